"""Encode and decode of cachegen sections in plain torch and numpy: the truth for its twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from . import format as fmt
from .format import SectionError

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_TORCH_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def dtype_of(tensor: torch.Tensor) -> fmt.DType:
    return fmt.DTYPES[str(tensor.dtype).removeprefix("torch.")]


def encode(
    kv: torch.Tensor, quantisers: Sequence[fmt.Quantiser], turns: np.ndarray | None = None
) -> list[bytes]:
    """Sections of ``kv[stripes, tokens, channels]``, one quantiser a stripe.

    turns: rotary frequencies uint32 [D / 2] of heads of D channels, or None.
    """
    return [_encode_stripe(x, q, turns) for x, q in zip(kv.cpu(), quantisers, strict=True)]


def decode(
    sections: Sequence[memoryview | bytes], out: torch.Tensor, turns: np.ndarray | None = None
) -> None:
    """Decode one section a stripe into ``out[stripes, tokens, channels]``; turns as in ``encode``.

    Raises SectionError for inconsistent sections.
    """
    for section, target in zip(sections, out, strict=True):
        target.copy_(_decode_stripe(bytes(section), target, turns))


def _as_bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(_TORCH_BITS[x.element_size()]).numpy()


def _from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits).view(dtype)


def _to_dtype(value: np.ndarray, like: torch.Tensor) -> np.ndarray:
    limit = np.float32(dtype_of(like).max_finite)
    clipped = np.clip(value, -limit, limit)
    return _as_bits(torch.from_numpy(clipped).to(like.dtype))


def _pack(values: np.ndarray, width: int) -> bytes:
    """Fixed-width integers, least significant bit first, padded to four bytes."""
    bits = (values[:, None] >> np.arange(width)) & 1
    packed = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()
    return _padded(packed)


def _unpack(data: bytes, count: int, width: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * width, bitorder="little")
    return (bits.reshape(count, width).astype(np.int64) << np.arange(width)).sum(1)


def _padded(data: bytes) -> bytes:
    return data + bytes(fmt.pad4(len(data)) - len(data))


def _split(bits: np.ndarray, d: fmt.DType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sign, exponent field and mantissa of bit patterns."""
    wide = bits.astype(np.int64)
    sign = wide >> (d.exponent_bits + d.mantissa_bits)
    exponent = (wide >> d.mantissa_bits) & ((1 << d.exponent_bits) - 1)
    return sign, exponent, wide & ((1 << d.mantissa_bits) - 1)


# Symbols: each returns (symbols [T, C], parameters [C], ...).


def _cos_sin(turns: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, 1, D / 2] each, in units of 2^-12."""
    phase = (np.arange(tokens)[:, None] * turns.astype(np.int64) + (1 << 19)) & 0xFFFFFFFF
    k = phase >> (32 - fmt.TURN_BITS)
    quarter = 1 << (fmt.TURN_BITS - 2)
    table = fmt.cosine().astype(np.int64)
    sin = table[(k - quarter) & ((1 << fmt.TURN_BITS) - 1)]
    return table[k][:, None], sin[:, None]


def _pairs(x: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views [..., heads, D / 2] of the two halves of each head of x[..., channels]."""
    heads = x.reshape(*x.shape[:-1], -1, 2, len(turns))
    return heads[..., 0, :], heads[..., 1, :]


def _base(param: np.ndarray, tokens: int, turns: np.ndarray | None) -> np.ndarray:
    """base[t, c]; turns: None for plain means."""
    base = np.broadcast_to(param << fmt.MEAN_BITS, (tokens, len(param))).copy()
    if turns is not None:
        cos, sin = _cos_sin(turns, tokens)
        a, b = _pairs(param, turns)
        base_a, base_b = _pairs(base, turns)
        base_a[:] = a * cos - b * sin
        base_b[:] = a * sin + b * cos
    return base


def _uniform_symbols(x: torch.Tensor, q: fmt.Quantiser, turns: np.ndarray | None):
    """Symbols, parameters, step, whether rotary; None where the range is beyond UNIFORM."""
    tokens, channels = x.shape
    value = x.float().numpy()
    finite = np.isfinite(value)
    value = np.where(finite, value, np.float32(0))
    largest = np.abs(value).max()
    exponent = int(largest.view(np.uint32) >> 23) - 127
    if largest > 0 and abs(exponent) > fmt.EXPONENT_LIMIT:
        return None
    step, param, rotary = np.float32(1), np.zeros(channels, np.int64), False
    if largest > 0:
        unit = 2.0 ** (exponent - fmt.FIXED_BITS)
        fixed = np.rint(value * np.float32(1 / unit)).astype(np.int64)
        mean_square = np.float64((fixed * fixed).sum()) / np.float64(tokens * channels)
        step = np.float32(q.alpha * (np.sqrt(mean_square) * unit))
        scale = 4 * unit / (np.float64(tokens) * np.float64(step))

        def rounded(sums: np.ndarray, scale: float) -> np.ndarray:
            mean = np.floor(sums.astype(np.float64) * scale + 0.5)
            return np.clip(mean, -fmt.MAX_PARAM, fmt.MAX_PARAM).astype(np.int64)

        param = rounded(fixed.sum(0), scale)
        if q.rotary and turns is not None:
            cos, sin = _cos_sin(turns, tokens)
            a, b = _pairs(fixed, turns)
            turned = np.empty_like(param)
            turned_a, turned_b = _pairs(turned, turns)
            turned_a[:] = rounded((a * cos + b * sin).sum(0), scale / (1 << fmt.TURN_BITS))
            turned_b[:] = rounded((b * cos - a * sin).sum(0), scale / (1 << fmt.TURN_BITS))
            rotary = (turned * turned).sum() > (param * param).sum()
            param = turned if rotary else param
    fine = np.rint(value * (np.float32(1 << fmt.CODE_BITS) / step))
    xi = np.clip(fine, -np.float32(fmt.MAX_FIXED), np.float32(fmt.MAX_FIXED)).astype(np.int64)
    d = xi - _base(param, tokens, turns if rotary else None)
    n = (np.abs(d) + (1 << (fmt.CODE_BITS - 1)) - q.dead_zone) >> fmt.CODE_BITS
    symbol = np.where(d < 0, -n, n) + fmt.CENTRE
    symbol[(n > fmt.MAX_CODE) | ~finite] = fmt.ESCAPE
    return symbol, param, step, rotary


def _token_max_symbols(x: torch.Tensor, q: fmt.Quantiser):
    tokens = x.shape[0]
    value = x.float().numpy()
    finite = np.isfinite(value)
    value = np.where(finite, value, np.float32(0))
    maxima = np.abs(value).max(1)
    factor = np.float32(q.max_code) / np.maximum(maxima, np.float32(fmt.SMALLEST_MAX))
    code = np.rint(value * factor[:, None]).astype(np.int64)
    param = (2 * code.sum(0) + tokens) // (2 * tokens)
    symbol = code - param + fmt.CENTRE
    symbol[~finite] = fmt.ESCAPE
    return symbol, param, _to_dtype(maxima, x)


def _lossless_symbols(bits: np.ndarray, d: fmt.DType):
    sign, exponent, mantissa = _split(bits, d)
    zero = exponent == 0
    special = exponent == (1 << d.exponent_bits) - 1 if d.escapes_top else np.zeros_like(zero)
    counted = ~zero & ~special
    count = counted.sum(0)
    total = (exponent * counted).sum(0)
    flip = (2 * (sign * counted).sum(0) > count).astype(np.int64)
    top = (2 * total + count) // np.maximum(2 * count, 1) + fmt.TOP_ABOVE_MEAN
    top = np.where(count > 0, top, 0)
    distance = np.where(zero, 0, top - exponent)
    symbol = 1 + 2 * distance + (sign ^ flip)
    outside = ~zero & ((distance < 1) | (distance > fmt.MAX_DISTANCE))
    symbol[outside | special] = fmt.ESCAPE
    return symbol, 2 * top + flip, mantissa


def _choose(
    symbol: np.ndarray, costs: np.ndarray, constant: np.ndarray, raw_bits: int
) -> np.ndarray:
    """Index of each channel: the cheapest table, CONSTANT or RAW_CHANNEL.

    constant: bool [C]; raw_bits: a value's bits, without those that the planes take in any case.
    """
    tokens, channels = symbol.shape
    index = np.empty(channels, np.int64)
    for c in range(channels):
        cost = np.bincount(symbol[:, c], minlength=256) @ costs.astype(np.int64)
        best = int(np.argmin(cost))
        index[c] = fmt.RAW_CHANNEL if cost[best] > tokens * raw_bits * fmt.COST_UNIT else best
        if constant[c]:
            index[c] = fmt.CONSTANT
    return index


def _encode_stripe(x: torch.Tensor, q: fmt.Quantiser, turns: np.ndarray | None) -> bytes:
    tokens, channels = x.shape
    d = dtype_of(x)
    bits = _as_bits(x)
    mode, aux, step, maxima, plain_bits = q.mode, 0, 0.0, b"", 0
    if mode == fmt.UNIFORM:
        made = _uniform_symbols(x, q, turns)
        if made is None:
            mode = fmt.LOSSLESS
        else:
            symbol, param, step, rotary = made
            aux = int(rotary)
    elif mode == fmt.TOKEN_MAX:
        symbol, param, token_max = _token_max_symbols(x, q)
        maxima = _padded(token_max.tobytes())
        aux = q.max_code
    bank = fmt.bank(mode)
    if mode == fmt.LOSSLESS:
        symbol, param, mantissa = _lossless_symbols(bits, d)
        plain_bits = d.mantissa_bits
        constant = (bits == 0).all(0)
    else:
        constant = (symbol == bank.constant).all(0)

    costs = fmt.costs(mode, d.itemsize)
    index = _choose(symbol, costs, constant, 8 * d.itemsize - plain_bits)
    order = np.argsort(index, kind="stable")
    order = order[: int((index < fmt.TABLES).sum())]
    raw_channels = np.flatnonzero(index == fmt.RAW_CHANNEL)

    coded = index < fmt.TABLES
    with_param = coded | ((index == fmt.CONSTANT) & (mode != fmt.LOSSLESS))
    if mode == fmt.UNIFORM and rotary:
        with_param[:] = True
    param_base = int(param[with_param].min()) if with_param.any() else 0
    param = np.where(with_param, param - param_base, 0)
    param_width = int(param.max()).bit_length()
    index_base = int(index.min())
    index_width = int(index.max() - index_base).bit_length()

    has_frequency = np.zeros(symbol.shape, bool)
    has_frequency[:, coded] = bank.freq[index[coded], symbol[:, coded]] > 0
    symbol = np.where(has_frequency, symbol, fmt.ESCAPE)
    positions = np.flatnonzero(((symbol == fmt.ESCAPE) & coded).ravel())

    counts, states, words = [], [], []
    for first in range(0, len(order), fmt.SEGMENT):
        segment = order[first : first + fmt.SEGMENT]
        state, stream = encode_lanes(symbol[:, segment], index[segment], bank)
        counts.append(len(stream))
        states.append(state)
        words.append(stream)
    parts = [
        _pack(index - index_base, index_width),
        _pack(param, param_width),
        maxima,
        np.array(counts, "<u4").tobytes(),
        np.array(states, "<u4").tobytes(),
        _padded(np.concatenate([np.empty(0, np.uint16), *words]).astype("<u2").tobytes()),
    ]
    if mode == fmt.LOSSLESS:
        byte_planes, aux = [], 0
        for k in range(d.byte_planes):
            plane = ((mantissa[:, order] >> (8 * k)) & 255).astype(np.uint8)
            if plane.any():
                byte_planes.append(plane.tobytes())
            else:
                aux |= 1 << k
        parts.append(_padded(b"".join(byte_planes)))
        rest = mantissa[:, order] >> (8 * d.byte_planes)
        groups = -(-tokens // 8)
        grouped = np.zeros((groups * 8, len(order)), np.int64)
        grouped[:tokens] = rest
        grouped = (
            grouped.reshape(groups, 1, 8, len(order)) >> np.arange(d.bit_planes)[:, None, None]
        )
        planes = ((grouped & 1) << np.arange(8)[:, None]).sum(2).astype(np.uint8)
        parts.append(_padded(planes.tobytes()))
    parts += [
        _padded(np.ascontiguousarray(bits[:, raw_channels].T).tobytes()),
        positions.astype("<u4").tobytes(),
        _padded(bits.ravel()[positions].tobytes()),
    ]
    header = fmt.HEADER.pack(
        mode, aux, index_base, index_width, param_width, 0,
        len(raw_channels), param_base, len(positions), float(step),
    )  # fmt: skip
    section = header + b"".join(parts)
    if len(section) >= fmt.raw_section_bytes(tokens, channels, d.itemsize):
        return bytes(fmt.HEADER_BYTES) + _padded(bits.tobytes())
    return section


def encode_lanes(
    symbol: np.ndarray, index: np.ndarray, bank: fmt.Bank
) -> tuple[np.ndarray, np.ndarray]:
    """Code the symbols ``[T, positions]`` of one segment; table ``index[positions]``.

    Returns the final states uint32 [32] and the words uint16 [n] in the order of reading.
    """
    tokens, positions = symbol.shape
    blocks = -(-positions // fmt.LANES)
    table = np.full(blocks * fmt.LANES, fmt.CONSTANT)
    table[:positions] = index
    padded = np.full((tokens, blocks * fmt.LANES), bank.constant)
    padded[:, :positions] = symbol
    state = np.full(fmt.LANES, fmt.STATE_LOW, np.int64)
    words = []
    for block in reversed(range(blocks)):
        lanes = slice(block * fmt.LANES, (block + 1) * fmt.LANES)
        for t in reversed(range(tokens)):
            freq = bank.freq[table[lanes], padded[t, lanes]].astype(np.int64)
            cum = bank.cum[table[lanes], padded[t, lanes]].astype(np.int64)
            full = state >= freq << (31 - fmt.PROB_BITS)
            words.append((state[full] & 0xFFFF)[::-1])
            state[full] >>= 16
            state = (state // freq << fmt.PROB_BITS) + cum + state % freq
    stream = np.concatenate(words)[::-1] if words else np.empty(0)
    return state.astype(np.uint32), stream.astype(np.uint16)


def decode_lanes(
    states: np.ndarray, words: np.ndarray, index: np.ndarray, tokens: int, bank: fmt.Bank
) -> np.ndarray:
    """Symbols int64 [T, positions] of one segment; the reverse of ``encode_lanes``."""
    positions = len(index)
    blocks = -(-positions // fmt.LANES)
    table = np.full(blocks * fmt.LANES, fmt.CONSTANT)
    table[:positions] = index
    symbol_of_slot = np.stack([np.repeat(np.arange(256), f) for f in bank.freq])
    symbol = np.empty((tokens, blocks * fmt.LANES), np.int64)
    state = states.astype(np.int64)
    if (state >= 1 << 31).any() or (state < fmt.STATE_LOW).any():
        raise SectionError("a lane's state is out of range")
    used = 0
    for block in range(blocks):
        lanes = slice(block * fmt.LANES, (block + 1) * fmt.LANES)
        for t in range(tokens):
            slot = state & (fmt.PROB_SCALE - 1)
            s = symbol_of_slot[table[lanes], slot]
            symbol[t, lanes] = s
            freq, cum = bank.freq[table[lanes], s], bank.cum[table[lanes], s]
            state = freq * (state >> fmt.PROB_BITS) + slot - cum
            empty = state < fmt.STATE_LOW
            taken = int(empty.sum())
            if used + taken > len(words):
                raise SectionError("a segment has too few words")
            state[empty] = state[empty] << 16 | words[used : used + taken]
            used += taken
    if used != len(words):
        raise SectionError("a segment has words left over")
    if (state != fmt.STATE_LOW).any():
        raise SectionError("a lane does not end in the state in which the encoder began")
    return symbol[:, :positions]


def _decode_stripe(section: bytes, like: torch.Tensor, turns: np.ndarray | None) -> torch.Tensor:
    tokens, channels = like.shape
    d = dtype_of(like)
    word = _BITS[d.itemsize]
    if len(section) < fmt.HEADER_BYTES:
        raise SectionError("the section is shorter than its header")
    (
        mode, aux, index_base, index_width, param_width, zero,
        raw_count, param_base, exceptions, step,
    ) = fmt.HEADER.unpack_from(section)  # fmt: skip
    if mode == fmt.RAW:
        if len(section) != fmt.raw_section_bytes(tokens, channels, d.itemsize):
            raise SectionError("a raw section of the wrong length")
        bits = np.frombuffer(section, word, tokens * channels, fmt.HEADER_BYTES)
        return _from_bits(bits.reshape(tokens, channels).copy(), like.dtype)
    fields = (mode, aux, index_width, param_width, zero, param_base, step)
    if not fmt.header_in_range(*fields, d.byte_planes):
        raise SectionError("a field of the section header is out of range")
    if mode == fmt.UNIFORM and aux and turns is None:
        raise SectionError("rotary means without rotary frequencies")

    planes = d.byte_planes - (aux.bit_count() if mode == fmt.LOSSLESS else 0)
    if mode != fmt.LOSSLESS:
        planes = 0
    bit_planes = d.bit_planes if mode == fmt.LOSSLESS else 0

    def offsets(coded: int, words: int) -> tuple[int, ...]:
        return fmt.parts(
            mode, index_width, param_width, tokens, channels, d.itemsize, coded, words, planes,
            bit_planes, raw_count, exceptions,
        )  # fmt: skip

    if offsets(0, 0)[-1] > len(section):
        raise SectionError("the section is too short")
    at = offsets(0, 0)
    index = index_base + _unpack(section[at[0] : at[1]], channels, index_width)
    param = param_base + _unpack(section[at[1] : at[2]], channels, param_width)
    if (index > fmt.RAW_CHANNEL).any():
        raise SectionError("a channel's index is out of range")
    order = np.argsort(index, kind="stable")[: int((index < fmt.TABLES).sum())]
    raw_channels = np.flatnonzero(index == fmt.RAW_CHANNEL)
    if len(raw_channels) != raw_count:
        raise SectionError("the number of raw channels is wrong")
    if offsets(len(order), 0)[-1] > len(section):
        raise SectionError("the section is too short")
    segments = -(-len(order) // fmt.SEGMENT)
    counts = np.frombuffer(section, "<u4", segments, at[3]).astype(np.int64)
    at = offsets(len(order), int(counts.sum()))
    if at[-1] != len(section):
        raise SectionError(f"the section has {len(section)} bytes, its parts {at[-1]}")

    bank = fmt.bank(mode)
    states = np.frombuffer(section, "<u4", fmt.LANES * segments, at[4]).reshape(-1, fmt.LANES)
    words = np.frombuffer(section, "<u2", int(counts.sum()), at[5])
    symbol = np.full((tokens, channels), bank.constant)
    start = 0
    for i in range(segments):
        segment = order[i * fmt.SEGMENT : (i + 1) * fmt.SEGMENT]
        stream = words[start : start + counts[i]]
        start += counts[i]
        symbol[:, segment] = decode_lanes(states[i], stream, index[segment], tokens, bank)

    if mode == fmt.LOSSLESS:
        bits = np.zeros((tokens, channels), word)
        mantissa = np.zeros((tokens, len(order)), np.int64)
        plane_at = at[6]
        for k in range(d.byte_planes):
            if not aux >> k & 1:
                plane = np.frombuffer(section, np.uint8, tokens * len(order), plane_at)
                mantissa |= plane.reshape(tokens, len(order)).astype(np.int64) << (8 * k)
                plane_at += tokens * len(order)
        groups = -(-tokens // 8)
        packed = np.frombuffer(section, np.uint8, groups * bit_planes * len(order), at[7])
        packed = packed.reshape(groups, bit_planes, 1, len(order)).astype(np.int64)
        rest = ((packed >> np.arange(8)[:, None]) & 1) << np.arange(bit_planes)[:, None, None]
        rest = rest.sum(1).reshape(groups * 8, len(order))[:tokens]
        mantissa |= rest << (8 * d.byte_planes)
        s, p = symbol[:, order], param[order]
        distance, sign = (s - 1) >> 1, ((s - 1) & 1) ^ (p & 1)
        mask = (1 << d.exponent_bits) - 1
        exponent = np.where(distance == 0, 0, ((p >> 1) - distance) & mask)
        value = (sign << d.exponent_bits | exponent) << d.mantissa_bits | mantissa
        bits[:, order] = value.astype(word)
    elif mode == fmt.UNIFORM:
        base = _base(param, tokens, turns if aux else None)
        fine = ((symbol - fmt.CENTRE) << fmt.CODE_BITS) + base
        scale = np.float32(step) * np.float32(2.0**-fmt.CODE_BITS)
        bits = _to_dtype(fine.astype(np.float32) * scale, like)
    else:
        maxima = np.frombuffer(section, word, tokens, at[2]).copy()
        if (maxima.view(f"u{maxima.itemsize}") >= d.infinity).any():
            raise fmt.SectionError("a token's maximum is negative or not finite")
        maxima = _from_bits(maxima, like.dtype).float().numpy()
        code = (symbol - fmt.CENTRE + param).astype(np.float32)
        bits = _to_dtype(code / np.float32(aux) * maxima[:, None], like)

    raw = np.frombuffer(section, word, raw_count * tokens, at[8]).reshape(raw_count, tokens)
    bits[:, raw_channels] = raw.T
    positions = np.frombuffer(section, "<u4", exceptions, at[9]).astype(np.int64)
    if exceptions and (positions[-1] >= tokens * channels or (np.diff(positions) <= 0).any()):
        raise SectionError("the positions of the exceptions are out of range or order")
    bits.reshape(-1)[positions] = np.frombuffer(section, word, exceptions, at[10])
    return _from_bits(bits, like.dtype)
