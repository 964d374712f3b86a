"""A `vllm serve` of a setting, started and stopped here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from vllm_kvcompress.evaluation.settings import Setting

NAME = "model"
"""What servers call their model."""

START_SECONDS = 900
_STOP_SECONDS = 30


class ServerError(RuntimeError):
    """A server does not start, or does not answer."""


class Server:
    """A server on a free port of this machine, while the block lasts.

    store: a folder for what is offloaded; log: where the server's output goes.
    """

    def __init__(
        self, model: str, setting: Setting, store: Path, log: Path, options: Sequence[str] = ()
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.setting = setting
        self.log = log
        stores = [
            {"type": "memory", "bytes": "2GiB"},
            {"type": "disk", "path": str(store), "bytes": "8GiB"},
        ]
        self.command = [
            *(vllm_path(), "serve", setting.model or model, "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *setting.server_arguments(stores),
            *options,
        ]

    def __enter__(self) -> Server:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            # The call that empties the engine's own cache is one for development.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self.log.open("wb") as log:
            # A session of its own, so that an interrupt reaches this process, which then ends it.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server of {self.setting.name} ended: {self._cause()}")
            try:
                self.call("/health")
                return
            except OSError:
                time.sleep(0.25)
        raise ServerError(
            f"the server of {self.setting.name} is not up after {START_SECONDS} s; see {self.log}"
        )

    def _cause(self) -> str:
        """The first error in the log, which is that of the process that failed."""
        text = self.log.read_text(errors="replace")
        # pydantic tells the reason of a ValidationError in the line below.
        reason = re.search(r"Value error, (.+?)(?: \[type=.*)?$", text, flags=re.M)
        lines = text.splitlines() or ["it said nothing"]
        errors = [line for line in lines if "Error: " in line]
        found = reason[1] if reason else (errors or lines[-1:])[0].strip()
        return f"{found} (log: {self.log})"

    def _stop(self) -> None:
        """End the server and the processes of its group, gently first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < deadline:
                self._process.poll()
                try:
                    os.killpg(self._process.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.1)

    def call(self, path: str, body: dict | None = None) -> str:
        """GET a path, or POST a JSON body to it. Raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the stores keep what they hold."""
        try:
            self.call("/reset_prefix_cache", {})
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.setting.name}: the cache was not emptied: {error}") from error

    def metrics(self) -> dict[str, float]:
        """Every sample at /metrics by name, summed over its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.call("/metrics")):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def wait_until_stored(self, seconds: float = 60) -> None:
        """Wait until no page waits for its encoder any more, and nothing new was stored."""
        deadline = time.monotonic() + seconds
        before = -1.0
        while time.monotonic() < deadline:
            found = self.metrics()
            stored = found.get("vllm:kvcompress_stored_chunks_total", 0.0)
            if stored == before and not found.get("vllm:kvcompress_staged_bytes", 0.0):
                return
            before = stored
            time.sleep(0.3)


def vllm_path() -> str:
    """The ``vllm`` command of this environment. Raises ValueError if there is none."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ValueError("there is no vllm command; install vLLM 0.32.0 into this environment")
    return found
