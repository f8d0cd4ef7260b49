// Below a column of cells in W8A8: the integer sum of a whole row, scaled once.
//
//   out = fp32(fp32(acc) * fp32(w_scale * x_scale))   three roundings at most, as in runq_w8a8
//
// Latency: 6 clocks in which en_i is 1; a row a clock. tag_i comes out as tag_o with the result of its row.
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

  logic [31:0] acc, scale;

  // Clocks 0 to 3.
  int_to_fp32 #(
      .INT_W(ACC_W)
  ) u_int_to_fp32 (
      .clk_i,
      .en_i,
      .int_i(acc_i),
      .f_o  (acc)
  );
  fp32_mul u_mul_scales (
      .clk_i,
      .en_i,
      .a_i(w_scale_i),
      .b_i(x_scale_i),
      .p_o(scale)
  );

  // Clocks 3 to 6.
  fp32_mul u_mul_acc (
      .clk_i,
      .en_i,
      .a_i(acc),
      .b_i(scale),
      .p_o(out_o)
  );

  logic [5:0] valid_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en_i) valid_q <= {valid_q[4:0], valid_i};
  end
  assign valid_o = valid_q[5];

  delay #(
      .WIDTH (TAG_W),
      .CLOCKS(6)
  ) u_tag (
      .clk_i,
      .en_i,
      .data_i(tag_i),
      .data_o(tag_o)
  );

endmodule
