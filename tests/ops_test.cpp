// What kernels are made of, and rows.
#include "engine/cpu/vector.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "engine/cpu/rows.h"
#include "golden.h"

TEST_CASE("swiglu: gates from -87 to -1, each of which counts, and 300 gates") {
    for (const std::string name : {"swiglu.slope", "swiglu.wide"}) {
        CAPTURE(name);
        const std::vector<float> gate = golden_ops().at(name + ".gate").f32(),
                                 up = golden_ops().at(name + ".up").f32();
        std::vector<float> out(gate.size());
        swiglu(out.data(), gate.data(), up.data(), int(gate.size()));
        CHECK(out == golden_ops().at(name + ".out").f32());
    }
}

TEST_CASE("swiglu") {
    const std::vector<float> gate = golden_ops().at("swiglu.gate").f32(),
                             up = golden_ops().at("swiglu.up").f32();
    std::vector<float> out(gate.size());
    swiglu(out.data(), gate.data(), up.data(), int(gate.size()));
    CHECK(out == golden_ops().at("swiglu.out").f32());
    std::vector<float> many, all_up;  // in place, and no whole number of vectors
    for (size_t i = 0; i < 2501; i++)
        many.push_back(gate[i % gate.size()]), all_up.push_back(up[i % up.size()]);
    swiglu(many.data(), many.data(), all_up.data(), 2501);
    for (size_t i = 0; i < many.size(); i++)
        CHECK(many[i] == doctest::Approx(out[i % out.size()]).epsilon(1e-6));
}

TEST_CASE("fused_multiply_add and exp: each lane to the bit, also by doubles, also of equal lanes") {
    std::mt19937 rng(2);
    const auto number = [&] {
        const uint32_t bits = (uint32_t(rng()) & 0x807fffff) | (90 + uint32_t(rng()) % 70) << 23;
        return std::bit_cast<float>(bits);
    };
    for (int trial = 0; trial < 100000; trial++) {
        float a[vector_lanes], b[vector_lanes], c[vector_lanes], found[vector_lanes];
        for (int i = 0; i < vector_lanes; i++) {
            a[i] = number(), b[i] = number(), c[i] = std::ldexp(a[i] * b[i], int(rng() % 60) - 30);
            if (rng() % 2 == 0) c[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(c[i]) & 0xffffff00);
        }
        if (trial % 2 == 0) std::fill_n(a, vector_lanes, a[0]), std::fill_n(b, vector_lanes, b[0]);
        if (trial % 2 == 0) std::fill_n(c, vector_lanes, c[0]);
        store(found, fused_multiply_add(load(a), load(b), load(c)));
        for (int i = 0; i < vector_lanes; i++) {
            CHECK(found[i] == std::fma(a[i], b[i], c[i]));
            CHECK(fused_by_doubles(a[i], b[i], c[i]) == std::fma(a[i], b[i], c[i]));
        }
        const float x = -float(rng() % 88) + float(rng() % 1000000) * 1e-6f;
        const Floats e = exp(splat(x));
        for (int i = 1; i < vector_lanes; i++) CHECK(e[i] == e[0]);
    }
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

TEST_CASE("rows: the last of a chunk, and room for more") {
    Rows x(3, 2);
    x.values = {11, 22, 33, 44, 55, 66};
    x.n_rows = 3;
    x.keep_last(2);
    CHECK(x.n_rows == 2);
    CHECK(std::vector<float>(x.row(0), x.row(2)) == std::vector<float>{33, 44, 55, 66});
    x.reserve(5);
    CHECK(x.values.size() == 10);
    CHECK(x.row(1)[1] == 66);
}
