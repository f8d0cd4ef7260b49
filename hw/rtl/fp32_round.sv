// The end of every fp32 operation here: normalizes an exact result and rounds it to IEEE 754 binary32, half to even.
//
// The result is sig * 2^(exp - 127 - (SIG_W - 1)), with its sign: exp_i is the exponent field that the number has if
// the highest bit of sig_i is its first one. Bits of an exact result that sig_i has no room for may be or-ed into its
// lowest bit, if sig_i has at least two bits below the last bit of the result ("jamming", as in Berkeley SoftFloat).
// What is too small for a normal number becomes a subnormal one, nothing is flushed to 0; what is too large becomes
// infinity. If special_i is 1, value_i is the result instead.
//
// Latency: 2 clocks. Handshake: none; it stands still while en_i is 0.

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

  // Clock 1: shift left until the first one is on top, but not beyond the exponent of subnormal numbers; or right to
  // reach that exponent.
  localparam int ZEROS_W = $clog2(SIG_W);
  logic [ZEROS_W-1:0] zeros;
  logic [10:0]        left, right;
  logic               is_small;
  leading_zeros #(
      .W(SIG_W)
  ) u_leading_zeros (
      .word_i (sig_i),
      .zeros_o(zeros)
  );
  assign is_small = exp_i < 11'sd1;
  assign left     = $signed(11'(zeros)) < exp_i - 11'sd1 ? 11'(zeros) : exp_i - 11'sd1;
  assign right    = 11'sd1 - exp_i;

  logic [SIG_W-1:0] shifted_left, shifted_right, lost;
  assign shifted_left  = sig_i << left[ZEROS_W-1:0];  // left is not above zeros
  assign shifted_right = sig_i >> right;
  assign lost          = sig_i & ~(~SIG_W'(0) << right);

  logic               sign_q, special_q;
  logic signed [10:0] exp_q;
  logic [SIG_W-1:0]   sig_q;
  logic [31:0]        value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q    <= sign_i;
      exp_q     <= is_small ? 11'sd1 : exp_i - $signed(left);
      sig_q     <= is_small ? {shifted_right[SIG_W-1:1], shifted_right[0] | (|lost)} : shifted_left;
      special_q <= special_i;
      value_q   <= value_i;
    end
  end

  // Clock 2: round. A carry goes from the fraction into the exponent, and makes the largest subnormal number normal.
  logic [10:0] field;  // of the exponent: 0 if the first bit is not there
  logic        up;
  logic [33:0] rounded;
  assign field   = sig_q[SIG_W-1] ? exp_q : '0;
  assign up      = sig_q[SIG_W-25] & (sig_q[SIG_W-24] | (|sig_q[SIG_W-26:0]));
  assign rounded = {field, sig_q[SIG_W-2-:23]} + 34'(up);

  always_ff @(posedge clk_i) begin
    if (en_i) begin
      if (special_q) f_o <= value_q;
      else if (rounded[33:23] >= 11'd255) f_o <= {sign_q, 8'hff, 23'h0};
      else f_o <= {sign_q, rounded[30:0]};
    end
  end

endmodule
