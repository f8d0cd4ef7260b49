// Groups of int8 codes to fp32 numbers: code * scale, rounded once, half to even. It makes a row of the embedding.
//
// A group comes as words of 32 bits: its scale, fp32, then its codes, four in a word, the first one in the lowest bits.
//
// Handshake: valid and ready on both sides. Latency: 10 clocks from a word of codes to the first number. Throughput: four
// numbers in 5 clocks. group_i stays while a group is on its way. Reset drops all.

module dequantizer #(
    parameter int COUNT_W = 16  // bits of a number of codes
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    input  logic [COUNT_W-1:0] group_i,  // codes of a group, a multiple of 4
    input  logic               valid_i,
    output logic               ready_o,
    input  logic [31:0]        word_i,
    output logic               valid_o,
    input  logic               ready_i,
    output logic [31:0]        y_o
);

  localparam int CONVERT = 4, LATENCY = 9;  // int_to_fp32; with fp32_mul

  logic [COUNT_W-1:0] left_q;   // codes of the group that are to come; 0: its scale comes next
  logic [2:0]         codes_q;  // in word_q
  logic [31:0]        word_q, scale_q;
  logic               en, take;
  assign en      = ready_i | ~valid_o;
  assign ready_o = codes_q == 3'd0;
  assign take    = valid_i & ready_o;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      left_q  <= '0;
      codes_q <= '0;
    end else if (take) begin
      left_q  <= left_q == '0 ? group_i : left_q - COUNT_W'(4);
      codes_q <= left_q == '0 ? 3'd0 : 3'd4;
    end else if (en & (codes_q != 3'd0)) begin
      codes_q <= codes_q - 3'd1;
    end
    if (take & (left_q == '0)) scale_q <= word_i;
    if (take) word_q <= word_i;
    else if (en) word_q <= {8'h0, word_q[31:8]};
  end

  logic [LATENCY-1:0] valid_q;
  assign valid_o = valid_q[LATENCY-1];
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en) valid_q <= {valid_q[LATENCY-2:0], codes_q != 3'd0};
  end

  logic [31:0] code, scale;
  int_to_fp32 #(
      .INT_W(8)
  ) u_to_fp32 (
      .clk_i,
      .en_i (en),
      .int_i(word_q[7:0]),
      .f_o  (code)
  );
  delay #(
      .WIDTH (32),
      .CLOCKS(CONVERT)
  ) u_scale (
      .clk_i,
      .en_i  (en),
      .data_i(scale_q),
      .data_o(scale)
  );
  fp32_mul u_mul (
      .clk_i,
      .en_i(en),
      .a_i (code),
      .b_i (scale),
      .p_o (y_o)
  );

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i (y_o)
  );

endmodule
