// Running a model, with a clock on it: tokens go in by feed() and prefill(). And what is printed about a run.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/lookup.h"
#include "engine/app/memory.h"
#include "engine/app/model.h"
#include "engine/app/sampler.h"
#include "engine/app/streams.h"
#include "engine/cpu/vector.h"
#include "engine/os/machine.h"
#include "engine/os/process.h"
#include "engine/os/threads.h"
#include "engine/text/tokenizer.h"

struct Statistics {
    int n_prefill = 0;  // tokens
    double prefill_seconds = 0;
    int n_decode = 0;  // generated tokens that were run: one less than are generated, as the last is not
    int n_passes = 0;  // that they took: as many, unless some were guessed right
    double decode_seconds = 0;
    uint64_t peak_memory = 0;  // bytes; 0: ask when the statistics are printed
    double decode_bytes = 0;   // read from memory: weights, and the keys and values of all earlier positions
};

struct Session {
    const Model& model;
    Sampler sampler;
    int context = 0;        // positions
    int max_new = INT_MAX;  // tokens generated in one go
    Lookup lookup{};
    // What the sampler's repetition penalty counts: all tokens, or of the new ones the last so many and what
    // would repeat a phrase.
    std::optional<size_t> penalty_window{};
    std::vector<int> held{};  // the tokens whose keys and values are in the KV cache, from position 0 on
    size_t kv_room = 0;       // positions that the KV cache has memory for; see make_room()
    size_t trace_room = 0;    // and a trace
    // Told how many tokens of a long prompt have been run; `n_done` is n_tokens at last. Empty: nobody asks.
    std::function<void(size_t n_done, size_t n_tokens)> progress{};
    Statistics statistics{};
};

// Why a generation ended.
enum class Stop { end_of_text, steps, context, ctrl_c };

// What comes after tokens that were run: after the last, or, of a guess, after each.
struct Next {
    std::span<const float> logits;  // (n, vocab_size), or empty and then
    int most_probable = -1;         // after the last
};

// What tokens are fed for: a prompt that goes on behind them, its end, or decoding.
enum class Feed { prompt, prompt_end, decode };

// Thrown where the logits of a position are not finite.
struct NotFinite : std::runtime_error {
    NotFinite(size_t position, std::vector<int> tokens)
        : std::runtime_error(format("position %zu: the logits are not finite", position)),
          ids(std::move(tokens)) {}
    std::vector<int> ids;  // that were run, from position 0 on
};

// Runs up to max_chunk `tokens` after those held. `greedy`: logits are wanted for nothing but the largest of
// them. Of a prompt that goes on they are not wanted at all. In decoding, tokens after the first are a guess:
// logits are those after each, and whether they are held is for the caller to say.
inline Next feed(Session& s, std::span<const int> tokens, Feed what, bool greedy) {
    const double start = seconds_now();
    const int pos = static_cast<int>(s.held.size());
    Next next;
    if (what == Feed::prompt && s.model.prefill) {
        s.model.prefill(tokens, pos);
    } else if (what == Feed::decode && tokens.size() > 1) {
        next.logits = s.model.forward(tokens, pos, true);
    } else if (greedy && s.model.forward_greedy) {
        next.most_probable = s.model.forward_greedy(tokens, pos);
    } else {
        next.logits = s.model.forward(tokens, pos, false);
    }
    const double seconds = seconds_now() - start;
    const auto held = what == Feed::decode ? tokens.first(1) : tokens;
    s.held.insert(s.held.end(), held.begin(), held.end());
    if (what == Feed::decode) {
        s.statistics.n_decode++;
        s.statistics.n_passes++;
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

// Before positions up to n_positions - 1 are used for the first time: throws std::runtime_error if there is
// no memory for their keys and values, and their part of a trace, of which the kernel would only say
// "Killed".
inline void make_room(Session& s, size_t n_positions) {
    std::vector<MemoryPart> parts;
    size_t kv_room = s.kv_room, trace_room = s.trace_room;
    if (const auto page = static_cast<size_t>(s.model.kv_page); page > 0 && n_positions > s.kv_room) {
        const size_t end = (n_positions + page - 1) / page * page;
        // Each thread has a stack, which counts where the address space is limited.
        const bool too_many = threads().size() > default_threads();
        parts.push_back(kv_part(static_cast<int64_t>(s.kv_room), static_cast<int64_t>(end),
                                s.model.bytes_per_position,
                                too_many ? "fewer threads (-j) take less" : "fewer tokens take less"));
        kv_room = end;
    }
    if (s.model.trace_size.at_first > 0 && n_positions > s.trace_room) {
        parts.push_back({format("the trace of positions %zu to %zu", s.trace_room, n_positions - 1),
                         s.model.trace_size.bytes(s.trace_room, n_positions), "--trace-from takes less"});
        trace_room = n_positions;
    }
    if (!parts.empty()) check_memory(parts, available_memory());
    s.kv_room = kv_room, s.trace_room = trace_room;
}

// Runs the rest of a prompt after the tokens held, a chunk at a time, to look for Ctrl-C before each. Returns
// what comes after its last token, or nothing if Ctrl-C came.
inline Next prefill(Session& s, std::span<const int> rest, bool greedy) {
    make_room(s, s.held.size() + rest.size());
    const auto chunk = static_cast<size_t>(s.model.max_chunk);
    constexpr double macs_of_a_long_wait = 1e11;  // about a second
    const size_t n_tokens = rest.size();
    const bool tells = s.progress && double(n_tokens) * double(s.model.macs_per_token) > macs_of_a_long_wait;
    Next next;
    while (!interrupted) {
        if (tells) s.progress(n_tokens - rest.size(), n_tokens);
        if (rest.size() <= chunk) {
            next = feed(s, rest, Feed::prompt_end, greedy);
            break;
        }
        feed(s, rest.first(chunk), Feed::prompt, greedy);
        rest = rest.subspan(chunk);
    }
    if (tells) s.progress(n_tokens, n_tokens);
    return next;
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
            put_foreign(out_, utf8_.push(tokenizer_->token_bytes(id)));
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

// For Session::progress: one line of a terminal, which is empty again at the end.
inline void show_progress(std::FILE* err, size_t n_done, size_t n_tokens) {
    const std::string text = format("reading: %zu of %zu tokens", n_done, n_tokens);
    note(err, "\r" + (n_done < n_tokens ? text : std::string(text.size(), ' ') + "\r"));
}

// `sampling` is empty where nothing was drawn.
inline void print_statistics(std::FILE* err, const Session& s, int n_threads, const std::string& sampling) {
    const Model& m = s.model;
    const ModelConfig& c = m.config;
    const Statistics& t = s.statistics;
    std::string text =
        format("model     %s, %d layers, dim %d, vocabulary %d; %s; %s\n", arch_name(c.arch), c.n_layers,
               c.dim, c.vocab_size, m.scheme.c_str(), size_text(m.file_bytes).c_str());
    text += format("run       %s, %d thread%s, context %d, peak memory %s", m.kernel.c_str(), n_threads,
                   n_threads == 1 ? "" : "s", s.context,
                   size_text(t.peak_memory > 0 ? t.peak_memory : peak_memory_bytes()).c_str());
    if (m.device_bytes) text += ", of the device " + size_text(m.device_bytes());
    text += "\n";
    if (!sampling.empty()) text += "sampling  " + sampling + "\n";
    if (t.n_prefill > 0) {
        text += format("prefill   %d tokens in %.2f s, %.1f tokens/s\n", t.n_prefill, t.prefill_seconds,
                       per_second(t.n_prefill, t.prefill_seconds));
    }
    if (t.n_decode > 0) {
        text += format("decode    %d tokens in %.2f s, %.1f tokens/s, %.1f GB/s", t.n_decode,
                       t.decode_seconds, per_second(t.n_decode, t.decode_seconds),
                       per_second(t.decode_bytes, t.decode_seconds) / 1e9);
        if (t.n_passes < t.n_decode) text += format(", %.2f tokens a pass", double(t.n_decode) / t.n_passes);
        text += "\n";
    }
    note(err, text);
}
