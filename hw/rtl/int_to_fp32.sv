// A signed integer to fp32: exact up to 2^24, beyond it rounded half to even.
//
// Latency: 4 clocks, a number a clock. Handshake: none; it stands still while en_i is 0.

module int_to_fp32 #(
    parameter int INT_W = 32  // at least 2
) (
    input  logic                    clk_i,
    input  logic                    en_i,
    input  logic signed [INT_W-1:0] int_i,
    output logic [31:0]             f_o
);

  localparam int SIG_W = INT_W < 26 ? 26 : INT_W;

  // Clock 1: the magnitude. That of the smallest number, 2^(INT_W - 1), fits, too, as there is no sign.
  logic             sign_q;
  logic [INT_W-1:0] magnitude_q;
  always_ff @(posedge clk_i) begin
    if (en_i) begin
      sign_q      <= int_i[INT_W-1];
      magnitude_q <= int_i[INT_W-1] ? -int_i : int_i;
    end
  end

  // Clocks 2 to 4. The highest bit of the magnitude stands for 2^(INT_W - 1).
  logic [SIG_W-1:0] sig;
  assign sig = SIG_W'(magnitude_q) << (SIG_W - INT_W);
  fp32_round #(
      .SIG_W(SIG_W)
  ) u_round (
      .clk_i,
      .en_i,
      .sign_i   (sign_q),
      .exp_i    (11'(126 + INT_W)),
      .sig_i    (sig),
      .special_i(1'b0),
      .value_i  (32'h0),
      .f_o
  );

endmodule
