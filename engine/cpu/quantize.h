// Quantizing fp32 to int8: the rule for a scale, the plain loop for values under one, and rows by the best
// instructions of this build. The programs' plain loops specify it; codes, scales and sums are the same to
// the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/cpu/instructions.h"
#include "engine/cpu/int8.h"

// to[i * stride] = the code of x[i], for n values under one scale, which is returned.
inline float quantize_group(int8_t* to, size_t stride, const float* x, int n) {
    float amax = 0, scale;
    for (int i = 0; i < n; i++) amax = std::max(amax, std::fabs(x[i]));
    const float inv = choose_scale(&scale, amax, nullptr);
    for (int i = 0; i < n; i++) {
        const float whole = std::nearbyintf(x[i] * inv);
        const float low = whole > -127.0f ? whole : -127.0f;  // in this order, NaN becomes -127
        to[i * stride] = int8_t(std::min(127.0f, low));
    }
    return scale;
}

// Codes (n,) and scales (n / group_size,) of x (n,), as quantize_group() makes them, NaN included;
// group_size is a multiple of 4 * Isa::lanes.
template <class Isa>
inline void quantize_vectors(int8_t* codes, float* scales, const float* x, int n, int group_size,
                             const float* fixed_scale) {
    constexpr int lanes = Isa::lanes;
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        typename Isa::Floats maxima{};
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += lanes) {
            const auto bits = typename Isa::Lanes(Isa::load_floats(xg + i)) & 0x7fffffff;
            const auto magnitude = typename Isa::Floats(bits);
            maxima = magnitude > maxima ? magnitude : maxima;  // NaN: stays
        }
        Float4 quads[lanes / 4];
        std::memcpy(quads, &maxima, sizeof maxima);
        for (const Float4& quad : quads) quads[0] = quad > quads[0] ? quad : quads[0];
        const float amax = std::max({quads[0][0], quads[0][1], quads[0][2], quads[0][3]});
        const float inv = choose_scale(scales + g, amax, fixed_scale);
        for (int i = 0; i < group_size; i += 4 * lanes) {
            auto scaled = [&](int v) { return Isa::load_floats(xg + i + v * lanes) * inv; };
            Isa::store_codes(codes + g * group_size + i, scaled(0), scaled(1), scaled(2), scaled(3));
        }
    }
}

// sums (n / group_size,) of codes (n,).
inline void sum_groups(int32_t* sums, const int8_t* codes, int n, int group_size) {
    for (int g = 0; g < n / group_size; g++) {
        int32_t sum = 0;
        for (int i = 0; i < group_size; i++) sum += codes[g * group_size + i];
        sums[g] = sum;
    }
}

// Quantizes x (n,) fp32: codes (n,), scales and sums of codes (n / group_size,). If fixed_scale is not null,
// every scale is that one. False, and nothing written, if this build has no path for the group size: the
// caller's plain loop is then what runs.
inline bool int8_quantize(int8_t* codes, float* scales, int32_t* sums, const float* x, int n, int group_size,
                          const float* fixed_scale = nullptr) {
    return BuildIsas::with_best_isa(group_size, [&](auto isa) {
        quantize_vectors<decltype(isa)>(codes, scales, x, n, group_size, fixed_scale);
        sum_groups(sums, codes, n, group_size);
    });
}

// The same, by the plain loop where this build has no path.
inline void quantize_groups(int8_t* codes, float* scales, int32_t* sums, const float* x, int n,
                            int group_size) {
    if (int8_quantize(codes, scales, sums, x, n, group_size)) return;
    for (int k = 0; k < n; k += group_size)
        scales[k / group_size] = quantize_group(codes + k, 1, x + k, group_size);
    sum_groups(sums, codes, n, group_size);
}
