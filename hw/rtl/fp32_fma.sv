// a * b + c in fp32 as IEEE 754 has it: rounded once, half to even, subnormal operands and results included.
//
// An exact sum of 0 is +0, unless both terms are -0. A result that is no number is the quiet NaN 7fc00000, whatever NaN an
// operand was, and so it is if a * b is no number and c is NaN.
// Latency: 6 clocks, a result a clock. Handshake: none; it stands still while en_i is 0.

module fp32_fma (
    input  logic        clk_i,
    input  logic        en_i,
    input  logic [31:0] a_i,
    input  logic [31:0] b_i,
    input  logic [31:0] c_i,
    output logic [31:0] f_o
);

  // Fields. The exponent of a subnormal number is 1, as of the smallest normal ones.
  logic [7:0]  a_exp, b_exp, c_exp;
  logic [23:0] a_sig, b_sig, c_sig;
  logic        sign, product_big, product_nan, c_big, c_nan;
  assign a_exp = a_i[30:23] | 8'(a_i[30:23] == 8'h00);
  assign b_exp = b_i[30:23] | 8'(b_i[30:23] == 8'h00);
  assign c_exp = c_i[30:23] | 8'(c_i[30:23] == 8'h00);
  assign a_sig = {a_i[30:23] != 8'h00, a_i[22:0]};
  assign b_sig = {b_i[30:23] != 8'h00, b_i[22:0]};
  assign c_sig = {c_i[30:23] != 8'h00, c_i[22:0]};
  assign sign  = a_i[31] ^ b_i[31];

  assign product_big = (a_exp == 8'hff) | (b_exp == 8'hff);
  assign product_nan = (a_i[30:0] > 31'h7f800000) | (b_i[30:0] > 31'h7f800000)
                     | (product_big & ((a_sig == 24'h0) | (b_sig == 24'h0)));
  assign c_big       = c_exp == 8'hff;
  assign c_nan       = c_i[30:0] > 31'h7f800000;

  // Clock 1: the exact product, and where c lies beside it. The terms are added in a window of 78 bits and one for the
  // carry. The product's last bit is bit 3, as bits 2 to 0 are enough for what lies below; c's last bit is bit `place`.
  logic               sign_q, c_sign_q, special_q;
  logic [47:0]        product_q;
  logic [23:0]        c_q;
  logic signed [10:0] exp_q, place_q;
  logic [7:0]         c_exp_q;
  logic [31:0]        value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q    <= sign;
      product_q <= a_sig * b_sig;
      c_sign_q  <= c_i[31];
      c_q       <= c_sig;
      exp_q     <= $signed({3'b0, a_exp}) + $signed({3'b0, b_exp}) - 11'sd98;
      place_q   <= $signed({3'b0, c_exp}) - $signed({3'b0, a_exp}) - $signed({3'b0, b_exp}) + 11'sd153;
      c_exp_q   <= c_exp;
      special_q <= product_big | c_big;
      if (product_nan | c_nan | (product_big & c_big & (sign ^ c_i[31]))) value_q <= 32'h7fc00000;
      else value_q <= {product_big ? sign : c_i[31], 8'hff, 23'h0};
    end
  end

  // Clock 2: align. Where c begins more than 3 bits above the product, or the product is 0, the window goes with c, and all
  // that counts of the product is whether it is 0. Below the window, the same is true of c: the product has 24 bits at
  // least, since at most one operand can be subnormal where c can lie below.
  logic        is_far;
  logic [10:0] right;
  logic [77:0] c_left;
  logic [23:0] c_right, c_lost;
  assign is_far  = (place_q > 11'sd54) | (product_q == 48'h0);
  assign right   = -place_q;
  assign c_left  = 78'(c_q) << (is_far ? 11'd54 : place_q);
  assign c_right = c_q >> right;
  assign c_lost  = c_q & ~(~24'h0 << right);

  logic               sign_qq, subtract_qq, special_qq;
  logic [77:0]        product_qq, c_qq;
  logic signed [10:0] exp_qq;
  logic [31:0]        value_qq;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_qq     <= sign_q;
      subtract_qq <= sign_q ^ c_sign_q;
      product_qq  <= is_far ? 78'(product_q != 48'h0) : {27'h0, product_q, 3'b000};
      c_qq        <= (place_q < 11'sd0) & ~is_far ? 78'({c_right[23:1], c_right[0] | (|c_lost)}) : c_left;
      exp_qq      <= is_far ? $signed({3'b0, c_exp_q}) + 11'sd1 : exp_q;
      special_qq  <= special_q;
      value_qq    <= value_q;
    end
  end

  // Clock 3: add, or subtract the smaller from the larger.
  logic        c_is_larger;
  logic [78:0] total;
  assign c_is_larger = c_qq > product_qq;
  always_comb begin
    if (!subtract_qq) total = {1'b0, product_qq} + {1'b0, c_qq};
    else if (c_is_larger) total = {1'b0, c_qq} - {1'b0, product_qq};
    else total = {1'b0, product_qq} - {1'b0, c_qq};
  end

  logic               sign_qqq, special_qqq;
  logic [78:0]        total_q;
  logic signed [10:0] exp_qqq;
  logic [31:0]        value_qqq;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      // Of opposite signs: that of the larger, and + if they are equal.
      sign_qqq    <= subtract_qq ? (c_is_larger ^ sign_qq) & (total != 79'h0) : sign_qq;
      total_q     <= total;
      exp_qqq     <= exp_qq;
      special_qqq <= special_qq;
      value_qqq   <= value_qq;
    end
  end

  // Clocks 4 to 6.
  fp32_round #(
      .SIG_W(79)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (sign_qqq),
      .exp_i    (exp_qqq),
      .sig_i    (total_q),
      .special_i(special_qqq),
      .value_i  (value_qqq),
      .f_o
  );

endmodule
