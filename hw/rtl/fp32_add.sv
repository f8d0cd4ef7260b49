// a + b in fp32 as IEEE 754 has it: rounded once, half to even, subnormal operands and results included.
//
// The sum of opposite numbers is +0. A result that is no number is the quiet NaN 7fc00000, whatever NaN an operand was.
// Latency: 6 clocks, a sum a clock. Handshake: none; it stands still while en_i is 0.

module fp32_add (
    input  logic        clk_i,
    input  logic        en_i,
    input  logic [31:0] a_i,
    input  logic [31:0] b_i,
    output logic [31:0] s_o
);

  // Clock 1: the operand of the larger magnitude, and the other one. Magnitudes compare like integers. The exponent of a
  // subnormal number is 1, as of the smallest normal ones.
  logic        swap;
  logic [7:0]  a_exp, b_exp;
  logic [31:0] larger, smaller;
  logic [7:0]  distance;  // of their exponents
  assign swap  = b_i[30:0] > a_i[30:0];
  assign a_exp = a_i[30:23] | 8'(a_i[30:23] == 8'h00);
  assign b_exp = b_i[30:23] | 8'(b_i[30:23] == 8'h00);
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      larger   <= swap ? b_i : a_i;
      smaller  <= swap ? a_i : b_i;
      distance <= swap ? b_exp - a_exp : a_exp - b_exp;
    end
  end

  // Fields.
  logic [7:0]  larger_exp;
  logic [23:0] larger_sig, smaller_sig;
  logic        subtract, larger_nan, smaller_big;
  assign larger_exp  = larger[30:23] | 8'(larger[30:23] == 8'h00);
  assign larger_sig  = {larger[30:23] != 8'h00, larger[22:0]};
  assign smaller_sig = {smaller[30:23] != 8'h00, smaller[22:0]};
  assign subtract    = larger[31] ^ smaller[31];
  assign larger_nan  = larger[30:0] > 31'h7f800000;
  assign smaller_big = smaller[30:23] == 8'hff;  // and so is the other

  // Clock 2: the smaller significand is shifted to the exponent of the larger. Three bits more than a significand are
  // enough, if the last one says whether anything was lost behind it.
  logic [26:0] wide, aligned, lost;
  assign wide    = {smaller_sig, 3'b000};
  assign aligned = wide >> distance;
  assign lost    = wide & ~(~27'h0 << distance);

  logic        sign_q, subtract_q, special_q;
  logic [7:0]  exp_q;
  logic [26:0] larger_q, smaller_q;
  logic [31:0] value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q     <= larger[31];
      subtract_q <= subtract;
      exp_q      <= larger_exp;
      larger_q   <= {larger_sig, 3'b000};
      smaller_q  <= {aligned[26:1], aligned[0] | (|lost)};
      special_q  <= larger[30:23] == 8'hff;
      value_q    <= larger_nan | (smaller_big & subtract) ? 32'h7fc00000 : larger;
    end
  end

  // Clock 3: add or subtract. The bit above those of the operands is for the carry.
  logic [27:0] total;
  assign total = subtract_q ? {1'b0, larger_q} - {1'b0, smaller_q} : {1'b0, larger_q} + {1'b0, smaller_q};

  logic               sign_qq, special_qq;
  logic signed [10:0] exp_qq;
  logic [27:0]        total_q;
  logic [31:0]        value_qq;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_qq    <= sign_q & ~(subtract_q & (total == 28'h0));
      exp_qq     <= $signed({3'b0, exp_q}) + 11'sd1;
      total_q    <= total;
      special_qq <= special_q;
      value_qq   <= value_q;
    end
  end

  // Clocks 4 to 6.
  fp32_round #(
      .SIG_W(28)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (sign_qq),
      .exp_i    (exp_qq),
      .sig_i    (total_q),
      .special_i(special_qq),
      .value_i  (value_qq),
      .f_o      (s_o)
  );

endmodule
