"""Mistakes planted in the kernels: each has to be found by running what nvcc makes of them.

    .venv/bin/python -m ptx.mutants                   all of them (make test-ptx)
    .venv/bin/python -m ptx.mutants --only 'barrier'  those whose name contains this

A mistake is planted in the PTX, where a line of inline assembly and a barrier stand as they are, or in the source, for
layouts and strides. It is found if a launch that the emulator ran from the right source gives another result, or breaks
a rule of the machine.
"""

# ruff: noqa: E501 (a mistake is a line)

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ptx.check import check_launch
from ptx.instructions import implement
from ptx.launches import Launch
from ptx.parse import Kernel, PtxError, kernels_of
from ptx.suite import ROOT, RUNS, ptx_file, record

AWQ, BACKEND = "runq_awq", "backend"
SOURCE = {AWQ: "runq_awq.cu", BACKEND: "engine/backend/gpu.cu"}
R = r"(%\w+)"  # a register, captured
FOUR = rf"\{{{R}, {R}, {R}, {R}\}}"


@dataclass
class Mutant:
    """`before` becomes `after`: a regular expression in the PTX of one kernel ('' is all), at its nth place (-1 is
    each); or, with a `file`, a text of that source."""

    name: str
    ptx: str
    before: str
    after: str
    kernel: str = ""
    nth: int = -1
    file: str = ""
    sm: int = 80


BAR, WARP_BAR = r"bar\.sync\s+0;", r"bar\.warp\.sync\s+-1;"
MUTANTS = [
    Mutant("lop3: two operands exchanged", AWQ, rf"lop3\.b32 {R}, {R}, {R}, {R}, 234", r"lop3.b32 \1, \2, \4, \3, 234"),
    Mutant("lop3: another table", AWQ, rf"(lop3\.b32 {R}, {R}, {R}, {R}), 234", r"\1, 248"),
    Mutant("prmt: operands exchanged", AWQ, rf"prmt\.b32 {R}, {R}, {R},", r"prmt.b32 \1, \3, \2,", "awq_gemv<1,8>"),
    Mutant("prmt: the other selector", AWQ, rf"(prmt\.b32 {R}, {R}, {R}), {R}", r"\1, 30258", "awq_gemm<16>"),
    Mutant("prmt: operands exchanged in attention", AWQ, rf"prmt\.b32 {R}, {R}, {R},", r"prmt.b32 \1, \3, \2,", "token_attention<1>"),
    Mutant("sub.f16x2: operands exchanged", AWQ, rf"sub\.f16x2 {R},{R},{R}", r"sub.f16x2 \1,\3,\2", "awq_dequantize"),
    Mutant("fma.f16x2: factor and addend exchanged", AWQ, rf"fma\.rn\.f16x2 {R},{R},{R},{R}", r"fma.rn.f16x2 \1,\2,\4,\3", "awq_gemv<4,8>"),
    Mutant("ldmatrix: transposed", AWQ, r"m8n8\.x4\.shared", "m8n8.x4.trans.shared"),
    Mutant("ldmatrix: two results exchanged", AWQ, rf"(x4\.shared\.b16) {FOUR}", r"\1 {\2, \4, \3, \5}"),
    Mutant("mma: registers of A exchanged", AWQ, rf"(f16\.f32 {FOUR}), {FOUR}", r"\1, {\6, \8, \7, \9}", "awq_gemm<32>"),
    Mutant("mma: registers of B exchanged", AWQ, rf"(f16\.f32 {FOUR}, {FOUR}), \{{{R}, {R}\}}", r"\1, {\11, \10}", "awq_gemv<4,8>"),
    Mutant("mma: registers of the result exchanged", AWQ, rf"(f16\.f32) {FOUR}", r"\1 {\2, \4, \3, \5}", "attention_kernel<2>"),
    Mutant("mma of int8: registers of A exchanged", BACKEND, rf"(s8\.s32 {FOUR}), {FOUR}", r"\1, {\6, \8, \7, \9}"),
    Mutant("mma of int8: registers of B exchanged", BACKEND, rf"(s8\.s32 {FOUR}, {FOUR}), \{{{R}, {R}\}}", r"\1, {\11, \10}"),
    Mutant("dp4a: one operand twice", BACKEND, rf"dp4a\.s32\.s32 {R}, {R}, {R}", r"dp4a.s32.s32 \1, \2, \2"),
    Mutant("shuffle: twice the distance", AWQ, rf"(shfl\.sync\.bfly\.b32\s+{R}\|{R}, {R}), {R}", r"\1, 2", "rmsnorm_kernel", 0),
    Mutant("shuffle: another distance, in a group of 2", BACKEND, rf"(shfl\.sync\.bfly\.b32\s+{R}\|{R}, {R}), {R}", r"\1, 2", "multiply_rows<Format<8,false,false>,32,1>", 0),
    Mutant("cp.async: waits for one group less", AWQ, r"wait_group 1", "wait_group 2"),
    Mutant("cp.async: waits for one group less, in awq_gemv", AWQ, r"wait_group 3", "wait_group 4", "awq_gemv<4,8>"),
    Mutant("cp.async: never waited for", AWQ, r"cp\.async\.wait_group \d;", ""),
    Mutant("cp.async: no groups", AWQ, r"cp\.async\.commit_group;", "", "awq_gemm<16>"),
    Mutant("cp.async: zeros where there are values", AWQ, rf"(selp\.b32\s+{R}), 16, 0,", r"\1, 0, 16,"),
    Mutant("vector load: elements exchanged", AWQ, rf"(ld\.global\.nc\.v4\.u32\s+)\{{{R},{R},", r"\1{\3,\2,", "fp16_gemv"),
    Mutant("vector load: misaligned", AWQ, r"(ld\.global\.nc\.v4\.u32\s[^;]*\[%rd\d+)\]", r"\1+4]", "fp16_gemv"),
    Mutant("griddepcontrol: never waits", AWQ, r"griddepcontrol\.wait;", "", "swiglu_kernel", sm=90),
    Mutant("arrivals: not set back to 0", AWQ, rf"st\.global\.u32\s+\[%rd\d+\], {R};", "", "awq_gemm<64>"),
    Mutant("barrier of block_sum", AWQ, BAR, "", "rmsnorm_kernel", 0),
    Mutant("barrier of arg_max, in a block", AWQ, BAR, "", "arg_max_kernel", 0),
    Mutant("barrier 2 of is_last, in arg_max", AWQ, BAR, "", "arg_max_kernel", 2),
    Mutant("barrier of arg_max, in the last block", AWQ, BAR, "", "arg_max_kernel", 3),
    Mutant("barrier 1 of plain_attention, a warp's", AWQ, WARP_BAR, "", "plain_attention", 0),
    Mutant("barrier 2 of plain_attention, a warp's", AWQ, WARP_BAR, "", "plain_attention", 1),
    Mutant("barrier of awq_gemv, before its parts are added", AWQ, BAR, "", "awq_gemv<1,8>", 0),
    Mutant("barrier 1 of awq_gemv's steps, a warp's", AWQ, WARP_BAR, "", "awq_gemv<4,8>", 0),
    Mutant("barrier 2 of awq_gemv's steps, a warp's", AWQ, WARP_BAR, "", "awq_gemv<4,8>", 1),
    Mutant("barrier of awq_gemm, of a stage", AWQ, BAR, "", "awq_gemm<16>", 0),
    Mutant("barrier 1 of is_last, in awq_gemv", AWQ, BAR, "", "awq_gemv<4,8>", 1),
    Mutant("barrier 2 of is_last, in awq_gemv", AWQ, BAR, "", "awq_gemv<4,8>", 2),
    Mutant("barrier of awq_gemm, before sums overwrite a stage", AWQ, BAR, "", "awq_gemm<16>", 1),
    Mutant("barrier of awq_gemm, before its groups are added", AWQ, BAR, "", "awq_gemm<16>", 2),
    Mutant("barrier 1 of is_last, in awq_gemm", AWQ, BAR, "", "awq_gemm<16>", 5),
    Mutant("barrier 2 of is_last, in awq_gemm", AWQ, BAR, "", "awq_gemm<16>", 6),
    Mutant("barrier of attention_kernel, of a stage", AWQ, BAR, "", "attention_kernel<1>", 0),
    Mutant("barrier of token_attention, behind its queries", AWQ, BAR, "", "token_attention<1>", 0),
    Mutant("barrier of token_attention, before its warps are added", AWQ, BAR, "", "token_attention<1>", 1),
    Mutant("barrier 1 of is_last, in attention", AWQ, BAR, "", "token_attention<1>", 2),
    Mutant("barrier 2 of is_last, in attention", AWQ, BAR, "", "token_attention<1>", 3),
    Mutant("is_last: neither release nor acquire", AWQ, r"atom\.acq_rel\.gpu", "atom", "awq_gemm<32>"),
    Mutant("barrier 1 of multiply_rows, a warp's", BACKEND, WARP_BAR, "", "multiply_rows<Format<4,false,false>,32,4>", 0),
    Mutant("barrier 2 of multiply_rows, a warp's", BACKEND, WARP_BAR, "", "multiply_rows<Format<4,false,false>,32,4>", 1),
    Mutant("barrier 1 of multiply_tile", BACKEND, BAR, "", "multiply_tile<Format<8,false,false>>", 0),
    Mutant("barrier 2 of multiply_tile", BACKEND, BAR, "", "multiply_tile<Format<8,false,false>>", 1),
    Mutant("layout of A: registers of dequantize", AWQ, "a[1] = dequantize(w.odd[0], p, 1, c);\n    a[2] = dequantize(w.even[1], p, 0, c);",
           "a[2] = dequantize(w.odd[0], p, 1, c);\n    a[1] = dequantize(w.even[1], p, 0, c);", file="runq_awq.cu"),
    Mutant("rows of a lane of awq_gemv", AWQ, "step.rows[t][8 * j + g]", "step.rows[t][8 * j + (g ^ 1)]", file="runq_awq.cu"),
    Mutant("awq_gemv: when a group begins", AWQ, "i == 0 ? group_steps - first % group_steps : i + group_steps", "i + group_steps", file="runq_awq.cu"),
    Mutant("stride of awq_gemv's partial sums", AWQ, "(size_t(from) * n_tiles + tile) * n * blockDim.x", "(size_t(from) * n_tiles + tile) * blockDim.x", file="runq_awq.cu"),
    Mutant("rows of ldmatrix", AWQ, "lane % 8 + lane / 16 * 8, lane / 8 % 2)", "lane % 8 + lane / 8 % 2 * 8, lane / 16)", file="runq_awq.cu"),
    Mutant("places of a part's activations", AWQ, "(x_place ^ k / 8) + 64 * j", "(x_place ^ k / 8) + 32 * j", file="runq_awq.cu"),
    Mutant("one stage too few in the ring", AWQ, "slot > 0 ? slot - 1 : gemm_stages - 1", "slot > 0 ? slot - 1 : gemm_stages - 2", file="runq_awq.cu"),
    Mutant("place of partial sums", AWQ, "size_t(2 * block + (block == first_block))", "size_t(2 * block)", file="runq_awq.cu"),
    Mutant("awq_gemm: 8 partial sums of a tile", AWQ, "from <= last_block; from += 8", "from < min(first_block + 8, last_block + 1); from += 8", "awq_gemm<16>", file="runq_awq.cu"),
    Mutant("awq_gemm: 32 partial sums of a tile", AWQ, "from <= last_block; from += 8", "from < min(first_block + 32, last_block + 1); from += 8", "awq_gemm<16>", file="runq_awq.cu"),
    Mutant("awq_gemm: partial sums from the last on", AWQ, "values[j] + partial(block)[", "values[j] + partial(first_block + last_block - block)[", "awq_gemm<64>", file="runq_awq.cu"),
    Mutant("awq_gemv: 16 splits of a tile", AWQ, "from < n_splits; from++", "from < min(n_splits, 16u); from++", "awq_gemv<4,8>", file="runq_awq.cu"),
    Mutant("awq_gemv: 31 splits of a tile", AWQ, "from < n_splits; from++", "from < min(n_splits, 31u); from++", "awq_gemv<4,8>", file="runq_awq.cu"),
    Mutant("awq_gemv: of 17 splits, 16", AWQ, "from < n_splits; from++", "from < n_splits - (n_splits == 17); from++", "awq_gemv<4,8>", file="runq_awq.cu"),
    Mutant("awq_gemv: splits from the last on", AWQ, "partials_of(from)[", "partials_of(n_splits - 1 - from)[", "awq_gemv<4,8>", file="runq_awq.cu"),
    Mutant("awq_gemv: inputs of split 16", AWQ, "int(blockIdx.y * n_warps + warp)", "int(blockIdx.y % 16 * n_warps + warp)", "awq_gemv<4,8>", file="runq_awq.cu"),
    Mutant("attention: stride of partial rows", AWQ, "(at_row(row) + split) * head_dim + element) = p.sums", "(at_row(row) + split) * 32 + element) = p.sums", file="engine/gpu/attention.cuh"),
    Mutant("attention: one stage instead of two", AWQ, "KeyStage<chunks>& stage = stages[first / attention_keys % 2];\n        for", "KeyStage<chunks>& stage = stages[0];\n        for", file="engine/gpu/attention.cuh"),
    Mutant("attention: partial results of a block too few", AWQ, "at.statistics + at_row(row), n_splits)", "at.statistics + at_row(row), n_splits - 1)", file="engine/gpu/attention.cuh"),
    Mutant("attention: 32 partial results", AWQ, "at.statistics + at_row(row), n_splits)", "at.statistics + at_row(row), min(n_splits, 32))", "token_attention<1>", file="engine/gpu/attention.cuh"),
    Mutant("attention: keys beyond the last", AWQ, "min(first + 8 * j + g, n_keys - 1)", "(first + 8 * j + g)", file="engine/gpu/attention.cuh"),
    Mutant("attention: a token does not see itself", AWQ, "last_key[i] + 1 - first", "last_key[i] - first", file="engine/gpu/attention.cuh"),
    Mutant("multiply_tile: rows of A", BACKEND, "{rows[t], rows[8 * tile_words + t], rows[t + 4],", "{rows[t], rows[t + 4], rows[8 * tile_words + t],", file="engine/backend/gpu.cu"),
    Mutant("multiply_tile: tokens of B", BACKEND, "x_codes + (n * 8 + g) * tile_words + word", "x_codes + (n * 8 + 2 * t) * tile_words + word", file="engine/backend/gpu.cu"),
]  # fmt: skip


def planted(m: Mutant, original: dict[str, Kernel]) -> str:
    """The PTX with the mistake; raises ValueError if there is no place for it."""
    if m.file:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("engine", "simt", "runq_awq.cu"):
                source, to = ROOT / name, Path(folder) / name
                shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
            path = Path(folder) / m.file
            text = path.read_text()
            if text.count(m.before) != 1:
                raise ValueError(f"{m.file} has {text.count(m.before)} times: {m.before}")
            path.write_text(text.replace(m.before, m.after))
            flags = ["-std=c++20", "-O3", "-I.", "-DENGINE", "-DNO_TOKENIZER", "-DNO_CUBLAS", "-ptx", "-arch=sm_80"]
            subprocess.run(["nvcc", *flags, SOURCE[m.ptx], "-o", "mutant.ptx"], cwd=folder, check=True)
            return (Path(folder) / "mutant.ptx").read_text()
    text = ptx_file(m.ptx, m.sm).read_text()
    begin, end = 0, len(text)
    if m.kernel:
        begin = text.index(f".entry {original[m.kernel].mangled}(")
        end = (text + ".entry ").index(".entry ", begin + 1)
    places = list(re.finditer(m.before, text[begin:end]))
    if not places or m.nth >= len(places):
        raise ValueError(f"{m.kernel or m.ptx} has {len(places)} places for: {m.before}")
    for place in reversed(places if m.nth < 0 else [places[m.nth]]):
        text = text[: begin + place.start()] + place.expand(m.after) + text[begin + place.end() :]
    return text


def found(m: Mutant, original: dict[str, Kernel], launches: list[Launch]) -> str:
    """How the mistake shows; '' if it does not."""
    try:
        kernels = kernels_of(planted(m, original), implement, original)
    except PtxError as error:
        return str(error)
    for launch in (x for x in launches if x.kernel.startswith(m.kernel)):
        if launch.kernel in kernels and (wrong := check_launch(kernels[launch.kernel], launch)):
            return wrong
    return ""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ptx.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--quick", action="store_true", help="a few, none of which is compiled")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m.name and not (args.quick and m.file)][:: 6 if args.quick else 1]
    launches: dict[str, list[Launch]] = {}
    originals = {name: kernels_of(ptx_file(name, 80).read_text(), implement) for name in {m.ptx for m in chosen}}
    for name in originals:
        with tempfile.TemporaryDirectory() as folder:
            runs = [r for r in RUNS if r.ptx == name and r.command[0].endswith("_test") and "*" in r.command[1]]
            if args.quick:  # without those of many blocks, which take long to record
                runs = [r for r in runs if name in r.command[0]]
            by_shape = {x.shape: x for r in runs for x in record(r, Path(folder) / "launches")}
        launches[name] = sorted(by_shape.values(), key=lambda x: x.grid[0] * x.grid[1] * x.grid[2] * x.block[0])
    missed = 0
    for m in chosen:
        how = found(m, originals[m.ptx], launches[m.ptx])
        missed += not how
        print(f"{'found ' if how else 'MISSED'} {m.name}: {how}"[:150], flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
