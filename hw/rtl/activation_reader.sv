// Sends the activations that a product would read, for a trace or a test: for each token and group its scale, then its
// codes, four in a word.
//
// Handshake: valid and ready; word_o stays while it waits. Throughput: a word in three clocks.

module activation_reader #(
    parameter int ROWS    = 16,  // rows of cells, a multiple of 4
    parameter int TOKEN_W = 4,   // bits of the index of a token,
    parameter int PASS_W  = 5,   // of a pass,
    parameter int GROUP_W = 4,   // and of a group
    parameter int COUNT_W = 16   // bits of a number of passes and groups
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    input  logic               start_i,
    input  logic [TOKEN_W-1:0] last_token_i,
    input  logic [COUNT_W-1:0] passes_i,      // of a group
    input  logic [COUNT_W-1:0] groups_i,
    output logic               active_o,
    // activation_store: read in a clock.
    output logic [TOKEN_W-1:0] token_o,
    output logic [PASS_W-1:0]  pass_o,
    output logic [GROUP_W-1:0] group_o,
    input  logic [8*ROWS-1:0]  codes_i,
    input  logic [31:0]        scale_i,
    // The stream.
    output logic               valid_o,
    input  logic               ready_i,
    output logic [31:0]        word_o,
    output logic               last_o
);

  localparam int WORDS = ROWS / 4;  // of a pass
  localparam int WORD_W = WORDS > 1 ? $clog2(WORDS) : 1;
  localparam logic [COUNT_W-1:0] ONE = 1;

  logic               read_q;      // what token_o, pass_o and group_o name is there in the next clock
  logic               in_codes_q;  // the scale of the group was sent
  logic [WORD_W-1:0]  word_q;
  logic [COUNT_W-1:0] pass_in_group_q, group_q;

  logic word_is_last, group_is_last, token_is_last, all_sent, step;
  assign step          = active_o & read_q & ~valid_o;
  assign word_is_last  = in_codes_q & (word_q == WORD_W'(WORDS - 1));
  assign group_is_last = word_is_last & (pass_in_group_q == passes_i - ONE);
  assign token_is_last = group_is_last & (group_q == groups_i - ONE);
  assign all_sent      = token_is_last & (token_o == last_token_i);
  assign group_o       = GROUP_W'(group_q);

  always_ff @(posedge clk_i) begin
    if (!rst_ni || start_i) begin
      active_o        <= rst_ni & start_i;
      read_q          <= 1'b0;
      in_codes_q      <= 1'b0;
      word_q          <= '0;
      pass_in_group_q <= '0;
      pass_o          <= '0;
      group_q         <= '0;
      token_o         <= '0;
      valid_o         <= 1'b0;
      last_o          <= 1'b0;
    end else begin
      read_q  <= active_o & ~step & ~valid_o;
      valid_o <= step | (valid_o & ~ready_i);
      if (step) begin
        word_o     <= in_codes_q ? codes_i[32*word_q+:32] : scale_i;
        last_o     <= all_sent;
        in_codes_q <= ~group_is_last;
        if (in_codes_q) word_q <= word_is_last ? '0 : word_q + WORD_W'(1);
        if (word_is_last) begin
          pass_in_group_q <= group_is_last ? '0 : pass_in_group_q + ONE;
          pass_o          <= token_is_last ? '0 : pass_o + PASS_W'(1);
        end
        if (group_is_last) group_q <= token_is_last ? '0 : group_q + ONE;
        if (token_is_last) token_o <= token_o + TOKEN_W'(1);
      end
      if (valid_o & ready_i & last_o) active_o <= 1'b0;
    end
  end

  handshake #(
      .WIDTH(33)
  ) u_word (
      .clk_i,
      .rst_ni (rst_ni & ~start_i),
      .valid_i(valid_o),
      .ready_i,
      .data_i ({last_o, word_o})
  );

endmodule
