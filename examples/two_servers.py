"""Two servers share a store: what one has computed, the other serves from there.

    python examples/two_servers.py [MODEL] [STORE]

Without MODEL it takes the test model that `make setup` makes. STORE is written as for --kv-store:
valkey:valkey://HOST:6379/0, say, for servers on machines of their own; without it a directory is
made. Both servers end with the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from serving import MODEL, counted, free_port, get, wait_until_ready, wait_until_stored

PROMPT = "Here is a list of words.\n" + "\n".join(f"{n}: word {n * n}" for n in range(160))


class Server:
    """A server on this machine, with a store that it shares."""

    def __init__(self, model: str, store: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("vllm-kvcompress")),
            *("serve", model, "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "model", "--max-model-len", "4096", "--enforce-eager"),
            *("--uvicorn-log-level", "warning"),
            # Servers share what they store with the same settings, and with others nothing.
            *("--kv-codec", "cachegen", "--kv-level", "high"),
            *("--kv-store", "memory:256MiB", "--kv-store", store),
        ]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB on the CPU engine; a GPU does not look at it
            "VLLM_LOGGING_LEVEL": "WARNING",
            **os.environ,
        }
        self.process = subprocess.Popen(command, env=environment)

    def ask(self, prompt: str) -> tuple[float, str]:
        """Seconds to the first token of the answer, and the answer."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        started, first, text = time.perf_counter(), 0.0, ""
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - started
                    text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        return first, text

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        store = sys.argv[2] if len(sys.argv) > 2 else f"disk:{folder},1GiB"
        servers = [Server(model, store), Server(model, store)]
        try:
            for server in servers:
                wait_until_ready(server.url, server.process)
                server.ask("Hello")  # compiles what the first request compiles
            one, other = servers
            body = {"model": "model", "prompt": PROMPT}
            tokens = json.loads(get(one.url + "/tokenize", body))["count"]
            print(f"\na prompt of {tokens} tokens, two servers on {store}")
            for name, server in (("the first", one), ("the second", other)):
                seconds, text = server.ask(PROMPT)
                loaded = counted(server.url, "external_prefix_cache_hits_total")
                print(
                    f"{name}: {loaded:.0f} tokens from the store, first token after "
                    f"{seconds:.2f} s, {text!r}",
                    flush=True,
                )
                wait_until_stored(one.url, tokens // 256)
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
