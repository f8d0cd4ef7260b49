// chip_axi with few pins, for place and route, as chip_top has matmul_axi.

module token_top #(
    parameter int ROWS = 4,
    parameter int COLS = 4
) (
    input  logic clk,
    input  logic rst_n,
    input  logic data,
    output logic folded
);

  localparam int IN_W = 8 + 1 + 32 + 4 + 1 + 1 + 8 + 1 + 1 + 1 + 1 + 8 * COLS + 2 + 1 + 1 + 1 + 1 + 1 + 2 + 1;
  localparam int OUT_W = 1 + 1 + 2 + 1 + 1 + 32 + 2 + 1 + 2 * (1 + 40 + 8 + 3 + 2 + 4 + 3 + 1) + 1 + 8 * COLS + COLS + 1 + 1 + 1;

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

  logic [7:0]        awaddr, araddr, m_arlen, m_awlen;
  logic              awvalid, wvalid, bready, arvalid, rready, awready, wready, bvalid, arready, rvalid;
  logic [31:0]       wdata, rdata;
  logic [3:0]        wstrb, m_arcache, m_awcache;
  logic [1:0]        bresp, rresp, m_rresp, m_bresp, m_arburst, m_awburst;
  logic              m_arready, m_rid, m_rlast, m_rvalid, m_awready, m_wready, m_bid, m_bvalid;
  logic              m_arid, m_arvalid, m_rready, m_awid, m_awvalid, m_wlast, m_wvalid, m_bready;
  logic [39:0]       m_araddr, m_awaddr;
  logic [2:0]        m_arsize, m_arprot, m_awsize, m_awprot;
  logic [8*COLS-1:0] m_rdata, m_wdata;
  logic [COLS-1:0]   m_wstrb;
  assign {awaddr, awvalid, wdata, wstrb, wvalid, bready, araddr, arvalid, rready, m_arready, m_rid, m_rdata, m_rresp, m_rlast,
          m_rvalid, m_awready, m_wready, m_bid, m_bresp, m_bvalid} = in_q;
  assign out = {awready, wready, bresp, bvalid, arready, rdata, rresp, rvalid, m_arid, m_araddr, m_arlen, m_arsize, m_arburst,
                m_arcache, m_arprot, m_arvalid, m_rready, m_awid, m_awaddr, m_awlen, m_awsize, m_awburst, m_awcache, m_awprot,
                m_awvalid, m_wdata, m_wstrb, m_wlast, m_wvalid, m_bready};

  chip_axi #(
      .ROWS(ROWS),
      .COLS(COLS)
  ) u_chip_axi (
      .aclk          (clk),
      .aresetn       (rst_n_q),
      .s_axil_awaddr (awaddr),
      .s_axil_awvalid(awvalid),
      .s_axil_awready(awready),
      .s_axil_wdata  (wdata),
      .s_axil_wstrb  (wstrb),
      .s_axil_wvalid (wvalid),
      .s_axil_wready (wready),
      .s_axil_bresp  (bresp),
      .s_axil_bvalid (bvalid),
      .s_axil_bready (bready),
      .s_axil_araddr (araddr),
      .s_axil_arvalid(arvalid),
      .s_axil_arready(arready),
      .s_axil_rdata  (rdata),
      .s_axil_rresp  (rresp),
      .s_axil_rvalid (rvalid),
      .s_axil_rready (rready),
      .m_axi_arid    (m_arid),
      .m_axi_araddr  (m_araddr),
      .m_axi_arlen   (m_arlen),
      .m_axi_arsize  (m_arsize),
      .m_axi_arburst (m_arburst),
      .m_axi_arcache (m_arcache),
      .m_axi_arprot  (m_arprot),
      .m_axi_arvalid (m_arvalid),
      .m_axi_arready (m_arready),
      .m_axi_rid     (m_rid),
      .m_axi_rdata   (m_rdata),
      .m_axi_rresp   (m_rresp),
      .m_axi_rlast   (m_rlast),
      .m_axi_rvalid  (m_rvalid),
      .m_axi_rready  (m_rready),
      .m_axi_awid    (m_awid),
      .m_axi_awaddr  (m_awaddr),
      .m_axi_awlen   (m_awlen),
      .m_axi_awsize  (m_awsize),
      .m_axi_awburst (m_awburst),
      .m_axi_awcache (m_awcache),
      .m_axi_awprot  (m_awprot),
      .m_axi_awvalid (m_awvalid),
      .m_axi_awready (m_awready),
      .m_axi_wdata   (m_wdata),
      .m_axi_wstrb   (m_wstrb),
      .m_axi_wlast   (m_wlast),
      .m_axi_wvalid  (m_wvalid),
      .m_axi_wready  (m_wready),
      .m_axi_bid     (m_bid),
      .m_axi_bresp   (m_bresp),
      .m_axi_bvalid  (m_bvalid),
      .m_axi_bready  (m_bready)
  );

endmodule
