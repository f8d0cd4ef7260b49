// For hw/tests/mac_pair_test.cpp: a mac_cell_pair beside the two cells that it replaces, with the same inputs.

module mac_pair (
    input  logic              clk_i,
    input  logic              rst_ni,
    input  logic              en_i,
    input  logic signed [7:0] x_i,
    input  logic              swap_i,
    input  logic              load_i,
    input  logic signed [7:0] w_0_i,
    input  logic signed [7:0] w_1_i,
    input  logic signed [19:0] sum_0_i,
    input  logic signed [19:0] sum_1_i,
    output logic signed [19:0] sum_0_o,  // of the pair
    output logic signed [19:0] sum_1_o,
    output logic               same_o    // the two cells have the same outputs
);

  logic signed [7:0]  cell_x, pair_x;
  logic               cell_swap, cell_load, pair_swap, pair_load;
  logic signed [19:0] cell_sum_0, cell_sum_1;
  two_cells #(
      .SUM_W(20)
  ) u_cells (
      .clk_i,
      .rst_ni,
      .en_i,
      .x_i,
      .swap_i,
      .load_i,
      .x_o    (cell_x),
      .swap_o (cell_swap),
      .load_o (cell_load),
      .w_0_i,
      .w_1_i,
      .sum_0_i,
      .sum_1_i,
      .sum_0_o(cell_sum_0),
      .sum_1_o(cell_sum_1)
  );
  mac_cell_pair #(
      .SUM_W(20)
  ) u_pair (
      .clk_i,
      .rst_ni,
      .en_i,
      .x_i,
      .swap_i,
      .load_i,
      .x_o   (pair_x),
      .swap_o(pair_swap),
      .load_o(pair_load),
      .w_0_i,
      .w_1_i,
      .sum_0_i,
      .sum_1_i,
      .sum_0_o,
      .sum_1_o
  );
  assign same_o = {cell_x, cell_swap, cell_load, cell_sum_0, cell_sum_1} ==
                  {pair_x, pair_swap, pair_load, sum_0_o, sum_1_o};

endmodule
