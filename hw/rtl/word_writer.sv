// Writes words of 32 bits to memory, in a row, as an AXI4 master: words are collected to beats, and each beat is a burst of
// its own, with strobes. The next beat goes out without waiting for the answer to the one before.
//
// start_i, while active_o is 0, gives the address, a multiple of 4, and how many words. active_o falls when memory has
// answered to all. An error that it answers with is error_o, for a clock.
//
// Handshake: AXI4; of the words, valid and ready. Throughput: LANES words in LANES + 1 clocks. Reset drops all.

module word_writer #(
    parameter int BYTES     = 16,  // of a beat, a power of two from 4 on
    parameter int ADDRESS_W = 40,
    parameter int WORDS_W   = 24   // bits of a number of words
) (
    input  logic                 clk_i,
    input  logic                 rst_ni,
    input  logic                 start_i,
    input  logic [ADDRESS_W-1:0] address_i,
    input  logic [WORDS_W-1:0]   words_i,
    output logic                 active_o,
    output logic                 error_o,
    // The words.
    input  logic                 valid_i,
    output logic                 ready_o,
    input  logic [31:0]          word_i,
    // AXI4, the channels of writes. A beat is always the last of its burst.
    output logic                 aw_valid_o,
    input  logic                 aw_ready_i,
    output logic [ADDRESS_W-1:0] aw_address_o,
    output logic                 w_valid_o,
    input  logic                 w_ready_i,
    output logic [8*BYTES-1:0]   w_data_o,
    output logic [BYTES-1:0]     w_strb_o,
    input  logic                 b_valid_i,
    output logic                 b_ready_o,
    input  logic                 b_error_i
);

  localparam int BYTE_W = $clog2(BYTES);
  localparam int LANES = BYTES / 4;
  localparam int LANE_W = LANES > 1 ? $clog2(LANES) : 1;

  logic [ADDRESS_W-1:BYTE_W] at_q;
  logic [LANE_W-1:0]         lane_q;
  logic [LANES-1:0]          lanes_q;  // that have a word
  logic [WORDS_W-1:0]        left_q, due_q;  // words that are to come; answers that are
  logic                      take, whole, beat_taken;
  assign ready_o      = (left_q != '0) & ~aw_valid_o & ~w_valid_o;
  assign take         = valid_i & ready_o;
  assign whole        = take & ((left_q == WORDS_W'(1)) | (lane_q == LANE_W'(LANES - 1)));
  assign beat_taken   = (aw_valid_o | w_valid_o) & (~aw_valid_o | aw_ready_i) & (~w_valid_o | w_ready_i);
  assign active_o     = (left_q != '0) | aw_valid_o | w_valid_o | (due_q != '0);
  assign aw_address_o = {at_q, BYTE_W'(0)};
  assign b_ready_o    = 1'b1;
  assign error_o      = b_valid_i & b_error_i;
  for (genvar i = 0; i < LANES; i++) begin : gen_lane
    assign w_strb_o[4*i+:4] = {4{lanes_q[i]}};
    always_ff @(posedge clk_i) if (take & (lane_q == LANE_W'(i))) w_data_o[32*i+:32] <= word_i;
  end
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      left_q     <= '0;
      due_q      <= '0;
      lanes_q    <= '0;
      aw_valid_o <= 1'b0;
      w_valid_o  <= 1'b0;
    end else begin
      if (start_i) left_q <= words_i;
      else if (take) left_q <= left_q - WORDS_W'(1);
      due_q      <= due_q + WORDS_W'(whole) - WORDS_W'(b_valid_i);
      aw_valid_o <= whole | (aw_valid_o & ~aw_ready_i);
      w_valid_o  <= whole | (w_valid_o & ~w_ready_i);
      if (beat_taken) lanes_q <= '0;
      else if (take) lanes_q[lane_q] <= 1'b1;
    end
    if (start_i) begin
      at_q   <= address_i[ADDRESS_W-1:BYTE_W];
      lane_q <= LANES > 1 ? address_i[2+:LANE_W] : '0;
    end else begin
      if (beat_taken) at_q <= at_q + (ADDRESS_W - BYTE_W)'(1);
      if (take) lane_q <= lane_q == LANE_W'(LANES - 1) ? '0 : lane_q + LANE_W'(1);
    end
  end

  handshake #(
      .WIDTH(ADDRESS_W)
  ) u_aw (
      .clk_i,
      .rst_ni,
      .valid_i(aw_valid_o),
      .ready_i(aw_ready_i),
      .data_i (aw_address_o)
  );
  handshake #(
      .WIDTH(9 * BYTES)
  ) u_w (
      .clk_i,
      .rst_ni,
      .valid_i(w_valid_o),
      .ready_i(w_ready_i),
      .data_i ({w_strb_o, w_data_o})
  );

  logic unused;
  assign unused = ^address_i[1:0];

endmodule
