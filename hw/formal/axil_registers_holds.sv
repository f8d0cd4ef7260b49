// Proves of axil_registers, from the first reset on and whatever a master does: an address and its data are taken in the
// same clock; each write has one answer, each read one, and they wait until they are taken (handshake.sv, in the module);
// what a read gives stays; a command comes only from a write to CONTROL, and a product for the queue from each to QUEUE;
// and sizes and modes stay while one runs.

module axil_registers_holds (
    input logic        clk_i,
    input logic        rst_ni,
    input logic [7:0]  awaddr_i,
    input logic        awvalid_i,
    input logic [31:0] wdata_i,
    input logic        wvalid_i,
    input logic        bready_i,
    input logic [7:0]  araddr_i,
    input logic        arvalid_i,
    input logic        rready_i,
    input logic [3:0]  status_i
);

  logic        awready, wready, bvalid, arready, rvalid, coded, fixed, unused_interrupt, push;
  logic [31:0] scale, unused_rdata;
  logic [3:0]  command;
  logic [4:0]  tokens;
  logic [15:0] passes, groups, rows_of_tiles;
  logic [1:0]  format;
  logic [17:0] unused_push_sizes;
  logic [63:0] unused_fetch_address;
  axil_registers u_axil_registers (
      .clk_i,
      .rst_ni,
      .awaddr_i,
      .awvalid_i,
      .awready_o      (awready),
      .wdata_i,
      .wvalid_i,
      .wready_o       (wready),
      .bvalid_o       (bvalid),
      .bready_i,
      .araddr_i,
      .arvalid_i,
      .arready_o      (arready),
      .rdata_o        (unused_rdata),
      .rvalid_o       (rvalid),
      .rready_i,
      .command_o      (command),
      .status_i,
      .tokens_o       (tokens),
      .passes_o       (passes),
      .groups_o       (groups),
      .rows_of_tiles_o(rows_of_tiles),
      .format_o       (format),
      .coded_o        (coded),
      .fixed_o        (fixed),
      .scale_o        (scale),
      .interrupt_o    (unused_interrupt),
      .push_o         (push),
      .push_sizes_o   (unused_push_sizes),
      .fetch_address_o(unused_fetch_address),
      .queue_room_i   (8'd0),
      .cycles_i       (32'd0),
      .sum_cycles_i   (32'd0),
      .weight_beats_i (32'd0),
      .weight_waits_i (32'd0),
      .weight_stalls_i(32'd0),
      .result_stalls_i(32'd0)
  );

  logic checks_q = 1'b0;  // a reset was there
  logic writes_q, reads_q, writes, busy_q;  // answers that are due; a command runs
  logic control_q, queue_q;                 // CONTROL, QUEUE was written a clock ago
  logic [88:0] sizes, sizes_q;
  assign sizes  = {tokens, passes, groups, rows_of_tiles, format, coded, fixed, scale};
  assign writes = awvalid_i & awready;
  always_ff @(posedge clk_i) begin
    checks_q  <= checks_q | ~rst_ni;
    writes_q  <= rst_ni & (writes | (writes_q & ~(bvalid & bready_i)));
    reads_q   <= rst_ni & ((arvalid_i & arready) | (reads_q & ~(rvalid & rready_i)));
    control_q <= rst_ni & writes & (awaddr_i[7:2] == 6'h03);
    queue_q   <= rst_ni & writes & (awaddr_i[7:2] == 6'h14);
    busy_q    <= rst_ni & status_i[0];
    sizes_q   <= sizes;
    if (checks_q) begin
      assert (writes == (wvalid_i & wready));
      assert (bvalid == writes_q);
      assert (rvalid == reads_q);
      assert (~(writes & writes_q));
      assert (~(arvalid_i & arready & reads_q));
      assert (control_q | (command == 4'h0));
      assert (push == queue_q);
      assert (~busy_q | (sizes == sizes_q));
    end
  end

endmodule
