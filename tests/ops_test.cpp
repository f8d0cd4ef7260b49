// The operations between matrix products, against the golden vectors.
#include "engine/cpu/ops.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "engine/cpu/vector.h"
#include "golden.h"

namespace {

Rows rows_of(const std::vector<float>& values, int n_rows) {
    Rows rows(n_rows, int(values.size()) / n_rows);
    rows.values = values;
    rows.n_rows = n_rows;
    return rows;
}

}  // namespace

TEST_CASE("rmsnorm: rows, and runs of a row") {
    for (const auto& [name, eps] : {std::pair{"128eps1e-05", 1e-5f},
                                    {"128eps1e-06", 1e-6f},
                                    {"2048eps1e-05", 1e-5f},
                                    {"2048eps1e-06", 1e-6f},
                                    {"limits", 1e-5f}}) {
        const std::string p = std::string("rmsnorm.") + name + ".";
        CAPTURE(p);
        const std::vector<float> weight = golden_ops().at(p + "weight").f32();
        const int n_rows = golden_ops().at(p + "x").shape[0], n = int(weight.size());
        const Rows x = rows_of(golden_ops().at(p + "x").f32(), n_rows);
        Rows out(size_t(n_rows), n);
        rmsnorm(out, x, weight.data(), n, eps);
        CHECK(out.n_rows == n_rows);
        CHECK(golden_ops().at(p + "out").f32() == out.values);  // rounded once: the same bits
        Rows heads = rows_of(x.values, 1);                      // one token with as many heads, in place
        rmsnorm(heads, heads, weight.data(), n, eps);
        CHECK(heads.values == out.values);
    }
}

TEST_CASE("rope: frequencies with and without rescaling, angles, and the rotation") {
    struct Case {
        const char* name;
        int head_dim;
        float theta;
        int rope_type, original_max_position;
        float factor, low, high, attention;
    };
    for (const Case& k :
         {Case{"plain", 64, 500000, 0, 0, 1, 1, 4, 1}, Case{"llama-3.2-1b", 64, 500000, 1, 8192, 32, 1, 4, 1},
          Case{"tiny", 32, 1000000, 1, 128, 8, 1, 4, 1},
          Case{"linear", 128, 1000000, 2, 8192, 2, 128, 129, 1},
          Case{"yarn", 128, 1000000, 3, 32768, 4, 88, 105, float(0.1 * std::log(4.0) + 1)}}) {
        const std::string p = std::string("rope.") + k.name + ".";
        CAPTURE(p);
        const std::vector<int32_t> positions = golden_ops().at(p + "positions").i32();
        ModelConfig c;
        c.head_dim = k.head_dim;
        c.rope_theta = k.theta;
        c.rope_type = k.rope_type, c.original_max_position = k.original_max_position;
        c.rope_factor = k.factor, c.low_freq_factor = k.low, c.high_freq_factor = k.high;
        c.attention_factor = k.attention;
        CHECK(golden_ops().at(p + "frequencies").f32() == rope_frequencies(c));

        const int n = int(positions.size()), half = k.head_dim / 2;
        RopeAngles angles(c, n);
        std::vector<float> cos, sin, out;
        const std::vector<float> x = golden_ops().at(p + "x").f32();  // (positions, 2 heads, head_dim)
        for (int i = 0; i < n; i++) {
            angles.set_positions(positions[i], 1);
            cos.insert(cos.end(), angles.cos.row(0), angles.cos.row(0) + half);
            sin.insert(sin.end(), angles.sin.row(0), angles.sin.row(0) + half);
            Rows heads = rows_of({x.begin() + i * 4 * half, x.begin() + (i + 1) * 4 * half}, 1);
            rope(heads, angles, k.head_dim);
            out.insert(out.end(), heads.values.begin(), heads.values.end());
        }
        CHECK(relative_error(golden_ops().at(p + "cos").f32(), cos) < 1e-7);
        CHECK(relative_error(golden_ops().at(p + "sin").f32(), sin) < 1e-7);
        CHECK(relative_error(golden_ops().at(p + "out").f32(), out) < 1e-6);
        // Several tokens at once are each at their own position.
        Rows two = rows_of(std::vector<float>(4 * size_t(half), 1.0f), 2), one = rows_of(two.values, 2);
        angles.set_positions(127, 2);
        rope(two, angles, k.head_dim);
        for (int t = 0; t < 2; t++) {
            angles.set_positions(127 + t, 1);
            rope(one.row(t), angles.cos.row(0), angles.sin.row(0), k.head_dim);
        }
        CHECK(two.values == one.values);
    }
}

TEST_CASE("swiglu: gates from -87 to -1, each of which counts") {
    const std::vector<float> gate = golden_ops().at("swiglu.slope.gate").f32(),
                             up = golden_ops().at("swiglu.slope.up").f32();
    std::vector<float> out(gate.size());
    swiglu(out.data(), gate.data(), up.data(), int(gate.size()));
    CHECK(relative_error(golden_ops().at("swiglu.slope.out").f32(), out) < 1e-6);
}

TEST_CASE("swiglu") {
    const std::vector<float> gate = golden_ops().at("swiglu.gate").f32(),
                             up = golden_ops().at("swiglu.up").f32();
    std::vector<float> out(gate.size());
    swiglu(out.data(), gate.data(), up.data(), int(gate.size()));
    CHECK(relative_error(golden_ops().at("swiglu.out").f32(), out) < 1e-6);
    Rows many(1, 2500), all_up(1, 2500);  // more than a thread takes at once
    many.n_rows = all_up.n_rows = 1;
    for (int i = 0; i < 2500; i++)
        many.values[i] = gate[i % gate.size()], all_up.values[i] = up[i % up.size()];
    swiglu(many, many, all_up);
    for (int i = 0; i < 2500; i++)
        CHECK(many.values[i] == doctest::Approx(out[i % out.size()]).epsilon(1e-6));
}

TEST_CASE("vectors: a NaN stays one, whatever its other bits, and leaves the lanes beside it alone") {
    std::vector<uint32_t> nans = {0x7fc00001, 0xffc00080, 0x7fffffff, 0xffffffff, 0x7fc00000, 0x7f800001};
    for (int bit = 0; bit < 23; bit++)
        for (const uint32_t sign : {0u, 0x80000000u}) nans.push_back(sign | 0x7f800000u | 1u << bit);
    for (const uint32_t bits : nans) {
        CAPTURE(bits);
        const auto nan = std::bit_cast<float>(bits);
        float row[vector_lanes], back[vector_lanes];
        for (int i = 0; i < vector_lanes; i++) row[i] = i % 2 == 1 ? nan : float(i);
        store(back, load(row));
        CHECK(std::memcmp(row, back, sizeof row) == 0);
        CHECK(std::isnan(splat(nan)[vector_lanes - 1]));
        CHECK(std::isnan(add_lanes(load(row))));
        store(back, exp(load(row)));
        for (int i = 0; i < vector_lanes; i++) {
            if (i % 2 == 1) CHECK(std::isnan(back[i]));
            if (i % 2 == 0) CHECK(back[i] == doctest::Approx(std::exp(double(i))).epsilon(1e-6));
        }
        std::vector<float> scores(size_t(padded(5)), 1.0f);
        scores[3] = nan;
        softmax(scores.data(), 5);
        for (int i = 0; i < 5; i++) CHECK(std::isnan(scores[i]));
        const std::vector<float> ones(vector_lanes + 1, 1.0f), gate(vector_lanes + 1, nan);
        std::vector<float> swished(vector_lanes + 1);
        swiglu(swished.data(), gate.data(), ones.data(), vector_lanes + 1);
        for (const float x : swished) CHECK(std::isnan(x));
    }
}

TEST_CASE("add, and the last rows of a chunk") {
    Rows x = rows_of({1, 2, 3, 4, 5, 6}, 3);
    add(x, rows_of({10, 20, 30, 40, 50, 60}, 3));
    CHECK(x.values == std::vector<float>{11, 22, 33, 44, 55, 66});
    x.keep_last(2);
    CHECK(x.n_rows == 2);
    CHECK(std::vector<float>(x.row(0), x.row(2)) == std::vector<float>{33, 44, 55, 66});
    x.reserve(5);
    CHECK(x.values.size() == 10);
    CHECK(x.row(1)[1] == 66);
}
