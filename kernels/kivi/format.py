"""Bytes of a KIVI page: the one place that knows where anything lies.

A page is one block of ``block_tokens`` tokens of one KV head. KIVI (Liu et al., ICML 2024) codes K
per channel in groups along tokens and V per token in groups along channels, each group with its
scale ``s`` and minimum ``m`` in the model's dtype: ``value = code * s + m``.

Every code takes two bits in a *plane*. A plane of ``rows x columns`` codes is an array of
little-endian 32-bit words ``[rows / 16, columns]``: bits ``2 i`` and ``2 i + 1`` of word ``[r, c]``
are row ``16 r + i`` of column ``c``. The rows are what attention sums over, so that one shift
unpacks neighbouring columns: K has channels as rows and tokens as columns, V the reverse. A code of
four bits is ``4 * high + low``: ``high`` in the first plane, ``low`` in a second one. K's second
plane holds all channels (4-bit K), the page's own choice of ``boosted`` channels in ascending
order, or none; V's holds all tokens (4-bit V) or none.

Sections of a page, in this order, without gaps, then zeros up to ``token_bytes`` a token. ``S`` is
``sinks``, ``D`` the head size, ``B`` the block's tokens, ``G`` the group:

    key_codes       u32   [D / 16, B]
    key_extra       u32   [extra rows / 16, B]
    value_codes     u32   [B / 16, D]
    value_extra     u32   [B / 16, D]             4-bit V only
    key_scale       dtype [B / G, D]
    key_min         dtype [B / G, D]
    value_scale     dtype [value groups, B]
    value_min       dtype [value groups, B]
    sink_keys       dtype [S, D]
    sink_values     dtype [S, D]                  rotated V only
    boosted         u8    [boosted]               boosted channels, if K has two bits

The first ``sinks`` tokens of a sequence keep their K exact in ``sink_keys`` of the sequence's first
block; they take no part in their group's scale, and their codes are zero. In other blocks
``sink_keys`` is zero.

V may be *rotated*: a token's V is multiplied by ``rotation(D)``, an orthogonal matrix that spreads
outliers over its channels, and then coded symmetrically with one scale a token and head,
``value = (code - (2**bits - 1) / 2) * scale``. There are no minima then, and the first ``sinks``
tokens keep V exact as well; their scales are zero. What attention sums of rotated V is turned back
once, by the same matrix.

What is not filled is zero: codes, scales and minima of tokens at and after the fill count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # sizes are asked for where importing torch would take longer than the answer
    import torch

ROWS = 16
"""Rows of a plane that share a word."""

GROUPS = (32, 64, 128)
BITS = (2, 4)
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value, by the names of ``DTYPES``, those of torch that scales may have."""

FITS = ("minmax", "unbiased")

FIT_SHRINK = 0.9
"""``unbiased``: the first range, as a share of the group's, about its middle."""

FIT_ROUNDS = 2
"""``unbiased``: how often scale and minimum are fitted to the codes, and the codes to them."""

FIT_LIMIT = 1.5
"""``unbiased``: a scale that would grow by this factor or more is left as it was fitted."""

FIRST_RMS = 0.9957
"""Rotated V of 2 bits: the first scale, in root mean squares; the best for a Gaussian."""

FIRST_RMS_4BIT = 0.3352
"""The same for 4 bits."""


def __getattr__(name: str) -> Any:
    if name == "DTYPES":
        import torch

        return tuple(getattr(torch, dtype) for dtype in ITEMSIZES)
    raise AttributeError(name)


def rotation(head_size: int) -> torch.Tensor:
    """The symmetric orthogonal matrix ``[head_size, head_size]`` that rotates V.

    Hadamard matrices of the largest power of two that divides the head size, along the diagonal.
    """
    import torch

    power = head_size & -head_size
    index = torch.arange(head_size)
    within, block = index % power, index // power
    odd = torch.zeros(head_size, head_size, dtype=torch.int64)
    both = within[:, None] & within
    while both.any():
        odd, both = odd ^ (both & 1), both >> 1
    signs = (1 - 2 * odd).float() * (block[:, None] == block)
    return signs / power**0.5


@dataclass(frozen=True)
class PageFormat:
    """Everything that the bytes of a page depend on. Raises ValueError for what has no page."""

    block_tokens: int
    head_size: int
    dtype: torch.dtype
    """The model's, of scales, minima, sinks and exact tokens. Where only sizes are asked for, its
    name will do."""
    group: int = 32
    """Tokens of a group of K, and channels of a group of V (its last one may be shorter)."""
    key_bits: int = 2
    value_bits: int = 2
    boosted: int = 0
    """K channels of a page, its widest, with four bits; a multiple of 16."""
    sinks: int = 0
    """Tokens at the start of a sequence whose K stay exact."""
    fit: str = "minmax"
    """How scales are found: ``minmax`` as published, or ``unbiased``, by least squared error and
    without what that shrinks values by."""
    rotated: bool = False
    """Whether V is rotated and coded symmetrically, with one group a token."""

    def __post_init__(self) -> None:
        if self._dtype_name not in ITEMSIZES:
            raise ValueError(f"dtype is {self._dtype_name}; choose from {', '.join(ITEMSIZES)}")
        for name, choices in (
            ("group", GROUPS),
            ("key_bits", BITS),
            ("value_bits", BITS),
            ("head_size", HEAD_SIZES),
            ("fit", FITS),
        ):
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name} is {value}; choose from {listed}")
        if self.block_tokens < 1 or self.block_tokens % self.group:
            raise ValueError(
                f"group is {self.group}, which does not divide the block of "
                f"{self.block_tokens} tokens"
            )
        if self.boosted % ROWS or not 0 <= self.boosted <= self.head_size:
            raise ValueError(
                f"boosted is {self.boosted}; choose a multiple of {ROWS} up to the head size, "
                f"{self.head_size}"
            )
        if self.boosted and self.key_bits != 2:
            raise ValueError(f"boosted is {self.boosted}, and K has {self.key_bits} bits already")
        if not 0 <= self.sinks <= self.group:
            raise ValueError(f"sinks is {self.sinks}; choose from 0 to the group, {self.group}")

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def key_groups(self) -> int:
        """Groups of K's tokens in a page."""
        return self.block_tokens // self.group

    @cached_property
    def value_group(self) -> int:
        """Channels of a group of V."""
        return self.head_size if self.rotated else min(self.group, self.head_size)

    @cached_property
    def value_groups(self) -> int:
        """Groups of V's channels, the last perhaps shorter."""
        return -(-self.head_size // self.value_group)

    @cached_property
    def extra_rows(self) -> int:
        """Channels in K's second plane."""
        return self.head_size if self.key_bits == 4 else self.boosted

    def _lengths(self, tokens: int) -> dict[str, int]:
        size, item = self.head_size, ITEMSIZES[self._dtype_name]
        plane = size * tokens // 4
        return {
            "key_codes": plane,
            "key_extra": self.extra_rows * tokens // 4,
            "value_codes": plane,
            "value_extra": plane if self.value_bits == 4 else 0,
            "key_scale": tokens // self.group * size * item,
            "key_min": tokens // self.group * size * item,
            "value_scale": self.value_groups * tokens * item,
            "value_min": 0 if self.rotated else self.value_groups * tokens * item,
            "sink_keys": self.sinks * size * item,
            "sink_values": self.sinks * size * item if self.rotated else 0,
            "boosted": self.boosted,
        }

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Offset and length in bytes of each section of a page."""
        found, offset = {}, 0
        for name, length in self._lengths(self.block_tokens).items():
            found[name] = (offset, length)
            offset += length
        return found

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Bytes of each section that is there, and of the items whose bytes are alike; then of the
        zeros at the end."""
        found = [
            (length, 1 if name.endswith(("codes", "extra", "boosted")) else self.dtype.itemsize)
            for name, (_, length) in self.sections.items()
            if length
        ]
        rest = self.page_bytes - sum(length for length, _ in found)
        return (*found, (rest, 1)) if rest else tuple(found)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a page, a token: what vLLM takes as ``state_content_bytes``.

        Blocks of 128 tokens and any multiple have the same, since vLLM asks for a token's bytes
        before it has settled on a block.
        """
        tokens = min(self.block_tokens, 128)
        return math.ceil(sum(self._lengths(tokens).values()) / tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of the page of one head."""
        return self.token_bytes * self.block_tokens

    @property
    def bits_per_value(self) -> float:
        """Bits of a page divided by its values, everything counted."""
        return self.token_bytes * 8 / (2 * self.head_size)

    @property
    def exact_token_bytes(self) -> int:
        """Bytes of K and V of one token of one head as the model has them."""
        return 2 * self.head_size * ITEMSIZES[self._dtype_name]

    def section(self, page: torch.Tensor, name: str) -> torch.Tensor:
        """A view of one section of contiguous pages ``uint8 [..., page_bytes]``, in its shape."""
        import torch

        offset, length = self.sections[name]
        tokens, size = self.block_tokens, self.head_size
        data = page[..., offset : offset + length]
        shape = {
            "key_codes": (size // ROWS, tokens),
            "key_extra": (self.extra_rows // ROWS, tokens),
            "value_codes": (tokens // ROWS, size),
            "value_extra": (tokens // ROWS if length else 0, size),
            "key_scale": (self.key_groups, size),
            "key_min": (self.key_groups, size),
            "value_scale": (self.value_groups, tokens),
            "value_min": (self.value_groups if length else 0, tokens),
            "sink_keys": (self.sinks, size),
            "sink_values": (self.sinks if length else 0, size),
            "boosted": (self.boosted,),
        }[name]
        if name == "boosted":
            kind = torch.uint8
        else:
            kind = torch.int32 if name.endswith(("codes", "extra")) else self.dtype
        return data.contiguous().view(kind).view(*page.shape[:-1], *shape)
