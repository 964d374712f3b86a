"""Text that models are measured on: the user's, or what every Python installation brings."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(name, text) of each file, or of a manual and of code of this Python if there are none.

    Raises OSError for a file that cannot be read, ValueError for one that is empty.
    """
    if not paths:
        return [("manual", _manual()), ("code", _code())]
    found = [(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    for path, (_, text) in zip(paths, found, strict=True):
        if not text.strip():
            raise ValueError(f"{path} is empty; give a text of some thousand words")
    return found


def _manual() -> str:
    """The topics of Python's reference, the longest first."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics, key=lambda k: (-len(topics[k]), k)))


def _code() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "tarfile.py", "asyncio/base_events.py", "http/cookiejar.py")
    # From behind the licence and the long docstrings at the top.
    return "\n".join((library / n).read_text("utf-8")[8000:60000] for n in names)
