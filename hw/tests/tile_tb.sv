// A test bench to start from: the array multiplies the tiles of `golden passes`, and every sum of every pass is compared.
//
//   $ .venv/bin/python -m golden passes 16x32x2048g64 --tile 32x8 --transpose --out build/tile
//   $ iverilog -g2012 -y hw/rtl -Y .sv -P tile_tb.ROWS=8 -P tile_tb.COLS=32 -o build/tile.vvp hw/tests/tile_tb.sv
//   $ vvp -n build/tile.vvp +vectors=build/tile +vcd
//
// That is an array of 8 rows (inputs) by 32 columns (outputs), and --tile is the other way round: outputs x inputs. +vcd writes
// the waves to build/tile/tile.vcd. In Verilator:
//
//   $ verilator --binary --timing --trace -y hw/rtl -GROWS=8 -GCOLS=32 --Mdir build/tile/verilator hw/tests/tile_tb.sv
//   $ build/tile/verilator/Vtile_tb +vectors=build/tile +vcd
//
// Three files are read, a word a line in hexadecimal, the first value of a word in its lowest bits, so rightmost:
//
//   x.codes.hex    ROWS int8 of a token; tokens of the first pass, tokens of the second, ...
//   w.codes.hex    COLS int8 of a row of cells, output by output; rows of the first tile, rows of the second, ...
//   pass.sums.hex  COLS int32, the sums of a token; tokens of the first tile, tokens of the second, ...
//
// A pass takes ROWS of the inputs, a tile is a pass for COLS of the outputs; tiles come pass by pass, then for the next outputs.
//
// The first wrong sum is named, and a wrong or missing one ends the run with $fatal, so with another exit code than 0.
`ifndef VERILATOR  // which wants one of every module, or of none
`timescale 1ns / 1ps
`endif

module tile_tb;
  parameter int ROWS = 16, COLS = 16;                      // of the array
  parameter int TOKENS = 16, OUTPUTS = 32, INPUTS = 2048;  // of the product
  localparam int PASSES = INPUTS / ROWS, TILES = (OUTPUTS + COLS - 1) / COLS * PASSES;
  localparam int PERIOD = TOKENS > ROWS ? TOKENS : ROWS;  // clocks from a tile to the next
  localparam int SUM_W = $clog2(ROWS * 128 * 128 + 1) + 1;

  logic [ROWS*8-1:0] x_codes[0:PASSES*TOKENS-1];
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
    if (INPUTS % ROWS != 0) $fatal(1, "INPUTS = %0d, expected a multiple of ROWS = %0d", INPUTS, ROWS);
    $readmemh({dir, "/x.codes.hex"}, x_codes);
    $readmemh({dir, "/w.codes.hex"}, w_codes);
    $readmemh({dir, "/pass.sums.hex"}, pass_sums);
    if (^x_codes[PASSES*TOKENS-1] === 1'bx) $fatal(1, "%s/x.codes.hex: expected %0d words", dir, PASSES * TOKENS);
    if (^w_codes[TILES*ROWS-1] === 1'bx) $fatal(1, "%s/w.codes.hex: expected %0d words", dir, TILES * ROWS);
    if (^pass_sums[TILES*TOKENS-1] === 1'bx) $fatal(1, "%s/pass.sums.hex: expected %0d words", dir, TILES * TOKENS);
    for (int c = 0; c < COLS; c++) came[c] = 0;
    if ($test$plusargs("vcd")) $dumpfile({dir, "/tile.vcd"});
    if ($test$plusargs("vcd")) $dumpvars(0, tile_tb);
    repeat (2) @(negedge clk);
    rst_n = 1;
    for (int i = 0; i <= TILES * PERIOD; i++) begin
      w_valid = i < TILES * PERIOD && i % PERIOD < ROWS;
      w_row   = $clog2(ROWS)'(i % PERIOD);
      if (w_valid) w = w_codes[i / PERIOD * ROWS + i % PERIOD];
      x_valid = i > 0 && (i - 1) % PERIOD < TOKENS;
      x_first = (i - 1) % PERIOD == 0;
      if (x_valid) x = x_codes[(i - 1) / PERIOD % PASSES * TOKENS + (i - 1) % PERIOD];
      @(negedge clk);
    end
    w_valid = 0;
    x_valid = 0;
    repeat (ROWS + COLS) @(negedge clk);
    for (int c = 0; c < COLS; c++) begin
      if (came[c] != TILES * TOKENS) $display("column %0d: %0d sums, expected %0d", c, came[c], TILES * TOKENS);
      if (came[c] != TILES * TOKENS) wrong = wrong + 1;
    end
    if (wrong != 0) $fatal(1, "FAILED: %0d sums are wrong or missing", wrong);
    $display("equal: %0d sums of %0d tiles, %0d tokens", TILES * TOKENS * COLS, TILES, TOKENS);
    $finish;
  end

  // Column c has a sum of every token, tile after tile. A sum of unknown bits is not equal either.
  always @(posedge clk) begin
    for (int c = 0; c < COLS; c++) begin
      if (rst_n && sum_valid[c] !== 1'b0) begin
        if (32'($signed(sum[c*SUM_W+:SUM_W])) !== pass_sums[came[c]][c*32+:32]) begin
          if (wrong == 0)
            $display("tile %0d, token %0d, column %0d: sum %0d, expected %0d", came[c] / TOKENS, came[c] % TOKENS, c,
                     $signed(sum[c*SUM_W+:SUM_W]), $signed(pass_sums[came[c]][c*32+:32]));
          wrong = wrong + 1;
        end
        came[c] = came[c] + 1;
      end
    end
  end
endmodule
