"""Plants a mistake in the RTL, one at a time, and runs the test that has to find it.

    python hw/tests/mutants.py [NAME ...]      make hw-mutants; with names, these mistakes alone

A mistake is a text of a source that is replaced by another, and has to be there once. The module's own test program has
to find it, for the core matmul_axi_test or system_test, for the chip one token of its story, each with a model of the
changed sources. It is found if a test case of doctest fails, or the story; not if a program only crashes, does not end,
or does not compile. Each test runs without a mistake, too, and has to pass. Mistakes that were found are kept in
OUT/found: the next run with the same sources leaves them out.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

RTL, BUILT, OUT = Path("hw/rtl"), Path("build/hw"), Path("build/hw/mutants")
LARGE = ("array_16x16", "msd_array_16x16")  # models that are not made anew: the small ones have the mistake, too
# What make builds for the mistakes of a test.
CORE, CHIP = "axi-4x8-scalers2", "chip-4x4/chip_run"
PROGRAMS = {"core": [f"{CORE}/matmul_axi_test", f"{CORE}/system_test"], "chip": [CHIP]}


class Mutant(NamedTuple):
    """A mistake: in a module, each text of `old` becomes the one of `new` at its place."""

    name: str
    test: str  # hw/tests/TEST_test.cpp, core, or chip
    module: str
    old: str | tuple[str, ...]
    new: str | tuple[str, ...]


# The operands are the integer and x_scale; the integer is multiplied by w_scale first.
OTHER_ORDER = """logic [31:0] acc, scale, w_scale, x_scale, acc_w;
  delay #(.WIDTH(32), .CLOCKS(5)) u_w_scale (.clk_i, .en_i, .data_i(w_scale_i), .data_o(w_scale));
  delay #(.WIDTH(32), .CLOCKS(5)) u_x_scale (.clk_i, .en_i, .data_i(scale), .data_o(x_scale));
  fp32_mul u_mul_w (.clk_i, .en_i, .a_i(acc), .b_i(w_scale), .p_o(acc_w));
"""


MUTANTS = [
    # The array.
    Mutant(
        "accumulator a bit short",
        "array",
        "mac_cell",
        "sum_i + SUM_W'(x_i * weight)",
        "SUM_W'($signed((SUM_W - 1)'(sum_i + SUM_W'(x_i * weight))))",
    ),
    Mutant(
        "weight register swapped a cycle early",
        "array",
        "systolic_array",
        "assign swap_right[r*(COLS+1)] = swap_left[r];",
        "assign swap_right[r*(COLS+1)] = swap_left[r == 0 ? 0 : r-1];",
    ),
    Mutant(
        "weight register swapped a cycle late",
        "array",
        "mac_cell",
        "assign weight = swap_i ? next_weight_q : weight_q;\n",
        "assign weight = weight_q;\n",
    ),
    Mutant("weights swapped in all columns at once", "array", "mac_cell", "swap_o <= swap_i;", "swap_o <= 1'b0;"),
    Mutant("a single weight register", "array", "mac_cell", "assign weight = swap_i ?", "assign weight = 1'b1 ?"),
    Mutant("tokens enter without skew", "array", "systolic_array", "x_skewed[r*X_W+:X_W]", "x_i[r*X_W+:X_W]"),
    Mutant(
        "weights enter without skew",
        "array",
        "systolic_array",
        ".w_i   (w_skewed[c*W_W+:W_W])",
        ".w_i   (w_i[c*W_W+:W_W])",
    ),
    Mutant(
        "activations without a sign",
        "array",
        "mac_cell",
        "SUM_W'(x_i * weight)",
        "SUM_W'($signed({1'b0, x_i}) * weight)",
    ),
    Mutant(
        "sums of a row above are lost",
        "array",
        "systolic_array",
        ".sum_i (sum_down[r*COLS+c])",
        ".sum_i (r == 2 ? '0 : sum_down[r*COLS+c])",
    ),
    Mutant(
        "sums announced a clock early",
        "array",
        "systolic_array",
        "valid_q[ROWS+COLS-2:ROWS-1]",
        "{valid_q[ROWS+COLS-3:ROWS-1], valid_q[ROWS-2]}",
    ),
    Mutant(
        "reset leaves tokens on their way", "array", "systolic_array", "if (!rst_ni) valid_q <= '0;\n    else if", "if"
    ),
    Mutant(
        "cells do not stand still",
        "array",
        "mac_cell",
        "      x_o   <= x_i;\n      sum_o <= sum_i + SUM_W'(x_i * weight);\n    end",
        "    end\n    x_o   <= x_i;\n    sum_o <= sum_i + SUM_W'(x_i * weight);",
    ),
    Mutant(
        "weights are loaded while it stands still",
        "array",
        "mac_cell",
        "      if (load_i) next_weight_q <= w_i;\n",
        "    end\n    if (load_i) next_weight_q <= w_i;\n    if (en_i) begin\n",
    ),
    Mutant("upper product without the borrow", "array", "mac_cell_pair", " + 16'(product[17])", ""),
    # fp32.
    Mutant(
        "truncation instead of rounding",
        "fp32",
        "fp32_round",
        "assign up      = sig_qq[SIG_W-25] & ",
        "assign up      = 1'b0 & ",
    ),
    Mutant("half-up rounding", "fp32", "fp32_round", "& (sig_qq[SIG_W-24] | (|sig_qq[SIG_W-26:0]))", "& 1'b1"),
    Mutant(
        "subnormal results flushed to 0",
        "fp32",
        "fp32_round",
        "else f_o <= {sign_qq, rounded[30:0]};",
        "else f_o <= {sign_qq, rounded[33:23] == 11'd0 ? 31'h0 : rounded[30:0]};",
    ),
    Mutant(
        "subnormal operands taken for normal",
        "fp32",
        "fp32_mul",
        "assign a_sig  = {a_exp != 8'h00,",
        "assign a_sig  = {1'b1,",
    ),
    Mutant(
        "bits shifted out of a subnormal are forgotten",
        "fp32",
        "fp32_round",
        "shifted_right[0] | (|lost)",
        "shifted_right[0]",
    ),
    Mutant("overflow is not infinity", "fp32", "fp32_round", "rounded[33:23] >= 11'd255", "rounded[33:23] > 11'd255"),
    Mutant("sum forgets what alignment shifts out", "fp32", "fp32_add", "aligned[0] | (|lost)", "aligned[0]"),
    Mutant("x - x is -0", "fp32", "fp32_add", "sign_q & ~(subtract_q & (total == 28'h0))", "sign_q"),
    Mutant(
        "infinity - infinity is infinity", "fp32", "fp32_add", "larger_nan | (smaller_big & subtract)", "larger_nan"
    ),
    Mutant("0 * infinity is infinity", "fp32", "fp32_mul", "a_nan | b_nan | a_zero | b_zero ?", "a_nan | b_nan ?"),
    Mutant("NaN is infinity", "fp32", "fp32_mul", "a_nan | b_nan | a_zero", "a_nan | a_zero"),
    Mutant("fma forgets c below the product", "fp32", "fp32_fma", "c_right[0] | (|c_lost)", "c_right[0]"),
    Mutant("fma forgets a product below c", "fp32", "fp32_fma", "78'(product_q != 48'h0)", "78'h0"),
    Mutant(
        "smallest integer has no magnitude",
        "fp32",
        "int_to_fp32",
        "magnitude_q <= int_i[INT_W-1] ? -int_i : int_i;",
        "magnitude_q <= INT_W'(int_i[INT_W-1] ? {1'b0, -int_i[INT_W-2:0]} : {1'b0, int_i[INT_W-2:0]});",
    ),
    Mutant("quotient forgets its remainder", "fp32", "fp32_div", "rest_q != 25'h0", "1'b0"),
    Mutant("quotient of subnormals without their exponent", "fp32", "fp32_div", " + $signed({6'b0, b_zeros})", ""),
    Mutant("halves of codes round up", "fp32", "fp32_to_code", "fixed[23] & (fixed[24] | (|fixed[22:0]))", "fixed[23]"),
    Mutant("codes are truncated", "fp32", "fp32_to_code", "fixed[23] & (fixed[24] | (|fixed[22:0]))", "1'b0"),
    Mutant(
        "code -128",
        "fp32",
        "fp32_to_code",
        "if (is_large) code = is_minus ? -8'd127",
        "if (is_large) code = is_minus ? -8'd128",
    ),
    Mutant("NaN becomes 0", "fp32", "fp32_to_code", "if (is_nan) code = -8'd127;", "if (is_nan) code = 8'd0;"),
    # Exponential.
    Mutant("exp without the square", "fp32", "fp32_exp", "20'(s_q) + (square_q >>> 11)", "20'(s_q)"),
    Mutant("exp takes the table's word below", "fp32", "fp32_exp", "[rest_q[27:19]+9'(rest_q[18])]", "[rest_q[27:19]]"),
    Mutant("exp with ln 2 of 28 bits", "fp32", "fp32_exp", "37'hb17217f7d", "37'hb17217f00"),
    Mutant("exp with log2(e) of 11 bits", "fp32", "fp32_exp", "14'd5909", "14'd5908"),
    Mutant("exp of numbers from 64 is infinite", "fp32", "fp32_exp", "x_i[30:23] > 8'd133", "x_i[30:23] > 8'd132"),
    Mutant("exp of NaN is infinite", "fp32", "fp32_exp", "value_q <= 32'h7fc00000", "value_q <= 32'h7f800000"),
    Mutant("exp with k of the number behind", "fp32", "fp32_exp", ".CLOCKS(6)", ".CLOCKS(5)"),
    # The scalers.
    Mutant(
        "scale order",
        "scaler",
        "group_scaler",
        (
            "logic [31:0] acc, scale;",
            "READ    = 4",
            "LATENCY = 11",
            ".w_scale_i,",
            ".a_i(acc),\n      .b_i(scale),\n      .c_i",
        ),
        (
            OTHER_ORDER,
            "READ    = 9",
            "LATENCY = 16",
            ".w_scale_i(32'h3f800000),",
            ".a_i(acc_w),\n      .b_i(x_scale),\n      .c_i",
        ),
    ),
    Mutant(
        "scale order of rows",
        "scaler",
        "row_scaler",
        (
            ".CLOCKS(10)",
            "logic [31:0] acc, scale;",
            "[9:0] valid_q",
            "[8:0], valid_i",
            "valid_q[9]",
            ".w_scale_i,",
            ".a_i(acc),\n      .b_i(scale)",
        ),
        (
            ".CLOCKS(15)",
            OTHER_ORDER,
            "[14:0] valid_q",
            "[13:0], valid_i",
            "valid_q[14]",
            ".w_scale_i(32'h3f800000),",
            ".a_i(acc_w),\n      .b_i(x_scale)",
        ),
    ),
    Mutant(
        "running sum a clock late",
        "scaler",
        "group_scaler",
        "localparam int READ    = 4;",
        "localparam int READ    = 5;",
    ),
    Mutant("sum a clock before its scale", "scaler", "scaler_operands", ".int_i(acc_q)", ".int_i(acc_i)"),
    Mutant("tag of another group", "scaler", "group_scaler", ".CLOCKS(LATENCY - READ)", ".CLOCKS(LATENCY - READ - 1)"),
    Mutant(
        "sums of 24 bits alone are converted",
        "scaler",
        "row_scaler",
        ".acc_i,",
        ".acc_i(ACC_W'($signed(acc_i[23:0]))),",
    ),
    # The quantizer.
    Mutant(
        "NaN counts for amax",
        "quantizer",
        "quantizer",
        "(x_i[30:0] > amax_q) & (x_i[30:0] <= 31'h7f800000)",
        "(x_i[30:0] > amax_q)",
    ),
    Mutant(
        "amax of the group before", "quantizer", "quantizer", "amax_q    <= last_i ? '0 : amax;", "amax_q    <= amax;"
    ),
    Mutant(
        "amax without the last number",
        "quantizer",
        "quantizer",
        "value_1_q     <= static_i ? static_scale_i : {1'b0, amax};",
        "value_1_q     <= static_i ? static_scale_i : {1'b0, amax_q};",
    ),
    Mutant(
        "infinite inverse is used",
        "quantizer",
        "quantizer",
        "assign is_usable    = (inv[30:23] != 8'hff) &",
        "assign is_usable    =",
    ),
    Mutant(
        "scale of tiny groups is kept",
        "quantizer",
        "quantizer",
        "is_usable | static_q[out_half_q] ? scale : 32'h0",
        "scale",
    ),
    Mutant("inverse of the next group", "quantizer", "quantizer", ".b_i (inv_read_qq)", ".b_i (inv_q)"),
    Mutant(
        "static inverse is 127 / (127 scale)",
        "quantizer",
        "quantizer",
        "is_static ? 32'h3f800000 : 32'h42fe0000),  // 1 or 127",
        "32'h42fe0000),",
    ),
    Mutant(
        "a half is filled before it is empty",
        "quantizer",
        "quantizer",
        "assign ready_o  = ~full_q[in_half_q];",
        "assign ready_o  = 1'b1;",
    ),
    Mutant(
        "code is lost while it waits", "quantizer", "quantizer", "assign en = ready_i | ~valid_o;", "assign en = 1'b1;"
    ),
    # RMSNorm and SwiGLU.
    Mutant("root without its last 20 bits", "rms_norm", "rms_norm", "? root[19:0]", "? 20'h0"),
    Mutant("n eps without the zero behind n", "rms_norm", "rms_norm", "<< eps_more", "<< 1'b0"),
    Mutant("eps is left out", "rms_norm", "rms_norm", "(index_q <= n_i)", "(index_q < n_i)"),
    Mutant(
        "largest exponent of the row before",
        "rms_norm",
        "rms_norm",
        "largest_q <= index_q == '0 ?",
        "largest_q <= 1'b0 ?",
    ),
    Mutant(
        "largest exponent without that of eps",
        "rms_norm",
        "rms_norm",
        "(place > eps_place ? place : eps_place)",
        "place",
    ),
    Mutant(
        "squares of 32 bits", "rms_norm", "rms_norm", "{product_q, GUARD'(0)}", "{product_q[47:16], (GUARD+16)'(0)}"
    ),
    Mutant("far squares are not far", "rms_norm", "rms_norm", "> 8'd63 ? 6'd63 :", "> 8'd255 ? 6'd63 :"),
    Mutant("quotient of an odd exponent", "rms_norm", "rms_norm", "== EXP[0]", "== ~EXP[0]"),
    Mutant("what is below a result is forgotten", "rms_norm", "rms_norm", "lost_q | (sum_q[36:0] != 37'h0)", "1'b0"),
    Mutant("w x of subnormal numbers as it is", "rms_norm", "rms_norm", "special | (wx_q[47:46] != 2'b00)", "1'b1"),
    Mutant("infinite number in a row", "rms_norm", "rms_norm", "| w_zero | has_inf_q;", "| w_zero;"),
    Mutant("NaN of the row before", "rms_norm", "rms_norm", "((index_q != '0) & has_nan_q)", "has_nan_q"),
    Mutant("row of zeros without eps is 0", "rms_norm", "rms_norm", "| is_zero | x_big", "| x_big"),
    Mutant("next row while results wait", "rms_norm", "rms_norm", "(state_q == TAKE) & drained", "(state_q == TAKE)"),
    Mutant("result is lost while it waits", "rms_norm", "rms_norm", "= ready_i | ~valid_o;", "= 1'b1;"),
    Mutant("silu with e^gate", "swiglu", "swiglu", "{~gate_q[31], gate_q[30:0]}", "gate_q"),
    Mutant("silu without the 1", "swiglu", "swiglu", "32'h3f800000", "32'h0"),
    Mutant("up of the number behind", "swiglu", "swiglu", ".b_i (divided_up_q)", ".b_i (up_q)"),
    Mutant("sum before it is there", "swiglu", "swiglu", "EXP + ADD + 1", "EXP + ADD"),
    Mutant(
        "number is taken while one is at work",
        "swiglu",
        "swiglu",
        "ready_o = count_q == 5'd0;",
        "ready_o = count_q < 5'd9;",
    ),
    Mutant("product is lost while it waits", "swiglu", "swiglu", "= ready_i | ~valid_o;", "= 1'b1;"),
    # The row of multipliers.
    Mutant(
        "row: accumulator a bit short",
        "dot_row",
        "dot_row",
        "(open_q ? sum_o : '0) + SUM_W'(tree_q[LEVELS<<LEVELS])",
        "SUM_W'($signed((SUM_W - 1)'((open_q ? sum_o : '0) + SUM_W'(tree_q[LEVELS<<LEVELS]))))",
    ),
    Mutant(
        "row: tree a bit short",
        "dot_row",
        "dot_row",
        "<= TREE_W'(x * w)",
        "<= TREE_W'($signed((X_W + W_W - 1)'(x * w)))",
    ),
    Mutant(
        "row: sum goes on into the next group", "dot_row", "dot_row", "open_q <= ~last_q[LEVELS];", "open_q <= 1'b1;"
    ),
    Mutant(
        "row: sum is lost while it waits",
        "dot_row",
        "dot_row",
        "assign en      = ready_i | ~valid_o;",
        "assign en      = 1'b1;",
    ),
    # Weights.
    Mutant("high half of a byte first", "weights", "file_codes", "{slice_i[0], 2'b00}", "{~slice_i[0], 2'b00}"),
    Mutant(
        "two-level codes times 4",
        "weights",
        "weight_expander",
        "{code[1:0], 2'b00} + {2'b00, code[1:0]}",
        "{code[1:0], 2'b00}",
    ),
    Mutant("w' without its sign", "weights", "weight_expander", "W_W'(steps) - W_W'(zero)", "W_W'(4'(steps - zero))"),
    Mutant(
        "second kept weight gets the first code",
        "weights",
        "weight_expander",
        "second ? codes_i[(FOUR/2+1)*4+:4]",
        "second ? codes_i[(FOUR/2)*4+:4]",
    ),
    Mutant("dropped weights are -zero", "weights", "weight_expander", "kept ? w : '0", "kept ? w : -W_W'(zero)"),
    Mutant(
        "subnormal fp16 scales are 0",
        "weights",
        "fp16_to_fp32",
        "{sign, 8'd112 - 8'(zeros), 10'(fraction << (zeros + 4'd1)), 13'h0}",
        "{sign, 31'h0}",
    ),
    # Attention.
    Mutant(
        "dot product goes on while the stream waits",
        "attention",
        "attention",
        "assign fma_en        = (state_q != ELEMENTS) | (pass_q == VALUES) | element_q;",
        "assign fma_en        = 1'b1;",
    ),
    Mutant("last score taken for the largest", "attention", "attention", "if (larger) largest_q", "largest_q"),
    Mutant(
        "largest score by its magnitude",
        "attention",
        "attention",
        "f[31] ? largest_q[31] & (f[30:0] < largest_q[30:0]) : largest_q[31] |",
        "(largest_q == 32'hff800000) |",
    ),
    Mutant(
        "positions that are not there count for softmax",
        "attention",
        "attention",
        "if (pass_q == SUM & beyond_q) b = 32'h0;",
        "",
    ),
    Mutant("a sum of two is lost", "attention", "attention", "|| clock_q == 5'd12", "|| clock_q == 5'd10"),
    Mutant(
        "probability of the row before",
        "attention",
        "attention",
        "state_q==ROW?position_q[POSITION_A-1:0] : step_q",
        "state_q==ROW?position_q[POSITION_A-1:0] - POSITION_A'(clock_q == 5'd0) : step_q",
    ),
    Mutant("high half of fp16 first", "attention", "attention", "kv_i[16*lane[0]+:16]", "kv_i[16*(1-lane[0])+:16]"),
    Mutant(
        "codes without a sign",
        "attention",
        "code_to_fp32",
        "f_o        = magnitude == 8'd0 ? 32'h0 : {code_i[7],",
        "f_o        = magnitude == 8'd0 ? 32'h0 : {1'b0,",
    ),
    Mutant(
        "last product of int8 goes elsewhere",
        "attention",
        "attention",
        "int_added ? at_q : int8_q ? mapped[DIM_A-1:0] : added_at",
        "~int8_q ? added_at : state_q == CONVERT ? mapped[DIM_A-1:0] : at_q",
    ),
    Mutant(
        "weights quantized without the last",
        "attention",
        "attention",
        ": last_position),",
        ": position_q + POSITIONS_W'(2) >= positions_q),",
    ),
    Mutant("sizes of another head", "attention", "attention", "= STEP_W'(dim_q);", "= STEP_W'(dim_i);"),
    Mutant("reset leaves a head at work", "attention", "attention", "if (!rst_ni) state_q <= IDLE;", ""),
    # The MSD split.
    Mutant("low digit without the 8", "msd", "msd_split", " ^ 4'b1000", ""),
    Mutant("digits weighed by 8", "msd", "msd_array", "(SUM_W'(h) <<< 4)", "(SUM_W'(h) <<< 3)"),
    Mutant(
        "eights of the tile that is loaded",
        "msd",
        "msd_array",
        "first_q[ROWS-1] ? next_q : at_work_q[c*W_SUM_W+:W_SUM_W]",
        "next_q",
    ),
    # Around the array: RoPE, residual sums, rows of the embedding, vectors, memory.
    Mutant(
        "rotation the other way", "token", "rope", "result[31] ^ (clock_q == 4'd6)", "result[31] ^ (clock_q == 4'd7)"
    ),
    Mutant("sums with cosine for sine", "token", "rope", "(clock_q == 4'd7) ? sin_q", "(clock_q == 4'd6) ? sin_q"),
    Mutant("reset keeps half a pair", "token", "rope", "      taken_q   <= '0;\n      results_q", "      results_q"),
    Mutant(
        "word lost while a result waits", "token", "rope", "if (give & (results_q == 2'd1)) begin", "if (give) begin"
    ),
    Mutant("results come again after a pause", "token", "rope", "(clock_q != 4'd14)", "(clock_q != 4'd13)"),
    Mutant("products of 0 without a sign", "token", "rope", "32'h80000000", "32'h0"),
    Mutant(
        "sum lost while it waits",
        "token",
        "residual_add",
        "assign ready_o = ready_i | ~valid_o;",
        "assign ready_o = 1'b1;",
    ),
    Mutant(
        "reset leaves sums on their way",
        "token",
        "residual_add",
        "if (!rst_ni) valid_q <= '0;\n    else if (ready_o)",
        "if (ready_o)",
    ),
    Mutant("numbers go on while a sum waits", "token", "residual_add", ".en_i(ready_o)", ".en_i(1'b1)"),
    Mutant(
        "number lost that is taken in a pause of the sums",
        "token",
        "residual_add",
        "{valid_q[4:0], valid_i}",
        "{valid_q[4:0], valid_i & ready_i}",
    ),
    Mutant(
        "adder stands still between numbers",
        "token",
        "residual_add",
        ".en_i(ready_o)",
        ".en_i(ready_o & (valid_i | valid_o))",
    ),
    Mutant("scale of the group behind", "token", "dequantizer", ".CLOCKS(CONVERT)", ".CLOCKS(CONVERT - 1)"),
    Mutant("codes of the embedding without sign", "token", "dequantizer", "word_q[7:0])", "{1'b0, word_q[6:0]})"),
    Mutant(
        "word taken before the last code is gone",
        "token",
        "dequantizer",
        "assign ready_o = codes_q == 3'd0;",
        "assign ready_o = codes_q <= 3'd1;",
    ),
    Mutant("codes go on while a number waits", "token", "dequantizer", "else if (en) word_q", "else word_q"),
    Mutant(
        "reset in a group is no new group",
        "token",
        "dequantizer",
        "      left_q  <= '0;\n      codes_q",
        "      codes_q",
    ),
    Mutant(
        "group four codes short",
        "token",
        "dequantizer",
        "left_q == '0 ? group_i :",
        "left_q == '0 ? group_i - COUNT_W'(4) :",
    ),
    Mutant("last code first", "token", "code_packer", "{code_i, word_q[31:8]}", "{word_q[23:0], code_i}"),
    Mutant(
        "end of a group seen by the code behind",
        "token",
        "code_packer",
        "~in_codes_q | ~last_q;",
        "~in_codes_q | ~last_i;",
    ),
    Mutant(
        "code taken while its scale waits",
        "token",
        "code_packer",
        "ready_o = in_codes_q & ~codes_q[2];",
        "ready_o = ~codes_q[2];",
    ),
    Mutant("scale before it is there", "token", "code_packer", "codes_q[2] : valid_i;", "codes_q[2] : 1'b1;"),
    Mutant(
        "reset in a group forgets the next scale",
        "token",
        "code_packer",
        "      in_codes_q <= 1'b0;\n      codes_q",
        "      codes_q",
    ),
    Mutant(
        "second vector is not repeated",
        "token",
        "vector_memory",
        "period_left_q == COUNT_W'(1) ? b_i : b_at_q + ADDRESS_W'(1)",
        "b_at_q + ADDRESS_W'(1)",
    ),
    Mutant(
        "first number of a pair moves while it waits",
        "token",
        "vector_memory",
        "if (advance & ~held_second_q)",
        "if (1'b1)",
    ),
    Mutant("reset leaves a stream", "token", "vector_memory", "      left_q        <= '0;\n", ""),
    Mutant(
        "number lost while it waits",
        "token",
        "vector_memory",
        "assign advance = ~valid_o | ready_i;",
        "assign advance = 1'b1;",
    ),
    Mutant(
        "no read while a number is written", "token", "vector_memory", "if (read) read_q", "if (read & ~write_i) read_q"
    ),
    Mutant("period goes on from the stream before", "token", "vector_memory", "      period_left_q <= period_i;\n", ""),
    Mutant(
        "first vector is repeated, too",
        "token",
        "vector_memory",
        "a_at_q <= a_at_q + ADDRESS_W'(1);",
        "a_at_q <= period_left_q == COUNT_W'(1) ? a_i : a_at_q + ADDRESS_W'(1);",
    ),
    Mutant("write address counts clocks", "token", "vector_memory", "else if (write_i) write_at_q", "else write_at_q"),
    Mutant(
        "beat taken while one waits",
        "token",
        "beat_to_words",
        "assign ready_o   = ~held_q | beat_ends;",
        "assign ready_o   = 1'b1;",
    ),
    Mutant("first beat from its first word", "token", "beat_to_words", "lane_q <= lane_i;", "lane_q <= '0;"),
    Mutant("words behind the last are given", "token", "beat_to_words", " & ~(give & last)", ""),
    Mutant(
        "last beat waits for all its words",
        "token",
        "beat_to_words",
        "give & (last | (lane_q == LANE_W'(LANES - 1)))",
        "give & (lane_q == LANE_W'(LANES - 1))",
    ),
    Mutant(
        "reset leaves words to come",
        "token",
        "beat_to_words",
        "    if (!rst_ni) begin\n      left_q <= '0;",
        "    if (!rst_ni) begin",
    ),
    Mutant("read crosses 4 KB", "token", "word_reader", " - {1'b0, at_q[BYTE_W+:BURST_W]}", ""),
    Mutant("read a beat short", "token", "word_reader", " + WORDS_W'(lane)", ""),
    Mutant(
        "request lost while one waits",
        "token",
        "word_reader",
        "(left_q != '0) & (~ar_valid_o | ar_ready_i)",
        "(left_q != '0)",
    ),
    Mutant(
        "read address without carry beyond 4 GB",
        "token",
        "word_reader",
        "at_q <= at_q + (ADDRESS_W - BYTE_W)'(beats);",
        "at_q[31:BYTE_W] <= at_q[31:BYTE_W] + (32 - BYTE_W)'(beats);",
    ),
    Mutant(
        "error counted while its beat waits",
        "token",
        "word_reader",
        "= r_valid_i & r_ready_o & r_error_i;",
        "= r_valid_i & r_error_i;",
    ),
    Mutant("reset leaves requests", "token", "word_reader", "      left_q     <= '0;\n", ""),
    Mutant(
        "write with strobes of the beat before",
        "token",
        "word_writer",
        "if (beat_taken) lanes_q <= '0;\n      else if",
        "if",
    ),
    Mutant("write does not wait for answers", "token", "word_writer", " | (due_q != '0)", ""),
    Mutant(
        "write address without carry beyond 4 GB",
        "token",
        "word_writer",
        "at_q <= at_q + (ADDRESS_W - BYTE_W)'(1);",
        "at_q[31:BYTE_W] <= at_q[31:BYTE_W] + (32 - BYTE_W)'(1);",
    ),
    Mutant(
        "word replaced while its beat waits", "token", "word_writer", " & ~aw_valid_o & ~w_valid_o;", " & ~aw_valid_o;"
    ),
    Mutant(
        "address and data must go at once",
        "token",
        "word_writer",
        "(~aw_valid_o | aw_ready_i) & (~w_valid_o | w_ready_i)",
        "(aw_valid_o & aw_ready_i) & (w_valid_o & w_ready_i)",
    ),
    Mutant(
        "last beat is written if it is full",
        "token",
        "word_writer",
        "((left_q == WORDS_W'(1)) | (lane_q == LANE_W'(LANES - 1)))",
        "(lane_q == LANE_W'(LANES - 1))",
    ),
    Mutant(
        "word taken behind the last",
        "token",
        "word_writer",
        "ready_o      = (left_q != '0) & ~aw",
        "ready_o      = ~aw",
    ),
    Mutant("error without an answer", "token", "word_writer", "= b_valid_i & b_error_i;", "= b_error_i;"),
    Mutant(
        "reset keeps strobes", "token", "word_writer", "      lanes_q    <= '0;\n      aw_valid_o", "      aw_valid_o"
    ),
    # The core through its ports.
    Mutant(
        "tile taken before it is whole",
        "core",
        "weight_loader",
        "assign tile_ready_o = tiles_q != 2'd0;",
        "assign tile_ready_o = fill_q != '0;",
    ),
    Mutant("buffer of weights overflows", "core", "weight_loader", "fill_q != FILL_W'(DEPTH)", "1'b1"),
    Mutant("scales overwritten", "core", "weight_loader", "banks_used_q != USED_W'(BANKS)", "1'b1"),
    Mutant(
        "scale of the bank before",
        "core",
        "weight_loader",
        "assign scale_bank_o  = bank_q;",
        "assign scale_bank_o  = bank_q + BANK_W'(1);",
    ),
    Mutant("beat of 4 bits taken at once", "core", "weight_loader", "has_room & last_slice", "has_room"),
    Mutant(
        "weights swapped a clock early",
        "core",
        "tile_sequencer",
        "active_o & loaded_q & ~in_pass_q",
        "active_o & (loaded_q | take_tile_o) & ~in_pass_q",
    ),
    Mutant(
        "next tile loaded into registers in use", "core", "tile_sequencer", "tile_ready_i & ~loaded_q", "tile_ready_i"
    ),
    Mutant(
        "results do not wait for room",
        "core",
        "tile_sequencer",
        "(result_room_i | ~(last_pass_o & last_group_o))",
        "1'b1",
    ),
    Mutant("first pass of a group adds to the last", "core", "column_edges", "(first_pass ? '0 : earlier)", "earlier"),
    Mutant(
        "first group adds to the row before", "core", "column_edges", "first_group_q ? 32'h0 : running_q", "running_q"
    ),
    Mutant(
        "sum of a pass a bit short",
        "core",
        "systolic_array",
        "= sum_down[ROWS*COLS+c];",
        "= SUM_W'($signed(sum_down[ROWS*COLS+c][SUM_W-2:0]));",
    ),
    Mutant(
        "sum of a group a bit short",
        "core",
        "column_edges",
        "wholes_q[{half, token}] <= total;",
        "wholes_q[{half, token}] <= TOTAL_W'($signed(total[SUM_W:0]));",
    ),
    Mutant("running sum read before it is written", "core", "column_edges", " & (early_q == 3'd0)", ""),
    Mutant("sums of a group do not wait for room", "core", "tile_sequencer", "(group_room_i | ~last_pass_o)", "1'b1"),
    Mutant(
        "sums in the half of the product before",
        "core",
        "column_edges",
        "whole & (waiting_q == 2'd0) ? last_scale_bank[0] : half_q ^ ends",
        "half_q ^ ends",
    ),
    Mutant(
        "x scale of the other half",
        "core",
        "column_edges",
        "x_scale_q <= x_scales_q[{half_q, token_q}];",
        "x_scale_q <= x_scales_q[{~half_q, token_q}];",
    ),
    Mutant(
        "x scale a token late",
        "core",
        "matmul_core",
        "assign scale_token     = issued_q[ROWS]",
        "assign scale_token     = issued_q[ROWS-1]",
    ),
    Mutant(
        "result changes while it waits",
        "core",
        "result_store",
        "    if (step) begin\n      m_data_o",
        "    if (filled_q != 2'd0) begin\n      m_data_o",
    ),
    Mutant(
        "last result marked too early",
        "core",
        "result_store",
        "m_last_o <= row_of_tiles_sent & is_last;",
        "m_last_o <= is_last;",
    ),
    Mutant(
        "reset forgets the sequencer",
        "core",
        "tile_sequencer",
        "active_o        <= rst_ni & start_i;",
        "active_o        <= start_i | (~rst_ni & active_o);",
    ),
    Mutant(
        "reset forgets a waiting result",
        "core",
        "result_store",
        "      m_valid_o      <= 1'b0;",
        "      m_valid_o      <= m_valid_o & ~m_ready_i;",
    ),
    Mutant("reset forgets sizes", "core", "axil_registers", "      passes_o        <= '0;\n", ""),
    Mutant("sizes change while a command runs", "core", "axil_registers", "if (write & ~status_i[0])", "if (write)"),
    Mutant(
        "sizes cut to 16 bits",
        "core",
        "axil_registers",
        "passes_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];",
        "passes_o <= wdata_i[COUNT_W-1:0];",
    ),
    Mutant("too many inputs accepted", "core", "matmul_axi", "(token_passes_q <= (2 * COUNT_W)'(MAX_PASSES))", "1'b1"),
    Mutant("too many tokens accepted", "core", "matmul_axi", "(tokens <= (TOKEN_W + 1)'(TOKENS))", "1'b1"),
    Mutant(
        "command while another runs",
        "core",
        "matmul_axi",
        "= ~busy & sizes_fit & (command == 4'd1);",
        "= sizes_fit & (command == 4'd1);",
    ),
    Mutant("activation taken while it waits", "core", "matmul_axi", "(coded | quantizer_ready)", "1'b1"),
    Mutant(
        "scale of the second code",
        "core",
        "matmul_axi",
        "if (code_valid) code_first_q <= code_last;",
        "if (code_valid) code_first_q <= ~code_last & ~code_first_q;",
    ),
    Mutant("scale read as codes", "core", "activation_reader", "in_codes_q <= ~group_is_last;", "in_codes_q <= 1'b1;"),
    Mutant(
        "codes of a word reversed", "core", "activation_store", ": longer[8*ROWS-1:0];", ": {word_q, codes_i[7:0]};"
    ),
    # What only the longest tokens show.
    Mutant(
        "sum of a long group two bits short",
        "core",
        "matmul_core",
        "localparam int TOTAL_W = $clog2(MAX_INPUTS * 128 * 128 + 1) + 1;",
        "localparam int TOTAL_W = $clog2(MAX_INPUTS * 128 * 128 + 1) - 1;",
    ),
    Mutant(
        "upper half of the inputs on top of the lower",
        "core",
        "activation_store",
        "if (word_whole) codes_q[{pass_q, token_q}]",
        "if (word_whole) codes_q[{1'b0, pass_q[PASS_W-2:0], token_q}]",
    ),
    Mutant(
        "upper half of the inputs read as the lower",
        "core",
        "activation_store",
        "codes_q[{pass_i, token_i}]",
        "codes_q[{1'b0, pass_i[PASS_W-2:0], token_i}]",
    ),
    Mutant(
        "scales of the upper half of the groups lost",
        "core",
        "activation_store",
        "scales_q[{group_i, scale_token_i}]",
        "scales_q[{1'b0, group_i[GROUP_W-2:0], scale_token_i}]",
    ),
    # The registers' channels.
    Mutant("answer to a write does not wait", "core", "axil_registers", "write | (bvalid_o & ~bready_i)", "write"),
    Mutant(
        "answer to a read does not wait",
        "core",
        "axil_registers",
        "(arvalid_i & arready_o) | (rvalid_o & ~rready_i)",
        "arvalid_i & arready_o",
    ),
    Mutant(
        "write without its data", "core", "axil_registers", "awvalid_i & wvalid_i & ~bvalid_o", "awvalid_i & ~bvalid_o"
    ),
    Mutant(
        "write without its address",
        "core",
        "axil_registers",
        "awvalid_i & wvalid_i & ~bvalid_o",
        "wvalid_i & ~bvalid_o",
    ),
    Mutant(
        "write while an answer waits",
        "core",
        "axil_registers",
        "awvalid_i & wvalid_i & ~bvalid_o",
        "awvalid_i & wvalid_i",
    ),
    Mutant(
        "read while an answer waits",
        "core",
        "axil_registers",
        "assign arready_o      = ~rvalid_o;",
        "assign arready_o      = 1'b1;",
    ),
    Mutant(
        "writes end with an error", "core", "matmul_axi", "assign s_axil_bresp = 2'b00;", "assign s_axil_bresp = 2'b10;"
    ),
    Mutant(
        "reads end with an error", "core", "matmul_axi", "assign s_axil_rresp = 2'b00;", "assign s_axil_rresp = 2'b10;"
    ),
    Mutant(
        "reset leaves an answer",
        "core",
        "axil_registers",
        "if (!rst_ni) rvalid_o <= 1'b0;\n    else rvalid_o",
        "rvalid_o",
    ),
    Mutant(
        "reset forgets done",
        "core",
        "matmul_axi",
        "      done_q    <= 1'b0;\n      refused_q <= 1'b0;\n      error_q",
        "      refused_q <= 1'b0;\n      error_q",
    ),
    Mutant("reset forgets refused", "core", "matmul_axi", "      refused_q <= 1'b0;\n      error_q", "      error_q"),
    Mutant(
        "reset forgets an error",
        "core",
        "matmul_axi",
        "      error_q   <= 1'b0;\n    end else begin",
        "    end else begin",
    ),
    # Registers.
    Mutant(
        "done stays when the next command begins",
        "core",
        "matmul_axi",
        "push_fits) begin\n        done_q    <= 1'b0;\n",
        "push_fits) begin\n",
    ),
    Mutant(
        "refused stays when the next command begins",
        "core",
        "matmul_axi",
        "        refused_q <= 1'b0;\n      end else begin",
        "      end else begin",
    ),
    Mutant(
        "done before the results are out",
        "core",
        "matmul_axi",
        "assign busy           = loading_q | core_active |",
        "assign busy           = loading_q | weights_active |",
    ),
    Mutant(
        "bytes of results kept wrong",
        "core",
        "matmul_axi",
        "reader_active ? COLS'(15) : '1",
        "reader_active ? COLS'(15) : COLS'(15)",
    ),
    Mutant("bytes of activations kept wrong", "core", "matmul_axi", "reader_active ? COLS'(15) : '1", "'1"),
    Mutant(
        "cycles of all commands",
        "core",
        "matmul_axi",
        "if (!rst_n || load_start || multiply_start || read_start) begin\n      cycles_q        <= '0;",
        "if (!rst_n) begin\n      cycles_q        <= '0;",
    ),
    Mutant("cycles without the last", "core", "matmul_axi", "if (busy) cycles_q", "if (busy & busy_q) cycles_q"),
    Mutant(
        "sum cycles until the results are out",
        "core",
        "matmul_axi",
        "if (sums_active) sum_cycles_q",
        "if (core_active) sum_cycles_q",
    ),
    Mutant(
        "results that wait counted without a wait",
        "core",
        "matmul_axi",
        "if (m_axis_tvalid & ~m_axis_tready) result_stalls_q",
        "if (m_axis_tvalid) result_stalls_q",
    ),
    Mutant(
        "weights that wait never counted",
        "core",
        "matmul_axi",
        "if (weights_active & w_valid & ~w_ready) weight_stalls_q",
        "if (weights_active & ~w_valid & ~w_ready) weight_stalls_q",
    ),
    Mutant(
        "weights that are behind the matrix awaited",
        "core",
        "matmul_axi",
        "if (weights_active & ~w_valid) weight_waits_q",
        "if (core_active & ~w_valid) weight_waits_q",
    ),
    Mutant(
        "rows and columns exchanged in SHAPE", "core", "matmul_axi", "12'(COLS), 12'(ROWS)}", "12'(ROWS), 12'(COLS)}"
    ),
    Mutant("half as many inputs in LIMITS", "core", "matmul_axi", "16'(MAX_INPUTS)})", "16'(MAX_INPUTS / 2)})"),
    Mutant("half as many tokens in SHAPE", "core", "matmul_axi", "({8'(TOKENS),", "({8'(TOKENS / 2),"),
    Mutant(
        "tokens cut to the bits they have",
        "core",
        "axil_registers",
        "|wdata_i[31:TOKEN_W+1] ? '1 : wdata_i[TOKEN_W:0]",
        "wdata_i[TOKEN_W:0]",
    ),
    Mutant(
        "rows of tiles cut to 16 bits",
        "core",
        "axil_registers",
        "rows_of_tiles_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];",
        "rows_of_tiles_o <= wdata_i[COUNT_W-1:0];",
    ),
    Mutant(
        "a static scale without its lowest bit",
        "core",
        "axil_registers",
        "scale_o <= wdata_i;",
        "scale_o <= {wdata_i[31:1], 1'b0};",
    ),
    Mutant("a static scale is not", "core", "matmul_axi", ".static_i      (fixed),", ".static_i      (1'b0),"),
    Mutant("a product without outputs begins", "core", "matmul_axi", " & (rows_of_tiles != '0);", ";"),
    Mutant(
        "two commands at once",
        "core",
        "matmul_axi",
        "assign read_start     = ~busy & sizes_fit & (command == 4'd4);",
        "assign read_start     = ~busy & sizes_fit & command[2];",
    ),
    Mutant(
        "stop leaves the core as it is",
        "core",
        "matmul_axi",
        "assign rst_n = aresetn & ~command[3];",
        "assign rst_n = aresetn;",
    ),
    Mutant("interrupt without leave", "core", "matmul_axi", "done_q & interrupts;", "done_q;"),
    Mutant(
        "interrupt while the command runs",
        "core",
        "matmul_axi",
        "= done_q & interrupts;",
        "= (done_q | busy) & interrupts;",
    ),
    Mutant("leave to interrupt outlives a reset", "core", "axil_registers", "      interrupt_o     <= 1'b0;\n", ""),
    # Streams.
    Mutant("activations behind the last one taken", "core", "matmul_axi", "loading_q & ~all_taken_q &", "loading_q &"),
    Mutant(
        "activations taken while nothing loads",
        "core",
        "matmul_axi",
        "s_axis_x_tready = loading_q & ~all_taken_q",
        "s_axis_x_tready = ~all_taken_q",
    ),
    Mutant(
        "load ends before its last codes", "core", "activation_store", "codes_full_q & scales_full_q;", "scales_full_q;"
    ),
    Mutant(
        "end of a token marked as that of all",
        "core",
        "activation_reader",
        "last_o     <= all_sent;",
        "last_o     <= token_is_last;",
    ),
    Mutant("activation does not wait", "core", "activation_reader", "step | (valid_o & ~ready_i)", "step"),
    Mutant(
        "zero points of the first group",
        "core",
        "weight_loader",
        "always_ff @(posedge clk_i) if (zeros_write)",
        "always_ff @(posedge clk_i) if (zeros_write & (group_q == '0))",
    ),
    Mutant("two levels taken for one", "core", "weight_loader", ".two_level_i(format_i == 2'd3)", ".two_level_i(1'b0)"),
    Mutant(
        "groups of scales in the bank of the first",
        "core",
        "weight_loader",
        "bank_q     <= bank_q + BANK_W'(1);",
        "bank_q     <= BANK_W'(0);",
    ),
    Mutant(
        "results of the other half of the columns",
        "core",
        "column_edges",
        "assign result_column_o = scaled_tag[TOKEN_W+:COLUMN_W];",
        "assign result_column_o = ~scaled_tag[TOKEN_W+:COLUMN_W];",
    ),
    # The queue and the master.
    Mutant(
        "bursts of full length from any address",
        "core",
        "weight_fetcher",
        "- {1'b0, at_q[BYTE_W+:BURST_W]};",
        "- (BURST_W + 1)'(at_q[BYTE_W]);",
    ),
    Mutant("burst a beat too long", "core", "weight_fetcher", "8'(beats) - 8'd1", "8'(beats)"),
    Mutant("address changes while it waits", "core", "weight_fetcher", "(~ar_valid_o | ar_ready_i) &", "1'b1 &"),
    Mutant(
        "more bursts than the buffer has room for", "core", "weight_fetcher", "FILL_W'(BEATS - BURST)", "FILL_W'(BEATS)"
    ),
    Mutant("more bursts than may wait", "core", "weight_fetcher", "(bursts_q != BURSTS_W'(OUTSTANDING)) &", ""),
    Mutant(
        "beats of a matrix without its zero points",
        "core",
        "weight_fetcher",
        "(format == 2'd0 ? ROW_W'(4) : ROW_W'(5))",
        "ROW_W'(4)",
    ),
    Mutant(
        "codes of 2 bits read as codes of 4",
        "core",
        "weight_fetcher",
        "(format == 2'd0 ? 0 : format == 2'd1 ? 1 : 2)",
        "(format == 2'd0 ? 0 : 1)",
    ),
    Mutant("matrix of the entry before", "core", "weight_fetcher", "if (step_q == 2'd0) at_q", "if (read_entry) at_q"),
    Mutant(
        "first entry is never taken off",
        "core",
        "weight_fetcher",
        "if (end_i) first_q <= first_q + QUEUE_W'(1);",
        "if (end_i) first_q <= first_q;",
    ),
    Mutant(
        "stop leaves beats that still come", "core", "weight_fetcher", "(stop_i | drains_o) & (due_q != '0)", "1'b0"
    ),
    Mutant(
        "stop takes an address back",
        "core",
        "weight_fetcher",
        "ask | (ar_valid_o & ~ar_ready_i);",
        "ask | (ar_valid_o & ~ar_ready_i & ~stop_i);",
    ),
    Mutant("beat of the buffer changes while it waits", "core", "weight_fetcher", "(~valid_o | ready_i);", "1'b1;"),
    Mutant("an error of memory is not one", "core", "weight_fetcher", "taken & r_error_i & ~drains_o", "1'b0"),
    Mutant(
        "error is forgotten at the next beat",
        "core",
        "matmul_axi",
        "(error_q & ~(load_start | command_multiplies | read_start))",
        "1'b0",
    ),
    Mutant(
        "a command while the queue has products",
        "core",
        "matmul_axi",
        "reader_active | queue_waits | queue_drains;",
        "reader_active | queue_drains;",
    ),
    Mutant(
        "done while beats still come", "core", "matmul_axi", "busy_q    <= busy & ~queue_drains;", "busy_q    <= busy;"
    ),
    Mutant("a matrix from any byte", "core", "matmul_axi", "(fetch_address[$clog2(COLS)-1:0] == '0) & ", ""),
    Mutant(
        "the upper bits of an address dropped",
        "core",
        "matmul_axi",
        " & ((fetch_address >> FETCH_ADDRESS_W) == '0);",
        ";",
    ),
    Mutant("the queue overflows", "core", "matmul_axi", " & (queue_room != '0) &", " &"),
    Mutant("a product of the queue without outputs", "core", "matmul_axi", " & (push_sizes[COUNT_W-1:0] != '0)", ""),
    Mutant(
        "format of the registers instead of the entry's",
        "core",
        "matmul_axi",
        "= queue_waits ? queue_format : format;",
        "= format;",
    ),
    # The chip around its units.
    Mutant("position for id", "chip", "step_sequencer", "2'd2:    index = position_i;", "2'd2:    index = token_i;"),
    Mutant(
        "attention without its own position",
        "chip",
        "step_sequencer",
        "index = position_i + INDEX_W'(1);",
        "index = position_i;",
    ),
    Mutant("every other step", "chip", "step_sequencer", "at_q + ADDRESS_W'(32)", "at_q + ADDRESS_W'(64)"),
    Mutant("step ends before memory answers", "chip", "chip_axi", "~writer_active & ~queue_waits", "~queue_waits"),
    Mutant("step ends before the product", "chip", "chip_axi", "(out_left_q == '0) & ", ""),
    Mutant("values from where keys are", "chip", "chip_axi", "values_start ? second_address : address", "address"),
    Mutant("rotation not from head to head", "chip", "chip_axi", ".period_i     (group)", ".period_i     (n)"),
    Mutant("result over its input", "chip", "chip_axi", ".write_at_i   (vector_out)", ".write_at_i   (vector_a)"),
    Mutant(
        "codes behind those before",
        "chip",
        "chip_axi",
        ".clear_i         (step_begins & quantizes)",
        ".clear_i         (start)",
    ),
    Mutant(
        "scale for the first group alone", "chip", "chip_axi", "code_first_q <= code_last;", "code_first_q <= 1'b0;"
    ),
]


def mistaken(mutant: Mutant) -> str:
    """The source with the mistake. Raises ValueError if a place of it is not there once."""
    text = (RTL / f"{mutant.module}.sv").read_text()
    edits = [(mutant.old, mutant.new)] if isinstance(mutant.old, str) else zip(mutant.old, mutant.new, strict=True)
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: {text.count(old)} places in {mutant.module}.sv, expected 1: {old}")
        text = text.replace(old, new)
    return text


def plant(mutant: Mutant) -> Path:
    """A copy of the RTL with the mistake."""
    folder = OUT / re.sub(r"[^a-z0-9]+", "-", mutant.name.lower()).strip("-")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(RTL, folder / "rtl")
    (folder / "rtl" / f"{mutant.module}.sv").write_text(mistaken(mutant))
    return folder


def unchanged(module: str) -> list[str]:
    """Models that do without a module, and the large ones."""
    folders = (BUILT / "models").iterdir()
    return [f.name for f in folders if f.name in LARGE or f"/{module}.sv" not in (f / "sources.d").read_text()]


def outcome(mutant: Mutant) -> tuple[str, str]:
    """What the test says: "found", and the test cases that fail; "passes"; or "fails", and what happened."""
    folder = plant(mutant)
    programs = [folder / program for program in PROGRAMS.get(mutant.test, [f"{mutant.test}_test"])]
    variables = {
        "RTL": folder / "rtl",
        "HW": folder,
        "HW_OBJECTS": BUILT,
        "HW_SAME": " ".join(unchanged(mutant.module)),
        "HW_VERILATOR": "-Wno-fatal -Wno-lint",
        "RTL_OPT": "-O1",
    }
    build = ["make", "-s", *(f"{name}={value}" for name, value in variables.items()), *map(str, programs)]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    if made.returncode:
        return "fails", "does not compile:\n" + made.stdout + made.stderr
    commands = [[str(program), "--no-colors=1", "--abort-after=1"] for program in programs]
    if mutant.test == "chip":
        story = ["-m", "hw.chip_story", "--hw", str(folder), "--array", "4x4", "--ids", "1", "--models", "q8"]
        commands = [[sys.executable, *story]]
    said = ""
    for command in commands:
        # Seconds of processor time: the wall's depend on what else runs.
        limited = ["sh", "-c", 'ulimit -t 60 && exec "$@"', "sh", *command]
        environment = {**os.environ, "HW_PAIRS": "100000"}
        ran = subprocess.run(limited, capture_output=True, text=True, check=False, env=environment)
        said += ran.stdout + ran.stderr
        if mutant.test == "chip":
            found = [line.strip()[:110] for line in said.splitlines() if re.search("NOT|outside|q8: ", line)][-1:]
        else:
            found = re.findall(r"^TEST CASE:  (.*)\n(?:(?!^=====)[\s\S])*?ERROR", ran.stdout, re.MULTILINE)
        if found and ran.returncode > 0 and "CRASHED" not in ran.stdout:
            shutil.rmtree(folder)
            return "found", "; ".join(found)
        if ran.returncode:
            return "fails", f"{ran.returncode}:\n" + said[-2000:]
    shutil.rmtree(folder)
    return "passes", ""


def kept() -> tuple[Path, list[str]]:
    """A file for the names of mistakes found in the sources as they are, and those that it has."""
    sources = sorted(path for kind in ("*.sv", "*.cpp", "*.h", "*.py") for path in Path("hw").rglob(kind))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    file = OUT / "found" / digest
    return file, file.read_text().splitlines() if file.exists() else []


def main(names: list[str]) -> int:
    """Plants the mistakes of these names, or all; the exit code is 1 if one is not found."""
    if unknown := set(names) - {m.name for m in MUTANTS}:
        sys.exit(f"no mistake is called {', '.join(sorted(unknown))}")
    for mutant in MUTANTS:
        mistaken(mutant)
    file, before = kept()
    chosen = [m for m in MUTANTS if (m.name in names if names else m.name not in before)]
    if not names:
        print(f"{len(MUTANTS) - len(chosen)} were found before in the same sources: {file}")
    tests = dict.fromkeys(m.test for m in chosen)
    same = [Mutant(f"none, {test}", test, "step_sequencer", "endmodule", "endmodule") for test in tests]
    file.parent.mkdir(parents=True, exist_ok=True)
    missing = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for mutant, (what, how) in zip(same, pool.map(outcome, same), strict=True):
            if what != "passes":
                sys.exit(f"{mutant.test} without a mistake: {what} {how}")
        for mutant, (what, how) in zip(chosen, pool.map(outcome, chosen), strict=True):
            print(
                f"{what if what == 'found' else 'NOT FOUND'}  {mutant.module:<15} {mutant.name:<50} {how}", flush=True
            )
            missing += what != "found"
            if what == "found":
                with file.open("a") as to:
                    to.write(mutant.name + "\n")
    print(f"{len(chosen) - missing} of {len(chosen)} planted mistakes were found")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
