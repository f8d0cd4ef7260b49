// A whole token: from its id to its logits. Weights, KV cache and program are in memory, behind the AXI4 master m_axi. The
// host writes the program's address, the token's id and its position, and reads the logits from memory (chip_registers.sv).
//
// A program is a list of steps, which step_sequencer.sv has. They run one behind the other; within a step all streams run:
//
//   memory -> weight_fetcher -> matmul_core -> words -> vector_memory, or memory
//   memory -> word_reader -> dequantizer, rms_norm, attention -> vector_memory
//   vector_memory -> quantizer -> matmul_core, or code_packer -> word_writer -> memory
//   vector_memory -> rms_norm, rope, attention, residual_add, swiglu -> vector_memory
//
// docs/chip.md has the program of a layer, and what each step takes.

module chip_axi #(
    parameter int ROWS          = 16,   // rows of cells: inputs. 4, 8, 16, 32 or 64
    parameter int COLS          = 16,   // columns of cells: outputs, and bytes of a beat of m_axi. A power of two from 4 to 128
    parameter int MAX_INPUTS    = 512,  // of a matrix, a power of two
    parameter int MIN_GROUP     = ROWS,  // inputs that share a scale, at least; a power of two
    // The largest power of two that divides both COLS and the passes of a group of 64.
    parameter int SCALERS       = COLS / ((COLS | (64 / ROWS)) & -(COLS | (64 / ROWS))),
    parameter int VECTOR_WORDS  = 2048,  // fp32 numbers between steps, a power of two
    parameter int MAX_DIM       = 64,   // of a head, a power of two
    parameter int MAX_POSITIONS = 512,  // of the context, a power of two
    parameter int ADDRESS_W     = 40
) (
    input  logic                 aclk,
    input  logic                 aresetn,
    // AXI4-Lite.
    input  logic [7:0]           s_axil_awaddr,
    input  logic                 s_axil_awvalid,
    output logic                 s_axil_awready,
    input  logic [31:0]          s_axil_wdata,
    input  logic [3:0]           s_axil_wstrb,
    input  logic                 s_axil_wvalid,
    output logic                 s_axil_wready,
    output logic [1:0]           s_axil_bresp,
    output logic                 s_axil_bvalid,
    input  logic                 s_axil_bready,
    input  logic [7:0]           s_axil_araddr,
    input  logic                 s_axil_arvalid,
    output logic                 s_axil_arready,
    output logic [31:0]          s_axil_rdata,
    output logic [1:0]           s_axil_rresp,
    output logic                 s_axil_rvalid,
    input  logic                 s_axil_rready,
    // AXI4.
    output logic                 m_axi_arid,
    output logic [ADDRESS_W-1:0] m_axi_araddr,
    output logic [7:0]           m_axi_arlen,
    output logic [2:0]           m_axi_arsize,
    output logic [1:0]           m_axi_arburst,
    output logic [3:0]           m_axi_arcache,
    output logic [2:0]           m_axi_arprot,
    output logic                 m_axi_arvalid,
    input  logic                 m_axi_arready,
    input  logic                 m_axi_rid,
    input  logic [8*COLS-1:0]    m_axi_rdata,
    input  logic [1:0]           m_axi_rresp,
    input  logic                 m_axi_rlast,
    input  logic                 m_axi_rvalid,
    output logic                 m_axi_rready,
    output logic                 m_axi_awid,
    output logic [ADDRESS_W-1:0] m_axi_awaddr,
    output logic [7:0]           m_axi_awlen,
    output logic [2:0]           m_axi_awsize,
    output logic [1:0]           m_axi_awburst,
    output logic [3:0]           m_axi_awcache,
    output logic [2:0]           m_axi_awprot,
    output logic                 m_axi_awvalid,
    input  logic                 m_axi_awready,
    output logic [8*COLS-1:0]    m_axi_wdata,
    output logic [COLS-1:0]      m_axi_wstrb,
    output logic                 m_axi_wlast,
    output logic                 m_axi_wvalid,
    input  logic                 m_axi_wready,
    input  logic                 m_axi_bid,
    input  logic [1:0]           m_axi_bresp,
    input  logic                 m_axi_bvalid,
    output logic                 m_axi_bready
);

  localparam int COUNT_W = 16, INDEX_W = 20, WORDS_W = 24;
  localparam int TOKENS = 2;  // the fewest that matmul_core takes; one is used
  localparam int ROW_W = $clog2(ROWS);
  localparam int COL_W = $clog2(COLS);
  localparam int PASS_W = $clog2(MAX_INPUTS / ROWS);
  localparam int GROUP_W = $clog2(MAX_INPUTS / MIN_GROUP);
  localparam int LANES = COLS / 4;  // words of a beat
  localparam int LANE_W = LANES > 1 ? $clog2(LANES) : 1;
  localparam int VECTOR_W = $clog2(VECTOR_WORDS);
  localparam int POSITION_W = $clog2(MAX_POSITIONS);
  localparam int BURST = 2048 / COLS > 32 ? 32 : 2048 / COLS;  // beats

  array_sizes #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .SCALERS   (SCALERS),
      .MIN_GROUP (MIN_GROUP),
      .FETCH     (1'b1),
      .FETCH_BURST(BURST),
      .FETCH_ADDRESS_W(ADDRESS_W)
  ) u_array_sizes ();

  // ---- registers ----
  logic                 start, refused, active, active_q, done_q, error_q, refused_q, memory_error;
  logic [INDEX_W-1:0]   token, position;
  logic [ADDRESS_W-1:0] program_at;
  logic [31:0]          cycles_q;
  chip_registers #(
      .ADDRESS_W(ADDRESS_W),
      .INDEX_W  (INDEX_W)
  ) u_registers (
      .clk_i     (aclk),
      .rst_ni    (aresetn),
      .awaddr_i  (s_axil_awaddr),
      .awvalid_i (s_axil_awvalid),
      .awready_o (s_axil_awready),
      .wdata_i   (s_axil_wdata),
      .wvalid_i  (s_axil_wvalid),
      .wready_o  (s_axil_wready),
      .bvalid_o  (s_axil_bvalid),
      .bready_i  (s_axil_bready),
      .araddr_i  (s_axil_araddr),
      .arvalid_i (s_axil_arvalid),
      .arready_o (s_axil_arready),
      .rdata_o   (s_axil_rdata),
      .rvalid_o  (s_axil_rvalid),
      .rready_i  (s_axil_rready),
      .start_o   (start),
      .token_o   (token),
      .position_o(position),
      .program_o (program_at),
      .status_i  ({refused_q, error_q, done_q, active | start}),
      .cycles_i  (cycles_q)
  );
  assign s_axil_bresp = 2'b00;
  assign s_axil_rresp = 2'b00;
  assign refused      = position >= INDEX_W'(MAX_POSITIONS);
  always_ff @(posedge aclk) begin
    if (!aresetn) begin
      active_q  <= 1'b0;
      done_q    <= 1'b0;
      error_q   <= 1'b0;
      refused_q <= 1'b0;
    end else begin
      active_q  <= active;
      done_q    <= ~start & (done_q | (active_q & ~active));
      error_q   <= ~start & (error_q | memory_error);
      refused_q <= start ? refused : refused_q;
    end
    if (start) cycles_q <= '0;
    else if (active) cycles_q <= cycles_q + 32'd1;
  end

  // ---- what happens when ----
  logic fetch, fetch_ready, step_begins, step_ends;
  logic embeds, copies, norms, quantizes, multiplies, rotates, stores, attends, adds, gates, to_memory;
  logic [ADDRESS_W-1:0] fetch_at, address, second_address;
  logic [1:0]           kv_format;
  logic [COUNT_W-1:0]   n, group, groups;
  logic [VECTOR_W-1:0]  vector_a, vector_b, vector_out;
  logic [WORDS_W-1:0]   row_words;
  logic [31:0]          constant;
  logic                 word_valid, word_ready;  // of memory
  logic [31:0]          word;
  step_sequencer #(
      .ADDRESS_W(ADDRESS_W),
      .INDEX_W  (INDEX_W),
      .VECTOR_W (VECTOR_W),
      .COUNT_W  (COUNT_W),
      .WORDS_W  (WORDS_W)
  ) u_sequencer (
      .clk_i          (aclk),
      .rst_ni         (aresetn),
      .start_i        (start & ~refused),
      .program_i      (program_at),
      .token_i        (token),
      .position_i     (position),
      .active_o       (active),
      .fetch_o        (fetch),
      .fetch_address_o(fetch_at),
      .word_valid_i   (word_valid),
      .word_ready_o   (fetch_ready),
      .word_i         (word),
      .begin_o        (step_begins),
      .end_i          (step_ends),
      .embeds_o       (embeds),
      .copies_o       (copies),
      .norms_o        (norms),
      .quantizes_o    (quantizes),
      .multiplies_o   (multiplies),
      .rotates_o      (rotates),
      .stores_o       (stores),
      .attends_o      (attends),
      .adds_o         (adds),
      .gates_o        (gates),
      .format_o       (kv_format),
      .to_memory_o    (to_memory),
      .n_o            (n),
      .a_o            (vector_a),
      .b_o            (vector_b),
      .out_o          (vector_out),
      .group_o        (group),
      .groups_o       (groups),
      .words_o        (row_words),
      .address_o      (address),
      .second_o       (second_address),
      .constant_o     (constant)
  );

  // A step ends when the vector is whole, when memory has answered to all writes, or when the array has all codes.
  logic               vector_write, writer_active, codes_full, queue_waits, attention_busy;
  logic [COUNT_W-1:0] out_left_q;
  logic               has_vector;
  assign has_vector = ~(quantizes | stores | (multiplies & to_memory));
  always_ff @(posedge aclk) begin
    if (step_begins) out_left_q <= has_vector ? n : '0;
    else if (vector_write) out_left_q <= out_left_q - COUNT_W'(1);
  end
  assign step_ends = ~step_begins & (out_left_q == '0) & ~writer_active & ~queue_waits & ~attention_busy &
                     (~quantizes | codes_full);

  // ---- memory, word by word ----
  logic                 reader_start, reader_active, reader_error, values_start, int8;
  logic [1:0]           values_q;  // how often they were asked for
  logic                 reader_ar_valid, reader_r_ready, fetcher_ar_valid, fetcher_r_ready;
  logic [ADDRESS_W-1:0] reader_ar_address, fetcher_ar_address;
  logic [7:0]           reader_ar_len, fetcher_ar_len;
  // Behind the keys, attention takes the values, in int8 twice.
  assign int8         = kv_format == 2'd3;
  assign values_start = attends & ~step_begins & ~reader_active & (values_q != {int8, ~int8});
  always_ff @(posedge aclk) values_q <= step_begins ? 2'd0 : values_q + 2'(values_start);
  assign reader_start = fetch | (step_begins & (embeds | copies | norms | attends)) | values_start;
  word_reader #(
      .BYTES    (COLS),
      .ADDRESS_W(ADDRESS_W),
      .BURST    (BURST),
      .WORDS_W  (WORDS_W)
  ) u_reader (
      .clk_i       (aclk),
      .rst_ni      (aresetn),
      .start_i     (reader_start),
      .address_i   (fetch ? fetch_at : values_start ? second_address : address),
      .words_i     (fetch ? WORDS_W'(8) : row_words),
      .active_o    (reader_active),
      .error_o     (reader_error),
      .ar_valid_o  (reader_ar_valid),
      .ar_ready_i  (m_axi_arready & ~multiplies),
      .ar_address_o(reader_ar_address),
      .ar_len_o    (reader_ar_len),
      .r_valid_i   (m_axi_rvalid & ~multiplies),
      .r_ready_o   (reader_r_ready),
      .r_data_i    (m_axi_rdata),
      .r_error_i   (m_axi_rresp[1]),
      .valid_o     (word_valid),
      .ready_i     (word_ready),
      .word_o      (word)
  );
  assign m_axi_arid    = 1'b0;
  assign m_axi_araddr  = multiplies ? fetcher_ar_address : reader_ar_address;
  assign m_axi_arlen   = multiplies ? fetcher_ar_len : reader_ar_len;
  assign m_axi_arvalid = multiplies ? fetcher_ar_valid : reader_ar_valid;
  assign m_axi_rready  = multiplies ? fetcher_r_ready : reader_r_ready;
  assign m_axi_arsize  = 3'(COL_W);
  assign m_axi_arburst = 2'b01;    // addresses go up
  assign m_axi_arcache = 4'b0011;  // as AMD and Arm advise for a master of normal memory
  assign m_axi_arprot  = 3'b000;

  logic        write_valid, write_ready, writer_error;
  logic [31:0] write_word;
  word_writer #(
      .BYTES    (COLS),
      .ADDRESS_W(ADDRESS_W),
      .WORDS_W  (WORDS_W)
  ) u_writer (
      .clk_i       (aclk),
      .rst_ni      (aresetn),
      .start_i     (step_begins & (stores | (multiplies & to_memory))),
      .address_i   (multiplies ? second_address : address),
      .words_i     (row_words),
      .active_o    (writer_active),
      .error_o     (writer_error),
      .valid_i     (write_valid),
      .ready_o     (write_ready),
      .word_i      (write_word),
      .aw_valid_o  (m_axi_awvalid),
      .aw_ready_i  (m_axi_awready),
      .aw_address_o(m_axi_awaddr),
      .w_valid_o   (m_axi_wvalid),
      .w_ready_i   (m_axi_wready),
      .w_data_o    (m_axi_wdata),
      .w_strb_o    (m_axi_wstrb),
      .b_valid_i   (m_axi_bvalid),
      .b_ready_o   (m_axi_bready),
      .b_error_i   (m_axi_bresp[1])
  );
  assign m_axi_awid    = 1'b0;
  assign m_axi_awlen   = 8'd0;
  assign m_axi_awsize  = 3'(COL_W);
  assign m_axi_awburst = 2'b01;
  assign m_axi_awcache = 4'b0011;
  assign m_axi_awprot  = 3'b000;
  assign m_axi_wlast   = 1'b1;

  // ---- vectors ----
  logic        read_valid, read_ready, read_start;
  logic [31:0] read_a, read_b, vector_data;
  assign read_start = step_begins & (norms | quantizes | rotates | stores | attends | adds | gates);
  vector_memory #(
      .WORDS  (VECTOR_WORDS),
      .COUNT_W(COUNT_W)
  ) u_vectors (
      .clk_i        (aclk),
      .rst_ni       (aresetn),
      .start_i      (read_start),
      .pairs_i      (rotates | adds | gates),
      .a_i          (vector_a),
      .b_i          (vector_b),
      .n_i          (n),
      .period_i     (group),
      .valid_o      (read_valid),
      .ready_i      (read_ready),
      .a_o          (read_a),
      .b_o          (read_b),
      .write_start_i(step_begins),
      .write_at_i   (vector_out),
      .write_i      (vector_write),
      .data_i       (vector_data)
  );

  // ---- a row of the embedding ----
  logic        embed_ready, embed_valid;
  logic [31:0] embed;
  dequantizer #(
      .COUNT_W(COUNT_W)
  ) u_dequantizer (
      .clk_i  (aclk),
      .rst_ni (aresetn),
      .group_i(group),
      .valid_i(word_valid & embeds),
      .ready_o(embed_ready),
      .word_i (word),
      .valid_o(embed_valid),
      .ready_i(1'b1),
      .y_o    (embed)
  );

  // ---- RMSNorm ----
  logic        norm_x_ready, norm_w_ready, norm_valid, unused_norm_last;
  logic [31:0] norm;
  rms_norm #(
      .MAX_N(MAX_INPUTS)
  ) u_rms_norm (
      .clk_i    (aclk),
      .rst_ni   (aresetn),
      .eps_i    (constant),
      .n_i      (n[$clog2(MAX_INPUTS):0]),
      .x_valid_i(read_valid & norms),
      .x_ready_o(norm_x_ready),
      .x_i      (read_b),
      .w_valid_i(word_valid & norms),
      .w_ready_o(norm_w_ready),
      .w_i      (word),
      .valid_o  (norm_valid),
      .ready_i  (1'b1),
      .y_o      (norm),
      .last_o   (unused_norm_last)
  );

  // ---- RoPE, residual sums, SwiGLU: of pairs ----
  logic        rope_ready, rope_valid, add_ready, add_valid, gate_ready, gate_valid;
  logic [31:0] rotated, sum, gated;
  rope u_rope (
      .clk_i  (aclk),
      .rst_ni (aresetn),
      .valid_i(read_valid & rotates),
      .ready_o(rope_ready),
      .x_i    (read_a),
      .turn_i (read_b),
      .valid_o(rope_valid),
      .ready_i(1'b1),
      .y_o    (rotated)
  );
  residual_add u_add (
      .clk_i  (aclk),
      .rst_ni (aresetn),
      .valid_i(read_valid & adds),
      .ready_o(add_ready),
      .x_i    (read_a),
      .y_i    (read_b),
      .valid_o(add_valid),
      .ready_i(1'b1),
      .sum_o  (sum)
  );
  swiglu u_swiglu (
      .clk_i  (aclk),
      .rst_ni (aresetn),
      .valid_i(read_valid & gates),
      .ready_o(gate_ready),
      .gate_i (read_a),
      .up_i   (read_b),
      .valid_o(gate_valid),
      .ready_i(1'b1),
      .y_o    (gated)
  );

  // ---- attention of a query head ----
  logic        q_ready, kv_ready, mix_valid, unused_attention;
  logic [31:0] mix;
  // What a trace takes of it.
  logic              score_valid, prob_valid, weight_valid, attention_code_valid;
  logic [31:0]       attention_step, attention_scale;
  logic signed [7:0] attention_code;
  attention #(
      .MAX_DIM      (MAX_DIM),
      .MAX_POSITIONS(MAX_POSITIONS)
  ) u_attention (
      .clk_i         (aclk),
      .rst_ni        (aresetn),
      .start_i       (step_begins & attends),
      .busy_o        (attention_busy),
      .dim_i         (n[$clog2(MAX_DIM):0]),
      .positions_i   (position[POSITION_W:0] + (POSITION_W + 1)'(1)),
      .kv_format_i   (kv_format & {1'b1, ~int8}),
      .int8_i        (int8),
      .scale_i       (constant),
      .q_valid_i     (read_valid & attends),
      .q_ready_o     (q_ready),
      .q_i           (read_b),
      .kv_valid_i    (word_valid & attends),
      .kv_ready_o    (kv_ready),
      .kv_i          (word),
      .out_valid_o   (mix_valid),
      .out_ready_i   (1'b1),
      .out_o         (mix),
      .out_last_o    (unused_attention),
      .score_valid_o (score_valid),
      .prob_valid_o  (prob_valid),
      .weight_valid_o(weight_valid),
      .step_o        (attention_step),
      .code_valid_o  (attention_code_valid),
      .code_o        (attention_code),
      .code_scale_o  (attention_scale)
  );

  // ---- quantizing: for the array, or for the KV cache ----
  logic               number_valid, number_last, quantizer_ready, code_valid, code_ready, code_last, packs, packer_ready;
  logic               pack_valid, code_first_q;
  logic [COUNT_W-1:0] group_left_q;
  logic [7:0]         code;
  logic [31:0]        code_scale, pack_word;
  assign packs        = stores & kv_format[1];
  assign number_valid = read_valid & (quantizes | packs);
  assign number_last  = group_left_q == COUNT_W'(1);
  always_ff @(posedge aclk) begin
    if (step_begins) group_left_q <= group;
    else if (number_valid & quantizer_ready) group_left_q <= number_last ? group : group_left_q - COUNT_W'(1);
    if (step_begins) code_first_q <= 1'b1;
    else if (code_valid & code_ready) code_first_q <= code_last;
  end
  quantizer #(
      .MAX_N(MAX_INPUTS)
  ) u_quantizer (
      .clk_i         (aclk),
      .rst_ni        (aresetn),
      .static_i      (1'b0),
      .static_scale_i(32'h0),
      .valid_i       (number_valid),
      .ready_o       (quantizer_ready),
      .x_i           (read_b),
      .last_i        (number_last),
      .valid_o       (code_valid),
      .ready_i       (code_ready),
      .code_o        (code),
      .scale_o       (code_scale),
      .last_o        (code_last)
  );
  code_packer u_packer (
      .clk_i  (aclk),
      .rst_ni (aresetn),
      .valid_i(code_valid & packs),
      .ready_o(packer_ready),
      .code_i (code),
      .scale_i(code_scale),
      .last_i (code_last),
      .valid_o(pack_valid),
      .ready_i(write_ready),
      .word_o (pack_word)
  );
  assign code_ready = packs ? packer_ready : 1'b1;

  // ---- products ----
  logic [COUNT_W-1:0] passes_q, groups_q, token_passes_q, rows_of_tiles;
  always_ff @(posedge aclk) begin
    if (step_begins & quantizes) begin
      passes_q       <= group >> ROW_W;
      groups_q       <= groups;
      token_passes_q <= n >> ROW_W;
    end
  end
  assign rows_of_tiles = COUNT_W'((({1'b0, n} + (COUNT_W + 1)'(COLS - 1))) >> COL_W);

  logic              product_starts, product_ends, product_runs_q, core_active;
  logic [COUNT_W-1:0] unused_rows_of_tiles;
  logic [1:0]        unused_format;
  logic [1:0]        unused_room;
  logic              unused_drains, fetch_error, w_valid, w_ready;
  logic [8*COLS-1:0] w_data;
  assign product_starts = queue_waits & ~product_runs_q & ~core_active;
  assign product_ends   = product_runs_q & ~core_active;
  always_ff @(posedge aclk) product_runs_q <= aresetn & (product_starts | (product_runs_q & ~product_ends));
  weight_fetcher #(
      .ROWS     (ROWS),
      .COLS     (COLS),
      .COUNT_W  (COUNT_W),
      .ADDRESS_W(ADDRESS_W),
      .BURST    (BURST),
      .DEPTH    (2)
  ) u_fetcher (
      .clk_i          (aclk),
      .rst_ni         (aresetn),
      .stop_i         (1'b0),
      .token_passes_i (token_passes_q),
      .groups_i       (groups_q),
      .push_i         (step_begins & multiplies),
      .beat_address_i (address[ADDRESS_W-1:COL_W]),
      .rows_of_tiles_i(rows_of_tiles),
      .format_i       (2'd0),
      .room_o         (unused_room),
      .waits_o        (queue_waits),
      .rows_of_tiles_o(unused_rows_of_tiles),
      .format_o       (unused_format),
      .end_i          (product_ends),
      .drains_o       (unused_drains),
      .error_o        (fetch_error),
      .ar_valid_o     (fetcher_ar_valid),
      .ar_ready_i     (m_axi_arready & multiplies),
      .ar_address_o   (fetcher_ar_address),
      .ar_len_o       (fetcher_ar_len),
      .r_valid_i      (m_axi_rvalid & multiplies),
      .r_ready_o      (fetcher_r_ready),
      .r_data_i       (m_axi_rdata),
      .r_error_i      (m_axi_rresp[1]),
      .r_last_i       (m_axi_rlast),
      .valid_o        (w_valid),
      .ready_i        (w_ready),
      .data_o         (w_data)
  );

  logic              result_valid, result_ready, unused_result_last, unused_weights, unused_sums;
  logic [8*COLS-1:0] result;
  logic [8*ROWS-1:0] unused_codes;
  logic [31:0]       unused_scale;
  matmul_core #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .SCALERS   (SCALERS),
      .MIN_GROUP (MIN_GROUP),
      .COUNT_W   (COUNT_W)
  ) u_core (
      .clk_i           (aclk),
      .rst_ni          (aresetn),
      .start_i         (product_starts),
      .format_i        (2'd0),
      .last_token_i    ('0),
      .passes_i        (passes_q),
      .groups_i        (groups_q),
      .token_passes_i  (token_passes_q),
      .rows_of_tiles_i (rows_of_tiles),
      .active_o        (core_active),
      .weights_active_o(unused_weights),
      .sums_active_o   (unused_sums),
      .clear_i         (step_begins & quantizes),
      .code_write_i    (code_valid & quantizes),
      .codes_write_i   (1'b0),
      .codes_i         ({24'h0, code}),
      .scale_write_i   (code_valid & quantizes & code_first_q),
      .scale_i         (code_scale),
      .full_o          (codes_full),
      .token_i         ('0),
      .pass_i          (PASS_W'(0)),
      .group_i         (GROUP_W'(0)),
      .codes_o         (unused_codes),
      .scale_o         (unused_scale),
      .s_w_valid_i     (w_valid),
      .s_w_ready_o     (w_ready),
      .s_w_data_i      (w_data),
      .m_valid_o       (result_valid),
      .m_ready_i       (result_ready),
      .m_data_o        (result),
      .m_last_o        (unused_result_last)
  );
  logic        product_valid, unused_product_active;
  logic [31:0] product_word;
  beat_to_words #(
      .LANES  (LANES),
      .WORDS_W(COUNT_W)
  ) u_results (
      .clk_i   (aclk),
      .rst_ni  (aresetn),
      .start_i (step_begins & multiplies),
      .lane_i  (LANE_W'(0)),
      .words_i (n),
      .active_o(unused_product_active),
      .valid_i (result_valid),
      .ready_o (result_ready),
      .beat_i  (result),
      .valid_o (product_valid),
      .ready_i (~to_memory | write_ready),
      .word_o  (product_word)
  );

  // ---- what goes where: of these one is at work ----
  assign word_ready = fetch_ready | copies | (embeds & embed_ready) | (norms & norm_w_ready) |
                      (attends & kv_ready);
  always_comb begin
    read_ready   = 1'b1;
    vector_write = 1'b0;
    vector_data  = word;
    if (embeds) {vector_write, vector_data} = {embed_valid, embed};
    if (copies) vector_write = word_valid;
    if (norms) {read_ready, vector_write, vector_data} = {norm_x_ready, norm_valid, norm};
    if (quantizes | packs) read_ready = quantizer_ready;
    if (stores & ~packs) read_ready = write_ready;
    if (multiplies) {vector_write, vector_data} = {product_valid & ~to_memory, product_word};
    if (rotates) {read_ready, vector_write, vector_data} = {rope_ready, rope_valid, rotated};
    if (attends) {read_ready, vector_write, vector_data} = {q_ready, mix_valid, mix};
    if (adds) {read_ready, vector_write, vector_data} = {add_ready, add_valid, sum};
    if (gates) {read_ready, vector_write, vector_data} = {gate_ready, gate_valid, gated};
  end
  assign write_valid  = packs ? pack_valid : stores ? read_valid : product_valid & multiplies & to_memory;
  assign write_word   = packs ? pack_word : stores ? read_b : product_word;
  assign memory_error = reader_error | fetch_error | writer_error;

  logic unused;
  assign unused = ^{s_axil_wstrb, m_axi_rid, m_axi_rresp[0], m_axi_bid, m_axi_bresp[0], unused_norm_last, unused_attention,
                    score_valid, prob_valid, weight_valid, attention_step, attention_code_valid, attention_code, attention_scale,
                    unused_rows_of_tiles, unused_format, unused_room, unused_drains, unused_result_last, unused_weights,
                    unused_sums, unused_codes, unused_scale, unused_product_active};

endmodule
