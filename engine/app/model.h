// What is between a program and the command line, which is the same for all schemes: a program gives its name
// and a function that loads a model. And how much memory a run takes, checked before any of it is taken:
// otherwise the kernel kills the process, or it spends minutes on what a few bytes of a header ask for.
//
// Counted is what a run cannot do without. Not the weights: a mapped file can be read from the disk again. Of
// the KV cache, which takes memory as positions are used, only the positions that are sure to be used.
// Programs on a device count all of both, as they allocate all of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/app/trace.h"
#include "engine/cpu/kv_cache.h"
#include "engine/model/config.h"
#include "engine/model/model_file.h"
#include "engine/os/memory.h"
#include "engine/os/system.h"

class Tokenizer;  // engine/text/tokenizer.h

// One loaded model, ready to run. Programs on a device with its own memory override all functions.
struct Model {
    ModelConfig config;
    std::shared_ptr<const Tokenizer> tokenizer;      // null if the file has none; the command line loads it
    std::span<const std::byte> tokenizer_section{};  // of the file; empty if another program made it
    std::string scheme;                              // e.g. "int8, groups of 64"
    std::string kernel;                              // the matmul path in use, e.g. "avx2"
    uint64_t file_bytes = 0;                         // the whole model file
    uint64_t weight_bytes = 0;                       // the weights in it
    uint64_t weight_bytes_per_token = 0;             // those that one decode step reads
    uint64_t kv_bytes_per_position = 0;              // of the KV cache
    uint64_t memory_bytes = 0;                       // that a run takes which uses the whole context
    uint64_t bytes_per_position = 0;     // of these, those of a position that is used: keys, values, scores
    TraceSize trace_size{};              // the command line finds it out, if there is a trace
    uint64_t macs_per_token = 0;         // multiply-adds of one token in the layers' matrices
    std::vector<TensorInfo> tensors;     // of the file, in its order
    std::vector<std::string> formats{};  // of its kinds of matrices where they differ: lines of --info
    int max_chunk = 0;                   // tokens that forward() takes at once: the program's file says
    int kv_page = 0;          // positions for which the KV cache takes memory at a time; 0: it has all of it
    bool finds_best = false;  // forward_greedy() is there

    virtual ~Model() = default;

    // Runs up to max_chunk tokens, tokens[i] at position pos + i. Returns logits (n_logits, vocab_size),
    // those of the last n_logits tokens: none, one or all. They are valid until the next call.
    virtual std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) = 0;
    // The same for the last token, but the index of the largest logit: the device finds it itself. -1 if they
    // are not all finite.
    virtual int forward_greedy(std::span<const int> /*tokens*/, int /*pos*/) { return -1; }
    // Puts made-up keys and values of positions 0 .. n - 1 into the cache. False: the program has to run
    // them.
    virtual bool fill_cache(int /*n*/) { return false; }
    virtual uint64_t device_bytes() const { return 0; }  // the most memory that was taken there
    // Bytes/s that the device can read; 0 if its memory is this machine's.
    virtual double device_bandwidth() { return 0; }
};

struct Program {
    const char* name;
    const char* summary;                                           // one line for --help
    std::unique_ptr<Model> (*load)(const Options&, Trace* trace);  // trace is null unless there is a --trace
    std::span<const OwnOption> options{};                          // that the other programs do not have
};

// All of a program's main(): engine/app/cli.cpp. Text goes to standard output and nothing else does. Every
// error becomes one line on standard error and an exit code, which is returned.
int run_command_line(int argc, const char* const* argv, const Program& program);

// The same with streams of the caller's.
int run_with_streams(int argc, const char* const* argv, const Program& program, const Streams& io);

// The tokenizer of the model's file, if it has one. Throws std::runtime_error with the file's name if the
// section is unsound.
void load_tokenizer(Model& model, const std::string& path);

// --info: a line for each field, and at last for each tensor, in the order of the file: name, type, shape and
// offset in the file in bytes.
void print_info(std::FILE* out, const Model& model, const Options& o, int context);

// ----------------------------------------------------------------------------
// What follows from a file

// Bytes of the KV cache for a position.
inline uint64_t kv_bytes(const ModelConfig& c, KvFormat format) {
    return 2 * uint64_t(c.n_layers) * uint64_t(c.n_kv_heads) * kv_head_bytes(format, c.head_dim);
}

// What follows from a file and its tensors, whatever the scheme. kv: how the KV cache keeps a number.
template <class Config>
void describe(Model& m, const ModelFileOf<Config>& file, const TensorList& tensors, KvFormat kv) {
    const Config& c = file.config;
    m.config = c;
    m.tokenizer_section = file.tokenizer;
    m.file_bytes = file.map->bytes.size();
    m.weight_bytes = tensors.weight_bytes();
    m.weight_bytes_per_token = tensors.bytes_per_token(c);
    m.kv_bytes_per_position = kv_bytes(c, kv);
    for (int l = 0; l < c.n_layers; l++) {
        int hidden_dim = c.hidden_dim;  // of the feed-forward block, of experts the active ones' together
        if constexpr (requires { c.moe; })
            if (c.has_experts(l)) hidden_dim = c.moe.n_active * c.moe.hidden_dim;
        const uint64_t heads = uint64_t(c.q_dim()) + uint64_t(c.kv_dim());  // in q and o, k and v
        m.macs_per_token += uint64_t(c.dim) * (2 * heads + 3 * uint64_t(hidden_dim));
    }
    m.tensors = tensors.all();
}

// "12.3 MB", "4.56 GB"
inline std::string size_text(uint64_t bytes) {
    const auto b = double(bytes);
    return bytes < 1000000000 ? format("%.1f MB", b / 1e6) : format("%.2f GB", b / 1e9);
}

// ----------------------------------------------------------------------------
// Memory

// The bytes of all parts together. Throws std::runtime_error, without the file's name, unless they are
// available: with the three largest parts, but none below a hundredth. `kind`: "memory" or "device memory".
inline uint64_t check_memory(std::vector<MemoryPart> parts, uint64_t available, const char* kind = "memory") {
    uint64_t needed = 0;
    for (const MemoryPart& part : parts) needed += part.bytes;
    if (needed <= available) return needed;
    std::stable_sort(parts.begin(), parts.end(),
                     [](const MemoryPart& a, const MemoryPart& b) { return a.bytes > b.bytes; });
    std::string text = format("needs %s of %s, %s are available: ", size_text(needed).c_str(), kind,
                              size_text(available).c_str());
    for (size_t i = 0; i < std::min<size_t>(3, parts.size()); i++) {
        if (i > 0 && parts[i].bytes < needed / 100) break;
        if (i > 0) text += ", ";
        text += size_text(parts[i].bytes) + " for " + parts[i].what;
    }
    if (const std::string advice = parts[0].advice; !advice.empty()) text += "; " + advice;
    throw std::runtime_error(text);
}

// The logits of n tokens in fp32.
inline MemoryPart logits_part(uint64_t n, int vocab_size) {
    return {n == 1 ? "the logits" : "the logits of " + std::to_string(n) + " tokens",
            n * uint64_t(vocab_size) * sizeof(float)};
}

// The KV cache of positions `first` to `end` - 1.
inline MemoryPart kv_part(size_t first, size_t end, uint64_t bytes_per_position, const char* advice) {
    return {format("the keys and values of positions %zu to %zd", first, ptrdiff_t(end) - 1),
            uint64_t(end - first) * bytes_per_position, advice};
}

// The context that a run uses: --ctx, or by default what the model was made for but at most 4096 positions.
inline int context_length(const Options& options, const ModelConfig& config) {
    if (options.ctx == 0) return std::min(4096, config.max_seq_len);
    if (options.ctx <= config.max_seq_len) return options.ctx;
    fail<UsageError>("--ctx: ", options.ctx, " is more than the model's max_seq_len, ", config.max_seq_len);
}

// The positions that a run is sure to use, as far as its options tell, up to `context`.
inline int sure_positions(const Options& o, int context) {
    const uint64_t n =
        o.bench ? uint64_t(o.bench->n_prompt) + uint64_t(o.bench->n_generated) + uint64_t(o.bench->depth)
        : o.ids ? o.ids->size()
                : 1;
    return int(std::clamp<uint64_t>(n, 1, uint64_t(context)));
}

// How many tokens' logits a run asks for at once, in chunks of n tokens: all for perplexity or a trace,
// otherwise a guess and the token before it.
inline int n_logits(const Options& o, bool traced, int n) {
    return o.ppl || traced ? n : std::min(n, 1 + o.lookup);
}

// What a CPU program's run takes besides the weights and a trace once it has used n_positions, in chunks of
// up to max_chunk tokens: what its RunState takes, made where memory is counted.
template <class RunState, class Config>
std::vector<MemoryPart> cpu_memory(const ModelFileOf<Config>& file, const Options& o, bool traced,
                                   int max_chunk, int n_positions) {
    const int context = context_length(o, file.config), n = std::min(max_chunk, context);
    MemoryCount count;
    const RunState counted{file.config, o, context, traced};
    const MemoryPart logits = logits_part(uint64_t(n_logits(o, traced, n)), file.config.vocab_size);
    // The cache, and with it what attention takes in each thread, is for whole pages of positions.
    constexpr int page = decltype(counted.cache)::page;
    const uint64_t n_all = (uint64_t(context) + page - 1) / page * page;
    return {{"a chunk of " + std::to_string(n) + " tokens", count.at_once() - logits.bytes},
            logits,
            kv_part(0, size_t(n_positions), count.as_used() / n_all, "fewer tokens take less"),
            {"the tokenizer", file.tokenizer.size()}};
}

// ----------------------------------------------------------------------------
// What programs on a CPU have in common

inline const OwnOption kv_option = {"--kv", {"f32", "f16", "q8"}, "numbers of the KV cache"};
// Products take longer, but nothing is copied, and processes share the file's memory.
inline const OwnOption mmap_option = {"--mmap", {}, "weights are read where the file lies: slower, no copy"};

inline KvFormat kv_format(const Options& options) {
    const std::string name = options.chosen(kv_option.name);
    return name == "q8" ? KvFormat::q8 : name == "f16" ? KvFormat::f16 : KvFormat::f32;
}

// The KV cache of a run.
inline KvCache kv_cache(const Options& options, const ModelConfig& c, int context) {
    return {kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, context};
}

// Whether matrices are packed for the kernels, in a copy: if that takes no more than three quarters of the
// memory that is available, and is not refused by --mmap. Otherwise they are read where the file lies, in
// pages of 4 KiB at whose ends the hardware stops fetching ahead, and in the file's order:
// docs/performance.md.
template <class Config>
bool packs_weights(const ModelFileOf<Config>& file, const Options& options) {
    if (options.info || options.own.contains(mmap_option.name)) return false;
    const uint64_t available = available_memory();
    return file.weights.size() <= available - available / 4;
}

// The matrices of a program that are multiplied, those that the engine may have copies of: all but the
// embedding, unless it is the classifier, too. Weights may say themselves which they are.
template <class Weights>
requires requires(Weights& w) { w.multiplied(); } || requires(Weights& w) {
    w.classifier.packed;
}
auto multiplied(Weights& w) {
    if constexpr (requires { w.multiplied(); }) {
        return w.multiplied();
    } else {
        std::vector all{&w.classifier};
        for (auto* layers :
             {&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj, &w.gate_proj, &w.down_proj, &w.up_proj})
            for (auto& m : *layers) all.push_back(&m);
        return all;
    }
}
