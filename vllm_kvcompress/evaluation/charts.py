"""Charts as SVG of a given width, coloured by the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

NARROW = 350
"""Width of charts for a phone; below LABELS_ASIDE labels stand above what they name."""

WIDE = 760
LABELS_ASIDE = 560

COLOURS = 6
"""Colours that the page defines as ``--c0`` and so on, beside ``--ink`` for text, ``--soft``,
``--line``, ``--faint``, ``--good``, ``--bad``, ``--card`` behind charts and ``--on`` for text on a
colour."""

_TEXT = 13
_LETTER = 7.2
_ROW = 30


@dataclass(frozen=True)
class Bar:
    """A named amount, or a named value with its interval."""

    label: str
    value: float
    told: str
    """The value for a person."""
    low: float | None = None
    high: float | None = None
    ink: str = "c0"
    """A colour of the page, ``faint`` for what the others are compared with."""


def _svg(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img" aria-label={quoteattr(title)} '
        f'font-family="system-ui, sans-serif" font-size="{_TEXT}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    ink: str = "ink",
    turn: bool = False,
    outlined: bool = True,
) -> str:
    more = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    if outlined:
        # In the colour behind it: text stays readable where a line crosses it.
        more += ' paint-order="stroke" stroke="var(--card)" stroke-width="4"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var(--{ink})"{more}>'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, ink: str = "line", more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="var(--{ink})" {more}/>'
    )


def colour(number: int) -> str:
    """One of COLOURS, by turns."""
    return f"c{number % COLOURS}"


def _frame(rows: Sequence[Bar], width: int) -> tuple[float, float, float]:
    """Where the plot begins, where it ends, and the height of a row."""
    told = _LETTER * max(len(row.told) for row in rows) + 8
    if width < LABELS_ASIDE:
        return 4, width - told, _ROW + 18
    return _LETTER * max(len(row.label) for row in rows) + 14, width - told, _ROW


def _labels(row: Bar, top: float, left: float, width: int) -> str:
    """The label above or left of a row whose line is 20 below ``top``, the value at its right."""
    if width < LABELS_ASIDE:
        return _text(2, top + 14, row.label) + _text(width - 2, top + 36, row.told, "end", "soft")
    return _text(left - 10, top + 20, row.label, "end") + _text(
        width - 2, top + 20, row.told, "end", "soft"
    )


def bars(title: str, rows: Sequence[Bar], width: int) -> str:
    """Horizontal bars from zero."""
    left, right, step = _frame(rows, width)
    largest = max(row.value for row in rows) or 1.0
    parts = []
    for number, row in enumerate(rows):
        top = number * step
        y = top + (26 if width < LABELS_ASIDE else 6)
        size = max(1.5, (right - left) * row.value / largest)
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{size:.1f}" height="18" rx="3" '
            f'fill="var(--{row.ink})"><title>{escape(row.label)}: {escape(row.told)}</title></rect>'
        )
        parts.append(_labels(row, top, left, width))
    return _svg(width, step * len(rows) + 6, title, parts)


def intervals(
    title: str,
    rows: Sequence[Bar],
    width: int,
    mark: float,
    mark_told: str,
    limit: float | None = None,
    limit_told: str = "",
    logarithmic: bool = False,
) -> str:
    """Values as dots on one scale, each with its interval.

    mark: what no difference is; limit: a tolerance. Logarithmic for ratios.
    """
    left, right, step = _frame(rows, width)
    known = [
        value
        for row in rows
        for value in (row.value, row.low, row.high, mark, limit)
        if value is not None
    ]
    scale = _Scale(min(known), max(known), left + 8, right - 14, logarithmic)
    bottom = step * len(rows) + 6
    parts = [_line(scale(mark), 0, scale(mark), bottom, "soft")]
    if limit is not None:
        parts.append(_line(scale(limit), 0, scale(limit), bottom, "bad", 'stroke-dasharray="4 4"'))
    for number, row in enumerate(rows):
        top = number * step
        y = top + (32 if width < LABELS_ASIDE else 15)
        told = f"<title>{escape(row.label)}: {escape(row.told)}</title>"
        if row.low is not None and row.high is not None:
            parts.append(
                _line(
                    scale(row.low), y, scale(row.high), y, row.ink, 'stroke-width="4" opacity="0.5"'
                )
            )
        parts.append(
            f'<circle cx="{scale(row.value):.1f}" cy="{y:.1f}" r="6" fill="var(--{row.ink})">{told}'
            "</circle>"
        )
        parts.append(_labels(row, top, left, width))
    near = limit is not None and abs(scale(limit) - scale(mark)) < 170
    parts.append(_axis_word(scale(mark), bottom + 16, mark_told, left, width))
    if limit is not None:
        below = bottom + (34 if near else 16)
        parts.append(_axis_word(scale(limit), below, limit_told, left, width, "bad"))
    return _svg(width, bottom + (44 if near else 26), title, parts)


def _axis_word(x: float, y: float, text: str, left: float, width: int, ink: str = "soft") -> str:
    """A word under a mark, kept inside the picture."""
    half = len(text) * _LETTER / 2
    return _text(min(max(x, half + 2), width - half - 2), y, text, "middle", ink)


class _Scale:
    """Values to places, linear or logarithmic."""

    def __init__(
        self, low: float, high: float, start: float, end: float, logarithmic: bool = False
    ) -> None:
        self._log = logarithmic
        low, high = self._of(low), self._of(high)
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        self._low, self._share = low, (end - start) / (high - low)
        self._start = start

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self._log else value

    def __call__(self, value: float) -> float:
        return self._start + (self._of(value) - self._low) * self._share


def heat_maps(
    title: str,
    maps: Sequence[tuple[str, Sequence[dict[str, float]]]],
    width: int,
) -> str:
    """A map a setting: prompts of a length in a column, from the beginning at the top to the end.

    Cells are ``length``, ``depth``, ``asked`` and ``right``.
    """
    lengths = sorted({cell["length"] for _, cells in maps for cell in cells})
    depths = sorted({cell["depth"] for _, cells in maps for cell in cells})
    side = 46
    one = len(lengths) * side + 58
    one = max(one, 0.92 * _LETTER * max(len(name) for name, _ in maps) + 6)
    columns = max(1, int(width // one))
    tall = 28 + len(depths) * 26 + 40
    parts = []
    for number, (name, cells) in enumerate(maps):
        left, top = (number % columns) * one, (number // columns) * tall
        parts.append(_text(left + 2, top + 16, name))
        for cell in cells:
            x = left + 42 + lengths.index(cell["length"]) * side
            y = top + 26 + depths.index(cell["depth"]) * 26
            share = cell["right"] / cell["asked"]
            told = f"{cell['right']:.0f}/{cell['asked']:.0f}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{side - 2}" height="24" rx="3" '
                f'fill="var(--c0)" fill-opacity="{0.08 + 0.72 * share:.2f}" '
                f'stroke="var(--line)"/>'
            )
            ink = "on" if share > 0.5 else "ink"
            parts.append(_text(x + side / 2 - 1, y + 16.5, told, "middle", ink, outlined=False))
        for i, depth in enumerate(depths):
            parts.append(_text(left + 38, top + 42 + i * 26, f"{100 * depth:.0f}%", "end", "soft"))
        for i, length in enumerate(lengths):
            x = left + 41 + i * side + side / 2
            parts.append(_text(x, top + 42 + len(depths) * 26, f"{length:.0f}", "middle", "soft"))
    return _svg(width, tall * math.ceil(len(maps) / columns), title, parts)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between two others."""
    span = max(high - low, 1e-9)
    rough = span / count
    power = 10 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - rough))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def scatter(
    title: str,
    points: Sequence[Bar],
    across: Sequence[float],
    width: int,
    x_told: str,
    y_told: str,
) -> str:
    """Values over ``across``, a logarithmic scale, numbered; a legend below names the numbers."""
    left, right, top, bottom = 68, width - 14, 12, 260
    columns = max(1, int(width // (_LETTER * max(len(point.label) for point in points) + 40)))
    legend = bottom + 68
    heights = [v for p in points for v in (p.value, p.low, p.high) if v is not None]
    low, high = min([0.0, *heights]), max([0.0, *heights])
    pad = 0.06 * (high - low or 1)
    y = _Scale(low - pad, high + pad, bottom, top)
    x = _Scale(min(across), max(across), left + 14, right - 14, logarithmic=True)
    parts = []
    for tick in ticks(low, high):
        parts.append(_line(left, y(tick), right, y(tick)))
        parts.append(_text(left - 6, y(tick) + 4, f"{tick:g}", "end", "soft"))
    for power in range(math.ceil(math.log2(min(across))), math.floor(math.log2(max(across))) + 1):
        parts.append(_text(x(2.0**power), bottom + 18, f"{2.0**power:g}", "middle", "soft"))
    parts.append(_line(left, y(0), right, y(0), "soft"))
    parts.append(_text((left + right) / 2, bottom + 38, x_told, "middle", "soft"))
    parts.append(_text(12, (top + bottom) / 2, y_told, "middle", "soft", turn=True))
    for number, (point, place) in enumerate(zip(points, across, strict=True), 1):
        if point.low is not None and point.high is not None:
            more = 'stroke-width="3" opacity="0.45"'
            parts.append(_line(x(place), y(point.low), x(place), y(point.high), point.ink, more))
        parts.append(
            f'<circle cx="{x(place):.1f}" cy="{y(point.value):.1f}" r="10" '
            f'fill="var(--{point.ink})">'
            f"<title>{escape(point.label)}: {escape(point.told)}</title></circle>"
        )
        parts.append(
            _text(x(place), y(point.value) + 4.5, str(number), "middle", "on", outlined=False)
        )
        at = 12 + (number - 1) % columns * width / columns
        below = legend + (number - 1) // columns * 26
        parts.append(
            f'<circle cx="{at:.1f}" cy="{below:.1f}" r="10" fill="var(--{point.ink})"/>'
            + _text(at, below + 4.5, str(number), "middle", "on", outlined=False)
            + _text(at + 17, below + 4.5, point.label)
        )
    return _svg(width, legend + 26 * math.ceil(len(points) / columns) - 8, title, parts)


@dataclass(frozen=True)
class Curve:
    """A line of points."""

    label: str
    points: list[tuple[float, float]]
    ink: str


def curves(title: str, lines: Sequence[Curve], width: int, x_told: str, y_told: str) -> str:
    """Lines on logarithmic scales, named by a legend above them."""
    right, bottom, left = width - 14, 300, 56
    top = 10 + 20 * math.ceil(len(lines) / (2 if width < LABELS_ASIDE else 3))
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x, y = _Scale(min(xs), max(xs), left, right, True), _Scale(min(ys), max(ys), bottom, top, True)
    parts = []
    for tick in powers(min(ys), max(ys)):
        parts.append(_line(left, y(tick), right, y(tick)))
        parts.append(_text(left - 6, y(tick) + 4, f"{tick:g}", "end", "soft"))
    for tick in powers(min(xs), max(xs)):
        parts.append(_line(x(tick), top, x(tick), bottom))
        parts.append(_text(x(tick), bottom + 18, f"{tick:g}", "middle", "soft"))
    columns = 2 if width < LABELS_ASIDE else 3
    for number, line in enumerate(lines):
        # Two in three are dashed: lines that lie close are told apart without colour too.
        dash = ("", 'stroke-dasharray="8 4"', 'stroke-dasharray="2 4"')[number % 3]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{line.ink})" stroke-width="2.5" '
            f"{dash}><title>{escape(line.label)}</title></polyline>"
        )
        a = left + (number % columns) * (right - left) / columns
        b = 12 + 20 * (number // columns)
        parts.append(_line(a, b - 4, a + 22, b - 4, line.ink, f'stroke-width="2.5" {dash}'))
        parts.append(_text(a + 28, b, line.label))
    parts.append(_text((left + right) / 2, bottom + 38, x_told, "middle", "soft"))
    parts.append(_text(12, (top + bottom) / 2, y_told, "middle", "soft", turn=True))
    return _svg(width, bottom + 48, title, parts)


def powers(low: float, high: float) -> list[float]:
    """Powers of ten between two positive values."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]
