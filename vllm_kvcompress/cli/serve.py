"""vllm serve, with the settings of this package as plain options.

Every option that is not one of these is passed on to vLLM as it is. The equivalent `vllm serve`
line is printed to standard error before it is run; with --dry-run it is printed, and not run.

  vllm-kvcompress serve MODEL --kv-cache-dtype kivi_2bit --kivi-group-size 128
  vllm-kvcompress serve MODEL --kv-level medium --kv-store memory:8GiB \\
      --kv-store disk:/var/cache/kv,100GiB --max-model-len 32768
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvcompress.capacity import CACHE_DTYPES
from vllm_kvcompress.cli.options import (
    KIVI,
    OFFLOAD,
    add_kivi_options,
    add_offload_options,
    add_pages_profile,
    kivi_settings,
    offload_settings,
)
from vllm_kvcompress.config import KIVI_DTYPES, PROFILE, KiviSettings, OffloadSettings
from vllm_kvcompress.evaluation.server import vllm_path
from vllm_kvcompress.page_profile import load_page_profile
from vllm_kvcompress.stores import parse_size

TRANSFER = "--kv-transfer-config"
ADDITIONAL = "--additional-config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings; the model and everything else are vLLM's."""
    parser.usage = "%(prog)s MODEL [options] [options of vllm serve]"
    parser.add_argument("--dry-run", action="store_true", help="print the line, and do not run it")
    add_offload_options(parser)
    add_kivi_options(parser)
    add_pages_profile(parser)
    parser.set_defaults(rest=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the line, then become it."""
    command = vllm_command(arguments)
    for hint in misspelt(arguments.rest):
        print(hint, file=sys.stderr)
    if arguments.json:
        print(json.dumps(command))
    elif arguments.dry_run:
        print(shlex.join(command))
    else:
        print(shlex.join(command), file=sys.stderr)
    if arguments.dry_run:
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(vllm_path(), command)


def vllm_command(arguments: argparse.Namespace) -> list[str]:
    """The arguments of the equivalent ``vllm serve``, the command's name first.

    Raises ValueError that names the option, for a value that cannot be used and for settings that
    are given in two ways.
    """
    rest: list[str] = arguments.rest
    _check_vllm(rest)
    offload, kivi = offload_settings(arguments), kivi_settings(arguments)
    command = ["vllm", "serve", *rest]
    if offload:
        _refuse_both(rest, TRANSFER, "--kv-codec, --kv-store and their like")
        _check_offload(offload)
        transfer = {
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": offload,
        }
        command += [TRANSFER, json.dumps(transfer)]
    pages: dict[str, Any] = {}
    if arguments.pages_profile is not None:
        _refuse_both(rest, ADDITIONAL, "--pages-profile")
        load_page_profile(arguments.pages_profile)
        pages[PROFILE] = os.path.abspath(arguments.pages_profile)
    if kivi:
        _refuse_both(rest, ADDITIONAL, "--kivi-...")
        _check_kivi(kivi, rest)
        pages["kivi"] = kivi
    if pages:
        command += [ADDITIONAL, json.dumps({"kvcompress": pages})]
    return command


def misspelt(rest: Sequence[str]) -> list[str]:
    """What to look at among vLLM's options: those that look like one of ours."""
    ours = ["--kv-store"]
    for prefix, known in (("kv", OFFLOAD), ("kivi", KIVI)):
        ours += [f"--{prefix}-{name.replace('_', '-')}" for name in known]
    found = []
    for text in rest:
        option = text.partition("=")[0]
        near = difflib.get_close_matches(option, ours, 1, 0.85) if option[:3] == "--k" else []
        found += [f"{option} is passed on to vLLM; did you mean {name}?" for name in near]
    return found


def _refuse_both(rest: Sequence[str], option: str, ours: str) -> None:
    # vLLM also takes single keys, as in --additional-config.name value.
    if any(text.replace("_", "-").partition("=")[0].partition(".")[0] == option for text in rest):
        raise ValueError(f"{option} is given, and {ours} too; put all settings into one of them")


def _check_vllm(rest: Sequence[str]) -> None:
    """What of vLLM's own part is surely wrong, before vLLM takes a minute to say so."""
    if not rest:
        raise ValueError("there is no MODEL; write vllm-kvcompress serve MODEL [options]")
    if rest[0].startswith(("/", "./", "../")) and not Path(rest[0]).exists():
        raise ValueError(
            f"{rest[0]}: no such folder; name a model's folder, or its name on the hub"
        )
    dtype = option_value(rest, "--kv-cache-dtype")
    if dtype is not None and dtype not in CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {dtype}: there is none of this name; choose from "
            f"{', '.join(CACHE_DTYPES)}"
        )


def _check_offload(settings: dict) -> None:
    OffloadSettings.parse(settings)
    for store in settings.get("stores", ()):
        if "bytes" in store:
            parse_size(store["bytes"], f"--kv-store {store['type']}: bytes")


def _check_kivi(settings: dict, rest: Sequence[str]) -> None:
    KiviSettings.parse({"kvcompress": {"kivi": settings}})
    dtype = option_value(rest, "--kv-cache-dtype")
    if dtype not in KIVI_DTYPES:
        raise ValueError(
            f"--kivi-{next(iter(settings)).replace('_', '-')} changes nothing without KIVI pages; "
            f"give --kv-cache-dtype with one of {', '.join(KIVI_DTYPES)}"
        )


def option_value(rest: Sequence[str], option: str) -> str | None:
    """The value of an option among vLLM's, None if it is not there."""
    for place, text in enumerate(rest):
        name, equals, value = text.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(rest[place + 1 :]), None)
    return None
