"""Options that several commands have: of KIVI pages, of the offload, of what is compared."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvcompress.evaluation import settings


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def number(text: str) -> int | float:
    """A number, whole if it is written so."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def names(text: str) -> list[str]:
    """Names between commas."""
    return text.split(",")


KIVI: dict[str, tuple[Callable[[str], Any] | None, str]] = {
    "preset": (str, "balanced or kivi, the published method: where the others' defaults come from"),
    "group_size": (whole, "tokens of a group of K, and channels of a group of V: 32, 64 or 128"),
    "residual_length": (whole, "most recent tokens of a request that stay exact"),
    "sink_tokens": (whole, "first tokens of a request that stay exact"),
    "boosted_channels": (number, "K channels with 4 bits: a share, or a multiple of 16"),
    "clipping": (str, "how scales are found: none, or least_squares"),
    "rotate_values": (None, "rotate V over its channels"),
    "pool_share": (number, "most that exact tokens take of the KV cache's memory"),
    "skip_dtype": (str, "kv_cache_dtype of the layers in --kv-cache-dtype-skip-layers"),
}
"""Settings of KIVI pages, given as ``--kivi-NAME``: how a value is read (None: a switch)."""

OFFLOAD: dict[str, tuple[Callable[[str], Any] | None, str]] = {
    "codec": (str, "cachegen, fp8, kivi, int8 or raw"),
    "level": (str, "of the codec; of cachegen: lossless, high, medium, low or paper"),
    "levels": (names, "levels at which every chunk is stored, such as high,low"),
    "ttft_slo_ms": (number, "deadline for the loading of a prompt, in milliseconds"),
    "profile": (str, "directory that `vllm-kvcompress calibrate` wrote, for cachegen"),
    "write_back": (None, "a store gets a blob only when the one above evicts it"),
    "chunk_tokens": (whole, "tokens of one blob"),
    "threads": (whole, "threads for encoding, and as many for decoding, in each worker"),
    "staging_bytes": (str, "pages that may wait for their encoder, such as 512MiB"),
    "retry_seconds": (number, "how long a chunk that failed to load counts as a miss"),
    "lookup_seconds": (number, "how long a request waits to hear what the shared stores hold"),
}
"""Settings of the offload, given as ``--kv-NAME``; the stores are ``--kv-store``."""

STORE_FORM = "TYPE:SETTING[,SETTING][,NAME=VALUE]"


def add_kivi_options(parser: argparse.ArgumentParser) -> None:
    """``--kivi-NAME`` for every setting of KIVI pages."""
    group = parser.add_argument_group("settings of KIVI pages")
    _add(group, "kivi", KIVI)


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    """``--kv-NAME`` for every setting of the offload, and ``--kv-store``."""
    group = parser.add_argument_group("offload; any of these switches it on")
    _add(group, "kv", OFFLOAD)
    group.add_argument(
        "--kv-store",
        dest="kv_stores",
        action="append",
        metavar=STORE_FORM,
        help="a store, such as memory:8GiB or disk:/var/cache/kv,100GiB; again for one below it",
    )


def _add(
    group: Any, prefix: str, known: Mapping[str, tuple[Callable[[str], Any] | None, str]]
) -> None:
    for name, (read, explanation) in known.items():
        option = f"--{prefix}-{name.replace('_', '-')}"
        if read is None:
            group.add_argument(option, action=argparse.BooleanOptionalAction, help=explanation)
        else:
            group.add_argument(option, type=read, metavar="VALUE", help=explanation)


def add_pages_profile(parser: argparse.ArgumentParser) -> None:
    """``--pages-profile``, the directory that is ``kvcompress.profile`` for the engine."""
    parser.add_argument(
        "--pages-profile",
        metavar="DIR",
        help="directory that `vllm-kvcompress calibrate` wrote: the layers to leave out of fp8 and "
        "KIVI pages, and how the others are packed",
    )


def kivi_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of KIVI pages that were given."""
    return _given(arguments, "kivi", KIVI)


def offload_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ``kv_connector_extra_config`` that was given; empty if none was.

    Raises ValueError for a store that makes no sense.
    """
    found = _given(arguments, "kv", OFFLOAD)
    if arguments.kv_stores:
        found["stores"] = [parse_store(text) for text in arguments.kv_stores]
    return found


def _given(arguments: argparse.Namespace, prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: getattr(arguments, f"{prefix}_{name}") for name in names}
    return {name: value for name, value in values.items() if value is not None}


def parse_store(text: str) -> dict[str, Any]:
    """``disk:/path,20GiB`` as the settings of a store.

    What has no name is a setting of the store in the order in which its class takes them. Raises
    ValueError that says what to write.
    """
    from vllm_kvcompress.stores import SEAL_KEY, store_class, store_types

    kind, colon, rest = text.partition(":")
    if kind not in store_types():
        raise ValueError(
            f"--kv-store {text}: there is no type {kind!r}; choose from "
            f"{', '.join(store_types())}, and write {STORE_FORM}"
        )
    parameters = inspect.signature(store_class(kind)).parameters
    found: dict[str, Any] = {"type": kind}
    places = iter(parameters)
    for part in rest.split(",") if colon else []:
        name, equals, value = part.partition("=")
        if not equals or name not in (*parameters, SEAL_KEY):
            name, value = next(places, ""), part
        if not name or not value or name in found:
            raise ValueError(
                f"--kv-store {text}: {part!r} is one too many, or empty; {kind} takes "
                f"{', '.join((*parameters, SEAL_KEY))}"
            )
        found[name] = _value(value)
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in found]
    if missing:
        raise ValueError(f"--kv-store {text}: {kind} needs {missing[0]}; write {STORE_FORM}")
    return found


def _value(text: str) -> Any:
    """A number or a truth value if it is written as one, else text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float) else text


def add_comparison(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """MODEL, the settings that are compared on it, and the text that it is asked with."""
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or its cached name")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=list(default),
        metavar="SETTING",
        help=f"what is compared with the model's own dtype: {settings.FORM}; all: every kind and "
        f"level; default: {' '.join(default)}",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="your text; default: Python's manual and code",
    )


def add_counts(
    parser: argparse.ArgumentParser, counts: Iterable[tuple[str, int | Sequence[int], str]]
) -> None:
    """Options with a number, or with several: name, default and explanation of each."""
    for name, default, explanation in counts:
        several = not isinstance(default, int)
        told = " ".join(map(str, default)) if several else default
        parser.add_argument(
            f"--{name}",
            nargs="+" if several else None,
            type=whole,
            default=list(default) if several else default,
            metavar="N",
            help=f"{explanation} ({told})",
        )


def engine_options(text: str) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` from JSON. Raises ValueError for what is no object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'--engine {text}: {error}; write JSON, such as \'{{"dtype": "float32"}}\''
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f'--engine {text}: write an object, such as {{"tensor_parallel_size": 2}}')
    return found


def log_aside(verbose: int) -> None:
    """Keep vLLM's log out of the results, and let it tell errors only unless more was asked for.

    To be called before torch and vLLM are imported, whose own first words it holds back too.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def human_size(count: float) -> str:
    """Bytes for a person, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
