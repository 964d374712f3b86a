"""Ahead-of-time compilation of every kernel, and what each one needs; no GPU is asked for.

What a variant of a kernel is compiled with equals what ``triton_codec.py`` launches it with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import triton
from triton.compiler import ASTSource

from ..triton_aot import TARGETS, Resources, resources_of
from . import format as fmt
from . import triton_lanes as lanes
from . import triton_layout as layout
from . import triton_quantise as quantise
from .triton_codec import BLOCKS
from .triton_common import EXACT

_ITEMS = {1: "*u8", 2: "*i16", 4: "*i32"}
# Types of the pointers that are not items of the tensor or int32.
_POINTERS = {
    "*u8": ("symbols", "index", "flags", "data8", "out8"),
    "*i16": ("data16", "out16", "words"),
    "*i64": ("order", "word_at", "ends", "plan", "sums", "turned", "squares"),
    "*fp32": ("scale", "factor", "steps"),
}
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    name: kernel and dtype; types: those of pointers that differ from the common ones.
    """

    name: str
    kernel: triton.JITFunction
    constants: dict[str, object]
    itemsize: int = 4
    types: dict[str, str] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=lambda: EXACT)

    def signature(self) -> dict[str, str]:
        common = {**_TYPES, **dict.fromkeys(("bits", "data", "out"), _ITEMS[self.itemsize])}
        common |= self.types
        signature = {}
        for name in self.kernel.arg_names:
            if name in self.constants:
                signature[name] = "constexpr"
            elif name.endswith("_ptr"):
                signature[name] = common.get(name.removesuffix("_ptr"), "*i32")
            else:
                signature[name] = "i32"
        return signature


def variants(dtypes: tuple[str, ...] = tuple(fmt.DTYPES)) -> Iterator[Variant]:
    """Every kernel in every specialisation that these dtypes need."""
    yield Variant("encode_segments", lanes.encode_segments, {}, options=lanes.ONE_WARP)
    yield Variant("decode_segments", lanes.decode_segments, {}, options=lanes.ONE_WARP)
    line = {"BLOCK": BLOCKS.line}
    tile = {"BLOCK_T": BLOCKS.rows, "BLOCK_C": BLOCKS.columns}
    column = {"BLOCK_T": BLOCKS.rows, "BLOCK_C": BLOCKS.sums}
    yield Variant("count_escapes", layout.count_escapes, line, types={"counts": "*i64"})
    yield Variant("pack_channels", layout.pack_channels, line, types={"index": "*i32"})
    yield Variant("unpack_channels", layout.unpack_channels, line, types={"index": "*i32"})
    yield Variant("write_words", layout.write_words, line)
    for name in dtypes:
        d = fmt.DTYPES[name]
        size = {"ITEMSIZE": d.itemsize}
        fields = {"EXPONENT_BITS": d.exponent_bits, "MANTISSA_BITS": d.mantissa_bits}

        def variant(kernel, constants, d=d, **more):
            turned = " turned" if constants.get("TURNED") else ""
            return Variant(
                f"{kernel.__name__}{turned} {d.name}", kernel, constants, d.itemsize, **more
            )

        raw = 8 * d.itemsize * fmt.COST_UNIT
        lossless_raw = raw - d.mantissa_bits * fmt.COST_UNIT
        costs = {"RAW_COST": raw, "RAW_COST_LOSSLESS": lossless_raw, "BLOCK_C": BLOCKS.tables}
        yield variant(layout.choose_tables, costs)
        yield variant(
            quantise.lossless_symbols, {**size, **fields, "ESCAPES_TOP": d.escapes_top, **column}
        )
        yield variant(quantise.restore_lossless, {**size, **fields, "BLOCK_C": BLOCKS.columns})
        planes = {**size, "MANTISSA_BITS": d.mantissa_bits, "BLOCK": BLOCKS.columns}
        yield variant(layout.write_planes, planes)
        yield variant(layout.write_escapes, {**size, **line})
        yield variant(layout.restore_escapes, {**size, **line})
        yield variant(layout.write_raw_channels, {**size, **line})
        if d.itemsize == 1:
            continue
        infinity = ((1 << d.exponent_bits) - 1) << d.mantissa_bits
        values = {"CODE": d.code, **size, "INFINITY": infinity}
        limited = {"CODE": d.code, **size, "MAX_FINITE": d.max_finite}
        floats = {"maxima": "*fp32"}
        yield variant(quantise.row_maxima, {**values, **line})
        yield variant(quantise.token_max_symbols, {**values, **column}, types=floats)
        yield variant(layout.write_maxima, {**limited, **line}, types=floats)
        for turned in (False, True):
            rotation = {"TURNED": turned}
            yield variant(quantise.uniform_sums, {**values, **rotation, **column})
            yield variant(quantise.uniform_symbols, {**values, **rotation, **tile})
            yield variant(quantise.restore_values, {**limited, **rotation, **tile})


def compile_for(variant: Variant, target: str):
    """The compiled kernel for one of TARGETS."""
    names = variant.kernel.arg_names
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    # Launches see tensors and offsets that are multiples of 16 bytes.
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")
    }
    source = ASTSource(variant.kernel, variant.signature(), constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(variant.options))


def resources(variant: Variant, target: str) -> Resources:
    """Compile a kernel and read what it needs from its binary."""
    return resources_of(compile_for(variant, target), variant.name, target)
