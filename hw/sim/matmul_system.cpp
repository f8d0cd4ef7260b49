#include "hw/sim/matmul_system.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "Vmatmul_axi.h"
#include "hw/sim/assertions.h"
#include "hw/sim/matmul_rtl.h"
#include "verilated.h"

// Where memory begins: above 4 GB, and not on a boundary of 4 KB.
constexpr uint64_t memory_base = 0x12'3456'7f00;

struct MatmulSystem::Model {
    VerilatedContext context;
    Vmatmul_axi top{&context};
};

namespace {
void require(bool holds, const char* rule) {
    if (!holds) throw std::runtime_error(std::string("m_axi: ") + rule);
}
MatmulSystem& of(void* context) { return *static_cast<MatmulSystem*>(context); }
}  // namespace

MatmulSystem::MatmulSystem(size_t memory_bytes) : model_(std::make_unique<Model>()), bytes_(memory_bytes) {
    bus.context = this;
    bus.read = [](void* c, uint32_t address) { return of(c).access(false, address, 0); };
    bus.write = [](void* c, uint32_t address, uint32_t value) { of(c).access(true, address, value); };
    bus.send = [](void* c, const void* from, size_t n) {
        of(c).sends_.push_back({static_cast<uint8_t*>(const_cast<void*>(from)), n});
    };
    bus.receive = [](void* c, void* to, size_t n) {
        of(c).receives_.push_back({static_cast<uint8_t*>(to), n});
    };
    bus.address = [](void* c, const void* p) {
        return memory_base + uint64_t(static_cast<const uint8_t*>(p) - of(c).bytes_.data());
    };
    // As an interrupt controller and a timer would.
    bus.wait = [](void* c) {
        const uint64_t until = of(c).clocks + of(c).patience;
        while (!of(c).model_->top.irq && of(c).clocks < until) of(c).tick();
        return int(of(c).model_->top.irq);
    };
    bus.polls = 100000;
    reset();
    beat_bytes_ = int(access(false, MATMUL_SHAPE, 0) >> 12 & 0xfff);
}
MatmulSystem::~MatmulSystem() {
    model_->top.final();
    Verilated::threadContextp(&model_->context);  // its scopes are taken out of it
}

void MatmulSystem::reset() {
    Vmatmul_axi& t = model_->top;
    drop_transfers(), bursts_.clear(), waiting_len_ = -1;
    t.s_axil_awvalid = t.s_axil_wvalid = t.s_axil_bready = t.s_axil_arvalid = t.s_axil_rready = 0;
    t.s_axis_w_tvalid = t.s_axis_x_tvalid = t.m_axis_tready = t.m_axi_arready = t.m_axi_rvalid = 0;
    t.aresetn = 0;
    for (int i = 0; i < 4; i++) tick();
    t.aresetn = 1;
}
void MatmulSystem::run(int n_clocks) {
    for (int i = 0; i < n_clocks; i++) tick();
}
bool MatmulSystem::idle() const {
    return sends_.empty() && receives_.empty() && bursts_.empty() && waiting_len_ < 0;
}
void MatmulSystem::drop_transfers() { sends_.clear(), receives_.clear(), model_->top.s_axis_x_tvalid = 0; }

// A clock of all that is around the core, but its registers.
void MatmulSystem::tick() {
    Vmatmul_axi& t = model_->top;
    Verilated::threadContextp(&model_->context);
    const bool runs = t.aresetn;
    const size_t beat = size_t(beat_bytes_);
    // What is offered stays until it is taken.
    if (!t.s_axis_x_tvalid && runs && !sends_.empty() && !pauses())
        t.s_axis_x_tvalid = 1, std::memcpy(&t.s_axis_x_tdata, sends_.front().at, 4);
    t.m_axis_tready = runs && !receives_.empty() && !pauses();
    t.m_axi_arready = runs && !pauses();
    if (!t.m_axi_rvalid && runs && !bursts_.empty() && clocks >= bursts_.front().ready && !pauses()) {
        t.m_axi_rvalid = 1, t.m_axi_rlast = bursts_.front().beats == 1;
        t.m_axi_rresp = beats_sent_ == memory.error_at ? 2 : 0;  // SLVERR
        std::memcpy(&t.m_axi_rdata, bytes_.data() + (bursts_.front().address - memory_base), beat);
    }
    t.eval();
    const bool x = t.s_axis_x_tvalid && t.s_axis_x_tready, m = t.m_axis_tvalid && t.m_axis_tready,
               ar = t.m_axi_arvalid && t.m_axi_arready, r = t.m_axi_rvalid && t.m_axi_rready;
    if (runs && m) {
        Transfer& to = receives_.front();
        std::memcpy(to.at, &t.m_axis_tdata, beat);
        to.at += beat, to.left -= beat;
        if ((to.left == 0) != bool(t.m_axis_tlast))
            throw std::runtime_error("m_axis: tlast is not with the last beat");
        if (to.left == 0) receives_.pop_front();
    }
    if (runs && x) {
        Transfer& from = sends_.front();
        from.at += 4, from.left -= 4;
        if (from.left == 0) sends_.pop_front();
    }
    if (runs) {
        require(waiting_len_ < 0 ||
                    (t.m_axi_arvalid && t.m_axi_araddr == waiting_address_ && t.m_axi_arlen == waiting_len_),
                "an address changes while it waits");
        waiting_len_ = t.m_axi_arvalid && !ar ? t.m_axi_arlen : -1, waiting_address_ = t.m_axi_araddr;
    }
    if (runs && ar) {
        const uint64_t first = t.m_axi_araddr, n = uint64_t(t.m_axi_arlen) + 1, end = first + n * beat;
        require(t.m_axi_arburst == 1 && (1u << t.m_axi_arsize) == beat && first % beat == 0,
                "a burst is not of whole beats");
        require(first / 4096 == (end - 1) / 4096, "a burst crosses 4 KB");
        require(first >= memory_base && end <= memory_base + bytes_.size(), "a burst leaves memory");
        bursts_.push_back({first, clocks + uint64_t(memory.latency), int(n)});
        require(bursts_.size() <= 16, "more than 16 bursts wait");
        if (counts.bursts++ == 0) counts.first_clock = clocks;
        counts.most_bursts = std::max(counts.most_bursts, int(bursts_.size()));
    }
    if (runs && r) {
        Burst& b = bursts_.front();
        b.address += beat, counts.beats++, beats_sent_++, counts.last_clock = clocks;
        if (--b.beats == 0) bursts_.pop_front();
    }
    for (uint8_t level : {1, 0}) t.aclk = level, t.eval();
    clocks++;
    if (x) t.s_axis_x_tvalid = 0, t.s_axis_x_tdata = uint32_t(clocks);
    if (r) t.m_axi_rvalid = 0, t.m_axi_rresp = 0, std::memset(&t.m_axi_rdata, int(clocks), beat);
    check_assertions();
}

uint32_t MatmulSystem::access(bool writes, uint32_t address, uint32_t value) {
    Vmatmul_axi& t = model_->top;
    t.s_axil_awaddr = t.s_axil_araddr = uint8_t(address), t.s_axil_wdata = value, t.s_axil_wstrb = 15;
    t.s_axil_awvalid = t.s_axil_wvalid = t.s_axil_bready = writes,
    t.s_axil_arvalid = t.s_axil_rready = !writes;
    for (int i = 0; i < 1000; i++) {
        t.eval();
        const bool asked =
            writes ? t.s_axil_awvalid && t.s_axil_awready : t.s_axil_arvalid && t.s_axil_arready;
        const bool answered = writes ? t.s_axil_bvalid : t.s_axil_rvalid;
        const uint32_t read = t.s_axil_rdata;
        tick();
        if (asked) t.s_axil_awvalid = t.s_axil_wvalid = t.s_axil_arvalid = 0;
        if (answered) {
            t.s_axil_bready = t.s_axil_rready = 0;
            return read;
        }
    }
    throw std::runtime_error("a register does not answer");
}
