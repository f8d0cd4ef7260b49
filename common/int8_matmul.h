// Int8 quantization and int8 x int8 matrix products, shared by the programs whose arithmetic is int8.
//
// The portable loops are the specification. The AVX2 path beside them gives the same int8 codes, the same
// scales and the same int32 accumulator for every group, bit for bit; only the fp32 sum over groups is taken
// in another order. tests/int8_matmul_test.cpp holds the two equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

// A sum of this many products of codes stays within int32: 2^16 * 127 * 128 < 2^31.
constexpr int max_group_size = 1 << 16;

// A quantized matrix, row by row. Value (i, j) is codes[i * n_cols + j] * scales[i * n_groups + j /
// group_size].
struct Int8Matrix {
    const int8_t* codes = nullptr;  // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;  // (n_rows, n_groups)
    int n_rows = 0;
    int n_cols = 0;
    int group_size = 1;  // divides n_cols

    int n_groups() const { return n_cols / group_size; }
    const int8_t* row_codes(int i) const { return codes + size_t(i) * n_cols; }
    const float* row_scales(int i) const { return scales + size_t(i) * n_groups(); }
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

// The best path this build has for a group size.
inline void quantize(int8_t* codes, float* scales, const float* x, int n, int group_size) {
#ifdef __AVX2__
    if (group_size % 32 == 0) return quantize_avx2(codes, scales, x, n, group_size);
#endif
    quantize_portable(codes, scales, x, n, group_size);
}

// ----------------------------------------------------------------------------
// Dot products of two rows

// The accumulator of one group: sum of x[i] * w[i], exact.
inline int32_t dot_group_portable(const int8_t* x, const int8_t* w, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += static_cast<int32_t>(x[i]) * static_cast<int32_t>(w[i]);
    return sum;
}

// A whole row: each group's accumulator times both scales, added up in fp32.
inline float dot_row_portable(const int8_t* x, const float* x_scales, const int8_t* w, const float* w_scales,
                              int n, int group_size) {
    float sum = 0;
    for (int g = 0; g < n / group_size; g++) {
        const int32_t acc = dot_group_portable(x + g * group_size, w + g * group_size, group_size);
        sum += static_cast<float>(acc) * w_scales[g] * x_scales[g];
    }
    return sum;
}

#ifdef __AVX2__
// Eight int32 lanes that add up to the group's accumulator; n is a multiple of 32.
//
// AVX2 multiplies bytes only as unsigned times signed (vpmaddubsw), so |w| is multiplied by x carrying w's
// sign. It adds two neighbouring products in int16 and would saturate above 32767; 2 * 127 * 128 = 32512
// stays below, because a code of x is never -128.
inline __m256i dot_lanes_avx2(const int8_t* x, const int8_t* w, int n) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i lanes = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32) {
        const __m256i x32 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        const __m256i w32 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w32), _mm256_sign_epi8(x32, w32));
        lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(pairs, ones));
    }
    return lanes;
}

inline int32_t dot_group_avx2(const int8_t* x, const int8_t* w, int n) {
    const __m256i lanes = dot_lanes_avx2(x, w, n);
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
}

// The eight lanes are scaled and summed in fp32 without adding them up first: one horizontal sum a row, not a
// group.
inline float dot_row_avx2(const int8_t* x, const float* x_scales, const int8_t* w, const float* w_scales,
                          int n, int group_size) {
    __m256 sums = _mm256_setzero_ps();
    for (int g = 0; g < n / group_size; g++) {
        // Decode runs at the speed of memory, and only if the next lines are already on their way: about 1 KB
        // ahead.
        const char* ahead = reinterpret_cast<const char*>(w + g * group_size + 1024);
        for (int i = 0; i < group_size; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
        const __m256i lanes = dot_lanes_avx2(x + g * group_size, w + g * group_size, group_size);
        const __m256 scale = _mm256_set1_ps(w_scales[g] * x_scales[g]);
        sums = _mm256_add_ps(sums, _mm256_mul_ps(_mm256_cvtepi32_ps(lanes), scale));
    }
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
#endif

// The best path this build has for a group size.
inline float dot_row(const int8_t* x, const float* x_scales, const int8_t* w, const float* w_scales, int n,
                     int group_size) {
#ifdef __AVX2__
    if (group_size == 64) return dot_row_avx2(x, x_scales, w, w_scales, n, 64);  // lets the compiler unroll
    if (group_size % 32 == 0) return dot_row_avx2(x, x_scales, w, w_scales, n, group_size);
#endif
    return dot_row_portable(x, x_scales, w, w_scales, n, group_size);
}

// Name of the path that dot_row takes.
inline const char* int8_kernel_name(int group_size) {
#ifdef __AVX2__
    if (group_size % 32 == 0) return "avx2";
#endif
    (void)group_size;
    return "portable";
}

// ----------------------------------------------------------------------------
// Matrix product

// out (x.n_rows, w.n_rows) fp32 = x (tokens, n_cols) times w (n_out, n_cols) transposed. Both share n_cols
// and group_size. By far the most time is spent here. Each row of w is read from memory once, whatever the
// number of tokens: the rows of x, a chunk of a prompt, stay in the cache. Every output is computed by the
// same instructions whatever the number of threads or tokens, so results do not depend on either.
inline void int8_matmul(float* out, const Int8Matrix& x, const Int8Matrix& w) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < w.n_rows; i++) {
        for (int t = 0; t < x.n_rows; t++) {
            out[size_t(t) * w.n_rows + i] = dot_row(x.row_codes(t), x.row_scales(t), w.row_codes(i),
                                                    w.row_scales(i), w.n_cols, w.group_size);
        }
    }
}
