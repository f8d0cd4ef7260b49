// data_i CLOCKS clocks later. It stands still while en_i is 0; contents are not reset.

module delay #(
    parameter int WIDTH  = 8,
    parameter int CLOCKS = 1  // at least 1
) (
    input  logic             clk_i,
    input  logic             en_i,
    input  logic [WIDTH-1:0] data_i,
    output logic [WIDTH-1:0] data_o
);

  logic [CLOCKS*WIDTH-1:0] stages_q;  // the youngest in the lowest bits
  if (CLOCKS == 1) begin : gen_one
    always_ff @(posedge clk_i) if (en_i) stages_q <= data_i;
  end else begin : gen_more
    always_ff @(posedge clk_i) if (en_i) stages_q <= {stages_q[(CLOCKS-1)*WIDTH-1:0], data_i};
  end
  assign data_o = stages_q[(CLOCKS-1)*WIDTH+:WIDTH];

endmodule
