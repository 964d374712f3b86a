"""Charts as PNG pictures, the same on every machine, with or without fonts of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ZOOM = 2
"""Pixels of a picture to one of a chart."""

_MARGIN, _HEAD = 24, 60
_REPLACED = {"\N{MULTIPLICATION SIGN}": "x"}
"""What the font does not have."""


def require() -> None:
    """Raises ValueError that says what to install if pictures cannot be made here."""
    missing = [
        package
        for module, package in (("resvg_py", "resvg-py"), ("PIL", "pillow"))
        if find_spec(module) is None
    ]
    if missing:
        raise ValueError(
            f"--images needs {' and '.join(missing)}, not installed here; "
            f"pip install {' '.join(missing)}"
        )


def png(heading: str, aside: str, chart: str, colours: Mapping[str, str]) -> bytes:
    """A chart, SVG whose colours are ``var(--NAME)``, under its heading and a word beside that."""
    import resvg_py
    from PIL import ImageFont

    root = ElementTree.fromstring(chart)
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    inner = chart.replace("<svg ", f'<svg x="{_MARGIN}" y="{_HEAD}" ', 1)
    outer = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * _MARGIN:.0f}" '
        f'height="{height + _HEAD + _MARGIN:.0f}" font-family="sans-serif">'
        f'<text x="{_MARGIN}" y="36" font-size="17" fill="var(--ink)">{escape(heading)}</text>'
        f'<text x="{_MARGIN + width:.0f}" y="36" font-size="13" text-anchor="end" '
        f'fill="var(--soft)">{escape(aside)}</text>{inner}</svg>'
    )
    for character, instead in _REPLACED.items():
        outer = outer.replace(character, instead)
    font = ImageFont.load_default(size=13)
    with tempfile.NamedTemporaryFile(suffix=".ttf") as file:
        # The machine may have none, and resvg draws no text then. Pillow brings one.
        Path(file.name).write_bytes(font.font_bytes)
        return resvg_py.svg_to_bytes(
            svg_string=re.sub(
                rf"var\(--({'|'.join(colours)})\)", lambda match: colours[match[1]], outer
            ),
            background=colours["card"],
            zoom=ZOOM,
            sans_serif_family=font.getname()[0],
            font_files=[file.name],
        )
