// Chat mode: a turn for each line of the user's.
#pragma once

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/app/generate.h"
#include "common/app/options.h"
#include "common/app/session.h"
#include "common/app/streams.h"
#include "common/model/config.h"
#include "common/os/signals.h"
#include "common/text/tokenizer.h"

// In chat, greedy is no good default: a small model that always takes its most probable token soon repeats
// itself without end. So where neither the user nor the file asks for a temperature, chat draws by these;
// what either of them does say of the others holds. The penalty is for the last tokens of the answer alone.
// One for everything since the beginning also grows with a long answer until it is no language any more, and
// it makes the token that ends an answer less likely, which templates put behind each turn
// (docs/real-model.md).
constexpr float chat_temperature = 0.7f, chat_top_p = 0.9f, chat_repetition_penalty = 1.1f;
constexpr size_t chat_penalty_window = 64;

// Returns the penalty's window, if the penalty is chat's.
inline std::optional<size_t> set_chat_sampling(Options& o, const ModelConfig& c) {
    if (o.mode != Mode::chat || o.temp || c.temperature != 0) return std::nullopt;
    o.temp = chat_temperature;
    if (!o.top_p && c.top_p == 1) o.top_p = chat_top_p;
    if (o.repetition_penalty || c.repetition_penalty != 1) return std::nullopt;
    o.repetition_penalty = chat_repetition_penalty;
    return chat_penalty_window;
}

// A turn renders the whole conversation anew and runs what differs from the KV cache. That is usually just
// the turn itself, but not always: Qwen3's template drops the thoughts of earlier turns, so what followed
// them has moved. This way the model sees exactly what it would see in Hugging Face's apply_chat_template().
inline Stop run_chat(Session& s, const Options& o, std::optional<std::string> first, const Streams& io) {
    const Tokenizer& tokenizer = need_tokenizer(s.model, "--mode chat");
    if (!tokenizer.has_chat()) throw UsageError("--mode chat: this file has no chat template");
    const bool terminal = is_terminal(io.in);

    if (terminal) note(io.err, "Type a message. Ctrl-D ends the conversation.\n");

    std::vector<ChatMessage> messages;
    if (o.system) messages.push_back({"system", *o.system});
    while (true) {
        std::string user;
        if (first && !first->empty()) {
            user = *std::exchange(first, std::nullopt);
        } else {
            if (terminal) note(io.err, "> ");
            if (!read_line(io.in, user)) {
                if (terminal) note(io.err, "\n");  // what is printed next does not stand behind the marker
                break;
            }
            if (user.empty()) continue;
        }
        const bool opening = messages.size() == (o.system ? 1 : 0);
        messages.push_back({"user", user});
        std::vector<int> ids = tokenizer.encode(tokenizer.render_chat(messages, o.think, true), false);
        // A turn that is not the first may find the context full; but some of its tokens have to be there.
        if (opening || ids.empty()) check_prompt("--mode chat", ids.size(), s.context);
        Stop stop = Stop::context;
        if (ids.size() < static_cast<size_t>(s.context)) {
            std::string answer;
            TokenPrinter printer(io.out, s.model, o.print_ids);
            stop = generate(s, ids, [&](int id) {
                printer.token(id);
                if (!tokenizer.is_special(id)) answer += tokenizer.token_bytes(id);
            });
            printer.end();
            messages.push_back({"assistant", answer});
        }
        if (stop == Stop::ctrl_c) return stop;
        if (stop == Stop::context) {
            note(io.err, format("the context of %d tokens is full: the conversation ends here\n", s.context));
            return stop;
        }
    }
    return interrupted ? Stop::ctrl_c : Stop::end_of_text;
}
