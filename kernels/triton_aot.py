"""What a kernel that was compiled ahead of time needs, for targets that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers a thread, spilled bytes a thread (on AMD: vector
    registers), stack bytes a thread, shared memory bytes a program, and its warps.

    What AMD's compiler calls spilled scalar registers stays in lanes of vector registers, which are
    counted, or takes stack.
    """

    kernel: str
    target: str
    registers: int
    spills: int
    stack: int
    shared: int
    warps: int


def resources_of(compiled: Any, kernel: str, target: str) -> Resources:
    """Read from the binary of what ``triton.compile`` returned."""
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    if TARGETS[target].backend == "hip":
        text = compiled.asm["amdgcn"]

        def number(name: str) -> int:
            return int(re.search(rf"\.{name}:\s*(\d+)", text).group(1))

        spills, stack = number("vgpr_spill_count"), number("private_segment_fixed_size")
        return Resources(kernel, target, number("vgpr_count"), spills, stack, shared, warps)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    # A thread spills to its stack frame or local memory; these kernels have nothing else there.
    spills = used["STACK"] + used["LOCAL"]
    return Resources(kernel, target, used["REG"], spills, used["STACK"], shared, warps)
