// runq_moe: Qwen3-MoE around one fused operator, from the bytes of a model file to words on the screen.
//
// A layer has many feed-forward networks, its experts, and a token goes through a few of them. The operator
// takes rows sorted by expert, multiplies each by its expert's gate and up, puts the first half through
// swish, multiplies by the second half and quantizes the product: nothing in between is written to memory.
// Experts are in A8W8 (int8 by int8), A8W4 (int8 by int4) or MXFP8 (blocks of 8-bit floats under one power of
// two), as the file says. Attention, dense layers, embedding and classifier are in A8W8, or as experts are.
// Or all matrices are of the ladder: each kind in 2, 4 or 8 bits, as in runq_gptq.cpp. The router is fp32,
// its sums fp64. docs/moe.md tells the whole story.
//
// The file is complete. This line compiles it, and the next one tells a story:
//
//     g++ -std=c++20 -O3 -march=native -ffp-contract=off -fopenmp runq_moe.cpp -o runq_moe -lpcre2-8 -lutf8proc
//     ./runq_moe model_moe.bin -i "Once upon a time"
//
// -DNO_TOKENIZER does without PCRE2 and utf8proc: token ids in, token ids out. Loops are plain: they are the
// specification. With -DENGINE, as `make` compiles it, engine/ takes the place of the two regions in #ifdef
// ENGINE: the same names, faster, with what is left out here, as a system prompt in chat (docs/engine.md).

#ifdef ENGINE
#include "engine/program_experts.h"
#else

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <climits>
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
#include <numeric>
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

// ---- section fp16 ----------------------------------------------------------
// fp16 as a file holds it (IEEE 754 binary16): a sign, 5 bits of exponent, 10 of fraction.
struct Half {
    uint16_t bits;
};

// The same number in fp32. Its exponent's bias is 127 in place of 15, and 2^112 makes up for that, in
// subnormal numbers, too.
inline float to_float(Half h) {
    const auto magnitude = std::bit_cast<float>(uint32_t(h.bits & 0x7fff) << 13) * 0x1p112f;
    auto bits = std::bit_cast<uint32_t>(magnitude);
    if ((h.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000;  // infinity, NaN
    return std::bit_cast<float>(bits | uint32_t(h.bits & 0x8000) << 16);
}

// The engine looks through all masks of a file at once, in all threads: not where each is found.
inline bool fast_check_mask(const uint8_t*) { return false; }
// ---- end of fp16 -----------------------------------------------------------

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

// The keys and values of every position so far, (n_layers, context, n_kv_heads * head_dim) each. Memory is
// taken as positions are used.
struct KvCache {
    int head_dim, kv_dim, context;
    std::unique_ptr<float[]> keys, values;

    KvCache(const ModelConfig& c, int n_positions)
        : head_dim(c.head_dim), kv_dim(c.kv_dim()), context(n_positions) {
        keys = std::make_unique_for_overwrite<float[]>(at(c.n_layers, 0));
        values = std::make_unique_for_overwrite<float[]>(at(c.n_layers, 0));
    }
    size_t at(int layer, int pos) const { return (size_t(layer) * context + pos) * kv_dim; }
    // k and v (n_tokens, n_kv_heads * head_dim), of positions pos, pos + 1, ...
    void append(int layer, int pos, const Rows& k, const Rows& v) {
        std::copy(k.row(0), k.row(k.n_rows), &keys[at(layer, pos)]);
        std::copy(v.row(0), v.row(v.n_rows), &values[at(layer, pos)]);
    }
};

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

// out (n_tokens, n_rows) = x (n_tokens, n) times w (n_rows, n) transposed, added up in fp64 and rounded once:
// where the result decides which experts run, and rounding must not. out.n_cols is n_rows.
inline void fp64_matmul(Rows& out, const Rows& x, const float* w) {
    out.n_rows = x.n_rows;
    parallel_for(int64_t(x.n_rows) * out.n_cols, [&](int at) {
        const int t = at / out.n_cols, i = at % out.n_cols;
        const float *token = x.row(t), *row = w + int64_t(i) * x.n_cols;
        double sums[8] = {}, sum = 0;  // every eighth product goes into the same
        for (int k = 0; k < x.n_cols; k++) sums[k % 8] += double(token[k]) * double(row[k]);
        for (const double part : sums) sum += part;
        out.row(t)[i] = float(sum);
    });
}

// Row i of `out` becomes row rows[i] of x.
inline void gather(Int8Rows& out, const Int8Rows& x, std::span<const int> rows) {
    out.resize(int(rows.size()), x.n_cols, x.group_size);
    for (int i = 0; i < out.n_rows; i++) {
        std::copy_n(x.row_codes(rows[size_t(i)]), x.n_cols, out.row_codes(i));
        std::copy_n(x.row_scales(rows[size_t(i)]), x.n_groups(), out.row_scales(i));
    }
}

// The engine is asked for a single row, too, and for the products of rows with a matrix each; and told which
// experts come next.
inline bool fast_quantize(Int8Rows&, int, const float*) { return false; }
bool fast_matmul(const Int8Rows&, const auto&, bool) { return false; }
void will_read(const auto&, const auto&) {}

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

// The choices of an option that is given without a value: main() writes "yes" behind it.
const std::vector<const char*> no_value{"no", "yes"};

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

// SwiGLU of rows whose first half is the gate: out (n_rows, n), x (n_rows, 2 n).
inline void swiglu_halves(Rows& out, const Rows& x) {
    out.n_rows = x.n_rows;
    parallel_for(x.n_rows, [&](int t) { swiglu(out.row(t), x.row(t), x.row(t) + out.n_cols, out.n_cols); });
}

// x += y
inline void add(Rows& x, const Rows& y) {
    parallel_for(x.n_rows, [&](int t) {
        for (int i = 0; i < x.n_cols; i++) x.row(t)[i] += y.row(t)[i];
    });
}

// ---- section matrices of few bits ------------------------------------------
// The arithmetic of matrices in 2 to 8 bits. fast_quantize and fast_matmul are the engine's forms of it

// How a kind of matrix is stored, in the four bytes that a header has for it: docs/model-files.md.
struct MatrixFormat {
    uint8_t bits = 0;    // of a code: 2, 4, 5, 6 or 8
    uint8_t flags = 0;   // the sum of those below
    uint16_t group = 0;  // weights along a row that share a scale; 0: the whole row

    static constexpr uint8_t sparse_flag = 1;       // two of each four weights are 0 and not stored
    static constexpr uint8_t two_level_flag = 2;    // groups have 4-bit scales under one fp32 scale per row
    static constexpr uint8_t int8_scales_flag = 4;  // int8 ones, and of 4 and 5 bits a table of values

    bool sparse() const { return (flags & sparse_flag) != 0; }
    bool two_level() const { return (flags & two_level_flag) != 0; }
    bool int8_scales() const { return (flags & int8_scales_flag) != 0; }
    bool has_table() const { return int8_scales() && bits <= 5; }
    // Whether there is such a format.
    bool known() const {
        if (flags == sparse_flag) return bits == 4 && (group == 64 || group == 128);
        if (flags == two_level_flag) return bits == 2 && group == 64;
        const bool has_group = group == 0 || group == 32 || group == 64 || group == 128;
        if (flags == int8_scales_flag) return bits >= 4 && bits <= 6 && has_group && group > 0;
        return flags == 0 && has_group && (bits == 2 || bits == 4 || bits == 8);
    }
    bool operator==(const MatrixFormat&) const = default;
};

// "4 bits in groups of 64, 2:4 sparse"
inline std::string format_text(const MatrixFormat& f) {
    const std::string groups = f.group > 0 ? "in groups of " + std::to_string(f.group) : "per row";
    return std::to_string(f.bits) + " bits " + groups + (f.two_level() ? ", two-level" : "") +
           (f.has_table() ? ", by table" : "") + (f.sparse() ? ", 2:4 sparse" : "");
}

// A matrix, row by row. Of its tables a format has some; the others are null. Weight (i, k), with g = k /
// group:
//
//   8 bits           code * (scale of group g, or of row i)
//   4 bits, 2 bits   (code - zero of g) * scale of g, or with one zero point for all groups
//   two levels       (5 * code - high half of level g) * (low half of level g * scale of row i)
//   nl4, 5 bits      table[code] * (int8 level of g * scale of row i)
//   6 bits           (code - 32) * (int8 level of g * scale of row i)
//   2:4 sparse       (code - zero of g) * scale of g where the mask has a 1, otherwise 0
struct LowbitMatrix {
    const uint8_t* codes = nullptr;        // (n_rows, row_bytes()); of 8 bits they are int8
    const uint8_t* mask = nullptr;         // (n_rows, n_cols / 8), column k in bit k % 8 of byte k / 8
    const Half* scales = nullptr;          // (n_rows, n_groups())
    const float* row_scales = nullptr;     // (n_rows,), instead
    const uint8_t* zeros = nullptr;        // (n_rows, (n_groups() + 1) / 2), the first in the low half
    const uint8_t* levels = nullptr;       // (n_rows, n_groups()); int8 but of 2 bits
    const int8_t* table = nullptr;         // (2^bits,)
    int bits = 0, zero_point = 0;          // of a code: 2, 4, 5, 6 or 8; where there are no zeros
    int n_rows = 0, n_cols = 0;            // output channels, input channels
    int n_codes = 0;                       // of a row: n_cols, or half as many if there is a mask
    int group = 0;                         // weights that share a scale: n_cols, or a multiple of ...
    int group_size = 0;                    // activations that share one
    const PackedMatrix* packed = nullptr;  // the engine's copy, if it has one

    int n_groups() const { return n_cols / group; }
    int row_bytes() const { return n_codes * bits / 8; }
};

// lift unpack_codes
// The codes of a row in n_bytes, of 1, 2, 4 or 8 bits: (8 * n_bytes / bits,). The row is cut into blocks of
// 64 bytes, what is left into one of 32, one of 16, and so on. In a block of B bytes, byte j holds codes j,
// j + B, j + 2 B, ... from its lowest bits up: vector instructions unpack it by a shift and an AND. A code
// goes `left` bits to the left, above what codes has there.
inline void unpack_codes(int8_t* codes, const uint8_t* bytes, int n_bytes, int bits, int left) {
    const int ones = (1 << bits) - 1, below = (1 << left) - 1;
    for (int block = 64; block > 0; block /= 2) {
        for (; n_bytes >= block; n_bytes -= block, bytes += block) {
            for (int shift = 0; shift < 8; shift += bits, codes += block)
                for (int j = 0; j < block; j++)
                    codes[j] = int8_t((codes[j] & below) | (bytes[j] >> shift & ones) << left);
        }
    }
}

// lift place_kept
// codes (n,): where the mask (n / 8,) has a 1, the next of kept (n / 2,), which may be the upper half of
// codes; 0 elsewhere. Of each four columns two are kept. Which they are is computed, as a processor would
// guess branches wrong.
inline void place_kept(int8_t* codes, const int8_t* kept, const uint8_t* mask, int n) {
    for (int k = 0; k < n; k += 4) {
        const int ones = mask[k / 8] >> k % 8;
        const int first = (1 - (ones & 1)) * (2 - (ones >> 1 & 1));
        const int second = 3 - (1 - (ones >> 3 & 1)) * (2 - (ones >> 2 & 1));
        const int8_t a = kept[k / 2], b = kept[k / 2 + 1];
        for (int j = 0; j < 4; j++) codes[k + j] = 0;
        codes[k + first] = a, codes[k + second] = b;
    }
}

// Row i of w as Q8 has it: value k is codes[k] * scales[k / group_size], group_size the activations'. codes
// (n_cols,) fit int8: what is stored in 8 bits or by a table is int8, and all else is a zero point of 0 to 15
// taken from a code of 0 to 15, or from 5 times one of 0 to 3, or 32 from one of 0 to 63. Codes of 5 and 6
// bits are two planes, one behind the other: the low 4 bits of all, then the upper 1 or 2. scales: (n_cols /
// group_size,).
void expand(int8_t* codes, float* scales, const LowbitMatrix& w, int i) {
    const int n_groups = w.n_groups(), n = w.n_codes / n_groups, n_scales = w.group / w.group_size;
    const size_t first = size_t(i) * n_groups;
    int8_t* stored = codes + (w.n_cols - w.n_codes);  // the upper half, if half of them are 0
    const uint8_t* row = w.codes + size_t(i) * w.row_bytes();
    const int low = w.bits == 5 || w.bits == 6 ? 4 : w.bits, low_bytes = w.n_codes * low / 8;
    unpack_codes(stored, row, low_bytes, low, 0);
    unpack_codes(stored, row + low_bytes, w.row_bytes() - low_bytes, w.bits - low, low);
    for (int g = 0; g < n_groups; g++) {
        float scale = w.row_scales != nullptr ? w.row_scales[i] : to_float(w.scales[first + g]);
        int times = 1, zero = w.zero_point;
        if (w.zeros != nullptr) {
            zero = w.zeros[size_t(i) * ((n_groups + 1) / 2) + g / 2] >> g % 2 * 4 & 15;
        } else if (w.levels != nullptr && w.bits > 2) {
            scale = float(int8_t(w.levels[first + g])) * scale;
        } else if (w.levels != nullptr) {
            times = 5, zero = w.levels[first + g] >> 4;  // zero points are fifths of a code
            scale = float(w.levels[first + g] & 15) * scale;
        }
        for (int k = g * n; k < (g + 1) * n; k++)
            stored[k] = w.table != nullptr ? w.table[stored[k]] : int8_t(times * stored[k] - zero);
        std::fill_n(scales + g * n_scales, n_scales, scale);
    }
    if (w.mask != nullptr) place_kept(codes, stored, w.mask + size_t(i) * (w.n_cols / 8), w.n_cols);
}

// lift quantize_group
// codes (group_size,) of x (group_size,): amax = max|x|, code = clamp(x * (127 / amax)) rounded half to even.
// Returns the scale, amax / 127. Where 127 / amax is not finite (amax 0, or below 3.74e-37), scale and codes
// are 0. -128 never appears.
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
// ---- end of matrices of few bits -------------------------------------------

// ----------------------------------------------------------------------------
// What the header says besides a model's usual numbers: docs/moe.md

// How a matrix is stored.
enum class WeightKind : uint32_t { a8w8 = 0, a8w4 = 1, mxfp8 = 2, ladder = 3 };
struct WeightFormat {
    WeightKind kind = WeightKind::a8w8;
    int group = 0;  // weights of a row that share a scale, 0: the whole row; of the ladder, activations

    bool is_ladder() const { return kind == WeightKind::ladder; }
};

// Of the ladder each of these kinds of matrix has a format, in the order of the header: q, k, v and o are of
// attn, gate, up and down of dense layers of ffn, experts' are of the next two.
constexpr const char* ladder_kinds[] = {"embed", "attn", "ffn", "gate_up_proj", "down_proj", "classifier"};

struct MoeConfig {
    WeightFormat expert_format;
    std::array<MatrixFormat, std::size(ladder_kinds)> ladder;
    bool pure = false;              // other matrices are stored as experts are, not in A8W8 (export --pure)
    int n_experts = 0;              // of each layer that has any
    int n_active = 0;               // experts that a token goes to
    int hidden_dim = 0;             // length inside an expert (moe_intermediate_size)
    bool norm_topk_prob = false;    // weights of the active experts are divided by their sum
    std::vector<uint8_t> is_dense;  // (n_layers,), 1: no experts

    // The format of all matrices but the experts'.
    WeightFormat other_format() const {
        return pure || expert_format.is_ladder() ? expert_format : WeightFormat{};
    }
};

struct Config : ModelConfig {
    MoeConfig moe;

    // Whether the feed-forward block of layer l is a mixture of experts.
    bool has_experts(int l) const { return moe.n_experts > 0 && moe.is_dense[size_t(l)] == 0; }
};

// ----------------------------------------------------------------------------
// MXFP8: 8-bit floats in blocks, each under one power of two (OCP Microscaling Formats 1.0). Elements are
// E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, and there is no
// infinity. A scale is E8M0. Files have both as they are here, and golden/mx.py is the reference

// lift e4m3_value
// The number that an element is.
inline float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = std::ldexp(float(exponent == 0 ? mantissa : 8 + mantissa), std::max(exponent, 1) - 10);
    if ((code & 0x7f) == 0x7f) value = NAN;
    return code & 0x80 ? -value : value;
}

// lift e4m3_code
// The element nearest to x, halves to even; beyond the largest, 448, the largest; 0x7f for NaN.
inline uint8_t e4m3_code(float x) {
    if (std::isnan(x)) return 0x7f;
    const float magnitude = std::min(std::fabs(x), 448.0f);
    const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);  // -6: of the subnormals, too
    // In steps of 2^(exponent - 3): 8 to 16, or 0 to 8 for subnormals. 16 is the next exponent's 8.
    const int steps = int(std::nearbyintf(std::ldexp(magnitude, 3 - exponent)));
    const int code = std::min(steps + (exponent + 6) * 8, 0x7e);
    return uint8_t(code | (std::signbit(x) ? 0x80 : 0));
}

// lift e8m0_value
// The number that a scale is: 2^(code - 127), and NaN for 255.
inline float e8m0_value(uint8_t code) {
    if (code == 255) return NAN;
    return std::ldexp(1.0f, code - 127);
}

// The same of all 256 codes.
std::array<float, 256> values_of_bytes(float (*value)(uint8_t)) {
    std::array<float, 256> all;
    for (size_t code = 0; code < 256; code++) all[code] = value(uint8_t(code));
    return all;
}
const auto e4m3_values = values_of_bytes(e4m3_value), e8m0_values = values_of_bytes(e8m0_value);

// lift quantize_mx_block
// codes (n,) of a block x (n,), and its scale, which is returned: 2^(floor(log2(max|x|)) - 8), at least
// 2^-127; 8 is the exponent of the largest element. With a NaN in it, all of the block is NaN.
inline uint8_t quantize_mx_block(uint8_t* codes, const float* x, int n) {
    float amax = 0;
    bool has_nan = false;
    for (int i = 0; i < n; i++) {
        amax = std::max(amax, std::fabs(x[i]));
        has_nan = has_nan || std::isnan(x[i]);
    }
    int shared = -127;
    if (amax > 0) shared = std::max(shared, (std::isinf(amax) ? 128 : std::ilogb(amax)) - 8);
    for (int i = 0; i < n; i++) {
        const bool is_beside_nan = has_nan && !std::isnan(x[i]);
        codes[i] = e4m3_code(is_beside_nan ? std::copysign(0.0f, x[i]) : std::ldexp(x[i], -shared));
    }
    return has_nan ? 255 : uint8_t(shared + 127);
}

// ----------------------------------------------------------------------------
// Quantizing what matrices are multiplied by: to int8 with one scale a row or a group, or to MXFP8

// Rows in the codes that matrices of a format are multiplied by: int8, the whole row one group but with the
// ladder, or E4M3, whose scales are the numbers that E8M0 means.
struct CodedRows : Int8Rows {
    bool is_mx = false;

    explicit CodedRows(int max_rows = 0, int columns = 1, const WeightFormat& of_matrices = {}) {
        if (max_rows > 0) resize(max_rows, columns, of_matrices);
    }
    void resize(int rows, int columns, const WeightFormat& of_matrices) {
        is_mx = of_matrices.kind == WeightKind::mxfp8;
        Int8Rows::resize(rows, columns, is_mx || of_matrices.is_ladder() ? of_matrices.group : columns);
    }
};

// x (n_cols,) becomes row t of `out`. An int8 row that is not finite has scale NaN, as no code can say so.
void quantize_row(CodedRows& out, int t, const float* x) {
    int8_t* codes = out.row_codes(t);
    float* scales = out.row_scales(t);
    if (!out.is_mx && fast_quantize(out, t, x)) return;
    for (int i = 0, n = out.group_size; i < out.n_cols; i += n) {
        auto* bytes = reinterpret_cast<uint8_t*>(codes) + i;
        scales[i / n] =
            out.is_mx ? e8m0_value(quantize_mx_block(bytes, x + i, n)) : quantize_group(codes + i, x + i, n);
    }
    if (!out.is_mx && !all_finite(x, size_t(out.n_cols))) std::fill_n(scales, out.n_groups(), NAN);
}

// All rows of x, for matrices of a format: the input of the products that follow.
void quantize(CodedRows& out, const Rows& x, const WeightFormat& format) {
    out.resize(x.n_rows, x.n_cols, format);
    parallel_for(x.n_rows, [&](int t) { quantize_row(out, t, x.row(t)); });
}

// ----------------------------------------------------------------------------
// Matrices and their products

// The weights of an expert, or others. A8W8 is 8 bits with a scale for a row, A8W4 is 4 bits with the zero
// point 8; group_size are the weights that share a scale.
struct MoeMatrix : LowbitMatrix {
    WeightFormat format;
    const uint8_t* mx_scales = nullptr;  // (n_rows, n_groups()): MXFP8, E8M0; codes are E4M3
    const float* assist = nullptr;       // (n_rows,): A8W4, see dot_by_digits

    bool is_mx() const { return format.kind == WeightKind::mxfp8; }
    // Columns whose products are added up before they are scaled: of a group, or 64 of A8W4's.
    int part() const { return format.kind == WeightKind::a8w4 && group_size % 64 == 0 ? 64 : group_size; }
};

// Codes as the loops multiply them: int8 and int4 as int16, which compilers multiply faster, and E4M3 as the
// numbers that they are. Of a row of weights, its scales (n_groups,), too.
struct WideCodes {
    std::vector<int16_t> codes;
    std::vector<float> values, scales;

    void load(const int8_t* from, size_t n, bool is_mx) {
        codes.assign(from, from + (is_mx ? 0 : n));
        values.resize(is_mx ? n : 0);
        for (size_t k = 0, end = values.size(); k < end; k++) values[k] = e4m3_values[uint8_t(from[k])];
    }
    void load_row(const MoeMatrix& w, int i) {
        std::vector<int8_t> row(size_t(w.n_cols));
        scales.resize(size_t(w.n_cols / w.group_size));
        if (!w.is_mx()) {
            expand(row.data(), scales.data(), w, i);
        } else {
            std::copy_n(w.codes + size_t(i) * row.size(), row.size(), row.data());
            for (size_t g = 0; g < scales.size(); g++)
                scales[g] = e8m0_values[w.mx_scales[size_t(i) * scales.size() + g]];
        }
        load(row.data(), row.size(), w.is_mx());
    }
};

// One row of the table per token, dequantized.
void embed(Rows& out, const MoeMatrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    WideCodes row;
    for (int t = 0; t < out.n_rows; t++) {
        row.load_row(table, tokens[t]);
        for (int i = 0; i < out.n_cols; i++)
            out.row(t)[i] =
                (table.is_mx() ? row.values[i] : float(row.codes[i])) * row.scales[i / table.group_size];
    }
}

// lift dot
// A row of activations (n,) times a row of weights (n,), n_scales scales and weights in groups of `group`:
// each run of `part` products is an exact int32 sum, scaled by both scales; the runs are added up in fp32.
template <class Code>
float dot(const Code* x, const float* x_scales, int n_scales, const Code* w, const float* w_scales, int n,
          int group, int part) {
    float out = 0;
    for (int k = 0; k < n;) {
        const float scale = w_scales[k / group] * x_scales[n_scales > 1 ? k / group : 0];
        int32_t sum = 0;
        for (const int end = k + part; k < end; k++) sum += int32_t(x[k]) * int32_t(w[k]);
        out = fused_multiply_add(float(sum), scale, out);
    }
    return out;
}

// lift dot_mx
// A row of activations (n,) times a row of weights (n,), both MXFP8: the products of elements are multiples
// of 2^-18 below 2^18, so that a block's sum in fp64 is exact, also times both scales, which are powers of
// two. Each is rounded to fp32; then they are added.
inline float dot_mx(const float* x, const float* x_scales, const float* w, const float* w_scales, int n,
                    int block) {
    float out = 0;
    for (int b = 0; b < n / block; b++) {
        const float *x_block = x + b * block, *w_block = w + b * block;
        double sum = 0;
        for (int k = 0; k < block; k++) sum += double(x_block[k]) * w_block[k];
        out += float(sum * x_scales[b] * w_scales[b]);
    }
    return out;
}

// out (n_rows, w.n_rows) = rows of x, from `first` on, times the matrix transposed. A row of weights is read
// once for all tokens.
void plain_matmul(const CodedRows& x, const MatrixProduct<MoeMatrix>& p, int first, int n_rows) {
    const int n = x.n_cols, size = p.w.group_size, part = p.w.part();
    p.out.n_rows = n_rows;
    WideCodes wide;
    wide.load(x.row_codes(first), size_t(n_rows) * size_t(n), x.is_mx);
    parallel_for(p.w.n_rows, [&](int i) {
        static thread_local WideCodes row;
        row.load_row(p.w, i);
        for (int t = 0; t < n_rows; t++) {
            const size_t at = size_t(t) * size_t(n);
            const float *x_scales = x.row_scales(first + t), *scales = row.scales.data();
            p.out.row(t)[i] = x.is_mx ? dot_mx(&wide.values[at], x_scales, row.values.data(), scales, n, size)
                                      : dot(&wide.codes[at], x_scales, x.n_groups(), row.codes.data(), scales,
                                            n, size, part);
        }
    });
}

// The products of one input with several matrices of a format: of experts, or q, k and v. With row_each those
// of its row i with the i-th: of one token, whose experts each have their row.
void matmul(const CodedRows& x, const std::vector<MatrixProduct<MoeMatrix>>& products,
            bool row_each = false) {
    if (fast_matmul(x, products, row_each)) return;
    for (size_t i = 0; i < products.size(); i++)
        plain_matmul(x, products[i], row_each ? int(i) : 0, row_each ? 1 : x.n_rows);
}

// ----------------------------------------------------------------------------
// Routing: which experts each token goes to, and what becomes of what they compute

// A pair is a token and one of its k experts: t * k + r, r = 0 the best.
struct Routing {
    int k = 0;                     // experts that a token goes to
    std::vector<int32_t> experts;  // (n_tokens, k)
    std::vector<float> weights;    // (n_tokens, k)
    std::vector<int> by_expert;    // all pairs, sorted by expert: the rows of what experts compute
    std::vector<int> row_of;       // (n_tokens, k), where a pair is in by_expert
    std::vector<int> token_of;     // (n_pairs,), the token of each row
    std::vector<int> every_row;    // (n_pairs,), 0, 1, 2, ...
};

// Sorts the pairs of tokens and experts by expert; those of one expert stay in the order of tokens.
void sort_pairs(Routing& r) {
    r.every_row.resize(r.experts.size());
    std::iota(r.every_row.begin(), r.every_row.end(), 0);
    r.by_expert = r.row_of = r.token_of = r.every_row;
    std::stable_sort(r.by_expert.begin(), r.by_expert.end(),
                     [&](int a, int b) { return r.experts[a] < r.experts[b]; });
    for (const int row : r.every_row) {
        r.row_of[r.by_expert[row]] = row;
        r.token_of[row] = r.by_expert[row] / r.k;
    }
}

// Of each token's logits (n_tokens, n_experts) the k largest, of equal ones the lowest index, and their
// softmax: over all experts, or over these k (norm_topk_prob of Qwen3's config.json).
void route(Routing& out, const Rows& logits, int k, bool norm_topk_prob) {
    out.k = k;
    out.experts.resize(size_t(logits.n_rows) * k), out.weights.resize(out.experts.size());
    std::vector<int32_t> order(size_t(logits.n_cols));
    for (int t = 0; t < logits.n_rows; t++) {
        const float* row = logits.row(t);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + k, order.end(),
                          [&](int a, int b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
        const auto term = [&](int expert) { return double(exp_fp32(row[expert] - row[order[0]])); };
        double sum = 0;
        for (int i = 0; i < (norm_topk_prob ? k : logits.n_cols); i++)
            sum += term(norm_topk_prob ? order[i] : i);
        for (int i = 0; i < k; i++) {
            out.experts[t * k + i] = order[i];
            out.weights[t * k + i] = float(term(order[i]) / sum);
        }
    }
    sort_pairs(out);
}

// out (n_tokens, dim) = the sum of each token's rows of x (n_pairs, dim) times their weights, in rising order
// of expert, which is that of the rows: the same sum whatever other tokens the chunk has.
void combine(Rows& out, const Rows& x, const Routing& routing) {
    out.n_rows = x.n_rows / routing.k;
    parallel_for(out.n_rows, [&](int t) {
        const auto first = routing.row_of.begin() + t * routing.k;
        std::vector<int> rows(first, first + routing.k);
        std::sort(rows.begin(), rows.end());
        std::fill_n(out.row(t), out.n_cols, 0.0f);
        for (const int row : rows)
            for (int i = 0; i < out.n_cols; i++)
                out.row(t)[i] =
                    fused_multiply_add(routing.weights[routing.by_expert[row]], x.row(row)[i], out.row(t)[i]);
    });
}

// ----------------------------------------------------------------------------
// What experts compute: a row for each pair, sorted by expert

// Calls use(first, product) for each expert that has rows: `product` (n, n_out) has rows first, first + 1,
// ... of by_expert, and row i is the expert's matrix times row rows[i] of x. One token's experts go together:
// they all read one row, or each its own.
void expert_products(const CodedRows& x, const std::vector<int>& rows, const std::vector<MoeMatrix>& experts,
                     const Routing& routing, auto use) {
    const int n_pairs = int(rows.size()), n_out = experts[0].n_rows;
    CodedRows expert_x;
    expert_x.is_mx = x.is_mx;
    Rows product(0, n_out);
    const bool is_one_token = n_pairs == routing.k;
    static thread_local std::vector<Rows> of_one_row;  // keeps its memory from layer to layer
    if (is_one_token) of_one_row.resize(std::max(of_one_row.size(), rows.size()));
    std::vector<MatrixProduct<MoeMatrix>> together;
    for (int first = 0, end = 0; first < n_pairs; first = end) {
        const int32_t expert = routing.experts[routing.by_expert[first]];
        while (end < n_pairs && routing.experts[routing.by_expert[end]] == expert) end++;
        if (is_one_token) {
            of_one_row[first].n_cols = n_out, of_one_row[first].reserve(1);
            together.push_back({of_one_row[first], experts[expert]});
            continue;
        }
        gather(expert_x, x, std::span(rows).subspan(first, end - first));
        product.reserve(end - first);
        matmul(expert_x, {{product, experts[expert]}});
        use(first, product);
    }
    if (!together.empty()) matmul(x, together, x.n_rows > 1);
    parallel_for(int(together.size()), [&](int i) { use(i, together[i].out); });
}

// out (n_pairs, n_out): row i is row rows[i] of x times the matrix of its expert.
void grouped_matmul(Rows& out, const CodedRows& x, const std::vector<int>& rows,
                    const std::vector<MoeMatrix>& experts, const Routing& routing) {
    out.n_rows = int(rows.size());
    expert_products(x, rows, experts, routing, [&](int first, const Rows& product) {
        std::copy(product.row(0), product.row(product.n_rows), out.row(first));
    });
}

// The fused operator (golden/grouped.py): matmul, swiglu and quantize for one expert's rows after another. At
// a time there are fp32 results of one expert alone, which stay in the cache.
void grouped_matmul_swiglu_quant(CodedRows& out, const CodedRows& x, const std::vector<MoeMatrix>& experts,
                                 const Routing& routing) {
    const int half = experts[0].n_rows / 2;
    out.resize(int(routing.by_expert.size()), half, experts[0].format);
    expert_products(x, routing.token_of, experts, routing, [&](int first, Rows& product) {
        parallel_for(product.n_rows, [&](int i) {
            swiglu(product.row(i), product.row(i), product.row(i) + half, half);
            quantize_row(out, first + i, product.row(i));
        });
    });
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

void check_mask(const std::string& name, const uint8_t* mask, int n_rows, int n_cols);

// The experts of a layer, (n_experts,) each.
struct Experts {
    std::vector<MoeMatrix> gate_up;  // 2 * moe.hidden_dim rows of dim columns
    std::vector<MoeMatrix> down;     // dim rows of moe.hidden_dim columns
};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    Config c;

    using Vectors = std::vector<const float*>;                                       // one of each layer
    using Matrices = std::vector<MoeMatrix>;                                         // likewise
    const uint8_t* dense_layers = file.next<uint8_t>("dense_layers", {c.n_layers});  // read with the header
    Vectors attn_norm = file.vectors<float>(c, "attn.norm", c.dim);
    Vectors ffn_norm = file.vectors<float>(c, "ffn.norm", c.dim);
    const float* norm = file.next<float>("norm", {c.dim});
    const float* rotation = c.rotation_block > 0 ? file.next<float>("rotation", {c.dim}) : nullptr;
    Vectors q_norm = c.has_head_norms() ? file.vectors<float>(c, "attn.q_norm", c.head_dim) : Vectors();
    Vectors k_norm = c.has_head_norms() ? file.vectors<float>(c, "attn.k_norm", c.head_dim) : Vectors();
    Vectors router = layers(with_experts, [&](const std::string& layer) {  // (n_experts, dim)
        return file.next<float>(layer + "moe.router", {c.moe.n_experts, c.dim});
    });

    MoeMatrix embedding = matrix("embed", c.vocab_size, c.dim);
    Matrices q_proj = matrices(each, "attn.q_proj", c.q_dim(), c.dim);
    Matrices k_proj = matrices(each, "attn.k_proj", c.kv_dim(), c.dim);
    Matrices v_proj = matrices(each, "attn.v_proj", c.kv_dim(), c.dim);
    Matrices o_proj = matrices(each, "attn.o_proj", c.dim, c.q_dim());
    Matrices gate_proj = matrices(dense, "ffn.gate_proj", c.hidden_dim, c.dim);
    Matrices down_proj = matrices(dense, "ffn.down_proj", c.dim, c.hidden_dim);
    Matrices up_proj = matrices(dense, "ffn.up_proj", c.hidden_dim, c.dim);
    MoeMatrix classifier = c.shared_classifier ? embedding : matrix("classifier", c.vocab_size, c.dim);
    std::vector<Experts> experts = layers(with_experts, [&](const std::string& layer) {
        return Experts{experts_of(layer + "moe.gate_up_proj", 2 * c.moe.hidden_dim, c.dim),
                       experts_of(layer + "moe.down_proj", c.dim, c.moe.hidden_dim)};
    });

    // What make("layers.3.") gives for each of such layers; the others' are empty.
    enum Layers { each, dense, with_experts };
    auto layers(Layers which, auto make) -> std::vector<decltype(make(""))> {
        std::vector<decltype(make(""))> found(size_t(c.n_layers));
        for (int l = 0; l < c.n_layers; l++)
            if (which == each || c.has_experts(l) == (which == with_experts))
                found[size_t(l)] = make("layers." + std::to_string(l) + ".");
        return found;
    }
    // A matrix that is no expert's, those of layers, and those of a layer's experts.
    MoeMatrix matrix(const std::string& name, int n_rows, int n_cols) {
        return tensors(name, c.moe.other_format(), {n_rows}, n_cols)[0];
    }
    Matrices matrices(Layers which, const char* part, int n_rows, int n_cols) {
        return layers(which, [&](const std::string& layer) { return matrix(layer + part, n_rows, n_cols); });
    }
    Matrices experts_of(const std::string& name, int n_rows, int n_cols) {
        return tensors(name, c.moe.expert_format, {c.moe.n_experts, n_rows}, n_cols);
    }
    // The matrices in the tensors of a name. rows: {n_rows}, or {n_matrices, n_rows}.
    Matrices tensors(const std::string& name, const WeightFormat& format, const std::vector<int>& rows,
                     int n_cols);
    static constexpr auto check_mask = ::check_mask;  // for the engine, which chooses when
    // All matrices that are multiplied: not the embedding, which is only looked up.
    std::vector<MoeMatrix*> multiplied() {
        std::vector<Matrices*> lists{&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj};
        for (Experts& e : experts) lists.insert(lists.end(), {&e.gate_up, &e.down});
        std::vector<MoeMatrix*> all{&classifier};
        for (Matrices* list : lists)
            for (MoeMatrix& w : *list) all.push_back(&w);
        return all;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights. Members are made where they stand, as those of Weights are

constexpr int max_chunk = 512;  // tokens of a prompt that go through together: each expert gets a few of them

struct RunState {
    Config c;
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
    Rows proj{n, c.dim};         // the output of o_proj and of down_proj
    Rows gate{n, c.hidden_dim};  // of dense layers
    Rows up{n, c.hidden_dim};
    Rows router{n, c.moe.n_experts};
    Rows logits{n_logits(options, traced, n), c.vocab_size};  // of the last token, or of all

    // A row per pair of token and expert.
    int n_pairs = n * c.moe.n_active;
    // Or step by step, which gives the same bits.
    bool fused = !traced && (!options.own.contains("--no-fuse") || options.own.at("--no-fuse") == "no");
    Rows gate_up{fused ? 0 : n_pairs, 2 * c.moe.hidden_dim};
    Rows hidden{fused ? 0 : n_pairs, c.moe.hidden_dim};
    Rows down{n_pairs, c.dim};

    // The quantized input of the products that come next, and of experts' second product.
    CodedRows xq{n, longest_row, c.moe.other_format()};
    CodedRows expert_hidden{n_pairs, c.moe.hidden_dim, c.moe.expert_format};
    Routing routing{};
    RopeAngles angles{c, n};                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};
    KvCache cache = kv_cache(options, c, context);
};

using Transformer = TransformerOf<Config, Weights, RunState>;

// ----------------------------------------------------------------------------
// Recording what a Recorder does not know. What experts compute is a row for each pair of token and expert,
// sorted by expert; a trace has it as (n_tokens, k, n_cols), a token's best expert first

struct MoeRecorder : Recorder {
    using Recorder::Recorder;
    using Recorder::operator();
    using Name = const char*;

    // Whether there is a trace, and this is the layer of which it has the sums of products.
    bool wants_sums() const { return trace != nullptr && layer == accumulator_layer; }
    void operator()(Name name, const Rows& x, const Routing& r) const;
    // Codes, NAME.q (n_tokens, n_cols) and NAME.s (n_tokens, n_groups), or those of pairs.
    void operator()(Name name, const CodedRows& x, const Routing* r = nullptr) const;
    // A product (n_tokens, n_rows), and its sums, NAME.acc (n_tokens, n_rows, n_groups). MXFP8 has none.
    void operator()(Name name, const Rows& out, const CodedRows& x, const MoeMatrix& w) const;
    // Experts' products, of row rows[i] of x with the matrix of the i-th row's expert, likewise.
    void operator()(Name name, const Rows& out, const CodedRows& x, const std::vector<int>& rows,
                    const std::vector<MoeMatrix>& experts, const Routing& r) const;
};

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions pos, pos + 1, ...
void attention_block(Transformer& m, int l, int pos) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const MoeRecorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.attn_norm[l], c.dim, c.norm_eps);           record("attn.norm", s.normed);
    quantize(s.xq, s.normed, c.moe.other_format());                      record("attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                    // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                  record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                         record("attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                         record("attn.v_proj", s.v, s.xq, w.v_proj[l]);
    if (c.has_head_norms()) {                                            // each head on its own
        rmsnorm(s.q, s.q, w.q_norm[l], c.head_dim, c.norm_eps);          record("attn.q_norm", s.q, c.head_dim);
        rmsnorm(s.k, s.k, w.k_norm[l], c.head_dim, c.norm_eps);          record("attn.k_norm", s.k, c.head_dim);
    }
    rope(s.q, s.angles, c.head_dim);                                     record("attn.q_rope", s.q, c.head_dim);
    rope(s.k, s.angles, c.head_dim);                                     record("attn.k_rope", s.k, c.head_dim);
    s.cache.append(l, pos, s.k, s.v);
    attention(s.attn_out, s.scores, s.probs, s.q, s.cache, l, pos);      record("attn.scores", s.scores);
                                                                         record("attn.probs", s.probs);
                                                                         record("attn.mix", s.attn_out);
    quantize(s.xq, s.attn_out, c.moe.other_format());                    record("attn.mix", s.xq);
    matmul(s.xq, {{s.proj, w.o_proj[l]}});                               record("attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                    record("attn.residual", s.x);
}

// x (n_tokens, dim) += what the feed-forward block of layer l makes of it: the weighted sum of what each token's
// experts make, or, in a dense layer, down_proj(silu(gate_proj(normed)) * up_proj(normed)).
void feed_forward_block(Transformer& m, int l) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const MoeRecorder record(m.trace, l);
    const Experts& experts = w.experts[l];
    const Routing& r = s.routing;

    rmsnorm(s.normed, s.x, w.ffn_norm[l], c.dim, c.norm_eps);            record("ffn.norm", s.normed);
    if (c.has_experts(l)) {
        fp64_matmul(s.router, s.normed, w.router[l]);                    record("moe.router", s.router);
        route(s.routing, s.router, c.moe.n_active, c.moe.norm_topk_prob);
                                                                         record("moe.experts", r.experts.data(), s.x.n_rows, {r.k});
                                                                         record("moe.weights", r.weights.data(), s.x.n_rows, {r.k});
        will_read(experts, r);
        quantize(s.xq, s.normed, c.moe.expert_format);                   record("ffn.norm", s.xq);
        if (s.fused) {
            grouped_matmul_swiglu_quant(s.expert_hidden, s.xq, experts.gate_up, r);
        } else {                                                         // the same, and every step is kept
            grouped_matmul(s.gate_up, s.xq, r.token_of, experts.gate_up, r);
                                                                         record("moe.gate_up_proj", s.gate_up, s.xq, r.token_of, experts.gate_up, r);
            swiglu_halves(s.hidden, s.gate_up);                          record("moe.swiglu", s.hidden, r);
            quantize(s.expert_hidden, s.hidden, c.moe.expert_format);    record("moe.swiglu", s.expert_hidden, &r);
        }
        grouped_matmul(s.down, s.expert_hidden, r.every_row, experts.down, r);
                                                                         record("moe.down_proj", s.down, s.expert_hidden, r.every_row, experts.down, r);
        combine(s.proj, s.down, r);                                      record("moe.mix", s.proj);
    } else {
        quantize(s.xq, s.normed, c.moe.other_format());                  record("ffn.norm", s.xq);
        matmul(s.xq, {{s.gate, w.gate_proj[l]},
                      {s.up, w.up_proj[l]}});                            record("ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                         record("ffn.up_proj", s.up, s.xq, w.up_proj[l]);
        swiglu(s.gate, s.gate, s.up);                                    record("ffn.swiglu", s.gate);
        quantize(s.xq, s.gate, c.moe.other_format());                    record("ffn.swiglu", s.xq);
        matmul(s.xq, {{s.proj, w.down_proj[l]}});                        record("ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
    }
    add(s.x, s.proj);                                                    record("ffn.residual", s.x);
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const MoeRecorder record(m.trace, -1);

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
    quantize(s.xq, s.normed, c.moe.other_format());                      record("norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                            record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// What was left open above: other arithmetic for A8W4, tensors, and what is recorded

// lift dot_by_digits
// dot() as hardware computes it that multiplies int4 by int4: a code of x is 16 * high + low + 8, two digits
// in -8..7 each (MSD, the most significant digit first). The eights add the same to every product with
// a row, 8 * sum(scale * w): `assist`, which the file has, so that they cost one addition.
template <class Code>
float dot_by_digits(const Code* x, float x_scale, const Code* w, const float* w_scales, int n, int group,
                    float assist) {
    float out = 0;
    for (int g = 0; g < n / group; g++) {
        int32_t high_sum = 0, low_sum = 0;
        for (int k = g * group; k < (g + 1) * group; k++) {
            high_sum += (x[k] >> 4) * w[k];
            low_sum += ((x[k] & 15) - 8) * w[k];
        }
        out = fused_multiply_add(float(16 * high_sum + low_sum), w_scales[g], out);
    }
    return (out + assist) * x_scale;
}

// ---- section reading matrices of few bits ----------------------------------
// Throws for a mask that does not keep two of each four columns: where the code of a column lies would
// depend on all columns before it.
void check_mask(const std::string& name, const uint8_t* mask, int n_rows, int n_cols) {
    for (int64_t k = 0; k < int64_t(n_rows) * n_cols; k += 4) {
        const int n_kept = std::popcount(mask[k / 8] >> k % 8 & 15u);
        if (n_kept != 2)
            fail(name, ": row ", k / n_cols, " keeps ", n_kept, " of columns ", k % n_cols, " to ",
                 k % n_cols + 3, ", expected 2 of each 4");
    }
}

// The tensors of a matrix: its mask or table, its codes, then what its groups have. rows: {n_rows}, or
// {n_matrices, n_rows} of matrices that lie one behind the other in each tensor: the first of them.
LowbitMatrix lowbit_tensors(TensorList& file, const std::string& name, const MatrixFormat& f,
                            const std::vector<int>& rows, int n_cols, int group_size) {
    LowbitMatrix m;
    m.bits = f.bits, m.n_rows = rows.back(), m.n_cols = n_cols, m.group_size = group_size;
    m.n_codes = f.sparse() ? n_cols / 2 : n_cols, m.group = f.group > 0 ? f.group : n_cols;
    const auto with = [&](int n, std::vector<int> shape) { return shape.push_back(n), shape; };
    if (f.sparse()) {
        m.mask = file.next<uint8_t>(name + ".mask", with(n_cols / 8, rows));
        const int n_rows = rows.size() > 1 ? rows[0] * rows[1] : rows[0];
        if (!fast_check_mask(m.mask)) check_mask(name + ".mask", m.mask, n_rows, n_cols);
    }
    if (f.has_table()) {
        const std::vector<int> matrices(rows.begin(), rows.end() - 1);
        m.table = file.next<int8_t>(name + ".table", with(1 << f.bits, matrices));
    } else if (f.int8_scales()) {
        m.zero_point = 1 << (f.bits - 1);
    }
    m.codes = f.bits < 8
                  ? file.next<uint8_t>(name + ".codes", with(m.row_bytes(), rows))
                  : reinterpret_cast<const uint8_t*>(file.next<int8_t>(name + ".codes", with(n_cols, rows)));
    if (f.two_level() || f.int8_scales()) {
        const std::vector<int> shape = with(m.n_groups(), rows);
        m.levels = f.two_level()
                       ? file.next<uint8_t>(name + ".groups", shape)
                       : reinterpret_cast<const uint8_t*>(file.next<int8_t>(name + ".groups", shape));
        m.row_scales = file.next<float>(name + ".row_scales", rows);
    } else if (f.bits == 8 && f.group == 0) {
        m.row_scales = file.next<float>(name + ".scales", rows);
    } else {
        m.scales = file.next<Half>(name + ".scales", with(m.n_groups(), rows));
        if (f.bits < 8) m.zeros = file.next<uint8_t>(name + ".zeros", with((m.n_groups() + 1) / 2, rows));
    }
    return m;
}

// Throws for a format that there is not or that does not fit its matrix, for two of a classifier that is the
// embedding, and for other groups of activations than the formats ask for. kinds: tuples of a name, a format
// and columns, those of the embedding first, of the classifier last.
void check_formats(const ModelConfig& c, const auto& kinds) {
    int expected = 64;  // activations share a scale by 64, or by 32 where a group of weights is as short
    for (const auto& [name, f, n_cols] : kinds) {
        if (!f.known())
            fail("the format of ", name, " is bits ", int(f.bits), ", flags ", int(f.flags), ", group ",
                 f.group, ", which is none");
        const int multiple = f.group == 128 ? 128 : 64;  // groups fill a row, the activations', too
        if (n_cols % multiple != 0) fail(name, " has ", n_cols, " columns, not a multiple of ", multiple);
        if (f.group == 32) expected = 32;
    }
    const MatrixFormat &embed = std::get<1>(kinds.front()), &classifier = std::get<1>(kinds.back());
    if (c.shared_classifier && classifier != embed)
        fail("the classifier is the embedding, but its format is ", format_text(classifier), ", not ",
             format_text(embed));
    check_value(c.group_size == expected, "group_size", c.group_size, "expected ", expected,
                ", the activations'");
}
// ---- end of reading matrices of few bits -----------------------------------

// Codes, scales and, with A8W4, the assist matrix.
Weights::Matrices Weights::tensors(const std::string& name, const WeightFormat& format,
                                   const std::vector<int>& rows, int n_cols) {
    const auto [kind, group] = format;
    const bool a8w8 = kind == WeightKind::a8w8, a8w4 = kind == WeightKind::a8w4;
    const auto with = [&](int n, std::vector<int> shape) { return shape.push_back(n), shape; };
    MoeMatrix w;
    w.n_rows = rows.back(), w.n_cols = w.n_codes = n_cols, w.format = format;
    w.group = w.group_size = group > 0 ? group : n_cols;
    w.bits = a8w4 ? 4 : 8, w.zero_point = a8w4 ? 8 : 0;
    if (format.is_ladder()) {
        size_t which = 0;  // the first kind whose name is in the matrix's: "ffn" of "layers.0.ffn.down_proj"
        while (name.find(ladder_kinds[which]) == name.npos) which++;
        w = {lowbit_tensors(file, name, c.moe.ladder[which], rows, n_cols, c.group_size), format};
    } else if (a8w8) {  // a matrix that is no expert's says that its rows have one group
        w.codes = reinterpret_cast<const uint8_t*>(file.next<int8_t>(name + ".codes", with(n_cols, rows)));
        w.row_scales = file.next<float>(name + ".scales", rows.size() == 1 ? with(1, rows) : rows);
    } else {
        w.codes = file.next<uint8_t>(name + ".codes", with(w.row_bytes(), rows));
        if (!a8w4) w.mx_scales = file.next<uint8_t>(name + ".scales", with(w.n_groups(), rows));
        if (a8w4 && group > 0) w.scales = file.next<Half>(name + ".scales", with(w.n_groups(), rows));
        if (a8w4 && group == 0) w.row_scales = file.next<float>(name + ".scales", rows);
        if (a8w4) w.assist = file.next<float>(name + ".assist", rows);
    }
    Matrices all;
    for (int e = 0; e < (rows.size() > 1 ? rows[0] : 1); e++) {
        all.push_back(w);
        const auto move = [&](auto*& tensor, int row) {  // null, too: where the engine only counts bytes
            if (tensor != nullptr) tensor += int64_t(w.n_rows) * row;
        };
        move(w.codes, w.row_bytes()), move(w.mask, n_cols / 8), move(w.scales, w.n_groups());
        move(w.row_scales, 1), move(w.zeros, (w.n_groups() + 1) / 2), move(w.levels, w.n_groups());
        move(w.mx_scales, w.n_groups()), move(w.assist, 1);
        if (w.table != nullptr) w.table += 1 << w.bits;
    }
    return all;
}

// Rows of n values under a name; r: of pairs, which it puts into the order of tokens, or null.
template <class T>
void record_rows(const Recorder& record, const std::string& name, const T* rows, int n_rows, int n,
                 const Routing* r) {
    if (r == nullptr) return record(name.c_str(), rows, n_rows, {n});
    std::vector<T> sorted;
    for (const int row : r->row_of)
        sorted.insert(sorted.end(), rows + int64_t(row) * n, rows + int64_t(row + 1) * n);
    record(name.c_str(), sorted.data(), n_rows / r->k, {r->k, n});
}

// Appends the exact sum of each group of each row of w, for one token's codes (n_cols,): (n_rows, n_groups).
void append_sums(std::vector<int32_t>& sums, const int8_t* x, const MoeMatrix& w) {
    WideCodes row;
    for (int i = 0; i < w.n_rows; i++) {
        row.load_row(w, i);
        for (int k = 0; k < w.n_cols; k++) {
            if (k % w.part() == 0) sums.push_back(0);
            sums.back() += x[k] * row.codes[size_t(k)];
        }
    }
}

void MoeRecorder::operator()(Name name, const Rows& x, const Routing& r) const {
    if (trace != nullptr) record_rows(*this, name, x.values.data(), x.n_rows, x.n_cols, &r);
}
void MoeRecorder::operator()(Name name, const CodedRows& x, const Routing* r) const {
    if (trace == nullptr) return;
    const auto record = [&](const auto* codes, const auto* scales) {
        record_rows(*this, std::string(name) + ".q", codes, x.n_rows, x.n_cols, r);
        record_rows(*this, std::string(name) + ".s", scales, x.n_rows, x.n_groups(), r);
    };
    if (!x.is_mx) return record(x.codes.data(), x.scales.data());
    std::vector<uint8_t> scales;  // bytes, as in a file
    for (int i = 0; i < x.n_rows * x.n_groups(); i++)
        scales.push_back(std::isnan(x.scales[i]) ? 255 : uint8_t(std::ilogb(x.scales[i]) + 127));
    record(reinterpret_cast<const uint8_t*>(x.codes.data()), scales.data());
}
void MoeRecorder::operator()(Name name, const Rows& out, const CodedRows& x, const MoeMatrix& w) const {
    (*this)(name, out);
    for (int t = 0; t < x.n_rows && wants_sums() && !x.is_mx; t++) {
        std::vector<int32_t> sums;
        append_sums(sums, x.row_codes(t), w);
        (*this)((std::string(name) + ".acc").c_str(), sums.data(), 1, {w.n_rows, w.n_cols / w.part()});
    }
}
void MoeRecorder::operator()(Name name, const Rows& out, const CodedRows& x, const std::vector<int>& rows,
                             const std::vector<MoeMatrix>& experts, const Routing& r) const {
    (*this)(name, out, r);
    const MoeMatrix& w = experts[0];
    for (size_t pair = 0; pair < r.experts.size() && wants_sums() && !x.is_mx; pair += size_t(r.k)) {
        std::vector<int32_t> sums;
        for (size_t i = pair; i < pair + size_t(r.k); i++)
            append_sums(sums, x.row_codes(rows[size_t(r.row_of[i])]), experts[size_t(r.experts[i])]);
        (*this)((std::string(name) + ".acc").c_str(), sums.data(), 1, {r.k, w.n_rows, w.n_cols / w.part()});
    }
}

// ----------------------------------------------------------------------------
// What files and the command line have of this program

// Throws for groups that a format has not, and for rows that are no multiple of what they have to be.
void check_config(const Config& c) {
    const auto [kind, group] = c.moe.expert_format;
    const bool a8w8 = kind == WeightKind::a8w8, a8w4 = kind == WeightKind::a8w4, pure = c.moe.pure;
    for (const uint8_t flag : c.moe.is_dense) check_value(flag <= 1, "dense_layers", flag, "expected 0 or 1");
    if (c.moe.expert_format.is_ladder()) {
        const int ffn = std::ranges::count(c.moe.is_dense, 1) > 0 ? c.hidden_dim : c.dim;
        std::vector<std::tuple<const char*, MatrixFormat, int>> kinds;
        const int which[] = {0, 1, 1, 2, 2, 3, 4, 5};
        const int n_cols[] = {c.dim, c.dim, c.q_dim(), c.dim, ffn, c.dim, c.moe.hidden_dim, c.dim};
        for (int i = 0; i < 8; i++)
            kinds.push_back({ladder_kinds[which[i]], c.moe.ladder[which[i]], n_cols[i]});
        return check_formats(c, kinds);
    }
    check_value(c.group_size == 0, "group_size", c.group_size, "expected 0 (whole rows)");
    for (const auto& [name, n] :
         {std::pair{"dim", c.dim}, {"hidden_dim", c.hidden_dim}, {"n_heads * head_dim", c.q_dim()}})
        check_value(n % 4 == 0 && n <= max_group_size, name, n,
                    "expected a multiple of 4, at most " + std::to_string(max_group_size));
    const bool has_group = a8w8   ? group == 0
                           : a8w4 ? group == 0 || group == 32 || group == 64 || group == 128
                                  : group > 0 && group % 32 == 0;
    check_value(has_group, "group", group, "which the experts' format has not");
    check_value(!(pure && a8w8), "pure", 1, "but all of A8W8 is int8: expected 0");
    auto check_row = [unit = std::max(group, a8w4 ? 32 : 4)](const char* name, int n) {
        check_value(n % unit == 0, name, n, "not a multiple of " + std::to_string(unit));
    };
    check_row("dim", c.dim);
    check_row("moe_hidden_dim", c.moe.hidden_dim);
    if (pure) check_row("n_heads * head_dim", c.q_dim());
    if (pure && std::count(c.moe.is_dense.begin(), c.moe.is_dense.end(), 1) > 0)
        check_row("hidden_dim", c.hidden_dim);
}

size_t read_own_fields(const HeaderReader& h, Config& c);  // at the end, where a HeaderReader is known

const FileFormat<Config> file_format{.magic = 0x616b6d65,
                                     .version = 1,
                                     .check = check_config,
                                     .read_own = read_own_fields,
                                     .first_arch = Arch::qwen3_moe,
                                     .last_arch = Arch::qwen3_moe,
                                     .alignment = 64};

constexpr const char* program_name = "runq_moe";
constexpr const char* program_summary = "Qwen3-MoE with experts in A8W8, A8W4, MXFP8 or 2 to 8 bits";
// "2 of 8 experts in A8W8, one scale a row; all else W8A8, one scale a row"
inline std::string scheme_text(const Config& c) {
    const char* const names[] = {"A8W8", "A8W4", "MXFP8"};
    const auto [kind, group] = c.moe.expert_format;
    const MatrixFormat &gate_up = c.moe.ladder[3], &down = c.moe.ladder[4];
    const std::string k = std::to_string(c.moe.n_active),
                      experts = k + " of " + std::to_string(c.moe.n_experts) + " experts in ";
    if (kind == WeightKind::ladder)
        return experts + format_text(gate_up) + (down == gate_up ? "" : " and " + format_text(down)) +
               "; all else by the ladder";
    return experts + names[int(kind)] + ", " +
           (group > 0 ? "groups of " + std::to_string(group) : "one scale a row") +
           (c.moe.pure ? "; all else the same" : "; all else W8A8, one scale a row");
}
const std::vector<OwnOption> scheme_options{
    {"--no-fuse", no_value, "experts step by step, without the fused operator"}};

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

// The fields of the header that are this program's own. Returns where they end.
size_t read_own_fields(const HeaderReader& h, Config& c) {
    MoeConfig& m = c.moe;
    m.expert_format.kind = WeightKind(h.number("format", 0xC0, 0, 3));
    const bool is_ladder = m.expert_format.is_ladder();
    m.n_experts = h.number("n_experts", 0xC4, 1, 1 << 10);
    m.n_active = h.number("n_active", 0xC8, 1, m.n_experts);
    m.hidden_dim = h.number("moe_hidden_dim", 0xCC, 1, 5120);
    m.norm_topk_prob = h.number("norm_topk_prob", 0xD0, 0, 1) == 1;
    m.expert_format.group = h.number("group", 0xD4, 0, is_ladder ? 0 : 1024);
    m.pure = h.number("pure", 0xD8, 0, is_ladder ? 0 : 1) == 1;
    // The table of dense layers is the first tensor: the others follow from it. Where the file ends before
    // it does, its tensor will say so.
    m.is_dense.resize(size_t(c.n_layers));
    for (size_t l = 0; l < m.is_dense.size() && header_size + l < h.file.size(); l++)
        m.is_dense[l] = h.value<uint8_t>(header_size + l);
    constexpr size_t ladder = 0xDC;
    if (!is_ladder) return ladder;
    m.expert_format.group = c.group_size;
    m.ladder = h.value<decltype(m.ladder)>(ladder);
    return ladder + sizeof m.ladder;
}

#ifndef RUNQ_NO_MAIN
int main(int argc, char** argv) {
    char yes[] = "yes";
    std::vector<char*> words(argv, argv + argc);
    for (size_t i = 1; i < words.size() && !no_value.empty(); i++)
        if (std::strcmp(words[i], "--no-fuse") == 0) words.insert(words.begin() + int(i) + 1, yes);
    return run_command_line(int(words.size()), words.data());
}
#endif
