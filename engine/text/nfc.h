// Unicode's normalization form C, by utf8proc and by the tables of Unicode 9, as Hugging Face's tokenizers
// have it. Left out with -DNO_TOKENIZER.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/utf8.h"

#ifndef NO_TOKENIZER
#include <utf8proc.h>

// Characters whose part in normalization was defined after Unicode 9: combining marks, and pairs that
// compose. Hugging Face normalizes by the tables of Unicode 9, to which they are unknown, so that they
// neither reorder nor compose; utf8proc is newer. docs/tokenizer.md says how this table was measured.
inline bool newer_than_unicode_9(char32_t c) {
    static constexpr std::array<std::array<char32_t, 2>, 59> ranges{
        {{0x5C8, 0x5C9},     {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
         {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1AF0},
         {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x105C9, 0x105C9}, {0x105D2, 0x105D2}, {0x105DA, 0x105DA},
         {0x105E4, 0x105E4}, {0x10D24, 0x10D27}, {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10ECB, 0x10ECF},
         {0x10EF0, 0x10EFB}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
         {0x1133B, 0x1133B}, {0x11380, 0x113E2}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930},
         {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
         {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
         {0x11F41, 0x11F42}, {0x1611E, 0x1612F}, {0x16D63, 0x16D6A}, {0x16FF0, 0x16FF1}, {0x1D127, 0x1D128},
         {0x1D250, 0x1D252}, {0x1D25B, 0x1D25C}, {0x1D25F, 0x1D25F}, {0x1D280, 0x1D281}, {0x1E08F, 0x1E08F},
         {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF},
         {0x1E6E3, 0x1E6E3}, {0x1E6E6, 0x1E6E6}, {0x1E6EE, 0x1E6EF}, {0x1E6F5, 0x1E6F5}}};
    const auto it = std::lower_bound(ranges.begin(), ranges.end(), c,
                                     [](const auto& range, char32_t value) { return range[1] < value; });
    return it != ranges.end() && (*it)[0] <= c;
}

// No text has more than this many times the bytes of its NFC form. Every character that is in NFC is made of
// at most 3.5 times its own bytes: U+0390 of U+1FBE, U+0308 and U+0301 (7 bytes to 2). A syllable of Hangul
// is made of 3 times as many. tests/test_tokenizer.py::test_what_nfc_makes_shorter looks at all characters.
constexpr size_t most_bytes_per_nfc_byte = 4;

// Appends the NFC form of `s`, valid UTF-8, to `out`, by utf8proc's tables: every character is decomposed,
// marks that follow each other are sorted by combining class (UAX #15), and what composes is composed.
// utf8proc_map() does the same, but sorts in quadratic time.
inline void append_nfc(std::string_view s, std::string& out) {
    if (s.empty()) return;
    const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto check = [](utf8proc_ssize_t n) {
        if (n < 0) throw std::runtime_error(std::string("tokenizer: NFC: ") + utf8proc_errmsg(n));
        return static_cast<size_t>(n);
    };
    const auto has_lower_class = [](utf8proc_int32_t a, utf8proc_int32_t b) {
        return utf8proc_get_property(a)->combining_class < utf8proc_get_property(b)->combining_class;
    };
    const auto is_starter = [](utf8proc_int32_t code) {
        return utf8proc_get_property(code)->combining_class == 0;
    };

    std::vector<utf8proc_int32_t> codes;
    codes.reserve(s.size());
    for (size_t i = 0; i < s.size();) {
        const Utf8Char c = utf8_first(s.substr(i));
        std::array<utf8proc_int32_t, 4> parts;  // the longest, of U+1F82 for example
        const size_t n = check(utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.code), parts.data(),
                                                       parts.size(), options, nullptr));
        if (n > parts.size()) throw std::runtime_error("tokenizer: NFC: a decomposition is too long");
        codes.insert(codes.end(), parts.begin(), parts.begin() + n);
        i += c.length;
    }
    for (auto run = codes.begin(); run != codes.end();) {
        const auto end = std::find_if(run, codes.end(), is_starter);
        if (!std::is_sorted(run, end, has_lower_class)) std::stable_sort(run, end, has_lower_class);
        run = std::find_if_not(end, codes.end(), is_starter);
    }
    codes.resize(
        check(utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), options)));
    for (const utf8proc_int32_t code : codes) {
        std::array<utf8proc_uint8_t, 4> bytes;
        const size_t n = check(utf8proc_encode_char(code, bytes.data()));
        out.append(reinterpret_cast<const char*>(bytes.data()), n);
    }
}

// NFC by the tables of Unicode 9. A character below U+0300 neither changes by itself nor acts on what stands
// before it, so that text may be cut in front of it, and a run of them needs no work but for the last one, to
// which marks may follow. A newer mark ends one stretch of text and starts the next, which keeps it there.
inline std::string nfc(std::string_view s) {
    const auto is_simple = [&](size_t i) { return static_cast<uint8_t>(s[i]) < 0xCC; };  // U+0300 is CC 80
    std::string out;
    out.reserve(s.size());
    size_t start = 0;  // of the stretch not yet handed out
    for (size_t i = 0; i < s.size();) {
        if (is_simple(i)) {
            append_nfc(s.substr(start, i - start), out);
            start = i;
            while (i < s.size() && is_simple(i)) i++;
            const size_t last = i - utf8_last(s.substr(start, i - start)).size();
            out.append(s.substr(start, last - start));
            start = last;
            continue;
        }
        const Utf8Char c = utf8_first(s.substr(i));
        if (newer_than_unicode_9(c.code)) {
            append_nfc(s.substr(start, i - start), out);
            out.append(s.substr(i, c.length));
            start = i + c.length;
        }
        i += c.length;
    }
    append_nfc(s.substr(start), out);
    return out;
}

#endif  // NO_TOKENIZER
