"""The inputs that fuzzing has found, replayed under AddressSanitizer and UBSan: tests/fuzz/replay.cpp."""

import os
import subprocess
import zipfile

import pytest

from tests.fuzz.planted_bugs import BUG_OF_KIND, BUGS, bug_of
from tests.fuzz.run import replay_of, stored
from tests.helpers import ROOT, some_of
from tests.test_plain import PROGRAMS

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PLAIN = {f"plain_{harness}_{program}" for harness in ("load", "forward") for program in PROGRAMS}
# Plain forms have the inputs of the others.
HARNESSES = sorted({archive.stem for archive in CORPUS.glob("*.zip")} - {"header"} | PLAIN)


def test_every_harness_has_inputs():
    sources = {path.stem for path in (ROOT / "tests" / "fuzz").glob("*.cpp")} - {"replay"}
    programs = [path.stem for path in sorted(ROOT.glob("runq*.c*"))]
    of_programs = {f"{harness}_{program}" for harness in ("load", "forward") for program in programs}
    assert set(HARNESSES) == sources - {"load", "forward"} | of_programs | PLAIN


def test_the_inputs_are_small():
    archives = map(zipfile.ZipFile, CORPUS.iterdir())
    assert sum(entry.file_size for archive in archives for entry in archive.infolist()) < 1_000_000


@pytest.mark.parametrize("name", HARNESSES)
def test_stored_inputs(name):
    """All of them; of the plain forms, which run what the others do, one in ten, but with FULL=1."""
    replay = ROOT / "build" / "fuzz" / replay_of(name)
    files = sorted(str(path) for folder in stored(name) if folder.is_dir() for path in folder.iterdir())
    files = some_of(files, whole=name not in PLAIN) or files
    assert files
    done = subprocess.run(
        [replay, name, *files], cwd=ROOT, capture_output=True, check=False, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = done.stderr.decode(errors="replace").splitlines()
    assert done.returncode == 0, f"{replay.relative_to(ROOT)} {name}: " + "\n".join(log[-60:])
    assert sum(line in files for line in log) == len(files)


PLANTED = BUGS | BUG_OF_KIND | {name: bug_of(name) for name in sorted(PLAIN)}


@pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_still_fit_the_sources(bug):
    """`make test-fuzz` plants them; that they can be planted is seen here."""
    path, old, _ = bug
    assert (ROOT / path).read_text().count(old) == 1
