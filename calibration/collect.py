"""Gather what the codec profile is made of while LLM Compressor runs samples through a model."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvcompress.calibration.codec_profile import CHUNK_TOKENS, Statistics, group_layers


class Collector:
    """Sees each layer's K and V of a sample, and adds them to the statistics.

    tokens: of all samples; width: see ``group_layers``; keep: chunks to leave out of the statistics
    and hold for the fit. ``refusal`` says why there can be no profile, or is empty.
    """

    def __init__(self, model: Any, tokens: int, width: int, keep: int):
        config = model.config.get_text_config()
        self._modules = attention_modules(model)
        self._hooks: list[Any] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._tokens, self._width, self._keep = tokens, width, keep
        self._seen = 0
        self._config = config
        self._turns = rotary_turns(model)
        self.statistics: Statistics | None = None
        self.kept: list[torch.Tensor] = []
        self.refusal = ""

    def attach(self) -> None:
        """Look at the caches that LLM Compressor has put into the attention modules."""
        from compressed_tensors.modeling.kvcache import (
            KV_CACHE_ATTR,
            register_key_hook,
            register_value_hook,
        )

        # Encoders and layers that share the cache of another one have none.
        self._modules = [m for m in self._modules if hasattr(m, KV_CACHE_ATTR)]
        wanted = self._config.num_hidden_layers
        if len(self._modules) != wanted:
            self.refusal = f"{len(self._modules)} of {wanted} layers have a cache that is seen"
            return
        for number, module in enumerate(self._modules):

            def key(_: Any, states: torch.Tensor, number: int = number) -> None:
                self._keys[number] = states

            def value(_: Any, states: torch.Tensor, number: int = number) -> None:
                self._values[number] = states

            self._hooks += [register_key_hook(module, key), register_value_hook(module, value)]

    def take(self) -> None:
        """Add the sample that has just gone through the model."""
        keys = [self._keys.pop(n) for n in sorted(self._keys)]
        values = [self._values.pop(n) for n in sorted(self._values)]
        if self.refusal:
            return
        if len({x.shape for x in keys + values}) != 1 or len(keys) != len(self._modules):
            self.refusal = "the layers of this model hold K and V of different shapes"
            return
        # [L, 2, T, H, D] of the one sequence of the batch.
        kv = torch.stack([torch.stack(keys), torch.stack(values)], 1)[:, :, 0].transpose(2, 3)
        layers, _, _, heads, size = kv.shape
        if self.statistics is None:
            together = group_layers(layers, heads * size, self._tokens, self._width)
            turns = self._turns
            if turns is None or turns.shape[1] * 2 != size:
                turns = torch.zeros(layers, size // 2, dtype=torch.int64)
            self.statistics = Statistics(turns, layers, heads, size, layers // together)
        for number, chunk in enumerate(kv.split(CHUNK_TOKENS, 2)):
            whole = chunk.shape[2] == CHUNK_TOKENS
            # The last chunk of the first samples: a position in the middle of a sequence.
            last = (number + 1) * CHUNK_TOKENS + CHUNK_TOKENS > kv.shape[2]
            if whole and last and len(self.kept) < self._keep:
                self.kept.append(chunk.to("cpu", copy=True))
            else:
                self.statistics.add(chunk, number * CHUNK_TOKENS)

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()
        self._modules, self._hooks = [], []
        if not self.refusal and (not self.kept or not self.statistics.tokens):
            self.refusal = f"no sample has {2 * CHUNK_TOKENS} tokens"


def attention_modules(model: Any) -> list[Any]:
    """The modules that LLM Compressor takes for attention with a KV cache, in order."""
    from compressed_tensors.quantization.utils import KV_CACHE_TARGETS
    from compressed_tensors.utils import match_named_modules

    return [module for _, module in match_named_modules(model, KV_CACHE_TARGETS)]


def rotary_turns(model: Any) -> torch.Tensor | None:
    """Rotary frequencies of each layer, int64 ``[L, D / 2]`` in 2^-32 turn a token.

    None where the model's rotary embedding is none that turns the pairs (i, i + D / 2) by a fixed
    angle a token; K is then decorrelated as it is cached.
    """
    config = model.config.get_text_config()
    found = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    if len(found) != 1:
        return None
    (rotary,) = found
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    rows = []
    for kind in kinds:
        frequencies = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
        if frequencies is None:
            return None
        rows.append((frequencies.double().cpu() / (2 * torch.pi) * 2.0**32).round().long())
    return torch.stack(rows) % 2**32
