// A8W4 on multipliers of 4 by 4 bits: two arrays hold the same int4 weights, one gets the high digits of the activations,
// the other the low ones (msd_split).
//
//   sum(x w) = 16 sum(high w) + sum(low w) + 8 sum(w)
//
// With ADD_EIGHTS the last term is added here, from a sum of the weights that each column takes while they are loaded, and
// sums are those of an array of int8 by int4. Without, it is left out, as in dot_by_digits of runq_moe.cpp, where the
// file's assist matrix has it, in fp32.
//
// Ports, clocks, reset and the caller's rules are those of systolic_array, but that sums come a clock later, in clock
// S + ROWS + 1 + c, and that with ADD_EIGHTS every tile's rows are loaded in order, all of them.
//
// SUM_W has room for ROWS products of the extremes: docs/hardware.md, "Bits".

module msd_array #(
    parameter int ROWS       = 16,
    parameter int COLS       = 16,
    parameter bit ADD_EIGHTS = 1'b1,
    localparam int X_MAX = ADD_EIGHTS ? 128 : 136,  // 16 * -8 - 8 is -136
    localparam int W_MAX = 8,
    localparam int SUM_W = $clog2(ROWS * X_MAX * W_MAX + 1) + 1,
    localparam int ROW_W = $clog2(ROWS)
) (
    input  logic                  clk_i,
    input  logic                  rst_ni,
    input  logic                  en_i,
    input  logic                  w_valid_i,
    input  logic [ROW_W-1:0]      w_row_i,
    input  logic [COLS*4-1:0]     w_i,
    input  logic                  x_valid_i,
    input  logic                  x_first_i,
    input  logic [ROWS*8-1:0]     x_i,
    output logic [COLS-1:0]       sum_valid_o,
    output logic [COLS*SUM_W-1:0] sum_o
);

  localparam int DIGIT_SUM_W = $clog2(ROWS * 64 + 1) + 1;
  localparam int W_SUM_W     = $clog2(ROWS * W_MAX + 1) + 1;

  logic [ROWS*4-1:0] high, low;
  msd_split #(
      .LANES(ROWS)
  ) u_split (
      .x_i,
      .high_o(high),
      .low_o (low)
  );

  logic [COLS-1:0]             valid;
  logic [COLS*DIGIT_SUM_W-1:0] high_sum, low_sum;
  systolic_array #(
      .ROWS (ROWS),
      .COLS (COLS),
      .X_W  (4),
      .W_W  (4),
      .X_MAX(8),
      .W_MAX(8)
  ) u_high (
      .clk_i,
      .rst_ni,
      .en_i,
      .w_valid_i,
      .w_row_i,
      .w_i,
      .x_valid_i,
      .x_first_i,
      .x_i        (high),
      .sum_valid_o(valid),
      .sum_o      (high_sum)
  );
  // Its sums are valid when those of the first are.
  logic [COLS-1:0] unused_valid;
  systolic_array #(
      .ROWS (ROWS),
      .COLS (COLS),
      .X_W  (4),
      .W_W  (4),
      .X_MAX(8),
      .W_MAX(8)
  ) u_low (
      .clk_i,
      .rst_ni,
      .en_i,
      .w_valid_i,
      .w_row_i,
      .w_i,
      .x_valid_i,
      .x_first_i,
      .x_i        (low),
      .sum_valid_o(unused_valid),
      .sum_o      (low_sum)
  );

  // 8 sum(w) of the tile whose sum leaves a column. Sums of weights are taken at the upper edge, all columns at once, and
  // kept in two registers, as the weights are: the next one is complete when the last row has come, and is taken over
  // when the tile's first sum leaves column 0. From there it goes right with the diagonal.
  logic [COLS*W_SUM_W-1:0] w_sum;
  if (ADD_EIGHTS) begin : gen_eights
    // Set when a tile's first token has come, ROWS clocks before its sum.
    logic [ROWS-1:0] first_q;
    always_ff @(posedge clk_i) begin
      if (!rst_ni) first_q <= '0;
      else if (en_i) first_q <= ROWS'({first_q, x_valid_i & x_first_i});
    end

    logic [COLS*W_SUM_W-1:0] at_work, at_work_q;
    for (genvar c = 0; c < COLS; c++) begin : gen_col
      logic signed [3:0]         w;
      logic signed [W_SUM_W-1:0] part, part_q, next_q;
      assign w    = w_i[c*4+:4];
      assign part = (w_row_i == '0 ? '0 : part_q) + W_SUM_W'(w);
      always_ff @(posedge clk_i) begin
        if (en_i & w_valid_i) begin
          part_q <= part;
          if (w_row_i == ROW_W'(ROWS - 1)) next_q <= part;
        end
      end
      assign at_work[c*W_SUM_W+:W_SUM_W] = first_q[ROWS-1] ? next_q : at_work_q[c*W_SUM_W+:W_SUM_W];
    end
    always_ff @(posedge clk_i) if (en_i) at_work_q <= at_work;

    skew #(
        .LANES(COLS),
        .WIDTH(W_SUM_W)
    ) u_skew (
        .clk_i,
        .en_i,
        .data_i(at_work),
        .data_o(w_sum)
    );
  end else begin : gen_no_eights
    assign w_sum = '0;
  end

  for (genvar c = 0; c < COLS; c++) begin : gen_sum
    logic signed [DIGIT_SUM_W-1:0] h, l;
    logic signed [W_SUM_W-1:0]     s;
    assign h = high_sum[c*DIGIT_SUM_W+:DIGIT_SUM_W];
    assign l = low_sum[c*DIGIT_SUM_W+:DIGIT_SUM_W];
    assign s = w_sum[c*W_SUM_W+:W_SUM_W];
    // 16 h and 8 s alone may need more bits than the sum of the three, which is what counts.
    always_ff @(posedge clk_i) begin
      if (en_i) sum_o[c*SUM_W+:SUM_W] <= (SUM_W'(h) <<< 4) + SUM_W'(l) + (SUM_W'(s) <<< 3);
    end
  end

  always_ff @(posedge clk_i) begin
    if (!rst_ni) sum_valid_o <= '0;
    else if (en_i) sum_valid_o <= valid;
  end

endmodule
