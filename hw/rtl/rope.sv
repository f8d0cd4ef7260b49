// Rotates adjacent pairs of a head, as `rope` of runq.cpp: (a, b) becomes (a cos - b sin, a sin + b cos).
//
// A pair comes as two words: a with its cosine, then b with its sine. The results, fp32, are fma(a, cos, -fp32(b sin)) and
// fma(a, sin, fp32(b cos)): one fp32_fma does all four operations in turn, a product as a sum with -0.
//
// Handshake: valid and ready on both sides. Latency: 14 clocks from the second word to the first result. Throughput: a pair
// in 18 clocks. Reset drops all.

module rope (
    input  logic        clk_i,
    input  logic        rst_ni,
    input  logic        valid_i,
    output logic        ready_o,
    input  logic [31:0] x_i,      // a, then b
    input  logic [31:0] turn_i,   // cosine, then sine
    output logic        valid_o,
    input  logic        ready_i,
    output logic [31:0] y_o
);

  // Words of the pair that are there; then the clock since; then results that are to go.
  logic [1:0]  taken_q, results_q;
  logic [3:0]  clock_q;
  logic [31:0] a_q, b_q, cos_q, sin_q, first_q, second_q;
  logic        take, give;
  assign ready_o = ~taken_q[1];
  assign take    = valid_i & ready_o;
  assign valid_o = results_q != 2'd0;
  assign give    = valid_o & ready_i;
  assign y_o     = results_q == 2'd2 ? first_q : second_q;

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      taken_q   <= '0;
      results_q <= '0;
      clock_q   <= '0;
    end else begin
      if (take) taken_q <= taken_q + 2'd1;
      if (taken_q[1] & (clock_q != 4'd14)) clock_q <= clock_q + 4'd1;
      if (clock_q == 4'd13) results_q <= 2'd2;
      if (give) results_q <= results_q - 2'd1;
      if (give & (results_q == 2'd1)) begin
        taken_q <= '0;
        clock_q <= '0;
      end
    end
  end

  // Clocks 0 and 1: the products with b; 6 and 7, when these are there: the sums.
  logic [31:0] factor, by, addend, result;
  assign factor = clock_q < 4'd6 ? b_q : a_q;
  assign by     = (clock_q == 4'd0) | (clock_q == 4'd7) ? sin_q : cos_q;
  assign addend = clock_q < 4'd6 ? 32'h80000000 : {result[31] ^ (clock_q == 4'd6), result[30:0]};
  fp32_fma u_fma (
      .clk_i,
      .en_i(1'b1),
      .a_i (factor),
      .b_i (by),
      .c_i (addend),
      .f_o (result)
  );
  always_ff @(posedge clk_i) begin
    if (take & ~taken_q[0]) begin
      a_q   <= x_i;
      cos_q <= turn_i;
    end
    if (take & taken_q[0]) begin
      b_q   <= x_i;
      sin_q <= turn_i;
    end
    if (clock_q == 4'd12) first_q <= result;
    if (clock_q == 4'd13) second_q <= result;
  end

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i (y_o)
  );

endmodule
