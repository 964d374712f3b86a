"""The layers of a model that keep a KV cache, read from its ``config.json`` as vLLM reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kvcompress.kernels.kivi.format import ITEMSIZES
from vllm_kvcompress.page_profile import ModelShape

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multi-modal models keep the configuration of their language model."""

_ASSUMED = "its layers are taken as alike"
"""The key that marks a model of a type that transformers does not know."""

_MAX_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

_MLA_MODELS = frozenset(
    (
        *("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
        *("kimi_k2", "pangu_ultra_moe"),
    )
)
"""Models of multi-head latent attention, whose cache holds one latent a token."""

_NO_LAYER_TYPES = frozenset(
    (
        *("baichuan", "dbrx", "gemma", "gpt2", "gpt_neox", "granite", "granitemoe", "internlm2"),
        *("llama", "mistral", "mixtral", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2"),
        *("qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2"),
        *_MLA_MODELS,
    )
)
"""Models whose layers are all alike unless ``layer_types`` says otherwise."""

_NOT_COUNTED = frozenset(
    (
        *("deepseek_v4", "deepseek_v41", "falcon_mamba", "gemma4", "gemma4_text", "longcat_flash"),
        *("mamba", "mamba2", "mimo_v2", "mimo_v2_flash", "nemotron-nas", "step3p5"),
    )
)
"""Models whose layers differ in ways that their settings do not tell in one form."""

_ALWAYS_FULL = frozenset(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"))
"""Models of which vLLM keeps every token where only some layers have a window."""

_NO_FLOAT16 = frozenset(("gemma2", "gemma3", "gemma3_text", "glm4"))
"""Models that vLLM does not run in float16."""

_STATES = (
    "compress_ratios",
    "block_configs",
    "attn_type_list",
    "layers_block_type",
    "hybrid_override_pattern",
    "ssm_cfg",
    "mamba_d_state",
    "attn_layer_period",
    "linear_attn_config",
    "global_head_dim",
    "num_key_value_heads_per_layer",
    "use_cla",
)
"""Settings of models whose layers keep something that is not counted here."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer with a KV cache, over all ranks."""

    number: int
    """Its index in the model."""
    kv_heads: int
    """Heads of K and V; 1 for a latent."""
    key_size: int
    """Channels of K of one head, or of the latent with its rotary part."""
    value_size: int
    """Channels of V of one head; 0 for a latent."""
    window: int | None = None
    """Tokens that a sliding window sees."""
    chunk: int | None = None
    """Tokens of a chunk of chunked local attention."""
    index_bytes: int = 0
    """Bytes a token of the cache of an indexer beside the latent."""

    @property
    def is_latent(self) -> bool:
        """Whether the cache holds one latent a token, the same on every rank."""
        return self.value_size == 0


@dataclass(frozen=True)
class StateLayer:
    """One layer that keeps a state of fixed size instead of a KV cache, over all ranks."""

    number: int
    """Its index in the model."""
    conv_channels: int
    conv_length: int
    """Tokens of each channel that a convolution remembers."""
    groups: int = 0
    """Groups of Mamba-2, which every rank has whole, each with ``group_channels`` more channels."""
    group_channels: int = 0
    heads: int = 0
    head_values: int = 0
    """Values of the recurrent state of one head."""
    dtype: str = "auto"
    """Of the recurrent state; ``auto``: the model's."""
    blocks: int = 2
    """Blocks of states that a request holds."""

    def bytes(self, ranks: int, dtype: str) -> int:
        """Bytes of the state on one rank. Raises ValueError if it cannot be shared out."""
        extra = ranks - self.groups if self.groups and self.groups % ranks else 0
        channels = self.conv_channels + (self.groups + extra) * self.group_channels
        if channels % ranks or self.heads % ranks:
            raise ValueError(
                f"tensor_parallel_size is {ranks}, and the state of layer {self.number}, of "
                f"{self.heads} heads and {channels} channels, cannot be shared out"
            )
        item = ITEMSIZES[dtype if self.dtype == "auto" else self.dtype]
        conv = channels // ranks * self.conv_length * ITEMSIZES[dtype]
        return conv + self.heads // ranks * self.head_values * item


@dataclass(frozen=True)
class ModelLayers:
    """What a KV cache has to hold for a model."""

    name: str
    layers: tuple[AttentionLayer, ...]
    dtype: str
    """The dtype that the model computes in, a key of ``ITEMSIZES``."""
    max_model_len: int
    """Tokens of the longest sequence."""
    kv_cache_dtype: str = "auto"
    """What ``--kv-cache-dtype auto`` stands for: a quantised checkpoint may ask for FP8."""
    shares_layers: bool = False
    """Whether some layers use the cache of others."""
    states: tuple[StateLayer, ...] = ()
    """Layers of a hybrid model that keep a state instead."""
    assumed: str = ""
    """What is taken for granted of a model whose type is not known, empty if nothing is."""
    model_type: str = ""
    """That of the language model."""

    @property
    def shape(self) -> ModelShape:
        """What a profile of the pages says of the model that it is of."""
        first = self.layers[0]
        return ModelShape(
            self.model_type, len(self.layers) + len(self.states), first.kv_heads, first.key_size
        )

    @property
    def has_some_windows(self) -> bool:
        """Whether some layers have a sliding window and others none."""
        return len({bool(layer.window) for layer in self.layers}) > 1

    @classmethod
    def read(cls, model: str | Path, dtype: str = "auto") -> ModelLayers:
        """From a model's folder, its ``config.json``, or the name of a model in the local cache.

        Raises ValueError, or OSError, that says what is wrong with it.
        """
        path = find_config(model)
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is not JSON: {error}; name a model's folder or its config.json"
            ) from error
        name = str(model) if path.parent != Path(model) else path.parent.name
        return cls.parse(config, name, dtype)

    @classmethod
    def parse(cls, config: Any, name: str = "model", dtype: str = "auto") -> ModelLayers:
        """From the content of a ``config.json``.

        Raises ValueError that names the field that is missing, wrong or not supported.
        """
        if not isinstance(config, Mapping):
            raise ValueError("config.json holds no object")
        text = _text_config(config)
        layers, states = _layers(text)
        return cls(
            name=name,
            layers=layers,
            dtype=_dtype(config, text, dtype),
            max_model_len=_max_model_len(text),
            kv_cache_dtype=_checkpoint_cache_dtype(config, text),
            shares_layers=bool(text.get("num_kv_shared_layers")),
            states=states,
            assumed=f"{text['model_type']}: {_ASSUMED}" if text.get(_ASSUMED) else "",
            model_type=text["model_type"],
        )


def find_config(model: str | Path) -> Path:
    """The ``config.json`` of a folder, a file, or a model in the local cache of Hugging Face."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if path.name == "config.json" or path.is_absolute() or str(model).startswith("."):
        raise ValueError(f"{path}: no such file; name a model's folder or its config.json")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached)
    raise ValueError(
        f"{model} is neither a folder nor in the local cache; name a folder or a config.json, or "
        f"fetch it first with: hf download {model} config.json"
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part, with what it leaves to its class's defaults filled in."""
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return _text_config({"model_type": config.get("model_type"), **inner})
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ValueError("config.json: model_type is missing")
    needed = {"num_hidden_layers", "num_attention_heads"}
    needed |= {"kv_lora_rank"} if kind in _MLA_MODELS else set()
    needed |= {"sliding_window"} if kind in ("mistral", "mixtral") else set()
    says_all = needed <= set(config) and not config.get("use_sliding_window")
    if says_all and (config.get("layer_types") or kind in _NO_LAYER_TYPES):
        return config
    return _with_defaults(config, kind)


def _with_defaults(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """As the class of the model's configuration in transformers completes it.

    Only for models that need it: importing transformers takes seconds.
    """
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return {**config, _ASSUMED: True}
    try:
        known = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # its classes check with errors of their own
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"config.json: not one of a {kind}: {why}") from error
    names = {*config, "layer_types", "sliding_window", "head_dim", "num_key_value_heads"}
    names |= {"num_hidden_layers", "num_attention_heads", "hidden_size", "attention_chunk_size"}
    names |= {"num_kv_shared_layers", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"}
    names |= {"index_topk", "index_head_dim", "is_encoder_decoder", *_MAX_LENGTHS, *_STATES}
    names |= {name for name in vars(known) if name.startswith(("linear_", "mamba_", "conv_"))}
    found = {name: getattr(known, name, None) for name in names}
    return {**config, **{name: value for name, value in found.items() if value is not None}}


def _count(
    config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1
) -> int:
    """The first of these fields that is there, a number of at least ``least``."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ValueError(
                f"config.json: {name} is {value!r}; expected a number of at least {least}"
            )
        return value
    if default is None:
        raise ValueError(f"config.json: {names[0]} is missing")
    return default


def _layers(
    text: Mapping[str, Any],
) -> tuple[tuple[AttentionLayer, ...], tuple[StateLayer, ...]]:
    kind = text["model_type"]
    if kind in _NOT_COUNTED or text.get("is_encoder_decoder"):
        raise ValueError(f"models of type {kind} are not counted")
    for name in _STATES:
        found = text.get(name)
        alike = (
            name == "attn_type_list" and isinstance(found, list) and set(map(str, found)) == {"1"}
        )
        if found and not alike and kind not in _HYBRIDS:
            raise ValueError(f"models of type {kind} are not counted: their layers differ ({name})")
    count = _count(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if count > 1 << 14:
        raise ValueError(f"config.json: num_hidden_layers is {count}")
    if kind in _MLA_MODELS and text.get("kv_lora_rank") is not None:
        return _latent_layers(text, count), ()
    heads = _count(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(text, heads)
    size = _count(text, "head_dim", "hidden_size_per_head", default=0)
    if not size:
        size = _count(text, "hidden_size", "n_embd", "d_model") // heads
    if not size:
        raise ValueError(f"config.json: hidden_size is less than num_attention_heads, {heads}")
    if text.get("v_head_dim") not in (None, size):
        raise ValueError(
            f"models of type {kind} are not counted: K has {size} channels a head and V "
            f"{text['v_head_dim']}"
        )
    own = count - _count(text, "num_kv_shared_layers", default=0, least=0)
    reaches = enumerate(_reaches(text, count)[: max(own, 0)])
    layers, states = [], []
    for number, reach in reaches:
        if reach is None:
            states.append(_HYBRIDS[kind](text, number))
        else:
            layers.append(AttentionLayer(number, kv_heads, size, size, *reach))
    return tuple(layers), tuple(states)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text["model_type"] == "falcon" and not text.get("new_decoder_architecture"):
        if text.get("multi_query", True):
            return 1
    elif text["model_type"] == "dbrx" and isinstance(text.get("attn_config"), Mapping):
        text = text["attn_config"]
    return _count(
        text,
        *("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num"),
        *("num_attention_groups", "kv_n_heads"),
        default=heads,
    )


def _delta_net(text: Mapping[str, Any], number: int) -> StateLayer:
    """Gated delta net."""
    keys = _count(text, "linear_num_key_heads") * _count(text, "linear_key_head_dim")
    heads, size = _count(text, "linear_num_value_heads"), _count(text, "linear_value_head_dim")
    return StateLayer(
        number,
        conv_channels=2 * keys + heads * size,
        conv_length=_count(text, "linear_conv_kernel_dim") - 1,
        heads=heads,
        head_values=size * _count(text, "linear_key_head_dim"),
    )


def _delta_net_of_its_dtype(text: Mapping[str, Any], number: int) -> StateLayer:
    """The same, where the config says in which dtype the state is kept."""
    found = text.get("mamba_ssm_dtype") or "auto"
    if found != "auto" and found not in ITEMSIZES:
        raise ValueError(
            f"config.json: mamba_ssm_dtype is {found!r}; expected {', '.join(ITEMSIZES)}"
        )
    return replace(_delta_net(text, number), dtype=found)


def _mamba2(text: Mapping[str, Any], number: int) -> StateLayer:
    heads, state = _count(text, "mamba_n_heads"), _count(text, "mamba_d_state")
    return StateLayer(
        number,
        conv_channels=_count(text, "mamba_expand") * _count(text, "hidden_size"),
        conv_length=_count(text, "mamba_d_conv") - 1,
        groups=_count(text, "mamba_n_groups"),
        group_channels=2 * state,
        heads=heads,
        head_values=_count(text, "mamba_d_head") * state,
        blocks=3,
    )


def _short_convolution(text: Mapping[str, Any], number: int) -> StateLayer:
    return StateLayer(
        number,
        conv_channels=_count(text, "conv_dim", "hidden_size"),
        conv_length=_count(text, "conv_L_cache") - 1,
    )


_HYBRIDS: dict[str, Callable[[Mapping[str, Any], int], StateLayer]] = {
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net_of_its_dtype,
    "qwen3_5_moe_text": _delta_net_of_its_dtype,
    "granitemoehybrid": _mamba2,
    "lfm2": _short_convolution,
}
"""Hybrid models by type: the state of one of their layers."""

_STATE_KINDS = ("linear_attention", "mamba", "conv")


def _reaches(text: Mapping[str, Any], count: int) -> list[tuple[int | None, int | None] | None]:
    """Window and chunk of each layer, None for a layer that keeps a state."""
    kind = text["model_type"]
    window = text.get("sliding_window") or None
    if window is not None:
        window = _count(text, "sliding_window")
        if text.get("use_sliding_window", kind not in _ALWAYS_FULL) is False:
            window = None
    kinds = text.get("layer_types")
    if kinds is None:
        return [(window, None)] * count
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise ValueError(f"config.json: layer_types has not one entry for each of {count} layers")
    some_full = any(entry != "sliding_attention" for entry in kinds)
    if some_full and kind in _ALWAYS_FULL:
        window = None
    if window is not None and kind == "cohere2":
        window += 1  # its window does not count the token itself
    found: list[tuple[int | None, int | None] | None] = []
    for number, entry in enumerate(kinds):
        if entry in ("full_attention", "attention"):
            found.append((None, None))
        elif entry == "sliding_attention":
            found.append((window, None))
        elif entry == "chunked_attention":
            found.append((None, _count(text, "attention_chunk_size")))
        elif kind in _HYBRIDS and entry in _STATE_KINDS:
            found.append(None)
        else:
            raise ValueError(
                f"config.json: layer {number} of a {kind} is of type {entry!r}, which is not "
                "counted; attention is, full, sliding-window, chunked and latent, and the states "
                f"of {', '.join(_HYBRIDS)}"
            )
    return found


def _latent_layers(text: Mapping[str, Any], count: int) -> tuple[AttentionLayer, ...]:
    size = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
    index = 0
    if text.get("index_topk"):
        channels = _count(text, "index_head_dim")
        index = channels + channels // 128 * 4  # FP8, and a float32 scale for each 128 channels
    return tuple(
        AttentionLayer(number, 1, size, 0, index_bytes=index if _has_index(text, number) else 0)
        for number in range(count)
    )


def _has_index(text: Mapping[str, Any], number: int) -> bool:
    """Whether a layer of sparse latent attention has an indexer of its own."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str | list | tuple):
            raise ValueError(f"config.json: index_topk_pattern is {pattern!r}; expected letters")
        return number >= len(pattern) or pattern[number] != "S"
    every = _count(text, "index_topk_freq", default=1)
    offset = _count(text, "index_skip_topk_offset", default=2, least=0)
    return max(number - offset + 1, 0) % every == 0


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], wanted: str) -> str:
    """The dtype that vLLM computes in, as ``--dtype`` says."""
    if wanted == "auto":
        wanted = next(
            (c[k] for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)),
            "float32",
        )
        wanted = str(wanted).removeprefix("torch.")
        refused = wanted == "float16" and text["model_type"] in _NO_FLOAT16
        if wanted == "float32" or wanted not in ITEMSIZES or refused:
            return "bfloat16"
    wanted = {"half": "float16", "float": "float32"}.get(wanted, wanted)
    if wanted not in ITEMSIZES:
        raise ValueError(f"dtype is {wanted}; choose from auto, {', '.join(ITEMSIZES)}")
    return wanted


def _max_model_len(text: Mapping[str, Any]) -> int:
    found = [_count(text, name) for name in _MAX_LENGTHS if text.get(name) is not None]
    if text.get("model_max_length"):
        return _count(text, "model_max_length")
    return min(found, default=2048)


def _checkpoint_cache_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The ``kv_cache_dtype`` that a quantised checkpoint asks for."""
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if not isinstance(found, Mapping):
                continue
            inner = found.get("quantization")
            algorithm = (inner if isinstance(inner, Mapping) else found).get("kv_cache_quant_algo")
            if found.get("kv_cache_scheme"):
                return "fp8"
            if isinstance(algorithm, str):
                return {"fp8": "fp8_e4m3"}.get(algorithm.lower(), algorithm.lower())
    return "auto"
