// Below a column of cells in W8A8: the integer sum of a whole row, scaled once.
//
//   out = fp32(fp32(acc) * fp32(w_scale * x_scale))   three roundings at most, as in runq_w8a8
//
// Latency: 10 clocks in which en_i is 1; a row a clock. tag_i comes out as tag_o with the result of its row.
// Handshake: while en_i is 0 everything stands still, outputs too. Reset drops what is on its way.

module row_scaler #(
    parameter int ACC_W = 32,  // bits of the integer sum of a row
    parameter int TAG_W = 8    // bits of the caller's name for the row
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    en_i,
    input  logic                    valid_i,
    input  logic signed [ACC_W-1:0] acc_i,
    input  logic [31:0]             w_scale_i,
    input  logic [31:0]             x_scale_i,
    input  logic [TAG_W-1:0]        tag_i,
    output logic                    valid_o,
    output logic [TAG_W-1:0]        tag_o,
    output logic [31:0]             out_o
);

  // Clocks 0 to 5.
  logic [31:0] acc, scale;
  scaler_operands #(
      .ACC_W(ACC_W)
  ) u_operands (
      .clk_i,
      .en_i,
      .acc_i,
      .w_scale_i,
      .x_scale_i,
      .acc_o  (acc),
      .scale_o(scale)
  );

  // Clocks 5 to 10.
  fp32_mul u_mul_acc (
      .clk_i,
      .en_i,
      .a_i(acc),
      .b_i(scale),
      .p_o(out_o)
  );

  logic [9:0] valid_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en_i) valid_q <= {valid_q[8:0], valid_i};
  end
  assign valid_o = valid_q[9];

  delay #(
      .WIDTH (TAG_W),
      .CLOCKS(10)
  ) u_tag (
      .clk_i,
      .en_i,
      .data_i(tag_i),
      .data_o(tag_o)
  );

endmodule
