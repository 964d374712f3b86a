"""Vectorised loops for the CPU in LLVM's intermediate language, shared by the page formats.

Everything takes addresses and lengths as int64, so that one compiled function serves every shape;
strides are in bytes. Vectors have eight lanes. Nothing here belongs to one instruction set: LLVM
makes AVX2, AVX-512 or NEON of it.
"""

from __future__ import annotations

import inspect

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
BF16, FP16, FP32 = range(3)

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VI, VF = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
VS, VH = ir.VectorType(I16, LANES), ir.VectorType(F16, LANES)
_KINDS = {"i": types.int64, "f": types.float32}

# 2^x on [-0.5, 0.5], the highest power first; to the last bit or two of float32.
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # fmt: skip


class Emit:
    """An IR builder with the few operations that the loops below are made of."""

    def __init__(self, builder):
        self.b = builder

    def __getattr__(self, name):
        return getattr(self.b, name)

    def at(self, address, offset):
        """The address with an offset in bytes, constant or not."""
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.b.add(address, offset)

    def get(self, address, kind, align=4):
        load = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        load.align = align
        return load

    def put(self, value, address, align=4):
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def splat(self, value):
        kind = ir.VectorType(value.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def broadcast(self, address):
        return self.splat(self.get(address, F32))

    def numbers(self, value):
        """A vector of a constant, float or integer."""
        return ir.Constant(VF if isinstance(value, float) else VI, [value] * LANES)

    def intrinsic(self, name, result, *values, fastmath=()):
        kind = ir.FunctionType(result, [value.type for value in values])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}.v8f32")
        return self.b.call(function, values, fastmath=fastmath)

    def fence(self):
        """Keeps LLVM from moving loads over this place, at no cost to the code itself: it would
        load early, and have too few registers for that."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def rint(self, x):
        return self.intrinsic("rint", VF, x)

    def fma_(self, x, y, z):
        return self.intrinsic("fma", VF, x, y, z)

    def smaller(self, x, y):
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def larger(self, x, y):
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def total(self, vector):
        zero = ir.Constant(F32, 0.0)
        return self.intrinsic("vector.reduce.fadd", F32, zero, vector, fastmath=("reassoc",))

    def variable(self, value):
        return cgutils.alloca_once_value(self.b, value)

    def times(self, count, step=1):
        """``with e.times(n, step) as i``: a loop over 0, step, 2 step, ... below n."""
        return cgutils.for_range_slice(self.b, I64(0), count, I64(step), I64, inc=True)

    def widened(self, address, kind):
        """Eight values of a dtype as float32."""
        if kind == BF16:
            bits = self.b.zext(self.get(address, VS, 2), VI)
            return self.b.bitcast(self.b.shl(bits, self.numbers(16)), VF)
        if kind == FP16:
            return self.b.fpext(self.get(address, VH, 2), VF)
        return self.get(address, VF)

    def narrowed(self, value, kind):
        """Eight float32 values rounded to a dtype, to nearest even."""
        if kind == BF16:
            bits = self.b.bitcast(value, VI)
            odd = self.b.and_(self.b.lshr(bits, self.numbers(16)), self.numbers(1))
            bits = self.b.add(bits, self.b.add(odd, self.numbers(0x7FFF)))
            return self.b.trunc(self.b.lshr(bits, self.numbers(16)), VS)
        if kind == FP16:
            return self.b.fptrunc(value, VH)
        return value

    def rounded(self, value, kind):
        """As ``narrowed``, as float32 again."""
        if kind == BF16:
            bits = self.b.bitcast(value, VI)
            odd = self.b.and_(self.b.lshr(bits, self.numbers(16)), self.numbers(1))
            bits = self.b.add(bits, self.b.add(odd, self.numbers(0x7FFF)))
            return self.b.bitcast(self.b.and_(bits, self.numbers(0xFFFF0000)), VF)
        if kind == FP16:
            return self.b.fpext(self.b.fptrunc(value, VH), VF)
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
        power = self.b.add(self.b.fptosi(whole, VI), self.numbers(127))
        y = self.b.fmul(y, self.b.bitcast(self.b.shl(power, self.numbers(23)), VF))
        return self.b.select(low, self.numbers(0.0), y)

    def transposed(self, rows):
        """Eight vectors as a matrix, transposed."""

        def shuffle(x, y, *order):
            return self.b.shuffle_vector(x, y, ir.Constant(VI, list(order)))

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


def operation(signature, result=None):
    """An intrinsic out of a function that emits it. signature: a letter an argument, i or f."""
    arguments = [_KINDS[letter] for letter in signature]
    returns = _KINDS[result] if result else types.none

    def wrap(body):
        def typed(typingctx, *given):
            def codegen(context, builder, _, args):
                value = body(Emit(builder), *args)
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


@operation("i", "i")
def get_i32(e, address):
    return e.sext(e.get(address, I32), I64)


@operation("i", "i")
def get_i64(e, address):
    return e.get(address, I64, 8)


@operation("i", "i")
def get_u8(e, address):
    return e.zext(e.get(address, I8, 1), I64)


@operation("i", "f")
def get_f32(e, address):
    return e.get(address, F32)


@operation("if")
def put_f32(e, address, value):
    e.put(value, address)


@operation("ii")
def put_i32(e, address, value):
    e.put(e.trunc(value, I32), address)


@operation("ii")
def put_i64(e, address, value):
    e.put(value, address, 8)


@operation("ii")
def put_u8(e, address, value):
    e.put(e.trunc(value, I8), address, 1)


@operation("ii", "i")
def fetch_add(e, address, value):
    """Adds to an int64 that other threads add to as well; what it was before."""
    pointer = e.inttoptr(address, I64.as_pointer())
    return e.atomic_rmw("add", pointer, value, "seq_cst")


@operation("i", "i")
def kept_outside(e, value):
    """The value; keeps LLVM from inlining the function: each loop is compiled once."""
    e.function.attributes.add("noinline")
    return value


def _product(rows, width):
    """As ``_plane`` for float32 values: ``out[q][x] += sum_r coef[q][r] * values[r][x]``."""

    @operation("iiiiiii")
    def product(e, values, stride, count, coef, coef_stride, out, out_stride):
        line = [e.at(out, e.mul(out_stride, I64(q))) for q in range(rows)]
        sums = [
            [e.variable(e.get(e.at(line[q], 32 * x), VF)) for x in range(width)]
            for q in range(rows)
        ]
        with e.times(count) as (i, _):
            row = e.add(values, e.mul(i, stride))
            here = e.at(coef, e.mul(i, I64(4)))
            value = [e.get(e.at(row, 32 * x), VF) for x in range(width)]
            for q in range(rows):
                factor = e.broadcast(e.at(here, e.mul(coef_stride, I64(q))))
                for x in range(width):
                    e.store(e.fma_(factor, value[x], e.load(sums[q][x])), sums[q][x])
        for q in range(rows):
            for x in range(width):
                e.put(e.load(sums[q][x]), e.at(line[q], 32 * x))

    return product


product12, product22, product32, product62 = (_product(rows, 2) for rows in (1, 2, 3, 6))


@operation("iiff")
def scaled(e, row, count, factor, offset):
    """``row = row * factor + offset``."""
    factor, offset = e.splat(factor), e.splat(offset)
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        e.put(e.fma_(e.get(e.at(row, i), VF), factor, offset), e.at(row, i))


@operation("iif")
def filled(e, row, count, value):
    value = e.splat(value)
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        e.put(value, e.at(row, i))


@operation("iifi")
def with_slope(e, row, count, slope, start):
    """``row[i] += slope * (start + i)``."""
    slope = e.splat(slope)
    steps = ir.Constant(VI, list(range(LANES)))
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        first = e.add(start, e.lshr(i, I64(2)))
        place = e.sitofp(e.add(e.splat(e.trunc(first, I32)), steps), VF)
        e.put(e.fma_(slope, place, e.get(e.at(row, i), VF)), e.at(row, i))


@operation("iiff")
def capped(e, row, count, inner, outer):
    """``row = outer * tanh(row)``, where ``inner * row`` is twice that row by log2(e)."""
    inner, outer = e.splat(inner), e.splat(outer)
    one = e.numbers(1.0)
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        x = e.fmul(e.get(e.at(row, i), VF), inner)
        x = e.larger(e.smaller(x, e.numbers(64.0)), e.numbers(-64.0))
        y = e.exp2(x)
        y = e.fdiv(e.fsub(y, one), e.fadd(y, one))
        e.put(e.fmul(y, outer), e.at(row, i))


@operation("ii", "f")
def row_max(e, row, count):
    best = e.variable(e.numbers(float("-inf")))
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        e.store(e.larger(e.get(e.at(row, i), VF), e.load(best)), best)
    vector = e.load(best)
    result = e.extract_element(vector, I32(0))
    for lane in range(1, LANES):
        result = e.larger(e.extract_element(vector, I32(lane)), result)
    return result


@operation("iif", "f")
def row_exp(e, row, count, largest):
    """``row = 2^(row - largest)``; its sum."""
    largest = e.splat(largest)
    total = e.variable(e.numbers(0.0))
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        p = e.exp2(e.fsub(e.get(e.at(row, i), VF), largest))
        e.put(p, e.at(row, i))
        e.store(e.fadd(p, e.load(total)), total)
    return e.total(e.load(total))


@operation("f", "f")
def exp2(e, x):
    return e.extract_element(e.exp2(e.splat(x)), I32(0))


def _widen(kind):
    size = 4 if kind == FP32 else 2

    @operation("iiiiii")
    def widen(e, source, stride, target, target_stride, rows, columns):
        """Rows of a dtype as float32."""
        with e.times(rows) as (r, _):
            start = e.add(source, e.mul(r, stride))
            to = e.add(target, e.mul(r, target_stride))
            with e.times(columns, LANES) as (c, _):
                value = e.widened(e.at(start, e.mul(c, I64(size))), kind)
                e.put(value, e.at(to, e.mul(c, I64(4))))

    return widen


def _narrow(kind):
    size = 4 if kind == FP32 else 2

    @operation("iiiiii")
    def narrow(e, source, stride, target, target_stride, rows, columns):
        """Rows of float32 rounded to a dtype."""
        with e.times(rows) as (r, _):
            start = e.add(source, e.mul(r, stride))
            to = e.add(target, e.mul(r, target_stride))
            with e.times(columns, LANES) as (c, _):
                value = e.narrowed(e.get(e.at(start, e.mul(c, I64(4))), VF), kind)
                e.put(value, e.at(to, e.mul(c, I64(size))), size)

    return narrow


def _turn(kind):
    size = 4 if kind == FP32 else 2

    @operation("iiiiii")
    def turn(e, source, stride, target, target_stride, rows, columns):
        """Rows of a dtype as columns of float32; after the last row, up to eight, copies of it."""
        last = e.sub(rows, I64(1))
        with e.times(rows, LANES) as (r, _):
            lines = []
            for lane in range(LANES):
                row = e.add(r, I64(lane))
                row = e.select(e.icmp_signed("<", row, last), row, last)
                lines.append(e.add(source, e.mul(row, stride)))
            down = e.at(target, e.mul(r, I64(4)))
            with e.times(columns, LANES) as (c, _):
                offset = e.mul(c, I64(size))
                turned = e.transposed([e.widened(e.at(x, offset), kind) for x in lines])
                to = e.at(down, e.mul(c, target_stride))
                for lane in range(LANES):
                    e.put(turned[lane], e.at(to, e.mul(target_stride, I64(lane))))

    return turn


widen_bf16, widen_fp16, widen_fp32 = (_widen(k) for k in (BF16, FP16, FP32))
narrow_bf16, narrow_fp16, narrow_fp32 = (_narrow(k) for k in (BF16, FP16, FP32))
turn_bf16, turn_fp16, turn_fp32 = (_turn(k) for k in (BF16, FP16, FP32))


@operation("ifii")
def product_row(e, source, factor, out, count):
    """``out += factor * source``."""
    factor = e.splat(factor)
    end = e.mul(count, I64(4))
    with e.times(end, 32) as (i, _):
        value = e.fma_(e.get(e.at(source, i), VF), factor, e.get(e.at(out, i), VF))
        e.put(value, e.at(out, i))


@operation("ii")
def prefetched(e, start, count):
    """Asks for bytes that are read soon; each line of a page is read once."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(e.module, kind, "llvm.prefetch.p0")
    with e.times(count, 64) as (i, _):
        e.call(prefetch, [e.inttoptr(e.add(start, i), pointer), I32(0), I32(3), I32(1)])
