// e^x in fp32, within one unit in the last place: 0.78 for all x. A subnormal result is within one of its own units, and
// e^0 is 1.
//
// Above 88.7228 the result is infinite, below -103.97 it is 0. NaN gives the quiet NaN 7fc00000.
//
//   x = k ln 2 + i / 512 + s     k and i whole, |s| <= 1/1024
//   e^x = 2^k e^(i/512) (1 + s + s^2 / 2), as s^3 / 6 < 2^-32
//
// e^(i/512) stands in a table of 512 words, a block RAM (Tang 1989, "Table-driven implementation of the exponential
// function").
// Latency: 12 clocks, a result a clock. Handshake: none; it stands still while en_i is 0.

module fp32_exp (
    input  logic        clk_i,
    input  logic        en_i,
    input  logic [31:0] x_i,
    output logic [31:0] y_o
);

  localparam logic signed [13:0] LOG2_E = 14'd5909;  // log2(e), in 2^-12. Every floor of `top * log2(e)` is right with it
  localparam logic signed [36:0] LN_2   = 37'hb17217f7d;  // ln(2), in 2^-36
  localparam logic [63:0]        RATIO  = 64'd1155175504876142865;  // e^(1/512), in 2^-60

  // In 2^-28. Each is the one before times the ratio, so that the last is wrong by less than 2^-50.
  logic [29:0] table_of_e[512];
  initial begin : fill
    logic [63:0] e;  // in 2^-60
    e = 64'd1 << 60;
    for (int i = 0; i < 512; i++) begin
      table_of_e[i] = 30'((e + 64'h80000000) >> 32);
      e = 64'((128'(e) * 128'(RATIO)) >> 60);
    end
  end

  // Clock 1: the magnitude in 2^-28, which has room for x below 128.
  logic        minus_q, special_q;
  logic [34:0] magnitude_q;
  logic [31:0] value_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      minus_q     <= x_i[31];
      magnitude_q <= {1'b1, x_i[22:0], 11'h0} >> (8'd133 - x_i[30:23]);
      special_q   <= x_i[30:23] > 8'd133;
      if (x_i[30:0] > 31'h7f800000) value_q <= 32'h7fc00000;
      else value_q <= x_i[31] ? 32'h0 : 32'h7f800000;
    end
  end

  // Clock 2: x as a whole number.
  logic signed [35:0] x_q;
  always_ff @(posedge clk_i) if (en_i) x_q <= minus_q ? -$signed({1'b0, magnitude_q}) : $signed({1'b0, magnitude_q});

  // Clock 3: k, by x rounded down to eighths. Clock 4: k ln 2. Clock 5: what is left, from 0 to ln 2 + 1/8.
  logic signed [10:0] top;
  logic signed [8:0]  k_q;
  logic signed [35:0] k_ln_2_q;
  logic signed [35:0] x_qq, x_qqq;
  logic [27:0]        rest_q;
  assign top = x_q[35:25];
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      k_q      <= 9'((25'(top) * 25'(LOG2_E)) >>> 15);
      x_qq     <= x_q;
      k_ln_2_q <= 36'((46'(k_q) * 46'(LN_2)) >>> 8);
      x_qqq    <= x_qq;
      rest_q   <= 28'(x_qqq - k_ln_2_q);
    end
  end

  // Clock 6: the table, at the nearest i; s^2, of which 10 bits are enough.
  logic signed [18:0] s_q;
  logic signed [9:0]  s_top;
  logic signed [19:0] square_q;
  logic [29:0]        e_q;
  assign s_top = rest_q[18:9];
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      e_q      <= table_of_e[rest_q[27:19]+9'(rest_q[18])];
      s_q      <= rest_q[18:0];
      square_q <= 20'(s_top) * 20'(s_top);
    end
  end

  // Clock 7: s + s^2 / 2, rounded to 2^-26. Clock 8: times the table's word. Clock 9: and added to it.
  logic signed [17:0] growth_q;
  logic signed [38:0] product_q;
  logic [29:0]        e_qq, e_qqq, sum_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      growth_q  <= 18'((20'(s_q) + (square_q >>> 11) + 20'sd2) >>> 2);
      e_qq      <= e_q;
      product_q <= 39'($signed({1'b0, e_qq[29:10]})) * 39'(growth_q);
      e_qqq     <= e_qq;
      sum_q     <= e_qqq + 30'(product_q >>> 16);
    end
  end

  // Clocks 10 to 12. The highest bit of the sum stands for 2.
  logic              special;
  logic [31:0]       value;
  logic signed [8:0] k;
  delay #(
      .WIDTH (33),
      .CLOCKS(8)
  ) u_special (
      .clk_i,
      .en_i,
      .data_i({special_q, value_q}),
      .data_o({special, value})
  );
  delay #(
      .WIDTH (9),
      .CLOCKS(6)
  ) u_k (
      .clk_i,
      .en_i,
      .data_i(k_q),
      .data_o(k)
  );
  fp32_round #(
      .SIG_W(30)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (1'b0),
      .exp_i    (11'(k) + 11'sd128),
      .sig_i    (sum_q),
      .special_i(special),
      .value_i  (value),
      .f_o      (y_o)
  );

endmodule
