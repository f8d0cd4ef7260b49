"""The checked build of the emulator names mistakes in AWQ's kernels: copies of their source, each with one bug."""

import os
import re
import subprocess

import pytest

from tests.test_runq import ROOT

# Name of the copy: what to replace, by what, the kernel to run, and what the emulator has to say.
BUGS = {
    "no_bug": ("", "", "gemm", None),
    "missing_barrier": (
        "            __syncthreads();                       // so have all threads'",
        "                                                   // so have all threads'",
        "gemm",
        r"missing_barrier::awq_gemm<16>, block \(\d,0,0\), thread \d+: .*shared memory",
    ),
    "wait_too_short": (
        "cp_async_wait<gemm_stages - 2>();",
        "cp_async_wait<gemm_stages - 1>();",
        "gemm",
        r"wait_too_short::awq_gemm<16>, block \(\d,0,0\), thread \d+: .*shared memory",
    ),
    "wrong_part": (
        "multiply_part(sums, ring[slot * Shape::k_groups + group],",
        "multiply_part(sums, ring[slot * Shape::k_groups + group + 1],",
        "gemm",
        r"wrong_part::awq_gemm<16>, block \(\d,0,0\), thread \d+: ",
    ),
    "missing_warp_barrier": (
        "        __syncwarp();                     // and so",
        "                                          // and so",
        "gemv",
        r"missing_warp_barrier::awq_gemv<1, 8>, block \(\d,0,0\), thread \d+: .*shared memory",
    ),
    "unequal_lanes": (
        "mma_m16n8k16(sums[j][p / 2], a, {b[r], b[r + 1]});",
        "if (g < 4) mma_m16n8k16(sums[j][p / 2], a, {b[r], b[r + 1]});",
        "gemv",
        r"unequal_lanes::awq_gemv<1, 8>, block \(\d,0,0\), thread \d+: mma was never reached by ",
    ),
    "beyond_the_end": (
        "lane / 8) * row_words + (piece < row_words ? piece : 0);",
        "lane / 8) * row_words + piece;",
        "gemv",
        r"beyond_the_end::awq_gemv<1, 8>, block \(\d,0,0\), thread \d+: reads 4 bytes .*",
    ),
}

# What the copies take of the program comes first.
DRIVER = """
#include <cstdio>
#define RUNQ_NO_MAIN
#include "runq_awq.cu"
{copies}
// One product of 5 tokens (gemm) or one (gemv), 192 inputs in groups of 64, 72 outputs.
template <class Run>
void attempt(const char* name, Run run) {{
    DeviceBuffer<uint32_t> qweight(192 * 9), qzeros(3 * 9);
    DeviceBuffer<half> scales(3 * 72), x(5 * 192);
    DeviceBuffer<float> out(5 * 72);
    qweight.clear(), qzeros.clear(), scales.clear(), x.clear();
    AwqMatrix w{{}};
    w.qweight = qweight.get(), w.qzeros = qzeros.get(), w.scales = scales.get();
    w.n_in = 192, w.n_out = 72, w.group_size = 64;
    try {{
        run(x.get(), AwqProducts{{{{{{w, out.get()}}}}, 1}}, SplitScratch{{}});
        std::printf("%s: nothing\\n", name);
    }} catch (const std::exception& e) {{
        std::printf("%s: %s\\n", name, e.what());
    }}
}}
int main() {{
{calls}
}}
"""
START = 'attempt("{n}", [](const half* x, const AwqProducts& products, const SplitScratch& scratch) {{ '
CALL = {
    "gemm": START + "launch<{n}::awq_gemm<16>>({{.grid = 1, .block = {n}::GemmShape<16>::threads, "
    ".shared_bytes = {n}::gemm_stages * {n}::GemmShape<16>::k_groups * sizeof({n}::GemmPart<16>)}}, "
    "x, 5, {n}::GemmShares{{1, 1, 1, 0, UINT32_MAX / 64 + 1}}, products, scratch); }});",
    "gemv": START + "launch<{n}::awq_gemv<1, 8>>({{.grid = 2, .block = 32 * {n}::gemv_warps, "
    ".shared_bytes = {n}::gemv_steps * {n}::gemv_warps * (sizeof({n}::GemvStep<1>) + 32)}}, "
    "x, products, scratch); }});",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """What each copy's launch ends with, by name. One program has all copies, each in a namespace."""
    folder = tmp_path_factory.mktemp("planted")
    program = (ROOT / "runq_awq.cu").read_text()
    # Each kernel with what stands before it under its heading, without what launches it.
    part = r"^// awq_{0}: .*?(?=^// (How awq_gemv is launched|How a product is divided)\b)"
    sources = {kernel: re.search(part.format(kernel), program, re.M | re.S)[0] for kernel in CALL}
    copies = []
    for name, (old, new, kernel, _) in BUGS.items():
        source = sources[kernel]
        assert name == "no_bug" or source.count(old) == 1, old
        (folder / f"{name}.cuh").write_text(source.replace(old, new) if old else source)
        copies.append(f'namespace {name} {{\n#include "{folder}/{name}.cuh"\n}}')
    calls = "\n".join(CALL[kernel].format(n=name) for name, (_, _, kernel, _) in BUGS.items())
    (folder / "driver.cpp").write_text(DRIVER.format(copies="\n".join(copies), calls=calls))
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-fopenmp-simd", "-pthread", "-fno-strict-aliasing", "-DNO_TOKENIZER", "-DENGINE",
             "-I.", "-w", "-fsanitize=thread,alignment,bounds"]  # fmt: skip
    subprocess.run([compiler, *flags, "-c", folder / "driver.cpp", "-o", folder / "driver.o"], cwd=ROOT, check=True)
    subprocess.run(
        [compiler, "-fopenmp-simd", "-pthread", folder / "driver.o", ROOT / "build" / "checks.o",
         "-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset", "-o", folder / "driver"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([folder / "driver"], capture_output=True, check=True, text=True, timeout=60)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", BUGS)
def test_the_emulator_names_it(messages, name):
    expected = BUGS[name][3]
    if expected is None:
        assert messages[name] == "nothing"
    else:
        assert re.fullmatch(f"simt: {expected}.*", messages[name]), messages[name]
