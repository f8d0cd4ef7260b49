"""What the compiler and the linker put into the programs besides their code."""

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
