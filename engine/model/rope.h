// Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): the angles. Rotating is each program's, or
// engine/cpu/ops.h's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "engine/model/config.h"

// Radians per position of each pair, theta^(-2i / head_dim), (head_dim / 2,) fp32. Llama 3.1 and later divide
// the frequencies of long wavelengths by `factor`, leave short wavelengths alone and blend in between. The
// frequencies are the same at every position; at position 0 every angle is 0.
inline std::vector<float> rope_frequencies(const ModelConfig& c) {
    std::vector<float> freq(size_t(c.head_dim) / 2);
    for (size_t i = 0; i < freq.size(); i++) {
        double f = std::pow(double(c.rope_theta), -2.0 * double(i) / c.head_dim);
        if (const RopeScaling& s = c.rope_scaling; s.llama3) {
            // Turns within the context that the model was first trained on.
            const double turns = s.original_max_position_embeddings * f / (2 * std::numbers::pi);
            const double low = s.low_freq_factor, high = s.high_freq_factor;
            const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
            f = (1 - smooth) * f / s.factor + smooth * f;
        }
        freq[i] = float(f);
    }
    return freq;
}

// cos and sin of the angle of a pair at a position, computed in fp64 and rounded once.
struct Rotation {
    float cos, sin;
};
inline Rotation rotation(int pos, float frequency) {
    const double angle = double(pos) * frequency;
    return {float(std::cos(angle)), float(std::sin(angle))};
}
