// Text <-> token ids: a byte-level BPE tokenizer (Llama 3, Qwen3, GPT-2 style), read from the tokenizer
// section of a model file, with ids equal to those of Hugging Face `tokenizers` for any input.
//
//   bytes -> valid UTF-8 -> added tokens -> NFC -> added tokens -> regex split -> byte-level BPE -> ids
//
// The section is written by export/tokenizer.py; its byte layout and every step above, with a worked
// example, are in docs/tokenizer.md. This file has the class; tokenizer_section.h reads the section, encode.h
// makes ids of text.
//
// Not here: training, offsets, other models than BPE, other normalizers than NFC. The exporter refuses those.
//
// Needs PCRE2 (the regular expression) and utf8proc (NFC). With -DNO_TOKENIZER neither is used, and encode()
// throws; everything else works.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/added_tokens.h"
#include "engine/text/chat_template.h"
#include "engine/text/random_hash.h"
#include "engine/text/regex.h"

class Tokenizer {
  public:
    // Reads a tokenizer section (docs/tokenizer.md) and keeps a copy of what it needs. `vocab_size` is the
    // model's. Throws std::runtime_error, "tokenizer: <field> <value> ...", for anything but a sound section.
    static Tokenizer load(std::span<const std::byte> section, int vocab_size);

    // Text, any bytes, to ids, as Hugging Face's encode() of bytes.decode(errors="replace"); tokens such as
    // <|eot_id|> inside the text become their ids. `add_bos` puts the BOS id first, if this tokenizer does
    // so. Throws std::runtime_error if the section's pattern explodes on this text (no real model's does).
    std::vector<int> encode(std::string_view text, bool add_bos) const;

    // Of a text that goes on, `text` (valid UTF-8) is the beginning. Appends the ids of as much of it as is
    // sure whatever follows, and returns how many bytes that is; the ids of the rest are those of the rest by
    // itself. 0: more has to be read.
    size_t encode_beginning(std::string_view text, std::vector<int>& ids) const;

    // A text (valid UTF-8) of more than n times as many bytes is more than n ids. 0: there is no such number,
    // as parts of a text may be no ids: bytes without a token, what a step drops, white space beside an added
    // token.
    size_t most_bytes_per_id() const;

    // The raw bytes of one token: maybe no whole character (see Utf8Stream), for an added token its name, and
    // nothing for an id that the tokenizer does not define.
    std::string_view token_bytes(int id) const {
        if (id < 0 || id >= vocab_size()) return {};
        return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
    }
    // Special tokens steer the model (<|eot_id|>); their bytes are not for the reader.
    bool is_special(int id) const { return id >= 0 && id < vocab_size() && (token_flags_[id] & kSpecial); }
    bool has_chat() const { return has_chat_; }
    // The conversation as text for encode(text, false). Needs has_chat(); see chat_text() for the rest.
    std::string render_chat(std::span<const ChatMessage> messages, bool think, bool generation_prompt) const {
        if (!has_chat_) throw std::runtime_error("chat: this model file has no chat template");
        return chat_text(chat_, messages, think, generation_prompt);
    }
    int vocab_size() const { return static_cast<int>(token_flags_.size()); }
    int bos_id() const { return bos_id_; }  // -1: none

  private:
    // the section's flags
    static constexpr uint32_t kNfc = 1, kIgnoreMerges = 2, kAddBos = 4, kHasChat = 8, kSteps = 16;
    static constexpr uint8_t kDefined = 1, kWord = 2, kSpecial = 4;  // a token's flags

    // A step of the pre-tokenizer: cuts a piece of text at the matches of a pattern.
    struct SplitStep {
        static constexpr uint32_t kDropGaps = 1;  // what no match covers is dropped
        static constexpr size_t kMost = 16;       // steps; DeepSeek's tokenizers have up to 5
        uint32_t flags = 0;
#ifndef NO_TOKENIZER
        AnchoredRegex pattern;
#endif
    };

    static constexpr uint32_t kNoRank = 0xFFFFFFFF;
    static constexpr size_t kShortWord = 48;  // bytes up to which the quadratic merge loop is the faster one

    // Merge `left right` -> `merged`; a lower rank goes first. A slot of the hash table is empty at left =
    // -1.
    struct Merge {
        int32_t left = -1, right = -1, merged = -1;
        uint32_t rank = kNoRank;
    };

    uint32_t flags_ = 0;
    int bos_id_ = -1;
    bool has_chat_ = false;
    ChatTemplate chat_;
    std::string bytes_;                 // every token's bytes, one after the other
    std::vector<uint32_t> offsets_;     // (vocab_size + 1,) where each token starts in bytes_
    std::vector<uint8_t> token_flags_;  // (vocab_size,)
    std::array<int, 256> byte_ids_;     // the token of each single byte, -1 if there is none
    RandomHash hash_;
    std::vector<Merge> merges_;   // open addressing, a power of two of slots
    std::vector<int32_t> words_;  // ids by the hash of their bytes, the same way; only for kIgnoreMerges
    AddedTokens raw_tokens_, normalized_tokens_;  // found before normalizing, and after
    size_t longest_added_ = 0;                    // bytes that one of them is found by
    uint32_t added_flags_ = 0;                    // that some of them have
    std::vector<SplitStep> steps_;
#ifndef NO_TOKENIZER
    AnchoredRegex word_pattern_;
#endif

    // Where the search for a pair begins.
    size_t first_slot(int32_t left, int32_t right) const {
        const uint64_t pair =
            static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
        return hash_(pair) & (merges_.size() - 1);
    }
    // The slot of a pair or a word, or else the empty slot where it would go.
    size_t merge_slot(int32_t left, int32_t right) const {
        size_t slot = first_slot(left, right);
        while (merges_[slot].left >= 0 && (merges_[slot].left != left || merges_[slot].right != right)) {
            slot = (slot + 1) & (merges_.size() - 1);
        }
        return slot;
    }
    size_t word_slot(std::string_view word) const {
        size_t slot = hash_(word) & (words_.size() - 1);
        while (words_[slot] >= 0 && token_bytes(words_[slot]) != word)
            slot = (slot + 1) & (words_.size() - 1);
        return slot;
    }
    const Merge& find_merge(int32_t left, int32_t right) const { return merges_[merge_slot(left, right)]; }
    static size_t slots_for(size_t n) {
        size_t slots = 16;
        while (slots < 2 * n) slots *= 2;
        return slots;
    }

    struct SectionReader;
    void read_merges(SectionReader& in, uint32_t n_merges);
    void read_added(SectionReader& in, uint32_t n_added, bool has_word_pattern);
    void read_steps(std::string_view bytes);
    void read_chat(std::string_view bytes);

#ifndef NO_TOKENIZER
    template <typename Text, typename Token>
    void split_added(const AddedTokens& tokens, std::string_view s, RegexBudget& budget, Text on_text,
                     Token on_token) const;
    bool is_word_char(std::string_view character, RegexBudget& budget) const;
    // The last place in a piece that goes on where a word has surely begun, and the ids before it.
    struct Sure {
        size_t bytes = 0, n_ids = 0;
    };
    void encode_text(std::string_view s, RegexBudget& budget, std::vector<int>& ids,
                     Sure* sure = nullptr) const;
    void split(std::string_view piece, size_t step, std::span<RegexMatcher> matchers, std::vector<int>& ids,
               Sure* sure = nullptr) const;
    void encode_word(std::string_view word, std::vector<int>& ids) const;
    void merge_short(std::vector<int>& ids, size_t start) const;
    void merge_long(std::vector<int>& ids, size_t start) const;
#endif
};

#include "engine/text/tokenizer_section.h"
// (after the class, whose members they define)
#include "engine/text/encode.h"
