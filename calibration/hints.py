"""What calibration advises for the pages of a model: the section that ``page_profile`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_kvcompress.calibration import sensitivity
from vllm_kvcompress.calibration.sensitivity import Probe
from vllm_kvcompress.config import CLIPPINGS, FOUR_BIT_DTYPE
from vllm_kvcompress.kernels.kivi.format import HEAD_SIZES
from vllm_kvcompress.page_profile import digest_of

KIVI_DTYPE = "kivi_2bit"
"""The pages that advice is about."""

BOOSTED = 0.25
"""Of K's channels, as many as are coded with four bits unless a user sets another number."""


def measure_pages(
    probe: Probe,
    scales: Mapping[int, Mapping[str, torch.Tensor]],
    model: Mapping[str, str],
    max_loss: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The section of a model, from what its pages cost on the windows of *probe*.

    scales: of FP8, by layer ``k`` and ``v``, ``[1]`` or ``[heads]``; model: ``name`` and
    ``model_type``; max_loss: nats a token.
    """
    say("measuring what fp8 pages cost each layer")
    shape = {"layers": probe.layers, "kv_heads": probe.kv_heads, "head_size": probe.head_size}
    section = {
        "model": {**model, **shape},
        "windows": sum(1 for _ in probe.histories()),
        "max_loss": max_loss,
        "fp8": _losses(probe, sensitivity.fp8_pages(scales), max_loss, "fp8 pages"),
    }
    if probe.head_size in HEAD_SIZES:
        say(f"measuring what {KIVI_DTYPE} pages cost each layer")
        section["kivi"] = _measure_kivi(probe, max_loss)
    else:
        say(f"no hints for KIVI pages: they have no head size {probe.head_size}")
    return {"digest": digest_of(section), **section}


def _measure_kivi(probe: Probe, max_loss: float) -> dict[str, Any]:
    clipping = best_clipping(probe)
    two = sensitivity.kivi_pages(KIVI_DTYPE, clipping=clipping)
    four = sensitivity.kivi_pages(FOUR_BIT_DTYPE, clipping=clipping)
    kivi = _losses(probe, two, max_loss, f"{KIVI_DTYPE} pages")
    order = sensitivity.most_sensitive_first(kivi["layers"])
    count, left = sensitivity.fewest(probe, two, order, max_loss, four)
    layers, skipped = order[:count], []
    if left > max_loss:
        count, left = sensitivity.fewest(probe, four, order, max_loss)
        layers, skipped = order[count:], order[:count]
    return {
        "dtype": KIVI_DTYPE,
        "clipping": clipping,
        **kivi,
        "with_4bit": {"layers": sorted(layers), "skip_layers": sorted(skipped), "left": left},
        "boosted_channels": widest_channels(probe),
    }


def _losses(probe: Probe, method: sensitivity.Method, max_loss: float, what: str) -> dict[str, Any]:
    found = sensitivity.measure(probe, method, what)
    skipped, left = sensitivity.skip_layers(probe, method, found["layers"], max_loss)
    return {**found, "skip_layers": skipped, "left": left}


def best_clipping(probe: Probe) -> str:
    """How scales of KIVI pages are best found, all layers together."""
    every = list(range(probe.layers))
    loss = {
        clipping: probe.divergences(sensitivity.kivi_pages(KIVI_DTYPE, clipping=clipping), [every])
        for clipping in CLIPPINGS
    }
    return min(loss, key=loss.__getitem__)


def widest_channels(probe: Probe) -> list[list[list[int]]]:
    """By layer and KV head, the channels of K with the widest range, a share of BOOSTED."""
    spread = sum(kv[:, 0].float().amax(1) - kv[:, 0].float().amin(1) for kv in probe.histories())
    count = round(BOOSTED * spread.shape[-1])
    return spread.topk(count, dim=-1).indices.sort(-1).values.tolist()
