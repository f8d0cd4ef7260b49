// The activations of a product: int8 codes, a word of ROWS codes for each pass and token, and fp32 scales, one for each
// group and token.
//
// Both are written in the order token, group, input, each with an address that counts on by itself from clear_i on: codes
// one or four at a time, scales in front of the codes of their group or behind them. Latency of a read: a clock.

module activation_store #(
    parameter int ROWS       = 16,   // rows of cells, a multiple of 4
    parameter int TOKENS     = 16,   // the most, a power of two
    parameter int MAX_PASSES = 32,   // the most of a token, a power of two
    parameter int MAX_GROUPS = 16,   // the most of a token, a power of two
    parameter int COUNT_W    = 16,   // bits of a number of passes and groups
    localparam int TOKEN_W = $clog2(TOKENS),
    localparam int PASS_W = $clog2(MAX_PASSES),
    localparam int GROUP_W = $clog2(MAX_GROUPS)
) (
    input  logic               clk_i,
    // Sizes of what is written: passes and groups of a token.
    input  logic               clear_i,
    input  logic [COUNT_W-1:0] passes_i,
    input  logic [COUNT_W-1:0] groups_i,
    input  logic [TOKEN_W-1:0] last_token_i,
    input  logic               code_write_i,   // one code, in the lowest bits, or
    input  logic               codes_write_i,  // four
    input  logic [31:0]        codes_i,
    input  logic               scale_write_i,
    input  logic [31:0]        scale_i,
    output logic               full_o,         // all that belongs to the tokens was written
    // Reads.
    input  logic [TOKEN_W-1:0] token_i,
    input  logic [PASS_W-1:0]  pass_i,
    output logic [8*ROWS-1:0]  codes_o,
    input  logic [TOKEN_W-1:0] scale_token_i,
    input  logic [GROUP_W-1:0] group_i,
    output logic [31:0]        scale_o
);

  localparam int LANE_W = $clog2(ROWS);

  // ---- codes: a word is collected, the first code in its lowest bits ----
  logic [8*ROWS+23:0] longer;
  logic [8*ROWS-1:0]  word;
  logic [8*ROWS-1:8]  word_q;  // without the byte that the next code pushes out
  logic [LANE_W-1:0]  lane_q;
  logic [PASS_W-1:0]  pass_q;
  logic [TOKEN_W-1:0] token_q;
  logic               codes_full_q, word_whole, last_pass;
  assign longer     = {codes_i, word_q};
  assign word       = codes_write_i ? longer[8*ROWS+23:24] : longer[8*ROWS-1:0];
  assign word_whole = codes_write_i ? lane_q == LANE_W'(ROWS - 4) : code_write_i & (lane_q == LANE_W'(ROWS - 1));
  assign last_pass  = COUNT_W'(pass_q) == passes_i - COUNT_W'(1);

  logic [8*ROWS-1:0] codes_q[TOKENS*MAX_PASSES];
  always_ff @(posedge clk_i) begin
    if (word_whole) codes_q[{pass_q, token_q}] <= word;
    codes_o <= codes_q[{pass_i, token_i}];
  end
  always_ff @(posedge clk_i) begin
    if (clear_i) begin
      lane_q       <= '0;
      pass_q       <= '0;
      token_q      <= '0;
      codes_full_q <= 1'b0;
    end else if (code_write_i | codes_write_i) begin
      word_q <= word[8*ROWS-1:8];
      lane_q <= word_whole ? '0 : lane_q + (codes_write_i ? LANE_W'(4) : LANE_W'(1));
      if (word_whole) pass_q <= last_pass ? '0 : pass_q + PASS_W'(1);
      if (word_whole & last_pass) begin
        token_q      <= token_q + TOKEN_W'(1);
        codes_full_q <= token_q == last_token_i;
      end
    end
  end

  // ---- scales ----
  logic [GROUP_W-1:0] group_q;
  logic [TOKEN_W-1:0] scale_token_q;
  logic               scales_full_q, last_group;
  assign last_group = COUNT_W'(group_q) == groups_i - COUNT_W'(1);
  logic [31:0] scales_q[TOKENS*MAX_GROUPS];
  always_ff @(posedge clk_i) begin
    if (scale_write_i) scales_q[{group_q, scale_token_q}] <= scale_i;
    scale_o <= scales_q[{group_i, scale_token_i}];
  end
  always_ff @(posedge clk_i) begin
    if (clear_i) begin
      group_q       <= '0;
      scale_token_q <= '0;
      scales_full_q <= 1'b0;
    end else if (scale_write_i) begin
      group_q <= last_group ? '0 : group_q + GROUP_W'(1);
      if (last_group) begin
        scale_token_q <= scale_token_q + TOKEN_W'(1);
        scales_full_q <= scale_token_q == last_token_i;
      end
    end
  end

  assign full_o = codes_full_q & scales_full_q;

endmodule
