// Whether a run's memory is there, asked before any of it is taken: otherwise the kernel ends the process
// without a word, or this one takes minutes to fill what a few bytes of a header ask for.
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

#include "common/app/streams.h"
#include "common/os/machine.h"

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
