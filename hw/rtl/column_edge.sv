// What is below a column of cells: adds up the passes of a group as integers, scales the sum of the group, and adds it
// to the running sum of its token in fp32 (group_scaler.sv). W8A8 is one group as long as a row.
//
// What a sum is comes with it as control_i, and goes on to the column at the right, whose sum is a clock later:
//
//   {valid, token, first_pass, last_pass, first_group, last_group, final_token, result_bank, scale_bank, x_scale}
//
// Latency: 11 clocks from the last sum of a token to its result. Throughput: a sum a clock; a token may come again in
// the next clock, and with its next group six clocks later (group_scaler.sv). Handshake: none, a sum never waits.

module column_edge #(
    parameter int TOKENS  = 16,  // the most of a product, a power of two
    parameter int SUM_W   = 19,  // bits of the sum of a pass
    parameter int TOTAL_W = 29,  // bits of the sum of a group
    parameter int BANKS   = 4,   // groups whose scales are kept, a power of two
    localparam int TOKEN_W = $clog2(TOKENS),
    localparam int BANK_W = $clog2(BANKS),
    localparam int CONTROL_W = 1 + TOKEN_W + 6 + BANK_W + 32
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic [CONTROL_W-1:0]    control_i,
    output logic [CONTROL_W-1:0]    control_o,
    input  logic signed [SUM_W-1:0] sum_i,
    // The scale of the weights of a group.
    input  logic                    scale_write_i,
    input  logic [BANK_W-1:0]       scale_bank_i,
    input  logic [31:0]             scale_i,
    // A product of a token with this output, in fp32.
    output logic                    result_valid_o,
    output logic                    result_bank_o,
    output logic [TOKEN_W-1:0]      result_token_o,
    output logic                    result_final_o,  // it is the last token's
    output logic [31:0]             result_o
);

  logic               valid, first_pass, last_pass, first_group, last_group, final_token, result_bank;
  logic [TOKEN_W-1:0] token;
  logic [BANK_W-1:0]  scale_bank;
  logic [31:0]        x_scale;
  assign {valid, token, first_pass, last_pass, first_group, last_group, final_token, result_bank, scale_bank, x_scale} =
      control_i;

  always_ff @(posedge clk_i) begin
    control_o <= control_i;
    if (!rst_ni) control_o[CONTROL_W-1] <= 1'b0;
  end

  // ---- the sum of a group ----
  logic signed [TOTAL_W-1:0] totals_q[TOKENS];
  logic signed [TOTAL_W-1:0] earlier, total, total_q;
  assign earlier = totals_q[token];
  assign total   = TOTAL_W'(sum_i) + (first_pass ? '0 : earlier);
  always_ff @(posedge clk_i) if (valid) totals_q[token] <= total;

  // ---- its scales ----
  localparam int TAG_W = TOKEN_W + 4;
  logic [31:0]       scales_q[BANKS];
  logic              whole_q;  // total_q is the sum of a group
  logic [31:0]       w_scale_q, x_scale_q;
  logic [TAG_W-1:0]  tag_q;
  always_ff @(posedge clk_i) begin
    if (scale_write_i) scales_q[scale_bank_i] <= scale_i;
    total_q   <= total;
    w_scale_q <= scales_q[scale_bank];
    x_scale_q <= x_scale;
    tag_q     <= {first_group, last_group, final_token, result_bank, token};
    whole_q   <= rst_ni & valid & last_pass;
  end

  logic              scaled, first_group_q, unused_read;
  logic [TAG_W-1:0]  read_tag, scaled_tag;
  logic [31:0]       running_q, scaled_sum;
  group_scaler #(
      .ACC_W(TOTAL_W),
      .TAG_W(TAG_W)
  ) u_group_scaler (
      .clk_i,
      .rst_ni,
      .en_i      (1'b1),
      .valid_i   (whole_q),
      .acc_i     (total_q),
      .w_scale_i (w_scale_q),
      .x_scale_i (x_scale_q),
      .tag_i     (tag_q),
      .read_o    (unused_read),
      .read_tag_o(read_tag),
      .sum_i     (first_group_q ? 32'h0 : running_q),
      .valid_o   (scaled),
      .tag_o     (scaled_tag),
      .sum_o     (scaled_sum)
  );

  // ---- the running sums ----
  logic [31:0] running_sums_q[TOKENS];
  always_ff @(posedge clk_i) begin
    if (scaled) running_sums_q[scaled_tag[TOKEN_W-1:0]] <= scaled_sum;
    running_q     <= running_sums_q[read_tag[TOKEN_W-1:0]];
    first_group_q <= read_tag[TAG_W-1];
  end

  assign result_valid_o = scaled & scaled_tag[TOKEN_W+2];
  assign result_final_o = scaled_tag[TOKEN_W+1];
  assign result_bank_o  = scaled_tag[TOKEN_W];
  assign result_token_o = scaled_tag[TOKEN_W-1:0];
  assign result_o       = scaled_sum;

endmodule
