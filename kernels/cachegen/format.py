"""Bytes, tables and arithmetic of the cachegen codec: the one place that knows an offset.

A chunk ``[layers, 2, tokens, kv_heads, head_size]`` is coded as one *section* per (layer, K or V),
in that order, after two shared ones. A section codes one *stripe* ``x[tokens, channels]``,
channels = kv_heads * head_size; it needs no other but the shared ones. T and C below are its tokens
and channels, D the head size.

The first shared section is empty or holds the rotary frequencies of K as D / 2 numbers u32, in
units of 2^-32 turn a token. The second is empty or holds the *sinks*, tokens that are kept exactly:
u32 their number n, 1 to MAX_SINKS; n u32 the tokens, strictly increasing; their rows
``[stripes, n, C]`` in the tensor's dtype. Where there are sinks the stripes code other values in
their place, which a decoder overwrites.

Section layout, little-endian; every part starts on a multiple of four bytes, padded with zeros:

======  ==============================================================================
offset  header, 20 bytes
======  ==============================================================================
0       u8   mode: RAW, LOSSLESS, UNIFORM or TOKEN_MAX
1       u8   UNIFORM: 1 where the channel parameters are rotary means, else 0;
             TOKEN_MAX: the largest code Q;
             LOSSLESS: bit k set when byte plane k is all zero and left out
2       u8   index base: smallest channel index
3       u8   index width: bits of one entry of the index plane, 0 to 6
4       u8   parameter width: bits of one entry of the parameter plane, 0 to 16
5       u8   zero
6       u16  RAW channels
8       i32  parameter base: smallest channel parameter, -32768 to 32767
12      u32  exceptions
16      f32  UNIFORM: step; otherwise zero
======  ==============================================================================

RAW: the header (all zero) is followed by the stripe's own bytes. Otherwise these parts follow:

1. index plane: per channel, index - base in *index width* bits, least significant bit first.
2. parameter plane: per channel, parameter - base in *parameter width* bits, likewise.
3. TOKEN_MAX: the maximum of each token, in the tensor's dtype.
4. u32 word count of each segment.
5. u32 final state of each lane of each segment, ``[segments, 32]``.
6. u16 words, the segments one after another.
7. LOSSLESS: byte planes, ``[planes kept, T, coded]`` bytes.
8. LOSSLESS: bit planes, ``[ceil(T / 8), bits, coded]`` bytes.
9. RAW channels, ``[channels, T]`` in the tensor's dtype.
10. exceptions: their positions ``t * C + c`` as u32, strictly increasing.
11. exceptions: their values in the tensor's dtype.

Channels. The index of a channel says how it is coded: below ``TABLES`` with that table;
``CONSTANT``: every symbol is the constant symbol and nothing is stored; ``RAW_CHANNEL``: as it is.
The *coded* channels are sorted by index, stably; position p of that order is channel ``order[p]``.

Lanes. Each ``SEGMENT`` positions form a segment with one word stream; the position p of a segment
belongs to block ``p // 32`` and lane ``p % 32``. The decoder goes through block 0, token 0, 1, …,
T - 1, then block 1, …: one step decodes one symbol in every lane:

    slot = x mod 2^11; symbol s with cum[s] <= slot < cum[s] + freq[s]
    x = freq[s] * (x >> 11) + slot - cum[s];   if x < 2^15: x = x << 16 | next word

Lanes that need a word take them in lane order. Lanes without a channel do nothing. At the end every
state is 2^15 and every word is used. The encoder runs the same steps backwards.

Symbols. Symbol 0 escapes: the value is among the exceptions. Otherwise:

- UNIFORM: ``symbol - 128`` is the code e of the difference to the channel's mean.
- TOKEN_MAX: ``symbol - 128`` is the difference e between code and channel parameter.
- LOSSLESS: ``symbol - 1 = 2 * d + (sign ^ flip)``; d = 0 for a zero exponent field, otherwise
  ``d = top - exponent``, 1 <= d <= 126. The channel parameter is ``2 * top + flip``. The other bits
  of a value, its mantissa, are kept in the planes: low bytes first, the rest as bit planes (byte
  [g, p, i]: bit j is bit p of token 8 * g + j at position i).

UNIFORM quantiser. Non-finite values count as zero and become exceptions. E = floor(log2(max |x|));
a stripe whose E is outside [-96, 96] is coded LOSSLESS instead. Only the lines marked f32 and f64
are not integer arithmetic; they are IEEE operations without contraction, so that every device
agrees on every bit.

    fixed = rint(x * 2^(11 - E))                                                           f32
    S2 = sum of fixed^2;  S1[c] = sum over tokens of fixed
    unit = 2^(E - 11);  step = float32(alpha * (sqrt(S2 / (T * C)) * unit)), 1 if all are zero   f64
    m[c] = floor(S1[c] * (4 * unit / (T * step)) + 1/2), limited to +-32767                      f64
    base[t, c] = 2^12 * m[c]
    xi = rint(x * (2^14 / step)), limited to +-2^30                                         f32
    d = xi - base;  n = (|d| + 2^13 - dead_zone) >> 14;  e = sign(d) * n, escapes where n > 127
    x' = float32(2^14 * e + base) * (step * 2^-14), limited to the dtype's finite range     f32

Rotary means. K turns with the position: in each pair of channels a = (head, i), b = (head, i + D/2)
by the frequency w[i]. Where the shared section has frequencies and the level wants it:

    k = ((t * w[i] + 2^19) mod 2^32) >> 20;  cos = COSINE[k], sin = COSINE[(k - 1024) mod 4096]
    Ra = sum of fixed_a * cos + fixed_b * sin;  Rb = sum of fixed_b * cos - fixed_a * sin
    A, B = as m from S1, with Ra / 2^12 and Rb / 2^12 in its place
    base_a = A * cos - B * sin;  base_b = A * sin + B * cos

The parameters are A in place of m at a, and B at b. A stripe has rotary means where the sum of
A^2 + B^2 over its pairs is larger than the sum of m^2 over its channels, 2^12 = cos 0 in COSINE.

TOKEN_MAX quantiser (CacheGen as LMCache ships it), M[t] = max over channels of finite |x|, f32
(a decoder refuses a maximum that is negative or not finite):

    code = rint(x * (Q / max(M[t], 2^-96)));  m[c] = floor((2 * sum of code + T) / (2 * T))
    x' = (code / Q) * M[t], limited likewise; e = code - m[c]

LOSSLESS channel parameter, over the values whose exponent field is neither zero nor, where that
holds infinities and NaN, all ones: count, sum of exponent fields S, negative ones N:

    top = floor((2 * S + count) / (2 * count)) + TOP_ABOVE_MEAN;  flip = 2 * N > count

and zero where count is. Values with the all-ones exponent escape.

The parameter plane holds base for RAW channels and for CONSTANT ones of LOSSLESS, whose parameter
means nothing; base is the smallest of the others, or zero. CONSTANT channels of LOSSLESS hold +0.
With rotary means every channel has a parameter, and no channel is CONSTANT unless its codes are.

Profile. A chunk that was transformed with a calibrated profile, which the container's header names,
has as its first section the position p0 of its first token, u32 below 2^31, and as its stripes the
coefficients of K, group by group of G layers, then those of V, in float32, with the profile's step
and rank. With the profile's scale s, turns w, mean m and basis B of a layer or group:

    n[t, c] = rint(x * (2^10 / s)), at most 2^17 in size; else coded without profile            f32
    u = n turned back, as rotary means are, by position p0 + t, or 2^12 * n where w is zero or for V
    z = B (u - m), over the channels of all layers of a group;  coefficient = float32(z * 2^-33)

    q = rint(coefficient * 2^12), zero where it is not finite, limited to +-2^20
    v = transpose(B) q + 2 m, turned to its position or times 2^12
    x' = float32(v * 2^-35) * s, limited to the dtype's finite range                             f32

p0 is found by the encoder, and any value decodes: the position below the profile's longest
sequence at which the turned mean of K is the most like its mean over the chunk.

The table of a channel is the cheapest by ``costs`` summed over its symbols (integers; the first of
equals); RAW_CHANNEL when that and the planes exceed the values as they are; CONSTANT wherever it
can be. A value whose symbol has no frequency in the channel's table escapes. A section that would
not be smaller than RAW is RAW.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
from dataclasses import dataclass

import numpy as np

CODEC_VERSION = 1

RAW, LOSSLESS, UNIFORM, TOKEN_MAX = 0, 1, 2, 3
HEADER = struct.Struct("<BBBBBBHiIf")
HEADER_BYTES = HEADER.size

MAX_TOKENS = 1 << 16
MAX_CHANNELS = (1 << 16) - 1
MAX_SINKS = 8

LANES = 32
SEGMENT = 256
PROB_BITS = 11
PROB_SCALE = 1 << PROB_BITS
STATE_LOW = 1 << 15

TABLES = 62
CONSTANT = TABLES
RAW_CHANNEL = TABLES + 1
ESCAPE = 0
CENTRE = 128
MAX_CODE = 127
CONSTANT_SYMBOL_LOSSLESS = 1

EXPONENT_LIMIT = 96
FIXED_BITS = 11
CODE_BITS = 14
MEAN_BITS = 12
MAX_PARAM = 32767
MAX_FIXED = 1 << 30
SMALLEST_MAX = 2.0**-EXPONENT_LIMIT
TURN_BITS = 12

MAX_DISTANCE = 126
TOP_ABOVE_MEAN = 6

COST_UNIT = 256
POSITION_BITS = 32

TABLE_DEAD_ZONE = 0.05


@dataclass(frozen=True)
class DType:
    """How LOSSLESS splits a value: sign | exponent | mantissa, from the top bit down."""

    name: str
    code: int
    itemsize: int
    exponent_bits: int
    mantissa_bits: int
    escapes_top: bool
    """The all-ones exponent holds infinities and NaN, which are exceptions."""
    max_finite: float

    @property
    def infinity(self) -> int:
        """The pattern with all exponent bits set and no others: no maximum reaches it."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def byte_planes(self) -> int:
        return self.mantissa_bits // 8

    @property
    def bit_planes(self) -> int:
        return self.mantissa_bits % 8


DTYPES = {
    d.name: d
    for d in (
        DType("bfloat16", 0, 2, 8, 7, True, float.fromhex("0x1.fep127")),
        DType("float16", 1, 2, 5, 10, True, 65504.0),
        DType("float32", 2, 4, 8, 23, True, float.fromhex("0x1.fffffep127")),
        DType("float8_e4m3fn", 3, 1, 4, 3, False, 448.0),
        DType("float8_e5m2", 4, 1, 5, 2, False, 57344.0),
    )
}


@dataclass(frozen=True)
class Quantiser:
    """How one stripe is coded: mode and its setting.

    alpha: UNIFORM step in units of the stripe's root mean square.
    dead_zone: UNIFORM, in units of step / 2^CODE_BITS: how much further from zero codes begin.
    rotary: UNIFORM may use rotary means.
    max_code: TOKEN_MAX largest code Q.
    """

    mode: int
    alpha: float = 0.0
    dead_zone: int = 0
    rotary: bool = False
    max_code: int = 0


def _uniform(alpha: float, dead_zone: float, rotary: bool) -> Quantiser:
    return Quantiser(UNIFORM, alpha, round(dead_zone * (1 << CODE_BITS)), rotary)


_LOSSLESS = Quantiser(LOSSLESS)
# (K, V). The loss of a model comes more from K's error than from V's, so K's steps are finer than
# those of equal rate.
_UNIFORM = {
    "high": (_uniform(0.180, 0.05, True), _uniform(0.163, 0.0, False)),
    "medium": (_uniform(0.560, 0.10, True), _uniform(0.508, 0.05, False)),
    "low": (_uniform(0.800, 0.10, True), _uniform(0.850, 0.05, False)),
}
UNIFORM_LEVELS = tuple(_UNIFORM)
LEVELS = ("lossless", *UNIFORM_LEVELS, "paper")


def quantiser(level: str, layers: int, layer: int, value: int) -> Quantiser:
    """The quantiser of a stripe of a 16- or 32-bit tensor.

    level: one of LEVELS; layers: of the whole chunk; layer: 0 to layers - 1; value: 0 K, 1 V.
    The paper's bins: K 32 in the first 10 layers then 16, V 32 in the first 2 then 16, and 32 in
    all of fewer than 10 layers. Q = bins // 2 - 1.
    """
    if level == "lossless":
        return _LOSSLESS
    if level == "paper":
        wide = layers < 10 or (layer < 2 if value else layer < 10)
        return Quantiser(TOKEN_MAX, max_code=(32 if wide else 16) // 2 - 1)
    return _UNIFORM[level][value]


def _quantise_frequencies(weights: list[int], low: int, high: int) -> list[int]:
    """Frequencies >= 1 on [low, high] and on ESCAPE, summing to PROB_SCALE; integers only."""
    freq = [0] * 256
    room = PROB_SCALE - 1
    total = sum(weights[low : high + 1])
    for s in range(low, high + 1):
        freq[s] = max(1, (2 * weights[s] * room + total) // (2 * total))
    excess = sum(freq) - room
    while excess:
        sign = 1 if excess > 0 else -1
        # The symbol whose frequency is furthest from its due on the side to be corrected.
        best = max(
            (s for s in range(low, high + 1) if sign < 0 or freq[s] > 1),
            key=lambda s: (
                sign * (freq[s] * total - weights[s] * room) * PROB_SCALE // (freq[s] * total),
                -s,
            ),
        )
        freq[best] -= sign
        excess -= sign
    freq[ESCAPE] = 1
    return freq


_WEIGHT = 1 << 48
_TAIL = _WEIGHT >> 17


def _width_grid() -> list[tuple[float, float]]:
    """(shape, standard deviation in steps) of the lossy tables."""
    grid = [(2.0, 0.16 * 2 ** (i / 4)) for i in range(33)]
    return grid + [(1.0, 0.12 * 2 ** (2 * i / 7)) for i in range(TABLES - 33)]


def _lossy_table(shape: float, sigma: float) -> list[int]:
    """Generalised Gaussian on the cells of the quantiser."""
    scale = sigma * math.sqrt(math.gamma(1 / shape) / math.gamma(3 / shape))
    sub = 16
    zero_edge = 0.5 + TABLE_DEAD_ZONE
    mass = []
    for n in range(MAX_CODE + 1):
        left, right = (0.0, zero_edge) if n == 0 else (zero_edge + n - 1, zero_edge + n)
        middles = (left + (right - left) * (k + 0.5) / sub for k in range(sub))
        mass.append(sum(math.exp(-((x / scale) ** shape)) for x in middles) * (right - left))
    total = 2 * sum(mass)
    weights = [0] * 256
    for n in range(MAX_CODE + 1):
        w = int(mass[n] * (2 if n == 0 else 1) / total * _WEIGHT)
        weights[CENTRE + n] = weights[CENTRE - n] = w
    reach = max(n for n in range(MAX_CODE + 1) if weights[CENTRE + n] > _TAIL or n == 0)
    reach = min(MAX_CODE, reach + 1)
    return _quantise_frequencies(weights, CENTRE - reach, CENTRE + reach)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _lossless_grid() -> list[tuple[float, float, bool]]:
    """(mean / deviation, log2 deviation within an octave, heavy-tailed) of the LOSSLESS tables."""
    grid = [(0.0, i / 4, False) for i in range(4)] + [(0.0, i / 4, True) for i in range(4)]
    for ratio, parts in (
        (0.5, 4),
        (1.0, 4),
        (1.5, 4),
        (2.0, 6),
        (3.0, 6),
        (4.5, 8),
        (7.0, 8),
        (12.0, 8),
    ):
        grid += [(ratio, i / parts, False) for i in range(parts)]
    return grid + [(0.7, i / 6, True) for i in range(TABLES - len(grid))]


def _lossless_table(ratio: float, octave: float, heavy: bool) -> list[int]:
    """Sign and exponent of a normal or two-sided exponential variable, placed as encoders do."""
    sigma = 2.0**octave
    mean = ratio * sigma

    def below(x: float) -> float:
        z = (x - mean) / sigma
        if not heavy:
            return _normal_cdf(z)
        tail = 0.5 * math.exp(-abs(z) * math.sqrt(2))
        return tail if z < 0 else 1 - tail

    cells = {}
    for k in range(-40, 24):
        low, high = 2.0**k, 2.0 ** (k + 1)
        cells[k] = (below(high) - below(low), below(-low) - below(-high))
    mean_exponent = sum(k * (p + n) for k, (p, n) in cells.items())
    top = math.floor(mean_exponent + 0.5) + TOP_ABOVE_MEAN
    weights = [0] * 256
    for k, (p, n) in cells.items():
        d = top - k
        if 1 <= d <= MAX_DISTANCE:
            weights[1 + 2 * d] = int(p * _WEIGHT)
            weights[2 + 2 * d] = int(n * _WEIGHT)
    reach = max(s for s in range(256) if weights[s] > _TAIL)
    return _quantise_frequencies(weights, 1, min(255, reach + 2))


@dataclass(frozen=True)
class Bank:
    """The tables of one family of modes.

    freq, cum: int32 [TABLES + 1, 256]; the last table gives all to the constant symbol, so that a
    lane which uses it never changes state. low, high: int32 [TABLES], the symbols with a frequency
    beside ESCAPE. constant: the constant symbol.
    """

    freq: np.ndarray
    cum: np.ndarray
    low: np.ndarray
    high: np.ndarray
    constant: int


def _build(freqs: list[list[int]], constant: int, name: str) -> Bank:
    freq = np.zeros((TABLES + 1, 256), np.int32)
    freq[:TABLES] = freqs
    freq[TABLES, constant] = PROB_SCALE
    _check_digest(name, freq)
    cum = np.cumsum(freq, axis=1, dtype=np.int32) - freq
    low = np.array([np.flatnonzero(f[1:])[0] + 1 for f in freq[:TABLES]], np.int32)
    high = np.array([np.flatnonzero(f)[-1] for f in freq[:TABLES]], np.int32)
    for a in (freq, cum, low, high):
        a.setflags(write=False)
    return Bank(freq, cum, low, high, constant)


@functools.cache
def lossy_bank() -> Bank:
    """The tables of UNIFORM and TOKEN_MAX."""
    return _build([_lossy_table(*g) for g in _width_grid()], CENTRE, "lossy")


@functools.cache
def lossless_bank() -> Bank:
    """The tables of LOSSLESS."""
    tables = [_lossless_table(*g) for g in _lossless_grid()]
    return _build(tables, CONSTANT_SYMBOL_LOSSLESS, "lossless")


def bank(mode: int) -> Bank:
    return lossless_bank() if mode == LOSSLESS else lossy_bank()


@functools.cache
def cosine() -> np.ndarray:
    """COSINE: int32 [4096], 2^12 times the cosine of k / 4096 turn."""
    turn = 1 << TURN_BITS
    table = [round((1 << TURN_BITS) * math.cos(2 * math.pi * k / turn)) for k in range(turn)]
    made = np.array(table, np.int32)
    _check_digest("cosine", made)
    made.setflags(write=False)
    return made


@functools.cache
def costs(mode: int, itemsize: int) -> np.ndarray:
    """int32 [256, TABLES]: what a symbol costs in a table, in 1 / COST_UNIT bits.

    Symbols without a frequency cost an escape, a position and a value of *itemsize* bytes.
    """
    # floor(COST_UNIT * log2 f) from integers alone.
    log2 = [0] + [(f**COST_UNIT).bit_length() - 1 for f in range(1, PROB_SCALE + 1)]
    cost = (PROB_BITS * COST_UNIT - np.array(log2, np.int32))[bank(mode).freq[:TABLES]]
    escape = (PROB_BITS + POSITION_BITS + 8 * itemsize) * COST_UNIT
    cost[bank(mode).freq[:TABLES] == 0] = escape
    cost[:, ESCAPE] = escape
    cost = np.ascontiguousarray(cost.T, np.int32)
    cost.setflags(write=False)
    return cost


DIGESTS = {
    "lossy": "f9e6322fe4b59f7a",
    "lossless": "94b41450d21d2c7f",
    "cosine": "0380e447587587ef",
}


def _check_digest(name: str, numbers: np.ndarray) -> None:
    """The tables come from the C library's exp, erfc and cos. A machine where one of these rounds
    to another integer would write blobs that no other machine decodes, so it must not start."""
    digest = hashlib.sha256(numbers.astype("<i4").tobytes()).hexdigest()[:16]
    if digest != DIGESTS[name]:
        raise RuntimeError(f"cachegen: {name} tables have digest {digest}, not {DIGESTS[name]}")


def pad4(n: int) -> int:
    """n rounded up to a multiple of four."""
    return (n + 3) & ~3


class SectionError(ValueError):
    """The bytes of a section are inconsistent; the message says how."""


def header_in_range(mode, aux, index_width, param_width, zero, param_base, step, byte_planes):
    """Whether the fields of a section that is not RAW are in range; byte_planes: of the dtype.

    Plain arithmetic, so that it can be compiled.
    """
    if mode == LOSSLESS:
        good = aux < 1 << byte_planes and step == 0
    elif mode == UNIFORM:
        good = aux <= 1 and math.isfinite(step) and step > 0
    else:
        good = mode == TOKEN_MAX and 1 <= aux <= MAX_CODE and step == 0
    small = index_width <= 6 and param_width <= 16 and zero == 0
    return good and small and -32768 <= param_base <= 32767


def parts(
    mode, index_width, param_width, tokens, channels, itemsize, coded, words, byte_planes,
    bit_planes, raw_channels, exceptions,
):  # fmt: skip
    """Offsets of the parts 1 to 11 of a section that is not RAW, and its length: 12 numbers.

    words: of all segments; byte_planes: those kept; coded, raw_channels: channels of either kind.
    Plain integer arithmetic, so that it can be compiled.
    """

    def pad4(n):
        return (n + 3) // 4 * 4

    segments = (coded + SEGMENT - 1) // SEGMENT
    index = HEADER_BYTES
    param = index + pad4((channels * index_width + 7) // 8)
    maxima = param + pad4((channels * param_width + 7) // 8)
    counts = maxima + (pad4(tokens * itemsize) if mode == TOKEN_MAX else 0)
    states = counts + 4 * segments
    stream = states + 4 * LANES * segments
    byte_plane = stream + pad4(2 * words)
    bit_plane = byte_plane + pad4(byte_planes * tokens * coded)
    raw = bit_plane + pad4((tokens + 7) // 8 * bit_planes * coded)
    positions = raw + pad4(raw_channels * tokens * itemsize)
    values = positions + 4 * exceptions
    end = values + pad4(exceptions * itemsize)
    return (
        index, param, maxima, counts, states, stream, byte_plane, bit_plane, raw, positions,
        values, end,
    )  # fmt: skip


def pack_turns(turns: np.ndarray | None) -> bytes:
    """The shared section: rotary frequencies uint32 [D / 2], or None."""
    return b"" if turns is None else turns.astype("<u4").tobytes()


def unpack_turns(section: memoryview, head_size: int) -> np.ndarray | None:
    """The rotary frequencies of a shared section. Raises SectionError for a wrong length."""
    if not len(section):
        return None
    if head_size % 2 or len(section) != 2 * head_size:
        raise SectionError(f"{len(section)} bytes of rotary frequencies for heads of {head_size}")
    return np.frombuffer(section, "<u4").astype(np.uint32)


def pack_start(start: int) -> bytes:
    """The first section of a chunk that was transformed with a profile."""
    return start.to_bytes(4, "little")


def unpack_start(section: memoryview) -> int:
    """The position of the chunk's first token. Raises SectionError for a wrong length or value."""
    start = int.from_bytes(section, "little")
    if len(section) != 4 or start >= 1 << 31:
        raise SectionError("the start of a transformed chunk is out of range")
    return start


def raw_section_bytes(tokens: int, channels: int, itemsize: int) -> int:
    return HEADER_BYTES + pad4(tokens * channels * itemsize)


def pack_sinks(sinks: list[int], rows: bytes) -> bytes:
    """The section of the sinks. rows: the values of ``[stripes, len(sinks), C]``."""
    if not sinks:
        return b""
    return np.array([len(sinks), *sinks], "<u4").tobytes() + rows


def unpack_sinks(section: memoryview, tokens: int, row_bytes: int) -> tuple[list[int], memoryview]:
    """The sinks and the bytes of their rows; row_bytes: those of one token in all stripes.

    Raises SectionError.
    """
    if not len(section):
        return [], section
    count = int.from_bytes(section[:4], "little")
    head = 4 + 4 * count
    if not 1 <= count <= MAX_SINKS or len(section) != head + count * row_bytes:
        raise SectionError("the length of the section of sinks is wrong")
    sinks = np.frombuffer(section[4:head], "<u4").tolist()
    if sinks[-1] >= tokens or any(a >= b for a, b in itertools.pairwise(sinks)):
        raise SectionError("the sinks are not increasing tokens of the chunk")
    return sinks, section[head:]
