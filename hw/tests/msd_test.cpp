// The MSD split and the pair of int4 arrays: digits against the golden vectors, sums against those of A8W4;
// and what follows in fp32, with the assist matrix, against the loop of runq_moe.cpp.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "Vfp32_add.h"
#include "Vfp32_mul.h"
#include "Vgroup_scaler.h"
#include "Vmsd_array_16x16.h"
#include "Vmsd_array_4x3.h"
#include "Vmsd_array_5x2.h"
#include "Vmsd_array_8x4.h"
#include "Vmsd_split.h"
#include "sim.h"
#include "vectors.h"

TEST_CASE("msd_split: golden vectors, every code") {
    Sim<Vmsd_split> sim;
    const std::vector<int64_t> codes = op("msd_split.codes"), high = op("msd_split.high"),
                               low = op("msd_split.low");
    REQUIRE(codes.size() == 256);
    for (size_t k = 0; k < codes.size(); k += 16) {
        for (int i = 0; i < 16; i++) set_lane(sim.top.x_i, i, 8, int(codes[k + size_t(i)]));
        sim.settle();
        for (int i = 0; i < 16; i++) {
            CHECK(lane(sim.top.high_o, i, 4) == high[k + size_t(i)]);
            CHECK(lane(sim.top.low_o, i, 4) == low[k + size_t(i)]);
        }
    }
}

// Tiles one after the other: weights as early as they may come, tokens as soon as they have them.
template <class Model, int rows, int cols, bool add_eights>
struct Msd {
    static constexpr int sum_width = std::bit_width(unsigned(rows * (add_eights ? 128 : 136) * 8)) + 1;
    Sim<Model> sim;
    Random random{43};

    // x: (n_tiles, n, rows), w: (n_tiles, rows, cols). Sums: (n_tiles, n, cols).
    std::vector<int> run(const std::vector<int>& x, const std::vector<int>& w, int n_tiles, bool pauses) {
        auto& top = sim.top;
        const int n = int(x.size()) / n_tiles / rows;
        std::vector<int> sums(size_t(n_tiles * n * cols)), next(cols, 0);
        int tile = -1, token = n, load_tile = 0, load_row = 0, remaining = n_tiles * n * cols;
        int64_t now = 0, start = -1, load_at = 0;
        sim.reset();
        for (int clocks = 0; remaining > 0; clocks++) {
            if (clocks == 1000 + 40 * n_tiles * (n + rows)) FAIL(remaining << " sums are missing");
            top.en_i = !(pauses && random.one_in(4));
            top.w_valid_i = top.x_valid_i = 0, top.x_first_i = random() & 1,
            top.w_row_i = uint8_t(random() % rows);
            const bool first_row = load_row == 0 && load_tile < n_tiles &&
                                   (load_tile == 0 || (tile == load_tile - 1 && now > start));
            const bool load = first_row || (load_row > 0 && load_row < rows);
            const bool begin = token == n && load_tile == tile + 1 && load_row > 0 && now > load_at;
            if (load) {
                top.w_valid_i = 1, top.w_row_i = uint8_t(load_row);
                for (int c = 0; c < cols; c++)
                    set_lane(top.w_i, c, 4, w[size_t((load_tile * rows + load_row) * cols + c)]);
            }
            if (begin || token < n) {
                const int of_tile = begin ? tile + 1 : tile, t = begin ? 0 : token;
                top.x_valid_i = 1, top.x_first_i = begin;
                for (int r = 0; r < rows; r++)
                    set_lane(top.x_i, r, 8, x[size_t((of_tile * n + t) * rows + r)]);
            }
            const bool moved = top.en_i;
            const bool token_came = top.x_valid_i;
            // While it stands still no input counts.
            if (!moved) {
                top.w_valid_i = top.x_valid_i = top.x_first_i = 1, top.w_row_i = uint8_t(random() % rows);
                for (int c = 0; c < cols; c++) set_lane(top.w_i, c, 4, int(random()));
            }
            sim.tick();
            if (!moved) continue;
            if (token_came) {
                if (begin) tile++, token = 0, start = now;
                token++;
            }
            if (load) {
                if (load_row == 0) load_at = now;
                load_row++;
            }
            // The loader goes on when the tile whose rows it has loaded has begun.
            if (load_row == rows && tile == load_tile) load_tile++, load_row = 0;
            now++;
            for (int c = 0; c < cols; c++) {
                if (!(top.sum_valid_o >> c & 1)) continue;
                REQUIRE(next[c] < n_tiles * n);
                sums[size_t(next[c] * cols + c)] = lane(top.sum_o, c, sum_width);
                next[c]++, remaining--;
            }
        }
        return sums;
    }
};

static int64_t exact(const std::vector<int>& x, const std::vector<int>& w, int rows, int cols, int n,
                     int tile, int t, int c, bool eights) {
    int64_t sum = 0;
    for (int r = 0; r < rows; r++)
        sum += int64_t(x[size_t((tile * n + t) * rows + r)] - (eights ? 0 : 8)) *
               w[size_t((tile * rows + r) * cols + c)];
    return sum;
}

template <class Model, int rows, int cols, bool add_eights>
static void check_random() {
    for (const bool pauses : {false, true}) {
        for (const int n : {1, 3, rows, 2 * rows + 1}) {
            for (const bool extreme : {false, true}) {
                Msd<Model, rows, cols, add_eights> msd;
                Random random(47);
                const int n_tiles = 5;
                std::vector<int> x(size_t(n_tiles * n * rows)), w(size_t(n_tiles * rows * cols));
                for (int& v : x) v = extreme ? (random() & 1 ? -128 : 127) : random.in(-128, 127);
                for (int& v : w) v = extreme ? -8 : random.in(-8, 7);
                if (extreme)
                    for (int r = 0; r < rows; r++) x[size_t(r)] = -128;
                const std::vector<int> sums = msd.run(x, w, n_tiles, pauses);
                int wrong = 0;
                for (int tile = 0; tile < n_tiles; tile++)
                    for (int t = 0; t < n; t++)
                        for (int c = 0; c < cols; c++)
                            wrong += sums[size_t((tile * n + t) * cols + c)] !=
                                     exact(x, w, rows, cols, n, tile, t, c, add_eights);
                CHECK(wrong == 0);
            }
        }
    }
}
TEST_CASE("msd_array: random and extreme") {
    check_random<Vmsd_array_16x16, 16, 16, true>();
    check_random<Vmsd_array_4x3, 4, 3, true>();
    check_random<Vmsd_array_5x2, 5, 2, false>();
}

// A reset while a token is on its way: no sum comes afterwards.
TEST_CASE("msd_array: reset in the middle") {
    Sim<Vmsd_array_4x3> sim;
    for (int before = 1; before < 12; before++) {
        sim.top.x_valid_i = sim.top.x_first_i = 1;
        for (int i = 0; i < before; i++) sim.tick();
        sim.top.x_valid_i = 0;
        sim.reset(1);
        for (int i = 0; i < 12; i++) {
            CHECK(int(sim.top.sum_valid_o) == 0);
            sim.tick();
        }
    }
}

// A8W4's vectors, expert by expert. parts(): what an array of digits makes of an expert's tokens.
struct A8w4 {
    std::string name;
    std::vector<int> w_shape = op_shape(name + ".weight.codes");  // experts, outputs, inputs
    std::vector<int64_t> x = op(name + ".x.codes"), w = op(name + ".weight.codes"),
                         ends = op(name + ".group_list");
    int n_experts = w_shape[0], n_out = w_shape[1], k = w_shape[2];

    // (n_out / cols * k / rows, n, cols): tile after tile, the inputs' within those of the outputs.
    template <class Model, int rows, int cols, bool add_eights>
    std::vector<int> parts(int e, int begin, int n) const {
        std::vector<int> tiles_x, tiles_w;
        for (int o = 0; o < n_out; o += cols) {
            for (int i = 0; i < k; i += rows) {
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < rows; r++) tiles_x.push_back(int(x[size_t((begin + t) * k + i + r)]));
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < cols; c++)
                        tiles_w.push_back(int(w[size_t((e * n_out + o + c) * k + i + r)]));
            }
        }
        return Msd<Model, rows, cols, add_eights>().run(tiles_x, tiles_w, n_out / cols * (k / rows),
                                                        e % 2 == 0);
    }
    // Of token t of n, output o, and the passes of a group: parts of that shape, added up.
    int64_t group_sum(const std::vector<int>& parts, int rows, int cols, int n, int t, int o, int g,
                      int per_group) const {
        int64_t sum = 0;
        for (int p = g * per_group; p < (g + 1) * per_group; p++)
            sum += parts[size_t(((o / cols * (k / rows) + p) * n + t) * cols + o % cols)];
        return sum;
    }
};

// The int32 sums of every group and expert.
TEST_CASE("msd_array: golden sums of A8W4") {
    for (const std::string& name : op_cases("grouped_a8w4.", "sums")) {
        INFO(name);
        const A8w4 v{name};
        const std::vector<int64_t> sums = op(name + ".sums");
        const int groups = op_shape(name + ".sums")[2], per_group = v.k / 16 / groups;
        int begin = 0, wrong = 0;
        for (int e = 0; e < v.n_experts; begin = int(v.ends[size_t(e)]), e++) {
            const int n = int(v.ends[size_t(e)]) - begin;
            if (n == 0) continue;
            const std::vector<int> parts = v.parts<Vmsd_array_16x16, 16, 16, true>(e, begin, n);
            for (int t = 0; t < n; t++)
                for (int o = 0; o < v.n_out; o++)
                    for (int g = 0; g < groups; g++)
                        wrong += v.group_sum(parts, 16, 16, n, t, o, g, per_group) !=
                                 sums[size_t(((begin + t) * v.n_out + o) * groups + g)];
        }
        CHECK(wrong == 0);
    }
}

// Digits alone, groups scaled and added up by group_scaler, then the assist matrix and x's scale: bit by bit
// what dot_by_digits of runq_moe.cpp has, and near the golden product.
TEST_CASE("A8W4 in fp32: digits, scaler, assist matrix") {
    Sim<Vgroup_scaler> scaler;
    Sim<Vfp32_add> add;
    Sim<Vfp32_mul> mul;
    scaler.reset();
    const auto scaled = [&](int64_t sum, uint32_t w_scale, uint32_t running) {
        auto& top = scaler.top;
        top.acc_i = uint32_t(sum), top.w_scale_i = w_scale, top.x_scale_i = bits_of(1), top.valid_i = 1;
        top.sum_i = running;
        scaler.tick();
        top.valid_i = 0;
        for (int clocks = 1; !top.valid_o; clocks++) {
            REQUIRE(clocks < 40);
            scaler.tick();
        }
        return uint32_t(top.sum_o);
    };
    for (const std::string& name : op_cases("grouped_a8w4.", "sums")) {
        INFO(name);
        const A8w4 v{name};
        const std::vector<int64_t> w_scales = op(name + ".weight.scales"), x_scales = op(name + ".x.scales"),
                                   assist = op(name + ".assist"), product = op(name + ".product");
        const int groups = op_shape(name + ".weight.scales")[2], per_group = v.k / 8 / groups;
        int begin = 0, wrong = 0, far = 0;
        for (int e = 0; e < v.n_experts; begin = int(v.ends[size_t(e)]), e++) {
            const int n = int(v.ends[size_t(e)]) - begin;
            if (n == 0) continue;
            const std::vector<int> parts = v.parts<Vmsd_array_8x4, 8, 4, false>(e, begin, n);
            for (int t = 0; t < n; t++) {
                for (int o = 0; o < v.n_out; o++) {
                    const size_t row = size_t(e * v.n_out + o);
                    uint32_t rtl = 0;
                    float plain = 0;
                    for (int g = 0; g < groups; g++) {
                        const int64_t sum = v.group_sum(parts, 8, 4, n, t, o, g, per_group);
                        const uint32_t w_scale = uint32_t(w_scales[row * size_t(groups) + size_t(g)]);
                        rtl = scaled(sum, w_scale, rtl);
                        plain = std::fma(float(sum), float_of(w_scale), plain);
                    }
                    const uint32_t x_scale = uint32_t(x_scales[size_t(begin + t)]);
                    add.top.a_i = rtl, add.top.b_i = uint32_t(assist[row]);
                    for (int i = 0; i < 6; i++) add.tick();
                    mul.top.a_i = add.top.s_o, mul.top.b_i = x_scale;
                    for (int i = 0; i < 5; i++) mul.tick();
                    plain = (plain + float_of(uint32_t(assist[row]))) * float_of(x_scale);
                    wrong += mul.top.p_o != bits_of(plain);
                    const float golden = float_of(uint32_t(product[size_t((begin + t) * v.n_out + o)]));
                    far += std::fabs(plain - golden) > 1e-4f * (1 + std::fabs(golden));
                }
            }
        }
        CHECK(wrong == 0);
        CHECK(far == 0);
    }
}
