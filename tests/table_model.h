// A model that is a small table, and the whole command line run on it.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/session.h"
#include "engine/os/system.h"

namespace {

// ----------------------------------------------------------------------------
// A model whose next token depends on the last one alone

struct Fed {
    int pos;
    std::vector<int> tokens;
    int n_logits;
    bool operator==(const Fed&) const = default;
};

struct Bigram {
    int vocab_size;
    std::vector<float> table;  // (vocab_size, vocab_size): row t has the logits after token t
    std::vector<Fed> fed;      // every call of forward()
    int raise_at_call = -1;    // the call that also sends this process a SIGINT
    uint64_t weight_bytes = 1000, kv_bytes = 10;
    int context = 64, max_chunk = 3, kv_page = 0;
    std::chrono::milliseconds pause{0};  // that every call takes

    // After token t comes t + 1, and after the last one the first.
    explicit Bigram(int vocab = 8) : vocab_size(vocab), table(static_cast<size_t>(vocab * vocab), 0.0f) {
        for (int t = 0; t < vocab; t++) row(t)[static_cast<size_t>((t + 1) % vocab)] = 5;
    }
    std::span<float> row(int t) {
        const auto n = static_cast<size_t>(vocab_size);
        return std::span(table).subspan(static_cast<size_t>(t) * n, n);
    }

    struct TableModel model();
};

struct TableModel : Model {
    Bigram* table;
    std::vector<float> logits{};
    std::function<int(std::span<const int> tokens, int pos)> greedy{};  // set finds_best, too
    std::function<void(int n)> fill{};

    explicit TableModel(Bigram& t) : table(&t) {
        config.vocab_size = t.vocab_size;
        config.max_seq_len = t.context;
        config.dim = config.n_layers = 1;
        config.temperature = 0;
        config.eos_ids = {7};
        scheme = "table";
        kernel = "lookup";
        weight_bytes_per_token = t.weight_bytes;
        kv_bytes_per_position = bytes_per_position = t.kv_bytes;
        kv_page = t.kv_page;
        max_chunk = t.max_chunk;
    }
    std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) override {
        if (static_cast<int>(table->fed.size()) == table->raise_at_call) std::raise(SIGINT);
        std::this_thread::sleep_for(table->pause);
        table->fed.push_back({pos, {tokens.begin(), tokens.end()}, n_logits});
        if (tokens.empty() || tokens.size() > static_cast<size_t>(max_chunk))
            throw std::logic_error("a chunk of " + std::to_string(tokens.size()) + " tokens");
        logits.clear();
        for (const int t : tokens.last(static_cast<size_t>(n_logits)))
            logits.insert(logits.end(), table->row(t).begin(), table->row(t).end());
        return logits;
    }
    int forward_greedy(std::span<const int> tokens, int pos) override { return greedy(tokens, pos); }
    bool fill_cache(int n) override {
        if (fill) fill(n);
        return fill != nullptr;
    }
};

inline TableModel Bigram::model() { return TableModel(*this); }

[[maybe_unused]] Sampler sampler_of(float temperature, int top_k, float top_p, uint64_t seed, float min_p = 0,
                                    float repetition_penalty = 1) {
    return {temperature, top_k, top_p, std::mt19937_64(seed), min_p, repetition_penalty};
}

[[maybe_unused]] Session greedy_session(Model& model, int context = 64) {
    return Session{model, sampler_of(0, 0, 1, 0), context};
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

[[maybe_unused]] std::unique_ptr<TableModel> load_table(const Options& o, Trace*) {
    auto m = std::make_unique<TableModel>(*loaded);
    context_length(o, m->config);
    return m;
}
[[maybe_unused]] const Program table_program = {
    "runq", "a table",
    [](const Options& o, Trace* trace) -> std::unique_ptr<Model> { return load_table(o, trace); }};
[[maybe_unused]] const Program no_program = {"runq", "loads nothing",
                                             [](const Options&, Trace*) -> std::unique_ptr<Model> {
                                                 throw std::runtime_error("the model was opened");
                                             }};

}  // namespace
