// Running a model, with a clock on it: tokens go in by feed().
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/sampler.h"
#include "engine/app/streams.h"
#include "engine/os/machine.h"
#include "engine/os/process.h"
#include "engine/os/threads.h"

struct Statistics {
    int n_prefill = 0;  // tokens
    double prefill_seconds = 0;
    int n_decode = 0;  // generated tokens that were run: one less than are generated, as the last is not
    int n_passes = 0;  // that they took: as many, unless some were guessed right
    double decode_seconds = 0;
    uint64_t peak_memory = 0;  // bytes; 0: ask when the statistics are printed
    double decode_bytes = 0;   // read from memory: weights, and the keys and values of all earlier positions
};

inline double per_second(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

// Prompt lookup: what may come next, guessed from the text so far (Apoorv Saxena, 2023,
// github.com/apoorvumang/prompt-lookup-decoding).
//
// Where the last few tokens stood before, what followed them then may follow again: in summaries, in edited
// code, in lists. The model runs the guess behind the last token in one pass, which reads the weights once,
// and says what it would have chosen behind each of them. The guess counts as far as it chose the same.
class Lookup {
  public:
    // most: tokens of a guess; 0 guesses nothing.
    explicit Lookup(int most = 0) : most_(size_t(most)), width_(std::min<size_t>(most_, 2)) {}

    // What followed the last tokens of `ids` where they stood before, three of them if they did, or two; up
    // to `room` tokens, and none if they never did. Of several places the last.
    std::vector<int> guess(std::span<const int> ids, size_t room) const {
        const size_t width = std::min(width_, room);
        for (size_t n = 3; width > 0 && n >= 2; n--) {
            if (ids.size() <= n) continue;
            const auto last = ids.last(n), before = ids.first(ids.size() - 1);
            const auto found = std::find_end(before.begin(), before.end(), last.begin(), last.end());
            if (found == before.end()) continue;
            const auto follows = ids.subspan(size_t(found - before.begin()) + n);
            const auto chosen = follows.first(std::min(width, follows.size()));
            return {chosen.begin(), chosen.end()};
        }
        return {};
    }

    // What came of a guess: so many of its tokens were right. Guesses become longer while they are, and short
    // where they are not: a pass over more tokens takes longer.
    void judge(size_t n_right, size_t n_guessed) {
        width_ = n_right == n_guessed ? std::min(2 * width_, most_) : std::max<size_t>(n_right, 1);
    }

  private:
    size_t most_, width_;
};

struct Session {
    Model& model;
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

// Thrown where the logits of a position are not finite.
struct NotFinite : std::runtime_error {
    NotFinite(size_t position, std::vector<int> tokens)
        : std::runtime_error(format("position %zu: the logits are not finite", position)),
          ids(std::move(tokens)) {}
    std::vector<int> ids;  // that were run, from position 0 on
};

// Before positions up to n_positions - 1 are used for the first time: throws std::runtime_error if there is
// no memory for their keys and values, and their part of a trace, of which the kernel would only say
// "Killed".
inline void make_room(Session& s, size_t n_positions) {
    std::vector<MemoryPart> parts;
    size_t kv_room = s.kv_room, trace_room = s.trace_room;
    if (const auto page = size_t(s.model.kv_page); page > 0 && n_positions > s.kv_room) {
        kv_room = (n_positions + page - 1) / page * page;
        // Each thread has a stack, which counts where the address space is limited.
        const bool too_many = threads().size() > default_threads();
        parts.push_back(kv_part(s.kv_room, kv_room, s.model.bytes_per_position,
                                too_many ? "fewer threads (-j) take less" : "fewer tokens take less"));
    }
    if (s.model.trace_size.at_first > 0 && n_positions > s.trace_room) {
        parts.push_back({format("the trace of positions %zu to %zu", s.trace_room, n_positions - 1),
                         s.model.trace_size.bytes(s.trace_room, n_positions), "--trace-from takes less"});
        trace_room = n_positions;
    }
    if (!parts.empty()) check_memory(parts, available_memory());
    s.kv_room = kv_room, s.trace_room = trace_room;
}

// What comes after tokens that were run: after the last, or, of a guess, after each.
struct Next {
    std::span<const float> logits{};  // (n, vocab_size), or empty and then
    int most_probable = -1;           // after the last
};

// Runs `tokens` after those held. A prompt goes in chunks of the program's max_chunk: Ctrl-C ends it before
// any of them, and then nothing comes after it. In decoding, tokens after the first are a guess, and whether
// they are held is for the caller to say.
enum class Feed { prompt, decode };
inline Next feed(Session& s, std::span<const int> tokens, Feed what) {
    const bool decodes = what == Feed::decode;
    const size_t n_tokens = tokens.size();
    if (!decodes) make_room(s, s.held.size() + n_tokens);
    constexpr double macs_of_a_long_wait = 1e11;  // about a second
    const bool tells =
        !decodes && s.progress && double(n_tokens) * double(s.model.macs_per_token) > macs_of_a_long_wait;
    Statistics& t = s.statistics;
    Next next;
    while (!tokens.empty() && (decodes || !interrupted)) {
        if (tells) s.progress(n_tokens - tokens.size(), n_tokens);
        const auto chunk = tokens.first(std::min(tokens.size(), size_t(s.model.max_chunk)));
        tokens = tokens.subspan(chunk.size());
        const int pos = int(s.held.size()), n_logits = !tokens.empty() ? 0 : decodes ? int(chunk.size()) : 1;
        const double start = seconds_now();
        if (n_logits == 1 && s.model.finds_best && s.sampler.greedy()) {
            next.most_probable = s.model.forward_greedy(chunk, pos);
        } else {
            next.logits = s.model.forward(chunk, pos, n_logits);
        }
        (decodes ? t.decode_seconds : t.prefill_seconds) += seconds_now() - start;
        s.held.insert(s.held.end(), chunk.begin(), decodes ? chunk.begin() + 1 : chunk.end());
        if (!decodes) t.n_prefill += int(chunk.size());
    }
    if (tells) s.progress(n_tokens, n_tokens);
    if (decodes) {
        t.n_decode++;
        t.n_passes++;
        t.decode_bytes += double(s.model.weight_bytes_per_token) +
                          double(s.model.kv_bytes_per_position) * double(s.held.size());
    }
    return next;
}

// Why a generation ended.
enum class Stop { end_of_text, steps, context, ctrl_c };
