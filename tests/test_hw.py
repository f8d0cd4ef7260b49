"""The arithmetic in SystemVerilog: hw/, the quick part of its tests. `make hw` has all of them."""

import re
import runpy
import shutil
import subprocess

import pytest

from bench.systolic import Array, default_scalers
from hw import place
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
    printed = make(*(["hw-lint", "hw-unit", "hw-icarus", "hw-cocotb", "hw-hls"] if FULL else ["hw-quick"]), "-j2")
    assert len(re.findall(r"Status: SUCCESS!", printed)) == (11 if FULL else 3)
    assert len(re.findall(r"^(?:tile|scaler)_tb, .*: equal: ", printed, re.MULTILINE)) >= 2
    print(printed.splitlines()[-1])


REFUSED = {
    "rtl-test ARRAY=8x30": "ARRAY=8x30: columns have to be a multiple of 4",
    "hw-icarus ARRAY=6x32": "ARRAY=6x32: rows have to be 4, 8, 16, 32 or 64, as they divide groups of 64",
    "hw-unit ARRAY=12x12": "ARRAY=12x12: rows have to be 4, 8, 16, 32 or 64, as they divide groups of 64",
    "rtl-story ARRAY=0x16": "ARRAY=0x16: rows have to be 4, 8, 16, 32 or 64, as they divide groups of 64",
    "rtl-backend ARRAY=8x5000": "ARRAY=8x5000: columns have to be 4092 at most",
    "hw-quick ARRAY=16x": "ARRAY=16x: expected rows x columns, such as 16x16",
    "rtl-test ARRAY=8X32": "ARRAY=8X32: expected rows x columns, such as 16x16",
    "rtl-test ARRAY=8x32 SCALERS=5": "SCALERS=5: has to divide the 32 columns of ARRAY=8x32",
    "rtl-test SCALERS=0": "SCALERS=0: expected a number, 1 and up",
    "hw-formal ARRAY=8x32": "ARRAY=8x32: make hw-formal does not take it; these do: hw-quick hw-unit "
    "hw-icarus hw-icarus-quick chip-story rtl-test rtl-story rtl-backend",
    "hw-unit SCALERS=8": "SCALERS=8: make hw-unit does not take it; these do: rtl-test rtl-story rtl-backend",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_make_refuses_in_a_line(arguments):
    """Before anything is compiled: nothing is printed but the line."""
    done = subprocess.run(["make", *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"mk/hw\.mk:\d+: \*\*\* {re.escape(REFUSED[arguments])}\.  Stop\.\n", done.stderr)


def said_by_make(rows, cols, scalers=""):
    """Rows, columns and scalers, or why they cannot be."""
    command = ["sh", "tools/array.sh", f"{rows}x{cols}", str(scalers)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_scalers_of_make_are_the_models():
    """What make says of an array whose SCALERS nobody chose, and what core_cycles takes."""
    for rows, cols in ((4, 4), (4, 8), (8, 20), (8, 28), (8, 32), (16, 12), (16, 16), (32, 8), (64, 64)):
        assert said_by_make(rows, cols) == f"{rows} {cols} {default_scalers(Array(rows, cols))}"


@needs_tools
def test_scalers_of_the_top_are_the_models(tmp_path):
    """The default of SCALERS in hw/rtl/matmul_axi.sv."""
    sizes = [(4, 4), (4, 12), (8, 4), (8, 12), (8, 16), (16, 12), (32, 4)]
    tops = [f"matmul_axi #(.ROWS({rows}), .COLS({cols}))" for rows, cols in sizes]
    assert widths(tops, tmp_path, "SCALERS") == [default_scalers(Array(rows, cols)) for rows, cols in sizes]


# Parameters of hw/rtl/array_sizes.sv beside the rows, columns and scalers that make knows, and who is refused.
OTHER_SIZES = {
    "TOKENS": (1, 3, 256),
    "MIN_GROUP": (8, 48),
    "MAX_INPUTS": (32, 1000, 65536),
    "FETCH_BURST": (1, 48, 512),
    "FETCH_OUTSTANDING": (1, 12, 512),
    "FETCH_ADDRESS_W": (31, 64),
}


@needs_tools
def test_simulators_and_synthesis_refuse_what_make_refuses(tmp_path):
    """array_sizes alone, in three tools: the parameter is named, and the tool stops."""
    rtl = ROOT / "hw" / "rtl" / "array_sizes.sv"

    def refused(tool, sizes):
        if tool == "verilator":
            command = ["verilator", "--lint-only", "-Wall", "--top-module", "array_sizes"]
            command += [*(f"-G{name}={n}" for name, n in sizes.items()), rtl]
        elif tool == "iverilog":
            command = ["iverilog", "-g2012", "-s", "array_sizes", "-o", tmp_path / "sizes.vvp"]
            command += [*(f"-Parray_sizes.{name}={n}" for name, n in sizes.items()), rtl]
        else:
            chosen = " ".join(f"-chparam {name} {n}" for name, n in sizes.items())
            command = ["yosys", "-q", "-p", f"read_verilog -sv {rtl}; hierarchy -top array_sizes {chosen}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        named = set(re.findall(r"\b([A-Z_]+?)(?:_| )has(?:_| )to(?:_| )", done.stdout + done.stderr))
        assert (done.returncode != 0) == bool(named), done.stdout + done.stderr
        return named

    arrays = [
        (16, 16, 4),
        (8, 28, 7),
        (64, 4, 4),
        (12, 12, 2),
        (8, 30, 5),
        (8, 0, 1),
        (8, 32, 5),
        (8, 32, 0),
        (8, 4096, 8),
    ]
    for rows, cols, scalers in arrays:
        sizes = {"ROWS": rows, "COLS": cols, "SCALERS": scalers, "MIN_GROUP": max(4, rows) if rows != 12 else 16}
        expected = re.findall(r"(rows have|columns have|SCALERS=\d+: )", said_by_make(rows, cols, scalers))
        names = {"rows have": "ROWS", "columns have": "COLS"}
        for tool in TOOLS if FULL or rows > 8 else ("iverilog",):
            assert {names.get(e, "SCALERS") for e in expected} == refused(tool, sizes) - (
                {"SCALERS"} if cols == 0 else set()
            )
    for name, values in OTHER_SIZES.items():
        for value in values:
            assert refused("iverilog", {name: value, "FETCH": 1}) == {name}
    # With m_axi a row of cells is a beat of AXI4: a power of two of up to 128 bytes.
    for cols, names in ((16, set()), (128, set()), (48, {"FETCH"}), (256, {"FETCH", "FETCH_BURST"})):
        assert refused("iverilog", {"COLS": cols, "FETCH": 1}) == names


@needs_tools
@pytest.mark.parametrize("name", place.PLACED)
def test_what_is_placed_elaborates(name):
    """The first lines of what make rtl-chip gives to Yosys: every module is found, with its parameters."""
    lines = place.ecp5_script(name)
    script = "; ".join([*lines[: lines.index("proc")], "select -assert-any counted/w:*"])
    done = subprocess.run(["yosys", "-q", "-p", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_tools
@pytest.mark.parametrize(("top", "parameters"), [*place.XILINX.values(), *place.UNITS.items()])
def test_what_is_counted_elaborates(top, parameters):
    script = "; ".join(place.read_module(top, parameters))
    done = subprocess.run(["yosys", "-q", "-p", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_tools
@needs_plain_path
def test_tiles_of_another_array():
    """Golden tiles and the scalers below them on 8 x 32, in Icarus."""
    printed = make("hw-icarus-quick", "ARRAY=8x32")
    assert len(re.findall(r"^(?:tile|scaler)_tb, 8x32, matmul\.16x64x64g64: equal: ", printed, re.MULTILINE)) == 2


@needs_tools
def test_a_tile_of_ones_own(tmp_path):
    """The files of docs/rtl.md in tile_tb: equal; a wrong sum is named, and a missing word, and the exit code is 1."""
    sizes = [
        f"-Ptile_tb.{name}={n}" for name, n in (("ROWS", 4), ("COLS", 4), ("TOKENS", 2), ("OUTPUTS", 4), ("INPUTS", 4))
    ]
    bench = [
        "iverilog",
        "-g2012",
        "-y",
        "hw/rtl",
        "-Y",
        ".sv",
        *sizes,
        "-o",
        tmp_path / "tile.vvp",
        "hw/tests/tile_tb.sv",
    ]
    subprocess.run(bench, cwd=ROOT, check=True)

    def run(x, sums):
        (tmp_path / "x.codes.hex").write_text(x)
        (tmp_path / "w.codes.hex").write_text("00000001\n00000100\n00010000\n02000000\n")
        (tmp_path / "pass.sums.hex").write_text(sums)
        command = ["vvp", "-n", tmp_path / "tile.vvp", f"+vectors={tmp_path}", "+vcd"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    x, sums = "04030201\n01010101\n", "00000008000000030000000200000001\n00000002000000010000000100000001\n"
    status, printed = run(x, sums)
    assert status == 0
    assert "equal: 8 sums of 1 tiles, 2 tokens" in printed
    assert "$var" in (tmp_path / "tile.vcd").read_text()
    status, printed = run(x, sums.replace("00000003", "ffffffff"))
    assert status == 1
    assert "tile 0, token 0, column 2: sum 3, expected -1\n" in printed
    status, printed = run(x[:9], sums)
    assert status == 1
    assert f"{tmp_path}/x.codes.hex: expected 2 words" in printed


def table_of_sums():
    """(what is summed, number of products) -> bits, from the table of docs/hardware.md."""
    page = (ROOT / "docs" / "hardware.md").read_text()
    lines = re.findall(r"^\| ((?:int8|MSD)[^|]*) \| [^|]* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    return {(name, n): int(bits) for name, *row in lines for n, bits in zip((1, 16, 32, 64), row, strict=True)}


def widths(modules, folder, name="SUM_W"):
    """A localparam or parameter of modules with parameters, such as "dot_row #(.LANES(1))", as Icarus computes it."""
    lines = [f'  {module} u{i} ();\n  initial $display("%0d", u{i}.{name});\n' for i, module in enumerate(modules)]
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
        "MSD: the row above and 8 * sum(w), so int8 x int4": ("msd_array #(.ROWS({n}), .COLS(1))", 128, 8),
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
    n = len(mutants["MUTANTS"])
    assert len({mutant.name for mutant in mutants["MUTANTS"]}) == n
    assert f" {n} planted mistakes" in (ROOT / "docs/rtl.md").read_text()
    for mutant in mutants["MUTANTS"]:
        assert mutants["mistaken"](mutant) != (ROOT / f"hw/rtl/{mutant.module}.sv").read_text()


@needs_tools
@pytest.mark.parametrize(("sizes", "named"), [({"ROWS": 1}, "ROWS"), ({"COLS": 3, "PAIRED": "1"}, "COLS")])
def test_an_array_that_cannot_be_is_refused(tmp_path, sizes, named):
    """systolic_array alone, in three tools."""
    rtl = ROOT / "hw/rtl"
    array = rtl / "systolic_array.sv"
    chosen = " ".join(f"-chparam {name} {n}" for name, n in sizes.items())
    commands = [
        ["verilator", "--lint-only", "-Wno-lint", "-y", rtl, *(f"-G{name}={n}" for name, n in sizes.items()), array],
        ["iverilog", "-g2012", "-y", rtl, "-Y", ".sv", "-s", "systolic_array", "-o", tmp_path / "array.vvp", array]
        + [f"-Psystolic_array.{name}={n}" for name, n in sizes.items()],
        ["yosys", "-q", "-p", f"read_verilog -sv {rtl}/*.sv; hierarchy -top systolic_array {chosen}"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0, command
        assert re.search(rf"\b{named}[_ ]has[_ ]to[_ ]be[_ ]", done.stdout + done.stderr), done.stdout + done.stderr


def test_file_lists_have_every_module():
    """Those for Bender, FuseSoC, and simulators that take -f."""
    modules = sorted(path.name for path in (ROOT / "hw" / "rtl").glob("*.sv"))
    for name in ("Bender.yml", "matmul_axi.core", "matmul_axi.f"):
        assert re.findall(r"rtl/(\w+\.sv)", (ROOT / "hw" / name).read_text()) == modules, name


@needs_tools
def test_simulators_take_the_file_list():
    for command in (
        ["verilator", "--lint-only", "-Wall", "--top-module", "matmul_axi", "-f", "hw/matmul_axi.f"],
        ["iverilog", "-g2012", "-t", "null", "-s", "matmul_axi", "-f", "hw/matmul_axi.f"],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
