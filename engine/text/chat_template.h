// Chat templates as literal text around each message. export/chat_template.py takes them out of the Jinja
// template, so no template language is interpreted here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/text/utf8.h"

struct ChatMessage {
    std::string role, content;  // role: system, user or assistant
};

// A chat template: its pieces, in the order in which the section stores them, and what they cannot say.
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
        drop_thoughts = 128,  // an answer is what follows its last </think> (DeepSeek-R1's distillations)
        fold_system = 256     // the first user message goes on where the system message ends (Llama 2)
    };
    uint32_t flags = 0;
    std::array<std::string, 13> pieces;  // chat_text() names them
};

// Python's str.strip(): White_Space and the four ASCII separators U+001C to U+001F.
inline std::string_view chat_trim(std::string_view s) {
    const auto is_space = [](char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); };
    return without_leading(without_trailing(s, is_space), is_space);
}

// The conversation as Hugging Face's apply_chat_template() writes it, for the templates that consist of
// literal pieces; the exporter has compared the two. Throws std::runtime_error for a conversation that is
// empty or has a role or an order that the template lacks.
inline std::string chat_text(const ChatTemplate& chat, std::span<const ChatMessage> messages, bool think,
                             bool generation_prompt) {
    if (messages.empty()) fail("chat: no messages");
    using enum ChatTemplate::Flag;
    const auto has = [&](ChatTemplate::Flag flag) { return (chat.flags & flag) != 0; };
    // no_system: before the first message when that is no system message. late_system: one that does not come
    // first. generate, generate_no_think: what the model is given to continue, thinking on and off.
    // think_open, think_close: around the thoughts of the last answer, with think_blocks.
    const auto& [no_system, system_prefix, system_suffix, late_system_prefix, late_system_suffix, user_prefix,
                 user_suffix, assistant_prefix, assistant_suffix, generate, generate_no_think, think_open,
                 think_close] = chat.pieces;

    // Qwen3: an answer keeps its thoughts only while no user has spoken since. (A user message that is one
    // <tool_response> is a tool speaking.) Without any user message, no answer keeps them.
    size_t last_user = messages.size();
    for (size_t i = 0, first = messages[0].role == "system"; i < messages.size(); i++) {
        const auto& [role, text] = messages[i];
        const bool tool = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
        if (role == "user" && (!tool || has(turns_only))) last_user = i;
        const bool in_turn =
            i < first ? messages.size() > 1 : role == ((i - first) % 2 ? "assistant" : "user");
        if (has(turns_only) && !in_turn) fail("chat: with this template, user and assistant must take turns");
    }

    std::string out = messages[0].role == "system" ? "" : no_system;
    for (size_t i = 0; i < messages.size(); i++) {
        const std::string valid = utf8_replace_invalid(messages[i].content);
        std::string_view text = valid;
        const std::string& role = messages[i].role;
        if (role == "system") {
            if (i > 0 && !has(late_system)) fail("chat: the system message must be the first");
            if (has(trim_system)) text = chat_trim(text);
            out.append(i == 0 ? system_prefix : late_system_prefix).append(text);
            out.append(i == 0 ? system_suffix : late_system_suffix);
        } else if (role == "user") {
            if (has(trim_user)) text = chat_trim(text);
            const bool folded = has(fold_system) && i == 1 && messages[0].role == "system";
            out.append(folded ? "" : user_prefix).append(text).append(user_suffix);
        } else if (role == "assistant") {
            constexpr std::string_view open = "<think>", close = "</think>";
            const auto is_newline = [](char32_t c) { return c == '\n'; };
            if (const size_t end = text.rfind(close); has(drop_thoughts) && end != text.npos) {
                text.remove_prefix(end + close.size());
                if (has(strip_answer)) text = without_leading(text, is_newline);
            }
            if (has(trim_assistant)) text = chat_trim(text);
            out.append(assistant_prefix);
            // "<think>\nthoughts\n</think>\n\nanswer", with text that has no </think> all answer.
            std::string_view thoughts;
            if (const size_t end = text.rfind(close); has(think_blocks) && end != text.npos) {
                thoughts = text.substr(0, text.find(close));
                if (const size_t begin = thoughts.rfind(open); begin != thoughts.npos)
                    thoughts.remove_prefix(begin + open.size());
                thoughts = without_leading(without_trailing(thoughts, is_newline), is_newline);
                text = without_leading(text.substr(end + close.size()), is_newline);
            }
            if (has(think_blocks) && last_user < i && (i + 1 == messages.size() || !thoughts.empty())) {
                out.append(think_open).append(thoughts).append(think_close);
                if (has(strip_answer)) text = without_leading(text, is_newline);
            }
            out.append(text).append(assistant_suffix);
        } else {
            fail("chat: role '", role, "' is not system, user or assistant");
        }
    }
    if (generation_prompt) out.append(think ? generate : generate_no_think);
    return out;
}
