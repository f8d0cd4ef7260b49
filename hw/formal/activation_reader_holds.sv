// Proves that activation_reader holds a word and its mark of the end while they wait (handshake.sv, in the module), and that
// it sends nothing before its start: from the first reset on, a word is there only while active_o is 1.

module activation_reader_holds (
    input logic        clk_i,
    input logic        rst_ni,
    input logic        start_i,
    input logic        last_token_i,
    input logic [3:0]  passes_i,
    input logic [3:0]  groups_i,
    input logic [31:0] codes_i,
    input logic [31:0] scale_i,
    input logic        ready_i
);

  logic        active, valid, unused_token, unused_last;
  logic [1:0]  unused_pass, unused_group;
  logic [31:0] unused_word;
  activation_reader #(
      .ROWS   (4),
      .TOKEN_W(1),
      .PASS_W (2),
      .GROUP_W(2),
      .COUNT_W(4)
  ) u_activation_reader (
      .clk_i,
      .rst_ni,
      .start_i,
      .last_token_i,
      .passes_i,
      .groups_i,
      .active_o(active),
      .token_o (unused_token),
      .pass_o  (unused_pass),
      .group_o (unused_group),
      .codes_i,
      .scale_i,
      .valid_o (valid),
      .ready_i,
      .word_o  (unused_word),
      .last_o  (unused_last)
  );

  logic checks_q = 1'b0;  // a reset was there
  always_ff @(posedge clk_i) begin
    checks_q <= checks_q | ~rst_ni;
    if (checks_q) assert (active | ~valid);
  end

endmodule
