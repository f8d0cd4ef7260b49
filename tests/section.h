// Tokenizer sections that tests make, field by field: docs/tokenizer.md has their bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace section {

// of the section
constexpr uint32_t nfc_flag = 1, ignore_merges_flag = 2, add_bos_flag = 4, chat_flag = 8, steps_flag = 16;
constexpr uint8_t defined = 1, word = 2, special = 4;  // of a token

}  // namespace section

struct Section {
    struct Token {
        std::string bytes;
        uint8_t flags = 0;
    };
    std::vector<Token> tokens;
    std::vector<std::array<uint32_t, 3>> merges;  // left, right, merged
    std::vector<std::array<uint32_t, 2>> added;   // id, flags
    std::string pattern, word_pattern, chat;
    uint32_t flags = 0, bos_id = 0xFFFFFFFF;

    uint32_t add(const std::string& bytes, uint8_t token_flags) {
        tokens.push_back({bytes, token_flags});
        return static_cast<uint32_t>(tokens.size() - 1);
    }
    int vocab_size() const { return static_cast<int>(tokens.size()); }

    static void put(std::string& out, uint32_t value) {
        out.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    std::string bytes() const {
        std::string offsets, token_flags, token_bytes, merge_ids, added_ids, out;
        put(offsets, 0);
        for (const Token& t : tokens) {
            token_bytes += t.bytes;
            token_flags += static_cast<char>(t.flags);
            put(offsets, static_cast<uint32_t>(token_bytes.size()));
        }
        for (const auto& m : merges) {
            for (const uint32_t id : m) put(merge_ids, id);
        }
        for (const auto& a : added) {
            for (const uint32_t x : a) put(added_ids, x);
        }
        const std::string body =
            offsets + merge_ids + added_ids + token_flags + token_bytes + pattern + word_pattern + chat;
        const auto size = [](const auto& x) { return static_cast<uint32_t>(x.size()); };
        const std::array<uint32_t, 12> header{
            0x6E6B6F74,   1,           48 + size(body), size(tokens),       flags,      bos_id,
            size(merges), size(added), size(pattern),   size(word_pattern), size(chat), size(token_bytes)};
        for (const uint32_t x : header) put(out, x);
        return out + body;
    }
};

// The chat part: the template's flags and its pieces, 13 in a sound section.
inline std::string chat_bytes(uint32_t flags, const std::vector<std::string>& pieces) {
    std::string out;
    Section::put(out, flags);
    for (const std::string& p : pieces) {
        Section::put(out, static_cast<uint32_t>(p.size()));
        out += p;
    }
    return out;
}

// A step of the pre-tokenizer as a section with steps_flag has it.
inline std::string step_bytes(uint32_t flags, const std::string& pattern) {
    std::string out;
    Section::put(out, flags);
    Section::put(out, static_cast<uint32_t>(pattern.size()));
    return out + pattern;
}
