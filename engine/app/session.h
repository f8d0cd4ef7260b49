// Running a model: a session, its prefill() and decode(), with a clock on them; the loop over new tokens; and
// generate mode: a prompt, and what the model makes of it. Chat mode uses the same.
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

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/sampler.h"
#include "engine/app/streams.h"
#include "engine/cpu/vector.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

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
// code, in lists. The model runs the last token and the guess in one pass, which reads the weights once, and
// gives logits for each of them. The guess is kept as far as the model chooses the same.
struct Lookup {
    size_t most = 0;                            // tokens of a guess; 0 guesses nothing
    size_t wanted = std::min<size_t>(most, 2);  // of the next guess

    // What followed the last three tokens of `ids`, or else the last two, at the last place where they stood
    // before: up to `room` tokens, none if there is no such place.
    std::vector<int> guess(std::span<const int> ids, size_t room) const {
        const size_t width = std::min(wanted, room);
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

    // Guesses become longer while all of their tokens are right, and short where they are not: a pass over
    // more tokens takes longer.
    void judge(size_t n_right, size_t n_guessed) {
        wanted = n_right == n_guessed ? std::min(2 * wanted, most) : std::max<size_t>(n_right, 1);
    }
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
    std::optional<uint64_t> digest{};  // of --digest; see add_to_digest()
};

// FNV-1a of 64 bits (Fowler, Noll and Vo, draft-eastlake-fnv) over the bytes of all logits that something was
// drawn or scored by, in order: the same number wherever a model runs.
constexpr uint64_t empty_digest = 0xcbf29ce484222325;
inline void add_to_digest(Session& s, std::span<const float> logits) {
    if (!s.digest) return;
    for (const std::byte byte : std::as_bytes(logits))
        *s.digest = (*s.digest ^ uint64_t(byte)) * 0x100000001b3;
}

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

// Runs up to max_chunk tokens after those held, and adds the time that it took to `seconds`.
inline Next run_chunk(Session& s, std::span<const int> tokens, int n_logits, double& seconds) {
    const Stopwatch time(seconds);
    const int pos = int(s.held.size());
    if (n_logits == 1 && s.model.finds_best && s.sampler.greedy() && !s.digest)
        return {{}, s.model.forward_greedy(tokens, pos)};
    return {s.model.forward(tokens, pos, n_logits)};
}

// Runs a prompt after the tokens held, in chunks of the program's max_chunk. Ctrl-C ends it before any of
// them, and then nothing comes after it.
inline Next prefill(Session& s, std::span<const int> tokens) {
    make_room(s, s.held.size() + tokens.size());
    constexpr double macs_of_a_long_wait = 1e11;  // about a second
    const bool tells =
        s.progress && double(tokens.size()) * double(s.model.macs_per_token) > macs_of_a_long_wait;
    Next next;
    for (size_t n_done = 0; n_done < tokens.size() && !interrupted;) {
        if (tells) s.progress(n_done, tokens.size());
        const auto chunk =
            tokens.subspan(n_done, std::min(tokens.size() - n_done, size_t(s.model.max_chunk)));
        n_done += chunk.size();
        next = run_chunk(s, chunk, n_done == tokens.size() ? 1 : 0, s.statistics.prefill_seconds);
        s.held.insert(s.held.end(), chunk.begin(), chunk.end());
        s.statistics.n_prefill += int(chunk.size());
    }
    if (tells) s.progress(tokens.size(), tokens.size());
    return next;
}

// Runs a token, and with it a guess of those that follow, in one pass: whether these are held is for the
// caller to say.
inline Next decode(Session& s, std::span<const int> tokens) {
    make_room(s, s.held.size() + tokens.size());
    Statistics& t = s.statistics;
    const Next next = run_chunk(s, tokens, int(tokens.size()), t.decode_seconds);
    s.held.push_back(tokens[0]);
    t.n_decode++;
    t.n_passes++;
    t.decode_bytes += double(s.model.weight_bytes_per_token) +
                      double(s.model.kv_bytes_per_position) * double(s.held.size());
    return next;
}

// Why a generation ended.
enum class Stop { end_of_text, steps, context, ctrl_c };

// Continues `ids` (1 to `context` of them) token by token, each appended to `ids` and handed to `emit`.
// What the KV cache already holds of `ids` is not run again. Throws std::invalid_argument for any other
// number of ids, NotFinite where there is nothing to choose by.
inline Stop generate(Session& s, std::vector<int>& ids, const std::function<void(int)>& emit) {
    if (ids.empty() || ids.size() > size_t(s.context))
        fail<std::invalid_argument>("generate: ", ids.size(), " tokens to go on from, expected 1 to ",
                                    s.context);
    const size_t n_prompt = ids.size();
    const auto penalized = [&] {
        const std::span<const int> all = ids;
        return s.penalty_window ? all.last(std::min(ids.size() - n_prompt, *s.penalty_window)) : all;
    };
    // What followed the last new tokens wherever they stood before among the new ones, with a window.
    const auto repeated = [&] {
        constexpr ptrdiff_t phrase_length = 8;  // tokens that are a repetition if they come again
        std::vector<int> followed;
        const auto end = s.penalty_window ? ptrdiff_t(ids.size()) : 0;
        for (ptrdiff_t i = ptrdiff_t(n_prompt) + phrase_length; i < end; i++) {
            const auto before = ids.begin() + i - phrase_length;
            if (std::equal(before, before + phrase_length, ids.end() - phrase_length))
                followed.push_back(ids[size_t(i)]);
        }
        return followed;
    };
    // The last token always runs, for its logits.
    const auto held = std::mismatch(s.held.begin(), s.held.end(), ids.begin(), ids.end() - 1).first;
    s.held.erase(held, s.held.end());

    Next next = prefill(s, std::span(ids).subspan(s.held.size()));
    const auto vocab_size = size_t(s.model.config.vocab_size);
    const std::vector<int>& eos_ids = s.model.config.eos_ids;
    std::vector<int> run;  // the ids of the last forward pass: one, and what was guessed to follow it
    size_t n_right = 0;    // of the guess
    for (int n_new = 0;; n_new++) {
        if (interrupted) return Stop::ctrl_c;
        if (n_new == s.max_new) return Stop::steps;
        if (ids.size() == size_t(s.context)) return Stop::context;
        if (s.held.size() < ids.size()) {  // the last id has not been run
            if (run.size() > 1) s.lookup.judge(n_right, run.size() - 1);
            const size_t room = std::min(size_t(s.max_new - n_new), s.context - ids.size()) - 1;
            run = s.lookup.guess(ids, std::min(room, size_t(s.model.max_chunk) - 1));
            run.insert(run.begin(), ids.back());
            next = decode(s, run);
            n_right = 0;
        }
        int id = next.most_probable;
        if (!next.logits.empty()) {
            const auto logits = next.logits.subspan(n_right * vocab_size, vocab_size);
            add_to_digest(s, logits);
            if (all_finite(logits.data(), logits.size()))
                id = s.sampler.sample(logits, penalized(), repeated());
        }
        if (id < 0) throw NotFinite(ids.size() - 1, ids);
        ids.push_back(id);
        emit(id);
        if (std::find(eos_ids.begin(), eos_ids.end(), id) != eos_ids.end()) return Stop::end_of_text;
        if (n_right + 1 < run.size() && run[n_right + 1] == id) {  // it has been run
            n_right++;
            s.held.push_back(id);
            s.statistics.n_decode++;
        }
    }
}

// Prints tokens as they come: as text in whole UTF-8 characters, or as ids separated by commas.
class TokenPrinter {
  public:
    TokenPrinter(std::FILE* out, const Model& model, bool print_ids)
        : out_(out), tokenizer_(model.tokenizer && !print_ids ? model.tokenizer.get() : nullptr) {}

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

inline const Tokenizer& need_tokenizer(const Model& m, const char* option) {
    if (m.tokenizer) return *m.tokenizer;
#ifdef NO_TOKENIZER
    throw UsageError(format("%s: this program was built without a tokenizer: use --ids", option));
#else
    throw UsageError(format("%s: this file has no tokenizer: use --ids", option));
#endif
}

constexpr size_t max_prompt_bytes = 1 << 24;  // or of a message

// The bytes that a text may have: `most`, or as many as there is memory for, but at least 64 KiB. To encode
// one takes up to 100 bytes: for a word its ids, their neighbours and the merges that are possible.
inline size_t text_limit(size_t most) {
    return std::min<uint64_t>(most, std::max(available_memory() / 128, uint64_t{1} << 16));
}

// The error line of a longer one.
inline std::string too_long(const std::string& text, size_t limit) {
    const char* reason = limit == max_prompt_bytes ? "the most that is held in memory at once"
                                                   : "for which there is not enough memory";
    return text + format(" is longer than %zu bytes, %s", limit, reason);
}

inline const char* prompt_option(const Options& o) {
    return o.ids ? "--ids" : o.file ? "--file" : "--prompt";
}

// The file of -f or -i -, if there is one. It is opened before the model is loaded, which may take long.
inline std::optional<TextFile> prompt_file(const Options& o, std::FILE* in) {
    if (!o.file && o.prompt != "-") return std::nullopt;
    return TextFile(prompt_option(o), o.file.value_or("-"), in);
}

// The prompt in it. Throws UsageError if it is too long.
inline std::string prompt_text(TextFile file, const Options& o) {
    const size_t limit = text_limit(max_prompt_bytes);
    std::optional<std::string> text = file.text(limit + 1);
    if (!text) throw UsageError(too_long(std::string(prompt_option(o)) + ": the prompt", limit));
    if (text->ends_with('\n')) text->pop_back();  // the file's last line has ended; the text may go on
    return std::move(*text);
}

// Throws UsageError unless there is something to go on from, and room for it.
inline void check_prompt(const std::string& option, size_t n_tokens, int context) {
    if (n_tokens == 0)
        fail<UsageError>(option, ": the prompt is empty, and this model has no token to begin a text with");
    if (n_tokens > size_t(context))
        fail<UsageError>(option, ": the prompt is ", n_tokens, " tokens long, the context only ", context);
}

// The prompt's token ids, at least one and at most the context's length.
inline std::vector<int> prompt_ids(const Model& m, const Options& o, const std::optional<std::string>& text,
                                   int context) {
    const ModelConfig& c = m.config;
    std::vector<int> ids = o.ids.value_or(std::vector<int>{});
    for (const int id : ids)
        if (id >= c.vocab_size)
            fail<UsageError>("--ids: ", id, " is outside the vocabulary, 0 to ", c.vocab_size - 1);
    if (text && !text->empty()) {
        ids = need_tokenizer(m, prompt_option(o)).encode(*text, true);
    } else if (!o.ids && c.bos_id >= 0) {
        ids = {c.bos_id};
    }
    check_prompt(prompt_option(o), ids.size() + size_t(o.cache_rule), context);
    ids.insert(ids.begin(), size_t(o.cache_rule), 0);
    return ids;
}

inline void run_generate(Session& s, const Options& o, const std::optional<std::string>& text,
                         const Streams& io) {
    std::vector<int> ids = prompt_ids(s.model, o, text, s.context);
    // And that is all: an input that nobody means, and nobody closes, would hold up the run.
    if (!text && !o.ids && has_input(io.in))
        note(io.err, "standard input is not read: with -i - it is the prompt\n");
    if (o.cache_rule > 0) {
        s.trace_room = size_t(o.cache_rule);  // a trace has nothing of them
        make_room(s, s.trace_room);
        if (!s.model.fill_cache(o.cache_rule)) throw UsageError("--cache-rule: this program has none");
        s.held.assign(size_t(o.cache_rule), 0);
    }
    TokenPrinter printer(io.out, s.model, o.print_ids);
    if (s.model.tokenizer && !o.print_ids) {
        if (text) put_foreign(io.out, *text);
        for (const int id : std::span(ids).subspan(size_t(o.cache_rule)))
            if (!text) printer.token(id);
    }
    generate(s, ids, [&](int id) { printer.token(id); });
    printer.end();
}
