// The memory of the vectors between steps: fp32 numbers, one read and one written in a clock.
//
// start_i begins a stream of n_i numbers from a_i on, which come on b_o; or, with pairs_i, of n_i pairs: a_o from a_i on, b_o
// from b_i on, where the first period_i numbers are read again and again. pairs_i, b_i and period_i stay meanwhile. Writes go
// to addresses that count on from those of write_start_i. A stream must not read what is written meanwhile, but for an
// address that it has read before.
//
// Handshake of the stream: valid and ready. Latency: 2 clocks from start_i, 3 with pairs. Throughput: a number a clock, a
// pair in two. Contents are not reset.

module vector_memory #(
    parameter int WORDS   = 2048,  // fp32 numbers, a power of two
    parameter int COUNT_W = 16,    // bits of a number of numbers
    localparam int ADDRESS_W = $clog2(WORDS)
) (
    input  logic                 clk_i,
    input  logic                 rst_ni,
    // Reads.
    input  logic                 start_i,
    input  logic                 pairs_i,
    input  logic [ADDRESS_W-1:0] a_i,
    input  logic [ADDRESS_W-1:0] b_i,
    input  logic [COUNT_W-1:0]   n_i,
    input  logic [COUNT_W-1:0]   period_i,
    output logic                 valid_o,
    input  logic                 ready_i,
    output logic [31:0]          a_o,
    output logic [31:0]          b_o,
    // Writes.
    input  logic                 write_start_i,
    input  logic [ADDRESS_W-1:0] write_at_i,
    input  logic                 write_i,
    input  logic [31:0]          data_i
);

  logic [31:0]          words_q[WORDS];
  logic [31:0]          read_q;
  logic [ADDRESS_W-1:0] a_at_q, b_at_q, write_at_q, read_at;
  logic [COUNT_W-1:0]   left_q, period_left_q;
  logic                 second_q;              // what is read next is of b
  logic                 held_q, held_second_q;  // read_q has a number; of b
  logic                 advance, read;
  assign valid_o = held_q & (~pairs_i | held_second_q);
  assign b_o     = read_q;
  assign advance = ~valid_o | ready_i;
  assign read    = (left_q != '0) & advance;
  assign read_at = second_q ? b_at_q : a_at_q;

  always_ff @(posedge clk_i) begin
    if (read) read_q <= words_q[read_at];
    if (write_i) words_q[write_at_q] <= data_i;
  end
  always_ff @(posedge clk_i) begin
    if (advance & ~held_second_q) a_o <= read_q;
    if (write_start_i) write_at_q <= write_at_i;
    else if (write_i) write_at_q <= write_at_q + ADDRESS_W'(1);
    if (!rst_ni) begin
      left_q        <= '0;
      second_q      <= 1'b0;
      held_q        <= 1'b0;
      held_second_q <= 1'b0;
    end else if (start_i) begin
      a_at_q        <= a_i;
      b_at_q        <= b_i;
      left_q        <= n_i;
      period_left_q <= period_i;
    end else if (advance) begin
      held_q        <= read;
      held_second_q <= read & second_q;
      if (read) begin
        second_q <= pairs_i & ~second_q;
        if (second_q | ~pairs_i) left_q <= left_q - COUNT_W'(1);
        if (second_q) begin
          b_at_q        <= period_left_q == COUNT_W'(1) ? b_i : b_at_q + ADDRESS_W'(1);
          period_left_q <= period_left_q == COUNT_W'(1) ? period_i : period_left_q - COUNT_W'(1);
        end else begin
          a_at_q <= a_at_q + ADDRESS_W'(1);
        end
      end
    end
  end

  handshake #(
      .WIDTH(32)
  ) u_out (
      .clk_i,
      .rst_ni,
      .valid_i(valid_o),
      .ready_i,
      .data_i (b_o)
  );

endmodule
