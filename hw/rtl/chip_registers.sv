// The registers of chip_axi.sv behind AXI4-Lite, 32 bits each:
//
//   0x00 ID        read   0x63686970, "chip"
//   0x04 CONTROL   write  1: runs the program for the token, unless it runs already
//   0x08 STATUS    read   bit 0: runs, 1: done, 2: memory had an error, 3: refused, as POSITION is too large
//   0x0c TOKEN            its id
//   0x10 POSITION         of the token, from 0 on
//   0x14 PROGRAM          address of the first instruction: low half, and 0x18: high half
//   0x1c CYCLES    read   of the latest run
//
// Handshake: AXI4-Lite. A write is taken when its address and its data are there, and is of a whole register. Addresses that
// nothing has are read as 0 and written to no effect. Latency: a clock from a request to its answer.

module chip_registers #(
    parameter int ADDRESS_W = 40,
    parameter int INDEX_W   = 20   // bits of an id and of a position
) (
    input  logic                 clk_i,
    input  logic                 rst_ni,
    // AXI4-Lite.
    input  logic [7:0]           awaddr_i,
    input  logic                 awvalid_i,
    output logic                 awready_o,
    input  logic [31:0]          wdata_i,
    input  logic                 wvalid_i,
    output logic                 wready_o,
    output logic                 bvalid_o,
    input  logic                 bready_i,
    input  logic [7:0]           araddr_i,
    input  logic                 arvalid_i,
    output logic                 arready_o,
    output logic [31:0]          rdata_o,
    output logic                 rvalid_o,
    input  logic                 rready_i,
    // The token.
    output logic                 start_o,     // for a clock
    output logic [INDEX_W-1:0]   token_o,
    output logic [INDEX_W-1:0]   position_o,
    output logic [ADDRESS_W-1:0] program_o,
    input  logic [3:0]           status_i,
    input  logic [31:0]          cycles_i
);

  // Addresses / 4.
  localparam logic [5:0] ID = 6'h0, CONTROL = 6'h1, STATUS = 6'h2, TOKEN = 6'h3, POSITION = 6'h4, PROGRAM = 6'h5;
  localparam logic [5:0] PROGRAM_HIGH = 6'h6, CYCLES = 6'h7;

  logic        write;
  logic [63:0] program_q;
  assign write     = awvalid_i & wvalid_i & ~bvalid_o;
  assign awready_o = write;
  assign wready_o  = write;
  assign arready_o = ~rvalid_o;
  assign program_o = program_q[ADDRESS_W-1:0];

  always_ff @(posedge clk_i) begin
    if (!rst_ni) begin
      bvalid_o   <= 1'b0;
      start_o    <= 1'b0;
      token_o    <= '0;
      position_o <= '0;
      program_q  <= '0;
    end else begin
      bvalid_o <= write | (bvalid_o & ~bready_i);
      start_o  <= write & (awaddr_i[7:2] == CONTROL) & wdata_i[0] & ~status_i[0];
      // What a run needs stays while it runs.
      if (write & ~status_i[0]) begin
        case (awaddr_i[7:2])
          TOKEN:        token_o <= wdata_i[INDEX_W-1:0];
          POSITION:     position_o <= |wdata_i[31:INDEX_W] ? '1 : wdata_i[INDEX_W-1:0];
          PROGRAM:      program_q[31:0] <= wdata_i;
          PROGRAM_HIGH: program_q[63:32] <= wdata_i;
          default:      ;
        endcase
      end
    end
  end

  always_ff @(posedge clk_i) begin
    if (!rst_ni) rvalid_o <= 1'b0;
    else rvalid_o <= (arvalid_i & arready_o) | (rvalid_o & ~rready_i);
    if (arvalid_i & arready_o) begin
      case (araddr_i[7:2])
        ID:           rdata_o <= 32'h6368_6970;  // "chip"
        STATUS:       rdata_o <= {28'h0, status_i};
        TOKEN:        rdata_o <= 32'(token_o);
        POSITION:     rdata_o <= 32'(position_o);
        PROGRAM:      rdata_o <= program_q[31:0];
        PROGRAM_HIGH: rdata_o <= program_q[63:32];
        CYCLES:       rdata_o <= cycles_i;
        default:      rdata_o <= '0;
      endcase
    end
  end

  logic unused;
  assign unused = ^{awaddr_i[1:0], araddr_i[1:0], program_q};

endmodule
