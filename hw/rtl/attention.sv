// Attention of one query over the keys and values of the positions up to its own: one head of one token.
//
//   score[p]  = q . k[p] * scale                    int8: fp32(sum of q.code * k.code) * ((q.scale * scale) * k.scale)
//   prob[p]   = exp(score[p] - largest score) * (1 / sum of these exponentials)
//   out[i]    = sum over p of  prob[p] * v[p][i]    int8: weight[p] = prob[p] * v.scale[p], quantized under one scale;
//                                                   fp32(sum over p of weight.code[p] * v[p].code[i]) * weight.scale
//
// All in fp32, each operation rounded once, but for the sums of codes, which are exact in 32 bits. A product and the addition
// behind it are one fp32_fma; q . k and the sum of exponentials are six sums side by side, added up at the end. int8 is --attn
// int8 of runq_w8a8 (docs/numerics.md): q is quantized here, by the `quantizer`, and so are the weights. Keys and values are
// rows of 32-bit words, as the cache keeps them; in q8 a key's scale goes to its score and a value's to its probability:
//
//   kv_format_i                  words of a row
//   0: fp32                      dim
//   1: fp16                      dim / 2, the first number in the low half
//   2: q8, and always for int8   1 + dim / 4: the fp32 scale, then codes, the first one in the lowest byte
//
// Order of the streams, from start_i on: dim numbers of q_i, then rows of kv_i: the keys of all positions, then the values.
// In int8 the values come twice. Of the first time only the scales count, since a weight's code needs the largest weight.
// Then out_o has dim numbers. busy_o is 1 until the last one is taken.
//
// Clocks, if no stream waits, of n positions, 6 at least:
//
//          a row of keys  a row of values       all
//   fp32   dim + 31       dim + 2               n (2 dim + 36) + 3 dim + 81; fp16 alike
//   q8     dim + 37       dim + 8               n (2 dim + 48) + 3 dim + 81
//   int8   dim + 20       dim / 4 + 8, dim + 2  n (9 dim / 4 + 33) + 19 dim / 4 + 177, dim up to 128
//
// For traces, valid in one clock and without ready, position by position: step_o is a score, a probability or (int8) a weight.
// code_o and code_scale_o (int8) are first those of q, then those of the weights.
//
// Handshake: start_i while busy_o is 0, with sizes and modes, which are kept. valid and ready on the streams; what is offered
// stays until it is taken. Reset drops all. If a score is NaN or +infinity, or all are -infinity, all that follows is NaN.

module attention #(
    parameter int MAX_DIM       = 128,   // numbers of a head, and
    parameter int MAX_POSITIONS = 2048,  // positions, at most; each a power of 2
    localparam int DIM_W = $clog2(MAX_DIM) + 1,
    localparam int POSITIONS_W = $clog2(MAX_POSITIONS) + 1
) (
    input  logic                   clk_i,
    input  logic                   rst_ni,
    input  logic                   start_i,
    output logic                   busy_o,
    input  logic [DIM_W-1:0]       dim_i,        // a multiple of 4, at least 8
    input  logic [POSITIONS_W-1:0] positions_i,  // at least 1
    input  logic [1:0]             kv_format_i,
    input  logic                   int8_i,
    input  logic [31:0]            scale_i,      // 1 / sqrt(dim), fp32
    // The query, fp32.
    input  logic                   q_valid_i,
    output logic                   q_ready_o,
    input  logic [31:0]            q_i,
    // Rows of keys, then of values.
    input  logic                   kv_valid_i,
    output logic                   kv_ready_o,
    input  logic [31:0]            kv_i,
    // The result, fp32.
    output logic                   out_valid_o,
    input  logic                   out_ready_i,
    output logic [31:0]            out_o,
    output logic                   out_last_o,
    // Traces.
    output logic                   score_valid_o,
    output logic                   prob_valid_o,
    output logic                   weight_valid_o,
    output logic [31:0]            step_o,
    output logic                   code_valid_o,
    output logic signed [7:0]      code_o,
    output logic [31:0]            code_scale_o
);

  localparam int FMA = 6;  // clocks of fp32_fma,
  localparam int EXP = 12;  // fp32_exp, and
  localparam int INT = 4;  // int_to_fp32
  localparam int REDUCED = 22;  // clocks from a dot product's last element to its sum
  localparam int LONGEST = MAX_DIM > MAX_POSITIONS ? MAX_DIM : MAX_POSITIONS;
  localparam int DIM_A = $clog2(MAX_DIM);
  localparam int POSITION_A = $clog2(MAX_POSITIONS);
  localparam int STEP_W = $clog2(LONGEST + 1 + FMA + EXP);
  localparam logic [31:0] ONE = 32'h3f800000;
  localparam logic [31:0] MINUS_0 = 32'h80000000;  // x * y + -0 is x * y, its sign too

  // ---- what it is at -------------------------------------------------------------------------------------------

  typedef enum logic [3:0] {
    IDLE,
    QUERY,        // q comes; in int8 it goes to the quantizer
    QUERY_CODES,  // int8: and comes back
    QUERY_SCALE,  // int8: q.scale * scale
    ROW,          // a row begins: its scale, its probability
    ELEMENTS,     // its elements, one a clock; or the exponentials, which are added up
    REDUCE,       // six sums to one
    EXPONENTS,    // exp(score - largest score)
    DIVIDE,       // 1 / sum
    PROBS,        // times that
    CONVERT,      // int8: sums of the result to fp32
    RESULT
  } state_t;
  typedef enum logic [1:0] {
    KEYS,
    SUM,     // no rows, but the exponentials
    SCALES,  // int8: the scales of values
    VALUES
  } pass_t;
  state_t                 state_q;
  pass_t                  pass_q;
  logic [STEP_W-1:0]      step_q;      // number, element, position
  logic [4:0]             clock_q;     // of what always takes the same time
  logic [POSITIONS_W-1:0] position_q;  // of the row
  logic [DIM_W-1:0]       dim_q;
  logic [POSITIONS_W-1:0] positions_q;
  logic                   half_q, coded_q, int8_q;  // fp16; a row has a scale and codes
  logic                   last_position;
  logic [STEP_W-1:0]      dim, positions;
  assign dim           = STEP_W'(dim_q);
  assign positions     = STEP_W'(positions_q);
  assign last_position = position_q == positions_q - POSITIONS_W'(1);
  assign busy_o        = state_q != IDLE;

  // ---- the elements of a row -----------------------------------------------------------------------------------

  // A lane of the word. Of rows whose scales alone count, whole words are dropped.
  logic [1:0]  lane;
  logic        drop, word_ends, code_waits, element, steps_end;
  logic [7:0]  code;
  logic [31:0] code_value, half_value;
  assign lane = step_q[1:0];
  assign drop = pass_q == SCALES;
  assign code = kv_i[8*lane+:8];
  code_to_fp32 u_code (
      .code_i(code),
      .f_o   (code_value)
  );
  fp16_to_fp32 u_half (
      .h_i(kv_i[16*lane[0]+:16]),
      .f_o(half_value)
  );

  logic              codes_valid;  // of the quantizer
  logic [STEP_W-1:0] last_step;
  assign code_waits = int8_q & (pass_q == VALUES) & ~codes_valid;
  assign element    = (state_q == ELEMENTS) & ((pass_q == SUM) | (kv_valid_i & ~code_waits));
  assign word_ends  = drop | (coded_q ? lane == 2'd3 : ~half_q | lane[0]);
  always_comb begin
    last_step = dim - STEP_W'(1);
    if (drop) last_step = dim - STEP_W'(4);
    if (pass_q == SUM) last_step = (positions < STEP_W'(FMA) ? STEP_W'(FMA) : positions) - STEP_W'(1);
  end
  assign steps_end  = step_q == last_step;
  assign kv_ready_o = ((state_q == ROW) & (clock_q == 5'd0) & coded_q) |
                      ((state_q == ELEMENTS) & (pass_q != SUM) & word_ends & ~code_waits);

  // A clock later: the element, and what belongs to it.
  logic              element_q;  // there is one
  logic [31:0]       value_q;    // it; or the scale of the row, or of q
  logic signed [7:0] code_q, weight_code_q;
  logic              first_q;    // a sum begins with it
  logic              beyond_q;   // there is no such position: it counts as 0
  logic [DIM_A-1:0]  at_q;
  always_ff @(posedge clk_i) begin
    element_q     <= rst_ni & element & ~drop;
    code_q        <= $signed(code);
    weight_code_q <= code_o;
    first_q       <= pass_q == VALUES ? position_q == '0 : step_q < (int8_q & (pass_q == KEYS) ? STEP_W'(1) : STEP_W'(FMA));
    beyond_q      <= step_q >= positions;
    at_q          <= step_q[DIM_A-1:0];
    if (state_q == QUERY_CODES) value_q <= code_scale_o;
    else if (pass_q == SUM) value_q <= ONE;
    else if (state_q == ROW) value_q <= kv_i;
    else value_q <= coded_q ? code_value : half_q ? half_value : kv_i;
  end

  // ---- memories ------------------------------------------------------------------------------------------------

  // The query; scores, then exponentials, then probabilities; the result. Reads take a clock.
  logic [31:0]           query_q[MAX_DIM], scores_q[MAX_POSITIONS], result_q[MAX_DIM];
  logic [31:0]           query, score, result;
  logic                  query_write, score_write, result_write;
  logic [31:0]           query_data, score_data, result_data;
  logic [POSITION_A-1:0] score_at;
  logic [DIM_A-1:0]      result_at;
  always_ff @(posedge clk_i) begin
    if (query_write) query_q[step_q[DIM_A-1:0]] <= query_data;
    query <= query_q[step_q[DIM_A-1:0]];
  end
  always_ff @(posedge clk_i) begin
    if (score_write) scores_q[score_at] <= score_data;
    score <= scores_q[state_q==ROW?position_q[POSITION_A-1:0] : step_q[POSITION_A-1:0]];
  end
  always_ff @(posedge clk_i) begin
    if (result_write) result_q[result_at] <= result_data;
    result <= result_q[step_q[DIM_A-1:0]];
  end

  // ---- arithmetic ----------------------------------------------------------------------------------------------

  // int8: the sum of a key's products, or the next one of the result's sums.
  logic signed [7:0]  times;
  logic signed [15:0] product;
  logic signed [31:0] sum, sum_q;
  logic [31:0]        int_value;
  assign times   = pass_q == VALUES ? weight_code_q : $signed(query[7:0]);
  assign product = code_q * times;
  assign sum     = (first_q ? 32'sd0 : pass_q == VALUES ? $signed(result) : sum_q) + 32'(product);
  always_ff @(posedge clk_i) if (element_q) sum_q <= sum;
  int_to_fp32 u_int (
      .clk_i,
      .en_i (1'b1),
      .int_i(state_q == CONVERT ? $signed(result) : sum_q),
      .f_o  (int_value)
  );

  // One multiplication and addition for everything. The six sums of a dot product go round in it, so that it stands still
  // while the next element is not there.
  logic        fma_en, sum_done, score_done;
  logic [31:0] a, b, c, f;
  logic [31:0] scale_q;     // of scores: scale_i; int8: q.scale * scale_i
  logic [31:0] factor_q;    // of a row: of its score, its probability, or weight; 1 / sum; int8: the weights' scale
  logic [31:0] half_sum_q;  // waits for its other half
  logic [31:0] largest_q, minus_largest;  // score
  assign fma_en        = (state_q != ELEMENTS) | (pass_q == VALUES) | element_q;
  assign sum_done      = (state_q == REDUCE) & (clock_q == 5'(REDUCED));
  assign score_done    = (state_q == REDUCE) & (clock_q == 5'(REDUCED + FMA));
  assign minus_largest = {~largest_q[31], largest_q[30:0]};
  always_comb begin
    a = value_q;
    b = score;
    c = MINUS_0;
    if (element_q) begin
      if (pass_q == KEYS) b = query;
      if (pass_q == SUM & beyond_q) b = 32'h0;
      if (pass_q == VALUES) b = factor_q;
      c = first_q ? 32'h0 : pass_q == VALUES ? result : f;
    end else begin
      case (state_q)
        REDUCE: begin
          a = sum_done ? (int8_q ? int_value : f) : half_sum_q;
          b = sum_done ? factor_q : ONE;
          c = sum_done ? MINUS_0 : f;
        end
        EXPONENTS: begin
          a = ONE;
          c = minus_largest;
        end
        PROBS: a = factor_q;
        CONVERT: begin
          a = int_value;
          b = factor_q;
        end
        default: if (pass_q == KEYS) b = scale_q;  // a row's or the query's scale
      endcase
    end
  end
  fp32_fma u_fma (
      .clk_i,
      .en_i(fma_en),
      .a_i (a),
      .b_i (b),
      .c_i (c),
      .f_o (f)
  );

  logic [31:0] exponential, inverse;
  logic        divided, unused_ready;
  fp32_exp u_exp (
      .clk_i,
      .en_i(1'b1),
      .x_i (f),
      .y_o (exponential)
  );
  fp32_div u_inverse (
      .clk_i,
      .rst_ni,
      .valid_i(state_q == DIVIDE),
      .ready_o(unused_ready),
      .a_i    (ONE),
      .b_i    (factor_q),
      .valid_o(divided),
      .ready_i(1'b1),
      .q_o    (inverse)
  );

  // Codes of the query, and of the weights: a weight's stays until its row of values has been multiplied by it.
  logic quantizer_ready, codes_ready, codes_last;
  assign codes_ready = (state_q == QUERY_CODES) | (element & (pass_q == VALUES) & int8_q & steps_end);
  quantizer #(
      .MAX_N(LONGEST)
  ) u_quantizer (
      .clk_i,
      .rst_ni,
      .static_i      (1'b0),
      .static_scale_i(32'h0),
      .valid_i       (((state_q == QUERY) & int8_q & q_valid_i) | weight_valid_o),
      .ready_o       (quantizer_ready),
      .x_i           (state_q == QUERY ? q_i : f),
      .last_i        (state_q == QUERY ? steps_end : last_position),
      .valid_o       (codes_valid),
      .ready_i       (codes_ready),
      .code_o,
      .scale_o       (code_scale_o),
      .last_o        (codes_last)
  );

  // ---- what goes into the memories, and out --------------------------------------------------------------------

  // A memory's numbers that are mapped come back `behind` clocks after they were read.
  logic [STEP_W-1:0] behind, mapped;
  logic              maps, mapping, map_ends;
  assign maps     = (state_q == EXPONENTS) | (state_q == PROBS) | (state_q == CONVERT);
  assign behind   = state_q == EXPONENTS ? STEP_W'(1 + FMA + EXP) : state_q == PROBS ? STEP_W'(1 + FMA) : STEP_W'(1 + INT + FMA);
  assign mapped   = step_q - behind;
  assign mapping  = maps & (step_q >= behind);
  assign map_ends = mapping & (mapped == (state_q == CONVERT ? dim : positions) - STEP_W'(1));

  assign q_ready_o   = (state_q == QUERY) & (~int8_q | quantizer_ready);
  assign query_write = (q_valid_i & q_ready_o & ~int8_q) | (codes_valid & (state_q == QUERY_CODES));
  assign query_data  = int8_q ? 32'(code_o) : q_i;

  assign score_write = score_done | (mapping & (state_q != CONVERT));
  assign score_at    = score_done ? position_q[POSITION_A-1:0] : mapped[POSITION_A-1:0];
  assign score_data  = state_q == EXPONENTS ? exponential : f;

  logic [FMA-1:0]   adding_q;  // elements of values on their way through fp32_fma
  logic [DIM_A-1:0] added_at;
  always_ff @(posedge clk_i) begin
    if (!rst_ni) adding_q <= '0;
    else adding_q <= {adding_q[FMA-2:0], element_q & (pass_q == VALUES) & ~int8_q};
  end
  delay #(
      .WIDTH (DIM_A),
      .CLOCKS(FMA)
  ) u_added_at (
      .clk_i,
      .en_i  (1'b1),
      .data_i(at_q),
      .data_o(added_at)
  );
  logic int_added;
  assign int_added    = element_q & (pass_q == VALUES) & int8_q;
  assign result_write = int_added | adding_q[FMA-1] | (mapping & (state_q == CONVERT));
  assign result_data  = int_added ? sum : f;
  assign result_at    = int_added ? at_q : int8_q ? mapped[DIM_A-1:0] : added_at;

  assign out_valid_o    = (state_q == RESULT) & (clock_q != 5'd0);
  assign out_o          = result;
  assign out_last_o     = steps_end;
  assign score_valid_o  = score_done;
  assign prob_valid_o   = mapping & (state_q == PROBS);
  assign weight_valid_o = (state_q == ROW) & (pass_q == SCALES) & (clock_q == 5'(1 + FMA));
  assign step_o         = f;
  assign code_valid_o   = codes_valid & codes_ready;

  // ---- step by step --------------------------------------------------------------------------------------------

  // Magnitudes compare like integers, and downwards if they are negative. NaN becomes the largest, so that all is NaN.
  logic larger;
  assign larger = f[31] ? largest_q[31] & (f[30:0] < largest_q[30:0]) : largest_q[31] | (f[30:0] > largest_q[30:0]);

  always_ff @(posedge clk_i) begin
    clock_q <= clock_q + 5'd1;
    case (state_q)
      IDLE: begin
        step_q      <= '0;
        position_q  <= '0;
        pass_q      <= KEYS;
        dim_q       <= dim_i;
        positions_q <= positions_i;
        half_q      <= kv_format_i == 2'd1;
        coded_q     <= kv_format_i[1] | int8_i;
        int8_q      <= int8_i;
        scale_q     <= scale_i;
        largest_q   <= 32'hff800000;
        if (start_i) state_q <= QUERY;
      end
      QUERY: begin
        clock_q <= 5'd0;
        if (q_valid_i & q_ready_o) begin
          step_q <= steps_end ? '0 : step_q + STEP_W'(1);
          if (steps_end) state_q <= int8_q ? QUERY_CODES : ROW;
        end
      end
      QUERY_CODES: begin
        clock_q <= 5'd0;
        if (codes_valid) begin
          step_q <= codes_last ? '0 : step_q + STEP_W'(1);
          if (codes_last) state_q <= QUERY_SCALE;
        end
      end
      QUERY_SCALE: begin
        if (clock_q == 5'(FMA)) begin
          scale_q <= f;
          clock_q <= 5'd0;
          state_q <= ROW;
        end
      end
      ROW: begin
        if (clock_q == 5'd0 & coded_q & ~kv_valid_i) clock_q <= 5'd0;
        if (clock_q == 5'd1 & ~(coded_q & ~(int8_q & (pass_q == VALUES)))) begin
          factor_q <= pass_q == KEYS ? scale_q : score;
          state_q  <= ELEMENTS;
        end
        if (clock_q == 5'(1 + FMA)) begin
          factor_q <= f;
          state_q  <= ELEMENTS;
        end
      end
      ELEMENTS: begin
        clock_q <= 5'd0;
        if (element) begin
          step_q <= step_q + (drop ? STEP_W'(4) : STEP_W'(1));
          if (int8_q & (pass_q == VALUES)) factor_q <= code_scale_o;
          if (steps_end) begin
            step_q <= '0;
            if (pass_q == KEYS || pass_q == SUM) begin
              state_q <= REDUCE;
              clock_q <= int8_q & (pass_q == KEYS) ? 5'(REDUCED - 1 - INT) : 5'd0;
            end else begin
              position_q <= last_position ? '0 : position_q + POSITIONS_W'(1);
              state_q    <= ROW;
              if (last_position) begin
                pass_q <= VALUES;
                if (pass_q == VALUES) state_q <= int8_q ? CONVERT : RESULT;
              end
            end
          end
        end
      end
      REDUCE: begin
        // The last element is added in clock 0, so that the six sums come in clocks 1 to 6, sums of two in 8, 10 and 12, and
        // that of four in 16.
        if (clock_q == 5'd1 || clock_q == 5'd3 || clock_q == 5'd5 || clock_q == 5'd8 || clock_q == 5'd12) half_sum_q <= f;
        if (sum_done & (pass_q == SUM)) begin
          factor_q <= f;
          state_q  <= DIVIDE;
        end
        if (score_done) begin
          if (larger) largest_q <= f;
          position_q <= last_position ? '0 : position_q + POSITIONS_W'(1);
          clock_q    <= 5'd0;
          state_q    <= last_position ? EXPONENTS : ROW;
        end
      end
      EXPONENTS: begin
        step_q <= map_ends ? '0 : step_q + STEP_W'(1);
        if (map_ends) begin
          pass_q  <= SUM;
          state_q <= ELEMENTS;
        end
      end
      DIVIDE: begin
        if (divided) begin
          factor_q <= inverse;
          state_q  <= PROBS;
        end
      end
      PROBS: begin
        clock_q <= 5'd0;
        step_q  <= map_ends ? '0 : step_q + STEP_W'(1);
        if (map_ends) begin
          pass_q  <= int8_q ? SCALES : VALUES;
          state_q <= ROW;
        end
      end
      CONVERT: begin
        clock_q <= 5'd0;
        step_q  <= map_ends ? '0 : step_q + STEP_W'(1);
        if (map_ends) state_q <= RESULT;
      end
      default: begin  // RESULT
        if (out_valid_o) begin
          clock_q <= out_ready_i ? 5'd0 : 5'd1;
          if (out_ready_i) step_q <= step_q + STEP_W'(1);
          if (out_ready_i & out_last_o) state_q <= IDLE;
        end
      end
    endcase
    if (!rst_ni) state_q <= IDLE;
  end

  // ---- checks in simulation ------------------------------------------------------------------------------------

  handshake #(
      .WIDTH(32)
  ) u_q_stays (
      .clk_i,
      .rst_ni,
      .valid_i(q_valid_i),
      .ready_i(q_ready_o),
      .data_i (q_i)
  );
  handshake #(
      .WIDTH(32)
  ) u_kv_stays (
      .clk_i,
      .rst_ni,
      .valid_i(kv_valid_i),
      .ready_i(kv_ready_o),
      .data_i (kv_i)
  );
  handshake #(
      .WIDTH(33)
  ) u_out_stays (
      .clk_i,
      .rst_ni,
      .valid_i(out_valid_o),
      .ready_i(out_ready_i),
      .data_i ({out_last_o, out_o})
  );
`ifndef SYNTHESIS
  always @(posedge clk_i) begin
    if (rst_ni & start_i) begin
      assert (!busy_o);
      assert (dim_i >= DIM_W'(8) && dim_i <= DIM_W'(MAX_DIM) && dim_i[1:0] == 2'd0);
      assert (positions_i != '0 && positions_i <= POSITIONS_W'(MAX_POSITIONS));
    end
    if (rst_ni & weight_valid_o) assert (quantizer_ready);
  end
`endif

endmodule
