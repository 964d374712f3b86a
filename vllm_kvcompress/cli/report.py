"""One page about capacity, quality and speed, from the JSON of estimate, eval and bench.

The page needs no network and no other file, on a phone or a desktop, light or dark.

  vllm-kvcompress estimate MODEL --kv-memory 2GiB --json > estimate.json
  vllm-kvcompress eval MODEL --json > eval.json
  vllm-kvcompress bench MODEL --json > bench.json
  vllm-kvcompress report estimate.json eval.json bench.json --out report.html --images charts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and where the page goes."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE.json",
        help="what estimate, eval and bench wrote with --json, at most one of each",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="the page (report.html)",
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="also write the charts, as PNG")


def run(arguments: argparse.Namespace) -> int:
    """Write the page; with ``--json`` print the data behind its charts."""
    from vllm_kvcompress.evaluation import pictures, report

    out, folder = arguments.out, arguments.images
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it, or name another")
    if folder is not None:
        pictures.require()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--images {folder} is a file; name a folder")
    given: dict[str, dict] = {}
    for path in arguments.files:
        kind, found = report.read_input(path)
        if kind in given:
            raise ValueError(f"{path} is a second file of {kind}; give one of each kind")
        given[kind] = found
    models = {str(found.get("model")) for found in given.values()}
    if len(models) > 1:
        raise ValueError(f"the files are of different models: {', '.join(sorted(models))}")
    made = [
        section
        for kind in report.KINDS
        if kind in given
        for section in report.sections(kind, given[kind])
    ]
    if not made:
        raise ValueError("the files hold nothing to show: every setting was refused")
    (model,) = models
    out.write_text(report.page(model, made), encoding="utf-8")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in report.images(model, made).items():
            (folder / name).write_bytes(picture)
    if arguments.json:
        print(json.dumps({section.name: section.data for section in made if section.data}))
    else:
        print(out)
    return 0
