// A code of 8 bits, two's complement, to fp32: exact.
//
// Combinational.

module code_to_fp32 (
    input  logic [7:0]  code_i,
    output logic [31:0] f_o
);

  // The magnitude, up to 128, is brought to the top: its first bit then stands for 2^(7 - zeros).
  logic [7:0] magnitude, normal;
  logic [2:0] zeros;
  logic       unused_one;
  assign magnitude = code_i[7] ? -code_i : code_i;
  leading_zeros #(
      .W(8)
  ) u_leading_zeros (
      .word_i (magnitude),
      .zeros_o(zeros)
  );
  assign normal     = magnitude << zeros;
  assign unused_one = normal[7];
  assign f_o        = magnitude == 8'd0 ? 32'h0 : {code_i[7], 8'd134 - 8'(zeros), normal[6:0], 16'h0};

endmodule
