// matmul_axi with few pins, for place and route: no package has pins for all of its streams, which on a chip come from a
// memory controller. Inputs are a shift register, and outputs are folded into one pin; a register stands on either side of
// each port, so that the slowest path is one of the core's.

module chip_top #(
    parameter int ROWS       = 16,
    parameter int COLS       = 16,
    parameter int TOKENS     = 16,
    parameter int MAX_INPUTS = 8192,
    parameter int MIN_GROUP  = 32
) (
    input  logic clk,
    input  logic rst_n,
    input  logic data,
    output logic folded
);

  localparam int IN_W = 8 + 1 + 32 + 4 + 1 + 1 + 8 + 1 + 1 + 1 + 8 * COLS + 1 + 32 + 1;
  localparam int OUT_W = 1 + 1 + 2 + 1 + 1 + 32 + 2 + 1 + 1 + 1 + 1 + 8 * COLS + COLS + 1 + 1;

  logic [IN_W-1:0]  shift_q, in_q;
  logic [OUT_W-1:0] out, out_q, fold_q;
  logic             rst_n_q;
  always_ff @(posedge clk) begin
    rst_n_q <= rst_n;
    shift_q <= {shift_q[IN_W-2:0], data};
    in_q    <= shift_q;
    out_q   <= out;
    fold_q  <= out_q ^ {fold_q[0], fold_q[OUT_W-1:1]};
    folded  <= fold_q[0];
  end

  logic [7:0]        awaddr, araddr;
  logic              awvalid, wvalid, bready, arvalid, rready, w_tvalid, x_tvalid, m_tready;
  logic [31:0]       wdata, x_tdata, rdata;
  logic [3:0]        wstrb;
  logic [8*COLS-1:0] w_tdata, m_tdata;
  logic              awready, wready, bvalid, arready, rvalid, w_tready, x_tready, m_tvalid, m_tlast, irq;
  logic [1:0]        bresp, rresp;
  logic [COLS-1:0]   m_tkeep;
  assign {awaddr, awvalid, wdata, wstrb, wvalid, bready, araddr, arvalid, rready, w_tvalid, w_tdata, x_tvalid, x_tdata,
          m_tready} = in_q;
  assign out = {awready, wready, bresp, bvalid, arready, rdata, rresp, rvalid, w_tready, x_tready, m_tvalid, m_tdata,
                m_tkeep, m_tlast, irq};

  matmul_axi #(
      .ROWS      (ROWS),
      .COLS      (COLS),
      .TOKENS    (TOKENS),
      .MAX_INPUTS(MAX_INPUTS),
      .MIN_GROUP (MIN_GROUP)
  ) u_matmul_axi (
      .aclk           (clk),
      .aresetn        (rst_n_q),
      .s_axil_awaddr  (awaddr),
      .s_axil_awvalid (awvalid),
      .s_axil_awready (awready),
      .s_axil_wdata   (wdata),
      .s_axil_wstrb   (wstrb),
      .s_axil_wvalid  (wvalid),
      .s_axil_wready  (wready),
      .s_axil_bresp   (bresp),
      .s_axil_bvalid  (bvalid),
      .s_axil_bready  (bready),
      .s_axil_araddr  (araddr),
      .s_axil_arvalid (arvalid),
      .s_axil_arready (arready),
      .s_axil_rdata   (rdata),
      .s_axil_rresp   (rresp),
      .s_axil_rvalid  (rvalid),
      .s_axil_rready  (rready),
      .s_axis_w_tvalid(w_tvalid),
      .s_axis_w_tready(w_tready),
      .s_axis_w_tdata (w_tdata),
      .s_axis_x_tvalid(x_tvalid),
      .s_axis_x_tready(x_tready),
      .s_axis_x_tdata (x_tdata),
      .m_axis_tvalid  (m_tvalid),
      .m_axis_tready  (m_tready),
      .m_axis_tdata   (m_tdata),
      .m_axis_tkeep   (m_tkeep),
      .m_axis_tlast   (m_tlast),
      .m_axi_arready  (1'b0),
      .m_axi_rid      (1'b0),
      .m_axi_rdata    ('0),
      .m_axi_rresp    (2'b00),
      .m_axi_rlast    (1'b0),
      .m_axi_rvalid   (1'b0),
      .irq            (irq)
  );

endmodule
