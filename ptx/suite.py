"""Every launch of every kernel: what the emulator runs is recorded, then run again from the PTX of nvcc.

.venv/bin/python -m ptx.suite            all of it (make test-ptx); --quick: what make test has
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ptx.check import check_launch
from ptx.instructions import implement
from ptx.launches import Launch, read_launches
from ptx.parse import Kernel, kernels_of

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = (80, 90)


@dataclass
class Run:
    """A program that launches kernels in the emulator, and the PTX that has the same kernels."""

    ptx: str  # build/ptx/NAME.sm_80.ptx
    command: list[str]
    quick: bool = False  # also in the short part
    repeats: bool = False  # launches of equal shape, too: those of another position


def _story(program: str, model: str, *options: str) -> list[str]:
    return [program, f"build/models/{model}.bin", "-i", "Once upon a time", "-t", "0", *options]


LLAMA, QWEN, OTHER = "tiny-llama.awq", "tiny-qwen3.awq", "tiny-llama.awq-g64"
LONG = ",".join(str(3 + 7 * i % 2000) for i in range(100))  # a chunk of 64 tokens and one of 36
RUNS = [
    Run("runq_awq", _story("./runq_awq", LLAMA, "-n", "2"), quick=True),
    Run("runq_awq", _story("./runq_awq", QWEN, "-n", "2"), quick=True),
    Run("runq_awq", _story("./runq_awq", OTHER, "-n", "6"), repeats=True),
    Run("runq_awq", _story("./runq_awq", QWEN, "-n", "3", "--matmul", "plain")),
    Run("runq_awq", _story("./runq_awq", QWEN, "-n", "3", "--trace", "build/ptx/trace.safetensors")),
    Run("runq_awq", ["./runq_awq", f"build/models/{LLAMA}.bin", "--ids", LONG, "-n", "1", "-t", "0"]),
    Run("runq_awq", ["build/runq_awq_test", "-tc=kernel: dequantize*,kernel: the largest logit*"], quick=True),
    Run("runq_awq", ["build/awq_kernels_test", "-tc=kernel: up to 33 blocks*,kernel: awq_gemv and*"]),
    Run("runq_awq", ["build/runq_awq_test", "-tc=kernel: *", "-tce=kernel: every product*"]),
    Run("awq_kernels", ["build/awq_kernels_test", "-tc=kernel: every rung*exactly"]),
    Run("plain_runq_awq", _story("build/plain/runq_awq", LLAMA, "-n", "2")),
    Run("plain_runq_awq", _story("build/plain/runq_awq", QWEN, "-n", "2", "--matmul", "plain")),
    Run("backend", ["build/backend_gpu_test", "-tc=the kernels of*"], quick=True),
]


def ptx_file(name: str, architecture: int) -> Path:
    """What nvcc wrote of build/ptx/NAME for an architecture."""
    return ROOT / f"build/ptx/{name}.sm_{architecture}.ptx"


def record(run: Run, path: Path) -> list[Launch]:
    """The launches of a run: of equal shapes the first, and all if it `repeats`."""
    done = subprocess.run(
        run.command,
        cwd=ROOT,
        env=os.environ | {"SIMT_LAUNCHES": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(run.command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    if not path.exists():
        raise RuntimeError(f"{run.command[0]} launched nothing in the emulator; is it built for a GPU? make CUDA=0")
    seen, kept = set(), []
    for launch in read_launches(path):
        if run.repeats or launch.shape not in seen:
            kept.append(launch)
        seen.add(launch.shape)
    return kept


def kernels_for(name: str) -> dict[int, dict[str, Kernel]]:
    """By architecture: the first one's kernels, and of each other those whose text differs."""
    first = kernels_of(ptx_file(name, ARCHITECTURES[0]).read_text(), implement)
    return {
        sm: first if sm == ARCHITECTURES[0] else kernels_of(ptx_file(name, sm).read_text(), implement, first)
        for sm in ARCHITECTURES
    }


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ptx.suite", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part that takes half a minute")
    args = parser.parse_args()
    kernels: dict[str, dict[int, dict[str, Kernel]]] = {}
    launched, failures, seen, apart = Counter(), 0, set(), {}
    first_of: dict[str, str] = {}  # text of a kernel: the PTX that has it first, whose launches are enough
    for run in RUNS:
        if args.quick and not run.quick:
            continue
        start, n = time.monotonic(), 0
        if run.ptx not in kernels:
            kernels[run.ptx] = kernels_for(run.ptx)
        with tempfile.TemporaryDirectory() as folder:
            launches = record(run, Path(folder) / "launches")
        of_kernel: Counter = Counter()
        for launch in launches:
            if (run.ptx, launch.shape) in seen and not run.repeats:
                continue
            seen.add((run.ptx, launch.shape))
            of_kernel[launch.kernel] += 1
            if args.quick and of_kernel[launch.kernel] > 4:
                continue
            for sm, of in kernels[run.ptx].items():
                if launch.kernel not in of and sm != ARCHITECTURES[0]:
                    continue  # nvcc wrote the same for both
                known = launch.kernel in of
                if known and first_of.setdefault(of[launch.kernel].text, run.ptx) != run.ptx:
                    continue
                n += 1
                wrong = check_launch(of[launch.kernel], launch, apart=apart) if known else "is not in the PTX"
                launched[run.ptx, launch.kernel] += 1
                if wrong:
                    failures += 1
                    print(f"sm_{sm} {launch.kernel} {launch.grid} x {launch.block}: {wrong}", flush=True)
        print(f"{n:5} launches {time.monotonic() - start:6.1f} s  {' '.join(run.command)[:110]}", flush=True)
    first = {name: of[ARCHITECTURES[0]] for name, of in kernels.items()}
    texts = {first[name][k].text for name, k in launched if k in first[name]}
    for name, of in kernels.items():
        missing = sorted(k for k, kernel in first[name].items() if kernel.text not in texts)
        if missing and not args.quick:
            failures += 1
            print(f"{name}: no run launches {', '.join(missing)}")
        print(f"{name}: in {len(of[ARCHITECTURES[1]])} kernels, what nvcc wrote for sm_90 differs from sm_80")
    for name, part in sorted(apart.items()):
        print(f"{name}: not equal to the bit; apart by {part:.1e} of what is allowed")
    print(f"{sum(launched.values())} launches of {len(launched)} kernels: {failures} differ beyond the contract")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
