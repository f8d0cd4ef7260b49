// a * b in fp32 as IEEE 754 has it: rounded once, half to even, subnormal operands and results included.
//
// A result that is no number is the quiet NaN 7fc00000, whatever NaN an operand was.
// Latency: 5 clocks, a product a clock. Handshake: none; it stands still while en_i is 0.

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

  // Clock 1: a times each half of b.
  logic               sign_q, special_q;
  logic signed [10:0] exp_q;
  logic [35:0]        low_q, high_q;
  logic [31:0]        value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q    <= sign;
      low_q     <= 36'(a_sig) * 36'(b_sig[11:0]);
      high_q    <= 36'(a_sig) * 36'(b_sig[23:12]);
      exp_q     <= $signed({3'b0, a_exp | 8'(a_exp == 8'h00)}) + $signed({3'b0, b_exp | 8'(b_exp == 8'h00)}) - 11'sd126;
      special_q <= a_big | b_big;
      value_q   <= a_nan | b_nan | a_zero | b_zero ? 32'h7fc00000 : {sign, 8'hff, 23'h0};
    end
  end

  // Clock 2: the exact product. Bit 46 stands for 1 if both operands are normal, so bit 47 has an exponent of 1 more.
  logic               sign_qq, special_qq;
  logic signed [10:0] exp_qq;
  logic [47:0]        sig_qq;
  logic [31:0]        value_qq;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_qq    <= sign_q;
      sig_qq     <= {high_q, 12'h0} + 48'(low_q);
      exp_qq     <= exp_q;
      special_qq <= special_q;
      value_qq   <= value_q;
    end
  end

  // Clocks 3 to 5.
  fp32_round #(
      .SIG_W(48)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (sign_qq),
      .exp_i    (exp_qq),
      .sig_i    (sig_qq),
      .special_i(special_qq),
      .value_i  (value_qq),
      .f_o      (p_o)
  );

endmodule
