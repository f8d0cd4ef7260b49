// Int8 quantization and int8 x int8 matrix products, shared by the programs whose arithmetic is int8.
//
// The portable loops are the specification. Every other path gives the same int8 codes, the same scales and
// the same int32 accumulator for every group, bit for bit; only the fp32 sum over groups may be rounded
// differently. tests/int8_matmul_test.cpp holds them equal.
//
// There are two ways through a product, and each instruction set has a kernel for both:
//
//   dot_row   one token: the weights stream past once, a row at a time, and the speed is that of memory.
//   tile      many tokens: each weight is used again and again, and the speed is that of the multipliers. The
//             weights of some rows (a panel) are packed side by side, so that one vector holds the same four
//             columns of each; so are the tokens. Four columns of a token are broadcast against a vector of
//             weights, and every lane adds up its own row. There are no sums across lanes, and one vector of
//             scales serves all rows.
//
// Both add up a row group by group, with a fused multiply-add each, so an output is the same to the bit
// either way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#if defined(__AVX2__) && !defined(RUNQ_SIMDE)  // tests/int8_simde_test.cpp brings its own intrinsics
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

// A sum of this many products of codes stays within int32: 2^16 * 127 * 128 < 2^31.
constexpr int max_group_size = 1 << 16;

// A quantized matrix, row by row. Value (i, j) is codes[i * n_cols + j] * scales[i * n_groups + j /
// group_size].
struct Int8Matrix {
    const int8_t* codes = nullptr;  // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;  // (n_rows, n_groups)
    const int32_t* sums = nullptr;  // (n_rows, n_groups), each group's codes added up; activations only
    int n_rows = 0;
    int n_cols = 0;
    int group_size = 1;  // divides n_cols

    int n_groups() const { return n_cols / group_size; }
    const int8_t* row_codes(int i) const { return codes + size_t(i) * n_cols; }
    const float* row_scales(int i) const { return scales + size_t(i) * n_groups(); }
    const int32_t* row_sums(int i) const { return sums + size_t(i) * n_groups(); }
};

// ----------------------------------------------------------------------------
// Quantizing

// 127 / amax, or 0 where that is no finite number: for a group of zeros, and for one so small (amax
// below 3.74e-37) that the quotient overflows. Such a group gets scale 0 and codes 0.
inline float inverse_scale(float amax) {
    const float inv = 127.0f / amax;
    return inv <= std::numeric_limits<float>::max() ? inv : 0.0f;  // NaN compares false
}

// The scale of a group whose largest magnitude is amax, and what its values are multiplied with. If
// `fixed_scale` is not null, the scale is that one, whatever amax is.
inline float choose_scale(float* scale, float amax, const float* fixed_scale) {
    if (fixed_scale != nullptr) {
        *scale = *fixed_scale;
        const float inv = 1.0f / *scale;  // below 2.94e-39 the scale is too small, as 0 is: codes 0
        return inv <= std::numeric_limits<float>::max() ? inv : 0.0f;
    }
    const float inv = inverse_scale(amax);
    *scale = inv > 0 ? amax / 127.0f : 0.0f;
    return inv;
}

// codes (n,) int8 and scales (n / group_size,) fp32 of x (n,): amax = max|x|, scale = amax / 127,
// code = clamp(x * (127 / amax)) rounded half to even. -128 never appears.
inline void quantize_portable(int8_t* codes, float* scales, const float* x, int n, int group_size,
                              const float* fixed_scale = nullptr) {
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float amax = 0;
        if (fixed_scale == nullptr) {
            for (int i = 0; i < group_size; i++) amax = std::max(amax, std::fabs(xg[i]));
        }
        const float inv = choose_scale(scales + g, amax, fixed_scale);
        for (int i = 0; i < group_size; i++) {
            const float r = std::nearbyintf(xg[i] * inv);
            const float low =
                r > -127.0f ? r : -127.0f;  // in this order, NaN becomes -127 rather than undefined
            codes[g * group_size + i] = static_cast<int8_t>(low < 127.0f ? low : 127.0f);
        }
    }
}

#ifdef __AVX2__
// The same, 32 values at a time. cvtps2dq rounds half to even (Intel SDM, MXCSR's default).
inline void quantize_avx2(int8_t* codes, float* scales, const float* x, int n, int group_size,
                          const float* fixed_scale) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 low = _mm256_set1_ps(-127), high = _mm256_set1_ps(127);
    // The two packs below work within 128-bit halves; this permutation puts the eight quads back in order.
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        __m256 m = _mm256_setzero_ps();
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += 8) {
            m = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(xg + i), magnitude), m);  // NaN: keeps m
        }
        __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        const float amax = _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
        const float inv = choose_scale(scales + g, amax, fixed_scale);
        const __m256 inv8 = _mm256_set1_ps(inv);
        auto rounded = [&](const float* p) {
            const __m256 r = _mm256_mul_ps(_mm256_loadu_ps(p), inv8);
            return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(r, low), high));  // NaN: takes `low`
        };
        for (int i = 0; i < group_size; i += 32) {
            const __m256i ab = _mm256_packs_epi32(rounded(xg + i), rounded(xg + i + 8));
            const __m256i cd = _mm256_packs_epi32(rounded(xg + i + 16), rounded(xg + i + 24));
            const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), in_order);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + g * group_size + i), all);
        }
    }
}
#endif

#ifdef __aarch64__
// The same, 16 values at a time. fcvtns rounds half to even (Arm ARM, FCVTNS). The comparisons are written so
// that NaN loses where it does in the portable loop: fmax would hand it on, and fmaxnm does for a signalling
// one.
inline void quantize_neon(int8_t* codes, float* scales, const float* x, int n, int group_size,
                          const float* fixed_scale) {
    const float32x4_t low = vdupq_n_f32(-127), high = vdupq_n_f32(127);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float32x4_t m = vdupq_n_f32(0);
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += 4) {
            const float32x4_t magnitude = vabsq_f32(vld1q_f32(xg + i));
            m = vbslq_f32(vcgtq_f32(magnitude, m), magnitude, m);  // NaN: keeps m
        }
        const float inv = choose_scale(scales + g, vmaxvq_f32(m), fixed_scale);
        auto rounded = [&](const float* p) {
            const float32x4_t r = vmulq_n_f32(vld1q_f32(p), inv);
            const float32x4_t at_least = vbslq_f32(vcgtq_f32(r, low), r, low);  // NaN: takes `low`
            return vmovn_s32(vcvtnq_s32_f32(vminq_f32(at_least, high)));
        };
        for (int i = 0; i < group_size; i += 16) {
            const int16x8_t ab = vcombine_s16(rounded(xg + i), rounded(xg + i + 4));
            const int16x8_t cd = vcombine_s16(rounded(xg + i + 8), rounded(xg + i + 12));
            vst1q_s8(codes + g * group_size + i, vcombine_s8(vmovn_s16(ab), vmovn_s16(cd)));
        }
    }
}
#endif

// The best path this build has for a group size; and sums (n / group_size,), the codes of each group added
// up.
inline void quantize(int8_t* codes, float* scales, int32_t* sums, const float* x, int n, int group_size,
                     const float* fixed_scale = nullptr) {
#ifdef __AVX2__
    if (group_size % 32 == 0) {
        quantize_avx2(codes, scales, x, n, group_size, fixed_scale);
    } else
#elif defined(__aarch64__)
    if (group_size % 16 == 0) {
        quantize_neon(codes, scales, x, n, group_size, fixed_scale);
    } else
#endif
        quantize_portable(codes, scales, x, n, group_size, fixed_scale);
    for (int g = 0; g < n / group_size; g++) {
        int32_t sum = 0;
        for (int i = 0; i < group_size; i++) sum += codes[g * group_size + i];
        sums[g] = sum;
    }
}

// ----------------------------------------------------------------------------
// Portable: the specification

// The accumulator of one group: sum of x[i] * w[i], exact.
inline int32_t dot_group_portable(const int8_t* x, const int8_t* w, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += static_cast<int32_t>(x[i]) * static_cast<int32_t>(w[i]);
    return sum;
}

// One output: row t of x times row i of w. Each group's accumulator times both scales, added up in fp32.
inline float dot_row_portable(const Int8Matrix& x, int t, const Int8Matrix& w, int i) {
    float sum = 0;
    for (int g = 0; g < w.n_groups(); g++) {
        const int offset = g * w.group_size;
        const int32_t acc =
            dot_group_portable(x.row_codes(t) + offset, w.row_codes(i) + offset, w.group_size);
        sum += static_cast<float>(acc) * (w.row_scales(i)[g] * x.row_scales(t)[g]);
    }
    return sum;
}

// ----------------------------------------------------------------------------
// Instruction sets. Each is the few operations that dot_row and tile below are made of:
//
//   lanes            int32 lanes of a vector
//   panel_vectors    vectors that hold a panel's rows; two where that leaves registers enough
//   tile_tokens      tokens whose accumulators, for a panel's rows, fit into the registers; a power of two
//   flip             what codes of w are xor-ed with before they are multiplied
//   offset           what that adds to each code: offset * sum(x) has to be taken off each accumulator
//   dot4(acc, w, x)  acc[lane] += w[lane][0..3] . x[lane][0..3], exact, bytes of w flipped
//   add_lanes        the lanes of four vectors, each added up, exact
//   add_scaled       sums[lane] += acc[lane] * scales[lane], with one rounding (a fused multiply-add)
//   keep             nothing; but it tells g++ 12 to leave this value in its register, where it would make a
//                    copy of each accumulator before and after each dot4

// Four lanes, in any instruction set (GCC manual, "Using Vector Instructions through Built-in Functions").
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));

template <class Vector, class T>
inline Vector load4(const T* p) {
    Vector v;
    static_assert(sizeof(v) == 4 * sizeof(T));
    std::memcpy(&v, p, sizeof v);
    return v;
}

#ifdef RUNQ_SIMDE
#define RUNQ_KEEP(v) (void)(v)
#else
#define RUNQ_KEEP(v) asm("" : "+v"(v))
#endif

#ifdef __AVX2__
// AVX2 multiplies bytes only as unsigned times signed (vpmaddubsw), so |w| is multiplied by x carrying w's
// sign. It adds two neighbouring products in int16 and would saturate above 32767; 2 * 127 * 128 = 32512
// stays below, because a code of x is never -128.
struct Avx2 {
    static constexpr const char* name = "avx2";
    static constexpr int lanes = 8, panel_vectors = 1, tile_tokens = 4, offset = 0;
    static constexpr uint8_t flip = 0;
    using Ints = __m256i;
    using Floats = __m256;

    static Ints splat(int32_t v) { return _mm256_set1_epi32(v); }
    static Ints load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static Ints flipped(Ints w) { return w; }
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const __m256i ab = _mm256_hadd_epi32(a, b), cd = _mm256_hadd_epi32(c, d);
        const __m256i v = _mm256_hadd_epi32(ab, cd);  // a, b, c and d of the lower half, then of the upper
        const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        return load4<Int4>(reinterpret_cast<const int32_t*>(&sums));
    }
    static void keep(Ints& v) { RUNQ_KEEP(v); }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
    static Floats scales(const float* w_scales, float x_scale) {
        return _mm256_mul_ps(_mm256_loadu_ps(w_scales), _mm256_set1_ps(x_scale));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), scales, sums);
    }
    static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
    static void store(float* p, Ints v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
};
#endif

// VNNI multiplies four unsigned by four signed bytes and adds them to an int32 lane, without saturation
// (vpdpbusd). To make w unsigned, 128 is added to each code: the sign bit flipped. That adds 128 * sum(x) to
// the group, which is known from quantizing x and taken off where the accumulator starts.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
struct AvxVnni : Avx2 {
    static constexpr const char* name = "avx-vnni";
    static constexpr int tile_tokens = 8, offset = 128;
    static constexpr uint8_t flip = 0x80;
    static Ints flipped(Ints w) { return _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(flip))); }
    static Ints dot4(Ints acc, Ints w, Ints x) {
#ifdef __AVX512VNNI__
        return _mm256_dpbusd_epi32(acc, w, x);
#else
        return _mm256_dpbusd_avx_epi32(acc, w, x);
#endif
    }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct Avx512Vnni {
    static constexpr const char* name = "avx512-vnni";
    static constexpr int lanes = 16, panel_vectors = 2, tile_tokens = 8, offset = 128;
    static constexpr uint8_t flip = 0x80;
    using Ints = __m512i;
    using Floats = __m512;

    static Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
    static Ints load(const void* p) { return _mm512_loadu_si512(p); }
    static Ints flipped(Ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(flip))); }
    static Ints dot4(Ints acc, Ints w, Ints x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i v = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i halves =  // v has a, b, c and d in each quarter
            _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
        const __m128i sums =
            _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        return load4<Int4>(reinterpret_cast<const int32_t*>(&sums));
    }
    static void keep(Ints& v) { RUNQ_KEEP(v); }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
    static Floats scales(const float* w_scales, float x_scale) {
        return _mm512_mul_ps(_mm512_loadu_ps(w_scales), _mm512_set1_ps(x_scale));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, sums);
    }
    static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
    static void store(float* p, Ints v) { _mm512_storeu_si512(p, v); }
};
#endif

#ifdef __aarch64__
// NEON multiplies signed by signed bytes, so w stays as it is. A vector holds only four int32, and a panel is
// two of them, so that a token's four codes, once loaded, serve twice.
struct Neon {
    static constexpr const char* name = "neon";
    static constexpr int lanes = 4, panel_vectors = 2, tile_tokens = 8, offset = 0;
    static constexpr uint8_t flip = 0;
    using Ints = int32x4_t;
    using Floats = float32x4_t;

    static Ints splat(int32_t v) { return vdupq_n_s32(v); }
    static Ints load(const void* p) { return vreinterpretq_s32_s8(vld1q_s8(static_cast<const int8_t*>(p))); }
    static Ints flipped(Ints w) { return w; }
    // Armv8.0: products in int16 (smull), two neighbours added in int16 (addp), two of these in int32
    // (sadalp). As with AVX2, two products stay within int16: 2 * 127 * 128 = 32512.
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const int8x16_t wb = vreinterpretq_s8_s32(w), xb = vreinterpretq_s8_s32(x);
        const int16x8_t low = vmull_s8(vget_low_s8(wb), vget_low_s8(xb));
        return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(wb, xb)));
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
    }
    static void keep(Ints& v) { asm("" : "+w"(v)); }
    static Floats zero() { return vdupq_n_f32(0); }
    static Floats load_floats(const float* p) { return vld1q_f32(p); }
    static Floats scales(const float* w_scales, float x_scale) {
        return vmulq_n_f32(vld1q_f32(w_scales), x_scale);
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return vfmaq_f32(sums, vcvtq_f32_s32(acc), scales);
    }
    static void store(float* p, Floats v) { vst1q_f32(p, v); }
    static void store(float* p, Ints v) { vst1q_f32(p, vreinterpretq_f32_s32(v)); }
};
#endif

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
// One instruction for all of dot4 (sdot): signed by signed, straight into int32.
struct NeonDot : Neon {
    static constexpr const char* name = "neon-dotprod";
    static Ints dot4(Ints acc, Ints w, Ints x) {
        return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
    }
};
#endif

// ----------------------------------------------------------------------------
// One token: a row of weights at a time

// How far ahead of use the codes of weights are fetched, in bytes, and their scales with them. The rows lie
// one behind the other, so near the end of one this reaches into the next; past the last, a prefetch does
// nothing.
constexpr int prefetch_distance = 6144;

// The accumulator of one group, with what Isa::offset has added still in it. A cache line at a time, each
// vector of it into an accumulator of its own, since an addition waits for the one before it.
template <class Isa>
inline int32_t dot_group(const int8_t* x, const int8_t* w, int n) {
    constexpr int line = 64, step = 4 * Isa::lanes;  // bytes, the second of a vector
    typename Isa::Ints acc[4] = {Isa::splat(0), Isa::splat(0), Isa::splat(0), Isa::splat(0)};
    auto add = [&](int j, int k) {
        acc[j] = Isa::dot4(acc[j], Isa::flipped(Isa::load(w + k)), Isa::load(x + k));
    };
    int k = 0;
    for (; k + line <= n; k += line) {
        __builtin_prefetch(w + k + prefetch_distance);
        for (int j = 0; j < line / step; j++) add(j, k + j * step);
    }
    for (; k < n; k += step) add(0, k);
    const Int4 sums = Isa::add_lanes(acc[0], acc[1], acc[2], acc[3]);
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// One output, row t of x times row i of w. group_size is a multiple of 4 * Isa::lanes. Adding up the lanes of
// a vector takes several instructions, so four groups share them.
template <class Isa, int known_group_size = 0>
inline float dot_row(const Int8Matrix& x, int t, const Int8Matrix& w, int i) {
    const int8_t *xr = x.row_codes(t), *wr = w.row_codes(i);
    const float *xs = x.row_scales(t), *ws = w.row_scales(i);
    const int32_t* x_sums = x.row_sums(t);
    const int group_size = known_group_size > 0 ? known_group_size : w.group_size, n_groups = w.n_groups();
    const int groups_ahead = prefetch_distance / group_size + 1;
    auto multiply_group = [&](int g) {
        auto acc = Isa::splat(0);
        const size_t begin = size_t(g) * group_size, end = begin + group_size;
        for (size_t k = begin; k < end; k += 4 * Isa::lanes) {
            // Memory keeps up only if the next lines are already on their way.
            if (k % 64 == 0) __builtin_prefetch(wr + k + prefetch_distance);
            acc = Isa::dot4(acc, Isa::flipped(Isa::load(wr + k)), Isa::load(xr + k));
        }
        return acc;
    };
    float sum = 0;
    int g = 0;
    for (; g + 4 <= n_groups; g += 4) {
        __builtin_prefetch(ws + g + groups_ahead);
        const auto a = multiply_group(g), b = multiply_group(g + 1);
        const auto c = multiply_group(g + 2), d = multiply_group(g + 3);
        const Int4 totals = Isa::add_lanes(a, b, c, d) - Isa::offset * load4<Int4>(x_sums + g);
        const Float4 products = __builtin_convertvector(totals, Float4);
        const Float4 scales = load4<Float4>(ws + g) * load4<Float4>(xs + g);
        for (int j = 0; j < 4; j++) sum = std::fma(products[j], scales[j], sum);
    }
    for (; g < n_groups; g++) {  // what is left; or the only one, a group as long as the row
        __builtin_prefetch(ws + g + groups_ahead);
        const size_t k = size_t(g) * group_size;
        const int32_t total = dot_group<Isa>(xr + k, wr + k, group_size) - Isa::offset * x_sums[g];
        sum = std::fma(static_cast<float>(total), ws[g] * xs[g], sum);
    }
    return sum;
}

// ----------------------------------------------------------------------------
// Many tokens: a panel of weights, tile by tile

// Bytes of a panel that are worked on at a time: they stay in or near the first-level cache for all tokens.
constexpr int panel_block_bytes = 1 << 14;

template <class Isa>
constexpr int panel_rows = Isa::lanes* Isa::panel_vectors;

// Turning n vectors of n words into columns takes log2(n) steps. Each makes two vectors of two, and moves a
// bit of the lane's number into the vector's number: first within quads of words (x86's unpack, Arm's zip),
// then quads as a whole. In the end vector place<n>(i) holds word i of every row, if row i began as
// vector place<n>(i).
template <int n>
constexpr int place(int i) {
    const int quad = n == 16 ? i / 4 % 2 * 2 + i / 8 : i / 4;  // of four quads, 1 and 2 change places
    return i % 4 * (n / 4) + quad;
}
template <bool quads, class Words, uint32_t... i>
inline void transpose_step(Words& low, Words& high, Words a, Words b, std::integer_sequence<uint32_t, i...>) {
    constexpr uint32_t n = sizeof...(i);
    // Lane j of `low`, counted on from a's n lanes to b's. `high` is one quad, or half a quad, further on.
    constexpr auto from = [](uint32_t j) {
        return quads ? j / 4 * 8 + j % 4 : j / 4 * 4 + j % 4 / 2 + j % 2 * n;
    };
    constexpr uint32_t step = quads ? 4 : 2;
#ifdef __clang__
    low = __builtin_shufflevector(a, b, from(i)...);
    high = __builtin_shufflevector(a, b, (from(i) + step)...);
#else
    low = __builtin_shuffle(a, b, Words{from(i)...});
    high = __builtin_shuffle(a, b, Words{(from(i) + step)...});
#endif
}
template <int n, int columns = 1, class Words>
inline void transpose(Words (&v)[n]) {
    if constexpr (columns < n) {
        Words next[n];
        for (int i = 0; i < n / 2; i++) {
            transpose_step<(columns >= 4)>(next[2 * i], next[2 * i + 1], v[i], v[i + n / 2],
                                           std::make_integer_sequence<uint32_t, n>());
        }
        transpose<n, 2 * columns>(next);
        std::copy_n(next, n, v);
    }
}

// Turns rows into columns: packed[word * columns + row] = rows[row * stride + word] ^ flip, in words of 4
// bytes, for n rows (a power of two). Rows from n_valid on, which are not there, count as 0.
template <int n>
inline void pack_words(void* packed, int columns, const void* rows, size_t stride, int n_valid, int n_words,
                       uint32_t flip) {
    typedef uint32_t Words __attribute__((vector_size(4 * n)));
    const char* from = static_cast<const char*>(rows);
    char* to = static_cast<char*>(packed);
    int word = 0;
    for (; n_valid >= n && word + n <= n_words; word += n) {
        Words v[n];
#pragma GCC unroll 16
        for (int row = 0; row < n; row++)
            std::memcpy(&v[place<n>(row)], from + 4 * (row * stride + word), sizeof v[0]);
        transpose<n>(v);
#pragma GCC unroll 16
        for (int i = 0; i < n; i++) {
            const Words column = v[place<n>(i)] ^ flip;
            std::memcpy(to + size_t(word + i) * columns * 4, &column, sizeof column);
        }
    }
    for (; word < n_words; word++) {  // the specification, for what is left over
        for (int row = 0; row < n; row++) {
            uint32_t value = 0;
            if (row < n_valid) std::memcpy(&value, from + 4 * (row * stride + word), 4);
            value ^= flip;
            std::memcpy(to + 4 * (size_t(word) * columns + row), &value, 4);
        }
    }
}

// Which columns a tile works on: n_groups whole groups; or, where a row is a single group, part of it. In the
// second case the accumulators, and not the fp32 sums, go on from block to block.
struct Block {
    int n_groups;
    int group_size;         // columns of a group, or of the part
    bool first = true;      // of the row: sums begin with 0
    bool last = true;       // of the row
    bool resumes = false;   // the accumulators lie in `out`
    bool suspends = false;  // and are to be left there
};

// What a tile is made of, for some of the columns: activations of tile_tokens tokens, and weights of
// panel_rows rows, each four columns at a time side by side (eight, and no sums, for NeonI8mm).
struct PackedTokens {
    uint32_t* codes;  // [k / 4][token][k % 4]
    float* scales;    // [group][token]
    int32_t* sums;    // [group][token]
};
struct PackedPanel {
    uint32_t* codes;  // [k / 4][row][k % 4], flipped
    float* scales;    // [group][row]
};

// Packs tokens t .. t + tile_tokens - 1 of x. Those past the last get zeros.
template <class Isa>
inline void pack_tokens(const PackedTokens& to, const Int8Matrix& x, int t) {
    const int n_valid = std::min(Isa::tile_tokens, x.n_rows - t), n_groups = x.n_groups();
    pack_words<Isa::tile_tokens>(to.codes, Isa::tile_tokens, x.row_codes(t), x.n_cols / 4, n_valid,
                                 x.n_cols / 4, 0);
    pack_words<Isa::tile_tokens>(to.scales, Isa::tile_tokens, x.row_scales(t), n_groups, n_valid, n_groups,
                                 0);
    pack_words<Isa::tile_tokens>(to.sums, Isa::tile_tokens, x.row_sums(t), n_groups, n_valid, n_groups, 0);
}

// Packs rows i .. i + panel_rows - 1 of w: n_cols columns of codes from k on. Rows past the last get zeros.
template <class Isa>
inline void pack_codes(uint32_t* to, const Int8Matrix& w, int i, int k, int n_cols) {
    constexpr int n = Isa::lanes, columns = panel_rows<Isa>;
    for (int row = 0; row < columns; row += n) {
        const int n_valid = w.n_rows - i - row, first = std::min(i + row, w.n_rows);
        pack_words<n>(to + row, columns, w.row_codes(first) + k, w.n_cols / 4, n_valid, n_cols / 4,
                      Isa::flip * 0x01010101u);
    }
}
// The same rows' scales, of all columns.
template <class Isa>
inline void pack_scales(float* to, const Int8Matrix& w, int i) {
    constexpr int n = Isa::lanes, columns = panel_rows<Isa>;
    for (int row = 0; row < columns; row += n) {
        const int n_valid = w.n_rows - i - row, first = std::min(i + row, w.n_rows);
        pack_words<n>(to + row, columns, w.row_scales(first), w.n_groups(), n_valid, w.n_groups(), 0);
    }
}

// out[token][row] = what was there (0 in the first block) + n_tokens tokens times a panel. The accumulators
// of all tokens stay in registers, so a vector of weights is loaded once for n_tokens multiplications.
// Inlined, g++ 12 would run out of registers.
template <class Isa, int n_tokens>
__attribute__((noinline)) void tile(float* out, PackedTokens x, PackedPanel w, const Block& block) {
    constexpr int lanes = Isa::lanes, vectors = Isa::panel_vectors;
    auto at = [&](int j, int v) { return out + (j * vectors + v) * lanes; };
    typename Isa::Floats sums[n_tokens][vectors];
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < vectors; v++) sums[j][v] = block.first ? Isa::zero() : Isa::load_floats(at(j, v));
    }
    for (int g = 0; g < block.n_groups; g++) {
        typename Isa::Ints acc[n_tokens][vectors];
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < vectors; v++) acc[j][v] = Isa::splat(-Isa::offset * x.sums[j]);
        }
        for (int j = 0; j < n_tokens && block.resumes; j++) {
            for (int v = 0; v < vectors; v++) acc[j][v] = Isa::load(at(j, v));
        }
        for (int k = 0; k < block.group_size; k += 4) {
            typename Isa::Ints codes[vectors];
            for (int v = 0; v < vectors; v++) codes[v] = Isa::load(w.codes + v * lanes);
            for (int j = 0; j < n_tokens; j++) {
                const auto four = Isa::splat(static_cast<int32_t>(x.codes[j]));
                for (int v = 0; v < vectors; v++) {
                    acc[j][v] = Isa::dot4(acc[j][v], codes[v], four);
                    Isa::keep(acc[j][v]);
                }
            }
            x.codes += Isa::tile_tokens;
            w.codes += lanes * vectors;
        }
        if (block.suspends) {
            // Without the request to unroll, g++ 12 would keep acc in memory all the time.
#pragma GCC unroll 8
            for (int j = 0; j < n_tokens; j++) {
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    Isa::store(at(j, v), acc[j][v]);
                }
            }
            return;
        }
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < vectors; v++) {
                sums[j][v] =
                    Isa::add_scaled(sums[j][v], acc[j][v], Isa::scales(w.scales + v * lanes, x.scales[j]));
            }
        }
        x.scales += Isa::tile_tokens;
        x.sums += Isa::tile_tokens;
        w.scales += lanes * vectors;
    }
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < vectors; v++) Isa::store(at(j, v), sums[j][v]);
    }
}

// The tile for 1 .. tile_tokens tokens.
template <class Isa, int n = Isa::tile_tokens>
inline void tile_of(int n_tokens, float* out, const PackedTokens& x, const PackedPanel& w,
                    const Block& block) {
    if (n_tokens == n) return tile<Isa, n>(out, x, w, block);
    if constexpr (n > 1) tile_of<Isa, n - 1>(n_tokens, out, x, w, block);
}

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
// smmla multiplies 2 x 8 codes by 8 x 2 and adds to 2 x 2 int32: twice the products of sdot, given two
// tokens. Few tokens go a row at a time with sdot. Eight codes of a row, or of a token, lie side by side:
// [k / 8][row or token][k % 8], so that a vector is a 2 x 8 block.
struct NeonI8mm : NeonDot {
    static constexpr const char* name = "neon-i8mm";
};

// The same as pack_words in words of 8 bytes.
template <int n>
inline void pack_eights(void* packed, const int8_t* rows, size_t stride, int n_valid, int n_eights) {
    char* to = static_cast<char*>(packed);
    for (int i = 0; i < n_eights; i++) {
        for (int row = 0; row < n; row++, to += 8) {
            if (row < n_valid) {
                std::memcpy(to, rows + row * stride + 8 * i, 8);
            } else {
                std::memset(to, 0, 8);
            }
        }
    }
}
template <>
inline void pack_tokens<NeonI8mm>(const PackedTokens& to, const Int8Matrix& x, int t) {
    const int n_valid = std::min(NeonI8mm::tile_tokens, x.n_rows - t), n_groups = x.n_groups();
    pack_eights<NeonI8mm::tile_tokens>(to.codes, x.row_codes(t), x.n_cols, n_valid, x.n_cols / 8);
    pack_words<NeonI8mm::tile_tokens>(to.scales, NeonI8mm::tile_tokens, x.row_scales(t), n_groups, n_valid,
                                      n_groups, 0);
}
template <>
inline void pack_codes<NeonI8mm>(uint32_t* to, const Int8Matrix& w, int i, int k, int n_cols) {
    pack_eights<panel_rows<NeonI8mm>>(to, w.row_codes(i) + k, w.n_cols, w.n_rows - i, n_cols / 8);
}

// 2 * n_pairs tokens; those past the last one are zeros. Until the row is complete, `out` holds the 2 x 2
// blocks as they are, and then out[token][row].
template <int n_pairs>
inline void tile_i8mm(float* out, PackedTokens x, PackedPanel w, const Block& block) {
    // [pair][i]: rows 2i and 2i + 1 of the panel times the pair's two tokens, as smmla leaves them:
    // (row 0, token 0), (row 0, token 1), (row 1, token 0), (row 1, token 1).
    constexpr int n_rows = panel_rows<NeonI8mm>, row_pairs = n_rows / 2;
    const int8_t *x_codes = reinterpret_cast<const int8_t*>(x.codes),
                 *w_codes = reinterpret_cast<const int8_t*>(w.codes);
    auto at = [&](int j, int i) { return out + (j * row_pairs + i) * 4; };
    float32x4_t sums[n_pairs][row_pairs];
    for (int j = 0; j < n_pairs; j++) {
        for (int i = 0; i < row_pairs; i++) sums[j][i] = block.first ? vdupq_n_f32(0) : vld1q_f32(at(j, i));
    }
    for (int g = 0; g < block.n_groups; g++, x.scales += NeonI8mm::tile_tokens, w.scales += n_rows) {
        int32x4_t acc[n_pairs][row_pairs];
        for (int j = 0; j < n_pairs; j++) {
            for (int i = 0; i < row_pairs; i++) {
                acc[j][i] = block.resumes ? vreinterpretq_s32_f32(vld1q_f32(at(j, i))) : vdupq_n_s32(0);
            }
        }
        for (int k = 0; k < block.group_size;
             k += 8, x_codes += 8 * NeonI8mm::tile_tokens, w_codes += 8 * n_rows) {
            int8x16_t rows[row_pairs];
            for (int i = 0; i < row_pairs; i++) rows[i] = vld1q_s8(w_codes + 16 * i);
            for (int j = 0; j < n_pairs; j++) {
                const int8x16_t tokens = vld1q_s8(x_codes + 16 * j);
                for (int i = 0; i < row_pairs; i++) acc[j][i] = vmmlaq_s32(acc[j][i], rows[i], tokens);
            }
        }
        for (int j = 0; j < n_pairs; j++) {
            const float32x2_t two = vld1_f32(x.scales + 2 * j);
            const float32x4_t xs = vcombine_f32(two, two);
            for (int i = 0; i < row_pairs; i++) {
                if (block.suspends) {
                    vst1q_f32(at(j, i), vreinterpretq_f32_s32(acc[j][i]));
                    continue;
                }
                const float32x4_t ws =
                    vcombine_f32(vdup_n_f32(w.scales[2 * i]), vdup_n_f32(w.scales[2 * i + 1]));
                sums[j][i] = vfmaq_f32(sums[j][i], vcvtq_f32_s32(acc[j][i]), vmulq_f32(ws, xs));
            }
        }
    }
    if (block.suspends) return;
    for (int j = 0; j < n_pairs; j++) {
        for (int i = 0; i < row_pairs; i++) {
            if (!block.last) vst1q_f32(at(j, i), sums[j][i]);
        }
        for (int i = 0; i < row_pairs && block.last;
             i += 2) {  // even lanes are the first token's, odd ones the second's
            vst1q_f32(out + 2 * j * n_rows + 2 * i, vuzp1q_f32(sums[j][i], sums[j][i + 1]));
            vst1q_f32(out + (2 * j + 1) * n_rows + 2 * i, vuzp2q_f32(sums[j][i], sums[j][i + 1]));
        }
    }
}
template <>
inline void tile_of<NeonI8mm>(int n_tokens, float* out, const PackedTokens& x, const PackedPanel& w,
                              const Block& block) {
    auto* pairs = n_tokens > 6   ? tile_i8mm<4>
                  : n_tokens > 4 ? tile_i8mm<3>
                  : n_tokens > 2 ? tile_i8mm<2>
                                 : tile_i8mm<1>;
    pairs(out, x, w, block);
}
#endif

// ----------------------------------------------------------------------------
// Matrix products

// out (x.n_rows, w->n_rows) fp32 = x times w transposed.
struct Product {
    float* out;
    const Int8Matrix* w;
};

// Each row of the weights is read once, whatever the number of tokens. `output` computes one output.
template <class Dot>
inline void products_by_rows(const Int8Matrix& x, std::span<const Product> products, Dot output) {
#pragma omp parallel
    for (const Product& p : products) {
        const int n_rows = p.w->n_rows;
#pragma omp for schedule(static) nowait
        for (int i = 0; i < n_rows; i++) {
            for (int t = 0; t < x.n_rows; t++) p.out[size_t(t) * n_rows + i] = output(x, t, *p.w, i);
        }
    }
}

// Memory that stays from call to call.
template <class T>
inline T* grown(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) buffer.resize(n);
    return buffer.data();
}

// Asks for part `part` of `parts` of rows i .. i + n_rows - 1 of w, if they are all there. They lie one
// behind the other, so this is one stream, and memory is best at that.
inline void prefetch_rows(const Int8Matrix& w, int i, int n_rows, size_t part, size_t parts) {
    if (i + n_rows > w.n_rows) return;
    const size_t n_bytes = size_t(n_rows) * w.n_cols, end = n_bytes * (part + 1) / parts;
    for (size_t at = n_bytes * part / parts / 64 * 64; at < end; at += 64) {
        __builtin_prefetch(w.row_codes(i) + at, 0, 2);  // into the second-level cache
    }
}

// out[token][row] = rows i .. i + panel_rows - 1 of w times all tokens, a block of columns after the other.
template <class Isa>
inline void panel_product(float* out, int n_tokens, const PackedTokens& x, const PackedPanel& panel,
                          const Int8Matrix& w, int i) {
    constexpr int n_rows = panel_rows<Isa>;
    const int n_tiles = (n_tokens + Isa::tile_tokens - 1) / Isa::tile_tokens,
              max_cols = panel_block_bytes / n_rows;
    // As many whole groups as fit into a block; or a part, if the row is one long group.
    const bool parts = w.n_groups() == 1 && w.n_cols > max_cols;
    const int width = parts ? max_cols : std::max(1, max_cols / w.group_size) * w.group_size;
    const size_t n_blocks = (w.n_cols + width - 1) / width;
    pack_scales<Isa>(panel.scales, w, i);
    for (size_t b = 0; b < n_blocks; b++) {
        const int k = int(b) * width, n_cols = std::min(width, w.n_cols - k);
        const bool first = b == 0, last = b + 1 == n_blocks;
        const Block block = parts ? Block{1, n_cols, true, last, !first, !last}
                                  : Block{n_cols / w.group_size, w.group_size, first, last};
        pack_codes<Isa>(panel.codes, w, i, k, n_cols);
        const PackedPanel columns{panel.codes, panel.scales + size_t(k / w.group_size) * n_rows};
        for (int tile = 0; tile < n_tiles; tile++) {
            // Meanwhile the next panel comes in, bit by bit.
            prefetch_rows(w, i + n_rows, n_rows, b * n_tiles + tile, n_blocks * n_tiles);
            const int token = tile * Isa::tile_tokens;
            const size_t codes = (size_t(token) * w.n_cols + size_t(k) * Isa::tile_tokens) / 4;
            const size_t group = size_t(token) * w.n_groups() + size_t(k / w.group_size) * Isa::tile_tokens;
            tile_of<Isa>(std::min(Isa::tile_tokens, n_tokens - token), out + size_t(token) * n_rows,
                         {x.codes + codes, x.scales + group, x.sums + group}, columns, block);
        }
    }
}

template <class Isa>
inline void products_by_panels(const Int8Matrix& x, std::span<const Product> products) {
    constexpr int n_rows = panel_rows<Isa>;
    const int n_tiles = (x.n_rows + Isa::tile_tokens - 1) / Isa::tile_tokens;
    const size_t tile_groups = size_t(x.n_groups()) * Isa::tile_tokens,
                 tile_words = size_t(x.n_cols) / 4 * Isa::tile_tokens;
    static thread_local std::vector<uint32_t> token_codes;
    static thread_local std::vector<float> token_scales;
    static thread_local std::vector<int32_t> token_sums;
    const PackedTokens tokens{grown(token_codes, n_tiles * tile_words),
                              grown(token_scales, n_tiles * tile_groups),
                              grown(token_sums, n_tiles * tile_groups)};
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int tile = 0; tile < n_tiles; tile++) {
            pack_tokens<Isa>({tokens.codes + tile * tile_words, tokens.scales + tile * tile_groups,
                              tokens.sums + tile * tile_groups},
                             x, tile * Isa::tile_tokens);
        }
        static thread_local std::vector<uint32_t> codes;
        static thread_local std::vector<float> scales, sums;
        const size_t block_bytes = std::max<size_t>(panel_block_bytes, size_t(n_rows) * x.group_size);
        const PackedPanel panel{grown(codes, block_bytes / 4), grown(scales, size_t(x.n_groups()) * n_rows)};
        // A panel's outputs, collected one token behind the other. The last panel may stick out.
        float* outputs = grown(sums, size_t(n_tiles) * Isa::tile_tokens * n_rows);
        for (const Product& p : products) {
            const int n_out = p.w->n_rows, n_panels = (n_out + n_rows - 1) / n_rows;
            // Guided: a thread gets many panels in a row, so that the next one is its own, and the last few
            // go to whoever is free.
#pragma omp for schedule(guided) nowait
            for (int i = 0; i < n_panels; i++) {
                const int first = i * n_rows, n_valid = std::min(n_rows, n_out - first);
                panel_product<Isa>(outputs, x.n_rows, tokens, panel, *p.w, first);
                for (int t = 0; t < x.n_rows; t++) {
                    const float* from = outputs + t * n_rows;
                    float* to = p.out + size_t(t) * n_out + first;
                    n_valid == n_rows ? std::copy_n(from, n_rows, to) : std::copy_n(from, n_valid, to);
                }
            }
        }
    }
}

// With fewer tokens than this, packing the weights costs more than it saves.
constexpr int min_tokens_to_pack = 6;

template <class Isa>
inline void products(const Int8Matrix& x, std::span<const Product> list) {
    if (x.n_rows < min_tokens_to_pack) {
        if (x.group_size == 64) {
            products_by_rows(x, list, [](auto&... row) { return dot_row<Isa, 64>(row...); });
        } else {
            products_by_rows(x, list, [](auto&... row) { return dot_row<Isa>(row...); });
        }
    } else {
        products_by_panels<Isa>(x, list);
    }
}

#ifdef __aarch64__
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
using BestNeon = NeonI8mm;
#elif defined(__ARM_FEATURE_DOTPROD)
using BestNeon = NeonDot;
#else
using BestNeon = Neon;
#endif
#endif

// Name of the path that int8_matmul takes for a group size.
inline const char* int8_kernel_name(int group_size) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (group_size % 64 == 0) return Avx512Vnni::name;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    if (group_size % 32 == 0) return AvxVnni::name;
#elif defined(__AVX2__)
    if (group_size % 32 == 0) return Avx2::name;
#elif defined(__aarch64__)
    if (group_size % 32 == 0) return BestNeon::name;
#endif
    (void)group_size;
    return "portable";
}

// The products of one input with several matrices that have its n_cols and group_size: q, k and v; gate and
// up. By far the most time is spent here. Every output is computed with the same roundings whatever the
// number of threads or tokens, so results do not depend on either.
inline void int8_matmul(const Int8Matrix& x, std::initializer_list<Product> list) {
    const std::span<const Product> all(list.begin(), list.size());
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (x.group_size % 64 == 0) return products<Avx512Vnni>(x, all);
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    if (x.group_size % 32 == 0) return products<AvxVnni>(x, all);
#elif defined(__AVX2__)
    if (x.group_size % 32 == 0) return products<Avx2>(x, all);
#elif defined(__aarch64__)
    if (x.group_size % 32 == 0) return products<BestNeon>(x, all);
#endif
    products_by_rows(x, all, dot_row_portable);
}
