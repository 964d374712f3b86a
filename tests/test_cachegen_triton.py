"""The Triton kernels: compiled for real targets, and run under the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interpreter import run_kernels
from vllm_kvcompress.kernels.cachegen import format as fmt
from vllm_kvcompress.kernels.cachegen import triton_aot

KERNELS = Path(__file__).with_name("test_cachegen_triton_kernels.py")
OTHER_DTYPES = tuple(name for name in fmt.DTYPES if name != "bfloat16")


def compile_all(dtypes, target):
    for variant in triton_aot.variants(dtypes):
        needed = triton_aot.resources(variant, target)
        assert needed.spills == 0, needed
        assert needed.stack == 0, needed
        assert needed.registers > 0, needed


@pytest.mark.parametrize("target", triton_aot.TARGETS)
def test_compiles_without_spills(target):
    compile_all(("bfloat16",), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", triton_aot.TARGETS)
def test_compiles_without_spills_for_other_dtypes(target):
    compile_all(OTHER_DTYPES, target)


def test_products_and_sums_stay_apart():
    for variant in triton_aot.variants(("bfloat16",)):
        ptx = triton_aot.compile_for(variant, "sm_90").asm["ptx"]
        assert not re.search(r"\bfma\.\w+\.f(16|32|64)", ptx), variant.name


def test_a_step_of_the_lanes_takes_one_ballot():
    for variant in triton_aot.variants(()):
        if "segments" in variant.name:
            ptx = triton_aot.compile_for(variant, "sm_90").asm["ptx"]
            assert "redux.sync.add" in ptx, variant.name
            assert "popc.b32" in ptx, variant.name
            assert "bar.sync" not in ptx, variant.name


def test_kernels():
    run_kernels(KERNELS, "not slow")


@pytest.mark.slow
def test_kernels_in_more_cases():
    run_kernels(KERNELS, "slow")
