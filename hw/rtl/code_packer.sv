// Codes of a group, as `quantizer` gives them, to words of 32 bits: its scale, then its codes, four in a word, the first one
// in the lowest bits. A group has a multiple of four codes.
//
// Handshake: valid and ready on both sides. Throughput: four codes in 5 clocks, and a clock for the scale. Reset drops all.

module code_packer (
    input  logic        clk_i,
    input  logic        rst_ni,
    input  logic        valid_i,
    output logic        ready_o,
    input  logic [7:0]  code_i,
    input  logic [31:0] scale_i,
    input  logic        last_i,   // of its group
    output logic        valid_o,
    input  logic        ready_i,
    output logic [31:0] word_o
);

  logic        in_codes_q, last_q;  // the scale of the group is out; word_q has its last codes
  logic [2:0]  codes_q;             // in word_q
  logic [31:0] word_q;
  assign ready_o = in_codes_q & ~codes_q[2];
  assign valid_o = in_codes_q ? codes_q[2] : valid_i;
  assign word_o  = in_codes_q ? word_q : scale_i;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      in_codes_q <= 1'b0;
      codes_q    <= '0;
    end else begin
      if (valid_i & ready_o) codes_q <= codes_q + 3'd1;
      if (valid_o & ready_i) begin
        in_codes_q <= ~in_codes_q | ~last_q;
        codes_q    <= '0;
      end
    end
    if (valid_i & ready_o) begin
      word_q <= {code_i, word_q[31:8]};
      last_q <= last_i;
    end
  end

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i (word_o)
  );

endmodule
