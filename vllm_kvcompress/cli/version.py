"""The versions of this package and of what it stands on."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

from vllm_kvcompress import __version__

DISTRIBUTIONS = ("vllm", "torch", "triton", "numba")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but ``--json``."""


def run(arguments: argparse.Namespace) -> int:
    """Print a version a line; ``not installed`` (null in JSON) for what is missing."""
    versions: dict[str, str | None] = {"vllm-kvcompress": __version__}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["python"] = platform.python_version()
    if arguments.json:
        print(json.dumps(versions))
    else:
        for name, version in versions.items():
            print(f"{name:16} {version or 'not installed'}")
    return 0
