// hw/chip/soft_mul.v, for Icarus, with the ECP5's cells as Yosys has them: all products of two numbers of 8 bits.
`timescale 1ns / 1ps

module soft_mul_tb;
  reg signed [7:0] a, b;
  wire signed [18:0] y;
  soft_mul #(.Y_WIDTH(19)) u_soft_mul (.A(a), .B(b), .Y(y));
  integer n, wrong;
  initial begin
    wrong = 0;
    for (n = 0; n < 65536; n = n + 1) begin
      {a, b} = n;
      #1 if (y !== a * b) wrong = wrong + 1;
    end
    if (wrong == 0) $display("equal: %0d products", n);
    else $display("FAILED: %0d products are wrong", wrong);
    $finish;
  end
endmodule
