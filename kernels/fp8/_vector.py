"""The inner loops of FP8 pages on the CPU; see ``kernels.vector`` for the conventions.

A code becomes float16 by moving its bits: e5m2 is float16's upper byte, and e4m3, whose exponent
has another bias, gives its value times 2^-8, subnormal numbers included. Whoever reads makes good
for that (``UNIT``).
"""

from __future__ import annotations

from llvmlite import ir

from ..vector import BF16, F32, FP16, FP32, I8, I16, I64, LANES, VF, VI, operation

UNIT = {"e4m3": 256.0, "e5m2": 1.0}
"""What a code's value is divided by when it is read."""

_WIDE = 2 * LANES
_CODES = ir.VectorType(I8, _WIDE)
_SHORTS = ir.VectorType(I16, _WIDE)
_HALVES = ir.VectorType(ir.HalfType(), _WIDE)
_FLOATS = ir.VectorType(F32, _WIDE)


def _shorts(value):
    return ir.Constant(_SHORTS, [value] * _WIDE)


def _read(e, address, code):
    """Sixteen codes as two vectors of float32, divided by the unit; NaN stays NaN."""
    codes = e.get(address, _CODES, 1)
    if code == "e5m2":
        bits = e.shl(e.zext(codes, _SHORTS), _shorts(8))
    else:
        # The sign is extended over the bit that the exponent has more in float16.
        bits = e.and_(e.shl(e.sext(codes, _SHORTS), _shorts(7)), _shorts(0xBFFF))
        is_nan = e.icmp_unsigned("==", e.or_(bits, _shorts(0x8000)), _shorts(0xBF80))
        bits = e.or_(bits, e.sext(is_nan, _SHORTS))
    wide = e.fpext(e.bitcast(bits, _HALVES), _FLOATS)
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    return [
        e.shuffle_vector(wide, nothing, ir.Constant(VI, list(range(first, first + LANES))))
        for first in (0, LANES)
    ]


def _product(code, rows, width):
    """``out[q][x] += sum_r coef[q][r] * codes[r][x]`` for a tile of ``rows`` queries and
    ``8 * width`` columns; the sums stay in registers. Bytes of codes, float32 otherwise."""

    @operation("iiiiiii")
    def product(e, codes, stride, count, coef, coef_stride, out, out_stride):
        line = [e.at(out, e.mul(out_stride, I64(q))) for q in range(rows)]
        sums = [
            [e.variable(e.get(e.at(line[q], 32 * x), VF)) for x in range(width)]
            for q in range(rows)
        ]
        with e.times(count) as (i, _):
            row = e.add(codes, e.mul(i, stride))
            here = e.at(coef, e.mul(i, I64(4)))
            factor = [e.broadcast(e.at(here, e.mul(coef_stride, I64(q)))) for q in range(rows)]
            for pair in range(width // 2):
                for half, value in enumerate(_read(e, e.at(row, 16 * pair), code)):
                    for q in range(rows):
                        to = sums[q][2 * pair + half]
                        e.store(e.fma_(factor[q], value, e.load(to)), to)
        for q in range(rows):
            for x in range(width):
                e.put(e.load(sums[q][x]), e.at(line[q], 32 * x))

    return product


def _written_out(code):
    @operation("iiiiii")
    def written_out(e, source, stride, target, target_stride, rows, columns):
        """Rows of codes as float32, divided by the unit; columns: a multiple of 16."""
        with e.times(rows) as (r, _):
            start = e.add(source, e.mul(r, stride))
            to = e.add(target, e.mul(r, target_stride))
            with e.times(columns, _WIDE) as (c, _):
                place = e.at(to, e.mul(c, I64(4)))
                for half, value in enumerate(_read(e, e.at(start, c), code)):
                    e.put(value, e.at(place, 32 * half))

    return written_out


_FIELDS = {  # bits of the mantissa, bias of the exponent, the largest number
    "e4m3": (3, 7, 448.0),
    "e5m2": (2, 15, 57344.0),
}


def _encoded(e, x, code):
    """Eight float32 values as codes, int32, rounded to nearest, ties to even."""
    mantissa, bias, largest = _FIELDS[code]
    dropped = 23 - mantissa
    bits = e.bitcast(x, VI)
    sign = e.and_(e.lshr(bits, e.numbers(24)), e.numbers(0x80))
    magnitude = e.bitcast(e.and_(bits, e.numbers(0x7FFFFFFF)), VF)
    is_nan = e.fcmp_unordered("uno", x, x)
    magnitude = e.smaller(magnitude, e.numbers(largest))
    bits = e.bitcast(magnitude, VI)
    odd = e.and_(e.lshr(bits, e.numbers(dropped)), e.numbers(1))
    normal = e.add(bits, e.add(odd, e.numbers((1 << (dropped - 1)) - 1)))
    normal = e.sub(e.lshr(normal, e.numbers(dropped)), e.numbers((127 - bias) << mantissa))
    # Below the normal numbers steps are even; adding a number with just that step rounds to it.
    step = 2.0 ** (1 - bias - mantissa)
    anchor = step * 2.0**23
    low = e.bitcast(e.fadd(magnitude, e.numbers(anchor)), VI)
    low = e.sub(low, e.bitcast(e.numbers(anchor), VI))
    is_low = e.fcmp_ordered("<", magnitude, e.numbers(2.0 ** (1 - bias)))
    codes = e.select(is_low, low, normal)
    codes = e.select(is_nan, e.numbers(0x7F), codes)
    return e.or_(codes, sign)


def _encode(kind, code):
    size = 4 if kind == FP32 else 2

    @operation("iiif")
    def encode(e, source, target, count, scale):
        """A row of a dtype, divided by the scale, as codes; count: a multiple of 8."""
        scale = e.splat(scale)
        codes = ir.VectorType(I8, LANES)
        with e.times(count, LANES) as (i, _):
            x = e.fdiv(e.widened(e.at(source, e.mul(i, I64(size))), kind), scale)
            e.put(e.trunc(_encoded(e, x, code), codes), e.at(target, i), 1)

    return encode


@operation("iiii")
def scattered(e, source, target, stride, count):
    """``count`` bytes that lie ``stride`` apart in the target."""
    with e.times(count) as (i, _):
        e.put(e.get(e.at(source, i), I8, 1), e.add(target, e.mul(i, stride)), 1)


TILES = ((1, 4), (2, 4), (3, 4), (6, 2), (1, 2), (2, 2), (3, 2))
PRODUCTS = {code: {tile: _product(code, *tile) for tile in TILES} for code in UNIT}
WRITTEN_OUT = {code: _written_out(code) for code in UNIT}
ENCODE = {code: {kind: _encode(kind, code) for kind in (BF16, FP16, FP32)} for code in UNIT}
