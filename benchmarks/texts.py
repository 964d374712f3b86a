"""Real text of several kinds that a machine already has: nothing is downloaded.

Each kind has a list of sources, best first; the first that holds enough text is taken. A Python
installation with this project's dependencies has all four.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

_STDLIB = Path(sysconfig.get_paths()["stdlib"])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _bible() -> str:
    """The King James Bible, through the command of Debian's bible-kjv."""
    command = shutil.which("bible")
    if command is None:
        return ""
    # -f prints one verse a line behind its reference.
    done = subprocess.run(
        [command, "-f", "Gen1:1-Exo40:38"], capture_output=True, text=True, timeout=60, check=False
    )
    verses = (line.partition(" ")[2] for line in done.stdout.splitlines())
    return "\n".join(v for v in verses if v)


def _opticks() -> str:
    """Newton's Opticks, test data of a compression library that vLLM's dependencies bring."""
    for root in site.getsitepackages():
        for path in Path(root).glob("*/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"):
            text = _read(path)
            # The book proper begins some way behind the front matter.
            return text[len(text) // 20 :]
    return ""


def _licences() -> str:
    found = [Path("/usr/share/common-licenses") / n for n in ("GPL-3", "GFDL-1.3", "MPL-2.0")]
    return "\n".join(_read(p) for p in found if p.is_file())


def _stdlib_code() -> str:
    names = ("argparse.py", "asyncio/base_events.py", "tarfile.py", "http/cookiejar.py")
    # From behind the licence and the long docstrings at the top.
    return "\n".join(_read(_STDLIB / n)[8000:60000] for n in names if (_STDLIB / n).is_file())


def _pydoc_topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(topics[k] for k in sorted(topics, key=lambda k: (-len(topics[k]), k)))


def _man_pages() -> str:
    if shutil.which("man") is None:
        return ""
    pages = []
    for name in ("bash", "perlfunc", "gcc", "tar", "find"):
        done = subprocess.run(
            ["man", "-P", "cat", name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LC_ALL": "C", "TERM": "dumb"},
        )
        pages.append(done.stdout)
    return "\n".join(pages)


def _readmes() -> str:
    """The long descriptions of installed packages."""
    found = {}
    for package in metadata.distributions():
        text = package.metadata.get_payload() or package.metadata.get("Description") or ""
        if isinstance(text, str) and len(text) > 4000:
            found[package.metadata["Name"]] = text[:20000]
    return "\n".join(found[name] for name in sorted(found, key=str.lower))


SOURCES: dict[str, list[Callable[[], str]]] = {
    "prose": [_opticks, _bible, _licences],
    "code": [_stdlib_code],
    "manual": [_pydoc_topics, _man_pages],
    "readme": [_readmes],
}


def texts(characters: int = 50_000) -> Iterator[tuple[str, str]]:
    """(kind, text) for every kind that this machine has, each of exactly ``characters``."""
    for kind, sources in SOURCES.items():
        for source in sources:
            text = source()
            if len(text) >= characters:
                yield kind, text[:characters]
                break


def chosen_texts(paths: list[Path], characters: int = 50_000) -> list[tuple[str, str]]:
    """(name, text) of the files named, or of every kind found here if there are none.

    Raises SystemExit, which says what to do, when fewer than three kinds are found.
    """
    if paths:
        return [(path.stem, _read(path)) for path in paths]
    found = list(texts(characters))
    if len(found) < 3:
        raise SystemExit(
            f"only {len(found)} kinds of text found on this machine; name text files with --text"
        )
    return found
