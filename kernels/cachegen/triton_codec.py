"""Encode and decode of cachegen sections with Triton, for all stripes of a chunk at once.

Writes and reads the bytes that ``reference.py`` does. What is one number a stripe or channel is
done by torch on the same device; the host looks twice while encoding (sizes, then the result) and
three times while decoding (indices, the lanes' status, the exceptions' status).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from . import format as fmt
from . import triton_common as common
from . import triton_lanes as lanes
from . import triton_layout as layout
from . import triton_quantise as quantise
from .format import SectionError
from .triton_common import EXACT

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CODED, _PLACED = common.PLAN_CODED.value, common.PLAN_PLACED.value
_STATUS = {
    lanes.STATE_OUT_OF_RANGE: "a lane's state is out of range",
    lanes.WORDS_MISMATCH: "a segment's words do not match its symbols",
}


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernels; any power of two gives the same bytes.

    rows: tokens of a tile, at most 32; columns: channels of a tile; sums: channels of a tile that
    a program takes through all tokens; tables: channels whose tables a program chooses; line:
    elements of everything that has one dimension; streams: programs that copy one segment or the
    exceptions of one stripe.
    """

    rows: int = 8
    columns: int = 128
    sums: int = 32
    tables: int = 8
    line: int = 1024
    streams: int = 4


BLOCKS = Blocks()


def encode(
    kv: torch.Tensor, quantisers: Sequence[fmt.Quantiser], turns: np.ndarray | None = None
) -> list[memoryview]:
    """Sections, in host memory, of contiguous ``kv[stripes, tokens, channels]``.

    quantisers: one a stripe; turns: rotary frequencies uint32 [D / 2] of heads of D channels, or
    None.
    """
    with torch.cuda.device_of(kv):
        return _encode(kv, quantisers, turns)


def decode(
    sections: Sequence[memoryview | bytes], out: torch.Tensor, turns: np.ndarray | None = None
) -> None:
    """Decode one section a stripe into contiguous ``out[stripes, tokens, channels]``.

    Raises SectionError for inconsistent sections.
    """
    with torch.cuda.device_of(out):
        _decode(sections, out, turns)


def _dtype_of(tensor: torch.Tensor) -> fmt.DType:
    return fmt.DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _infinity(d: fmt.DType) -> int:
    """The pattern of infinity: finite magnitudes are below it."""
    return ((1 << d.exponent_bits) - 1) << d.mantissa_bits


def _power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:
        return ((exponent + 127) << 23).to(torch.int32).view(dtype)
    return ((exponent.to(torch.int64) + 1023) << 52).view(dtype)


@functools.cache
def _cosine(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(fmt.cosine().copy()).to(device)


def _turns_on(device: torch.device, turns: np.ndarray | None) -> tuple[torch.Tensor, int]:
    """Frequencies int32 [half] and half; one zero and 1 where there are none."""
    host = np.zeros(1, np.uint32) if turns is None else turns.astype(np.uint32)
    return torch.from_numpy(host.view(np.int32)).to(device), len(host)


def _host_buffer(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _views(data: torch.Tensor) -> dict[int, torch.Tensor]:
    """The same bytes as items of 1, 2 and 4 bytes; their number is a multiple of four."""
    return {size: data.view(dtype) for size, dtype in _TORCH_BITS.items()}


def _sort(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices uint8 in ascending order, the channels int64 in that order; coded channels int32."""
    ascending, order = torch.sort(index, dim=1, stable=True)
    coded = (index < fmt.TABLES).sum(1).to(torch.int32)
    return ascending.to(torch.uint8), order, coded


def _uniform(bits, d, quantisers, turns, largest, modes, params, symbols):
    """UNIFORM symbols and parameters. Sends stripes beyond its range to LOSSLESS in *modes*.

    Returns step float32 [S] and whether the parameters are rotary means, int32 [S].
    """
    stripes, tokens, channels = bits.shape
    device = bits.device

    def each(values, dtype):
        return torch.tensor(list(values), dtype=dtype, device=device)

    exponent = (largest >> 23) - 127
    some = largest > 0
    beyond = some & (exponent.abs() > fmt.EXPONENT_LIMIT) & (modes == fmt.UNIFORM)
    modes[beyond] = fmt.LOSSLESS
    exponent = torch.where(some & ~beyond, exponent, 0)
    wanted = each((q.rotary and turns is not None for q in quantisers), torch.int32)
    frequencies, half = _turns_on(device, turns)
    sums, turned, squares = torch.zeros(3, stripes, channels, dtype=torch.int64, device=device)
    values = {"CODE": d.code, "ITEMSIZE": d.itemsize, "INFINITY": _infinity(d)}
    rotation = {"TURNED": turns is not None}
    quantise.uniform_sums[stripes, triton.cdiv(channels, BLOCKS.sums)](
        bits, modes, wanted, _power_of_two(fmt.FIXED_BITS - exponent, torch.float32), frequencies,
        _cosine(device), sums, turned, squares, tokens, channels, half, **values, **rotation,
        BLOCK_T=BLOCKS.rows, BLOCK_C=BLOCKS.sums, **EXACT,
    )  # fmt: skip

    # Quotients of tensors only: torch may turn a quotient with a Python number into a product.
    def double(number):
        return torch.full((stripes,), float(number), dtype=torch.float64, device=device)

    unit = _power_of_two(exponent - fmt.FIXED_BITS, torch.float64)
    mean_square = squares.sum(1).to(torch.float64) / double(tokens * channels)
    alpha = each((q.alpha for q in quantisers), torch.float64)
    step = (alpha * (mean_square.sqrt() * unit)).to(torch.float32)
    step = torch.where(some & (modes == fmt.UNIFORM), step, 1)
    finer = 1 << (fmt.CODE_BITS - fmt.MEAN_BITS)
    scale = finer * unit / (double(tokens) * step.to(torch.float64))

    def rounded(total, scale):
        mean = (total.to(torch.float64) * scale[:, None] + 0.5).floor()
        return mean.clamp(-fmt.MAX_PARAM, fmt.MAX_PARAM).to(torch.int64)

    plain = rounded(sums, scale)
    rotating = rounded(turned, scale * 2.0**-fmt.TURN_BITS)
    rotary = (rotating * rotating).sum(1) > (plain * plain).sum(1)
    rotary &= (wanted != 0) & (modes == fmt.UNIFORM)
    params.copy_(torch.where(rotary[:, None], rotating, plain))
    rotary = rotary.to(torch.int32)
    factor = torch.full_like(step, 1 << fmt.CODE_BITS) / step
    grid = stripes, triton.cdiv(tokens, BLOCKS.rows), triton.cdiv(channels, BLOCKS.columns)
    quantise.uniform_symbols[grid](
        bits, modes, rotary, factor, each((q.dead_zone for q in quantisers), torch.int32), params,
        frequencies, _cosine(device), symbols, tokens, channels, half, **values, **rotation,
        BLOCK_T=BLOCKS.rows, BLOCK_C=BLOCKS.columns, **EXACT,
    )  # fmt: skip
    return step, rotary


def _encode(kv, quantisers, turns):
    stripes, tokens, channels = kv.shape
    if len(quantisers) != stripes:
        raise ValueError(f"{len(quantisers)} quantisers for {stripes} stripes")
    device, d = kv.device, _dtype_of(kv)
    size = d.itemsize
    bits = kv.view(_TORCH_BITS[size])
    kinds = {q.mode for q in quantisers}
    modes = torch.tensor([q.mode for q in quantisers], dtype=torch.int32, device=device)
    codes = torch.tensor([q.max_code for q in quantisers], dtype=torch.int32, device=device)
    symbols = torch.empty(stripes, tokens, channels, dtype=torch.uint8, device=device)
    params, used = torch.zeros(2, stripes, channels, dtype=torch.int32, device=device)
    maxima = torch.zeros(stripes, tokens, dtype=torch.int32, device=device)
    step = torch.zeros(stripes, dtype=torch.float32, device=device)
    rotary = torch.zeros(stripes, dtype=torch.int32, device=device)
    values = {"CODE": d.code, "ITEMSIZE": size, "INFINITY": _infinity(d)}
    if kinds != {fmt.LOSSLESS}:
        quantise.row_maxima[stripes * tokens,](
            bits, maxima, channels, **values, BLOCK=BLOCKS.line, **EXACT
        )
    if fmt.UNIFORM in kinds:
        largest = maxima.amax(1)
        step, rotary = _uniform(bits, d, quantisers, turns, largest, modes, params, symbols)
    by_sums = stripes, triton.cdiv(channels, BLOCKS.sums)
    if fmt.TOKEN_MAX in kinds:
        quantise.token_max_symbols[by_sums](
            bits, modes, codes, maxima.view(torch.float32), params, symbols, tokens, channels,
            **values, BLOCK_T=BLOCKS.rows, BLOCK_C=BLOCKS.sums, **EXACT,
        )  # fmt: skip
    if kinds & {fmt.LOSSLESS, fmt.UNIFORM}:
        quantise.lossless_symbols[by_sums](
            bits, modes, params, used, symbols, tokens, channels, ITEMSIZE=size,
            EXPONENT_BITS=d.exponent_bits, MANTISSA_BITS=d.mantissa_bits,
            ESCAPES_TOP=d.escapes_top, BLOCK_T=BLOCKS.rows, BLOCK_C=BLOCKS.sums, **EXACT,
        )  # fmt: skip

    index = torch.empty(stripes, channels, dtype=torch.uint8, device=device)
    layout.choose_tables[stripes, triton.cdiv(channels, BLOCKS.tables)](
        symbols, modes, used, layout.cost_rows(size, device), index, tokens, channels,
        RAW_COST=8 * size * fmt.COST_UNIT,
        RAW_COST_LOSSLESS=(8 * size - d.mantissa_bits) * fmt.COST_UNIT, BLOCK_C=BLOCKS.tables,
        **EXACT,
    )  # fmt: skip
    flags = layout.escape_flags(device)
    ends = torch.empty(stripes, tokens, dtype=torch.int64, device=device)
    layout.count_escapes[stripes * tokens,](
        symbols, index, modes, flags, ends, tokens, channels, BLOCK=BLOCKS.line, **EXACT
    )
    ends = ends.cumsum(1)
    ascending, order, coded = _sort(index)
    segments = triton.cdiv(channels, fmt.SEGMENT)
    capacity = tokens * fmt.SEGMENT
    words = torch.empty(stripes, segments, capacity, dtype=torch.int16, device=device)
    counts = torch.empty(stripes, segments, dtype=torch.int32, device=device)
    states = torch.empty(stripes, segments, fmt.LANES, dtype=torch.int32, device=device)
    lanes.encode_segments[stripes, segments](
        symbols, order, ascending, coded, modes, *lanes.encode_entries(device), words, counts,
        states, tokens, channels, segments, **lanes.ONE_WARP,
    )  # fmt: skip

    # Channels without a parameter of their own get the smallest of the others.
    lossless = (modes == fmt.LOSSLESS)[:, None]
    is_coded = index < fmt.TABLES
    counted = is_coded | ((index == fmt.CONSTANT) & ~lossless) | (rotary != 0)[:, None]
    param_base = torch.where(counted, params, 1 << 30).amin(1)
    param_base = torch.where(counted.any(1), param_base, 0)
    params = torch.where(counted, params - param_base[:, None], 0)
    index_base = index.amin(1)
    planes_used = [
        torch.where(is_coded, (used >> (8 * k)) & 255, 0).amax(1) for k in range(d.byte_planes)
    ]
    columns = (
        modes, rotary, step.view(torch.int32), index_base, index.amax(1), coded,
        (index == fmt.RAW_CHANNEL).sum(1), param_base, params.amax(1), ends[:, -1], *planes_used,
    )  # fmt: skip
    summary = torch.cat([torch.stack([c.long() for c in columns], 1), counts.long()], 1).cpu()

    plans = np.zeros((stripes, common.PLAN_WIDTH.value), np.int64)
    starts = np.zeros((stripes, segments), np.int64)
    headers, end = [], 0
    first_count = len(columns)
    for i, row in enumerate(summary.tolist()):
        plan, header = _plan_section(row, quantisers[i], d, tokens, channels, first_count)
        shift = end
        end += plan[common.AT_END.value]
        plan[: common.PARTS] += shift
        plans[i] = plan
        word_counts = np.array(row[first_count:])
        starts[i] = plan[common.AT_STREAM.value] // 2 + np.cumsum(word_counts) - word_counts
        headers.append((shift, header, plan[common.AT_COUNTS.value], word_counts))

    out = torch.zeros(end, dtype=torch.uint8, device=device)
    _write_parts(
        out, bits, d, kinds, torch.from_numpy(plans).to(device),
        torch.from_numpy(starts).to(device), (index - index_base[:, None]).to(torch.int32), params,
        maxima, words, counts, states, order, symbols, index, flags, ends,
    )  # fmt: skip
    for i, (shift, header, _, _) in enumerate(headers):
        if header is None:
            raw = bits[i].reshape(-1).view(torch.uint8)
            out[shift + fmt.HEADER_BYTES :][: len(raw)] = raw
    host = _host_buffer(end, device)
    host.copy_(out)
    memory = host.numpy()
    view = memoryview(memory)
    sections = []
    for (shift, header, counts_at, word_counts), plan in zip(headers, plans, strict=True):
        if header is not None:
            view[shift : shift + fmt.HEADER_BYTES] = header
            used_counts = word_counts[: triton.cdiv(int(plan[_CODED]), fmt.SEGMENT)]
            memory[counts_at:][: 4 * len(used_counts)] = used_counts.astype("<u4").view(np.uint8)
        sections.append(view[shift : int(plan[common.AT_END.value])])
    return sections


def _plan_section(row, quantiser, d, tokens, channels, first_count):
    """Plan of a stripe, offsets from its own start, and its header; no header where it is RAW."""
    (
        mode, aux, step, index_base, index_top, coded, raw_channels, param_base, param_top, escapes,
    ) = row[:10]  # fmt: skip
    byte_planes = bit_planes = 0
    if mode == fmt.LOSSLESS:
        left_out = [used == 0 for used in row[10:first_count]]
        aux = sum(out << k for k, out in enumerate(left_out))
        byte_planes = len(left_out) - sum(left_out)
        bit_planes = d.bit_planes
    elif mode == fmt.TOKEN_MAX:
        aux = quantiser.max_code
    index_width = (index_top - index_base).bit_length()
    param_width = param_top.bit_length()
    offsets = fmt.parts(
        mode, index_width, param_width, tokens, channels, d.itemsize, coded,
        sum(row[first_count:]), byte_planes, bit_planes, raw_channels, escapes,
    )  # fmt: skip
    plan = np.zeros(common.PLAN_WIDTH.value, np.int64)
    whole = fmt.raw_section_bytes(tokens, channels, d.itemsize)
    if offsets[-1] >= whole:
        plan[common.AT_END.value] = whole
        return plan, None
    plan[: common.PARTS] = offsets
    plan[common.PARTS :] = (
        mode, aux, coded, channels - raw_channels, index_width, param_width, index_base,
        param_base, escapes,
    )  # fmt: skip
    bits = step if mode == fmt.UNIFORM else 0
    step = float(np.array(bits, np.int32).view(np.float32))
    header = fmt.HEADER.pack(
        mode, aux, index_base, index_width, param_width, 0, raw_channels, param_base, escapes, step
    )
    return plan, header


def _write_parts(
    out, bits, d, kinds, plans, starts, index_above, params_above, maxima, words, counts, states,
    order, symbols, index, flags, ends,
):  # fmt: skip
    """Everything but headers, word counts and RAW sections."""
    stripes, tokens, channels = bits.shape
    size = d.itemsize
    views = _views(out)
    items = views[size]
    segments, capacity = words.shape[1:]
    packed = triton.cdiv(channels * 16, 32 * BLOCKS.line)
    layout.pack_channels[stripes, packed](
        index_above, params_above, plans, views[4], channels, BLOCK=BLOCKS.line, **EXACT
    )
    layout.write_words[stripes * segments, BLOCKS.streams](
        words, counts, states, starts, plans, views[2], views[4], segments, capacity,
        BLOCK=BLOCKS.line, **EXACT,
    )  # fmt: skip
    if fmt.TOKEN_MAX in kinds:
        layout.write_maxima[stripes, triton.cdiv(tokens, BLOCKS.line)](
            maxima.view(torch.float32), plans, items, tokens, CODE=d.code, ITEMSIZE=size,
            MAX_FINITE=d.max_finite, BLOCK=BLOCKS.line, **EXACT,
        )  # fmt: skip
    if kinds & {fmt.LOSSLESS, fmt.UNIFORM}:
        grid = stripes, triton.cdiv(tokens, 8), triton.cdiv(channels, BLOCKS.columns)
        layout.write_planes[grid](
            bits, order, plans, out, tokens, channels, ITEMSIZE=size,
            MANTISSA_BITS=d.mantissa_bits, BLOCK=BLOCKS.columns, **EXACT,
        )  # fmt: skip
    layout.write_raw_channels[stripes, channels](
        bits, order, plans, items, tokens, channels, ITEMSIZE=size, BLOCK=BLOCKS.line, **EXACT
    )
    layout.write_escapes[stripes * tokens,](
        symbols, index, flags, ends, plans, bits, views[4], items, tokens, channels,
        ITEMSIZE=size, BLOCK=BLOCKS.line, **EXACT,
    )  # fmt: skip


@dataclass(frozen=True)
class _Fields:
    """The header of a section that is not RAW."""

    mode: int
    aux: int
    index_base: int
    index_width: int
    param_width: int
    raw_channels: int
    param_base: int
    exceptions: int
    step: float

    def parts(self, d, tokens, channels, coded, words):
        lossless = self.mode == fmt.LOSSLESS
        return fmt.parts(
            self.mode, self.index_width, self.param_width, tokens, channels, d.itemsize, coded,
            words, d.byte_planes - self.aux.bit_count() if lossless else 0,
            d.bit_planes if lossless else 0, self.raw_channels, self.exceptions,
        )  # fmt: skip


def _read_header(section, d, tokens, channels, turned) -> _Fields | None:
    """None for RAW. Raises SectionError where the header contradicts itself or the length."""
    if len(section) < fmt.HEADER_BYTES:
        raise SectionError("the section is shorter than its header")
    (
        mode, aux, index_base, index_width, param_width, zero, raw_channels, param_base,
        exceptions, step,
    ) = fmt.HEADER.unpack_from(section)  # fmt: skip
    if mode == fmt.RAW:
        if len(section) != fmt.raw_section_bytes(tokens, channels, d.itemsize):
            raise SectionError("a raw section of the wrong length")
        return None
    ranged = mode, aux, index_width, param_width, zero, param_base, step, d.byte_planes
    if not fmt.header_in_range(*ranged):
        raise SectionError("a field of the section header is out of range")
    if mode == fmt.UNIFORM and aux and not turned:
        raise SectionError("rotary means without rotary frequencies")
    fields = _Fields(
        mode, aux, index_base, index_width, param_width, raw_channels, param_base, exceptions, step
    )
    if fields.parts(d, tokens, channels, 0, 0)[-1] > len(section):
        raise SectionError("the section is too short")
    return fields


def _decode(sections, out, turns):
    stripes, tokens, channels = out.shape
    if len(sections) != stripes:
        raise SectionError(f"{len(sections)} sections for {stripes} stripes")
    device, d = out.device, _dtype_of(out)
    size = d.itemsize
    bits = out.view(_TORCH_BITS[size])
    fields = [_read_header(s, d, tokens, channels, turns is not None) for s in sections]
    if any(len(s) % 4 for s in sections):
        raise SectionError("the length of a section is no multiple of four")
    lengths = [len(s) for s in sections]
    starts = np.cumsum([0, *lengths])
    host = _host_buffer(int(starts[-1]), device)
    memory = host.numpy()
    for section, start, length in zip(sections, starts[:-1].tolist(), lengths, strict=True):
        memory[start : start + length] = np.frombuffer(section, np.uint8)
    data = host.to(device, non_blocking=True)
    views = _views(data)

    plans = np.zeros((stripes, common.PLAN_WIDTH.value), np.int64)
    for i, f in enumerate(fields):
        if f is not None:
            plans[i, : common.PARTS] = f.parts(d, tokens, channels, 0, 0)
            plans[i, : common.PARTS] += starts[i]
            plans[i, common.PARTS :] = (
                f.mode, f.aux, 0, 0, f.index_width, f.param_width, f.index_base, f.param_base,
                f.exceptions,
            )  # fmt: skip
    index, params = torch.zeros(2, stripes, channels, dtype=torch.int32, device=device)
    layout.unpack_channels[stripes, triton.cdiv(channels, BLOCKS.line)](
        data,
        torch.from_numpy(plans).to(device),
        index,
        params,
        channels,
        BLOCK=BLOCKS.line,
        **EXACT,
    )
    ascending, order, coded = _sort(index)
    raw = (index == fmt.RAW_CHANNEL).sum(1)
    found = torch.stack([index.amax(1).long(), coded.long(), raw.long()], 1).tolist()

    segments = triton.cdiv(channels, fmt.SEGMENT)
    word_at = np.zeros((stripes, segments), np.int64)
    counts = np.zeros((stripes, segments), np.int32)
    states = np.zeros((stripes, segments, fmt.LANES), np.uint32)
    steps = np.zeros(stripes, np.float32)
    for i, f in enumerate(fields):
        if f is None:
            coded[i] = 0
            pixels = bits[i].reshape(-1).view(torch.uint8)
            pixels.copy_(data[starts[i] + fmt.HEADER_BYTES :][: len(pixels)])
            continue
        highest, coded_here, raw_here = found[i]
        section = memory[starts[i] : starts[i + 1]]
        if highest > fmt.RAW_CHANNEL:
            raise SectionError(f"section {i}: a channel's index is out of range")
        if raw_here != f.raw_channels:
            raise SectionError(f"section {i}: the number of raw channels is wrong")
        offsets = f.parts(d, tokens, channels, coded_here, 0)
        if offsets[-1] > len(section):
            raise SectionError(f"section {i}: the section is too short")
        n = triton.cdiv(coded_here, fmt.SEGMENT)
        word_counts = section[offsets[common.AT_COUNTS.value] :][: 4 * n].view("<u4")
        total = int(word_counts.sum(dtype=np.int64))
        offsets = f.parts(d, tokens, channels, coded_here, total)
        if offsets[-1] != len(section):
            raise SectionError(f"section {i}: the section's length does not match its parts")
        if f.mode == fmt.TOKEN_MAX:
            maxima = section[offsets[common.AT_MAXIMA.value] :][: tokens * size].view(f"<u{size}")
            if (maxima >= d.infinity).any():
                raise SectionError("a token's maximum is negative or not finite")
        plans[i, : common.PARTS] = offsets
        plans[i, : common.PARTS] += starts[i]
        plans[i, _CODED], plans[i, _PLACED] = coded_here, channels - raw_here
        counts[i, :n] = word_counts
        ends = np.cumsum(word_counts, dtype=np.int64)
        word_at[i, :n] = plans[i, common.AT_STREAM.value] // 2 + ends - word_counts
        final = section[offsets[common.AT_STATES.value] :][: 4 * n * fmt.LANES]
        states[i, :n] = final.view("<u4").reshape(n, fmt.LANES)
        steps[i] = np.float32(f.step) * np.float32(2.0**-fmt.CODE_BITS)

    def upload(array):
        return torch.from_numpy(array).to(device)

    plan, modes = upload(plans), upload(plans[:, common.PLAN_MODE.value].astype(np.int32))
    symbols = torch.empty(stripes, tokens, channels, dtype=torch.uint8, device=device)
    status = torch.zeros(stripes, segments, dtype=torch.int32, device=device)
    lanes.decode_segments[stripes, segments](
        views[2], upload(word_at), upload(counts), upload(states.view(np.int32)), ascending, coded,
        modes, lanes.decode_entries(device), symbols, status, tokens, channels, segments,
        **lanes.ONE_WARP,
    )  # fmt: skip
    slot = torch.empty(stripes, channels, dtype=torch.int32, device=device)
    places = torch.arange(channels, dtype=torch.int32, device=device).expand(stripes, channels)
    slot.scatter_(1, order, places)
    kinds = {f.mode for f in fields if f is not None}
    if kinds & {fmt.UNIFORM, fmt.TOKEN_MAX}:
        frequencies, half = _turns_on(device, turns)
        grid = stripes, triton.cdiv(tokens, BLOCKS.rows), triton.cdiv(channels, BLOCKS.columns)
        quantise.restore_values[grid](
            symbols, slot, plan, upload(steps), params, frequencies, _cosine(device), views[size],
            bits, tokens, channels, half, CODE=d.code, ITEMSIZE=size, MAX_FINITE=d.max_finite,
            TURNED=turns is not None, BLOCK_T=BLOCKS.rows, BLOCK_C=BLOCKS.columns, **EXACT,
        )  # fmt: skip
    if fmt.LOSSLESS in kinds:
        grid = stripes, triton.cdiv(tokens, 8), triton.cdiv(channels, BLOCKS.columns)
        quantise.restore_lossless[grid](
            symbols, slot, plan, params, data, views[size], bits, tokens, channels, ITEMSIZE=size,
            EXPONENT_BITS=d.exponent_bits, MANTISSA_BITS=d.mantissa_bits, BLOCK_C=BLOCKS.columns,
            **EXACT,
        )  # fmt: skip
    misplaced = torch.zeros(stripes, dtype=torch.int32, device=device)
    if any(f is not None and f.exceptions for f in fields):
        layout.restore_escapes[stripes, BLOCKS.streams](
            views[4], views[size], plan, bits, misplaced, tokens, channels, ITEMSIZE=size,
            BLOCK=BLOCKS.line, **EXACT,
        )  # fmt: skip
    worst = torch.stack([status.amax(), misplaced.amax()]).tolist()
    if worst[0]:
        raise SectionError(_STATUS[worst[0]])
    if worst[1]:
        raise SectionError("the positions of the exceptions are out of range or order")
