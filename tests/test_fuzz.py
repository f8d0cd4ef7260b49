"""The inputs that fuzzing has found, replayed under AddressSanitizer and UBSan: tests/fuzz/replay.cpp."""

import os
import subprocess

import pytest

from tests.fuzz.planted_bugs import BUG_OF_KIND, BUGS
from tests.fuzz.run import stored
from tests.helpers import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
HARNESSES = sorted({folder.name for folder in CORPUS.iterdir()} - {"header"})


def test_every_harness_has_inputs():
    sources = {path.stem for path in (ROOT / "tests" / "fuzz").glob("*.cpp")} - {"replay"}
    programs = [path.stem for path in sorted(ROOT.glob("runq*.c*"))]
    of_programs = {f"{harness}_{program}" for harness in ("load", "forward") for program in programs}
    assert set(HARNESSES) == sources - {"load", "forward"} | of_programs


def test_the_inputs_are_small():
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.parametrize("name", HARNESSES)
def test_stored_inputs(name):
    _, _, program = name.partition("_runq")
    replay = ROOT / "build" / "fuzz" / ("replay" if "_runq" not in name else f"replay_runq{program}")
    files = sorted(str(path) for folder in stored(name) for path in folder.iterdir())
    done = subprocess.run(
        [replay, name, *files], cwd=ROOT, capture_output=True, check=False, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = done.stderr.decode(errors="replace").splitlines()
    assert done.returncode == 0, f"{replay.relative_to(ROOT)} {name}: " + "\n".join(log[-60:])
    assert sum(line in files for line in log) == len(files)


@pytest.mark.parametrize("bug", [*BUGS.values(), *BUG_OF_KIND.values()], ids=[*BUGS, *BUG_OF_KIND])
def test_planted_bugs_still_fit_the_sources(bug):
    """`make test-fuzz` plants them; that they can be planted is seen here."""
    path, old, _ = bug
    assert (ROOT / path).read_text().count(old) == 1
