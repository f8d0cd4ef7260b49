// Proves that the quantizer holds a code, its scale and the mark of the last while the code waits: a clock after valid_o
// without ready_i, valid_o is still 1 and these are what they were. The one exception is a reset.

module quantizer_holds (
    input logic clk_i,
    input logic rst_ni,
    input logic ready_i,
    input logic valid_i,
    input logic last_i,
    input logic static_i,
    input logic [31:0] static_scale_i,
    input logic [31:0] x_i
);

  logic        valid, unused_ready;
  logic [40:0] value;
  quantizer #(
      .MAX_N(2)
  ) u_quantizer (
      .clk_i,
      .rst_ni,
      .static_i,
      .static_scale_i,
      .valid_i,
      .ready_o(unused_ready),
      .x_i,
      .last_i,
      .valid_o(valid),
      .ready_i,
      .code_o (value[7:0]),
      .scale_o(value[39:8]),
      .last_o (value[40])
  );

  logic checks_q = 1'b0;
  logic [40:0] value_q;
  always_ff @(posedge clk_i) begin
    checks_q <= rst_ni & valid & ~ready_i;
    value_q       <= value;
    if (checks_q) begin
      assert (valid);
      assert (value == value_q);
    end
  end

endmodule
