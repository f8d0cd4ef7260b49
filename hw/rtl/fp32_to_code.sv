// An fp32 number to a code of 8 bits: rounded to a whole number, half to even, and clamped to -127..127. NaN becomes -127,
// as in quantize_group of runq.cpp.
//
// Latency: 1 clock, a number a clock. Handshake: none; it stands still while en_i is 0.

module fp32_to_code (
    input  logic              clk_i,
    input  logic              en_i,
    input  logic [31:0]       f_i,
    output logic signed [7:0] code_o
);

  // Magnitudes compare like integers.
  logic [30:0] magnitude;
  logic        is_minus, is_nan, is_small, is_large;
  assign is_minus  = f_i[31];
  assign magnitude = f_i[30:0];
  assign is_nan    = magnitude > 31'h7f800000;
  assign is_small  = magnitude <= 31'h3f000000;  // up to 0.5, which is even 0
  assign is_large  = magnitude >= 31'h42fe0000;  // from 127

  // In between the exponent is 126 .. 133: of 1.fraction * 2^(exp - 127), 0 to 6 bits of the fraction are whole. Above
  // the point there are 8 bits, below it 24: a half, and what is behind.
  logic [31:0] fixed;
  logic        up;
  logic [7:0]  whole;
  assign fixed = {8'h00, 1'b1, magnitude[22:0]} << (magnitude[25:23] + 3'd2);
  assign up    = fixed[23] & (fixed[24] | (|fixed[22:0]));
  assign whole = fixed[31:24] + 8'(up);

  logic [7:0] code;
  always_comb begin
    code = is_minus ? -whole : whole;
    if (is_small) code = 8'd0;
    if (is_large) code = is_minus ? -8'd127 : 8'd127;
    if (is_nan) code = -8'd127;
  end

  always_ff @(posedge clk_i) if (en_i) code_o <= code;

endmodule
