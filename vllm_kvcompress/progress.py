"""Progress of long work, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys


class Progress:
    """How far ``total`` units have come, while the block lasts.

    On a terminal a bar stands below the lines that are told, and goes away in the end; where
    standard error is a file or a pipe there are the lines alone.
    """

    def __init__(self, total: float, unit: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            unit=unit,
            unit_scale=True,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> Progress:
        return self

    @property
    def is_bar(self) -> bool:
        """Whether somebody watches it move."""
        return not self._bar.disable

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, line: str) -> None:
        """A line that stays, above the bar."""
        self._bar.write(line, file=sys.stderr)

    def doing(self, what: str) -> None:
        """Name what is going on, on the bar alone."""
        self._bar.set_description_str(what)

    def advance(self, units: float = 1) -> None:
        """Units more are done."""
        self._bar.update(units)

    def reach(self, units: float) -> None:
        """So many are done in all, whatever was counted before."""
        self._bar.update(units - self._bar.n)
