"""FP8 pages: where a block's codes lie, and what a code is.

A page is one block of one KV head: ``2 * head_size`` bytes a token. K comes first, channel-major
``[head_size, block_tokens]``, then V, token-major ``[block_tokens, head_size]``: the way in which
attention reads each of them a row at a time. There is nothing else in a page; scales belong to the
layer, one for all its KV heads or one a head.

A code is an IEEE-like float of 8 bits: ``e4m3`` as in OCP's FP8 (no infinity; the largest number is
448), or ``e5m2`` (the largest is 57,344). A value divided by its scale, in float32, is rounded to
nearest, ties to even; what is too large, infinity included, becomes the largest number, and NaN
stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Kinds of codes and torch's dtypes of them."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of models."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

BLOCK_MULTIPLE = 16
"""The tokens of a block are a multiple of it."""


@dataclass(frozen=True)
class PageFormat:
    """The pages of a layer. Raises ValueError for what has none."""

    block_tokens: int
    head_size: int
    code: str = "e4m3"
    """A key of ``CODES``."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"FP8 code {self.code!r}; choose from {', '.join(CODES)}")
        if self.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(f"head size {self.head_size}; FP8 pages take {sizes}")
        if self.block_tokens < 1 or self.block_tokens % BLOCK_MULTIPLE:
            raise ValueError(
                f"blocks of {self.block_tokens} tokens; FP8 pages take multiples of "
                f"{BLOCK_MULTIPLE}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of a code."""
        return CODES[self.code]

    @property
    def largest(self) -> float:
        """The largest number that a code stands for."""
        return torch.finfo(self.dtype).max

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one head."""
        return 2 * self.block_tokens * self.head_size

    @property
    def values_offset(self) -> int:
        """Where V begins in a page, in bytes."""
        return self.block_tokens * self.head_size
