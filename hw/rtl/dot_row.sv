// One row of multipliers, as wide as memory: sums of products for decode, where each weight is used once.
//
// A word has LANES weights of one output, in the order of its inputs, and the LANES activations that go with them. The
// products of a word are added in a tree of registers, and words are added up until the one marked last_i: that sum,
// of a group or of a row, comes out, and the next begins at 0. An array with as many cells but a row and a column takes
// LANES weights a clock, too, when it has but one token; this takes LANES multipliers for it.
//
// Latency: 2 + clog2(LANES) clocks from the last word to its sum. Throughput: a word a clock.
// Handshake: valid and ready on both sides; a word, or a sum, passes in a clock in which both are 1. valid_o does not
// wait for ready_i, and sum_o stays while it waits. ready_o depends on ready_i in the same clock.
//
// SUM_W has room for PRODUCTS products of the extremes: docs/hardware.md, "Bits".

module dot_row #(
    parameter int LANES    = 16,
    parameter int X_W      = 8,
    parameter int W_W      = 8,
    parameter int X_MAX    = 128,  // largest magnitude of an activation, and
    parameter int W_MAX    = 128,  // of a weight
    parameter int PRODUCTS = 64,   // of the longest sum; a multiple of LANES
    localparam int SUM_W = $clog2(PRODUCTS * X_MAX * W_MAX + 1) + 1
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    valid_i,
    output logic                    ready_o,
    input  logic [LANES*X_W-1:0]    x_i,
    input  logic [LANES*W_W-1:0]    w_i,
    input  logic                    last_i,
    output logic                    valid_o,
    input  logic                    ready_i,
    output logic signed [SUM_W-1:0] sum_o
);

  localparam int LEVELS = $clog2(LANES);
  localparam int TREE_W = $clog2(LANES * X_MAX * W_MAX + 1) + 1;

  // Everything moves unless a sum waits at the end.
  logic en;
  assign en      = ready_i | ~valid_o;
  assign ready_o = en;

  // Level 0 has the products, level l sums of 2^l of them. Lanes beyond LANES are 0.
  logic signed [TREE_W-1:0] tree_q[(LEVELS+1)*(1<<LEVELS)];
  for (genvar l = 0; l <= LEVELS; l++) begin : gen_level
    for (genvar i = 0; i < (1 << (LEVELS - l)); i++) begin : gen_node
      if (l > 0) begin : gen_sum
        always_ff @(posedge clk_i) begin
          if (en) begin
            tree_q[(l<<LEVELS)+i] <= tree_q[((l-1)<<LEVELS)+2*i] + tree_q[((l-1)<<LEVELS)+2*i+1];
          end
        end
      end else if (i < LANES) begin : gen_product
        logic signed [X_W-1:0] x;
        logic signed [W_W-1:0] w;
        assign x = x_i[i*X_W+:X_W];
        assign w = w_i[i*W_W+:W_W];
        always_ff @(posedge clk_i) if (en) tree_q[i] <= TREE_W'(x * w);
      end else begin : gen_none
        assign tree_q[i] = '0;
      end
    end
  end

  // Flags go along with each level.
  logic [LEVELS:0] valid_q, last_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en) valid_q <= (LEVELS + 1)'({valid_q, valid_i});
    if (en) last_q <= (LEVELS + 1)'({last_q, last_i});
  end

  // The sum of the words so far; `open_q` while there are some.
  logic open_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      open_q  <= 1'b0;
      valid_o <= 1'b0;
    end else if (en) begin
      valid_o <= valid_q[LEVELS] & last_q[LEVELS];
      if (valid_q[LEVELS]) open_q <= ~last_q[LEVELS];
    end
    if (en & valid_q[LEVELS]) sum_o <= (open_q ? sum_o : '0) + SUM_W'(tree_q[LEVELS<<LEVELS]);
  end

endmodule
