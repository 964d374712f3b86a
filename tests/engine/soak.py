"""Random outages and damage under a busy engine, for as long as told: every answer is checked, and
so is that memory, files and threads do not grow.

    python -m tests.engine.soak [--minutes 30] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests import servers
from tests.engine.conftest import CHUNK, Engine, prompt, running_engine
from tests.engine.models import tiny_llama
from tests.engine.outages import OUTAGES, threads_of_the_engine

PROMPTS = 40
MEGABYTES_OF_GROWTH = 64
MORE_FILES, MORE_THREADS = 16, 8


def measure() -> dict[str, float]:
    """Resident megabytes, open files, and threads that are not those of the link."""
    status = Path("/proc/self/status").read_text()
    return {
        "megabytes": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        "files": len(os.listdir("/proc/self/fd")) - 2 * links(),
        "threads": threads_of_the_engine(),
    }


def links() -> int:
    """Connections that a link carries in this process, two sockets each."""
    return sum(thread.name.startswith("link") for thread in threading.enumerate()) // 2


def abort_one(engine: Engine, text: list[int]) -> None:
    """A client that goes away with its request under way."""
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("gone", {"prompt_token_ids": text}, SamplingParams(max_tokens=8))
    for _ in range(2):
        llm_engine.step()
    llm_engine.abort_request(["gone"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()


def damage(chance: random.Random, disk: Path, server: servers.ValkeyServer) -> None:
    """Overwrite a few bytes of some blob on the disk and of some in the server."""
    files = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    if files:
        chosen = chance.choice(sorted(files))
        # The engine may evict it at any moment.
        with contextlib.suppress(FileNotFoundError), chosen.open("r+b") as file:
            file.seek(chance.randrange(900))
            file.write(b"damaged")
    if (key := server.command("RANDOMKEY")) is not None:
        server.command("SETRANGE", key, chance.randrange(900), b"damaged")


def soak(minutes: float, seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    model = tiny_llama(folder / "model")
    texts = [prompt(CHUNK + chance.randrange(5 * CHUNK), seed=number) for number in range(PROMPTS)]
    tight = {"num_gpu_blocks_override": 48, "max_model_len": 512, "max_num_seqs": 16}
    with running_engine(model, None, **tight) as engine:
        expected = [engine.generate(text)[0].tokens for text in texts]

    options = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with servers.valkey_server(folder / "server", *options) as server:
        link = servers.Link(server.port)
        offload = {
            "codec": "raw",
            "retry_seconds": 0.5,
            "stores": [
                {"type": "memory", "bytes": "1MiB"},
                {"type": "disk", "path": str(folder / "disk"), "bytes": "2MiB"},
                {
                    "type": "valkey",
                    "url": f"valkey://127.0.0.1:{link.port}",
                    "timeout_seconds": 0.3,
                },
            ],
        }
        done: Counter[str] = Counter()
        samples: list[dict[str, float]] = []
        with running_engine(model, offload, **tight) as engine:
            started = time.monotonic()
            current = None
            while (elapsed := time.monotonic() - started) < 60 * minutes:
                if current is None and chance.random() < 0.2:
                    current = chance.choice(list(OUTAGES))
                    OUTAGES[current].begin(link, server)
                    done[f"outage {current}"] += 1
                elif current is not None and chance.random() < 0.2:
                    OUTAGES[current].end(link, server)
                    current = None
                if current is None and chance.random() < 0.2:
                    damage(chance, folder / "disk", server)
                    done["damaged"] += 1
                if chance.random() < 0.5:
                    engine.forget_local()
                if chance.random() < 0.1:
                    abort_one(engine, chance.choice(texts))
                    done["aborted"] += 1
                chosen = chance.choices(range(PROMPTS), k=chance.randrange(1, 17))
                answers = engine.generate(*(texts[number] for number in chosen))
                for number, answer in zip(chosen, answers, strict=True):
                    if answer.tokens != expected[number]:
                        raise SystemExit(f"prompt {number} got another answer; seed {seed}")
                    done["requests"] += 1
                    done["from a cache"] += answer.cached > 0
                samples.append(measure())
                if len(samples) % 50 == 0:
                    print(f"{elapsed:6.0f} s  {dict(done)}  {samples[-1]}", flush=True)
            if current is not None:
                OUTAGES[current].end(link, server)
            print(f"metrics: {engine.metrics()}")
        link.down()
    print(f"{dict(done)}; no request failed")
    check_growth(samples)


def check_growth(samples: list[dict[str, float]]) -> None:
    """The last quarter against the second: the first fills what is bounded."""
    quarter = max(1, len(samples) // 4)
    for name, allowed in (
        ("megabytes", MEGABYTES_OF_GROWTH),
        ("files", MORE_FILES),
        ("threads", MORE_THREADS),
    ):
        early = max(sample[name] for sample in samples[quarter : 2 * quarter] or samples)
        late = max(sample[name] for sample in samples[-quarter:])
        print(f"{name}: {early:.0f} in the second quarter, {late:.0f} in the last")
        if late > early + allowed:
            raise SystemExit(f"{name} grew by {late - early:.0f}, more than {allowed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak(arguments.minutes, arguments.seed, Path(folder))


if __name__ == "__main__":
    main()
