// How much memory a run takes, and whether it is there, asked before any of it is taken: otherwise the kernel
// ends the process without a word, or this one takes minutes to fill what a few bytes of a header ask for.
// Of a program on a CPU cpu_memory() finds it out by making the program's RunState where memory is only
// counted (engine/os/memory.h).
//
// What is counted is what a run cannot do without. That is not the weights: a mapped file is read from the
// disk again and again if it has to be. And it is not the KV cache of the whole context, which takes memory
// as positions are used (a context of 131072 does no harm to a short talk), but that of the positions which
// are sure to be used. Programs on a device count all of that, as they allocate all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/model/config.h"
#include "engine/model/model_file.h"
#include "engine/os/machine.h"
#include "engine/os/memory.h"

// "12.3 MB", "4.56 GB"
inline std::string size_text(uint64_t bytes) {
    const auto b = static_cast<double>(bytes);
    return bytes < 1000000000 ? format("%.1f MB", b / 1e6) : format("%.2f GB", b / 1e9);
}

struct MemoryPart {
    std::string what;  // "the logits of 128 tokens"
    uint64_t bytes;
    const char* advice = "";  // what makes it smaller, if anything does
};

// Throws std::runtime_error, without the file's name, unless all parts together are available. `kind` is
// "memory" or "device memory". The line has the largest parts, but none below a hundredth.
inline void check_memory(std::vector<MemoryPart> parts, uint64_t available, const char* kind = "memory") {
    uint64_t needed = 0;
    for (const MemoryPart& part : parts) needed += part.bytes;
    if (needed <= available) return;
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
            n * static_cast<uint64_t>(vocab_size) * sizeof(float)};
}

// The KV cache of positions `first` to `end` - 1.
inline MemoryPart kv_part(int64_t first, int64_t end, uint64_t bytes_per_position, const char* advice) {
    return {format("the keys and values of positions %lld to %lld", static_cast<long long>(first),
                   static_cast<long long>(end - 1)),
            static_cast<uint64_t>(end - first) * bytes_per_position, advice};
}

// The context that a run uses: --ctx, or by default what the model was made for but at most 4096 positions.
inline int context_length(const Options& options, const ModelConfig& config) {
    if (options.ctx == 0) return std::min(4096, config.max_seq_len);
    if (options.ctx > config.max_seq_len) {
        throw UsageError("--ctx: " + std::to_string(options.ctx) + " is more than the model's max_seq_len, " +
                         std::to_string(config.max_seq_len));
    }
    return options.ctx;
}

// The positions that a run is sure to use, as far as its options tell, up to `context`.
inline int sure_positions(const Options& o, int context) {
    const uint64_t n =
        o.bench ? uint64_t(o.bench->n_prompt) + uint64_t(o.bench->n_generated) + uint64_t(o.bench->depth)
        : o.ids ? o.ids->size()
                : 1;
    return int(std::clamp<uint64_t>(n, 1, uint64_t(context)));
}

// How many tokens' logits a run asks for at once, in chunks of n tokens: those of all for perplexity or a
// trace, those of a guess and the token before it, or one token's.
inline int n_logits(const Options& o, bool traced, int n) {
    return o.ppl || traced ? n : std::min(n, 1 + o.lookup);
}

// What a CPU program's run takes besides the weights and a trace once it has used n_positions, in chunks of
// up to max_chunk tokens: what its RunState takes, made where memory is counted.
template <class RunState, class Config>
std::vector<MemoryPart> cpu_memory(const ModelFileOf<Config>& file, const Options& o, bool traced,
                                   int max_chunk, int n_positions) {
    const int context = context_length(o, file.config), n = std::min(max_chunk, context);
    const MemoryCount count;
    const RunState counted{file.config, o, context, traced};
    const MemoryPart logits = logits_part(uint64_t(n_logits(o, traced, n)), file.config.vocab_size);
    // The cache, and with it what attention takes in each thread, is for whole pages of positions.
    constexpr int page = decltype(counted.cache)::page;
    const uint64_t n_all = (uint64_t(context) + page - 1) / page * page;
    return {{"a chunk of " + std::to_string(n) + " tokens", count.at_once() - logits.bytes},
            logits,
            kv_part(0, n_positions, count.as_used() / n_all, "fewer tokens take less"),
            {"the tokenizer", file.tokenizer.size()}};
}
