// The loop over tokens, and generate mode: a prompt, and what the model makes of it. And what chat has of
// that, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/cpu/vector.h"
#include "engine/os/system.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

// Continues `ids` (1 to `context` of them) token by token, each appended to `ids` and handed to `emit`.
// What the KV cache already holds of `ids` is not run again. Throws std::invalid_argument for any other
// number of ids, NotFinite where there is nothing to choose by.
inline Stop generate(Session& s, std::vector<int>& ids, const std::function<void(int)>& emit) {
    if (ids.empty() || ids.size() > size_t(s.context)) {
        throw std::invalid_argument(
            format("generate: %zu tokens to go on from, expected 1 to %d", ids.size(), s.context));
    }
    const size_t n_prompt = ids.size();
    const auto penalized = [&]() -> std::span<const int> {
        if (!s.penalty_window) return ids;
        return std::span(ids).last(std::min(ids.size() - n_prompt, *s.penalty_window));
    };
    // What followed the last new tokens wherever they stood before among the new ones, with a window.
    std::vector<int> followed;
    const auto repeated = [&]() -> std::span<const int> {
        constexpr ptrdiff_t phrase_length = 8;  // tokens that are a repetition if they come again
        followed.clear();
        if (!s.penalty_window) return followed;
        const auto end = ptrdiff_t(ids.size());
        for (ptrdiff_t i = ptrdiff_t(n_prompt) + phrase_length; i < end; i++) {
            const auto before = ids.begin() + i - phrase_length;
            if (std::equal(before, before + phrase_length, ids.end() - phrase_length))
                followed.push_back(ids[size_t(i)]);
        }
        return followed;
    };
    size_t same = 0;  // the last token always runs, for its logits
    while (same < s.held.size() && same + 1 < ids.size() && s.held[same] == ids[same]) same++;
    s.held.resize(same);

    Next next = feed(s, std::span(ids).subspan(same), Feed::prompt);
    const auto vocab_size = size_t(s.model.config.vocab_size);
    const std::vector<int>& eos_ids = s.model.config.eos_ids;
    std::vector<int> run;  // the ids of the last forward pass: one, and what was guessed to follow it
    size_t n_right = 0;    // of the guess
    bool is_known = true;  // whether that pass has said what comes after the last id
    for (int n_new = 0;; n_new++) {
        if (interrupted) return Stop::ctrl_c;
        if (n_new == s.max_new) return Stop::steps;
        if (ids.size() == size_t(s.context)) return Stop::context;
        if (!is_known) {
            if (run.size() > 1) s.lookup.judge(n_right, run.size() - 1);
            const size_t room = std::min(size_t(s.max_new - n_new), s.context - ids.size()) - 1;
            run = s.lookup.guess(ids, std::min(room, size_t(s.model.max_chunk) - 1));
            run.insert(run.begin(), ids.back());
            make_room(s, ids.size() + run.size() - 1);
            next = feed(s, run, Feed::decode);
            n_right = 0;
        }
        const auto logits =
            next.logits.empty() ? next.logits : next.logits.subspan(n_right * vocab_size, vocab_size);
        if (logits.empty() ? next.most_probable < 0 : !all_finite(logits.data(), logits.size()))
            throw NotFinite(ids.size() - 1, ids);
        const int id =
            logits.empty() ? next.most_probable : s.sampler.sample(logits, penalized(), repeated());
        ids.push_back(id);
        emit(id);
        if (std::find(eos_ids.begin(), eos_ids.end(), id) != eos_ids.end()) return Stop::end_of_text;
        is_known = n_right + 1 < run.size() && run[n_right + 1] == id;
        if (is_known) {  // it was run
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

// A text of the command line itself, by the rule for texts.
inline std::string option_text(const char* option, const std::string& value) {
    try {
        return text_by_rule(std::string(option) + ": the text", value);
    } catch (const NotUtf8& e) {
        throw UsageError(e.what());
    }
}

inline const Tokenizer& need_tokenizer(const Model& m, const char* option) {
    if (m.tokenizer) return *m.tokenizer;
#ifdef NO_TOKENIZER
    throw UsageError(format("%s: this program was built without a tokenizer: use --ids", option));
#else
    throw UsageError(format("%s: this file has no tokenizer: use --ids", option));
#endif
}

// How long a text may be that is held in memory, and what is said of a longer one. Encoding takes up to 100
// bytes for each byte of a text: of one word an id, its neighbours and the merges that are possible.
struct TextLimit {
    size_t n_bytes;
    std::string reason;

    std::string line(const std::string& text) const {
        return text + format(" is longer than %zu bytes, ", n_bytes) + reason;
    }
};

// The most that there is memory for, and 16 MiB.
inline TextLimit memory_limit() {
    constexpr uint64_t least = 1 << 16, most = 1 << 24;
    const uint64_t room = std::max(available_memory() / 128, least);
    if (room < most) return {size_t(room), "for which there is not enough memory"};
    return {most, "the most that is held in memory at once"};
}

// The same for a prompt or a message: what is longer is no text of `context` tokens. (Up to 64 KiB are no
// burden, and then the line can say how many tokens they are.)
inline TextLimit text_limit(const Tokenizer& tokenizer, int context) {
    const uint64_t most = uint64_t{tokenizer.most_bytes_per_id()} * uint64_t(context);
    TextLimit memory = memory_limit();
    if (most == 0 || most > std::max<uint64_t>(memory.n_bytes, available_memory() / 128)) return memory;
    return {size_t(std::max<uint64_t>(most, 1 << 16)),
            format("and so than the context of %d tokens", context)};
}

// The prompt of -i or -f, none if there is neither. What -f names is opened at once, before a model is
// loaded, which may take longer.
class Prompt {
  public:
    Prompt(const Options& o, std::FILE* in) : option_(o.file ? "--file" : "--prompt") {
        if (o.file || o.prompt == "-") {
            file_ = std::make_unique<TextFile>(option_, o.file.value_or("-"), in);
            file_->read(text_.emplace(), 1 << 16);
        } else if (o.prompt) {
            text_ = option_text("--prompt", *o.prompt);
        }
    }

    // All of it, for this model. Throws UsageError if it is too long.
    std::optional<std::string> text(const Model& m, int context) && {
        if (file_ && m.tokenizer) {
            const TextLimit limit = text_limit(*m.tokenizer, context);
            if (file_->read(*text_, limit.n_bytes + 1))
                throw UsageError(limit.line(std::string(option_) + ": the prompt"));
        }
        // A file's last line has ended; the text may go on.
        if (file_ && text_->ends_with('\n')) text_->pop_back();
        return std::move(text_);
    }

  private:
    const char* option_;
    std::optional<std::string> text_;
    std::unique_ptr<TextFile> file_;  // whose beginning is in text_
};

// Throws UsageError unless there is something to go on from, and room for it.
inline void check_prompt(const std::string& option, size_t n_tokens, int context) {
    if (n_tokens == 0) {
        throw UsageError(option + ": the prompt is empty, and this model has no token to begin a text with");
    }
    if (n_tokens > size_t(context)) {
        throw UsageError(option + ": the prompt is " + std::to_string(n_tokens) +
                         " tokens long, the context only " + std::to_string(context));
    }
}

// The prompt's token ids, at least one and at most the context's length.
inline std::vector<int> prompt_ids(const Model& m, const Options& o, const std::optional<std::string>& text,
                                   int context) {
    const ModelConfig& c = m.config;
    const std::string option = o.ids ? "--ids" : o.file ? "--file" : "--prompt";
    std::vector<int> ids;
    if (o.ids) {
        ids = *o.ids;
        for (const int id : ids) {
            if (id >= c.vocab_size) {
                throw UsageError("--ids: " + std::to_string(id) + " is outside the vocabulary, 0 to " +
                                 std::to_string(c.vocab_size - 1));
            }
        }
    } else if (text && !text->empty()) {
        ids = need_tokenizer(m, option.c_str()).encode(*text, true);
    } else if (c.bos_id >= 0) {
        ids = {c.bos_id};
    }
    check_prompt(option, ids.size(), context);
    return ids;
}

inline Stop run_generate(Session& s, const Options& o, const std::optional<std::string>& text,
                         const Streams& io) {
    std::vector<int> ids = prompt_ids(s.model, o, text, s.context);
    // And that is all: an input that nobody means, and nobody closes, would hold up the run.
    if (!text && !o.ids && has_input(io.in))
        note(io.err, "standard input is not read: with -i - it is the prompt\n");
    TokenPrinter printer(io.out, s.model, o.print_ids);
    if (printer.prints_text()) {
        if (text) {
            put_foreign(io.out, *text);
        } else {
            for (const int id : ids) printer.token(id);
        }
    }
    const Stop stop = generate(s, ids, [&](int id) { printer.token(id); });
    printer.end();
    return stop;
}
