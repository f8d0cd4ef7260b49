// a * b in fp32 as IEEE 754 has it: rounded once, half to even, subnormal operands and results included.
//
// A result that is no number is the quiet NaN 7fc00000, whatever NaN an operand was.
// Latency: 3 clocks, a product a clock. Handshake: none; it stands still while en_i is 0.

module fp32_mul (
    input  logic        clk_i,
    input  logic        en_i,
    input  logic [31:0] a_i,
    input  logic [31:0] b_i,
    output logic [31:0] p_o
);

  // Fields. The exponent of a subnormal number is 1, as of the smallest normal ones.
  logic [7:0]  a_exp, b_exp;
  logic [23:0] a_sig, b_sig;
  logic        sign, a_zero, b_zero, a_big, b_big, a_nan, b_nan;
  assign a_exp  = a_i[30:23];
  assign b_exp  = b_i[30:23];
  assign a_sig  = {a_exp != 8'h00, a_i[22:0]};
  assign b_sig  = {b_exp != 8'h00, b_i[22:0]};
  assign sign   = a_i[31] ^ b_i[31];
  assign a_zero = a_sig == 24'h0;
  assign b_zero = b_sig == 24'h0;
  assign a_big  = a_exp == 8'hff;  // infinite, or NaN
  assign b_big  = b_exp == 8'hff;
  assign a_nan  = a_big & (a_i[22:0] != 23'h0);
  assign b_nan  = b_big & (b_i[22:0] != 23'h0);

  // Clock 1: the exact product. Bit 46 stands for 1 if both operands are normal, so bit 47 has an exponent of 1 more.
  logic               sign_q, special_q;
  logic signed [10:0] exp_q;
  logic [47:0]        sig_q;
  logic [31:0]        value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q    <= sign;
      sig_q     <= a_sig * b_sig;
      exp_q     <= $signed({3'b0, a_exp | 8'(a_exp == 8'h00)}) + $signed({3'b0, b_exp | 8'(b_exp == 8'h00)}) - 11'sd126;
      special_q <= a_big | b_big;
      value_q   <= a_nan | b_nan | a_zero | b_zero ? 32'h7fc00000 : {sign, 8'hff, 23'h0};
    end
  end

  // Clocks 2 and 3.
  fp32_round #(
      .SIG_W(48)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (sign_q),
      .exp_i    (exp_q),
      .sig_i    (sig_q),
      .special_i(special_q),
      .value_i  (value_q),
      .f_o      (p_o)
  );

endmodule
