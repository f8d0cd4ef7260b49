"""matmul_axi on Icarus under AXI models that nobody here wrote: cocotbext-axi drives registers and streams.

    make hw-cocotb           1,000 products of all formats, with random pauses on every channel; a stop; 300 products
                             from an AXI4 memory

Environment: COCOTB_PRODUCTS, their number; COCOTB_SEED. Each result has to be what numpy gives for it, to the bit, each
register what was written, and WEIGHT_BEATS and STATUS what was sent.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge
from cocotbext.axi import (
    AxiLiteBus,
    AxiLiteMaster,
    AxiRamRead,
    AxiReadBus,
    AxiStreamBus,
    AxiStreamFrame,
    AxiStreamSink,
    AxiStreamSource,
)

from golden.fp32 import fma

# Registers: docs/rtl.md.
ID, SHAPE, CONTROL, STATUS, TOKENS, PASSES, GROUPS, TILES, MODE = 0, 4, 0x0C, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24
INTERRUPT, WEIGHT_BEATS, ADDRESS, QUEUE = 0x2C, 0x38, 0x48, 0x50
LOAD, MULTIPLY, READ, STOP = 1, 2, 4, 8
CODED = 4
CLOCK = 10  # steps of the simulator
PRODUCTS = int(os.environ.get("COCOTB_PRODUCTS", "1000"))


class Memory(AxiRamRead):
    """64 KB, from 0 on; what is above is answered with an error."""

    async def _read(self, address: int, length: int) -> bytes:
        if address >= 1 << 16:
            raise IndexError(f"no memory at {address:#x}")
        return self.read(address, length)


class Core:
    """The core, and what drives it."""

    def __init__(self, dut: Any) -> None:
        def stream(kind: type, prefix: str) -> Any:
            return kind(AxiStreamBus.from_prefix(dut, prefix), dut.aclk, dut.aresetn, reset_active_level=False)

        self.dut = dut
        bus = AxiLiteBus.from_prefix(dut, "s_axil")
        self.registers = AxiLiteMaster(bus, dut.aclk, dut.aresetn, reset_active_level=False)
        self.weights = stream(AxiStreamSource, "s_axis_w")
        self.activations = stream(AxiStreamSource, "s_axis_x")
        self.results = stream(AxiStreamSink, "m_axis")
        bus = AxiReadBus.from_prefix(dut, "m_axi")
        self.memory = Memory(bus, dut.aclk, dut.aresetn, reset_active_level=False, size=1 << 16)

    async def begin(self) -> None:
        """Starts the clock, and resets the core."""
        cocotb.start_soon(Clock(self.dut.aclk, CLOCK, units="step").start())
        self.dut.aresetn.value = 0
        for _ in range(4):
            await RisingEdge(self.dut.aclk)
        self.dut.aresetn.value = 1
        shape = await self.registers.read_dword(SHAPE)
        self.rows, self.cols = shape & 0xFFF, shape >> 12 & 0xFFF

    def pauses(self, draw: random.Random, share: float) -> None:
        """Every channel pauses in that share of all clocks."""

        def clocks() -> Iterator[bool]:
            while True:
                yield draw.random() < share

        write, read = self.registers.write_if, self.registers.read_if
        channels = [write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel]
        channels += [self.memory.ar_channel, self.memory.r_channel]
        for channel in [*channels, self.weights, self.activations, self.results]:
            channel.set_pause_generator(clocks())

    async def command(self, command: int, at: dict[int, int]) -> None:
        """Writes registers, by address, all at once, and then the command."""
        writes = [cocotb.start_soon(self.registers.write_dword(address, n)) for address, n in at.items()]
        for write in writes:
            await write
        await self.registers.write_dword(CONTROL, command)

    async def done(self) -> None:
        """Waits for the end of a command by its interrupt; STATUS is done, and neither busy nor refused."""
        await RisingEdge(self.dut.aclk)
        while not self.dut.irq.value:
            await RisingEdge(self.dut.aclk)
        assert await self.registers.read_dword(STATUS) == 2


def product(rng: np.random.Generator, rows: int, cols: int, mode: int) -> tuple[dict, bytes, bytes, np.ndarray]:
    """Sizes by register, the streams of both operands, and results (n_tokens, n_outputs) fp32 of a random product."""
    n, passes, groups, tiles = (int(rng.integers(1, most + 1)) for most in (4, 3, 3, 3))
    group, m = passes * rows, tiles * cols
    x = rng.integers(-128, 128, (n, groups, group)).astype(np.int8)
    x_scales = rng.uniform(1e-3, 1, (n, groups)).astype(np.float32)
    w_scales = rng.uniform(1e-3, 1, (m, groups)).astype(np.float32)
    bits = (8, 4, 2, 2)[mode]
    codes = rng.integers(-128, 128, (m, groups, group)) if mode == 0 else rng.integers(0, 1 << bits, (m, groups, group))
    zeros = rng.integers(0, 16, (m, groups)) if mode else np.zeros((m, groups), int)
    w = codes * (5 if mode == 3 else 1) - zeros[:, :, None]
    x_stream = b"".join(x_scales[t, g].tobytes() + x[t, g].tobytes() for t in range(n) for g in range(groups))
    w_stream = bytearray()
    for c in range(0, m, cols):
        for g in range(groups):
            w_stream += w_scales[c : c + cols, g].tobytes()
            if mode:
                w_stream += zeros[c : c + cols, g].astype(np.uint8).tobytes()
            per_beat = 8 // bits
            part = (codes[c : c + cols, g] & ((1 << bits) - 1)).reshape(cols, -1, per_beat)
            w_stream += (part << (bits * np.arange(per_beat))).sum(2).T.astype(np.uint8).tobytes()
    out = np.zeros((n, m), np.float32)
    for g in range(groups):
        acc = np.einsum("tk,mk->tm", x[:, g].astype(np.int64), w[:, g]).astype(np.float32)
        out = fma(acc, w_scales[None, :, g] * x_scales[:, None, g], out)
    at = {TOKENS: n, PASSES: passes, GROUPS: groups, TILES: tiles}
    return at, x_stream, bytes(w_stream), out


@cocotb.test(timeout_time=CLOCK * 1500 * PRODUCTS, timeout_unit="step")
async def products(dut: Any) -> None:
    """Random products, equal to the bit."""
    core = Core(dut)
    await core.begin()
    assert await core.registers.read_dword(ID) == 0x716E7572
    await core.registers.write_dword(INTERRUPT, 1)
    seed = int(os.environ.get("COCOTB_SEED", "1"))
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    for i in range(PRODUCTS):
        if i % 10 == 0:
            core.pauses(draw, (0, 0.3, 0.6)[i // 10 % 3])
        mode = i % 4
        at, x, w, wanted = product(rng, core.rows, core.cols, mode)
        await core.command(LOAD, {**at, MODE: CODED})
        await core.activations.send(AxiStreamFrame(x))
        await core.done()
        await core.command(READ, {})
        back = await core.results.recv()
        assert bytes(back.tdata) == x, f"product {i}: activations are other ones"
        await core.done()
        await core.command(MULTIPLY, {MODE: mode})
        await core.weights.send(AxiStreamFrame(w))
        frame = await core.results.recv()
        n, tiles = at[TOKENS], at[TILES]
        found = np.frombuffer(bytes(frame.tdata), np.float32).reshape(tiles, n, core.cols).swapaxes(0, 1).reshape(n, -1)
        assert np.array_equal(found.view(np.int32), wanted.view(np.int32)), f"product {i}, mode {mode}: results differ"
        await core.done()
        assert await core.registers.read_dword(WEIGHT_BEATS) == len(w) // core.cols
        for address, value in at.items():
            assert await core.registers.read_dword(address) == value
    dut._log.info("%d products are equal to the bit", PRODUCTS)


@cocotb.test(timeout_time=CLOCK * 5000, timeout_unit="step")
async def stop(dut: Any) -> None:
    """A command whose stream has too few beats runs until it is stopped, and the next one is as ever."""
    core = Core(dut)
    await core.begin()
    await core.registers.write_dword(INTERRUPT, 1)
    at, x, w, wanted = product(np.random.default_rng(2), core.rows, core.cols, 0)
    for beats in (3, len(x) // 4):
        await core.command(LOAD, {**at, MODE: CODED})
        await core.activations.send(AxiStreamFrame(x[: 4 * beats]))
        for _ in range(4 * beats + 20):
            await RisingEdge(dut.aclk)
        if beats == 3:
            assert await core.registers.read_dword(STATUS) == 1
            await core.registers.write_dword(CONTROL, STOP)
            assert await core.registers.read_dword(STATUS) == 0
    await core.done()
    await core.command(MULTIPLY, {MODE: 0})
    await core.weights.send(AxiStreamFrame(w))
    frame = await core.results.recv()
    first = np.frombuffer(bytes(frame.tdata), np.float32)[: core.cols]
    assert np.array_equal(first, wanted[0, : core.cols])
    await core.done()


@cocotb.test(timeout_time=CLOCK * 2000 * PRODUCTS, timeout_unit="step")
async def queue(dut: Any) -> None:
    """Products whose matrices the core reads from memory: up to four in the queue, equal to the bit."""
    core = Core(dut)
    await core.begin()
    await core.registers.write_dword(INTERRUPT, 1)
    rng, draw = np.random.default_rng(3), random.Random(3)
    done = 0
    while done < max(4, 3 * PRODUCTS // 10):
        core.pauses(draw, (0, 0.3, 0.6)[done % 3])
        mode, times = done % 4, int(rng.integers(1, 5))
        at, x, w, wanted = product(rng, core.rows, core.cols, mode)
        await core.command(LOAD, {**at, MODE: CODED})
        await core.activations.send(AxiStreamFrame(x))
        await core.done()
        address = int(rng.integers(0, (1 << 16) - len(w))) // core.cols * core.cols
        core.memory.write(address, w)
        for _ in range(times):
            await core.registers.write_dword(ADDRESS, address)
            await core.registers.write_dword(QUEUE, at[TILES] | mode << 16)
        n, tiles = at[TOKENS], at[TILES]
        for _ in range(times):
            frame = await core.results.recv()
            found = np.frombuffer(bytes(frame.tdata), np.float32).reshape(tiles, n, core.cols).swapaxes(0, 1)
            assert np.array_equal(found.reshape(n, -1).view(np.int32), wanted.view(np.int32)), f"product {done} differs"
        await core.done()
        assert await core.registers.read_dword(QUEUE) == 4
        done += times
    # What memory does not have is answered with an error, which is the product's.
    await core.registers.write_dword(ADDRESS, 1 << 16)
    await core.registers.write_dword(QUEUE, 1)
    await core.results.recv()
    while not dut.irq.value:
        await RisingEdge(dut.aclk)
    assert await core.registers.read_dword(STATUS) == 2 | 8
    dut._log.info("%d products from memory are equal to the bit", done)
