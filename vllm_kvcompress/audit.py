"""Are the FP8 scales of a model loaded, sound and used: told once in every worker at its start.

vLLM starts silently with scales of 1.0 where a checkpoint of compressed-tensors lacks them, with
scales of zero, and with scales that its loader for a model has passed by. Each shows only in the
answers. So what the layers hold is compared with what the checkpoint's files hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvcompress import audit_metrics, compat
from vllm_kvcompress.attention.fp8 import Fp8Impl
from vllm_kvcompress.config import FP8_DTYPES, KIVI_DTYPES, SCALE_RANGE, Fp8Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(compat.LOGGER_NAME)

PROBLEMS = {
    "missing": "have no scale in the checkpoint and use 1.0; calibrate the model, see "
    "`vllm-kvcompress calibrate --help`",
    "one": "have scales of K or of V that are 1.0 in the checkpoint, as if nobody had found them",
    "bad": "have a scale that is zero, not finite, or beyond any model's range",
    "heads": "have another number of scales in the checkpoint than KV heads",
    "collapsed": "have a scale per head in the checkpoint and use their greatest for all heads",
    "unused": "do not use the scale that the checkpoint holds",
}
"""What can be wrong with a layer's scales, and how a sentence about layers goes on."""

_SCALE_NAME = re.compile(r"(?P<stem>.+)\.(?:(?P<kind>[kv])_scale|[kv]_proj\.output_scale)")
_SCALE_OF_BOTH = re.compile(r"(?P<stem>.+)\.kv_scale")

Scales = dict[str, tuple[float, ...]]
"""The scales of K and of V, under ``k`` and ``v``."""


@dataclass(frozen=True)
class LayerScales:
    """What the audit finds about one layer."""

    name: str
    dtype: str
    """Its ``kv_cache_dtype``; ``auto`` for a layer that keeps the model's dtype."""
    used: Scales
    """What it computes with; empty where it has no FP8 pages."""
    stored: Scales
    """What the checkpoint holds for this worker's heads; empty if it has none."""
    problems: tuple[str, ...]
    """Keys of ``PROBLEMS``."""

    @property
    def per_head(self) -> bool:
        """Whether it computes with a scale per KV head."""
        return any(len(scales) > 1 for scales in self.used.values())

    @property
    def state(self) -> str:
        """One word: ``skipped``, ``packed`` (another compressed dtype), ``ok`` or a problem."""
        if not self.used:
            return "packed" if self.dtype in KIVI_DTYPES else "skipped"
        return self.problems[0] if self.problems else "ok"


class UnusableScales(ValueError):
    """The audit has found problems, and ``strict_scales`` is set."""


def audit_layers(
    layers: Mapping[str, Any],
    checkpoint: Mapping[str, Scales],
    rank: int = 0,
    ranks: int = 1,
) -> list[LayerScales]:
    """Compare the layers' scales with the checkpoint's.

    layers: attention layers by name; checkpoint: as ``checkpoint_scales`` returns them; rank and
    ranks: of tensor parallelism, which divides the heads.
    """
    stored_of = _matched(layers, checkpoint)
    return [
        _audit_layer(name, layer, stored_of.get(name, {}), rank, ranks)
        for name, layer in layers.items()
    ]


def _audit_layer(name: str, layer: Any, stored: Scales, rank: int, ranks: int) -> LayerScales:
    dtype = layer.kv_cache_dtype
    if dtype not in FP8_DTYPES:
        return LayerScales(name, dtype, {}, stored, ())
    held = dict(zip("kv", compat.scales_of(layer), strict=True))
    used = {kind: tuple(scales) for kind, scales in held.items()}
    if not _takes_vectors(layer):
        used = {"k": (layer._k_scale_float,), "v": (layer._v_scale_float,)}
    mine = {kind: _of_rank(s, layer.num_kv_heads, rank, ranks) for kind, s in stored.items()}
    everything = [scale for scales in used.values() for scale in scales]
    problems = []
    lowest, highest = SCALE_RANGE
    if any(not lowest <= scale <= highest for scale in everything):
        problems.append("bad")  # NaN compares false
    if not all(_fits(len(s), layer.num_kv_heads, ranks) for s in stored.values()):
        problems.append("heads")
    elif any(len(mine.get(kind, ())) > len(used[kind]) for kind in used):
        problems.append("collapsed")
    elif mine and any(not _equal(used[kind], mine[kind]) for kind in mine):
        problems.append("unused")
    # e5m2 reaches beyond what models make of K and V: it is used without scales.
    if FP8_DTYPES[dtype] == "e4m3":
        if set(mine) != {"k", "v"}:
            problems.append("missing")
        elif any(all(scale == 1.0 for scale in scales) for scales in used.values()):
            problems.append("one")
    return LayerScales(name, dtype, used, mine, tuple(problems))


def _takes_vectors(layer: Any) -> bool:
    """Whether the layer's backend computes with a scale per head where the layer has one."""
    backend = getattr(layer, "attn_backend", None)
    return isinstance(layer.impl, Fp8Impl) or (
        backend is not None and backend.supports_per_head_quant_scales()
    )


def _fits(count: int, heads: int, ranks: int) -> bool:
    """Whether a checkpoint's scales are one a layer, or one for each head that the ranks share."""
    replicated = heads == 1 and count > 0 and ranks % count == 0
    return count == 1 or count == heads * ranks or replicated


def _of_rank(scales: tuple[float, ...], heads: int, rank: int, ranks: int) -> tuple[float, ...]:
    """The part of a checkpoint's scales for the heads of one rank, as vLLM divides them."""
    if len(scales) <= 1 or (len(scales) == heads and ranks == 1):
        return scales
    if heads * ranks <= len(scales):
        return scales[rank * heads : (rank + 1) * heads]
    first = rank * len(scales) // ranks  # heads are replicated
    return scales[first : first + 1]


def _equal(used: tuple[float, ...], stored: tuple[float, ...]) -> bool:
    if len(stored) == 1:
        stored = stored * len(used)
    # vLLM doubles scales where FP8 has another bias.
    factors = (1, 2) if compat.doubles_scales() else (1,)
    return all(
        # A checkpoint may hold scales in 16 bits.
        u == s
        or (math.isnan(u) and math.isnan(s))
        or any(math.isclose(u, factor * s, rel_tol=1e-2) for factor in factors)
        for u, s in zip(used, stored, strict=True)
    )


# ------------------------------------------------------------------------- the checkpoint's side


def checkpoint_scales(folder: Path) -> dict[str, Scales]:
    """The scales of K and V in a checkpoint's safetensors files, by the module that has them.

    A file that cannot be read counts as one without scales: whoever loads the weights says so.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Scales] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    for stem, kind in _parsed(name):
                        values = file.get_tensor(name).float().reshape(-1).tolist()
                        found.setdefault(stem, {})[kind] = tuple(values)
        except (OSError, SafetensorError):
            continue
    return found


def _parsed(name: str) -> Iterable[tuple[str, str]]:
    """The module, and ``k`` or ``v``, that a tensor of this name has a scale for."""
    if match := _SCALE_OF_BOTH.fullmatch(name):
        return [(match["stem"], "k"), (match["stem"], "v")]
    match = _SCALE_NAME.fullmatch(name)
    if match is None:
        return []
    stem = match["stem"].removesuffix(".k_proj").removesuffix(".v_proj").removesuffix(".attn")
    kind = match["kind"] or name[len(match["stem"]) + 1]
    return [(stem, kind)]


def _matched(layers: Iterable[str], checkpoint: Mapping[str, Scales]) -> dict[str, Scales]:
    """The checkpoint's scales by layer: modules are the same from ``layers.N`` on."""
    by_tail: dict[str, list[str]] = {}
    for stem in checkpoint:
        by_tail.setdefault(_tail(stem), []).append(stem)
    found = {}
    for name in layers:
        stem = name.removesuffix(".attn")
        candidates = [stem] if stem in checkpoint else by_tail.get(_tail(stem), [])
        if len(candidates) == 1:
            found[name] = checkpoint[candidates[0]]
    return found


def _tail(stem: str) -> str:
    parts = stem.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[first:])


# ------------------------------------------------------------------------------- what is told


def summary(rows: list[LayerScales]) -> str:
    """A few lines about all layers."""
    quantised = [row for row in rows if row.used]
    lines = []
    for dtype in sorted({row.dtype for row in quantised}):
        own = [row for row in quantised if row.dtype == dtype]
        heads = {row.per_head for row in own}
        how = "per head" if heads == {True} else "per tensor" if heads == {False} else "mixed"
        ranges = ", ".join(
            f"{kind.upper()} {_range([s for row in own for s in row.used[kind]])}" for kind in "kv"
        )
        good = sum(
            row.stored != {} and not {"unused", "missing", "heads"} & {*row.problems} for row in own
        )
        lines.append(
            f"{dtype}: layers {_numbers(own)}, scales {how}, {good} of {len(own)} from the "
            f"checkpoint; {ranges}"
        )
    for state in ("skipped", "packed"):
        others = [row for row in rows if row.state == state]
        for dtype in sorted({row.dtype for row in others}):
            own = [row for row in others if row.dtype == dtype]
            named = "the model's dtype" if dtype == "auto" else dtype
            lines.append(f"{named}: layers {_numbers(own)}")
    return "KV cache: " + "; ".join(lines)


def complaints(rows: list[LayerScales]) -> list[str]:
    """A sentence for each problem, naming its layers."""
    said = []
    for problem, text in PROBLEMS.items():
        own = [row for row in rows if problem in row.problems]
        if own:
            said.append(f"FP8 scales: layers {_numbers(own)} {text}")
    return said


def _range(scales: list[float]) -> str:
    finite = [scale for scale in scales if math.isfinite(scale)]
    if len(finite) < len(scales):
        return ", ".join([*([_range(finite)] if finite else []), "some not finite"])
    low, high = min(scales), max(scales)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _numbers(rows: list[LayerScales]) -> str:
    """Layers by number, runs as ``2-5``; by name where two have the same number."""
    numbers = [compat.layer_number(row.name) for row in rows]
    if len(set(numbers)) < len(numbers):
        return ", ".join(row.name for row in rows)
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ------------------------------------------------------------------------------ in the worker


def arrange() -> None:
    """Have the audit made when the worker that calls has loaded its model."""
    compat.after_loading(audit_worker)


def audit_worker(vllm_config: VllmConfig, worker_rank: int) -> None:
    """Audit this worker's layers, log what was found, and hand it to ``/metrics``.

    Raises UnusableScales for problems if ``strict_scales`` is set.
    """
    layers = compat.attention_layers(vllm_config)
    if not any(layer.kv_cache_dtype in FP8_DTYPES for layer in layers.values()):
        return
    folder = compat.checkpoint_folder(vllm_config)
    checkpoint = {} if folder is None else checkpoint_scales(folder)
    rows = audit_layers(layers, checkpoint, *compat.tensor_parallel_rank())
    audit_metrics.publish(vllm_config.instance_id, worker_rank, [row.state for row in rows])
    said = complaints(rows)
    if said and Fp8Settings.parse(vllm_config.additional_config).strict_scales:
        raise UnusableScales("; ".join(said) + " (additional_config: kvcompress.fp8.strict_scales)")
    log: Callable[..., None] = logger.info if worker_rank == 0 else logger.debug
    log("%s", summary(rows))
    for sentence in said:
        logger.warning("%s", sentence)
