// Chat templates as literal text around each message. export/chat_template.py takes them out of the Jinja
// template, so no template language is interpreted here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "engine/text/utf8.h"

struct ChatMessage {
    std::string role, content;  // role: system, user or assistant
};

// The pieces of a chat template, in the order in which the section stores them.
struct ChatTemplate {
    enum Flag : uint32_t {
        // White space at both ends of a message is dropped (Llama 3).
        trim_system = 1,
        trim_user = 2,
        trim_assistant = 4,
        think_blocks = 8,  // <think>..</think> of earlier answers is dropped (Qwen3)
        late_system = 16,  // a system message may come after the first message
        turns_only = 32,   // only for [system,] user, assistant, user, ...
        // Newlines in front of an answer are dropped: in front of the last one (think_blocks, Qwen3), or
        // where thoughts are (drop_thoughts).
        strip_answer = 64,
        drop_thoughts = 128  // an answer is what follows its last </think> (DeepSeek-R1's distillations)
    };
    uint32_t flags = 0;
    // What stands before the first message when that is not a system message.
    std::string no_system;
    std::string system_prefix, system_suffix;            // a system message that comes first
    std::string late_system_prefix, late_system_suffix;  // one that does not
    std::string user_prefix, user_suffix, assistant_prefix, assistant_suffix;
    std::string generate, generate_no_think;  // what the model is given to continue, thinking on and off
    std::string think_open, think_close;      // think_blocks: around the thoughts of the last answer

    std::array<std::string*, 13> pieces() {
        return {&no_system,          &system_prefix, &system_suffix,     &late_system_prefix,
                &late_system_suffix, &user_prefix,   &user_suffix,       &assistant_prefix,
                &assistant_suffix,   &generate,      &generate_no_think, &think_open,
                &think_close};
    }
};

// Python's str.strip(): White_Space and the four ASCII separators U+001C to U+001F.
inline std::string_view chat_trim(std::string_view s) {
    const auto is_space = [](char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); };
    s.remove_prefix(leading_space(s, is_space));
    s.remove_suffix(trailing_space(s, is_space));
    return s;
}
inline std::string_view trim_newlines(std::string_view s, bool left, bool right) {
    while (left && !s.empty() && s.front() == '\n') s.remove_prefix(1);
    while (right && !s.empty() && s.back() == '\n') s.remove_suffix(1);
    return s;
}

// The conversation as Hugging Face's apply_chat_template() writes it, for the templates that consist of
// literal pieces; the exporter has compared the two. Throws std::runtime_error for a conversation that is
// empty or has a role or an order that the template lacks.
inline std::string chat_text(const ChatTemplate& chat, std::span<const ChatMessage> messages, bool think,
                             bool generation_prompt) {
    if (messages.empty()) throw std::runtime_error("chat: no messages");
    const auto has = [&](ChatTemplate::Flag flag) { return (chat.flags & flag) != 0; };

    // Qwen3: an answer keeps its thoughts only while no user has spoken since. (A user message that is one
    // <tool_response> is a tool speaking.) Without any user message, no answer keeps them.
    size_t last_user = messages.size();
    for (size_t i = 0, first = messages[0].role == "system"; i < messages.size(); i++) {
        const auto& [role, text] = messages[i];
        const bool tool = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
        if (role == "user" && (!tool || has(ChatTemplate::turns_only))) last_user = i;
        const bool in_turn =
            i < first ? messages.size() > 1 : role == ((i - first) % 2 ? "assistant" : "user");
        if (has(ChatTemplate::turns_only) && !in_turn) {
            throw std::runtime_error("chat: with this template, user and assistant must take turns");
        }
    }

    std::string out = messages[0].role == "system" ? "" : chat.no_system;
    for (size_t i = 0; i < messages.size(); i++) {
        const std::string text = utf8_replace_invalid(messages[i].content);
        const auto content = [&](bool trim) { return trim ? chat_trim(text) : std::string_view(text); };
        const std::string& role = messages[i].role;
        if (role == "system" && i == 0) {
            out.append(chat.system_prefix).append(content(has(ChatTemplate::trim_system)));
            out.append(chat.system_suffix);
        } else if (role == "system") {
            if (!has(ChatTemplate::late_system)) {
                throw std::runtime_error("chat: the system message must be the first");
            }
            out.append(chat.late_system_prefix).append(content(has(ChatTemplate::trim_system)));
            out.append(chat.late_system_suffix);
        } else if (role == "user") {
            out.append(chat.user_prefix).append(content(has(ChatTemplate::trim_user)));
            out.append(chat.user_suffix);
        } else if (role == "assistant") {
            std::string_view answer = text, thoughts;
            const size_t thought_end = text.rfind("</think>");
            if (has(ChatTemplate::drop_thoughts) && thought_end != std::string::npos) {
                answer =
                    trim_newlines(answer.substr(thought_end + 8), has(ChatTemplate::strip_answer), false);
            }
            if (has(ChatTemplate::trim_assistant)) answer = chat_trim(answer);
            if (has(ChatTemplate::think_blocks)) {
                // "<think>\nthoughts\n</think>\n\nanswer", with text that has no </think> all answer.
                const std::string_view whole = answer;
                if (const size_t end = whole.rfind("</think>"); end != std::string_view::npos) {
                    answer = trim_newlines(whole.substr(end + 8), true, false);
                    thoughts = trim_newlines(whole.substr(0, whole.find("</think>")), false, true);
                    if (const size_t open = thoughts.rfind("<think>"); open != std::string_view::npos) {
                        thoughts.remove_prefix(open + 7);
                    }
                    thoughts = trim_newlines(thoughts, true, false);
                }
            }
            out.append(chat.assistant_prefix);
            const bool current =
                has(ChatTemplate::think_blocks) && last_user < messages.size() && i > last_user;
            if (current && (i + 1 == messages.size() || !thoughts.empty())) {
                out.append(chat.think_open).append(trim_newlines(thoughts, true, true));
                out.append(chat.think_close);
                out.append(trim_newlines(answer, has(ChatTemplate::strip_answer), false));
            } else {
                out.append(answer);
            }
            out.append(chat.assistant_suffix);
        } else {
            throw std::runtime_error("chat: role '" + role + "' is not system, user or assistant");
        }
    }
    if (generation_prompt) out.append(think ? chat.generate : chat.generate_no_think);
    return out;
}
