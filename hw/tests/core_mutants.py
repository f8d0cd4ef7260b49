"""Mistakes planted in the core of hw/rtl, one at a time: matmul_axi_test.cpp or system_test.cpp has to find each.

    make hw-core-mutants [CORE_MUTANT=NAME]

A mutant is a copy of hw/rtl with one line changed, compiled as an array of 4 x 8 cells with 2 scalers. The make target
builds the test first. Exit code 1 names those that no test case noticed.
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
    "command while another runs": (
        "matmul_axi.sv",
        "= ~busy & sizes_fit & (command == 4'd1);",
        "= sizes_fit & (command == 4'd1);",
    ),
    "activation taken while it waits": ("matmul_axi.sv", "(coded | quantizer_ready)", "1'b1"),
    "scale of the second code": (
        "matmul_axi.sv",
        "if (code_valid) code_first_q <= code_last;",
        "if (code_valid) code_first_q <= ~code_last & ~code_first_q;",
    ),
    "scale read as codes": ("activation_reader.sv", "in_codes_q <= ~group_is_last;", "in_codes_q <= 1'b1;"),
    "codes of a word reversed": ("activation_store.sv", ": longer[8*ROWS-1:0];", ": {word_q, codes_i[7:0]};"),
    # What only the longest tokens show.
    "sum of a long group two bits short": (
        "matmul_core.sv",
        "localparam int TOTAL_W = $clog2(MAX_INPUTS * 128 * 128 + 1) + 1;",
        "localparam int TOTAL_W = $clog2(MAX_INPUTS * 128 * 128 + 1) - 1;",
    ),
    "upper half of the inputs on top of the lower": (
        "activation_store.sv",
        "if (word_whole) codes_q[{pass_q, token_q}]",
        "if (word_whole) codes_q[{1'b0, pass_q[PASS_W-2:0], token_q}]",
    ),
    "upper half of the inputs read as the lower": (
        "activation_store.sv",
        "codes_q[{pass_i, token_i}]",
        "codes_q[{1'b0, pass_i[PASS_W-2:0], token_i}]",
    ),
    "scales of the upper half of the groups lost": (
        "activation_store.sv",
        "scales_q[{group_i, scale_token_i}]",
        "scales_q[{1'b0, group_i[GROUP_W-2:0], scale_token_i}]",
    ),
    # The registers' channels.
    "answer to a write does not wait": ("axil_registers.sv", "write | (bvalid_o & ~bready_i)", "write"),
    "answer to a read does not wait": (
        "axil_registers.sv",
        "(arvalid_i & arready_o) | (rvalid_o & ~rready_i)",
        "arvalid_i & arready_o",
    ),
    "write without its data": ("axil_registers.sv", "awvalid_i & wvalid_i & ~bvalid_o", "awvalid_i & ~bvalid_o"),
    "write without its address": ("axil_registers.sv", "awvalid_i & wvalid_i & ~bvalid_o", "wvalid_i & ~bvalid_o"),
    "write while an answer waits": ("axil_registers.sv", "awvalid_i & wvalid_i & ~bvalid_o", "awvalid_i & wvalid_i"),
    "read while an answer waits": (
        "axil_registers.sv",
        "assign arready_o      = ~rvalid_o;",
        "assign arready_o      = 1'b1;",
    ),
    "writes end with an error": ("matmul_axi.sv", "assign s_axil_bresp = 2'b00;", "assign s_axil_bresp = 2'b10;"),
    "reads end with an error": ("matmul_axi.sv", "assign s_axil_rresp = 2'b00;", "assign s_axil_rresp = 2'b10;"),
    "reset leaves an answer": (
        "axil_registers.sv",
        "if (!rst_ni) rvalid_o <= 1'b0;\n    else rvalid_o",
        "rvalid_o",
    ),
    "reset forgets done": (
        "matmul_axi.sv",
        "      done_q    <= 1'b0;\n      refused_q <= 1'b0;\n      error_q",
        "      refused_q <= 1'b0;\n      error_q",
    ),
    "reset forgets refused": (
        "matmul_axi.sv",
        "      refused_q <= 1'b0;\n      error_q",
        "      error_q",
    ),
    "reset forgets an error": (
        "matmul_axi.sv",
        "      error_q   <= 1'b0;\n    end else begin",
        "    end else begin",
    ),
    # Registers.
    "done stays when the next command begins": (
        "matmul_axi.sv",
        "push_fits) begin\n        done_q    <= 1'b0;\n",
        "push_fits) begin\n",
    ),
    "refused stays when the next command begins": (
        "matmul_axi.sv",
        "        refused_q <= 1'b0;\n      end else begin",
        "      end else begin",
    ),
    "done before the results are out": (
        "matmul_axi.sv",
        "assign busy           = loading_q | core_active |",
        "assign busy           = loading_q | weights_active |",
    ),
    "bytes of results kept wrong": (
        "matmul_axi.sv",
        "reader_active ? COLS'(15) : '1",
        "reader_active ? COLS'(15) : COLS'(15)",
    ),
    "bytes of activations kept wrong": ("matmul_axi.sv", "reader_active ? COLS'(15) : '1", "'1"),
    "cycles of all commands": (
        "matmul_axi.sv",
        "if (!rst_n || load_start || multiply_start || read_start) begin\n      cycles_q        <= '0;",
        "if (!rst_n) begin\n      cycles_q        <= '0;",
    ),
    "cycles without the last": ("matmul_axi.sv", "if (busy) cycles_q", "if (busy & busy_q) cycles_q"),
    "sum cycles until the results are out": (
        "matmul_axi.sv",
        "if (sums_active) sum_cycles_q",
        "if (core_active) sum_cycles_q",
    ),
    "results that wait counted without a wait": (
        "matmul_axi.sv",
        "if (m_axis_tvalid & ~m_axis_tready) result_stalls_q",
        "if (m_axis_tvalid) result_stalls_q",
    ),
    "weights that wait never counted": (
        "matmul_axi.sv",
        "if (weights_active & w_valid & ~w_ready) weight_stalls_q",
        "if (weights_active & ~w_valid & ~w_ready) weight_stalls_q",
    ),
    "weights that are behind the matrix awaited": (
        "matmul_axi.sv",
        "if (weights_active & ~w_valid) weight_waits_q",
        "if (core_active & ~w_valid) weight_waits_q",
    ),
    "rows and columns exchanged in SHAPE": ("matmul_axi.sv", "12'(COLS), 12'(ROWS)}", "12'(ROWS), 12'(COLS)}"),
    "half as many inputs in LIMITS": ("matmul_axi.sv", "16'(MAX_INPUTS)})", "16'(MAX_INPUTS / 2)})"),
    "half as many tokens in SHAPE": ("matmul_axi.sv", "({8'(TOKENS),", "({8'(TOKENS / 2),"),
    "tokens cut to the bits they have": (
        "axil_registers.sv",
        "|wdata_i[31:TOKEN_W+1] ? '1 : wdata_i[TOKEN_W:0]",
        "wdata_i[TOKEN_W:0]",
    ),
    "rows of tiles cut to 16 bits": (
        "axil_registers.sv",
        "rows_of_tiles_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];",
        "rows_of_tiles_o <= wdata_i[COUNT_W-1:0];",
    ),
    "a static scale without its lowest bit": (
        "axil_registers.sv",
        "scale_o <= wdata_i;",
        "scale_o <= {wdata_i[31:1], 1'b0};",
    ),
    "a static scale is not": ("matmul_axi.sv", ".static_i      (fixed),", ".static_i      (1'b0),"),
    "a product without outputs begins": ("matmul_axi.sv", " & (rows_of_tiles != '0);", ";"),
    "two commands at once": (
        "matmul_axi.sv",
        "assign read_start     = ~busy & sizes_fit & (command == 4'd4);",
        "assign read_start     = ~busy & sizes_fit & command[2];",
    ),
    "stop leaves the core as it is": (
        "matmul_axi.sv",
        "assign rst_n = aresetn & ~command[3];",
        "assign rst_n = aresetn;",
    ),
    "interrupt without leave": ("matmul_axi.sv", "done_q & interrupts;", "done_q;"),
    "interrupt while the command runs": ("matmul_axi.sv", "= done_q & interrupts;", "= (done_q | busy) & interrupts;"),
    "leave to interrupt outlives a reset": ("axil_registers.sv", "      interrupt_o     <= 1'b0;\n", ""),
    # Streams.
    "activations behind the last one taken": ("matmul_axi.sv", "loading_q & ~all_taken_q &", "loading_q &"),
    "activations taken while nothing loads": (
        "matmul_axi.sv",
        "s_axis_x_tready = loading_q & ~all_taken_q",
        "s_axis_x_tready = ~all_taken_q",
    ),
    "load ends before its last codes": ("activation_store.sv", "codes_full_q & scales_full_q;", "scales_full_q;"),
    "end of a token marked as that of all": (
        "activation_reader.sv",
        "last_o     <= all_sent;",
        "last_o     <= token_is_last;",
    ),
    "activation does not wait": (
        "activation_reader.sv",
        "step | (valid_o & ~ready_i)",
        "step",
    ),
    "zero points of the first group": (
        "weight_loader.sv",
        "always_ff @(posedge clk_i) if (zeros_write)",
        "always_ff @(posedge clk_i) if (zeros_write & (group_q == '0))",
    ),
    "two levels taken for one": ("weight_loader.sv", ".two_level_i(format_i == 2'd3)", ".two_level_i(1'b0)"),
    "groups of scales in the bank of the first": (
        "weight_loader.sv",
        "bank_q     <= bank_q + BANK_W'(1);",
        "bank_q     <= BANK_W'(0);",
    ),
    "results of the other half of the columns": (
        "column_edges.sv",
        "assign result_column_o = scaled_tag[TOKEN_W+:COLUMN_W];",
        "assign result_column_o = ~scaled_tag[TOKEN_W+:COLUMN_W];",
    ),
    # The queue and the master.
    "bursts of full length from any address": (
        "weight_fetcher.sv",
        "- {1'b0, at_q[BYTE_W+:BURST_W]};",
        "- (BURST_W + 1)'(at_q[BYTE_W]);",
    ),
    "burst a beat too long": ("weight_fetcher.sv", "8'(beats) - 8'd1", "8'(beats)"),
    "address changes while it waits": ("weight_fetcher.sv", "(~ar_valid_o | ar_ready_i) &", "1'b1 &"),
    "more bursts than the buffer has room for": ("weight_fetcher.sv", "FILL_W'(BEATS - BURST)", "FILL_W'(BEATS)"),
    "more bursts than may wait": ("weight_fetcher.sv", "(bursts_q != BURSTS_W'(OUTSTANDING)) &", ""),
    "beats of a matrix without its zero points": (
        "weight_fetcher.sv",
        "(format == 2'd0 ? ROW_W'(4) : ROW_W'(5))",
        "ROW_W'(4)",
    ),
    "codes of 2 bits read as codes of 4": (
        "weight_fetcher.sv",
        "(format == 2'd0 ? 0 : format == 2'd1 ? 1 : 2)",
        "(format == 2'd0 ? 0 : 1)",
    ),
    "matrix of the entry before": ("weight_fetcher.sv", "if (step_q == 2'd0) at_q", "if (read_entry) at_q"),
    "first entry is never taken off": (
        "weight_fetcher.sv",
        "if (end_i) first_q <= first_q + QUEUE_W'(1);",
        "if (end_i) first_q <= first_q;",
    ),
    "stop leaves beats that still come": ("weight_fetcher.sv", "(stop_i | drains_o) & (due_q != '0)", "1'b0"),
    "stop takes an address back": (
        "weight_fetcher.sv",
        "ask | (ar_valid_o & ~ar_ready_i);",
        "ask | (ar_valid_o & ~ar_ready_i & ~stop_i);",
    ),
    "beat of the buffer changes while it waits": ("weight_fetcher.sv", "(~valid_o | ready_i);", "1'b1;"),
    "an error of memory is not one": ("weight_fetcher.sv", "taken & r_error_i & ~drains_o", "1'b0"),
    "error is forgotten at the next beat": (
        "matmul_axi.sv",
        "(error_q & ~(load_start | command_multiplies | read_start))",
        "1'b0",
    ),
    "a command while the queue has products": (
        "matmul_axi.sv",
        "reader_active | queue_waits | queue_drains;",
        "reader_active | queue_drains;",
    ),
    "done while beats still come": (
        "matmul_axi.sv",
        "busy_q    <= busy & ~queue_drains;",
        "busy_q    <= busy;",
    ),
    "a matrix from any byte": ("matmul_axi.sv", "(fetch_address[$clog2(COLS)-1:0] == '0) & ", ""),
    "the upper bits of an address dropped": ("matmul_axi.sv", " & ((fetch_address >> FETCH_ADDRESS_W) == '0);", ";"),
    "the queue overflows": ("matmul_axi.sv", " & (queue_room != '0) &", " &"),
    "a product of the queue without outputs": ("matmul_axi.sv", " & (push_sizes[COUNT_W-1:0] != '0)", ""),
    "format of the registers instead of the entry's": (
        "matmul_axi.sv",
        "= queue_waits ? queue_format : format;",
        "= format;",
    ),
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
    built = ROOT / "build" / "hw" / "axi-4x8-scalers2"
    tests = {"matmul_axi_test": ["matmul_rtl"], "system_test": ["matmul_rtl", "matmul_system"]}
    sources = sorted(map(str, (folder / "rtl").glob("*.sv")))
    options = [
        "--x-assign",
        "fast",
        "--x-initial",
        "fast",
        "--assert",
        "-Wno-lint",
        "-GROWS=4",
        "-GCOLS=8",
        "-GSCALERS=2",
        "-GMIN_GROUP=4",
        "-GFETCH=1'b1",
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
    archive = [
        "make",
        "-s",
        "-C",
        str(folder),
        "-f",
        "Vmatmul_axi.mk",
        "VM_PARALLEL_BUILDS=0",
        "OPT_FAST=-O0",
        "Vmatmul_axi__ALL.a",
    ]
    runtime = [str(built / "model" / part) for part in ("verilated.o", "verilated_threads.o")]
    links = []
    for test, parts in tests.items():
        objects = [str(built / f"{part}.o") for part in (test, *parts)]
        archived = str(folder / "Vmatmul_axi__ALL.a")
        links.append(["g++", *objects, archived, *runtime, "-pthread", "-o", str(folder / test)])
    for command in ([*model, *sources], archive, *links):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"{name}: does not compile: {done.stderr[-1000:]}")
    try:
        for test in tests:
            # Seconds of processor time: the wall's depend on what else runs.
            limited = ["sh", "-c", 'ulimit -t 60 && exec "$0" --abort-after=1', str(folder / test)]
            done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                failed = ", ".join(dict.fromkeys(re.findall(r"^TEST CASE:  (.*)$", done.stdout, re.M)))
                return failed or f"{test} ends by signal {-done.returncode}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


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
