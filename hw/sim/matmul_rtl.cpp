#include "hw/sim/matmul_rtl.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "Vmatmul_axi.h"
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
}

// A clock: what was set before is sampled by its rising edge.
void MatmulRtl::tick() {
    Model& m = *model_;
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
    for (int i = 0; i < n_clocks; i++) tick();
    t.aresetn = 1;
    t.eval();
    random_.seed(stalls.seed);
}

uint32_t MatmulRtl::read(uint8_t address) {
    Vmatmul_axi& t = model_->top;
    t.s_axil_araddr = address, t.s_axil_arvalid = 1, t.s_axil_rready = 1;
    t.eval();
    while (!t.s_axil_arready) tick();
    tick();
    t.s_axil_arvalid = 0;
    while (!t.s_axil_rvalid) tick();
    const uint32_t value = t.s_axil_rdata;
    tick();
    t.s_axil_rready = 0;
    return value;
}

void MatmulRtl::write(uint8_t address, uint32_t value) {
    Vmatmul_axi& t = model_->top;
    t.s_axil_awaddr = address, t.s_axil_wdata = value, t.s_axil_wstrb = 15;
    t.s_axil_awvalid = t.s_axil_wvalid = t.s_axil_bready = 1;
    t.eval();
    while (!t.s_axil_wready) tick();
    tick();
    t.s_axil_awvalid = t.s_axil_wvalid = 0;
    while (!t.s_axil_bvalid) tick();
    tick();
    t.s_axil_bready = 0;
}

bool MatmulRtl::result_is_there() const { return model_->top.m_axis_tvalid != 0; }

RtlCounters MatmulRtl::counters() {
    using namespace rtl_register;
    return {read(cycles),       read(sum_cycles),    read(weight_beats),
            read(weight_waits), read(weight_stalls), read(result_stalls)};
}

void MatmulRtl::set_sizes(const RtlSizes& s, uint32_t mode) {
    using namespace rtl_register;
    sizes_ = s;
    write(tokens, s.tokens), write(passes, s.passes), write(groups, s.groups);
    write(rows_of_tiles, s.rows_of_tiles), write(rtl_register::mode, mode);
}

std::vector<uint8_t> MatmulRtl::run(uint32_t command, std::span<const uint8_t> weights,
                                    std::span<const uint32_t> activations, bool has_results,
                                    uint64_t after_clocks) {
    Vmatmul_axi& t = model_->top;
    write(rtl_register::control, command);
    if ((read(rtl_register::status) & rtl_status::refused) != 0)
        throw std::runtime_error("the core refused a command");
    const size_t beat = size_t(cols);
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
        t.m_axis_tready = has_results && !pause(stalls.results);
        t.eval();
        const bool w_taken = t.s_axis_w_tvalid && t.s_axis_w_tready,
                   x_taken = t.s_axis_x_tvalid && t.s_axis_x_tready;
        const bool m_taken = t.m_axis_tvalid && t.m_axis_tready;
        if (m_taken) {
            results.resize(results.size() + beat);
            std::memcpy(results.data() + results.size() - beat, &t.m_axis_tdata, beat);
            last = t.m_axis_tlast;
        }
        tick();
        if (w_taken) w_at += beat, t.s_axis_w_tvalid = 0;
        if (x_taken) x_at++, t.s_axis_x_tvalid = 0;
        idle = w_taken || x_taken || m_taken ? 0 : idle + 1;
        if (after_clocks != 0 && clocks - began >= after_clocks) return results;
        if (idle > 100000) throw std::runtime_error("nothing moves on any stream");
    }
    t.s_axis_w_tvalid = t.s_axis_x_tvalid = t.m_axis_tready = 0;
    for (int i = 0; (read(rtl_register::status) & rtl_status::done) == 0; i++)
        if (i == 100000) throw std::runtime_error("a command does not end");
    if (w_at != weights.size()) throw std::runtime_error("weights are left over");
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
