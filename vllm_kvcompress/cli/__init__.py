"""The ``vllm-kvcompress`` command. A command is a module here, with its arguments and its run."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from vllm_kvcompress import __version__
from vllm_kvcompress.cli import (
    bench,
    calibrate,
    completion,
    doctor,
    estimate,
    eval,
    inspect,
    report,
    serve,
    version,
)

COMMANDS = (estimate, calibrate, eval, bench, report, serve, doctor, inspect, completion, version)

OK, NOT_GOOD, ERROR, INTERRUPTED = 0, 1, 2, 130

EPILOG = f"""\
exit status: {OK} it went well; {NOT_GOOD} it ran, and what it checked is not good; {ERROR} it could
not run, and a line on standard error says why and what to type; {INTERRUPTED} interrupted.
"""


class Parser(argparse.ArgumentParser):
    """Ends with one line for what cannot be read, however many options there are."""

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, a subparser a command."""
    parser = Parser(
        prog="vllm-kvcompress",
        description="Compressed KV cache for vLLM.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-kvcompress {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").splitlines()[0]
        command = subparsers.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument(
            *("-v", "--verbose"),
            action="count",
            default=0,
            help="say more on standard error, and where an error arose; twice: still more",
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, which the help of every command explains."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not hasattr(arguments, "rest"):
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    level = {0: logging.WARNING, 1: logging.INFO}.get(arguments.verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    try:
        status = arguments.run(arguments)
        # Here, where a pipe that is closed or a disk that is full can still be told.
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Nobody reads the rest; Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NOT_GOOD
        if arguments.verbose:
            traceback.print_exc()
        print(f"{parser.prog}: error: {describe_error(error)}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def describe_error(error: ValueError | OSError) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split())
