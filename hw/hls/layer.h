// A layer of a Q8 model for one token, for high-level synthesis: layer(x, weights, kv, out). Sizes are
// macros, arrays are fixed, and nothing takes memory from the heap. C++17.
//
// The loops marked `lift` are those of runq.cpp, word for word (tests/test_hls.py compares them). RMSNorm is
// that of runq.cpp with NORM_T in the place of double, as fp64 takes many DSPs: with -DNORM_T=double all
// is runq's to the bit, with float nearly.
// Angles of RoPE are tables, which the host fills. A fused multiply-add is a core that such tools have:
// std::fma in the place of the doubles, which are for processors without one.
//
// Pragmas of a tool go where loops are: dot's inner loop is the product, 7 matrices of a layer go through it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

// The sizes of models/tiny-llama.
#ifndef DIM
#define DIM 128         // length of a token's vector
#define HIDDEN_DIM 384  // length inside the feed-forward block
#define N_HEADS 4
#define N_KV_HEADS 2
#define HEAD_DIM 32
#define GROUP_SIZE 64  // weights that share a scale; divides DIM, HIDDEN_DIM and N_HEADS * HEAD_DIM
#define CONTEXT 512    // the most positions
#define NORM_EPS 1e-5f
#endif
#ifndef NORM_T
#define NORM_T float
#endif

constexpr int q_dim = N_HEADS * HEAD_DIM, kv_dim = N_KV_HEADS * HEAD_DIM;
constexpr int longest_row = HIDDEN_DIM > DIM ? (HIDDEN_DIM > q_dim ? HIDDEN_DIM : q_dim)
                                             : (DIM > q_dim ? DIM : q_dim);
static_assert(DIM % GROUP_SIZE == 0 && HIDDEN_DIM % GROUP_SIZE == 0 && q_dim % GROUP_SIZE == 0,
              "groups divide rows");
static_assert(N_HEADS % N_KV_HEADS == 0 && HEAD_DIM % 2 == 0, "heads share keys, and turn in pairs");

// Codes (rows, cols) and a scale for each group of a row (rows, cols / GROUP_SIZE).
template <int rows, int cols>
struct Q8Weights {
    int8_t codes[rows * cols];
    float scales[rows * (cols / GROUP_SIZE)];
};
struct LayerWeights {
    float attn_norm[DIM], ffn_norm[DIM];
    Q8Weights<q_dim, DIM> q_proj;
    Q8Weights<kv_dim, DIM> k_proj, v_proj;
    Q8Weights<DIM, q_dim> o_proj;
    Q8Weights<HIDDEN_DIM, DIM> gate_proj, up_proj;
    Q8Weights<DIM, HIDDEN_DIM> down_proj;
    float cos[CONTEXT * (HEAD_DIM / 2)], sin[CONTEXT * (HEAD_DIM / 2)];  // of each position's angles
};
// Keys, rotated, and values (CONTEXT, kv_dim) of the first n_positions positions.
struct LayerCache {
    int n_positions;
    float keys[CONTEXT * kv_dim], values[CONTEXT * kv_dim];
};

// lift fused_multiply_add
// a * b + c, rounded once. Where the processor has no instruction: in fp64 the product is exact, and rounding
// its sum with c, then that to fp32, is rounding once, but where the first result lies halfway between two
// fp32 numbers. There, what the first rounding has lost (Knuth's TwoSum) decides.
inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    const double product = double(a) * b;
    double sum = product + c;
    const double part = sum - product, lost = (product - (sum - part)) + (c - part);
    const double mirrored = sum + (sum - float(sum));  // if halfway, the fp32 number on the other side
    if (lost != 0 && mirrored == float(mirrored)) sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
    return float(sum);
#endif
}

// lift exp_fp32
// e^x, within 1 unit in the last place; below -87 it is e^-87, above 88 it is e^88, NaN stays NaN. With
// x = n ln 2 + r, n whole and |r| <= ln 2 / 2, it is 2^n e^r, and e^r the first terms of its Taylor series.
// ln 2 is taken off in two parts, the first so short that n times it is exact (Cody and Waite 1980).
inline float exp_fp32(float x) {
    if (std::isnan(x)) return x;
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = fused_multiply_add(x, 1.44269504f, 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds
    const float r = fused_multiply_add(n, 2.12194440e-4f, fused_multiply_add(-n, 0.693359375f, x));
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    float sum = 1.0f / 5040;
    for (const float term : terms) sum = fused_multiply_add(sum, r, term);
    return std::ldexp(sum, int(n));
}

// out[i] = weight[i] * x[i] / sqrt(mean(x^2) + eps) over n values, in NORM_T.
inline void rmsnorm(float* out, const float* x, const float* weight, int n, float eps) {
    NORM_T sums[8] = {}, sum = 0;
    for (int i = 0; i < n; i++) sums[i % 8] += NORM_T(x[i]) * x[i];
    for (const NORM_T part : sums) sum += part;
    const NORM_T inv = NORM_T(1) / std::sqrt(sum / n + eps);
    for (int i = 0; i < n; i++) out[i] = float(weight[i] * (x[i] * inv));
}

// lift rope
// Rotates the adjacent pairs (2i, 2i + 1) of one head by cos and sin (head_dim / 2,) (Su et al. 2021, arXiv
// 2104.09864). Hugging Face's pairs are (i, i + head_dim / 2): the exporter has reordered q_proj, k_proj and
// the head norms.
inline void rope(float* head, const float* cos, const float* sin, int head_dim) {
    for (int i = 0; i < head_dim / 2; i++) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = fused_multiply_add(a, cos[i], -(b * sin[i]));
        head[2 * i + 1] = fused_multiply_add(a, sin[i], b * cos[i]);
    }
}

// lift softmax
// x[i] = exp(x[i] - max) / sum over n values. Every 16th goes into the same of 16 sums.
inline void softmax(float* x, int n) {
    const float max = *std::max_element(x, x + n);
    float sums[16] = {}, sum = 0;
    for (int i = 0; i < n; i++) {
        x[i] = exp_fp32(x[i] - max);
        sums[i % 16] += x[i];
    }
    for (const float part : sums) sum += part;
    const float inv = 1.0f / sum;
    for (int i = 0; i < n; i++) x[i] *= inv;
}

// lift swiglu
// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202).
inline void swiglu(float* out, const float* gate, const float* up, int n) {
    for (int i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp_fp32(-gate[i])) * up[i];
}

// lift attend
// One query (head_dim,) against the keys and values of its kv head, those of position p at p * stride ->
// scores and probs (n_positions,), which may be one array, and out (head_dim,).
inline void attend(float* out, float* scores, float* probs, const float* q, const float* keys,
                   const float* values, int n_positions, int head_dim, int stride) {
    const float scale = 1.0f / std::sqrt(float(head_dim));
    for (int p = 0; p < n_positions; p++) {
        const float* key = keys + int64_t(p) * stride;
        float sum = 0;
        for (int i = 0; i < head_dim; i++) sum = fused_multiply_add(q[i], key[i], sum);
        scores[p] = sum * scale;
        probs[p] = scores[p];
    }
    softmax(probs, n_positions);
    for (int i = 0; i < head_dim; i++) out[i] = 0;
    for (int p = 0; p < n_positions; p++) {
        const float* value = values + int64_t(p) * stride;
        for (int i = 0; i < head_dim; i++) out[i] = fused_multiply_add(probs[p], value[i], out[i]);
    }
}

// lift quantize_group
// codes (group_size,) of x (group_size,): amax = max|x|, code = clamp(x * inv) rounded half to even, where
// inv = 127 / amax is rounded to fp32 first. Returns the scale, amax / 127. Where inv is not finite (amax 0,
// or at most 127 / FLT_MAX), scale and codes are 0. -128 never appears.
inline float quantize_group(int8_t* codes, const float* x, int group_size) {
    float amax = 0;
    for (int i = 0; i < group_size; i++) amax = std::max(amax, std::fabs(x[i]));
    float inv = 127.0f / amax;
    if (!(inv > 0 && inv <= std::numeric_limits<float>::max())) inv = 0;
    for (int i = 0; i < group_size; i++) {
        const float r = std::nearbyintf(x[i] * inv);
        const float low = r > -127.0f ? r : -127.0f;  // in this order, NaN becomes -127 rather than undefined
        codes[i] = int8_t(low < 127.0f ? low : 127.0f);
    }
    return inv > 0 ? amax / 127.0f : 0.0f;
}

// lift dot
// Rows of activations (n_tokens, n) times a row of weights (n,) -> out (n_tokens,): each group is an exact
// int32 sum, scaled by both scales; the groups are added up in fp32. Activations are int8, widened to int16,
// which compilers multiply faster. known_size, if not 0, is group_size, known to the compiler: faster, too.
template <int n_tokens, int known_size>
void dot(float* out, const int16_t* x, const float* x_scales, const int8_t* w, const float* w_scales, int n,
         int group_size) {
    if (known_size > 0) group_size = known_size;
    const int n_groups = n / group_size;
    float total[n_tokens] = {};
    for (int g = 0; g < n_groups; g++) {
        int32_t sums[n_tokens] = {};
        for (int k = g * group_size; k < (g + 1) * group_size; k++)
            for (int t = 0; t < n_tokens; t++) sums[t] += int32_t(x[t * n + k]) * int32_t(w[k]);
        for (int t = 0; t < n_tokens; t++)
            total[t] = fused_multiply_add(float(sums[t]), w_scales[g] * x_scales[t * n_groups + g], total[t]);
    }
    for (int t = 0; t < n_tokens; t++) out[t] = total[t];
}

// The row x (n,) as codes (n,), and a scale for each group.
inline void quantize(int8_t* codes, float* scales, const float* x, int n) {
    for (int i = 0; i < n; i += GROUP_SIZE)
        scales[i / GROUP_SIZE] = quantize_group(codes + i, x + i, GROUP_SIZE);
}

// out (rows,) = the quantized row times w transposed.
template <int rows, int cols>
void matmul(float* out, const int8_t* codes, const float* scales, const Q8Weights<rows, cols>& w) {
    int16_t wide[cols];
    for (int i = 0; i < cols; i++) wide[i] = codes[i];
    for (int i = 0; i < rows; i++)
        dot<1, GROUP_SIZE>(out + i, wide, scales, w.codes + i * cols, w.scales + i * (cols / GROUP_SIZE),
                           cols, GROUP_SIZE);
}

// out (DIM,) = the layer of x (DIM,), a token at position kv.n_positions, whose key and value are appended.
// At most CONTEXT positions: of a full cache it makes nothing, and returns false.
inline bool layer(const float* x, const LayerWeights& w, LayerCache& kv, float* out) {
    float normed[DIM], q[q_dim], mix[q_dim], proj[DIM], gate[HIDDEN_DIM], up[HIDDEN_DIM], scores[CONTEXT];
    int8_t codes[longest_row];
    float scales[longest_row / GROUP_SIZE];
    const int pos = kv.n_positions;
    if (pos < 0 || pos >= CONTEXT) return false;
    float *key = kv.keys + pos * kv_dim, *value = kv.values + pos * kv_dim;
    const float *cos = w.cos + pos * (HEAD_DIM / 2), *sin = w.sin + pos * (HEAD_DIM / 2);

    rmsnorm(normed, x, w.attn_norm, DIM, NORM_EPS);
    quantize(codes, scales, normed, DIM);
    matmul(q, codes, scales, w.q_proj);
    matmul(key, codes, scales, w.k_proj);
    matmul(value, codes, scales, w.v_proj);
    for (int h = 0; h < N_HEADS; h++) rope(q + h * HEAD_DIM, cos, sin, HEAD_DIM);
    for (int h = 0; h < N_KV_HEADS; h++) rope(key + h * HEAD_DIM, cos, sin, HEAD_DIM);
    kv.n_positions = pos + 1;
    for (int h = 0; h < N_HEADS; h++) {
        const int kv_head = h / (N_HEADS / N_KV_HEADS) * HEAD_DIM;
        attend(mix + h * HEAD_DIM, scores, scores, q + h * HEAD_DIM, kv.keys + kv_head, kv.values + kv_head,
               pos + 1, HEAD_DIM, kv_dim);
    }
    quantize(codes, scales, mix, q_dim);
    matmul(proj, codes, scales, w.o_proj);
    for (int i = 0; i < DIM; i++) out[i] = x[i] + proj[i];

    rmsnorm(normed, out, w.ffn_norm, DIM, NORM_EPS);
    quantize(codes, scales, normed, DIM);
    matmul(gate, codes, scales, w.gate_proj);
    matmul(up, codes, scales, w.up_proj);
    swiglu(gate, gate, up, HIDDEN_DIM);
    quantize(codes, scales, gate, HIDDEN_DIM);
    matmul(proj, codes, scales, w.down_proj);
    for (int i = 0; i < DIM; i++) out[i] += proj[i];
    return true;
}
