// The program PROGRAM as its file alone, in a namespace of its own beside the form over the engine: inputs
// are made and changed by what the engine has, and read by this.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bits/stdc++.h>  // what the file includes, which must not be inside the namespace
#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef NO_TOKENIZER
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#endif

#include "tests/fuzz/program.h"

// Files "mapped" for one input: memory of exactly their size, so that AddressSanitizer sees reads behind it.
inline std::vector<std::unique_ptr<char[]>> mapped_files;
inline void* map_copy(void*, size_t n, int, int, int file, off_t) {
    mapped_files.push_back(std::make_unique_for_overwrite<char[]>(n));
    return pread(file, mapped_files.back().get(), n, 0) == ssize_t(n) ? mapped_files.back().get()
                                                                      : MAP_FAILED;
}

#undef ENGINE
#define mmap map_copy
namespace plain {
struct Trace;  // not the engine's
#include PROGRAM

// A loaded model, as the engine's Model is used by harnesses.
struct Model {
    std::unique_ptr<Transformer> transformer;
    int max_chunk = plain::max_chunk;

    ~Model() { mapped_files.clear(); }
    // The logits of all tokens, or of the last.
    std::span<const float> forward(std::span<const int> tokens, int pos, bool wants_all) const {
        std::span<const float> logits;
        while (!tokens.empty()) {
            const auto chunk = tokens.first(std::min(tokens.size(), size_t(transformer->state.n)));
            tokens = tokens.subspan(chunk.size());
            const int n_wanted = wants_all ? int(chunk.size()) : tokens.empty() ? 1 : 0;
            logits = plain::forward(*transformer, chunk, pos, n_wanted);
            pos += int(chunk.size());
        }
        return logits;
    }
};
inline Model load_model(const Options& options, Trace* trace) {
    mapped_files.clear();  // of files that were refused
    return {load_transformer(options, trace)};
}
}  // namespace plain
#undef mmap
#define ENGINE 1
