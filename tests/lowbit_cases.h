// Matrices of 2 to 8 bits to test with: made from codes and zero points, and packed by rules of their
// own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/half.h"
#include "engine/cpu/quant_matrix.h"
#include "int8_cases.h"

// How a matrix is stored, as a program's MatrixFormat says it.
struct LowbitFormat {
    uint8_t bits;    // of a code: 2, 4, 5, 6 or 8
    uint8_t flags;   // one of those below, or 0
    uint16_t group;  // weights along a row that share a scale; 0: the whole row

    static constexpr uint8_t sparse_flag = 1, two_level_flag = 2, int8_scales_flag = 4;

    bool sparse() const { return flags == sparse_flag; }
    bool two_level() const { return flags == two_level_flag; }
    bool int8_scales() const { return flags == int8_scales_flag; }
    bool has_table() const { return int8_scales() && bits <= 5; }
};

inline std::string format_text(const LowbitFormat& f) {
    return std::to_string(f.bits) + " bits, group " + std::to_string(f.group) + ", flags " +
           std::to_string(f.flags);
}

// A matrix with its memory, and what it expands to.
struct LowbitCase {
    std::vector<uint8_t> codes, mask, zeros, levels;
    std::vector<int8_t> table;
    std::vector<Half> scales;
    std::vector<float> row_scales;
    std::vector<int8_t> expanded;        // (n_rows, n_cols)
    std::vector<float> expanded_scales;  // (n_rows, n_cols / group_size)
    QuantMatrix shape{};                 // without the addresses

    QuantMatrix view() const {
        auto or_null = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
        QuantMatrix m = shape;
        m.codes = codes.data(), m.mask = or_null(mask), m.zeros = or_null(zeros), m.levels = or_null(levels);
        m.table = or_null(table);
        m.scales = scales.empty() ? static_cast<const void*>(row_scales.data()) : scales.data();
        return m;
    }
};

// Every format that a program runs.
inline std::vector<LowbitFormat> all_formats() {
    std::vector<LowbitFormat> all;
    for (const uint8_t bits : {8, 4, 2}) {
        for (const uint16_t group : {0, 32, 64, 128}) all.push_back({bits, 0, group});
    }
    all.push_back({2, LowbitFormat::two_level_flag, 64});
    all.push_back({4, LowbitFormat::sparse_flag, 64});
    all.push_back({4, LowbitFormat::sparse_flag, 128});
    for (const uint8_t bits : {4, 5, 6})
        for (const uint16_t group : {32, 64, 128})
            all.push_back({bits, LowbitFormat::int8_scales_flag, group});
    return all;
}

// The byte of a row in which code k of n lies, and the lowest of its bits.
inline std::pair<int, int> code_place(int k, int n, int bits) {
    const int per_byte = 8 / bits;
    int start = 0, block = 64;
    while (true) {
        while (n - start < block * per_byte) block /= 2;
        if (k < start + block * per_byte) break;
        start += block * per_byte;
    }
    return {start / per_byte + (k - start) % block, (k - start) / block * bits};
}

enum class LowbitFill { uniform, largest, smallest };  // of each code times -1, 0 or 1

// `exact`: scales are small whole numbers, so that outputs are integers.
inline LowbitCase make_lowbit(std::mt19937& rng, const LowbitFormat& f, int group_size, int n_rows,
                              int n_cols, LowbitFill fill, bool exact) {
    auto below = [&](int n) { return int(rng() % unsigned(n)); };
    LowbitCase m;
    QuantMatrix& s = m.shape;
    s.kind = f.sparse()      ? QUANT_GEMM_SPARSE
             : f.two_level() ? QUANT_GEMM_TWO_LEVEL
             : f.has_table() ? QUANT_GEMM_TABLE
             : f.bits == 8   ? QUANT_GEMM_SIGNED
                             : QUANT_GEMM_UNSIGNED;
    const bool per_row = f.two_level() || f.int8_scales() || (f.bits == 8 && f.group == 0);
    s.scale_type = f.int8_scales() ? QUANT_GEMM_GROUP_INT8
                   : per_row       ? QUANT_GEMM_ROW_FP32
                                   : QUANT_GEMM_GROUP_FP16;
    if (f.int8_scales() && !f.has_table()) s.zero_point = 32;
    s.bits = f.bits, s.n_rows = n_rows, s.n_cols = n_cols, s.group_size = group_size;
    s.group = f.group > 0 ? f.group : n_cols;
    const int n_groups = n_cols / s.group, n_codes = f.sparse() ? n_cols / 2 : n_cols;
    const int row_bytes = n_codes * f.bits / 8, largest = (1 << f.bits) - 1;
    m.codes.resize(size_t(n_rows) * row_bytes);
    if (f.sparse()) m.mask.resize(size_t(n_rows) * n_cols / 8);
    const bool has_zeros = f.bits < 8 && !f.two_level() && !f.int8_scales();
    if (f.has_table()) {  // -128 to 127
        for (int code = 0; code <= largest; code++) m.table.push_back(int8_t(code * 255 / largest - 128));
        std::shuffle(m.table.begin() + 1, m.table.end() - 1, rng);
    }
    if (has_zeros) m.zeros.resize(size_t(n_rows) * ((n_groups + 1) / 2));
    for (int i = 0; i < n_rows; i++) {
        std::vector<int> zero;
        std::vector<float> scale;
        const float row_scale = exact ? float(1 + below(2)) : 1e-4f * float(1 + below(1000));
        if (per_row) m.row_scales.push_back(row_scale);
        for (int g = 0; g < n_groups; g++) {
            const int top = f.two_level() ? 15 : largest;
            const int extremes[] = {below(top + 1), 0, top};
            zero.push_back(f.bits == 8 || f.has_table() ? 0 : f.int8_scales() ? 32 : extremes[int(fill)]);
            if (f.two_level()) {
                const int level = exact ? below(3) : below(16);
                m.levels.push_back(uint8_t(level | zero.back() << 4));
                scale.push_back(float(level) * row_scale);
            } else if (f.int8_scales()) {
                const int level = exact ? below(5) - 2 : below(255) - 127;
                m.levels.push_back(uint8_t(level));
                scale.push_back(float(level) * row_scale);
            } else if (f.bits == 8 && f.group == 0) {
                scale.push_back(row_scale);
            } else {
                // 0.5, 1, 2; or anything from 2^-11 on
                const auto bits = uint16_t(exact ? 0x3800 + 0x400 * below(3) : 0x1000 + below(0x1000));
                m.scales.push_back({bits});
                scale.push_back(std::ldexp(1.0f + float(bits & 1023) / 1024, (bits >> 10) - 15));
            }
            if (has_zeros)
                m.zeros[size_t(i) * ((n_groups + 1) / 2) + g / 2] |= uint8_t(zero.back() << g % 2 * 4);
        }
        for (int k = 0; k < n_cols; k += group_size) m.expanded_scales.push_back(scale[k / s.group]);
        int n_kept = 0;
        for (int k = 0; k < n_cols; k++) {
            static const std::pair<int, int> pairs[] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};
            static std::pair<int, int> kept;
            if (k % 4 == 0) kept = pairs[below(6)];
            if (f.sparse()) {
                if (k % 4 != kept.first && k % 4 != kept.second) {
                    m.expanded.push_back(0);
                    continue;
                }
                m.mask[(size_t(i) * n_cols + k) / 8] |= uint8_t(1 << k % 8);
            }
            const int extremes[] = {below(largest + 1), largest, 0};
            const int code = f.bits == 8 ? extremes[int(fill)] - 128 : extremes[int(fill)];
            const int low_bits = f.bits == 5 || f.bits == 6 ? 4 : f.bits, low = (1 << low_bits) - 1;
            const auto [byte, shift] = code_place(f.sparse() ? n_kept++ : k, n_codes, low_bits);
            uint8_t* row = m.codes.data() + size_t(i) * row_bytes;
            row[byte] |= uint8_t((code & low) << shift);
            if (low_bits < f.bits) {  // the plane behind
                const auto [high_byte, high_shift] = code_place(k, n_codes, f.bits - 4);
                row[n_codes / 2 + high_byte] |= uint8_t(code >> 4 << high_shift);
            }
            m.expanded.push_back(f.has_table() ? m.table[code]
                                               : int8_t((f.two_level() ? 5 : 1) * code - zero[k / s.group]));
        }
    }
    return m;
}

// The activations' group that goes with a format: a weight group is a whole number of them.
inline std::vector<int> group_sizes(const LowbitFormat& f) {
    if (f.group == 32) return {32};
    return {32, 64};
}

// The outputs by plain loops: of each group an exact accumulator, the groups first to last.
inline std::vector<float> plain_outputs(const QuantRows& x, const LowbitCase& w) {
    const int n_rows = w.shape.n_rows, n_cols = w.shape.n_cols, size = w.shape.group_size,
              groups = n_cols / size;
    std::vector<float> out;
    for (int t = 0; t < x.n_rows; t++) {
        for (int i = 0; i < n_rows; i++) {
            float sum = 0;
            for (int g = 0; g < groups; g++) {
                const int8_t* codes = &w.expanded[size_t(i) * n_cols + size_t(g * size)];
                const int32_t acc = reference_accumulator(row_codes(x, t) + g * size, codes, size);
                const float scale = w.expanded_scales[size_t(i) * groups + g] * row_scales(x, t)[g];
                sum = std::fma(float(acc), scale, sum);
            }
            out.push_back(sum);
        }
    }
    return out;
}
