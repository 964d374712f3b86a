"""Stores: put and get per blob size beside plain files, lookups, and restarts with 10,000 keys.

The disk figures are those of the page cache and the file system, as a server sees them; nothing is
synced. ``--path`` chooses another file system than that of the temporary directory.

    python benchmarks/bench_stores.py [--path DIR] [--megabytes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_kvcompress.stores import Store, create_stack, create_store

BLOB_BYTES = (64 << 10, 1 << 20, 4 << 20)
THREADS = (1, 4)
MOST_KEYS = 500
KEYS = 10_000
LOOKUP = 500
CAPACITY = "64GiB"


def make_keys(count: int, seed: int = 0) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(56) for _ in range(count)]


def make_stores(path: Path) -> dict[str, Callable[[], Store]]:
    memory = {"type": "memory", "bytes": CAPACITY}
    disk = {"type": "disk", "bytes": CAPACITY}
    return {
        "memory": lambda: create_store(memory),
        "disk": lambda: create_store({**disk, "path": str(path / "disk")}),
        "memory over disk": lambda: create_stack([memory, {**disk, "path": str(path / "stack")}]),
    }


class PlainFiles:
    """What a disk store cannot beat: one file a blob, written and read with no more than that."""

    def __init__(self, path: Path) -> None:
        self._path = path / "plain"
        self._path.mkdir()

    def put(self, key: bytes, blob: bytes) -> bool:
        with open(self._path / key.hex(), "wb", buffering=0) as file:
            file.write(blob)
        return True

    def get(self, key: bytes) -> bytes:
        with open(self._path / key.hex(), "rb", buffering=0) as file:
            return file.read()

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._path / key.hex())


def seconds(action: Callable[[bytes], object], keys: list[bytes], threads: int = 1) -> float:
    """Wall-clock time of ``action`` over all keys."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        done = list(pool.map(action, keys)) if threads > 1 else [action(key) for key in keys]
        elapsed = time.perf_counter() - start
    assert all(done)
    return elapsed


def throughput(stores: dict[str, object], blob_bytes: int, total: int, threads: int) -> dict:
    """Per store, GB/s and microseconds an operation; the stores take turns, the median counts."""
    keys = make_keys(min(max(total // blob_bytes, threads), MOST_KEYS))
    blob = random.Random(1).randbytes(blob_bytes)
    times = {name: ([], []) for name in stores}
    for _ in range(3):
        for name, store in stores.items():
            times[name][0].append(seconds(lambda key: store.put(key, blob), keys, threads))  # noqa: B023
            times[name][1].append(seconds(store.get, keys, threads))
            store.remove(keys)
    rows = {}
    for name, (puts, gets) in times.items():
        rows[name] = {}
        for operation, elapsed in (
            ("put", statistics.median(puts)),
            ("get", statistics.median(gets)),
        ):
            rows[name][operation] = {
                "gigabytes_per_second": len(keys) * blob_bytes / elapsed / 1e9,
                "microseconds": 1e6 * elapsed / len(keys),
            }
    return rows


def many_keys(make_store: Callable[[], Store]) -> dict:
    """Lookup of 500 keys, half of them missing, and start, with 10,000 keys of 64 bytes each."""
    store, keys = make_store(), make_keys(KEYS)
    for key in keys:
        store.put(key, bytes(64))
    wanted = random.Random(2).sample(keys, LOOKUP // 2) + make_keys(LOOKUP // 2, seed=3)
    lookups = []
    for _ in range(20):
        start = time.perf_counter()
        assert sum(store.contains(wanted)) == LOOKUP // 2
        lookups.append(time.perf_counter() - start)
    figures = {"contains_milliseconds": 1e3 * statistics.median(lookups)}
    if store.shared:
        starts = []
        for _ in range(3):
            start = time.perf_counter()
            again = make_store()
            starts.append(time.perf_counter() - start)
        assert again.contains(keys) == [True] * KEYS
        figures["start_milliseconds"] = 1e3 * statistics.median(starts)
    store.clear()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a directory of the file system to measure")
    parser.add_argument("--megabytes", type=int, default=256, help="bytes written a figure")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    figures: dict = {"throughput": [], "many_keys": {}}
    with tempfile.TemporaryDirectory(dir=arguments.path) as directory:
        path = Path(directory)
        stores: dict[str, object] = {"plain files": PlainFiles(path)}
        stores |= {name: make() for name, make in make_stores(path).items()}
        print(
            f"{'blob':>9} {'threads':>7}  {'store':<17}{'put':>12}{'get':>31}   (x: to plain files)"
        )
        for blob_bytes in BLOB_BYTES:
            for threads in THREADS:
                rows = throughput(stores, blob_bytes, arguments.megabytes << 20, threads)
                figures["throughput"].append(
                    {"blob_bytes": blob_bytes, "threads": threads, "stores": rows}
                )
                for name, row in rows.items():
                    print(f"{blob_bytes >> 10:>5} KiB {threads:>7}  {name:<17}", end="")
                    for operation, plain in rows["plain files"].items():
                        speed = row[operation]["gigabytes_per_second"]
                        ratio = speed / plain["gigabytes_per_second"]
                        print(f"{row[operation]['microseconds']:9.0f} us {speed:7.2f} GB/s", end="")
                        print(f" {ratio:5.2f}x" if name == "disk" else " " * 7, end="")
                    print()

        print(f"\n{KEYS} keys: lookup of {LOOKUP}, half of them missing, and start")
        for name, make in make_stores(path).items():
            figures["many_keys"][name] = row = many_keys(make)
            start = row.get("start_milliseconds")
            print(f"  {name:<17} lookup {row['contains_milliseconds']:.2f} ms", end="")
            print("" if start is None else f", start {start:.0f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
