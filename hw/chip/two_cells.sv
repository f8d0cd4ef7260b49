// Two mac_cells that are neighbours in a row: what mac_cell_pair is tested against, and counted beside.

module two_cells #(
    parameter int SUM_W = 19
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    en_i,
    input  logic signed [7:0]       x_i,
    input  logic                    swap_i,
    input  logic                    load_i,
    output logic signed [7:0]       x_o,
    output logic                    swap_o,
    output logic                    load_o,
    input  logic signed [7:0]       w_0_i,
    input  logic signed [7:0]       w_1_i,
    input  logic signed [SUM_W-1:0] sum_0_i,
    input  logic signed [SUM_W-1:0] sum_1_i,
    output logic signed [SUM_W-1:0] sum_0_o,
    output logic signed [SUM_W-1:0] sum_1_o
);

  logic signed [7:0] x;
  logic              swap, load;
  mac_cell #(
      .SUM_W(SUM_W)
  ) u_cell_0 (
      .clk_i,
      .rst_ni,
      .en_i,
      .x_i,
      .swap_i,
      .load_i,
      .x_o   (x),
      .swap_o(swap),
      .load_o(load),
      .w_i   (w_0_i),
      .sum_i (sum_0_i),
      .sum_o (sum_0_o)
  );
  mac_cell #(
      .SUM_W(SUM_W)
  ) u_cell_1 (
      .clk_i,
      .rst_ni,
      .en_i,
      .x_i   (x),
      .swap_i(swap),
      .load_i(load),
      .x_o,
      .swap_o,
      .load_o,
      .w_i   (w_1_i),
      .sum_i (sum_1_i),
      .sum_o (sum_1_o)
  );

endmodule
