// What both scalers multiply: a sum as fp32, and the product of its scales, in the same clock.
//
// Latency: 5 clocks, a sum a clock. Handshake: none; it stands still while en_i is 0.

module scaler_operands #(
    parameter int ACC_W = 22  // bits of the integer sum
) (
    input  logic                    clk_i,
    input  logic                    en_i,
    input  logic signed [ACC_W-1:0] acc_i,
    input  logic [31:0]             w_scale_i,
    input  logic [31:0]             x_scale_i,
    output logic [31:0]             acc_o,     // fp32(acc_i)
    output logic [31:0]             scale_o    // fp32(w_scale_i * x_scale_i)
);

  // A conversion is a clock shorter than a product.
  logic signed [ACC_W-1:0] acc_q;
  always_ff @(posedge clk_i) if (en_i) acc_q <= acc_i;
  int_to_fp32 #(
      .INT_W(ACC_W)
  ) u_int_to_fp32 (
      .clk_i,
      .en_i,
      .int_i(acc_q),
      .f_o  (acc_o)
  );
  fp32_mul u_mul (
      .clk_i,
      .en_i,
      .a_i(w_scale_i),
      .b_i(x_scale_i),
      .p_o(scale_o)
  );

endmodule
