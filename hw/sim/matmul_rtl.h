// Drives hw/rtl/matmul_axi.sv, compiled by Verilator, as a processor and two DMA engines would: registers
// over AXI4-Lite, weights, activations and results over AXI4-Streams, clock by clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

class Vmatmul_axi;

// Byte addresses: docs/rtl.md.
namespace rtl_register {
constexpr uint8_t id = 0x00, shape = 0x04, limits = 0x08, control = 0x0c, status = 0x10, tokens = 0x14,
                  passes = 0x18, groups = 0x1c, rows_of_tiles = 0x20, mode = 0x24, scale = 0x28,
                  interrupt = 0x2c, cycles = 0x30, sum_cycles = 0x34, weight_beats = 0x38,
                  weight_waits = 0x3c, weight_stalls = 0x40, result_stalls = 0x44;
}
namespace rtl_command {
constexpr uint32_t load = 1, multiply = 2, read = 4, stop = 8;
}
namespace rtl_status {
constexpr uint32_t busy = 1, done = 2, refused = 4;
}
namespace rtl_mode {
constexpr uint32_t coded = 4, fixed_scale = 8;  // and below them the format of the weights
}
enum class RtlFormat : uint32_t { int8 = 0, four_bits = 1, two_bits = 2, two_level = 3 };

// What the core counted during its latest command.
struct RtlCounters {
    uint32_t cycles;         // of the command
    uint32_t sum_cycles;     // from the first weight to the last sum below the array
    uint32_t weight_beats;   // taken
    uint32_t weight_waits;   // clocks in which no beat of weights was there
    uint32_t weight_stalls;  // clocks in which a beat had to wait
    uint32_t result_stalls;  // clocks in which results had to wait
};

// How often a stream pauses, as a share of all clocks, and each channel of the registers; weight_every: a
// beat of weights comes every so many clocks, as from a memory that is narrower than a row of cells; more:
// streams go on offering beats that belong to no command, which the core must not take.
struct RtlStalls {
    double weights = 0, activations = 0, results = 0;
    uint32_t seed = 1;
    int weight_every = 1;
    double registers = 0;
    bool more = false;
};

// An access to a register: what is written, or what was read.
struct RtlAccess {
    bool writes;
    uint8_t address;
    uint32_t value;
};

// Sizes of a product or of activations, in what the registers count.
struct RtlSizes {
    uint32_t tokens = 1, passes = 1, groups = 1, rows_of_tiles = 1;
};

// A weight matrix as the stream of weights: docs/rtl.md.
struct RtlMatrix {
    std::vector<uint8_t> stream;  // whole beats
    int n_rows = 0, n_cols = 0, group_size = 0;
    RtlFormat format = RtlFormat::int8;
};

// Every clock is checked: what the core offers stays until it is taken, an answer belongs to a request, tkeep
// is right, and at the end of a command STATUS and counters are what the ports have shown. std::runtime_error
// says what is not.
class MatmulRtl {
  public:
    MatmulRtl();
    ~MatmulRtl();
    MatmulRtl(const MatmulRtl&) = delete;
    MatmulRtl& operator=(const MatmulRtl&) = delete;

    int rows = 0, cols = 0, max_tokens = 0;  // of the array; the most tokens of a product
    int max_inputs = 0, min_group = 0;
    RtlStalls stalls;
    uint64_t clocks = 0;  // simulated so far

    void reset(int n_clocks = 4);
    uint32_t read(uint8_t address);
    void write(uint8_t address, uint32_t value);
    // Accesses one behind the other, without waiting for answers; reads and writes are two orders of their
    // own.
    void access(std::span<RtlAccess> all);
    void ask();  // a read and a write of ID whose answers nobody takes, for a test of reset
    RtlCounters counters();
    bool result_is_there() const;  // m_axis_tvalid
    bool interrupts() const;       // irq
    // Ends what runs, and takes back all that streams offer; registers stay.
    void stop();

    // Whether activations in such groups can be multiplied.
    bool fits(int n_cols, int group_size) const {
        return group_size % rows == 0 && group_size >= min_group && n_cols % group_size == 0 &&
               n_cols <= max_inputs;
    }

    // codes (n_rows, n_cols), scales (n_rows, n_cols / group_size) fp32; with a format of few bits codes are
    // 0..15 or 0..3, and zeros (n_rows, n_cols / group_size) is what is taken off them, or off five times
    // them. What does not fill a tile is 0.
    RtlMatrix pack(RtlFormat format, const int8_t* codes, const uint8_t* zeros, const float* scales,
                   int n_rows, int n_cols, int group_size) const;

    // Loads x (n_tokens, n_cols) fp32 through the quantizer. fixed_scale: not null, all scales are that one.
    void quantize(const float* x, int n_tokens, int n_cols, int group_size,
                  const float* fixed_scale = nullptr);
    // Loads codes (n_tokens, n_cols) and scales (n_tokens, n_cols / group_size) as they are.
    void load(const int8_t* codes, const float* scales, int n_tokens, int n_cols, int group_size);
    // Reads back what was loaded.
    void read_activations(int8_t* codes, float* scales);
    // out (tokens that were loaded, w.n_rows) fp32 = activations times w transposed; a row of out is
    // out_stride long.
    void multiply(const RtlMatrix& w, float* out, size_t out_stride);

    // One command with what its streams bring, until tlast on m_axis or, where n_results is 0, until STATUS
    // says done. Returns the beats of results. For tests: after_clocks, if not 0, ends it early, whatever has
    // come.
    std::vector<uint8_t> run(uint32_t command, std::span<const uint8_t> weights,
                             std::span<const uint32_t> activations, bool has_results,
                             uint64_t after_clocks = 0);
    void set_sizes(const RtlSizes& sizes, uint32_t mode);
    void trace_to(
        const std::string& path);  // a VCD file of all signals from here on, if compiled with --trace

  private:
    void tick();
    void watch();
    void check_end(uint32_t command, bool coded);
    struct Model;
    std::unique_ptr<Model> model_;
    std::mt19937 random_;
    // What the ports have shown: the beat of each channel that waits, and how many requests came and were
    // answered.
    std::vector<uint8_t> waiting_result_;
    bool waiting_b_ = false, waiting_r_ = false;
    uint32_t waiting_read_ = 0;
    uint64_t addresses_ = 0, words_ = 0, written_ = 0, reads_ = 0, answered_ = 0;
    // And what the counters have to be: a command begins two clocks after its write to CONTROL.
    RtlCounters expected_ = {};
    uint32_t command_ = 0, weights_left_ = 0;
    uint64_t begins_ = 0;
    bool begun_ = true, coded_ = false, stopping_ = false;
    RtlSizes sizes_;
    int group_size_ = 0, n_cols_ = 0;
    bool pause(double share) {
        return share > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < share;
    }
};
