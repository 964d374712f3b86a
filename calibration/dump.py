"""Keys and values of a model on real text.

``python -m vllm_kvcompress.calibration.dump MODEL OUT TEXT...`` writes one safetensors file a text:
``kv``, bfloat16 ``[layers, 2, tokens, kv_heads, head_size]``, and ``ids``, int64 ``[tokens]``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from vllm_kvcompress.calibration.scales import ENCODERS

# Longest piece of a text that goes through the model at once: bounds the logits and attention.
PREFILL_TOKENS = 512

_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")


def model_class(config: PretrainedConfig) -> type[AutoModelForCausalLM]:
    """The class that loads a model of this configuration: one that predicts text, perhaps after
    looking at pictures. Raises ValueError for others."""
    kind = type(config)
    if not config.is_encoder_decoder:
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM
        if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return AutoModelForImageTextToText
    raise ValueError(f"{config.model_type} is no decoder that predicts text")


def load_weights(path: str | Path, config: PretrainedConfig, dtype: Any) -> PreTrainedModel:
    """A model of this configuration with the weights of a checkpoint.

    Raises ValueError where the weights are those of another model: transformers fills what is
    missing with random numbers, and passes over the layers that are too many.
    """
    loads = model_class(config)
    model, found = loads.from_pretrained(path, dtype=dtype, output_loading_info=True)
    missing = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    if missing:
        raise ValueError(
            f"its weights lack {_few(missing)}, which its configuration asks for; "
            "get the whole checkpoint"
        )
    text = config.get_text_config()
    layers = text.num_hidden_layers + (getattr(text, "num_nextn_predict_layers", None) or 0)
    beyond = {
        name
        for name in found["unexpected_keys"]
        if (number := _LAYER.search(name))
        and int(number[1]) >= layers
        and not ENCODERS.search(name)
    }
    if beyond:
        raise ValueError(
            f"its weights hold {_few(beyond)}, and its configuration has only {layers} layers; "
            "correct num_hidden_layers in config.json"
        )
    return model


def _few(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None):
    """The model and the tokenizer of a checkpoint directory.

    dtype: of the weights and the arithmetic; if None, bfloat16 on an accelerator and float32 on
    the CPU, where many machines have no fast bfloat16.
    """
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model = load_weights(path, AutoConfig.from_pretrained(path), dtype).eval().to(device)
    return model, AutoTokenizer.from_pretrained(path)


@torch.inference_mode()
def prefill(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """The model's cache after the tokens ``ids``, int64 ``[tokens]``."""
    cache = DynamicCache()
    for start in range(0, len(ids), PREFILL_TOKENS):
        piece = ids[None, start : start + PREFILL_TOKENS].to(model.device)
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def cache_to_kv(cache: DynamicCache) -> torch.Tensor:
    """The K and V of a cache of one sequence: ``[layers, 2, tokens, kv_heads, head_size]``.

    Raises ValueError if layers differ in shape (sliding windows, head sizes), or have no K and V.
    """
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    if any(not isinstance(tensor, torch.Tensor) for tensor in held):
        raise ValueError("some layers of this model hold no K and V")
    if len({tensor.shape for tensor in held}) != 1:
        raise ValueError("the layers of this model hold K and V of different shapes")
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).contiguous()


def dump_kv(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """K and V of the tokens ``ids``, int64 ``[tokens]``, rounded to bfloat16, on the CPU.

    Returns ``[layers, 2, tokens, kv_heads, head_size]``, K after its rotary embedding, as an
    engine caches it.
    """
    return cache_to_kv(prefill(model, ids)).to("cpu", torch.bfloat16)


def tokenize(tokenizer, text: str, tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of a text, int64. Raises ValueError if it has fewer."""
    # No tokenizer in use makes tokens of more than 16 characters on average.
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[0, :tokens]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens; {tokens} are needed")
    return ids


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvcompress.calibration.dump",
        description="Write the KV of a model on text files, one safetensors file a text.",
    )
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("out", type=Path, help="directory to write to")
    parser.add_argument("texts", nargs="+", type=Path, help="text files")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens of each text (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    args = parser.parse_args(argv)
    model, tokenizer = load_model(args.model, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.texts:
        try:
            ids = tokenize(tokenizer, path.read_text(errors="replace"), args.tokens)
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        kv = dump_kv(model, ids)
        target = args.out / f"{path.stem}.safetensors"
        save_file({"kv": kv, "ids": ids}, target)
        print(f"{target}: {list(kv.shape)} bfloat16", flush=True)


if __name__ == "__main__":
    main()
