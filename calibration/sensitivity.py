"""What FP8 and KIVI pages cost a model, layer by layer, and which layers to leave out of them.

The measure is the divergence, in nats a token, of the predictions after a history that went through
pages from those after the same history in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from vllm_kvcompress.calibration.dump import cache_to_kv, prefill
from vllm_kvcompress.config import KiviSettings
from vllm_kvcompress.kernels.kivi import implementation
from vllm_kvcompress.progress import Progress

HISTORY, RECENT, SCORED = 384, 128, 128
WINDOW = HISTORY + SCORED
BLOCK = 128
_VARIANTS, _VARIANTS_ON_A_CPU = 8, 2
"""Histories that go through the model at once: their predictions take memory, and a CPU is no
faster with more."""

Method = Callable[[torch.Tensor], torch.Tensor]
"""KV ``[L, 2, T, H, D]`` in bfloat16 -> as pages give it back."""


class Probe:
    """A model and windows of text, whose histories can be given to it changed.

    windows: int64 ``[WINDOW]`` each.
    """

    def __init__(self, model: PreTrainedModel, windows: Sequence[torch.Tensor]):
        self.model = model
        self._windows = []
        for ids in windows:
            kv = cache_to_kv(prefill(model, ids[:HISTORY])).cpu()
            old, recent = kv.to(torch.bfloat16).split([HISTORY - RECENT, RECENT], 2)
            ids = ids[HISTORY:].to(model.device)
            base = self._predict([torch.cat([old, recent], 2)], ids)
            self._windows.append((old, recent, ids, base))
        self.layers, _, _, self.kv_heads, self.head_size = self._windows[0][0].shape

    def divergences(
        self,
        method: Method,
        choices: Sequence[Sequence[int]],
        others: Method | None = None,
        advance: Callable[[float], None] = lambda choices: None,
    ) -> list[float]:
        """For each choice of layers, the divergence where these go through pages; mean of windows.

        The other layers go through *others*, or stay as they are. Each runs once a window, on all
        layers. advance: is told how many choices more are done.
        """
        totals = [0.0] * len(choices)
        at_once = _VARIANTS_ON_A_CPU if self.model.device.type == "cpu" else _VARIANTS
        for old, recent, ids, base in self._windows:
            changed = method(old)
            rest = old if others is None else others(old)
            for first in range(0, len(choices), at_once):
                variants = []
                for layers in choices[first : first + at_once]:
                    mixed = rest.clone()
                    mixed[list(layers)] = changed[list(layers)]
                    variants.append(torch.cat([mixed, recent], 2))
                for number, now in enumerate(self._predict(variants, ids), first):
                    totals[number] += _divergence(now, base[0]) / len(self._windows)
                    advance(1 / len(self._windows))
        return totals

    def histories(self) -> Iterator[torch.Tensor]:
        """KV ``[L, 2, T, H, D]`` of each window that ``divergences`` changes, in bfloat16."""
        for old, *_ in self._windows:
            yield old

    @torch.inference_mode()
    def _predict(self, histories: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Log probabilities ``[histories, SCORED - 1, vocabulary]``."""
        cache = DynamicCache()
        stacked = torch.stack(list(histories)).to(self.model.device, self.model.dtype)
        for layer, pair in enumerate(stacked.transpose(0, 1).unbind(0)):
            k, v = pair.transpose(2, 3).unbind(1)
            cache.update(k, v, layer)
        batch = ids[None].expand(len(histories), -1)
        logits = self.model(batch, past_key_values=cache, use_cache=True).logits[:, :-1]
        return functional.log_softmax(logits.float(), dim=-1)


def _divergence(now: torch.Tensor, base: torch.Tensor) -> float:
    return functional.kl_div(now, base, reduction="batchmean", log_target=True).item()


def fp8_pages(scales: Mapping[int, Mapping[str, torch.Tensor]]) -> Method:
    """Pages of FP8 e4m3 with these scales: by layer, ``k`` and ``v``, ``[1]`` or ``[heads]``."""

    def method(kv: torch.Tensor) -> torch.Tensor:
        back = kv.clone()
        limit = torch.finfo(torch.float8_e4m3fn).max
        for layer, kinds in scales.items():
            for value, kind in enumerate("kv"):
                scale = kinds[kind][:, None]
                codes = (kv[layer, value].float() / scale).clamp(-limit, limit)
                back[layer, value] = codes.to(torch.float8_e4m3fn).float() * scale
        return back

    return method


def kivi_pages(cache_dtype: str = "kivi_2bit", **settings: Any) -> Method:
    """KIVI pages with these settings of ``additional_config``; defaults as they are served."""
    given = KiviSettings.parse({"kvcompress": {"kivi": settings}})

    def method(kv: torch.Tensor) -> torch.Tensor:
        layers, _, tokens, heads, size = kv.shape
        fmt = given.page_format(cache_dtype, BLOCK, size, kv.dtype)
        kernels = implementation(kv.device)
        blocks = tokens // BLOCK
        index = torch.arange(blocks, dtype=torch.int32)
        fills, firsts = torch.full_like(index, BLOCK), (index == 0).int()
        cache = torch.zeros(blocks, heads, BLOCK, fmt.token_bytes, dtype=torch.uint8)
        back = kv.clone()
        for layer in range(layers):
            k, v = back[layer].unflatten(1, (blocks, BLOCK))
            kernels.pack(fmt, k, v, index, cache, index, fills, firsts)
            kernels.unpack(fmt, cache, index, fills, firsts, k, v, index)
        return back

    return method


def measure(probe: Probe, method: Method, what: str = "pages") -> dict[str, Any]:
    """The divergence of each layer alone and of all together; *what* they are, for the bar."""
    every = list(range(probe.layers))
    choices = [[layer] for layer in every] + [every]
    with Progress(len(choices), "layer") as progress:
        progress.doing(f"measuring {what}")
        found = probe.divergences(method, choices, advance=progress.advance)
    return {"layers": found[:-1], "all": found[-1]}


def fewest(
    probe: Probe,
    method: Method,
    order: Sequence[int],
    target: float,
    others: Method | None = None,
) -> tuple[int, float]:
    """How many layers, from the front of *order*, must not go through the pages of *method* so that
    the model diverges by at most *target*, and by what it does then.

    Those go through *others*, or stay as they are. All layers where nothing less meets the target.
    """

    def rest(count: int) -> float:
        return probe.divergences(method, [order[count:]], others)[0]

    low, high, left = 0, len(order), None
    while low < high:
        middle = (low + high) // 2
        now = rest(middle)
        if now <= target:
            high, left = middle, now
        else:
            low = middle + 1
    return high, rest(high) if left is None else left


def most_sensitive_first(alone: Sequence[float]) -> list[int]:
    """The layers in the order of the divergence of each alone."""
    return sorted(range(len(alone)), key=lambda layer: -alone[layer])


def skip_layers(
    probe: Probe, method: Method, alone: Sequence[float], target: float
) -> tuple[list[int], float]:
    """The fewest layers to leave out so that the rest diverges by at most *target*, and by what.

    alone: the divergence of each layer. The most sensitive go first; what is left is measured
    together. All layers, and 0, where nothing less meets the target.
    """
    order = most_sensitive_first(alone)
    count, left = fewest(probe, method, order, target)
    return sorted(order[:count]), left
