// Int8 matrices and activations to test with, and the plain arithmetic that every path has to give.
//
// reference_quantize and reference_accumulator are what the plain loops of runq.cpp and runq_w8a8.cpp
// specify; the tests of these programs hold their loops to the same golden vectors and to the fast paths.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#ifdef ENGINE
#include "engine/cpu/quant_matrix.h"
#endif
#include "golden.h"

// codes and scales of x (n,), groups of group_size; under fixed_scale if that is not null.
inline void reference_quantize(int8_t* codes, float* scales, const float* x, int n, int group_size,
                               const float* fixed_scale = nullptr) {
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float amax = 0;
        for (int i = 0; i < group_size; i++) amax = std::max(amax, std::fabs(xg[i]));
        float inv = fixed_scale != nullptr ? 1.0f / *fixed_scale : 127.0f / amax;
        if (!(inv > 0 && inv <= std::numeric_limits<float>::max())) inv = 0;
        scales[g] = fixed_scale != nullptr ? *fixed_scale : inv > 0 ? amax / 127.0f : 0.0f;
        for (int i = 0; i < group_size; i++) {
            const float r = std::nearbyint(xg[i] * inv);
            codes[g * group_size + i] = int8_t(!(r > -127) ? -127 : r > 127 ? 127 : r);
        }
    }
}

// Sum of x[i] * w[i], exact.
inline int32_t reference_accumulator(const int8_t* x, const int8_t* w, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += int64_t{x[i]} * w[i];
    return int32_t(sum);
}

// How to fill a matrix. A product of two extremes is the largest that an accumulator has to hold.
enum Fill { uniform, zeros, all_127, all_minus_127, alternating, zero_groups, all_minus_128 };
constexpr Fill activation_fills[] = {uniform, zeros, all_127, all_minus_127, alternating, zero_groups};
// -128 is none of our codes, but a foreign file may hold it in its weights.
constexpr Fill weight_fills[] = {uniform,     zeros,       all_127,      all_minus_127,
                                 alternating, zero_groups, all_minus_128};

// A quantized matrix with its memory. The codes start at an odd address: no alignment is promised.
struct Matrix {
    std::vector<int8_t> codes;  // one in front, then (n_rows, n_cols)
    std::vector<float> scales;
    std::vector<int32_t> sums;
    int n_rows, n_cols, group_size;

    int n_groups() const { return n_cols / group_size; }
    const int8_t* row_codes(int i) const { return codes.data() + 1 + size_t(i) * n_cols; }
    const float* row_scales(int i) const { return scales.data() + size_t(i) * n_groups(); }

#ifdef ENGINE
    // n rows from `first` on, as activations and as weights.
    QuantRows rows(int first, int n) const {
        const int32_t* first_sums = sums.data() + size_t(first) * n_groups();
        return {row_codes(first), row_scales(first), first_sums, n, n_cols, group_size};
    }
    QuantRows rows() const { return rows(0, n_rows); }
    QuantMatrix weights(int first, int n) const {
        return int8_matrix(row_codes(first), row_scales(first), n, n_cols, group_size);
    }
    QuantMatrix weights() const { return weights(0, n_rows); }
#endif
};

inline Matrix make_matrix(const std::vector<int8_t>& codes, const std::vector<float>& scales, int n_rows,
                          int n_cols, int group_size) {
    Matrix m{{0}, scales, {}, n_rows, n_cols, group_size};
    m.codes.insert(m.codes.end(), codes.begin(), codes.end());
    for (size_t i = 0; i < codes.size(); i += group_size) {
        int32_t sum = 0;
        for (int j = 0; j < group_size; j++) sum += codes[i + j];
        m.sums.push_back(sum);
    }
    return m;
}

// Codes as `fill` says and scales of 1, so that outputs are integers; or random scales about 0.01.
inline Matrix filled_matrix(std::mt19937& rng, Fill fill, bool random_scales, int n_rows, int n_cols,
                            int group_size) {
    std::uniform_int_distribution<int> code(-127, 127);
    std::vector<int8_t> codes(size_t(n_rows) * n_cols);
    for (size_t i = 0; i < codes.size(); i++) {
        const int fills[] = {code(rng), 0, 127, -127, i % 2 ? 127 : -127, i / group_size % 2 ? 0 : code(rng),
                             -128};
        codes[i] = static_cast<int8_t>(fills[fill]);
    }
    const size_t n_groups = codes.size() / group_size;
    std::vector<float> scales = random_values(rng, n_groups, 0.01f);
    if (!random_scales) scales.assign(n_groups, 1);
    return make_matrix(codes, scales, n_rows, n_cols, group_size);
}

// Eight groups of values on which quantizers differ first: ties, zeros, infinities, NaN, tiny and huge ones.
inline std::vector<float> awkward_groups(std::mt19937& rng, int trial, int group_size) {
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> x = random_values(rng, 8 * group_size, std::pow(10.0f, float(trial % 70) - 35));
    auto group = [&](int g) { return x.begin() + g * group_size; };
    // Values that lie exactly between two codes: amax is a power of two times 127.
    for (int i = 0; i < group_size; i++) x[i] = (i == 7 ? 127.0f : float(i % 41) - 20.5f) * 0.25f;
    const int place = trial / 4 % group_size;  // every lane of a vector gets its turn
    if (trial % 5 == 0) std::fill(group(1), group(2), 0.0f);
    if (trial % 7 == 0) group(2)[place] = trial % 2 ? infinity : -infinity;
    if (trial % 3 == 0) group(3)[place] = std::numeric_limits<float>::quiet_NaN();
    if (trial % 13 == 0) std::fill(group(4), group(5), 1e-38f);
    if (trial % 3 == 1) std::fill(group(5), group(6), std::numeric_limits<float>::quiet_NaN());
    if (trial % 3 == 2) group(6)[place] = std::numeric_limits<float>::signaling_NaN();
    if (trial % 2 == 0) group(7)[place] = std::numeric_limits<float>::max();
    return x;
}
