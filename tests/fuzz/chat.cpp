// Fuzzes chat: rendering a conversation, and the loop that answers lines of standard input. The input is the
// choices that template, tokenizer and model are made by, and then the lines.
#include "engine/app/chat.h"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/tokenizer.h"
#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"

namespace {

void render(Choices& choices) {
    ChatTemplate chat;
    chat.flags = uint32_t(choices.number(0, 255));
    for (std::string& piece : chat.pieces) piece = utf8_replace_invalid(choices.text(6));
    std::vector<ChatMessage> messages;
    for (int n = choices.number(0, 6); n > 0; n--) {
        const std::string role = choices.one_of<const char*>({"user", "assistant", "system", "tool"});
        std::string content;
        for (int parts = choices.number(1, 4); parts > 0; parts--) {
            content += choices.one_of<const char*>({"", "<think>", "</think>", "\n", "<tool_response>",
                                                    "</tool_response>", " \xC2\x85", "\x1C\xE2\x80\xA8"});
            content += choices.text(8);
        }
        messages.push_back({role, content});
    }
    const bool think = choices.yes(), generation_prompt = choices.yes();
    if (choices.yes()) chat.flags |= ChatTemplate::fold_system;
    try {
        const std::string text = chat_text(chat, messages, think, generation_prompt);
        expect(utf8_valid_prefix(text) == text.size(), "a conversation is UTF-8");
    } catch (const std::runtime_error& e) {
        expect(std::string_view(e.what()).starts_with("chat: "), "the message says where");
    }
}

// A model whose next token depends on position and last token alone, and that checks what it is given.
struct ChatModel : Model {
    uint32_t seed;
    std::vector<float> logits{};

    ChatModel(std::shared_ptr<const Tokenizer> of_section, int context, uint32_t s, int chunk) : seed(s) {
        config.vocab_size = of_section->vocab_size();
        config.max_seq_len = context;
        config.eos_ids = {int(seed % uint32_t(config.vocab_size))};
        max_chunk = chunk;
        tokenizer = std::move(of_section);
    }
    std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) override {
        expect(!tokens.empty() && int(tokens.size()) <= max_chunk, "tokens run in chunks");
        expect(pos >= 0 && int64_t{pos} + int64_t(tokens.size()) <= config.max_seq_len,
               "tokens run within the context");
        for (const int id : tokens)
            expect(id >= 0 && id < config.vocab_size, "tokens run are in the vocabulary");
        const uint32_t mixed = (uint32_t(pos) * 31 + uint32_t(tokens.back())) * 2654435761u ^ seed;
        logits.assign(size_t(config.vocab_size), 0);
        logits[(mixed >> 8) % uint32_t(config.vocab_size)] = 1;
        return std::span<const float>(logits).first(n_logits > 0 ? logits.size() : 0);
    }
};

void converse(Choices& choices) {
    BuiltSection built = build_section(choices);
    Section& s = built.section;
    if (!(s.flags & section::chat_flag)) {
        s.flags |= section::chat_flag;
        s.chat = build_chat(choices);
    }
    const int context = choices.number(1, 64), max_chunk = choices.number(1, 3);
    Options o;
    if (choices.yes()) o.system = choices.text(8);
    o.think = choices.yes();
    o.print_ids = choices.yes();
    const auto seed = uint32_t(choices.number(0, 65535));
    const int max_new = choices.number(1, 8);
    std::optional<std::string> first;
    if (choices.yes()) first = choices.text(8);
    std::string lines = choices.rest();

    const std::string section_bytes = s.bytes();
    try {
        auto tokenizer = std::make_shared<const Tokenizer>(
            Tokenizer(std::as_bytes(std::span(section_bytes)), s.vocab_size()));
        ChatModel model(tokenizer, context, seed, max_chunk);
        Session session{model, Sampler{0, 0, 1, {}}, context, max_new};
        std::FILE* in = fmemopen(lines.data(), lines.size(), "r");
        const std::unique_ptr<std::FILE, int (*)(std::FILE*)> closed(in, std::fclose);
        expect(in != nullptr, "fmemopen works");
        run_chat(session, o, first, {in, nowhere(), nowhere()});
    } catch (const std::runtime_error& e) {  // a UsageError is one
        const std::string_view what = e.what();
        expect(
            what.starts_with("tokenizer: ") || what.starts_with("chat: ") || what.starts_with("--mode chat"),
            "the message says where");
    }
}

void fuzz_chat(FuzzBytes bytes) {
    Choices choices(bytes);
    choices.yes() ? converse(choices) : render(choices);
}

}  // namespace

FUZZ_TARGET(fuzz_chat)
