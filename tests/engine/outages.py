"""What may befall a shared store while an engine uses it, and how each ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine.conftest import CHUNK, Engine, prompt
from tests.servers import Link, ValkeyServer

Action = Callable[[Link, ValkeyServer], object]

LOAD = [prompt(2 * CHUNK + 9 * i, seed=30 + i // 2) for i in range(8)]
"""Prompts of a busy engine."""


@dataclass(frozen=True)
class Outage:
    begin: Action
    end: Action


def _cut_in_mid_blob(link: Link, server: ValkeyServer) -> None:
    link.cut_after = 1500
    link.down()
    link.up()


OUTAGES = {
    "gone": Outage(lambda link, server: link.down(), lambda link, server: link.up()),
    "silent": Outage(lambda link, server: server.pause(), lambda link, server: server.go_on()),
    "slow": Outage(
        lambda link, server: setattr(link, "delay", 2.0),
        lambda link, server: setattr(link, "delay", 0.0),
    ),
    "cut-in-mid-blob": Outage(
        _cut_in_mid_blob,
        lambda link, server: setattr(link, "cut_after", None),
    ),
    "full": Outage(
        lambda link, server: server.command("CONFIG", "SET", "maxmemory", "1mb"),
        lambda link, server: server.command("CONFIG", "SET", "maxmemory", "0"),
    ),
    "read-only": Outage(
        lambda link, server: server.command("REPLICAOF", "127.0.0.1", "1"),
        lambda link, server: server.command("REPLICAOF", "NO", "ONE"),
    ),
    "restarted-empty": Outage(
        lambda link, server: server.stop(), lambda link, server: server.start()
    ),
}


def _fill(path: str) -> None:
    with open(os.path.join(path, "filler"), "ab", buffering=0) as file:
        for piece in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece))


def _make_room(path: str) -> None:
    os.unlink(os.path.join(path, "filler"))


def _remount(path: str, read_only: bool) -> None:
    MS_RDONLY, MS_REMOUNT = 1, 32
    flags = MS_REMOUNT | (MS_RDONLY if read_only else 0)
    assert ctypes.CDLL(None).mount(b"", path.encode(), b"", flags, None) == 0


def _replace_by_a_file(path: str) -> None:
    shutil.rmtree(os.path.join(path, "store"))
    with open(os.path.join(path, "store"), "wb"):
        pass


DISK_OUTAGES: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "full": (_fill, _make_room),
    "read-only": (lambda path: _remount(path, True), lambda path: _remount(path, False)),
    "removed": (lambda path: shutil.rmtree(os.path.join(path, "store")), lambda path: None),
    "replaced-by-a-file": (
        _replace_by_a_file,
        lambda path: os.unlink(os.path.join(path, "store")),
    ),
}
"""What may befall the file system under a disk store at ``PATH/store``, and how each ends."""


def valkey_store(port: int, **settings: Any) -> dict[str, Any]:
    return {
        "type": "valkey",
        "url": f"valkey://127.0.0.1:{port}",
        "namespace": f"e{time.time_ns()}",
        "timeout_seconds": 0.5,
        **settings,
    }


def healed(engine: Engine) -> bool:
    """Whether a prompt is stored and comes back, not from vLLM's own cache."""
    text = prompt(CHUNK + 5, seed=time.time_ns())
    engine.generate(text)
    engine.settle()
    engine.forget_local()
    return engine.generate(text)[0].cached == CHUNK


def wait_until_healed(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while not healed(engine):
        assert time.monotonic() < deadline, engine.metrics()
        time.sleep(0.1)


def threads_of_the_engine() -> int:
    return sum(not thread.name.startswith("link") for thread in threading.enumerate())
