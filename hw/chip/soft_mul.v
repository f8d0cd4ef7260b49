// For Yosys' techmap: a product of signed numbers of 8 bits by carry cells instead of a DSP, for the cells that the chip has
// no DSP for.
//
// Partial products are added in a tree, that of the sign bit of B is subtracted. A half of ECP5's CCU2C has four inputs, and
// so adds two bits of partial products, each of which is an AND, without a LUT of its own. hw/tests/soft_mul_tb.v tries all
// products.

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

  // Two bits of B each, in multiples of 1, 4, 16, 64. Then two of those, and all; what has nothing below it to add to stays.
  wire signed [9:0] pair0, pair1, pair2, pair3;
  wire signed [10:0] low, high;
  wire signed [11:0] top;
  soft_mul_pair #(.MINUS(0)) s0 (.A(A), .B(B[1:0]), .Y(pair0));
  soft_mul_pair #(.MINUS(0)) s1 (.A(A), .B(B[3:2]), .Y(pair1));
  soft_mul_pair #(.MINUS(0)) s2 (.A(A), .B(B[5:4]), .Y(pair2));
  soft_mul_pair #(.MINUS(1)) s3 (.A(A), .B(B[7:6]), .Y(pair3));
  assign low  = $signed(pair0[9:2]) + pair1;
  assign high = $signed(pair2[9:2]) + pair3;
  assign top  = $signed({low[10], low[10:2]}) + $signed({high, pair2[1:0]});
  assign Y    = {{(Y_WIDTH - 15) {top[11]}}, top[10:0], low[1:0], pair0[1:0]};
endmodule

// A * B[0] + 2 * A * B[1], or A * B[0] - 2 * A * B[1].
module soft_mul_pair #(
    parameter MINUS = 0
) (
    input [7:0] A,
    input [1:0] B,
    output [9:0] Y
);
  // The first term's bits, and the second's. A half of a cell has inputs a, b, c, d: it passes a carry on if its LUT is 1,
  // and otherwise sends the lowest quarter of the LUT, a function of a and b. Of sums the LUT is (a & b) ^ (c & d), of
  // differences, where a and b are the second term's, ~(a & b) ^ (c & d); and 1 is the first carry.
  wire [9:0] first = {A[7], A[7], A}, second = {A[7], A, 1'b0};
  wire [9:0] a = MINUS ? second : first, c = MINUS ? first : second;
  wire b = MINUS ? B[1] : B[0], d = MINUS ? B[0] : B[1];
  wire [5:0] carry;
  assign carry[0] = MINUS ? 1'b1 : 1'b0;
  genvar i;
  for (i = 0; i < 5; i = i + 1) begin : gen_cell
    CCU2C #(
        .INIT0(MINUS ? 16'h8777 : 16'h7888),
        .INIT1(MINUS ? 16'h8777 : 16'h7888),
        .INJECT1_0("NO"),
        .INJECT1_1("NO")
    ) cell_ (
        .CIN(carry[i]),
        .A0(a[2*i]), .B0(b), .C0(c[2*i]), .D0(d),
        .A1(a[2*i+1]), .B1(b), .C1(c[2*i+1]), .D1(d),
        .S0(Y[2*i]), .S1(Y[2*i+1]), .COUT(carry[i+1])
    );
  end
endmodule
