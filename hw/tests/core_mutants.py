"""Mistakes planted in the core of hw/rtl, one at a time: hw/tests/matmul_axi_test.cpp has to find each.

    make hw-core-mutants [CORE_MUTANT=NAME]

A mutant is a copy of hw/rtl with one line changed, compiled as an array of 4 x 4 cells. The make target builds the test
first. Exit code 1 names those that no
test case noticed.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "build" / "hw" / "core-mutants"

# Name: file, text, what it becomes.
MUTANTS = {
    "tile taken before it is whole": (
        "weight_loader.sv",
        "assign tile_ready_o = tiles_q != 2'd0;",
        "assign tile_ready_o = fill_q != '0;",
    ),
    "buffer of weights overflows": ("weight_loader.sv", "fill_q != FILL_W'(DEPTH)", "1'b1"),
    "scales overwritten": ("weight_loader.sv", "banks_used_q != USED_W'(BANKS)", "1'b1"),
    "scale of the bank before": (
        "weight_loader.sv",
        "assign scale_bank_o  = bank_q;",
        "assign scale_bank_o  = bank_q + BANK_W'(1);",
    ),
    "beat of 4 bits taken at once": ("weight_loader.sv", "has_room & last_slice", "has_room"),
    "weights swapped a clock early": (
        "tile_sequencer.sv",
        "active_o & loaded_q & ~in_pass_q",
        "active_o & (loaded_q | take_tile_o) & ~in_pass_q",
    ),
    "next tile loaded into registers in use": ("tile_sequencer.sv", "tile_ready_i & ~loaded_q", "tile_ready_i"),
    "results do not wait for room": ("tile_sequencer.sv", "(result_room_i | ~(last_pass_o & last_group_o))", "1'b1"),
    "first pass of a group adds to the last": ("column_edges.sv", "(first_pass ? '0 : earlier)", "earlier"),
    "first group adds to the row before": ("column_edges.sv", "first_group_q ? 32'h0 : running_q", "running_q"),
    "sum of a pass a bit short": (
        "systolic_array.sv",
        "= sum_down[ROWS*COLS+c];",
        "= SUM_W'($signed(sum_down[ROWS*COLS+c][SUM_W-2:0]));",
    ),
    "sum of a group a bit short": (
        "column_edges.sv",
        "wholes_q[{half, token}] <= total;",
        "wholes_q[{half, token}] <= TOTAL_W'($signed(total[SUM_W:0]));",
    ),
    "running sum read before it is written": ("column_edges.sv", " & (early_q == 3'd0)", ""),
    "sums of a group do not wait for room": ("tile_sequencer.sv", "(group_room_i | ~last_pass_o)", "1'b1"),
    "sums in the half of the product before": (
        "column_edges.sv",
        "whole & (waiting_q == 2'd0) ? last_scale_bank[0] : half_q ^ ends",
        "half_q ^ ends",
    ),
    "x scale of the other half": (
        "column_edges.sv",
        "x_scale_q <= x_scales_q[{half_q, token_q}];",
        "x_scale_q <= x_scales_q[{~half_q, token_q}];",
    ),
    "x scale a token late": (
        "matmul_core.sv",
        "assign scale_token     = issued_q[ROWS]",
        "assign scale_token     = issued_q[ROWS-1]",
    ),
    "result changes while it waits": (
        "result_store.sv",
        "    if (step) begin\n      m_data_o",
        "    if (filled_q != 2'd0) begin\n      m_data_o",
    ),
    "last result marked too early": (
        "result_store.sv",
        "m_last_o <= row_of_tiles_sent & is_last;",
        "m_last_o <= is_last;",
    ),
    "reset forgets the sequencer": (
        "tile_sequencer.sv",
        "active_o        <= rst_ni & start_i;",
        "active_o        <= start_i | (~rst_ni & active_o);",
    ),
    "reset forgets a waiting result": (
        "result_store.sv",
        "      m_valid_o      <= 1'b0;",
        "      m_valid_o      <= m_valid_o & ~m_ready_i;",
    ),
    "reset forgets sizes": ("axil_registers.sv", "      passes_o        <= '0;\n", ""),
    "sizes change while a command runs": ("axil_registers.sv", "if (write & ~status_i[0])", "if (write)"),
    "sizes cut to 16 bits": (
        "axil_registers.sv",
        "passes_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];",
        "passes_o <= wdata_i[COUNT_W-1:0];",
    ),
    "too many inputs accepted": ("matmul_axi.sv", "(token_passes_q <= (2 * COUNT_W)'(MAX_PASSES))", "1'b1"),
    "too many tokens accepted": ("matmul_axi.sv", "(tokens <= (TOKEN_W + 1)'(TOKENS))", "1'b1"),
    "command while another runs": ("matmul_axi.sv", "command[0] & ~busy & sizes_fit", "command[0] & sizes_fit"),
    "activation taken while it waits": ("matmul_axi.sv", "(coded | quantizer_ready)", "1'b1"),
    "scale of the second code": (
        "matmul_axi.sv",
        "if (code_valid) code_first_q <= code_last;",
        "if (code_valid) code_first_q <= ~code_last & ~code_first_q;",
    ),
    "scale read as codes": ("activation_reader.sv", "in_codes_q <= ~group_is_last;", "in_codes_q <= 1'b1;"),
    "codes of a word reversed": ("activation_store.sv", ": longer[8*ROWS-1:0];", ": {word_q, codes_i[7:0]};"),
}


def check(name: str, change: tuple[str, str, str] | None) -> str:
    """What the test says of a mutant: the test cases that fail. Raises ValueError where it cannot be made."""
    folder = OUT / re.sub(r"\W+", "-", name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "hw" / "rtl", folder / "rtl")
    if change is not None:
        file, old, new = change
        source = folder / "rtl" / file
        text = source.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name}: {file} has {text.count(old)} times: {old}")
        source.write_text(text.replace(old, new))
    # What drives the core does not see the change: its objects are those of the core as it is.
    parts = [ROOT / "build" / "hw" / "axi-4x4" / f"{part}.o" for part in ("matmul_axi_test", "matmul_rtl")]
    sources = sorted(map(str, (folder / "rtl").glob("*.sv")))
    options = [
        "--x-assign",
        "fast",
        "--x-initial",
        "fast",
        "--noassert",
        "-Wno-lint",
        "-GROWS=4",
        "-GCOLS=4",
        "-GMIN_GROUP=4",
    ]
    model = [
        "verilator",
        "--cc",
        *options,
        "--top-module",
        "matmul_axi",
        "--prefix",
        "Vmatmul_axi",
        "--Mdir",
        str(folder),
    ]
    archive = ["make", "-s", "-C", str(folder), "-f", "Vmatmul_axi.mk", "OPT_FAST=-O1", "Vmatmul_axi__ALL.a"]
    link = ["g++", *map(str, parts), str(folder / "Vmatmul_axi__ALL.a"), "verilated.o", "verilated_threads.o"]
    runtime = ROOT / "build" / "hw" / "axi-4x4" / "model"
    link = [str(runtime / part) if part.startswith("verilated") else part for part in link]
    for command in ([*model, *sources], archive, [*link, "-pthread", "-o", str(folder / "test")]):
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise ValueError(f"{name}: does not compile: {built.stderr[-1000:]}")
    try:
        done = subprocess.run([folder / "test"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ", ".join(dict.fromkeys(re.findall(r"^TEST CASE:  (.*)$", done.stdout, re.M))) if done.returncode else ""


def main(names: list[str]) -> int:
    """Checks the mutants of these names, or all; the exit code is 1 if one is not found."""
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        print(f"no such mutant: {', '.join(unknown)}", file=sys.stderr)
        return 2
    found = check("none", None)
    if found:
        print(f"the RTL as it is fails: {found}", file=sys.stderr)
        return 1
    missed = []
    for name in names or MUTANTS:
        found = check(name, MUTANTS[name])
        print(f"{name:42} {found or 'NOT FOUND'}", flush=True)
        if not found:
            missed.append(name)
    print(f"{len(names or MUTANTS) - len(missed)} of {len(names or MUTANTS)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
