// Runs a program: reads an instruction of eight words from memory, has its step done, goes on with the next.
//
// An instruction, word by word, the first one at its address; n, group and groups count numbers, addresses of vectors count
// numbers from the begin of the vector memory, those of memory count bytes:
//
//   0  bits 3..0: the step. 5..4: what goes into the address: nothing (0), the token's id (1), its position (2).
//      7..6: KV cache in fp32 (0), fp16 (1), q8 (2), or q8 for attention in int8 (3). 8: results go to memory. 31..16: n
//   1  15..0: a, vector that is read; 31..16: b, the second one
//   2  15..0: out, vector that is written; 31..16: group
//   3  15..0: groups; 31..16: row, words of a row in memory
//   4  memory: address, low half; 5: high half
//   6  step: bytes. memory + step * index is the address of what is read or written. A product's results go to
//      memory + step; the values of attention begin there, behind the keys
//   7  constant, fp32: eps of a norm, 1 / sqrt(head_dim) of attention
//
//   step          out (n numbers)
//   0 end         -
//   1 embed       a row of codes and scales in groups of `group`, in memory (dequantizer.sv)
//   2 copy        a row of memory
//   3 norm        RMSNorm of a, weights in memory
//   4 quantize    none: a goes to the array, in `groups` groups of `group`
//   5 multiply    the matrix in memory (weight_loader.sv) times what was quantized
//   6 rotate      a rotated by b, a row of cosines and sines in turn, of `group` numbers
//   7 store       none: a goes to memory as a row of the KV cache
//   8 attend      attention of the query a over all positions up to the token's (attention.sv)
//   9 add         a + b
//  10 gate        SwiGLU: a the gate, b up
//
// Latency: behind an instruction's last word 3 clocks until begin_o. begin_o is 1 for a clock; the step runs, and its fields
// stay, until end_i.

module step_sequencer #(
    parameter int ADDRESS_W = 40,
    parameter int INDEX_W   = 20,  // bits of an id and of a position
    parameter int VECTOR_W  = 11,  // bits of an address of the vector memory
    parameter int COUNT_W   = 16,
    parameter int WORDS_W   = 24   // bits of a number of words in memory
) (
    input  logic                 clk_i,
    input  logic                 rst_ni,
    input  logic                 start_i,
    input  logic [ADDRESS_W-1:0] program_i,
    input  logic [INDEX_W-1:0]   token_i,
    input  logic [INDEX_W-1:0]   position_i,
    output logic                 active_o,
    // Reads of instructions: eight words from fetch_address_o on.
    output logic                 fetch_o,
    output logic [ADDRESS_W-1:0] fetch_address_o,
    input  logic                 word_valid_i,
    output logic                 word_ready_o,
    input  logic [31:0]          word_i,
    // The step, one of ten. All are 0 while none runs.
    output logic                 begin_o,
    input  logic                 end_i,
    output logic                 embeds_o,
    output logic                 copies_o,
    output logic                 norms_o,
    output logic                 quantizes_o,
    output logic                 multiplies_o,
    output logic                 rotates_o,
    output logic                 stores_o,
    output logic                 attends_o,
    output logic                 adds_o,
    output logic                 gates_o,
    // Its fields.
    output logic [1:0]           format_o,
    output logic                 to_memory_o,
    output logic [COUNT_W-1:0]   n_o,
    output logic [VECTOR_W-1:0]  a_o,
    output logic [VECTOR_W-1:0]  b_o,
    output logic [VECTOR_W-1:0]  out_o,
    output logic [COUNT_W-1:0]   group_o,
    output logic [COUNT_W-1:0]   groups_o,
    output logic [WORDS_W-1:0]   words_o,    // of a row; of attention's keys: row * positions
    output logic [ADDRESS_W-1:0] address_o,
    output logic [ADDRESS_W-1:0] second_o,   // memory + step
    output logic [31:0]          constant_o
);

  localparam logic [2:0] IDLE = 3'd0, FETCH = 3'd1, WORDS = 3'd2, ADDRESS = 3'd3, BEGIN = 3'd4, RUN = 3'd5;
  localparam int STEP_W = 24;

  logic [2:0]           state_q, word_q;
  logic [31:0]          instruction_q[8];
  logic [ADDRESS_W-1:0] at_q;
  logic [3:0]           step;
  logic                 take, runs;
  assign active_o        = state_q != IDLE;
  assign fetch_o         = state_q == FETCH;
  assign fetch_address_o = at_q;
  assign word_ready_o    = state_q == WORDS;
  assign take            = word_valid_i & word_ready_o;
  assign begin_o         = state_q == BEGIN;
  assign runs            = (state_q == BEGIN) | (state_q == RUN);

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      state_q <= IDLE;
      word_q  <= '0;
    end else begin
      case (state_q)
        IDLE:    if (start_i) state_q <= FETCH;
        FETCH:   state_q <= WORDS;
        WORDS:   if (take & (word_q == 3'd7)) state_q <= step == 4'd0 ? IDLE : ADDRESS;
        ADDRESS: state_q <= BEGIN;
        BEGIN:   state_q <= RUN;
        default: if (end_i) state_q <= FETCH;
      endcase
      if (take) word_q <= word_q + 3'd1;
    end
    if (state_q == IDLE) at_q <= program_i;
    else if (begin_o) at_q <= at_q + ADDRESS_W'(32);
    if (take) instruction_q[word_q] <= word_i;
  end

  assign step         = instruction_q[0][3:0];
  assign embeds_o     = runs & (step == 4'd1);
  assign copies_o     = runs & (step == 4'd2);
  assign norms_o      = runs & (step == 4'd3);
  assign quantizes_o  = runs & (step == 4'd4);
  assign multiplies_o = runs & (step == 4'd5);
  assign rotates_o    = runs & (step == 4'd6);
  assign stores_o     = runs & (step == 4'd7);
  assign attends_o    = runs & (step == 4'd8);
  assign adds_o       = runs & (step == 4'd9);
  assign gates_o      = runs & (step == 4'd10);
  assign format_o     = instruction_q[0][7:6];
  assign to_memory_o  = instruction_q[0][8];
  assign n_o          = instruction_q[0][31:16];
  assign a_o          = instruction_q[1][VECTOR_W-1:0];
  assign b_o          = instruction_q[1][16+:VECTOR_W];
  assign out_o        = instruction_q[2][VECTOR_W-1:0];
  assign group_o      = instruction_q[2][31:16];
  assign groups_o     = instruction_q[3][15:0];
  assign constant_o   = instruction_q[7];

  // One multiplier: step * index, or of attention row * positions.
  logic                       attends;
  logic [1:0]                 indexed;
  logic [ADDRESS_W-1:0]       memory;
  logic [STEP_W-1:0]          factor;
  logic [INDEX_W-1:0]         index;
  logic [STEP_W+INDEX_W-1:0]  product;
  assign attends = step == 4'd8;
  assign indexed = instruction_q[0][5:4];
  assign memory  = ADDRESS_W'({instruction_q[5], instruction_q[4]});
  assign factor  = attends ? STEP_W'(instruction_q[3][31:16]) : instruction_q[6][STEP_W-1:0];
  always_comb begin
    case (indexed)
      2'd1:    index = token_i;
      2'd2:    index = position_i;
      default: index = '0;
    endcase
    if (attends) index = position_i + INDEX_W'(1);
  end
  assign product = factor * index;
  always_ff @(posedge clk_i) begin
    if (state_q == ADDRESS) begin
      address_o <= attends ? memory : memory + ADDRESS_W'(product);
      second_o  <= memory + ADDRESS_W'(instruction_q[6]);
      words_o   <= attends ? WORDS_W'(product) : WORDS_W'(instruction_q[3][31:16]);
    end
  end

  logic unused;
  assign unused = ^{instruction_q[0], instruction_q[1], instruction_q[2], instruction_q[5], product};

endmodule
