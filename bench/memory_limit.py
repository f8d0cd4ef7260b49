"""Decode of a mixture of experts that does not fit into memory: tokens/s by how much of the file may be there.

    sudo .venv/bin/python -m bench.memory_limit MODEL.bin [MODEL.bin ...] [--shares 100 75 50 25] [--steps N]

runq_moe reads the file where it lies (--mmap) within a memory control group (cgroup v2) whose limit is a share of
the file's size, and room for the program itself. The file is taken out of memory before each run, as its pages are
charged to whoever read them first. A prompt of 128 tokens, which is not counted, goes to nearly all experts and fills
memory. Models with random weights are what models.by_rule writes; with --skew a quarter of the experts gets most
tokens.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PROMPT = ",".join(map(str, range(1, 129)))
ROOT = Path(__file__).resolve().parent.parent
GROUP = "runq-memory-limit"
OWN_BYTES = 400 << 20  # of the program: a chunk of tokens, the cache


def group_folder() -> Path:
    """The folder of a memory control group, made. Raises OSError where there is none."""
    folder = Path("/sys/fs/cgroup") / GROUP
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        if (folder / "memory.max").exists():
            return folder
    raise OSError("there is no memory control group here that this user may make: it takes Linux, and root")


def drop(path: Path) -> None:
    """Takes a file's pages out of memory."""
    with path.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def speed_of(model: Path, steps: int, folder: Path) -> float:
    """Tokens/s of decoding so many, in the group. Raises RuntimeError with what the program says if it fails."""

    def join() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    drop(model)
    sampled = ["-t", "2", "--top-p", "1", "--seed", "1"]  # the most probable tokens repeat
    command = [ROOT / "runq_moe", model, "--mmap", "--ids", PROMPT, "-n", str(steps), *sampled]
    done = subprocess.run(command, preexec_fn=join, capture_output=True, text=True, check=False)
    found = re.search(r"decode .* ([\d.]+) tokens/s", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{model}, exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return float(found[1])


def measure(args: argparse.Namespace) -> None:
    """Prints the table. Raises OSError without a control group, RuntimeError if a run fails."""
    folder = group_folder()
    print("| tokens/s | " + " | ".join(f"{share} %" for share in args.shares) + " |")
    print("|---|" + "---:|" * len(args.shares))
    for model in args.models:
        cells = []
        for share in args.shares:
            (folder / "memory.max").write_text(str(model.stat().st_size * share // 100 + OWN_BYTES))
            speeds = [speed_of(model, args.steps, folder) for _ in range(args.rounds)]
            cells.append(f"{statistics.median(speeds):.1f}")
        print(f"| {model.stem} | " + " | ".join(cells) + " |", flush=True)
    folder.rmdir()


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory_limit", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shares", nargs="+", type=int, default=[100, 75, 50, 25], help="per cent of the file")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a run (64)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, of which the median counts (3)")
    args = parser.parse_args()
    if min(args.rounds, *args.shares) < 1 or args.steps < 2:
        parser.error("--rounds and --shares have to be 1 or more, --steps 2 or more")
    if missing := [str(model) for model in args.models if not model.is_file()]:
        print(f"memory_limit: {missing[0]}: no such file", file=sys.stderr)
        return 1
    try:
        measure(args)
    except (OSError, RuntimeError) as error:
        print(f"memory_limit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
