// Below a column of cells in Q8, GPTQ and A8W4: a group's integer sum, scaled, is added to the running sum of its output.
//
//   a   = fp32(acc)                 exact up to 2^24
//   s   = fp32(w_scale * x_scale)
//   sum = fp32(a * s + sum)         rounded once: `out` of golden/passes.py, and of the programs (docs/numerics.md)
//
// The running sum is the caller's, in a memory below the array, or in a register. To make the way from one group of an
// output to its next short, it is not asked for with acc_i but when it is needed:
//
//   clock
//     0      valid_i, acc_i, w_scale_i, x_scale_i, tag_i
//     4      read_o = 1, read_tag_o = tag_i: the address, for a memory that reads in one clock
//     5      sum_i: the running sum before this group, +0 for an output's first
//    11      valid_o, tag_o, sum_o: the running sum after it
//
// Two groups of one output have to be 8 clocks apart, if a memory reads a clock later what was written before; 6 if sum_o
// goes straight back to sum_i.
// Clocks are those in which en_i is 1. A group a clock. Handshake: while en_i is 0 everything stands still, outputs too.
// Reset drops what is on its way.

module group_scaler #(
    parameter int ACC_W = 22,   // bits of the integer sum of a group
    parameter int TAG_W = 8     // bits of the caller's name for the running sum: an address, say
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    en_i,
    input  logic                    valid_i,
    input  logic signed [ACC_W-1:0] acc_i,
    input  logic [31:0]             w_scale_i,
    input  logic [31:0]             x_scale_i,
    input  logic [TAG_W-1:0]        tag_i,
    output logic                    read_o,
    output logic [TAG_W-1:0]        read_tag_o,
    input  logic [31:0]             sum_i,
    output logic                    valid_o,
    output logic [TAG_W-1:0]        tag_o,
    output logic [31:0]             sum_o
);

  localparam int READ    = 4;   // clocks from acc_i to read_o
  localparam int LATENCY = 11;  // and to sum_o

  // Clocks 0 to 5.
  logic [31:0] acc, scale;
  scaler_operands #(
      .ACC_W(ACC_W)
  ) u_operands (
      .clk_i,
      .en_i,
      .acc_i,
      .w_scale_i,
      .x_scale_i,
      .acc_o  (acc),
      .scale_o(scale)
  );

  // Clocks 5 to 11.
  fp32_fma u_fma (
      .clk_i,
      .en_i,
      .a_i(acc),
      .b_i(scale),
      .c_i(sum_i),
      .f_o(sum_o)
  );

  logic [LATENCY-1:0] valid_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en_i) valid_q <= {valid_q[LATENCY-2:0], valid_i};
  end
  assign read_o  = valid_q[READ-1];
  assign valid_o = valid_q[LATENCY-1];

  delay #(
      .WIDTH (TAG_W),
      .CLOCKS(READ)
  ) u_read_tag (
      .clk_i,
      .en_i,
      .data_i(tag_i),
      .data_o(read_tag_o)
  );
  delay #(
      .WIDTH (TAG_W),
      .CLOCKS(LATENCY - READ)
  ) u_tag (
      .clk_i,
      .en_i,
      .data_i(read_tag_o),
      .data_o(tag_o)
  );

endmodule
