// The end of every fp32 operation here: normalizes an exact result and rounds it to IEEE 754 binary32, half to even.
//
// The result is sig * 2^(exp - 127 - (SIG_W - 1)), with its sign: exp_i is the exponent field that the number has if
// the highest bit of sig_i is its first one. Bits of an exact result that sig_i has no room for may be or-ed into its
// lowest bit, if sig_i has at least two bits below the last bit of the result ("jamming", as in Berkeley SoftFloat).
// What is too small for a normal number becomes a subnormal one, nothing is flushed to 0; what is too large becomes
// infinity. If special_i is 1, value_i is the result instead.
//
// Latency: 3 clocks. Handshake: none; it stands still while en_i is 0.

module fp32_round #(
    parameter int SIG_W = 28  // at least 26
) (
    input  logic               clk_i,
    input  logic               en_i,
    input  logic               sign_i,
    input  logic signed [10:0] exp_i,
    input  logic [SIG_W-1:0]   sig_i,
    input  logic               special_i,
    input  logic [31:0]        value_i,
    output logic [31:0]        f_o
);

  // Clock 1: how far the first one is from the top. To bring it there is a shift to the left, but not beyond the exponent
  // of subnormal numbers, 1. What is below that exponent already is shifted to the right until it has it.
  localparam int ZEROS_W = $clog2(SIG_W);
  logic [ZEROS_W-1:0] zeros;
  logic signed [10:0] exp;  // if the first one comes to the top
  logic               is_normal;
  leading_zeros #(
      .W(SIG_W)
  ) u_leading_zeros (
      .word_i (sig_i),
      .zeros_o(zeros)
  );
  assign exp       = exp_i - $signed(11'(zeros));
  assign is_normal = $signed(11'(zeros)) < exp_i;  // exp >= 1

  logic               sign_q, special_q, is_small_q;
  logic [ZEROS_W-1:0] left_q;
  logic [10:0]        right_q;
  logic signed [10:0] exp_q;
  logic [SIG_W-1:0]   sig_q;
  logic [31:0]        value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q     <= sign_i;
      is_small_q <= exp_i < 11'sd1;
      left_q     <= is_normal ? zeros : ZEROS_W'(exp_i - 11'sd1);
      right_q    <= 11'sd1 - exp_i;
      exp_q      <= is_normal ? exp : 11'sd1;
      sig_q      <= sig_i;
      special_q  <= special_i;
      value_q    <= value_i;
    end
  end

  // Clock 2: shift.
  logic [SIG_W-1:0] shifted_left, shifted_right, lost;
  assign shifted_left  = sig_q << left_q;
  assign shifted_right = sig_q >> right_q;
  assign lost          = sig_q & ~(~SIG_W'(0) << right_q);

  logic               sign_qq, special_qq;
  logic signed [10:0] exp_qq;
  logic [SIG_W-1:0]   sig_qq;
  logic [31:0]        value_qq;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_qq    <= sign_q;
      exp_qq     <= exp_q;
      sig_qq     <= is_small_q ? {shifted_right[SIG_W-1:1], shifted_right[0] | (|lost)} : shifted_left;
      special_qq <= special_q;
      value_qq   <= value_q;
    end
  end

  // Clock 3: round. A carry goes from the fraction into the exponent, and makes the largest subnormal number normal.
  logic [10:0] field;  // of the exponent: 0 if the first bit is not there
  logic        up;
  logic [33:0] rounded;
  assign field   = sig_qq[SIG_W-1] ? exp_qq : '0;
  assign up      = sig_qq[SIG_W-25] & (sig_qq[SIG_W-24] | (|sig_qq[SIG_W-26:0]));
  assign rounded = {field, sig_qq[SIG_W-2-:23]} + 34'(up);

  always_ff @(posedge clk_i) begin
    if (en_i) begin
      if (special_qq) f_o <= value_qq;
      else if (rounded[33:23] >= 11'd255) f_o <= {sign_qq, 8'hff, 23'h0};
      else f_o <= {sign_qq, rounded[30:0]};
    end
  end

endmodule
