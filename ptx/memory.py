"""Global and shared memory of a launch, and the rules by which threads may use them.

A clock advances at each barrier, fence and atomic operation. An access happens before another one by another thread
if a barrier of their block lies between, or `bar.warp.sync` of their warp (PTX ISA, "Memory Consistency Model",
causality order). All threads run in lockstep here, so a missing barrier changes no result: it is found because each
32-bit word knows who used it last, and when.
"""

import bisect

import numpy as np

from ptx.parse import PtxError

NOBODY, SEVERAL = -1, -2


class Order:
    """When the barriers of a grid were. Threads and blocks are numbered over the grid."""

    def __init__(self, n_blocks: int, block_size: int):
        self.block_size, self.clock = block_size, 1
        self.barrier = np.zeros(n_blocks, "i4")  # time of each block's latest
        self.warp_barrier = np.zeros(n_blocks * block_size // 32, "i4")
        # What a fence and an atomic operation behind it publish to other blocks: accesses of the block's threads
        # before the time `published`, and of the thread itself before `published_own`; and since when, and by
        # which thread, the block may see what others published.
        self.fenced, self.published = np.zeros(n_blocks, "i4"), np.zeros(n_blocks, "i4")
        self.fenced_own, self.published_own = np.zeros(n_blocks, "i4"), np.zeros(n_blocks, "i4")
        self.publisher = np.full(n_blocks, NOBODY, "i4")
        self.arrived, self.acquired = np.zeros(n_blocks, "i4"), np.zeros(n_blocks, "i4")

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def block_barrier(self, blocks: np.ndarray) -> None:
        self.barrier[blocks] = self.tick()

    def fence(self, threads: np.ndarray) -> None:
        """membar.gl by these threads."""
        b = threads // self.block_size
        self.fenced[b], self.fenced_own[b], self.publisher[b] = self.barrier[b], self.tick(), threads
        self.acquired[b] = np.where(self.arrived[b] > 0, self.clock, 0)

    def atomic(self, threads: np.ndarray) -> None:
        b = threads // self.block_size
        own = self.publisher[b] == threads  # a fence by the same thread lies before
        self.published[b] = np.where(own, self.fenced[b], 0)
        self.published_own[b] = np.where(own, self.fenced_own[b], 0)
        self.arrived[b] = self.tick()

    def before(self, other: np.ndarray, warp: np.ndarray, time: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Whether what `other` (of that warp) did at `time` happened before what `who`, of its block, does now."""
        return (
            (other == who)
            | (time < self.barrier[who // self.block_size])
            | ((warp == who // 32) & (time < self.warp_barrier[who // 32]))
        )

    def before_across(self, other: np.ndarray, time: np.ndarray, who: np.ndarray) -> np.ndarray:
        """The same of threads of different blocks: published by the one, acquired by the other."""
        theirs, mine = other // self.block_size, who // self.block_size
        own = (other == self.publisher[theirs]) & (time < self.published_own[theirs])
        acquired = self.acquired[mine]
        seen = (acquired > 0) & ((who == self.publisher[mine]) | (self.barrier[mine] > acquired))
        return ((time < self.published[theirs]) | own) & seen


class GlobalMemory:
    """The allocations that a launch can reach: {address: bytes}, each address a multiple of 256."""

    def __init__(self, buffers: dict[int, np.ndarray], order: Order):
        self.begins, self.ends, self.offsets, total = [], [], [], 0
        for begin in sorted(buffers):
            self.begins.append(begin)
            self.ends.append(begin + len(buffers[begin]))
            self.offsets.append(total)
            total += -(-len(buffers[begin]) // 256) * 256
        self.bytes = np.zeros(total + 256, "u1")
        for begin, offset in zip(self.begins, self.offsets, strict=True):
            self.bytes[offset : offset + len(buffers[begin])] = buffers[begin]
        self.order = order
        self.writer = np.full(len(self.bytes) // 4, NOBODY, "i4")  # of this launch; SEVERAL: atomic operations
        self.time = np.zeros(len(self.bytes) // 4, "i4")
        self.written = False
        # Programmatic dependent launch: threads that have waited for the kernels before; what those wrote.
        self.waited: np.ndarray | None = None
        self.fresh = np.zeros(len(self.bytes) // 4, bool)

    def begin_early(self, n_threads: int, fresh: dict[int, np.ndarray]) -> None:
        """No thread may write before its griddepcontrol.wait, nor read the words `fresh` ({address: indices})."""
        self.waited = np.zeros(n_threads, bool)
        for begin, words in fresh.items():
            self.fresh[self.offsets[self.begins.index(begin)] // 4 + words] = True

    def _check_early(self, at: np.ndarray, size: int, who: np.ndarray, write: bool) -> None:
        early = ~self.waited[who]
        for j in range(max(1, size // 4) if early.any() else 0):
            if np.any(early & (write | self.fresh[at // 4 + j])):
                did = "writes global memory" if write else "reads what a kernel before it wrote"
                raise PtxError(f"{did}, before griddepcontrol.wait")

    def place(self, address: np.ndarray, size: int) -> np.ndarray:
        """Indices into `bytes` of `size` bytes at each address."""
        if np.any(address % np.uint64(size)):
            raise PtxError(f"misaligned: {size} bytes of global memory at {_first(address, address % size != 0):#x}")
        low, high = int(address.min()), int(address.max())
        k = bisect.bisect_right(self.begins, low) - 1
        if k >= 0 and high + size <= self.ends[k]:
            return address.astype("i8") - (self.begins[k] - self.offsets[k])
        begins, ends = np.array(self.begins, "u8"), np.array(self.ends, "u8")
        k = np.searchsorted(begins, address, "right") - 1
        outside = (k < 0) | (address + np.uint64(size) > ends[k])
        if outside.any():
            raise PtxError(f"outside: {size} bytes of global memory at {_first(address, outside):#x}")
        return address.astype("i8") - (begins - np.array(self.offsets, "u8")).astype("i8")[k]

    def check(self, at: np.ndarray, size: int, who: np.ndarray, write: bool) -> None:
        """Words that another thread of this launch wrote need an order; a write is remembered."""
        if self.waited is not None:
            self._check_early(at, size, who, write)
        if not (write or self.written):
            return
        for j in range(max(1, size // 4)):
            word = at // 4 + j
            other, time = self.writer[word], self.time[word]
            block = self.order.block_size
            same = other // block == who // block
            ordered = np.where(
                same,
                self.order.before(other, other // 32, time, who),
                self.order.before_across(other, time, who),
            )
            bad = (other >= 0) & ~ordered
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                raise PtxError(
                    f"race: thread {who[i] % block} of block {who[i] // block} {'writes' if write else 'reads'} global "
                    f"memory that thread {other[i] % block} of block {other[i] // block} wrote"
                )
            if write:
                self.written = True
                keep = other != SEVERAL
                self.writer[word[keep]], self.time[word[keep]] = who[keep], self.order.clock

    def atomic(self, at: np.ndarray, who: np.ndarray) -> None:
        if self.waited is not None:
            self._check_early(at, 4, who, True)
        self.writer[at // 4] = SEVERAL

    def contents(self) -> dict[int, np.ndarray]:
        return {
            begin: self.bytes[offset : offset + end - begin]
            for begin, end, offset in zip(self.begins, self.ends, self.offsets, strict=True)
        }


class SharedMemory:
    """Of all blocks that run together: `size` bytes each, NaN in fp16 and fp32 until they are written."""

    def __init__(self, n_blocks: int, size: int, first_block: int, order: Order):
        self.size, self.stride, self.first_block = size, -(-size // 16) * 16, first_block
        self.bytes = np.full(n_blocks * self.stride + 16, 0xFF, "u1")
        words = len(self.bytes) // 4
        self.writer, self.reader = np.full(words, NOBODY, "i4"), np.full(words, NOBODY, "i4")
        self.reader_warp = np.full(words, NOBODY, "i4")
        self.write_time, self.read_time = np.zeros(words, "i4"), np.zeros(words, "i4")
        self.copying = np.full(words, NOBODY, "i4")  # a cp.async by this thread has not landed
        self.order = order

    def place(self, address: np.ndarray, size: int, who: np.ndarray) -> np.ndarray:
        address = address.astype("i8")
        if np.any(address % size):
            raise PtxError(f"misaligned: {size} bytes of shared memory at {_first(address, address % size != 0)}")
        outside = (address < 0) | (address + size > self.size)
        if outside.any():
            raise PtxError(f"outside: {size} bytes at {_first(address, outside)} of {self.size} of shared memory")
        return address + (who // self.order.block_size - self.first_block) * self.stride

    def check(self, at: np.ndarray, size: int, who: np.ndarray, write: bool, copy: bool = False) -> None:
        for j in range(max(1, size // 4)):
            self._check_word(at // 4 + j, who, write, copy)

    def _check_word(self, word: np.ndarray, who: np.ndarray, write: bool, copy: bool) -> None:
        order, did = self.order, "writes" if write else "reads"
        writer = self.writer[word]
        if np.any(self.copying[word] >= 0):
            self._fail(did, "where a cp.async is not yet waited for", word, who, self.copying[word] >= 0)
        bad = (writer >= 0) & ~order.before(writer, writer // 32, self.write_time[word], who)
        if bad.any():
            self._fail(did, "that another thread wrote, with no barrier between", word, who, bad)
        reader, warp = self.reader[word], self.reader_warp[word]
        unordered = (reader != NOBODY) & ~order.before(reader, warp, self.read_time[word], who)
        if not write:
            if np.any(writer == NOBODY):
                self._fail(did, "that nobody has written", word, who, writer == NOBODY)
            self.reader[word], self.reader_warp[word], self.read_time[word] = who, who // 32, order.clock
            self.reader_warp[word[(self.reader_warp[word] != who // 32) | (unordered & (warp != who // 32))]] = SEVERAL
            self.reader[word[(self.reader[word] != who) | unordered]] = SEVERAL
            return
        if unordered.any():
            self._fail(did, "that another thread read, with no barrier between", word, who, unordered)
        self.reader[word] = NOBODY
        if copy:
            self.copying[word] = who
        else:
            self.wrote(word, who)
            if np.any(self.writer[word] != who):
                self._fail(did, "that another thread writes at the same time", word, who, self.writer[word] != who)

    def wrote(self, word: np.ndarray, who: np.ndarray) -> None:
        self.writer[word], self.write_time[word] = who, self.order.clock

    def _fail(self, did: str, what: str, word: np.ndarray, who: np.ndarray, bad: np.ndarray) -> None:
        i = int(np.flatnonzero(bad)[0])
        block = self.order.block_size
        raise PtxError(
            f"race: thread {who[i] % block} of block {who[i] // block} {did} byte {word[i] * 4 % self.stride} "
            f"of shared memory {what}"
        )


def _first(values: np.ndarray, where: np.ndarray) -> int:
    return int(values[np.flatnonzero(where)[0]])
