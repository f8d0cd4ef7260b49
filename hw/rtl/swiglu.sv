// SwiGLU (Shazeer 2020, arXiv 2002.05202): y = gate / (1 + e^-gate) * up, each operation rounded to fp32, as in runq.cpp.
//
// y is within 2.3 * 2^-23 of the exact value, relatively, where nothing is subnormal: 0.8 for fp32_exp, 0.5 for each
// rounding. Below a gate of -88.7228 e^-gate is infinite and y is 0. A result that is no number is the quiet NaN 7fc00000.
//
// The first half of a number, 1 + e^-gate, is made while that before is divided, and the product behind both, so that one is
// taken every 32 clocks. Latency: 55 clocks.
// Handshake: valid and ready on both sides. What is offered stays until it is taken. Reset drops all.

module swiglu (
    input  logic        clk_i,
    input  logic        rst_ni,
    input  logic        valid_i,
    output logic        ready_o,
    input  logic [31:0] gate_i,
    input  logic [31:0] up_i,
    output logic        valid_o,
    input  logic        ready_i,
    output logic [31:0] y_o
);

  localparam int EXP = 12, ADD = 6;  // latencies of fp32_exp and fp32_add

  // count_q: 0 idle; 1 to EXP + ADD 1 + e^-gate is on its way, from operands that stay; DONE it waits for the division.
  localparam logic [4:0] DONE = 5'(EXP + ADD + 1);
  logic [4:0]  count_q;
  logic [31:0] gate_q, up_q, divided_up_q, e, sum, quotient;
  logic        divide, div_ready, div_valid, en;
  assign ready_o = count_q == 5'd0;
  assign divide  = (count_q == DONE) & div_ready;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) count_q <= 5'd0;
    else if (ready_o) count_q <= 5'(valid_i);
    else if (divide) count_q <= 5'd0;
    else if (count_q != DONE) count_q <= count_q + 5'd1;
    if (ready_o) begin
      gate_q <= gate_i;
      up_q   <= up_i;
    end
    if (divide) divided_up_q <= up_q;
  end

  fp32_exp u_exp (
      .clk_i,
      .en_i(1'b1),
      .x_i ({~gate_q[31], gate_q[30:0]}),
      .y_o (e)
  );
  fp32_add u_add (
      .clk_i,
      .en_i(1'b1),
      .a_i (e),
      .b_i (32'h3f800000),  // 1
      .s_o (sum)
  );
  fp32_div u_div (
      .clk_i,
      .rst_ni,
      .valid_i(divide),
      .ready_o(div_ready),
      .a_i    (gate_q),
      .b_i    (sum),
      .valid_o(div_valid),
      .ready_i(en),
      .q_o    (quotient)
  );

  // The product: 5 clocks.
  logic [4:0] valid_q;
  assign en      = ready_i | ~valid_o;
  assign valid_o = valid_q[4];
  always_ff @(posedge clk_i) begin
    if (!rst_ni) valid_q <= '0;
    else if (en) valid_q <= {valid_q[3:0], div_valid};
  end
  fp32_mul u_mul (
      .clk_i,
      .en_i(en),
      .a_i (quotient),
      .b_i (divided_up_q),
      .p_o (y_o)
  );

  handshake #(
      .WIDTH(64)
  ) u_in (
      .clk_i,
      .rst_ni,
      .valid_i,
      .ready_i(ready_o),
      .data_i ({gate_i, up_i})
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
