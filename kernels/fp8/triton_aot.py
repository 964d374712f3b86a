"""Ahead-of-time compilation of the kernels of FP8 pages, and what each needs; no GPU is asked for.

What a kernel is compiled with equals what ``triton_fp8.py`` launches it with.
"""

from __future__ import annotations

import triton
from triton.compiler import ASTSource

from ..triton_aot import TARGETS, Resources, resources_of
from . import triton_fp8
from .format import PageFormat

_ITEMS = {"bf16": "*i16", "fp16": "*fp16", "fp32": "*fp32"}
_POINTERS = {
    "cache": "*u8", "slots": "*i64", "table": "*i32", "starts": "*i32", "lengths": "*i32",
    "k_scale": "*fp32", "v_scale": "*fp32", "slopes": "*fp32", "sinks": "*fp32",
}  # fmt: skip
# Integers that a launch may pass as any number; the others are strides, multiples of 16.
_COUNTS = ("window", "grouped", "k_scale_step", "v_scale_step", "table_stride")


def compile_for(kernel: str, fmt: PageFormat, target: str, kind: str = "bf16", rows: int = 4096):
    """The compiled ``store_tokens`` or ``attend_pages`` for one of TARGETS; kind: of the model."""
    function = getattr(triton_fp8, kernel)
    constants = {**triton_fp8.constants_of(fmt), "KIND": kind}
    options = triton_fp8.STORE_OPTIONS
    if kernel == "attend_pages":
        constants |= triton_fp8.attend_constants(fmt, rows) | {"DOT": kind}
        constants |= dict.fromkeys(("CAPPED", "SLOPES", "SINKS"), False)
        options = triton_fp8.attend_options(fmt)
    names = function.arg_names
    signature = {}
    for name in names:
        short = name.removesuffix("_ptr")
        if name in constants:
            signature[name] = "constexpr"
        elif short != name:
            signature[name] = _POINTERS.get(short, _ITEMS[kind])
        else:
            signature[name] = "fp32" if name in ("scale", "soft_cap") else "i32"
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in _COUNTS)
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, fixed, attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(options))


def resources(
    kernel: str, fmt: PageFormat, target: str, kind: str = "bf16", rows: int = 4096
) -> Resources:
    """Compile a kernel and read what it needs from its binary."""
    return resources_of(compile_for(kernel, fmt, target, kind, rows), kernel, target)
