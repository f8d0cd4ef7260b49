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
//   weights
//             of `lanes` rows are packed side by side, so that one vector holds the same four columns of all
//             of them; four columns of a token are broadcast against it, and every lane adds up its own row.
//             There are no sums across lanes, and one vector of scales serves all rows.
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

// codes (n,) int8 and scales (n / group_size,) fp32 of x (n,): amax = max|x|, scale = amax / 127,
// code = clamp(x * (127 / amax)) rounded half to even. -128 never appears.
inline void quantize_portable(int8_t* codes, float* scales, const float* x, int n, int group_size) {
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float amax = 0;
        for (int i = 0; i < group_size; i++) amax = std::max(amax, std::fabs(xg[i]));
        const float inv = inverse_scale(amax);
        scales[g] = inv > 0 ? amax / 127.0f : 0.0f;
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
inline void quantize_avx2(int8_t* codes, float* scales, const float* x, int n, int group_size) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 low = _mm256_set1_ps(-127), high = _mm256_set1_ps(127);
    // The two packs below work within 128-bit halves; this permutation puts the eight quads back in order.
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        __m256 m = _mm256_setzero_ps();
        for (int i = 0; i < group_size; i += 8) {
            m = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(xg + i), magnitude), m);  // NaN: keeps m
        }
        __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        const float amax = _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
        const float inv = inverse_scale(amax);
        scales[g] = inv > 0 ? amax / 127.0f : 0.0f;
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
inline void quantize_neon(int8_t* codes, float* scales, const float* x, int n, int group_size) {
    const float32x4_t low = vdupq_n_f32(-127), high = vdupq_n_f32(127);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float32x4_t m = vdupq_n_f32(0);
        for (int i = 0; i < group_size; i += 4) {
            const float32x4_t magnitude = vabsq_f32(vld1q_f32(xg + i));
            m = vbslq_f32(vcgtq_f32(magnitude, m), magnitude, m);  // NaN: keeps m
        }
        const float amax = vmaxvq_f32(m), inv = inverse_scale(amax);
        scales[g] = inv > 0 ? amax / 127.0f : 0.0f;
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
inline void quantize(int8_t* codes, float* scales, int32_t* sums, const float* x, int n, int group_size) {
#ifdef __AVX2__
    if (group_size % 32 == 0) {
        quantize_avx2(codes, scales, x, n, group_size);
    } else
#elif defined(__aarch64__)
    if (group_size % 16 == 0) {
        quantize_neon(codes, scales, x, n, group_size);
    } else
#endif
        quantize_portable(codes, scales, x, n, group_size);
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
//   lanes            int32 lanes of a vector, and rows of w in a panel
//   tile_tokens      tokens whose accumulators fit into the registers, in int32 and in fp32
//   flip             what codes of w are xor-ed with before they are multiplied
//   offset           what that adds to each code: offset * sum(x) has to be taken off each accumulator
//   dot4(acc, w, x)  acc[lane] += w[lane][0..3] . x[lane][0..3], exact, bytes of w flipped
//   add_scaled       sums[lane] += acc[lane] * scales[lane], with one rounding (a fused multiply-add)

#ifdef __AVX2__
// AVX2 multiplies bytes only as unsigned times signed (vpmaddubsw), so |w| is multiplied by x carrying w's
// sign. It adds two neighbouring products in int16 and would saturate above 32767; 2 * 127 * 128 = 32512
// stays below, because a code of x is never -128.
struct Avx2 {
    static constexpr const char* name = "avx2";
    static constexpr int lanes = 8, tile_tokens = 6, offset = 0;
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
    static int32_t add_lanes(Ints v) {
        __m128i h = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
    }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats scales(const float* w_scales, float x_scale) {
        return _mm256_mul_ps(_mm256_loadu_ps(w_scales), _mm256_set1_ps(x_scale));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), scales, sums);
    }
    static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
};
#endif

// VNNI multiplies four unsigned by four signed bytes and adds them to an int32 lane, without saturation
// (vpdpbusd). To make w unsigned, 128 is added to each code: the sign bit flipped. That adds 128 * sum(x) to
// the group, which is known from quantizing x and taken off where the accumulator starts.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
struct AvxVnni : Avx2 {
    static constexpr const char* name = "avx-vnni";
    static constexpr int offset = 128;
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
    static constexpr int lanes = 16, tile_tokens = 12, offset = 128;
    static constexpr uint8_t flip = 0x80;
    using Ints = __m512i;
    using Floats = __m512;

    static Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
    static Ints load(const void* p) { return _mm512_loadu_si512(p); }
    static Ints flipped(Ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(flip))); }
    static Ints dot4(Ints acc, Ints w, Ints x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static int32_t add_lanes(Ints v) { return _mm512_reduce_add_epi32(v); }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats scales(const float* w_scales, float x_scale) {
        return _mm512_mul_ps(_mm512_loadu_ps(w_scales), _mm512_set1_ps(x_scale));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, sums);
    }
    static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
};
#endif

#ifdef __aarch64__
// NEON multiplies signed by signed bytes, so w stays as it is. A vector holds only four int32; two of them
// make a panel of 8 rows, so that a token's four codes, once loaded, serve twice. 6 tokens take 24 of the 32
// registers.
struct Neon {
    static constexpr const char* name = "neon";
    static constexpr int lanes = 8, tile_tokens = 6, offset = 0;
    static constexpr uint8_t flip = 0;
    struct Ints {
        int32x4_t a, b;
    };
    struct Floats {
        float32x4_t a, b;
    };

    static Ints splat(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
    static Ints load(const void* p) {
        const int8_t* codes = static_cast<const int8_t*>(p);
        return {vreinterpretq_s32_s8(vld1q_s8(codes)), vreinterpretq_s32_s8(vld1q_s8(codes + 16))};
    }
    static Ints flipped(Ints w) { return w; }
    // Armv8.0: products in int16 (smull), two neighbours added in int16 (addp), two of these in int32
    // (sadalp). As with AVX2, two products stay within int16: 2 * 127 * 128 = 32512.
    static int32x4_t dot4(int32x4_t acc, int32x4_t w, int32x4_t x) {
        const int8x16_t wb = vreinterpretq_s8_s32(w), xb = vreinterpretq_s8_s32(x);
        const int16x8_t low = vmull_s8(vget_low_s8(wb), vget_low_s8(xb));
        return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(wb, xb)));
    }
    static Ints dot4(Ints acc, Ints w, Ints x) { return {dot4(acc.a, w.a, x.a), dot4(acc.b, w.b, x.b)}; }
    static int32_t add_lanes(Ints v) { return vaddvq_s32(vaddq_s32(v.a, v.b)); }
    static Floats zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
    static Floats scales(const float* w_scales, float x_scale) {
        return {vmulq_n_f32(vld1q_f32(w_scales), x_scale), vmulq_n_f32(vld1q_f32(w_scales + 4), x_scale)};
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return {vfmaq_f32(sums.a, vcvtq_f32_s32(acc.a), scales.a),
                vfmaq_f32(sums.b, vcvtq_f32_s32(acc.b), scales.b)};
    }
    static void store(float* p, Floats v) {
        vst1q_f32(p, v.a);
        vst1q_f32(p + 4, v.b);
    }
};
#endif

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
// One instruction for all of dot4 (sdot): signed by signed, straight into int32.
struct NeonDot : Neon {
    static constexpr const char* name = "neon-dotprod";
    static Ints dot4(Ints acc, Ints w, Ints x) {
        return {vdotq_s32(acc.a, vreinterpretq_s8_s32(w.a), vreinterpretq_s8_s32(x.a)),
                vdotq_s32(acc.b, vreinterpretq_s8_s32(w.b), vreinterpretq_s8_s32(x.b))};
    }
};
#endif

// ----------------------------------------------------------------------------
// One token: a row of weights at a time

// How far ahead of use the weights are fetched. The rows lie one behind the other, so this reaches into the
// next row.
constexpr int prefetch_distance = 1024;

// One output, row t of x times row i of w. group_size is a multiple of 4 * Isa::lanes.
template <class Isa>
inline float dot_row(const Int8Matrix& x, int t, const Int8Matrix& w, int i) {
    const int8_t *xr = x.row_codes(t), *wr = w.row_codes(i);
    const float *xs = x.row_scales(t), *ws = w.row_scales(i);
    const int32_t* x_sums = x.row_sums(t);
    const int group_size = w.group_size, n_groups = w.n_groups();
    float sum = 0;
    for (int g = 0; g < n_groups; g++, xr += group_size, wr += group_size) {
        auto acc = Isa::splat(0);
        for (int k = 0; k < group_size; k += 4 * Isa::lanes) {
            // Memory keeps up only if the next lines are already on their way.
            if (k % 64 == 0) __builtin_prefetch(wr + k + prefetch_distance);
            acc = Isa::dot4(acc, Isa::flipped(Isa::load(wr + k)), Isa::load(xr + k));
        }
        const int32_t total = Isa::add_lanes(acc) - Isa::offset * x_sums[g];
        sum = std::fma(static_cast<float>(total), ws[g] * xs[g], sum);
    }
    return sum;
}

// ----------------------------------------------------------------------------
// Many tokens: a panel of weights, tile by tile

// Packs rows first .. first + lanes - 1 of w side by side: codes[k / 4][lane][k % 4], flipped, and
// scales[g][lane]. Lanes past the last row get codes and scales of 0.
template <class Isa>
inline void pack_panel(uint32_t* codes, float* scales, const Int8Matrix& w, int first) {
    constexpr uint32_t flip = Isa::flip * 0x01010101u;
    for (int lane = 0; lane < Isa::lanes; lane++) {
        const bool exists = first + lane < w.n_rows;
        const int8_t* row = exists ? w.row_codes(first + lane) : nullptr;
        for (int k = 0; k < w.n_cols / 4; k++) {
            uint32_t four = 0;
            if (exists) std::memcpy(&four, row + 4 * k, 4);
            codes[k * Isa::lanes + lane] = four ^ flip;
        }
        for (int g = 0; g < w.n_groups(); g++) {
            scales[g * Isa::lanes + lane] = exists ? w.row_scales(first + lane)[g] : 0;
        }
    }
}

// n_tokens tokens from t on, times a packed panel: out[token] gets `lanes` outputs. The accumulators of all
// tokens stay in registers, so a vector of weights is loaded once for n_tokens multiplications.
template <class Isa, int n_tokens>
inline void tile(float* out, size_t out_stride, const Int8Matrix& x, int t, const uint32_t* codes,
                 const float* scales) {
    typename Isa::Floats sums[n_tokens];
    for (int j = 0; j < n_tokens; j++) sums[j] = Isa::zero();
    const int8_t* xr = x.row_codes(t);
    for (int g = 0; g < x.n_groups(); g++, xr += x.group_size) {
        typename Isa::Ints acc[n_tokens];
        for (int j = 0; j < n_tokens; j++) acc[j] = Isa::splat(-Isa::offset * x.row_sums(t + j)[g]);
        for (int k = 0; k < x.group_size; k += 4, codes += Isa::lanes) {
            const auto w = Isa::load(codes);
            for (int j = 0; j < n_tokens; j++) {
                int32_t four;
                std::memcpy(&four, xr + size_t(j) * x.n_cols + k, 4);
                acc[j] = Isa::dot4(acc[j], w, Isa::splat(four));
            }
        }
        for (int j = 0; j < n_tokens; j++) {
            sums[j] = Isa::add_scaled(sums[j], acc[j],
                                      Isa::scales(scales + g * Isa::lanes, x.row_scales(t + j)[g]));
        }
    }
    for (int j = 0; j < n_tokens; j++) Isa::store(out + size_t(j) * out_stride, sums[j]);
}

// ----------------------------------------------------------------------------
// Matrix products

// out (x.n_rows, w->n_rows) fp32 = x times w transposed.
struct Product {
    float* out;
    const Int8Matrix* w;
};

// Each row of the weights is read once, whatever the number of tokens. `outputs` computes one output.
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

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
// smmla multiplies 2 x 8 codes by 8 x 2 and adds to 2 x 2 int32: twice the products of sdot, given two
// tokens. Few tokens go a row at a time with sdot. 6 tokens by 8 rows make 12 accumulators and 12 fp32 sums.
struct NeonI8mm : NeonDot {
    static constexpr const char* name = "neon-i8mm";
};

// Eight codes of a row at a time: codes[k / 8][lane][k % 8], so that a vector is a 2 x 8 block of the panel.
template <>
inline void pack_panel<NeonI8mm>(uint32_t* codes, float* scales, const Int8Matrix& w, int first) {
    constexpr int lanes = NeonI8mm::lanes;
    for (int lane = 0; lane < lanes; lane++) {
        const bool exists = first + lane < w.n_rows;
        for (int k = 0; k < w.n_cols / 8; k++) {
            uint32_t* eight = codes + (k * lanes + lane) * 2;
            eight[0] = eight[1] = 0;
            if (exists) std::memcpy(eight, w.row_codes(first + lane) + 8 * k, 8);
        }
        for (int g = 0; g < w.n_groups(); g++) {
            scales[g * lanes + lane] = exists ? w.row_scales(first + lane)[g] : 0;
        }
    }
}

// 2 * n_pairs tokens from t on; where that goes past the last token, the last is computed again.
template <int n_pairs>
inline void tile_i8mm(float* out, size_t out_stride, const Int8Matrix& x, int t, const int8_t* codes,
                      const float* scales) {
    // [pair][i]: rows 2i and 2i + 1 of the panel times the pair's two tokens, as smmla leaves them:
    // (row 0, token 0), (row 0, token 1), (row 1, token 0), (row 1, token 1).
    constexpr int row_pairs = NeonI8mm::lanes / 2;
    int token[n_pairs][2];
    float32x4_t sums[n_pairs][row_pairs];
    for (int j = 0; j < n_pairs; j++) {
        for (int s = 0; s < 2; s++) token[j][s] = std::min(t + 2 * j + s, x.n_rows - 1);
        for (int i = 0; i < row_pairs; i++) sums[j][i] = vdupq_n_f32(0);
    }
    for (int g = 0; g < x.n_groups(); g++, scales += NeonI8mm::lanes) {
        int32x4_t acc[n_pairs][row_pairs];
        for (int j = 0; j < n_pairs; j++) {
            for (int i = 0; i < row_pairs; i++) acc[j][i] = vdupq_n_s32(0);
        }
        for (int k = g * x.group_size; k < (g + 1) * x.group_size; k += 8) {
            int8x16_t w[row_pairs];
            for (int i = 0; i < row_pairs; i++, codes += 16) w[i] = vld1q_s8(codes);
            for (int j = 0; j < n_pairs; j++) {
                const int8x16_t xb =
                    vcombine_s8(vld1_s8(x.row_codes(token[j][0]) + k), vld1_s8(x.row_codes(token[j][1]) + k));
                for (int i = 0; i < row_pairs; i++) acc[j][i] = vmmlaq_s32(acc[j][i], w[i], xb);
            }
        }
        for (int j = 0; j < n_pairs; j++) {
            const float two[2] = {x.row_scales(token[j][0])[g], x.row_scales(token[j][1])[g]};
            const float32x4_t xs = vcombine_f32(vld1_f32(two), vld1_f32(two));
            for (int i = 0; i < row_pairs; i++) {
                const float32x4_t ws = vcombine_f32(vdup_n_f32(scales[2 * i]), vdup_n_f32(scales[2 * i + 1]));
                sums[j][i] = vfmaq_f32(sums[j][i], vcvtq_f32_s32(acc[j][i]), vmulq_f32(ws, xs));
            }
        }
    }
    for (int j = 0; j < n_pairs; j++) {
        float *even = out + token[j][0] * out_stride, *odd = out + token[j][1] * out_stride;
        for (int i = 0; i < row_pairs; i += 2) {  // even lanes are the first token's, odd ones the second's
            vst1q_f32(even + 2 * i, vuzp1q_f32(sums[j][i], sums[j][i + 1]));
            vst1q_f32(odd + 2 * i, vuzp2q_f32(sums[j][i], sums[j][i + 1]));
        }
    }
}
#endif

// One panel of weights times all tokens, for as many tokens at a time as the registers hold.
template <class Isa>
inline void panel_product(float* out, size_t out_stride, const Int8Matrix& x, const uint32_t* codes,
                          const float* scales) {
    int t = 0;
    for (; t + Isa::tile_tokens <= x.n_rows; t += Isa::tile_tokens) {
        tile<Isa, Isa::tile_tokens>(out + t * out_stride, out_stride, x, t, codes, scales);
    }
    for (; t + 4 <= x.n_rows; t += 4) tile<Isa, 4>(out + t * out_stride, out_stride, x, t, codes, scales);
    for (; t < x.n_rows; t++) tile<Isa, 1>(out + t * out_stride, out_stride, x, t, codes, scales);
}

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
template <>
inline void panel_product<NeonI8mm>(float* out, size_t out_stride, const Int8Matrix& x, const uint32_t* codes,
                                    const float* scales) {
    const int8_t* panel = reinterpret_cast<const int8_t*>(codes);
    int t = 0;
    for (; t + 4 < x.n_rows; t += 6) tile_i8mm<3>(out, out_stride, x, t, panel, scales);
    if (t + 2 < x.n_rows) {
        tile_i8mm<2>(out, out_stride, x, t, panel, scales);
    } else if (t < x.n_rows) {
        tile_i8mm<1>(out, out_stride, x, t, panel, scales);
    }
}
#endif

template <class Isa>
inline void products_by_panels(const Int8Matrix& x, std::span<const Product> products) {
#pragma omp parallel
    {
        // A thread's packed panel stays from call to call; it stays in the cache too.
        static thread_local std::vector<uint32_t> codes;
        static thread_local std::vector<float> scales, edge;
        codes.resize(std::max(codes.size(), size_t(x.n_cols) / 4 * Isa::lanes));
        scales.resize(std::max(scales.size(), size_t(x.n_groups()) * Isa::lanes));
        for (const Product& p : products) {
            const int n_rows = p.w->n_rows, n_panels = (n_rows + Isa::lanes - 1) / Isa::lanes;
#pragma omp for schedule(dynamic) nowait
            for (int panel = 0; panel < n_panels; panel++) {
                const int first = panel * Isa::lanes, n_valid = std::min(Isa::lanes, n_rows - first);
                pack_panel<Isa>(codes.data(), scales.data(), *p.w, first);
                if (n_valid == Isa::lanes) {
                    panel_product<Isa>(p.out + first, n_rows, x, codes.data(), scales.data());
                } else {  // the last panel sticks out: only its valid lanes are kept
                    edge.resize(std::max(edge.size(), size_t(x.n_rows) * Isa::lanes));
                    panel_product<Isa>(edge.data(), Isa::lanes, x, codes.data(), scales.data());
                    for (int t = 0; t < x.n_rows; t++) {
                        std::copy_n(edge.data() + t * Isa::lanes, n_valid,
                                    p.out + size_t(t) * n_rows + first);
                    }
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
        products_by_rows(x, list, dot_row<Isa>);
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
