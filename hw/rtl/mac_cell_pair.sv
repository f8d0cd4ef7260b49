// Two neighbours of a row of cells with one multiplier: both take the same activation, and one product of 27 x 18 bits,
// which is what a DSP48E2 of AMD's UltraScale+ has, holds both of theirs.
//
//   (w1 * 2^18 + w0) * x = w1 * x * 2^18 + w0 * x
//
// The lower product is bits 17 .. 0, signed; where it is negative, it has borrowed 1 from the upper one. Seen from outside
// this is two mac_cells of 8 bits whose right one takes its activation, its swap and its load a clock later: the two sums
// come out in the same clocks. Ports are those of mac_cell.sv, `_0` the left cell's and `_1` the right cell's.
//
// Latency: 1 clock from x_i and sum_0_i to sum_0_o, 2 to the right cell's sum, as from one cell to the next.

module mac_cell_pair #(
    parameter int SUM_W = 20  // bits of a sum, signed
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    en_i,
    input  logic signed [7:0]       x_i,
    input  logic                    swap_i,
    input  logic                    load_i,
    output logic signed [7:0]       x_o,
    output logic                    swap_o,
    output logic                    load_o,
    input  logic signed [7:0]       w_0_i,
    input  logic signed [7:0]       w_1_i,      // a clock behind w_0_i, as the array's skew has it
    input  logic signed [SUM_W-1:0] sum_0_i,
    input  logic signed [SUM_W-1:0] sum_1_i,
    output logic signed [SUM_W-1:0] sum_0_o,
    output logic signed [SUM_W-1:0] sum_1_o
);

  // The left cell's weights, and the right one's, which are loaded and swapped a clock later.
  logic signed [7:0] weight_0_q, next_0_q, weight_0, weight_1_q, next_1_q, weight_1;
  logic signed [7:0] x_q;
  logic              swap_q, load_q;

  // The right cell multiplies a clock later than the left one. So that both products are of one clock, the right cell's is
  // made early, by the weight that it will have, and waits for a clock.
  assign weight_0 = swap_i ? next_0_q : weight_0_q;
  assign weight_1 = swap_i ? (load_q ? w_1_i : next_1_q) : weight_1_q;

  logic signed [26:0] both;
  logic signed [44:0] product;
  logic signed [17:0] low;
  logic signed [15:0] high, high_q;
  assign both    = (27'(weight_1) <<< 18) + 27'(weight_0);
  assign product = both * 18'(x_i);
  assign low     = product[17:0];
  assign high    = 16'(product[44:18]) + 16'(product[17]);

  always_ff @(posedge clk_i) begin
    if (en_i) begin
      weight_0_q <= weight_0;
      weight_1_q <= weight_1;
      if (load_i) next_0_q <= w_0_i;
      if (load_q) next_1_q <= w_1_i;
      x_q     <= x_i;
      x_o     <= x_q;
      high_q  <= high;
      sum_0_o <= sum_0_i + SUM_W'(low);
      sum_1_o <= sum_1_i + SUM_W'(high_q);
    end
  end

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      swap_q <= 1'b0;
      load_q <= 1'b0;
      swap_o <= 1'b0;
      load_o <= 1'b0;
    end else if (en_i) begin
      swap_q <= swap_i;
      load_q <= load_i;
      swap_o <= swap_q;
      load_o <= load_q;
    end
  end

endmodule
