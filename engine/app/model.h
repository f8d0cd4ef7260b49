// Between a program and its command line: a loaded model, ready to run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/memory.h"
#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/app/trace.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/masks.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/model/config.h"
#include "engine/model/matrix_format.h"
#include "engine/model/model_file.h"
#include "engine/model/tensors.h"
#include "engine/os/machine.h"
#include "engine/os/process.h"

class Tokenizer;  // engine/text/tokenizer.h

// A line of --info.
struct OwnField {
    const char* name;
    std::string value;
};

// What a program hands to the command line: one loaded model, ready to run.
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
    uint64_t memory_bytes = 0;             // that a run takes which uses the whole context; 0: not known
    uint64_t bytes_per_position = 0;       // of these, those of a position that is used: keys, values, scores
    TraceSize trace_size{};                // the command line finds it out, if there is a trace
    uint64_t macs_per_token = 0;           // multiply-adds of one token in the layers' matrices
    std::vector<TensorInfo> tensors;       // of the file, in its order
    std::vector<OwnField> own_fields{};    // of --info, that only this scheme has
    const PhaseSeconds* phases = nullptr;  // where the time goes; null if the program does not measure it
    // Runs tokens[i] at position pos + i. Returns logits (n_rows, vocab_size): a row for every token with
    // all_logits, else one row, the last token's. They are valid until the next call. At most max_chunk
    // tokens with all_logits; without, any number.
    std::function<std::span<const float>(std::span<const int> tokens, int pos, bool all_logits)> forward;
    int max_chunk = 0;  // the program sets it
    // Runs up to max_chunk tokens of a prompt that goes on, without logits. Empty: forward() does it.
    std::function<void(std::span<const int> tokens, int pos)> prefill;
    // Puts made-up keys and values of positions 0 .. n - 1 into the cache. Empty: the program has to run
    // them.
    std::function<void(int n)> fill_cache;
    int kv_page = 0;  // positions for which the KV cache takes memory at a time; 0: it has all of it already

    // The members below are set by programs that run on a device with its own memory, and empty elsewhere.
    // As forward() for the last of up to max_chunk tokens, but the index of the largest logit: the device
    // finds it itself. -1 if they are not all finite.
    std::function<int(std::span<const int> tokens, int pos)> forward_greedy;
    std::function<uint64_t()> device_bytes;    // the most memory that was taken there
    std::function<double()> device_bandwidth;  // bytes/s it can read; 0 if its memory is this machine's
};

struct Program {
    const char* name;
    const char* summary;                          // one line for --help
    Model (*load)(const Options&, Trace* trace);  // trace is null unless there is a --trace
    std::span<const OwnOption> options{};         // that the other programs do not have
};

// The option of programs that run on a CPU.
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

// Bytes of the KV cache for a position.
inline uint64_t kv_bytes(const ModelConfig& c, KvFormat format) {
    return 2 * uint64_t(c.n_layers) * uint64_t(c.n_kv_heads) * kv_head_bytes(format, c.head_dim);
}

// The lengths of the feed-forward blocks together, of experts the active ones'.
template <class Config>
uint64_t hidden_dims(const Config& c) {
    uint64_t n = 0;
    for (int l = 0; l < c.n_layers; l++) {
        int of_layer = c.hidden_dim;
        if constexpr (requires { c.moe; })
            if (c.has_experts(l)) of_layer = c.moe.n_active * c.moe.hidden_dim;
        n += uint64_t(of_layer);
    }
    return n;
}

// What follows from a file and its tensors, whatever the scheme. kv: how the KV cache keeps a number.
template <class Config>
Model model_of(const ModelFileOf<Config>& file, const TensorList& tensors, KvFormat kv) {
    const Config& c = file.config;
    Model m;
    m.config = c;
    m.tokenizer_section = file.tokenizer;
    m.file_bytes = file.map.bytes().size();
    m.weight_bytes = tensors.weight_bytes();
    m.weight_bytes_per_token = tensors.bytes_per_token(c);
    m.kv_bytes_per_position = kv_bytes(c, kv);
    m.macs_per_token = c.macs_per_token(hidden_dims(c));
    m.tensors = tensors.all();
    return m;
}

// A chunk's forward pass: up to max_chunk tokens, tokens[i] at position pos + i. Returns logits (n_logits,
// vocab_size), those of the last n_logits tokens: none, one or all.
using ForwardChunk =
    std::function<std::span<const float>(std::span<const int> tokens, int pos, int n_logits)>;

// Model::forward made of that: any number of tokens, a chunk after the other. A trace has the logits of every
// token, so that it does not depend on how the tokens were fed. Otherwise only the last chunk's are computed.
inline auto in_chunks(ForwardChunk forward, int max_chunk, int vocab_size, bool traced) {
    return [=, forward = std::move(forward)](std::span<const int> tokens, int pos, bool all_logits) {
        std::span<const float> logits;
        while (!tokens.empty()) {
            const auto chunk = tokens.first(std::min(tokens.size(), size_t(max_chunk)));
            tokens = tokens.subspan(chunk.size());
            const bool all = all_logits || traced;
            logits = forward(chunk, pos, all ? int(chunk.size()) : tokens.empty() ? 1 : 0);
            pos += int(chunk.size());
        }
        return all_logits ? logits : logits.last(size_t(vocab_size));
    };
}

// Model::prefill made of a chunk's forward pass: no logits, unless there is a trace, which has every token's.
inline auto without_logits(ForwardChunk forward, bool traced) {
    return [=, forward = std::move(forward)](std::span<const int> chunk, int pos) {
        forward(chunk, pos, traced ? int(chunk.size()) : 0);
    };
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

// A model that a CPU program has loaded, and all that a run of it needs: what forward() is given. Weights and
// RunState are the program's own, and so may be Config.
template <class Config, class Weights, class RunState>
struct TransformerOf {
    ModelFileOf<Config> file;
    Weights weights;
    RunState state;
    Trace* trace = nullptr;      // not null: record every step
    PackedMatrices packed = {};  // the weights, as the kernels read them fastest; the program may do without
};

// Opens the model file, which is of this format, and allocates a run's memory, for chunks of up to max_chunk
// tokens. Throws std::runtime_error with one line that names the file. Nothing but the header and the
// tokenizer section is read before everything has been checked. packs: unless the caller does it, or not.
template <class Transformer, class Config>
std::shared_ptr<Transformer> load_cpu(const FileFormat<Config>& format, int max_chunk, const Options& options,
                                      Trace* trace, bool packs = true) {
    using Weights = decltype(Transformer::weights);
    using RunState = decltype(Transformer::state);
    if (options.chosen("--attn") == "int8" && kv_format(options) != KvFormat::f32)
        throw UsageError("--kv: has no meaning with --attn int8, whose cache is int8");
    const std::string& path = options.model_path;
    ModelFileOf<Config> file = open_model_file(path, format);
    const auto alignment = uint64_t(format.alignment);
    Weights{TensorList(nullptr, 0, alignment, alignment), file.config}.file.check_end(file);
    if (options.rope_theta) file.config.rope_theta = *options.rope_theta;
    const int context = context_length(options, file.config);
    const uint64_t available = available_memory();
    try {
        check_memory(cpu_memory<RunState>(file, options, trace != nullptr, max_chunk,
                                          sure_positions(options, context)),
                     available);
        Weights weights{TensorList(file), file.config};
        RunState state{file.config, options, context, trace != nullptr};
        auto m = std::make_shared<Transformer>(
            Transformer{std::move(file), std::move(weights), std::move(state), trace});
        if constexpr (requires { &Weights::check_mask; })  // reads tensors: --info has no use for that
            if (!options.info) check_masks(m->weights);
        if constexpr (requires { m->weights.pack(m->packed); })  // or load_model() packs, or nothing does
            if (packs_weights(m->file, options)) m->weights.pack(m->packed);
        if constexpr (requires { multiplied(m->weights)[0]->packed; })
            if (packs && packs_weights(m->file, options))
                for (auto* w : multiplied(m->weights))
                    if (has_kernel(*w)) w->packed = m->packed.add(view_of(*w));
        return m;
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

// What quantizes and multiplies where this build's kernels do.
template <class Transformer>
const char* kernel_name(const Transformer& m) {
    if constexpr (requires { kernel_group(m.weights.classifier); }) {
        const int group = kernel_group(m.weights.classifier);
        return group > 0 ? int8_kernel_name(group) : "portable";
    } else if constexpr (requires { multiplied(m.weights); }) {
        // With a scale a row, rows of different lengths may take different paths: the name is that of the
        // model's width.
        const int group = m.file.config.group_size;
        return int8_kernel_name(group > 0 ? group : m.file.config.dim);
    }
    return "portable";
}

// A loaded Transformer as the command line takes it. `forward` is the program's own.
template <class Transformer>
Model cpu_model(std::shared_ptr<Transformer> m, const Options& options, std::string scheme,
                std::string kernel, int max_chunk) {
    Model model = model_of(m->file, m->weights.file, m->state.cache.format());
    model.memory_bytes = m->weights.file.bytes_in_use(model.config);
    const auto memory = [&](int n_positions) {
        uint64_t n_bytes = 0;
        for (const MemoryPart& part :
             cpu_memory<decltype(m->state)>(m->file, options, m->trace != nullptr, max_chunk, n_positions))
            n_bytes += part.bytes;
        return n_bytes;
    };
    model.memory_bytes += memory(context_length(options, model.config));
    model.bytes_per_position = memory(1) - memory(0);
    if (m->trace != nullptr && !options.own.contains(mmap_option.name)) {
        // Accumulators are computed from the file, which otherwise is packed and given back.
        for (const TensorInfo& t : m->weights.file.all())
            if (t.name.starts_with(step_name(accumulator_layer, ""))) model.memory_bytes += t.n_bytes;
    }
    model.scheme = std::move(scheme);
    model.kernel = std::move(kernel);
    model.phases = &phase_seconds;
    model.max_chunk = max_chunk;
    model.fill_cache = [m](int n) { m->state.cache.fill(n); };
    if constexpr (requires { m->state.int8_attention; }) {
        if (m->state.int8_attention) {  // its cache is another
            model.scheme += "; attention in int8";
            model.kv_bytes_per_position = kv_bytes(model.config, KvFormat::q8);
            model.fill_cache = [m](int n) { m->state.int8.cache.fill(n); };
        }
    }
    model.kv_page = decltype(m->state.cache)::page;
    const ForwardChunk chunk = [m](auto... arguments) { return forward(*m, arguments...); };
    model.forward = in_chunks(chunk, max_chunk, m->file.config.vocab_size, m->trace != nullptr);
    model.prefill = without_logits(chunk, m->trace != nullptr);
    return model;
}
