"""FP8 scales of the KV cache, of a model or a checkpoint, and what is wrong with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_kvcompress.codecs.profile import TENSORS_NAME
from vllm_kvcompress.config import SCALE_RANGE

Scales = Mapping[str, torch.Tensor]
"""Scale by its name in the checkpoint, ``model.layers.0.self_attn.k_scale``: float32, ``[1]`` for
strategy ``tensor``, ``[kv_heads]`` for ``attn_head``."""

NAME = re.compile(r"(?P<module>.*?(?P<layer>\d+)\..*)\.(?P<kind>[kv])_scale$")
ENCODERS = re.compile(r"vision|visual|image|audio")
"""In the names of modules that have no KV cache."""
_LATENT = "kv_a_proj_with_mqa"
"""What latent attention has, and no other."""
_BF16_ROUNDING = 2.0**-7


def _held(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in tensors if NAME.match(name)]


def of_model(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The scales that a model holds, by name."""
    return {name: tensor.detach().float().cpu().flatten() for name, tensor in _held(model)}


def unset(model: torch.nn.Module) -> None:
    """Make all scales of a model NaN: LLM Compressor leaves those as they happen to be in memory
    that it has made and then finds nothing for."""
    for _, tensor in _held(model):
        tensor.data.fill_(torch.nan)


def drop_useless(model: torch.nn.Module) -> None:
    """Take the scales out of a model that are NaN still, and those of latent attention: what an
    engine caches there, LLM Compressor has not seen."""
    for name, tensor in _held(model):
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        if tensor.isnan().all() or hasattr(module, _LATENT):
            delattr(module, kind)


def tensors_of(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The names in the weight files of a checkpoint, and what reads the tensor of each."""
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "pt")  # stays open as long as it is read from
        for name in file.keys():  # noqa: SIM118
            yield name, functools.partial(file.get_tensor, name)


def of_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The scales in the weight files of a checkpoint, by name.

    Raises ValueError, which names the file, for one that is damaged.
    """
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == TENSORS_NAME:
            continue
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if NAME.match(name)]  # noqa: SIM118
                found |= {name: file.get_tensor(name).float().flatten() for name in names}
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); copy or calibrate the checkpoint again"
            ) from error
    return found


def compare_weights(source: Path, folder: Path) -> list[str]:
    """Where the weights of a checkpoint differ from those of the one that it was made of.

    Names that only one of the two has are passed over: libraries rename when they save.
    """
    ours = dict(tensors_of(folder))
    return [
        f"{name} differs from that of {source}"
        for name, read in tensors_of(source)
        if name in ours and not torch.equal(read(), ours[name]())
    ]


def by_layer(found: Scales) -> dict[int, dict[str, torch.Tensor]]:
    """``k`` and ``v`` of each layer, in the order of the layers."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in found.items():
        match = NAME.match(name)
        layers.setdefault(int(match["layer"]), {})[match["kind"]] = tensor
    return dict(sorted(layers.items()))


@dataclass(frozen=True)
class Missed:
    """An attention module without scales, and the reason."""

    module: str
    reason: str
    cached: bool
    """Whether it has K and V of its own in the KV cache."""

    def __str__(self) -> str:
        return f"{self.module}: {self.reason}"


def missed_layers(model: Any, found: Scales) -> list[Missed]:
    """Attention modules that have no scales, each with the reason where it is known."""
    config = model.config.get_text_config()
    scaled = {NAME.match(name)["module"] for name in found}
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    first_shared = config.num_hidden_layers - shared
    missed = []
    for name, module in model.named_modules():
        children = dict(module.named_children())
        attends = {"k_proj", "v_proj"} <= set(children) or _LATENT in children
        attends = attends or {"q_proj", "o_proj"} <= set(children)
        attends = attends or bool({"qkv_proj", "c_attn", "query_key_value", "Wqkv"} & set(children))
        if not attends or name in scaled:
            continue
        number = re.search(r"\.(\d+)\.", name)
        layer = int(number[1]) if number else None
        cached = True
        if ENCODERS.search(name):
            reason, cached = "an encoder, which has no KV cache", False
        elif "cross" in name or "encoder_attn" in name:
            reason = "cross attention"
        elif _LATENT in children:
            reason = "latent attention (MLA)"
        elif layer is not None and layer >= first_shared:
            reason, cached = "shares the KV cache of an earlier layer, and its scales", False
        else:
            reason = "LLM Compressor takes only modules named self_attn or attention"
        missed.append(Missed(name, reason, cached))
    return missed


def unseen_layers(model: Any) -> list[Missed]:
    """Where LLM Compressor sees no layer whose scales an engine could use: all attention modules,
    with the reason. Empty otherwise. Takes the environment of calibration."""
    from vllm_kvcompress.calibration.collect import attention_modules

    if any(not hasattr(module, _LATENT) for module in attention_modules(model)):
        return []
    return missed_layers(model, {})


def layers_with_cache(config: Any) -> set[int]:
    """The layers of a text configuration that write K and V of their own."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {
        layer
        for layer in range(own)
        if not kinds or ("attention" in kinds[layer] and "linear" not in kinds[layer])
    }


def check(found: Scales, config: Any, strategy: str) -> list[str]:
    """What is wrong with the scales of a model with this text configuration, a line each."""
    lines = []
    layers = by_layer(found)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if missing := sorted(layers_with_cache(config) - set(layers)):
        lines.append(f"layers {', '.join(map(str, missing))} have no scales")
    for number, kinds in layers.items():
        for kind in "kv":
            if kind not in kinds:
                lines.append(f"layer {number} has no {kind}_scale")
                continue
            scale = kinds[kind]
            count = heads if strategy == "attn_head" else 1
            if scale.numel() != count:
                lines.append(
                    f"{kind}_scale of layer {number} has {scale.numel()} values, not {count}"
                )
            if not scale.isfinite().all():
                lines.append(f"{kind}_scale of layer {number} is not finite")
            elif (scale <= 0).any():
                lines.append(f"{kind}_scale of layer {number} is zero or negative")
            elif (scale > SCALE_RANGE[1]).any() or (scale < SCALE_RANGE[0]).any():
                lines.append(f"{kind}_scale of layer {number} is absurd: {scale.tolist()}")
    return lines


def _tail(name: str) -> str:
    """The name from the layer's number on: a checkpoint may call what holds the layers otherwise
    than the model does."""
    return name[NAME.match(name).start("layer") :]


def compare(wanted: Scales, found: Scales) -> list[str]:
    """Where the scales of a checkpoint differ from those of the model, but for bf16's rounding."""
    tails = [{_tail(name): tensor for name, tensor in of.items()} for of in (wanted, found)]
    if all(len(short) == len(of) for short, of in zip(tails, (wanted, found), strict=True)):
        wanted, found = tails
    lines = [f"{name} is not in the checkpoint" for name in wanted if name not in found]
    lines += [f"{name} is in the checkpoint alone" for name in found if name not in wanted]
    for name in set(wanted) & set(found):
        a, b = wanted[name], found[name]
        if a.shape != b.shape or not torch.allclose(a, b, rtol=_BF16_ROUNDING, atol=0):
            lines.append(f"{name} is {b.tolist()} in the checkpoint, and {a.tolist()} in the model")
    return lines
