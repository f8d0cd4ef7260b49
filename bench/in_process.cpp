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
Model model;
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
        if (n_positions + n_tokens > context_length(options, model.config))
            throw std::runtime_error("the context is shorter than " + std::to_string(n_positions + n_tokens));
        if (model.fill_cache) model.fill_cache(n_positions);
        return nullptr;
    } catch (const std::exception& e) {
        error = e.what();
        return error.c_str();
    }
}

// Runs n tokens at once at position pos, the last of which gets logits.
EXPORT void run_tokens(int n, int pos) {
    std::vector<int> ids(static_cast<size_t>(n));
    for (int i = 0; i < n; i++) ids[size_t(i)] = (7 + 31 * i) % model.config.vocab_size;
    model.forward(ids, pos, false);
}
