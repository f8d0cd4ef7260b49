"""The arithmetic in SystemVerilog: hw/, the quick part of its tests. `make hw` has all of them."""

import re
import runpy
import shutil
import subprocess

import pytest

from tests.helpers import FULL, ROOT

TOOLS = ("verilator", "iverilog", "yosys")
needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS),
    reason=f"needs {', '.join(TOOLS)}: make hw installs and runs them",
)
needs_plain_path = pytest.mark.skipif(
    " " in str(ROOT), reason="needs a directory whose path has no space, as the make files of Verilator do"
)


def make(*arguments):
    """What a target printed. Fails if it does."""
    result = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@needs_tools
@needs_plain_path
def test_quick_part():
    """Array, scalers and quantizer against the golden vectors; with FULL=1 every module."""
    printed = make("hw-lint" if FULL else "hw-quick", *(["hw-unit", "hw-icarus"] if FULL else []), "-j2")
    assert len(re.findall(r"Status: SUCCESS!", printed)) == (7 if FULL else 3)
    assert len(re.findall(r"^(?:tile|scaler)_tb, .*: equal: ", printed, re.MULTILINE)) >= 3
    print(printed.splitlines()[-1])


def table_of_sums():
    """(what is summed, number of products) -> bits, from the table of docs/hardware.md."""
    page = (ROOT / "docs" / "hardware.md").read_text()
    lines = re.findall(r"^\| ((?:int8|MSD)[^|]*) \| [^|]* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    return {(name, n): int(bits) for name, *row in lines for n, bits in zip((1, 16, 32, 64), row, strict=True)}


def widths(modules, folder):
    """The localparam SUM_W of modules with parameters, such as "dot_row #(.LANES(1))", as Icarus computes it."""
    lines = [f'  {module} u{i} ();\n  initial $display("%0d", u{i}.SUM_W);\n' for i, module in enumerate(modules)]
    (folder / "widths.sv").write_text(f"module widths;\n{''.join(lines)}endmodule\n")
    compiled = [
        "iverilog",
        "-g2012",
        "-y",
        ROOT / "hw/rtl",
        "-Y",
        ".sv",
        "-o",
        folder / "widths.vvp",
        folder / "widths.sv",
    ]
    subprocess.run(compiled, check=True, capture_output=True)
    printed = subprocess.run(["vvp", "-n", folder / "widths.vvp"], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in printed.split()]


@needs_tools
def test_widths_are_those_of_the_page(tmp_path):
    """Every sum in the RTL is as wide as docs/hardware.md says, and as its largest value needs."""
    table = table_of_sums()
    array = "systolic_array #(.ROWS({n}), .COLS(1), .X_MAX({x}), .W_MAX({w}))"
    digits = "systolic_array #(.ROWS({n}), .COLS(1), .X_W(4), .W_W(4), .X_MAX({x}), .W_MAX({w}))"
    row = "dot_row #(.LANES(1), .PRODUCTS({n}), .X_MAX({x}), .W_MAX({w}))"
    kinds = {
        "int8 x int8, both within -127..127": (array, 127, 127),
        "int8 x int8, weights to -128": (array, 127, 128),
        "int8 x int8, both to -128": (array, 128, 128),
        "MSD: a digit x int4": (digits, 8, 8),
        "MSD: 16 high + low": ("msd_array #(.ROWS({n}), .COLS(1), .ADD_EIGHTS(0))", 136, 8),
        "MSD: with 8 * sum(w), so int8 x int4": ("msd_array #(.ROWS({n}), .COLS(1))", 128, 8),
    }
    assert {name for name, _ in table} == set(kinds)
    expected = {}
    for (name, n), bits in table.items():
        module, x, w = kinds[name]
        if n > 1:
            expected[module.format(n=n, x=x, w=w)] = bits
        if module == array:
            expected[row.format(n=n, x=x, w=w)] = bits
        assert bits == (n * x * w).bit_length() + 1
    for n, bits in ((2048, 26), (8192, 28), (65536, 31)):  # rows of W8A8
        expected[row.format(n=n, x=127, w=128)] = bits
    expected[row.format(n=64, x=127, w=15)] = 18  # GPTQ's w'
    assert dict(zip(expected, widths(expected, tmp_path), strict=True)) == expected


def test_planted_mistakes_have_their_place():
    """`make hw-mutants` plants them one by one; here each only has to fit the sources as they are."""
    mutants = runpy.run_path(str(ROOT / "hw/tests/mutants.py"))
    assert len({mutant.name for mutant in mutants["MUTANTS"]}) == len(mutants["MUTANTS"]) >= 15
    for mutant in mutants["MUTANTS"]:
        assert mutants["mistaken"](mutant) != (ROOT / f"hw/rtl/{mutant.module}.sv").read_text()
