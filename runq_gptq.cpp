// runq_gptq: Llama 3 and Qwen3 inference in 2, 4 and 8 bits, to read from top to bottom.
//
// Each kind of matrix has its own format: codes of 2, 4 or 8 bits with a scale and a zero point for each
// group of weights along a row, and possibly two of each four weights left out. All of them expand to what
// Q8 has (runq.cpp): int8 codes, and one fp32 scale for each group of activations. So the arithmetic is Q8's:
// activations are quantized to int8 in groups of 64, each group of a product is an exact int32 sum, and the
// groups are added up in fp32. How the weights came to their codes (GPTQ, Frantar et al. 2022, arXiv
// 2210.17323) makes no difference here.
//
// This file has what is the scheme's own: the matrix, expanding it and multiplying by it as plain loops, the
// tensors of a file, and the forward pass. The rest is in engine/, as runq.cpp says. docs/gptq.md has the
// formats with pictures and numbers. What quantizes and multiplies can also be a shared library that is
// chosen at run time, for another CPU or a GPU (--backend, docs/backends.md).
//
//     make runq_gptq && ./runq_gptq model_gptq.bin -i "Once upon a time"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/backend/backend.h"
#include "engine/cpu/attention.h"
#include "engine/cpu/expand_sparse.h"
#include "engine/cpu/half.h"
#include "engine/cpu/ops.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/rows.h"
#include "engine/model/header.h"
#include "engine/model/matrix_format.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "engine/os/clock.h"
#include "engine/os/threads.h"

// ----------------------------------------------------------------------------
// The arithmetic. The loops are the specification; int8_quantize and quant_matmul are their fast forms.

// A matrix of a GPTQ file. Of the tables of a QuantMatrix (engine/cpu/quant_matrix.h) a kind has some:
//
//   8 bits           weight = code * scale
//   4 bits, 2 bits   weight = (code - zero) * scale
//   two levels       weight = (5 * code - high nibble of level) * (low nibble of level * row_scale)
//   2:4 sparse       weight = (code - zero) * scale where the mask has a 1, otherwise 0
using GptqMatrix = ModelMatrix;

// A row as Q8 has it: value k is codes[k] * scales[k / group_size], group_size the activations'.
struct ExpandedRow {
    std::vector<int8_t> codes;  // (n_cols,)
    std::vector<float> scales;  // (n_cols / group_size,)
};

ExpandedRow expand(const GptqMatrix& w, int i) {
    std::vector<uint8_t> stored(size_t(w.n_cols));
    unpack_row(stored.data(), w, i);
    const uint8_t* mask = w.kind == QUANT_GEMM_SPARSE ? w.mask + size_t(i) * mask_bytes(w) : nullptr;
    const int times = w.kind == QUANT_GEMM_TWO_LEVEL ? 5 : 1;  // zero points are fifths of a code
    ExpandedRow row;
    size_t next = 0;  // of the stored codes
    for (int first = 0; first < w.n_cols; first += w.group_size) {
        const int group = first / w.group;  // of weights: one or more of the activations'
        row.scales.push_back(weight_scale(w, i, group));
        const int zero = weight_zero(w, i, group);
        for (int k = first; k < first + w.group_size; k++) {
            // What the mask leaves out, two of each four, is 0.
            const bool is_stored = mask == nullptr || (mask[k / 8] >> k % 8 & 1) != 0;
            row.codes.push_back(is_stored ? int8_t(times * int8_t(stored[next++]) - zero) : int8_t(0));
        }
    }
    return row;
}

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

// Row t of x times an expanded row: each group is an exact int32 sum, scaled by both scales; the groups are
// added up in fp32.
float dot(const Int8Rows& x, int t, const ExpandedRow& w) {
    float sum = 0;
    for (int g = 0; g < x.n_groups(); g++) {
        int32_t acc = 0;
        for (int k = g * x.group_size; k < (g + 1) * x.group_size; k++)
            acc += int32_t(x.row_codes(t)[k]) * int32_t(w.codes[k]);
        sum += float(acc) * (w.scales[g] * x.row_scales(t)[g]);
    }
    return sum;
}

// The products of one input with several matrices: q, k and v; gate and up. By far the most time is spent
// here.
void matmul(const Int8Rows& x, std::initializer_list<MatrixProduct<GptqMatrix>> products) {
    const Stopwatch time(phase_seconds.matmul);
    if (quant_matmul(x, products)) return;
    for (const MatrixProduct<GptqMatrix>& p : products) {
        parallel_for(p.w.n_rows, [&](int i) {
            const ExpandedRow row = expand(p.w, i);
            for (int t = 0; t < x.n_rows; t++) p.out.row(t)[i] = dot(x, t, row);
        });
    }
}

// One row of the table per token, dequantized. The table as a whole stays as it is.
void embed(Rows& out, const GptqMatrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    for_each_row(out.n_rows, [&](int t) {
        const ExpandedRow row = expand(table, tokens[t]);
        for (int k = 0; k < out.n_cols; k++)
            out.row(t)[k] = float(row.codes[k]) * row.scales[k / table.group_size];
    });
}

// ----------------------------------------------------------------------------
// The tensors of a file

// The kinds of matrices, in the order of the header; formats/gptq.py has the same list.
namespace kind {
enum Index { embed, q_proj, k_proj, v_proj, o_proj, gate_proj, down_proj, up_proj, classifier };
}  // namespace kind
constexpr int n_kinds = 9;
constexpr const char* kind_names[n_kinds] = {"embed",     "q_proj",    "k_proj",  "v_proj",    "o_proj",
                                             "gate_proj", "down_proj", "up_proj", "classifier"};

struct Config : ModelConfig {
    std::array<MatrixFormat, n_kinds> formats;  // how each kind of matrix is stored
    bool has_order = false;                     // activations are gathered before they are quantized
};

size_t read_own_fields(const HeaderReader& h, Config& c) {
    constexpr size_t formats = 0xC0, has_order = 0xE4;
    c.formats = h.value<decltype(c.formats)>(formats);
    c.has_order = h.checked_int("has_order", h.u8(has_order), 0, 1) == 1;
    return has_order + 1;
}

// The columns of a kind of matrix.
int columns(const ModelConfig& c, int which) {
    return which == kind::o_proj ? c.q_dim() : which == kind::down_proj ? c.hidden_dim : c.dim;
}

// Throws for a format that there is not or that does not fit its matrix, for two of a classifier that is the
// embedding, and for other groups of activations than the formats ask for.
void check_config(const Config& c) {
    for (int which = 0; which < n_kinds; which++)
        check_format(c.formats[which], kind_names[which], columns(c, which));
    const MatrixFormat &embed = c.formats[kind::embed], &classifier = c.formats[kind::classifier];
    if (c.shared_classifier && !(classifier == embed))
        throw std::runtime_error("the classifier is the embedding, but its format is " +
                                 format_text(classifier) + ", not " + format_text(embed));
    const int expected = activation_group(c.formats);
    check_value(c.group_size == expected, "group_size", c.group_size,
                "expected " + std::to_string(expected) + ", the activations'");
}

const FileFormat<Config> file_format{
    .magic = 0x616b6770, .version = 1, .check = check_config, .read_own = read_own_fields, .alignment = 64};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    Config c;

    LayerNorms<float> norms = file.layer_norms<float>(c);     // attn, ffn: n_layers of (dim,); last: (dim,)
    HeadNorms<float> head_norms = file.head_norms<float>(c);  // q, k: n_layers of (head_dim,), Qwen3 only

    // Which channel each column of the matrices that follow is for, n_layers of (n_cols,); null if they are
    // in order.
    std::vector<const int32_t*> attn_norm_order = orders("attn.norm.order", c.dim);
    std::vector<const int32_t*> attn_mix_order = orders("attn.mix.order", c.q_dim());
    std::vector<const int32_t*> ffn_norm_order = orders("ffn.norm.order", c.dim);
    std::vector<const int32_t*> ffn_swiglu_order = orders("ffn.swiglu.order", c.hidden_dim);

    GptqMatrix embedding = matrix("embed", kind::embed, c.vocab_size);
    std::vector<GptqMatrix> q_proj = layers("attn.q_proj", kind::q_proj, c.q_dim());
    std::vector<GptqMatrix> k_proj = layers("attn.k_proj", kind::k_proj, c.kv_dim());
    std::vector<GptqMatrix> v_proj = layers("attn.v_proj", kind::v_proj, c.kv_dim());
    std::vector<GptqMatrix> o_proj = layers("attn.o_proj", kind::o_proj, c.dim);
    std::vector<GptqMatrix> gate_proj = layers("ffn.gate_proj", kind::gate_proj, c.hidden_dim);
    std::vector<GptqMatrix> down_proj = layers("ffn.down_proj", kind::down_proj, c.dim);
    std::vector<GptqMatrix> up_proj = layers("ffn.up_proj", kind::up_proj, c.hidden_dim);
    GptqMatrix classifier =
        c.shared_classifier ? embedding : matrix("classifier", kind::classifier, c.vocab_size);

    std::vector<const int32_t*> orders(const char* part, int n) {
        if (!c.has_order) return std::vector<const int32_t*>(size_t(c.n_layers));
        return file.layers(c, part, [&](const std::string& name) { return file.next_order(name, n); });
    }
    // A matrix: the mask of a sparse one, its codes, then what its groups have.
    GptqMatrix matrix(const std::string& name, kind::Index which, int n_rows) {
        GptqMatrix m{matrix_in(c.formats[which], n_rows, columns(c, which), c.group_size)};
        if (m.kind == QUANT_GEMM_SPARSE)
            m.mask = file.next<uint8_t>(name + ".mask", {n_rows, int(mask_bytes(m))});
        m.codes = m.bits == 8 ? as_bytes(file.next<int8_t>(name + ".codes", {n_rows, m.n_cols}))
                              : file.next<uint8_t>(name + ".codes", {n_rows, int(code_bytes(m))});
        if (m.kind == QUANT_GEMM_TWO_LEVEL) {
            m.levels = file.next<uint8_t>(name + ".groups", {n_rows, n_scales(m)});
            m.scales = file.next<float>(name + ".row_scales", {n_rows});
        } else if (m.scale_type == QUANT_GEMM_ROW_FP32) {
            m.scales = file.next<float>(name + ".scales", {n_rows});
        } else {
            m.scales = file.next<Half>(name + ".scales", {n_rows, n_scales(m)});
            if (m.bits < 8) m.zeros = file.next<uint8_t>(name + ".zeros", {n_rows, int(zero_bytes(m))});
        }
        return m;
    }
    std::vector<GptqMatrix> layers(const char* part, kind::Index which, int n_rows) {
        return file.layers(c, part, [&](const std::string& name) { return matrix(name, which, n_rows); });
    }
    // Throws std::runtime_error for a mask that does not keep two of each four columns: where the code of a
    // column lies would depend on all columns before it. load_cpu() calls it.
    void check() const {
        std::vector<TensorInfo> masks;
        for (const TensorInfo& t : file.all())
            if (t.name.ends_with(".mask")) masks.push_back(t);
        const auto row = [&](const TensorInfo& t, int64_t i) {
            return reinterpret_cast<const uint8_t*>(file.data(t)) + size_t(i) * size_t(t.shape[1]);
        };
        const auto are_good = [&](const TensorInfo& t, int64_t begin, int64_t end) {
            return is_two_of_four(row(t, begin), size_t(end - begin) * size_t(t.shape[1]));
        };
        std::atomic<bool> good = true;
        parallel_lists(
            masks, [](const TensorInfo& t) { return t.shape[0]; },
            [&](const TensorInfo& t, int64_t begin, int64_t end) {
                if (!are_good(t, begin, end)) good = false;
            });
        if (good) return;
        for (const TensorInfo& t : masks) {  // the first
            if (are_good(t, 0, t.shape[0])) continue;
            int i = 0, k = 0;
            while (are_good(t, i, i + 1)) i++;
            const auto n_kept = [&](int at) { return std::popcount(row(t, i)[at / 8] >> at % 8 & 15u); };
            while (n_kept(k) == 2) k += 4;
            throw std::runtime_error(t.name + ": row " + std::to_string(i) + " keeps " +
                                     std::to_string(n_kept(k)) + " of columns " + std::to_string(k) + " to " +
                                     std::to_string(k + 3) + ", expected 2 of each 4");
        }
    }
    // The matrices that are multiplied: all but the embedding, unless it is the classifier, too.
    std::vector<GptqMatrix*> multiplied() {
        std::vector<GptqMatrix*> all{&classifier};
        for (auto* part : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj})
            for (GptqMatrix& m : *part) all.push_back(&m);
        return all;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights. Members are made where they stand, as those of Weights are

constexpr int max_chunk = 128;  // tokens of a prompt that go through together

struct RunState {
    Config c;
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
    Rows gathered{c.has_order ? n : 0, c.longest_row()};      // of a file with orders

    Int8Rows xq{n, c.longest_row(), c.group_size};     // the quantized input of the products that come next
    RopeAngles angles{c, n};                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};
    KvCache cache{kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, context};
    ChosenBackend backend{};  // quantizes and multiplies; if it is none, the functions above do
};

// Its members: file, weights, state and trace (engine/app/model.h).
using Transformer = TransformerOf<Config, Weights, RunState>;

// The input of the products that follow: x, gathered where there is an order, and quantized. Recorded under
// the name of x.
void quantize(RunState& s, const Rows& x, const int32_t* order, const Recorder& record, std::string name) {
    if (order != nullptr) {
        gather(s.gathered, x, order);
        record((name += ".gathered").c_str(), s.gathered);
    }
    const Rows& input = order != nullptr ? s.gathered : x;
    if (!s.backend.quantize(s.xq, input, s.c.group_size, s.traced)) quantize(s.xq, input, s.c.group_size);
    record(name, s.xq);
}

// The products of that input with several matrices.
void matmul(RunState& s, std::initializer_list<MatrixProduct<GptqMatrix>> products) {
    if (!s.backend.multiply(products)) matmul(s.xq, products);
}

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
    quantize(s, s.normed, w.attn_norm_order[l], record, "attn.norm");
    matmul(s, {{s.q, w.q_proj[l]},                                     // q, k and v read the same input
               {s.k, w.k_proj[l]},
               {s.v, w.v_proj[l]}});                                   record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
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
    quantize(s, s.attn_out, w.attn_mix_order[l], record, "attn.mix");
    matmul(s, {{s.proj, w.o_proj[l]}});                                record("attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                  record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim,  c.norm_eps);        record("ffn.norm", s.normed);
    quantize(s, s.normed, w.ffn_norm_order[l], record, "ffn.norm");
    matmul(s, {{s.gate, w.gate_proj[l]},
               {s.up, w.up_proj[l]}});                                 record("ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                       record("ffn.up_proj", s.up, s.xq, w.up_proj[l]);
    swiglu(s.gate, s.gate, s.up);                                      record("ffn.swiglu", s.gate);
    quantize(s, s.gate, w.ffn_swiglu_order[l], record, "ffn.swiglu");
    matmul(s, {{s.proj, w.down_proj[l]}});                             record("ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
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
    quantize(s, s.normed, nullptr, record, "norm");
    s.logits.reserve(n_logits);
    matmul(s, {{s.logits, w.classifier}});                             record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

const OwnOption own_options[] = {
    kv_option,
    mmap_option,
    {"--backend", {"auto", "builtin"}, "what quantizes and multiplies (docs/backends.md)", "or a NAME"}};

Model load_model(const Options& options, Trace* trace) {
    auto m = load_cpu<Transformer>(file_format, max_chunk, options, trace);
    const Config& c = m->file.config;
    const auto matrices = options.info ? std::vector<GptqMatrix*>{} : m->weights.multiplied();
    m->state.backend.load("runq_gptq", options.own.at("--backend"), matrices,
                          packs_weights(m->file, options) ? &m->packed : nullptr);
    Model model =
        cpu_model(m, options, "GPTQ: 2, 4 and 8 bits", m->state.backend.kernel_name(c.group_size), max_chunk);
    for (int which = 0; which < n_kinds; which++)
        model.own_fields.push_back(
            format_field(m->weights.file, kind_names[which], c.formats[which], columns(c, which)));
    return model;
}

#ifndef RUNQ_NO_MAIN
#include "engine/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(
        argc, argv, {"runq_gptq", "Llama 3 and Qwen3 in 2, 4 and 8 bits (GPTQ)", load_model, own_options});
}
#endif
