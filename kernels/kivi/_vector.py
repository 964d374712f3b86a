"""The inner loops of KIVI pages on the CPU, in LLVM's intermediate language.

Everything takes addresses and lengths as int64, so that one compiled function serves every shape;
strides are in bytes. Vectors have eight lanes. What a plane of codes is stands in ``format.py``.
Nothing here belongs to one instruction set: LLVM makes AVX2, AVX-512 or NEON of it.
"""

from __future__ import annotations

import inspect

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
BF16, FP16, FP32 = range(3)

_I1, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_VI, _VF = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_VS, _VH = ir.VectorType(_I16, LANES), ir.VectorType(_F16, LANES)
_KINDS = {"i": types.int64, "f": types.float32}

MASKS = np.repeat(np.array([3 << 2 * r for r in range(15)] + [0]), 4 * LANES).astype(np.int32)
"""What ``_plane`` reads its masks from."""

# 2^x on [-0.5, 0.5], the highest power first; to the last bit or two of float32.
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # fmt: skip


class _Emit:
    """An IR builder with the few operations that the loops below are made of."""

    def __init__(self, builder):
        self.b = builder

    def __getattr__(self, name):
        return getattr(self.b, name)

    def at(self, address, offset):
        """The address with an offset in bytes, constant or not."""
        offset = _I64(offset) if isinstance(offset, int) else offset
        return self.b.add(address, offset)

    def get(self, address, kind, align=4):
        load = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        load.align = align
        return load

    def put(self, value, address, align=4):
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def splat(self, value):
        kind = ir.VectorType(value.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
        zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def broadcast(self, address):
        return self.splat(self.get(address, _F32))

    def numbers(self, value):
        """A vector of a constant, float or integer."""
        return ir.Constant(_VF if isinstance(value, float) else _VI, [value] * LANES)

    def intrinsic(self, name, result, *values, fastmath=()):
        kind = ir.FunctionType(result, [value.type for value in values])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}.v8f32")
        return self.b.call(function, values, fastmath=fastmath)

    def fence(self):
        """Keeps LLVM from moving loads over this place, at no cost to the code itself: it would
        load early, and have too few registers for that."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def rint(self, x):
        return self.intrinsic("rint", _VF, x)

    def fma_(self, x, y, z):
        return self.intrinsic("fma", _VF, x, y, z)

    def smaller(self, x, y):
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def larger(self, x, y):
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def total(self, vector):
        zero = ir.Constant(_F32, 0.0)
        return self.intrinsic("vector.reduce.fadd", _F32, zero, vector, fastmath=("reassoc",))

    def variable(self, value):
        return cgutils.alloca_once_value(self.b, value)

    def times(self, count, step=1):
        """``with e.times(n, step) as i``: a loop over 0, step, 2 step, ... below n."""
        return cgutils.for_range_slice(self.b, _I64(0), count, _I64(step), _I64, inc=True)

    def widened(self, address, kind):
        """Eight values of a dtype as float32."""
        if kind == BF16:
            bits = self.b.zext(self.get(address, _VS, 2), _VI)
            return self.b.bitcast(self.b.shl(bits, self.numbers(16)), _VF)
        if kind == FP16:
            return self.b.fpext(self.get(address, _VH, 2), _VF)
        return self.get(address, _VF)

    def narrowed(self, value, kind):
        """Eight float32 values rounded to a dtype, to nearest even."""
        if kind == BF16:
            bits = self.b.bitcast(value, _VI)
            odd = self.b.and_(self.b.lshr(bits, self.numbers(16)), self.numbers(1))
            bits = self.b.add(bits, self.b.add(odd, self.numbers(0x7FFF)))
            return self.b.trunc(self.b.lshr(bits, self.numbers(16)), _VS)
        if kind == FP16:
            return self.b.fptrunc(value, _VH)
        return value

    def rounded(self, value, kind):
        """As ``narrowed``, as float32 again."""
        if kind == BF16:
            bits = self.b.bitcast(value, _VI)
            odd = self.b.and_(self.b.lshr(bits, self.numbers(16)), self.numbers(1))
            bits = self.b.add(bits, self.b.add(odd, self.numbers(0x7FFF)))
            return self.b.bitcast(self.b.and_(bits, self.numbers(0xFFFF0000)), _VF)
        if kind == FP16:
            return self.b.fpext(self.b.fptrunc(value, _VH), _VF)
        return value

    def exp2(self, x):
        """2^x; zero below the normal numbers."""
        low = self.b.fcmp_ordered("<", x, self.numbers(-126.0))
        x = self.b.select(low, self.numbers(-126.0), x)
        whole = self.rint(x)
        part = self.b.fsub(x, whole)
        y = self.numbers(_EXP2[0])
        for factor in _EXP2[1:]:
            y = self.fma_(y, part, self.numbers(factor))
        power = self.b.add(self.b.fptosi(whole, _VI), self.numbers(127))
        y = self.b.fmul(y, self.b.bitcast(self.b.shl(power, self.numbers(23)), _VF))
        return self.b.select(low, self.numbers(0.0), y)

    def transposed(self, rows):
        """Eight vectors as a matrix, transposed."""

        def shuffle(x, y, *order):
            return self.b.shuffle_vector(x, y, ir.Constant(_VI, list(order)))

        pairs = []
        for i in range(0, 8, 2):
            pairs.append(shuffle(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13))
            pairs.append(shuffle(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15))
        fours = []
        for i in (0, 4):
            for j in (0, 1):
                x, y = pairs[i + j], pairs[i + 2 + j]
                fours.append(shuffle(x, y, 0, 1, 8, 9, 4, 5, 12, 13))
                fours.append(shuffle(x, y, 2, 3, 10, 11, 6, 7, 14, 15))
        low = [shuffle(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) for i in range(4)]
        high = [shuffle(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15) for i in range(4)]
        return low + high


def _operation(signature, result=None):
    """An intrinsic out of a function that emits it. signature: a letter an argument, i or f."""
    arguments = [_KINDS[letter] for letter in signature]
    returns = _KINDS[result] if result else types.none

    def wrap(body):
        def typed(typingctx, *given):
            def codegen(context, builder, _, args):
                value = body(_Emit(builder), *args)
                return context.get_dummy_value() if result is None else value

            return returns(*arguments), codegen

        typed.__name__ = body.__name__
        # numba asks for names, and would hand over a tuple for a starred argument.
        names = ["typingctx", *list(inspect.signature(body).parameters)[1:]]
        typed.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return intrinsic(typed)

    return wrap


@_operation("i", "i")
def get_i32(e, address):
    return e.sext(e.get(address, _I32), _I64)


@_operation("i", "i")
def get_i64(e, address):
    return e.get(address, _I64, 8)


@_operation("i", "i")
def get_u8(e, address):
    return e.zext(e.get(address, ir.IntType(8), 1), _I64)


@_operation("i", "f")
def get_f32(e, address):
    return e.get(address, _F32)


@_operation("if")
def put_f32(e, address, value):
    e.put(value, address)


@_operation("ii")
def put_i32(e, address, value):
    e.put(e.trunc(value, _I32), address)


@_operation("ii")
def put_i64(e, address, value):
    e.put(value, address, 8)


@_operation("ii")
def put_u8(e, address, value):
    e.put(e.trunc(value, ir.IntType(8)), address, 1)


@_operation("ii", "i")
def fetch_add(e, address, value):
    """Adds to an int64 that other threads add to as well; what it was before."""
    pointer = e.inttoptr(address, _I64.as_pointer())
    return e.atomic_rmw("add", pointer, value, "seq_cst")


@_operation("i", "i")
def kept_outside(e, value):
    """The value; keeps LLVM from inlining the function: each loop is compiled once."""
    e.function.attributes.add("noinline")
    return value


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

    @_operation("iiiiiiii")
    def plane(e, words, stride, count, coef, coef_stride, out, out_stride, masks):
        zero = e.numbers(0.0)
        sums = [
            [[e.variable(zero) for _ in range(width)] for _ in range(rows)] for _ in range(sets)
        ]
        line = [e.at(out, e.mul(out_stride, _I64(q))) for q in range(rows)]
        for q in range(rows):
            for x in range(width):
                e.store(e.get(e.at(line[q], 32 * x), _VF), sums[0][q][x])
        with e.times(count) as (i, _):
            row = e.add(words, e.mul(i, stride))
            here = e.at(coef, e.mul(i, _I64(64)))
            factor = [e.at(here, e.mul(coef_stride, _I64(q))) for q in range(rows)]
            for r in range(16):
                if crowded:
                    e.fence()
                factors = [e.broadcast(e.at(factor[q], 4 * r)) for q in range(rows)]
                for x in range(width):
                    word = e.get(e.at(row, 32 * x), _VI)
                    if r == 15:
                        code = e.lshr(word, e.numbers(30))
                    elif crowded:
                        code = e.and_(word, e.get(e.at(masks, 32 * (4 * r + x)), _VI))
                    else:
                        code = e.and_(word, e.numbers(3 << 2 * r))
                    code = e.sitofp(code, _VF)
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


def _product(rows, width):
    """As ``_plane`` for float32 values: ``out[q][x] += sum_r coef[q][r] * values[r][x]``."""

    @_operation("iiiiiii")
    def product(e, values, stride, count, coef, coef_stride, out, out_stride):
        line = [e.at(out, e.mul(out_stride, _I64(q))) for q in range(rows)]
        sums = [
            [e.variable(e.get(e.at(line[q], 32 * x), _VF)) for x in range(width)]
            for q in range(rows)
        ]
        with e.times(count) as (i, _):
            row = e.add(values, e.mul(i, stride))
            here = e.at(coef, e.mul(i, _I64(4)))
            value = [e.get(e.at(row, 32 * x), _VF) for x in range(width)]
            for q in range(rows):
                factor = e.broadcast(e.at(here, e.mul(coef_stride, _I64(q))))
                for x in range(width):
                    e.store(e.fma_(factor, value[x], e.load(sums[q][x])), sums[q][x])
        for q in range(rows):
            for x in range(width):
                e.put(e.load(sums[q][x]), e.at(line[q], 32 * x))

    return product


plane12, plane14 = _plane(1, 2), _plane(1, 4)
plane22, plane24 = _plane(2, 2), _plane(2, 4)
plane32, plane34 = _plane(3, 2), _plane(3, 4)
plane42 = _plane(4, 2)
product12, product22, product32, product62 = (_product(rows, 2) for rows in (1, 2, 3, 6))


@_operation("iiiiiiiii")
def coefficients(e, queries, stride, scale, low, out, out_stride, sums, rows, count):
    """For each row ``out = query * scale``, and ``sums``, that of ``query * low``."""
    zero = e.numbers(0.0)
    end = e.mul(count, _I64(4))
    with e.times(rows) as (r, _):
        query = e.add(queries, e.mul(r, stride))
        to = e.add(out, e.mul(r, out_stride))
        totals = [e.variable(zero) for _ in range(2)]
        with e.times(end, 64) as (i, _):
            for half, total in enumerate(totals):
                j = e.at(i, 32 * half)
                q = e.get(e.add(query, j), _VF)
                e.put(e.fmul(q, e.get(e.add(scale, j), _VF)), e.add(to, j))
                e.store(e.fma_(q, e.get(e.add(low, j), _VF), e.load(total)), total)
        total = e.total(e.fadd(e.load(totals[0]), e.load(totals[1])))
        e.put(total, e.add(sums, e.mul(r, _I64(4))))


@_operation("iiii")
def multiplied(e, x, y, out, count):
    """``out = x * y``."""
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        e.put(e.fmul(e.get(e.at(x, i), _VF), e.get(e.at(y, i), _VF)), e.at(out, i))


@_operation("iiiii")
def picked(e, values, index, power, out, count):
    """``out[i] = values[index[i]] * power[i]``; bytes of index."""
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        here = e.at(index, e.lshr(i, _I64(2)))
        vector = ir.Constant(_VF, ir.Undefined)
        for lane in range(LANES):
            at = e.zext(e.get(e.at(here, lane), ir.IntType(8), 1), _I64)
            value = e.get(e.add(values, e.shl(at, _I64(2))), _F32)
            vector = e.insert_element(vector, value, _I32(lane))
        e.put(e.fmul(vector, e.get(e.at(power, i), _VF)), e.at(out, i))


@_operation("iiff")
def scaled(e, row, count, factor, offset):
    """``row = row * factor + offset``."""
    factor, offset = e.splat(factor), e.splat(offset)
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        e.put(e.fma_(e.get(e.at(row, i), _VF), factor, offset), e.at(row, i))


@_operation("iif")
def filled(e, row, count, value):
    value = e.splat(value)
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        e.put(value, e.at(row, i))


@_operation("iifi")
def with_slope(e, row, count, slope, start):
    """``row[i] += slope * (start + i)``."""
    slope = e.splat(slope)
    steps = ir.Constant(_VI, list(range(LANES)))
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        first = e.add(start, e.lshr(i, _I64(2)))
        place = e.sitofp(e.add(e.splat(e.trunc(first, _I32)), steps), _VF)
        e.put(e.fma_(slope, place, e.get(e.at(row, i), _VF)), e.at(row, i))


@_operation("iiff")
def capped(e, row, count, inner, outer):
    """``row = outer * tanh(row)``, where ``inner * row`` is twice that row by log2(e)."""
    inner, outer = e.splat(inner), e.splat(outer)
    one = e.numbers(1.0)
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        x = e.fmul(e.get(e.at(row, i), _VF), inner)
        x = e.larger(e.smaller(x, e.numbers(64.0)), e.numbers(-64.0))
        y = e.exp2(x)
        y = e.fdiv(e.fsub(y, one), e.fadd(y, one))
        e.put(e.fmul(y, outer), e.at(row, i))


@_operation("ii", "f")
def row_max(e, row, count):
    best = e.variable(e.numbers(float("-inf")))
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        e.store(e.larger(e.get(e.at(row, i), _VF), e.load(best)), best)
    vector = e.load(best)
    result = e.extract_element(vector, _I32(0))
    for lane in range(1, LANES):
        result = e.larger(e.extract_element(vector, _I32(lane)), result)
    return result


@_operation("iif", "f")
def row_exp(e, row, count, largest):
    """``row = 2^(row - largest)``; its sum."""
    largest = e.splat(largest)
    total = e.variable(e.numbers(0.0))
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        p = e.exp2(e.fsub(e.get(e.at(row, i), _VF), largest))
        e.put(p, e.at(row, i))
        e.store(e.fadd(p, e.load(total)), total)
    return e.total(e.load(total))


@_operation("f", "f")
def exp2(e, x):
    return e.extract_element(e.exp2(e.splat(x)), _I32(0))


def _widen(kind):
    size = 4 if kind == FP32 else 2

    @_operation("iiiiii")
    def widen(e, source, stride, target, target_stride, rows, columns):
        """Rows of a dtype as float32."""
        with e.times(rows) as (r, _):
            start = e.add(source, e.mul(r, stride))
            to = e.add(target, e.mul(r, target_stride))
            with e.times(columns, LANES) as (c, _):
                value = e.widened(e.at(start, e.mul(c, _I64(size))), kind)
                e.put(value, e.at(to, e.mul(c, _I64(4))))

    return widen


def _narrow(kind):
    size = 4 if kind == FP32 else 2

    @_operation("iiiiii")
    def narrow(e, source, stride, target, target_stride, rows, columns):
        """Rows of float32 rounded to a dtype."""
        with e.times(rows) as (r, _):
            start = e.add(source, e.mul(r, stride))
            to = e.add(target, e.mul(r, target_stride))
            with e.times(columns, LANES) as (c, _):
                value = e.narrowed(e.get(e.at(start, e.mul(c, _I64(4))), _VF), kind)
                e.put(value, e.at(to, e.mul(c, _I64(size))), size)

    return narrow


def _turn(kind):
    size = 4 if kind == FP32 else 2

    @_operation("iiiiii")
    def turn(e, source, stride, target, target_stride, rows, columns):
        """Rows of a dtype as columns of float32; after the last row, up to eight, copies of it."""
        last = e.sub(rows, _I64(1))
        with e.times(rows, LANES) as (r, _):
            lines = []
            for lane in range(LANES):
                row = e.add(r, _I64(lane))
                row = e.select(e.icmp_signed("<", row, last), row, last)
                lines.append(e.add(source, e.mul(row, stride)))
            down = e.at(target, e.mul(r, _I64(4)))
            with e.times(columns, LANES) as (c, _):
                offset = e.mul(c, _I64(size))
                turned = e.transposed([e.widened(e.at(x, offset), kind) for x in lines])
                to = e.at(down, e.mul(c, target_stride))
                for lane in range(LANES):
                    e.put(turned[lane], e.at(to, e.mul(target_stride, _I64(lane))))

    return turn


widen_bf16, widen_fp16, widen_fp32 = (_widen(k) for k in (BF16, FP16, FP32))
narrow_bf16, narrow_fp16, narrow_fp32 = (_narrow(k) for k in (BF16, FP16, FP32))
turn_bf16, turn_fp16, turn_fp32 = (_turn(k) for k in (BF16, FP16, FP32))


@_operation("iiiiiffi")
def decode_row(e, words, place, extra, extra_place, out, scale, low, count):
    """``out = code * scale + low`` of one row of a plane; extra: the row's low bits, or 0."""
    scale, low = e.splat(scale), e.splat(low)
    place = e.splat(e.trunc(place, _I32))
    extra_place = e.splat(e.trunc(extra_place, _I32))
    three = e.numbers(3)
    end = e.mul(count, _I64(4))

    def stored(code, i):
        # Two roundings, as where the format is defined.
        e.put(e.fadd(e.fmul(e.sitofp(code, _VF), scale), low), e.at(out, i))

    with e.if_else(e.icmp_signed("==", extra, _I64(0))) as (two, four):
        with two, e.times(end, 32) as (i, _):
            stored(e.and_(e.lshr(e.get(e.at(words, i), _VI), place), three), i)
        with four, e.times(end, 32) as (i, _):
            high = e.and_(e.lshr(e.get(e.at(words, i), _VI), place), three)
            rest = e.and_(e.lshr(e.get(e.at(extra, i), _VI), extra_place), three)
            stored(e.or_(e.shl(high, e.numbers(2)), rest), i)


def _encode(kind):
    @_operation("ifffiiii")
    def encode(e, values, scale, low, top, cut, place, words, count):
        """Adds bits ``cut`` and ``cut + 1`` of a row's codes to its words, at bit ``place``.

        Every operation is rounded to the dtype.
        """
        scale, low, top = e.splat(scale), e.splat(low), e.splat(top)
        cut, place = e.splat(e.trunc(cut, _I32)), e.splat(e.trunc(place, _I32))
        zero, three = e.numbers(0.0), e.numbers(3)
        end = e.mul(count, _I64(4))
        with e.times(end, 32) as (i, _):
            x = e.rounded(e.fsub(e.get(e.at(values, i), _VF), low), kind)
            x = e.rounded(e.fdiv(x, scale), kind)
            x = e.rint(e.smaller(e.larger(x, zero), top))
            code = e.and_(e.lshr(e.fptosi(x, _VI), cut), three)
            word = e.or_(e.get(e.at(words, i), _VI), e.shl(code, place))
            e.put(word, e.at(words, i))

    return encode


encode_bf16, encode_fp16, encode_fp32 = (_encode(k) for k in (BF16, FP16, FP32))


@_operation("iiiii")
def extremes(e, values, stride, count, low, high):
    """The least and greatest of ``count`` rows, in eight columns."""
    least = e.variable(e.numbers(float("inf")))
    most = e.variable(e.numbers(float("-inf")))
    with e.times(count) as (r, _):
        x = e.get(e.add(values, e.mul(r, stride)), _VF)
        e.store(e.smaller(x, e.load(least)), least)
        e.store(e.larger(x, e.load(most)), most)
    e.put(e.load(least), low)
    e.put(e.load(most), high)


@_operation("iiiiiifi")
def least_squares(e, values, stride, count, low, scale, top, shrink, rounds):
    """Scale and minimum of least squared error, in eight columns of ``count`` rows.

    low, scale: the least and greatest values, and then the result; top: the greatest codes.
    """
    first, last = e.get(low, _VF), e.get(scale, _VF)
    top = e.get(top, _VF)
    zero, one = e.numbers(0.0), e.numbers(1.0)
    n = e.splat(e.sitofp(count, _F32))
    half = e.fmul(e.fsub(last, first), e.splat(e.fmul(shrink, ir.Constant(_F32, 0.5))))
    middle = e.fmul(e.fadd(last, first), e.numbers(0.5))
    a = e.variable(e.fdiv(e.fadd(half, half), top))
    m = e.variable(e.fsub(middle, half))
    sums = [e.variable(zero) for _ in range(4)]
    with e.times(count) as (r, _):
        x = e.fsub(e.get(e.add(values, e.mul(r, stride)), _VF), first)
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
            x = e.get(e.add(values, e.mul(r, stride)), _VF)
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


@_operation("ifii")
def product_row(e, source, factor, out, count):
    """``out += factor * source``."""
    factor = e.splat(factor)
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        value = e.fma_(e.get(e.at(source, i), _VF), factor, e.get(e.at(out, i), _VF))
        e.put(value, e.at(out, i))


@_operation("iiiiiiiif")
def stretched(e, values, stride, count, low, scale, out_low, out_scale, top, limit):
    """From scales and minima that codes were found with, those whose error is uncorrelated with
    the codes' values, in eight columns; not where scales would grow by ``limit``."""
    first, step, top = e.get(low, _VF), e.get(scale, _VF), e.get(top, _VF)
    zero, one = e.numbers(0.0), e.numbers(1.0)
    n = e.splat(e.sitofp(count, _F32))
    some = e.fcmp_ordered(">", step, zero)
    divisor = e.select(some, step, one)
    sums = [e.variable(zero) for _ in range(4)]
    with e.times(count) as (r, _):
        x = e.fsub(e.get(e.add(values, e.mul(r, stride)), _VF), first)
        e.store(e.fadd(x, e.load(sums[0])), sums[0])
    mean = e.fdiv(e.load(sums[0]), n)
    with e.times(count) as (r, _):
        x = e.fsub(e.get(e.add(values, e.mul(r, stride)), _VF), first)
        code = e.rint(e.smaller(e.larger(e.fdiv(x, divisor), zero), top))
        code = e.select(some, code, zero)
        spread = e.fsub(x, mean)
        e.store(e.fadd(code, e.load(sums[1])), sums[1])
        e.store(e.fma_(spread, spread, e.load(sums[2])), sums[2])
        e.store(e.fma_(spread, code, e.load(sums[3])), sums[3])
    codes, squares, product = (e.load(total) for total in sums[1:])
    fits = e.fcmp_ordered(">", product, zero)
    longer = e.fdiv(squares, e.select(fits, product, one))
    fits = e.and_(fits, e.fcmp_ordered("<", longer, e.fmul(e.splat(limit), step)))
    fitted = e.fadd(first, e.fsub(mean, e.fmul(longer, e.fdiv(codes, n))))
    e.put(e.select(fits, longer, step), out_scale)
    e.put(e.select(fits, fitted, first), out_low)


def _symmetric_code(e, y, scale, middle):
    """Codes less their middle; scale: not zero."""
    ratio = e.fadd(e.fdiv(y, scale), middle)
    code = e.rint(e.smaller(e.larger(ratio, e.numbers(0.0)), e.fadd(middle, middle)))
    return e.fsub(code, middle)


@_operation("iiiiffi")
def symmetric_fit(e, values, stride, count, scale, first, middle, rounds):
    """Scales of least squared error of symmetric codes, in eight columns of ``count`` rows."""
    zero, one = e.numbers(0.0), e.numbers(1.0)
    middle, first = e.splat(middle), e.splat(first)
    n = e.splat(e.sitofp(count, _F32))
    squares, both, now = (e.variable(zero) for _ in range(3))
    with e.times(count) as (r, _):
        y = e.get(e.add(values, e.mul(r, stride)), _VF)
        e.store(e.fma_(y, y, e.load(squares)), squares)
    mean = e.fdiv(e.load(squares), n)
    e.store(e.fmul(e.intrinsic("sqrt", _VF, mean), first), now)
    with e.times(rounds) as (_, _):
        step = e.load(now)
        some = e.fcmp_ordered(">", step, zero)
        divisor = e.select(some, step, one)
        e.store(zero, squares)
        e.store(zero, both)
        with e.times(count) as (r, _):
            y = e.get(e.add(values, e.mul(r, stride)), _VF)
            code = _symmetric_code(e, y, divisor, middle)
            e.store(e.fma_(code, code, e.load(squares)), squares)
            e.store(e.fma_(code, y, e.load(both)), both)
        fitted = e.fdiv(e.load(both), e.load(squares))
        e.store(e.select(some, fitted, zero), now)
    e.put(e.load(now), scale)


@_operation("iiiiif")
def symmetric_stretched(e, values, stride, count, scale, out, middle):
    """As ``stretched`` for symmetric codes."""
    zero, one = e.numbers(0.0), e.numbers(1.0)
    middle = e.splat(middle)
    step = e.get(scale, _VF)
    some = e.fcmp_ordered(">", step, zero)
    divisor = e.select(some, step, one)
    squares, both = (e.variable(zero) for _ in range(2))
    with e.times(count) as (r, _):
        y = e.get(e.add(values, e.mul(r, stride)), _VF)
        code = _symmetric_code(e, y, divisor, middle)
        e.store(e.fma_(y, y, e.load(squares)), squares)
        e.store(e.fma_(code, y, e.load(both)), both)
    product = e.load(both)
    fits = e.and_(some, e.fcmp_ordered(">", product, zero))
    longer = e.fdiv(e.load(squares), e.select(fits, product, one))
    e.put(e.select(fits, longer, zero), out)


@_operation("iif")
def rotated_eights(e, row, count, factor):
    """Every eight values by the Hadamard matrix of that size, times a factor."""
    factor = e.splat(factor)
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        x = e.fmul(e.get(e.at(row, i), _VF), factor)
        for h in (1, 2, 4):
            order = ir.Constant(_VI, [lane ^ h for lane in range(LANES)])
            signs = ir.Constant(_VF, [-1.0 if lane & h else 1.0 for lane in range(LANES)])
            x = e.fma_(x, signs, e.shuffle_vector(x, x, order))
        e.put(x, e.at(row, i))


@_operation("iii")
def butterfly(e, x, y, count):
    """``x, y = x + y, x - y``."""
    end = e.mul(count, _I64(4))
    with e.times(end, 32) as (i, _):
        a, b = e.get(e.at(x, i), _VF), e.get(e.at(y, i), _VF)
        e.put(e.fadd(a, b), e.at(x, i))
        e.put(e.fsub(a, b), e.at(y, i))


@_operation("ii")
def prefetched(e, start, count):
    """Asks for bytes that are read soon; each line of a page is read once."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(e.module, kind, "llvm.prefetch.p0")
    with e.times(count, 64) as (i, _):
        e.call(prefetch, [e.inttoptr(e.add(start, i), pointer), _I32(0), _I32(3), _I32(1)])
