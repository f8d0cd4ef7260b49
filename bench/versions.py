"""Compares the speed of two versions of a program, both loaded into one process and run in turns.

    python -m bench.versions COMMIT runq MODEL.bin                 the working tree against a commit
    python -m bench.versions . runq MODEL.bin                      against itself: how much of it is chance
    python -m bench.versions COMMIT runq MODEL.bin --mmap          options of the program follow

On a machine whose memory others use too, two runs of the same program differ by ten per cent and more. Here a turn
takes 20 ms, or as long as the tokens take once, and is compared with the turn of the other version beside it; the
median of these ratios is good to one or two per cent. Each of the --starts is a process of its own, and they take turns
in which version is loaded first, because where a model lies in memory counts as well.

Works on Linux, for the four programs that run on a CPU, and for commits that bench/in_process.cpp can be compiled with
(b571660 and later).
"""

import argparse
import ctypes
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "versions"
POSITION = 64  # of the tokens that run: as many have run before
TURN = 0.02  # seconds that a turn takes at least


@dataclass
class Case:
    """What is timed: n tokens at once, with so many threads."""

    n_tokens: int
    threads: int

    def __str__(self) -> str:
        return f"{'decode' if self.n_tokens == 1 else f'prefill {self.n_tokens}'}, -j {self.threads}"


@dataclass
class Start:
    """What a process found: speed of the second version as a multiple of the first's; seconds of n tokens of both."""

    ratio: float
    seconds: tuple[float, float]


def tree_of(version: str) -> Path:
    """The folder of a version: that folder, or a commit's files, which are written below build/versions."""
    if Path(version, "engine").is_dir():
        return Path(version)
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--short", version + "^{commit}"], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise ValueError(f"'{version}' is neither a folder with this project's files nor a commit of it")
    tree = OUT / found.stdout.strip()
    if not tree.is_dir():
        files = subprocess.run([*git, "archive", version], capture_output=True, check=True).stdout
        part = tree.with_name(tree.name + ".part")  # the folder has its name once all files are in it
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(part)], input=files, check=True)
        if not (part / "engine").exists():  # its name until November 2026
            (part / "engine").symlink_to("common")
        part.rename(tree)
    return tree


def build(tree: Path, program: str, name: str) -> Path:
    """The program of that folder as a library. Its files decide what it is; compiler and flags are this version's."""
    if not (tree / f"{program}.cpp").is_file():
        raise ValueError(f"{tree} has no {program}.cpp")
    OUT.mkdir(parents=True, exist_ok=True)
    library = OUT / f"{name}_{program}.so"
    subprocess.run(
        ["make", "-s", "version-library", f"TREE={tree.resolve()}", f"PROGRAM={program}", f"OUT={library}"],
        cwd=ROOT,
        check=True,
    )
    return library


def load(library: Path, arguments: list[str], n_tokens: int) -> ctypes.CDLL:
    """The library, ready to run n_tokens of the model that `arguments` name, a command line. Raises ValueError."""
    loaded = ctypes.CDLL(str(library))
    loaded.open_model.restype = ctypes.c_char_p
    argv = (ctypes.c_char_p * len(arguments))(*map(os.fsencode, arguments))
    error = loaded.open_model(len(arguments), argv, POSITION, n_tokens)
    if error is not None:
        raise ValueError(f"{library.name}: {error.decode()}")
    return loaded


def run_start(libraries: tuple[Path, Path], arguments: list[str], case: Case, first: int, seconds: float) -> Start:
    """Loads both, the one with index `first` before the other, and lets them run in turns for so many seconds."""
    loaded = {i: load(libraries[i], [*arguments, "-j", str(case.threads)], case.n_tokens) for i in (first, 1 - first)}

    def timed(i: int, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            loaded[i].run_tokens(case.n_tokens, POSITION)
        return (time.perf_counter() - begin) / times

    once = [timed(i, 1) for i in (0, 1, 0, 1)][2:]  # the first runs meet memory that is not there yet
    times = max(1, round(TURN / min(once)))
    pairs = []
    for turn in range(max(3, round(seconds / (times * sum(once))))):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        took = {i: timed(i, times) for i in order}
        pairs.append((took[0], took[1]))
    return start_of(pairs)


def start_of(pairs: list[tuple[float, float]]) -> Start:
    """What a start found, from the seconds of both versions in each turn."""
    base, this = zip(*pairs, strict=True)
    return Start(statistics.median(b / t for b, t in pairs), (statistics.median(base), statistics.median(this)))


def compare(
    libraries: tuple[Path, Path], arguments: list[str], case: Case, n_starts: int, seconds: float
) -> list[Start]:
    """As many starts, each in a process of its own. Raises ValueError if one of them ends before it is done."""
    found = []
    for k in range(n_starts):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                found.append(pool.submit(run_start, libraries, arguments, case, k % 2, seconds).result())
            except BrokenProcessPool:
                raise ValueError(
                    f"{case}: the process was ended; by a fault in a version, or for want of memory"
                ) from None
    return found


def check_memory(arguments: list[str]) -> None:
    """Raises ValueError if the second version would find too little memory to pack its weights.

    A program packs if that takes no more than three quarters of what is available (packs_weights in
    engine/app/model.h). One that does not is slower, and the comparison would mean nothing.
    """
    size = Path(arguments[1]).stat().st_size
    available = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    if "--mmap" not in arguments and 0.75 * (available - size) < size:
        raise ValueError(
            f"{arguments[1]}: two copies need {7 * size / 3e9:.1f} GB, {available / 1e9:.1f} GB are available"
        )


def positive(text: str) -> int:
    """A number from 1 on, for argparse."""
    if (n := int(text)) < 1:
        raise ValueError
    return n


def line(case: Case, starts: list[Start]) -> str:
    """A row of the table: median, least and greatest ratio, and what the median start took."""
    ratios = [s.ratio for s in starts]
    middle = sorted(starts, key=lambda s: s.ratio)[len(starts) // 2]
    before, after = (f"{1000 * t:.2f}" for t in middle.seconds)
    spread = f"({min(ratios):.3f}-{max(ratios):.3f})"
    return f"{case!s:<18} {statistics.median(ratios):.3f} {spread}  {before} ms -> {after} ms"


def main(arguments: list[str]) -> int:
    """Prints a row for each number of threads and tokens. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.versions", description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the other version: a commit, or a folder with its files")
    parser.add_argument("program", choices=("runq", "runq_w8a8", "runq_gptq", "runq_moe"))
    parser.add_argument("model", help="a model file of that program, for instance of models.by_rule")
    parser.add_argument("--starts", type=positive, default=5, help="processes for each figure (5)")
    parser.add_argument("--seconds", type=float, default=2, help="that a process lets them run in turns (2)")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[1, 64], help="that run at once: 1 is decode (1 64)"
    )
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="(1 2)")
    options, own = parser.parse_known_args(arguments)
    try:
        command = [options.program, options.model, *own]
        check_memory(command)
        libraries = (
            build(tree_of(options.base), options.program, "base"),
            build(ROOT, options.program, "this"),
        )
        print(f"{options.program}: speed of this version as a multiple of that of {options.base}", flush=True)
        print(f"medians of {options.starts} starts (least-greatest), and the time of those tokens", flush=True)
        for threads in options.threads:
            for n_tokens in options.tokens:
                case = Case(n_tokens, threads)
                print(line(case, compare(libraries, command, case, options.starts, options.seconds)), flush=True)
    except (ValueError, OSError, subprocess.CalledProcessError) as e:
        print(f"bench.versions: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
