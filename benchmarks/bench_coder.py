"""Speed and output of the lane coder alone, against constriction's ANS and zstd level 1.

All three code the same symbols in the same run on one core: draws of a discretised Gaussian on 31
symbols, in 256 channels. In the rows of one width all channels are alike, the best case for
constriction and its one distribution. In the rows ``mixed`` every channel has
its own width, as channels of KV do. What a decoder needs beside the stream is counted: 6 bits a
channel for the lanes' table indices, one distribution of 16-bit numbers for constriction.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import constriction
import numpy as np
import zstandard
from timing import best_time

from vllm_kvcompress.kernels.cachegen import _vector as vec
from vllm_kvcompress.kernels.cachegen import cpu
from vllm_kvcompress.kernels.cachegen import format as fmt

RADIUS = 15


def draw(sigma: float | None, tokens: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Symbols uint8 [tokens, SEGMENT] around CENTRE, and their entropy in bits a symbol.

    sigma: the width of all channels in steps; None for widths from 0.4 to 8, one a channel.
    """
    n = np.arange(-RADIUS, RADIUS + 1)
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.uniform(np.log(0.4), np.log(8), fmt.SEGMENT))
    widths = np.full(fmt.SEGMENT, sigma) if sigma else np.sort(spread)
    p = np.exp(-0.5 * (n / widths[:, None]) ** 2)
    p /= p.sum(1, keepdims=True)
    drawn = np.stack([rng.choice(n, tokens, p=q) for q in p], 1)
    entropy = -(p * np.log2(np.maximum(p, 1e-300))).sum(1).mean()
    return (drawn + fmt.CENTRE).astype(np.uint8), float(entropy)


class Lanes:
    """One segment of the format: 256 channels, 32 lanes, a table a channel."""

    def __init__(self, symbols: np.ndarray, vector: bool):
        self.tokens = len(symbols)
        self.source = np.concatenate([symbols.ravel(), np.zeros(vec.SYMBOL_SLACK, np.uint8)])
        costs = fmt.costs(fmt.UNIFORM, 2)
        histograms = np.stack([np.bincount(c, minlength=256) for c in symbols.T])
        table = np.argmin(histograms @ costs.astype(np.int64), axis=1)
        order = np.argsort(table, kind="stable")
        self.table = table[order].astype(np.int32).reshape(-1, fmt.LANES)
        self.side_bits = 6 * fmt.SEGMENT
        self.tables = cpu._tables(fmt.UNIFORM, 2)
        self.out = np.empty(symbols.size + vec.SYMBOL_SLACK, np.uint8)
        self.words = np.empty(symbols.size + 2 * vec.WORD_SLACK, np.uint16)
        self.state = np.empty(fmt.LANES, np.uint32)
        self.end = len(self.words) - vec.WORD_SLACK
        self.channels = order.astype(np.int32).reshape(-1, fmt.LANES)
        self.encode_block = vec.encode_block_vector if vector else vec.encode_block_scalar
        self.decode_block = vec.decode_block_vector if vector else vec.decode_block_scalar

    def encode(self) -> None:
        self.state[:] = fmt.STATE_LOW
        at = self.end
        for channel, table in zip(self.channels[::-1], self.table[::-1], strict=True):
            at = self.encode_block(
                self.state, self.words, at,  self.tables.entries,
                256 * table, vec.COMPRESS, self.source, 0, channel, fmt.SEGMENT, self.tokens,
            )  # fmt: skip
        self.at = at
        self.final = self.state.copy()

    def decode(self) -> None:
        state = self.final.copy()
        at = self.at
        for block, table in enumerate(self.table):
            at = self.decode_block(
                state, self.words, at, self.end, self.tables.decode, fmt.PROB_SCALE * table,
                vec.SPREAD, self.out, block * fmt.LANES, fmt.SEGMENT, self.tokens,
            )  # fmt: skip

    def check(self) -> None:
        shape = self.tokens, fmt.SEGMENT
        size = self.tokens * fmt.SEGMENT
        source = self.source[:size].reshape(shape)[:, self.channels.ravel()]
        assert (self.out[:size].reshape(shape) == source).all()

    @property
    def size(self) -> int:
        return 2 * (self.end - self.at) + 4 * fmt.LANES + self.side_bits // 8


class Constriction:
    """One empirical distribution for all symbols."""

    def __init__(self, symbols: np.ndarray):
        self.symbols = symbols.ravel().astype(np.int32) - (fmt.CENTRE - RADIUS)
        p = np.bincount(self.symbols, minlength=2 * RADIUS + 1) / len(self.symbols)
        self.model = constriction.stream.model.Categorical(p, perfect=False)

    def encode(self) -> None:
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(self.symbols, self.model)
        self.compressed = coder.get_compressed()

    def decode(self) -> None:
        coder = constriction.stream.stack.AnsCoder(self.compressed)
        self.out = coder.decode(self.model, len(self.symbols))

    def check(self) -> None:
        assert (self.out == self.symbols).all()

    @property
    def size(self) -> int:
        return self.compressed.nbytes + 2 * (2 * RADIUS + 1)


class Zstd:
    def __init__(self, symbols: np.ndarray):
        self.symbols = symbols.tobytes()

    def encode(self) -> None:
        self.compressed = zstandard.ZstdCompressor(level=1).compress(self.symbols)

    def decode(self) -> None:
        self.out = zstandard.ZstdDecompressor().decompress(self.compressed)

    def check(self) -> None:
        assert self.out == self.symbols

    @property
    def size(self) -> int:
        return len(self.compressed)


def measure(sigma: float | None, tokens: int, repeats: int) -> list[dict]:
    symbols, entropy = draw(sigma, tokens)
    coders = {
        "lanes": Lanes(symbols, vector=True),
        "lanes scalar": Lanes(symbols, vector=False),
        "constriction ANS": Constriction(symbols),
        "zstd 1": Zstd(symbols),
    }
    rows = []
    for name, coder in coders.items():
        coder.encode()
        coder.decode()
        coder.check()
        encode, decode = best_time(coder.encode, repeats), best_time(coder.decode, repeats)
        rows.append({
            "coder": name, "sigma": sigma or "mixed", "symbols": symbols.size, "entropy": entropy,
            "bits_per_symbol": 8 * coder.size / symbols.size,
            "encode_msym_s": symbols.size / encode / 1e6,
            "decode_msym_s": symbols.size / decode / 1e6,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    for sigma in [*arguments.sigma, None]:
        rows += measure(sigma, arguments.tokens, arguments.repeats)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(
        f"{'':18} sigma entropy    bits  encode  decode  Msymbols/s; one core, AVX2 {vec.HAS_AVX2}"
    )
    for i in range(0, len(rows), 4):
        for r in rows[i : i + 4]:
            print(
                f"{r['coder']:18} {r['sigma']!s:>5} {r['entropy']:7.3f} {r['bits_per_symbol']:7.3f}"
                f" {r['encode_msym_s']:7.0f} {r['decode_msym_s']:7.0f}"
            )
        ours, _, ans, zstd = rows[i : i + 4]
        for peer in (ans, zstd):
            print(
                f"  lanes against {peer['coder']:17}"
                f" size x{ours['bits_per_symbol'] / peer['bits_per_symbol']:.3f}"
                f" encode x{ours['encode_msym_s'] / peer['encode_msym_s']:.2f}"
                f" decode x{ours['decode_msym_s'] / peer['decode_msym_s']:.2f}"
            )


if __name__ == "__main__":
    main()
