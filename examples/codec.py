"""A codec and a store without vLLM: real KV of a model, at every level, over a disk and back.

    python examples/codec.py [MODEL]

Without MODEL it takes the test model that `make setup` makes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.stores import create_store

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
TOKENS = 256


def kv_of(model: str, text: str) -> torch.Tensor:
    """The KV cache of a text, as codecs take it: ``[layers, 2, tokens, kv_heads, head_size]``."""
    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        cache = network(tokens[:, :TOKENS], use_cache=True).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).contiguous().bfloat16()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(MODEL)
    kv = kv_of(model, Path(tempfile.__file__).read_text())
    print(f"KV of {kv.shape[2]} tokens, {kv.nbytes / 2**20:.1f} MiB in {kv.dtype}\n")
    print("level      ratio   bits   error   encode  decode")
    with tempfile.TemporaryDirectory() as folder:
        store = create_store({"type": "disk", "path": folder, "bytes": "1GiB"})
        for level in ("lossless", "high", "medium", "low", "paper"):
            codec = create_codec("cachegen", level=level)
            codec.decode(codec.encode(kv))  # compiles once
            start = time.perf_counter()
            blob = codec.encode(kv)
            encoded = time.perf_counter()
            # A key is any bytes that stand for what is stored.
            store.put(level.encode(), blob)
            again = codec.decode(store.get(level.encode()))
            decoded = time.perf_counter()
            error = ((again - kv).float().norm() / kv.float().norm()).square()
            print(
                f"{level:9}  {kv.nbytes / len(blob):5.2f}  {8 * len(blob) / kv.numel():5.2f}"
                f"  {error:.4f}  {encoded - start:5.3f} s {decoded - encoded:5.3f} s"
            )
        store.close()


if __name__ == "__main__":
    main()
