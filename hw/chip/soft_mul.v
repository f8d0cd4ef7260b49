// For Yosys' techmap: a product of signed numbers by adders instead of a DSP, for the cells that the chip has no DSP for.
// Partial products are added in a tree, that of the sign bit of B is subtracted. $alu, rather than +, keeps Yosys from
// making one sum of many numbers of them, which takes three times the LUTs.

(* techmap_celltype = "$mul" *)
module soft_mul (A, B, Y);
  parameter A_SIGNED = 1;
  parameter B_SIGNED = 1;
  parameter A_WIDTH = 8;
  parameter B_WIDTH = 8;
  parameter Y_WIDTH = 16;
  input [A_WIDTH-1:0] A;
  input [B_WIDTH-1:0] B;
  output [Y_WIDTH-1:0] Y;

  wire _TECHMAP_FAIL_ = !A_SIGNED || !B_SIGNED || A_WIDTH != 8 || B_WIDTH != 8 || Y_WIDTH < 16;

  // Pairs of partial products, two bits of B each: 10 bits, in multiples of 1, 4, 16, 64. Then two of those, and all.
  wire signed [9:0] pair0, pair1, pair2, pair3;
  wire signed [12:0] low, high;
  wire signed [15:0] product;
  wire signed [8:0] a = $signed(A);
  sum #(.W(10)) s0 (.A(B[0] ? {a[8], a} : 10'd0), .B(B[1] ? {a, 1'b0} : 10'd0), .MINUS(1'b0), .Y(pair0));
  sum #(.W(10)) s1 (.A(B[2] ? {a[8], a} : 10'd0), .B(B[3] ? {a, 1'b0} : 10'd0), .MINUS(1'b0), .Y(pair1));
  sum #(.W(10)) s2 (.A(B[4] ? {a[8], a} : 10'd0), .B(B[5] ? {a, 1'b0} : 10'd0), .MINUS(1'b0), .Y(pair2));
  sum #(.W(10)) s3 (.A(B[6] ? {a[8], a} : 10'd0), .B(B[7] ? {a, 1'b0} : 10'd0), .MINUS(1'b1), .Y(pair3));
  sum #(.W(13)) s4 (.A({{3{pair0[9]}}, pair0}), .B({pair1[9], pair1, 2'b00}), .MINUS(1'b0), .Y(low));
  sum #(.W(13)) s5 (.A({{3{pair2[9]}}, pair2}), .B({pair3[9], pair3, 2'b00}), .MINUS(1'b0), .Y(high));
  sum #(.W(16)) s6 (.A({{3{low[12]}}, low}), .B({high[11:0], 4'b0000}), .MINUS(1'b0), .Y(product));
  assign Y = {{(Y_WIDTH > 16 ? Y_WIDTH - 16 : 0) {product[15]}}, product};
endmodule

module sum #(
    parameter W = 10
) (
    input [W-1:0] A,
    input [W-1:0] B,
    input MINUS,
    output [W-1:0] Y
);
  wire [W-1:0] unused_x, unused_co;
  \$alu #(.A_SIGNED(1), .B_SIGNED(1), .A_WIDTH(W), .B_WIDTH(W), .Y_WIDTH(W)) _TECHMAP_REPLACE_ (
      .A(A), .B(B), .BI(MINUS), .CI(MINUS), .Y(Y),       .X(unused_x), .CO(unused_co));
endmodule
