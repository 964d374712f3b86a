"""The container: pack, unpack and the raw codec, and the checksum beside the others at hand.

python benchmarks/bench_container.py [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_kvcompress.codecs import container, create_codec

BLOB_BYTES = 8 << 20
SHAPE = (32, 2, 256, 2, 128)


def gigabytes_per_second(action: Callable[[], object], size: int) -> float:
    """The best of a second of repetitions."""
    best, end = float("inf"), time.perf_counter() + 1
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    content = random.Random(0).randbytes(BLOB_BYTES)
    header = container.Header("raw", "", torch.uint8, (1, 1, 1, 1, BLOB_BYTES))
    blob = container.pack(header, [content])
    codec, kv = create_codec("raw"), torch.ones(SHAPE, dtype=torch.bfloat16)
    raw, out = codec.encode(kv), torch.empty_like(kv)
    kv_bytes = kv.numel() * kv.element_size()
    figures = {
        "CRC-32 (the container's)": gigabytes_per_second(lambda: zlib.crc32(content), BLOB_BYTES),
        "Adler-32": gigabytes_per_second(lambda: zlib.adler32(content), BLOB_BYTES),
        **{
            name: gigabytes_per_second(lambda: hashlib.new(name, content).digest(), BLOB_BYTES)  # noqa: B023
            for name in ("sha1", "sha256", "blake2b", "blake2s", "md5")
        },
        "pack": gigabytes_per_second(lambda: container.pack(header, [content]), BLOB_BYTES),
        "unpack": gigabytes_per_second(lambda: container.unpack(blob), BLOB_BYTES),
        "raw encode": gigabytes_per_second(lambda: codec.encode(kv), kv_bytes),
        "raw decode": gigabytes_per_second(lambda: codec.decode(raw, out=out), kv_bytes),
    }
    for name, speed in figures.items():
        print(f"{name:<26}{speed:6.2f} GB/s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
