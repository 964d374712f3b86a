"""The ``vllm-kvcompress`` command. A command is a module here, with its arguments and its run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm_kvcompress import __version__
from vllm_kvcompress.cli import inspect, version

COMMANDS = (inspect, version)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 with one line on standard error if not."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvcompress", description="Compressed KV cache for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-kvcompress {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").splitlines()[0]
        command = subparsers.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Nobody reads the rest; Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"{parser.prog}: error: {describe_error(error)}", file=sys.stderr)
        return 2


def describe_error(error: ValueError | OSError) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split())
