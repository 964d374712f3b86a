"""A server with KIVI pages and a store, from plain options, and a client that asks it twice.

    python examples/serving.py [MODEL]

Without MODEL it takes the test model that `make setup` makes. The server ends with the script.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
PROMPT = "Here is a list of words.\n" + "\n".join(f"{n}: word {n * n}" for n in range(120))


def get(url: str, body: dict | None = None) -> str:
    """What the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """Return when the server answers. Raises RuntimeError if it ends instead."""
    while True:
        try:
            get(url + "/health")
            return
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                raise RuntimeError("the server did not start; what it said is above") from None
            time.sleep(0.5)


def counted(url: str, name: str) -> float:
    """One of the server's counters; README lists those of this package."""
    lines = get(url + "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}"))


def wait_until_stored(url: str, chunks: int) -> None:
    """Return when so many chunks have gone through the codec into the stores."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if counted(url, "kvcompress_stored_chunks_total") >= chunks:
            return
        time.sleep(0.2)
    raise RuntimeError("nothing more was stored for a minute")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("vllm-kvcompress")),
            *("serve", model, "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "model", "--max-model-len", "2048", "--enforce-eager"),
            *("--kv-cache-dtype", "kivi_2bit", "--kivi-residual-length", "256"),
            *("--kv-level", "high", "--kv-store", "memory:256MiB"),
            *("--kv-store", f"disk:{folder},1GiB"),
        ]
        # GiB of KV cache on the CPU engine; a GPU does not look at it.
        server = subprocess.Popen(command, env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ})
        try:
            wait_until_ready(url, server)
            body = {"model": "model", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            for time_of_asking in ("first", "again"):
                start = time.perf_counter()
                answer = json.loads(get(url + "/v1/completions", body))
                took = time.perf_counter() - start
                print(f"{time_of_asking}: {took:.2f} s {answer['choices'][0]['text']!r}")
            wait_until_stored(url, 1)
            print("\nwhat the server counted:")
            for line in get(url + "/metrics").splitlines():
                if line.startswith("vllm:kvcompress_") and "_created" not in line:
                    print("  " + line)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
