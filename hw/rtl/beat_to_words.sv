// Beats of several words of 32 bits to a stream of single words, the first one in the lowest bits.
//
// start_i says how many words are to come, and which word of the first beat is the first of them. What is behind the last
// word is thrown away, further beats included.
//
// Handshake: valid and ready on both sides. Latency: a clock. Throughput: a word a clock. Reset drops all.

module beat_to_words #(
    parameter int LANES   = 4,   // words of a beat, a power of two
    parameter int WORDS_W = 24,  // bits of a number of words
    localparam int LANE_W = LANES > 1 ? $clog2(LANES) : 1
) (
    input  logic                clk_i,
    input  logic                rst_ni,
    input  logic                start_i,
    input  logic [LANE_W-1:0]   lane_i,
    input  logic [WORDS_W-1:0]  words_i,
    output logic                active_o,  // words are to come
    input  logic                valid_i,
    output logic                ready_o,
    input  logic [32*LANES-1:0] beat_i,
    output logic                valid_o,
    input  logic                ready_i,
    output logic [31:0]         word_o
);

  logic [32*LANES-1:0] beat_q;
  logic [LANE_W-1:0]   lane_q;
  logic [WORDS_W-1:0]  left_q;
  logic                held_q, give, last, beat_ends;
  assign active_o  = left_q != '0;
  assign valid_o   = held_q;
  assign word_o    = beat_q[32*lane_q+:32];
  assign give      = valid_o & ready_i;
  assign last      = left_q == WORDS_W'(1);
  assign beat_ends = give & (last | (lane_q == LANE_W'(LANES - 1)));
  assign ready_o   = ~held_q | beat_ends;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      left_q <= '0;
      held_q <= 1'b0;
    end else if (start_i) begin
      left_q <= words_i;
      lane_q <= lane_i;
      held_q <= 1'b0;
    end else begin
      if (give) left_q <= left_q - WORDS_W'(1);
      if (give) lane_q <= beat_ends ? '0 : lane_q + LANE_W'(1);
      held_q <= (valid_i & ready_o & active_o & ~(give & last)) | (held_q & ~beat_ends);
    end
    if (valid_i & ready_o) beat_q <= beat_i;
  end

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni(rst_ni & ~start_i),
      .valid_i(valid_o),
      .ready_i,
      .data_i (word_o)
  );

endmodule
