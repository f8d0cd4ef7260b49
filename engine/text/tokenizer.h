// Text <-> token ids: a byte-level BPE tokenizer (Llama 3, Qwen3, GPT-2 style), read from the tokenizer
// section of a model file, with ids equal to those of Hugging Face `tokenizers` for any input.
//
//   bytes -> valid UTF-8 -> added tokens -> NFC -> added tokens -> regex split -> byte-level BPE -> ids
//
// Every step, with a worked example, is in docs/tokenizer.md. Not here: training, offsets, other models than
// BPE, other normalizers than NFC. The exporter refuses those. With -DNO_TOKENIZER, without PCRE2 and
// utf8proc, encode() throws; everything else works.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/pre_tokenizer.h"
#include "engine/text/utf8.h"
#include "engine/text/vocabulary.h"

class Tokenizer : public Vocabulary {
  public:
    using Vocabulary::Vocabulary;

    // Text, any bytes, to ids, as Hugging Face's encode() of bytes.decode(errors="replace"); tokens such as
    // <|eot_id|> inside the text become their ids. `add_bos` puts the BOS id first, if this tokenizer does
    // so. Throws std::runtime_error if the section's pattern explodes on this text (no real model's does).
    std::vector<int> encode(std::string_view text, bool add_bos) const {
#ifdef NO_TOKENIZER
        fail("tokenizer: built without PCRE2 and utf8proc (TOKENIZER=0), so it takes ids only");
#endif
        std::vector<int> ids;
        if (add_bos && flags_ & kAddBos) ids.push_back(bos_id_);
        std::string repaired;
        if (utf8_valid_prefix(text) != text.size()) text = repaired = utf8_replace_invalid(text);
        RegexBudget budget(text.size());
        split_added(raw_tokens_, text, budget, ids, [&](std::string_view s) {
            std::string normal;
            if (flags_ & kNfc) s = normal = nfc(s);
            split_added(normalized_tokens_, s, budget, ids,
                        [&](std::string_view t) { split(t, 0, budget, ids); });
        });
        return ids;
    }

  private:
    // Cuts `s` at the added tokens in it, whose ids it appends: on_text(stretch) for what is between them. Of
    // the tokens that match at one place the longest is taken. This follows `find_matches` of Hugging Face's
    // added_vocabulary.rs, also where that is peculiar: the search goes on behind a token's own text, not
    // behind the white space that `rstrip` takes along, and behind a token that `single_word` turns down.
    template <typename Text>
    void split_added(const AddedTokens& tokens, std::string_view s, RegexBudget& budget,
                     std::vector<int>& ids, Text on_text) const {
        size_t done = 0;                          // everything before it has been handed out
        size_t searched = 0;                      // tokens that start before it are not looked at
        size_t spaces_start = 0, spaces_end = 0;  // the last white space that `rstrip` has measured
        for (const auto& [at, token] : tokens.find(s)) {
            if (at < searched) continue;
            size_t start = at, stop = searched = at + token->text.size();
            if (token->flags & AddedToken::single_word) {
                const bool word_before = start > 0 && is_word_char(utf8_last(s.substr(0, start)), budget);
                if (word_before || (stop < s.size() && is_word_char(s.substr(stop), budget))) continue;
            }
            if (token->flags & AddedToken::lstrip) {
                const size_t stretch = start - std::min(start, done);
                start = done + without_trailing(s.substr(done, stretch), is_white_space).size();
            }
            if (token->flags & AddedToken::rstrip) {
                if (stop < spaces_start || stop > spaces_end) {
                    spaces_start = stop;
                    spaces_end = s.size() - without_leading(s.substr(stop), is_white_space).size();
                }
                stop = spaces_end;
            }
            if (done < start) on_text(s.substr(done, start - done));
            ids.push_back(token->id);
            done = stop;
        }
        if (done < s.size()) on_text(s.substr(done));
    }

    // Whether the first character of `s` may be part of a word (\w of Rust's regular expressions).
    bool is_word_char(std::string_view s, RegexBudget& budget) const {
        return word_pattern_.match(s.substr(0, utf8_first(s).length), 0, budget) > 0;
    }

    // Cuts a piece of normalized text at the matches of the step's pattern, which sees no more than the
    // piece; each part goes on to the next step, and what the last one leaves is a word. What no match covers
    // is a part too ("isolated" in Hugging Face's terms), unless the step drops it. An empty match also cuts,
    // but one right behind the last match does not count.
    void split(std::string_view piece, size_t step, RegexBudget& budget, std::vector<int>& ids) const {
        if (step == steps_.size()) return encode_word(piece, ids);
        const auto& [drops_gaps, pattern] = steps_[step];
        const auto part = [&](size_t from, size_t to) {
            if (from < to) split(piece.substr(from, to - from), step + 1, budget, ids);
        };
        size_t start = 0;           // of the text not yet handed on
        bool just_matched = false;  // a match ended at `i`
        for (size_t i = 0; i < piece.size();) {
            const ptrdiff_t end = pattern.match(piece, i, budget);
            if (end < 0 || (just_matched && size_t(end) == i)) {
                i += utf8_first(piece.substr(i)).length;
                just_matched = false;
                continue;
            }
            if (!drops_gaps) part(start, i);
            part(i, size_t(end));
            start = i = size_t(end);
            just_matched = true;
        }
        if (!drops_gaps) part(start, piece.size());
    }

    void encode_word(std::string_view word, std::vector<int>& ids) const {
        if (flags_ & kIgnoreMerges)
            if (const int id = words_[word_slot(word)]; id >= 0) return ids.push_back(id);
        const size_t start = ids.size();
        for (const char c : word) {
            // A byte without a token vanishes, as in Hugging Face's BPE without an unk_token.
            if (const int id = byte_ids_[uint8_t(c)]; id >= 0) ids.push_back(id);
        }
        const std::span<int> of_word = std::span(ids).subspan(start);
        ids.resize(start + merge(of_word));
    }

    // Byte-pair encoding: again and again, of all neighbours that may merge, the pair with the lowest rank
    // does, the leftmost of equals. Takes O(n log n) steps for n ids, in a linked list of them (-1: merged
    // into the one on its left) and a heap of the merges that were possible when they were pushed; one whose
    // ids have changed since is skipped. Returns how many stay.
    size_t merge(std::span<int> id) const {
        using Candidate = std::array<uint32_t, 3>;  // rank, and the positions of left and right
        if (id.size() > UINT32_MAX) fail("tokenizer: a word of 4 GiB");
        const auto n = uint32_t(id.size()), none = n;
        std::vector<uint32_t> next(n), previous(n);
        std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
        const auto push = [&](uint32_t left, uint32_t right) {
            if (left == none || right == none) return;
            const uint32_t rank = merges_[merge_slot(id[left], id[right])].rank;
            if (rank != kNoRank) heap.push({rank, left, right});
        };
        for (uint32_t i = 0; i < n; i++) next[i] = i + 1, previous[i] = i > 0 ? i - 1 : none;
        for (uint32_t i = 0; i + 1 < n; i++) push(i, i + 1);
        while (!heap.empty()) {
            const auto [rank, left, right] = heap.top();
            heap.pop();
            if (id[left] < 0 || next[left] != right) continue;
            const Merge& merge = merges_[merge_slot(id[left], id[right])];
            if (merge.rank != rank) continue;
            id[left] = merge.merged;
            id[right] = -1;
            next[left] = next[right];
            if (next[left] != none) previous[next[left]] = left;
            push(previous[left], left);
            push(left, next[left]);
        }
        return size_t(std::remove(id.begin(), id.end(), -1) - id.begin());
    }
};
