// The operations between matrix products, in fp32 and the same whatever the scheme: RMSNorm, RoPE, SwiGLU,
// the residual sum. Each takes all tokens of a chunk; threads share them token by token.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/model/config.h"

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
