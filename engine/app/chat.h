// Chat mode: a turn for each line of the user's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/app/line_editor.h"
#include "engine/app/options.h"
#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/model/config.h"
#include "engine/os/files.h"
#include "engine/os/system.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

// Greedy is no good default in chat: small models soon repeat themselves without end. So chat draws by these
// where neither the user nor the file sets a temperature; other settings of either stay.
// docs/real-model.md says how they were chosen. The penalty is for the last tokens of the answer, and for
// those that would repeat a phrase of it (generate()).
constexpr float chat_temperature = 0.1f, chat_top_p = 0.9f, chat_repetition_penalty = 1.15f;
constexpr size_t chat_penalty_window = 128;

// Returns the penalty's window, if the penalty is chat's.
inline std::optional<size_t> set_chat_sampling(Options& o, const ModelConfig& c) {
    if (!o.chat || o.temp || c.temperature != 0) return std::nullopt;
    o.temp = chat_temperature;
    if (!o.top_p && c.top_p == 1) o.top_p = chat_top_p;
    if (o.repetition_penalty || c.repetition_penalty != 1) return std::nullopt;
    o.repetition_penalty = chat_repetition_penalty;
    return chat_penalty_window;
}

// A conversation in progress: what was said, and how it goes on.
struct Conversation {
    Session& session;
    const Options& options;
    const Streams& io;
    const Tokenizer& tokenizer;
    LineEditor editor;
    bool terminal;  // a person types: there are commands, and Ctrl-C ends an answer only
    std::vector<ChatMessage> messages{};  // a system message first, if there is one
    bool shows_speed = false;             // after each answer
    bool leaves = false;                  // /bye was typed

    bool has_system() const { return !messages.empty() && messages[0].role == "system"; }
};

// The conversation as JSON, a list of messages as transformers' apply_chat_template() takes it.
inline std::string chat_json(const std::vector<ChatMessage>& messages) {
    const auto quoted = [](const std::string& words) {
        std::string text = "\"";
        const std::string valid = utf8_replace_invalid(words);
        for (std::string_view rest = valid; !rest.empty();) {
            const Utf8Char c = utf8_first(rest);
            if (c.code == '"' || c.code == '\\') text += '\\';
            if (c.code < 0x20 || (c.code >= 0x7F && c.code < 0xA0))  // a terminal may obey these
                text += format("\\u%04x", unsigned(c.code));
            else
                text += rest.substr(0, size_t(c.length));
            rest.remove_prefix(size_t(c.length));
        }
        return text + '"';
    };
    std::string all;
    for (const auto& [role, content] : messages)
        all += (all.empty() ? "" : ",") + ("\n {\"role\": " + quoted(role)) +
               ", \"content\": " + quoted(content) + "}";
    return "[" + all + "\n]\n";
}

// ----------------------------------------------------------------------------
// What a person can type besides messages

constexpr const char* chat_help =
    "/system TEXT   another system prompt, and a new conversation\n"
    "/reset         forget what was said, but not the system prompt\n"
    "/stats         speed after each answer, or no more\n"
    "/save FILE     write the conversation as JSON\n"
    "/bye           leave, as Ctrl-D does\n"
    "\"\"\"            begins and ends a message of several lines; Ctrl-D ends it, too\n"
    "Ctrl-C ends an answer, not the conversation.\n";

// Whether the text was a command, which has then been obeyed.
inline bool obey_command(Conversation& chat, const std::string& text) {
    if (!text.starts_with('/')) return false;
    const size_t space = text.find(' ');
    const std::string name = text.substr(0, space);
    const size_t begin = text.find_first_not_of(' ', space);  // of what stands behind the name
    const std::string rest =
        begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
    const auto say = [&](const std::string& line) { note(chat.io.err, line + "\n"); };
    if (name == "/help" || name == "/?") {
        note(chat.io.err, chat_help);
    } else if (name == "/bye" || name == "/exit" || name == "/quit") {
        chat.leaves = true;
    } else if (name == "/reset" || name == "/clear") {
        chat.messages.resize(chat.has_system() ? 1 : 0);
        say("a new conversation");
    } else if (name == "/system") {
        chat.messages.clear();
        if (!rest.empty()) chat.messages.push_back({"system", rest});
        say(rest.empty() ? "a new conversation, without a system prompt"
                         : "a new conversation, with this system prompt");
    } else if (name == "/stats") {
        chat.shows_speed = !chat.shows_speed;
        say(chat.shows_speed ? "speed is shown after each answer" : "speed is shown no more");
    } else if (name == "/save" && rest.empty()) {
        say("/save: no file given");
    } else if (name == "/save") {
        try {
            const std::string json = chat_json(chat.messages);
            const std::string home = home_folder();  // "~", as in a shell
            const bool is_home = !home.empty() && (rest == "~" || rest.starts_with("~/"));
            const std::string path = is_home ? home + rest.substr(1) : rest;
            NewFile file(path);
            file.write(json.data(), json.size());
            file.commit();
            say(format("%zu messages are in ", chat.messages.size()) + printable(path));
        } catch (const std::runtime_error& e) {
            say("/save: " + printable(e.what()));
        }
    } else {
        say(printable(name) + ": no such command; /help lists them");
    }
    return true;
}

// The next message that a person types, or a line of what is no terminal. Lines between three quotes are one,
// of up to `most` bytes.
inline Typed read_message(Conversation& chat, std::string& text, size_t most) {
    constexpr std::string_view quotes = "\"\"\"";
    Typed typed = chat.editor.read("> ", text);
    if (typed != Typed::line || !chat.terminal || !text.starts_with(quotes)) return typed;
    text.erase(0, quotes.size());
    while (!text.ends_with(quotes)) {
        std::string line;
        typed = chat.editor.read(". ", line);
        if (typed == Typed::end) break;  // Ctrl-D ends them, too
        if (typed != Typed::line) return typed;
        text += '\n' + line;
        if (text.size() > most) return Typed::too_long;
    }
    if (text.ends_with(quotes)) text.resize(text.size() - quotes.size());
    if (text.starts_with('\n')) text.erase(0, 1);
    if (text.ends_with('\n')) text.pop_back();
    return Typed::line;
}

// ----------------------------------------------------------------------------
// Turns

// The conversation as ids, with room for an answer: while there is none, the oldest message of the user and
// its answer are dropped. Where the last message alone is too long, it is dropped instead, and there are no
// ids; UsageError if it is an option's.
inline std::vector<int> ids_that_fit(Conversation& chat, bool is_option) {
    const auto context = size_t(chat.session.context);
    const size_t room = std::min(size_t(chat.session.max_new), std::max<size_t>(context / 4, 1));
    const size_t oldest = chat.has_system() ? 1 : 0;
    std::vector<ChatMessage> kept = chat.messages;
    size_t n_dropped = 0;
    std::vector<int> ids;
    while (true) {
        ids = chat.tokenizer.encode(chat.tokenizer.render_chat(kept, chat.options.think, true), false);
        if (ids.size() + room <= context || kept.size() == oldest + 1) break;
        const auto begin = kept.begin() + ptrdiff_t(oldest);
        kept.erase(begin, begin + 2);
        n_dropped++;
    }
    if (ids.empty() || is_option) check_prompt("--mode chat", ids.size(), int(context));
    if (ids.size() >= context) {
        note(chat.io.err, format("this message is too long: %zu tokens, the context is %zu (--ctx)\n",
                                 ids.size(), context));
        chat.messages.pop_back();
        return {};
    }
    if (n_dropped > 0)
        note(chat.io.err, format("the context of %zu tokens is full: the oldest %s forgotten\n", context,
                                 n_dropped == 1 ? "turn is" : format("%zu turns are", n_dropped).c_str()));
    chat.messages = std::move(kept);
    return ids;
}

// Answers the last message, up to an end token (session.h). A turn renders the whole conversation anew and
// runs what differs from the KV cache. That is usually just the turn itself, but not always: Qwen3's template
// drops the thoughts of earlier turns, so what followed them has moved. This way the model sees exactly what
// it would see in Hugging Face's apply_chat_template().
inline void answer(Conversation& chat, std::vector<int> ids) {
    std::string text;
    TokenPrinter printer(chat.io.out, chat.session.model, chat.options.print_ids);
    const Statistics before = chat.session.statistics;
    const Stop stop = generate(chat.session, ids, [&](int id) {
        printer.token(id);
        if (!chat.tokenizer.is_special(id)) text += chat.tokenizer.token_bytes(id);
    });
    printer.end();
    chat.messages.push_back({"assistant", text});
    if (stop == Stop::context)
        note(chat.io.err,
             format("the context of %d tokens is full: the answer ends here\n", chat.session.context));
    if (chat.shows_speed) {
        const Statistics& t = chat.session.statistics;
        const int n_prefill = t.n_prefill - before.n_prefill, n_decode = t.n_decode - before.n_decode;
        note(chat.io.err,
             format("read %d tokens, %.1f tokens/s; wrote %d, %.1f tokens/s; %zu of %d positions used\n",
                    n_prefill, per_second(n_prefill, t.prefill_seconds - before.prefill_seconds),
                    n_decode + 1, per_second(n_decode, t.decode_seconds - before.decode_seconds),
                    chat.session.held.size(), chat.session.context));
    }
}

// A conversation: `first`, if it is there, then a message for each line of standard input.
inline void run_chat(Session& s, const Options& o, std::optional<std::string> first, const Streams& io) {
    const Tokenizer& tokenizer = need_tokenizer(s.model, "--mode chat");
    if (!tokenizer.has_chat()) throw UsageError("--mode chat: this file has no chat template");
    const bool terminal = is_terminal(io.in);
    const size_t limit = text_limit(max_prompt_bytes);
    Conversation chat{s, o, io, tokenizer, LineEditor(io, history_path(), limit), terminal};
    if (terminal) note(io.err, "Type a message. /help lists commands, Ctrl-D ends the conversation.\n");
    if (o.system) chat.messages.push_back({"system", *o.system});
    while (!chat.leaves) {
        std::string text;
        const bool is_option = first && !first->empty();
        if (is_option) {
            text = *std::exchange(first, std::nullopt);
        } else {
            const Typed typed = read_message(chat, text, limit);
            if (typed == Typed::ctrl_c && terminal) {
                interrupted = 0;
                note(io.err, "Ctrl-D or /bye ends the conversation.\n");
                continue;
            }
            const std::string name = terminal ? "this message" : "--mode chat: a line of standard input";
            if (typed == Typed::too_long) {
                note(io.err, too_long(name, limit) + "\n");
                continue;
            }
            if (typed != Typed::line) break;
            try {
                text = text_by_rule(name, text);
            } catch (const std::runtime_error& e) {
                if (!terminal) throw;
                note(io.err, std::string(e.what()) + "\n");
                continue;
            }
            if (text.empty()) continue;
            chat.editor.remember(text);
            if (terminal && obey_command(chat, text)) continue;
        }
        chat.messages.push_back({"user", text});
        std::vector<int> ids = ids_that_fit(chat, is_option);
        if (ids.empty()) continue;
        answer(chat, std::move(ids));
        if (terminal) interrupted = 0;
    }
}
