"""The inner loops of KIVI pages on the CPU; see ``kernels.vector`` for the conventions.

What a plane of codes is stands in ``format.py``.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from ..vector import BF16, F32, FP16, FP32, I8, I32, I64, LANES, VF, VI, operation

MASKS = np.repeat(np.array([3 << 2 * r for r in range(15)] + [0]), 4 * LANES).astype(np.int32)
"""What ``_plane`` reads its masks from."""


def _plane(rows, width):
    """A kernel for one tile of ``rows`` queries and ``8 * width`` columns of a plane of codes.

    ``out[q][x] += sum_r coef[q][r] * (4^(r % 16) * code[r][x])``, but for every sixteenth row the
    code itself: a code is masked where it lies in its word, and the coefficients make good for its
    place, but the top one would be negative as a signed integer. The sums stay in registers, and
    conversions and masks run beside the multiplications, two or more of which go to each of them.

    masks: int32 ``[16, 4, 8]``, ``MASKS``. With twelve sums there is no register left for a mask,
    and LLVM would keep it in one. So it is read from memory of which LLVM knows nothing, from a
    place of its own for every word, and after a fence for every row.
    """
    sets = 2 if rows * width <= 4 else 1  # enough independent sums to hide the latency
    crowded = rows * width == 12

    @operation("iiiiiiii")
    def plane(e, words, stride, count, coef, coef_stride, out, out_stride, masks):
        zero = e.numbers(0.0)
        sums = [
            [[e.variable(zero) for _ in range(width)] for _ in range(rows)] for _ in range(sets)
        ]
        line = [e.at(out, e.mul(out_stride, I64(q))) for q in range(rows)]
        for q in range(rows):
            for x in range(width):
                e.store(e.get(e.at(line[q], 32 * x), VF), sums[0][q][x])
        with e.times(count) as (i, _):
            row = e.add(words, e.mul(i, stride))
            here = e.at(coef, e.mul(i, I64(64)))
            factor = [e.at(here, e.mul(coef_stride, I64(q))) for q in range(rows)]
            for r in range(16):
                if crowded:
                    e.fence()
                factors = [e.broadcast(e.at(factor[q], 4 * r)) for q in range(rows)]
                for x in range(width):
                    word = e.get(e.at(row, 32 * x), VI)
                    if r == 15:
                        code = e.lshr(word, e.numbers(30))
                    elif crowded:
                        code = e.and_(word, e.get(e.at(masks, 32 * (4 * r + x)), VI))
                    else:
                        code = e.and_(word, e.numbers(3 << 2 * r))
                    code = e.sitofp(code, VF)
                    for q in range(rows):
                        to = sums[r % sets][q][x]
                        e.store(e.fma_(factors[q], code, e.load(to)), to)
        for q in range(rows):
            for x in range(width):
                total = e.load(sums[0][q][x])
                if sets == 2:
                    total = e.fadd(total, e.load(sums[1][q][x]))
                e.put(total, e.at(line[q], 32 * x))

    return plane


plane12, plane14 = _plane(1, 2), _plane(1, 4)
plane22, plane24 = _plane(2, 2), _plane(2, 4)
plane32, plane34 = _plane(3, 2), _plane(3, 4)
plane42 = _plane(4, 2)


@operation("iiiiiiiii")
def coefficients(e, queries, stride, scale, low, out, out_stride, sums, rows, count):
    """For each row ``out = query * scale``, and ``sums``, that of ``query * low``."""
    zero = e.numbers(0.0)
    end = e.mul(count, I64(4))
    with e.times(rows) as (r, _):
        query = e.add(queries, e.mul(r, stride))
        to = e.add(out, e.mul(r, out_stride))
        totals = [e.variable(zero) for _ in range(2)]
        with e.times(end, 64) as (i, _):
            for half, total in enumerate(totals):
                j = e.at(i, 32 * half)
                q = e.get(e.add(query, j), VF)
                e.put(e.fmul(q, e.get(e.add(scale, j), VF)), e.add(to, j))
                e.store(e.fma_(q, e.get(e.add(low, j), VF), e.load(total)), total)
        total = e.total(e.fadd(e.load(totals[0]), e.load(totals[1])))
        e.put(total, e.add(sums, e.mul(r, I64(4))))


@operation("iiii")
def multiplied(e, x, y, out, count):
    """``out = x * y``."""
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        e.put(e.fmul(e.get(e.at(x, i), VF), e.get(e.at(y, i), VF)), e.at(out, i))


@operation("iiiii")
def picked(e, values, index, power, out, count):
    """``out[i] = values[index[i]] * power[i]``; bytes of index."""
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        here = e.at(index, e.lshr(i, I64(2)))
        vector = ir.Constant(VF, ir.Undefined)
        for lane in range(LANES):
            at = e.zext(e.get(e.at(here, lane), I8, 1), I64)
            value = e.get(e.add(values, e.shl(at, I64(2))), F32)
            vector = e.insert_element(vector, value, I32(lane))
        e.put(e.fmul(vector, e.get(e.at(power, i), VF)), e.at(out, i))


@operation("iiiiiffi")
def decode_row(e, words, place, extra, extra_place, out, scale, low, count):
    """``out = code * scale + low`` of one row of a plane; extra: the row's low bits, or 0."""
    scale, low = e.splat(scale), e.splat(low)
    place = e.splat(e.trunc(place, I32))
    extra_place = e.splat(e.trunc(extra_place, I32))
    three = e.numbers(3)
    end = e.mul(count, I64(4))

    def stored(code, i):
        # Two roundings, as where the format is defined.
        e.put(e.fadd(e.fmul(e.sitofp(code, VF), scale), low), e.at(out, i))

    with e.if_else(e.icmp_signed("==", extra, I64(0))) as (two, four):
        with two, e.times(end, 32) as (i, _):
            stored(e.and_(e.lshr(e.get(e.at(words, i), VI), place), three), i)
        with four, e.times(end, 32) as (i, _):
            high = e.and_(e.lshr(e.get(e.at(words, i), VI), place), three)
            rest = e.and_(e.lshr(e.get(e.at(extra, i), VI), extra_place), three)
            stored(e.or_(e.shl(high, e.numbers(2)), rest), i)


def _encode(kind):
    @operation("ifffiiii")
    def encode(e, values, scale, low, top, cut, place, words, count):
        """Adds bits ``cut`` and ``cut + 1`` of a row's codes to its words, at bit ``place``.

        Every operation is rounded to the dtype.
        """
        scale, low, top = e.splat(scale), e.splat(low), e.splat(top)
        cut, place = e.splat(e.trunc(cut, I32)), e.splat(e.trunc(place, I32))
        zero, three = e.numbers(0.0), e.numbers(3)
        end = e.mul(count, I64(4))
        with e.times(end, 32) as (i, _):
            x = e.rounded(e.fsub(e.get(e.at(values, i), VF), low), kind)
            x = e.rounded(e.fdiv(x, scale), kind)
            x = e.rint(e.smaller(e.larger(x, zero), top))
            code = e.and_(e.lshr(e.fptosi(x, VI), cut), three)
            word = e.or_(e.get(e.at(words, i), VI), e.shl(code, place))
            e.put(word, e.at(words, i))

    return encode


encode_bf16, encode_fp16, encode_fp32 = (_encode(k) for k in (BF16, FP16, FP32))


@operation("iiiii")
def extremes(e, values, stride, count, low, high):
    """The least and greatest of ``count`` rows, in eight columns."""
    least = e.variable(e.numbers(float("inf")))
    most = e.variable(e.numbers(float("-inf")))
    with e.times(count) as (r, _):
        x = e.get(e.add(values, e.mul(r, stride)), VF)
        e.store(e.smaller(x, e.load(least)), least)
        e.store(e.larger(x, e.load(most)), most)
    e.put(e.load(least), low)
    e.put(e.load(most), high)


@operation("iiiiiifi")
def least_squares(e, values, stride, count, low, scale, top, shrink, rounds):
    """Scale and minimum of least squared error, in eight columns of ``count`` rows.

    low, scale: the least and greatest values, and then the result; top: the greatest codes.
    """
    first, last = e.get(low, VF), e.get(scale, VF)
    top = e.get(top, VF)
    zero, one = e.numbers(0.0), e.numbers(1.0)
    n = e.splat(e.sitofp(count, F32))
    half = e.fmul(e.fsub(last, first), e.splat(e.fmul(shrink, ir.Constant(F32, 0.5))))
    middle = e.fmul(e.fadd(last, first), e.numbers(0.5))
    a = e.variable(e.fdiv(e.fadd(half, half), top))
    m = e.variable(e.fsub(middle, half))
    sums = [e.variable(zero) for _ in range(4)]
    with e.times(count) as (r, _):
        x = e.fsub(e.get(e.add(values, e.mul(r, stride)), VF), first)
        e.store(e.fadd(x, e.load(sums[0])), sums[0])
    x_mean = e.fdiv(e.load(sums[0]), n)
    with e.times(rounds) as (_, _):
        for s in sums[1:]:
            e.store(zero, s)
        scale_now, low_now = e.load(a), e.load(m)
        some = e.fcmp_ordered(">", scale_now, zero)
        inverse = e.fdiv(one, e.select(some, scale_now, one))
        inverse = e.select(some, inverse, zero)
        with e.times(count) as (r, _):
            x = e.get(e.add(values, e.mul(r, stride)), VF)
            code = e.fmul(e.fsub(x, low_now), inverse)
            code = e.rint(e.smaller(e.larger(code, zero), top))
            e.store(e.fadd(code, e.load(sums[1])), sums[1])
            e.store(e.fma_(code, code, e.load(sums[2])), sums[2])
            e.store(e.fma_(code, e.fsub(x, first), e.load(sums[3])), sums[3])
        codes, squares, both = (e.load(s) for s in sums[1:])
        code_mean = e.fdiv(codes, n)
        # Whole numbers below 2^24: the difference is exact.
        spread = e.fsub(e.fmul(n, squares), e.fmul(codes, codes))
        fits = e.fcmp_ordered(">", spread, zero)
        spread = e.fdiv(e.select(fits, spread, one), n)
        slope = e.fdiv(e.fsub(both, e.fmul(codes, x_mean)), spread)
        fits = e.and_(fits, e.fcmp_ordered(">", slope, zero))
        e.store(e.select(fits, slope, scale_now), a)
        fitted = e.fadd(first, e.fsub(x_mean, e.fmul(slope, code_mean)))
        e.store(e.select(fits, fitted, low_now), m)
    e.put(e.load(m), low)
    e.put(e.load(a), scale)


@operation("iiiiiiiif")
def stretched(e, values, stride, count, low, scale, out_low, out_scale, top, limit):
    """From scales and minima that codes were found with, those whose error is uncorrelated with
    the codes' values, in eight columns; not where scales would grow by ``limit``."""
    first, step, top = e.get(low, VF), e.get(scale, VF), e.get(top, VF)
    zero, one = e.numbers(0.0), e.numbers(1.0)
    n = e.splat(e.sitofp(count, F32))
    some = e.fcmp_ordered(">", step, zero)
    divisor = e.select(some, step, one)
    sums = [e.variable(zero) for _ in range(4)]
    with e.times(count) as (r, _):
        x = e.fsub(e.get(e.add(values, e.mul(r, stride)), VF), first)
        code = e.rint(e.smaller(e.larger(e.fdiv(x, divisor), zero), top))
        e.store(e.fadd(x, e.load(sums[0])), sums[0])
        e.store(e.fadd(code, e.load(sums[1])), sums[1])
        e.store(e.fma_(x, x, e.load(sums[2])), sums[2])
        e.store(e.fma_(x, code, e.load(sums[3])), sums[3])
    total, codes, squares, product = (e.load(sum_) for sum_ in sums)
    mean = e.fdiv(total, n)
    codes = e.select(some, codes, zero)
    squares = e.fsub(squares, e.fmul(mean, total))
    product = e.select(some, e.fsub(product, e.fmul(mean, codes)), zero)
    fits = e.fcmp_ordered(">", product, zero)
    longer = e.fdiv(squares, e.select(fits, product, one))
    fits = e.and_(fits, e.fcmp_ordered("<", longer, e.fmul(e.splat(limit), step)))
    fitted = e.fadd(first, e.fsub(mean, e.fmul(longer, e.fdiv(codes, n))))
    e.put(e.select(fits, longer, step), out_scale)
    e.put(e.select(fits, fitted, first), out_low)


def _symmetric_code(e, steps, middle):
    """Codes less their middle, of values in steps."""
    steps = e.fadd(steps, middle)
    code = e.rint(e.smaller(e.larger(steps, e.numbers(0.0)), e.fadd(middle, middle)))
    return e.fsub(code, middle)


@operation("iiiiffi")
def symmetric_fit(e, values, stride, count, scale, first, middle, rounds):
    """Scales of least squared error of symmetric codes, in eight columns of ``count`` rows."""
    zero, one = e.numbers(0.0), e.numbers(1.0)
    middle, first = e.splat(middle), e.splat(first)
    n = e.splat(e.sitofp(count, F32))
    squares, both, now = (e.variable(zero) for _ in range(3))
    with e.times(count) as (r, _):
        y = e.get(e.add(values, e.mul(r, stride)), VF)
        e.store(e.fma_(y, y, e.load(squares)), squares)
    mean = e.fdiv(e.load(squares), n)
    e.store(e.fmul(e.intrinsic("sqrt", VF, mean), first), now)
    with e.times(rounds) as (_, _):
        step = e.load(now)
        some = e.fcmp_ordered(">", step, zero)
        inverse = e.fdiv(one, e.select(some, step, one))
        e.store(zero, squares)
        e.store(zero, both)
        with e.times(count) as (r, _):
            y = e.get(e.add(values, e.mul(r, stride)), VF)
            code = _symmetric_code(e, e.fmul(y, inverse), middle)
            e.store(e.fma_(code, code, e.load(squares)), squares)
            e.store(e.fma_(code, y, e.load(both)), both)
        fitted = e.fdiv(e.load(both), e.load(squares))
        e.store(e.select(some, fitted, zero), now)
    e.put(e.load(now), scale)


@operation("iiiiif")
def symmetric_stretched(e, values, stride, count, scale, out, middle):
    """As ``stretched`` for symmetric codes."""
    zero, one = e.numbers(0.0), e.numbers(1.0)
    middle = e.splat(middle)
    step = e.get(scale, VF)
    some = e.fcmp_ordered(">", step, zero)
    divisor = e.select(some, step, one)
    squares, both = (e.variable(zero) for _ in range(2))
    with e.times(count) as (r, _):
        y = e.get(e.add(values, e.mul(r, stride)), VF)
        code = _symmetric_code(e, e.fdiv(y, divisor), middle)
        e.store(e.fma_(y, y, e.load(squares)), squares)
        e.store(e.fma_(code, y, e.load(both)), both)
    product = e.load(both)
    fits = e.and_(some, e.fcmp_ordered(">", product, zero))
    longer = e.fdiv(e.load(squares), e.select(fits, product, one))
    e.put(e.select(fits, longer, zero), out)


@operation("iif")
def rotated_eights(e, row, count, factor):
    """Every eight values by the Hadamard matrix of that size, times a factor."""
    factor = e.splat(factor)
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        x = e.fmul(e.get(e.at(row, i), VF), factor)
        for h in (1, 2, 4):
            order = ir.Constant(VI, [lane ^ h for lane in range(LANES)])
            signs = ir.Constant(VF, [-1.0 if lane & h else 1.0 for lane in range(LANES)])
            x = e.fma_(x, signs, e.shuffle_vector(x, x, order))
        e.put(x, e.at(row, i))


@operation("iii")
def butterfly(e, x, y, count):
    """``x, y = x + y, x - y``."""
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        a, b = e.get(e.at(x, i), VF), e.get(e.at(y, i), VF)
        e.put(e.fadd(a, b), e.at(x, i))
        e.put(e.fsub(a, b), e.at(y, i))
