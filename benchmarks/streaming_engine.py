"""Time to first token over links of several speeds: the real engine, a throttled store, the codecs.

    python benchmarks/streaming_engine.py --json .cache/bench/streaming_engine.json

One engine stores a prompt's KV at every level behind a link. For each speed of the link the prompt
is then asked for again, restored at each level alone and by the policy with a deadline; recomputing
is what the first request took. A second table takes sizes and decoding speeds from there and a
faster prefill, in simulated time, for machines that compute faster than this one.

``--kv FILE ...`` leaves the engine out and loads dumps of a model's KV (see
``vllm_kvcompress.calibration.dump``) into pages, with what the connector loads with: what a first
token waits for before its own computation, and no recomputing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
# The link and its speed are in this process, and so must the engine be.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import streaming_link
from streaming_simulation import Context, LevelSpeed, Trace, simulate

from vllm_kvcompress.codecs import Codec, codec_names, create_codec

ROOT = Path(__file__).resolve().parents[1]
GBITS = (0.1, 1.0, 10.0, 100.0)
LEVELS = ("raw", "int8", "high", "medium", "low")
CHUNK = 256
BLOCK = 128
LINK = "link"


class Bench:
    """An engine whose one store lies behind a link."""

    def __init__(self, model: Path, tokens: int, slo_ms: float, threads: int) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(model),
            enforce_eager=True,
            max_model_len=tokens + CHUNK,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVCompressConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "levels": list(LEVELS),
                    "ttft_slo_ms": slo_ms,
                    "chunk_tokens": CHUNK,
                    "threads": threads,
                    "stores": [{"type": "link", "name": LINK}],
                    "retry_seconds": 0.001,
                },
            },
        )
        self.link = streaming_link.link(LINK)
        # One token behind the last whole chunk, as the last one is computed in any case.
        text = (ROOT / "README.md").read_text() * 3
        ids = self.llm.get_tokenizer().encode(text)
        if len(ids) < tokens:
            raise SystemExit(f"--tokens {tokens}: the text has only {len(ids)}")
        self.prompt = ids[: tokens // CHUNK * CHUNK + 1]

    @property
    def chunks(self) -> int:
        return len(self.prompt) // CHUNK

    def first_token(self) -> tuple[float, list[int], int]:
        """Seconds to the first token, the tokens, and how many of the prompt were restored."""
        from vllm import SamplingParams

        started = time.perf_counter()
        (output,) = self.llm.generate(
            [{"prompt_token_ids": self.prompt}],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - started
        return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens

    def settle(self) -> None:
        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        engine.step()  # gives out the stores of the request that has just ended
        while scheduler.connector.has_pending_push_work():
            engine.step()

    def restore(self, gbits: float, level: int | None) -> dict[str, Any]:
        """Load the prompt over a link of a speed, at one level or by the policy (None)."""
        from vllm_kvcompress.connector.fingerprint import split_blob_key

        self.settle()
        assert self.llm.reset_prefix_cache()
        time.sleep(0.01)  # retry_seconds
        self.link.visible = lambda key: level is None or split_blob_key(key)[1] == level
        self.link.bytes_per_second = gbits * 1e9 / 8
        self.link.carried.clear()
        seconds, tokens, cached = self.first_token()
        self.link.visible = lambda key: True
        carried = list(self.link.carried)
        return {
            "seconds": seconds,
            "first_token": tokens,
            "cached": cached,
            "levels": [LEVELS[split_blob_key(key)[1]] for key, _ in carried],
            "bytes": sum(size for _, size in carried),
        }


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    recompute, tokens, _ = bench.first_token()
    print(f"recompute: {recompute:.1f} s for {len(bench.prompt)} tokens", flush=True)
    bench.settle()
    local = statistics.median(bench.first_token()[0] for _ in range(3))
    rows = sweep(bench, repeats)
    for row in rows:
        row["same_token"] = row.pop("first_token") == tokens
    return {
        "tokens": len(bench.prompt),
        "chunks": bench.chunks,
        "recompute": recompute,
        "own_cache": local,
        "rows": rows,
    }


class LoadBench:
    """Dumped KV behind a link, loaded into pages by the connector's own machinery."""

    def __init__(self, dumps: list[Path], tokens: int, slo_ms: float, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from safetensors.torch import load_file

        from vllm_kvcompress.connector.groups import PlainGroup
        from vllm_kvcompress.connector.loading import Loads
        from vllm_kvcompress.kernels import pages
        from vllm_kvcompress.layout import PageLayout
        from vllm_kvcompress.streaming import Prior, Speeds

        parts = [
            part.contiguous()
            for dump in dumps
            for part in load_file(dump)["kv"].split(CHUNK, dim=2)
            if part.shape[2] == CHUNK
        ]
        self.chunks = tokens // CHUNK
        self.parts = [parts[place % len(parts)] for place in range(self.chunks)]
        layers, _, _, heads, size = parts[0].shape
        index = torch.randperm(2 * BLOCK * heads * size).to(torch.int32).view(2, -1)
        layout = PageLayout(layers, BLOCK, heads, size, parts[0].dtype, index)
        pages.warm_up(layout.dtype.itemsize)
        blocks = self.chunks * (CHUNK // BLOCK)
        pool = [torch.zeros(blocks, layout.page_bytes, dtype=torch.int8) for _ in range(layers)]
        self.group = PlainGroup(0, layout, pool)
        self.codecs = {level: codec_of(level) for level in LEVELS}
        self.link = streaming_link.link(LINK)
        self.store = streaming_link.LinkStore(LINK)
        for place, part in enumerate(self.parts):
            for number, codec in enumerate(self.codecs.values()):
                key = bytes([place, number])
                self.store.put(key, codec.encode(part, fingerprint=key))
        self.speeds = Speeds([Prior(1.0, 1e9)] * len(LEVELS), threads)
        self.loads = Loads(
            self,
            self.speeds,
            threads,
            slo_ms / 1000,
            True,
            lambda name, count: ThreadPoolExecutor(count),
        )

    def fetch(self, place: int, level: int) -> tuple[bytes, int] | None:
        blob = self.store.get(bytes([place, level]))
        return None if blob is None else (blob, len(blob))

    def place(self, job_id: int, place: int, level: int, blob: bytes) -> int:
        key = bytes([place, level])
        content = self.group.decode(blob, self.codecs[LEVELS[level]], key)
        blocks = CHUNK // BLOCK
        for block in range(blocks):
            content.write(block, place * blocks + block, False)
        return content.nbytes

    def failed(self, job_id: int, place: int, cause: str) -> None:
        raise SystemExit(f"chunk {place} failed: {cause}")

    def given_up(self, job_id: int, places: Sequence[int]) -> None:
        pass

    def done(self, job_id: int, raw_bytes: int, seconds: float) -> None:
        self.seconds = seconds

    def restore(self, gbits: float, level: int | None) -> dict[str, Any]:
        from vllm_kvcompress.streaming import StreamChunk

        self.link.visible = lambda key: level is None or key[1] == level
        self.link.bytes_per_second = gbits * 1e9 / 8
        self.link.carried.clear()
        plan = [StreamChunk(CHUNK, part.nbytes, set(range(len(LEVELS)))) for part in self.parts]
        self.loads.begin(0, range(self.chunks), plan)
        self.loads.wait([0])
        carried = list(self.link.carried)
        return {
            "seconds": self.seconds,
            "levels": [LEVELS[key[1]] for key, _ in carried],
            "bytes": sum(size for _, size in carried),
        }


def sweep(bench: Bench | LoadBench, repeats: int) -> list[dict[str, Any]]:
    """Every level and the policy at every speed of the link; the median of some runs."""
    rows = []
    for gbits in GBITS:
        for level in (*LEVELS, "policy"):
            number = None if level == "policy" else LEVELS.index(level)
            runs = [bench.restore(gbits, number)]
            while len(runs) < repeats and runs[0]["seconds"] < 3:
                runs.append(bench.restore(gbits, number))
            runs.sort(key=lambda run: run["seconds"])
            row = {"gbits": gbits, "level": level, **runs[len(runs) // 2]}
            rows.append(row)
            print(f"{gbits:6.1f} {level:8s} {row['seconds']:8.3f} s", flush=True)
    return rows


def codec_of(level: str) -> Codec:
    return create_codec(level) if level in codec_names() else create_codec("cachegen", level=level)


def decode_speeds(blobs: dict[str, list[bytes]]) -> dict[str, float]:
    """Bytes of KV that one thread decodes a second of its own time, by level."""
    found = {}
    for level, some in blobs.items():
        codec = codec_of(level)
        out = codec.decode(some[0])
        times = []
        for blob in some:
            started = time.thread_time()
            codec.decode(blob, out=out)
            times.append(time.thread_time() - started)
        found[level] = out.nbytes / min(times)
    return found


def simulated(figures: dict[str, Any], slo: float, prefill: float) -> list[dict[str, Any]]:
    """The same table for a machine that prefills so many tokens a second, loading alone."""
    raw_bytes = figures["raw_bytes"]
    levels = {
        level: LevelSpeed(level, raw_bytes / size, figures["decode"][level])
        for level, size in figures["blob_bytes"].items()
    }
    chunks = figures["chunks"]
    context = Context(chunks, CHUNK, raw_bytes // chunks, prefill)
    alone = Context(chunks, CHUNK, raw_bytes // chunks, 0.0)
    rows = []
    for gbits in GBITS:
        trace = Trace(str(gbits), [gbits * 1e9 / 8])
        for level in LEVELS:
            seconds = simulate(trace, [levels[level]], alone).seconds
            rows.append({"gbits": gbits, "level": level, "seconds": seconds})
        outcome = simulate(trace, list(levels.values()), context, slo, known=True)
        rows.append({"gbits": gbits, "level": "policy", "seconds": outcome.seconds})
    return rows


def table(rows: list[dict[str, Any]], recompute: float | None) -> str:
    columns = (*LEVELS, "policy")
    computed = "" if recompute is None else f"{recompute:.2f}"
    lines = [
        "| Gbit/s | " + " | ".join(columns) + " | recompute |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for gbits in GBITS:
        found = {row["level"]: row["seconds"] for row in rows if row["gbits"] == gbits}
        cells = " | ".join(f"{found[column]:.2f}" for column in columns)
        lines.append(f"| {gbits:g} | {cells} | {computed} |")
    return "\n".join(lines)


Blobs = dict[str, list[bytes]]


def from_engine(arguments: argparse.Namespace) -> tuple[dict[str, Any], Blobs]:
    from vllm_kvcompress.connector.fingerprint import split_blob_key

    bench = Bench(arguments.model, arguments.tokens, arguments.slo_ms, arguments.threads)
    figures = measure(bench, arguments.repeats)
    print(f"from vLLM's own cache: {figures['own_cache']:.2f} s")
    blobs: Blobs = {level: [] for level in LEVELS}
    for key, blob in bench.link.blobs.items():
        blobs[LEVELS[split_blob_key(key)[1]]].append(blob)
    figures["blob_bytes"] = {level: sum(map(len, some)) for level, some in blobs.items()}
    return figures, blobs


def from_dumps(arguments: argparse.Namespace) -> tuple[dict[str, Any], Blobs]:
    bench = LoadBench(arguments.kv, arguments.tokens, arguments.slo_ms, arguments.threads)
    blobs: Blobs = {level: [] for level in LEVELS}
    for key, blob in bench.link.blobs.items():
        blobs[LEVELS[key[1]]].append(blob)
    figures = {
        "tokens": bench.chunks * CHUNK,
        "chunks": bench.chunks,
        "recompute": None,
        "blob_bytes": {level: sum(map(len, some)) for level, some in blobs.items()},
        "rows": sweep(bench, arguments.repeats),
    }
    bench.loads.shutdown()
    return figures, blobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2-135m")
    parser.add_argument("--kv", type=Path, nargs="+", help="dumps to load, without an engine")
    parser.add_argument("--tokens", type=int, default=7936, help="of the context, about")
    parser.add_argument("--slo-ms", type=float, default=1000.0, help="ttft_slo_ms of the policy")
    parser.add_argument("--threads", type=int, default=2, help="threads that decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--prefill", type=float, default=20_000, help="tokens a second of the simulated machine"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with streaming_link.registered():
        if arguments.kv:
            figures, blobs = from_dumps(arguments)
        else:
            figures, blobs = from_engine(arguments)
    figures["decode"] = decode_speeds({level: some[:8] for level, some in blobs.items()})
    figures["raw_bytes"] = sum(create_codec("raw").decode(blob).nbytes for blob in blobs["raw"])
    print(f"\n{figures['tokens']} tokens, seconds\n")
    print(table(figures["rows"], figures["recompute"]))
    for level, size in figures["blob_bytes"].items():
        print(
            f"{level:8s} {figures['raw_bytes'] / size:6.2f}x smaller, decoded at "
            f"{figures['decode'][level] / 1e9:.2f} GB/s"
        )
    figures["simulated"] = simulated(figures, arguments.slo_ms / 1000, arguments.prefill)
    print(
        f"\nsimulated: loading alone, a machine that prefills {arguments.prefill:.0f} tokens a "
        "second, one thread that decodes\n"
    )
    prefill = figures["chunks"] * CHUNK / arguments.prefill
    print(table(figures["simulated"], prefill))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
