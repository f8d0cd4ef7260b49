// What a tokenizer section has (docs/tokenizer.md: its bytes), read and checked: tokens, merges, added
// tokens, the pre-tokenizer's patterns, the chat template. The section is written by export/tokenizer.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/chat_template.h"
#include "engine/text/pre_tokenizer.h"
#include "engine/text/utf8.h"

// Sizes that no real tokenizer comes near. They bound the work and the memory that a small file can ask for.
constexpr uint32_t max_token_bytes = 1 << 14;    // printed each time the token is generated
constexpr uint32_t max_merge_bytes = 1 << 24;    // of all merged tokens, and 256 more for each merge
constexpr uint32_t max_added_bytes = 1 << 10;    // of an added token: compared with a text in many places
constexpr uint32_t max_pattern_bytes = 1 << 14;  // each takes time at every byte of a text
constexpr uint32_t max_chat_bytes = 1 << 20;     // repeated in every turn

// A hash function drawn at random, so that no file can be made whose keys collide in it: the upper half of a
// x + b mod 2^128 with random a and b. Over the draw, the hashes of any two numbers are independent and
// uniform (Dietzfelbinger, "Universal hashing and k-wise independence via integer arithmetic without primes",
// 1996), so any two fall into the same of n slots with probability 1/n.
class RandomHash {
  public:
    uint64_t operator()(uint64_t x) const { return uint64_t((a_ * x + b_) >> 64); }

    uint64_t operator()(std::string_view s) const {
        uint64_t h = (*this)(s.size());
        for (size_t i = 0; i < s.size(); i += 8) {
            uint64_t eight = 0;
            std::memcpy(&eight, s.data() + i, std::min<size_t>(8, s.size() - i));
            h = (*this)(h ^ eight);
        }
        return h;
    }

  private:
    static unsigned __int128 draw() {
        std::random_device random;  // 32 bits a call
        unsigned __int128 bits = 0;
        for (int i = 0; i < 4; i++) bits = bits << 32 | random();
        return bits;
    }
    unsigned __int128 a_ = draw(), b_ = draw();
};

// Hash tables with open addressing: a power of two of slots, for up to half as many keys. A key is searched
// for from the slot of its hash on, up to its own or an empty one, which is_end(slot) tells.
inline size_t slots_for(size_t n) { return std::bit_ceil(std::max<size_t>(16, 2 * n)); }
template <class Slot, class IsEnd>
size_t find_slot(const std::vector<Slot>& table, uint64_t hash, IsEnd is_end) {
    size_t i = hash & (table.size() - 1);
    while (!is_end(table[i])) i = (i + 1) & (table.size() - 1);
    return i;
}

struct AddedToken {
    enum Flag : uint32_t { special = 1, normalized = 2, lstrip = 4, rstrip = 8, single_word = 16 };
    int id = 0;
    uint32_t flags = 0;
    std::string text;
};

// Finds added tokens, such as <|im_end|>, in a text.
class AddedTokens {
  public:
    // Texts are not empty; of tokens with the same text the first counts.
    explicit AddedTokens(std::vector<AddedToken> tokens = {}) : tokens_(std::move(tokens)) {
        std::stable_sort(tokens_.begin(), tokens_.end(), [](auto& x, auto& y) { return x.text < y.text; });
        const auto repeats = [](const auto& x, const auto& y) { return x.text == y.text; };
        tokens_.erase(std::unique(tokens_.begin(), tokens_.end(), repeats), tokens_.end());
        for (const AddedToken& t : tokens_) {
            is_first_[uint8_t(t.text[0])] = true;
            shorter_.push_back(longest_prefix(t.text, int(shorter_.size()) - 1));
        }
    }

    struct Found {
        size_t at = 0;
        const AddedToken* token = nullptr;
    };
    // Every place in `s` where a token starts, from left to right, each with the longest token there.
    std::vector<Found> find(std::string_view s) const {
        std::vector<Found> found;
        for (size_t i = 0; i < s.size(); i++) {
            if (!is_first_[uint8_t(s[i])]) continue;
            const std::string_view rest = s.substr(i);
            const auto before = [](auto& x, auto& t) { return x < t.text; };
            const auto behind = std::upper_bound(tokens_.begin(), tokens_.end(), rest, before);
            if (const int t = longest_prefix(rest, int(behind - tokens_.begin()) - 1); t >= 0)
                found.push_back({i, &tokens_[size_t(t)]});
        }
        return found;
    }

  private:
    // The longest token that `s` begins with; -1 if there is none. `last`: the last one that is sorted before
    // `s`, or -1. What is sorted between a beginning of `s` and `s` begins with it, too: so it is `last` or
    // one of those that `last` begins with.
    int longest_prefix(std::string_view s, int last) const {
        if (last < 0) return -1;
        const std::string& text = tokens_[size_t(last)].text;
        const auto n = std::mismatch(s.begin(), s.end(), text.begin(), text.end()).second - text.begin();
        while (last >= 0 && tokens_[size_t(last)].text.size() > size_t(n)) last = shorter_[size_t(last)];
        return last;
    }

    std::vector<AddedToken> tokens_;    // sorted by text
    std::vector<int> shorter_;          // of each, the longest other one that it begins with, or -1
    std::array<bool, 256> is_first_{};  // bytes that tokens begin with
};

// What holds of a sound section: if not, throws "tokenizer: " and the parts.
void require(bool is_sound, const auto&... parts) {
    if (!is_sound) fail("tokenizer: ", parts...);
}

// A cursor over the section. Every read is checked; numbers are little-endian at any alignment.
struct SectionReader {
    std::string_view rest;

    std::string_view take(uint64_t n, const char* field) {
        require(n <= rest.size(), field, " ", n, " bytes, but only ", rest.size(), " are left");
        const std::string_view taken = rest.substr(0, n);
        rest.remove_prefix(n);
        return taken;
    }
    uint32_t u32(const char* field, uint32_t most = UINT32_MAX) {
        uint32_t value;
        std::memcpy(&value, take(4, field).data(), 4);
        require(value <= most, field, " ", value, " is more than ", most);
        return value;
    }
    // n numbers, or arrays of numbers.
    template <class T>
    std::vector<T> array(uint64_t n, const char* field) {
        const std::string_view bytes = take(n * sizeof(T), field);
        std::vector<T> all(n);
        std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(all.data()));
        return all;
    }
    static void check_text(std::string_view text, const char* field) {
        const size_t valid = utf8_valid_prefix(text);
        require(valid == text.size(), field, " byte ", valid, " is not valid UTF-8");
    }
};

class Vocabulary {
  public:
    // Reads a section and keeps a copy of what it needs. `vocab_size` is the model's. Throws
    // std::runtime_error, "tokenizer: <field> <value> ...", for anything but a sound section.
    Vocabulary(std::span<const std::byte> section, int vocab_size) {
        SectionReader in{{reinterpret_cast<const char*>(section.data()), section.size()}};
        // The header: twelve 32-bit numbers.
        const uint32_t magic = in.u32("magic"), version = in.u32("version"), size = in.u32("size");
        require(magic == 0x6E6B6F74, "magic ", magic, " is not 0x6e6b6f74 (\"tokn\")");
        require(version == 1, "version ", version, " is not 1");
        require(size == section.size(), "size ", size, " but the section has ", section.size(), " bytes");
        const uint32_t vocab = in.u32("vocab_size");
        require(vocab_size > 0 && vocab == uint32_t(vocab_size), "vocab_size ", vocab, " is not the model's ",
                vocab_size);
        flags_ = in.u32("flags");
        require(flags_ < 2 * kSteps, "flags ", flags_, " has unknown bits");
        const uint32_t bos_id = in.u32("bos_id");
        bos_id_ = int(bos_id);
        require(bos_id < vocab || bos_id_ == -1, "bos_id ", bos_id, " is not an id");
        require(bos_id < vocab || !(flags_ & kAddBos), "flags ", flags_, " asks for BOS without a bos_id");
        const uint32_t n_merges = in.u32("n_merges"), n_added = in.u32("n_added");
        const uint32_t pattern_size = in.u32("pattern_size", max_pattern_bytes);
        const uint32_t word_pattern_size = in.u32("word_pattern_size", max_pattern_bytes);
        const uint32_t chat_size = in.u32("chat_size", max_chat_bytes), bytes_size = in.u32("bytes_size");

        // Where each token's bytes start. The bytes themselves come later.
        offsets_ = in.array<uint32_t>(uint64_t{vocab} + 1, "vocab_size");
        for (size_t i = 0; i <= vocab; i++) {
            const uint32_t low = i == 0 ? 0 : offsets_[i - 1], high = i == 0 ? 0 : bytes_size;
            require(offsets_[i] >= low && offsets_[i] <= high, "offsets[", i, "] ", offsets_[i],
                    " is not in ", low, "..", high);
        }
        require(offsets_[vocab] == bytes_size, "bytes_size ", bytes_size,
                " is not where the last token ends");

        const auto merges = in.array<std::array<int32_t, 3>>(n_merges, "n_merges");
        const auto added = in.array<std::array<uint32_t, 2>>(n_added, "n_added");
        token_flags_ = in.take(vocab, "vocab_size");
        bytes_ = in.take(bytes_size, "bytes_size");
        const SectionReader steps{in.take(pattern_size, "pattern_size")};
        const std::string_view word_pattern = in.take(word_pattern_size, "word_pattern_size");
        const SectionReader chat{in.take(chat_size, "chat_size")};
        require(in.rest.empty(), "size ", size, " leaves ", in.rest.size(), " bytes over");

        read_tokens();
        read_merges(merges);
        read_steps(steps);
        SectionReader::check_text(word_pattern, "word_pattern");
        if (!word_pattern.empty()) word_pattern_.compile(word_pattern, "word_pattern");
        read_added(added, !word_pattern.empty());
        if (has_chat()) read_chat(chat);
        require(has_chat() || chat_size == 0, "chat_size ", chat_size, " but the flags say there is no chat");
    }

    // The raw bytes of one token: maybe no whole character (see Utf8Stream), for an added token its name, and
    // nothing for an id that is not defined.
    std::string_view token_bytes(int id) const {
        if (id < 0 || id >= vocab_size()) return {};
        return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
    }
    // Special tokens steer the model (<|eot_id|>); their bytes are not for the reader.
    bool is_special(int id) const { return id >= 0 && id < vocab_size() && (token_flags_[id] & kSpecial); }
    int vocab_size() const { return int(token_flags_.size()); }
    int bos_id() const { return bos_id_; }  // -1: none
    bool has_chat() const { return (flags_ & kHasChat) != 0; }
    // The conversation as text for encode(text, false). Needs has_chat(); see chat_text() for the rest.
    std::string render_chat(std::span<const ChatMessage> messages, bool think, bool generation_prompt) const {
        if (!has_chat()) fail("chat: this model file has no chat template");
        return chat_text(chat_, messages, think, generation_prompt);
    }

  protected:
    static constexpr uint32_t kNfc = 1, kIgnoreMerges = 2, kAddBos = 4, kHasChat = 8, kSteps = 16;
    static constexpr uint8_t kDefined = 1, kWord = 2, kSpecial = 4;  // a token's flags
    static constexpr uint32_t kNoRank = 0xFFFFFFFF;

    // A step of the pre-tokenizer: cuts a piece of text at the matches of a pattern.
    struct SplitStep {
        bool drops_gaps;  // what no match covers is dropped
        AnchoredRegex pattern{};
    };
    // Merge `left right` -> `merged`; a lower rank goes first. An empty slot has left = -1.
    struct Merge {
        int32_t left = -1, right = -1, merged = -1;
        uint32_t rank = kNoRank;
    };
    // The slot of a pair or a word, or else the empty slot where it would go.
    size_t merge_slot(int32_t left, int32_t right) const {
        return find_slot(merges_, hash_of(left, right),
                         [&](const Merge& m) { return m.left < 0 || (m.left == left && m.right == right); });
    }
    size_t word_slot(std::string_view word) const {
        return find_slot(words_, hash_(word), [&](int32_t id) { return id < 0 || token_bytes(id) == word; });
    }

    uint32_t flags_ = 0;
    int bos_id_ = -1;
    ChatTemplate chat_;
    std::string bytes_;              // every token's bytes, one after the other
    std::vector<uint32_t> offsets_;  // (vocab_size + 1,) where each token starts in bytes_
    std::string token_flags_;        // (vocab_size,)
    std::array<int, 256> byte_ids_;  // the token of each single byte, -1 if there is none
    RandomHash hash_;
    std::vector<Merge> merges_;                   // a hash table by left and right
    std::vector<int32_t> words_;                  // ids, a hash table by their bytes; only for kIgnoreMerges
    AddedTokens raw_tokens_, normalized_tokens_;  // found before normalizing, and after
    std::vector<SplitStep> steps_;
    AnchoredRegex word_pattern_;

  private:
    uint64_t hash_of(int32_t left, int32_t right) const {
        return hash_(uint64_t{uint32_t(left)} << 32 | uint32_t(right));
    }

    void read_tokens() {
        byte_ids_.fill(-1);
        if (flags_ & kIgnoreMerges) words_.assign(slots_for(token_flags_.size()), -1);
        for (int id = 0; id < vocab_size(); id++) {
            const unsigned f = uint8_t(token_flags_[id]);
            const std::string_view bytes = token_bytes(id);
            const size_t n = bytes.size();
            require(n <= max_token_bytes, "token ", id, " of ", n, " bytes is longer than ", max_token_bytes);
            require(f == 0 ? n == 0 : n > 0 && f & kDefined && f < 2 * kSpecial, "token_flags[", id, "] ", f,
                    " does not fit a token of ", n, " bytes");
            if (!(f & kWord)) continue;
            if (n == 1) byte_ids_[uint8_t(bytes[0])] = id;
            if (flags_ & kIgnoreMerges) words_[word_slot(bytes)] = id;
        }
    }

    // Merges are stored by rank, lowest first: left id, right id, id of the result.
    void read_merges(const std::vector<std::array<int32_t, 3>>& stored) {
        merges_.resize(slots_for(stored.size()));
        uint64_t bytes = 0;  // of the results
        for (uint32_t rank = 0; rank < stored.size(); rank++) {
            const auto check_id = [&](bool is_sound, int32_t id, const char* what) {
                require(is_sound, "merges[", rank, "] ", uint32_t(id), what);
            };
            const auto [left, right, merged] = stored[rank];
            for (const int32_t id : stored[rank])
                check_id(uint32_t(id) < token_flags_.size() && token_flags_[id] & kWord, id,
                         " is not a token that words consist of");
            const std::string_view a = token_bytes(left), b = token_bytes(right), ab = token_bytes(merged);
            bytes += ab.size();
            check_id(bytes <= max_merge_bytes + 256 * uint64_t{stored.size()}, merged,
                     " makes merges too long in all");
            check_id(ab.size() == a.size() + b.size() && ab.starts_with(a) && ab.ends_with(b), merged,
                     " is not its two parts put together");
            Merge& slot = merges_[merge_slot(left, right)];
            check_id(slot.left < 0, left, " and its partner repeat");
            slot = {left, right, merged, rank};
        }
    }

    // Steps are stored in the order in which they cut: flags, length of the pattern, the pattern. Without
    // kSteps the bytes are the one step's pattern, and if there are none text is not cut.
    void read_steps(SectionReader in) {
        const size_t n_bytes = in.rest.size();
        const bool are_listed = (flags_ & kSteps) != 0;
        while (!in.rest.empty()) {
            require(steps_.size() < 16, "pattern_size ", n_bytes, " holds more than 16 steps");
            const uint32_t flags = are_listed ? in.u32("pattern flags") : 0;
            require(flags <= 1, "pattern flags ", flags, " has unknown bits");
            const std::string_view pattern = in.take(are_listed ? in.u32("pattern") : n_bytes, "pattern of");
            SectionReader::check_text(pattern, "pattern");
            steps_.push_back({flags == 1});
            steps_.back().pattern.compile(pattern, "pattern");
        }
    }

    void read_added(const std::vector<std::array<uint32_t, 2>>& stored, bool has_word_pattern) {
        std::vector<AddedToken> raw, normalized;
        std::vector<bool> seen(token_flags_.size());
        for (size_t i = 0; i < stored.size(); i++) {
            const uint32_t id = stored[i][0], f = stored[i][1];
            const auto check_id = [&](bool is_sound, const auto&... what) {
                require(is_sound, "added[", i, "].id ", id, what...);
            };
            check_id(id < seen.size(), " is not below ", seen.size());
            require(f <= 31, "added[", i, "].flags ", f, " has unknown bits");
            require(!(f & AddedToken::single_word) || has_word_pattern, "added[", i, "].flags ", f,
                    " needs a word_pattern");
            std::string text(token_bytes(int(id)));
            check_id(!text.empty(), " is a token without text");
            check_id(!seen[id], " is there twice");
            seen[id] = true;
            check_id(text.size() <= max_added_bytes, " is a token longer than ", max_added_bytes, " bytes");
            SectionReader::check_text(text, "added token");
            const bool is_normalized = (f & AddedToken::normalized) != 0;
            if (is_normalized && flags_ & kNfc) text = nfc(text);
            (is_normalized ? normalized : raw).push_back({int(id), f, std::move(text)});
        }
        raw_tokens_ = AddedTokens(std::move(raw));
        normalized_tokens_ = AddedTokens(std::move(normalized));
    }

    void read_chat(SectionReader in) {
        const size_t n_bytes = in.rest.size();
        chat_.flags = in.u32("chat.flags");
        require(chat_.flags <= 511, "chat.flags ", chat_.flags, " has unknown bits");
        for (std::string& piece : chat_.pieces) {
            piece = in.take(in.u32("chat literal"), "chat literal of");
            SectionReader::check_text(piece, "chat literal");
        }
        require(in.rest.empty(), "chat_size ", n_bytes, " leaves bytes over");
    }
};
