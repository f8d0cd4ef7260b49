// What happens to text before byte-pair encoding, by two libraries: Unicode's normalization form C
// (utf8proc), and regular expressions that cut it into words (PCRE2), within a bound on the work. With
// -DNO_TOKENIZER both are left out.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/utf8.h"

#ifdef NO_TOKENIZER
// What there is instead: encode() throws before it uses any of it.
inline std::string nfc(std::string_view s) { return std::string(s); }
struct RegexBudget {
    explicit RegexBudget(size_t) {}
};
struct AnchoredRegex {
    void compile(std::string_view, const char*) {}
    ptrdiff_t match(std::string_view, size_t, RegexBudget&) const { return -1; }
};
#else
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

// Characters whose part in normalization was defined after Unicode 9: combining marks, and pairs that
// compose. Hugging Face normalizes by the tables of Unicode 9, to which they are unknown, so that they
// neither reorder nor compose; utf8proc is newer. docs/tokenizer.md says how this table was measured.
inline bool newer_than_unicode_9(char32_t c) {
    using Range = std::pair<char32_t, char32_t>;
    static constexpr std::array<Range, 59> ranges{
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
    auto it = std::lower_bound(ranges.begin(), ranges.end(), c, [](auto& r, auto x) { return r.second < x; });
    return it != ranges.end() && it->first <= c;
}

// Appends the NFC form of `s`, valid UTF-8, to `out`, by utf8proc's tables: every character is decomposed,
// marks that follow each other are sorted by combining class (UAX #15), and what composes is composed.
// utf8proc_map() does the same, but sorts in quadratic time.
inline void append_nfc(std::string_view s, std::string& out) {
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto check = [](utf8proc_ssize_t n) {
        if (n < 0) fail("tokenizer: NFC: ", utf8proc_errmsg(n));
        return size_t(n);
    };
    const auto class_of = [](utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; };
    const auto is_starter = [&](utf8proc_int32_t code) { return class_of(code) == 0; };
    const auto is_lower = [&](utf8proc_int32_t a, utf8proc_int32_t b) { return class_of(a) < class_of(b); };

    std::vector<utf8proc_int32_t> codes;
    codes.reserve(s.size());
    for (size_t i = 0; i < s.size();) {
        const Utf8Char c = utf8_first(s.substr(i));
        std::array<utf8proc_int32_t, 4> parts;  // the longest, of U+1F82 for example
        const size_t n = check(
            utf8proc_decompose_char(utf8proc_int32_t(c.code), parts.data(), parts.size(), options, nullptr));
        if (n > parts.size()) fail("tokenizer: NFC: a decomposition is too long");
        codes.insert(codes.end(), parts.begin(), parts.begin() + n);
        i += c.length;
    }
    for (auto run = codes.begin(); run != codes.end();) {
        const auto end = std::find_if(run + 1, codes.end(), is_starter);
        if (!std::is_sorted(run, end, is_lower)) std::stable_sort(run, end, is_lower);
        run = end;
    }
    const auto n = utf8proc_ssize_t(codes.size());
    codes.push_back(0);  // room for a byte behind the text that codes become, in their place
    const size_t n_bytes = check(utf8proc_reencode(codes.data(), n, options));
    out.append(reinterpret_cast<const char*>(codes.data()), n_bytes);
}

// NFC by the tables of Unicode 9. A character below U+0300 neither changes by itself nor acts on what stands
// before it, so that text may be cut in front of it, and a run of them needs no work but for the last one, to
// which marks may follow. A newer mark stays where it is: the text is cut on both sides of it.
inline std::string nfc(std::string_view s) {
    const auto is_simple = [&](size_t i) { return uint8_t(s[i]) < 0xCC; };  // U+0300 is CC 80
    std::string out;
    out.reserve(s.size());
    for (size_t i = 0; i < s.size();) {
        const size_t run = i;
        while (i < s.size() && is_simple(i)) i++;
        const size_t last = i > run ? i - utf8_last(s.substr(0, i)).size() : i;
        out.append(s.substr(run, last - run));
        size_t newer = 0;  // bytes of a newer mark at i
        while (i < s.size() && !is_simple(i) && newer == 0) {
            const Utf8Char c = utf8_first(s.substr(i));
            if (newer_than_unicode_9(c.code))
                newer = c.length;
            else
                i += c.length;
        }
        append_nfc(s.substr(last, i - last), out);
        out.append(s.substr(i, newer));
        i += newer;
    }
    return out;
}

// What a pattern may consist of, as a regular expression. Its match ends in front of something that can take
// time that nobody counts: classes in caseless mode, which are slow to compile; back references, lookbehind,
// large counts, recursion and what begins with (*, script runs for example; and what hides text from this
// search, \Q, \c, comments and [ in a class.
constexpr std::string_view safe_pattern = R"(
    (?(DEFINE) (?<escape> \\ (?: [Ppx] \{ [^}]*+ (?: \} | \z ) | [^0-9EQcgk] | \z ) )
               (?<class> \[ (?! \^? \] ) (?: [^][\\] | (?&escape) )*+ ) )
    (?: [^[({\\] | (?&escape) | (?&class) \]
      | \{ (?! [^}]{0,4} [0-9]{4} )                               (?# a count of up to three digits)
      | \( (?: (?! [*?] ) | \? [:=!] | \?i: (?= [^([\\)]* \) ) )  (?# the last is of plain words)
    )*+ (?&class)?)";

// The work that all matches in one text may take together, in steps: 64 per byte, of which the patterns of
// real models take 4.2 at most (`\s*[\r\n]+` on a long run of spaces), and some for short texts. And what
// PCRE2 needs for a match. A text has one, and no other thread uses it.
struct RegexBudget {
    size_t total, left;
    size_t position = 0;  // at the last callback
    std::shared_ptr<pcre2_match_data> data{pcre2_match_data_create(1, nullptr), pcre2_match_data_free};
    std::shared_ptr<pcre2_match_context> context{pcre2_match_context_create(nullptr),
                                                 pcre2_match_context_free};

    explicit RegexBudget(size_t text_size) : total(100'000 + 64 * text_size), left(total) {
        if (!data || !context) throw std::bad_alloc();
        pcre2_set_callout(context.get(), count, this);
        pcre2_set_heap_limit(context.get(), 64 * 1024);  // KiB
    }
    RegexBudget(const RegexBudget&) = delete;  // PCRE2 knows its address

  private:
    // PCRE2's callback before each item of the pattern: a step, and one for each byte since the last.
    static int count(pcre2_callout_block* at, void* budget) {
        RegexBudget& b = *static_cast<RegexBudget*>(budget);
        const size_t now = at->current_position;
        const size_t steps = 1 + (now > b.position ? now - b.position : b.position - now);
        b.position = now;
        if (steps > b.left) return PCRE2_ERROR_CALLOUT;
        b.left -= steps;
        return 0;
    }
};

// One compiled regular expression, matched only where it is told to (anchored).
//
// A step is an item of the pattern that is tried, or a byte that the match moves. PCRE2 does not count what a
// repeat such as \s* runs over, does not tell how much it has counted, and counts differently with and
// without JIT. So a match is first tried where it cannot take long: on the next `window` bytes, within
// `quick_limit`. If it needs to see more (to PCRE2 it is a partial match then) or to try more, the
// interpreter does it again, with a callback before each item of the pattern that counts the steps.
struct AnchoredRegex {
    static constexpr size_t window = 128;
    static constexpr uint32_t quick_limit = 64;

    std::shared_ptr<pcre2_code> code, counted;  // counted: calls back before every item of the pattern

    // `what` names the pattern in the error message. Throws std::runtime_error.
    void compile(std::string_view pattern, const char* what) {
        const auto subject = reinterpret_cast<PCRE2_SPTR>(pattern.data());
        const auto safe = compiled(safe_pattern, PCRE2_ANCHORED | PCRE2_EXTENDED, "safe_pattern");
        const RegexBudget found(0);
        const int rc = pcre2_match(safe.get(), subject, pattern.size(), 0, 0, found.data.get(), nullptr);
        const size_t end = rc < 0 ? 0 : pcre2_get_ovector_pointer(found.data.get())[1];
        if (end < pattern.size())
            fail("tokenizer: ", what, " has something at byte ", end, " that is not supported");
        // UCP: \p{..} and caseless matching by Unicode's tables. \C would cut characters in two.
        const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C;
        code = compiled(pattern, options, what);
        counted = compiled(pattern, options | PCRE2_AUTO_CALLOUT, what);
        // Where there is no JIT, the interpreter is used.
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    }

    // The end of the match in `text`, valid UTF-8, that starts at `at`, or -1 if there is none. Throws
    // std::runtime_error when the budget is spent (by a pattern whose backtracking explodes).
    ptrdiff_t match(std::string_view text, size_t at, RegexBudget& budget) const {
        const auto run = [&](const pcre2_code* pattern, size_t end, uint32_t options, uint32_t limit) {
            pcre2_set_match_limit(budget.context.get(), limit);
            return pcre2_match(pattern, reinterpret_cast<PCRE2_SPTR>(text.data()), end, at,
                               PCRE2_NO_UTF_CHECK | options, budget.data.get(), budget.context.get());
        };
        size_t end = std::min(text.size(), at + window);
        while (end < text.size() && (text[end] & 0xC0) == 0x80) end--;  // whole characters
        int rc = run(code.get(), end, end < text.size() ? PCRE2_PARTIAL_HARD : 0, quick_limit);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            budget.position = at;
            rc = run(counted.get(), text.size(), 0, UINT32_MAX);
        }
        if (rc == PCRE2_ERROR_NOMATCH) return -1;
        if (rc < 0) {
            const std::string why = rc != PCRE2_ERROR_CALLOUT
                                        ? message(rc)
                                        : "it takes more than " + std::to_string(budget.total) + " steps";
            fail("tokenizer: pattern fails at byte ", at, " of a text of ", text.size(), ": ", why);
        }
        return ptrdiff_t(std::max(pcre2_get_ovector_pointer(budget.data.get())[1], at));
    }

  private:
    static std::string message(int error) {
        unsigned char text[200] = "";
        pcre2_get_error_message(error, text, sizeof text);
        return reinterpret_cast<const char*>(text);
    }
    static std::shared_ptr<pcre2_code> compiled(std::string_view pattern, uint32_t options,
                                                const char* what) {
        int error = 0;
        size_t offset = 0;
        std::shared_ptr<pcre2_code> result(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                                         pattern.size(), options, &error, &offset, nullptr),
                                           pcre2_code_free);
        if (error == PCRE2_ERROR_HEAP_FAILED) throw std::bad_alloc();  // no fault of the pattern
        if (!result) fail("tokenizer: ", what, " does not compile at byte ", offset, ": ", message(error));
        return result;
    }
};

#endif  // NO_TOKENIZER
