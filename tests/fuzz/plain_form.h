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
    int max_chunk;

    ~Model() { mapped_files.clear(); }
    std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) const {
        return plain::forward(*transformer, tokens, pos, n_logits);
    }
};
inline std::unique_ptr<Model> load_model(const Options& options, Trace* trace) {
    mapped_files.clear();  // of files that were refused
    auto transformer = load_transformer(options, trace);
    const int n = transformer->state.n;
    return std::unique_ptr<Model>(new Model{std::move(transformer), n});
}
}  // namespace plain
#undef mmap
#define ENGINE 1
