"""Predicts how many tokens/s runq_awq makes on GPUs, from counts of its kernels and the cards' data sheets.

    python -m bench.predict [--models qwen3-8b ...] [--cards h100 ...] [--kernels PHASE:N] [--blocks]

    --kernels decode:1024    also every kernel of a token at 1,024 keys: what it costs and what limits it
    --blocks                 instead, how many blocks and warps of each kernel an SM holds at once, by architecture

A launch takes the time to start it, and the longest of five times: bytes from memory; bytes from the second-level cache
(L2); instructions of the busiest multiprocessor (SM); its products on tensor cores; and the *wait*, the time of one
warp alone: its instructions one by one, and its loads, as many at a time as the compiled kernel has in flight, times
the blocks that come one after another. What the last block of a tile does alone is added. Launches follow one another.
On Hopper all but cuBLAS's are *early* (Programmatic Dependent Launch): of a launch's start LAUNCH_EARLY remains, and
loads from memory in front of the wait for the launch before cost nothing, as if that hid them.

Left out: what else overlaps between launches; that latency grows with the load; hits in L1, and hits of weights in L2;
bank conflicts; clocks below the boost clock; which block runs where. cuBLAS is a share of the peak. Nothing was fitted
to a measurement of this program. bench/sass.py counts what was compiled, into bench/kernel_counts.json.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.random_checkpoint import MODELS, config_of
from bench.run import work_of
from formats.checkpoint import Config

# ----------------------------------------------------------------------------
# Constants: the same before and after any change of a kernel


@dataclass(frozen=True)
class Card:
    """bandwidth in bytes/s; cycles of a load from memory and from L2; L2 in bytes/s; per SM: warps, blocks, shared."""

    name: str
    arch: str
    n_sms: int
    clock: float
    bandwidth: float
    fp16_flops: float
    mma_share: float
    dram_cycles: float
    l2_cycles: float
    l2_bandwidth: float
    warps: int
    blocks: int
    shared: int


# SMs, clock, bandwidth, dense fp16 FLOP/s with fp32 sums: NVIDIA's H100, H200 and A100 data sheets and white papers,
# Ada GPU architecture white paper (RTX 4090). Warps, blocks, shared bytes: CUDA C++ Programming Guide, Technical
# Specifications per Compute Capability. Assumed: cycles, and mma.sync's share of Hopper's peak (only wgmma has all of
# it), both after Luo et al. 2024 (arXiv 2402.13499: H100 PCIe, A100, RTX 4090; without load); the L2's bandwidth, 60 %
# of 5,120 bytes per clock (A100 white paper; the others alike).
CARDS = {
    "h100": Card("H100 SXM", "sm_90", 132, 1.83e9, 3.35e12, 989.4e12, 0.62, 479, 263, 5.6e12, 64, 32, 228 << 10),
    "a100": Card("A100 SXM 80 GB", "sm_80", 108, 1.41e9, 2.039e12, 312e12, 1, 466, 262, 4.3e12, 64, 32, 164 << 10),
    "h200": Card("H200 SXM", "sm_90", 132, 1.83e9, 4.8e12, 989.4e12, 0.62, 479, 263, 5.6e12, 64, 32, 228 << 10),
    "4090": Card("RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, 165.2e12, 1, 542, 273, 5.0e12, 48, 24, 100 << 10),
}
READ_SHARE = 0.92  # assumed: of the data sheet's bandwidth that reading reaches
LAUNCH = 1.3e-6  # assumed: a kernel in a graph: 0.5 us to the next (Gray 2019, "Getting Started with CUDA Graphs", on a
# V100), and 0.8 us until its first instruction and after its last
LAUNCH_EARLY = 0.5e-6  # of these 1.3 us, what remains of an early launch
LAUNCH_ALONE = 2.5e-6  # assumed: without a graph the host takes this long per launch
STEP = 15e-6  # assumed: per step of the host: ids up, the graph's launch, the result down
CYCLES = 2.0  # assumed: per instruction of a warp that runs alone; a result takes 4, and half of them wait for one
UNKNOWN = {"registers": 128, "shared": 0}  # cuBLAS's kernels
CUBLAS_SHARE = 0.7  # assumed: of the tensor cores' peak
MMA_FLOP = 2 * 16 * 8 * 16  # of an mma.m16n8k16

# Of the program; tests/test_predict.py holds these to the sources.
MAX_CHUNK, MAX_SPLITS, MAX_PARTIALS, DEQUANTIZE_FROM = 512, 32, 1 << 23, 256
GEMV_WARPS, GEMV_INPUTS, GEMV_STEPS, GEMM_INPUTS, GEMM_STAGES = 8, 16, 4, 64, 3
GEMM_US = {16: (2.0, 0.4), 32: (2.5, 0.4), 64: (1.8, 0.9)}  # GemmShape's stage_us and part_us
ATTENTION_WARPS, ATTENTION_KEYS, TOKEN_WARPS, TOKEN_KEYS, TOKEN_STEPS = 8, 64, 8, 16, 4
ARG_MAX_THREADS, ARG_MAX_BLOCKS = 256, 256


# ----------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class Launch:
    """A kernel's launch. Instructions, mma and rounds are those of its longest warp.

    dram, l2: bytes of all blocks. rounds, near: how often a warp waits for memory and for L2, one after the other;
    early: of these rounds, those of loads that begin before the wait for the launch before.
    alone, alone_instructions: the same for L2 in the block that finishes a tile. flop: of cuBLAS.
    """

    kernel: str
    blocks: int
    warps: int  # of a block
    dram: float
    l2: float = 0
    instructions: float = 0
    mma: float = 0
    rounds: float = 0
    near: float = 0
    early: float = 0
    alone: float = 0
    alone_instructions: float = 0
    dynamic_shared: int = 0
    flop: float = 0


def blocks_per_sm(card: Card, registers: int, shared: int, warps: int) -> int:
    """How many blocks an SM holds at once (CUDA C++ Programming Guide, Hardware Multithreading).

    registers of a thread, given out to warps by 256; shared bytes of a block, to which the system adds 1,024.
    """
    per_warp = -(-registers * 32 // 256) * 256
    return max(1, min(card.blocks, card.warps // warps, 65536 // per_warp // warps, card.shared // (shared + 1024)))


def is_early(card: Card, launch: Launch) -> bool:
    """Whether it begins beside the launch before."""
    return card.arch >= "sm_90" and launch.kernel != "cuBLAS"


def rounds_of(card: Card, launch: Launch) -> float:
    """How often it waits for memory."""
    return launch.rounds - launch.early * is_early(card, launch)


def times(card: Card, counts: dict, launch: Launch, graph: bool = True) -> dict[str, float]:
    """Seconds by what they are for; "start" and "finish" are added to the longest of the others."""
    row = counts.get(launch.kernel, UNKNOWN)
    fit = blocks_per_sm(card, row["registers"], row["shared"] + launch.dynamic_shared, launch.warps)
    busiest, turns = math.ceil(launch.blocks / card.n_sms), math.ceil(launch.blocks / (fit * card.n_sms))
    far, near, step = card.dram_cycles / card.clock, card.l2_cycles / card.clock, CYCLES / card.clock
    flops = card.fp16_flops / card.n_sms * card.mma_share
    return {
        "start": LAUNCH_ALONE if not graph else LAUNCH_EARLY if is_early(card, launch) else LAUNCH,
        "memory": launch.dram / (card.bandwidth * READ_SHARE),
        "L2": launch.l2 / card.l2_bandwidth,
        "instructions": busiest * launch.warps * launch.instructions / (4 * card.clock),
        "tensor": busiest * launch.warps * launch.mma * MMA_FLOP / flops
        + launch.flop / (card.fp16_flops * CUBLAS_SHARE),
        "wait": turns * (rounds_of(card, launch) * far + launch.near * near + launch.instructions * step),
        "finish": launch.alone * near + launch.alone_instructions * step,
    }


def total(parts: dict[str, float]) -> float:
    """Seconds of a launch."""
    return parts["start"] + parts["finish"] + max(v for k, v in parts.items() if k not in ("start", "finish"))


def binds(parts: dict[str, float]) -> str:
    """The largest part."""
    return max(parts, key=parts.get)


# ----------------------------------------------------------------------------
# The program's launches. Each function names the lines of the source that it follows.


def row_walk(counts: dict, kernel: str, loads: float) -> tuple[float, float]:
    """Instructions and rounds of a warp that walks through `loads` loads in the kernel's main loop."""
    main = counts[kernel]["main"]
    instructions = counts[kernel]["straight"] + loads * main["instructions"] / max(1, main["loads"])
    return instructions, math.ceil(loads / max(1, main["in_flight"]))


def embed(counts: dict, rows: int, dim: int) -> Launch:
    """embed_kernel: a thread has two values; the token's id, then its row."""
    blocks, straight = rows * math.ceil(dim / 512), counts["embed_kernel"]["straight"]
    return Launch("embed_kernel", blocks, 8, 2 * rows * dim, 4 * rows * dim, straight, rounds=1, near=1)


def rmsnorm(counts: dict, rows: int, dim: int) -> Launch:
    """rmsnorm_kernel: one block a row; a thread loads up to 16 weights at once, and as many values."""
    warps, straight = min(32, math.ceil(dim / 512)), counts["rmsnorm_kernel"]["straight"]
    return Launch("rmsnorm_kernel", rows, warps, 2 * dim, 6 * rows * dim, straight, rounds=1, near=1, early=1)


def prepare_heads(counts: dict, c: Config, rows: int) -> Launch:
    """prepare_heads_kernel: a warp a head; position, rotations, then the head."""
    heads, straight = c.n_heads + 2 * c.n_kv_heads, counts["prepare_heads_kernel"]["straight"]
    blocks, n_bytes = rows * math.ceil(heads / 4), rows * heads * c.head_dim * 6
    return Launch("prepare_heads_kernel", blocks, 4, 0, n_bytes, straight, near=2, rounds=1, early=1)


def swiglu(counts: dict, n: int) -> Launch:
    """swiglu_kernel: a thread has two values, which were just written, and lie in L2."""
    return Launch("swiglu_kernel", math.ceil(n / 512), 8, 0, 10 * n, counts["swiglu_kernel"]["straight"], near=1)


def weight_bytes(n_in: int, n_out: int) -> float:
    """Codes, zero points and scales of groups of 128."""
    return n_in * n_out * (4 + 4 / 128 + 16 / 128) / 8


def gemv_shape(card: Card, n_in: int, n_tiles: int, step_bytes: int) -> tuple[int, int, int]:
    """Warps of a block, blocks of a tile, and a warp's most steps. Scratch memory suffices for these shapes."""
    shapes, fits = [], 2 * GEMV_WARPS * GEMV_STEPS * step_bytes + 8192 <= card.shared
    for warps in (GEMV_WARPS, GEMV_WARPS // 2)[not fits :]:
        steps = max(1, n_in // GEMV_INPUTS // warps)
        splits = max(1, min(2 * GEMV_WARPS // warps * card.n_sms // n_tiles, steps, MAX_SPLITS))
        while steps < 8 * splits and steps % splits:
            splits -= 1
        shapes.append((warps, splits, math.ceil(n_in / GEMV_INPUTS / (warps * splits))))
    return min(shapes, key=lambda shape: shape[2])


def gemv(card: Card, counts: dict, n_in: int, outs: list[int]) -> Launch:
    """awq_gemv with run_gemv(). A main loop is four steps of 16 inputs, and a warp has their copies in flight."""
    words = 4 if all(n % 32 == 0 for n in outs) else 1
    tiles = sum(math.ceil(n / (64 * words)) for n in outs)
    step_bytes, finish, finish_instructions = 672 * words + 128, 0.0, 0.0
    warps, splits, steps = gemv_shape(card, n_in, tiles, step_bytes)
    kernel, values = f"awq_gemv<{words}, {warps}>", max(1, 2 * words // warps)
    row = counts[kernel]
    if splits > 1:
        finish = 2 + math.ceil(splits * values / row["last"]["in_flight"])
        finish_instructions = splits * values * row["last"]["instructions"] / row["last"]["loads"]
    return Launch(
        kernel, tiles * splits, warps, weight_bytes(n_in, sum(outs)), 8 * splits * sum(outs) * (splits > 1),
        row["straight"] + steps * row["main"]["instructions"] / GEMV_STEPS, steps * row["main"]["mma"] // GEMV_STEPS,
        max(1, steps / GEMV_STEPS), 1, 1, finish, finish_instructions,
        warps * (GEMV_STEPS * step_bytes + 2 * GEMV_INPUTS * steps),
    )  # fmt: skip


def gemm_shape(size: int) -> tuple[int, int, int]:
    """GemmShape of tiles of `size` tokens: output channels of a tile, k groups, warps."""
    columns, k_groups = 128, 2 if size > 32 else 4
    return columns, k_groups, k_groups * columns // 64


def gemm(card: Card, counts: dict, n_in: int, outs: list[int], n_tokens: int) -> Launch:
    """awq_gemm of the tile that run_fused() chooses."""
    return min((gemm_of(size, card, counts, n_in, outs, n_tokens) for size in GEMM_US), key=lambda of: of[0])[1]


def gemm_of(size: int, card: Card, counts: dict, n_in: int, outs: list[int], n_tokens: int) -> tuple[float, Launch]:
    """GemmPlan::us(), and the launch. A main loop is a stage; the ring has two stages in flight."""
    (columns, k_groups, warps), rows, row = gemm_shape(size), math.ceil(n_tokens / size), counts[f"awq_gemm<{size}>"]
    n_tiles, tile_stages = rows * sum(math.ceil(n / columns) for n in outs), math.ceil(n_in / GEMM_INPUTS / k_groups)
    n_stages = n_tiles * tile_stages
    most = min(2 * card.n_sms, n_stages, MAX_PARTIALS // (2 * size * columns))
    stages = math.ceil(n_stages / most)  # of a block, the longest
    blocks, weights = math.ceil(n_stages / stages), weight_bytes(n_in, sum(outs))
    l2, finish, us = rows * weights + n_tiles * n_in * size * 2, 0.0, stages * GEMM_US[size][0]
    if stages % tile_stages:  # tiles are cut; a thread adds parts of two tokens, of up to eight blocks, at a time
        us += (tile_stages // stages + 1) * GEMM_US[size][1]
        l2 += 8 * (blocks + n_tiles) * size * columns
        parts = math.ceil(tile_stages / stages) + 1
        finish = 2 + math.ceil(size * columns / (4 * 32 * warps) / 2) * math.ceil(parts / 8)
    return us, Launch(
        f"awq_gemm<{size}>", blocks, warps, weights, l2, row["straight"] + stages * row["main"]["instructions"],
        stages * row["main"]["mma"], 1 + stages / (GEMM_STAGES - 1), alone=finish,
        dynamic_shared=GEMM_STAGES * k_groups * (2 * GEMM_INPUTS * size + GEMM_INPUTS * columns // 2),
    )  # fmt: skip


def cublas(n_tokens: int, n_in: int, n_out: int) -> Launch:
    """An fp16 product; 256 blocks stand for cuBLAS's own grid."""
    return Launch("cuBLAS", 256, 8, 2 * n_in * n_out, flop=2 * n_tokens * n_in * n_out, rounds=4)


def products(card: Card, counts: dict, n_in: int, outs: list[int], n_tokens: int) -> Iterator[Launch]:
    """run_products(): awq_gemv, awq_gemm, or from DEQUANTIZE_FROM tokens on awq_dequantize and cuBLAS."""
    if n_tokens == 1:
        yield gemv(card, counts, n_in, outs)
    elif n_tokens < DEQUANTIZE_FROM:
        yield gemm(card, counts, n_in, outs, n_tokens)
    else:
        for n_out in outs:
            blocks, straight = math.ceil(n_out / 1024) * n_in // 8, counts["awq_dequantize"]["straight"]
            n_bytes = weight_bytes(n_in, n_out) + 2 * n_in * n_out
            yield Launch("awq_dequantize", blocks, 4, n_bytes, 0, straight, rounds=1, early=1)
            yield cublas(n_tokens, n_in, n_out)


def attention(card: Card, counts: dict, c: Config, n_tokens: int, pos: int, context: int) -> Launch:
    """attention_kernel, or of one token token_attention and FastAttention."""
    per_kv, keys, kv_bytes = c.n_heads // c.n_kv_heads, pos + n_tokens, 4 * c.kv_dim
    tiles = math.ceil(n_tokens * per_kv / 16)
    if n_tokens > 1:  # a main loop is a stage of keys, and the next is copied meanwhile
        kernel, steps = f"attention_kernel<{c.head_dim // 32}>", math.ceil(keys / ATTENTION_KEYS)
        row, blocks = counts[kernel], math.ceil(tiles / ATTENTION_WARPS)
        return Launch(
            kernel, blocks * c.n_kv_heads, ATTENTION_WARPS, keys * kv_bytes, (pos + n_tokens / 2) * kv_bytes * blocks,
            row["straight"] + steps * row["main"]["instructions"], steps * row["main"]["mma"], 1 + steps, near=2,
            dynamic_shared=2 * 2 * ATTENTION_KEYS * 2 * (c.head_dim + 8),
        )  # fmt: skip
    kernel, n_tiles = f"token_attention<{c.head_dim // 32}>", tiles * c.n_kv_heads
    row, n_steps, block_keys, splits = counts[kernel], math.ceil(keys / TOKEN_KEYS), TOKEN_STEPS * TOKEN_KEYS, 1
    if n_steps > TOKEN_WARPS:
        most = max(1, min(card.n_sms // n_tiles, math.ceil(context / block_keys)))
        splits = min(most, math.ceil(n_steps / TOKEN_STEPS))
    steps, walks = math.ceil(n_steps / (splits * TOKEN_WARPS)), math.ceil(splits / 16) * (splits > 1)
    return Launch(
        kernel, n_tiles * splits, TOKEN_WARPS, keys * kv_bytes, 16 * c.n_heads * splits * (c.head_dim / 2 + 1),
        row["straight"] + steps * row["main"]["instructions"], steps * row["main"]["mma"], steps, 2, 1,
        2 * (splits > 1) + walks, walks * row["last"]["instructions"], 4 * min(per_kv, 16) * (8 * c.head_dim + 4),
    )  # fmt: skip


def classifier(counts: dict, c: Config) -> Iterator[Launch]:
    """fp16_gemv: a warp a row, two loads of 16 bytes a lane at a time; arg_max_kernel: four logits a load."""
    instructions, rounds = row_walk(counts, "fp16_gemv", 2 * math.ceil(c.dim / 256))
    blocks = math.ceil(c.vocab_size / 8)
    yield Launch("fp16_gemv", blocks, 8, 2 * c.vocab_size * c.dim, blocks * 2 * c.dim, instructions, rounds=rounds)
    blocks = min(math.ceil(c.vocab_size / (4 * ARG_MAX_THREADS)), ARG_MAX_BLOCKS)
    loads = math.ceil(c.vocab_size / (4 * ARG_MAX_THREADS * blocks))
    instructions, near = row_walk(counts, "arg_max_kernel", loads)
    warps = ARG_MAX_THREADS // 32
    yield Launch("arg_max_kernel", blocks, warps, 0, 4 * c.vocab_size, instructions, near=near, alone=3)


def step(card: Card, counts: dict, c: Config, n: int, pos: int, context: int, next_token: bool) -> list[Launch]:
    """run_step() of engine/gpu/command_line.cuh: n tokens from position pos on."""
    launches = [embed(counts, n, c.dim)]
    for _ in range(c.n_layers):
        launches += [
            rmsnorm(counts, n, c.dim),
            *products(card, counts, c.dim, [c.n_heads * c.head_dim, c.kv_dim, c.kv_dim], n),
            prepare_heads(counts, c, n),
            attention(card, counts, c, n, pos, context),
            *products(card, counts, c.n_heads * c.head_dim, [c.dim], n),
            rmsnorm(counts, n, c.dim),
            *products(card, counts, c.dim, [c.hidden_dim, c.hidden_dim], n),
            swiglu(counts, n * c.hidden_dim),
            *products(card, counts, c.hidden_dim, [c.dim], n),
        ]
    return launches + ([rmsnorm(counts, 1, c.dim), *classifier(counts, c)] if next_token else [])


def launches_of(card: Card, counts: dict, c: Config, phase: str, n: int) -> list[list[Launch]]:
    """The steps of a token at n keys ("decode"), or of a prompt of n tokens ("prefill")."""
    context = max(4096, n + 256)
    if phase == "decode":
        return [step(card, counts, c, 1, n - 1, context, True)]
    ends = range(MAX_CHUNK, n + MAX_CHUNK, MAX_CHUNK)
    return [step(card, counts, c, min(n, e) - e + MAX_CHUNK, e - MAX_CHUNK, context, e >= n) for e in ends]


def seconds(card: Card, counts: dict, c: Config, phase: str, n: int, graph: bool = True) -> float:
    """Of a token at n keys, or of a prompt of n tokens."""
    steps = launches_of(card, counts[card.arch], c, phase, n)
    return sum(STEP + sum(total(times(card, counts[card.arch], x, graph)) for x in launches) for launches in steps)


def tokens_per_s(card: Card, counts: dict, c: Config, phase: str, n: int) -> float:
    """Of decode at n keys, or of a prompt of n tokens."""
    return (1 if phase == "decode" else n) / seconds(card, counts, c, phase, n)


def limit(card: Card, c: Config, phase: str, n: int) -> float:
    """Tokens/s if nothing cost time but reading once at the data sheet's bandwidth, or multiplying at its peak."""
    work = work_of(c, "awq")
    reading = work.layer_bytes + work.classifier_bytes + work.kv_bytes * n * (phase == "decode")
    tokens = 1 if phase == "decode" else n
    return tokens / max(reading / card.bandwidth, 2 * work.layer_macs * tokens / card.fp16_flops)


DECODE, PREFILL = (1, 1024, 8192), (16, 32, 128, 512, 2048, 4096)
CELLS = [("decode", n) for n in DECODE] + [("prefill", n) for n in PREFILL]
PREDICTED = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b")


def read_counts() -> dict:
    """{architecture: {kernel: what bench/sass.py counted}}."""
    return json.loads((Path(__file__).parent / "kernel_counts.json").read_text(encoding="utf-8"))


# waits: for memory, for L2, and for L2 by the last block alone
KERNEL_HEADS = ["kernel", "launches", "blocks", "of an SM", "MB", "instructions", "waits", "us", "us in all", "limit"]


def kernel_rows(card: Card, counts: dict, launches: list[Launch]) -> Iterator[list[object]]:
    """Equal launches together, the longest first."""
    costs = {x: times(card, counts, x) for x in launches}
    for x, parts in sorted(costs.items(), key=lambda item: -launches.count(item[0]) * total(item[1])):
        row, n = counts.get(x.kernel, UNKNOWN), launches.count(x)
        fit = blocks_per_sm(card, row["registers"], row["shared"] + x.dynamic_shared, x.warps)
        waits = f"{rounds_of(card, x):.0f}+{x.near:.0f}+{x.alone:.0f}"
        yield [x.kernel, n, x.blocks, fit, f"{x.dram / 1e6:.2f}", f"{x.instructions:.0f}", waits,
               f"{1e6 * total(parts):.1f}", f"{1e6 * n * total(parts):.0f}", binds(parts)]  # fmt: skip


def block_rows(c: Config) -> Iterator[list[object]]:
    """Every kernel of a model, by the architectures that bench/sass.py counted: blocks and warps of an SM."""
    ampere = replace(CARDS["4090"], arch="sm_86", blocks=16)  # RTX 3090: otherwise as sm_89
    cards, all_counts = [CARDS["a100"], ampere, CARDS["4090"], CARDS["h100"]], read_counts()
    yield ["kernel", "warps", *(card.arch for card in cards)]
    phases = [("decode", 1024), *(("prefill", n) for n in (16, 32, 64, 512))]
    found: dict[str, Launch] = {}
    for phase, n in phases:
        for launch in (x for step in launches_of(cards[-1], all_counts["sm_90"], c, phase, n) for x in step):
            found.setdefault(launch.kernel, launch)
    for kernel, x in sorted(found.items()):
        if kernel != "cuBLAS":
            rows = [(card, all_counts[card.arch][kernel]) for card in cards]
            fit = [blocks_per_sm(card, r["registers"], r["shared"] + x.dynamic_shared, x.warps) for card, r in rows]
            yield [kernel, x.warps, *(f"{n} ({n * x.warps})" for n in fit)]


def aligned(rows: list[list[object]]) -> str:
    """Columns of text; all but the first to the right."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in text)
    return "\n".join(lines)


def phase_and_n(text: str) -> tuple[str, int]:
    """decode:1024 as ("decode", 1024)."""
    phase, _, n = text.partition(":")
    if phase not in ("decode", "prefill") or not (n.isascii() and n.isdigit()) or not 1 <= int(n) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"'{text}' is not decode:KEYS or prefill:TOKENS, of 1 to {1 << 20}")
    return phase, int(n)


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=PREDICTED, metavar="MODEL")
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=["h100", "a100", "4090"], metavar="CARD")
    parser.add_argument(
        "--kernels", type=phase_and_n, metavar="PHASE:N", help="every kernel of decode:KEYS or prefill:TOKENS"
    )
    parser.add_argument("--blocks", action="store_true", help="blocks and warps of each kernel that an SM holds")
    args = parser.parse_args()
    counts, parts = read_counts(), []
    if args.blocks:
        args.cards = []
        parts = [
            f"{name}: blocks (warps) of an SM\n\n{aligned(list(block_rows(config_of(name))))}" for name in args.models
        ]
    for card in (CARDS[name] for name in args.cards):
        rows: list[list[object]] = [[card.name, *args.models]]
        for phase, n in CELLS:
            configs = map(config_of, args.models)
            speeds = [(tokens_per_s(card, counts, c, phase, n), limit(card, c, phase, n)) for c in configs]
            rows.append([f"{phase} {n}", *(f"{speed:.0f} ({100 * speed / most:.0f} %)" for speed, most in speeds)])
        parts.append(f"Predicted tokens/s, and per cent of the limit\n\n{aligned(rows)}")
        for name in args.models if args.kernels else []:
            phase, n = args.kernels
            steps = launches_of(card, counts[card.arch], config_of(name), phase, n)
            rows = [KERNEL_HEADS, *kernel_rows(card, counts[card.arch], [x for step in steps for x in step])]
            parts.append(f"{card.name}, {name}, {phase} {n}\n\n{aligned(rows)}")
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
