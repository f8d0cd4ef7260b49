// A product with all that goes into it, drawn at random, for the tests of the core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "hw/sim/matmul_rtl.h"

// Activations, a matrix, and their product as `out` of golden/passes.py has it.
struct Case {
    int n_tokens, n_rows, n_cols, group_size;
    std::vector<int8_t> x, w;               // (n_tokens, n_cols), (n_rows, n_cols)
    std::vector<float> x_scales, w_scales;  // a scale per group
    std::vector<float> out;                 // (n_tokens, n_rows)

    RtlFormat format;
    std::vector<int8_t> codes;  // of w, as pack() takes them
    std::vector<uint8_t> zeros;

    // A group that is shorter than a row of cells becomes one as long. Numbers are drawn; at the extremes,
    // tokens and outputs with even numbers have the lowest throughout, and those with odd numbers the
    // highest.
    Case(int tokens, int rows, int cols, int group, uint32_t seed, RtlFormat f = RtlFormat::int8,
         bool extremes = false)
        : n_tokens(tokens), n_rows(rows), format(f) {
        static const int least = MatmulRtl().rows;
        group = group_size = std::max(group, least), cols = n_cols = std::max(cols, least);
        std::mt19937 random(seed);
        // Rows of such codes; every seventh is the lowest.
        auto draw = [&](int n, int lowest, int highest) {
            std::vector<int8_t> c;
            for (int row = 0; row < n; row++) {
                for (int k = 0; k < cols; k++) {
                    const int any =
                        random() % 7 == 0 ? lowest : lowest + int(random() % uint32_t(highest - lowest + 1));
                    c.push_back(int8_t(!extremes ? any : row % 2 == 0 ? lowest : highest));
                }
            }
            return c;
        };
        auto scales = [&](size_t n) {
            std::vector<float> s(n);
            for (float& v : s) v = std::ldexp(float(random() % 8388608 + 1), int(random() % 12) - 30);
            return s;
        };
        const size_t groups = size_t(cols / group);
        x = draw(tokens, -128, 127);
        const int highest = f == RtlFormat::int8 ? 127 : f == RtlFormat::four_bits ? 15 : 3;
        codes = draw(rows, f == RtlFormat::int8 ? -128 : 0, highest);
        for (size_t i = 0; i < size_t(rows) * groups; i++) {
            const uint32_t any = random() % 16, extreme = i / groups % 2 == 0 ? 15 : 0;
            zeros.push_back(f == RtlFormat::int8 ? 0 : uint8_t(extremes ? extreme : any));
        }
        for (size_t i = 0; i < codes.size(); i++)
            w.push_back(int8_t((f == RtlFormat::two_level ? 5 : 1) * codes[i] - zeros[i / size_t(group)]));
        x_scales = scales(size_t(tokens) * groups), w_scales = scales(size_t(rows) * groups);
        multiply();
    }

    // out = x times w transposed.
    void multiply() {
        const int tokens = n_tokens, rows = n_rows, cols = n_cols, group = group_size;
        const size_t groups = size_t(cols / group);
        out.clear();
        for (int t = 0; t < tokens; t++) {
            for (int i = 0; i < rows; i++) {
                float sum = 0;
                for (size_t g = 0; g < groups; g++) {
                    int32_t acc = 0;
                    for (int k = int(g) * group; k < int(g + 1) * group; k++)
                        acc += x[size_t(t * cols + k)] * w[size_t(i * cols + k)];
                    const float scale = w_scales[size_t(i) * groups + g] * x_scales[size_t(t) * groups + g];
                    sum = std::fma(float(acc), scale, sum);
                }
                out.push_back(sum);
            }
        }
    }
};
