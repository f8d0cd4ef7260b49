// Proves that no sum of the array overflows at its derived width, for any weights and activations.
//
// By induction over the rows: if the sum from above is one of r products, r < ROWS, and so at most r * X_MAX * W_MAX in
// magnitude, then the sum that the cell hands down has not overflowed, and is at most (r + 1) * X_MAX * W_MAX. The first row
// gets 0. `sat` of Yosys proves the step for all r at once.

module accumulator #(
    parameter int ROWS  = 64,
    parameter int X_MAX = 128,
    parameter int W_MAX = 128,
    localparam int SUM_W = $clog2(ROWS * X_MAX * W_MAX + 1) + 1
) (
    input logic                    clk_i,
    input logic [7:0]              row_i,
    input logic signed [7:0]       x_i,
    input logic signed [7:0]       w_i,
    input logic signed [SUM_W-1:0] sum_i
);

  logic signed [SUM_W-1:0] sum;
  logic signed [7:0]       unused_x;
  logic                    unused_swap, unused_load;
  mac_cell #(
      .SUM_W(SUM_W)
  ) u_cell (
      .clk_i,
      .rst_ni(1'b1),
      .en_i  (1'b1),
      .x_i,
      .swap_i(1'b1),
      .load_i(1'b1),
      .x_o   (unused_x),
      .swap_o(unused_swap),
      .load_o(unused_load),
      .w_i,
      .sum_i,
      .sum_o (sum)
  );

  // In more bits than any sum can need. A sum that overflows is off by 2^SUM_W, so that it is not within a product of the
  // one that came from above.
  localparam int WIDE = 32;
  logic signed [WIDE-1:0] bound, sum_in, sum_in_q, sum_out, bound_q;
  assign bound   = $signed({1'b0, row_i}) * (X_MAX * W_MAX);
  assign sum_in  = sum_i;
  assign sum_out = sum;
  always_ff @(posedge clk_i) begin
    sum_in_q <= sum_in;
    bound_q  <= bound + X_MAX * W_MAX;
  end

  // 1 from the second clock on, when weight, sum and bound belong together.
  logic [1:0] checks_q = 2'b00;
  always_ff @(posedge clk_i) begin
    checks_q <= {checks_q[0], 1'b1};
    if (checks_q == 2'b11) begin
      assert (sum_out - sum_in_q <= X_MAX * W_MAX && sum_out - sum_in_q >= -X_MAX * W_MAX);
      assert (sum_out <= bound_q && sum_out >= -bound_q);
    end
    assume (row_i < ROWS);
    assume (sum_in <= bound && sum_in >= -bound);
    assume (x_i <= X_MAX && x_i >= -X_MAX);
    assume (w_i <= W_MAX && w_i >= -W_MAX);
  end

endmodule
