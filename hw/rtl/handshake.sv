// Checks a stream in simulation and in proofs: what is offered stays, with all its data, until it is taken or reset. Its
// assertions are immediate ones, which Verilator (--assert), Icarus and Yosys (-formal) take. Nothing of it is left in
// hardware.

module handshake #(
    parameter int WIDTH = 1
) (
    input logic             clk_i,
    input logic             rst_ni,
    input logic             valid_i,
    input logic             ready_i,
    input logic [WIDTH-1:0] data_i
);

`ifdef SYNTHESIS
  logic unused;
  assign unused = ^{clk_i, rst_ni, valid_i, ready_i, data_i};
`else
  logic             waits_q;
  logic [WIDTH-1:0] data_q;
  always @(posedge clk_i) begin
    waits_q <= rst_ni & valid_i & ~ready_i;
    data_q  <= data_i;
    if (rst_ni & waits_q) begin
      assert (valid_i);
      assert (data_i == data_q);
    end
  end
`endif

endmodule
