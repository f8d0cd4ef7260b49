// As program.h, for a program that has attention in int8, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/cpu/attention_int8.h"
#include "engine/program.h"

// A Recorder that knows what attention in int8 makes, too.
struct AttentionRecorder : Recorder {
    using Recorder::Recorder;
    using Recorder::operator();
    // Quantized heads: NAME.q (n_tokens, heads, head_dim) and NAME.s (n_tokens, heads, 1).
    void operator()(const std::string& name, const Int8Rows& x, int head_dim) const {
        const int n_heads = x.n_cols / head_dim;
        (*this)(name + ".q", x.codes.data(), x.n_rows, {n_heads, head_dim});
        (*this)(name + ".s", x.scales.data(), x.n_rows, {n_heads, 1});
    }
    // The weights of positions, their codes, NAME.q, and scales, NAME.s (n_tokens, n_heads, 1): quantized
    // once more, as kernels keep none.
    void operator()(const std::string& name, const Int8Attention& a) const {
        const HeadScores& x = a.weights;
        (*this)(name, x);
        if (!*this) return;
        std::vector<int8_t> codes(x.values.size());
        std::vector<float> scales(size_t(x.n_tokens) * size_t(x.n_heads));
        for (size_t i = 0; i < scales.size(); i++) {
            const float* row = x.values.data() + i * x.width;
            int32_t sum;
            quantize_groups(codes.data() + i * x.width, &scales[i], &sum, row, int(x.width), int(x.width));
            if (!all_finite(row, x.width)) scales[i] = std::numeric_limits<float>::quiet_NaN();
        }
        seen(name + ".q", x, codes.data());
        (*this)(name + ".s", scales.data(), x.n_tokens, {x.n_heads, 1});
    }
};
