// Checks in simulation that a command's stream has as many beats as it has to, none lost and none twice: they are counted
// from start_i on, and the count is compared in the clock of end_i, that of the last beat included. handshake.sv has which
// tools take it. Nothing of it is left in hardware.

module beats (
    input logic        clk_i,
    input logic        rst_ni,
    input logic        start_i,
    input logic        beat_i,
    input logic        end_i,
    input logic [63:0] expected_i
);

`ifdef SYNTHESIS
  logic unused;
  assign unused = ^{clk_i, rst_ni, start_i, beat_i, end_i, expected_i};
`else
  logic [63:0] count_q;
  always @(posedge clk_i) begin
    count_q <= !rst_ni || start_i ? '0 : count_q + 64'(beat_i);
    if (rst_ni & end_i) begin
      assert (count_q + 64'(beat_i) == expected_i);
    end
  end
`endif

endmodule
