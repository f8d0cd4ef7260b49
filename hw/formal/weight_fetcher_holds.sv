// Proves of weight_fetcher, from the first reset on and whatever its user does: a burst that is asked for stays until it is
// taken, and lies within 4 KB; no more than OUTSTANDING wait; a beat always has room in the buffer; the stream of weights
// stays. All but the last are assertions of the module. Of memory it assumes that no beat comes that was not asked for.

module weight_fetcher_holds (
    input logic        clk_i,
    input logic        rst_ni,
    input logic        stop_i,
    input logic [3:0]  token_passes_i,
    input logic [3:0]  groups_i,
    input logic        push_i,
    input logic [11:0] beat_address_i,
    input logic [3:0]  rows_of_tiles_i,
    input logic [1:0]  format_i,
    input logic        end_i,
    input logic        ar_ready_i,
    input logic        r_valid_i,
    input logic [31:0] r_data_i,
    input logic        r_error_i,
    input logic        r_last_i,
    input logic        ready_i
);

  localparam int BURST = 2, OUTSTANDING = 2;

  logic        waits, drains, ar_valid, valid, unused;
  logic [1:0]  room, format;
  logic [3:0]  rows_of_tiles;
  logic [13:0] ar_address;
  logic [7:0]  ar_len;
  logic [31:0] data;
  logic        error, r_ready;
  weight_fetcher #(
      .ROWS       (4),
      .COLS       (4),
      .COUNT_W    (4),
      .ADDRESS_W  (14),
      .BURST      (BURST),
      .OUTSTANDING(OUTSTANDING),
      .DEPTH      (2)
  ) u_fetcher (
      .clk_i,
      .rst_ni,
      .stop_i,
      .token_passes_i,
      .groups_i,
      .push_i         (push_i & (room != 2'd0)),
      .beat_address_i,
      .rows_of_tiles_i,
      .format_i,
      .room_o         (room),
      .waits_o        (waits),
      .rows_of_tiles_o(rows_of_tiles),
      .format_o       (format),
      .end_i          (end_i & waits),
      .drains_o       (drains),
      .error_o        (error),
      .ar_valid_o     (ar_valid),
      .ar_ready_i,
      .ar_address_o   (ar_address),
      .ar_len_o       (ar_len),
      .r_valid_i,
      .r_ready_o      (r_ready),
      .r_data_i,
      .r_error_i,
      .r_last_i,
      .valid_o        (valid),
      .ready_i,
      .data_o         (data)
  );
  handshake #(
      .WIDTH(32)
  ) u_stream (
      .clk_i,
      .rst_ni (rst_ni & ~stop_i),
      .valid_i(valid),
      .ready_i,
      .data_i (data)
  );
  assign unused = ^{rows_of_tiles, format, drains, error, r_ready, ar_valid, ar_address, ar_len};

  logic checks_q = 1'b0;  // a reset was there
  always_ff @(posedge clk_i) begin
    checks_q <= checks_q | ~rst_ni;
    assume (checks_q | ~rst_ni);
  end

endmodule
