"""Types the commands of the pages, each page's from top to bottom, where nothing but `make` was typed before.

    python -m tests.pages [--have WORD,WORD...] [--in CLONE] [PAGE...]

Clones what is committed and runs `make` there, or takes CLONE, where that is done. For each page a copy of it is made,
in which the page's commands run one after the other, then its Python sessions and shown outputs (tests/test_docs.py).
`make test-pages` is this; `make test` runs the quick commands in a copy of what `make` made here (tests/test_pages.py).

Every block marked `sh` is run. A comment in front of it says if more is needed, or that a command shall fail:

    <!-- needs: WORD... -->     not run, unless --have names all words. The words are those of NEEDS
    <!-- exits: CODE... -->     the exit code of each command, where one is not 0

A command has to end by itself, with nothing on standard input, with its exit code and without a traceback.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from tests.test_docs import DOCUMENTS, ROOT, Block, blocks, sourced

NEEDS = {
    "minutes": "runs for more than some ten seconds",
    "hours": "runs for more than some ten minutes, or takes gigabytes",
    "network": "fetches a model, or reads one that was fetched",
    "packages": "Debian packages that `make` does not install",
    "CUDA": "nvcc, hipcc or a GPU",
    "desk": "a Mac with Homebrew, or Windows with MSYS2",
    "NDK": "Android's compiler, and a phone",
    "torch": "a Python with torch and more",
    "engine": "vLLM or SGLang",
    "yours": "a file of the reader's own: MODEL, text.txt, mine.safetensors",
    "terminal": "a person at a terminal",
}


def commands_of(block: Block) -> list[str]:
    """The command lines of a block, those that end in a backslash with the next ones."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def needs_of(block: Block) -> set[str]:
    return set(block.source.removeprefix("needs:").split()) if block.source.startswith("needs:") else set()


def codes_of(block: Block) -> list[int]:
    """The exit code that each command of the block shall have."""
    if block.source.startswith("exits:"):
        return [int(code) for code in block.source.removeprefix("exits:").split()]
    return [0] * len(commands_of(block))


def check_markers(document: str) -> list[str]:
    """Comments with `needs` and `exits` that say nothing, or stand before no block of commands."""
    meant = len(re.findall(r"^<!--\s*(?:needs|exits)\b", document, re.M))
    found = [b for kind in ("needs", "exits") for b, _ in sourced(document, kind) if b.language in ("sh", "python")]
    bad = [] if meant == len(found) else ["a comment with needs or exits stands before no block of commands"]
    for block in found:
        if block.source.startswith("needs:"):
            unknown = needs_of(block) - NEEDS.keys()
            bad += [f"line {block.line}: nobody knows what `{word}` is that is needed" for word in sorted(unknown)]
            bad += [] if needs_of(block) else [f"line {block.line}: what is needed?"]
        elif not re.fullmatch(r"exits:( \d+)+", block.source) or len(codes_of(block)) != len(commands_of(block)):
            bad.append(f"line {block.line}: {len(commands_of(block))} commands, and {block.source}")
    return bad


def is_run(block: Block, have: Collection[str]) -> bool:
    """Whether its commands are typed where these words of NEEDS hold."""
    return block.language == "sh" and needs_of(block) <= set(have)


def run(command: str, folder: Path, limit: float) -> tuple[int, str]:
    """Exit code and output of a command line; what it leaves running when it ends, or at the limit, is ended."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},  # a busy machine shall not take minutes
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def run_page(document: str, folder: Path, have: Collection[str], limit: float) -> Iterator[tuple[str, str, float]]:
    """Each command that is run: where and what it is, a complaint (empty: it did as it should), seconds."""
    for block in blocks(document):
        if not is_run(block, have):
            continue
        for command, wanted in zip(commands_of(block), codes_of(block), strict=True):
            start = time.monotonic()
            code, output = run(command, folder, limit)
            seconds = time.monotonic() - start
            last = "\n".join("    " + line for line in output.splitlines()[-5:])
            complaint = ""
            if code == -1:
                complaint = f"not done after {limit:.0f} s\n{last}"
            elif code != wanted:
                complaint = f"exit code {code}\n{last}"
            elif "Traceback (most recent call last)" in output:
                complaint = f"a traceback\n{last}"
            yield f"line {block.line}: {command}", complaint, seconds


@cache
def made_files() -> set[str]:
    """Files that `make` made in this checkout, those in .venv aside: its commands name them, and git does not."""
    listing = subprocess.run(["make", "-nB", "all"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        os.path.normpath(word) for word in re.findall(r"[\w./+-]+", listing) if not word.startswith(("/", ".venv"))
    }
    return {name for name in named if (ROOT / name).is_file()} - source_files()


@cache
def source_files() -> set[str]:
    """Files that git has, or would take: a new one's tests pass before it is added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in found.split("\0") if name and (ROOT / name).exists()}


def copy_made(to: Path) -> Path:
    """A copy of this checkout in which nothing was typed but `make`."""
    for name in source_files() | made_files():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    (to / ".venv").symlink_to(ROOT / ".venv")
    return to


def clone_made(to: Path) -> Path:
    """A clone of what is committed here, after `make`."""
    subprocess.run(["git", "clone", "--quiet", ROOT, to], check=True)
    code, output = run(f"make -j{os.cpu_count()}", to, 3600)
    if code != 0:
        sys.exit(f"make in a clone: exit code {code}\n{output}")
    return to


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description="Type the commands of the pages.")
    parser.add_argument("--have", default="minutes", help="what blocks may need: " + ", ".join(NEEDS))
    parser.add_argument("--in", dest="clone", type=Path, help="a clone after `make`; otherwise one is made")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    args = parser.parse_args()
    have = [word for word in args.have.split(",") if word]
    if unknown := [word for word in have if word not in NEEDS]:
        parser.error(f"--have {unknown[0]}: not one of {', '.join(NEEDS)}")
    if unknown := [page for page in args.pages if page not in DOCUMENTS]:
        parser.error(f"{unknown[0]} is no page")
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="pages-") as work:
        clone = args.clone.resolve() if args.clone else clone_made(Path(work) / "clone")
        for page in args.pages or DOCUMENTS:
            folder = Path(work) / "page"
            shutil.copytree(clone, folder, symlinks=True, ignore=lambda _, names: {".venv"} & set(names))
            (folder / ".venv").symlink_to(clone / ".venv")
            document = (folder / page).read_text(encoding="utf-8")
            tests = [f"'tests/test_docs.py::test_document[{page}-{check}]'" for check in ("outputs", "sessions")]
            document += f"<!-- needs: minutes -->\n```sh\n.venv/bin/python -m pytest -q {' '.join(tests)}\n```\n"
            print(page, flush=True)
            for where, complaint, seconds in run_page(document, folder, have, 3600):
                print(f"  {seconds:6.1f} s  {where}" + (f"\n  FAILED: {complaint}" if complaint else ""), flush=True)
                passed, failed = passed + (not complaint), failed + bool(complaint)
            shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
