"""The calibrated transform of a chunk: rotary positions undone, means removed, channels of several
layers decorrelated; and back.

Integers in float64 throughout, so small that every sum stays below 2^53: the order of summation,
and with it the device and the library that multiplies the matrices, does not change a bit. What is
computed stands in ``format.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import format as fmt

SAMPLE_BITS = 10
MAX_SAMPLE = 1 << 17
BASIS_BITS = 11
COEFFICIENT_BITS = 12
MAX_COEFFICIENT = 1 << 20
MAX_MEAN = 1 << 28
MAX_BASIS_SUM = 1 << (BASIS_BITS + 6)
MAX_POSITIONS = 1 << 24

_START_LAYERS = 6
_POSITIONS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Transform:
    """What a model's chunks are transformed with. L layers of H heads of D channels, C = H * D.

    group_layers: G, consecutive layers that are decorrelated together; divides L.
    max_positions: tokens of the longest sequence; where a chunk starts is looked for below it.
    scale: float32 [L, 2], positive: the root mean square of each layer's K and V.
    turns: int64 [L, D / 2], rotary frequencies in 2^-32 turn a token; zeros for a layer without.
    mean: int32 [2, L * C], of K before its rotary embedding and of V, in 2^-22 of the scale.
    basis: for K and for V int16 [L / G, R, G * C], orthonormal rows times 2^11, R <= G * C.

    Raises ValueError for arrays that do not fit each other or whose sums could exceed 2^53.
    """

    layers: int
    kv_heads: int
    head_size: int
    group_layers: int
    max_positions: int
    scale: torch.Tensor
    turns: torch.Tensor
    mean: torch.Tensor
    basis: tuple[torch.Tensor, torch.Tensor]

    def __post_init__(self) -> None:
        sizes = (self.layers, self.kv_heads, self.head_size, self.group_layers, self.max_positions)
        if min(sizes) < 1 or self.layers % self.group_layers or self.max_positions > MAX_POSITIONS:
            raise ValueError(f"sizes {sizes} of a transform are out of range")
        groups, width = self.layers // self.group_layers, self.group_layers * self.channels
        _expect(self.scale, "scale", torch.float32, (self.layers, 2))
        _expect(self.turns, "turns", torch.int64, (self.layers, self.head_size // 2))
        _expect(self.mean, "mean", torch.int32, (2, self.layers * self.channels))
        if not (self.scale.isfinite() & (self.scale > 2.0**-96) & (self.scale < 2.0**96)).all():
            raise ValueError("a scale of a transform is not finite and positive")
        if ((self.turns < 0) | (self.turns >= 1 << 32)).any():
            raise ValueError("a rotary frequency of a transform is out of range")
        if self.turns.any() and self.head_size % 2:
            raise ValueError("rotary frequencies for heads of an odd size")
        if (self.mean.long().abs() > MAX_MEAN).any():
            raise ValueError("a mean of a transform is out of range")
        for name, basis in zip("kv", self.basis, strict=True):
            rank = basis.shape[1] if basis.dim() == 3 else 0
            _expect(basis, f"basis of {name}", torch.int16, (groups, rank, width))
            if not 1 <= rank <= width:
                raise ValueError(f"the basis of {name} has rank {rank}, not 1 to {width}")
            size = basis.int().abs()
            if max(size.sum(1).max(), size.sum(2).max()) > MAX_BASIS_SUM:
                raise ValueError(f"the basis of {name} is too large")

    @property
    def channels(self) -> int:
        """C, channels of a token in one layer's K or V."""
        return self.kv_heads * self.head_size

    def forward(self, kv: torch.Tensor, start: int, ranks: tuple[int, int]) -> list[torch.Tensor]:
        """Coefficients of K and of V, float32 ``[L / G, T, rank]`` each, on the device of ``kv``.

        kv: ``[L, 2, T, H, D]``; start: the position of its first token, 0 or more. Raises
        OverflowError where a value is not finite or beyond 2^7 times its layer's scale.
        """
        found = []
        for value in (0, 1):
            units = self._samples(kv[:, value], self.scale[:, value]).double()
            rows = self._rotated(units, value, start, back=True)
            rows -= self._means(value, kv.device)[:, None]
            grouped = rows.unflatten(0, (-1, self.group_layers)).transpose(1, 2).flatten(2)
            basis = self.basis[value][:, : ranks[value]].to(kv.device).double()
            product = grouped @ basis.transpose(1, 2)
            found.append(product.float() * 2.0 ** -(SAMPLE_BITS + fmt.TURN_BITS + BASIS_BITS))
        return found

    def inverse(self, coefficients: list[torch.Tensor], start: int, out: torch.Tensor) -> None:
        """The chunk ``[L, 2, T, H, D]`` to ``out``, which has the dtype that is wanted.

        coefficients: as ``forward`` gives them, or whatever a damaged blob made of them.
        """
        limit = fmt.DTYPES[str(out.dtype).removeprefix("torch.")].max_finite
        for value, given in enumerate(coefficients):
            units = given.nan_to_num(0.0, 0.0, 0.0) * 2.0**COEFFICIENT_BITS
            units = units.round().clamp(-MAX_COEFFICIENT, MAX_COEFFICIENT).double()
            basis = self.basis[value][:, : given.shape[2]].to(out.device).double()
            grouped = (units @ basis).unflatten(2, (self.group_layers, -1)).transpose(1, 2)
            rows = grouped.flatten(0, 1)
            # From 2^-22 of the scale to the 2^-23 of a coefficient times the basis.
            rows = rows + 2 * self._means(value, out.device)[:, None]
            rows = self._rotated(rows, value, start, back=False).float()
            rows *= 2.0 ** -(COEFFICIENT_BITS + BASIS_BITS + fmt.TURN_BITS)
            rows *= self.scale[:, value].to(out.device)[:, None, None]
            rows.clamp_(-limit, limit)
            out[:, value] = rows.unflatten(2, (self.kv_heads, self.head_size)).to(out.dtype)

    def find_start(self, keys: torch.Tensor) -> int:
        """The position of the first token of K ``[L, T, H, D]``, found by its turned mean.

        Looked for in a few layers; 0 where K has no rotary embedding. A wrong one costs bits.
        Raises OverflowError as ``forward`` does.
        """
        if not self.turns.any():
            return 0
        chosen = slice(0, self.layers, -(-self.layers // _START_LAYERS))
        keys = keys[chosen]
        tokens = keys.shape[1]
        units = self._samples(keys, self.scale[chosen, 0]).double()
        sums = self._rotated(units, 0, 0, back=True, chosen=chosen).sum(1)
        held = self._means(0, keys.device)[chosen]
        # Both to 2^-10 of the scale: what follows fits 64 bits.
        seen = (sums / (tokens << fmt.TURN_BITS)).round().long()
        mean = (held / (1 << fmt.TURN_BITS)).round().long()
        half = self.head_size // 2
        seen, mean = (x.view(-1, self.kv_heads, 2, half) for x in (seen, mean))
        real = (seen * mean).sum(2).sum(1)
        imaginary = (seen[:, :, 1] * mean[:, :, 0] - seen[:, :, 0] * mean[:, :, 1]).sum(1)
        turns, which = self.turns[chosen].to(keys.device).unique(dim=0, return_inverse=True)
        empty = torch.zeros(len(turns), half, dtype=torch.int64, device=keys.device)
        real, imaginary = (empty.index_add(0, which, x) for x in (real, imaginary))
        scores = []
        for first in range(0, self.max_positions, _POSITIONS_AT_ONCE):
            last = min(first + _POSITIONS_AT_ONCE, self.max_positions)
            positions = torch.arange(first, last, device=keys.device)
            cos, sin = _cos_sin(turns, positions)
            scores.append((real[:, None] * cos + imaginary[:, None] * sin).sum(2).sum(0))
        score = torch.cat(scores)
        return int((score == score.max()).nonzero()[0])

    def _samples(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """``[layers, T, H, D]`` as integers float32 ``[layers, T, C]`` in 2^-10 of the scale."""
        factor = (2.0**SAMPLE_BITS / scale).to(x.device)
        units = (x.float().flatten(2) * factor[:, None, None]).round()
        if not (units.abs() <= MAX_SAMPLE).all():
            raise OverflowError("a value is not finite, or far beyond those of the calibration")
        return units

    def _means(self, value: int, device: torch.device) -> torch.Tensor:
        """float64 ``[L, C]``."""
        return self.mean[value].view(self.layers, -1).to(device).double()

    def _rotated(
        self,
        rows: torch.Tensor,
        value: int,
        start: int,
        *,
        back: bool,
        chosen: slice = slice(None),
    ) -> torch.Tensor:
        """2^12 times ``[layers, T, C]``, K turned to its position or back from it; not in place."""
        turns = self.turns[chosen]
        if value or not turns.any():
            return rows * (1 << fmt.TURN_BITS)
        positions = torch.arange(start, start + rows.shape[1], device=rows.device)
        cos, sin = _cos_sin(turns.to(rows.device), positions)
        cos, sin = cos.double()[:, :, None], sin.double()[:, :, None]
        if back:
            sin = -sin
        a, b = rows.unflatten(2, (self.kv_heads, 2, -1)).unbind(3)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], 3).flatten(2)


def _cos_sin(turns: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[n, positions, D / 2]`` each, in units of 2^-12, of frequencies ``[n, D / 2]``."""
    phase = positions[:, None] * turns[:, None] + (1 << (31 - fmt.TURN_BITS))
    k = (phase & 0xFFFFFFFF) >> (32 - fmt.TURN_BITS)
    table = torch.from_numpy(fmt.cosine().astype("int64")).to(turns.device)
    quarter = 1 << (fmt.TURN_BITS - 2)
    return table[k], table[(k - quarter) & ((1 << fmt.TURN_BITS) - 1)]


def _expect(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} of a transform is {tensor.dtype} {list(tensor.shape)}; "
            f"expected {dtype} {list(shape)}"
        )
