// The second test bench for Icarus: the scaler below a column, with the files of `golden passes`. The totals of each group
// go in; the running sums, in fp32, are compared to the bit. One output and one token at a time, a group when the one before is
// out.
`timescale 1ns / 1ps

module scaler_tb;
  parameter int ROWS = 16, COLS = 16, TOKENS = 16, OUTPUTS = 32, INPUTS = 2048, GROUP = 64;
  localparam int ROW_TILES = (OUTPUTS + COLS - 1) / COLS, GROUPS = INPUTS / GROUP, PASSES = INPUTS / ROWS;

  logic [COLS*32-1:0] totals[0:ROW_TILES*PASSES*TOKENS-1], outs[0:ROW_TILES*GROUPS*TOKENS-1];
  logic [31:0] x_scales[0:GROUPS*TOKENS-1], w_scales[0:ROW_TILES*GROUPS*COLS-1];

  logic clk = 0, rst_n = 0, valid = 0, read, out_valid, unused_read_tag, unused_tag;
  logic [31:0] total, w_scale, x_scale, running, out;
  always #5 clk = ~clk;
  group_scaler #(.ACC_W(32), .TAG_W(1)) u_scaler (.clk_i(clk), .rst_ni(rst_n), .en_i(1'b1), .valid_i(valid),
      .acc_i(total), .w_scale_i(w_scale), .x_scale_i(x_scale), .tag_i(1'b0), .read_o(read), .read_tag_o(unused_read_tag),
      .sum_i(running), .valid_o(out_valid), .tag_o(unused_tag), .sum_o(out));

  int wrong = 0, compared = 0;
  string dir;
  initial begin
    if (!$value$plusargs("vectors=%s", dir)) dir = "build/tile";
    $readmemh({dir, "/pass.totals.hex"}, totals);
    $readmemh({dir, "/x.scales.hex"}, x_scales);
    $readmemh({dir, "/w.scales.hex"}, w_scales);
    $readmemh({dir, "/out.hex"}, outs);
    repeat (2) @(negedge clk);
    rst_n = 1;
    for (int row = 0; row < ROW_TILES; row++)
      for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < COLS; c++) begin
          running = 0;
          for (int g = 0; g < GROUPS; g++) begin
            total   = totals[(row*PASSES + (g+1)*(GROUP/ROWS) - 1)*TOKENS + t][c*32+:32];
            w_scale = w_scales[(row*GROUPS + g)*COLS + c];
            x_scale = x_scales[g*TOKENS + t];
            valid   = 1;
            @(negedge clk);
            valid = 0;
            for (int i = 0; i < 20 && out_valid !== 1'b1; i++) @(negedge clk);
            if (out_valid !== 1'b1 || out !== outs[(row*GROUPS + g)*TOKENS + t][c*32+:32]) wrong = wrong + 1;
            compared = compared + 1;
            running  = out;
          end
        end
    if (wrong != 0 || compared != ROW_TILES * COLS * TOKENS * GROUPS)
      $fatal(1, "FAILED: %0d of %0d running sums are wrong", wrong, compared);
    $display("equal: %0d running sums", compared);
    $finish;
  end
endmodule
