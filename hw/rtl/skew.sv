// Delays lane i of a word by i clocks, or, REVERSED, lane i by LANES - 1 - i.
//
// At the edges of a systolic array: the first makes a token, or a row of weights, enter as the diagonal wave that the
// array expects; the second makes a word again of sums that leave column by column.
//
// Latency: i, or LANES - 1 - i, clocks. Handshake: none; it stands still while en_i is 0. Contents are not reset.

module skew #(
    parameter int LANES    = 4,
    parameter int WIDTH    = 8,
    parameter bit REVERSED = 1'b0
) (
    input  logic                   clk_i,
    input  logic                   en_i,
    input  logic [LANES*WIDTH-1:0] data_i,  // lane 0 in the lowest bits
    output logic [LANES*WIDTH-1:0] data_o
);

  for (genvar i = 0; i < LANES; i++) begin : gen_lane
    localparam int DELAY = REVERSED ? LANES - 1 - i : i;
    if (DELAY == 0) begin : gen_wire
      assign data_o[i*WIDTH+:WIDTH] = data_i[i*WIDTH+:WIDTH];
    end else begin : gen_delay
      logic [DELAY*WIDTH-1:0] stages_q;  // the youngest in the lowest bits
      if (DELAY == 1) begin : gen_one
        always_ff @(posedge clk_i) if (en_i) stages_q <= data_i[i*WIDTH+:WIDTH];
      end else begin : gen_more
        always_ff @(posedge clk_i) if (en_i) stages_q <= {stages_q[(DELAY-1)*WIDTH-1:0], data_i[i*WIDTH+:WIDTH]};
      end
      assign data_o[i*WIDTH+:WIDTH] = stages_q[(DELAY-1)*WIDTH+:WIDTH];
    end
  end

endmodule
