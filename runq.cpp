// runq: Llama 3 and Qwen3 inference in Q8, to read from top to bottom.
//
// Weights are int8 with one fp32 scale per group of 64 along a row. Before each matrix product the
// activations are quantized the same way, the product runs in int8 x int8 -> int32 group by group, and
// everything else (normalization, rotation, softmax, SwiGLU, residuals) is plain fp32. A layer has 4
// quantizations and 7 products.
//
// This file has what is Q8's own: the matrix, quantize and matmul as plain loops, the tensors of a file, and
// the forward pass. What any scheme needs is in engine/: the operations between products and attention
// (cpu/), model files (model/), the tokenizer (text/), the command line (app/). cpu/ also has the fast forms
// of the loops here. docs/forward-pass.md walks through the same steps with equations and numbers.
//
//     make runq && ./runq model.bin -i "Once upon a time"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/cpu/attention.h"
#include "engine/cpu/ops.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/rows.h"
#include "engine/model/header.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "engine/os/clock.h"
#include "engine/os/threads.h"

// ----------------------------------------------------------------------------
// Q8: the arithmetic. The loops are the specification; int8_quantize and quant_matmul are their fast
// forms.

// Weights in Q8, row by row: value (i, j) is codes[i * n_cols + j] * scales[i * n_groups + j / group_size].
struct Q8Matrix {
    const int8_t* codes = nullptr;         // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;         // (n_rows, n_groups)
    int n_rows = 0, n_cols = 0;            // output channels, input channels
    int group_size = 0;                    // divides n_cols
    const PackedMatrix* packed = nullptr;  // the same weights as the kernels read them fastest, or null

    int n_groups() const { return n_cols / group_size; }
    QuantMatrix view() const { return int8_matrix(codes, scales, n_rows, n_cols, group_size); }
};

// codes (group_size,) of x (group_size,): amax = max|x|, code = clamp(x * (127 / amax)) rounded half to even.
// Returns the scale, amax / 127. Where 127 / amax is not finite (amax 0, or below 3.74e-37), scale and codes
// are 0. -128 never appears.
float quantize_group(int8_t* codes, const float* x, int group_size) {
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

// Quantizes the rows of x: the input of the matrices that follow. out: codes (n_tokens, n_cols) and scales
// (n_tokens, n_cols / group_size).
void quantize(Int8Rows& out, const Rows& x, int group_size) {
    out.resize(x.n_rows, x.n_cols, group_size);
    for_each_row(x.n_rows, [&](int t) {
        int8_t* codes = out.row_codes(t);
        float* scales = out.row_scales(t);
        if (!int8_quantize(codes, scales, out.row_sums(t), x.row(t), x.n_cols, group_size))
            for (int i = 0; i < x.n_cols; i += group_size)
                scales[i / group_size] = quantize_group(codes + i, x.row(t) + i, group_size);
        keep_nan(out, t, x.row(t));
    });
}

// Row t of x times row i of w: each group is an exact int32 sum, scaled by both scales; the groups are added
// up in fp32.
float dot(const Int8Rows& x, int t, const Q8Matrix& w, int i) {
    const int8_t *x_codes = x.row_codes(t), *w_codes = w.codes + size_t(i) * w.n_cols;
    const float *x_scales = x.row_scales(t), *w_scales = w.scales + size_t(i) * w.n_groups();
    float sum = 0;
    for (int g = 0; g < w.n_groups(); g++) {
        int32_t acc = 0;
        for (int k = g * w.group_size; k < (g + 1) * w.group_size; k++)
            acc += int32_t(x_codes[k]) * int32_t(w_codes[k]);
        sum += float(acc) * (w_scales[g] * x_scales[g]);
    }
    return sum;
}

// The products of one input with several matrices: q, k and v; gate and up. By far the most time is spent
// here.
void matmul(const Int8Rows& x, std::initializer_list<MatrixProduct<Q8Matrix>> products) {
    const Stopwatch time(phase_seconds.matmul);
    if (quant_matmul(x, products)) return;
    for (const MatrixProduct<Q8Matrix>& p : products) {
        parallel_for(p.w.n_rows, [&](int i) {
            for (int t = 0; t < x.n_rows; t++) p.out.row(t)[i] = dot(x, t, p.w, i);
        });
    }
}

// One row of the table per token, dequantized. The table as a whole stays int8.
void embed(Rows& out, const Q8Matrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    for (int t = 0; t < out.n_rows; t++) {
        const int8_t* codes = table.codes + size_t(tokens[t]) * table.n_cols;
        const float* scales = table.scales + size_t(tokens[t]) * table.n_groups();
        for (int i = 0; i < out.n_cols; i++) out.row(t)[i] = float(codes[i]) * scales[i / table.group_size];
    }
}

// ----------------------------------------------------------------------------
// The tensors of a file

// Throws if the group size does not divide what it has to.
void check_config(const ModelConfig& c) {
    // A multiple of 4 keeps the scales behind the codes aligned; the limit keeps the int32 sums exact.
    const int size = c.group_size;
    check_value(size >= 4 && size % 4 == 0 && size <= max_group_size, "group_size", size,
                "expected a multiple of 4 up to " + std::to_string(max_group_size));
    for (const auto& [name, n] : c.row_lengths())
        check_value(n % size == 0, name, n, "not a multiple of group_size " + std::to_string(size));
}

const FileFormat<ModelConfig> file_format{.scheme = scheme_q8, .check = check_config};

// Every tensor in the order of the file, which is llama2.c's version 2 with Qwen3's two head norms added. A
// member is made as it stands here (C++ makes members in the order of their declaration), so the list of
// names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    LayerNorms<float> norms = file.layer_norms<float>(c);     // attn, ffn: n_layers of (dim,); last: (dim,)
    HeadNorms<float> head_norms = file.head_norms<float>(c);  // q, k: n_layers of (head_dim,), Qwen3 only

    Q8Matrix embedding = q8("embed", c.vocab_size, c.dim);
    std::vector<Q8Matrix> q_proj = q8_layers("attn.q_proj", c.q_dim(), c.dim);
    std::vector<Q8Matrix> k_proj = q8_layers("attn.k_proj", c.kv_dim(), c.dim);
    std::vector<Q8Matrix> v_proj = q8_layers("attn.v_proj", c.kv_dim(), c.dim);
    std::vector<Q8Matrix> o_proj = q8_layers("attn.o_proj", c.dim, c.q_dim());
    std::vector<Q8Matrix> gate_proj = q8_layers("ffn.gate_proj", c.hidden_dim, c.dim);  // w1 in llama2.c
    std::vector<Q8Matrix> down_proj = q8_layers("ffn.down_proj", c.dim, c.hidden_dim);  // w2
    std::vector<Q8Matrix> up_proj = q8_layers("ffn.up_proj", c.hidden_dim, c.dim);      // w3
    Q8Matrix classifier = c.shared_classifier ? embedding : q8("classifier", c.vocab_size, c.dim);

    // A matrix: its codes, then its scales.
    Q8Matrix q8(const std::string& name, int n_rows, int n_cols) {
        const int8_t* codes = file.next<int8_t>(name + ".codes", {n_rows, n_cols});
        const float* scales = file.next<float>(name + ".scales", {n_rows, n_cols / c.group_size});
        return {codes, scales, n_rows, n_cols, c.group_size};
    }
    std::vector<Q8Matrix> q8_layers(const char* part, int n_rows, int n_cols) {
        return file.layers(c, part, [&](const std::string& name) { return q8(name, n_rows, n_cols); });
    }
    // Packs, for the kernels, all matrices that are multiplied: not the embedding, which is only looked up.
    void pack(PackedMatrices& packed) {
        for (auto* layers : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj})
            for (Q8Matrix& m : *layers) m.packed = packed.add(m.view());
        classifier.packed = packed.add(classifier.view());
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights. Members are made where they stand, as those of Weights are

constexpr int max_chunk = 128;  // tokens of a prompt that go through together

struct RunState {
    ModelConfig c;
    Options options;
    int context;  // positions whose keys and values are kept
    bool traced;  // every step is recorded

    // A row per token of a chunk.
    int n = std::min(max_chunk, context);
    Rows x{n, c.dim};       // the residual stream
    Rows normed{n, c.dim};  // normalized x
    Rows q{n, c.q_dim()};   // n_heads * head_dim
    Rows k{n, c.kv_dim()};  // n_kv_heads * head_dim
    Rows v{n, c.kv_dim()};
    Rows attn_out{n, c.q_dim()};
    Rows proj{n, c.dim};  // the output of o_proj and of down_proj
    Rows gate{n, c.hidden_dim};
    Rows up{n, c.hidden_dim};
    Rows logits{n_logits(options, traced, n), c.vocab_size};  // of the last token, or of all

    Int8Rows xq{n, c.longest_row(), c.group_size};     // the quantized input of the products that come next
    RopeAngles angles{c, n};                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};
    KvCache cache{kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, context};
};

// Its members: file, weights, state and trace (engine/app/model.h).
using Transformer = TransformerOf<ModelConfig, Weights, RunState>;

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions pos, pos + 1, ...
void attention_block(Transformer& m, int l, int pos) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.attn[l], c.dim, c.norm_eps);        record("attn.norm", s.normed);
    quantize(s.xq, s.normed, c.group_size);                            record("attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                  // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                       record("attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                       record("attn.v_proj", s.v, s.xq, w.v_proj[l]);
    if (c.arch == Arch::qwen3) {                                       // each head on its own
        rmsnorm(s.q, s.q, w.head_norms.q[l], c.head_dim, c.norm_eps);  record("attn.q_norm", s.q, c.head_dim);
        rmsnorm(s.k, s.k, w.head_norms.k[l], c.head_dim, c.norm_eps);  record("attn.k_norm", s.k, c.head_dim);
    }
    rope(s.q, s.angles, c.head_dim);                                   record("attn.q_rope", s.q, c.head_dim);
    rope(s.k, s.angles, c.head_dim);                                   record("attn.k_rope", s.k, c.head_dim);
    s.cache.append(l, pos, s.k, s.v);
    attention(s.attn_out, s.scores, s.probs, s.q, s.cache, l, pos);    record("attn.scores", s.scores);
                                                                       record("attn.probs", s.probs);
                                                                       record("attn.mix", s.attn_out);
    quantize(s.xq, s.attn_out, c.group_size);                          record("attn.mix", s.xq);
    matmul(s.xq, {{s.proj, w.o_proj[l]}});                             record("attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                  record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim,  c.norm_eps);        record("ffn.norm", s.normed);
    quantize(s.xq, s.normed, c.group_size);                            record("ffn.norm", s.xq);
    matmul(s.xq, {{s.gate, w.gate_proj[l]},
                  {s.up, w.up_proj[l]}});                              record("ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                       record("ffn.up_proj", s.up, s.xq, w.up_proj[l]);
    swiglu(s.gate, s.gate, s.up);                                      record("ffn.swiglu", s.gate);
    quantize(s.xq, s.gate, c.group_size);                              record("ffn.swiglu", s.xq);
    matmul(s.xq, {{s.proj, w.down_proj[l]}});                          record("ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
    add(s.x, s.proj);                                                  record("ffn.residual", s.x);
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const Recorder record(m.trace, -1);

    embed(s.x, w.embedding, tokens);                                   record("tokens", tokens.data(), n_tokens, {});
                                                                       record("embed", s.x);
    s.angles.set_positions(pos, n_tokens);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, pos);
        feed_forward_block(m, l);
    }
    if (n_logits == 0) return {};
    s.x.keep_last(n_logits);
    rmsnorm(s.normed, s.x, w.norms.last, c.dim, c.norm_eps);           record("norm", s.normed);
    quantize(s.xq, s.normed, c.group_size);                            record("norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                          record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

const OwnOption own_options[] = {kv_option, mmap_option};

Model load_model(const Options& options, Trace* trace) {
    auto m = load_cpu<Transformer>(file_format, max_chunk, options, trace);
    const int group_size = m->file.config.group_size;
    return cpu_model(m, options, "Q8: int8, one scale for " + std::to_string(group_size) + " weights",
                     int8_kernel_name(group_size), max_chunk);
}

#ifndef RUNQ_NO_MAIN
#include "engine/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(
        argc, argv, {"runq", "Llama 3 and Qwen3 in Q8 (int8, one scale a group)", load_model, own_options});
}
#endif
