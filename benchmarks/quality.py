"""What codecs and compressed pages cost a model: nats a token above exact history, on real text.

A window is 1,536 tokens of history and the 256 that follow. The KV of the history, but for its last
128 tokens, goes through the codec in chunks of 256, or into KIVI pages of blocks of 128; the loss
is the mean negative log likelihood of the 256 tokens minus that of the same tokens with bfloat16
history. The divergence is that of the predicted distributions from those with bfloat16 history, in
nats a token: it says the same with far less noise. The model computes in float32.

    python benchmarks/quality.py [--only codecs|pages] [--model DIR] [--text FILE ...]
        [--windows N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import peer_lmcache
import torch
from rate_distortion import OTHERS
from texts import chosen_texts
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from vllm_kvcompress.calibration.dump import cache_to_kv, load_model, prefill, tokenize
from vllm_kvcompress.calibration.sensitivity import BLOCK, kivi_pages
from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.config import KiviSettings

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
HISTORY, RECENT, SCORED = 1536, 128, 256
BASE = "raw"
LEVELS = ("lossless", "high", "medium", "low", "paper")

Method = Callable[[torch.Tensor], torch.Tensor]
"""KV ``[layers, 2, tokens, kv_heads, head_size]`` in bfloat16 -> as it comes back."""


def codec_method(name: str, chunk: int, **settings) -> Method:
    codec = create_codec(name, **settings)

    def method(kv: torch.Tensor) -> torch.Tensor:
        parts = [codec.decode(codec.encode(part)) for part in kv.split(chunk, dim=2)]
        return torch.cat(parts, dim=2)

    return method


def pages_method(cache_dtype: str, **settings) -> Method:
    """Into pages of this ``kv_cache_dtype`` and out again; bits a value stand in ``.bits``."""
    given = KiviSettings.parse({"kvcompress": {"kivi": settings}})
    through_pages = kivi_pages(cache_dtype, **settings)

    def method(kv: torch.Tensor) -> torch.Tensor:
        fmt = given.page_format(cache_dtype, BLOCK, kv.shape[-1], kv.dtype)
        method.bits = fmt.bits_per_value
        return through_pages(kv)

    return method


def plain_kivi(kv: torch.Tensor, group: int = 32) -> torch.Tensor:
    """KIVI at two bits in a few lines of float32, sharing nothing with the kernels."""

    def through(x: torch.Tensor, dim: int) -> torch.Tensor:
        split = x.float().unflatten(dim, (-1, group))
        low, high = split.amin(dim + 1, keepdim=True), split.amax(dim + 1, keepdim=True)
        scale = ((high - low) / 3).clamp_min(1e-8)
        return (((split - low) / scale).clamp(0, 3).round() * scale + low).flatten(dim, dim + 1)

    return torch.stack([through(kv[:, 0], 1), through(kv[:, 1], 3)], 1).to(kv.dtype)


def pages_methods() -> dict[str, Method]:
    methods = {BASE: codec_method("raw", BLOCK), "plain KIVI 2-bit G32": plain_kivi}
    for group in (32, 64, 128):
        published = {"preset": "kivi", "group_size": group}
        methods[f"kivi_2bit kivi G{group}"] = pages_method("kivi_2bit", **published)
    for group in (32, 64, 128):
        methods[f"kivi_2bit balanced G{group}"] = pages_method("kivi_2bit", group_size=group)
    for dtype in ("kivi_k4v2", "kivi_k2v4", "kivi_4bit"):
        methods[f"{dtype} kivi G32"] = pages_method(dtype, preset="kivi")
        methods[f"{dtype} balanced G64"] = pages_method(dtype)
    return methods


def codec_methods(levels: list[str], chunk: int) -> dict[str, Method]:
    methods = {BASE: codec_method("raw", chunk)}
    methods |= {level: codec_method("cachegen", chunk, level=level) for level in levels}
    methods["int8"] = codec_method("int8", chunk)
    for codec, others in OTHERS.items():
        for level in others:
            methods[f"{codec} {level}"] = codec_method(codec, chunk, level=level)
    methods["LMCache CacheGen"] = lambda kv: peer_lmcache.quantise(kv)[1].to(kv.dtype)
    return methods


@torch.inference_mode()
def predict(model: PreTrainedModel, kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log probabilities ``[scored - 1, vocabulary]`` of what follows each of ``ids`` but the last.

    kv: the history; ids: int64 ``[scored]``.
    """
    cache = DynamicCache()
    for layer, pair in enumerate(kv.float().transpose(2, 3)):
        cache.update(pair[0][None], pair[1][None], layer)
    logits = model(ids[None], past_key_values=cache, use_cache=True).logits[0, :-1]
    return functional.log_softmax(logits.float(), dim=-1)


def measure_window(
    model: PreTrainedModel, ids: torch.Tensor, methods: dict[str, Method]
) -> dict[str, tuple[float, float]]:
    """(nats a token, divergence from BASE) by method; ``exact`` is history in float32.

    ids: int64, those of one window. BASE is the first of the methods.
    """
    history = cache_to_kv(prefill(model, ids[:HISTORY]))
    old, recent = history.split([HISTORY - RECENT, RECENT], dim=2)
    scored = ids[HISTORY:]
    predicted = {}
    measured = {}
    for label, method in {**methods, "exact": lambda kv: kv}.items():
        back = method(old if label == "exact" else old.to(torch.bfloat16)).float()
        now = predict(model, torch.cat([back, recent], dim=2), scored)
        base = predicted.setdefault(BASE, now)
        divergence = functional.kl_div(now, base, reduction="batchmean", log_target=True)
        measured[label] = (functional.nll_loss(now, scored[1:]).item(), divergence.item())
    return measured


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use")
    parser.add_argument("--windows", type=int, default=3, help="of each text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--only", choices=["codecs", "pages"], default="codecs")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)

    pages = args.only == "pages"
    methods = pages_methods() if pages else codec_methods(args.levels, args.chunk)
    length = HISTORY + SCORED
    texts = chosen_texts(args.text)
    model, tokenizer = load_model(args.model)
    windows = []
    for name, text in texts:
        ids = tokenize(tokenizer, text, args.windows * length)
        for number, window in enumerate(ids.split(length)):
            measured = measure_window(model, window, methods)
            windows.append({"text": name, "window": number, "measured": measured})
            base = measured[BASE][0]
            losses = "  ".join(f"{m} {v[0] - base:+.4f}" for m, v in measured.items() if m != BASE)
            print(f"{name} {number}: {BASE} {base:.4f}  {losses}", flush=True)

    print(
        f"{'method':<24}{'nats/token':>12}{'above ' + BASE:>12}{'std error':>12}{'divergence':>12}"
        + ("        bits" if pages else "")
    )
    rows = []
    for label in windows[0]["measured"]:
        own = [w["measured"][label] for w in windows]
        above = [nats - w["measured"][BASE][0] for (nats, _), w in zip(own, windows, strict=True)]
        error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else float("nan")
        row = {
            "method": label,
            "nats": statistics.mean(nats for nats, _ in own),
            "above": statistics.mean(above),
            "std_error": error,
            "divergence": statistics.mean(divergence for _, divergence in own),
        }
        if hasattr(methods.get(label), "bits"):
            row["bits"] = methods[label].bits
        rows.append(row)
        print(f"{label:<24}" + "".join(f"{row[k]:>12.4f}" for k in list(row)[1:]), flush=True)
    if args.json:
        result = {"model": args.model.name, "chunk": args.chunk, "rows": rows, "windows": windows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
