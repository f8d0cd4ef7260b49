// The golden vectors as the tests read them, and inputs that several tests make.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "safetensors.h"

// Each operation alone.
inline const Tensors& golden_ops() {
    static const Tensors ops = read_safetensors("golden/data/ops.safetensors");
    return ops;
}

// The table of the op vectors that has a rule in place of bytes: docs/numerics.md gives it. Rows of 64
// columns.
struct GoldenTable {
    static constexpr int n_rows = 70001, n_cols = 64;
    int group_size;
    std::vector<int8_t> codes = std::vector<int8_t>(size_t(n_rows) * n_cols);
    std::vector<float> scales = std::vector<float>(size_t(n_rows) * n_cols / group_size);

    explicit GoldenTable(int group) : group_size(group) {
        for (int64_t row = 0; row < n_rows; row++) {
            for (int64_t i = 0; i < n_cols; i++)
                codes[size_t(row * n_cols + i)] = int8_t((7919 * row + 104729 * i) % 255 - 127);
            const int64_t n_groups = n_cols / group;
            for (int64_t g = 0; g < n_groups; g++)
                scales[size_t(row * n_groups + g)] = float(1 + (31 * row + 17 * g) % 10007) / 1048576;
        }
    }
};

// Whether two arrays of floats are equal to the bit.
inline bool same_bits(std::span<const float> a, std::span<const float> b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// x (n,) becomes exp(x - max) / sum of the same, as the contract has it: by plain loops. exp: the contract's,
// which has a test of its own.
inline void reference_softmax(std::vector<float>& x, float (*exp)(float)) {
    const float max = *std::max_element(x.begin(), x.end());
    float sums[16] = {}, sum = 0;
    for (size_t i = 0; i < x.size(); i++) sums[i % 16] += x[i] = exp(x[i] - max);
    for (const float part : sums) sum += part;
    for (float& value : x) value *= 1.0f / sum;
}

// Whether sweeps that `make test` does in part are to be done whole: FULL=1, which `make test-all` sets.
inline bool full_sweeps() {
    const char* full = std::getenv("FULL");
    return full != nullptr && *full != '\0' && std::string(full) != "0";
}

inline std::vector<float> random_values(std::mt19937& rng, size_t n, float size = 1) {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> values(n);
    for (float& v : values) v = normal(rng);
    return values;
}
