"""Runs harnesses that are built with libFuzzer, one after the other.

    python tests/fuzz/run.py --seconds 60 NAME...    looks for inputs that a harness does not survive
    python tests/fuzz/run.py --merge NAME...         takes over what was found into tests/fuzz/corpus
    python tests/fuzz/run.py --coverage NAME...      what stored and found inputs reach of the sources

A harness NAME is build/fuzz/bin/NAME. It starts from the inputs in tests/fuzz/corpus/NAME.zip and keeps those that
reach something new in build/fuzz/NAME. An input that it does not survive stays in build/fuzz/crashes; the exit code is
then 1. Needs nothing but Python.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "fuzz" / "corpus"  # has an archive of inputs for each harness
BUILD = Path("build/fuzz")
UNPACKED = ROOT / BUILD / "stored"
STORED_BYTES = 150_000  # of a harness at most; where the fewest inputs are more than that, the smallest of them stay
# Bytes of an input at most, where libFuzzer's own limit, a little above the longest input of the corpus, is too low.
LONGEST = {"encode": 4096, "section_raw": 4096, "section_built": 1024, "chat": 1024, "options": 512}
LONGEST_OF_PROGRAMS = {"load_runq_awq": 32768, "load_runq_gptq": 32768, "load": 8192, "forward": 512}


def longest(name: str) -> int:
    """Bytes of an input at most."""
    of_any_form = name.removeprefix("plain_")
    return LONGEST.get(name) or next(n for prefix, n in LONGEST_OF_PROGRAMS.items() if of_any_form.startswith(prefix))


def stored(name: str) -> list[Path]:
    """Folders with the stored inputs of a harness, unpacked if need be: its own (there may be none), those it shares.

    These are headers, with which all programs' files may begin, and for a program's plain form those of its other one.
    """
    of_any_form = name.removeprefix("plain_")
    shared = [of_any_form] * (of_any_form != name) + ["header"] * of_any_form.startswith("load_")
    return [unpacked(archive) for archive in (name, *shared)]


def unpacked(name: str) -> Path:
    """The folder with an archive's inputs. There is none if there is no archive."""
    archive = STORED / f"{name}.zip"
    if not archive.exists():
        return UNPACKED / name
    state = archive.stat()
    folder = UNPACKED / f"{name}-{state.st_mtime_ns}-{state.st_size}"
    if not folder.exists():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=UNPACKED) as new, zipfile.ZipFile(archive) as inputs:
            inputs.extractall(Path(new, "inputs"))
            with contextlib.suppress(OSError):  # another process was faster
                Path(new, "inputs").rename(folder)
    return folder


def store(name: str, inputs: list[Path]) -> None:
    """Packs inputs into a harness's archive: the same bytes for the same inputs."""
    with zipfile.ZipFile(STORED / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(inputs):
            archive.writestr(zipfile.ZipInfo(path.name[:12]), path.read_bytes(), zipfile.ZIP_DEFLATED)


def replay_of(name: str) -> str:
    """The program that replays its inputs."""
    harness, _, program = name.partition("_runq")
    return "replay" + (f"_runq{program}" if harness != name else "")


def count(*folders: Path) -> int:
    return sum(1 for folder in folders for _ in folder.iterdir())


def digest(log: str) -> str:
    """What went wrong, and where in this project."""
    what = re.search(
        r"^(expected: |.*(ERROR:|runtime error:|terminate called|Assertion)).*(\n  what\(\):.*)?", log, re.M
    )
    frames = re.findall(rf"^ +#\d+ .* {re.escape(str(ROOT))}/(?:\./)?(\S+?:\d+)", log, re.M)
    if what is None:
        return log[-2000:]
    return "\n".join([what[0], *(f"    {frame}" for frame in dict.fromkeys(frames))])


def fuzz(name: str, seconds: int, timeout: int) -> bool:
    """Runs one harness and prints what came of it. Returns whether it survived every input, each in `timeout` s."""
    found, crashes, seeds = BUILD / name, BUILD / "crashes", stored(name)
    for folder in (found, crashes, *seeds):
        folder.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in crashes.iterdir()}
    command = [BUILD / "bin" / name, f"-max_total_time={seconds}", f"-max_len={longest(name)}", "-len_control=0",
               f"-timeout={timeout}", "-rss_limit_mb=2048", "-print_final_stats=1",
               f"-artifact_prefix={crashes}/{name}-", found, *seeds]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
    log = done.stderr.decode(errors="replace")
    executions = re.search(r"stat::number_of_executed_units: (\d+)", log)
    rate = re.search(r"stat::average_exec_per_sec: +(\d+)", log)
    coverage = re.findall(r"cov: (\d+)", log)
    print(
        f"{name}: {executions[1] if executions else '?'} executions, {rate[1] if rate else '?'} a second, "
        f"coverage {coverage[-1] if coverage else '?'}, {count(found)} inputs beside {count(*seeds)} stored ones",
        flush=True,
    )
    if done.returncode == 0:
        return True
    print(digest(log))
    for path in sorted(crashes.iterdir()):
        if path.name not in before:
            print(f"{name}: to run it again: build/fuzz/bin/{name} {path}")
    return False


def merge(name: str) -> None:
    """Replaces a harness's own inputs by the fewest, of those stored and found, that reach all that they reach.

    Nothing is stored for what the shared headers reach.
    """
    new, (own, *shared) = BUILD / "merged", stored(name)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for path in (path for folder in shared for path in folder.iterdir()):
        shutil.copy(path, new)  # what lies here to begin with stays, and only what it does not reach is added
    sources = [folder for folder in (own, BUILD / name) if folder.is_dir()]
    # Edges alone: how often each was passed would keep five times as many inputs.
    command = [BUILD / "bin" / name, "-merge=1", "-use_counters=0", f"-max_len={longest(name)}", new, *sources]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    for path in (path for folder in shared for path in folder.iterdir()):
        (new / path.name).unlink()
    total, kept = 0, []
    for path in sorted(new.iterdir(), key=lambda path: path.stat().st_size):
        if total + path.stat().st_size > STORED_BYTES:
            break
        total += path.stat().st_size
        kept.append(path)
    store(name, kept)
    print(f"{name}: {len(kept)} inputs, {total} bytes", flush=True)


def llvm_cov(what: str, *options: str) -> str:
    """What llvm-cov says of all that coverage() has run."""
    binaries = [str(word) for path in sorted((BUILD / "coverage").glob("replay*")) for word in ("-object", path)]
    command = ["llvm-cov", what, *binaries[1:], "-instr-profile", str(BUILD / "coverage" / "all.profdata"), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def untaken(file: str) -> list[int]:
    """The lines of a file that nothing executes, or that have a branch which nothing takes."""
    times: dict[tuple[str, ...], int] = {}
    for kind, numbers in re.findall(r"^(DA|BRDA):(.+)$", llvm_cov("export", "-format=lcov", file), re.M):
        *place, n = numbers.split(",")
        key = (kind, *place)
        times[key] = times.get(key, 0) + (int(n) if n.isdigit() else 0)
    return sorted({int(key[1]) for key, n in times.items() if n == 0})


def coverage(names: list[str]) -> None:
    """Prints what the inputs of all harnesses together reach: functions, lines and branches of each file."""
    folder = BUILD / "coverage"
    for old in folder.glob("*.profraw"):
        old.unlink()
    for name in names:
        replay = folder / replay_of(name)
        inputs = [path for found in (*stored(name), BUILD / name) if found.is_dir() for path in found.iterdir()]
        env = os.environ | {"LLVM_PROFILE_FILE": f"{folder}/{name}.profraw"}
        subprocess.run([replay, name, *sorted(inputs)], check=True, capture_output=True, env=env)
    profiles = sorted(str(path) for path in folder.glob("*.profraw"))
    subprocess.run(["llvm-profdata", "merge", "-sparse", *profiles, "-o", folder / "all.profdata"], check=True)
    parsers = [
        path for part in ("engine/app/options.h", "engine/model/*.h", "engine/text/*.h") for path in ROOT.glob(part)
    ]
    files = [str(path.relative_to(ROOT)) for path in [*sorted(parsers), *sorted(ROOT.glob("runq*.c*"))]]
    for row in json.loads(llvm_cov("export", "-summary-only", *files))["data"][0]["files"]:
        file, summary = os.path.relpath(row["filename"], ROOT), row["summary"]
        reached = [
            f"{kind} {summary[kind]['covered']} of {summary[kind]['count']}"
            for kind in ("functions", "lines", "branches")
        ]
        print(f"{file}: " + ", ".join(reached))
        lines = (ROOT / file).read_text().splitlines()
        for number in untaken(file):
            print(f"    {number}: {lines[number - 1].strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--timeout", type=int, default=60, help="seconds that an input may take (60)")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("names", nargs="+", metavar="NAME")
    args = parser.parse_args()
    if args.merge:
        for name in args.names:
            merge(name)
        return 0
    if args.coverage:
        coverage(args.names)
        return 0
    survived = [fuzz(name, args.seconds, args.timeout) for name in args.names]
    return 0 if all(survived) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
