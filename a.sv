module a #(parameter int COLS = 16) (input logic clk, output logic [COLS-1:0] y);
  if (COLS % 4 != 0) begin : gen_refused
    $error("COLS = %0d, expected a multiple of 4", COLS);
  end
  assign y = '0;
endmodule
