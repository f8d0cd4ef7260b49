// Reads matrices from memory as an AXI4 master, and queues the products that take them.
//
// An entry of the queue is a matrix: its address, a multiple of COLS, how many rows of tiles it has, and the format of its
// weights. In memory it is what weight_loader.sv takes, beat by beat. The first entry is the product that runs, or is next;
// end_i takes it off. Matrices are read one behind the other, ahead of the array, into a buffer of OUTSTANDING bursts. A
// burst is asked for when the buffer has room for all of it, so r_ready_o is always 1. Bursts end at multiples of BURST
// beats, so none crosses a boundary of 4 KB.
//
// stop_i drops the queue and the buffer. What was asked for still comes, and is thrown away: until then drains_o is 1.
// An error that memory answers with is error_o, for a clock; the beat goes on as it came, so no stream has a beat less.
//
// Handshake: AXI4; of the stream, valid and ready. Throughput: a beat a clock. Latency: 5 clocks from push_i to ar_valid_o,
// 2 from r_valid_i to valid_o.

module weight_fetcher #(
    parameter int ROWS        = 16,  // of cells, a multiple of 4
    parameter int COLS        = 16,  // of cells, so bytes of a beat: a power of two
    parameter int COUNT_W     = 16,  // bits of a number of groups, passes and rows of tiles
    parameter int ADDRESS_W   = 40,
    parameter int BURST       = 32,  // the most beats of a burst, a power of two; BURST * COLS is at most 4096
    parameter int OUTSTANDING = 16,  // the most bursts that are asked for and not all there
    parameter int DEPTH       = 4,   // of the queue, a power of two
    localparam int BYTE_W = $clog2(COLS),
    localparam int COUNT_OF_DEPTH_W = $clog2(DEPTH + 1)
) (
    input  logic                        clk_i,
    input  logic                        rst_ni,
    input  logic                        stop_i,
    // The activations' sizes, which stay while the queue has products.
    input  logic [COUNT_W-1:0]          token_passes_i,
    input  logic [COUNT_W-1:0]          groups_i,
    // The queue. push_i only where room_o is 1.
    input  logic                        push_i,
    input  logic [ADDRESS_W-1:BYTE_W]   beat_address_i,
    input  logic [COUNT_W-1:0]          rows_of_tiles_i,
    input  logic [1:0]                  format_i,
    output logic [COUNT_OF_DEPTH_W-1:0] room_o,           // entries that are free
    output logic                        waits_o,          // there is a first entry
    output logic [COUNT_W-1:0]          rows_of_tiles_o,  // the first entry's
    output logic [1:0]                  format_o,
    input  logic                        end_i,
    output logic                        drains_o,
    output logic                        error_o,
    // AXI4, the channels of reads.
    output logic                        ar_valid_o,
    input  logic                        ar_ready_i,
    output logic [ADDRESS_W-1:0]        ar_address_o,
    output logic [7:0]                  ar_len_o,         // beats - 1
    input  logic                        r_valid_i,
    output logic                        r_ready_o,
    input  logic [8*COLS-1:0]           r_data_i,
    input  logic                        r_error_i,
    input  logic                        r_last_i,
    // The stream of weights.
    output logic                        valid_o,
    input  logic                        ready_i,
    output logic [8*COLS-1:0]           data_o
);

  localparam int QUEUE_W = $clog2(DEPTH);
  localparam int BURST_W = $clog2(BURST);
  localparam int BEATS = BURST * OUTSTANDING;  // of the buffer
  localparam int PLACE_W = $clog2(BEATS);
  localparam int FILL_W = $clog2(BEATS + 1);
  localparam int BURSTS_W = $clog2(OUTSTANDING + 1);
  localparam int ROW_W = COUNT_W + 2;          // bits of the beats of a row of tiles
  localparam int LEFT_W = COUNT_W + ROW_W;     // and of a matrix

  // ---- the queue ----
  logic [ADDRESS_W-1:BYTE_W]   addresses_q[DEPTH];
  logic [COUNT_W+1:0]          sizes_q[DEPTH];  // format, rows of tiles
  logic [QUEUE_W-1:0]          first_q, fetch_q, push_at;
  logic [COUNT_OF_DEPTH_W-1:0] entries_q, unread_q;  // of these, not yet read from memory
  logic                        read_entry;
  assign room_o  = COUNT_OF_DEPTH_W'(DEPTH) - entries_q;
  assign waits_o = entries_q != '0;
  assign push_at = first_q + QUEUE_W'(entries_q);
  assign {format_o, rows_of_tiles_o} = sizes_q[first_q];
  always_ff @(posedge clk_i) begin
    if (push_i) begin
      addresses_q[push_at] <= beat_address_i;
      sizes_q[push_at]     <= {format_i, rows_of_tiles_i};
    end
    if (!rst_ni || stop_i) begin
      first_q   <= '0;
      fetch_q   <= '0;
      entries_q <= '0;
      unread_q  <= '0;
    end else begin
      if (end_i) first_q <= first_q + QUEUE_W'(1);
      if (read_entry) fetch_q <= fetch_q + QUEUE_W'(1);
      entries_q <= entries_q + COUNT_OF_DEPTH_W'(push_i) - COUNT_OF_DEPTH_W'(end_i);
      unread_q  <= unread_q + COUNT_OF_DEPTH_W'(push_i) - COUNT_OF_DEPTH_W'(read_entry);
    end
  end

  // ---- beats of a matrix: three clocks ----
  logic [1:0]                format, step_q;  // 0: waits for an entry; 3: asks for its bursts
  logic [COUNT_W-1:0]        rows_of_tiles;
  logic [ADDRESS_W-1:BYTE_W] at_q;            // of the next burst
  logic [ROW_W-1:0]          scales_q, row_q;
  logic [ROW_W+1:0]          codes_q;
  logic [LEFT_W-1:0]         left_q;
  logic                      ask;
  logic [BURST_W:0]          to_boundary, beats;
  assign {format, rows_of_tiles} = sizes_q[fetch_q];
  assign read_entry  = (step_q == 2'd3) & (ask ? left_q == LEFT_W'(beats) : left_q == '0);
  assign to_boundary = (BURST_W + 1)'(BURST) - {1'b0, at_q[BYTE_W+:BURST_W]};
  assign beats       = left_q < LEFT_W'(to_boundary) ? left_q[BURST_W:0] : to_boundary;
  always_ff @(posedge clk_i) begin
    scales_q <= ROW_W'(groups_i) * (format == 2'd0 ? ROW_W'(4) : ROW_W'(5));
    codes_q  <= (ROW_W + 2)'(token_passes_i) * (ROW_W + 2)'(ROWS);
    row_q    <= scales_q + ROW_W'(codes_q >> (format == 2'd0 ? 0 : format == 2'd1 ? 1 : 2));
    if (step_q == 2'd0) at_q <= addresses_q[fetch_q];
    else if (ask) at_q <= at_q + (ADDRESS_W - BYTE_W)'(beats);
    if (step_q == 2'd2) left_q <= LEFT_W'(rows_of_tiles) * LEFT_W'(row_q);
    else if (ask) left_q <= left_q - LEFT_W'(beats);
    if (!rst_ni || stop_i || read_entry) step_q <= 2'd0;
    else if (step_q != 2'd0 || unread_q != '0) step_q <= step_q == 2'd3 ? 2'd3 : step_q + 2'd1;
  end

  // ---- bursts ----
  logic [BURSTS_W-1:0] bursts_q;       // asked for, and not all there
  logic [FILL_W-1:0]   due_q, fill_q;  // beats that come, and that are in the buffer
  logic                taken, burst_ends, step;
  assign ask = (step_q == 2'd3) & (left_q != '0) & ~stop_i & ~drains_o & (~ar_valid_o | ar_ready_i) &
               (bursts_q != BURSTS_W'(OUTSTANDING)) & (due_q + fill_q <= FILL_W'(BEATS - BURST));
  assign r_ready_o  = 1'b1;
  assign taken      = r_valid_i;
  assign burst_ends = taken & r_last_i;
  assign error_o    = taken & r_error_i & ~drains_o;
  always_ff @(posedge clk_i) begin
    if (ask) begin
      ar_address_o <= {at_q, BYTE_W'(0)};
      ar_len_o     <= 8'(beats) - 8'd1;
    end
    if (!rst_ni) begin
      ar_valid_o <= 1'b0;
      drains_o   <= 1'b0;
      bursts_q   <= '0;
      due_q      <= '0;
    end else begin
      ar_valid_o <= ask | (ar_valid_o & ~ar_ready_i);
      drains_o   <= (stop_i | drains_o) & (due_q != '0);
      bursts_q   <= bursts_q + BURSTS_W'(ask) - BURSTS_W'(burst_ends);
      due_q      <= due_q + (ask ? FILL_W'(beats) : '0) - FILL_W'(taken);
    end
  end

  // ---- the buffer ----
  logic [8*COLS-1:0]  buffer_q[BEATS];
  logic [PLACE_W-1:0] write_q, read_q;
  logic               keep;
  assign keep = taken & ~drains_o;
  assign step = (fill_q != '0) & (~valid_o | ready_i);
  always_ff @(posedge clk_i) begin
    if (keep) buffer_q[write_q] <= r_data_i;
    if (step) data_o <= buffer_q[read_q];
  end
  always_ff @(posedge clk_i) begin
    if (!rst_ni || stop_i) begin
      write_q <= '0;
      read_q  <= '0;
      fill_q  <= '0;
      valid_o <= 1'b0;
    end else begin
      if (keep) write_q <= write_q + PLACE_W'(1);
      if (step) read_q <= read_q + PLACE_W'(1);
      fill_q  <= fill_q + FILL_W'(keep) - FILL_W'(step);
      valid_o <= step | (valid_o & ~ready_i);
    end
  end

  // ---- what simulation and proofs check ----
  handshake #(
      .WIDTH(ADDRESS_W + 8)
  ) u_ar (
      .clk_i  (clk_i),
      .rst_ni (rst_ni),
      .valid_i(ar_valid_o),
      .ready_i(ar_ready_i),
      .data_i ({ar_address_o, ar_len_o})
  );
`ifndef SYNTHESIS
  always @(posedge clk_i) begin
    if (rst_ni) begin
      if (ar_valid_o) assert (32'(ar_address_o[11:0]) + (32'(ar_len_o) + 32'd1) * COLS <= 32'd4096);
      assert (32'(due_q) + 32'(fill_q) <= BEATS);
      assert (bursts_q <= BURSTS_W'(OUTSTANDING));
      // Of memory: nothing comes that was not asked for.
`ifdef FORMAL
      assume (~taken | ((due_q != '0) & (bursts_q != '0)));
`else
      assert (~taken | ((due_q != '0) & (bursts_q != '0)));
`endif
    end
  end
`endif

endmodule
