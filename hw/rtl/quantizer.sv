// Where activations come in: groups of fp32 numbers to int8 codes and an fp32 scale for each group.
//
//   amax  = max |x|, NaN not counting
//   inv   = fp32(127 / amax), or 0 if that is not finite     static: fp32(1 / static_scale_i), or 0
//   scale = fp32(amax / 127), or 0 if inv is 0               static: static_scale_i
//   code  = fp32(x * inv), rounded half to even, clamped to -127..127; NaN becomes -127
//
// These are quantize_group of runq.cpp and, with static_i, that of runq_w8a8.cpp, to the bit. A group is a
// group of Q8, a row of W8A8, or a block of 32: it ends with the number that last_i marks, and has MAX_N at most.
//
// A buffer has two halves. One takes in a group while the codes of the one before leave the other, so that a group of n
// takes about n + 18 clocks in a stream of them: while one half waits for its division, the other can only be filled.
// Latency: n + 40 clocks from a group's first number to its first code, if both pass without a wait.
//
// Handshake: valid and ready on both sides; a number, or a code, passes in a clock in which both are 1. scale_o and last_o
// come with each code, and all of them stay while they wait for ready_i. static_i and static_scale_i are looked at with
// the last number of a group. Reset drops all.

module quantizer #(
    parameter int MAX_N = 2048  // numbers of the longest group; a power of 2, 2 at least
) (
    input  logic              clk_i,
    input  logic              rst_ni,
    input  logic              static_i,
    input  logic [31:0]       static_scale_i,
    // Numbers.
    input  logic              valid_i,
    output logic              ready_o,
    input  logic [31:0]       x_i,
    input  logic              last_i,
    // Codes.
    output logic              valid_o,
    input  logic              ready_i,
    output logic signed [7:0] code_o,
    output logic [31:0]       scale_o,
    output logic              last_o
);

  localparam int ADDR_W = $clog2(MAX_N);

  // ---- in: a group into half in_half_q -------------------------------------------------------------------------

  logic [31:0]       buffer[2*MAX_N];
  logic              in_half_q;
  logic [ADDR_W-1:0] in_addr_q;
  logic [30:0]       amax_q, amax;

  // Of each half: whether it has a group, its last address, and its largest magnitude or its static scale.
  logic [1:0]        full_q, static_q;
  logic [ADDR_W-1:0] last_addr_0_q, last_addr_1_q;
  logic [31:0]       value_0_q, value_1_q;

  logic put, put_last, group_leaves, out_half_q;
  assign ready_o  = ~full_q[in_half_q];
  assign put      = valid_i & ready_o;
  assign put_last = put & last_i;

  // Magnitudes compare like integers; those beyond infinity are NaN.
  assign amax = (x_i[30:0] > amax_q) & (x_i[30:0] <= 31'h7f800000) ? x_i[30:0] : amax_q;

  always_ff @(posedge clk_i) begin
    if (put) buffer[{in_half_q, in_addr_q}] <= x_i;
    if (put_last) begin
      static_q[in_half_q] <= static_i;
      if (in_half_q) begin
        last_addr_1_q <= in_addr_q;
        value_1_q     <= static_i ? static_scale_i : {1'b0, amax};
      end else begin
        last_addr_0_q <= in_addr_q;
        value_0_q     <= static_i ? static_scale_i : {1'b0, amax};
      end
    end
  end

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      in_half_q <= 1'b0;
      in_addr_q <= '0;
      amax_q    <= '0;
      full_q    <= 2'b00;
    end else begin
      if (put) begin
        in_half_q <= in_half_q ^ last_i;
        in_addr_q <= last_i ? '0 : in_addr_q + ADDR_W'(1);
        amax_q    <= last_i ? '0 : amax;
      end
      if (put_last) full_q[in_half_q] <= 1'b1;
      if (group_leaves) full_q[out_half_q] <= 1'b0;
    end
  end

  // ---- both quotients of half divide_half_q --------------------------------------------------------------------

  logic        divide_half_q, divide, divided, take, is_static;
  logic [1:0]  begun_q;  // of each half: the division of its group has begun
  logic        inv_ready, scale_ready, inv_valid, scale_valid;
  logic [31:0] value, inv, scale;
  assign is_static = static_q[divide_half_q];
  assign value     = divide_half_q ? value_1_q : value_0_q;
  assign divide    = full_q[divide_half_q] & ~begun_q[divide_half_q] & inv_ready & scale_ready;
  assign divided   = inv_valid & scale_valid;

  fp32_div u_inv (
      .clk_i,
      .rst_ni,
      .valid_i(divide),
      .ready_o(inv_ready),
      .a_i    (is_static ? 32'h3f800000 : 32'h42fe0000),  // 1 or 127
      .b_i    (value),
      .valid_o(inv_valid),
      .ready_i(take),
      .q_o    (inv)
  );
  // A static scale is divided by 1, which leaves it as it is.
  fp32_div u_scale (
      .clk_i,
      .rst_ni,
      .valid_i(divide),
      .ready_o(scale_ready),
      .a_i    (value),
      .b_i    (is_static ? 32'h3f800000 : 32'h42fe0000),
      .valid_o(scale_valid),
      .ready_i(take),
      .q_o    (scale)
  );

  // ---- out: the codes of half out_half_q -----------------------------------------------------------------------

  // Everything moves unless a code waits at the end.
  logic en;
  assign en = ready_i | ~valid_o;

  logic              busy_q, is_usable;
  logic [ADDR_W-1:0] out_addr_q;
  logic [31:0]       inv_q, scale_q;
  assign take         = divided & ~busy_q;
  assign is_usable    = (inv[30:23] != 8'hff) & (inv[30:0] != 31'h0);
  assign group_leaves = busy_q & en & (out_addr_q == (out_half_q ? last_addr_1_q : last_addr_0_q));

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      divide_half_q <= 1'b0;
      begun_q       <= 2'b00;
      out_half_q    <= 1'b0;
      busy_q        <= 1'b0;
    end else begin
      if (divide) begin
        divide_half_q          <= ~divide_half_q;
        begun_q[divide_half_q] <= 1'b1;
      end
      if (take) busy_q <= 1'b1;
      if (group_leaves) begin
        busy_q              <= 1'b0;
        out_half_q          <= ~out_half_q;
        begun_q[out_half_q] <= 1'b0;
      end
    end
    if (take) begin
      inv_q      <= is_usable ? inv : 32'h0;
      scale_q    <= is_usable | static_q[out_half_q] ? scale : 32'h0;
      out_addr_q <= '0;
    end else if (busy_q & en) begin
      out_addr_q <= out_addr_q + ADDR_W'(1);
    end
  end

  // Clocks 1 and 2: read, as a large memory takes most of a clock. Clocks 3 to 7: multiply. Clock 8: round. A group's inverse
  // and scale may change when its last number has been read, so that they go along.
  logic [31:0] read_q, x_q, inv_read_q, inv_read_qq, product;
  always_ff @(posedge clk_i) begin
    if (en) begin
      read_q      <= buffer[{out_half_q, out_addr_q}];
      x_q         <= read_q;
      inv_read_q  <= inv_q;
      inv_read_qq <= inv_read_q;
    end
  end

  fp32_mul u_mul (
      .clk_i,
      .en_i(en),
      .a_i (x_q),
      .b_i (inv_read_qq),
      .p_o (product)
  );
  fp32_to_code u_to_code (
      .clk_i,
      .en_i(en),
      .f_i (product),
      .code_o
  );

  logic [7:0] valid_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en) valid_q <= {valid_q[6:0], busy_q};
  end
  assign valid_o = valid_q[7];

  delay #(
      .WIDTH (33),
      .CLOCKS(8)
  ) u_scale_and_last (
      .clk_i,
      .en_i  (en),
      .data_i({scale_q, group_leaves}),
      .data_o({scale_o, last_o})
  );

endmodule
