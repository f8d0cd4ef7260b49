// Running a model, with a clock on it: prompts, generation, and what is printed about a run.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "common/app/model.h"
#include "common/app/sampler.h"
#include "common/app/streams.h"
#include "common/cpu/machine.h"
#include "common/text/tokenizer.h"

struct Statistics {
    int n_prefill = 0;  // tokens
    double prefill_seconds = 0;
    int n_decode = 0;  // tokens run one at a time: one less than are generated, as the last is not run
    double decode_seconds = 0;
    uint64_t peak_memory = 0;  // bytes; 0: ask when the statistics are printed
    double decode_bytes = 0;   // read from memory: weights, and the keys and values of all earlier positions
};

struct Session {
    const Model& model;
    Sampler sampler;
    int context = 0;          // positions
    int max_new = INT_MAX;    // tokens generated in one go
    std::vector<int> held{};  // the tokens whose keys and values are in the KV cache, from position 0 on
    Statistics statistics{};
};

enum class Stop { end_of_text, steps, context, ctrl_c };

// What comes after tokens that were run.
struct Next {
    std::span<const float> logits;  // (vocab_size,), or empty and then
    int most_probable = -1;
};

// Runs `tokens` after those held. `greedy`: logits are wanted for nothing but the largest of them.
inline Next feed(Session& s, std::span<const int> tokens, bool decode, bool greedy) {
    const double start = seconds_now();
    const int pos = static_cast<int>(s.held.size());
    Next next;
    if (greedy && s.model.forward_greedy) {
        next.most_probable = s.model.forward_greedy(tokens, pos);
    } else {
        next.logits = s.model.forward(tokens, pos, false);
    }
    const double seconds = seconds_now() - start;
    s.held.insert(s.held.end(), tokens.begin(), tokens.end());
    if (decode) {
        s.statistics.n_decode++;
        s.statistics.decode_seconds += seconds;
        s.statistics.decode_bytes +=
            static_cast<double>(s.model.weight_bytes_per_token) +
            static_cast<double>(s.model.kv_bytes_per_position) * static_cast<double>(s.held.size());
    } else {
        s.statistics.n_prefill += static_cast<int>(tokens.size());
        s.statistics.prefill_seconds += seconds;
    }
    return next;
}

// Continues `ids` (1 to `context` of them) token by token, each appended to `ids` and handed to `emit`.
// What the KV cache already holds of `ids` is not run again.
inline Stop generate(Session& s, std::vector<int>& ids, const std::function<void(int)>& emit) {
    size_t same = 0;  // the last token always runs, for its logits
    while (same < s.held.size() && same + 1 < ids.size() && s.held[same] == ids[same]) same++;
    s.held.resize(same);

    Next next;
    while (s.held.size() < ids.size()) {
        if (interrupted) return Stop::ctrl_c;
        // A few chunks at a time, to look for Ctrl-C now and then
        const size_t n = std::min(8 * static_cast<size_t>(s.model.max_chunk), ids.size() - s.held.size());
        next = feed(s, std::span(ids).subspan(s.held.size(), n), false, s.sampler.greedy());
    }
    const std::vector<int>& eos_ids = s.model.config.eos_ids;
    for (int n_new = 0;; n_new++) {
        if (interrupted) return Stop::ctrl_c;
        if (n_new == s.max_new) return Stop::steps;
        if (ids.size() == static_cast<size_t>(s.context)) return Stop::context;
        if (n_new > 0) next = feed(s, std::span(&ids.back(), 1), true, s.sampler.greedy());
        const int id = next.logits.empty() ? next.most_probable : s.sampler.sample(next.logits, ids);
        ids.push_back(id);
        emit(id);
        if (std::find(eos_ids.begin(), eos_ids.end(), id) != eos_ids.end()) return Stop::end_of_text;
    }
}

// Prints tokens as they come: as text in whole UTF-8 characters, or as ids separated by commas.
class TokenPrinter {
  public:
    TokenPrinter(std::FILE* out, const Model& model, bool print_ids)
        : out_(out), tokenizer_(model.tokenizer && !print_ids ? model.tokenizer.get() : nullptr) {}

    bool prints_text() const { return tokenizer_ != nullptr; }

    void token(int id) {
        if (tokenizer_ == nullptr) {
            put(out_, (n_ids_++ > 0 ? "," : "") + std::to_string(id));
        } else if (!tokenizer_->is_special(id)) {
            put(out_, utf8_.push(tokenizer_->token_bytes(id)));
        }
    }
    void end() { put(out_, utf8_.flush() + "\n"); }

  private:
    std::FILE* out_;
    const Tokenizer* tokenizer_;  // null: print ids
    Utf8Stream utf8_;
    int n_ids_ = 0;
};

inline double per_second(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

// `sampling` is empty where nothing was drawn.
inline void print_statistics(std::FILE* err, const Session& s, int n_threads, const std::string& sampling) {
    const Model& m = s.model;
    const ModelConfig& c = m.config;
    const Statistics& t = s.statistics;
    auto size = [](uint64_t bytes) {
        const auto b = static_cast<double>(bytes);
        return bytes < 1000000000 ? format("%.1f MB", b / 1e6) : format("%.2f GB", b / 1e9);
    };
    std::string text = format("model     %s, %d layers, dim %d, vocabulary %d; %s; %s\n", arch_name(c.arch),
                              c.n_layers, c.dim, c.vocab_size, m.scheme.c_str(), size(m.file_bytes).c_str());
    text += format("run       %s, %d thread%s, context %d, peak memory %s", m.kernel.c_str(), n_threads,
                   n_threads == 1 ? "" : "s", s.context,
                   size(t.peak_memory > 0 ? t.peak_memory : peak_memory_bytes()).c_str());
    if (m.device_bytes) text += ", of the device " + size(m.device_bytes());
    text += "\n";
    if (!sampling.empty()) text += "sampling  " + sampling + "\n";
    if (t.n_prefill > 0) {
        text += format("prefill   %d tokens in %.2f s, %.1f tokens/s\n", t.n_prefill, t.prefill_seconds,
                       per_second(t.n_prefill, t.prefill_seconds));
    }
    if (t.n_decode > 0) {
        text += format("decode    %d tokens in %.2f s, %.1f tokens/s, %.1f GB/s\n", t.n_decode,
                       t.decode_seconds, per_second(t.n_decode, t.decode_seconds),
                       per_second(t.decode_bytes, t.decode_seconds) / 1e9);
    }
    note(err, text);
}
