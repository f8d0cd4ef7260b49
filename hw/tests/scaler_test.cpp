// group_scaler and row_scaler against the files of `golden passes`, group after group, and against plain
// loops.
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "Vgroup_scaler.h"
#include "Vrow_scaler.h"
#include "sim.h"
#include "vectors.h"

// The running sums of many outputs in a memory that reads in a clock, and a group_scaler that adds to them.
// Groups are fed in any order that leaves `apart` clocks between two of the same sum.
struct Scaler {
    static constexpr int apart = 8;
    Sim<Vgroup_scaler> sim;
    Random random{5};
    std::vector<uint32_t> memory;
    std::vector<int64_t> fed_at;
    int64_t now = 0, fed = 0, written = 0;
    uint32_t read = 0;
    bool pauses = false;

    explicit Scaler(size_t n_sums) : memory(n_sums, 0), fed_at(n_sums, -100) { sim.reset(); }

    void clock(bool valid, int32_t acc, uint32_t w_scale, uint32_t x_scale, size_t at) {
        auto& top = sim.top;
        for (bool moved = false; !moved;) {
            moved = !(pauses && random.one_in(4));
            top.en_i = moved;
            top.valid_i = valid, top.acc_i = uint32_t(acc), top.w_scale_i = w_scale, top.x_scale_i = x_scale,
            top.tag_i = uint16_t(at);
            if (!valid || !moved)
                top.acc_i = uint32_t(random()), top.w_scale_i = uint32_t(random()),
                top.tag_i = uint16_t(random());
            top.sum_i = moved ? read : uint32_t(random());
            sim.settle();
            // The memory: a read takes what was there before this clock's write.
            const bool reads = top.read_o;
            const size_t address = top.read_tag_o;
            if (moved) {
                if (reads) REQUIRE(address < memory.size());
                read = reads ? memory[address] : uint32_t(random());
                if (top.valid_o) {
                    REQUIRE(top.tag_o < memory.size());
                    memory[top.tag_o] = top.sum_o;
                    written++;
                }
                now++;
            }
            sim.tick();
        }
    }
    void feed(int32_t acc, uint32_t w_scale, uint32_t x_scale, size_t at) {
        while (now < fed_at[at] + apart) clock(false, 0, 0, 0, 0);
        fed_at[at] = now;
        fed++;
        clock(true, acc, w_scale, x_scale, at);
    }
    void finish() {
        for (int i = 0; i < 24; i++) clock(false, 0, 0, 0, 0);
        CHECK(written == fed);
    }
};

// Every product: the totals of each group and the scales go in, token by token, and all running sums are the
// file's.
TEST_CASE("group_scaler: golden passes") {
    for (const Passes& p : all_passes()) {
        INFO(p.name);
        const std::vector<int64_t> totals = p.read("pass.totals"), x_scales = p.read("x.scales"),
                                   w_scales = p.read("w.scales"), out = p.read("out");
        const int n = p.n_tokens, per_group = p.group_size / p.rows, cols = p.cols;
        const size_t row_size = size_t(n) * size_t(cols);
        REQUIRE(out.size() == row_size * size_t(p.n_groups() * p.n_row_tiles()));
        uint64_t wrong = 0;
        for (int row = 0; row < p.n_row_tiles(); row++) {
            Scaler scaler(row_size);
            scaler.pauses = p.n_groups() < 10 && row == 0;
            for (int g = 0; g < p.n_groups(); g++) {
                const size_t last_pass = size_t(row * p.n_passes() + (g + 1) * per_group - 1);
                for (int t = 0; t < n; t++)
                    for (int c = 0; c < cols; c++)
                        scaler.feed(
                            int32_t(totals[(last_pass * size_t(n) + size_t(t)) * size_t(cols) + size_t(c)]),
                            uint32_t(w_scales[size_t((row * p.n_groups() + g) * cols + c)]),
                            uint32_t(x_scales[size_t(g * n + t)]), size_t(t * cols + c));
                scaler.finish();
                for (size_t i = 0; i < row_size; i++)
                    wrong += scaler.memory[i] != uint32_t(out[size_t(row * p.n_groups() + g) * row_size + i]);
            }
        }
        CHECK(wrong == 0);
    }
}

// Scales of all sizes, among them subnormal ones and 0; sums of both signs up to the largest.
TEST_CASE("group_scaler: random") {
    Scaler scaler(32);
    scaler.pauses = true;
    std::vector<float> sums(32, 0);
    Random random(9);
    for (int i = 0; i < 20000; i++) {
        const size_t at = random() % 32;
        const int32_t acc = int32_t(random()) >> (random() & 31);
        const auto scale = [&] {
            return random.one_in(50) ? 0 : uint32_t(random() & 0x7fffff) | uint32_t(random.in(0, 150)) << 23;
        };
        const uint32_t w = scale(), x = random.one_in(2) ? scale() : bits_of(1) + uint32_t(random() & 0xffff);
        const float s = float_of(w) * float_of(x);
        sums[at] = std::fma(float(acc), s, sums[at]);
        scaler.feed(acc, w, x, at);
    }
    scaler.finish();
    for (size_t i = 0; i < 32; i++) CHECK(same_float(scaler.memory[i], bits_of(sums[i])));
}

// Nothing of what was on its way before a reset comes out after it.
template <class Model>
static void check_reset(int latency) {
    Sim<Model> sim;
    for (int before = 1; before < 20; before++) {
        sim.reset(1);
        sim.top.valid_i = 1;
        for (int i = 0; i < before; i++) sim.tick();
        sim.top.valid_i = 0;
        sim.reset(1);
        for (int i = 0; i < 20; i++) {
            CHECK(!sim.top.valid_o);
            sim.tick();
        }
        sim.top.valid_i = 1;
        sim.tick();
        sim.top.valid_i = 0;
        for (int i = 1; i < latency; i++) {
            CHECK(!sim.top.valid_o);
            sim.tick();
        }
        CHECK(sim.top.valid_o);
    }
}
TEST_CASE("scalers: reset, and latency") {
    check_reset<Vgroup_scaler>(11);
    check_reset<Vrow_scaler>(10);
}

// Rows of W8A8: the sum of a whole row, one scale of each side.
struct Row {
    int32_t acc;
    uint32_t w_scale, x_scale, out;
};
static void check_rows(const std::vector<Row>& rows) {
    Sim<Vrow_scaler> sim;
    sim.reset();
    Random random(11);
    uint64_t wrong = 0;
    size_t fed = 0, came = 0;
    for (size_t clocks = 0; came < rows.size(); clocks++) {
        if (clocks == 1000 + 10 * rows.size()) FAIL((rows.size() - came) << " results are missing");
        auto& top = sim.top;
        top.en_i = !random.one_in(4), top.valid_i = fed < rows.size() && !random.one_in(4);
        const Row r =
            top.valid_i ? rows[fed] : Row{int32_t(random()), uint32_t(random()), uint32_t(random()), 0};
        top.acc_i = uint32_t(r.acc), top.w_scale_i = r.w_scale, top.x_scale_i = r.x_scale,
        top.tag_i = uint8_t(fed * 7);
        fed += top.en_i && top.valid_i;
        const bool moved = top.en_i;
        sim.tick();
        if (moved && top.valid_o) {
            wrong += !same_float(top.out_o, rows[came].out) || top.tag_o != uint8_t(came * 7);
            came++;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("row_scaler: golden passes of one group") {
    std::vector<Row> rows;
    for (const Passes& p : all_passes()) {
        if (p.n_groups() != 1) continue;
        const std::vector<int64_t> totals = p.read("pass.totals"), x_scales = p.read("x.scales"),
                                   w_scales = p.read("w.scales"), out = p.read("out");
        for (int row = 0; row < p.n_row_tiles(); row++)
            for (int t = 0; t < p.n_tokens; t++)
                for (int c = 0; c < p.cols; c++) {
                    const size_t last = size_t((row + 1) * p.n_passes() - 1);
                    const size_t sum = (last * size_t(p.n_tokens) + size_t(t)) * size_t(p.cols) + size_t(c);
                    rows.push_back({int32_t(totals[sum]), uint32_t(w_scales[size_t(row * p.cols + c)]),
                                    uint32_t(x_scales[size_t(t)]),
                                    uint32_t(out[size_t((row * p.n_tokens + t) * p.cols + c)])});
                }
    }
    CHECK(rows.size() > 1000);
    check_rows(rows);
    // Scales of 1: `out` of the vectors is the conversion of the sum, rounded half to even, and exact.
    rows.clear();
    const std::vector<int64_t> sums = op("matmul.beyond24bits.accumulators"),
                               out = op("matmul.beyond24bits.out");
    for (size_t i = 0; i < sums.size(); i++)
        rows.push_back({int32_t(sums[i]), bits_of(1), bits_of(1), uint32_t(out[i])});
    check_rows(rows);
}

TEST_CASE("row_scaler: random") {
    Random random(13);
    std::vector<Row> rows;
    for (int i = 0; i < 20000; i++) {
        const int32_t acc = int32_t(random()) >> (random() & 31);
        const uint32_t w = uint32_t(random()) & 0x7fffffff, x = uint32_t(random()) & 0x7fffffff;
        rows.push_back({acc, w, x, bits_of(float(acc) * (float_of(w) * float_of(x)))});
    }
    check_rows(rows);
}
