// A program as a library, so that bench/versions.py can load two versions of it into one process. PROGRAM is
// the program's file, of this tree or of an older one.
#define RUNQ_NO_MAIN
#ifndef PROGRAM
#define PROGRAM "runq.cpp"  // for tools that look at this file alone
#endif
#include PROGRAM

#include <algorithm>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
Options options;
decltype(load_model(options, nullptr)) model{};

// What a tree's load_model() gives: a pointer to a Model, or, in trees whose Model is no interface, a value.
template <class Loaded>
constexpr bool is_pointer = requires(Loaded& loaded) {
    *loaded;
};
template <class Loaded>
auto& of(Loaded& loaded) {
    if constexpr (is_pointer<Loaded>)
        return *loaded;
    else
        return loaded;
}
// Has n made-up positions in the cache, if the program can do that.
template <class Loaded>
void fill(Loaded& loaded, int n) {
    if constexpr (is_pointer<Loaded>)
        loaded->fill_cache(n);
    else if (loaded.fill_cache)
        loaded.fill_cache(n);
}
template <class Loaded>
void run(Loaded& loaded, std::span<const int> ids, int pos) {
    if constexpr (is_pointer<Loaded>) {
        const auto most = size_t(loaded->max_chunk);
        for (size_t i = 0; i < ids.size(); i += most) {
            const auto chunk = ids.subspan(i, std::min(most, ids.size() - i));
            loaded->forward(chunk, pos + int(i), i + most >= ids.size());
        }
    } else {
        loaded.forward(ids, pos, false);
    }
}
}  // namespace

// Loads a model file. `arguments` are n_arguments of the command line, the first of them the program's name.
// The KV cache begins with made-up keys and values of n_positions, and n_tokens will come after them. Returns
// null, or what went wrong.
EXPORT const char* open_model(int n_arguments, const char* const* arguments, int n_positions, int n_tokens) {
    static std::string error;
    try {
        options = parse_options(n_arguments, arguments, own_options);
        threads().resize(options.threads);
        model = load_model(options, nullptr);
        if (n_positions + n_tokens > context_length(options, of(model).config))
            throw std::runtime_error("the context is shorter than " + std::to_string(n_positions + n_tokens));
        fill(model, n_positions);
        return nullptr;
    } catch (const std::exception& e) {
        error = e.what();
        return error.c_str();
    }
}

// Runs n tokens at once at position pos, the last of which gets logits.
EXPORT void run_tokens(int n, int pos) {
    std::vector<int> ids(static_cast<size_t>(n));
    for (int i = 0; i < n; i++) ids[size_t(i)] = (7 + 31 * i) % of(model).config.vocab_size;
    run(model, ids, pos);
}
