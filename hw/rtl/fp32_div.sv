// a / b in fp32 as IEEE 754 has it: rounded once, half to even, subnormal operands and results included.
//
// A bit of the quotient per clock, by restoring division: the quantizer divides twice per group, and has the time.
// A result that is no number is the quiet NaN 7fc00000, whatever NaN an operand was.
//
// Latency: 31 clocks from valid_i and ready_o to valid_o; one division at a time.
// Handshake: valid and ready on both sides. valid_o and q_o stay until ready_i. Reset drops the division at work.

module fp32_div (
    input  logic        clk_i,
    input  logic        rst_ni,
    input  logic        valid_i,
    output logic        ready_o,
    input  logic [31:0] a_i,
    input  logic [31:0] b_i,
    output logic        valid_o,
    input  logic        ready_i,
    output logic [31:0] q_o
);

  localparam int STEPS = 26;  // quotient bits: a significand, a bit to round by, and one as the first may be 0

  // The operands, as they came. Fields; significands are normalized, so that subnormal numbers get exponents down to -22.
  logic [31:0] a_q, b_q;
  logic [4:0]  a_zeros, b_zeros;
  logic [23:0] a_sig, b_sig;
  logic        sign, a_nan, b_nan, a_zero, b_zero, a_big, b_big;
  leading_zeros #(
      .W(24)
  ) u_a_zeros (
      .word_i (a_sig),
      .zeros_o(a_zeros)
  );
  leading_zeros #(
      .W(24)
  ) u_b_zeros (
      .word_i (b_sig),
      .zeros_o(b_zeros)
  );
  assign a_sig  = {a_q[30:23] != 8'h00, a_q[22:0]};
  assign b_sig  = {b_q[30:23] != 8'h00, b_q[22:0]};
  assign sign   = a_q[31] ^ b_q[31];
  assign a_zero = a_q[30:0] == 31'h0;
  assign b_zero = b_q[30:0] == 31'h0;
  assign a_big  = a_q[30:23] == 8'hff;  // infinite, or NaN
  assign b_big  = b_q[30:23] == 8'hff;
  assign a_nan  = a_big & (a_q[22:0] != 23'h0);
  assign b_nan  = b_big & (b_q[22:0] != 23'h0);

  // count_q: 0 idle; 1 the operands are normalized; then a bit in each of STEPS; three for rounding; DONE the result waits.
  localparam int DONE = STEPS + 5;
  logic [4:0]         count_q;
  logic               sign_q, special_q;
  logic signed [10:0] exp_q;
  logic [23:0]        divisor_q;
  logic [24:0]        rest_q;
  logic [STEPS-1:0]   quotient_q;
  logic [31:0]        value_q;

  logic        fits;
  logic [23:0] rest;
  assign fits = rest_q >= {1'b0, divisor_q};
  assign rest = 24'(fits ? rest_q - {1'b0, divisor_q} : rest_q);

  assign ready_o = count_q == 5'd0;
  assign valid_o = count_q == 5'(DONE);

  always_ff @(posedge clk_i) begin
    if (!rst_ni) count_q <= 5'd0;
    else if (ready_o) count_q <= 5'(valid_i);
    else if (!valid_o) count_q <= count_q + 5'd1;
    else if (ready_i) count_q <= 5'd0;

    if (ready_o) begin
      a_q <= a_i;
      b_q <= b_i;
    end
    if (count_q == 5'd1) begin
      sign_q     <= sign;
      exp_q      <= $signed({3'b0, a_q[30:23] | 8'(a_q[30:23] == 8'h00)}) - $signed({6'b0, a_zeros})
                  - $signed({3'b0, b_q[30:23] | 8'(b_q[30:23] == 8'h00)}) + $signed({6'b0, b_zeros}) + 11'sd127;
      rest_q     <= {1'b0, a_sig << a_zeros};
      divisor_q  <= b_sig << b_zeros;
      special_q  <= a_zero | b_zero | a_big | b_big;
      if (a_nan | b_nan | (a_zero & b_zero) | (a_big & b_big)) value_q <= 32'h7fc00000;
      else value_q <= {sign, a_big | b_zero ? 8'hff : 8'h00, 23'h0};
    end else if (count_q <= 5'(STEPS + 1)) begin
      quotient_q <= {quotient_q[STEPS-2:0], fits};
      rest_q     <= {rest, 1'b0};
    end
  end

  fp32_round #(
      .SIG_W(STEPS + 1)
  ) u_round (
      .clk_i,
      .en_i     (~valid_o),
      .sign_i   (sign_q),
      .exp_i    (exp_q),
      .sig_i    ({quotient_q, rest_q != 25'h0}),
      .special_i(special_q),
      .value_i  (value_q),
      .f_o      (q_o)
  );

endmodule
