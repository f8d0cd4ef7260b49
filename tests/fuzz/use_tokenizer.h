// Everything that a program does with a tokenizer, and what has to hold of it.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer.h"
#include "tests/fuzz/fuzz.h"

constexpr std::string_view awkward_text =
    "hello hell </s>\xC3\xA9 e\xCC\x81 x</s> <s>\xFF\xF0\x9F 12   \n\xE4\xB8\xADit's \xCC\x81";

// The bytes of the ids one after the other.
inline std::string bytes_of(const Tokenizer& t, const std::vector<int>& ids) {
    std::string bytes;
    for (const int id : ids) bytes += t.token_bytes(id);
    return bytes;
}

// Encodes the text, prints the ids, renders a conversation with it. Throws what these document.
inline std::vector<int> use_tokenizer(const Tokenizer& t, std::string_view text) {
    const std::vector<int> ids = t.encode(text, false);
    for (const int id : ids) expect(id >= 0 && id < t.vocab_size(), "every id is in the vocabulary");

    // Printed token by token, or all at once.
    Utf8Stream stream;
    std::string printed;
    for (const int id : ids) printed += stream.push(t.token_bytes(id));
    printed += stream.flush();
    expect(utf8_valid_prefix(printed) == printed.size(), "what is printed is UTF-8");
    expect(printed == utf8_replace_invalid(bytes_of(t, ids)), "a stream prints what the whole text is");

    std::vector<int> with_bos = t.encode(text, true);
    if (with_bos.size() > ids.size()) {
        expect(with_bos[0] == t.bos_id() && t.bos_id() < t.vocab_size(), "BOS comes first");
        with_bos.erase(with_bos.begin());
    }
    expect(with_bos == ids, "BOS changes nothing else");

    for (const int id : {-1, t.vocab_size(), INT32_MAX, INT32_MIN}) {
        expect(t.token_bytes(id).empty() && !t.is_special(id), "an id that is none has no bytes");
    }
    if (t.has_chat()) {
        const std::string user(text.substr(0, 200));
        const std::vector<ChatMessage> messages{{"system", user}, {"user", user}, {"assistant", user}};
        const std::string rendered = t.render_chat(messages, true, true);
        expect(utf8_valid_prefix(rendered) == rendered.size(), "a conversation is UTF-8");
    }
    return ids;
}
