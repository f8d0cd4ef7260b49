// The number of zeros above the first one of a word, as a tree: a level of gates for each bit of the number. (Of a loop
// over the bits Yosys makes a chain as long as the word.) Of a word of zeros it is W, or W - 1 if W is a power of two.
//
// Combinational.

module leading_zeros #(
    parameter int W = 48,
    localparam int COUNT_W = $clog2(W)
) (
    input  logic [W-1:0]       word_i,
    output logic [COUNT_W-1:0] zeros_o
);

  // Level l has nodes of 2^l bits each, node 0 at the top: whether all bits are 0, and how many are above the first one.
  // What the word lacks to a power of two is ones, at the bottom.
  for (genvar l = 0; l <= COUNT_W; l++) begin : gen_level
    localparam int NODES = 1 << (COUNT_W - l);
    logic [NODES-1:0]         empty;
    logic [NODES*COUNT_W-1:0] count;
    for (genvar i = 0; i < NODES; i++) begin : gen_node
      if (l == 0) begin : gen_bit
        assign empty[i]                  = i < W ? ~word_i[i<W?W-1-i : 0] : 1'b0;
        assign count[i*COUNT_W+:COUNT_W] = '0;
      end else begin : gen_pair
        logic               left_empty;
        logic [COUNT_W-1:0] left, right;
        assign left_empty                = gen_level[l-1].empty[2*i];
        assign left                      = gen_level[l-1].count[2*i*COUNT_W+:COUNT_W];
        assign right                     = gen_level[l-1].count[(2*i+1)*COUNT_W+:COUNT_W] | COUNT_W'(1 << (l - 1));
        assign empty[i]                  = left_empty & gen_level[l-1].empty[2*i+1];
        assign count[i*COUNT_W+:COUNT_W] = left_empty ? right : left;
      end
    end
  end
  logic unused_empty;
  assign zeros_o      = gen_level[COUNT_W].count;
  assign unused_empty = gen_level[COUNT_W].empty;

endmodule
