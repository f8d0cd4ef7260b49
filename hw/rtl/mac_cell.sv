// A cell of the systolic array: sum_o = sum_i + weight * x_i, a clock later.
//
// The cell has two weight registers. `load_i` writes w_i into the second one while the first is at work; `swap_i`, which
// comes with the first token of a tile, makes the second weight the first, and that token is multiplied by it already.
// This is what a cell of bench/systolic.py does in a cycle.
//
// Latency: 1 clock from x_i and sum_i to sum_o; x_o, swap_o and load_o are x_i, swap_i and load_i a clock later.
// Handshake: none. While en_i is 0 the cell stands still. Reset clears the flags; weights and sums need none.

module mac_cell #(
    parameter int X_W   = 8,   // bits of an activation, signed
    parameter int W_W   = 8,   // bits of a weight, signed
    parameter int SUM_W = 20   // bits of a sum, signed: the caller derives it from the largest sum
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    en_i,
    // From the left, and on to the right.
    input  logic signed [X_W-1:0]   x_i,
    input  logic                    swap_i,
    input  logic                    load_i,
    output logic signed [X_W-1:0]   x_o,
    output logic                    swap_o,
    output logic                    load_o,
    // The weight that load_i takes in.
    input  logic signed [W_W-1:0]   w_i,
    // From above, and on down.
    input  logic signed [SUM_W-1:0] sum_i,
    output logic signed [SUM_W-1:0] sum_o
);

  logic signed [W_W-1:0] weight_q, next_weight_q, weight;

  assign weight = swap_i ? next_weight_q : weight_q;

  always_ff @(posedge clk_i) begin
    if (en_i) begin
      weight_q <= weight;
      if (load_i) next_weight_q <= w_i;
      x_o   <= x_i;
      sum_o <= sum_i + SUM_W'(x_i * weight);
    end
  end

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      swap_o <= 1'b0;
      load_o <= 1'b0;
    end else if (en_i) begin
      swap_o <= swap_i;
      load_o <= load_i;
    end
  end

endmodule
