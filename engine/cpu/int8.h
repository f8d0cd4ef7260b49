// What an instruction set has to bring for the kernels.
//
// An instruction set is a struct (instructions.h) of constants and of the few operations that the kernels are
// made of (row_kernel.h, tile_kernel.h; lowbit_ops.h has what the tiles of 2 and 4 bits need beside these). A
// lane is one int32 of a vector, and the four int8 in its place. VectorOps has what compilers make alike of
// all vectors.
//
//   panel_vectors      vectors of weights that a tile of tile_tokens tokens multiplies
//   tile_tokens        tokens whose accumulators, for these vectors, fit into the registers; a power of two
//   dot4(acc, w, x)    acc[lane] += w[lane][0..3] . x[lane][0..3], exact, bytes of w flipped
//   add_lanes(a, ..)   the sums of the lanes of four vectors, exact
//   add_scaled(s, ..)  sums[lane] += acc[lane] * scales[lane], rounded once (a fused multiply-add)
//   store_codes(p, ..) four vectors of floats as int8: rounded half to even, in -127..127; NaN is -127
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

// How far ahead of use packed weights that are read once are asked for, in bytes. Blocks lie one behind the
// other, so near the end of one this reaches into the next; past the last, a prefetch does nothing.
constexpr int prefetch_distance = 8192;
// Where that is into the second-level cache, how far ahead codes of few bits go on from there to the first:
// their arithmetic leaves a core no time to wait for the second.
constexpr int first_level_distance = 3072;

// Four lanes, in any instruction set (GCC manual, "Using Vector Instructions through Built-in Functions").
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));

template <class Vector>
inline Vector load_as(const void* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Vectors of the types that Registers names.
template <class Registers>
struct VectorOps {
    using Ints = typename Registers::Ints;
    using Floats = typename Registers::Floats;
    static constexpr int lanes = sizeof(Ints) / 4;  // of int32
    typedef int32_t Lanes __attribute__((vector_size(4 * lanes)));
    // At any address. A memcpy of so many bytes would be a move of integers to g++ 12, and a copy to floats.
    struct [[gnu::packed, gnu::may_alias]] IntsAt {
        Ints v;
    };
    struct [[gnu::packed, gnu::may_alias]] FloatsAt {
        Floats v;
    };
    // Codes of w are xor-ed with `flip` before they are multiplied. That adds `offset` to each, so offset *
    // sum(x) is taken off each accumulator.
    static constexpr uint8_t flip = 0;
    static constexpr int offset = 0;

    static Ints splat(int32_t v) { return Ints(Lanes{} + v); }
    static Ints load(const void* p) { return static_cast<const IntsAt*>(p)->v; }
    static Ints flipped(Ints w) { return w; }
    static Floats zero() { return Floats{}; }
    static Floats load_floats(const float* p) { return reinterpret_cast<const FloatsAt*>(p)->v; }
    static void store(void* p, Floats v) { static_cast<FloatsAt*>(p)->v = v; }
    static void store(void* p, Ints v) { static_cast<IntsAt*>(p)->v = v; }
};
// The same for instructions that take codes of w as unsigned.
template <class Ops>
struct FlippedOps : Ops {
    using typename Ops::Ints;
    static constexpr uint8_t flip = 0x80;
    static constexpr int offset = 128;
    static Ints flipped(Ints w) { return w ^ Ops::splat(int32_t(0x80808080)); }
};
struct FourLanes {
    using Ints = Int4;
    using Floats = Float4;
};

// The scale of a group whose largest magnitude is amax. Returns what its values are multiplied by: 127 /
// amax; or 0, with scale 0, where that is not finite (amax 0, or below 3.74e-37). If `fixed_scale` is not
// null, it is the scale, whatever amax is; below 2.94e-39 its inverse is not finite, and codes are 0.
inline float choose_scale(float* scale, float amax, const float* fixed_scale) {
    constexpr float largest = std::numeric_limits<float>::max();
    if (fixed_scale != nullptr) {
        *scale = *fixed_scale;
        const float inv = 1.0f / *scale;
        return inv <= largest ? inv : 0.0f;
    }
    const float inv = 127.0f / amax;
    const bool usable = inv <= largest && inv > 0;  // NaN compares false
    *scale = usable ? amax / 127.0f : 0.0f;
    return usable ? inv : 0.0f;
}

// In plain C++, what attention needs of an instruction set: where a build has none, and where tests look for
// the same sums.
struct PlainInt8 : VectorOps<FourLanes> {
    static Ints dot4(Ints acc, Ints w, Ints x) {
        int8_t a[16], b[16];
        std::memcpy(a, &w, sizeof a);
        std::memcpy(b, &x, sizeof b);
        for (int i = 0; i < 16; i++) acc[i / 4] += int32_t(a[i]) * int32_t(b[i]);
        return acc;
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return sums + __builtin_convertvector(acc, Floats) * scales;
    }
};
