// A test bench to start from: the array multiplies the tiles of `golden passes`, and every sum of every pass is compared.
//
//   .venv/bin/python -m golden passes 16x32x2048g64 --tile 32x8 --transpose --out build/tile
//   iverilog -g2012 -y hw/rtl -Y .sv -P tile_tb.ROWS=8 -P tile_tb.COLS=32 -o build/tile.vvp hw/tests/tile_tb.sv
//   vvp -n build/tile.vvp +vectors=build/tile
//
// That is an array of 8 rows (inputs) by 32 columns (outputs); +vcd writes the waves to build/tile/tile.vcd.
`timescale 1ns / 1ps

module tile_tb;
  parameter int ROWS = 16, COLS = 16;                     // of the array
  parameter int TOKENS = 16, OUTPUTS = 32, INPUTS = 2048;  // of the product
  localparam int PASSES = INPUTS / ROWS, TILES = (OUTPUTS + COLS - 1) / COLS * PASSES;
  localparam int PERIOD = TOKENS > ROWS ? TOKENS : ROWS;  // clocks from a tile to the next
  localparam int SUM_W = $clog2(ROWS * 128 * 128 + 1) + 1;

  logic [ROWS*8-1:0] x_codes[0:PASSES*TOKENS-1];  // in the order of the files: golden/passes.py
  logic [COLS*8-1:0] w_codes[0:TILES*ROWS-1];
  logic [COLS*32-1:0] pass_sums[0:TILES*TOKENS-1];

  logic clk = 0, rst_n = 0, w_valid = 0, x_valid = 0, x_first;
  logic [$clog2(ROWS)-1:0] w_row;
  logic [COLS*8-1:0] w;
  logic [ROWS*8-1:0] x;
  logic [COLS-1:0] sum_valid;
  logic [COLS*SUM_W-1:0] sum;
  always #5 clk = ~clk;
  systolic_array #(.ROWS(ROWS), .COLS(COLS)) u_array (.clk_i(clk), .rst_ni(rst_n), .en_i(1'b1), .w_valid_i(w_valid),
      .w_row_i(w_row), .w_i(w), .x_valid_i(x_valid), .x_first_i(x_first), .x_i(x), .sum_valid_o(sum_valid), .sum_o(sum));

  // A tile takes PERIOD clocks. Its rows of weights come from clock 0 on, its tokens from clock 1 on.
  int wrong = 0, came[COLS];
  string dir;
  initial begin
    if (!$value$plusargs("vectors=%s", dir)) dir = "build/tile";
    $readmemh({dir, "/x.codes.hex"}, x_codes);
    $readmemh({dir, "/w.codes.hex"}, w_codes);
    $readmemh({dir, "/pass.sums.hex"}, pass_sums);
    for (int c = 0; c < COLS; c++) came[c] = 0;
    if ($test$plusargs("vcd")) $dumpfile({dir, "/tile.vcd"});
    if ($test$plusargs("vcd")) $dumpvars(0, tile_tb);
    repeat (2) @(negedge clk);
    rst_n = 1;
    for (int i = 0; i <= TILES * PERIOD; i++) begin
      w_valid = i < TILES * PERIOD && i % PERIOD < ROWS;
      w_row   = i % PERIOD;
      w       = w_codes[i / PERIOD * ROWS + i % PERIOD];
      x_valid = i > 0 && (i - 1) % PERIOD < TOKENS;
      x_first = (i - 1) % PERIOD == 0;
      x       = x_codes[(i - 1) / PERIOD % PASSES * TOKENS + (i - 1) % PERIOD];
      @(negedge clk);
    end
    w_valid = 0;
    x_valid = 0;
    repeat (ROWS + COLS) @(negedge clk);
    for (int c = 0; c < COLS; c++) if (came[c] != TILES * TOKENS) wrong = wrong + 1;
    if (wrong == 0) $display("equal: %0d sums of %0d tiles, %0d tokens", TILES * TOKENS * COLS, TILES, TOKENS);
    else $display("FAILED: %0d sums are wrong or missing", wrong);
    $finish;
  end

  // Column c has a sum of every token, tile after tile. A sum of unknown bits is not equal either.
  always @(posedge clk) begin
    for (int c = 0; c < COLS; c++) begin
      if (rst_n && sum_valid[c] !== 1'b0) begin
        if (32'($signed(sum[c*SUM_W+:SUM_W])) !== pass_sums[came[c]][c*32+:32]) wrong = wrong + 1;
        came[c] = came[c] + 1;
      end
    end
  end
endmodule
