"""The Triton kernels of FP8 pages: compiled for real targets, and run under the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import run_kernels
from vllm_kvcompress.kernels.fp8 import triton_aot
from vllm_kvcompress.kernels.fp8.format import PageFormat

KERNELS = Path(__file__).with_name("test_fp8_triton_kernels.py")


@pytest.mark.parametrize(
    "size, target",
    [
        pytest.param(size, t, marks=() if t == "sm_80" else pytest.mark.slow)
        for size in (64, 128)
        for t in triton_aot.TARGETS
    ],
)
def test_kernels_compile_without_spills(size, target):
    fmt = PageFormat(16, size)
    for kernel, rows in (("store_tokens", 0), ("attend_pages", 4), ("attend_pages", 4096)):
        needed = triton_aot.resources(kernel, fmt, target, rows=rows)
        assert needed.registers > 0, needed
        assert needed.spills == 0, needed


def test_codes_are_made_and_read_by_integers_and_multiplied_by_tensor_cores():
    ptx = {
        kernel: triton_aot.compile_for(kernel, PageFormat(16, 128), "sm_80").asm["ptx"]
        for kernel in ("store_tokens", "attend_pages")
    }
    assert not any("e4m3" in text or "e5m2" in text for text in ptx.values())
    assert "div.rn.f32" in ptx["store_tokens"]
    assert "mma.sync" in ptx["attend_pages"] and "bf16" in ptx["attend_pages"]


def test_kernels_agree_with_the_reference():
    run_kernels(KERNELS, "not slow")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_more_cases():
    run_kernels(KERNELS, "slow")
