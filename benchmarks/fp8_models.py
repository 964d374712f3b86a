"""Checkpoints with FP8 scales, and the same model with K and V that need them.

What calibration writes is imitated here by taking the true maxima of one text's K and V, so that
tests can serve it without the environment of calibration.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0
"""Of e4m3."""


def copy_checkpoint(model: Path, out: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A copy of a checkpoint in one file, its files linked, with other weights if given."""
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if weights is not None and file.suffix == ".safetensors":
            continue
        (out / file.name).unlink(missing_ok=True)
        os.link(file, out / file.name)
    if weights is not None:
        (out / "model.safetensors").unlink(missing_ok=True)
        save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def with_scales(
    model: Path, out: Path, kv: torch.Tensor, per_head: bool, missing: tuple[int, ...] = ()
) -> Path:
    """A copy of a checkpoint that holds FP8 scales, in the form that LLM Compressor gives them.

    kv: K and V of some text, ``[layers, 2, tokens, kv_heads, head_size]``; missing: layers that get
    none.
    """
    out = copy_checkpoint(model, out)
    largest = kv.float().abs().amax((2, 4)) / LARGEST  # [layers, 2, kv_heads]
    tensors = {}
    for layer, pair in enumerate(largest):
        for kind, scale in zip("kv", pair, strict=True):
            value = scale.view(-1, 1, 1) if per_head else scale.amax().view(1)
            if layer not in missing:
                tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = value.clone()
    save_file(tensors, out / "kv_scales.safetensors", {"format": "pt"})
    declare_scheme(out, "attn_head" if per_head else "tensor")
    return out


def declare_scheme(checkpoint: Path, strategy: str) -> None:
    """Let a checkpoint's config.json say that it has FP8 scales of a strategy."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
        },
    }
    path.unlink()  # a link to the original
    path.write_text(json.dumps(config, indent=1))


def rescaled(model: Path, out: Path, k_powers: tuple[int, ...], v_powers: tuple[int, ...]) -> Path:
    """A Llama whose KV head h has K larger by ``2**k_powers[h]`` and V by ``2**v_powers[h]``.

    Queries and the output projection are smaller by as much, so that the model computes the same:
    powers of two round nothing.
    """
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    weights = load_file(model / "model.safetensors")
    k = torch.tensor([2.0**p for p in k_powers])
    v = torch.tensor([2.0**p for p in v_powers])
    assert len(k) == len(v) == kv_heads
    for name, weight in weights.items():
        rows, columns = None, None
        if ".k_proj." in name:
            rows = k.repeat_interleave(size)
        elif ".v_proj." in name:
            rows = v.repeat_interleave(size)
        elif ".q_proj." in name:
            rows = (1 / k).repeat_interleave(heads // kv_heads * size)
        elif ".o_proj.weight" in name:
            columns = (1 / v).repeat_interleave(heads // kv_heads * size)
        if rows is not None:
            weights[name] = (weight.float() * rows.view(-1, *[1] * (weight.dim() - 1))).to(weight)
        elif columns is not None:
            weights[name] = (weight.float() * columns).to(weight)
    return copy_checkpoint(model, out, {name: w.contiguous() for name, w in weights.items()})
