// RMSNorm of a row (Zhang & Sennrich 2019, arXiv 1910.07467): y[i] = w[i] x[i] / sqrt(mean(x^2) + eps).
//
// The contract (docs/numerics.md) is what fp64 gives, rounded once to fp32. Here the sum has 48 + GUARD bits beside those
// that it needs for MAX_N terms, the root has 60, and its product with w x is exact up to the one rounding: what is lost
// before that is at most 2^-57 of the result. The roundings of fp64 are about 2^-51 together, so that a result is another than
// that of fp64 only where the latter is within 2^-50 of the middle of two fp32 numbers.
//
//   1  x comes in: to a memory; the largest exponent is kept
//   2  sum = n eps + x[0]^2 + x[1]^2 + ..., all aligned to the largest exponent
//   3  inv = sqrt(n / sum), a bit a clock: first the quotient, by restoring division, then its root, digit by digit
//   4  y[i] = w[i] x[i] inv, rounded: 12 clocks each
//
// One multiplier of 24 x 24 bits makes squares, w x, and, in six parts, w x times the root.
// Of a row with NaN all results are NaN, 7fc00000; so they are if the sum is 0. Of a row with an infinite number, inv is 0.
//
// Latency: a row of n numbers takes about 14 n + 200 clocks, and one more for each leading zero of subnormal numbers.
// Handshake: valid and ready on all streams; what is offered stays until it is taken. n_i and eps_i stay from the first
// number to the last result. x is taken first; weights are taken when the root is there, each as its result is made; the
// next row comes in when the last result is out. Reset drops the row.

module rms_norm #(
    parameter int MAX_N = 2048,  // numbers of the longest row; a power of 2, 2 to 8192
    localparam int COUNT_W = $clog2(MAX_N) + 1
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    input  logic [31:0]        eps_i,      // fp32, not negative, finite; a subnormal number counts as 0
    input  logic [COUNT_W-1:0] n_i,        // 1 to MAX_N
    // The row.
    input  logic               x_valid_i,
    output logic               x_ready_o,
    input  logic [31:0]        x_i,
    // Weights.
    input  logic               w_valid_i,
    output logic               w_ready_o,
    input  logic [31:0]        w_i,
    // Results.
    output logic               valid_o,
    input  logic               ready_i,
    output logic [31:0]        y_o,
    output logic               last_o
);

  localparam int ADDR_W = $clog2(MAX_N);
  localparam int GUARD  = 26;                    // bits of the sum below the last one of the largest square
  localparam int TERM_W = 48 + GUARD;
  localparam int SUM_W  = TERM_W + COUNT_W;
  localparam int PAD    = 23 - COUNT_W;          // zeros behind n, where it is multiplied by eps

  typedef enum logic [2:0] {
    TAKE,
    SUM,
    NORMALIZE,
    DIVIDE,
    ROOT,
    MULTIPLY
  } state_e;
  state_e state_q;

  // ---- 1: the row ---------------------------------------------------------------------------------------------

  (* ram_style = "block" *)
  logic [31:0]        row[MAX_N];
  logic [31:0]        x_q;      // of the memory
  logic [COUNT_W-1:0] index_q;  // of the number that comes in, is read, or is multiplied
  logic               last, put, put_last, drained, next;
  assign last      = index_q == n_i - COUNT_W'(1);
  assign x_ready_o = (state_q == TAKE) & drained;
  assign put       = x_valid_i & x_ready_o;
  assign put_last  = put & last;

  always_ff @(posedge clk_i) begin
    if (put) row[index_q[ADDR_W-1:0]] <= x_i;
    else x_q <= row[index_q[ADDR_W-1:0]];
  end

  // A number is sig * 2^(place - 150), its square is sig^2 * 2^(2 (place - 150)). n eps gets such a place, too: n has one
  // more zero behind it if that makes the exponent even.
  logic        eps_more;
  logic [7:0]  place, eps_place, largest_q;
  logic        unused_eps_sign;
  logic        has_nan_q, has_inf_q;
  assign place     = x_i[30:23] | 8'(x_i[30:23] == 8'h00);
  assign unused_eps_sign = eps_i[31];
  assign eps_more  = eps_i[23] ^ PAD[0];
  assign eps_place = eps_i[30:23] == 8'h00 ? 8'h00 : 8'((9'(eps_i[30:23]) + 9'(150 - PAD) - 9'(eps_more)) >> 1);

  always_ff @(posedge clk_i) begin
    if (put) begin
      largest_q <= index_q == '0 ? (place > eps_place ? place : eps_place) : (place > largest_q ? place : largest_q);
      has_nan_q <= (x_i[30:0] > 31'h7f800000) | ((index_q != '0) & has_nan_q);
      has_inf_q <= (x_i[30:0] == 31'h7f800000) | ((index_q != '0) & has_inf_q);
    end
  end

  // ---- the multiplier -----------------------------------------------------------------------------------------

  // step_q counts the clocks of a number in MULTIPLY: 0 its weight is taken; 1 and 2 w x; 3 that is normalized; 4 to 10
  // its parts times those of the root; 11 the result goes to the rounding.
  logic [3:0]  step_q;
  logic [31:0] w_q;
  logic [59:0] root;
  logic [47:0] wx_q, product_q;
  logic [23:0] x_sig, w_sig, wx_low, wx_high, eps_sig, left, right;
  logic [19:0] part;
  logic        odd;  // step
  logic        of_eps_q;  // x_q stands for eps
  assign x_sig   = {x_q[30:23] != 8'h00, x_q[22:0]};
  assign w_sig   = {w_q[30:23] != 8'h00, w_q[22:0]};
  assign wx_low  = wx_q[23:0];
  assign wx_high = wx_q[47:24];
  assign eps_sig = eps_i[30:23] == 8'h00 ? 24'h0 : {1'b1, eps_i[22:0]};
  assign odd     = step_q[0];
  assign part    = step_q[3:1] == 3'd2 ? root[19:0] : step_q[3:1] == 3'd3 ? root[39:20] : root[59:40];
  always_comb begin
    left  = x_sig;
    right = x_sig;
    if (state_q == MULTIPLY) begin
      if (step_q > 4'd3) left = odd ? wx_high : wx_low;
      right = step_q > 4'd3 ? {4'h0, part} : w_sig;
    end else if (of_eps_q) begin
      left  = eps_sig;
      right = 24'({1'b0, n_i, PAD'(0)}) << eps_more;
    end
  end
  always_ff @(posedge clk_i) product_q <= 48'(left) * 48'(right);

  // ---- 2: the sum ---------------------------------------------------------------------------------------------

  // A clock each: read, multiply, align, add. valid_q has a bit for each but the first.
  logic [2:0]        valid_q;
  logic              sums;  // a term begins
  logic [7:0]        x_place;
  logic [5:0]        right_q;
  logic [TERM_W-1:0] term_q;
  assign sums    = (state_q == SUM) & (index_q <= n_i);
  assign x_place = of_eps_q ? eps_place : x_q[30:23] | 8'(x_q[30:23] == 8'h00);
  always_ff @(posedge clk_i) begin
    of_eps_q <= index_q == n_i;
    right_q  <= largest_q - x_place > 8'd63 ? 6'd63 : 6'(largest_q - x_place);
    term_q   <= {product_q, GUARD'(0)} >> {right_q, 1'b0};
  end

  // ---- 3: the quotient and its root ---------------------------------------------------------------------------

  // value_q is the sum, then, with its first one at the top, the divisor, and at last the root, in its lowest bits.
  // The quotient grows until one of its highest two bits is 1 and its exponent is even: from 1/4 to 1, in 2^-64. Then it
  // leaves from above, two bits a clock, and the first bit of the root, from 1/2 to 1, is a one.
  localparam int EXP = COUNT_W + 1 + GUARD - SUM_W;  // of the quotient if exp_q is 0 and the largest number's place 150
  logic [SUM_W-1:0]   value_q;
  logic [63:0]        quotient_q, rest_q;
  logic signed [8:0]  exp_q;  // sum: zeros above it; then that of the quotient, without that of the largest number
  logic signed [10:0] even_exp, root_exp;
  logic               is_zero, divided, rooted, fits;
  logic [64:0]        minuend, subtrahend;
  assign root       = value_q[59:0];
  assign is_zero    = exp_q == 9'(SUM_W);
  assign divided    = (quotient_q[63:62] != 2'b00) & (exp_q[0] == EXP[0]);
  assign rooted     = value_q[59];
  assign minuend    = state_q == DIVIDE ? {rest_q, 1'b0} : {rest_q[62:0], quotient_q[63:62]};
  assign subtrahend = state_q == DIVIDE ? {1'b0, value_q[SUM_W-1-:64]} : {3'b0, root, 2'b01};
  assign fits       = minuend >= subtrahend;
  // 1 / sqrt(mean + eps) = root * 2^(root_exp - 60).
  assign even_exp   = 11'(exp_q) + 11'(64 + EXP);
  assign root_exp   = (even_exp >>> 1) - $signed({3'b0, largest_q}) + 11'sd150;

  always_ff @(posedge clk_i) begin
    case (state_q)
      SUM: begin
        if (valid_q[2]) value_q <= value_q + SUM_W'(term_q);
        exp_q <= '0;
      end
      NORMALIZE: begin
        if (~value_q[SUM_W-1] & ~is_zero) begin
          value_q <= value_q << 1;
          exp_q   <= exp_q + 9'sd1;
        end
        quotient_q <= '0;
        rest_q     <= {1'b0, n_i, (63 - COUNT_W)'(0)};
      end
      DIVIDE, ROOT: begin
        if (divided & (state_q == DIVIDE)) begin
          value_q <= '0;
          rest_q  <= '0;
        end else if (~rooted | (state_q == DIVIDE)) begin
          rest_q <= 64'(fits ? minuend - subtrahend : minuend);
          if (state_q == DIVIDE) begin
            quotient_q <= {quotient_q[62:0], fits};
            exp_q      <= exp_q - 9'sd1;
          end else begin
            quotient_q <= quotient_q << 2;
            value_q    <= {value_q[SUM_W-2:0], fits};
          end
        end
      end
      TAKE: value_q <= '0;
      default: ;
    endcase
  end

  // ---- 4: results ---------------------------------------------------------------------------------------------

  // special: the result is not made by multiplication.
  logic               x_zero, w_zero, x_big, w_big, is_nan, special, wx_normal, en, leaves;
  logic [5:0]         zeros_q;  // above w x, where it has been shifted
  logic [67:0]        sum_q;    // of the parts so far, without 20 bits a part of the root
  logic               lost_q;   // one of those was 1
  logic [7:0]         w_place;
  logic signed [10:0] exp;
  assign w_place   = w_q[30:23] | 8'(w_q[30:23] == 8'h00);
  assign x_zero    = x_q[30:0] == 31'h0;
  assign w_zero    = w_q[30:0] == 31'h0;
  assign x_big     = x_q[30:23] == 8'hff;
  assign w_big     = w_q[30:23] == 8'hff;
  assign is_nan    = has_nan_q | (w_q[30:0] > 31'h7f800000) | is_zero | x_big | (w_big & (x_zero | has_inf_q));
  assign special   = is_nan | w_big | x_zero | w_zero | has_inf_q;
  assign wx_normal = special | (wx_q[47:46] != 2'b00);
  assign exp       = 11'(x_place) + 11'(w_place) + root_exp - 11'(zeros_q) - 11'sd126;

  assign w_ready_o = (state_q == MULTIPLY) & (step_q == 4'd0);
  assign en        = ready_i | ~valid_o;
  assign leaves    = step_q == 4'd11;
  assign next      = leaves & en;

  always_ff @(posedge clk_i) begin
    if (w_valid_i & w_ready_o) w_q <= w_i;
    if (step_q == 4'd2) begin
      wx_q    <= product_q;
      zeros_q <= '0;
    end else if (step_q == 4'd3 & ~wx_normal) begin
      wx_q    <= wx_q << 1;
      zeros_q <= zeros_q + 6'd1;
    end
    if (step_q == 4'd4) begin
      sum_q  <= '0;
      lost_q <= 1'b0;
    end else if (step_q > 4'd4 & ~leaves) begin
      if (odd) begin
        sum_q  <= 68'(sum_q[67:20]) + 68'(product_q);
        lost_q <= lost_q | (sum_q[19:0] != 20'h0);
      end else begin
        sum_q <= sum_q + {product_q[43:0], 24'h0};
      end
    end
  end

  logic [2:0] round_valid_q, round_last_q;
  assign valid_o = round_valid_q[2];
  assign last_o  = round_last_q[2];
  assign drained = round_valid_q == 3'b000;
  fp32_round #(
      .SIG_W(32)
  ) u_round (
      .clk_i,
      .en_i     (en),
      .sign_i   (x_q[31] ^ w_q[31]),
      .exp_i    (exp),
      .sig_i    ({sum_q[67:37], lost_q | (sum_q[36:0] != 37'h0)}),
      .special_i(special),
      .value_i  (is_nan ? 32'h7fc00000 : {x_q[31] ^ w_q[31], w_big ? 8'hff : 8'h00, 23'h0}),
      .f_o      (y_o)
  );

  // ---- what comes next ----------------------------------------------------------------------------------------

  always_ff @(posedge clk_i) begin
    if (en) round_last_q <= {round_last_q[1:0], last};
    if (!rst_ni) begin
      state_q       <= TAKE;
      index_q       <= '0;
      valid_q       <= '0;
      step_q        <= 4'd0;
      round_valid_q <= '0;
    end else begin
      valid_q <= {valid_q[1:0], sums};
      if (en) round_valid_q <= {round_valid_q[1:0], leaves};
      if (put_last | (next & last)) index_q <= '0;
      else if (put | sums | next) index_q <= index_q + COUNT_W'(1);
      else if (state_q == NORMALIZE) index_q <= '0;
      case (state_q)
        TAKE: if (put_last) state_q <= SUM;
        SUM: if (~sums & (valid_q == '0)) state_q <= NORMALIZE;
        NORMALIZE: if (value_q[SUM_W-1] | is_zero) state_q <= is_zero ? MULTIPLY : DIVIDE;
        DIVIDE: if (divided) state_q <= ROOT;
        ROOT: if (rooted) state_q <= MULTIPLY;
        default: if (next & last) state_q <= TAKE;
      endcase
      if (step_q == 4'd0) step_q <= {3'd0, w_valid_i & w_ready_o};
      else if (next) step_q <= 4'd0;
      else if (~leaves & ((step_q != 4'd3) | wx_normal)) step_q <= step_q + 4'd1;
    end
  end

  handshake #(
      .WIDTH(32)
  ) u_x (
      .clk_i,
      .rst_ni,
      .valid_i(x_valid_i),
      .ready_i(x_ready_o),
      .data_i (x_i)
  );
  handshake #(
      .WIDTH(32)
  ) u_w (
      .clk_i,
      .rst_ni,
      .valid_i(w_valid_i),
      .ready_i(w_ready_o),
      .data_i (w_i)
  );
  handshake #(
      .WIDTH(33)
  ) u_y (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i ({last_o, y_o})
  );

endmodule
