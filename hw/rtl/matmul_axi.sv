// matmul_core behind AXI: registers by AXI4-Lite, and AXI4-Streams of weights, activations and results. This is the top
// that a Zynq's or LiteX's interconnect and DMA engines take; docs/rtl.md has the map of the registers.
//
// Commands, each of which runs until STATUS says done:
//
//   load      s_axis_x: fp32 values, token by token, which are quantized; or, in MODE coded, what `read` sends
//   multiply  s_axis_w: the matrix, as weight_loader.sv has it; m_axis: results, as result_store.sv has them
//   read      m_axis: scales and codes of the activations, as activation_reader.sv has them, in the lowest 32 bits
//
// Activations stay for any number of products. A command that cannot be, because another one runs, or its sizes are 0 or
// too large, is refused and changes nothing but STATUS. Reset drops all; the command `stop`, all but the registers.

module matmul_axi #(
    parameter int ROWS       = 16,   // rows of cells: inputs. 4, 8, 16, 32 or 64 (array_sizes.sv has all rules)
    parameter int COLS       = 16,   // columns of cells: outputs. A multiple of 4
    parameter int TOKENS     = 16,   // the most of a product, a power of two
    parameter int MAX_INPUTS = 2048,  // of a token, a power of two
    // Divides COLS. A group of 64 has 64 / ROWS passes, so that as many columns, or fewer, can share a scaler: here the
    // largest power of two that divides both, the lowest 1 among the bits of the two.
    parameter int SCALERS    = COLS / ((COLS | (64 / ROWS)) & -(COLS | (64 / ROWS))),
    parameter int MIN_GROUP  = 32,   // inputs that share a scale, at least; a power of two
    parameter bit PAIRED     = 1'b0  // neighbouring cells share a multiplier of 27 x 18 bits, as AMD's DSP48E2 has
) (
    input  logic              aclk,
    input  logic              aresetn,
    // AXI4-Lite.
    input  logic [7:0]        s_axil_awaddr,
    input  logic              s_axil_awvalid,
    output logic              s_axil_awready,
    input  logic [31:0]       s_axil_wdata,
    input  logic [3:0]        s_axil_wstrb,
    input  logic              s_axil_wvalid,
    output logic              s_axil_wready,
    output logic [1:0]        s_axil_bresp,
    output logic              s_axil_bvalid,
    input  logic              s_axil_bready,
    input  logic [7:0]        s_axil_araddr,
    input  logic              s_axil_arvalid,
    output logic              s_axil_arready,
    output logic [31:0]       s_axil_rdata,
    output logic [1:0]        s_axil_rresp,
    output logic              s_axil_rvalid,
    input  logic              s_axil_rready,
    // Weights and their scales.
    input  logic              s_axis_w_tvalid,
    output logic              s_axis_w_tready,
    input  logic [8*COLS-1:0] s_axis_w_tdata,
    // Activations.
    input  logic              s_axis_x_tvalid,
    output logic              s_axis_x_tready,
    input  logic [31:0]       s_axis_x_tdata,
    // Results.
    output logic              m_axis_tvalid,
    input  logic              m_axis_tready,
    output logic [8*COLS-1:0] m_axis_tdata,
    output logic [COLS-1:0]   m_axis_tkeep,
    output logic              m_axis_tlast,
    // As long as STATUS says done, if INTERRUPT is 1.
    output logic              irq
);

  array_sizes #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .SCALERS   (SCALERS),
      .MIN_GROUP (MIN_GROUP)
  ) u_array_sizes ();

  localparam int COUNT_W = 16;
  localparam int TOKEN_W = $clog2(TOKENS);
  localparam int MAX_PASSES = MAX_INPUTS / ROWS;
  localparam int MAX_GROUPS = MAX_INPUTS / MIN_GROUP;
  localparam int PASS_W = $clog2(MAX_PASSES);
  localparam int GROUP_W = $clog2(MAX_GROUPS);

  // ---- registers ----
  logic [3:0]         command;
  logic [TOKEN_W:0]   tokens;
  logic [COUNT_W-1:0] passes, groups, rows_of_tiles;
  logic [1:0]         format;
  logic               coded, fixed, interrupts, busy, done_q, refused_q;
  logic [31:0]        fixed_scale;
  logic [31:0] cycles_q, sum_cycles_q, weight_beats_q, weight_waits_q, weight_stalls_q, result_stalls_q;
  axil_registers #(
      .COUNT_W(COUNT_W),
      .TOKEN_W(TOKEN_W),
      .SHAPE  ({8'(TOKENS), 12'(COLS), 12'(ROWS)}),
      .LIMITS ({16'(MIN_GROUP), 16'(MAX_INPUTS)})
  ) u_axil_registers (
      .clk_i          (aclk),
      .rst_ni         (aresetn),
      .awaddr_i       (s_axil_awaddr),
      .awvalid_i      (s_axil_awvalid),
      .awready_o      (s_axil_awready),
      .wdata_i        (s_axil_wdata),
      .wvalid_i       (s_axil_wvalid),
      .wready_o       (s_axil_wready),
      .bvalid_o       (s_axil_bvalid),
      .bready_i       (s_axil_bready),
      .araddr_i       (s_axil_araddr),
      .arvalid_i      (s_axil_arvalid),
      .arready_o      (s_axil_arready),
      .rdata_o        (s_axil_rdata),
      .rvalid_o       (s_axil_rvalid),
      .rready_i       (s_axil_rready),
      .command_o      (command),
      .status_i       ({refused_q, done_q, busy}),
      .tokens_o       (tokens),
      .passes_o       (passes),
      .groups_o       (groups),
      .rows_of_tiles_o(rows_of_tiles),
      .format_o       (format),
      .coded_o        (coded),
      .fixed_o        (fixed),
      .scale_o        (fixed_scale),
      .interrupt_o    (interrupts),
      .cycles_i       (cycles_q),
      .sum_cycles_i   (sum_cycles_q),
      .weight_beats_i (weight_beats_q),
      .weight_waits_i (weight_waits_q),
      .weight_stalls_i(weight_stalls_q),
      .result_stalls_i(result_stalls_q)
  );
  assign s_axil_bresp = 2'b00;
  assign s_axil_rresp = 2'b00;

  // ---- commands ----
  logic rst_n;  // of all but the registers
  assign rst_n = aresetn & ~command[3];

  logic [2*COUNT_W-1:0] token_passes_q;
  always_ff @(posedge aclk) token_passes_q <= passes * groups;

  logic [TOKEN_W-1:0] last_token;
  logic               sizes_fit, load_start, multiply_start, read_start;
  logic               loading_q, core_active, reader_active;
  assign last_token = TOKEN_W'(tokens - (TOKEN_W + 1)'(1));
  assign sizes_fit = (tokens != '0) & (tokens <= (TOKEN_W + 1)'(TOKENS)) & (groups <= COUNT_W'(MAX_GROUPS)) &
                     (token_passes_q != '0) & (token_passes_q <= (2 * COUNT_W)'(MAX_PASSES));
  assign load_start     = ~busy & sizes_fit & (command == 4'd1);
  assign multiply_start = ~busy & sizes_fit & (command == 4'd2) & (rows_of_tiles != '0);
  assign read_start     = ~busy & sizes_fit & (command == 4'd4);
  assign busy           = loading_q | core_active | reader_active;
  assign irq            = done_q & interrupts;

  logic full, load_end, busy_q;
  assign load_end = loading_q & full;
  always_ff @(posedge aclk) begin
    if (!rst_n) begin
      loading_q <= 1'b0;
      busy_q    <= 1'b0;
      done_q    <= 1'b0;
      refused_q <= 1'b0;
    end else begin
      loading_q <= load_start | (loading_q & ~load_end);
      busy_q    <= busy;
      if (load_start | multiply_start | read_start) begin
        done_q    <= 1'b0;
        refused_q <= 1'b0;
      end else begin
        if (busy_q & ~busy) done_q <= 1'b1;
        if (command != 4'h0) refused_q <= 1'b1;
      end
    end
  end

  // ---- activations ----
  // In MODE coded: the scale of a group, then its codes.
  localparam int WORD_W = COUNT_W + $clog2(ROWS);
  logic [WORD_W-1:0] word_q;  // of the group
  logic [WORD_W-1:0] last_word_q;
  logic              x_taken, word_last, coded_scale, coded_codes;
  always_ff @(posedge aclk) begin
    last_word_q <= coded ? (WORD_W)'(passes) * WORD_W'(ROWS / 4) : WORD_W'(passes) * WORD_W'(ROWS) - WORD_W'(1);
  end
  assign word_last   = word_q == last_word_q;
  assign x_taken     = s_axis_x_tvalid & s_axis_x_tready;
  assign coded_scale = x_taken & coded & (word_q == '0);
  assign coded_codes = x_taken & coded & (word_q != '0);

  // Otherwise the numbers of a group, for the quantizer. Behind the last token's nothing is taken.
  logic               quantizer_ready, code_valid, code_last, code_first_q, all_taken_q, token_last, group_last;
  logic [TOKEN_W-1:0] x_token_q;
  logic [COUNT_W-1:0] x_group_q;
  logic [7:0]         code;
  logic [31:0]        code_scale;
  assign group_last = x_taken & word_last;
  assign token_last = group_last & (x_group_q == groups - COUNT_W'(1));
  quantizer #(
      .MAX_N(MAX_INPUTS)
  ) u_quantizer (
      .clk_i         (aclk),
      .rst_ni        (rst_n & ~load_start),
      .static_i      (fixed),
      .static_scale_i(fixed_scale),
      .valid_i       (s_axis_x_tvalid & loading_q & ~coded & ~all_taken_q),
      .ready_o       (quantizer_ready),
      .x_i           (s_axis_x_tdata),
      .last_i        (word_last),
      .valid_o       (code_valid),
      .ready_i       (1'b1),
      .code_o        (code),
      .scale_o       (code_scale),
      .last_o        (code_last)
  );
  always_ff @(posedge aclk) begin
    if (!rst_n || load_start) begin
      word_q       <= '0;
      x_group_q    <= '0;
      x_token_q    <= '0;
      all_taken_q  <= 1'b0;
      code_first_q <= 1'b1;
    end else begin
      if (x_taken) word_q <= word_last ? '0 : word_q + WORD_W'(1);
      if (group_last) x_group_q <= token_last ? '0 : x_group_q + COUNT_W'(1);
      if (token_last) begin
        x_token_q   <= x_token_q + TOKEN_W'(1);
        all_taken_q <= x_token_q == last_token;
      end
      if (code_valid) code_first_q <= code_last;
    end
  end
  assign s_axis_x_tready = loading_q & ~all_taken_q & (coded | quantizer_ready);

  // ---- the core ----
  logic [TOKEN_W-1:0] read_token;
  logic [PASS_W-1:0]  read_pass;
  logic [GROUP_W-1:0] read_group;
  logic [8*ROWS-1:0]  read_codes;
  logic [31:0]        read_scale;
  logic               result_valid, result_ready, result_last, weights_active, sums_active;
  logic [8*COLS-1:0]  result_data;
  matmul_core #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .SCALERS   (SCALERS),
      .MIN_GROUP (MIN_GROUP),
      .PAIRED    (PAIRED),
      .COUNT_W   (COUNT_W)
  ) u_core (
      .clk_i           (aclk),
      .rst_ni          (rst_n),
      .start_i         (multiply_start),
      .format_i        (format),
      .last_token_i    (last_token),
      .passes_i        (passes),
      .groups_i        (groups),
      .token_passes_i  (token_passes_q[COUNT_W-1:0]),
      .rows_of_tiles_i (rows_of_tiles),
      .active_o        (core_active),
      .weights_active_o(weights_active),
      .sums_active_o   (sums_active),
      .clear_i         (load_start),
      .code_write_i    (code_valid),
      .codes_write_i   (coded_codes),
      .codes_i         (coded ? s_axis_x_tdata : {24'h0, code}),
      .scale_write_i   (coded ? coded_scale : code_valid & code_first_q),
      .scale_i         (coded ? s_axis_x_tdata : code_scale),
      .full_o          (full),
      .token_i         (read_token),
      .pass_i          (read_pass),
      .group_i         (read_group),
      .codes_o         (read_codes),
      .scale_o         (read_scale),
      .s_w_valid_i     (s_axis_w_tvalid),
      .s_w_ready_o     (s_axis_w_tready),
      .s_w_data_i      (s_axis_w_tdata),
      .m_valid_o       (result_valid),
      .m_ready_i       (result_ready),
      .m_data_o        (result_data),
      .m_last_o        (result_last)
  );

  logic        reader_valid, reader_last;
  logic [31:0] reader_word;
  activation_reader #(
      .ROWS   (ROWS),
      .TOKEN_W(TOKEN_W),
      .PASS_W (PASS_W),
      .GROUP_W(GROUP_W),
      .COUNT_W(COUNT_W)
  ) u_reader (
      .clk_i       (aclk),
      .rst_ni      (rst_n),
      .start_i     (read_start),
      .last_token_i(last_token),
      .passes_i    (passes),
      .groups_i    (groups),
      .active_o    (reader_active),
      .token_o     (read_token),
      .pass_o      (read_pass),
      .group_o     (read_group),
      .codes_i     (read_codes),
      .scale_i     (read_scale),
      .valid_o     (reader_valid),
      .ready_i     (m_axis_tready),
      .word_o      (reader_word),
      .last_o      (reader_last)
  );
  assign result_ready  = m_axis_tready & ~reader_active;
  assign m_axis_tvalid = reader_active ? reader_valid : result_valid;
  assign m_axis_tdata  = reader_active ? (8 * COLS)'(reader_word) : result_data;
  assign m_axis_tkeep  = reader_active ? COLS'(15) : '1;
  assign m_axis_tlast  = reader_active ? reader_last : result_last;

  // ---- counters: of the latest command ----
  always_ff @(posedge aclk) begin
    if (!rst_n || load_start || multiply_start || read_start) begin
      cycles_q        <= '0;
      sum_cycles_q    <= '0;
      weight_beats_q  <= '0;
      weight_waits_q  <= '0;
      weight_stalls_q <= '0;
      result_stalls_q <= '0;
    end else begin
      if (busy) cycles_q <= cycles_q + 32'd1;
      if (sums_active) sum_cycles_q <= sum_cycles_q + 32'd1;
      if (s_axis_w_tvalid & s_axis_w_tready) weight_beats_q <= weight_beats_q + 32'd1;
      if (weights_active & ~s_axis_w_tvalid) weight_waits_q <= weight_waits_q + 32'd1;
      if (weights_active & s_axis_w_tvalid & ~s_axis_w_tready) weight_stalls_q <= weight_stalls_q + 32'd1;
      if (m_axis_tvalid & ~m_axis_tready) result_stalls_q <= result_stalls_q + 32'd1;
    end
  end

  // ---- what simulation checks ----
  handshake #(
      .WIDTH(9 * COLS + 1)
  ) u_m_axis (
      .clk_i  (aclk),
      .rst_ni (rst_n),
      .valid_i(m_axis_tvalid),
      .ready_i(m_axis_tready),
      .data_i ({m_axis_tlast, m_axis_tkeep, m_axis_tdata})
  );
  logic [63:0] tokens_long, codes_per_beat, group_words;
  assign tokens_long    = 64'(tokens);
  assign codes_per_beat = format == 2'd0 ? 64'd1 : format == 2'd1 ? 64'd2 : 64'd4;
  assign group_words    = 64'(passes) * 64'(ROWS);
  beats u_results (
      .clk_i     (aclk),
      .rst_ni    (rst_n),
      .start_i   (multiply_start | read_start),
      .beat_i    (m_axis_tvalid & m_axis_tready),
      .end_i     (m_axis_tvalid & m_axis_tready & m_axis_tlast),
      .expected_i(reader_active ? tokens_long * 64'(groups) * (64'd1 + group_words / 64'd4) :
                                  tokens_long * 64'(rows_of_tiles) * 64'd4)
  );
  beats u_weights (
      .clk_i     (aclk),
      .rst_ni    (rst_n),
      .start_i   (multiply_start),
      .beat_i    (s_axis_w_tvalid & s_axis_w_tready),
      .end_i     (core_active & ~weights_active),
      .expected_i(64'(rows_of_tiles) * 64'(groups) * ((format == 2'd0 ? 64'd4 : 64'd5) + group_words / codes_per_beat))
  );
  beats u_activations (
      .clk_i     (aclk),
      .rst_ni    (rst_n),
      .start_i   (load_start),
      .beat_i    (x_taken),
      .end_i     (load_end),
      .expected_i(tokens_long * 64'(groups) * (coded ? 64'd1 + group_words / 64'd4 : group_words))
  );

  logic unused;
  assign unused = ^{s_axil_wstrb, token_passes_q[2*COUNT_W-1:COUNT_W]};

endmodule
