// The operations between products of quantized matrices, in fp32 and the same whatever the scheme: RMSNorm,
// RoPE, SwiGLU, the residual sum. Each takes all tokens of a chunk; threads share them token by token. And a
// product of fp32 matrices added up in fp64: where the result decides something, and rounding must not.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/model/config.h"
#include "engine/os/threads.h"

// out[i] = weight[i] * x[i] / sqrt(mean(x^2) + eps) over n values (Zhang & Sennrich 2019, arXiv 1910.07467).
//
// Computed in fp64 and rounded once: it costs nothing beside the matrices, and the result is the same to the
// bit for any order of summation. That matters here and nowhere else: embedding rows are multiples of a scale
// and the weights are short numbers, so that many normalized values lie exactly halfway between two codes,
// and the last bit would decide which.
inline void rmsnorm(float* out, const float* x, const float* weight, int n, float eps) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += double(x[i]) * x[i];
    const double inv = 1.0 / std::sqrt(sum / n + eps);
    for (int i = 0; i < n; i++) out[i] = float(weight[i] * (x[i] * inv));
}

// Normalizes each run of n values: whole rows of x, or each head of q or k, of weight's length n. out may
// be x.
inline void rmsnorm(Rows& out, const Rows& x, const float* weight, int n, float eps) {
    out.n_rows = x.n_rows;
    for_each_row(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i += n) rmsnorm(out.row(t) + i, x.row(t) + i, weight, n, eps);
    });
}

// cos and sin of the rotation angles of a chunk's positions, the same in every layer. Frequencies, rescaled
// for long contexts, are rope_frequencies() in engine/model/config.h.
struct RopeAngles {
    std::vector<float> frequencies;  // (head_dim / 2,) radians per position
    Rows cos, sin;                   // (n_tokens, head_dim / 2)
    float attention_factor = 1;

    RopeAngles() = default;
    RopeAngles(const ModelConfig& c, int max_tokens)
        : frequencies(rope_frequencies(c)),
          cos(max_tokens, c.head_dim / 2),
          sin(max_tokens, c.head_dim / 2),
          attention_factor(c.attention_factor) {}

    // For n_tokens tokens at positions pos, pos + 1, ...
    void set_positions(int pos, int n_tokens) {
        cos.n_rows = sin.n_rows = n_tokens;
        for (int t = 0; t < n_tokens; t++) {
            for (size_t i = 0; i < frequencies.size(); i++) {
                const Rotation r = rotation(pos + t, frequencies[i], attention_factor);
                cos.row(t)[i] = r.cos;
                sin.row(t)[i] = r.sin;
            }
        }
    }
};

// Rotates the adjacent pairs (2i, 2i + 1) of one head by cos and sin (head_dim / 2,).
inline void rope(float* head, const float* cos, const float* sin, int head_dim) {
    for (int i = 0; i < head_dim / 2; i++) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cos[i] - b * sin[i];
        head[2 * i + 1] = a * sin[i] + b * cos[i];
    }
}

// Rotates every head of every token, in place. x: (n_tokens, heads * head_dim).
inline void rope(Rows& x, const RopeAngles& angles, int head_dim) {
    for_each_row(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i += head_dim)
            rope(x.row(t) + i, angles.cos.row(t), angles.sin.row(t), head_dim);
    });
}

// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202)
inline void swiglu(float* out, const float* gate, const float* up, int n) {
    int i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) {
        const Floats z = load(gate + i);
        store(out + i, z / (1.0f + exp(-z)) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

// SwiGLU of all tokens. out may be gate.
inline void swiglu(Rows& out, const Rows& gate, const Rows& up) {
    out.n_rows = gate.n_rows;
    for_each_row(gate.n_rows, [&](int t) { swiglu(out.row(t), gate.row(t), up.row(t), gate.n_cols); });
}

// The same of rows whose first half is the gate: out (n_rows, n), x (n_rows, 2 n).
inline void swiglu_halves(Rows& out, const Rows& x) {
    out.n_rows = x.n_rows;
    for_each_row(x.n_rows, [&](int t) { swiglu(out.row(t), x.row(t), x.row(t) + out.n_cols, out.n_cols); });
}

// x += y
inline void add(Rows& x, const Rows& y) {
    for_each_row(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i++) x.row(t)[i] += y.row(t)[i];
    });
}

// A vector of doubles, as wide as the machine's registers.
typedef double Doubles __attribute__((vector_size(4 * vector_lanes)));
constexpr int double_lanes = vector_lanes / 2;

// out[t][i] = sum over k of x[t][k] * w[i][k], in fp64 and rounded once: x (n_tokens, n), w (n_rows, n), rows
// of out n_out apart. Each lane adds up every double_lanes-th column, whatever n_tokens and n_rows are. All
// sums stay in registers, so that a number is read and widened once for several products.
template <int n_tokens, int n_rows>
void fp64_tile(float* out, int n_out, const float* x, const float* w, int n) {
    typedef float HalfFloats __attribute__((vector_size(2 * vector_lanes)));
    auto widen = [](const float* p) {
        HalfFloats v;
        std::memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, Doubles);
    };
    Doubles sums[n_tokens][n_rows] = {};
    const int end = n / double_lanes * double_lanes;
    for (int k = 0; k < end; k += double_lanes) {
        // One token reads the rows once, in a file's memory, whose pages are small: the next rows are asked
        // for into the second-level cache, and a KiB ahead into the first.
        for (int i = 0; i < n_rows && n_tokens == 1 && k % 16 == 0; i++)
            __builtin_prefetch(w + size_t(n_rows + i) * n + k, 0, 2),
                __builtin_prefetch(w + size_t(i) * n + k + 256, 0, 3);
        Doubles tokens[n_tokens];
        UNROLL(4)
        for (int t = 0; t < n_tokens; t++) tokens[t] = widen(x + size_t(t) * n + k);
        UNROLL(4)
        for (int i = 0; i < n_rows; i++) {
            const Doubles weights = widen(w + size_t(i) * n + k);
            UNROLL(4)
            for (int t = 0; t < n_tokens; t++) sums[t][i] += tokens[t] * weights;
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n_rows; i++) {
            double sum = 0;
            for (int lane = 0; lane < double_lanes; lane++) sum += sums[t][i][lane];
            for (int k = end; k < n; k++) sum += double(x[size_t(t) * n + k]) * double(w[size_t(i) * n + k]);
            out[t * n_out + i] = float(sum);
        }
    }
}

// Some tokens times up to max_rows rows of w, four at a time or one.
template <int n_tokens, int max_rows>
void fp64_rows(float* out, int n_out, const float* x, const float* w, int n, int n_rows) {
    if (n_rows >= max_rows) return fp64_tile<n_tokens, max_rows>(out, n_out, x, w, n);
    for (int i = 0; i < n_rows; i++) fp64_tile<n_tokens, 1>(out + i, n_out, x, w + size_t(i) * n, n);
}

// out (n_tokens, n_rows) = x (n_tokens, n) times w (n_rows, n) transposed, added up in fp64; out.n_cols is
// n_rows.
inline void fp64_matmul(Rows& out, const Rows& x, const float* w) {
    constexpr int max_tokens = vector_lanes == 16 ? 4 : 2, max_rows = 4;  // as registers allow
    const int n = x.n_cols, n_rows = out.n_cols;
    out.n_rows = x.n_rows;
    const int n_tiles = (n_rows + max_rows - 1) / max_rows;
    parallel_for((x.n_rows + max_tokens - 1) / max_tokens * n_tiles, [&](int tile) {
        const int t = tile / n_tiles * max_tokens, i = tile % n_tiles * max_rows;
        const float* from = w + size_t(i) * n;
        if (t + max_tokens <= x.n_rows)
            return fp64_rows<max_tokens, max_rows>(out.row(t) + i, n_rows, x.row(t), from, n, n_rows - i);
        for (int j = t; j < x.n_rows; j++)
            fp64_rows<1, max_rows>(out.row(j) + i, n_rows, x.row(j), from, n, n_rows - i);
    });
}
