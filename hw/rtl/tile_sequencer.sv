// Runs the tiles of a product as `simulate` of bench/systolic.py does: the next tile is loaded while the tokens of this
// one go through, and a tile starts as soon as its own load has begun and the tokens of the one before are in.
//
// Rows of tiles follow each other; in each of them its groups, in each group its passes, in each pass its tokens. A load
// begins where a whole tile is in the buffer and the second registers of all cells are free, and takes ROWS clocks. The
// last pass of a group waits for room for its sums, that of a row of tiles for room for its results.
//
// Latency: a tile starts a clock after its load has begun. Sizes stay as they are while active_o is 1.

module tile_sequencer #(
    parameter int ROWS    = 16,  // rows of cells, at least 2
    parameter int TOKEN_W = 4,   // bits of the index of a token
    parameter int COUNT_W = 16,  // bits of a number of passes, groups and rows of tiles
    parameter int PASS_W  = 5,   // bits of the index of a pass in its row of tiles
    parameter int GROUP_W = 4,   // bits of the index of a group
    localparam int ROW_W = $clog2(ROWS)
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    input  logic               start_i,
    input  logic [TOKEN_W-1:0] last_token_i,      // the number of tokens - 1
    input  logic [COUNT_W-1:0] passes_i,          // of a group
    input  logic [COUNT_W-1:0] groups_i,
    input  logic [COUNT_W-1:0] rows_of_tiles_i,
    output logic               active_o,          // a tile has to start, or a token to be sent
    // To the buffer of weights and the second registers.
    input  logic               tile_ready_i,
    output logic               take_tile_o,
    output logic               take_o,            // row take_row_o of the tile is read
    output logic [ROW_W-1:0]   take_row_o,
    // A token of a pass: its activations are read in this clock.
    output logic               issue_o,
    output logic [TOKEN_W-1:0] token_o,
    output logic [PASS_W-1:0]  pass_o,            // of the row of tiles: which ROWS inputs
    output logic [GROUP_W-1:0] group_o,
    output logic               first_token_o,
    output logic               final_token_o,
    output logic               first_pass_o,      // of its group
    output logic               last_pass_o,
    output logic               first_group_o,
    output logic               last_group_o,
    input  logic               result_room_i,     // for the results of a row of tiles
    input  logic               group_room_i       // for the sums of a group
);

  localparam logic [COUNT_W-1:0] ONE = 1;

  logic               loaded_q;  // a tile is in the second registers, or on its way there, and has not started
  logic [ROW_W-1:0]   row_q;     // that is loaded next
  logic [TOKEN_W-1:0] token_q;
  logic               in_pass_q;  // tokens behind a pass's first
  logic [COUNT_W-1:0] pass_in_group_q, group_q, row_of_tiles_q;
  logic [PASS_W-1:0]  pass_q;

  assign take_tile_o = active_o & tile_ready_i & ~loaded_q & (row_q == '0);
  assign take_o      = take_tile_o | (row_q != '0);
  assign take_row_o  = row_q;

  assign first_pass_o  = pass_in_group_q == '0;
  assign last_pass_o   = pass_in_group_q == passes_i - ONE;
  assign first_group_o = group_q == '0;
  assign last_group_o  = group_q == groups_i - ONE;
  assign first_token_o = active_o & loaded_q & ~in_pass_q & (group_room_i | ~last_pass_o) &
                         (result_room_i | ~(last_pass_o & last_group_o));
  assign issue_o       = first_token_o | in_pass_q;
  assign final_token_o = issue_o & (token_q == last_token_i);
  assign token_o       = token_q;
  assign pass_o        = pass_q;
  assign group_o       = GROUP_W'(group_q);

  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      active_o        <= rst_ni & start_i;
      loaded_q        <= 1'b0;
      row_q           <= '0;
      token_q         <= '0;
      in_pass_q       <= 1'b0;
      pass_in_group_q <= '0;
      pass_q          <= '0;
      group_q         <= '0;
      row_of_tiles_q  <= '0;
    end else begin
      if (take_tile_o) loaded_q <= 1'b1;
      else if (first_token_o) loaded_q <= 1'b0;
      if (take_o) row_q <= row_q == ROW_W'(ROWS - 1) ? '0 : row_q + ROW_W'(1);
      if (issue_o) begin
        token_q   <= final_token_o ? '0 : token_q + TOKEN_W'(1);
        in_pass_q <= ~final_token_o;
      end
      if (final_token_o) begin
        pass_in_group_q <= last_pass_o ? '0 : pass_in_group_q + ONE;
        pass_q          <= last_pass_o & last_group_o ? '0 : pass_q + PASS_W'(1);
        if (last_pass_o) group_q <= last_group_o ? '0 : group_q + ONE;
        if (last_pass_o & last_group_o) begin
          row_of_tiles_q <= row_of_tiles_q + ONE;
          if (row_of_tiles_q == rows_of_tiles_i - ONE) active_o <= 1'b0;
        end
      end
    end
  end

endmodule
