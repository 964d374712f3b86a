"""Whether coding tokens as differences to an anchor token would pay, as CacheGen's paper does.

Bits a value of the same codes, so of the same loss: coded as ``cachegen`` does, around the mean of
each channel; as differences to the first token of each group of 10; and to the token before. K
also with its rotary embedding undone first, by the frequencies that the codec measures. Entropy
coding with the codec's own tables, the best for each channel, anchors and differences apart.

    python benchmarks/streaming_deltas.py [--model DIR] [--kv FILE ...] [--tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from texts import chosen_texts

from vllm_kvcompress.calibration.dump import dump_kv, load_model, tokenize
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen.rotary import estimate_turns

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
LEVELS = ("high", "medium", "low")
GROUP = 10


def table_bits(codes: np.ndarray) -> float:
    """Bits that codes ``[tokens, channels]`` take, with the best table of each channel."""
    if not codes.size:
        return 0.0
    channels = codes.shape[1]
    symbols = np.where(np.abs(codes) > fmt.MAX_CODE, fmt.ESCAPE, codes + fmt.CENTRE).astype(int)
    counts = np.zeros((channels, 256), np.int64)
    np.add.at(counts, (np.broadcast_to(np.arange(channels), codes.shape), symbols), 1)
    costs = counts @ fmt.costs(fmt.UNIFORM, 2).astype(np.int64)
    return costs.min(axis=1).sum() / fmt.COST_UNIT


def around_means(values: np.ndarray, step: float, means: np.ndarray) -> float:
    """Bits of values coded around ``means``, which broadcast over the tokens."""
    return table_bits(np.rint((values - means) / step))


def against_anchors(values: np.ndarray, step: float) -> float:
    """Bits with the first of each group coded around the mean, the others against it."""
    codes = np.rint(values / step)
    first = np.arange(len(codes)) // GROUP * GROUP
    anchors = np.arange(len(codes)) % GROUP == 0
    middle = np.rint(codes[anchors].mean(axis=0))
    return table_bits(codes[anchors] - middle) + table_bits((codes - codes[first])[~anchors])


def against_previous(values: np.ndarray, step: float) -> float:
    codes = np.rint(values / step)
    return table_bits(np.diff(codes, axis=0, prepend=codes[:1] * 0))


def turned(values: np.ndarray, turns: np.ndarray, head_size: int, sign: int) -> np.ndarray:
    """Channel pairs of ``values [tokens, heads * head_size]`` turned with their position."""
    tokens, half = len(values), head_size // 2
    x = values.reshape(tokens, -1, head_size)
    angle = sign * 2 * np.pi * (np.arange(tokens)[:, None] * (turns / 2.0**32) % 1.0)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).reshape(values.shape)


def measure(kv: torch.Tensor, level: str) -> dict[str, float]:
    """Bits a value of one chunk ``[layers, 2, tokens, kv_heads, head_size]``, by method."""
    layers, _, tokens, heads, size = kv.shape
    turns = estimate_turns(kv[:, 0])
    assert turns is not None
    bits: dict[str, float] = {}

    def add(name: str, amount: float) -> None:
        bits[name] = bits.get(name, 0.0) + amount / (layers * tokens * heads * size)

    for layer in range(layers):
        for part, name in ((0, "K"), (1, "V")):
            values = kv[layer, part].double().reshape(tokens, -1).numpy()
            alpha = fmt.quantiser(level, layers, layer, part).alpha
            step = alpha * float(np.sqrt(np.square(values).mean()))
            add(f"{name} means", around_means(values, step, values.mean(axis=0)))
            add(f"{name} anchors", against_anchors(values, step))
            add(f"{name} previous", against_previous(values, step))
            if part == 0:
                still = turned(values, turns, size, -1)
                means = turned(np.broadcast_to(still.mean(axis=0), still.shape), turns, size, 1)
                add("K rotary means", around_means(values, step, means))
                add("K undone, anchors", against_anchors(still, step))
                add("K undone, previous", against_previous(still, step))
    return bits


def dumped(arguments: argparse.Namespace) -> list[tuple[str, torch.Tensor]]:
    if arguments.kv:
        from safetensors.torch import load_file

        return [(path.stem, load_file(path)["kv"]) for path in arguments.kv]
    model, tokenizer = load_model(arguments.model)
    return [
        (name, dump_kv(model, tokenize(tokenizer, text, arguments.tokens)))
        for name, text in chosen_texts([])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--kv", type=Path, nargs="*", default=[], help="dumps to take instead")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rows = []
    for name, kv in dumped(arguments):
        for level in LEVELS:
            parts = kv[:, :, : arguments.tokens].split(arguments.chunk, dim=2)
            found = [measure(part, level) for part in parts]
            mean = {key: sum(each[key] for each in found) / len(found) for key in found[0]}
            rows.append({"text": name, "level": level, **mean})
    columns = list(rows[0])[2:]
    for level in LEVELS:
        print(f"\n{level}: bits a value, mean of {len(rows) // len(LEVELS)} texts")
        for column in columns:
            own = [row[column] for row in rows if row["level"] == level]
            print(f"  {column:20s} {sum(own) / len(own):6.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
