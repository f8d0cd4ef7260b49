// matmul_core behind AXI: registers by AXI4-Lite, and AXI4-Streams of weights, activations and results. This is the top
// that a Zynq's or LiteX's interconnect and DMA engines take; docs/rtl.md has the map of the registers.
//
// Commands, each of which runs until STATUS says done:
//
//   load      s_axis_x: fp32 values, token by token, which are quantized; or, in MODE coded, what `read` sends
//   multiply  s_axis_w: the matrix, as weight_loader.sv has it; m_axis: results, as result_store.sv has them
//   read      m_axis: scales and codes of the activations, as activation_reader.sv has them, in the lowest 32 bits
//
// With FETCH, products can be queued: their matrices come from memory by m_axi, as weight_fetcher.sv has it, and each starts
// when the one before is done.
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
    parameter bit PAIRED     = 1'b0,  // neighbouring cells share a multiplier of 27 x 18 bits, as AMD's DSP48E2 has
    // The queue and the master m_axi; COLS is a power of two then. Bursts have up to FETCH_BURST beats, a power of two.
    parameter bit FETCH      = 1'b0,
    parameter int FETCH_BURST = 32,
    parameter int FETCH_OUTSTANDING = 16,  // bursts, a power of two; the buffer has room for as many
    parameter int FETCH_ADDRESS_W = 40
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
    // AXI4, reads of the queue's matrices.
    output logic                       m_axi_arid,
    output logic [FETCH_ADDRESS_W-1:0] m_axi_araddr,
    output logic [7:0]                 m_axi_arlen,
    output logic [2:0]                 m_axi_arsize,
    output logic [1:0]                 m_axi_arburst,
    output logic [3:0]                 m_axi_arcache,
    output logic [2:0]                 m_axi_arprot,
    output logic                       m_axi_arvalid,
    input  logic                       m_axi_arready,
    input  logic                       m_axi_rid,
    input  logic [8*COLS-1:0]          m_axi_rdata,
    input  logic [1:0]                 m_axi_rresp,
    input  logic                       m_axi_rlast,
    input  logic                       m_axi_rvalid,
    output logic                       m_axi_rready,
    // As long as STATUS says done, if INTERRUPT is 1.
    output logic              irq
);

  array_sizes #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .SCALERS   (SCALERS),
      .MIN_GROUP (MIN_GROUP),
      .FETCH     (FETCH),
      .FETCH_BURST(FETCH_BURST),
      .FETCH_OUTSTANDING(FETCH_OUTSTANDING),
      .FETCH_ADDRESS_W(FETCH_ADDRESS_W)
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
  logic               coded, fixed, interrupts, busy, done_q, refused_q, error_q, push;
  logic [COUNT_W+1:0] push_sizes;
  logic [63:0]        fetch_address;
  logic [7:0]         queue_room;
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
      .status_i       ({error_q, refused_q, done_q, busy}),
      .tokens_o       (tokens),
      .passes_o       (passes),
      .groups_o       (groups),
      .rows_of_tiles_o(rows_of_tiles),
      .format_o       (format),
      .coded_o        (coded),
      .fixed_o        (fixed),
      .scale_o        (fixed_scale),
      .interrupt_o    (interrupts),
      .push_o         (push),
      .push_sizes_o   (push_sizes),
      .fetch_address_o(fetch_address),
      .queue_room_i   (queue_room),
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
  logic               sizes_fit, load_start, command_multiplies, multiply_start, read_start, push_fits;
  logic               loading_q, core_active, reader_active;
  logic               queue_waits, queue_drains, queue_starts, queue_runs_q, queue_ends, queue_error;
  logic [COUNT_W-1:0] queue_rows_of_tiles, product_rows_of_tiles;
  logic [1:0]         queue_format, product_format;
  assign last_token = TOKEN_W'(tokens - (TOKEN_W + 1)'(1));
  assign sizes_fit = (tokens != '0) & (tokens <= (TOKEN_W + 1)'(TOKENS)) & (groups <= COUNT_W'(MAX_GROUPS)) &
                     (token_passes_q != '0) & (token_passes_q <= (2 * COUNT_W)'(MAX_PASSES));
  assign load_start     = ~busy & sizes_fit & (command == 4'd1);
  assign command_multiplies = ~busy & sizes_fit & (command == 4'd2) & (rows_of_tiles != '0);
  assign read_start     = ~busy & sizes_fit & (command == 4'd4);
  assign busy           = loading_q | core_active | reader_active | queue_waits | queue_drains;
  assign irq            = done_q & interrupts;

  // The queue: its first product starts when the core is idle, and is taken off when it is idle again.
  assign queue_starts          = queue_waits & ~queue_runs_q & ~core_active;
  assign queue_ends            = queue_runs_q & ~core_active;
  assign multiply_start        = command_multiplies | queue_starts;
  assign product_rows_of_tiles = queue_waits ? queue_rows_of_tiles : rows_of_tiles;
  assign product_format        = queue_waits ? queue_format : format;
  assign push_fits = push & (~busy | queue_waits) & sizes_fit & (push_sizes[COUNT_W-1:0] != '0) & (queue_room != '0) &
                     (fetch_address[$clog2(COLS)-1:0] == '0) & ((fetch_address >> FETCH_ADDRESS_W) == '0);
  always_ff @(posedge aclk) queue_runs_q <= rst_n & (queue_starts | (queue_runs_q & ~queue_ends));

  logic full, load_end, busy_q;
  assign load_end = loading_q & full;
  always_ff @(posedge aclk) begin
    if (!rst_n) begin
      loading_q <= 1'b0;
      busy_q    <= 1'b0;
      done_q    <= 1'b0;
      refused_q <= 1'b0;
      error_q   <= 1'b0;
    end else begin
      loading_q <= load_start | (loading_q & ~load_end);
      busy_q    <= busy & ~queue_drains;
      error_q   <= queue_error | (error_q & ~(load_start | command_multiplies | read_start));
      if (load_start | command_multiplies | read_start | push_fits) begin
        done_q    <= 1'b0;
        refused_q <= 1'b0;
      end else begin
        if (busy_q & ~busy) done_q <= 1'b1;
        if (push | (command != 4'h0)) refused_q <= 1'b1;
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
  logic               fetch_valid, w_valid, w_ready;
  logic [8*COLS-1:0]  fetch_data;
  assign w_valid         = queue_waits ? fetch_valid : s_axis_w_tvalid;
  assign s_axis_w_tready = w_ready & ~queue_waits;
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
      .format_i        (product_format),
      .last_token_i    (last_token),
      .passes_i        (passes),
      .groups_i        (groups),
      .token_passes_i  (token_passes_q[COUNT_W-1:0]),
      .rows_of_tiles_i (product_rows_of_tiles),
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
      .s_w_valid_i     (w_valid),
      .s_w_ready_o     (w_ready),
      .s_w_data_i      (queue_waits ? fetch_data : s_axis_w_tdata),
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

  // ---- matrices from memory ----
  assign m_axi_arid    = 1'b0;
  assign m_axi_arsize  = 3'($clog2(COLS));
  assign m_axi_arburst = 2'b01;    // addresses go up
  assign m_axi_arcache = 4'b0011;  // as AMD and Arm advise for a master of normal memory
  assign m_axi_arprot  = 3'b000;
  logic unused_fetch;
  if (FETCH) begin : gen_fetch
    localparam int QUEUE = 4;
    logic [$clog2(QUEUE+1)-1:0] room;
    weight_fetcher #(
        .ROWS       (ROWS),
        .COLS       (COLS),
        .COUNT_W    (COUNT_W),
        .ADDRESS_W  (FETCH_ADDRESS_W),
        .BURST      (FETCH_BURST),
        .OUTSTANDING(FETCH_OUTSTANDING),
        .DEPTH      (QUEUE)
    ) u_fetcher (
        .clk_i          (aclk),
        .rst_ni         (aresetn),
        .stop_i         (command[3]),
        .token_passes_i (token_passes_q[COUNT_W-1:0]),
        .groups_i       (groups),
        .push_i         (push_fits),
        .beat_address_i (fetch_address[FETCH_ADDRESS_W-1:$clog2(COLS)]),
        .rows_of_tiles_i(push_sizes[COUNT_W-1:0]),
        .format_i       (push_sizes[COUNT_W+1:COUNT_W]),
        .room_o         (room),
        .waits_o        (queue_waits),
        .rows_of_tiles_o(queue_rows_of_tiles),
        .format_o       (queue_format),
        .end_i          (queue_ends),
        .drains_o       (queue_drains),
        .error_o        (queue_error),
        .ar_valid_o     (m_axi_arvalid),
        .ar_ready_i     (m_axi_arready),
        .ar_address_o   (m_axi_araddr),
        .ar_len_o       (m_axi_arlen),
        .r_valid_i      (m_axi_rvalid),
        .r_ready_o      (m_axi_rready),
        .r_data_i       (m_axi_rdata),
        .r_error_i      (m_axi_rresp[1]),
        .r_last_i       (m_axi_rlast),
        .valid_o        (fetch_valid),
        .ready_i        (w_ready),
        .data_o         (fetch_data)
    );
    assign queue_room   = 8'(room);
    assign unused_fetch = ^{m_axi_rid, m_axi_rresp[0]};
  end else begin : gen_no_fetch
    assign {queue_room, queue_waits, queue_rows_of_tiles, queue_format, queue_drains, queue_error} = '0;
    assign {m_axi_arvalid, m_axi_araddr, m_axi_arlen, m_axi_rready, fetch_valid, fetch_data} = '0;
    assign unused_fetch = ^{push_sizes[COUNT_W+1:COUNT_W], m_axi_arready, m_axi_rid, m_axi_rdata, m_axi_rresp, m_axi_rlast,
                            m_axi_rvalid};
  end

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
      if (w_valid & w_ready) weight_beats_q <= weight_beats_q + 32'd1;
      if (weights_active & ~w_valid) weight_waits_q <= weight_waits_q + 32'd1;
      if (weights_active & w_valid & ~w_ready) weight_stalls_q <= weight_stalls_q + 32'd1;
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
  assign codes_per_beat = product_format == 2'd0 ? 64'd1 : product_format == 2'd1 ? 64'd2 : 64'd4;
  assign group_words    = 64'(passes) * 64'(ROWS);
  beats u_results (
      .clk_i     (aclk),
      .rst_ni    (rst_n),
      .start_i   (multiply_start | read_start),
      .beat_i    (m_axis_tvalid & m_axis_tready),
      .end_i     (m_axis_tvalid & m_axis_tready & m_axis_tlast),
      .expected_i(reader_active ? tokens_long * 64'(groups) * (64'd1 + group_words / 64'd4) :
                                  tokens_long * 64'(product_rows_of_tiles) * 64'd4)
  );
  beats u_weights (
      .clk_i     (aclk),
      .rst_ni    (rst_n),
      .start_i   (multiply_start),
      .beat_i    (w_valid & w_ready),
      .end_i     (core_active & ~weights_active),
      .expected_i(64'(product_rows_of_tiles) * 64'(groups) *
                  ((product_format == 2'd0 ? 64'd4 : 64'd5) + group_words / codes_per_beat))
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
  assign unused = ^{unused_fetch, s_axil_wstrb, token_passes_q[2*COUNT_W-1:COUNT_W]};

endmodule
