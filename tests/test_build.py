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


def test_what_is_compiled_twice_has_no_name_in_common():
    """Of a function in both objects, the linker may keep AVX2's; and a constructor would run on any processor."""
    objects = [*ROOT.glob("build/backends/*/attention_avx2.o"), *ROOT.glob("build/desks/*/attention_avx2.o")]
    if not objects:
        pytest.skip("needs make portable on x86-64")
    for path in objects:
        printed = subprocess.run(["nm", "--defined-only", path], capture_output=True, check=True, text=True).stdout
        symbols = re.findall(r"^\w+ (\w) (\S+)$", printed, re.M)
        assert "attend_avx2" in {name for _, name in symbols}, path
        assert [name for kind, name in symbols if kind in "TWi" and "12vectors_of_8" not in name] == [], path
        assert [name for _, name in symbols if re.search("GLOBAL__sub_I|init_array|ctors$", name)] == [], path


def test_a_variable_of_make_belongs_to_one_file():
    """One make reads all files, and rules see what the last of them says: releases once got PCRE2_FLAGS of the page."""
    files = {}
    for path in [ROOT / "Makefile", *ROOT.glob("mk/*.mk")]:
        for name in re.findall(r"^([A-Za-z_][\w-]*)\s*(?::|\?)?=", path.read_text(encoding="utf-8"), re.M):
            files.setdefault(name, set()).add(path.name)
    assert len(files) > 100
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
