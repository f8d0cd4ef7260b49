// runq_w8a8: Llama 3 and Qwen3 inference in SmoothQuant W8A8, to read from top to bottom.
//
// Weights are int8 with one fp32 scale per row (output channel), activations are int8 with one fp32 scale per
// token. So the whole dot product of a row and a token is a sum of int32, and is scaled once: what a systolic
// array or an int8 matrix unit computes. One scale for all channels of a token is hard on an LLM, because a
// few channels of its activations are far larger than the others. SmoothQuant (Xiao et al. 2022, arXiv
// 2211.10438) divides these channels and multiplies the weights' input channels, once, at export: this
// program knows nothing of it. docs/w8a8.md tells the whole story.
//
// A file may instead hold a scale per 32 weights; then activations get one per 32 values, too. And a file may
// hold the activations' scales, one per place, measured beforehand; then only the rounding is left to do at
// run time.
//
// This file has what is W8A8's own: the matrix, quantize and matmul as plain loops, the tensors of a file,
// and the forward pass. The rest is in engine/, as runq.cpp says. docs/forward-pass.md walks through the same
// steps with equations and numbers.
//
//     make runq_w8a8 model_w8a8.bin && ./runq_w8a8 model_w8a8.bin -i "Once upon a time"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/cpu/attention.h"
#include "engine/cpu/attention_int8.h"
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
// W8A8: the arithmetic. The loops are the specification; int8_quantize and quant_matmul are their fast forms.

// Weights in W8A8: row i is codes[i] * scales[i]; or, in blocks of 32 columns, each block has a scale.
struct W8A8Matrix {
    const int8_t* codes = nullptr;         // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;         // (n_rows, n_blocks)
    int n_rows = 0, n_cols = 0;            // output channels, input channels
    int block = 0;                         // values under one scale: n_cols or 32
    const PackedMatrix* packed = nullptr;  // the same weights as the kernels read them fastest, or null

    int n_blocks() const { return n_cols / block; }  // per row
    QuantMatrix view() const { return int8_matrix(codes, scales, n_rows, n_cols, block); }
};

// Values under one scale in rows of n_cols, given a header's group_size.
int block_of(int group_size, int n_cols) { return group_size == 0 ? n_cols : group_size; }

// codes (n,) of x (n,) under one scale, which is returned: codes are x / scale rounded half to even and
// clamped to -127..127. The scale is the static one if there is one, otherwise max|x| / 127. Codes are 0
// where the scale is so small that its inverse is not finite; and so is then the scale, unless it is static.
float quantize_block(int8_t* codes, const float* x, int n, const float* static_scale) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
    float inv = static_scale != nullptr ? 1.0f / *static_scale : 127.0f / largest;
    if (!(inv <= std::numeric_limits<float>::max())) inv = 0;
    for (int i = 0; i < n; i++) {
        const float whole = std::nearbyintf(x[i] * inv);
        // Compared in this order, NaN becomes -127 rather than undefined.
        codes[i] = int8_t(std::min(127.0f, whole > -127.0f ? whole : -127.0f));
    }
    if (static_scale != nullptr) return *static_scale;
    return inv > 0 ? largest / 127.0f : 0.0f;
}

// Quantizes the rows of x, each under one scale (group_size 0) or in blocks: the input of the matrices that
// follow.
void quantize(Int8Rows& out, const Rows& x, int group_size, const float* static_scale) {
    const int block = block_of(group_size, x.n_cols);
    out.resize(x.n_rows, x.n_cols, block);
    for_each_row(x.n_rows, [&](int t) {
        int8_t* codes = out.row_codes(t);
        float* scales = out.row_scales(t);
        if (!int8_quantize(codes, scales, out.row_sums(t), x.row(t), x.n_cols, block, static_scale))
            for (int b = 0; b < out.n_groups(); b++)
                scales[b] = quantize_block(codes + b * block, x.row(t) + b * block, block, static_scale);
        keep_nan(out, t, x.row(t));
    });
}

// Row t of x times row i of w: an exact int32 sum, scaled once by the token's scale and the row's. With
// blocks, each block is such a sum.
float dot(const Int8Rows& x, int t, const W8A8Matrix& w, int i) {
    float out = 0;
    for (int b = 0; b < w.n_blocks(); b++) {
        const int8_t* x_codes = x.row_codes(t) + b * w.block;
        const int8_t* w_codes = w.codes + size_t(i) * w.n_cols + b * w.block;
        int32_t sum = 0;
        for (int k = 0; k < w.block; k++) sum += int32_t(x_codes[k]) * int32_t(w_codes[k]);
        out += float(sum) * (w.scales[size_t(i) * w.n_blocks() + b] * x.row_scales(t)[b]);
    }
    return out;
}

// The products of one input with several matrices: q, k and v; gate and up. By far the most time is spent
// here.
void matmul(const Int8Rows& x, std::initializer_list<MatrixProduct<W8A8Matrix>> products) {
    const Stopwatch time(phase_seconds.matmul);
    if (quant_matmul(x, products)) return;
    for (const MatrixProduct<W8A8Matrix>& p : products) {
        parallel_for(p.w.n_rows, [&](int i) {
            for (int t = 0; t < x.n_rows; t++) p.out.row(t)[i] = dot(x, t, p.w, i);
        });
    }
}

// One row of the table per token, dequantized. The table as a whole stays int8.
void embed(Rows& out, const W8A8Matrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    for (int t = 0; t < out.n_rows; t++) {
        const int8_t* codes = table.codes + size_t(tokens[t]) * table.n_cols;
        const float* scales = table.scales + size_t(tokens[t]) * table.n_blocks();
        for (int i = 0; i < out.n_cols; i++) out.row(t)[i] = float(codes[i]) * scales[i / table.block];
    }
}

// ----------------------------------------------------------------------------
// The tensors of a file

// Throws for a block size that there is not, and for rows that cannot share a scale.
void check_config(const ModelConfig& c) {
    const int size = c.group_size;
    check_value(size == 0 || size == 32, "group_size", size, "expected 0 (whole rows) or 32");
    if (size != 0 && c.static_activations)
        throw std::runtime_error("activations is 1 (static) with group_size 32, expected 0");
    // A multiple of 4 keeps the scales behind the codes aligned; the limit keeps the int32 sums exact.
    const int multiple = size == 0 ? 4 : size;
    for (const auto& [name, n] : c.row_lengths()) {
        check_value(n % multiple == 0, name, n, "not a multiple of " + std::to_string(multiple));
        check_value(size != 0 || n <= max_group_size, name, n,
                    "expected at most " + std::to_string(max_group_size));
    }
}

const FileFormat<ModelConfig> file_format{
    .magic = 0x616b3838, .version = 1, .check = check_config, .max_activations = 1};

// Where activations are quantized: four times in a layer, and before the classifier.
enum Place { attn_norm, attn_mix, ffn_norm, ffn_swiglu, n_places };

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    LayerNorms<float> norms = file.layer_norms<float>(c);     // attn, ffn: n_layers of (dim,); last: (dim,)
    HeadNorms<float> head_norms = file.head_norms<float>(c);  // q, k: n_layers of (head_dim,), Qwen3 only

    // (n_layers * n_places + 1,), only if they are static; the last is the classifier's
    const float* act_scales =
        c.static_activations ? file.next<float>("act_scales", {c.n_layers * n_places + 1}) : nullptr;

    W8A8Matrix embedding = w8a8("embed", c.vocab_size, c.dim);
    std::vector<W8A8Matrix> q_proj = w8a8_layers("attn.q_proj", c.q_dim(), c.dim);
    std::vector<W8A8Matrix> k_proj = w8a8_layers("attn.k_proj", c.kv_dim(), c.dim);
    std::vector<W8A8Matrix> v_proj = w8a8_layers("attn.v_proj", c.kv_dim(), c.dim);
    std::vector<W8A8Matrix> o_proj = w8a8_layers("attn.o_proj", c.dim, c.q_dim());
    std::vector<W8A8Matrix> gate_proj = w8a8_layers("ffn.gate_proj", c.hidden_dim, c.dim);  // w1 in llama2.c
    std::vector<W8A8Matrix> down_proj = w8a8_layers("ffn.down_proj", c.dim, c.hidden_dim);  // w2
    std::vector<W8A8Matrix> up_proj = w8a8_layers("ffn.up_proj", c.hidden_dim, c.dim);      // w3
    W8A8Matrix classifier = c.shared_classifier ? embedding : w8a8("classifier", c.vocab_size, c.dim);

    // A matrix: its codes, then its scales.
    W8A8Matrix w8a8(const std::string& name, int n_rows, int n_cols) {
        const int block = block_of(c.group_size, n_cols);
        const int8_t* codes = file.next<int8_t>(name + ".codes", {n_rows, n_cols});
        return {codes, file.next<float>(name + ".scales", {n_rows, n_cols / block}), n_rows, n_cols, block};
    }
    std::vector<W8A8Matrix> w8a8_layers(const char* part, int n_rows, int n_cols) {
        return file.layers(c, part, [&](const std::string& name) { return w8a8(name, n_rows, n_cols); });
    }
    // Packs the matrices that are multiplied for the kernels.
    void pack(PackedMatrices& packed) {
        for (auto* layers : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj})
            for (W8A8Matrix& m : *layers) m.packed = packed.add(m.view());
        classifier.packed = packed.add(classifier.view());
    }
    // The static scale of a place; null if activations get their own. Layer n_layers is the classifier.
    const float* act_scale(int layer, int place) const {
        return act_scales == nullptr ? nullptr : act_scales + layer * n_places + place;
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

    // The quantized input of the products that come next.
    Int8Rows xq{n, c.longest_row(), block_of(c.group_size, c.longest_row())};
    RopeAngles angles{c, n};                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};

    // Keys and values of the positions; or, with --attn int8, these and the chunk's q, k and v in int8.
    bool int8_attention = options.chosen("--attn") == "int8";
    KvCache cache{kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, int8_attention ? 0 : context};
    Int8Attention int8{c, n, int8_attention ? context : 0, traced};
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

    rmsnorm(s.normed, s.x, w.norms.attn[l], c.dim, c.norm_eps);          record("attn.norm", s.normed);
    quantize(s.xq, s.normed, c.group_size, w.act_scale(l, attn_norm));   record("attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                    // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                  record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                         record("attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                         record("attn.v_proj", s.v, s.xq, w.v_proj[l]);
    if (c.arch == Arch::qwen3) {                                         // each head on its own
        rmsnorm(s.q, s.q, w.head_norms.q[l], c.head_dim, c.norm_eps);    record("attn.q_norm", s.q, c.head_dim);
        rmsnorm(s.k, s.k, w.head_norms.k[l], c.head_dim, c.norm_eps);    record("attn.k_norm", s.k, c.head_dim);
    }
    rope(s.q, s.angles, c.head_dim);                                     record("attn.q_rope", s.q, c.head_dim);
    rope(s.k, s.angles, c.head_dim);                                     record("attn.k_rope", s.k, c.head_dim);
    if (s.int8_attention) {
        quantize(s.int8.q, s.q, c.head_dim, nullptr);                    record("attn.q_rope", s.int8.q, c.head_dim);
        quantize(s.int8.k, s.k, c.head_dim, nullptr);                    record("attn.k_rope", s.int8.k, c.head_dim);
        quantize(s.int8.v, s.v, c.head_dim, nullptr);                    record("attn.v_proj", s.int8.v);
        s.int8.cache.append(l, pos, s.int8.k, s.int8.v);
        attention_int8(s.attn_out, s.scores, s.probs, s.int8, l, pos);   record("attn.weights", s.int8.weights);
    } else {
        s.cache.append(l, pos, s.k, s.v);
        attention(s.attn_out, s.scores, s.probs, s.q, s.cache, l, pos);
    }
                                                                         record("attn.scores", s.scores);
                                                                         record("attn.probs", s.probs);
                                                                         record("attn.mix", s.attn_out);
    quantize(s.xq, s.attn_out, c.group_size, w.act_scale(l, attn_mix));  record("attn.mix", s.xq);
    matmul(s.xq, {{s.proj, w.o_proj[l]}});                               record("attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                    record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim,  c.norm_eps);          record("ffn.norm", s.normed);
    quantize(s.xq, s.normed, c.group_size, w.act_scale(l, ffn_norm));    record("ffn.norm", s.xq);
    matmul(s.xq, {{s.gate, w.gate_proj[l]},
                  {s.up, w.up_proj[l]}});                                record("ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                         record("ffn.up_proj", s.up, s.xq, w.up_proj[l]);
    swiglu(s.gate, s.gate, s.up);                                        record("ffn.swiglu", s.gate);
    quantize(s.xq, s.gate, c.group_size, w.act_scale(l, ffn_swiglu));    record("ffn.swiglu", s.xq);
    matmul(s.xq, {{s.proj, w.down_proj[l]}});                            record("ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
    add(s.x, s.proj);                                                    record("ffn.residual", s.x);
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

    embed(s.x, w.embedding, tokens);                                     record("tokens", tokens.data(), n_tokens, {});
                                                                         record("embed", s.x);
    s.angles.set_positions(pos, n_tokens);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, pos);
        feed_forward_block(m, l);
    }
    if (n_logits == 0) return {};
    s.x.keep_last(n_logits);
    rmsnorm(s.normed, s.x, w.norms.last, c.dim, c.norm_eps);             record("norm", s.normed);
    quantize(s.xq, s.normed, c.group_size, w.act_scale(c.n_layers, 0));  record("norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                            record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

const OwnOption own_options[] = {
    kv_option, {"--attn", {"fp32", "int8"}, "products of attention; int8: so is the cache"}, mmap_option};

Model load_model(const Options& options, Trace* trace) {
    if (options.chosen("--attn") == "int8" && options.chosen(kv_option.name) != "f32")
        throw UsageError("--kv: has no meaning with --attn int8, whose cache is int8");
    auto m = load_cpu<Transformer>(file_format, max_chunk, options, trace);
    const ModelConfig& c = m->file.config;
    std::string scheme = c.group_size == 0 ? "W8A8: int8, one scale a row; activations one a "
                                           : "W8A8: int8, one scale for 32 weights; activations one for ";
    scheme += c.static_activations ? "place (static)" : c.group_size == 0 ? "token" : "32 values";
    if (m->state.int8_attention) scheme += "; attention in int8";
    // Rows of different lengths may take different paths: the name is that of the model's width.
    Model model = cpu_model(m, options, scheme, int8_kernel_name(block_of(c.group_size, c.dim)), max_chunk);
    if (m->state.int8_attention) {
        model.kv_bytes_per_position = kv_bytes(c, KvFormat::q8);
        model.fill_cache = [m](int n) { m->state.int8.cache.fill(n); };
    }
    return model;
}

#ifndef RUNQ_NO_MAIN
#include "engine/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(
        argc, argv,
        {"runq_w8a8", "Llama 3 and Qwen3 in SmoothQuant W8A8 (int8 by int8)", load_model, own_options});
}
#endif
