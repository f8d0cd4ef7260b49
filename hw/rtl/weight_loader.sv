// Takes the stream of weights apart: scales go to the edges of the columns, codes into a buffer of two tiles.
//
// A beat has COLS bytes. A group begins with 4 beats of fp32 scales, one for each of the COLS outputs, the first
// output's in the lowest bits of the first beat. Behind them come the codes of the group's passes, ROWS rows of cells
// for each pass: a beat has the int8 codes of a row of cells, output by output, or, where nibbles_i is 1, those of two
// rows in 4 bits each, signed, the first row's in the low half of each byte.
//
// A tile is offered when all of it is in the buffer, so that the array may take a row in every clock whatever the
// stream does meanwhile. Scales of BANKS groups are kept: a bank is free again with group_done_i.
//
// Handshake: valid and ready; s_ready_o does not depend on s_valid_i. Throughput: a row of cells a clock. A row that
// take_i reads is on row_o in the next clock.

module weight_loader #(
    parameter int ROWS    = 16,  // rows of cells, at least 2
    parameter int COLS    = 16,  // columns of cells, a multiple of 4
    parameter int BANKS   = 4,   // groups whose scales are kept, a power of two
    parameter int COUNT_W = 16,  // bits of a number of passes, groups and rows of tiles
    localparam int BANK_W = $clog2(BANKS)
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    // From start_i on: rows_of_tiles_i times groups_i groups of passes_i passes. Sizes stay while active_o is 1.
    input  logic               start_i,
    input  logic               nibbles_i,
    input  logic [COUNT_W-1:0] passes_i,
    input  logic [COUNT_W-1:0] groups_i,
    input  logic [COUNT_W-1:0] rows_of_tiles_i,
    output logic               active_o,       // more beats are expected
    // The stream.
    input  logic               s_valid_i,
    output logic               s_ready_o,
    input  logic [8*COLS-1:0]  s_data_i,
    // Scales of COLS / 4 outputs, those of quarter scale_part_o, for a bank.
    output logic               scale_write_o,
    output logic [BANK_W-1:0]  scale_bank_o,
    output logic [1:0]         scale_part_o,
    output logic [8*COLS-1:0]  scale_data_o,
    input  logic               group_done_i,
    // Tiles. take_tile_i comes with the take_i of a tile's first row.
    output logic               tile_ready_o,
    input  logic               take_tile_i,
    input  logic               take_i,
    output logic [8*COLS-1:0]  row_o
);

  localparam int DEPTH = 2 * ROWS;
  localparam int ADDRESS_W = $clog2(DEPTH);
  localparam int FILL_W = $clog2(DEPTH + 1);
  localparam int ROW_W = $clog2(ROWS);
  localparam int USED_W = $clog2(BANKS + 1);
  localparam logic [COUNT_W-1:0] ONE = 1;

  // ---- where in the stream ----
  logic               in_codes_q;       // the codes of a group come, and not its scales
  logic [1:0]         part_q;           // of the scales
  logic [ROW_W-1:0]   row_q;            // of the tile
  logic [COUNT_W-1:0] pass_q, group_q, row_of_tiles_q;
  logic               second_q;         // half of a beat of nibbles
  logic [USED_W-1:0]  banks_used_q;
  logic [BANK_W-1:0]  bank_q;
  logic [FILL_W-1:0]  fill_q;           // rows in the buffer, and
  logic [1:0]         tiles_q;          // whole tiles that were not taken

  logic bank_free, bank_taken, has_room, row_written, tile_whole, group_whole, outputs_whole;
  assign bank_free     = banks_used_q != USED_W'(BANKS);
  assign bank_taken    = scale_write_o & (part_q == 2'd0);
  assign has_room      = fill_q != FILL_W'(DEPTH);
  assign row_written   = active_o & in_codes_q & s_valid_i & has_room;
  assign tile_whole    = row_written & (row_q == ROW_W'(ROWS - 1));
  assign group_whole   = tile_whole & (pass_q == passes_i - ONE);
  assign outputs_whole = group_whole & (group_q == groups_i - ONE);

  // A beat of nibbles stays for two clocks and is taken in the second.
  assign s_ready_o     = active_o & (in_codes_q ? has_room & (~nibbles_i | second_q) : bank_free);
  assign scale_write_o = active_o & ~in_codes_q & s_valid_i & bank_free;
  assign scale_bank_o  = bank_q;
  assign scale_part_o  = part_q;
  assign scale_data_o  = s_data_i;

  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      active_o       <= rst_ni & start_i;
      in_codes_q     <= 1'b0;
      part_q         <= '0;
      row_q          <= '0;
      pass_q         <= '0;
      group_q        <= '0;
      row_of_tiles_q <= '0;
      second_q       <= 1'b0;
      banks_used_q   <= '0;
      bank_q         <= '0;
    end else begin
      if (scale_write_o) begin
        part_q <= part_q + 2'd1;
        if (part_q == 2'd3) in_codes_q <= 1'b1;
      end
      if (row_written) begin
        second_q <= nibbles_i & ~second_q;
        row_q    <= tile_whole ? '0 : row_q + ROW_W'(1);
      end
      if (tile_whole) pass_q <= group_whole ? '0 : pass_q + ONE;
      if (group_whole) begin
        in_codes_q <= 1'b0;
        bank_q     <= bank_q + BANK_W'(1);
        group_q    <= outputs_whole ? '0 : group_q + ONE;
      end
      if (outputs_whole) begin
        row_of_tiles_q <= row_of_tiles_q + ONE;
        if (row_of_tiles_q == rows_of_tiles_i - ONE) active_o <= 1'b0;
      end
      banks_used_q <= banks_used_q + USED_W'(bank_taken) - USED_W'(group_done_i);
    end
  end

  // ---- codes of 4 bits ----
  logic [8*COLS-1:0] codes;
  for (genvar c = 0; c < COLS; c++) begin : gen_unpack
    logic [3:0] nibble;
    assign nibble = second_q ? s_data_i[8*c+4+:4] : s_data_i[8*c+:4];
    assign codes[8*c+:8] = nibbles_i ? {{4{nibble[3]}}, nibble} : s_data_i[8*c+:8];
  end

  // ---- the buffer ----
  logic [8*COLS-1:0]    buffer_q[DEPTH];
  logic [ADDRESS_W-1:0] write_q, read_q;
  always_ff @(posedge clk_i) begin
    if (row_written) buffer_q[write_q] <= codes;
    row_o <= buffer_q[read_q];
  end
  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      write_q <= '0;
      read_q  <= '0;
      fill_q  <= '0;
      tiles_q <= '0;
    end else begin
      if (row_written) write_q <= write_q == ADDRESS_W'(DEPTH - 1) ? '0 : write_q + ADDRESS_W'(1);
      if (take_i) read_q <= read_q == ADDRESS_W'(DEPTH - 1) ? '0 : read_q + ADDRESS_W'(1);
      fill_q  <= fill_q + FILL_W'(row_written) - FILL_W'(take_i);
      tiles_q <= tiles_q + 2'(tile_whole) - 2'(take_tile_i);
    end
  end
  assign tile_ready_o = tiles_q != 2'd0;

endmodule
