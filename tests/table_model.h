// A model that is a small table, and the whole command line run on it.
#pragma once

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/cli.h"
#include "engine/app/session.h"
#include "engine/os/process.h"

namespace {

// ----------------------------------------------------------------------------
// A model whose next token depends on the last one alone

struct Fed {
    int pos;
    std::vector<int> tokens;
    bool all_logits;
    bool operator==(const Fed&) const = default;
};

struct Bigram {
    int vocab_size;
    std::vector<float> table;  // (vocab_size, vocab_size): row t has the logits after token t
    std::vector<Fed> fed;      // every call of forward()
    int raise_at_call = -1;    // the call that also sends this process a SIGINT
    uint64_t weight_bytes = 1000, kv_bytes = 10;
    int context = 64, max_chunk = 3, kv_page = 0;
    bool has_prefill = false;
    std::vector<Fed> prefilled;  // every call of prefill(), if the model has it
    int raise_at_prefill = -1;   // that call, counted from 1, also sends a SIGINT

    // After token t comes t + 1, and after the last one the first.
    explicit Bigram(int vocab = 8) : vocab_size(vocab), table(static_cast<size_t>(vocab * vocab), 0.0f) {
        for (int t = 0; t < vocab; t++) row(t)[static_cast<size_t>((t + 1) % vocab)] = 5;
    }
    std::span<float> row(int t) {
        const auto n = static_cast<size_t>(vocab_size);
        return std::span(table).subspan(static_cast<size_t>(t) * n, n);
    }

    Model model() {
        Model m;
        m.config.vocab_size = vocab_size;
        m.config.max_seq_len = context;
        m.config.dim = m.config.n_layers = 1;
        m.config.temperature = 0;
        m.config.eos_ids = {7};
        m.scheme = "table";
        m.kernel = "lookup";
        m.weight_bytes_per_token = weight_bytes;
        m.kv_bytes_per_position = m.bytes_per_position = kv_bytes;
        m.kv_page = kv_page;
        m.max_chunk = max_chunk;
        m.forward = [this, logits = std::vector<float>()](std::span<const int> tokens, int pos,
                                                          bool all_logits) mutable {
            if (static_cast<int>(fed.size()) == raise_at_call) std::raise(SIGINT);
            fed.push_back({pos, {tokens.begin(), tokens.end()}, all_logits});
            logits.clear();
            for (const int t : all_logits ? tokens : tokens.last(1)) {
                logits.insert(logits.end(), row(t).begin(), row(t).end());
            }
            return std::span<const float>(logits);
        };
        if (has_prefill) {
            m.prefill = [this](std::span<const int> tokens, int pos) {
                prefilled.push_back({pos, {tokens.begin(), tokens.end()}, false});
                if (static_cast<int>(prefilled.size()) == raise_at_prefill) std::raise(SIGINT);
            };
        }
        return m;
    }
};

[[maybe_unused]] Session greedy_session(const Model& model, int context = 64) {
    return Session{model, Sampler(0, 0, 1, 0), context};
}

// ----------------------------------------------------------------------------
// Running the whole command line, with files for the three streams

struct Result {
    int code;
    std::string out, err;
};

[[maybe_unused]] std::string contents(std::FILE* file) {
    std::string text;
    std::rewind(file);
    for (int c; (c = std::getc(file)) != EOF;) text.push_back(static_cast<char>(c));
    std::fclose(file);
    return text;
}

[[maybe_unused]] Result run_cli(const Program& program, std::vector<const char*> arguments,
                                const std::string& input = "") {
    const Streams io{std::tmpfile(), std::tmpfile(), std::tmpfile()};
    std::fwrite(input.data(), 1, input.size(), io.in);
    std::rewind(io.in);
    arguments.insert(arguments.begin(), "runq");
    interrupted = 0;
    const int code = run_with_streams(static_cast<int>(arguments.size()), arguments.data(), program, io);
    interrupted = 0;
    std::fclose(io.in);
    return {code, contents(io.out), contents(io.err)};
}

// What SIGINT does while this exists, however the tests were started.
struct OnSigint {
    explicit OnSigint(void (*handler)(int)) : before(std::signal(SIGINT, handler)) {}
    ~OnSigint() { std::signal(SIGINT, before); }
    OnSigint(const OnSigint&) = delete;
    OnSigint& operator=(const OnSigint&) = delete;
    void (*before)(int);
};

[[maybe_unused]] Bigram* loaded = nullptr;  // what the next load gives; a Program's load is a plain function

[[maybe_unused]] const Program table_program = {"runq", "a table", [](const Options& o, Trace*) {
                                                    Model m = loaded->model();
                                                    context_length(o, m.config);
                                                    return m;
                                                }};
[[maybe_unused]] const Program no_program = {"runq", "loads nothing", [](const Options&, Trace*) -> Model {
                                                 throw std::runtime_error("the model was opened");
                                             }};

}  // namespace
