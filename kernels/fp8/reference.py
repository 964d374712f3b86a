"""FP8 pages in plain torch: storing and attention as the definition says. The truth.

A layer's cache is bytes ``[blocks, kv_heads, block_tokens, 2 * head_size]``, of any strides but
with the page of one head contiguous. Scales are float32, of one element for all KV heads or
``[kv_heads]``. Attention reads every token, new ones too, as it is stored.
"""

from __future__ import annotations

import torch

from ..attention import Attention
from .format import CODES, PageFormat


def warm_up() -> None:
    """Nothing is compiled."""


def quantise(x: torch.Tensor, scale: torch.Tensor, code: str) -> torch.Tensor:
    """Codes of ``x / scale``, in torch's dtype of them. ``scale`` is float32 and broadcasts."""
    dtype = CODES[code]
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def store(
    fmt: PageFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write tokens into pages: ``block * block_tokens + token`` is a slot, a negative one none.

    key, value: ``[tokens, kv_heads, head_size]``, of at least as many tokens as there are slots.
    slots: int64.
    """
    count = len(slots)
    k = quantise(key[:count], k_scale.view(-1, 1), fmt.code).view(torch.uint8)
    v = quantise(value[:count], v_scale.view(-1, 1), fmt.code).view(torch.uint8)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, place = divmod(slot, fmt.block_tokens)
        pages = cache[block].view(torch.uint8).flatten(1).clone()  # [H, page_bytes]
        keys, values = pages.split(fmt.values_offset, 1)
        keys.unflatten(1, (fmt.head_size, fmt.block_tokens))[:, :, place] = k[token]
        values.unflatten(1, (fmt.block_tokens, fmt.head_size))[:, place] = v[token]
        cache[block].view(torch.uint8).copy_(pages.view(cache[block].shape))


def read(
    fmt: PageFormat,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of whole blocks as stored: float32 ``[n, kv_heads, block_tokens, head_size]``."""
    pages = cache.view(torch.uint8)[blocks.long()].flatten(2)
    keys, values = pages.contiguous().view(fmt.dtype).float().split(fmt.values_offset, 2)
    keys = keys.unflatten(2, (fmt.head_size, fmt.block_tokens)).transpose(2, 3)
    values = values.unflatten(2, (fmt.block_tokens, fmt.head_size))
    return keys * k_scale.view(-1, 1, 1), values * v_scale.view(-1, 1, 1)


def attend(
    fmt: PageFormat,
    attention: Attention,
    query: torch.Tensor,
    cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    max_query: int,
    max_seq: int,
) -> None:
    """Attention of new tokens over all that is stored of their sequences up to themselves.

    query: ``[tokens, heads, head_size]``, and ``out``; the new tokens of all sequences, one after
    another. block_table: int32 ``[sequences, width]``; query_start: int32 ``[sequences + 1]``;
    seq_lens: int32 ``[sequences]``, the new tokens included; max_query, max_seq: their greatest, on
    the host.
    """
    heads, kv_heads = query.shape[1], cache.shape[1]
    for row in range(len(seq_lens)):
        begin, end = int(query_start[row]), int(query_start[row + 1])
        length = int(seq_lens[row])
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // fmt.block_tokens)]
        k, v = (
            x.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(heads // kv_heads, 0)
            for x in read(fmt, cache, blocks, k_scale, v_scale)
        )  # [heads, length, head_size]
        q = query[begin:end].float().transpose(0, 1)
        logits = q @ k.transpose(1, 2) * attention.scale
        if attention.soft_cap:
            logits = attention.soft_cap * torch.tanh(logits / attention.soft_cap)
        position = torch.arange(length - (end - begin), length, device=q.device)
        distance = torch.arange(length, device=q.device) - position[:, None]
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
