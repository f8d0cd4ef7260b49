// runq: Llama 3 and Qwen3 inference in Q8, one file to read from top to bottom.
//
// Weights are int8 with one fp32 scale for each group of 64 along a row. Before each matrix product the
// activations are quantized the same way, the product runs in int8 x int8 -> int32 group by group, and
// everything else (normalization, rotation, softmax, SwiGLU, residuals) is plain fp32. A layer has 4
// quantizations and 7 products.
//
// This file is about the scheme and the forward pass. Model files, tokens, sampling and the command line are
// in common/; docs/forward-pass.md walks through the same steps with equations and numbers.
//
//     make runq && ./runq model.bin -i "Once upon a time"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/attention.h"
#include "common/cli.h"
#include "common/int8_matmul.h"
#include "common/model_file.h"
#include "common/trace.h"
#include "common/vector.h"

// ----------------------------------------------------------------------------
// Weights, in place in the model file

struct Weights {
    const float* attn_norm = nullptr;   // (n_layers, dim)
    const float* ffn_norm = nullptr;    // (n_layers, dim)
    const float* final_norm = nullptr;  // (dim,)
    const float* q_norm = nullptr;      // (n_layers, head_dim), Qwen3 only
    const float* k_norm = nullptr;      // (n_layers, head_dim), Qwen3 only

    Int8Matrix embedding;               // (vocab_size, dim)
    std::vector<Int8Matrix> q_proj;     // n_layers of (n_heads * head_dim, dim)
    std::vector<Int8Matrix> k_proj;     // n_layers of (n_kv_heads * head_dim, dim)
    std::vector<Int8Matrix> v_proj;     // n_layers of (n_kv_heads * head_dim, dim)
    std::vector<Int8Matrix> o_proj;     // n_layers of (dim, n_heads * head_dim)
    std::vector<Int8Matrix> gate_proj;  // n_layers of (hidden_dim, dim)      w1 in llama2.c
    std::vector<Int8Matrix> down_proj;  // n_layers of (dim, hidden_dim)      w2
    std::vector<Int8Matrix> up_proj;    // n_layers of (hidden_dim, dim)      w3
    Int8Matrix classifier;              // (vocab_size, dim); the embedding itself if the two are tied
};

// Bytes of a quantized matrix in the file: a byte for each code, then four for each group's scale.
uint64_t matrix_bytes(uint64_t n_rows, uint64_t n_cols, uint64_t group_size) {
    return n_rows * n_cols + n_rows * (n_cols / group_size) * sizeof(float);
}

// Bytes of one layer's seven matrices.
uint64_t layer_matrix_bytes(const ModelConfig& c) {
    return matrix_bytes(c.q_dim(), c.dim, c.group_size) +         // q_proj
           2 * matrix_bytes(c.kv_dim(), c.dim, c.group_size) +    // k_proj, v_proj
           matrix_bytes(c.dim, c.q_dim(), c.group_size) +         // o_proj
           2 * matrix_bytes(c.hidden_dim, c.dim, c.group_size) +  // gate_proj, up_proj
           matrix_bytes(c.dim, c.hidden_dim, c.group_size);       // down_proj
}

uint64_t norm_bytes(const ModelConfig& c) {
    const uint64_t n_layers = c.n_layers, dim = c.dim, head_dim = c.head_dim;
    const uint64_t head_norms = c.arch == Arch::qwen3 ? 2 * n_layers * head_dim : 0;
    return ((2 * n_layers + 1) * dim + head_norms) * sizeof(float);
}

// Bytes of all weights that a header implies. Throws if the group size does not divide what it has to.
uint64_t weight_bytes(const ModelConfig& c) {
    auto fail = [](const std::string& what) { throw std::runtime_error(what); };
    // A multiple of 4 keeps the scales behind the codes aligned; the limit keeps the int32 accumulators
    // exact.
    if (c.group_size < 4 || c.group_size % 4 != 0 || c.group_size > max_group_size) {
        fail("group_size is " + std::to_string(c.group_size) + ", expected a multiple of 4 up to " +
             std::to_string(max_group_size));
    }
    for (const auto& [name, n] : {std::pair{"dim", c.dim}, std::pair{"hidden_dim", c.hidden_dim},
                                  std::pair{"n_heads * head_dim", c.q_dim()}}) {
        if (n % c.group_size != 0) {
            fail(std::string(name) + " is " + std::to_string(n) + ", not a multiple of group_size " +
                 std::to_string(c.group_size));
        }
    }
    const uint64_t table = matrix_bytes(c.vocab_size, c.dim, c.group_size);
    return norm_bytes(c) + (c.shared_classifier ? 1 : 2) * table + c.n_layers * layer_matrix_bytes(c);
}

// The order of the file: norms, embedding, then each projection over all layers, then the classifier if it
// has its own. llama2.c's version 2, with Qwen3's two head norms added.
Weights map_weights(const ModelFile& file) {
    const ModelConfig& c = file.config;
    const uint64_t n_layers = c.n_layers, dim = c.dim, head_dim = c.head_dim;
    WeightCursor cursor(file);
    auto matrix = [&](int n_rows, int n_cols) {
        Int8Matrix m{nullptr, nullptr, nullptr, n_rows, n_cols, c.group_size};
        m.codes = cursor.take<int8_t>(uint64_t(n_rows) * n_cols);
        m.scales = cursor.take<float>(uint64_t(n_rows) * m.n_groups());
        return m;
    };
    auto matrices = [&](int n_rows, int n_cols) {
        std::vector<Int8Matrix> layers;
        for (int l = 0; l < c.n_layers; l++) layers.push_back(matrix(n_rows, n_cols));
        return layers;
    };

    Weights w;
    w.attn_norm = cursor.take<float>(n_layers * dim);
    w.ffn_norm = cursor.take<float>(n_layers * dim);
    w.final_norm = cursor.take<float>(dim);
    if (c.arch == Arch::qwen3) {
        w.q_norm = cursor.take<float>(n_layers * head_dim);
        w.k_norm = cursor.take<float>(n_layers * head_dim);
    }
    w.embedding = matrix(c.vocab_size, c.dim);
    w.q_proj = matrices(c.q_dim(), c.dim);
    w.k_proj = matrices(c.kv_dim(), c.dim);
    w.v_proj = matrices(c.kv_dim(), c.dim);
    w.o_proj = matrices(c.dim, c.q_dim());
    w.gate_proj = matrices(c.hidden_dim, c.dim);
    w.down_proj = matrices(c.dim, c.hidden_dim);
    w.up_proj = matrices(c.hidden_dim, c.dim);
    w.classifier = c.shared_classifier ? w.embedding : matrix(c.vocab_size, c.dim);
    return w;
}

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights

constexpr int max_attention_rows = 16;  // queries that share the keys they read
constexpr int max_chunk = 128;          // tokens of a prompt that go through together

struct RunState {
    int context = 0;      // positions the KV cache holds
    PhaseSeconds phases;  // where the time went

    // One row a token of the chunk.
    std::vector<float> x;          // (max_chunk, dim), the residual stream
    std::vector<float> h;          // (max_chunk, dim), normalized x; also the output of o_proj and down_proj
    std::vector<float> q;          // (max_chunk, n_heads * head_dim)
    std::vector<float> k;          // (max_chunk, n_kv_heads * head_dim)
    std::vector<float> v;          // (max_chunk, n_kv_heads * head_dim)
    std::vector<float> mix;        // (max_chunk, n_heads * head_dim), attention's output
    std::vector<float> gate;       // (max_chunk, hidden_dim)
    std::vector<float> up;         // (max_chunk, hidden_dim)
    std::vector<float> rope_cos;   // (max_chunk, head_dim / 2)
    std::vector<float> rope_sin;   // (max_chunk, head_dim / 2)
    std::vector<float> rope_freq;  // (head_dim / 2,) radians a position
    std::vector<float> logits;     // (1 or max_chunk, vocab_size)

    std::vector<int8_t> codes;  // (max_chunk, widest input of a matrix), the quantized activations
    std::vector<float> scales;  // (max_chunk, widest input / group_size)
    std::vector<int32_t> sums;  // (max_chunk, widest input / group_size), each group's codes added up

    KvCache cache;  // keys and values of `context` positions
};

struct Transformer {
    ModelFile file;
    Weights weights;
    RunState state;
    Trace* trace = nullptr;  // not null: record every step
};

// ----------------------------------------------------------------------------
// The operations

// out = weight * x / sqrt(mean(x^2) + eps), in fp64 and rounded once. It costs nothing beside the matrices,
// and the result is the same to the bit for any order of summation. That matters here and nowhere else:
// embedding rows are multiples of a scale and the weights are short numbers, so that many normalized values
// lie exactly halfway between two codes, and the last bit would decide which.
void rmsnorm(float* out, const float* x, const float* weight, int n, float eps) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += double(x[i]) * x[i];
    const double inv = 1.0 / std::sqrt(sum / n + eps);
    for (int i = 0; i < n; i++) out[i] = float(weight[i] * (x[i] * inv));
}

// Radians per position of each pair, theta^(-2i / head_dim), (head_dim / 2,). Llama 3.1 and later stretch the
// long wavelengths by `factor`, leave the short ones alone and blend in between; this holds at every
// position, so leaving it out changes every token.
std::vector<float> rope_frequencies(const ModelConfig& c) {
    std::vector<float> freq(c.head_dim / 2);
    for (int i = 0; i < c.head_dim / 2; i++) {
        double f = std::pow(double(c.rope_theta), -2.0 * i / c.head_dim);
        if (const RopeScaling& s = c.rope_scaling; s.llama3) {
            const double turns =
                s.original_max_position_embeddings * f / (2 * M_PI);  // within the original context
            const double low = s.low_freq_factor, high = s.high_freq_factor;
            const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
            f = (1 - smooth) * f / s.factor + smooth * f;
        }
        freq[i] = static_cast<float>(f);
    }
    return freq;
}

// Rotates the adjacent pairs (2i, 2i + 1) of one head by the angles of its position.
void rope(float* head, const float* cos, const float* sin, int head_dim) {
    for (int i = 0; i < head_dim / 2; i++) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cos[i] - b * sin[i];
        head[2 * i + 1] = a * sin[i] + b * cos[i];
    }
}

// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z))
void swiglu(float* out, const float* gate, const float* up, int n) {
    int i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) {
        const Floats z = load(gate + i);
        store(out + i, z / (1.0f + exp(-z)) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

// x (n,) += y
void add(float* x, const float* y, int n) {
#pragma omp parallel for simd schedule(static) if (n > 1 << 14)
    for (int i = 0; i < n; i++) x[i] += y[i];
}

// ----------------------------------------------------------------------------
// The forward pass

// Row i of a buffer whose rows are `width` long.
float* row(std::vector<float>& buffer, size_t i, size_t width) { return buffer.data() + i * width; }

// Puts a step's values under its name into the trace, if there is one: n_tokens values of the given shape.
// Layer -1 is outside the layers.
template <class T>
void record(const Transformer& m, int layer, const char* name, const T* values, int n_tokens,
            std::initializer_list<int> shape) {
    if (m.trace != nullptr) m.trace->add(step_name(layer, name), values, n_tokens, shape);
}

// The same for (n_heads, n) values of one token, in rows `width` apart.
void record_rows(const Transformer& m, int layer, const char* name, const float* rows, size_t width, int n) {
    std::vector<float> values;
    for (int h = 0; h < m.file.config.n_heads; h++)
        values.insert(values.end(), rows + h * width, rows + h * width + n);
    record(m, layer, name, values.data(), 1, {m.file.config.n_heads, n});
}

// Quantizes a chunk's activations (n_tokens, width) into the run state: the input of the matrices that
// follow.
Int8Matrix quantize_step(Transformer& m, int layer, const char* name, const float* values, int n_tokens,
                         int width) {
    RunState& s = m.state;
    const Int8Matrix x{s.codes.data(), s.scales.data(), s.sums.data(),
                       n_tokens,       width,           m.file.config.group_size};
#pragma omp parallel for schedule(static) if (n_tokens > 1)
    for (int t = 0; t < n_tokens; t++) {
        const size_t group = size_t(t) * x.n_groups();
        quantize(s.codes.data() + size_t(t) * width, s.scales.data() + group, s.sums.data() + group,
                 values + size_t(t) * width, width, x.group_size);
    }
    if (m.trace != nullptr) {
        m.trace->add(step_name(layer, name) + ".q", x.codes, n_tokens, {width});
        m.trace->add(step_name(layer, name) + ".s", x.scales, n_tokens, {x.n_groups()});
    }
    return x;
}

// Attention of a chunk: s.q (n_tokens, n_heads * head_dim), rotated, against all positions up to each token's
// own -> s.mix, same shape. The query heads that share a kv head read the same keys and values, so they go
// together, and with them those of the next tokens, up to max_attention_rows. Threads share such blocks out.
void attention(Transformer& m, int layer, int n_tokens, int pos) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    const double start = seconds_now();
    const int n_queries = n_tokens * c.heads_per_kv();  // of one kv head: token by token, then head by head
    const int n_blocks = (n_queries + max_attention_rows - 1) / max_attention_rows;
    const size_t width = padded(pos + n_tokens);  // of a row of scores
    const size_t n_traced = m.trace != nullptr ? n_tokens * c.n_heads * width : 0;
    std::vector<float> all_scores(n_traced), all_probs(n_traced);  // (n_tokens, n_heads, width)
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < c.n_kv_heads * n_blocks; i++) {
        const int kv = i / n_blocks, first = i % n_blocks * max_attention_rows;
        const int n_rows = std::min(max_attention_rows, n_queries - first);
        const float* q[max_attention_rows];
        float *mix[max_attention_rows], *scores[max_attention_rows];
        int n_seen[max_attention_rows], row_of[max_attention_rows];
        for (int r = 0; r < n_rows; r++) {
            const int token = (first + r) / c.heads_per_kv(), head = (first + r) % c.heads_per_kv();
            row_of[r] = token * c.n_heads + kv * c.heads_per_kv() + head;
            q[r] = row(s.q, row_of[r], c.head_dim);
            mix[r] = row(s.mix, row_of[r], c.head_dim);
            if (n_traced > 0) scores[r] = row(all_scores, row_of[r], width);
            n_seen[r] = pos + token + 1;
        }
        static thread_local std::vector<float> buffer;  // stays from call to call
        float* probs = grown(buffer, size_t(max_attention_rows) * padded(s.context));
        attend(mix, s.cache, layer, kv, q, n_seen, n_rows, probs, width, n_traced > 0 ? scores : nullptr);
        if (n_traced > 0) {
            for (int r = 0; r < n_rows; r++)
                std::copy_n(probs + r * width, n_seen[r], row(all_probs, row_of[r], width));
        }
    }
    s.phases.attention += seconds_now() - start;
    for (int t = 0; t < n_tokens && n_traced > 0; t++) {  // a token's matrix is as wide as it sees
        record_rows(m, layer, "attn.scores", row(all_scores, t * c.n_heads, width), width, pos + t + 1);
        record_rows(m, layer, "attn.probs", row(all_probs, t * c.n_heads, width), width, pos + t + 1);
    }
}

// The products of one quantized input with several matrices.
void multiply(Transformer& m, const Int8Matrix& x, std::initializer_list<Product> products) {
    const double start = seconds_now();
    int8_matmul(x, products);
    m.state.phases.matmul += seconds_now() - start;
}

// x (n, dim) += attention of layer l: tokens at positions pos .. pos + n - 1.
void attention_block(Transformer& m, int l, int n, int pos) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const int half = c.head_dim / 2;

    // Normalize, quantize, and multiply by three matrices.
#pragma omp parallel for schedule(static) if (n > 1)
    for (int t = 0; t < n; t++) {
        rmsnorm(row(s.h, t, c.dim), row(s.x, t, c.dim), w.attn_norm + size_t(l) * c.dim, c.dim, c.norm_eps);
    }
    record(m, l, "attn.norm", s.h.data(), n, {c.dim});
    const Int8Matrix h = quantize_step(m, l, "attn.norm", s.h.data(), n, c.dim);
    multiply(m, h, {{s.q.data(), &w.q_proj[l]}, {s.k.data(), &w.k_proj[l]}, {s.v.data(), &w.v_proj[l]}});
    record(m, l, "attn.q_proj", s.q.data(), n, {c.q_dim()});
    record(m, l, "attn.k_proj", s.k.data(), n, {c.kv_dim()});
    record(m, l, "attn.v_proj", s.v.data(), n, {c.kv_dim()});

    // Qwen3 normalizes each head of q and k on its own.
    if (c.arch == Arch::qwen3) {
        const float* q_norm = w.q_norm + size_t(l) * c.head_dim;
        const float* k_norm = w.k_norm + size_t(l) * c.head_dim;
#pragma omp parallel for schedule(static) if (n > 1)
        for (int i = 0; i < n * c.n_heads; i++) {
            rmsnorm(row(s.q, i, c.head_dim), row(s.q, i, c.head_dim), q_norm, c.head_dim, c.norm_eps);
        }
#pragma omp parallel for schedule(static) if (n > 1)
        for (int i = 0; i < n * c.n_kv_heads; i++) {
            rmsnorm(row(s.k, i, c.head_dim), row(s.k, i, c.head_dim), k_norm, c.head_dim, c.norm_eps);
        }
        record(m, l, "attn.q_norm", s.q.data(), n, {c.n_heads, c.head_dim});
        record(m, l, "attn.k_norm", s.k.data(), n, {c.n_kv_heads, c.head_dim});
    }

    // Rotate q and k by their positions, and keep k and v.
#pragma omp parallel for schedule(static) if (n > 1)
    for (int t = 0; t < n; t++) {
        const float *cos = row(s.rope_cos, t, half), *sin = row(s.rope_sin, t, half);
        for (int i = 0; i < c.n_heads; i++)
            rope(row(s.q, t * c.n_heads + i, c.head_dim), cos, sin, c.head_dim);
        for (int i = 0; i < c.n_kv_heads; i++) {
            float* k = row(s.k, t * c.n_kv_heads + i, c.head_dim);
            const float* v = row(s.v, t * c.n_kv_heads + i, c.head_dim);
            rope(k, cos, sin, c.head_dim);
            s.cache.keep(l, i, pos + t, k, v);
        }
    }
    record(m, l, "attn.q_rope", s.q.data(), n, {c.n_heads, c.head_dim});
    record(m, l, "attn.k_rope", s.k.data(), n, {c.n_kv_heads, c.head_dim});

    // Scores, softmax and the weighted sum of values; then back into the residual stream.
    attention(m, l, n, pos);
    record(m, l, "attn.mix", s.mix.data(), n, {c.q_dim()});
    multiply(m, quantize_step(m, l, "attn.mix", s.mix.data(), n, c.q_dim()), {{s.h.data(), &w.o_proj[l]}});
    record(m, l, "attn.o_proj", s.h.data(), n, {c.dim});
    add(s.x.data(), s.h.data(), n * c.dim);
    record(m, l, "attn.residual", s.x.data(), n, {c.dim});
}

// x (n, dim) += down(silu(gate(h)) * up(h)) of layer l, h the normalized x.
void feed_forward_block(Transformer& m, int l, int n) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
#pragma omp parallel for schedule(static) if (n > 1)
    for (int t = 0; t < n; t++) {
        rmsnorm(row(s.h, t, c.dim), row(s.x, t, c.dim), w.ffn_norm + size_t(l) * c.dim, c.dim, c.norm_eps);
    }
    record(m, l, "ffn.norm", s.h.data(), n, {c.dim});
    const Int8Matrix h = quantize_step(m, l, "ffn.norm", s.h.data(), n, c.dim);
    multiply(m, h, {{s.gate.data(), &w.gate_proj[l]}, {s.up.data(), &w.up_proj[l]}});
    record(m, l, "ffn.gate_proj", s.gate.data(), n, {c.hidden_dim});
    record(m, l, "ffn.up_proj", s.up.data(), n, {c.hidden_dim});
#pragma omp parallel for schedule(static) if (n > 1)
    for (int i = 0; i < n * c.hidden_dim; i += 1024) {
        const int width = std::min(1024, n * c.hidden_dim - i);
        swiglu(s.gate.data() + i, s.gate.data() + i, s.up.data() + i, width);
    }
    record(m, l, "ffn.swiglu", s.gate.data(), n, {c.hidden_dim});
    multiply(m, quantize_step(m, l, "ffn.swiglu", s.gate.data(), n, c.hidden_dim),
             {{s.h.data(), &w.down_proj[l]}});
    record(m, l, "ffn.down_proj", s.h.data(), n, {c.dim});
    add(s.x.data(), s.h.data(), n * c.dim);
    record(m, l, "ffn.residual", s.x.data(), n, {c.dim});
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const int n = static_cast<int>(tokens.size());

    // The embedding: one row of the table for each token, dequantized. The table as a whole stays int8.
    for (int t = 0; t < n; t++) {
        const int8_t* codes = w.embedding.row_codes(tokens[t]);
        const float* scales = w.embedding.row_scales(tokens[t]);
        float* x = row(s.x, t, c.dim);
        for (int i = 0; i < c.dim; i++) x[i] = float(codes[i]) * scales[i / c.group_size];
    }
    record(m, -1, "tokens", tokens.data(), n, {});
    record(m, -1, "embed", s.x.data(), n, {c.dim});

    // The rotation angles of each position, the same in every layer.
    const int half = c.head_dim / 2;
    for (int t = 0; t < n; t++) {
        for (int i = 0; i < half; i++) {
            const double angle = double(pos + t) * s.rope_freq[i];
            s.rope_cos[t * half + i] = float(std::cos(angle));
            s.rope_sin[t * half + i] = float(std::sin(angle));
        }
    }

    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, n, pos);
        feed_forward_block(m, l, n);
    }

    // The classifier scores every token of the vocabulary, for the last tokens that were asked for.
    const int first = n - n_logits;
    for (int t = first; t < n; t++) {
        rmsnorm(row(s.h, t, c.dim), row(s.x, t, c.dim), w.final_norm, c.dim, c.norm_eps);
    }
    if (n_logits == 0) return {};
    float* h = row(s.h, first, c.dim);
    record(m, -1, "norm", h, n_logits, {c.dim});
    s.logits.resize(std::max(s.logits.size(), size_t(n_logits) * c.vocab_size));
    multiply(m, quantize_step(m, -1, "norm", h, n_logits, c.dim), {{s.logits.data(), &w.classifier}});
    record(m, -1, "logits", s.logits.data(), n_logits, {c.vocab_size});
    return {s.logits.data(), size_t(n_logits) * c.vocab_size};
}

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

// Allocates a run's memory; `context` is the number of positions to keep.
RunState make_run_state(const ModelConfig& c, int context) {
    const size_t chunk = std::min(max_chunk, context), widest = std::max({c.dim, c.q_dim(), c.hidden_dim});
    RunState s;
    s.context = context;
    s.x.resize(chunk * c.dim);
    s.h.resize(chunk * c.dim);
    s.q.resize(chunk * c.q_dim());
    s.k.resize(chunk * c.kv_dim());
    s.v.resize(chunk * c.kv_dim());
    s.mix.resize(chunk * c.q_dim());
    s.gate.resize(chunk * c.hidden_dim);
    s.up.resize(chunk * c.hidden_dim);
    s.rope_cos.resize(chunk * c.head_dim / 2);
    s.rope_sin.resize(chunk * c.head_dim / 2);
    s.rope_freq = rope_frequencies(c);
    s.logits.resize(c.vocab_size);  // grows to a chunk's rows when perplexity asks for all of them
    s.codes.resize(chunk * widest);
    s.scales.resize(chunk * widest / c.group_size);
    s.sums.resize(chunk * widest / c.group_size);
    s.cache = KvCache(c.n_layers, c.n_kv_heads, c.head_dim, context);
    return s;
}

// Opens a Q8 file and allocates a run's memory. Throws std::runtime_error with one line that names the file.
Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    Transformer m;
    m.file = open_model_file(path, magic_q8, version_q8, weight_bytes);
    if (options.rope_theta) m.file.config.rope_theta = *options.rope_theta;
    m.weights = map_weights(m.file);
    m.state = make_run_state(m.file.config, context_length(options, m.file.config));
    m.trace = trace;
    return m;
}

Model load_model(const Options& options, Trace* trace) {
    auto m = std::make_shared<Transformer>(load_transformer(options.model_path, options, trace));
    const ModelConfig& c = m->file.config;
    Model model;
    model.config = c;
    if (!m->file.tokenizer.empty()) {
        try {
            model.tokenizer = Tokenizer::load(m->file.tokenizer, c.vocab_size);
        } catch (const std::runtime_error& e) {
            throw std::runtime_error(m->file.path + ": " + e.what());
        }
    }
    model.scheme = "Q8: int8, one scale for " + std::to_string(c.group_size) + " weights";
    model.kernel = int8_kernel_name(c.group_size);
    model.file_bytes = m->file.map.bytes().size();
    model.weight_bytes = m->file.weights.size();
    model.weight_bytes_per_token =
        c.n_layers * layer_matrix_bytes(c) + norm_bytes(c) + matrix_bytes(c.vocab_size, c.dim, c.group_size);
    model.macs_per_token =
        uint64_t(c.n_layers) * c.dim * (2 * c.q_dim() + 2 * c.kv_dim() + 3 * uint64_t(c.hidden_dim));
    model.phases = &m->state.phases;
    model.kv_bytes_per_position = uint64_t(2) * c.n_layers * c.kv_dim() * sizeof(float);
    model.max_chunk = max_chunk;
    model.forward = [m](std::span<const int> tokens, int pos, bool all_logits) {
        std::span<const float> logits;
        while (!tokens.empty()) {
            const auto chunk = tokens.first(std::min<size_t>(tokens.size(), max_chunk));
            tokens = tokens.subspan(chunk.size());
            // A trace has the logits of every token, so that it does not depend on how the tokens were fed.
            // Otherwise only the last chunk's are wanted.
            const bool all = all_logits || m->trace != nullptr;
            logits = forward(*m, chunk, pos, all ? int(chunk.size()) : tokens.empty() ? 1 : 0);
            pos += int(chunk.size());
        }
        return all_logits ? logits : logits.last(m->file.config.vocab_size);
    };
    return model;
}

#ifndef RUNQ_NO_MAIN
int main(int argc, char** argv) {
    return run_command_line(argc, argv,
                            {"runq", "Llama 3 and Qwen3 in Q8 (int8, one scale a group)", load_model});
}
#endif
