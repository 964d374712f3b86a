"""How much a KV cache holds: bytes, tokens and requests for every dtype, before anything runs.

Reads a config.json and computes what vLLM would; nothing is downloaded, no engine is started. With
--kv-memory the tokens are those of vLLM's start-up log. With --gpu-memory the KV cache gets what
--gpu-memory-utilization leaves beside the weights; activations and CUDA graphs take some of it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kvcompress.cli.options import (
    add_kivi_options,
    add_pages_profile,
    human_size,
    kivi_settings,
    number,
    whole,
)

CODEC_FIGURES = {
    "lossless": (10.36, 0.26, 0.65),
    "high": (3.88, 0.27, 0.85),
    "medium": (2.22, 0.28, 0.85),
    "low": (1.61, 0.28, 0.90),
    "paper": (2.58, 0.35, 0.89),
}
"""Bits a value, GB/s of KV encoded and decoded a core: README's figures, of one AVX2 core."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, engine, memory and settings."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model's folder, its config.json, or a name in the local cache of Hugging Face",
    )
    parser.add_argument(
        *("--context", "--max-model-len"),
        type=whole,
        metavar="N",
        help="tokens of a request, vLLM's --max-model-len; default: the model's longest",
    )
    parser.add_argument(
        "--batch", type=whole, default=1, metavar="B", help="requests whose bytes are told (1)"
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory of the KV cache on each rank, such as 2GiB: vLLM's --kv-cache-memory-bytes, or"
        " VLLM_CPU_KVCACHE_SPACE",
    )
    memory.add_argument("--gpu-memory", metavar="SIZE", help="memory of each GPU, such as 80GiB")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=number,
        default=0.92,
        metavar="SHARE",
        help="share of --gpu-memory for weights and KV cache (0.92)",
    )
    parser.add_argument(
        "--weights",
        metavar="SIZE",
        help="bytes of the weights on all ranks; default: of the files beside the config.json",
    )
    parser.add_argument(
        *("--tp", "--tensor-parallel-size"), type=whole, default=1, metavar="N", help="ranks (1)"
    )
    parser.add_argument(
        "--kv-cache-dtype", metavar="DTYPE", help="only this dtype; default: a table of all"
    )
    parser.add_argument(
        "--kv-cache-dtype-skip-layers",
        nargs="+",
        default=[],
        metavar="LAYER",
        help="layers left out of the dtype: numbers, or sliding_window",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="the engine; default: what vLLM is installed for"
    )
    parser.add_argument("--dtype", default="auto", help="the dtype the model computes in (auto)")
    parser.add_argument("--block-size", type=whole, metavar="N", help="tokens of a block")
    parser.add_argument("--max-num-seqs", type=whole, metavar="N", help="as vLLM's")
    parser.add_argument("--max-num-batched-tokens", type=whole, metavar="N", help="as vLLM's")
    parser.add_argument(
        "--codec-speed",
        action="append",
        default=[],
        metavar="LEVEL=BITS,ENCODE,DECODE",
        help="bits a value and GB/s a core of a codec level, measured on your data and machine "
        "(benchmarks/bench_codec.py); default: README's figures",
    )
    parser.add_argument(
        "--threads", type=whole, default=1, metavar="N", help="threads that encode, and decode (1)"
    )
    add_kivi_options(parser)
    add_pages_profile(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    found = estimate(arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        print_estimate(found)
    return 0


@dataclass(frozen=True)
class Row:
    """A dtype with its settings, as the table names it."""

    dtype: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        told = [
            str(value) if name == "preset" else f"{name} {value}"
            for name, value in self.settings.items()
        ]
        return ", ".join([self.dtype, *told])


def rows(arguments: argparse.Namespace, device: str, latent: bool, kivi_pages: bool) -> list[Row]:
    """What the table is of: the dtype that was asked for, or all that the engine has."""
    settings = kivi_settings(arguments)
    if arguments.kv_cache_dtype is not None:
        return [Row(arguments.kv_cache_dtype, settings)]
    kivi = [
        Row("kivi_2bit", settings),
        *(
            Row("kivi_2bit", {**settings, "preset": preset, "group_size": group})
            for preset, group in (*(("balanced", 128), ("kivi", 32), ("kivi", 64), ("kivi", 128)),)
            if not settings
        ),
        *(Row(dtype, settings) for dtype in ("kivi_k4v2", "kivi_k2v4", "kivi_4bit")),
    ]
    # vLLM's other packed dtypes are for GPUs.
    own = ["auto"] if device == "cpu" and latent else ["auto", "fp8"]
    if device == "cuda":
        own += ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
        if latent:
            own += ["fp8_ds_mla", "nvfp4_ds_mla"]
        else:
            own += ["nvfp4", "ultraquant_4bit"]
            own += ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"]
            own += ["turboquant_3bit_nc"]
    return [*(Row(dtype, {}) for dtype in own), *(kivi if kivi_pages else [])]


def estimate(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError that names the option for what cannot be."""
    from vllm_kvcompress.capacity import CacheOptions, EngineOptions, plan
    from vllm_kvcompress.config import KiviSettings
    from vllm_kvcompress.model_layers import ModelLayers
    from vllm_kvcompress.page_profile import load_page_profile

    if arguments.batch < 1 or arguments.threads < 1:
        raise ValueError("--batch and --threads are numbers of at least 1")
    model = ModelLayers.read(arguments.model, arguments.dtype)
    profile = None
    if arguments.pages_profile is not None:
        profile = load_page_profile(arguments.pages_profile)
    device = arguments.device or installed_device()
    engine = EngineOptions(
        device=device,
        tensor_parallel_size=arguments.tp,
        block_size=arguments.block_size,
        max_model_len=arguments.context,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        gpu_memory=None if arguments.gpu_memory is None else _size(arguments, "gpu_memory"),
    )
    context = arguments.context or model.max_model_len
    memory, weights = kv_memory(arguments, device)
    whole = plan(model, engine, CacheOptions(kv_cache_dtype="bfloat16"))
    table = []
    latent = any(layer.is_latent for layer in model.layers)
    for row in rows(arguments, device, latent, not latent and not model.states):
        kivi = KiviSettings.parse({"kvcompress": {"kivi": row.settings}})
        cache = CacheOptions(row.dtype, kivi, tuple(arguments.kv_cache_dtype_skip_layers), profile)
        line: dict[str, Any] = {"kv_cache_dtype": row.dtype, "settings": row.settings}
        table.append(line)
        try:
            planned = plan(model, engine, cache)
            line.update(
                bits_per_value=8 * planned.token_bytes() / planned.values(),
                token_bytes=planned.token_bytes(),
                block_tokens=sorted({p.block for group in planned.groups for p in group}),
                block_bytes=planned.block_bytes,
                groups=[len(group) for group in planned.groups],
                request_bytes=planned.request_bytes(context),
                batch_bytes=arguments.batch * planned.request_bytes(context),
            )
            if memory is not None:
                line.update(
                    pool_bytes=planned.pool_bytes(memory),
                    blocks=planned.blocks(memory),
                    tokens=planned.tokens(memory),
                    tokens_without_pool=replace(planned, pool_block=0).tokens(memory),
                    requests=planned.requests(memory, context),
                    times=planned.tokens(memory) / max(whole.tokens(memory), 1),
                )
        except ValueError as error:
            if len(table) == 1:
                raise
            line["refused"] = str(error)
    return {
        "model": model.name,
        "layers": len(model.layers),
        "windows": sum(1 for layer in model.layers if layer.window),
        "states": len(model.states),
        "assumed": model.assumed,
        "kv_heads": model.layers[0].kv_heads,
        "head_size": model.layers[0].key_size,
        "latent": model.layers[0].is_latent,
        "dtype": model.dtype,
        "device": device,
        "tensor_parallel_size": arguments.tp,
        "context": context,
        "batch": arguments.batch,
        "kv_memory": memory,
        "weights": weights,
        "pages_profile": None if profile is None else profile.folder,
        "dtypes": table,
        "threads": arguments.threads,
        "codec_levels": break_even(arguments.codec_speed, arguments.threads),
    }


def installed_device() -> str:
    """``cpu`` where the installed vLLM is for a CPU, else ``cuda``."""
    from importlib import metadata

    try:
        return "cpu" if metadata.version("vllm").endswith("+cpu") else "cuda"
    except metadata.PackageNotFoundError:
        return "cuda"


def _size(arguments: argparse.Namespace, name: str) -> int:
    from vllm_kvcompress.stores import parse_size

    return parse_size(getattr(arguments, name), "--" + name.replace("_", "-"))


def kv_memory(arguments: argparse.Namespace, device: str) -> tuple[int | None, int | None]:
    """Bytes for the KV cache on each rank, and of the weights on all; None for what nobody said."""
    if arguments.kv_memory is not None:
        return _size(arguments, "kv_memory"), None
    if arguments.gpu_memory is None:
        return None, None
    if device == "cpu":
        raise ValueError("--gpu-memory is for --device cuda; give --kv-memory for the CPU engine")
    share = arguments.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ValueError(f"--gpu-memory-utilization is {share}; expected a share up to 1")
    if arguments.weights is not None:
        weights = _size(arguments, "weights")
    else:
        weights = weight_bytes(arguments.model)
    left = int(_size(arguments, "gpu_memory") * share) - weights // max(arguments.tp, 1)
    if left <= 0:
        raise ValueError(
            f"the weights, {human_size(weights)}, leave nothing of --gpu-memory "
            f"{arguments.gpu_memory}; give more, or a larger --tp"
        )
    return left, weights


def weight_bytes(model: str) -> int:
    """Bytes of the weights beside a model's config.json. Raises ValueError if there are none."""
    from vllm_kvcompress.model_layers import find_config

    folder = find_config(model).parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError):
            pass
    for pattern in ("*.safetensors", "*.bin"):
        found = sum(path.stat().st_size for path in Path(folder).glob(pattern))
        if found:
            return found
    raise ValueError(f"{folder} holds no weights; give their size, such as --weights 16GiB")


def break_even(given: list[str], threads: int) -> list[dict[str, Any]]:
    """The links on which a codec level pays.

    Through a link of ``L`` bytes a second, KV of 16 bits takes ``1 / L`` seconds a byte as it is;
    as a blob that is ``r`` times as small, ``1 / (r L)`` and ``1 / D`` to decode. The blob is
    sooner there if ``L < D (1 - 1 / r)``, and the same holds for storing with the encoder's speed.
    Where transfer and codec overlap completely, the bound is ``D`` itself.
    """
    figures = dict(CODEC_FIGURES)
    for text in given:
        level, equals, values = text.partition("=")
        try:
            bits, encode, decode = (float(value) for value in values.split(","))
        except ValueError:
            bits = encode = decode = 0.0
        if not equals or level not in figures or min(bits, encode, decode) <= 0:
            raise ValueError(
                f"--codec-speed {text}: write LEVEL=BITS,ENCODE,DECODE with a level of "
                f"{', '.join(figures)}, such as high=3.9,0.3,0.9"
            )
        figures[level] = (bits, encode, decode)
    return [
        {
            "level": level,
            "bits_per_value": bits,
            "ratio": 16 / bits,
            "encode_gb_s": encode * threads,
            "decode_gb_s": decode * threads,
            "store_below_gb_s": max(0.0, encode * threads * (1 - bits / 16)),
            "load_below_gb_s": max(0.0, decode * threads * (1 - bits / 16)),
        }
        for level, (bits, encode, decode) in figures.items()
    ]


def print_estimate(found: dict[str, Any]) -> None:
    """The tables for a person."""
    if found["latent"]:
        shape = f"a latent of {found['head_size']} values a token"
    else:
        shape = f"{found['kv_heads']} KV heads of {found['head_size']} channels"
    windows = f", {found['windows']} with a sliding window" if found["windows"] else ""
    if found["states"]:
        windows += f", {found['states']} more with a state"
    ranks = found["tensor_parallel_size"]
    print(f"{found['model']}: {found['layers']} layers{windows}, {shape}, {found['dtype']}")
    if found["assumed"]:
        print(f"a type that is not known, {found['assumed']}")
    memory = found["kv_memory"]
    where = "the CPU engine" if found["device"] == "cpu" else "a GPU"
    rank = f", each of {ranks} ranks" if ranks > 1 else ""
    if memory is None:
        print(f"KV cache on {where}{rank}; --kv-memory or --gpu-memory tells what fits")
    else:
        beside = "" if found["weights"] is None else " beside the weights"
        print(f"KV cache of {human_size(memory)}{beside} on {where}{rank}")
    if found["pages_profile"] is not None:
        print(f"fp8 and KIVI pages with the profile in {found['pages_profile']}")
    print(f"requests of {found['context']:,} tokens\n")
    names = [Row(line["kv_cache_dtype"], line["settings"]).name for line in found["dtypes"]]
    width = max(len("kv_cache_dtype"), *(len(name) for name in names))
    batch = "1 request" if found["batch"] == 1 else f"{found['batch']} requests"
    head = f"{'kv_cache_dtype':{width}}  {'bits':>5}  {'B/token':>9}  {batch:>12}"
    if memory is not None:
        head += f"  {'pool':>10}  {'tokens':>11}  {'requests':>8}  {'16 bits':>7}"
    print(head)
    for name, line in zip(names, found["dtypes"], strict=True):
        if "refused" in line:
            print(f"{name:{width}}  {line['refused']}")
            continue
        text = (
            f"{name:{width}}  {line['bits_per_value']:5.2f}  {line['token_bytes']:9,.0f}  "
            f"{human_size(line['batch_bytes']):>12}"
        )
        if memory is not None:
            pool = human_size(line["pool_bytes"]) if line["pool_bytes"] else "-"
            text += (
                f"  {pool:>10}  {line['tokens']:11,}  {line['requests']:8,}  {line['times']:6.2f}x"
            )
        print(text)
    threads = found["threads"]
    print(
        f"\noffload, {threads} thread{'s' * (threads > 1)}: a level is sooner than codec raw "
        "through links below\n"
        f"{'level':10}  {'bits':>5}  {'ratio':>5}  {'encode':>9}  {'decode':>9}  "
        f"{'storing':>9}  {'loading':>9}  GB/s"
    )
    for line in found["codec_levels"]:
        print(
            f"{line['level']:10}  {line['bits_per_value']:5.2f}  {line['ratio']:5.2f}  "
            f"{line['encode_gb_s']:9.2f}  {line['decode_gb_s']:9.2f}  "
            f"{line['store_below_gb_s']:9.2f}  {line['load_below_gb_s']:9.2f}"
        )
