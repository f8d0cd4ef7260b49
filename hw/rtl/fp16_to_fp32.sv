// fp16 to fp32, for the scales of GPTQ and A8W4: exact, subnormal numbers included. NaN becomes the quiet NaN 7fc00000.
//
// Combinational.

module fp16_to_fp32 (
    input  logic [15:0] h_i,
    output logic [31:0] f_o
);

  logic       sign;
  logic [4:0] exp;
  logic [9:0] fraction;
  assign sign     = h_i[15];
  assign exp      = h_i[14:10];
  assign fraction = h_i[9:0];

  // A subnormal number, fraction * 2^-24, is a normal one in fp32.
  logic [3:0] zeros;
  always_comb begin
    zeros = 4'd0;
    for (int i = 0; i < 10; i++) if (fraction[i]) zeros = 4'(9 - i);
  end

  always_comb begin
    if (exp == 5'd31) f_o = fraction == 10'd0 ? {sign, 8'hff, 23'h0} : 32'h7fc00000;
    else if (exp != 5'd0) f_o = {sign, 8'(exp) + 8'd112, fraction, 13'h0};
    else if (fraction == 10'd0) f_o = {sign, 31'h0};
    else f_o = {sign, 8'd112 - 8'(zeros), 10'(fraction << (zeros + 4'd1)), 13'h0};
  end

endmodule
