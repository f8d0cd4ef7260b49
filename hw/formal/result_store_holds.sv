// Proves that result_store holds a beat while it waits: a clock after m_valid_o without m_ready_i, m_valid_o is still 1, and
// data and last are what they were, whatever the columns write. Exceptions are a reset, and a start, which matmul_axi does
// not give while a result waits.

module result_store_holds (
    input logic         clk_i,
    input logic         rst_ni,
    input logic         start_i,
    input logic         last_token_i,
    input logic [3:0]   rows_of_tiles_i,
    input logic         reserve_i,
    input logic [3:0]   write_i,
    input logic [3:0]   bank_i,
    input logic [3:0]   token_i,
    input logic         final_i,
    input logic [127:0] result_i,
    input logic         m_ready_i
);

  logic        valid, last, unused_room, unused_active;
  logic [31:0] data;
  result_store #(
      .COLS   (4),
      .TOKENS (2),
      .COUNT_W(4)
  ) u_result_store (
      .clk_i,
      .rst_ni,
      .start_i,
      .last_token_i,
      .rows_of_tiles_i,
      .reserve_i,
      .room_o   (unused_room),
      .active_o (unused_active),
      .write_i,
      .bank_i,
      .token_i,
      .final_i,
      .result_i,
      .m_valid_o(valid),
      .m_ready_i,
      .m_data_o (data),
      .m_last_o (last)
  );

  logic checks_q = 1'b0;
  logic [32:0] value_q;
  always_ff @(posedge clk_i) begin
    checks_q <= rst_ni & ~start_i & valid & ~m_ready_i;
    value_q  <= {last, data};
    if (checks_q) begin
      assert (valid);
      assert ({last, data} == value_q);
    end
  end

endmodule
