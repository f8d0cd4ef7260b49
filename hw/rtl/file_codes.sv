// Codes out of the bytes of a GPTQ file: LANES codes that are neighbours in a row of weights.
//
// A file packs a block of B bytes (64; at the end of a row 32 or 16) so that byte j has the codes j, j + B, j + 2B, ... of
// the block, from its lowest bits up: docs/model-files.md, "GPTQ". So lane j takes its code from byte j, and slice_i,
// which code of each byte, is the only choice: the same bytes are used 2 or 4 times. A block that is longer than LANES is
// taken LANES bytes at a time.
//
// Combinational.

module file_codes #(
    parameter int LANES = 16
) (
    input  logic               two_bits_i,  // codes have 2 bits, otherwise 4
    input  logic [1:0]         slice_i,     // 0 .. 3, or 0 .. 1 with 4 bits
    input  logic [LANES*8-1:0] bytes_i,
    output logic [LANES*4-1:0] codes_o      // those of 2 bits have two zeros above
);

  for (genvar i = 0; i < LANES; i++) begin : gen_lane
    logic [3:0] code;
    assign code            = 4'(bytes_i[i*8+:8] >> (two_bits_i ? {slice_i, 1'b0} : {slice_i[0], 2'b00}));
    assign codes_o[i*4+:4] = two_bits_i ? {2'b00, code[1:0]} : code;
  end

endmodule
