// runq_w8a8: Llama 3 and Qwen3 in SmoothQuant W8A8, from the bytes of a model file to words on the screen.
//
// Weights are int8 with one fp32 scale per row (output channel), activations are int8 with one per token. So
// the whole dot product of a row and a token is a sum of int32, and is scaled once: what a systolic array
// computes. An LLM makes that hard, as a few channels of its activations are far larger than the others.
// SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) divides these at export, and multiplies the weights.
//
// A file may instead have a scale per 32 weights; then activations get one per 32 values, too. Or it has the
// activations' scales, one per place, measured beforehand. With --attn int8 the two products of attention are
// int8, too, and so is the KV cache. All else is fp32, as in runq.cpp. docs/w8a8.md tells the whole story.
//
// The file is complete. This line compiles it, and the next one tells a story:
//
//     g++ -std=c++20 -O3 -march=native -ffp-contract=off -fopenmp runq_w8a8.cpp -o runq_w8a8 -lpcre2-8 -lutf8proc
//     ./runq_w8a8 model_w8a8.bin -i "Once upon a time"
//
// -DNO_TOKENIZER does without PCRE2 and utf8proc: token ids in, token ids out. Loops are plain: they are the
// specification. With -DENGINE, as `make` compiles it, engine/ takes the place of the two regions in #ifdef
// ENGINE: the same names, faster, with what is left out here, as a system prompt in chat (docs/engine.md).

#ifdef ENGINE
#include "engine/cpu/attention_int8.h"
#include "engine/program.h"
#else

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef NO_TOKENIZER
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#endif
#if __has_include(<sys/mman.h>)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

// ---- section rows ----------------------------------------------------------
// Threads, errors, and what the forward pass hands from one operation to the next: a row per token

// A wrong command line: exit code 2. All other errors: exit code 1.
struct UsageError : std::logic_error {
    using std::logic_error::logic_error;
};

// Throws an error that says its parts, one after another.
template <class Error = std::runtime_error>
[[noreturn]] void fail(const auto&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

// Calls body(i) for each i below n, in all threads.
void parallel_for(int64_t n, auto body) {
#pragma omp parallel for schedule(guided) if (n > 1)
    for (int64_t i = 0; i < n; i++) body(int(i));
}

// (n_rows, n_cols) fp32, with room for more rows. An operation sets n_rows of what it writes.
struct Rows {
    int n_rows, n_cols;
    std::vector<float> values;

    explicit Rows(int rows = 0, int cols = 0) : n_rows(rows), n_cols(cols), values(size_t(rows) * cols) {}
    float* row(int i) { return values.data() + size_t(i) * size_t(n_cols); }
    const float* row(int i) const { return values.data() + size_t(i) * size_t(n_cols); }
    void reserve(int rows) { values.resize(std::max(values.size(), size_t(rows) * size_t(n_cols))); }
    // Drops all rows but the last n.
    void keep_last(int n) {
        std::copy(row(n_rows - n), row(n_rows), row(0));
        n_rows = n;
    }
};

// Rows in int8: codes (n_rows, n_cols), and a scale for each group of group_size along a row.
struct Int8Rows {
    int n_rows, n_cols, group_size;
    std::vector<int8_t> codes;
    std::vector<float> scales;

    explicit Int8Rows(int max_rows = 0, int columns = 0, int group = 1) { resize(max_rows, columns, group); }
    int n_groups() const { return n_cols / group_size; }
    int8_t* row_codes(int i) { return codes.data() + size_t(i) * size_t(n_cols); }
    const int8_t* row_codes(int i) const { return codes.data() + size_t(i) * size_t(n_cols); }
    float* row_scales(int i) { return scales.data() + size_t(i) * size_t(n_groups()); }
    const float* row_scales(int i) const { return scales.data() + size_t(i) * size_t(n_groups()); }
    void resize(int rows, int columns, int group) {
        n_rows = rows, n_cols = columns, group_size = group;
        codes.resize(size_t(rows) * size_t(columns));
        scales.resize(size_t(rows) * size_t(n_groups()));
    }
};

// One of the products that read the same input: out (n_tokens, w.n_rows) = x times w transposed.
template <class Matrix>
struct MatrixProduct {
    Rows& out;
    const Matrix& w;
};

inline bool all_finite(const float* x, size_t n) {
    return std::all_of(x, x + n, [](float value) { return std::isfinite(value); });
}

// What the engine does faster, and is asked first: nothing, in a file that is compiled alone.
struct PackedMatrix;
inline bool fast_quantize(Int8Rows&, const Rows&, int) { return false; }
bool fast_matmul(const Int8Rows&, const auto&) { return false; }
// ---- end of rows -----------------------------------------------------------

// ---- section config --------------------------------------------------------
// The numbers of a model, as the header of its file has them

enum class Arch : uint32_t { llama = 1, qwen3 = 2, qwen3_moe = 3 };

struct ModelConfig {
    Arch arch = Arch::llama;
    int dim = 0;         // length of a token's vector (hidden_size)
    int hidden_dim = 0;  // length inside the feed-forward block (intermediate_size)
    int n_layers = 0;
    int n_heads = 0, n_kv_heads = 0;  // n_heads / n_kv_heads query heads share a key/value head
    int head_dim = 0;                 // n_heads * head_dim need not be dim
    int vocab_size = 0;               // rows of the embedding and of the classifier
    int max_seq_len = 0;              // positions the model was made for
    bool shared_classifier = false;   // the classifier is the embedding (tied)
    int group_size = 0;               // weights that share one scale; 0: the whole row
    bool static_activations = false;  // activations' scales are in the file, not found at run time
    int rotation_block = 0;           // rows of the embedding are rotated, in such blocks; 0: they are not
    float norm_eps = 1e-5f, rope_theta = 500000;
    int rope_type = 0, original_max_position = 0;  // config.json's rope_scaling: 1 llama3, 2 linear, 3 yarn
    float rope_factor = 1, low_freq_factor = 1, high_freq_factor = 4, attention_factor = 1;
    int bos_id = -1;                      // -1: none
    std::vector<int> eos_ids;             // generation ends at any of these
    float temperature = 1, top_p = 0.9f;  // sampling defaults; temperature 0 is greedy, top_p 1 off
    int top_k = 0;                        // 0: off

    bool has_head_norms() const { return arch != Arch::llama; }
    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
};
// ---- end of config ---------------------------------------------------------

// As fast_quantize() above, under a static scale if that is not null.
inline bool fast_quantize(Int8Rows&, const Rows&, int, const float*) { return false; }

// ---- section fp32 ----------------------------------------------------------
// fp32 arithmetic with one answer: every sum has an order, and a fused multiply-add is written where it is
// meant (docs/numerics.md)

#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ == 2
#error "runq needs fp32 as IEEE 754 has it: compile without -Ofast, -ffast-math and -mfpmath=387"
#endif

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

// Whether a product is rounded before something is added to it, as the text says: -ffp-contract=off.
inline bool rounds_products() {
    volatile float a = 1 + 0x1p-12f, c = 1 + 0x1p-11f;
    const float product = a * a;
    return product - c == 0;
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
// ---- end of fp32 -----------------------------------------------------------

// ---- section attention of a query ------------------------------------------
// What stands between the products: softmax, SwiGLU, and attention of one query

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
// ---- end of attention of a query -------------------------------------------

// The keys and values of every position so far, n_numbers (head_dim) of each head: (n_layers, context,
// n_kv_heads * n_numbers) each. Memory is taken as positions are used.
template <class T>
struct KvCacheOf {
    int head_dim, kv_dim, context;
    std::unique_ptr<T[]> keys, values;

    KvCacheOf(const ModelConfig& c, int n_positions, int n_numbers = 0)
        : head_dim(n_numbers ? n_numbers : c.head_dim),
          kv_dim(c.n_kv_heads * head_dim),
          context(n_positions) {
        keys = std::make_unique_for_overwrite<T[]>(at(c.n_layers, 0));
        values = std::make_unique_for_overwrite<T[]>(at(c.n_layers, 0));
    }
    size_t at(int layer, int pos) const { return (size_t(layer) * context + pos) * kv_dim; }
    // k and v (n_tokens, kv_dim), of positions pos, pos + 1, ...
    void append(int layer, int pos, int n_tokens, const T* k, const T* v) {
        std::copy_n(k, size_t(n_tokens) * kv_dim, &keys[at(layer, pos)]);
        std::copy_n(v, size_t(n_tokens) * kv_dim, &values[at(layer, pos)]);
    }
    void append(int layer, int pos, const Rows& k, const Rows& v) {
        append(layer, pos, k.n_rows, k.row(0), v.row(0));
    }
};
using KvCache = KvCacheOf<float>;

// What each head makes of each position, before or after softmax, if a trace wants it: row t * n_heads + h is
// of token t, whose first pos + t + 1 positions count.
struct HeadScores : Rows {
    int n_heads, pos = 0;

    HeadScores(bool is_wanted, int max_tokens, int heads, int n_positions)
        : Rows(is_wanted ? max_tokens * heads : 0, n_positions), n_heads(heads) {}
};

// Attention of a chunk: q (n_tokens, n_heads * head_dim), rotated, of tokens at positions pos, pos + 1, ...,
// each against all positions up to its own -> out, same shape. Their keys and values are in the cache.
inline void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
                      int layer, int pos) {
    const int d = cache.head_dim, n_heads = q.n_cols / d, heads_per_kv = n_heads * d / cache.kv_dim;
    const bool keeps = !scores.values.empty();
    out.n_rows = q.n_rows;
    scores.n_rows = probs.n_rows = q.n_rows * n_heads;
    scores.pos = probs.pos = pos;
    parallel_for(int64_t(q.n_rows) * n_heads, [&](int i) {
        const int t = i / n_heads, h = i % n_heads, n_positions = pos + t + 1;
        const size_t first = cache.at(layer, 0) + size_t(h / heads_per_kv) * d;
        std::vector<float> unkept(keeps ? 0 : size_t(n_positions));
        attend(out.row(t) + h * d, keeps ? scores.row(i) : unkept.data(),
               keeps ? probs.row(i) : unkept.data(), q.row(t) + h * d, &cache.keys[first],
               &cache.values[first], n_positions, d, cache.kv_dim);
    });
}

// ---- section tensors and options -------------------------------------------
// A model file: 256 bytes of header, the weights, the tokenizer section; little-endian, used in place. What
// the command line asks for, and a record of all that a run computes

static_assert(std::endian::native == std::endian::little);
constexpr size_t header_size = 256;
[[maybe_unused]] constexpr int max_group_size = 1 << 16;  // keeps int32 sums of int8 products exact

// Throws "NAME is VALUE, WHY" unless the value fits.
void check_value(bool fits, const std::string& name, int64_t value, const auto&... why) {
    if (!fits) fail(name, " is ", value, ", ", why...);
}

// What a program says of its files. Config is ModelConfig, or has it and fields of the program's own.
struct HeaderReader;
template <class Config>
struct FileFormat {
    uint32_t magic;                // a file's first word
    int version;                   // and its second
    void (*check)(const Config&);  // throws if the program cannot run such a model
    // If it is there, reads the fields of the program's own, from byte 0xC0 on; what follows is 0.
    size_t (*read_own)(const HeaderReader&, Config&) = nullptr;
    Arch first_arch = Arch::llama, last_arch = Arch::qwen3;  // that it runs, and those between
    int max_activations = 0;                                 // the highest value of that field
    int alignment = 1;                                       // bytes: every tensor begins at a multiple of it
};

// The tensors of a file, one after another from the end of the header on.
struct TensorList {
    std::span<const std::byte> weights;
    size_t alignment, end = 0;  // end: of the tensors so far

    // The next tensor, in place.
    template <class T>
    const T* next(const std::string& name, const std::vector<int>& shape) {
        const size_t begin = (end + alignment - 1) / alignment * alignment;
        size_t n_bytes = sizeof(T);
        for (const int n : shape) n_bytes *= size_t(n);
        if (begin > weights.size() || n_bytes > weights.size() - begin)
            fail("weights are ", weights.size(), " bytes and end before those of ", name);
        end = begin + n_bytes;
        return reinterpret_cast<const T*>(weights.data() + begin);
    }
    // What make(name) gives for each layer's tensor: "layers.0.NAME", "layers.1.NAME", ...
    auto layers(const ModelConfig& c, const std::string& name, auto make) {
        std::vector<decltype(make(name))> found;
        for (int l = 0; l < c.n_layers; l++)
            found.push_back(make("layers." + std::to_string(l) + "." + name));
        return found;
    }
    template <class T>
    std::vector<const T*> vectors(const ModelConfig& c, const std::string& name, int n) {
        return layers(c, name, [&](const std::string& full_name) { return next<T>(full_name, {n}); });
    }
};

template <class Config>
struct ModelFileOf {
    Config config;
    std::span<const std::byte> bytes, weights, tokenizer;  // of the whole file, and of its parts
};

// A loaded model, and all that a run of it needs. Weights and RunState are the program's own.
template <class Config, class Weights, class RunState>
struct TransformerOf {
    ModelFileOf<Config> file;
    Weights weights;
    RunState state;
    struct Trace* trace = nullptr;  // not null: record every step
};

// An option of one program alone. Its value is one of `choices`, the first by default.
struct OwnOption {
    const char* name;
    std::vector<const char*> choices;
    const char* help;
};

struct Options {
    std::string model_path;
    std::optional<std::string> prompt, file, ppl, trace;  // a text, paths; file "-": standard input
    std::vector<int> ids;                                 // the prompt as these; {}: not given
    bool chat = false, print_ids = false, digest = false;
    int steps = 256, ctx = 0, threads = 0;  // 0: to the end of the context; at most 4096; OpenMP's default
    std::optional<float> temp, top_p;       // these three: the model's if not given
    std::optional<int> top_k;
    std::optional<uint64_t> seed;            // another in each run if not given
    std::map<std::string, std::string> own;  // the program's own options
};

// How many tokens' logits a chunk of n tokens needs at most: those of all for perplexity or a trace.
inline int n_logits(const Options& o, bool is_traced, int n) { return o.ppl || is_traced ? n : 1; }
inline KvCache kv_cache(const Options&, const ModelConfig& c, int context) { return {c, context}; }
constexpr int accumulator_layer = 1;  // of which a trace has the integer sums of each product
// Every intermediate tensor of a run, by step name; all tokens one after another, however they were fed.
struct Trace {
    struct Tensor {
        const char* type;               // safetensors' name
        int n_tokens = 0;               // so far
        std::vector<int> shape;         // of a token; {} is one number
        std::vector<std::string> rows;  // bytes along the last dimension
    };
    std::map<std::string, Tensor> tensors;
    void write(const std::string& path) const;  // a safetensors file
};

// Appends the steps of one layer, or those outside the layers (layer -1), if there is a trace.
struct Recorder {
    Trace* trace;
    int layer;

    Recorder(Trace* t, int l) : trace(t), layer(l) {}
    // n_tokens values of the given shape. The last dimension may grow from call to call, as attention's does.
    template <class T>
    void operator()(const std::string& name, const T* values, int n_tokens, std::vector<int> shape) const;
    void operator()(const std::string& name, const Rows& x) const {
        (*this)(name, x.row(0), x.n_rows, {x.n_cols});
    }
    void operator()(const std::string& name, const Rows& x, int head_dim) const {
        (*this)(name, x.row(0), x.n_rows, {x.n_cols / head_dim, head_dim});
    }
    void operator()(const std::string& name, const Int8Rows& x) const {
        (*this)(name + ".q", x.codes.data(), x.n_rows, {x.n_cols});
        (*this)(name + ".s", x.scales.data(), x.n_rows, {x.n_groups()});
    }
    void operator()(const std::string& name, const HeadScores& x) const;
    template <class Matrix>  // a product, and in one layer the integer sums of its groups
    void operator()(const std::string& name, const Rows& out, const Int8Rows& x, const Matrix& w) const {
        (*this)(name, out);
        if (trace == nullptr || layer != accumulator_layer) return;
        std::vector<int32_t> sums;
        for (int t = 0; t < x.n_rows; t++) {
            for (size_t k = 0; k < size_t(w.n_rows) * size_t(w.n_cols); k++) {
                if (k % size_t(w.group_size) == 0) sums.push_back(0);
                sums.back() += x.row_codes(t)[k % size_t(w.n_cols)] * w.codes[k];
            }
        }
        (*this)(name + ".acc", sums.data(), x.n_rows, {w.n_rows, w.n_cols / w.group_size});
    }
};
// ---- end of tensors and options --------------------------------------------

// ----------------------------------------------------------------------------
// Attention in int8 (--attn int8): both products are int8 by int8, with exact int32 sums (SmoothQuant,
// section 5). Each head of q, k and v is quantized under one scale. docs/w8a8.md says what this costs

void quantize(Int8Rows& out, const Rows& x, int group_size,
              const float* static_scale);  // of the scheme, below

// lift scores_int8
// scores (n_positions,) of a query against the keys of its kv head, all in codes: q (head_dim,), keys
// (n_positions, head_dim) with a scale each, of every n_kv_heads-th head. Each is an exact sum, scaled once.
inline void scores_int8(float* scores, const int8_t* q, float q_scale, const int8_t* keys,
                        const float* key_scales, int n_positions, int n_kv_heads, int head_dim) {
    const float scale = q_scale * (1.0f / std::sqrt(float(head_dim)));
    for (int p = 0; p < n_positions; p++) {
        const int8_t* key = keys + int64_t(p) * n_kv_heads * head_dim;
        int32_t sum = 0;
        for (int i = 0; i < head_dim; i++) sum += int32_t(q[i]) * int32_t(key[i]);
        scores[p] = float(sum) * (scale * key_scales[p * n_kv_heads]);
    }
}

// lift mix_int8
// out (head_dim,) is the sum over positions of weight times value, in codes: weights (n_positions,) under one
// scale, values as keys are in scores_int8. sums (head_dim,) is memory for the exact sums.
inline void mix_int8(float* out, int32_t* sums, const int8_t* weights, float weights_scale,
                     const int8_t* values, int n_positions, int n_kv_heads, int head_dim) {
    for (int i = 0; i < head_dim; i++) sums[i] = 0;
    for (int p = 0; p < n_positions; p++) {
        const int8_t* value = values + int64_t(p) * n_kv_heads * head_dim;
        for (int i = 0; i < head_dim; i++) sums[i] += int32_t(weights[p]) * int32_t(value[i]);
    }
    for (int i = 0; i < head_dim; i++) out[i] = float(sums[i]) * weights_scale;
}

// What attention in int8 reads, and of a trace the weights that it multiplies values by.
struct Int8Attention {
    static constexpr int max_context = 133144;  // 133144 * 127 * 127 < 2^31: sums stay within int32
    Int8Rows q, k, v;         // of the chunk in hand: a row per token, a group of head_dim codes per head
    KvCacheOf<int8_t> codes;  // of keys and values: head_dim codes of each head, and a scale
    KvCacheOf<float> scales;
    HeadScores weights;

    Int8Attention(const ModelConfig& c, int max_tokens, int context, bool traced)
        : codes(c, context), scales(c, context, 1), weights(traced, max_tokens, c.n_heads, context) {
        check_value(context <= max_context, "--attn int8: the context", context, "expected at most ",
                    max_context, ", so that sums stay within int32");
    }
};

// Attention of the chunk a.q, a.k and a.v, as attention() does it in fp32. Each position's value has its own
// scale, which cannot be taken out of a sum over positions. So it goes to the probability, before that is
// quantized: then one scale is left for each query.
inline void attention_int8(Rows& out, HeadScores& scores, HeadScores& probs, Int8Attention& a, int layer,
                           int pos) {
    a.codes.append(layer, pos, a.k.n_rows, a.k.codes.data(), a.v.codes.data());
    a.scales.append(layer, pos, a.k.n_rows, a.k.scales.data(), a.v.scales.data());
    const int d = a.codes.head_dim, n_heads = a.q.n_groups(), n_kv_heads = a.scales.kv_dim;
    out.n_rows = a.q.n_rows;
    for (HeadScores* kept : {&scores, &probs, &a.weights})
        kept->n_rows = a.q.n_rows * n_heads, kept->pos = pos;
    parallel_for(int64_t(a.q.n_rows) * n_heads, [&](int i) {
        const int t = i / n_heads, h = i % n_heads, n_positions = pos + t + 1;
        const size_t first = a.scales.at(layer, 0) + h / (n_heads / n_kv_heads);
        Rows x(1, n_positions);  // scores, then probabilities, then weights
        Int8Rows weights;
        std::vector<int32_t> sums(size_t(d), 0);
        const auto keep = [&](HeadScores& kept) {
            if (!kept.values.empty()) std::ranges::copy(x.values, kept.row(i));
        };
        scores_int8(x.row(0), a.q.row_codes(t) + h * d, a.q.row_scales(t)[h], &a.codes.keys[first * d],
                    &a.scales.keys[first], n_positions, n_kv_heads, d);
        keep(scores);
        softmax(x.row(0), n_positions);
        keep(probs);
        for (int p = 0; p < n_positions; p++) x.row(0)[p] *= a.scales.values[first + size_t(p) * n_kv_heads];
        keep(a.weights);
        quantize(weights, x, 0, nullptr);
        mix_int8(out.row(t) + h * d, sums.data(), weights.row_codes(0), weights.scales[0],
                 &a.codes.values[first * d], n_positions, n_kv_heads, d);
    });
}

#endif  // ENGINE

// ----------------------------------------------------------------------------
// Operations: on pointers and numbers, then on the rows of all tokens

// lift rmsnorm
// out[i] = weight[i] * x[i] / sqrt(mean(x^2) + eps) over n values (Zhang & Sennrich 2019, arXiv 1910.07467).
// In fp64, rounded once. Every eighth square goes into the same of 8 sums.
inline void rmsnorm(float* out, const float* x, const float* weight, int n, float eps) {
    double sums[8] = {}, sum = 0;
    for (int i = 0; i < n; i++) sums[i % 8] += double(x[i]) * x[i];
    for (const double part : sums) sum += part;
    const double inv = 1.0 / std::sqrt(sum / n + eps);
    for (int i = 0; i < n; i++) out[i] = float(weight[i] * (x[i] * inv));
}

// lift rope
// Rotates the adjacent pairs (2i, 2i + 1) of one head by cos and sin (head_dim / 2,) (Su et al. 2021, arXiv
// 2104.09864).
inline void rope(float* head, const float* cos, const float* sin, int head_dim) {
    for (int i = 0; i < head_dim / 2; i++) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = fused_multiply_add(a, cos[i], -(b * sin[i]));
        head[2 * i + 1] = fused_multiply_add(a, sin[i], b * cos[i]);
    }
}

// Normalizes each run of n values: whole rows of x, or each head of q or k. out may be x.
inline void rmsnorm(Rows& out, const Rows& x, const float* weight, int n, float eps) {
    out.n_rows = x.n_rows;
    parallel_for(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i += n) rmsnorm(out.row(t) + i, x.row(t) + i, weight, n, eps);
    });
}

// cos and sin of a chunk's angles. Pair i turns by theta^(-2i / head_dim) radians per position; rope_scaling
// divides low frequencies by `factor`, blending by turns in the first context (llama3) or by pairs (YaRN).
struct RopeAngles {
    std::vector<float> frequencies;  // (head_dim / 2,)
    Rows cos, sin;                   // (n_tokens, head_dim / 2)
    double scale = 1;                // of both: YaRN's attention_factor

    RopeAngles(const ModelConfig& c, int n) : cos(n, c.head_dim / 2), sin(n, c.head_dim / 2) {
        scale = c.attention_factor;
        for (int i = 0; i < c.head_dim / 2; i++) {
            double f = std::pow(double(c.rope_theta), -2.0 * i / c.head_dim);
            if (c.rope_type > 0) {
                const double turns = c.original_max_position * f / (2 * std::numbers::pi);
                const double x = c.rope_type == 1 ? turns : c.head_dim - i;
                const double low = c.low_freq_factor, high = c.high_freq_factor;
                const double smooth = std::clamp((x - low) / (high - low), 0.0, 1.0);
                f = (1 - smooth) * f / c.rope_factor + smooth * f;
            }
            frequencies.push_back(float(f));
        }
    }
    // For n_tokens tokens at positions pos, pos + 1, ... In fp64, rounded once.
    void set_positions(int pos, int n_tokens) {
        cos.n_rows = sin.n_rows = n_tokens;
        for (int t = 0; t < n_tokens; t++)
            for (size_t i = 0; i < frequencies.size(); i++) {
                const double angle = double(pos + t) * frequencies[i];
                cos.row(t)[i] = float(scale * std::cos(angle));
                sin.row(t)[i] = float(scale * std::sin(angle));
            }
    }
};

// Rotates every head of every token, in place. x: (n_tokens, heads * head_dim).
inline void rope(Rows& x, const RopeAngles& angles, int head_dim) {
    parallel_for(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i += head_dim)
            rope(x.row(t) + i, angles.cos.row(t), angles.sin.row(t), head_dim);
    });
}

// SwiGLU of all tokens. out may be gate.
inline void swiglu(Rows& out, const Rows& gate, const Rows& up) {
    out.n_rows = gate.n_rows;
    parallel_for(gate.n_rows, [&](int t) { swiglu(out.row(t), gate.row(t), up.row(t), gate.n_cols); });
}

// x += y
inline void add(Rows& x, const Rows& y) {
    parallel_for(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i++) x.row(t)[i] += y.row(t)[i];
    });
}

// ----------------------------------------------------------------------------
// W8A8: the arithmetic. fast_quantize and fast_matmul are the engine's forms of it

// Weights in W8A8: row i is codes[i] * scales[i]; or, in groups of 32 columns, each group has a scale.
struct W8A8Matrix {
    const int8_t* codes = nullptr;         // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;         // (n_rows, n_groups)
    int n_rows = 0, n_cols = 0;            // output channels, input channels
    int group_size = 0;                    // values under one scale: n_cols or 32
    const PackedMatrix* packed = nullptr;  // the engine's copy, if it has one

    int n_groups() const { return n_cols / group_size; }
};

// Values under one scale in rows of n_cols, given a header's group_size, where 0 is the whole row.
inline int group_of(int group_size, int n_cols) { return group_size == 0 ? n_cols : group_size; }

// lift quantize_group
// codes (n,) of x (n,) under one scale, which is returned: codes are x / scale rounded half to even and
// clamped to -127..127. The scale is the static one if there is one, otherwise max|x| / 127. Codes are 0
// where the scale is so small that its inverse is not finite; and so is then the scale, unless it is static.
inline float quantize_group(int8_t* codes, const float* x, int n, const float* static_scale = nullptr) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
    float inv = static_scale != nullptr ? 1.0f / *static_scale : 127.0f / largest;
    if (!(inv <= std::numeric_limits<float>::max())) inv = 0;
    for (int i = 0; i < n; i++) {
        const float r = std::nearbyintf(x[i] * inv);
        const float low = r > -127.0f ? r : -127.0f;  // in this order, NaN becomes -127 rather than undefined
        codes[i] = int8_t(low < 127.0f ? low : 127.0f);
    }
    if (static_scale != nullptr) return *static_scale;
    return inv > 0 ? largest / 127.0f : 0.0f;
}

// Quantizes the rows of x: the input of the matrices that follow, or the heads of q, k or v. out: codes
// (n_tokens, n_cols) and scales (n_tokens, n_groups), with group_size 0 one a row; all scales of a row that
// is not finite are NaN, as no code can say so.
void quantize(Int8Rows& out, const Rows& x, int group_size, const float* static_scale) {
    const int size = group_of(group_size, x.n_cols);
    if (fast_quantize(out, x, size, static_scale)) return;
    out.resize(x.n_rows, x.n_cols, size);
    parallel_for(x.n_rows, [&](int t) {
        float* scales = out.row_scales(t);
        for (int i = 0; i < x.n_cols; i += size)
            scales[i / size] = quantize_group(out.row_codes(t) + i, x.row(t) + i, size, static_scale);
        if (!all_finite(x.row(t), size_t(x.n_cols))) std::fill_n(scales, out.n_groups(), NAN);
    });
}

// lift dot
// A row of activations (n,) times rows of weights (n_rows, n) -> out (n_rows,): an exact int32 sum of each
// group, mostly of the whole row, scaled by both scales. Activations are int8, widened to int16: faster.
template <int n_rows>
void dot(float* out, const int16_t* x, const float* x_scales, const int8_t* w, const float* w_scales, int n,
         int group_size) {
    const int n_groups = n / group_size;
    float total[n_rows] = {};
    for (int g = 0; g < n_groups; g++) {
        int32_t sums[n_rows] = {};
        for (int k = g * group_size; k < (g + 1) * group_size; k++)
            for (int r = 0; r < n_rows; r++) sums[r] += int32_t(x[k]) * int32_t(w[r * n + k]);
        for (int r = 0; r < n_rows; r++)
            total[r] = fused_multiply_add(float(sums[r]), w_scales[r * n_groups + g] * x_scales[g], total[r]);
    }
    for (int r = 0; r < n_rows; r++) out[r] = total[r];
}

// The products of one input with several matrices: q, k and v; gate and up. By far the most time is spent
// here. A row of weights is read once for all tokens of a chunk, eight rows together; for a single token one
// after the other, which memory delivers faster.
void matmul(const Int8Rows& x, std::initializer_list<MatrixProduct<W8A8Matrix>> products) {
    if (fast_matmul(x, products)) return;
    const int n = x.n_cols;
    const std::vector<int16_t> wide(x.codes.begin(), x.codes.begin() + ptrdiff_t(x.n_rows) * n);
    for (const MatrixProduct<W8A8Matrix>& p : products) {
        p.out.n_rows = x.n_rows;
        parallel_for((p.w.n_rows + 7) / 8, [&](int tile) {
            const int end = std::min(8 * tile + 8, p.w.n_rows);
            const int together = x.n_rows > 1 && end % 8 == 0 ? 8 : 1;
            for (int i = 8 * tile; i < end; i += together) {
                const int8_t* codes = p.w.codes + size_t(i) * n;
                const float* scales = p.w.scales + size_t(i) * p.w.n_groups();
                for (int t = 0; t < x.n_rows; t++)
                    (together == 8 ? dot<8> : dot<1>)(p.out.row(t) + i, &wide[size_t(t) * n], x.row_scales(t),
                                                      codes, scales, n, x.group_size);
            }
        });
    }
}

// One row of the table per token, dequantized. The table as a whole stays int8.
void embed(Rows& out, const W8A8Matrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    for (int t = 0; t < out.n_rows; t++) {
        const int8_t* codes = table.codes + size_t(tokens[t]) * table.n_cols;
        const float* scales = table.scales + size_t(tokens[t]) * table.n_groups();
        for (int i = 0; i < out.n_cols; i++) out.row(t)[i] = float(codes[i]) * scales[i / table.group_size];
    }
}

// ---- section rotation ------------------------------------------------------
// A tied model that was exported with --rotate (docs/gptq.md#rotation): the layers' weights want x rotated,
// the embedding, which is the classifier, stays as it was

// lift hadamard
// Walsh-Hadamard transform of each block of x (n,), in place and not normalized. block: a power of two.
inline void hadamard(float* x, int n, int block) {
    for (int h = 1; h < block; h *= 2)
        for (int i = 0; i < n; i += 2 * h)
            for (int k = i; k < i + h; k++) {
                const float a = x[k], b = x[k + h];
                x[k] = a + b;
                x[k + h] = a - b;
            }
}

// x (n_tokens, dim) <- x R, R = diag(s) H. s (dim,): signs over the root of block.
inline void rotate(Rows& x, const float* s, int block) {
    parallel_for(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i++) x.row(t)[i] *= s[i];
        hadamard(x.row(t), x.n_cols, block);
    });
}

// x <- x R^T, the inverse of rotate.
inline void rotate_back(Rows& x, const float* s, int block) {
    parallel_for(x.n_rows, [&](int t) {
        hadamard(x.row(t), x.n_cols, block);
        for (int i = 0; i < x.n_cols; i++) x.row(t)[i] *= s[i];
    });
}
// ---- end of rotation -------------------------------------------------------

// ----------------------------------------------------------------------------
// The tensors of a file

// Where activations are quantized: four times in a layer, and before the classifier.
enum Place { attn_norm, attn_mix, ffn_norm, ffn_swiglu, n_places };

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    using Vectors = std::vector<const float*>;  // one of each layer
    Vectors attn_norm = file.vectors<float>(c, "attn.norm", c.dim);
    Vectors ffn_norm = file.vectors<float>(c, "ffn.norm", c.dim);
    const float* norm = file.next<float>("norm", {c.dim});
    const float* rotation = c.rotation_block > 0 ? file.next<float>("rotation", {c.dim}) : nullptr;
    Vectors q_norm = c.has_head_norms() ? file.vectors<float>(c, "attn.q_norm", c.head_dim) : Vectors();
    Vectors k_norm = c.has_head_norms() ? file.vectors<float>(c, "attn.k_norm", c.head_dim) : Vectors();

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
        const int size = group_of(c.group_size, n_cols);
        const int8_t* codes = file.next<int8_t>(name + ".codes", {n_rows, n_cols});
        return {codes, file.next<float>(name + ".scales", {n_rows, n_cols / size}), n_rows, n_cols, size};
    }
    std::vector<W8A8Matrix> w8a8_layers(const char* part, int n_rows, int n_cols) {
        return file.layers(c, part, [&](const std::string& name) { return w8a8(name, n_rows, n_cols); });
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
    int longest_row = std::max({c.dim, c.hidden_dim, c.q_dim()});
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

    Int8Rows xq{n, longest_row, group_of(c.group_size, longest_row)};  // the input of products
    RopeAngles angles{c, n};                                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};                  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};
    // Keys and values of the positions; or, with --attn int8, these and the chunk's q, k and v in int8.
    bool int8_attention = options.own["--attn"] == "int8";
    KvCache cache = kv_cache(options, c, int8_attention ? 0 : context);
    Int8Attention int8{c, n, int8_attention ? context : 0, traced};
};

using Transformer = TransformerOf<ModelConfig, Weights, RunState>;

// A Recorder that knows what attention in int8 makes, too: with --attn int8.
struct AttentionRecorder : Recorder {
    using Recorder::Recorder;
    using Recorder::operator();
    // Heads in codes: NAME.q (n_tokens, heads, length) and NAME.s (n_tokens, heads, 1).
    void operator()(const std::string& name, const Int8Rows& x, int length) const {
        (*this)(name + ".q", x.codes.data(), x.n_rows, {x.n_groups(), length});
        (*this)(name + ".s", x.scales.data(), x.n_rows, {x.n_groups(), 1});
    }
    // Weights, and the same in codes: as long as a token has positions.
    void operator()(const std::string& name, const Int8Attention& a) const {
        (*this)(name, a.weights);
        const int n_heads = a.weights.n_heads;
        for (int t = 0; t < a.q.n_rows && trace != nullptr; t++) {
            const int n_positions = a.weights.pos + t + 1;
            Rows seen(n_heads, n_positions);
            seen.n_rows = n_heads;
            for (int h = 0; h < n_heads; h++)
                std::copy_n(a.weights.row(t * n_heads + h), n_positions, seen.row(h));
            Int8Rows codes;
            quantize(codes, seen, n_positions, nullptr);
            (*this)(name + ".q", codes.codes.data(), 1, {n_heads, n_positions});
            (*this)(name + ".s", codes.scales.data(), 1, {n_heads, 1});
        }
    }
};

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions pos, pos + 1, ...
void attention_block(Transformer& m, int l, int pos) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const AttentionRecorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.attn_norm[l], c.dim, c.norm_eps);           record("attn.norm", s.normed);
    quantize(s.xq, s.normed, c.group_size, w.act_scale(l, attn_norm));   record("attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                    // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                  record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                         record("attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                         record("attn.v_proj", s.v, s.xq, w.v_proj[l]);
    if (c.arch == Arch::qwen3) {                                         // each head on its own
        rmsnorm(s.q, s.q, w.q_norm[l], c.head_dim, c.norm_eps);          record("attn.q_norm", s.q, c.head_dim);
        rmsnorm(s.k, s.k, w.k_norm[l], c.head_dim, c.norm_eps);          record("attn.k_norm", s.k, c.head_dim);
    }
    rope(s.q, s.angles, c.head_dim);                                     record("attn.q_rope", s.q, c.head_dim);
    rope(s.k, s.angles, c.head_dim);                                     record("attn.k_rope", s.k, c.head_dim);
    if (s.int8_attention) {
        quantize(s.int8.q, s.q, c.head_dim, nullptr);                    record("attn.q_rope", s.int8.q, c.head_dim);
        quantize(s.int8.k, s.k, c.head_dim, nullptr);                    record("attn.k_rope", s.int8.k, c.head_dim);
        quantize(s.int8.v, s.v, c.head_dim, nullptr);                    record("attn.v_proj", s.int8.v);
        attention_int8(s.attn_out, s.scores, s.probs, s.int8, l, pos);   record("attn.weights", s.int8);
    } else {
        s.cache.append(l, pos, s.k, s.v);
        attention(s.attn_out, s.scores, s.probs, s.q, s.cache, l, pos);
    }                                                                    record("attn.scores", s.scores);
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

    rmsnorm(s.normed, s.x, w.ffn_norm[l], c.dim, c.norm_eps);           record("ffn.norm", s.normed);
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
    if (c.rotation_block > 0) {
        rotate(s.x, w.rotation, c.rotation_block);                       record("rotate", s.x);
    }
    s.angles.set_positions(pos, n_tokens);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, pos);
        feed_forward_block(m, l);
    }
    if (n_logits == 0) return {};
    s.x.keep_last(n_logits);
    if (c.rotation_block > 0) {
        rotate_back(s.x, w.rotation, c.rotation_block);                  record("rotate_back", s.x);
    }
    rmsnorm(s.normed, s.x, w.norm, c.dim, c.norm_eps);                   record("norm", s.normed);
    quantize(s.xq, s.normed, c.group_size, w.act_scale(c.n_layers, 0));  record("norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                            record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// What files and the command line have of this program

// Throws for a group size that there is not, and for rows that cannot share a scale.
void check_config(const ModelConfig& c) {
    const bool whole_rows = c.group_size == 0;
    check_value(whole_rows || c.group_size == 32, "group_size", c.group_size,
                "expected 0 (whole rows) or 32");
    if (!whole_rows && c.static_activations) fail("activations is 1 (static) with group_size 32, expected 0");
    // A multiple of 4 keeps the scales behind the codes aligned; the limit keeps the int32 sums exact.
    const int multiple = whole_rows ? 4 : 32;
    for (const auto& [name, n] :
         {std::pair{"dim", c.dim}, {"hidden_dim", c.hidden_dim}, {"n_heads * head_dim", c.q_dim()}}) {
        check_value(n % multiple == 0, name, n, "not a multiple of ", multiple);
        check_value(!whole_rows || n <= max_group_size, name, n, "expected at most ", max_group_size);
    }
}

const FileFormat<ModelConfig> file_format{
    .magic = 0x616b3838, .version = 1, .check = check_config, .max_activations = 1};

constexpr const char* program_name = "runq_w8a8";
constexpr const char* program_summary = "Llama 3 and Qwen3 in SmoothQuant W8A8 (int8 by int8)";
inline std::string scheme_text(const ModelConfig& c) {
    if (c.group_size > 0) return "W8A8: int8, one scale for 32 weights; activations one for 32 values";
    return std::string("W8A8: int8, one scale a row; activations one a ") +
           (c.static_activations ? "place (static)" : "token");
}
const std::vector<OwnOption> scheme_options{
    {"--attn", {"fp32", "int8"}, "products of attention; int8: so is the cache"}};

#ifdef ENGINE
#include "engine/command_line.h"
#else

// ---- section text ----------------------------------------------------------
// Files of text, and UTF-8

// All of a file, of standard input for "-". Throws.
inline std::string read_bytes(const std::string& path) {
    std::ifstream file;
    if (path != "-") file.open(path, std::ios::binary);
    if (!file) fail("cannot open '", path, "': ", std::strerror(errno));
    std::istream& in = path == "-" ? std::cin : file;
    return {std::istreambuf_iterator<char>(in), {}};
}

#ifdef NO_TOKENIZER
struct Pattern {
    bool drops_gaps;
    Pattern(std::string_view, bool drops) : drops_gaps(drops) {}
    std::pair<size_t, size_t> match(std::string_view s, size_t) const { return {s.size(), s.size()}; }
};
inline int utf8_length(std::string_view s) { return s.empty() ? 0 : 1; }
inline std::string to_nfc(std::string_view s) { return std::string(s); }
#else
// A regular expression of PCRE2 that cuts text at its matches.
struct Pattern {
    bool drops_gaps;  // what no match covers
    std::shared_ptr<pcre2_code> code;
    Pattern(std::string_view pattern, bool drops) : drops_gaps(drops) {
        int error = 0;
        size_t offset = 0;
        const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
        code = {pcre2_compile(PCRE2_SPTR(pattern.data()), pattern.size(), options, &error, &offset, nullptr),
                pcre2_code_free};
        if (!code) fail("tokenizer: a pattern does not compile at byte ", offset);
    }
    // The next match in s, valid UTF-8, that is not empty at byte `at`: begin and end, of s if there is none.
    std::pair<size_t, size_t> match(std::string_view s, size_t at) const {
        static pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
        static pcre2_match_context* limits = pcre2_match_context_create(nullptr);
        pcre2_set_match_limit(limits, 10'000'000);  // a damaged file's pattern may explode
        const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY_ATSTART;
        const int rc = pcre2_match(code.get(), PCRE2_SPTR(s.data()), s.size(), at, options, data, limits);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) fail("tokenizer: a pattern fails behind byte ", at);
        const size_t* found = pcre2_get_ovector_pointer(data);
        if (rc < 0 || found[0] < at || found[1] < std::max(found[0], at + 1)) return {s.size(), s.size()};
        return {found[0], found[1]};
    }
};

// How many bytes the first character of s has, negative if it is ill-formed.
inline int utf8_length(std::string_view s) {
    utf8proc_int32_t code = 0;
    return int(utf8proc_iterate(PCRE2_SPTR(s.data()), ptrdiff_t(s.size()), &code));
}

// Unicode's normalization form C.
inline std::string to_nfc(std::string_view s) {
    utf8proc_uint8_t* out = nullptr;
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto n = utf8proc_map(PCRE2_SPTR(s.data()), ptrdiff_t(s.size()), &out, options);
    if (n < 0) fail("tokenizer: NFC: ", utf8proc_errmsg(n));
    std::string normal(reinterpret_cast<const char*>(out), size_t(n));
    std::free(out);
    return normal;
}
#endif

// s as the rule for every text says that a person gives: it is UTF-8; "\r\n" is "\n"; a byte order mark in
// front is no part of it. What is ill-formed throws UsageError, or becomes U+FFFD where there is no name.
inline std::string valid_text(std::string_view s, const char* name = nullptr) {
    std::string out;
    for (size_t i = name && s.starts_with("\xEF\xBB\xBF") ? 3 : 0, n; i < s.size(); i += n) {
        const int length = utf8_length(s.substr(i));
        if (length < 0 && name) fail<UsageError>(name, " is not UTF-8 at byte ", i);
        n = size_t(std::max(length, 1));
        if (!name || !s.substr(i).starts_with("\r\n")) out += length < 0 ? "\xEF\xBF\xBD" : s.substr(i, n);
    }
    return out;
}
// ---- end of text -----------------------------------------------------------

// ---- section file ----------------------------------------------------------
// Opening a model file. All of the header that is used is checked; docs/model-files.md has every field

struct HeaderReader {
    std::span<const std::byte> file;  // at least 256 bytes

    template <class T>
    T value(size_t offset) const {
        T v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    }
    template <class T>
    T number(const char* name, size_t offset, T low, T high) const {
        const T v = value<T>(offset);
        if (!(v >= low && v <= high)) fail(name, " is ", v, ", expected ", low, " to ", high);  // NaN, too
        return v;
    }
};

// The whole file in memory, until the program ends: mapped, or read where there is no mmap.
inline std::span<const std::byte> file_bytes(const std::string& path) {
#if __has_include(<sys/mman.h>)
    const int file = open(path.c_str(), O_RDONLY);
    if (file < 0) fail("cannot open: ", std::strerror(errno));
    const size_t n = std::filesystem::file_size(path);  // throws for a directory, a device
    void* p = n > 0 ? mmap(nullptr, n, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    close(file);
    if (p == MAP_FAILED) fail("cannot map: ", std::strerror(errno));
    return {static_cast<const std::byte*>(p), n};
#else
    static std::string bytes;
    bytes = read_bytes(path);
    return std::as_bytes(std::span(bytes));
#endif
}

// Limits are far above any model's, and low enough that no product of sizes overflows 64 bits.
template <class Config>
ModelFileOf<Config> open_model_file(const std::string& path, const FileFormat<Config>& format) {
    const auto bytes = file_bytes(path);
    const HeaderReader h{bytes};
    if (bytes.size() < header_size || h.value<uint32_t>(0) != format.magic)
        fail("no model file of ", program_name, " (python -m export makes one)");
    h.number("version", 4, format.version, format.version);
    ModelFileOf<Config> f{{}, bytes, bytes.subspan(header_size), {}};
    Config& c = f.config;
    c.dim = h.number("dim", 0x08, 1, 1 << 20);
    c.hidden_dim = h.number("hidden_dim", 0x0C, 1, 1 << 22);
    c.n_layers = h.number("n_layers", 0x10, 1, 1 << 12);
    c.n_heads = h.number("n_heads", 0x14, 1, 1 << 12);
    c.n_kv_heads = h.number("n_kv_heads", 0x18, 1, c.n_heads);
    c.vocab_size = h.number("vocab_size", 0x1C, 1, 1 << 24);
    c.max_seq_len = h.number("max_seq_len", 0x20, 1, 1 << 24);
    c.shared_classifier = h.value<uint8_t>(0x24) != 0;
    c.group_size = h.value<int32_t>(0x25);
    c.head_dim = c.dim / c.n_heads;  // without an extension
    check_value(c.n_heads % c.n_kv_heads == 0, "n_heads", c.n_heads, "not a multiple of n_kv_heads");
    if (h.value<uint32_t>(0x40) != 0) {  // the extension; llama2.c's own files have none
        h.number("extension magic", 0x40, 0x31584b41, 0x31584b41);  // "AKX1"
        c.arch = Arch(h.number("arch", 0x44, int(format.first_arch), int(format.last_arch)));
        c.head_dim = h.number("head_dim", 0x48, 2, 1 << 12);
        h.number("group_size at 0x4c", 0x4C, c.group_size, c.group_size);
        c.norm_eps = h.number("norm_eps", 0x50, 0.0f, 1.0f);
        c.rope_theta = h.number("rope_theta", 0x54, 1.0f, 1e12f);
        c.rope_type = h.number("rope_scaling type", 0x58, 0, 3);
        if (c.rope_type > 0) {
            c.rope_factor = h.number("rope_scaling factor", 0x5C, 1.0f, 1e6f);
            c.high_freq_factor = h.number("high_freq_factor", 0x64, 1e-6f, 1e6f);
            const float highest = std::nextafter(c.high_freq_factor, 0.0f);
            c.low_freq_factor = h.number("low_freq_factor", 0x60, 1e-6f, highest);
            c.original_max_position = h.number("original_max_position_embeddings", 0x68, 1, 1 << 24);
        }
        if (c.rope_type > 1) c.attention_factor = h.number("attention_factor", 0x30, 0.01f, 100.0f);
        c.rotation_block = h.number("rotation_block", 0x34, 0, c.dim);
        if (c.rotation_block > 0)
            check_value(c.dim % c.rotation_block == 0 && (c.rotation_block & (c.rotation_block - 1)) == 0,
                        "rotation_block", c.rotation_block, "expected a power of two that divides dim");
        c.bos_id = h.number("bos_id", 0x6C, -1, c.vocab_size - 1);
        c.eos_ids.resize(size_t(h.number("n_eos", 0x70, 0, 8)));
        for (size_t i = 0; i < c.eos_ids.size(); i++)
            c.eos_ids[i] = h.number("eos_id", 0x74 + 4 * i, 0, c.vocab_size - 1);
        c.temperature = h.number("temperature", 0x94, 0.0f, 100.0f);
        c.top_p = h.number("top_p", 0x98, 0.0f, 1.0f);
        c.top_k = h.number("top_k", 0x9C, 0, 1 << 24);
        c.static_activations = h.number("activations", 0xB4, 0, format.max_activations) == 1;
        const auto end = h.value<uint64_t>(0xA0), size = h.value<uint64_t>(0xA8);
        if (end < header_size || end > bytes.size() || bytes.size() - end != size)
            fail("file is ", bytes.size(), " bytes, but its tokenizer section is ", size, " bytes at ", end);
        f.weights = bytes.subspan(header_size, end - header_size);
        f.tokenizer = bytes.subspan(end);
        for (size_t i = format.read_own == nullptr ? 0xC0 : format.read_own(h, c); i < header_size; i++)
            if (h.value<uint8_t>(i) != 0) fail("reserved byte ", i, " is not 0");
    } else {
        check_value(c.dim % c.n_heads == 0, "dim", c.dim, "not a multiple of n_heads");
    }
    check_value(c.head_dim >= 2 && c.head_dim <= 1 << 12, "head_dim", c.head_dim, "expected 2 to 4096");
    check_value(c.head_dim % 2 == 0, "head_dim", c.head_dim, "RoPE needs an even number");
    format.check(c);
    return f;
}
// ---- end of file -----------------------------------------------------------

// ---- section tokenizer and sampler -----------------------------------------
// Text <-> token ids: byte-level BPE (Sennrich et al. 2015, arXiv 1508.07909), read from the last section of
// the model file; ids are those of Hugging Face's tokenizers. docs/tokenizer.md has each step and byte:
//   UTF-8 -> added tokens -> NFC -> regular expressions -> byte-pair encoding of each word

struct Tokenizer {
    enum Flag : uint32_t { nfc = 1, ignore_merges = 2, adds_bos = 4, has_chat = 8, has_steps = 16 };
    enum TokenFlag : uint8_t { defined = 1, word = 2, special = 4 };
    enum AddedFlag : uint32_t { normalized = 2, unusual = 4 + 8 + 16 };
    enum ChatFlag : uint32_t { trims_user = 2, trims_answer = 4, drops_thoughts = 8 + 128, strips = 8 + 64 };
    enum Piece { opening, user = 5, user_end, answer, answer_end, generate, n_pieces = 13 };

    uint32_t flags = 0, chat_flags = 0;
    int bos_id = -1;
    std::string bytes;                                // every token's, one after the other
    std::vector<uint32_t> offsets;                    // (vocab_size + 1,) where each token starts in bytes
    std::string token_flags;                          // (vocab_size,)
    std::unordered_map<std::string_view, int> words;  // tokens that text becomes, each single byte among them
    std::map<std::pair<int, int>, size_t> ranks;      // of neighbours that may merge; the lowest does
    std::vector<int> merged;                          // by rank: what they become
    std::vector<int> added;                           // ids of those cut out of a text, the longest first
    std::vector<Pattern> steps;
    std::array<std::string, n_pieces> chat;

    // A token's bytes: maybe no whole character.
    std::string_view token(int id) const {
        return std::string_view(bytes).substr(offsets[id], offsets[id + 1] - offsets[id]);
    }
    // What a reader sees of it.
    std::string shown(int id) const { return std::string(token_flags[id] & special ? "" : token(id)); }

    // Throws std::runtime_error for a section that is cut short, or has ids that there are not.
    Tokenizer(std::span<const std::byte> section, int vocab_size) {
        std::string_view rest(reinterpret_cast<const char*>(section.data()), section.size());
        const auto check = [](bool is_good, const char* what) {
            if (!is_good) fail("tokenizer: ", what);
        };
        const auto take = [&](size_t n) {
            check(n <= rest.size(), "the section is cut short");
            const std::string_view taken = rest.substr(0, n);
            rest.remove_prefix(n);
            return taken;
        };
        const auto u32 = [&] {
            uint32_t v;
            std::memcpy(&v, take(4).data(), 4);
            return v;
        };
        const auto id = [&] {
            const uint32_t v = u32();
            check(v < uint32_t(vocab_size), "an id is outside the vocabulary");
            return int(v);
        };
        const uint32_t magic = u32(), version = u32(), size = u32(), vocab = u32();
        check(magic == 0x6E6B6F74 && version == 1, "the section does not begin as one");
        check(size == section.size() && vocab == uint32_t(vocab_size), "the section has another size");
        flags = u32(), bos_id = int(u32());
        check(bos_id >= (flags & adds_bos ? 0 : -1) && bos_id < vocab_size, "bos_id is no id");
        const uint32_t n_merges = u32(), n_added = u32(), pattern_size = u32(), word_size = u32();
        const uint32_t chat_size = u32(), bytes_size = u32();
        for (int i = 0; i <= vocab_size; i++) offsets.push_back(u32());
        check(std::ranges::is_sorted(offsets) && offsets.back() == bytes_size, "tokens overlap");
        for (size_t rank = 0; rank < n_merges; rank++) {
            const int left = id(), right = id();
            ranks.try_emplace({left, right}, rank);
            merged.push_back(id());
        }
        for (uint32_t i = 0; i < n_added; i++) {
            added.push_back(id());
            check((u32() & (flags & nfc ? unusual | normalized : unusual)) == 0,
                  "an added token looks around");
        }
        token_flags = take(size_t(vocab_size)), bytes = take(bytes_size);
        for (int i = 0; i < vocab_size; i++)
            if (token_flags[i] & word) words[token(i)] = i;
        std::ranges::stable_sort(added, std::greater{}, [&](int i) { return token(i).size(); });
        check(added.empty() || !token(added.back()).empty(), "an added token is empty");
        for (const size_t end = rest.size() - std::min<size_t>(pattern_size, rest.size());
             rest.size() > end;) {
            check(steps.size() < 16, "there are too many patterns");
            const bool drops_gaps = flags & has_steps && u32() == 1;
            steps.emplace_back(take(flags & has_steps ? u32() : pattern_size), drops_gaps);
        }
        take(word_size);  // what an added token that looks around takes for a word
        check(chat_size <= rest.size(), "the section is cut short");
        if (!(flags & has_chat)) return;
        chat_flags = u32();
        for (std::string& piece : chat) piece = take(u32());
    }

    // The ids of a text: of added tokens such as <|eot_id|> in it, at each place the longest, and of the
    // words between. wants_bos: with BOS in front, if this tokenizer does so.
    std::vector<int> encode(std::string_view text, bool wants_bos) const {
        std::vector<int> ids;
        if (wants_bos && flags & adds_bos) ids.push_back(bos_id);
        const std::string valid = valid_text(text);
        const std::string_view s = valid;
        for (size_t done = 0, i = 0; i <= s.size(); i++) {  // what is before done has its ids
            const auto begins = [&](int a) { return s.substr(i).starts_with(token(a)); };
            const auto found = std::ranges::find_if(added, begins);
            if (found == added.end() && i < s.size()) continue;
            const std::string part(s.substr(done, i - done));
            cut(flags & nfc ? to_nfc(part) : part, 0, ids);
            if (found == added.end()) break;
            ids.push_back(*found);
            done = i + token(*found).size();
            i = done - 1;
        }
        return ids;
    }

    // Cuts s at the matches of a step's pattern. Each part goes on to the next step, and so does what no
    // match covers, unless the step drops it; what the last step leaves is a word.
    void cut(std::string_view s, size_t step, std::vector<int>& ids) const {
        if (s.empty()) return;
        if (step == steps.size()) return encode_word(s, ids);
        for (size_t done = 0; done < s.size();) {
            const auto [begin, end] = steps[step].match(s, done);
            if (!steps[step].drops_gaps) cut(s.substr(done, begin - done), step + 1, ids);
            cut(s.substr(begin, end - begin), step + 1, ids);
            done = end;
        }
    }

    // Byte-pair encoding: of all neighbours that may merge, the pair with the lowest rank does, the leftmost
    // of equals, until none may.
    void encode_word(std::string_view text, std::vector<int>& ids) const {
        const auto whole = words.find(text);
        if (flags & ignore_merges && whole != words.end()) return ids.push_back(whole->second);
        std::vector<int> id;
        for (size_t i = 0; i < text.size(); i++) {
            const auto byte = words.find(text.substr(i, 1));
            if (byte != words.end()) id.push_back(byte->second);
        }
        while (true) {
            size_t best = merged.size(), left = 0;  // the rank of a pair, and where it is
            for (size_t i = 0; i + 1 < id.size(); i++) {
                const auto rank = ranks.find({id[i], id[i + 1]});
                if (rank != ranks.end() && rank->second < best) best = rank->second, left = i;
            }
            if (best == merged.size()) break;
            id[left] = merged[best];
            id.erase(id.begin() + ptrdiff_t(left) + 1);
        }
        ids.insert(ids.end(), id.begin(), id.end());
    }

    // A conversation of user and assistant in turn, the user's message last, as Hugging Face's
    // apply_chat_template() writes it, up to where the model goes on.
    std::string chat_text(std::span<const std::string> messages) const {
        constexpr const char* spaces = " \t\n\v\f\r";
        std::string out = chat[opening];
        for (size_t i = 0; i < messages.size(); i++) {
            std::string_view text = messages[i];
            const bool is_user = i % 2 == 0;
            const size_t thought = is_user ? text.npos : text.rfind("</think>");
            if (chat_flags & drops_thoughts && thought != text.npos) {
                text.remove_prefix(thought + 8);
                while (chat_flags & strips && text.starts_with('\n')) text.remove_prefix(1);
            }
            if (chat_flags & (is_user ? trims_user : trims_answer)) {
                text = text.substr(0, text.find_last_not_of(spaces) + 1);
                text.remove_prefix(std::min(text.find_first_not_of(spaces), text.size()));
            }
            out.append(chat[is_user ? user : answer]).append(text);
            out.append(chat[is_user ? user_end : answer_end]);
        }
        return out + chat[generate];
    }
};

// Logits -> the next token. Temperature 0 takes the most probable one. Otherwise divide by the temperature,
// keep the top_k most probable tokens, of those the most probable that together have top_p of the
// probability, and draw.
struct Sampler {
    float temperature;
    int top_k;
    float top_p;
    std::mt19937_64 random;

    int sample(std::span<const float> logits) {
        const auto best = std::ranges::max_element(logits) - logits.begin();
        if (temperature == 0) return int(best);
        std::vector<float> weights;  // softmax without its division
        std::vector<size_t> ids;     // that may be drawn
        double total = 0;            // of their weights
        for (size_t i = 0; i < logits.size(); i++) {
            const float z = (logits[i] - logits[best]) / temperature;
            weights.push_back(z < -87 ? 0 : exp_fp32(z));  // far below it is 0: it could not win
            if (weights[i] > 0) ids.push_back(i), total += weights[i];
        }
        const bool cuts_k = top_k > 0 && size_t(top_k) < ids.size();
        if (cuts_k || top_p < 1) {
            // Below (1 - top_p) / n a token is never among those of top_p: that leaves few to sort.
            const double least = cuts_k ? 0 : (1.0 - top_p) * total / double(logits.size());
            std::erase_if(ids, [&](size_t id) { return weights[id] < least; });
            std::ranges::stable_sort(ids, std::greater{}, [&](size_t id) { return weights[id]; });
            if (cuts_k) {
                ids.resize(size_t(top_k)), total = 0;
                for (const size_t id : ids) total += weights[id];
            }
            const double wanted = top_p * std::exchange(total, 0);
            size_t n = 0;
            while (n < ids.size() && (n == 0 || total < wanted)) total += weights[ids[n++]];
            ids.resize(n);
            std::ranges::sort(ids);
        }
        double r = double(random() >> 11) * 0x1p-53 * total;  // the same on every machine
        for (const size_t id : ids)
            if ((r -= weights[id]) < 0) return int(id);
        return int(ids.back());
    }
};
// ---- end of tokenizer and sampler ------------------------------------------

// ---- section trace ---------------------------------------------------------
// Recording and writing a trace

template <class T>
void Recorder::operator()(const std::string& name, const T* values, int n_tokens,
                          std::vector<int> shape) const {
    if (trace == nullptr) return;
    Trace::Tensor& t = trace->tensors[layer < 0 ? name : "layers." + std::to_string(layer) + "." + name];
    t.type = std::is_floating_point_v<T> ? "F32" : sizeof(T) > 1 ? "I32" : std::is_signed_v<T> ? "I8" : "U8";
    t.n_tokens += n_tokens, t.shape = shape;
    const size_t row = sizeof(T) * size_t(shape.empty() ? 1 : shape.back());
    size_t all = sizeof(T) * size_t(n_tokens);
    for (const int d : shape) all *= size_t(d);
    for (size_t i = 0; i < all; i += row) t.rows.emplace_back(reinterpret_cast<const char*>(values) + i, row);
}
inline void Recorder::operator()(const std::string& name, const HeadScores& x) const {
    for (int t = 0; t < x.n_rows / x.n_heads && trace != nullptr; t++) {
        const int n_positions = x.pos + t + 1;
        std::vector<float> seen;
        for (int i = t * x.n_heads; i < (t + 1) * x.n_heads; i++)
            seen.insert(seen.end(), x.row(i), x.row(i) + n_positions);
        (*this)(name, seen.data(), 1, {x.n_heads, n_positions});
    }
}
// A safetensors file (https://huggingface.co/docs/safetensors). Rows that are shorter than the last are
// filled up with zeros.
inline void Trace::write(const std::string& path) const {
    std::string json = "{", data;
    for (const auto& [name, t] : tensors) {
        const size_t begin = data.size(), longest = t.rows.back().size();
        for (const std::string& row : t.rows) data += row + std::string(longest - row.size(), '\0');
        json += (begin == 0 ? "\"" : ",\"") + name + "\":{\"dtype\":\"" + t.type + "\",\"shape\":[" +
                std::to_string(t.n_tokens);
        for (const int d : t.shape) json += "," + std::to_string(d);
        json += "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
    }
    json += "}" + std::string(7 - json.size() % 8, ' ');
    const auto size = uint64_t(json.size());
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof size) << json << data;
    if (!file.flush()) fail("--trace: cannot write '", path, "'");
}
// ---- end of trace ----------------------------------------------------------

// ---- section command line --------------------------------------------------
// Options, and what a program does with a loaded model

constexpr const char* help_text = R"(%s: %s
usage: %s <model.bin> [options]
  -i TEXT       the prompt; - reads standard input
  -f PATH       the prompt is a file's text
  --ids 1,2,3   the prompt as token ids
  -m MODE       generate (default) or chat: a turn for each line of standard input
  -n N          new tokens, in chat for each turn (default 256; 0: to the context's end)
  -c N          context length (default: the model's, at most 4096)
  -t F          temperature; 0 takes the most probable token
  -k N          only the N most probable tokens; 0: all
  -p F          only the most probable tokens, up to probability F
  -s N          random seed (default: another in each run)
  -j N          threads (default: OpenMP's)
  --print-ids   print token ids instead of text
  --digest      print a hash of the logits, the same on every machine
  --trace PATH  write every intermediate tensor to a safetensors file
  --ppl PATH    perplexity of a text file
)";

// Throws UsageError. No model path: --help was printed.
inline Options parse_options(int argc, char** argv) {
    Options o;
    std::string name, value;
    // All of the value as a number from low to high.
    const auto number = [&](auto low, auto high) {
        auto found = low;
        const char* end = value.data() + value.size();
        const auto [rest, error] = std::from_chars(value.data(), end, found);
        if (error != std::errc() || rest != end || !(found >= low && found <= high))
            fail<UsageError>(name, ": '", value, "' is no number from ", low, " to ", high);
        return found;
    };
    const auto one_of = [&](const std::vector<const char*>& choices) {
        if (std::ranges::count(choices, value) > 0) return value;
        fail<UsageError>(name, ": '", value, "' is none of its choices, such as ", choices.back());
    };
    std::map<std::string, std::function<void()>> options{
        {"-i", [&] { (value == "-" ? o.file : o.prompt) = value; }},
        {"-f", [&] { o.file = value; }},
        {"-n", [&] { o.steps = number(0, INT32_MAX); }},
        {"-c", [&] { o.ctx = number(1, INT32_MAX); }},
        {"-t", [&] { o.temp = float(number(0.0, 100.0)); }},
        {"-k", [&] { o.top_k = number(0, INT32_MAX); }},
        {"-p", [&] { o.top_p = float(number(0.0, 1.0)); }},
        {"-s", [&] { o.seed = number(uint64_t{0}, UINT64_MAX); }},
        {"-j", [&] { o.threads = number(1, 1024); }},
        {"--trace", [&] { o.trace = value; }},
        {"--ppl", [&] { o.ppl = value; }},
    };
    options["-m"] = [&] { o.chat = one_of({"generate", "chat"}) == "chat"; };
    options["--ids"] = [&] {
        o.ids.clear();
        for (std::istringstream list(value + ","); std::getline(list, value, ',');)
            o.ids.push_back(number(0, INT32_MAX));
    };
    for (const OwnOption& x : scheme_options) {
        o.own[x.name] = x.choices.front();
        options[x.name] = [&] { o.own[name] = one_of(x.choices); };
    }
    for (int i = 1; i < argc; i++) {
        name = argv[i];
        if (name == "-h" || name == "--help") {
            std::printf(help_text, program_name, program_summary, program_name);
            for (const OwnOption& x : scheme_options) std::printf("  %-13s %s\n", x.name, x.help);
            return {};
        }
        if (name == "--print-ids") {
            o.print_ids = true;
        } else if (name == "--digest") {
            o.digest = true;
        } else if (options.contains(name)) {
            if (++i == argc) fail<UsageError>(name, ": needs a value");
            value = argv[i];
            options[name]();
        } else if (name.starts_with('-') || !o.model_path.empty()) {
            fail<UsageError>("unexpected argument '", name, "'; -h shows how to use this program");
        } else {
            o.model_path = name;
        }
    }
    if (o.model_path.empty()) fail<UsageError>("no model file given; -h shows how to use this program");
    if (o.trace && (o.chat || o.ppl)) fail<UsageError>("--trace: not together with -m chat or --ppl");
    return o;
}

// Opens the model file and allocates a run's memory.
inline std::unique_ptr<Transformer> load_transformer(const Options& o, Trace* trace) try {
    auto file = open_model_file(o.model_path, file_format);
    Weights weights{TensorList{file.weights, size_t(file_format.alignment)}, file.config};
    if (weights.file.end != file.weights.size())
        fail("weights are ", file.weights.size(), " bytes, but the header implies ", weights.file.end);
    const int most = file.config.max_seq_len, context = o.ctx > 0 ? o.ctx : std::min(most, 4096);
    if (context > most) fail<UsageError>("-c: ", context, " is more than the model's ", most);
    RunState state{file.config, o, context, trace != nullptr};
    return std::make_unique<Transformer>(Transformer{file, std::move(weights), std::move(state), trace});
} catch (const std::runtime_error& e) {
    fail(o.model_path, ": ", e.what());
}

// A model that runs, and what it was asked.
struct Session {
    Transformer& m;
    const std::optional<Tokenizer>& tokenizer;
    Sampler sampler;
    const ModelConfig& c = m.file.config;
    const Options& o = m.state.options;
    size_t context = size_t(m.state.context), vocab_size = size_t(c.vocab_size);
    std::vector<int> held{};                  // the tokens that the KV cache holds, from position 0 on
    int n_tokens[2]{};                        // that were run: of prompts, and one by one
    std::chrono::duration<double> time[2]{};  // that they took

    // FNV-1a of 64 bits (Fowler, Noll and Vo) over the bytes of all logits that something was drawn or scored
    // by.
    uint64_t digest = 0xcbf29ce484222325;

    void add_to_digest(std::span<const float> logits) {
        for (const std::byte byte : std::as_bytes(logits))
            if (o.digest) digest = (digest ^ uint64_t(byte)) * 0x100000001b3;
    }
    // Runs the next chunk of ids, which begin with the tokens held. Returns logits (n_logits, vocab_size).
    std::span<const float> run(std::span<const int> ids) {
        const auto start = std::chrono::steady_clock::now();
        const size_t n = std::min(ids.size() - held.size(), size_t(m.state.n));
        const auto chunk = ids.subspan(held.size(), n);
        const auto logits = forward(m, chunk, int(held.size()), n_logits(o, m.trace != nullptr, int(n)));
        held.insert(held.end(), chunk.begin(), chunk.end());
        if (!all_finite(logits.data(), logits.size()))
            fail("the logits of positions up to ", held.size() - 1, " are not finite");
        n_tokens[n == 1] += int(n);
        time[n == 1] += std::chrono::steady_clock::now() - start;
        return logits;
    }

    // Writes `prompt`, and what continues ids: to a token that ends the text, to the end of the context, or
    // as much as -n says. Returns its text. What the KV cache holds of ids is not run again.
    std::string generate(std::vector<int> ids, const std::string& prompt) {
        if (ids.empty()) fail<UsageError>("the prompt is empty, and no token begins a text of this model");
        if (ids.size() > context)
            fail<UsageError>("the prompt is ", ids.size(), " tokens long, the context only ", context);
        std::cout << prompt;
        const auto last = ids.end() - 1;  // always runs, for its logits
        held.erase(std::mismatch(held.begin(), held.end(), ids.begin(), last).first, held.end());
        const size_t end = o.steps > 0 ? std::min(context, ids.size() + size_t(o.steps)) : context;
        std::string answer, comma;
        while (ids.size() < end) {
            std::span<const float> logits;
            while (held.size() < ids.size()) logits = run(ids);
            add_to_digest(logits.last(vocab_size));
            const int id = sampler.sample(logits.last(vocab_size));
            ids.push_back(id);
            const std::string text = tokenizer ? tokenizer->shown(id) : "";
            const bool is_text = tokenizer && !o.print_ids;
            answer += text;
            std::cout << (is_text ? text : std::exchange(comma, ",") + std::to_string(id)) << std::flush;
            if (std::ranges::count(c.eos_ids, id) > 0) break;
        }
        std::cout << std::endl;
        return answer;
    }

    // The ids of the text are cut into windows that fill the context, each with BOS in front where the
    // tokenizer says so, and run from position 0; every token that has another before it is scored.
    void print_perplexity(std::string_view text) {
        const std::vector<int> ids = tokenizer->encode(text, false), bos = tokenizer->encode("", true);
        const size_t n_new = context - bos.size();  // of the text, in a window
        double nll = 0;                             // negative log-likelihood
        size_t n_scored = 0;
        for (size_t i = 0; i < ids.size() && n_new > 0; i += n_new) {
            std::vector<int> window = bos;
            window.insert(window.end(), &ids[i], &ids[i] + std::min(n_new, ids.size() - i));
            held.clear();
            while (held.size() + 1 < window.size()) {
                auto logits = run(std::span(window).first(window.size() - 1));
                for (; !logits.empty(); logits = logits.subspan(vocab_size), n_scored++) {
                    const auto row = logits.first(vocab_size);
                    add_to_digest(row);
                    const int next = window[held.size() + 1 - logits.size() / vocab_size];
                    const double max = *std::ranges::max_element(row);
                    double sum = 0;
                    for (const float logit : row) sum += std::exp(logit - max);
                    nll += std::log(sum) + max - row[size_t(next)];
                }
            }
        }
        if (n_scored == 0) fail<UsageError>("--ppl: the text is too short");
        std::printf("perplexity %.4f over %zu tokens (windows of %zu)\n", std::exp(nll / double(n_scored)),
                    n_scored, context);
    }
};

inline void run(const Options& o) {
    std::optional<std::string> text = o.file ? read_bytes(*o.file) : o.prompt;
    if (text) text = valid_text(*text, "the prompt");
    if (o.file && text->ends_with('\n')) text->pop_back();  // its last line has ended; the text may go on
    if (text && !o.ids.empty()) fail<UsageError>("there is a prompt twice: as text, and as --ids");
#ifdef _OPENMP
    if (o.threads > 0) omp_set_num_threads(o.threads);
#endif
    Trace trace;
    const auto m = load_transformer(o, o.trace ? &trace : nullptr);
    const ModelConfig& c = m->file.config;
    std::optional<Tokenizer> tokenizer;
#ifndef NO_TOKENIZER
    if (!m->file.tokenizer.empty()) tokenizer.emplace(m->file.tokenizer, c.vocab_size);
#endif
    if (!tokenizer && (text || o.ppl || o.chat))
        fail<UsageError>("there is no tokenizer, in this file or in this program: use --ids");
    if (o.chat && !(tokenizer->flags & Tokenizer::has_chat))
        fail<UsageError>("-m chat: this file has no chat template");
    const float temperature = o.temp.value_or(c.temperature), top_p = o.top_p.value_or(c.top_p);
    const uint64_t seed = o.seed.value_or(std::random_device()());
    Session s{*m, tokenizer, {temperature, o.top_k.value_or(c.top_k), top_p, std::mt19937_64(seed)}};
    if (o.ppl) {
        s.print_perplexity(valid_text(read_bytes(*o.ppl), "--ppl: the text"));
    } else if (!o.chat) {
        std::vector<int> ids = text ? tokenizer->encode(*text, true) : o.ids;
        if (ids.empty() && c.bos_id >= 0) ids = {c.bos_id};
        std::string shown = text.value_or("");
        for (const int id : o.ids) {
            if (id >= c.vocab_size) fail<UsageError>("--ids: ", id, " is outside the vocabulary");
            shown += tokenizer ? tokenizer->shown(id) : "";
        }
        s.generate(ids, o.print_ids ? "" : shown);
    }
    std::vector<std::string> messages;
    std::string line = text.value_or("");
    while (o.chat && (!line.empty() || std::getline(std::cin, line))) {
        if (line.ends_with('\r')) line.pop_back();
        if (line.empty()) continue;
        messages.push_back(valid_text(std::exchange(line, ""), "a line of standard input"));
        messages.push_back(s.generate(tokenizer->encode(tokenizer->chat_text(messages), false), ""));
    }
    if (o.trace) trace.write(*o.trace);
    for (const int i : {0, 1}) {
        const char* what = i == 0 ? "prefill" : "decode ";
        const int n = s.n_tokens[i];
        if (n > 0) std::fprintf(stderr, "%s %d tokens, %.1f tokens/s\n", what, n, n / s.time[i].count());
    }
    if (o.digest) std::fprintf(stderr, "digest  %016llx\n", static_cast<unsigned long long>(s.digest));
}

inline int run_command_line(int argc, char** argv) try {
    const Options o = parse_options(argc, argv);
    if (!rounds_products())
        std::fprintf(stderr, "%s: products are fused with sums: compile with -ffp-contract=off\n",
                     program_name);
    if (!o.model_path.empty()) run(o);
    if (!std::cout.flush()) fail("cannot write the output");
    return 0;
} catch (const std::exception& e) {
    const bool is_memory = dynamic_cast<const std::bad_alloc*>(&e) != nullptr;
    std::fprintf(stderr, "%s: %s\n", program_name, is_memory ? "not enough memory" : e.what());
    return dynamic_cast<const UsageError*>(&e) != nullptr ? 2 : 1;
}
// ---- end of command line ---------------------------------------------------
#endif  // ENGINE

#ifndef RUNQ_NO_MAIN
int main(int argc, char** argv) { return run_command_line(argc, argv); }
#endif
