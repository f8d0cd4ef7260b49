"""What each instruction does: a function per kind, found by the opcode's text. PTX ISA 9.0, "Instruction Set".

A function gets the machine, the instruction's operands and the parts of the opcode that its pattern captures. It works
on all threads that execute the instruction at once. An opcode that no pattern matches is refused by name.
"""

import re
from collections.abc import Callable

import numpy as np

from ptx.machine import DTYPE, Machine
from ptx.parse import Instruction, Operand, PtxError

INT = r"([su](?:16|32|64))"

_PATTERNS: list[tuple[re.Pattern, Callable]] = []


def define(pattern: str) -> Callable:
    """Makes a function what executes every opcode that the pattern matches."""

    def add(function: Callable) -> Callable:
        _PATTERNS.append((re.compile(pattern), function))
        return function

    return add


def implement(i: Instruction) -> Callable:
    """run(machine) of an instruction."""
    for pattern, function in _PATTERNS:
        if m := pattern.fullmatch(i.opcode):
            groups = m.groups()
            return lambda machine: function(machine, i.operands, *groups)
    raise PtxError(f"unknown instruction: {i.text}")


# ---- integers ("Integer Arithmetic Instructions", "Logic and Shift Instructions") ------------------------------------


@define(rf"(add|sub|min|max)\.{INT}")
def _integer(m: Machine, o: list[Operand], op: str, type: str) -> None:
    f = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[op]
    m.put(o[0], f(m.get(o[1], type), m.get(o[2], type)))


@define(rf"(mul|mad)\.lo\.{INT}")
def _low_product(m: Machine, o: list[Operand], op: str, type: str) -> None:
    product = m.get(o[1], type) * m.get(o[2], type)
    m.put(o[0], product + m.get(o[3], type) if op == "mad" else product)


@define(r"(mul|mad)\.wide\.([su])(16|32)")
def _wide_product(m: Machine, o: list[Operand], op: str, sign: str, bits: str) -> None:
    wide = f"{sign}{2 * int(bits)}"
    product = m.get(o[1], sign + bits).astype(DTYPE[wide]) * m.get(o[2], sign + bits).astype(DTYPE[wide])
    m.put(o[0], product + m.get(o[3], wide) if op == "mad" else product)


@define(r"(div|rem)\.([su])(32)")
def _quotient(m: Machine, o: list[Operand], op: str, sign: str, bits: str) -> None:
    """Rounds towards zero. What a division by zero gives is not specified, so it is refused."""
    a, b = (np.asarray(m.get(x, sign + bits)).astype("i8") for x in o[1:3])
    if np.any(b == 0):
        raise PtxError("division by zero")
    quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    m.put(o[0], (quotient if op == "div" else a - quotient * b).astype(DTYPE[sign + bits]))


@define(r"(neg|abs)\.(s32|s64)")
def _negated(m: Machine, o: list[Operand], op: str, type: str) -> None:
    a = m.get(o[1], type)
    m.put(o[0], -a if op == "neg" else np.abs(a))


@define(r"dp4a\.s32\.s32")
def _dp4a(m: Machine, o: list[Operand]) -> None:
    a, b = (m.bytes_of(x, "i1").astype("i4") for x in o[1:3])
    m.put(o[0], (a * b).sum(1, dtype="i4") + m.get(o[3], "s32"))


@define(r"(and|or|xor)\.(pred|b16|b32|b64)")
def _logic(m: Machine, o: list[Operand], op: str, type: str) -> None:
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    m.put(o[0], f(m.get(o[1], type), m.get(o[2], type)))


@define(r"not\.(pred|b16|b32|b64)")
def _not(m: Machine, o: list[Operand], type: str) -> None:
    m.put(o[0], ~m.get(o[1], type))


@define(r"lop3\.b32")
def _lop3(m: Machine, o: list[Operand]) -> None:
    """Bit 4 a + 2 b + c of the table is the result for the bits a, b, c."""
    a, b, c = (m.get(x, "b32") for x in o[1:4])
    table, d = int(o[4].text, 0), np.zeros_like(a + b + c)
    for i in range(8):
        if table >> i & 1:
            d |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    m.put(o[0], d)


@define(r"(shl|shr)\.([bsu])(16|32|64)")
def _shift(m: Machine, o: list[Operand], op: str, sign: str, bits: str) -> None:
    """Amounts beyond the width give 0, or the sign."""
    a, n, width = m.get(o[1], sign + bits), m.get(o[2], "u32"), int(bits)
    by = np.minimum(n, width - 1).astype(DTYPE[sign + bits])
    shifted = a << by if op == "shl" else a >> by
    m.put(o[0], shifted if sign == "s" else np.where(n < width, shifted, np.zeros_like(shifted)))


@define(r"prmt\.b32")
def _prmt(m: Machine, o: list[Operand]) -> None:
    """A nibble of the selector takes one of eight bytes; its highest bit makes eight copies of the byte's sign."""
    bytes_ = np.concatenate([m.bytes_of(o[1], "u1"), m.bytes_of(o[2], "u1")], axis=1)
    selector, d = m.full(o[3], "u32"), np.zeros((m.n_active, 4), "u1")
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = bytes_[np.arange(len(bytes_)), nibble & np.uint32(7)]
        d[:, i] = np.where(nibble >= 8, np.where(byte >= 128, 255, 0), byte)
    m.put(o[0], d.view("u4").ravel())


@define(r"bfi\.b32")
def _bfi(m: Machine, o: list[Operand]) -> None:
    """The low bits of a, put into b."""
    a, b, at, n = (m.get(x, "u32").astype("u8") for x in o[1:5])
    mask = ((np.uint64(1) << n) - np.uint64(1)) << at
    m.put(o[0], ((b & ~mask) | ((a << at) & mask)).astype("u4"))


# ---- floating point ("Floating Point Instructions", "Half Precision Floating Point Instructions") --------------------


@define(r"(add|sub|mul)\.(?:rn\.)?(f32|f16x2|f16)")
def _float(m: Machine, o: list[Operand], op: str, type: str) -> None:
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    m.put(o[0], f(m.get(o[1], type), m.get(o[2], type)))


@define(r"div\.rn\.f32")
def _divide(m: Machine, o: list[Operand]) -> None:
    m.put(o[0], m.get(o[1], "f32") / m.get(o[2], "f32"))


@define(r"fma\.(rn|rm)\.(f32|f16x2|f16)")
def _fma(m: Machine, o: list[Operand], rounding: str, type: str) -> None:
    """a b + c, rounded once. In fp64 the product is exact; the sum is rounded to odd, so that it keeps on which side
    of a tie it was, and the last rounding is right (Boldo & Melquiond 2008, "Emulation of a FMA")."""
    a, b, c = (np.asarray(m.get(x, type)).astype("f8") for x in o[1:4])
    p = a * b
    s = np.asarray(p + c)
    t = s - p
    error = (p - (s - t)) + (c - t)
    inexact = np.isfinite(s) & (error != 0) & (s.view("i8") & 1 == 0)
    s = (s.view("i8") + np.where(inexact, np.where((error > 0) == (s > 0), 1, -1), 0)).view("f8")
    r = s.astype(DTYPE[type])
    if rounding == "rm":
        r = np.where(r > s, np.nextafter(r, DTYPE[type].type(-np.inf)), r)
    m.put(o[0], r)


@define(r"(neg|abs)\.f32")
def _float_sign(m: Machine, o: list[Operand], op: str) -> None:
    a = m.get(o[1], "f32")
    m.put(o[0], -a if op == "neg" else np.abs(a))


@define(r"(min|max)\.f32")
def _float_extreme(m: Machine, o: list[Operand], op: str) -> None:
    """NaN only if both are."""
    m.put(o[0], (np.fmin if op == "min" else np.fmax)(m.get(o[1], "f32"), m.get(o[2], "f32")))


@define(r"ex2\.approx\.ftz\.f32")
def _ex2(m: Machine, o: list[Operand]) -> None:
    """2^a. The GPU's is within 2 ulp of this, subnormals as zero."""
    a = np.asarray(m.get(o[1], "f32"))
    r = np.exp2(a.astype("f8")).astype("f4")
    m.put(o[0], np.where(np.abs(r) < np.finfo("f4").tiny, np.float32(0), r))


@define(r"rcp\.rn\.f32")
def _reciprocal(m: Machine, o: list[Operand]) -> None:
    m.put(o[0], np.float32(1) / m.get(o[1], "f32"))


@define(r"rsqrt\.approx\.f32")
def _rsqrt(m: Machine, o: list[Operand]) -> None:
    """The GPU's has a relative error of up to 2^-22.9."""
    m.put(o[0], (1 / np.sqrt(np.asarray(m.get(o[1], "f32")).astype("f8"))).astype("f4"))


# ---- comparison, selection, moves, conversion ------------------------------------------------------------------------


@define(r"setp\.(eq|ne|lt|le|gt|ge)(u?)\.(\w\d+)")
def _setp(m: Machine, o: list[Operand], compare: str, unordered: str, type: str) -> None:
    """Of floats, `u` makes the result true if one is NaN; without it, false."""
    a, b = m.get(o[1], type), m.get(o[2], type)
    f = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    r = f[compare](a, b)
    if type == "f32":
        nan = np.isnan(a) | np.isnan(b)
        r = r | nan if unordered else r & ~nan
    m.put(o[0], r)


@define(r"selp\.(\w\d+)")
def _selp(m: Machine, o: list[Operand], type: str) -> None:
    m.put(o[0], np.where(m.get(o[3], "pred"), m.get(o[1], type), m.get(o[2], type)))


@define(r"mov\.(pred|\w\d+)")
def _mov(m: Machine, o: list[Operand], type: str) -> None:
    """Also packs registers into a wider one, the first lowest, or takes it apart."""
    if o[1].kind == "vector":
        bits = 8 * o[1].parts[0].storage.itemsize
        parts = [
            m.full(p, f"u{bits}").astype(DTYPE[type]) << DTYPE[type].type(bits * i) for i, p in enumerate(o[1].parts)
        ]
        return m.put(o[0], np.bitwise_or.reduce(parts))
    value = np.asarray(m.get(o[1], type))
    if o[0].kind != "vector":
        return m.put(o[0], value.copy())
    for i, part in enumerate(o[0].parts):
        m.put(part, (value >> value.dtype.type(8 * part.storage.itemsize * i)).astype(part.storage))
    return None


@define(r"cvta\.to\.(?:global|shared)\.u64|cvta\.(?:global|shared)\.u64")
def _cvta(m: Machine, o: list[Operand]) -> None:
    """Addresses of both spaces stay what they are: no kernel here uses generic ones."""
    m.put(o[0], np.array(m.get(o[1], "u64")))


@define(r"cvt\.(?:(rn|rzi|rni)\.)?(sat\.)?(\w\d+)\.(\w\d+)")
def _cvt(m: Machine, o: list[Operand], rounding: str | None, saturate: str | None, to: str, source: str) -> None:
    """Integers wrap; floats are rounded to nearest (rn, rni), or cut (rzi), where NaN becomes 0 and what is too large
    the largest."""
    value = np.asarray(m.get(o[1], source))
    if rounding == "rni":
        value = np.rint(value)
    if rounding == "rzi" and to[0] in "su":
        limits = np.iinfo(DTYPE[to])
        value = np.clip(np.trunc(np.nan_to_num(value.astype("f8"), nan=0)), limits.min, limits.max)
    elif source[0] == "f" and to[0] != "f":
        raise PtxError(f"cvt of {source} to {to} without rzi")
    if saturate:
        value = np.clip(np.where(np.isnan(value), np.float32(0), value), 0, 1)
    m.put(o[0], value.astype(DTYPE[to]))


@define(r"cvt\.rn\.f16x2\.f32")
def _cvt_pair(m: Machine, o: list[Operand]) -> None:
    """The first source becomes the upper half."""
    pair = np.stack([m.full(o[2], "f32"), m.full(o[1], "f32")], axis=1)
    m.put(o[0], pair.astype("f2"))


# ---- memory ("Data Movement and Conversion Instructions") ------------------------------------------------------------


@define(r"ld\.(param|global|shared)(?:\.nc)?(?:\.v([24]))?\.(\w\d+)")
def _ld(m: Machine, o: list[Operand], space: str, n: str | None, type: str) -> None:
    parts = o[0].parts if o[0].kind == "vector" else [o[0]]
    m.load(space, m.address(o[1]), DTYPE[type], parts)


@define(r"st\.(global|shared)(?:\.v([24]))?\.(\w\d+)")
def _st(m: Machine, o: list[Operand], space: str, n: str | None, type: str) -> None:
    parts = o[1].parts if o[1].kind == "vector" else [o[1]]
    m.store(space, m.address(o[0]), [m.full(p, type) for p in parts])


@define(r"atom(\.acq_rel\.gpu)?\.global\.add\.u32")
def _atom(m: Machine, o: list[Operand], order: str | None) -> None:
    if order:
        m.order.fence(m.threads())
    m.atomic_add(o[0], m.address(o[1]), m.full(o[2], "u32"))
    if order:
        m.order.fence(m.threads())


@define(r"membar\.gl")
def _membar(m: Machine, o: list[Operand]) -> None:
    m.order.fence(m.threads())


@define(r"cp\.async\.(?:ca|cg)\.shared\.global(?:\.L2::128B)?")
def _cp_async(m: Machine, o: list[Operand]) -> None:
    """The fourth operand is how many bytes are read; the rest becomes zero."""
    m.begin_copy(m.address(o[0]), m.address(o[1]), int(o[2].text), m.full(o[3], "u32") if len(o) > 3 else None)


@define(r"cp\.async\.commit_group")
def _commit(m: Machine, o: list[Operand]) -> None:
    m.groups[m.active] += 1


@define(r"cp\.async\.wait_group")
def _wait(m: Machine, o: list[Operand]) -> None:
    m.land_copies(int(o[0].text))


# ---- a warp together ("Parallel Synchronization", "Warp Level Matrix Multiply-Accumulate Instructions") --------------


@define(r"bar\.warp\.sync")
def _warp_sync(m: Machine, o: list[Operand]) -> None:
    m.order.warp_barrier[m.whole_warps("bar.warp.sync", o[0])] = m.order.tick()


@define(r"shfl\.sync\.(bfly|idx)\.b32")
def _shuffle(m: Machine, o: list[Operand], mode: str) -> None:
    """Lane i gets the value of lane i ^ b (bfly) or of lane b of its segment (idx); its own where that is outside."""
    n, lane = len(m.whole_warps("shfl.sync", o[4])), np.arange(32, dtype="u4")
    value, by, c = (m.full(x, "b32").reshape(n, 32) for x in o[1:4])
    segment, clamp = c >> np.uint32(8) & np.uint32(31), c & np.uint32(31)
    last = (lane & segment) | (clamp & ~segment)
    source = lane ^ (by & np.uint32(31)) if mode == "bfly" else (lane & segment) | (by & np.uint32(31) & ~segment)
    source = np.where(source <= last, source, lane)
    m.put(o[0], np.take_along_axis(value, source.astype("i8"), 1).ravel())


LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


@define(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.(trans\.)?shared\.b16")
def _ldmatrix(m: Machine, o: list[Operand], transposed: str | None) -> None:
    """Lane 8 i + j has the address of row j of matrix i. Lane 4 g + t gets elements 2 t and 2 t + 1 of row g, or of
    column g, of each."""
    n = len(m.whole_warps("ldmatrix"))
    rows = m.rows_of_shared(m.address(o[1])).view("u2").reshape(n, 4, 8, 8)
    if transposed:
        rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2))
    pairs = rows.view("u4")
    for i, register in enumerate(o[0].parts):
        m.put(register, pairs[:, i, G, T].ravel())


@define(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32")
def _mma_fp16(m: Machine, o: list[Operand]) -> None:
    """See "Matrix Fragments for mma.m16n8k16 with floating point type". Products are exact in fp32; they are added in
    fp32 in the order of k, as simt/ptx.h does: in which order a tensor core adds, and how it rounds, is not known."""
    n = len(m.whole_warps("mma"))
    a, b, c = np.empty((n, 16, 16), "f4"), np.empty((n, 16, 8), "f4"), np.empty((n, 16, 8), "f4")
    for i, x in enumerate(o[1].parts):
        pair = m.full(x, "b32").view("f2").reshape(n, 32, 2)
        for e in range(2):
            a[:, G + i % 2 * 8, 2 * T + i // 2 * 8 + e] = pair[:, :, e]
    for i, x in enumerate(o[2].parts):
        pair = m.full(x, "b32").view("f2").reshape(n, 32, 2)
        for e in range(2):
            b[:, 2 * T + 8 * i + e, G] = pair[:, :, e]
    for i, x in enumerate(o[3].parts):
        c[:, G + i // 2 * 8, 2 * T + i % 2] = m.full(x, "f32").reshape(n, 32)
    a, b = np.ascontiguousarray(a.transpose(2, 0, 1))[..., None], np.ascontiguousarray(b.transpose(1, 0, 2))[:, :, None]
    for k in range(16):
        c += a[k] * b[k]
    for i, x in enumerate(o[0].parts):
        m.put(x, c[:, G + i // 2 * 8, 2 * T + i % 2].ravel())


@define(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32")
def _mma_int8(m: Machine, o: list[Operand]) -> None:
    """See "Matrix Fragments for mma.m16n8k32". Without .satfinite, sums wrap."""
    n = len(m.whole_warps("mma"))
    a, b, c = np.empty((n, 16, 32), "i4"), np.empty((n, 32, 8), "i4"), np.empty((n, 16, 8), "i4")
    for i, x in enumerate(o[1].parts):
        four = m.full(x, "b32").view("i1").reshape(n, 32, 4)
        for e in range(4):
            a[:, G + i % 2 * 8, 4 * T + i // 2 * 16 + e] = four[:, :, e]
    for i, x in enumerate(o[2].parts):
        four = m.full(x, "b32").view("i1").reshape(n, 32, 4)
        for e in range(4):
            b[:, 4 * T + 16 * i + e, G] = four[:, :, e]
    for i, x in enumerate(o[3].parts):
        c[:, G + i // 2 * 8, 2 * T + i % 2] = m.full(x, "s32").reshape(n, 32)
    c += a @ b
    for i, x in enumerate(o[0].parts):
        m.put(x, c[:, G + i // 2 * 8, 2 * T + i % 2].ravel())


# ---- the kernels before ("Parallel Synchronization and Communication Instructions: griddepcontrol") ------------------


@define(r"griddepcontrol\.launch_dependents")
def _launch_dependents(m: Machine, o: list[Operand]) -> None:
    """Lets the next kernel start; here launches follow one another."""


@define(r"griddepcontrol\.wait")
def _wait_for_previous(m: Machine, o: list[Operand]) -> None:
    m.memory.waited[m.threads()] = True


# ---- control flow: machine.py looks at these itself ------------------------------------------------------------------


@define(r"bra(?:\.uni)?|ret|bar\.sync")
def _control(m: Machine, o: list[Operand]) -> None:
    raise AssertionError
