"""The Triton kernels of KIVI pages: compiled for real targets, and run under the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interpreter import run_kernels
from vllm_kvcompress.kernels.kivi import triton_aot

KERNELS = Path(__file__).with_name("test_kivi_triton_kernels.py")


def needs_of(sizes, target):
    for variant in triton_aot.variants(triton_aot.presets(sizes), target):
        yield triton_aot.resources(variant, target)


@pytest.mark.parametrize(
    "size, target",
    [
        pytest.param(size, t, marks=() if (size, t) == (128, "sm_90") else pytest.mark.slow)
        for size in (64, 128)
        for t in triton_aot.TARGETS
    ],
)
def test_presets_compile_without_spills(size, target):
    for needed in needs_of((size,), target):
        assert needed.registers > 0, needed
        assert needed.spills == 0, needed
        assert needed.stack == 0, needed


def test_packing_keeps_products_and_sums_apart():
    for variant in triton_aot.variants(triton_aot.presets((64,))):
        if "pack" in variant.name:
            ptx = triton_aot.compile_for(variant, "sm_90").asm["ptx"]
            assert not re.search(r"\bfma\.\w+\.f(16|32|64)", ptx), variant.name
            assert not re.search(r"\bdiv\.(approx|full)", ptx), variant.name


def test_decoding_multiplies_codes_by_tensor_cores_and_converts_none():
    for variant in triton_aot.variants(triton_aot.presets((128,))):
        if "decode_history" in variant.name:
            ptx = triton_aot.compile_for(variant, "sm_90").asm["ptx"]
            assert re.search(r"\b(w?gmma|mma)\.\S*bf16", ptx), variant.name
            assert not re.search(r"\bcvt\.\w+\.f(16|32)\.[su]\d+", ptx), variant.name


def test_kernels_agree_with_the_reference():
    run_kernels(KERNELS, "not slow")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_more_cases():
    run_kernels(KERNELS, "slow")
