// Reads words of 32 bits from memory, in a row, as an AXI4 master: bursts of whole beats, which end at multiples of BURST
// beats, so that none crosses a boundary of 4 KB.
//
// start_i, while active_o is 0, gives the address, a multiple of 4, and how many words. Beats wait on the channel until the
// words before are taken, so r_ready_o may be 0. An error that memory answers with is error_o, for a clock; the words go on
// as they came.
//
// Handshake: AXI4; of the words, valid and ready. Latency: 2 clocks from start_i to ar_valid_o, 1 from r_valid_i to valid_o.
// Throughput: a word a clock. Reset drops all.

module word_reader #(
    parameter int BYTES     = 16,  // of a beat, a power of two from 4 on
    parameter int ADDRESS_W = 40,
    parameter int BURST     = 16,  // the most beats of a burst, a power of two; BURST * BYTES is at most 4096
    parameter int WORDS_W   = 24   // bits of a number of words
) (
    input  logic                 clk_i,
    input  logic                 rst_ni,
    input  logic                 start_i,
    input  logic [ADDRESS_W-1:0] address_i,
    input  logic [WORDS_W-1:0]   words_i,
    output logic                 active_o,      // words are to come
    output logic                 error_o,
    // AXI4, the channels of reads.
    output logic                 ar_valid_o,
    input  logic                 ar_ready_i,
    output logic [ADDRESS_W-1:0] ar_address_o,
    output logic [7:0]           ar_len_o,      // beats - 1
    input  logic                 r_valid_i,
    output logic                 r_ready_o,
    input  logic [8*BYTES-1:0]   r_data_i,
    input  logic                 r_error_i,
    // The words.
    output logic                 valid_o,
    input  logic                 ready_i,
    output logic [31:0]          word_o
);

  localparam int BYTE_W = $clog2(BYTES);
  localparam int LANES = BYTES / 4;
  localparam int LANE_W = LANES > 1 ? $clog2(LANES) : 1;
  localparam int BURST_W = $clog2(BURST);

  logic [LANE_W-1:0] lane;  // of the first word
  assign lane = LANES > 1 ? address_i[2+:LANE_W] : '0;

  logic [ADDRESS_W-1:BYTE_W] at_q;    // of the next burst
  logic [WORDS_W-1:0]        left_q;  // beats that are not asked for
  logic [BURST_W:0]          to_boundary, beats;
  logic                      ask;
  assign ask         = (left_q != '0) & (~ar_valid_o | ar_ready_i);
  assign to_boundary = (BURST_W + 1)'(BURST) - {1'b0, at_q[BYTE_W+:BURST_W]};
  assign beats       = left_q < WORDS_W'(to_boundary) ? left_q[BURST_W:0] : to_boundary;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      left_q     <= '0;
      ar_valid_o <= 1'b0;
    end else begin
      if (start_i) left_q <= (words_i + WORDS_W'(lane) + WORDS_W'(LANES - 1)) / WORDS_W'(LANES);
      else if (ask) left_q <= left_q - WORDS_W'(beats);
      ar_valid_o <= ask | (ar_valid_o & ~ar_ready_i);
    end
    if (start_i) at_q <= address_i[ADDRESS_W-1:BYTE_W];
    else if (ask) at_q <= at_q + (ADDRESS_W - BYTE_W)'(beats);
    if (ask) begin
      ar_address_o <= {at_q, BYTE_W'(0)};
      ar_len_o     <= 8'(beats) - 8'd1;
    end
  end

  assign error_o = r_valid_i & r_ready_o & r_error_i;
  beat_to_words #(
      .LANES  (LANES),
      .WORDS_W(WORDS_W)
  ) u_words (
      .clk_i,
      .rst_ni,
      .start_i,
      .lane_i (lane),
      .words_i,
      .active_o,
      .valid_i(r_valid_i),
      .ready_o(r_ready_o),
      .beat_i (r_data_i),
      .valid_o,
      .ready_i,
      .word_o
  );

  handshake #(
      .WIDTH(ADDRESS_W + 8)
  ) u_ar (
      .clk_i,
      .rst_ni,
      .valid_i(ar_valid_o),
      .ready_i(ar_ready_i),
      .data_i ({ar_address_o, ar_len_o})
  );

  logic unused;
  assign unused = ^address_i[1:0];

endmodule
