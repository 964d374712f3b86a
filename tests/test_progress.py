"""Progress: a bar where somebody watches, lines where nobody does, and never among the results."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios

SCRIPT = """
import time
from vllm_kvcompress.progress import Progress
with Progress(2000, "token") as progress:
    progress.doing("1/2 auto")
    progress.advance(500)
    progress.tell("1/2 auto: 3 s")
    progress.reach(1000)
    time.sleep(0.2)
    progress.advance(0)
    print('{"kind": "eval"}')
"""


def run(stderr: int) -> str:
    """What went to standard output."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60
    )
    assert done.returncode == 0
    return done.stdout


def test_on_a_terminal_a_bar_stands_below_the_lines_and_goes_away():
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    try:
        out = run(slave)
        shown = os.read(master, 1 << 16).decode()
    finally:
        os.close(slave)
        os.close(master)
    assert out == '{"kind": "eval"}\n'
    assert re.search(r"1/2 auto: +50%\|.*\| 1\.00k/2\.00k .*token/s", shown)
    assert re.search(r"\r1/2 auto: 3 s\r?\n", shown)
    assert not shown.rpartition("\r")[0].rpartition("\r")[2].strip(" \x1b[A")


def test_in_a_file_there_are_the_lines_alone(tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert run(log.fileno()) == '{"kind": "eval"}\n'
    assert (tmp_path / "log").read_text() == "1/2 auto: 3 s\n"
