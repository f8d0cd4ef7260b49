// Text to ids: added tokens, the pre-tokenizer's pattern, and byte-pair encoding of each word. Part of
// tokenizer.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/nfc.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

#ifdef NO_TOKENIZER
inline std::vector<int> Tokenizer::encode(std::string_view, bool) const {
    throw std::runtime_error(
        "tokenizer: built without PCRE2 and utf8proc (TOKENIZER=0), so it takes ids only");
}
inline size_t Tokenizer::encode_beginning(std::string_view, std::vector<int>&) const { return 0; }
inline size_t Tokenizer::most_bytes_per_id() const { return 0; }
#else
inline std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos) const {
    std::vector<int> ids;
    if (add_bos && flags_ & kAddBos) ids.push_back(bos_id_);
    std::string repaired;
    if (utf8_valid_prefix(text) != text.size()) text = repaired = utf8_replace_invalid(text);
    RegexBudget budget(text.size());

    const auto push = [&](int id) { ids.push_back(id); };
    const auto encode_normalized = [&](std::string_view s) { encode_text(s, budget, ids); };
    const auto normalize = [&](std::string_view s) {
        if (flags_ & kNfc) {
            const std::string normal = nfc(s);
            split_added(normalized_tokens_, normal, budget, encode_normalized, push);
        } else {
            split_added(normalized_tokens_, s, budget, encode_normalized, push);
        }
    };
    split_added(raw_tokens_, text, budget, normalize, push);
    return ids;
}

// Every step of encode(), as far as nothing that may follow can change what it does.
inline size_t Tokenizer::encode_beginning(std::string_view text, std::vector<int>& ids) const {
    constexpr uint32_t looks_around = AddedToken::lstrip | AddedToken::rstrip | AddedToken::single_word;
    if (steps_.empty() || steps_[0].pattern.anchored || added_flags_ & looks_around) return 0;
    const auto sure_end = [&](std::string_view s) {  // an added token that begins behind it may be cut off
        size_t end = s.size() - std::min(s.size(), longest_added_);
        while (end > 0 && end < s.size() && (s[end] & 0xC0) == 0x80) end--;
        return end;
    };
    const auto end_of_added = [&](const AddedTokens& tokens, std::string_view s) {  // of the last sure one
        const std::vector<AddedTokens::Found> found = tokens.find_backwards(s);
        size_t end = 0;
        for (auto f = found.rbegin(); f != found.rend() && f->at < sure_end(s); ++f)
            if (f->at >= end) end = f->at + f->token->size;
        return end;
    };
    const auto between = [](std::string_view s, size_t begin, size_t end) {
        return s.substr(begin, std::max(begin, end) - begin);
    };

    const size_t start = end_of_added(raw_tokens_, text);
    const std::vector<int> before = encode(text.substr(0, start), false);
    ids.insert(ids.end(), before.begin(), before.end());
    const size_t n_before = ids.size();
    std::string_view stretch = between(text, start, sure_end(text)), normal = stretch;
    std::string normalized;
    if (flags_ & kNfc) {  // as far as it may be cut in front of an ASCII character
        while (!stretch.empty() && static_cast<uint8_t>(stretch.back()) >= 0x80) stretch.remove_suffix(1);
        if (!stretch.empty()) stretch.remove_suffix(1);
        normal = normalized = nfc(stretch);
    }
    RegexBudget budget(text.size());
    const size_t first = end_of_added(normalized_tokens_, normal);
    split_added(
        normalized_tokens_, normal.substr(0, first), budget,
        [&](std::string_view s) { encode_text(s, budget, ids); }, [&](int id) { ids.push_back(id); });
    const std::string_view piece = between(normal, first, sure_end(normal));
    Sure sure{0, n_before};
    encode_text(piece, budget, ids, &sure);
    ids.resize(sure.n_ids);
    if (sure.bytes == 0) return start;
    if (!(flags_ & kNfc)) return start + first + sure.bytes;
    // NFC neither makes nor changes a character up to U+0020: before the same one, the same text has been.
    const auto is_blank = [](char c) { return static_cast<uint8_t>(c) <= 0x20; };
    const std::string_view done = normal.substr(0, first + sure.bytes);
    size_t n = static_cast<size_t>(std::count_if(done.begin(), done.end(), is_blank));
    size_t end = 0;
    while (!is_blank(stretch[end]) || n-- > 0) end++;
    return start + end;
}

inline size_t Tokenizer::most_bytes_per_id() const {
    size_t most = longest_added_;
    bool drops = added_flags_ & (AddedToken::lstrip | AddedToken::rstrip);
    for (const SplitStep& step : steps_) drops = drops || step.flags & SplitStep::kDropGaps;
    for (int byte = 0; byte <= 0xF4; byte++)  // C0, C1 and F5 up are in no UTF-8
        drops = drops || (byte_ids_[static_cast<size_t>(byte)] < 0 && byte != 0xC0 && byte != 0xC1);
    for (int id = 0; id < vocab_size(); id++)
        if (token_flags_[id] & kWord) most = std::max(most, token_bytes(id).size());
    return drops ? 0 : most * (flags_ & kNfc ? most_bytes_per_nfc_byte : 1);
}

// Cuts `s` at the added tokens in it: on_text(stretch) for what is between them, on_token(id) for each. Of
// the tokens that match at one place the longest is taken. This follows `find_matches` of Hugging Face's
// added_vocabulary.rs, also where that is peculiar: the search goes on behind a token's own text, not behind
// the white space that `rstrip` takes along, and behind a token that `single_word` turns down.
template <typename Text, typename Token>
void Tokenizer::split_added(const AddedTokens& tokens, std::string_view s, RegexBudget& budget, Text on_text,
                            Token on_token) const {
    size_t done = 0;                          // everything before it has been handed out
    size_t searched = 0;                      // tokens that start before it are not looked at
    size_t spaces_start = 0, spaces_end = 0;  // the last white space that `rstrip` has measured
    const std::vector<AddedTokens::Found> found = tokens.find_backwards(s);
    for (auto f = found.rbegin(); f != found.rend(); ++f) {
        if (f->at < searched) continue;
        const AddedToken& token = *f->token;
        size_t start = f->at, stop = start + token.size;
        searched = stop;
        if (token.flags & AddedToken::single_word) {
            const bool word_before = start > 0 && is_word_char(utf8_last(s.substr(0, start)), budget);
            const bool word_after = stop < s.size() && is_word_char(s.substr(stop), budget);
            if (word_before || word_after) continue;
        }
        if (token.flags & AddedToken::lstrip) {
            start =
                done < start ? start - trailing_space(s.substr(done, start - done), is_white_space) : done;
        }
        if (token.flags & AddedToken::rstrip) {
            if (stop < spaces_start || stop > spaces_end) {
                spaces_start = stop;
                spaces_end = stop + leading_space(s.substr(stop), is_white_space);
            }
            stop = spaces_end;
        }
        if (done < start) on_text(s.substr(done, start - done));
        on_token(token.id);
        done = stop;
    }
    if (done < s.size()) on_text(s.substr(done));
}

// Whether the first character of `s` may be part of a word (\w of Rust's regular expressions).
inline bool Tokenizer::is_word_char(std::string_view s, RegexBudget& budget) const {
    const std::string_view character = s.substr(0, utf8_first(s).length);
    return RegexMatcher(word_pattern_, character, budget).match(0) > 0;
}

// Splits normalized text into words, as the steps of the pre-tokenizer say, and encodes each. `sure`: the
// text goes on.
inline void Tokenizer::encode_text(std::string_view s, RegexBudget& budget, std::vector<int>& ids,
                                   Sure* sure) const {
    std::vector<RegexMatcher> matchers;  // one per step, for all its pieces
    matchers.reserve(steps_.size());
    for (const SplitStep& step : steps_) matchers.emplace_back(step.pattern, s, budget);
    if (sure != nullptr) matchers[0].goes_on = true;
    split(s, 0, matchers, ids, sure);
}

// Cuts a piece of text at the matches of the step's pattern; each part goes on to the next step, and what the
// last one leaves is a word. What no match covers is a part too ("isolated" in Hugging Face's terms), unless
// the step drops it. An empty match also cuts, but one right behind the last match does not count.
inline void Tokenizer::split(std::string_view piece, size_t step, std::span<RegexMatcher> matchers,
                             std::vector<int>& ids, Sure* sure) const {
    if (step == steps_.size()) return encode_word(piece, ids);
    RegexMatcher& matcher = matchers[step];
    matcher.text = piece;  // the pattern sees no more than the piece
    const bool keep_gaps = !(steps_[step].flags & SplitStep::kDropGaps);
    const auto part = [&](size_t from, size_t to) {
        if (from < to) split(piece.substr(from, to - from), step + 1, matchers, ids);
    };
    size_t start = 0;           // of the text not yet handed on
    bool just_matched = false;  // a match ended at `i`
    for (size_t i = 0; i < piece.size();) {
        const ptrdiff_t end = matcher.match(i);
        if (end == RegexMatcher::undecided) return;
        if (end < 0 || (just_matched && static_cast<size_t>(end) == i)) {
            i += utf8_first(piece.substr(i)).length;
            just_matched = false;
            continue;
        }
        if (keep_gaps) part(start, i);
        part(i, static_cast<size_t>(end));
        start = i = static_cast<size_t>(end);
        just_matched = true;
        // In NFC the place has to be found in the text as it was: see encode_beginning().
        const bool blank = i < piece.size() && static_cast<uint8_t>(piece[i]) <= 0x20;
        if (sure != nullptr && (blank || !(flags_ & kNfc))) *sure = {i, ids.size()};
    }
    if (keep_gaps) part(start, piece.size());
}

inline void Tokenizer::encode_word(std::string_view word, std::vector<int>& ids) const {
    if (flags_ & kIgnoreMerges) {
        if (const int32_t id = words_[word_slot(word)]; id >= 0) return ids.push_back(id);
    }
    const size_t start = ids.size();
    for (const char c : word) {
        // A byte that no token stands for vanishes, as it does in Hugging Face's BPE without an unk_token.
        if (const int id = byte_ids_[static_cast<uint8_t>(c)]; id >= 0) ids.push_back(id);
    }
    if (ids.size() - start <= kShortWord) {
        merge_short(ids, start);
    } else {
        merge_long(ids, start);
    }
}

// Byte-pair encoding of ids[start..]: again and again, of all neighbours that may merge, the pair with the
// lowest rank does, the leftmost of equals. Takes O(n^2) steps for n ids, in two small arrays.
inline void Tokenizer::merge_short(std::vector<int>& ids, size_t start) const {
    std::array<uint32_t, kShortWord> ranks;  // of the merge of i and i + 1
    int* id = ids.data() + start;
    size_t n = ids.size() - start;
    const auto rank_at = [&](size_t i) { return i + 1 < n ? find_merge(id[i], id[i + 1]).rank : kNoRank; };
    for (size_t i = 0; i < n; i++) ranks[i] = rank_at(i);
    while (n > 1) {
        const size_t best = std::min_element(ranks.begin(), ranks.begin() + n) - ranks.begin();
        if (ranks[best] == kNoRank) break;
        id[best] = find_merge(id[best], id[best + 1]).merged;
        std::copy(id + best + 2, id + n, id + best + 1);
        std::copy(ranks.begin() + best + 2, ranks.begin() + n, ranks.begin() + best + 1);
        n--;
        ranks[best] = rank_at(best);
        if (best > 0) ranks[best - 1] = rank_at(best - 1);
    }
    ids.resize(start + n);
}

// Merges a word's ids as merge_short() does, in O(n log n): a linked list of ids, and a heap of the merges
// that were possible when they were pushed. One whose ids have changed since is skipped.
inline void Tokenizer::merge_long(std::vector<int>& ids, size_t start) const {
    struct Candidate {
        uint32_t rank, left, right;  // left and right: positions
        bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
    };
    if (ids.size() - start > UINT32_MAX) throw std::runtime_error("tokenizer: a word of 4 GiB");
    const auto n = static_cast<uint32_t>(ids.size() - start), none = n;
    int* id = ids.data() + start;  // -1: merged into the one on its left
    std::vector<uint32_t> next(n), previous(n);
    std::priority_queue<Candidate> heap;
    const auto push = [&](uint32_t left, uint32_t right) {
        if (left == none || right == none) return;
        if (const uint32_t rank = find_merge(id[left], id[right]).rank; rank != kNoRank) {
            heap.push({rank, left, right});
        }
    };
    for (uint32_t i = 0; i < n; i++) next[i] = i + 1, previous[i] = i > 0 ? i - 1 : none;
    for (uint32_t i = 0; i + 1 < n; i++) push(i, i + 1);
    while (!heap.empty()) {
        const Candidate c = heap.top();
        heap.pop();
        if (id[c.left] < 0 || id[c.right] < 0 || next[c.left] != c.right) continue;
        const Merge& merge = find_merge(id[c.left], id[c.right]);
        if (merge.rank != c.rank) continue;
        id[c.left] = merge.merged;
        id[c.right] = -1;
        next[c.left] = next[c.right];
        if (next[c.left] != none) previous[next[c.left]] = c.left;
        push(previous[c.left], c.left);
        push(c.left, next[c.left]);
    }
    ids.erase(std::remove(ids.begin() + static_cast<ptrdiff_t>(start), ids.end(), -1), ids.end());
}
#endif  // NO_TOKENIZER
