// The registers of matmul_axi.sv behind AXI4-Lite: docs/rtl.md has the map.
//
// Handshake: AXI4-Lite with 32 bits of data. A write is taken when its address and its data are there; strobes are not
// looked at, as a register is written as a whole. Addresses that nothing has are read as 0 and written to no effect.
// Latency: a clock from the address of a read, or the data of a write, to the answer.

module axil_registers #(
    parameter int COUNT_W = 16,  // bits of a number of passes, groups and rows of tiles
    parameter int TOKEN_W = 4,   // bits of the index of a token
    parameter logic [31:0] SHAPE = 0,  // what SHAPE and LIMITS say
    parameter logic [31:0] LIMITS = 0
) (
    input  logic               clk_i,
    input  logic               rst_ni,
    // AXI4-Lite.
    input  logic [7:0]         awaddr_i,
    input  logic               awvalid_i,
    output logic               awready_o,
    input  logic [31:0]        wdata_i,
    input  logic               wvalid_i,
    output logic               wready_o,
    output logic               bvalid_o,
    input  logic               bready_i,
    input  logic [7:0]         araddr_i,
    input  logic               arvalid_i,
    output logic               arready_o,
    output logic [31:0]        rdata_o,
    output logic               rvalid_o,
    input  logic               rready_i,
    // Commands, for a clock each: load activations, multiply, read activations, stop.
    output logic [3:0]         command_o,
    input  logic [3:0]         status_i,    // error, refused, done, busy
    // Sizes and modes.
    output logic [TOKEN_W:0]   tokens_o,
    output logic [COUNT_W-1:0] passes_o,
    output logic [COUNT_W-1:0] groups_o,
    output logic [COUNT_W-1:0] rows_of_tiles_o,
    output logic [1:0]         format_o,    // of weights: weight_loader.sv
    output logic               coded_o,     // activations come as codes and scales, not as fp32
    output logic               fixed_o,     // activations have scale_o for a scale
    output logic [31:0]        scale_o,
    output logic               interrupt_o, // done is to be an interrupt
    // A product for the queue, for a clock; the address stays.
    output logic               push_o,
    output logic [COUNT_W+1:0] push_sizes_o,    // format, rows of tiles
    output logic [63:0]        fetch_address_o,
    input  logic [7:0]         queue_room_i,
    // What is counted.
    input  logic [31:0]        cycles_i,
    input  logic [31:0]        sum_cycles_i,
    input  logic [31:0]        weight_beats_i,
    input  logic [31:0]        weight_waits_i,
    input  logic [31:0]        weight_stalls_i,
    input  logic [31:0]        result_stalls_i
);

  // Addresses / 4.
  localparam logic [5:0] ID = 6'h00, SHAPE_AT = 6'h01, LIMITS_AT = 6'h02, CONTROL = 6'h03, STATUS = 6'h04;
  localparam logic [5:0] TOKENS = 6'h05, PASSES = 6'h06, GROUPS = 6'h07, ROWS_OF_TILES = 6'h08, MODE = 6'h09;
  localparam logic [5:0] SCALE = 6'h0a, INTERRUPT = 6'h0b, CYCLES = 6'h0c, SUM_CYCLES = 6'h0d, WEIGHT_BEATS = 6'h0e;
  localparam logic [5:0] WEIGHT_WAITS = 6'h0f, WEIGHT_STALLS = 6'h10, RESULT_STALLS = 6'h11;
  localparam logic [5:0] FETCH_ADDRESS = 6'h12, FETCH_ADDRESS_HIGH = 6'h13, QUEUE = 6'h14;

  logic write, unused_address;
  assign write          = awvalid_i & wvalid_i & ~bvalid_o;
  assign awready_o      = write;
  assign wready_o       = write;
  assign arready_o      = ~rvalid_o;
  assign unused_address = ^{awaddr_i[1:0], araddr_i[1:0]};

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      bvalid_o        <= 1'b0;
      command_o       <= '0;
      tokens_o        <= '0;
      passes_o        <= '0;
      groups_o        <= '0;
      rows_of_tiles_o <= '0;
      format_o        <= '0;
      coded_o         <= 1'b0;
      fixed_o         <= 1'b0;
      scale_o         <= '0;
      interrupt_o     <= 1'b0;
      push_o          <= 1'b0;
      fetch_address_o <= '0;
    end else begin
      bvalid_o  <= write | (bvalid_o & ~bready_i);
      command_o <= write & (awaddr_i[7:2] == CONTROL) ? wdata_i[3:0] : 4'h0;
      if (write & (awaddr_i[7:2] == INTERRUPT)) interrupt_o <= wdata_i[0];
      push_o <= write & (awaddr_i[7:2] == QUEUE);
      if (write & (awaddr_i[7:2] == FETCH_ADDRESS)) fetch_address_o[31:0] <= wdata_i;
      if (write & (awaddr_i[7:2] == FETCH_ADDRESS_HIGH)) fetch_address_o[63:32] <= wdata_i;
      // Sizes of a product that runs stay.
      if (write & ~status_i[0]) begin
        case (awaddr_i[7:2])
          TOKENS:        tokens_o <= |wdata_i[31:TOKEN_W+1] ? '1 : wdata_i[TOKEN_W:0];
          PASSES:        passes_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];
          GROUPS:        groups_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];
          ROWS_OF_TILES: rows_of_tiles_o <= |wdata_i[31:COUNT_W] ? '0 : wdata_i[COUNT_W-1:0];
          MODE:          {fixed_o, coded_o, format_o} <= wdata_i[3:0];
          SCALE:         scale_o <= wdata_i;
          default:       ;
        endcase
      end
    end
  end

  always_ff @(posedge clk_i) if (write) push_sizes_o <= |wdata_i[31:COUNT_W+2] ? '0 : wdata_i[COUNT_W+1:0];

  always_ff @(posedge clk_i) begin
    if (!rst_ni) rvalid_o <= 1'b0;
    else rvalid_o <= (arvalid_i & arready_o) | (rvalid_o & ~rready_i);
    if (arvalid_i & arready_o) begin
      case (araddr_i[7:2])
        ID:            rdata_o <= 32'h716e_7572;  // "runq"
        SHAPE_AT:      rdata_o <= SHAPE;
        LIMITS_AT:     rdata_o <= LIMITS;
        STATUS:        rdata_o <= {28'h0, status_i};
        TOKENS:        rdata_o <= 32'(tokens_o);
        PASSES:        rdata_o <= 32'(passes_o);
        GROUPS:        rdata_o <= 32'(groups_o);
        ROWS_OF_TILES: rdata_o <= 32'(rows_of_tiles_o);
        MODE:          rdata_o <= {28'h0, fixed_o, coded_o, format_o};
        SCALE:         rdata_o <= scale_o;
        INTERRUPT:     rdata_o <= {31'h0, interrupt_o};
        CYCLES:        rdata_o <= cycles_i;
        SUM_CYCLES:    rdata_o <= sum_cycles_i;
        WEIGHT_BEATS:  rdata_o <= weight_beats_i;
        WEIGHT_WAITS:  rdata_o <= weight_waits_i;
        WEIGHT_STALLS: rdata_o <= weight_stalls_i;
        RESULT_STALLS: rdata_o <= result_stalls_i;
        FETCH_ADDRESS: rdata_o <= fetch_address_o[31:0];
        FETCH_ADDRESS_HIGH: rdata_o <= fetch_address_o[63:32];
        QUEUE:         rdata_o <= {24'h0, queue_room_i};
        default:       rdata_o <= 32'h0;
      endcase
    end
  end

  handshake u_b (
      .clk_i,
      .rst_ni,
      .valid_i(bvalid_o),
      .ready_i(bready_i),
      .data_i (1'b0)
  );
  handshake #(
      .WIDTH(32)
  ) u_r (
      .clk_i,
      .rst_ni,
      .valid_i(rvalid_o),
      .ready_i(rready_i),
      .data_i (rdata_o)
  );

endmodule
