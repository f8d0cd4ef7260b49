// A product of up to TOKENS tokens with a matrix that comes as a stream: the array, what feeds it, and what is below it.
//
//   weights -> weight_loader -> systolic_array <- activation_store <- activations
//                                    |
//                               column_edges, one scaler for several columns
//                                    |
//                               result_store -> results
//
// tile_sequencer says what happens when. Activations are written before start_i and stay for further products. Sizes
// stay as they are while active_o is 1.
//
// A sum never waits below the array: a pass starts when its weights are there, and the last one of a row of tiles when
// there is room for its results. So stalls of the streams stop the sequencer, and no clock enable goes through the array.

module matmul_core #(
    parameter int ROWS       = 16,    // rows of cells: inputs. A multiple of 4
    parameter int COLS       = 16,    // columns of cells: outputs. A multiple of 4
    parameter int TOKENS     = 16,    // the most of a product, a power of two
    parameter int MAX_INPUTS = 512,   // of a token; MAX_INPUTS / ROWS is a power of two
    parameter int SCALERS    = 4,     // of sums: COLS / SCALERS columns share one
    parameter int MIN_GROUP  = 32,    // inputs that share a scale, at least; MAX_INPUTS / MIN_GROUP is a power of two
    parameter bit PAIRED     = 1'b0,  // neighbouring cells share a multiplier (mac_cell_pair.sv)
    parameter int COUNT_W    = 16,    // bits of a number of passes, groups and rows of tiles
    localparam int TOKEN_W = $clog2(TOKENS),
    localparam int PASS_W = $clog2(MAX_INPUTS / ROWS),
    localparam int GROUP_W = $clog2(MAX_INPUTS / MIN_GROUP)
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    // Sizes, and the begin of a product.
    input  logic               start_i,
    input  logic [1:0]         format_i,         // of weights
    input  logic [TOKEN_W-1:0] last_token_i,     // the number of tokens - 1
    input  logic [COUNT_W-1:0] passes_i,         // of a group
    input  logic [COUNT_W-1:0] groups_i,
    input  logic [COUNT_W-1:0] token_passes_i,   // passes_i * groups_i
    input  logic [COUNT_W-1:0] rows_of_tiles_i,
    output logic               active_o,
    output logic               weights_active_o,  // beats of weights are to come
    output logic               sums_active_o,     // between the first weight and the last column's last sum
    // Activations.
    input  logic               clear_i,          // what follows is written from token 0 on
    input  logic               code_write_i,
    input  logic               codes_write_i,
    input  logic [31:0]        codes_i,
    input  logic               scale_write_i,
    input  logic [31:0]        scale_i,
    output logic               full_o,
    // Reads of activations, while no product is active.
    input  logic [TOKEN_W-1:0] token_i,
    input  logic [PASS_W-1:0]  pass_i,
    input  logic [GROUP_W-1:0] group_i,
    output logic [8*ROWS-1:0]  codes_o,
    output logic [31:0]        scale_o,
    // Streams.
    input  logic               s_w_valid_i,
    output logic               s_w_ready_o,
    input  logic [8*COLS-1:0]  s_w_data_i,
    output logic               m_valid_o,
    input  logic               m_ready_i,
    output logic [8*COLS-1:0]  m_data_o,
    output logic               m_last_o
);

  localparam int ROW_W = $clog2(ROWS);
  localparam int BANKS = 4;
  localparam int BANK_W = $clog2(BANKS);
  localparam int MAX_PASSES = MAX_INPUTS / ROWS;
  localparam int MAX_GROUPS = MAX_INPUTS / MIN_GROUP;
  localparam int SUM_W = $clog2(ROWS * 128 * 128 + 1) + 1;  // as systolic_array has it
  localparam int TOTAL_W = $clog2(MAX_INPUTS * 128 * 128 + 1) + 1;
  localparam int CONTROL_W = 1 + TOKEN_W + 6 + BANK_W + 32;

  // ---- what happens when ----
  logic               sequencer_active, tile_ready, take_tile, take, issue, result_room, group_room;
  logic [ROW_W-1:0]   take_row;
  logic [TOKEN_W-1:0] token;
  logic [PASS_W-1:0]  pass;
  logic [GROUP_W-1:0] group;
  logic first_token, final_token, first_pass, last_pass, first_group, last_group;
  tile_sequencer #(
      .ROWS   (ROWS),
      .TOKEN_W(TOKEN_W),
      .COUNT_W(COUNT_W),
      .PASS_W (PASS_W),
      .GROUP_W(GROUP_W)
  ) u_tile_sequencer (
      .clk_i,
      .rst_ni,
      .start_i,
      .last_token_i,
      .passes_i,
      .groups_i,
      .rows_of_tiles_i,
      .active_o     (sequencer_active),
      .tile_ready_i (tile_ready),
      .take_tile_o  (take_tile),
      .take_o       (take),
      .take_row_o   (take_row),
      .issue_o      (issue),
      .token_o      (token),
      .pass_o       (pass),
      .group_o      (group),
      .first_token_o(first_token),
      .final_token_o(final_token),
      .first_pass_o (first_pass),
      .last_pass_o  (last_pass),
      .first_group_o(first_group),
      .last_group_o (last_group),
      .result_room_i(result_room),
      .group_room_i (group_room)
  );

  // Rows of tiles take the banks of results in turn, groups those of scales.
  logic              result_bank_q;
  logic [BANK_W-1:0] scale_bank_q;
  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      result_bank_q <= 1'b0;
      scale_bank_q  <= '0;
    end else if (final_token & last_pass) begin
      result_bank_q <= result_bank_q ^ last_group;
      scale_bank_q  <= scale_bank_q + BANK_W'(1);
    end
  end

  // ---- weights ----
  logic              scale_write, group_done;
  logic [BANK_W-1:0] scale_bank;
  logic [1:0]        scale_part;
  logic [8*COLS-1:0] scale_data, w_row;
  weight_loader #(
      .ROWS   (ROWS),
      .COLS   (COLS),
      .BANKS  (BANKS),
      .COUNT_W(COUNT_W)
  ) u_weight_loader (
      .clk_i,
      .rst_ni,
      .start_i,
      .format_i,
      .passes_i,
      .groups_i,
      .rows_of_tiles_i,
      .active_o     (weights_active_o),
      .s_valid_i    (s_w_valid_i),
      .s_ready_o    (s_w_ready_o),
      .s_data_i     (s_w_data_i),
      .scale_write_o(scale_write),
      .scale_bank_o (scale_bank),
      .scale_part_o (scale_part),
      .scale_data_o (scale_data),
      .group_done_i (group_done),
      .tile_ready_o (tile_ready),
      .take_tile_i  (take_tile),
      .take_i       (take),
      .row_o        (w_row)
  );

  // ---- activations, and reads of both: two clocks, as a large memory takes most of one ----
  logic [8*ROWS-1:0]  read_codes;
  logic [TOKEN_W-1:0] scale_token;
  logic [GROUP_W-1:0] scale_group;
  activation_store #(
      .ROWS      (ROWS),
      .TOKENS    (TOKENS),
      .MAX_PASSES(MAX_PASSES),
      .MAX_GROUPS(MAX_GROUPS),
      .COUNT_W   (COUNT_W)
  ) u_activation_store (
      .clk_i,
      .clear_i      (clear_i | ~rst_ni),
      .passes_i     (token_passes_i),
      .groups_i,
      .last_token_i,
      .code_write_i,
      .codes_write_i,
      .codes_i,
      .scale_write_i,
      .scale_i,
      .full_o,
      .token_i      (sequencer_active ? token : token_i),
      .pass_i       (sequencer_active ? pass : pass_i),
      .codes_o      (read_codes),
      .scale_token_i(active_o ? scale_token : token_i),
      .group_i      (active_o ? scale_group : group_i),
      .scale_o
  );

  assign codes_o = read_codes;

  logic              w_read_q, w_valid_q, x_read_q, x_valid_q, x_first_read_q, x_first_q;
  logic [ROW_W-1:0]  w_row_read_q, w_row_q;
  logic [8*COLS-1:0] w_q;
  logic [8*ROWS-1:0] codes_q;
  always_ff @(posedge clk_i) begin
    w_read_q       <= rst_ni & take;
    w_row_read_q   <= take_row;
    x_read_q       <= rst_ni & issue;
    x_first_read_q <= first_token;
    w_valid_q      <= rst_ni & w_read_q;
    w_row_q        <= w_row_read_q;
    w_q            <= w_row;
    x_valid_q      <= rst_ni & x_read_q;
    x_first_q      <= x_first_read_q;
    codes_q        <= read_codes;
  end

  // ---- the array ----
  logic [COLS*SUM_W-1:0] sums;
  logic [COLS-1:0]       unused_sum_valid;  // control_i of column_edges says it
  systolic_array #(
      .ROWS  (ROWS),
      .COLS  (COLS),
      .PAIRED(PAIRED)
  ) u_systolic_array (
      .clk_i,
      .rst_ni,
      .en_i       (1'b1),
      .w_valid_i  (w_valid_q),
      .w_row_i    (w_row_q),
      .w_i        (w_q),
      .x_valid_i  (x_valid_q),
      .x_first_i  (x_first_q),
      .x_i        (codes_q),
      .sum_valid_o(unused_sum_valid),
      .sum_o      (sums)
  );

  // ---- what a sum is: it leaves column 0 ROWS + 2 clocks after the token's issue ----
  localparam int ISSUED_W = 1 + TOKEN_W + 6 + BANK_W + GROUP_W;
  logic [ISSUED_W-1:0] issued_q[ROWS+1];
  logic [GROUP_W-1:0]  leaving_group_q;
  assign leaving_group_q = issued_q[ROWS][GROUP_W-1:0];
  assign scale_group     = leaving_group_q;
  assign scale_token     = issued_q[ROWS][GROUP_W+BANK_W+6+:TOKEN_W];
  logic [CONTROL_W-33:0] leaving_q;
  always_ff @(posedge clk_i) begin
    issued_q[0] <= {
      rst_ni & issue,
      token,
      first_pass,
      last_pass,
      first_group,
      last_group,
      final_token,
      result_bank_q,
      scale_bank_q,
      group
    };
    for (int i = 1; i <= ROWS; i++) begin
      issued_q[i] <= issued_q[i-1];
      if (!rst_ni) issued_q[i][ISSUED_W-1] <= 1'b0;
    end
    leaving_q <= issued_q[ROWS][ISSUED_W-1:GROUP_W];
    if (!rst_ni) leaving_q[CONTROL_W-33] <= 1'b0;
  end

  // ---- below the columns ----
  localparam int SHARE = COLS / SCALERS;
  localparam int COLUMN_W = SHARE > 1 ? $clog2(SHARE) : 1;
  logic [CONTROL_W-1:0]       control[SCALERS+1];
  logic [COLS-1:0]            scale_writes;
  logic [COLS*32-1:0]         scales;
  logic [SCALERS-1:0]         scaled, result_valid, result_bank, result_final;
  logic [SCALERS*TOKEN_W-1:0] result_token;
  logic [SCALERS*32-1:0]      result;
  logic [COLS-1:0]            column_valid, column_bank;
  logic [COLS*TOKEN_W-1:0]    column_token;
  logic [COLS*32-1:0]         column_result;
  assign control[0] = {leaving_q, scale_o};
  for (genvar i = 0; i < SCALERS; i++) begin : gen_edges
    logic [COLUMN_W-1:0] column;
    column_edges #(
        .SHARE  (SHARE),
        .TOKENS (TOKENS),
        .SUM_W  (SUM_W),
        .TOTAL_W(TOTAL_W),
        .BANKS  (BANKS)
    ) u_column_edges (
        .clk_i,
        .rst_ni,
        .last_token_i,
        .control_i      (control[i]),
        .control_o      (control[i+1]),
        .sum_i          (sums[i*SHARE*SUM_W+:SHARE*SUM_W]),
        .scale_write_i  (scale_writes[i*SHARE+:SHARE]),
        .scale_bank_i   (scale_bank),
        .scale_i        (scales[32*i*SHARE+:32*SHARE]),
        .scaled_o       (scaled[i]),
        .result_valid_o (result_valid[i]),
        .result_column_o(column),
        .result_bank_o  (result_bank[i]),
        .result_token_o (result_token[i*TOKEN_W+:TOKEN_W]),
        .result_final_o (result_final[i]),
        .result_o       (result[32*i+:32])
    );
    for (genvar j = 0; j < SHARE; j++) begin : gen_column
      localparam int C = i * SHARE + j;
      assign scale_writes[C]                  = scale_write & (scale_part == 2'(C / (COLS / 4)));
      assign scales[32*C+:32]                 = scale_data[32*(C%(COLS/4))+:32];
      assign column_valid[C]                  = result_valid[i] & (column == COLUMN_W'(j));
      assign column_bank[C]                   = result_bank[i];
      assign column_token[C*TOKEN_W+:TOKEN_W] = result_token[i*TOKEN_W+:TOKEN_W];
      assign column_result[32*C+:32]          = result[32*i+:32];
    end
  end
  // The last columns are through with a group after all others.
  assign group_done = scaled[SCALERS-1];

  // Groups from their last pass on, until they are scaled.
  logic [1:0] groups_q;
  logic       group_begins;
  assign group_begins = first_token & last_pass;
  assign group_room = ~groups_q[1];
  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) groups_q <= '0;
    else groups_q <= groups_q + 2'(group_begins) - 2'(group_done);
  end

  logic results_active;
  result_store #(
      .COLS   (COLS),
      .TOKENS (TOKENS),
      .COUNT_W(COUNT_W)
  ) u_result_store (
      .clk_i,
      .rst_ni,
      .start_i,
      .last_token_i,
      .rows_of_tiles_i,
      .reserve_i(first_token & last_pass & last_group),
      .room_o   (result_room),
      .active_o (results_active),
      .write_i  (column_valid),
      .bank_i   (column_bank),
      .token_i  (column_token),
      .final_i  (result_final[SCALERS-1]),
      .result_i (column_result),
      .m_valid_o,
      .m_ready_i,
      .m_data_o,
      .m_last_o
  );
  assign active_o = sequencer_active | results_active;

  // ---- for the counter that is compared with bench/systolic.py: until the last column had the last sum ----
  logic               last_sum;
  logic [COUNT_W-1:0] rows_of_tiles_left_q;
  assign last_sum = control[SCALERS][CONTROL_W-1] & control[SCALERS][BANK_W+32+4] & control[SCALERS][BANK_W+32+2] &
                    control[SCALERS][BANK_W+32+1];
  always_ff @(posedge clk_i) begin
    if (!rst_ni) sums_active_o <= 1'b0;
    else if (start_i) sums_active_o <= 1'b0;
    else if (s_w_valid_i & s_w_ready_o) sums_active_o <= 1'b1;
    else if (last_sum & (rows_of_tiles_left_q == COUNT_W'(1))) sums_active_o <= 1'b0;
    if (start_i) rows_of_tiles_left_q <= rows_of_tiles_i;
    else if (last_sum) rows_of_tiles_left_q <= rows_of_tiles_left_q - COUNT_W'(1);
  end

endmodule
