"""KIVI pages in plain torch: pack, unpack and attention as the definition says. The truth.

Tensors of exact tokens are ``[slots, block_tokens, kv_heads, head_size]`` in the model's dtype, a
layer's cache is bytes ``[blocks, kv_heads, block_tokens, token_bytes]``, of any strides but with
the page of one head contiguous.

Rounding. With ``fit="minmax"`` every operation is one in the model's dtype, rounded to it, as the
published kernels do them: ``m = min``, ``s = (max - m) / (2**bits - 1)``,
``code = round(clamp((x - m) / s, 0, 2**bits - 1))``, ties to even. Where the published method
divides by zero, in a group whose values are all equal, the code is zero. With ``fit="unbiased"``
arithmetic is in float32. Scale and minimum are fitted to the codes by least squares, and the codes
are found again after both are rounded to the model's dtype. Then the scale is stretched, for the
same codes, so that the error is uncorrelated with the codes' values: least squares shrinks values,
and attention, which averages over tokens, would not average that away. Unpacking,
``code * s + m``, is in float32.
"""

from __future__ import annotations

import torch

from ..attention import Attention
from .format import (
    FIRST_RMS,
    FIRST_RMS_4BIT,
    FIT_LIMIT,
    FIT_ROUNDS,
    FIT_SHRINK,
    ROWS,
    PageFormat,
    rotation,
)


def warm_up() -> None:
    """Nothing is compiled."""


def pages_of(fmt: PageFormat, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A copy of the pages ``uint8 [n, kv_heads, page_bytes]`` of these blocks."""
    return cache.view(torch.uint8)[blocks.long()].flatten(2)


def pack(
    fmt: PageFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Write pages: block ``blocks[i]`` of ``cache`` from the exact tokens in slot ``slots[i]``.

    keys, values: exact tokens ``[slots, block_tokens, kv_heads, head_size]``.
    fills: how many of the block's tokens there are; firsts: whether the block is the first of its
    sequence and has the sinks. All int32 ``[n]``.
    """
    k = keys[slots.long()].transpose(1, 2)  # [n, H, B, D]
    v = values[slots.long()].transpose(1, 2)
    token = torch.arange(fmt.block_tokens)
    filled = (token < fills[:, None])[:, None].expand(k.shape[:3])  # [n, H, B]
    sink = (token < fmt.sinks) & (firsts[:, None] != 0)
    sink = filled & sink[:, None]

    parts = {}
    grouped = k.unflatten(2, (fmt.key_groups, fmt.group))  # [n, H, g, G, D]
    counted = (filled & ~sink).unflatten(2, (fmt.key_groups, fmt.group))[..., None]
    counted = counted.expand(grouped.shape)
    boosted = _boosted(fmt, grouped, counted)  # [n, H, D], which channels have four bits
    top = torch.where(boosted, 15, 3) if fmt.key_bits == 2 else torch.full_like(boosted, 15).long()
    top = torch.full_like(top, 15) if fmt.key_bits == 4 else top
    codes, scale, low = _quantise(fmt, grouped, counted, top[:, :, None, None], 3)
    parts["key_scale"], parts["key_min"] = scale.squeeze(3), low.squeeze(3)
    codes = codes.flatten(2, 3).transpose(2, 3)  # [n, H, D, B]
    four = (top == 15)[..., None]
    parts["key_codes"] = _plane(torch.where(four, codes >> 2, codes))
    if fmt.extra_rows:
        rows = torch.sort(top == 15, dim=-1, descending=True, stable=True).indices
        rows = rows[..., : fmt.extra_rows]  # ascending channels
        extra = codes.gather(2, rows[..., None].expand(*rows.shape, fmt.block_tokens))
        parts["key_extra"] = _plane(extra & 3)
        if fmt.boosted:
            parts["boosted"] = rows.to(torch.uint8)
    parts["sink_keys"] = torch.where(sink[..., None], k, 0)[:, :, : fmt.sinks]
    if fmt.rotated:
        parts["sink_values"] = torch.where(sink[..., None], v, 0)[:, :, : fmt.sinks]
        codes, parts["value_scale"] = _quantise_rotated(fmt, v, filled & ~sink)
    else:
        codes, parts["value_scale"], parts["value_min"] = _quantise_values(fmt, v, filled)
    if fmt.value_bits == 4:
        parts["value_codes"], parts["value_extra"] = _plane(codes >> 2), _plane(codes & 3)
    else:
        parts["value_codes"] = _plane(codes)

    pages = torch.zeros(*k.shape[:2], fmt.page_bytes, dtype=torch.uint8)
    for name, part in parts.items():
        offset, length = fmt.sections[name]
        if length:
            pages[..., offset : offset + length] = part.contiguous().flatten(2).view(torch.uint8)
    cache.view(torch.uint8)[blocks.long()] = pages.unflatten(2, (fmt.block_tokens, -1))


def _quantise_values(
    fmt: PageFormat, v: torch.Tensor, filled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``[n, H, B, D]``, scales and minima ``[n, H, groups, B]`` of V."""
    pad = fmt.value_groups * fmt.value_group - fmt.head_size
    grouped = torch.nn.functional.pad(v, (0, pad)).unflatten(3, (fmt.value_groups, -1))
    real = torch.arange(fmt.head_size + pad) < fmt.head_size
    counted = filled[..., None, None] & real.view(fmt.value_groups, -1)  # [n, H, B, g, G]
    levels = torch.tensor(2**fmt.value_bits - 1)
    codes, scale, low = _quantise(fmt, grouped, counted, levels, 4)
    scale, low = scale.squeeze(4).transpose(2, 3), low.squeeze(4).transpose(2, 3)
    return codes.flatten(3)[..., : fmt.head_size], scale, low


def _quantise_rotated(
    fmt: PageFormat, v: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[n, H, B, D]`` and scales ``[n, H, 1, B]`` of rotated V, of what is counted."""
    y = torch.where(counted[..., None], v.float(), 0) @ rotation(fmt.head_size)
    middle = (2**fmt.value_bits - 1) / 2

    def code(scale: torch.Tensor) -> torch.Tensor:
        ratio = y / torch.where(scale > 0, scale, 1) + middle
        codes = ratio.clamp(0, 2 * middle).round()
        return torch.where(scale > 0, codes, 0)

    first = FIRST_RMS if fmt.value_bits == 2 else FIRST_RMS_4BIT
    scale = (y * y).mean(-1, keepdim=True).sqrt() * first
    for _ in range(FIT_ROUNDS):
        c = code(scale) - middle
        scale = (c * y).sum(-1, keepdim=True) / (c * c).sum(-1, keepdim=True)
    scale = scale.to(fmt.dtype).float()
    codes = code(scale)
    product = ((codes - middle) * y).sum(-1, keepdim=True)
    stretched = (y * y).sum(-1, keepdim=True) / torch.where(product > 0, product, 1)
    scale = torch.where((product > 0) & (scale > 0), stretched, 0).to(fmt.dtype)
    codes = torch.where(scale > 0, codes, 0)
    return codes.to(torch.int32), scale.transpose(2, 3)


def _boosted(fmt: PageFormat, grouped: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The channels ``[n, H, D]`` whose ranges, squared and summed over the groups, are widest."""
    x = grouped.float()
    low = torch.where(counted, x, torch.inf).amin(3)
    high = torch.where(counted, x, -torch.inf).amax(3)
    width = torch.where(high >= low, high - low, 0)
    total = (width * width).sum(2)
    order = torch.sort(total, dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros(total.shape, dtype=torch.bool)
    return chosen.scatter(-1, order[..., : fmt.boosted], True)


def _quantise(
    fmt: PageFormat, x: torch.Tensor, counted: torch.Tensor, levels: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of ``x`` and the scale and minimum of each group along ``dim``, of what is counted."""
    low = torch.where(counted, x, torch.inf).amin(dim, keepdim=True)
    high = torch.where(counted, x, -torch.inf).amax(dim, keepdim=True)
    some = high >= low
    low, high = torch.where(some, low, 0), torch.where(some, high, 0)
    if fmt.fit == "minmax":
        low, high = low.to(x.dtype), high.to(x.dtype)
        scale = (high - low) / levels.to(x.dtype)
        return _codes(x, counted, scale, low, levels), scale, low
    x = torch.where(counted, x.float(), 0)
    low, high = low.float(), high.float()
    half = (high - low) * (FIT_SHRINK / 2)
    scale, low = half * 2 / levels, (high + low) / 2 - half
    count = counted.sum(dim, keepdim=True).float().clamp_min(1)
    x_mean = x.sum(dim, keepdim=True) / count
    for _ in range(FIT_ROUNDS):
        codes = _codes(x, counted, scale, low, levels).float()
        code_mean = codes.sum(dim, keepdim=True) / count
        spread = torch.where(counted, codes - code_mean, 0)
        variance = (spread * spread).sum(dim, keepdim=True)
        slope = (spread * x).sum(dim, keepdim=True) / variance
        fits = (variance > 0) & (slope > 0)
        scale = torch.where(fits, slope, scale)
        low = torch.where(fits, x_mean - slope * code_mean, low)
    scale, low = scale.to(fmt.dtype), low.to(fmt.dtype)
    codes = _codes(x, counted, scale.float(), low.float(), levels)
    c = codes.float()
    code_mean = c.sum(dim, keepdim=True) / count
    spread = torch.where(counted, x - x_mean, 0)
    product = (spread * (c - code_mean)).sum(dim, keepdim=True)
    stretched = (spread * spread).sum(dim, keepdim=True) / product
    fits = (product > 0) & (stretched < FIT_LIMIT * scale.float())
    scale = torch.where(fits, stretched, scale.float())
    low = torch.where(fits, x_mean - stretched * code_mean, low.float())
    scale, low = scale.to(fmt.dtype), low.to(fmt.dtype)
    return codes, scale, low


def _codes(
    x: torch.Tensor,
    counted: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    levels: torch.Tensor,
) -> torch.Tensor:
    """int32 codes; zero where nothing is counted and where the scale is zero."""
    ratio = (x - low) / torch.where(scale > 0, scale, 1)
    codes = torch.minimum(ratio.clamp_min(0), levels.to(x.dtype)).round()
    return torch.where(counted & (scale > 0), codes, 0).to(torch.int32)


def _plane(codes: torch.Tensor) -> torch.Tensor:
    """Words ``int32 [..., rows / 16, columns]`` of codes of two bits ``[..., rows, columns]``."""
    split = codes.unflatten(-2, (-1, ROWS)).long()
    words = (split << (2 * torch.arange(ROWS))[:, None]).sum(-2)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def _unplane(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_plane``, int32."""
    split = words[..., None, :] >> (2 * torch.arange(ROWS, dtype=torch.int32))[:, None]
    return (split & 3).flatten(-3, -2)


def unpack(
    fmt: PageFormat,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    fills: torch.Tensor,
    firsts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """The first ``fills[i]`` tokens of block ``blocks[i]``, rounded to the model's dtype, into slot
    ``slots[i]`` of ``keys`` and ``values``. Arguments as in ``pack``.
    """
    k, v = dequantise(fmt, cache, blocks, firsts)  # [n, H, B, D]
    for i, slot in enumerate(slots.tolist()):
        fill = int(fills[i])
        keys[slot, :fill] = k[i, :, :fill].transpose(0, 1).to(keys.dtype)
        values[slot, :fill] = v[i, :, :fill].transpose(0, 1).to(values.dtype)


def dequantise(
    fmt: PageFormat, cache: torch.Tensor, blocks: torch.Tensor, firsts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of whole blocks as stored: float32 ``[n, kv_heads, block_tokens, head_size]``."""
    pages = pages_of(fmt, cache, blocks)
    part = {name: fmt.section(pages, name) for name in fmt.sections}

    codes = _unplane(part["key_codes"])  # [n, H, D, B]
    if fmt.extra_rows:
        extra = _unplane(part["key_extra"])
        if fmt.key_bits == 4:
            codes = 4 * codes + extra
        else:
            rows = part["boosted"].long()[..., None].expand(extra.shape)
            codes = codes.scatter(2, rows, 4 * codes.gather(2, rows) + extra)
    scale = part["key_scale"].float().repeat_interleave(fmt.group, 2)  # [n, H, B, D]
    low = part["key_min"].float().repeat_interleave(fmt.group, 2)
    k = codes.transpose(2, 3) * scale + low
    if fmt.sinks:
        sink = firsts.bool()[:, None, None, None]
        head = torch.where(sink, part["sink_keys"].float(), k[:, :, : fmt.sinks])
        k = torch.cat([head, k[:, :, fmt.sinks :]], 2)

    codes = _unplane(part["value_codes"])  # [n, H, B, D]
    if fmt.value_bits == 4:
        codes = 4 * codes + _unplane(part["value_extra"])
    if fmt.rotated:
        scale = part["value_scale"].float().transpose(2, 3)
        v = (codes - (2**fmt.value_bits - 1) / 2) * scale @ rotation(fmt.head_size)
        if fmt.sinks:
            head = torch.where(sink, part["sink_values"].float(), v[:, :, : fmt.sinks])
            v = torch.cat([head, v[:, :, fmt.sinks :]], 2)
        return k, v
    group = torch.arange(fmt.head_size) // fmt.value_group
    scale = part["value_scale"].float()[:, :, group].transpose(2, 3)
    low = part["value_min"].float()[:, :, group].transpose(2, 3)
    return k, codes * scale + low


def attend(
    fmt: PageFormat,
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    slot_of_block: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
) -> None:
    """Attention of new tokens over what is stored of their sequence, and over each other, exactly.

    query: ``[tokens, heads, head_size]``, and ``out``; key, value: ``[tokens, kv_heads,
    head_size]``, the new tokens of all sequences, one after another.
    exact_keys, exact_values: the residual pool, ``[slots, block_tokens, kv_heads, head_size]``.
    slot_of_block: int32 ``[blocks]``, a block's slot, or -1 where it is packed in ``cache``.
    block_table: int32 ``[sequences, width]``; query_start: int32 ``[sequences + 1]``; seq_lens:
    int32 ``[sequences]``, the new tokens included; max_query, max_seq: their greatest, on the host.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    for row in range(len(seq_lens)):
        begin, end = int(query_start[row]), int(query_start[row + 1])
        length = int(seq_lens[row])
        history = length - (end - begin)
        k, v = _history(
            fmt, cache, exact_keys, exact_values, slot_of_block, block_table[row], history
        )
        k = torch.cat([k, key[begin:end].float().transpose(0, 1)], 1)  # [H, length, D]
        v = torch.cat([v, value[begin:end].float().transpose(0, 1)], 1)
        q = query[begin:end].float().transpose(0, 1)  # [heads, new, D]
        k = k.repeat_interleave(heads // kv_heads, 0)
        v = v.repeat_interleave(heads // kv_heads, 0)
        logits = q @ k.transpose(1, 2) * attention.scale
        if attention.soft_cap:
            logits = attention.soft_cap * torch.tanh(logits / attention.soft_cap)
        distance = torch.arange(length) - torch.arange(history, length)[:, None]
        if attention.slopes is not None:
            logits = logits + attention.slopes.float()[:, None, None] * distance
        hidden = distance > 0
        if attention.window:
            hidden = hidden | (distance <= -attention.window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if attention.sinks is not None:
            sink = attention.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
            weights = torch.cat([logits, sink], 2).softmax(2)[..., :-1]
        else:
            weights = logits.softmax(2)
        out[begin:end] = (weights @ v).transpose(0, 1).to(out.dtype)


def _history(
    fmt: PageFormat,
    cache: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    slot_of_block: torch.Tensor,
    table: torch.Tensor,
    history: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first ``history`` tokens as stored, float32 ``[kv_heads, history, D]``."""
    count = -(-history // fmt.block_tokens)
    blocks = table[:count].long()
    firsts = torch.arange(count) == 0
    k, v = dequantise(fmt, cache, blocks, firsts)  # [n, H, B, D]
    slots = slot_of_block[blocks].long()
    exact = (slots >= 0).nonzero().flatten()
    k[exact] = exact_keys[slots[exact]].transpose(1, 2).float()
    v[exact] = exact_values[slots[exact]].transpose(1, 2).float()
    k = k.transpose(0, 1).flatten(1, 2)[:, :history]
    return k, v.transpose(0, 1).flatten(1, 2)[:, :history]
