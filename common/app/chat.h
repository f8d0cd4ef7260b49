// Chat mode: a turn for each line of the user's.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/app/generate.h"
#include "common/app/session.h"
#include "common/app/signals.h"
#include "common/app/streams.h"
#include "common/text/tokenizer.h"

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
