// Proves that fp32_div holds its quotient while it waits: a clock after valid_o without ready_i, valid_o is still 1 and the
// quotient is what it was. The one exception is a reset.

module fp32_div_holds (
    input logic clk_i,
    input logic rst_ni,
    input logic ready_i,
    input logic valid_i,
    input logic [31:0] a_i,
    input logic [31:0] b_i
);

  logic        valid, unused_ready;
  logic [31:0] value;
  fp32_div u_div (
      .clk_i,
      .rst_ni,
      .valid_i,
      .ready_o(unused_ready),
      .a_i,
      .b_i,
      .valid_o(valid),
      .ready_i,
      .q_o    (value)
  );

  logic checks_q = 1'b0;
  logic [31:0] value_q;
  always_ff @(posedge clk_i) begin
    checks_q <= rst_ni & valid & ~ready_i;
    value_q       <= value;
    if (checks_q) begin
      assert (valid);
      assert (value == value_q);
    end
  end

endmodule
