// x + y in fp32, of two streams that come together: fp32_add with a handshake.
//
// Handshake: valid and ready on both sides. Latency: 6 clocks, a sum a clock. Reset drops all.

module residual_add (
    input  logic        clk_i,
    input  logic        rst_ni,
    input  logic        valid_i,
    output logic        ready_o,
    input  logic [31:0] x_i,
    input  logic [31:0] y_i,
    output logic        valid_o,
    input  logic        ready_i,
    output logic [31:0] sum_o
);

  // Everything moves unless a sum waits at the end.
  logic [5:0] valid_q;
  assign ready_o = ready_i | ~valid_o;
  assign valid_o = valid_q[5];
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (ready_o) valid_q <= {valid_q[4:0], valid_i};
  end

  fp32_add u_add (
      .clk_i,
      .en_i(ready_o),
      .a_i (x_i),
      .b_i (y_i),
      .s_o (sum_o)
  );

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i (sum_o)
  );

endmodule
