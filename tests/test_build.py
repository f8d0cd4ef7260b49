"""What the compiler and the linker put into the programs besides their code, and with which flags they are called."""

import re
import subprocess

import pytest

from tests.helpers import ROOT

PROGRAMS = sorted(path.stem for path in ROOT.glob("runq*.cpp"))  # what nvcc makes is another matter


def readelf(program, *options):
    return subprocess.run(
        ["readelf", "--wide", *options, ROOT / program], capture_output=True, check=True, text=True
    ).stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_are_hardened(program):
    """Full RELRO, stack protector and checked libc calls, as HARDENING in mk/build.mk asks for."""
    assert "GNU_RELRO" in readelf(program, "--segments")
    assert "BIND_NOW" in readelf(program, "--dynamic")
    symbols = readelf(program, "--dyn-syms")
    assert "__stack_chk_fail" in symbols
    assert "_chk@GLIBC" in symbols.replace("__stack_chk_fail", "")


@pytest.mark.parametrize("goal", ["build/runq_test.o", "build/int8_simde_test.o", "build/simt_test.o", "runq_awq"])
def test_all_goals_write_down_the_same_flags(goal):
    """Otherwise what one goal compiled would be compiled again by the next."""

    def flags(goal):
        printed = subprocess.run(["make", "-n", goal], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return re.findall(r"echo '(.*)' > build/flags$", printed, re.M)

    assert len(flags(goal)) == 1
    assert flags(goal) == flags("runq")


def test_back_ends_do_nothing_before_they_are_asked():
    """A constructor of a static object would run when the library is loaded, whatever the processor has."""
    objects = sorted((ROOT / "build" / "backends").glob("*/*.kernels.o"))
    if not objects:
        pytest.skip("needs make portable")
    for path in objects:
        sections = subprocess.run(["readelf", "--wide", "-S", path], capture_output=True, check=True, text=True).stdout
        assert not re.search(r"\.(init_array|ctors)\b", sections), path


def test_a_variable_of_make_belongs_to_one_file():
    """One make reads all files, and rules see what the last of them says: releases once got PCRE2_FLAGS of the page."""
    files = {}
    for path in [ROOT / "Makefile", *ROOT.glob("mk/*.mk")]:
        for name in re.findall(r"^([A-Za-z_][\w-]*)\s*(?::|\?)?=", path.read_text(encoding="utf-8"), re.M):
            files.setdefault(name, set()).add(path.name)
    assert len(files) > 100
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_modules_that_ci_leaves_out_start_no_program():
    sources = [path.read_text() for path in (ROOT / "tests").glob("test_*.py")]
    sources = [source for source in sources if '\npytestmark = needs_change("python")\n' in source]
    assert len(sources) == 17
    assert [
        found[0] for source in sources if (found := re.search(r"ROOT / \"(runq|build|engine|simt)|BIN\[", source))
    ] == []


def test_ci_asks_again_for_what_has_changed(tmp_path):
    """What .ci/run remembers as passed is the bytes of the files that a pattern names, not those of others."""
    script = (ROOT / ".ci/run").read_text()
    functions = script[script.index("in_bytes()") : script.index("jobs=")]
    repository = tmp_path / "tree"
    (repository / "engine").mkdir(parents=True)
    (repository / "engine/a.h").write_text("1")
    (repository / "README.md").write_text("1")

    def names():
        commands = "; ".join(f"in_bytes '{pattern}'" for pattern in ("^engine/.*\\.h$", "^README"))
        script = f"dpkg-query() {{ echo packages; }}; passed=passed CCACHE_NAMESPACE=x\n{functions}\n{commands}"
        return subprocess.run(
            ["bash", "-c", script], cwd=repository, check=True, capture_output=True, text=True
        ).stdout.split()

    subprocess.run("git init -q && git add .", shell=True, check=True, cwd=repository)
    engine, readme = names()
    assert engine != readme
    assert names() == [engine, readme]
    (repository / "engine/a.h").write_text("2")
    assert names()[0] != engine
    assert names()[1] == readme
    (repository / "README.md").chmod(0o755)
    assert names()[1] != readme
