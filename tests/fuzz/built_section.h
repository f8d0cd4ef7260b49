// Tokenizer sections made by choices: a vocabulary with its merges, added tokens, patterns and a chat
// template.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/section.h"

struct BuiltSection {
    Section section;
    bool keeps_text = true;       // encoding loses nothing: every byte has a token, nothing is normalized
    bool may_be_refused = false;  // the pattern is any text, which may not be one
};

// A pattern: none, those of real models, pieces of them, or anything.
inline std::string build_pattern(Choices& choices, BuiltSection& built) {
    constexpr const char* llama =
        R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    switch (choices.number(0, 3)) {
        case 0:
            return "";
        case 1:
            return llama;
        case 2: {
            std::string pattern;
            for (int n = choices.number(1, 4); n > 0; n--) {
                if (!pattern.empty()) pattern += "|";
                pattern += choices.one_of({R"(\p{L}+)", R"(\p{N})", R"( ?[^\s\p{L}\p{N}]+)", R"(\s+(?!\S))",
                                           R"(\s+)", R"((?i:'s|'t))", ".", "a*", "(?=b)", "[a-c]{2,3}",
                                           R"(\b)", "^", "$"});
            }
            return pattern;
        }
        default:
            built.may_be_refused = true;
            return choices.text(40);
    }
}

// Several steps in the place of the one pattern.
inline void build_steps(Choices& choices, BuiltSection& built) {
    std::string steps, pattern = built.section.pattern;
    for (int n = choices.number(0, 3); n > 0; n--) {
        const bool drops_gaps = choices.yes();
        if (drops_gaps) built.keeps_text = false;
        steps += step_bytes(drops_gaps, pattern);
        pattern = build_pattern(choices, built);
    }
    built.section.pattern = steps;
}

inline void build_added_tokens(Choices& choices, BuiltSection& built) {
    Section& s = built.section;
    for (int n = choices.number(0, 6); n > 0; n--) {
        std::string text = choices.one_of<const char*>(
            {"", "<s>", "</s>", " ", "ab", "a", "\xC3\xA9", "e\xCC\x81", "<|im_end|>"});
        if (text.empty()) text = utf8_replace_invalid(choices.text(12));
        if (text.empty()) text = "x";
        const bool is_special = choices.yes();
        const auto flags = uint32_t(choices.number(0, 31));  // as docs/tokenizer.md lists them
        constexpr uint32_t strip = 4 | 8;
        if (flags & strip) built.keeps_text = false;
        s.added.push_back({s.add(text, section::defined | (is_special ? section::special : 0)), flags});
    }
}

inline std::string build_chat(Choices& choices) {
    std::vector<std::string> pieces;
    const auto flags = uint32_t(choices.number(0, 255));
    for (int i = 0; i < 13; i++) pieces.push_back(utf8_replace_invalid(choices.text(6)));
    return chat_bytes(flags, pieces);
}

inline BuiltSection build_section(Choices& choices) {
    BuiltSection built;
    Section& s = built.section;
    constexpr uint8_t in_words = section::defined | section::word;

    // Single bytes: all of them, or some letters.
    if (choices.yes()) {
        for (int b = 0; b < 256; b++) s.add(std::string(1, char(b)), in_words);
    } else {
        for (int n = choices.number(1, 16), b = choices.number(0, 255); n > 0; n--, b++) {
            s.add(std::string(1, char(b)), in_words);
        }
        built.keeps_text = false;
    }
    // Merges of any two tokens, whose result may be there already.
    std::set<std::pair<uint32_t, uint32_t>> seen;
    for (int n = choices.number(0, 24); n > 0; n--) {
        const auto left = uint32_t(choices.number(0, s.vocab_size() - 1));
        const auto right = uint32_t(choices.number(0, s.vocab_size() - 1));
        const std::string both = s.tokens[left].bytes + s.tokens[right].bytes;
        if (both.size() > 64 || !seen.insert({left, right}).second) continue;
        const auto same = std::find_if(s.tokens.begin(), s.tokens.end(),
                                       [&](const Section::Token& t) { return t.bytes == both; });
        const bool is_new = same == s.tokens.end() || choices.yes();
        s.merges.push_back({left, right, is_new ? s.add(both, in_words) : uint32_t(same - s.tokens.begin())});
    }
    if (choices.yes()) s.add("", 0);  // a gap, as padded vocabularies have
    build_added_tokens(choices, built);
    s.pattern = build_pattern(choices, built);
    s.word_pattern = choices.one_of({R"([\p{L}\p{N}_])", R"(\w)"});

    s.flags = uint32_t(choices.number(0, 31));
    if (s.flags & section::steps_flag) build_steps(choices, built);
    if (s.flags & section::nfc_flag) built.keeps_text = false;
    if (s.flags & section::add_bos_flag) s.bos_id = uint32_t(choices.number(0, s.vocab_size() - 1));
    if (s.flags & section::chat_flag) s.chat = build_chat(choices);
    return built;
}

// Twelve tokens: letters, one merge, <s>.
inline Section smallest_section() {
    Section s;
    for (int i = 0; i < 10; i++) s.add(std::string(1, char('a' + i)), section::defined | section::word);
    s.merges.push_back({0, 1, s.add("ab", section::defined | section::word)});
    s.bos_id = s.add("<s>", section::defined | section::special);
    s.added.push_back({s.bos_id, 1});
    return s;
}
