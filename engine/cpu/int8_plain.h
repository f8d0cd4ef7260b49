// Int8 in plain C++: where a build has no instruction set, and where tests look for the same sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/cpu/int8.h"

// What attention needs of an instruction set (int8.h).
struct PlainInt8 {
    static constexpr int lanes = 4, offset = 0;
    static constexpr uint8_t flip = 0;
    using Ints = Int4;
    using Floats = Float4;
    static Ints splat(int32_t v) { return Ints{v, v, v, v}; }
    static Ints load(const void* p) { return load4<Ints>(static_cast<const int32_t*>(p)); }
    static Ints dot4(Ints acc, Ints w, Ints x) {
        int8_t a[16], b[16];
        std::memcpy(a, &w, sizeof a);
        std::memcpy(b, &x, sizeof b);
        for (int i = 0; i < 16; i++) acc[i / 4] += int32_t(a[i]) * int32_t(b[i]);
        return acc;
    }
    static Floats zero() { return Floats{}; }
    static Floats scales(const float* w_scales, float x_scale) { return load4<Floats>(w_scales) * x_scale; }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return sums + __builtin_convertvector(acc, Floats) * scales;
    }
    static void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
};
