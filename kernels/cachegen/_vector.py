"""The inner loops of the lane coder as AVX2 code, and scalar operations of an exact width.

numba computes integers in 64 bits and does not vectorise the coder's gathers and refills, so these
few operations are written in LLVM's intermediate language. ``decode_block_vector`` and
``encode_block_vector`` are the scalar functions of the same signature where AVX2 is missing.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from . import format as fmt

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32 = ir.FloatType()
_V8 = ir.VectorType(_I32, 8)
_V4 = ir.VectorType(_I64, 4)
_GROUPS = fmt.LANES // 8
_JOIN = (0, 2, 8, 10, 4, 6, 12, 14)


def _has_avx2() -> bool:
    if config.CPU_FEATURES is not None:
        return "+avx2" in config.CPU_FEATURES
    if config.CPU_NAME not in (None, "host"):
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get("avx2"))


HAS_AVX2 = _has_avx2()

# Slack around word buffers: the vector loops read and write eight words at a time, and the decoder
# checks its position once a step.
WORD_SLACK = 64
# The vector encoder reads symbols four bytes at a time.
SYMBOL_SLACK = 64


def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """Per mask of lanes: the rank of each lane among those set; and the lanes set, at the end."""
    spread = np.zeros((256, 8), np.uint8)
    compress = np.zeros((256, 8), np.uint8)
    for mask in range(256):
        lanes = [i for i in range(8) if mask >> i & 1]
        for rank, lane in enumerate(lanes):
            spread[mask, lane] = rank
            compress[mask, 8 - len(lanes) + rank] = lane
    return spread, compress


SPREAD, COMPRESS = (table.ravel() for table in _permutations())


@intrinsic
def never_inline(typingctx):
    """Called in a function, keeps LLVM from inlining it: compiling takes half a minute less."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen


def _float_unary(name):
    @intrinsic
    def operation(typingctx, x):
        def codegen(context, builder, signature, args):
            return builder.call(builder.module.declare_intrinsic(name, [_F32]), args)

        return types.float32(types.float32), codegen

    return operation


rint = _float_unary("llvm.rint")


@intrinsic
def bits_of(typingctx, x):
    """The bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """The float32 with these bits, the low 32 of an integer."""

    def codegen(context, builder, signature, args):
        value = args[0]
        if signature.args[0].bitwidth > 32:
            value = builder.trunc(value, _I32)
        elif signature.args[0].bitwidth < 32:
            value = builder.zext(value, _I32)
        return builder.bitcast(value, _F32)

    return types.float32(bits), codegen


@intrinsic
def bfloat16_of(typingctx, x):
    """Bits of a float32 rounded to bfloat16, to nearest even. Not for NaN."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        bits = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        return builder.trunc(builder.lshr(bits, _I32(16)), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def float16_of(typingctx, x):
    """Bits of a float32 of at most 65504 rounded to float16, to nearest even. Not for NaN."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
        size = builder.and_(bits, _I32(0x7FFFFFFF))
        odd = builder.and_(builder.lshr(size, _I32(13)), _I32(1))
        normal = builder.add(size, builder.add(odd, _I32((0xFFF - (112 << 23)) & 0xFFFFFFFF)))
        normal = builder.lshr(normal, _I32(13))
        # Adding 1/2 leaves the subnormal's bits, rounded, at the bottom of the sum.
        half = ir.Constant(_F32, 0.5)
        small = builder.bitcast(builder.fadd(builder.bitcast(size, _F32), half), _I32)
        small = builder.sub(small, _I32(0x3F000000))
        tiny = builder.icmp_unsigned("<", size, _I32(113 << 23))
        return builder.trunc(builder.or_(sign, builder.select(tiny, small, normal)), _I16)

    return types.uint16(types.float32), codegen


def _as_i32(builder, value, kind):
    if kind.bitwidth > 32:
        return builder.trunc(value, _I32)
    if kind.bitwidth < 32:
        return (builder.sext if kind.signed else builder.zext)(value, _I32)
    return value


@intrinsic
def uniform_symbol(typingctx, fine, base, nearest):
    """The UNIFORM symbol of a value in units of step / 2^CODE_BITS, not rounded, as uint8.

    nearest: what is added before the code is cut off, half a step less the dead zone.
    """

    def codegen(context, builder, signature, args):
        b = builder
        fine, base, nearest = args
        limit = float(fmt.MAX_FIXED)
        for bound, past in ((limit, ">"), (-limit, "<")):
            bound = ir.Constant(_F32, bound)
            fine = b.select(b.fcmp_ordered(past, fine, bound), bound, fine)
        rounded = b.call(b.module.declare_intrinsic("llvm.rint", [_F32]), [fine])
        d = b.sub(b.fptosi(rounded, _I32), base)
        negative = b.icmp_signed("<", d, _I32(0))
        size = b.select(negative, b.sub(_I32(0), d), d)
        n = b.ashr(b.add(size, nearest), _I32(fmt.CODE_BITS))
        # Beyond MAX_CODE the sum below is 0 or 256 and its low byte ESCAPE.
        n = b.select(b.icmp_signed(">", n, _I32(fmt.MAX_CODE)), _I32(fmt.MAX_CODE + 1), n)
        e = b.select(negative, b.sub(_I32(0), n), n)
        return b.trunc(b.add(e, _I32(fmt.CENTRE)), _I8)

    return types.uint8(types.float32, types.int32, types.int32), codegen


@intrinsic
def uniform_value(typingctx, symbol, base):
    """float32(2^CODE_BITS * e + base) of a UNIFORM symbol."""

    def codegen(context, builder, signature, args):
        symbol, base = args
        e = builder.sub(builder.zext(symbol, _I32), _I32(fmt.CENTRE))
        return builder.sitofp(builder.add(builder.shl(e, _I32(fmt.CODE_BITS)), base), _F32)

    return types.float32(types.uint8, types.int32), codegen


@intrinsic
def token_max_code(typingctx, symbol, param):
    """float32(e + parameter) of a TOKEN_MAX symbol."""

    def codegen(context, builder, signature, args):
        symbol, param = args
        e = builder.sub(builder.zext(symbol, _I32), _I32(fmt.CENTRE))
        return builder.sitofp(builder.add(e, param), _F32)

    return types.float32(types.uint8, types.int32), codegen


@intrinsic
def lossless_symbol(typingctx, bits, param, exponent_bits, mantissa_bits, limit):
    """The LOSSLESS symbol of a bit pattern as uint8.

    param: 2 * top + flip; exponent fields from *limit* on escape.
    """

    def codegen(context, builder, signature, args):
        b = builder
        x, param, exponent_bits, mantissa_bits, limit = (
            _as_i32(b, a, t) for a, t in zip(args, signature.args, strict=True)
        )
        one = _I32(1)
        mask = b.sub(b.shl(one, exponent_bits), one)
        exponent = b.and_(b.lshr(x, mantissa_bits), mask)
        sign = b.xor(b.lshr(b.lshr(x, mantissa_bits), exponent_bits), b.and_(param, one))
        zero = b.icmp_signed("==", exponent, _I32(0))
        distance = b.sub(b.ashr(param, one), exponent)
        # One unsigned comparison for 1 <= distance <= MAX_DISTANCE.
        near = b.icmp_unsigned("<", b.sub(distance, one), _I32(fmt.MAX_DISTANCE))
        near = b.and_(near, b.icmp_signed("<", exponent, limit))
        distance = b.select(zero, _I32(0), distance)
        symbol = b.add(b.add(b.shl(distance, one), b.and_(sign, one)), one)
        symbol = b.select(b.or_(zero, near), symbol, _I32(fmt.ESCAPE))
        return b.trunc(symbol, _I8)

    return types.uint8(bits, param, exponent_bits, mantissa_bits, limit), codegen


@intrinsic
def lossless_bits(typingctx, symbol, param, mantissa, exponent_bits, mantissa_bits):
    """The bit pattern of a LOSSLESS symbol and mantissa, as uint32."""

    def codegen(context, builder, signature, args):
        b = builder
        symbol, param, mantissa, exponent_bits, mantissa_bits = (
            _as_i32(b, a, t) for a, t in zip(args, signature.args, strict=True)
        )
        one = _I32(1)
        code = b.sub(symbol, one)
        distance = b.ashr(code, one)
        sign = b.and_(b.xor(code, param), one)
        mask = b.sub(b.shl(one, exponent_bits), one)
        exponent = b.and_(b.sub(b.ashr(param, one), distance), mask)
        zero = b.icmp_signed("==", distance, _I32(0))
        exponent = b.select(zero, _I32(0), exponent)
        top = b.or_(b.shl(sign, exponent_bits), exponent)
        return b.or_(b.shl(top, mantissa_bits), mantissa)

    return types.uint32(symbol, param, mantissa, exponent_bits, mantissa_bits), codegen


@intrinsic
def move_bit(typingctx, target, source, position, to):
    """The byte *target* with bit *position* of the byte *source* set in it as bit *to*."""

    def codegen(context, builder, signature, args):
        target, source, position, to = args
        position, to = builder.trunc(position, _I8), builder.trunc(to, _I8)
        bit = builder.and_(builder.lshr(source, position), _I8(1))
        return builder.or_(target, builder.shl(bit, to))

    return types.uint8(types.uint8, types.uint8, types.intp, types.intp), codegen


@intrinsic
def array_at(typingctx, address):
    """A pointer to bytes from its address as an integer, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.CPointer(types.uint8)(types.uintp), codegen


@njit(nogil=True)
def decode_block_scalar(state, words, at, limit, table, offset, spread, out, out_at, stride, steps):
    """Decode *steps* symbols in each of 32 lanes.

    state: uint32 [32], changed; words: uint16, read from ``words[at]``; table: uint32 slots;
    offset: int32 [32], each lane's first slot; out: uint8, step t to ``out[out_at + t * stride:]``.
    Returns the position after the last word read; beyond ``limit`` if the words ran out, and then
    the output is incomplete. ``words`` must have WORD_SLACK elements beyond limit.
    """
    for t in range(steps):
        if at > limit:
            break
        base = out_at + t * stride
        for lane in range(fmt.LANES):
            x = np.int64(state[lane])
            entry = np.int64(table[offset[lane] + (x & (fmt.PROB_SCALE - 1))])
            x = ((entry >> fmt.PROB_BITS) & 0xFFF) * (x >> fmt.PROB_BITS)
            x += entry & (fmt.PROB_SCALE - 1)
            out[base + lane] = entry >> 24
            if x < fmt.STATE_LOW:
                x = x << 16 | np.int64(words[at])
                at += 1
            state[lane] = x
    return at


@njit(nogil=True)
def encode_block_scalar(
    state, words, at, entries, offset, compress, symbols, first, channel, stride, steps
):
    """Encode *steps* symbols in each of 32 lanes, the last first.

    state: uint32 [32], changed; words: uint16, written downwards from ``words[at - 1]``;
    entries: uint64 [tables * 256], see ``cpu.encode_tables``;
    offset: int32 [32], each lane's table * 256. Lane j's symbol of step t stands at
    ``symbols[first + t * stride + channel[j]]``. Returns the new at.
    """
    for t in range(steps - 1, -1, -1):
        base = first + t * stride
        for lane in range(fmt.LANES - 1, -1, -1):
            x = np.int64(state[lane])
            both = entries[offset[lane] + np.int64(symbols[base + channel[lane]])]
            entry = np.int64(both & np.uint64(0xFFFFFFFF))
            reciprocal = np.int64(both >> np.uint64(32))
            freq = (entry >> 12) & 0xFFF
            if (x >> (31 - fmt.PROB_BITS)) >= freq:
                at -= 1
                words[at] = x & 0xFFFF
                x >>= 16
            quotient = (x * reciprocal >> 32) >> (entry >> 24)
            state[lane] = x + (entry & 0xFFF) + quotient * (fmt.PROB_SCALE - freq)
    return at


class _Emitter:
    """Shorthands over llvmlite's builder for vectors of eight 32-bit lanes."""

    def __init__(self, context, builder, signature, args):
        self.b = builder
        self.arrays = [
            context.make_array(t)(context, builder, a).data if isinstance(t, types.Array) else a
            for t, a in zip(signature.args, args, strict=True)
        ]

    @staticmethod
    def splat(value):
        return ir.Constant(_V8, [value] * 8)

    def load8(self, array, index, element, align):
        at = self.b.gep(array, [index])
        vector = ir.VectorType(element, 8)
        value = self.b.load(self.b.bitcast(at, vector.as_pointer()), align=align)
        return value if element == _I32 else self.b.zext(value, _V8)

    def store8(self, value, array, index, align):
        at = self.b.gep(array, [index])
        self.b.store(value, self.b.bitcast(at, value.type.as_pointer()), align=align)

    def intrinsic(self, name, result, arguments):
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, arguments)

    def gather(self, base, index, scale):
        pointer = self.b.bitcast(base, _I8.as_pointer())
        arguments = [self.splat(0), pointer, index, self.splat(0xFFFFFFFF), _I8(scale)]
        return self.intrinsic("llvm.x86.avx2.gather.d.d.256", _V8, arguments)

    def gather_pairs(self, base, index):
        """The low and the high halves of eight 64-bit elements."""
        pointer = self.b.bitcast(base, _I8.as_pointer())
        halves = []
        # This order makes joining them again one shuffle within 128 bits.
        for lanes in ((0, 1, 4, 5), (2, 3, 6, 7)):
            order = ir.Constant(ir.VectorType(_I32, 4), lanes)
            some = self.b.shuffle_vector(index, index, order)
            arguments = [
                ir.Constant(_V4, [0] * 4), pointer, some, ir.Constant(_V4, [-1] * 4), _I8(8),
            ]  # fmt: skip
            pairs = self.intrinsic("llvm.x86.avx2.gather.d.q.256", _V4, arguments)
            halves.append(self.b.bitcast(pairs, _V8))
        return [
            self.b.shuffle_vector(*halves, ir.Constant(_V8, [x + high for x in _JOIN]))
            for high in (0, 1)
        ]

    def permute(self, value, order):
        return self.intrinsic("llvm.x86.avx2.permd", _V8, [value, order])

    def mask(self, condition):
        """The lanes as bits of an i64, and how many there are."""
        bits = self.b.zext(self.b.bitcast(condition, _I8), _I64)
        count = self.b.call(self.b.module.declare_intrinsic("llvm.ctpop", [_I64]), [bits])
        return bits, count

    def loop(self, steps, go_on):
        """Opens a loop over i64 0, 1, … while below steps and go_on(); returns (index, close)."""
        b = self.b
        counter = cgutils.alloca_once_value(b, _I64(0))
        head, body, end = (b.append_basic_block(n) for n in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        index = b.load(counter)
        more = b.and_(b.icmp_signed("<", index, steps), go_on())
        b.cbranch(more, body, end)
        b.position_at_end(body)

        def close():
            b.store(b.add(index, _I64(1)), counter)
            b.branch(head)
            b.position_at_end(end)

        return index, close


@intrinsic
def _decode_block_avx2(
    typingctx, state, words, at, limit, table, offset, spread, out, out_at, stride, steps
):
    def codegen(context, builder, signature, args):
        e = _Emitter(context, builder, signature, args)
        b = builder
        state, words, at, limit, table, offset, spread, out, out_at, stride, steps = e.arrays
        position = cgutils.alloca_once_value(b, at)
        lanes = [e.load8(state, _I64(8 * g), _I32, 4) for g in range(_GROUPS)]
        states = [cgutils.alloca_once_value(b, x) for x in lanes]
        offsets = [e.load8(offset, _I64(8 * g), _I32, 4) for g in range(_GROUPS)]
        index, close = e.loop(steps, lambda: b.icmp_signed("<=", b.load(position), limit))
        symbols = []
        for g in range(_GROUPS):
            x = b.load(states[g])
            slot = b.and_(x, e.splat(fmt.PROB_SCALE - 1))
            entry = e.gather(table, b.add(slot, offsets[g]), 4)
            freq = b.and_(b.lshr(entry, e.splat(fmt.PROB_BITS)), e.splat(0xFFF))
            x = b.mul(freq, b.lshr(x, e.splat(fmt.PROB_BITS)))
            x = b.add(x, b.and_(entry, e.splat(fmt.PROB_SCALE - 1)))
            empty = b.icmp_signed("<", x, e.splat(fmt.STATE_LOW))
            bits, count = e.mask(empty)
            here = b.load(position)
            order = e.load8(spread, b.shl(bits, _I64(3)), _I8, 1)
            word = e.permute(e.load8(words, here, _I16, 2), order)
            filled = b.or_(b.shl(x, e.splat(16)), word)
            b.store(b.select(empty, filled, x), states[g])
            b.store(b.add(here, count), position)
            symbols.append(b.lshr(entry, e.splat(24)))
        row = symbols
        while len(row) > 1:
            width = row[0].type.count
            both = ir.Constant(ir.VectorType(_I32, 2 * width), list(range(2 * width)))
            row = [b.shuffle_vector(x, y, both) for x, y in zip(row[::2], row[1::2], strict=True)]
        bytes_ = b.trunc(row[0], ir.VectorType(_I8, fmt.LANES))
        e.store8(bytes_, out, b.add(out_at, b.mul(index, stride)), 1)
        close()
        for g in range(_GROUPS):
            e.store8(b.load(states[g]), state, _I64(8 * g), 4)
        return b.load(position)

    signature = types.intp(
        state, words, types.intp, types.intp, table, offset, spread, out, types.intp, types.intp,
        types.intp,
    )  # fmt: skip
    return signature, codegen


@intrinsic
def _encode_block_avx2(
    typingctx, state, words, at, entries, offset, compress, symbols, first, channel, stride, steps,
):  # fmt: skip
    def codegen(context, builder, signature, args):
        e = _Emitter(context, builder, signature, args)
        b = builder
        (
            state, words, at, entries, offset, compress, symbols, first, channel, stride, steps,
        ) = e.arrays  # fmt: skip
        position = cgutils.alloca_once_value(b, at)
        lanes = [e.load8(state, _I64(8 * g), _I32, 4) for g in range(_GROUPS)]
        states = [cgutils.alloca_once_value(b, x) for x in lanes]
        offsets = [e.load8(offset, _I64(8 * g), _I32, 4) for g in range(_GROUPS)]
        channels = [e.load8(channel, _I64(8 * g), _I32, 4) for g in range(_GROUPS)]
        low_half = ir.Constant(_V4, [0xFFFFFFFF] * 4)
        high_half = ir.Constant(_V4, [0xFFFFFFFF00000000] * 4)
        shift32 = ir.Constant(_V4, [32] * 4)
        index, close = e.loop(steps, lambda: ir.IntType(1)(1))
        step = b.sub(b.sub(steps, _I64(1)), index)
        row = b.gep(symbols, [b.add(first, b.mul(step, stride))])
        for g in reversed(range(_GROUPS)):
            x = b.load(states[g])
            symbol = b.and_(e.gather(row, channels[g], 1), e.splat(0xFF))
            at_entry = b.add(offsets[g], symbol)
            entry, factor = e.gather_pairs(entries, at_entry)
            freq = b.and_(b.lshr(entry, e.splat(12)), e.splat(0xFFF))
            full = b.icmp_signed(">=", b.lshr(x, e.splat(31 - fmt.PROB_BITS)), freq)
            bits, count = e.mask(full)
            order = e.load8(compress, b.shl(bits, _I64(3)), _I8, 1)
            word = b.trunc(e.permute(x, order), ir.VectorType(_I16, 8))
            here = b.load(position)
            e.store8(word, words, b.sub(here, _I64(8)), 2)
            b.store(b.sub(here, count), position)
            x = b.select(full, b.lshr(x, e.splat(16)), x)
            x4, factor4 = b.bitcast(x, _V4), b.bitcast(factor, _V4)
            even = b.mul(b.and_(x4, low_half), b.and_(factor4, low_half))
            odd = b.mul(b.lshr(x4, shift32), b.lshr(factor4, shift32))
            high = b.or_(b.lshr(even, shift32), b.and_(odd, high_half))
            quotient = b.lshr(b.bitcast(high, _V8), b.lshr(entry, e.splat(24)))
            x = b.add(x, b.and_(entry, e.splat(0xFFF)))
            x = b.add(x, b.mul(quotient, b.sub(e.splat(fmt.PROB_SCALE), freq)))
            b.store(x, states[g])
        close()
        for g in range(_GROUPS):
            e.store8(b.load(states[g]), state, _I64(8 * g), 4)
        return b.load(position)

    signature = types.intp(
        state, words, types.intp, entries, offset, compress, symbols, types.intp,
        channel, types.intp, types.intp,
    )  # fmt: skip
    return signature, codegen


if HAS_AVX2:

    @njit(nogil=True)
    def decode_block_vector(
        state, words, at, limit, table, offset, spread, out, out_at, stride, steps
    ):
        return _decode_block_avx2(
            state, words, at, limit, table, offset, spread, out, out_at, stride, steps
        )

    @njit(nogil=True)
    def encode_block_vector(
        state, words, at, entries, offset, compress, symbols, first, channel, stride,
        steps,
    ):  # fmt: skip
        return _encode_block_avx2(
            state, words, at, entries, offset, compress, symbols, first, channel, stride, steps,
        )  # fmt: skip
else:
    decode_block_vector = decode_block_scalar
    encode_block_vector = encode_block_scalar
