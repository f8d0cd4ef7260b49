// What is below SHARE neighbouring columns of cells: each adds up the passes of a group as integers, for each token, and
// one scaler (group_scaler.sv) takes the sums of the groups in turn, scales them, and adds them to the running sums in
// fp32. W8A8 is one group as long as a row.
//
// A column has a sum to scale in one of the passes of a group, so that as many columns as a group has passes keep one
// scaler busy. Sums of two groups are kept: one that is written, one that is scaled.
//
// What a sum is comes with it as control_i, and goes on to the next column, whose sum is a clock later:
//
//   {valid, token, first_pass, last_pass, first_group, last_group, final_token, result_bank, scale_bank, x_scale}
//
// Latency: scaling of a group begins 3 clocks after the last token's sum in the last column, takes a clock for each token
// and column, and a result comes out 12 clocks behind its turn. Throughput: a sum a clock and column, a result a clock.
// Handshake: none, a sum never waits. The caller lets no more than two groups be on their way, from their last pass to
// scaled_o. A running sum needs 8 clocks from one group to the next (group_scaler.sv): turns of groups begin that far apart,
// which makes those of few tokens and columns longer.

module column_edges #(
    parameter int SHARE   = 4,   // columns
    parameter int TOKENS  = 16,  // the most of a product, a power of two
    parameter int SUM_W   = 19,  // bits of the sum of a pass
    parameter int TOTAL_W = 29,  // bits of the sum of a group
    parameter int BANKS   = 4,   // groups whose scales are kept, a power of two
    localparam int TOKEN_W = $clog2(TOKENS),
    localparam int COLUMN_W = SHARE > 1 ? $clog2(SHARE) : 1,
    localparam int BANK_W = $clog2(BANKS),
    localparam int CONTROL_W = 1 + TOKEN_W + 6 + BANK_W + 32
) (
    input  logic                   clk_i,
    input  logic                   rst_ni,
    input  logic [TOKEN_W-1:0]     last_token_i,    // the number of tokens - 1
    input  logic [CONTROL_W-1:0]   control_i,       // of the first column
    output logic [CONTROL_W-1:0]   control_o,       // of the column behind the last one
    input  logic [SHARE*SUM_W-1:0] sum_i,
    // The weights' scales of a group, one for each column whose bit is 1.
    input  logic [SHARE-1:0]       scale_write_i,
    input  logic [BANK_W-1:0]      scale_bank_i,
    input  logic [SHARE*32-1:0]    scale_i,
    output logic                   scaled_o,        // a group's sums and scales are not needed any more
    // A product of a token with the output of a column, in fp32.
    output logic                   result_valid_o,
    output logic [COLUMN_W-1:0]    result_column_o,
    output logic                   result_bank_o,
    output logic [TOKEN_W-1:0]     result_token_o,
    output logic                   result_final_o,  // of the last token in the last column
    output logic [31:0]            result_o
);

  // ---- sums of groups: bit 0 of scale_bank says in which half they are ----
  logic [CONTROL_W-1:0]   control[SHARE+1];
  logic [SHARE*TOTAL_W-1:0] sums;     // that the scaler's turn names
  logic [SHARE*32-1:0]      w_scales;
  logic                     turn_half;
  logic [TOKEN_W-1:0]       turn_token;
  logic [BANK_W-1:0]        turn_scale_bank;
  assign control[0] = control_i;
  for (genvar c = 0; c < SHARE; c++) begin : gen_column
    logic                      valid, first_pass, last_pass;
    logic [TOKEN_W-1:0]        token;
    logic                      half;
    logic signed [TOTAL_W-1:0] earlier, total;
    assign {valid, token, first_pass, last_pass} = control[c][CONTROL_W-1-:TOKEN_W+3];
    assign half = control[c][32];

    logic signed [TOTAL_W-1:0] totals_q[TOKENS], wholes_q[2*TOKENS];
    logic signed [SUM_W-1:0]   sum;
    assign sum     = sum_i[c*SUM_W+:SUM_W];
    assign earlier = totals_q[token];
    assign total   = TOTAL_W'(sum) + (first_pass ? '0 : earlier);
    always_ff @(posedge clk_i) begin
      if (valid) totals_q[token] <= total;
      if (valid & last_pass) wholes_q[{half, token}] <= total;
    end
    assign sums[c*TOTAL_W+:TOTAL_W] = wholes_q[{turn_half, turn_token}];

    logic [31:0] w_scales_q[BANKS];
    always_ff @(posedge clk_i) if (scale_write_i[c]) w_scales_q[scale_bank_i] <= scale_i[32*c+:32];
    assign w_scales[32*c+:32] = w_scales_q[turn_scale_bank];

    logic [CONTROL_W-1:0] control_q;
    always_ff @(posedge clk_i) begin
      control_q <= control[c];
      if (!rst_ni) control_q[CONTROL_W-1] <= 1'b0;
    end
    assign control[c+1] = control_q;
  end
  assign control_o = control[SHARE];

  // What goes with a group and a token: scales of activations come with the first column.
  logic               first_valid, first_last_pass;
  logic [TOKEN_W-1:0] first_token;
  logic [31:0]        x_scales_q[2*TOKENS];
  assign first_valid     = control_i[CONTROL_W-1];
  assign first_token     = control_i[CONTROL_W-2-:TOKEN_W];
  assign first_last_pass = control_i[BANK_W+32+4];
  always_ff @(posedge clk_i) if (first_valid & first_last_pass) x_scales_q[{control_i[32], first_token}] <= control_i[31:0];

  // ---- turns: a group whose last sum the last column has had ----
  logic              last_valid, last_last_pass, last_first_group, last_last_group, last_final, last_result_bank;
  logic [BANK_W-1:0] last_scale_bank;
  assign last_valid       = control_o[CONTROL_W-1];
  assign last_last_pass   = control_o[BANK_W+32+4];
  assign last_first_group = control_o[BANK_W+32+3];
  assign last_last_group  = control_o[BANK_W+32+2];
  assign last_final       = control_o[BANK_W+32+1];
  assign last_result_bank = control_o[BANK_W+32];
  assign last_scale_bank  = control_o[32+:BANK_W];

  // {first_group, last_group, result_bank, scale_bank} of both halves; how many wait, or are scaled.
  localparam int INFO_W = 3 + BANK_W;
  logic [INFO_W-1:0]   info_0_q, info_1_q, info;
  logic [1:0]          waiting_q;
  logic [2:0]          early_q;  // clocks until the running sums of the group before can be read
  logic                busy_q, half_q, begins, ends, whole;
  logic [TOKEN_W-1:0]  token_q;
  logic [COLUMN_W-1:0] column_q;
  assign whole           = last_valid & last_last_pass & last_final;
  assign begins          = ~busy_q & (waiting_q != 2'd0) & (early_q == 3'd0);
  assign ends            = busy_q & (column_q == COLUMN_W'(SHARE - 1)) & (token_q == last_token_i);
  assign info            = half_q ? info_1_q : info_0_q;
  assign turn_half       = half_q;
  assign turn_token      = token_q;
  assign turn_scale_bank = info[BANK_W-1:0];
  assign scaled_o        = ends;
  always_ff @(posedge clk_i) begin
    if (whole & ~last_scale_bank[0]) info_0_q <= {last_first_group, last_last_group, last_result_bank, last_scale_bank};
    if (whole & last_scale_bank[0]) info_1_q <= {last_first_group, last_last_group, last_result_bank, last_scale_bank};
    if (!rst_ni) begin
      waiting_q <= '0;
      early_q   <= '0;
      busy_q    <= 1'b0;
      half_q    <= 1'b0;
    end else begin
      waiting_q <= waiting_q + 2'(whole) - 2'(ends);
      early_q   <= begins ? 3'd7 : early_q - 3'(early_q != 3'd0);
      busy_q    <= begins | (busy_q & ~ends);
      half_q    <= whole & (waiting_q == 2'd0) ? last_scale_bank[0] : half_q ^ ends;
    end
    if (begins) begin
      token_q  <= '0;
      column_q <= '0;
    end else if (busy_q) begin
      column_q <= column_q == COLUMN_W'(SHARE - 1) ? '0 : column_q + COLUMN_W'(1);
      if (column_q == COLUMN_W'(SHARE - 1)) token_q <= token_q + TOKEN_W'(1);
    end
  end

  // ---- the scaler ----
  localparam int TAG_W = 4 + COLUMN_W + TOKEN_W;
  logic                      scale_q;
  logic signed [TOTAL_W-1:0] sum_q;
  logic [31:0]               w_scale_q, x_scale_q;
  logic [TAG_W-1:0]          tag_q;
  always_ff @(posedge clk_i) begin
    scale_q   <= rst_ni & busy_q;
    sum_q     <= sums[column_q*TOTAL_W+:TOTAL_W];
    w_scale_q <= w_scales[column_q*32+:32];
    x_scale_q <= x_scales_q[{half_q, token_q}];
    tag_q     <= {info[INFO_W-1-:3], ends, column_q, token_q};
  end

  logic             scaled, first_group_q, unused_read;
  logic [TAG_W-1:0] read_tag, scaled_tag;
  logic [31:0]      running_q, scaled_sum;
  group_scaler #(
      .ACC_W(TOTAL_W),
      .TAG_W(TAG_W)
  ) u_group_scaler (
      .clk_i,
      .rst_ni,
      .en_i      (1'b1),
      .valid_i   (scale_q),
      .acc_i     (sum_q),
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
  logic [31:0] running_sums_q[(1<<COLUMN_W)*TOKENS];
  always_ff @(posedge clk_i) begin
    if (scaled) running_sums_q[scaled_tag[COLUMN_W+TOKEN_W-1:0]] <= scaled_sum;
    running_q     <= running_sums_q[read_tag[COLUMN_W+TOKEN_W-1:0]];
    first_group_q <= read_tag[TAG_W-1];
  end

  assign result_valid_o  = scaled & scaled_tag[TAG_W-2];
  assign result_bank_o   = scaled_tag[TAG_W-3];
  assign result_final_o  = scaled_tag[TAG_W-4];
  assign result_column_o = scaled_tag[TOKEN_W+:COLUMN_W];
  assign result_token_o  = scaled_tag[TOKEN_W-1:0];
  assign result_o        = scaled_sum;

endmodule
