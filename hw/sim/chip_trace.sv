// What a trace takes from inside chip_axi.sv, in simulation: bound to the modules that have it, it calls hw/sim/chip_run.cpp.

module chip_trace (
    input logic        clk_i,
    input logic        begins_i,        // a step
    input logic        ends_i,
    input logic        result_valid_i,  // a number of its result
    input logic [31:0] result_i,
    input logic        code_valid_i,
    input logic [7:0]  code_i,
    input logic        scale_valid_i,
    input logic [31:0] scale_i,
    // Of attention.
    input logic        score_valid_i,
    input logic        prob_valid_i,
    input logic        weight_valid_i,
    input logic [31:0] attention_i,
    input logic        attention_code_valid_i,
    input logic [7:0]  attention_code_i,
    input logic [31:0] attention_scale_i
);
  import "DPI-C" function void trace_step(input int begins);
  import "DPI-C" function void trace_word(input int kind, input int word);
  always @(posedge clk_i) begin
    if (ends_i) trace_step(0);
    if (begins_i) trace_step(1);
    if (result_valid_i) trace_word(0, result_i);
    if (code_valid_i) trace_word(1, 32'(code_i));
    if (scale_valid_i) trace_word(2, scale_i);
    if (score_valid_i) trace_word(3, attention_i);
    if (prob_valid_i) trace_word(4, attention_i);
    if (weight_valid_i) trace_word(5, attention_i);
    if (attention_code_valid_i) begin
      trace_word(6, 32'(attention_code_i));
      trace_word(7, attention_scale_i);
    end
  end
endmodule

// The integer sum of a group and an output, as a scaler takes it.
module sum_trace #(
    parameter int SUM_W = 32
) (
    input logic                    clk_i,
    input logic                    valid_i,
    input logic signed [SUM_W-1:0] sum_i
);
  import "DPI-C" context function void trace_sum(input int sum);
  always @(posedge clk_i) if (valid_i) trace_sum(32'(sum_i));
endmodule

bind chip_axi chip_trace u_trace (
    .clk_i                 (aclk),
    .begins_i              (step_begins),
    .ends_i                (step_ends & u_sequencer.runs & ~step_begins),
    .result_valid_i        (vector_write | (product_valid & multiplies & to_memory & write_ready)),
    .result_i              (multiplies ? product_word : vector_data),
    .code_valid_i          (code_valid & code_ready),
    .code_i                (code),
    .scale_valid_i         (code_valid & code_ready & code_first_q),
    .scale_i               (code_scale),
    .score_valid_i         (score_valid),
    .prob_valid_i          (prob_valid),
    .weight_valid_i        (weight_valid),
    .attention_i           (attention_step),
    .attention_code_valid_i(attention_code_valid),
    .attention_code_i      (attention_code),
    .attention_scale_i     (attention_scale)
);
bind column_edges sum_trace #(
    .SUM_W(TOTAL_W)
) u_trace (
    .clk_i  (clk_i),
    .valid_i(scale_q),
    .sum_i  (sum_q)
);
