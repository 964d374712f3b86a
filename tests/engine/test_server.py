"""``vllm serve`` as a user starts it: by name and by module path, with metrics, over a restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.engine.conftest import prompt


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def server(model: Path, transfer: dict, log: Path, *arguments: str):
    """A running server; yields its address. It is ended as an operator would end it."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "1024"),
        *("--block-size", "32", "--served-model-name", "m"),
        *("--kv-transfer-config", json.dumps(transfer), *arguments),
    ]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 600
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def complete(address: str, tokens: list[int]) -> None:
    body = {
        "model": "m",
        "prompt": tokens,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def metrics(address: str) -> dict[str, float]:
    """The connector's samples, summed over labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("vllm:kvcompress_"):
            name = line.partition("{")[0].removeprefix("vllm:kvcompress_")
            found[name] = found.get(name, 0) + float(line.rsplit(" ", 1)[1])
    return found


def wait_for(address: str, name: str, value: float) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = metrics(address)
        if found.get(name, 0) >= value:
            return found
        time.sleep(0.3)
    raise AssertionError(f"{name} did not reach {value}: {metrics(address)}")


def test_a_server_stores_restarts_restores_and_tells_it_at_metrics(llama, tmp_path):
    disk = {"type": "disk", "path": str(tmp_path / "store"), "bytes": "64MiB"}
    extra = {
        "codec": "cachegen",
        "level": "high",
        "chunk_tokens": 64,
        "stores": [{"type": "memory", "bytes": "16MiB"}, disk],
    }
    transfer = {
        "kv_connector": "KVCompressConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    text = prompt(4 * 64 + 10)
    log = tmp_path / "first.log"
    with server(llama, transfer, log) as address:
        complete(address, text)
        found = wait_for(address, "stored_chunks_total", 4)
        assert found["stored_raw_bytes_total"] > 2 * found["stored_blob_bytes_total"] > 0
        assert found["compression_ratio"] > 2
        assert found["encode_seconds_total"] > 0
        assert found["lookup_misses_total"] > 0
    start = [line for line in log.read_text().splitlines() if "KV offload: codec" in line]
    assert len(start) == 1
    for word in ("cachegen", "high", "memory 0 blobs", "disk 0 blobs"):
        assert word in start[0]

    # By module path this time: the class is the same, and so are the keys.
    by_path = {**transfer, "kv_connector_module_path": "vllm_kvcompress.connector.connector"}
    log = tmp_path / "second.log"
    with server(llama, by_path, log) as address:
        complete(address, text)
        found = wait_for(address, "loaded_chunks_total", 4)
        assert found["loaded_blob_bytes_total"] > 0
        assert found["decode_seconds_total"] > 0
        assert found["lookup_hits_total"] >= 4
        assert found["store_entries"] >= 4
        assert not found.get("load_failures_total")
    assert "disk 4 blobs" in log.read_text()


def test_a_server_with_a_wrong_setting_ends_with_a_line_that_names_it(llama, tmp_path):
    transfer = {
        "kv_connector": "KVCompressConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"codec": "cachegen", "level": "extreme"},
    }
    log = tmp_path / "log"
    with pytest.raises(AssertionError), server(llama, transfer, log):
        pass
    assert "no level 'extreme'; choose from lossless, high, medium, low, paper" in log.read_text()
