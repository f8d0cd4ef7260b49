// Takes the stream of weights apart: scales go to the edges of the columns, codes into a buffer of two tiles.
//
// A beat has COLS bytes. A group begins with 4 beats of fp32 scales, one for each of the COLS outputs, the first
// output's in the lowest bits of the first beat. Behind them come the codes of the group's passes, ROWS rows of cells
// for each pass. With format_i
//
//   0  a beat has the int8 codes of one row of cells, output by output
//   1  codes are of 4 bits: byte c has those of output c for two rows, the first row's in its low half
//   2  codes are of 2 bits: byte c has those of output c for four rows, the first row's in its lowest bits
//   3  the same, with two levels of scales: a code counts five times
//
// and with 1 to 3 a beat between scales and codes has the group's zero points, output c's in byte c
// (weight_expander.sv).
//
// A tile is offered when all of it is in the buffer, so that the array may take a row in every clock whatever the
// stream does meanwhile. Scales of BANKS groups are kept: a bank is free again with group_done_i.
//
// Handshake: valid and ready; s_ready_o does not depend on s_valid_i. Throughput: a row of cells a clock, so a beat in
// one, two or four clocks. A row that take_i reads is on row_o in the next clock.

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
    input  logic [1:0]         format_i,
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
  logic               in_codes_q;       // the codes of a group come, and not its scales and zero points
  logic [2:0]         part_q;           // of the scales; 4: the zero points
  logic [ROW_W-1:0]   row_q;            // of the tile
  logic [COUNT_W-1:0] pass_q, group_q, row_of_tiles_q;
  logic [1:0]         slice_q;          // which row of a beat
  logic [USED_W-1:0]  banks_used_q;
  logic [BANK_W-1:0]  bank_q;
  logic [FILL_W-1:0]  fill_q;           // rows in the buffer, or on their way there, and
  logic [1:0]         tiles_q;          // whole tiles that were not taken

  logic few_bits, last_slice, bank_free, bank_taken, zeros_write, has_room, row_taken, tile_whole, group_whole, outputs_whole;
  assign bank_free     = banks_used_q != USED_W'(BANKS);
  assign bank_taken    = scale_write_o & (part_q == 3'd0);
  assign few_bits      = format_i != 2'd0;
  assign last_slice    = ~few_bits | (slice_q == (format_i == 2'd1 ? 2'd1 : 2'd3));
  assign zeros_write   = active_o & ~in_codes_q & s_valid_i & part_q[2];
  assign has_room      = fill_q != FILL_W'(DEPTH);
  assign row_taken     = active_o & in_codes_q & s_valid_i & has_room;
  assign tile_whole    = row_taken & (row_q == ROW_W'(ROWS - 1));
  assign group_whole   = tile_whole & (pass_q == passes_i - ONE);
  assign outputs_whole = group_whole & (group_q == groups_i - ONE);

  // A beat of several rows stays until its last one is taken.
  assign s_ready_o     = active_o & (in_codes_q ? has_room & last_slice : bank_free | (part_q != 3'd0));
  assign scale_write_o = active_o & ~in_codes_q & s_valid_i & (bank_free | (part_q != 3'd0)) & ~part_q[2];
  assign scale_bank_o  = bank_q;
  assign scale_part_o  = part_q[1:0];
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
      slice_q        <= '0;
      banks_used_q   <= '0;
      bank_q         <= '0;
    end else begin
      if (scale_write_o | zeros_write) begin
        part_q <= part_q + 3'd1;
        if (part_q == (few_bits ? 3'd4 : 3'd3)) begin
          part_q     <= '0;
          in_codes_q <= 1'b1;
        end
      end
      if (row_taken) begin
        slice_q <= last_slice ? '0 : slice_q + 2'd1;
        row_q   <= tile_whole ? '0 : row_q + ROW_W'(1);
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

  // ---- weights: a clock ----
  logic [4*COLS-1:0] zeros_q, codes;
  logic [5*COLS-1:0] expanded_q;
  logic [8*COLS-1:0] bytes_q, weights;
  logic              written_q, tile_written_q;
  for (genvar c = 0; c < COLS; c++) begin : gen_weight
    always_ff @(posedge clk_i) if (zeros_write) zeros_q[4*c+:4] <= s_data_i[8*c+:4];
    assign weights[8*c+:8] = few_bits ? {{3{expanded_q[5*c+4]}}, expanded_q[5*c+:5]} : bytes_q[8*c+:8];
  end
  file_codes #(
      .LANES(COLS)
  ) u_file_codes (
      .two_bits_i(format_i[1]),
      .slice_i   (slice_q),
      .bytes_i   (s_data_i),
      .codes_o   (codes)
  );
  weight_expander #(
      .LANES(COLS)
  ) u_weight_expander (
      .clk_i,
      .en_i       (1'b1),
      .two_level_i(format_i == 2'd3),
      .sparse_i   (1'b0),
      .codes_i    (codes),
      .zeros_i    (zeros_q),
      .mask_i     ({COLS{1'b1}}),
      .w_o        (expanded_q)
  );
  always_ff @(posedge clk_i) begin
    bytes_q        <= s_data_i;
    written_q      <= rst_ni & ~start_i & row_taken;
    tile_written_q <= rst_ni & ~start_i & tile_whole;
  end

  // ---- the buffer ----
  logic [8*COLS-1:0]    buffer_q[DEPTH];
  logic [ADDRESS_W-1:0] write_q, read_q;
  always_ff @(posedge clk_i) begin
    if (written_q) buffer_q[write_q] <= weights;
    row_o <= buffer_q[read_q];
  end
  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      write_q <= '0;
      read_q  <= '0;
      fill_q  <= '0;
      tiles_q <= '0;
    end else begin
      if (written_q) write_q <= write_q == ADDRESS_W'(DEPTH - 1) ? '0 : write_q + ADDRESS_W'(1);
      if (take_i) read_q <= read_q == ADDRESS_W'(DEPTH - 1) ? '0 : read_q + ADDRESS_W'(1);
      fill_q  <= fill_q + FILL_W'(row_taken) - FILL_W'(take_i);
      tiles_q <= tiles_q + 2'(tile_written_q) - 2'(take_tile_i);
    end
  end
  assign tile_ready_o = tiles_q != 2'd0;

endmodule
