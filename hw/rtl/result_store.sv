// Results of two rows of tiles: the columns write one while the other goes out as a stream.
//
// A beat has COLS / 4 results of a token, fp32, the first output's in the lowest bits; four beats are a token, and the
// tokens of a row of tiles follow each other. A bank is taken by reserve_i, when the row's last pass starts, so that no
// column ever has to wait.
//
// Handshake: valid and ready; m_data_o stays while it waits. Throughput: a beat a clock.

module result_store #(
    parameter int COLS    = 16,  // columns of cells, a multiple of 4
    parameter int TOKENS  = 16,  // the most, a power of two
    parameter int COUNT_W = 16,  // bits of a number of rows of tiles
    localparam int TOKEN_W = $clog2(TOKENS)
) (
    input  logic                    clk_i,
    input  logic                    rst_ni,
    input  logic                    start_i,          // of a product of rows_of_tiles_i
    input  logic [TOKEN_W-1:0]      last_token_i,
    input  logic [COUNT_W-1:0]      rows_of_tiles_i,
    input  logic                    reserve_i,
    output logic                    room_o,
    output logic                    active_o,         // results are to come, or to go
    // From the columns, in any order, but the last column's last token last.
    input  logic [COLS-1:0]         write_i,
    input  logic [COLS-1:0]         bank_i,
    input  logic [COLS*TOKEN_W-1:0] token_i,
    input  logic                    final_i,          // with the last column's: the last token's
    input  logic [COLS*32-1:0]      result_i,
    // The stream.
    output logic                    m_valid_o,
    input  logic                    m_ready_i,
    output logic [8*COLS-1:0]       m_data_o,
    output logic                    m_last_o          // of the product
);

  localparam int PER_BEAT = COLS / 4;
  localparam logic [COUNT_W-1:0] ONE = 1;

  logic               bank_q;
  logic [TOKEN_W-1:0] token_q;
  logic [1:0]         part_q;
  logic [1:0]         reserved_q, filled_q;
  logic [COUNT_W-1:0] row_of_tiles_q;
  logic               pending_q;  // rows of tiles of the product are left

  logic [COLS*32-1:0] word;
  for (genvar c = 0; c < COLS; c++) begin : gen_column
    logic [31:0] results_q[2*TOKENS];
    always_ff @(posedge clk_i) if (write_i[c]) results_q[{bank_i[c], token_i[c*TOKEN_W+:TOKEN_W]}] <= result_i[32*c+:32];
    assign word[32*c+:32] = results_q[{bank_q, token_q}];
  end

  logic step, row_of_tiles_sent, row_of_tiles_whole, is_last;
  assign step               = (filled_q != 2'd0) & (~m_valid_o | m_ready_i);
  assign row_of_tiles_sent  = step & (part_q == 2'd3) & (token_q == last_token_i);
  assign row_of_tiles_whole = write_i[COLS-1] & final_i;
  assign is_last            = row_of_tiles_q == rows_of_tiles_i - ONE;
  assign room_o             = ~reserved_q[1];
  assign active_o           = pending_q | m_valid_o;

  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      bank_q         <= 1'b0;
      token_q        <= '0;
      part_q         <= '0;
      reserved_q     <= '0;
      filled_q       <= '0;
      row_of_tiles_q <= '0;
      pending_q      <= rst_ni & start_i;
      m_valid_o      <= 1'b0;
    end else begin
      if (step) begin
        part_q <= part_q + 2'd1;
        if (part_q == 2'd3) token_q <= row_of_tiles_sent ? '0 : token_q + TOKEN_W'(1);
      end
      if (row_of_tiles_sent) begin
        bank_q         <= ~bank_q;
        row_of_tiles_q <= row_of_tiles_q + ONE;
        if (is_last) pending_q <= 1'b0;
      end
      reserved_q <= reserved_q + 2'(reserve_i) - 2'(row_of_tiles_sent);
      filled_q   <= filled_q + 2'(row_of_tiles_whole) - 2'(row_of_tiles_sent);
      m_valid_o  <= step | (m_valid_o & ~m_ready_i);
    end
    if (step) begin
      m_data_o <= word[32*PER_BEAT*part_q+:32*PER_BEAT];
      m_last_o <= row_of_tiles_sent & is_last;
    end
  end

endmodule
