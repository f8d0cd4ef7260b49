"""Runs a grid: the threads of all its blocks at once, a register of all of them as one numpy array.

Threads that are at the same instruction go on together; those that are behind, at the lowest instruction, go first, so
that branches meet again. A block's barrier opens when all its threads wait there.
"""

from __future__ import annotations

import numpy as np

from ptx.memory import NOBODY, GlobalMemory, Order, SharedMemory
from ptx.parse import Kernel, Operand, PtxError

MOST_THREADS = 1 << 16  # that run at once; blocks beyond these run afterwards

# numpy's type for each fundamental type (PTX ISA 9.0, "Types").
DTYPE = {
    "pred": "?",
    "b8": "u1",
    "u8": "u1",
    "s8": "i1",
    "b16": "u2",
    "u16": "u2",
    "s16": "i2",
    "b32": "u4",
    "u32": "u4",
}
DTYPE |= {"s32": "i4", "b64": "u8", "u64": "u8", "s64": "i8", "f16": "f2", "f16x2": "f2", "f32": "f4"}
DTYPE = {name: np.dtype(code) for name, code in DTYPE.items()}


def run(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_shared: int,
    arguments: bytes,
    buffers: dict[int, np.ndarray],
    counters: object = None,
    fresh: dict[int, np.ndarray] | None = None,
) -> dict[int, np.ndarray]:
    """Runs a launch on copies of the buffers ({address: bytes}); returns what it leaves in them. fresh: of these, the
    words that kernels just before wrote, {address: indices}."""
    size = block[0] * block[1] * block[2]
    n_blocks = grid[0] * grid[1] * grid[2]
    if len(arguments) != kernel.parameters:
        raise PtxError(f"{kernel.name}: {len(arguments)} bytes of arguments, {kernel.parameters} of parameters")
    if size % 32:
        raise PtxError(f"{kernel.name}: blocks of {size} threads are not made of whole warps")
    order = Order(n_blocks, size)
    memory = GlobalMemory(buffers, order)
    if any(i.opcode.startswith("griddepcontrol") for i in kernel.code):
        memory.begin_early(n_blocks * size, fresh or {})
    together = max(1, MOST_THREADS // size)
    with np.errstate(all="ignore"):
        for first in range(0, n_blocks, together):
            machine = Machine(kernel, grid, block, dynamic_shared, arguments, memory, order, first)
            machine.counters = counters
            try:
                machine.run(min(together, n_blocks - first))
            except PtxError as error:
                raise PtxError(f"{kernel.name}: {error} [{machine.at}]") from None
    return memory.contents()


class Machine:
    """The state of the threads that run together; instructions.py changes it for those that are active."""

    def __init__(self, kernel, grid, block, dynamic_shared, arguments, memory, order, first_block):  # noqa: ANN001
        self.kernel, self.grid, self.block, self.memory, self.order = kernel, grid, block, memory, order
        self.dynamic_shared, self.first_block = dynamic_shared, first_block
        self.parameters = np.frombuffer(arguments + bytes(-len(arguments) % 8), "u1")
        self.at, self.counters = "", None

    # ---- registers ----------------------------------------------------------------------------------------------

    def get(self, o: Operand, type: str) -> np.ndarray:
        """An operand's value in each active thread, or a single number where it is the same in all. f16x2: (n, 2)."""
        if o.kind == "register":
            a = self.registers.get(o.text)
            if a is None:
                raise PtxError(f"reads {o.text}, which nothing has written")
            return self._as(a if self.all_active else a[self.active], type)
        if o.kind == "number":
            if type not in o.cache:
                o.cache[type] = _number(o.text, type)
            return o.cache[type]
        value = self.special[o.text]
        return (value[self.active] if isinstance(value, np.ndarray) else np.int64(value)).astype(DTYPE[type])

    @staticmethod
    def _as(a: np.ndarray, type: str) -> np.ndarray:
        want = DTYPE[type]
        if type == "f16x2":
            return a.view("f2").reshape(-1, 2)
        if want == a.dtype:
            return a
        return (a if want.itemsize == a.dtype.itemsize else a.astype(f"u{want.itemsize}")).view(want)

    def full(self, o: Operand, type: str) -> np.ndarray:
        """As get(), with a value for each thread."""
        a = self.get(o, type)
        return np.ascontiguousarray(a) if np.ndim(a) else np.full(self.n_active, a, DTYPE[type])

    def bytes_of(self, o: Operand, dtype: str) -> np.ndarray:
        """(n, 4), the bytes of 32 bits."""
        return self.full(o, "b32").view(dtype).reshape(-1, 4)

    def put(self, o: Operand, value: np.ndarray) -> None:
        if o.text == "_":
            return
        value = np.asarray(value)
        if value.ndim == 2:  # f16x2
            value = np.ascontiguousarray(value).view("u4").ravel()
        if o.storage is None or (value.dtype.itemsize != o.storage.itemsize and value.dtype.kind == "f"):
            raise PtxError(f"{value.dtype} does not fit into {o.text}")
        if value.dtype.itemsize != o.storage.itemsize:  # integers are extended by their sign, or cut
            value = value.astype(f"{value.dtype.kind}{o.storage.itemsize}")
        value = value.view(o.storage) if value.dtype != o.storage else value
        if self.all_active:
            self.registers[o.text] = value if value.ndim else np.full(self.n, value)
            return
        if o.text not in self.registers:
            self.registers[o.text] = np.zeros(self.n, o.storage)
        self.registers[o.text][self.active] = value

    def address(self, o: Operand) -> np.ndarray:
        offset = np.uint64(o.offset & (1 << 64) - 1)
        if o.base is None:
            return np.full(self.n_active, offset)
        wide = "u64" if o.base.storage.itemsize == 8 else "u32"
        return self.full(o.base, wide).astype("u8") + offset

    def threads(self) -> np.ndarray:
        """The active threads, numbered over the grid."""
        return self.everyone if self.all_active else self.everyone[self.active]

    def whole_warps(self, what: str, mask: Operand | None = None) -> np.ndarray:
        """The warps of the active threads, numbered over the grid; all their lanes have to be here."""
        if mask is not None and np.any(self.get(mask, "u32") != 0xFFFFFFFF):
            raise PtxError(f"{what} with a mask that leaves out lanes")
        warps = self.threads().reshape(-1, 32) // 32 if self.n_active % 32 == 0 else np.array([[0, 1]])
        if np.any(warps != warps[:, :1]):
            raise PtxError(f"{what} is not reached by all lanes of a warp together")
        return warps[:, 0]

    # ---- memory -------------------------------------------------------------------------------------------------

    def load(self, space: str, address: np.ndarray, dtype: np.dtype, registers: list[Operand]) -> None:
        size = dtype.itemsize * len(registers)
        if space == "param":
            if np.any(address % np.uint64(size)) or np.any(address + np.uint64(size) > len(self.parameters)):
                raise PtxError("misaligned or outside: a parameter")
            source, at = self.parameters, address.astype("i8")
        elif space == "global":
            source, at = self.memory.bytes, self.memory.place(address, size)
            self.memory.check(at, size, self.threads(), False)
        else:
            source, at = self.shared.bytes, self.shared.place(address, size, self.threads())
            self.shared.check(at, size, self.threads(), False)
        if self.counters and space != "param":
            self.counters.access(space, "load", size, address, self.threads())
        view, at = source[: len(source) // dtype.itemsize * dtype.itemsize].view(dtype), at // dtype.itemsize
        for i, register in enumerate(registers):
            self.put(register, view[at + i])

    def store(self, space: str, address: np.ndarray, values: list[np.ndarray]) -> None:
        dtype = values[0].dtype
        size = dtype.itemsize * len(values)
        if space == "global":
            target, at = self.memory.bytes, self.memory.place(address, size)
            self.memory.check(at, size, self.threads(), True)
        else:
            target, at = self.shared.bytes, self.shared.place(address, size, self.threads())
            self.shared.check(at, size, self.threads(), True)
        if self.counters:
            self.counters.access(space, "store", size, address, self.threads())
        view, at = target.view(dtype), at // dtype.itemsize
        for i, value in enumerate(values):
            view[at + i] = value

    def atomic_add(self, out: Operand, address: np.ndarray, values: np.ndarray) -> None:
        at = self.memory.place(address, 4)
        self.memory.atomic(at, self.threads())
        words, old = self.memory.bytes.view("u4"), np.empty(len(at), "u4")
        for i, word in enumerate(at // 4):  # one after another
            old[i] = words[word]
            words[word] += values[i]
        self.order.atomic(self.threads())
        self.put(out, old)

    def rows_of_shared(self, address: np.ndarray) -> np.ndarray:
        """(n, 16), the bytes at each thread's address."""
        at = self.shared.place(address, 16, self.threads())
        self.shared.check(at, 16, self.threads(), False)
        if self.counters:
            self.counters.access("shared", "ldmatrix", 16, address, self.threads())
        return self.shared.bytes[: len(self.shared.bytes) // 16 * 16].reshape(-1, 16)[at // 16]

    # ---- cp.async: bytes arrive when the thread waits for them, not before -----------------------------------------

    def begin_copy(self, to: np.ndarray, source: np.ndarray, size: int, valid: np.ndarray | None) -> None:
        who = self.threads()
        valid = np.full(len(who), size, "u4") if valid is None else valid
        if np.any((valid != 0) & (valid != size)):
            raise PtxError("cp.async of a part")
        read = valid > 0
        at = self.shared.place(to, size, who)
        self.shared.check(at, size, who, True, copy=True)
        place = np.zeros(len(who), "i8")
        if read.any():
            place[read] = self.memory.place(source[read], size)
            self.memory.check(place[read], size, who[read], False)
        if self.counters:
            self.counters.access("global", "cp.async", size, source[read], who[read])
            self.counters.access("shared", "cp.async", size, to, who)
        index = np.arange(self.n)[self.active]
        self.copies.append((index, at, place, read, self.groups[index].copy(), size))

    def land_copies(self, n_left: int) -> None:
        waits = np.zeros(self.n, bool)
        waits[self.active] = True
        remaining = []
        for index, at, place, read, group, size in self.copies:
            lands = waits[index] & (group < self.groups[index] - n_left)
            dtype = {4: "u4", 8: "u8", 16: "c16"}[size]
            source = self.memory.bytes.view(dtype)[place[lands] // size]
            self.shared.bytes[: len(self.shared.bytes) // size * size].view(dtype)[at[lands] // size] = np.where(
                read[lands], source, source.dtype.type(0)
            )
            for j in range(size // 4):
                word = at[lands] // 4 + j
                self.shared.copying[word] = NOBODY
                self.shared.wrote(word, self.everyone[index[lands]])
            if not lands.all():
                remaining.append((*(x[~lands] for x in (index, at, place, read, group)), size))
        self.copies = remaining

    # ---- control flow -------------------------------------------------------------------------------------------

    def run(self, n_blocks: int) -> None:
        """Runs blocks first_block .. first_block + n_blocks - 1."""
        x, y, z = self.block
        size, (gx, gy, gz) = x * y * z, self.grid
        self.n = n_blocks * size
        self.everyone = np.arange(self.n, dtype="i4") + np.int32(self.first_block * size)
        t, b = self.everyone % size, self.everyone // size
        self.special = {"%tid.x": t % x, "%tid.y": t // x % y, "%tid.z": t // (x * y)}
        self.special |= {"%ntid.x": x, "%ntid.y": y, "%ntid.z": z, "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz}
        self.special |= {"%ctaid.x": b % gx, "%ctaid.y": b // gx % gy, "%ctaid.z": b // (gx * gy), "%laneid": t % 32}
        shared = self.kernel.static_shared + self.dynamic_shared
        self.shared = SharedMemory(n_blocks, shared, self.first_block, self.order)
        self.registers: dict[str, np.ndarray] = {}
        self.groups, self.copies = np.zeros(self.n, "i4"), []
        self.pc = np.zeros(self.n, "i4")
        self.done, self.waiting = np.zeros(self.n, bool), np.zeros(self.n, bool)
        while not self.done.all():
            ready = ~(self.done | self.waiting)
            if not ready.any():
                raise PtxError("bar.sync is never reached by all threads of a block")
            here = int(self.pc[ready].min())
            self._activate(np.flatnonzero(ready & (self.pc == here)))
            self._go_on(here, self.n_active == np.count_nonzero(ready))

    def _activate(self, index: np.ndarray) -> None:
        self.all_active = len(index) == self.n
        self.active, self.n_active = slice(None) if self.all_active else index, len(index)

    def _go_on(self, p: int, is_everyone: bool) -> None:
        """From instruction p on, until these threads part, wait or may meet others."""
        code, targets, counters = self.kernel.code, self.kernel.targets, self.counters
        while True:
            i = code[p]
            self.at = i.text
            taken = None
            if i.guard is not None:
                taken = self.get(i.guard, "pred") ^ i.negated
            if counters:
                counters.instruction(i.opcode, self.threads())
            if i.opcode.startswith("bra"):
                target = self.kernel.labels[i.operands[0].text]
                if taken is None or taken.all():
                    p = target
                elif not taken.any():
                    p += 1
                else:
                    self.pc[self.active] = np.where(taken, target, p + 1)
                    return
            elif i.opcode == "ret":
                if taken is not None:
                    raise PtxError("ret under a predicate")
                self.done[self.active] = True
                return
            elif i.opcode == "bar.sync":
                if taken is not None or i.operands[0].text != "0" or len(i.operands) > 1:
                    raise PtxError("a barrier other than 0, or one under a predicate")
                self.whole_warps("bar.sync")
                self.waiting[self.active], self.pc[self.active] = True, p + 1
                self._open_barriers()
                return
            elif taken is None or taken.all():
                i.run(self)
                p += 1
            else:
                active, n, is_all = self.active, self.n_active, self.all_active
                if taken.any():
                    self._activate(np.arange(self.n)[active][taken])
                    i.run(self)
                self.active, self.n_active, self.all_active = active, n, is_all
                p += 1
            if p in targets and not is_everyone:
                self.pc[self.active] = p
                return

    def _open_barriers(self) -> None:
        size = self.order.block_size
        full = self.waiting.reshape(-1, size).all(1)
        self.waiting.reshape(-1, size)[full] = False
        self.order.block_barrier(np.flatnonzero(full) + self.first_block)


def _number(text: str, type: str) -> np.ndarray:
    """0f3F800000 is an fp32 number by its bits."""
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), "u4").view(DTYPE[type])[()]
    if type == "pred":
        return np.bool_(int(text))
    try:
        value = int(text, 0)
    except ValueError:
        raise PtxError(f"unknown operand: {text}") from None
    bits = 8 * DTYPE[type].itemsize
    return np.array(value & (1 << bits) - 1, f"u{bits // 8}").view(DTYPE[type])[()]
