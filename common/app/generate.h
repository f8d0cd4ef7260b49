// Generate mode: a prompt, and what the model makes of it. The loop over tokens is generate(), in session.h.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "common/app/model.h"
#include "common/app/options.h"
#include "common/app/session.h"
#include "common/app/streams.h"
#include "common/text/tokenizer.h"

// The prompt of -i or -f as it was given, without reading the model. None if there is neither.
inline std::optional<std::string> prompt_text(const Options& o, std::FILE* in) {
    const std::string option = o.file ? "--file" : "--prompt", path = o.file.value_or("-");
    if (!o.file && o.prompt != "-") return o.prompt;
    std::string text = read_text(option, path, in);
    if (text.ends_with('\n')) text.pop_back();  // the file's last line has ended; the text may go on
    return text;
}

inline const Tokenizer& need_tokenizer(const Model& m, const char* option) {
    if (m.tokenizer) return *m.tokenizer;
#ifdef NO_TOKENIZER
    throw UsageError(format("%s: this program was built without a tokenizer: use --ids", option));
#else
    throw UsageError(format("%s: this file has no tokenizer: use --ids", option));
#endif
}

// Throws UsageError unless there is something to go on from, and room for it.
inline void check_prompt(const std::string& option, size_t n_tokens, int context) {
    if (n_tokens == 0) {
        throw UsageError(option + ": the prompt is empty, and this model has no token to begin a text with");
    }
    if (n_tokens > static_cast<size_t>(context)) {
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
    TokenPrinter printer(io.out, s.model, o.print_ids);
    if (printer.prints_text()) {
        if (text) {
            Utf8Stream whole;  // a prompt that is not valid UTF-8 shows as the model gets to see it
            put_foreign(io.out, whole.push(*text));
            put(io.out, whole.flush());
        } else {
            for (const int id : ids) printer.token(id);
        }
    }
    const Stop stop = generate(s, ids, [&](int id) { printer.token(id); });
    printer.end();
    return stop;
}
