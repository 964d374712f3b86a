"""What may befall a shared store while an engine uses it, and how each ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine.conftest import CHUNK, Engine, prompt
from tests.servers import Link, ValkeyServer

Action = Callable[[Link, ValkeyServer], object]


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
