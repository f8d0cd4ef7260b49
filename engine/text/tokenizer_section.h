// Reads the tokenizer section of a model file: docs/tokenizer.md has its bytes. Part of tokenizer.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/nfc.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

// Sizes that no real tokenizer comes near. They bound the work and the memory that a small file can ask for.
constexpr uint32_t max_token_bytes = 1 << 14;    // printed each time the token is generated
constexpr uint32_t max_merge_bytes = 1 << 24;    // of all merged tokens, and 256 more for each merge
constexpr uint32_t max_added_bytes = 1 << 22;    // of all added tokens, for each of which there is a node
constexpr uint32_t max_pattern_bytes = 1 << 14;  // each takes time at every byte of a text
constexpr uint32_t max_chat_bytes = 1 << 20;     // repeated in every turn

// A cursor over the section. Every read is checked; numbers are little-endian at any alignment.
struct Tokenizer::SectionReader {
    std::string_view rest;
    std::string_view take(uint64_t n, const char* field) {
        if (n > rest.size()) fail(field, n, "bytes, but only " + std::to_string(rest.size()) + " are left");
        const std::string_view taken = rest.substr(0, n);
        rest.remove_prefix(n);
        return taken;
    }
    uint32_t u32(const char* field) { return read_u32(take(4, field).data()); }
    static uint32_t read_u32(const char* p) {
        uint32_t value;
        std::memcpy(&value, p, 4);
        return value;
    }
    [[noreturn]] static void fail(const std::string& field, uint64_t value, const std::string& what) {
        throw std::runtime_error("tokenizer: " + field + " " + std::to_string(value) + " " + what);
    }
    static void check_text(std::string_view text, const char* field) {
        const size_t valid = utf8_valid_prefix(text);
        if (valid != text.size()) fail(std::string(field) + " byte", valid, "is not valid UTF-8");
    }
};

inline Tokenizer Tokenizer::load(std::span<const std::byte> section, int vocab_size) {
    using Reader = SectionReader;
    const auto fail = [](const std::string& field, uint64_t value, const std::string& what) {
        Reader::fail(field, value, what);
    };
    Tokenizer t;
    Reader in{{reinterpret_cast<const char*>(section.data()), section.size()}};

    // The header: twelve 32-bit numbers.
    const uint32_t magic = in.u32("magic"), version = in.u32("version"), size = in.u32("size");
    if (magic != 0x6E6B6F74) fail("magic", magic, "is not 0x6e6b6f74 (\"tokn\")");
    if (version != 1) fail("version", version, "is not 1");
    if (size != section.size())
        fail("size", size, "but the section has " + std::to_string(section.size()) + " bytes");
    const uint32_t vocab = in.u32("vocab_size");
    if (vocab_size <= 0 || vocab != static_cast<uint32_t>(vocab_size)) {
        fail("vocab_size", vocab, "is not the model's " + std::to_string(vocab_size));
    }
    t.flags_ = in.u32("flags");
    if (t.flags_ > (kNfc | kIgnoreMerges | kAddBos | kHasChat | kSteps))
        fail("flags", t.flags_, "has unknown bits");
    t.has_chat_ = t.flags_ & kHasChat;
    const uint32_t bos_id = in.u32("bos_id");
    if (bos_id != 0xFFFFFFFF && bos_id >= vocab) fail("bos_id", bos_id, "is not an id");
    if (bos_id == 0xFFFFFFFF && t.flags_ & kAddBos) fail("flags", t.flags_, "asks for BOS without a bos_id");
    t.bos_id_ = static_cast<int>(bos_id);
    const uint32_t n_merges = in.u32("n_merges"), n_added = in.u32("n_added");
    const uint32_t pattern_size = in.u32("pattern_size"), word_pattern_size = in.u32("word_pattern_size");
    const uint32_t chat_size = in.u32("chat_size"), bytes_size = in.u32("bytes_size");

    // Where each token's bytes start. The bytes themselves come later.
    const std::string_view offsets = in.take(4 * (uint64_t{vocab} + 1), "vocab_size");
    t.offsets_.resize(size_t{vocab} + 1);
    for (size_t i = 0; i <= vocab; i++) {
        t.offsets_[i] = Reader::read_u32(offsets.data() + 4 * i);
        const uint32_t low = i == 0 ? 0 : t.offsets_[i - 1], high = i == 0 ? 0 : bytes_size;
        if (t.offsets_[i] < low || t.offsets_[i] > high) {
            fail("offsets[" + std::to_string(i) + "]", t.offsets_[i],
                 "is not in " + std::to_string(low) + ".." + std::to_string(high));
        }
    }
    if (t.offsets_[vocab] != bytes_size) fail("bytes_size", bytes_size, "is not where the last token ends");

    const auto check_size = [&](const char* field, uint32_t value, uint32_t most) {
        if (value > most) fail(field, value, "is more than " + std::to_string(most));
    };
    check_size("pattern_size", pattern_size, max_pattern_bytes);
    check_size("word_pattern_size", word_pattern_size, max_pattern_bytes);
    check_size("chat_size", chat_size, max_chat_bytes);
    Reader merges{in.take(12 * uint64_t{n_merges}, "n_merges")};
    Reader added{in.take(8 * uint64_t{n_added}, "n_added")};
    const std::string_view token_flags = in.take(vocab, "vocab_size");
    t.token_flags_.assign(token_flags.begin(), token_flags.end());
    t.bytes_ = in.take(bytes_size, "bytes_size");
    const std::string_view pattern = in.take(pattern_size, "pattern_size");
    const std::string_view word_pattern = in.take(word_pattern_size, "word_pattern_size");
    const std::string_view chat = in.take(chat_size, "chat_size");
    if (!in.rest.empty()) fail("size", size, "leaves " + std::to_string(in.rest.size()) + " bytes over");

    t.byte_ids_.fill(-1);
    for (int id = 0; id < t.vocab_size(); id++) {
        const uint8_t f = t.token_flags_[id];
        const std::string_view bytes = t.token_bytes(id);
        if (bytes.size() > max_token_bytes) {
            fail("token " + std::to_string(id) + " of", bytes.size(),
                 "bytes is longer than " + std::to_string(max_token_bytes));
        }
        if (f > (kDefined | kWord | kSpecial) || (f != 0 && !(f & kDefined)) ||
            bytes.empty() == ((f & kDefined) != 0)) {
            fail("token_flags[" + std::to_string(id) + "]", f,
                 "does not fit a token of " + std::to_string(bytes.size()) + " bytes");
        }
        if (bytes.size() == 1 && f & kWord) t.byte_ids_[static_cast<uint8_t>(bytes[0])] = id;
    }
    t.read_merges(merges, n_merges);
    if (t.flags_ & kIgnoreMerges) {
        t.words_.assign(slots_for(vocab), -1);
        for (int id = 0; id < t.vocab_size(); id++) {
            if (t.token_flags_[id] & kWord) t.words_[t.word_slot(t.token_bytes(id))] = id;
        }
    }

    t.read_steps(pattern);
    Reader::check_text(word_pattern, "word_pattern");
#ifndef NO_TOKENIZER
    if (!word_pattern.empty()) t.word_pattern_.compile(word_pattern, "word_pattern");
#endif

    t.read_added(added, n_added, !word_pattern.empty());
    if (t.has_chat_) t.read_chat(chat);
    if (!t.has_chat_ && chat_size != 0) fail("chat_size", chat_size, "but the flags say there is no chat");
    return t;
}

inline void Tokenizer::read_added(SectionReader& in, uint32_t n_added, bool has_word_pattern) {
    std::vector<std::pair<AddedToken, std::string>> raw, normalized;
    std::vector<bool> seen(token_flags_.size());
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n_added; i++) {
        const uint32_t id = in.u32("added id"), f = in.u32("added flags");
        const auto fail = [&](const char* field, uint64_t value, const std::string& what) {
            SectionReader::fail("added[" + std::to_string(i) + "]." + field, value, what);
        };
        if (id >= seen.size()) fail("id", id, "is not below " + std::to_string(seen.size()));
        if (f > 31) fail("flags", f, "has unknown bits");
        if (f & AddedToken::single_word && !has_word_pattern) fail("flags", f, "needs a word_pattern");
        std::string text(token_bytes(static_cast<int>(id)));
        if (text.empty()) fail("id", id, "is a token without text");
        if (seen[id]) fail("id", id, "is there twice");
        seen[id] = true;
        bytes += text.size();
        if (bytes > max_added_bytes)
            fail("id", id,
                 "makes added tokens longer than " + std::to_string(max_added_bytes) + " bytes in all");
        SectionReader::check_text(text, "added token");
#ifndef NO_TOKENIZER
        if (f & AddedToken::normalized && flags_ & kNfc) text = nfc(text);
#endif
        longest_added_ = std::max(longest_added_, text.size());
        added_flags_ |= f;
        (f & AddedToken::normalized ? normalized : raw)
            .emplace_back(AddedToken{.id = static_cast<int>(id), .flags = f}, std::move(text));
    }
    raw_tokens_.build(std::move(raw));
    normalized_tokens_.build(std::move(normalized));
}

// Merges are stored by rank, lowest first: left id, right id, id of the result.
inline void Tokenizer::read_merges(SectionReader& in, uint32_t n_merges) {
    merges_.resize(slots_for(n_merges));
    uint64_t bytes = 0;  // of the results
    for (uint32_t rank = 0; rank < n_merges; rank++) {
        const auto fail = [&](uint32_t id, const char* what) {
            SectionReader::fail("merges[" + std::to_string(rank) + "]", id, what);
        };
        // The table does not fit into the caches, so slots are asked for some merges ahead.
        constexpr size_t ahead = 8 * 12;
        if (in.rest.size() >= ahead + 12) {
            const char* later = in.rest.data() + ahead;
            const uint32_t later_left = SectionReader::read_u32(later),
                           later_right = SectionReader::read_u32(later + 4);
            __builtin_prefetch(
                &merges_[first_slot(static_cast<int>(later_left), static_cast<int>(later_right))]);
        }
        const uint32_t left = in.u32("merge"), right = in.u32("merge"), merged = in.u32("merge");
        for (const uint32_t id : {left, right, merged}) {
            if (id >= token_flags_.size() || !(token_flags_[id] & kWord)) {
                fail(id, "is not a token that words consist of");
            }
        }
        const std::string_view a = token_bytes(static_cast<int>(left)),
                               b = token_bytes(static_cast<int>(right)),
                               ab = token_bytes(static_cast<int>(merged));
        bytes += ab.size();
        if (bytes > max_merge_bytes + 256 * uint64_t{n_merges}) fail(merged, "makes merges too long in all");
        if (ab.size() != a.size() + b.size() || !ab.starts_with(a) || !ab.ends_with(b)) {
            fail(merged, "is not its two parts put together");
        }
        Merge& slot = merges_[merge_slot(static_cast<int>(left), static_cast<int>(right))];
        if (slot.left >= 0) fail(left, "and its partner repeat");
        slot = {static_cast<int>(left), static_cast<int>(right), static_cast<int>(merged), rank};
    }
}

// Steps are stored in the order in which they cut: flags, length of the pattern, the pattern. Without kSteps
// the bytes are the one step's pattern, and if there are none text is not cut.
inline void Tokenizer::read_steps(std::string_view bytes) {
    SectionReader in{bytes};
    const auto add = [&](uint32_t flags, std::string_view pattern) {
        SectionReader::check_text(pattern, "pattern");
        SplitStep& step = steps_.emplace_back();
        step.flags = flags;
#ifndef NO_TOKENIZER
        step.pattern.compile(pattern, "pattern");
#endif
    };
    if (!(flags_ & kSteps)) {
        if (!bytes.empty()) add(0, bytes);
        return;
    }
    while (!in.rest.empty()) {
        if (steps_.size() == SplitStep::kMost) {
            SectionReader::fail("pattern_size", bytes.size(), "holds more than 16 steps");
        }
        const uint32_t flags = in.u32("pattern flags");
        if (flags > SplitStep::kDropGaps) SectionReader::fail("pattern flags", flags, "has unknown bits");
        add(flags, in.take(in.u32("pattern"), "pattern of"));
    }
}

inline void Tokenizer::read_chat(std::string_view bytes) {
    SectionReader in{bytes};
    chat_.flags = in.u32("chat.flags");
    if (chat_.flags > 255) SectionReader::fail("chat.flags", chat_.flags, "has unknown bits");
    for (std::string* piece : chat_.pieces()) {
        *piece = in.take(in.u32("chat literal"), "chat literal of");
        SectionReader::check_text(*piece, "chat literal");
    }
    if (!in.rest.empty()) SectionReader::fail("chat_size", bytes.size(), "leaves bytes over");
}
