// Proves that dot_row holds its sum while it waits: a clock after valid_o without ready_i, valid_o is still 1 and the
// sum is what it was. The one exception is a reset.

module dot_row_holds (
    input logic clk_i,
    input logic rst_ni,
    input logic ready_i,
    input logic valid_i,
    input logic last_i,
    input logic [15:0] x_i,
    input logic [15:0] w_i
);

  logic        valid, unused_ready;
  logic [16:0] value;
  dot_row #(
      .LANES   (2),
      .PRODUCTS(2)
  ) u_dot_row (
      .clk_i,
      .rst_ni,
      .valid_i,
      .ready_o(unused_ready),
      .x_i,
      .w_i,
      .last_i,
      .valid_o(valid),
      .ready_i,
      .sum_o  (value)
  );

  logic checks_q = 1'b0;
  logic [16:0] value_q;
  always_ff @(posedge clk_i) begin
    checks_q <= rst_ni & valid & ~ready_i;
    value_q       <= value;
    if (checks_q) begin
      assert (valid);
      assert (value == value_q);
    end
  end

endmodule
