// GPTQ's codes to the weights w' that the array multiplies by, in -15..15: docs/gptq.md, "Five ways to store a matrix".
//
//   4 bits, 2 bits       code - zero
//   2 bits, two-level    5 * code - zero          zero: z, the high half of the group's byte
//   4 bits, 2:4 sparse   code - zero for the two of each four weights that mask_i keeps, 0 for the others
//
// A scale then gives their values. (Codes of 8 bits are w' as they are.) Every lane has a zero point of its own: lanes that
// are neighbours in a row of weights mostly share one, lanes that are different outputs do not.
//
// Sparse codes come as LANES / 2 in the lower lanes of codes_i, in order: those of lanes 2q and 2q + 1 go to the lanes that
// mask_i keeps among 4q .. 4q + 3.
//
// Latency: 1 clock, a word a clock. Handshake: none; it stands still while en_i is 0.

module weight_expander #(
    parameter int LANES = 16,  // a multiple of 4
    localparam int W_W = 5     // bits of w'
) (
    input  logic                 clk_i,
    input  logic                 en_i,
    input  logic                 two_level_i,
    input  logic                 sparse_i,
    input  logic [LANES*4-1:0]   codes_i,
    input  logic [LANES*4-1:0]   zeros_i,
    input  logic [LANES-1:0]     mask_i,   // sparse: two 1s in each four
    output logic [LANES*W_W-1:0] w_o
);

  for (genvar i = 0; i < LANES; i++) begin : gen_lane
    // The code of a sparse lane is the second of its four if one before it in the four is kept.
    localparam int FOUR = i / 4 * 4;
    logic [3:0] code, sparse_code, steps, zero;
    logic       second, kept;
    if (i == FOUR) begin : gen_first
      assign second = 1'b0;
    end else begin : gen_other
      assign second = |mask_i[i-1:FOUR];
    end
    assign sparse_code = second ? codes_i[(FOUR/2+1)*4+:4] : codes_i[(FOUR/2)*4+:4];
    assign code        = sparse_i ? sparse_code : codes_i[i*4+:4];
    assign zero        = zeros_i[i*4+:4];
    assign kept        = ~sparse_i | mask_i[i];

    // 5 * code is at most 15: two-level codes are 0 .. 3.
    logic [W_W-1:0] w;
    assign steps = two_level_i ? {code[1:0], 2'b00} + {2'b00, code[1:0]} : code;
    assign w     = W_W'(steps) - W_W'(zero);
    always_ff @(posedge clk_i) if (en_i) w_o[i*W_W+:W_W] <= kept ? w : '0;
  end

endmodule
