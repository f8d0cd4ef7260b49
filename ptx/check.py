"""Runs what nvcc compiled on launches that the emulator ran, and compares what both leave in memory.

SIMT_LAUNCHES=build/ptx/launches ./runq_awq model_awq.bin -n 4
.venv/bin/python -m ptx.check build/ptx/runq_awq.ptx build/ptx/launches
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from formats.errors import one_line
from ptx.instructions import implement
from ptx.launches import Launch, read_launches
from ptx.machine import run
from ptx.parse import Kernel, PtxError, kernels_of

# Where results need not be equal to the bit: by kernel, the offset in the arguments of a pointer to results, their
# type, and how far they may be apart: relative to a value, and to the largest of the buffer.
#
# rmsnorm, prepare_heads: rsqrt.approx has an error of up to 2^-22.9; nvcc makes one fma of a product and a sum, g++
# does not. In fp16 the result is at most its neighbour; where RoPE subtracts two numbers, relative to these.
# swiglu, attention: expf is ex2.approx on a GPU (2 ulp), another function on a CPU; attention rounds probabilities to
# fp16 in between, so each may be off by 2^-11 of itself.
HALF = 2.0**-10
CLOSE = {
    "rmsnorm_kernel": {0: ("f2", HALF, 0)},
    "prepare_heads_kernel": {
        24: ("f2", HALF, 2**-22),
        32: ("f2", HALF, 2**-22),
        104: ("f4", 2**-22, 0),
        112: ("f4", 2**-22, 0),
    },
    "swiglu_kernel": {0: ("f2", HALF, 0)},
    "plain_attention": {0: ("f2", HALF, 2**-20)},
    "attention_kernel": {24: ("f2", HALF, 2**-11)},
    "token_attention": {24: ("f2", HALF, 2**-11), 64: ("f4", 2**-11, 2**-11), 72: ("f4", 2**-11, 2**-11)},
}


def difference(launch: Launch, found: dict[int, np.ndarray], apart: dict[str, float] | None = None) -> str:
    """What is wrong in `found`; '' if nothing is. apart: by kernel, the largest part of an allowed difference."""
    rules = {}
    for at, rule in CLOSE.get(launch.kernel.partition("<")[0], {}).items():
        p = int.from_bytes(launch.arguments[at : at + 8], "little")
        for begin, b in launch.after.items():
            if begin <= p < begin + len(b):
                rules[begin] = rule
    for begin, want in launch.after.items():
        got = found[begin]
        if np.array_equal(got, want):
            continue
        dtype, relative, absolute = rules.get(begin, ("u4", 0, 0))
        n = len(want) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
        a, b = got[:n].view(dtype), want[:n].view(dtype)
        changed = np.flatnonzero(a != b)
        x, y = a[changed].astype("f8"), b[changed].astype("f8")
        bound = relative * np.abs(y)
        if absolute:
            bound += absolute * np.abs(np.where(np.isfinite(b), b, 0).astype("f8")).max()
        bad = ~((np.abs(x - y) <= bound) | (np.isnan(x) & np.isnan(y)))
        if dtype == "u4":  # equal to the bit, whatever type it is
            bad[:] = True
        if apart is not None and not bad.any() and np.any(x != y):
            name = launch.kernel.partition("<")[0]
            apart[name] = max(apart.get(name, 0.0), float(np.nanmax(np.abs(x - y)[x != y] / bound[x != y])))
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            if dtype == "u4":
                return (
                    f"word {changed[i]} is {a[changed[i]]:#x}, the emulator has {b[changed[i]]:#x}; {bad.sum()} differ"
                )
            return f"{dtype} {changed[i]} is {x[i]}, the emulator has {y[i]}; {bad.sum()} differ"
    return ""


def check_launch(kernel: Kernel, launch: Launch, apart: dict[str, float] | None = None) -> str:
    """Runs a launch; what is wrong, or ''."""
    try:
        found = run(
            kernel, launch.grid, launch.block, launch.shared, launch.arguments, launch.before, fresh=launch.fresh
        )
    except PtxError as error:
        return str(error)
    return difference(launch, found, apart)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ptx.check", description=__doc__.splitlines()[0])
    parser.add_argument("ptx", type=Path, help="what nvcc -ptx wrote")
    parser.add_argument("launches", type=Path, nargs="+", help="what SIMT_LAUNCHES wrote")
    parser.add_argument("--all", action="store_true", help="launches of equal shape, too, not only the first of each")
    args = parser.parse_args()
    kernels = kernels_of(args.ptx.read_text(), implement)
    seen, bad = set(), 0
    n, seconds = defaultdict(int), defaultdict(float)
    for path in args.launches:
        for launch in read_launches(path):
            if not args.all and launch.shape in seen:
                continue
            seen.add(launch.shape)
            start = time.monotonic()
            kernel = kernels.get(launch.kernel)
            wrong = check_launch(kernel, launch) if kernel else "is not in the PTX"
            n[launch.kernel] += 1
            seconds[launch.kernel] += time.monotonic() - start
            if wrong:
                bad += 1
                print(f"{path}: {launch.kernel} {launch.grid} x {launch.block}: {wrong}")
    for name in sorted(n):
        print(f"{name:45} {n[name]:5} launches {seconds[name]:7.1f} s")
    for name in sorted(set(kernels) - set(n)):
        print(f"{name:45} not launched")
    print(f"{sum(n.values())} launches, {bad} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        code = main()
    except (OSError, ValueError, PtxError) as error:
        code = f"ptx.check: {one_line(error)}"
    sys.exit(code)
