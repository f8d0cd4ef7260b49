// Activations of 8 bits as two digits of 4, x = 16 high + low + 8, both in -8..7 (MSD, the most significant digit first):
// docs/moe.md, "A8W4, directly and by the MSD split".
//
// high is the upper half of the byte. low is the lower half with its first bit inverted, which takes 8 off.
// Combinational.

module msd_split #(
    parameter int LANES = 16
) (
    input  logic [LANES*8-1:0] x_i,
    output logic [LANES*4-1:0] high_o,
    output logic [LANES*4-1:0] low_o
);

  for (genvar i = 0; i < LANES; i++) begin : gen_lane
    assign high_o[i*4+:4] = x_i[i*8+4+:4];
    assign low_o[i*4+:4]  = x_i[i*8+:4] ^ 4'b1000;
  end

endmodule
