// A weight-stationary array of ROWS x COLS cells: row r takes input channel r, column c has output channel c.
//
// It is the array that `simulate` of bench/systolic.py models, cycle by cycle. Words come in whole, and are skewed here:
//
//   weights  w_valid_i, w_row_i, w_i    in clock T: the COLS weights of row w_row_i go into the second registers of its
//                                       cells, cell (r, c) at the end of clock T + c
//   tokens   x_valid_i, x_first_i, x_i  in clock S: the ROWS codes of a token; code r enters row r in clock S + r.
//                                       With x_first_i each cell takes its second weight over as this token passes
//   sums     sum_valid_o[c], sum_o      column c has that token's sum in clock S + ROWS + c: a diagonal again. For whole
//                                       words, put `skew` with REVERSED behind it
//
// Clocks are those in which en_i is 1; while it is 0 everything stands still and inputs are not looked at. Gaps between
// tokens, or between weights, are allowed anywhere. Reset drops what is on its way.
//
// The caller keeps two rules, or sums are wrong. If the row words of a tile come in clocks L_0 < L_1 < ... :
//   1. its first token comes in clock S >= L_r + 1 - r for each row r
//   2. the next tile's words come after S, that of row r not before clock S + 1 + r
// At one word a clock, beginning with row 0, these are S > L_0 for both: load, then start a clock later.
// Tokens of a tile come one after the other, at one a clock if nothing else limits them.
//
// SUM_W has room for ROWS products of the extremes: docs/hardware.md, "Bits".

module systolic_array #(
    parameter int ROWS  = 16,   // 2 or more
    parameter int COLS  = 16,
    parameter int X_W   = 8,    // bits of an activation
    parameter int W_W   = 8,    // bits of a weight
    parameter int X_MAX = 128,  // largest magnitude of an activation, and
    parameter int W_MAX = 128,  // of a weight
    parameter bit PAIRED = 1'b0,  // neighbours of a row share a multiplier (mac_cell_pair.sv): 8 bits, COLS even
    localparam int SUM_W = $clog2(ROWS * X_MAX * W_MAX + 1) + 1,
    localparam int ROW_W = $clog2(ROWS)
) (
    input  logic                  clk_i,
    input  logic                  rst_ni,
    input  logic                  en_i,
    // A row of weights; output c in lane c.
    input  logic                  w_valid_i,
    input  logic [ROW_W-1:0]      w_row_i,
    input  logic [COLS*W_W-1:0]   w_i,
    // A token; input r in lane r.
    input  logic                  x_valid_i,
    input  logic                  x_first_i,  // with x_valid_i: the first token of a tile
    input  logic [ROWS*X_W-1:0]   x_i,
    // Sums; output c in lane c.
    output logic [COLS-1:0]       sum_valid_o,
    output logic [COLS*SUM_W-1:0] sum_o
);

`ifdef __ICARUS__
  // As in array_sizes.sv.
  if (ROWS < 2) ROWS_has_to_be_2_or_more u_rows ();
  if (PAIRED && COLS % 2 != 0) COLS_has_to_be_even_if_PAIRED u_cols ();
`else
  if (ROWS < 2) $error("ROWS has to be 2 or more");
  if (PAIRED && COLS % 2 != 0) $error("COLS has to be even if PAIRED");
`endif

  // The codes of a token enter diagonally.
  logic [ROWS*X_W-1:0] x_skewed;
  skew #(
      .LANES(ROWS),
      .WIDTH(X_W)
  ) u_x_skew (
      .clk_i,
      .en_i,
      .data_i(x_i),
      .data_o(x_skewed)
  );

  // With them goes the flag that swaps weights: swap_left[r] enters row r.
  logic [ROWS-1:0] swap_left;
  logic [ROWS-2:0] swap_q;
  assign swap_left = {swap_q, x_valid_i & x_first_i};
  always_ff @(posedge clk_i) begin
    if (!rst_ni) swap_q <= '0;
    else if (en_i) swap_q <= swap_left[ROWS-2:0];
  end

  // Weights enter diagonally, too. A column's weight goes to all of its cells; the flag that moves right selects the row.
  logic [COLS*W_W-1:0] w_skewed;
  skew #(
      .LANES(COLS),
      .WIDTH(W_W)
  ) u_w_skew (
      .clk_i,
      .en_i,
      .data_i(w_i),
      .data_o(w_skewed)
  );

  // What goes from cell to cell. Right: index c is the left edge of column c. Down: index r is the upper edge of row r.
  logic [X_W-1:0]   x_right   [ROWS*(COLS+1)];
  logic             swap_right[ROWS*(COLS+1)];
  logic             load_right[ROWS*(COLS+1)];
  logic [SUM_W-1:0] sum_down  [(ROWS+1)*COLS];

  for (genvar r = 0; r < ROWS; r++) begin : gen_row
    assign x_right[r*(COLS+1)]    = x_skewed[r*X_W+:X_W];
    assign swap_right[r*(COLS+1)] = swap_left[r];
    assign load_right[r*(COLS+1)] = w_valid_i & (w_row_i == ROW_W'(r));
    for (genvar c = 0; c < (PAIRED ? COLS : 0); c = c + 2) begin : gen_pair
      mac_cell_pair #(
          .SUM_W(SUM_W)
      ) u_pair (
          .clk_i,
          .rst_ni,
          .en_i,
          .x_i    (x_right[r*(COLS+1)+c]),
          .swap_i (swap_right[r*(COLS+1)+c]),
          .load_i (load_right[r*(COLS+1)+c]),
          .x_o    (x_right[r*(COLS+1)+c+2]),
          .swap_o (swap_right[r*(COLS+1)+c+2]),
          .load_o (load_right[r*(COLS+1)+c+2]),
          .w_0_i  (w_skewed[c*W_W+:W_W]),
          .w_1_i  (w_skewed[(c+1)*W_W+:W_W]),
          .sum_0_i(sum_down[r*COLS+c]),
          .sum_1_i(sum_down[r*COLS+c+1]),
          .sum_0_o(sum_down[(r+1)*COLS+c]),
          .sum_1_o(sum_down[(r+1)*COLS+c+1])
      );
    end
    for (genvar c = 0; c < (PAIRED ? 0 : COLS); c++) begin : gen_col
      mac_cell #(
          .X_W  (X_W),
          .W_W  (W_W),
          .SUM_W(SUM_W)
      ) u_cell (
          .clk_i,
          .rst_ni,
          .en_i,
          .x_i   (x_right[r*(COLS+1)+c]),
          .swap_i(swap_right[r*(COLS+1)+c]),
          .load_i(load_right[r*(COLS+1)+c]),
          .x_o   (x_right[r*(COLS+1)+c+1]),
          .swap_o(swap_right[r*(COLS+1)+c+1]),
          .load_o(load_right[r*(COLS+1)+c+1]),
          .w_i   (w_skewed[c*W_W+:W_W]),
          .sum_i (sum_down[r*COLS+c]),
          .sum_o (sum_down[(r+1)*COLS+c])
      );
    end
  end

  for (genvar c = 0; c < COLS; c++) begin : gen_edge
    assign sum_down[c] = '0;
    assign sum_o[c*SUM_W+:SUM_W] = sum_down[ROWS*COLS+c];
  end

  // A sum is there ROWS + c clocks after its token.
  logic [ROWS+COLS-2:0] valid_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en_i) valid_q <= {valid_q[ROWS+COLS-3:0], x_valid_i};
  end
  assign sum_valid_o = valid_q[ROWS+COLS-2:ROWS-1];

endmodule
