#include "hw/sim/matmul_rtl.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "Vmatmul_axi.h"
#include "hw/sim/assertions.h"
#include "verilated.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

struct MatmulRtl::Model {
    VerilatedContext context;
    Vmatmul_axi top{&context};
#if VM_TRACE
    VerilatedVcdC vcd;
#endif
    bool traced = false;
    uint64_t time = 0;
};

MatmulRtl::MatmulRtl() : model_(std::make_unique<Model>()) {
    reset();
    if (read(rtl_register::id) != 0x716e7572)
        throw std::runtime_error("the core does not answer with its id");
    const uint32_t shape = read(rtl_register::shape), limits = read(rtl_register::limits);
    rows = int(shape & 0xfff), cols = int(shape >> 12 & 0xfff), max_tokens = int(shape >> 24);
    max_inputs = int(limits & 0xffff), min_group = int(limits >> 16);
}
MatmulRtl::~MatmulRtl() {
#if VM_TRACE
    if (model_->traced) model_->vcd.close();
#endif
    model_->top.final();
    Verilated::threadContextp(&model_->context);  // its scopes are taken out of it
}

namespace {
void require(bool holds, const char* rule) {
    if (!holds) throw std::runtime_error(std::string("AXI: ") + rule);
}
}  // namespace

// What the next edge will sample.
void MatmulRtl::watch() {
    const Vmatmul_axi& t = model_->top;
    if (!t.aresetn) {
        waiting_result_.clear(), waiting_b_ = waiting_r_ = false;
        addresses_ = words_ = written_ = reads_ = answered_ = 0;
        return;
    }
    // What is offered stays, with all its data, until it is taken.
    const size_t keep_bytes = (size_t(cols) + 7) / 8;
    std::vector<uint8_t> result;
    if (t.m_axis_tvalid && (!t.m_axis_tready || !waiting_result_.empty())) {
        result.resize(size_t(cols) + keep_bytes + 1);
        std::memcpy(result.data(), &t.m_axis_tdata, size_t(cols));
        std::memcpy(result.data() + cols, &t.m_axis_tkeep, keep_bytes);
        result.back() = t.m_axis_tlast;
    }
    require(stopping_ || waiting_result_.empty() || waiting_result_ == result,
            "m_axis changes while it waits");
    if (t.m_axis_tready) result.clear();
    waiting_result_.swap(result);
    require(!waiting_b_ || t.s_axil_bvalid, "bvalid falls while it waits");
    require(!waiting_r_ || (t.s_axil_rvalid && t.s_axil_rdata == waiting_read_), "r changes while it waits");
    waiting_b_ = t.s_axil_bvalid && !t.s_axil_bready, waiting_r_ = t.s_axil_rvalid && !t.s_axil_rready;
    waiting_read_ = t.s_axil_rdata;
    if (t.m_axis_tvalid) {
        for (int c = 0; c < cols; c++) {
            uint8_t byte;
            std::memcpy(&byte, reinterpret_cast<const uint8_t*>(&t.m_axis_tkeep) + c / 8, 1);
            require((byte >> c % 8 & 1) == (command_ != rtl_command::read || c < 4), "tkeep");
        }
    }
    // An answer belongs to a request.
    require(!t.s_axil_bvalid || written_ < std::min(addresses_, words_), "an answer to no write");
    require(!t.s_axil_rvalid || answered_ < reads_, "an answer to no read");
    require(t.s_axil_bresp == 0 && t.s_axil_rresp == 0, "an answer is no OKAY");
    const bool address = t.s_axil_awvalid && t.s_axil_awready, word = t.s_axil_wvalid && t.s_axil_wready;
    addresses_ += address, words_ += word, written_ += t.s_axil_bvalid && t.s_axil_bready;
    reads_ += t.s_axil_arvalid && t.s_axil_arready, answered_ += t.s_axil_rvalid && t.s_axil_rready;
    // What is counted.
    if (!begun_ && address && t.s_axil_awaddr == rtl_register::control) begun_ = true, begins_ = clocks + 2;
    if (!begun_ || clocks < begins_) return;
    if (weights_left_ != 0) {
        const bool taken = t.s_axis_w_tvalid && t.s_axis_w_tready;
        expected_.weight_beats += taken, weights_left_ -= taken;
        expected_.weight_waits += !t.s_axis_w_tvalid;
        expected_.weight_stalls += t.s_axis_w_tvalid && !t.s_axis_w_tready;
    }
    expected_.result_stalls += t.m_axis_tvalid && !t.m_axis_tready;
}

// CYCLES is known from outside but where the quantizer takes its time.
void MatmulRtl::check_end(uint32_t command, bool coded) {
    const uint32_t status = read(rtl_register::status);
    const RtlCounters c = counters();
    auto same = [](const char* name, uint32_t found, uint32_t wanted) {
        if (found != wanted)
            throw std::runtime_error(std::string(name) + " is " + std::to_string(found) +
                                     ", the ports have shown " + std::to_string(wanted));
    };
    same("STATUS", status, rtl_status::done);
    if (command != rtl_command::load || coded) same("CYCLES", c.cycles, expected_.cycles);
    same("WEIGHT_BEATS", c.weight_beats, expected_.weight_beats);
    same("WEIGHT_WAITS", c.weight_waits, expected_.weight_waits);
    same("WEIGHT_STALLS", c.weight_stalls, expected_.weight_stalls);
    same("RESULT_STALLS", c.result_stalls, expected_.result_stalls);
}

// A clock: what was set and evaluated before is sampled by its rising edge.
void MatmulRtl::tick() {
    Model& m = *model_;
    Verilated::threadContextp(&m.context);  // not that of the core that was made last, which may be gone
    watch();
#if VM_TRACE
    if (m.traced) m.top.eval(), m.vcd.dump(m.time++);  // what the edge will sample, at times that 3 divides
#endif
    for (int level : {1, 0}) {
        m.top.aclk = uint8_t(level);
        m.top.eval();
#if VM_TRACE
        if (m.traced) m.vcd.dump(m.time++);
#endif
    }
    clocks++;
    check_assertions();
}

void MatmulRtl::trace_to([[maybe_unused]] const std::string& path) {
#if VM_TRACE
    model_->context.traceEverOn(true);
    model_->top.trace(&model_->vcd, 99);
    model_->vcd.open(path.c_str());
    model_->traced = true;
#else
    throw std::runtime_error("compiled without --trace");
#endif
}

void MatmulRtl::reset(int n_clocks) {
    Vmatmul_axi& t = model_->top;
    t.s_axil_awvalid = t.s_axil_wvalid = t.s_axil_bready = t.s_axil_arvalid = t.s_axil_rready = 0;
    t.s_axis_w_tvalid = t.s_axis_x_tvalid = t.m_axis_tready = 0;
    t.aresetn = 0;
    t.eval();
    for (int i = 0; i < n_clocks; i++) tick();
    t.aresetn = 1;
    t.eval();
    random_.seed(stalls.seed);
}

uint32_t MatmulRtl::read(uint8_t address) {
    RtlAccess one[] = {{false, address, 0}};
    access(one);
    return one[0].value;
}
void MatmulRtl::write(uint8_t address, uint32_t value) {
    RtlAccess one[] = {{true, address, value}};
    access(one);
}

// Five channels, each at its own pace. What is not valid is noise.
void MatmulRtl::access(std::span<RtlAccess> all) {
    Vmatmul_axi& t = model_->top;
    std::vector<RtlAccess*> writes, reads;
    for (RtlAccess& a : all) (a.writes ? writes : reads).push_back(&a);
    size_t addresses = 0, words = 0, written = 0, asked = 0, answered = 0;
    const double share = stalls.registers;
    for (int clock = 0; written < writes.size() || answered < reads.size(); clock++) {
        if (clock == 20000) throw std::runtime_error("a register does not answer");
        if (!t.s_axil_awvalid)
            t.s_axil_awvalid = addresses < writes.size() && !pause(share),
            t.s_axil_awaddr = t.s_axil_awvalid ? writes[addresses]->address : rtl_register::control;
        if (!t.s_axil_wvalid)
            t.s_axil_wvalid = words < writes.size() && !pause(share),
            t.s_axil_wdata = t.s_axil_wvalid ? writes[words]->value : 0xa5a5a5a5u, t.s_axil_wstrb = 15;
        if (!t.s_axil_arvalid)
            t.s_axil_arvalid = asked < reads.size() && !pause(share),
            t.s_axil_araddr = t.s_axil_arvalid ? reads[asked]->address : 0xfc;
        t.s_axil_bready = written < writes.size() && !pause(share);
        t.s_axil_rready = answered < reads.size() && !pause(share);
        t.eval();
        const bool aw = t.s_axil_awvalid && t.s_axil_awready, w = t.s_axil_wvalid && t.s_axil_wready,
                   ar = t.s_axil_arvalid && t.s_axil_arready;
        written += t.s_axil_bvalid && t.s_axil_bready;
        if (t.s_axil_rvalid && t.s_axil_rready) reads[answered++]->value = t.s_axil_rdata;
        tick();
        if (aw) t.s_axil_awvalid = 0, addresses++;
        if (w) t.s_axil_wvalid = 0, words++;
        if (ar) t.s_axil_arvalid = 0, asked++;
    }
    t.s_axil_bready = t.s_axil_rready = 0;
    t.eval();
}

void MatmulRtl::ask() {
    Vmatmul_axi& t = model_->top;
    t.s_axil_araddr = t.s_axil_awaddr = rtl_register::id;
    t.s_axil_arvalid = t.s_axil_awvalid = t.s_axil_wvalid = 1;
    t.eval();
    tick();
    t.s_axil_arvalid = t.s_axil_awvalid = t.s_axil_wvalid = 0;
    t.eval();
}

bool MatmulRtl::result_is_there() const { return model_->top.m_axis_tvalid != 0; }
bool MatmulRtl::interrupts() const { return model_->top.irq != 0; }

void MatmulRtl::stop() {
    Vmatmul_axi& t = model_->top;
    t.s_axis_w_tvalid = t.s_axis_x_tvalid = t.m_axis_tready = 0;
    stopping_ = true;  // the one time that a result may be taken back
    write(rtl_register::control, rtl_command::stop);
    tick();
    stopping_ = false;
}

RtlCounters MatmulRtl::counters() {
    using namespace rtl_register;
    return {read(cycles),       read(sum_cycles),    read(weight_beats),
            read(weight_waits), read(weight_stalls), read(result_stalls)};
}

void MatmulRtl::set_sizes(const RtlSizes& s, uint32_t mode) {
    using namespace rtl_register;
    sizes_ = s, coded_ = (mode & rtl_mode::coded) != 0;
    write(tokens, s.tokens), write(passes, s.passes), write(groups, s.groups);
    write(rows_of_tiles, s.rows_of_tiles), write(rtl_register::mode, mode);
}

std::vector<uint8_t> MatmulRtl::run(uint32_t command, std::span<const uint8_t> weights,
                                    std::span<const uint32_t> activations, bool has_results,
                                    uint64_t after_clocks) {
    Vmatmul_axi& t = model_->top;
    const size_t beat = size_t(cols);
    command_ = command, weights_left_ = uint32_t(weights.size() / beat), expected_ = {}, begun_ = false;
    write(rtl_register::control, command);
    const uint32_t status = read(rtl_register::status);
    if ((status & rtl_status::refused) != 0) throw std::runtime_error("the core refused a command");
    if (status != rtl_status::busy)
        throw std::runtime_error("a command begins, and STATUS is not busy alone");
    std::vector<uint8_t> results;
    size_t w_at = 0, x_at = 0;
    bool last = false;
    const uint64_t began = clocks;
    uint64_t next_weight = clocks, idle = 0;
    // A stream that has offered a beat keeps it until it is taken.
    while (has_results ? !last : x_at < activations.size()) {
        if (!t.s_axis_w_tvalid && w_at < weights.size() && clocks >= next_weight && !pause(stalls.weights)) {
            t.s_axis_w_tvalid = 1;
            std::memcpy(&t.s_axis_w_tdata, weights.data() + w_at, beat);
            next_weight = clocks + uint64_t(stalls.weight_every);
        }
        if (!t.s_axis_x_tvalid && x_at < activations.size() && !pause(stalls.activations))
            t.s_axis_x_tvalid = 1, t.s_axis_x_tdata = activations[x_at];
        const bool more_w = !t.s_axis_w_tvalid && stalls.more && w_at >= weights.size(),
                   more_x = !t.s_axis_x_tvalid && stalls.more && x_at >= activations.size();
        if (more_w) t.s_axis_w_tvalid = 1;
        if (more_x) t.s_axis_x_tvalid = 1;
        t.m_axis_tready = has_results && !pause(stalls.results);
        t.eval();
        if ((more_w && t.s_axis_w_tready) || (more_x && t.s_axis_x_tready))
            throw std::runtime_error("the core takes a beat that belongs to no command");
        const bool w_taken = t.s_axis_w_tvalid && t.s_axis_w_tready,
                   x_taken = t.s_axis_x_tvalid && t.s_axis_x_tready;
        const bool m_taken = t.m_axis_tvalid && t.m_axis_tready;
        if (m_taken) {
            results.resize(results.size() + beat);
            std::memcpy(results.data() + results.size() - beat, &t.m_axis_tdata, beat);
            last = t.m_axis_tlast;
        }
        if (m_taken || x_taken) expected_.cycles = uint32_t(clocks - begins_ + (m_taken ? 1 : 2));
        tick();
        if (w_taken) w_at += beat, t.s_axis_w_tvalid = 0, std::memset(&t.s_axis_w_tdata, int(clocks), beat);
        if (x_taken) x_at++, t.s_axis_x_tvalid = 0, t.s_axis_x_tdata = uint32_t(clocks);
        if (more_w) t.s_axis_w_tvalid = 0;
        if (more_x) t.s_axis_x_tvalid = 0;
        idle = w_taken || x_taken || m_taken ? 0 : idle + 1;
        if (after_clocks != 0 && clocks - began >= after_clocks) return results;
        if (idle > 20000) throw std::runtime_error("nothing moves on any stream");
    }
    for (int i = 0; stalls.more && i < 100; i++) {
        t.s_axis_w_tvalid = t.s_axis_x_tvalid = 1;
        t.eval();
        if (t.s_axis_w_tready || t.s_axis_x_tready)
            throw std::runtime_error("the core takes a beat behind its command's last");
        tick();
    }
    t.s_axis_w_tvalid = t.s_axis_x_tvalid = t.m_axis_tready = 0;
    for (int i = 0; (read(rtl_register::status) & rtl_status::done) == 0; i++)
        if (i == 20000) throw std::runtime_error("a command does not end");
    if (w_at != weights.size()) throw std::runtime_error("weights are left over");
    check_end(command, coded_);
    return results;
}

RtlMatrix MatmulRtl::pack(RtlFormat format, const int8_t* codes, const uint8_t* zeros, const float* scales,
                          int n_rows, int n_cols, int group_size) const {
    RtlMatrix w{{}, n_rows, n_cols, group_size, format};
    const int n_groups = n_cols / group_size, rows_of_tiles = (n_rows + cols - 1) / cols;
    const int per_byte = format == RtlFormat::int8        ? 1
                         : format == RtlFormat::four_bits ? 2
                                                          : 4,
              bits = 8 / per_byte;
    w.stream.reserve(size_t(rows_of_tiles) * size_t(cols) * size_t(n_cols / per_byte + 5 * n_groups));
    for (int first = 0; first < rows_of_tiles * cols; first += cols) {
        for (int g = 0; g < n_groups; g++) {
            auto of_group = [&](int c) { return size_t(c) * size_t(n_groups) + size_t(g); };
            for (int c = first; c < first + cols; c++) {
                const float scale = c < n_rows ? scales[of_group(c)] : 0;
                uint8_t bytes[4];
                std::memcpy(bytes, &scale, 4);
                w.stream.insert(w.stream.end(), bytes, bytes + 4);
            }
            if (format != RtlFormat::int8)
                for (int c = first; c < first + cols; c++)
                    w.stream.push_back(c < n_rows ? zeros[of_group(c)] : 0);
            auto code = [&](int c, int k) {
                const int v = c < n_rows ? codes[size_t(c) * size_t(n_cols) + size_t(k)] : 0;
                return v & ((1 << bits) - 1);
            };
            for (int k = g * group_size; k < (g + 1) * group_size; k += per_byte) {
                for (int c = first; c < first + cols; c++) {
                    int byte = 0;
                    for (int i = 0; i < per_byte; i++) byte |= code(c, k + i) << i * bits;
                    w.stream.push_back(uint8_t(byte));
                }
            }
        }
    }
    return w;
}

void MatmulRtl::quantize(const float* x, int n_tokens, int n_cols, int group_size, const float* fixed_scale) {
    group_size_ = group_size, n_cols_ = n_cols;
    set_sizes({uint32_t(n_tokens), uint32_t(group_size / rows), uint32_t(n_cols / group_size), 1},
              fixed_scale != nullptr ? rtl_mode::fixed_scale : 0);
    if (fixed_scale != nullptr) write(rtl_register::scale, std::bit_cast<uint32_t>(*fixed_scale));
    const auto* words = reinterpret_cast<const uint32_t*>(x);
    run(rtl_command::load, {}, {words, size_t(n_tokens) * size_t(n_cols)}, false);
}

void MatmulRtl::load(const int8_t* codes, const float* scales, int n_tokens, int n_cols, int group_size) {
    group_size_ = group_size, n_cols_ = n_cols;
    set_sizes({uint32_t(n_tokens), uint32_t(group_size / rows), uint32_t(n_cols / group_size), 1},
              rtl_mode::coded);
    std::vector<uint32_t> words;
    for (int i = 0; i < n_tokens * n_cols; i += 4) {
        if (i % group_size == 0) words.push_back(std::bit_cast<uint32_t>(scales[i / group_size]));
        uint32_t four;
        std::memcpy(&four, codes + i, 4);
        words.push_back(four);
    }
    run(rtl_command::load, {}, words, false);
}

void MatmulRtl::read_activations(int8_t* codes, float* scales) {
    const std::vector<uint8_t> beats = run(rtl_command::read, {}, {}, true);
    const size_t words_per_group = 1 + size_t(group_size_) / 4;
    for (size_t i = 0; i < beats.size() / size_t(cols); i++) {
        const size_t g = i / words_per_group, k = i % words_per_group;
        const uint8_t* word = beats.data() + i * size_t(cols);
        if (k == 0)
            std::memcpy(scales + g, word, 4);
        else
            std::memcpy(codes + g * size_t(group_size_) + 4 * (k - 1), word, 4);
    }
}

void MatmulRtl::multiply(const RtlMatrix& w, float* out, size_t out_stride) {
    RtlSizes s = sizes_;
    s.rows_of_tiles = uint32_t((w.n_rows + cols - 1) / cols);
    set_sizes(s, uint32_t(w.format));
    const std::vector<uint8_t> beats = run(rtl_command::multiply, w.stream, {}, true);
    const size_t row_bytes = size_t(cols) * 4;
    for (size_t i = 0; i < beats.size() / row_bytes; i++) {
        const size_t token = i % s.tokens, first = i / s.tokens * size_t(cols);
        const size_t n = std::min(size_t(cols), size_t(w.n_rows) - first);
        std::memcpy(out + token * out_stride + first, beats.data() + i * row_bytes, 4 * n);
    }
}
