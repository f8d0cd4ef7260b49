// Regular expressions: the few calls of PCRE2 that the pre-tokenizer needs, within a bound on the work. Left
// out with -DNO_TOKENIZER.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#ifndef NO_TOKENIZER
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// Where `pattern` has something that can take time that nobody counts, or pattern.size(): classes in caseless
// mode, which are slow to compile; back references, lookbehind, large counts, recursion and what begins with
// (*, script runs for example; and what hides text from this search, \Q, \c, comments and [ in a class.
inline size_t unsafe_construct(std::string_view pattern) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); i++) {
        const size_t at = i;
        const std::string_view rest = pattern.substr(i), next = rest.substr(1);
        bool safe = true;
        if (rest[0] == '\\' && !next.empty()) {
            safe = !is_digit(next[0]) && std::string_view("EQcgk").find(next[0]) == std::string_view::npos;
            i++;
            const bool has_braces = std::string_view("Ppx").find(next[0]) != std::string_view::npos;
            if (has_braces && next.substr(1).starts_with('{')) i += std::min(next.find('}'), next.size() - 1);
        } else if (in_class) {
            safe = rest[0] != '[';
            in_class = rest[0] != ']';
        } else if (rest[0] == '[') {
            safe = !next.starts_with(']') && !next.starts_with("^]");
            in_class = true;
        } else if (rest[0] == '{') {  // a count: three digits
            size_t digits = 0;
            for (const char c : next.substr(0, std::min<size_t>(next.find('}'), 8))) {
                digits = is_digit(c) ? digits + 1 : 0;
                safe = safe && digits <= 3;
            }
        } else if (rest.starts_with("(?i:")) {  // plain words
            safe = rest.find_first_of("([\\", 1) > rest.find(')');
        } else if (rest.starts_with("(?")) {
            safe = rest.starts_with("(?:") || rest.starts_with("(?=") || rest.starts_with("(?!");
        } else if (rest[0] == '(') {
            safe = !next.starts_with('*');
        }
        if (!safe) return at;
    }
    return pattern.size();
}

// Whether a match may depend on where the text begins or ends, or on the character in front of it.
inline bool has_anchor(std::string_view pattern) {
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); i++) {
        if (pattern[i] == '\\' && i + 1 < pattern.size()) {
            i++;
            const bool is_anchor = std::string_view("AbBGZz").find(pattern[i]) != std::string_view::npos;
            if (is_anchor && !in_class) return true;
        } else if (in_class) {
            in_class = pattern[i] != ']';
        } else if (pattern[i] == '^' || pattern[i] == '$') {
            return true;
        } else {
            in_class = pattern[i] == '[';
        }
    }
    return false;
}

// One compiled regular expression, matched only where it is told to (anchored).
struct AnchoredRegex {
    std::shared_ptr<pcre2_code> code, counted;  // counted: calls back before every item of the pattern
    bool anchored = false;                      // see has_anchor()

    // `what` names the pattern in the error message. Throws std::runtime_error.
    void compile(std::string_view pattern, const char* what) {
        if (const size_t at = unsafe_construct(pattern); at < pattern.size()) {
            throw std::runtime_error(std::string("tokenizer: ") + what + " has something at byte " +
                                     std::to_string(at) + " that is not supported");
        }
        // UCP: \p{..} and caseless matching by Unicode's tables. \C would cut characters in two.
        const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C;
        code = compiled(pattern, options, what);
        counted = compiled(pattern, options | PCRE2_AUTO_CALLOUT, what);
        anchored = has_anchor(pattern);
        // Where there is no JIT, the interpreter is used.
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    }

    static std::string message(int error) {
        unsigned char text[200] = "";
        pcre2_get_error_message(error, text, sizeof text);
        return reinterpret_cast<const char*>(text);
    }

  private:
    static std::shared_ptr<pcre2_code> compiled(std::string_view pattern, uint32_t options,
                                                const char* what) {
        int error = 0;
        size_t offset = 0;
        std::shared_ptr<pcre2_code> result(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                                         pattern.size(), options, &error, &offset, nullptr),
                                           pcre2_code_free);
        if (error == PCRE2_ERROR_HEAP_FAILED) throw std::bad_alloc();  // no fault of the pattern
        if (!result) {
            throw std::runtime_error(std::string("tokenizer: ") + what + " does not compile at byte " +
                                     std::to_string(offset) + ": " + message(error));
        }
        return result;
    }
};

// The work that all matches in one text may take together, in steps: 64 per byte, of which the patterns of
// real models take 4.2 at most (`\s*[\r\n]+` on a long run of spaces), and some for short texts.
struct RegexBudget {
    size_t total, left;
    explicit RegexBudget(size_t text_size) : total(100'000 + 64 * text_size), left(total) {}
};

// Matches an AnchoredRegex at positions of one string. Not shared between threads.
//
// A step is an item of the pattern that is tried, or a byte that the match moves. PCRE2 does not count what a
// repeat such as \s* runs over, does not tell how much it has counted, and counts differently with and
// without JIT. So a match is first tried where it cannot take long: on the next `window` bytes, within
// `quick_limit`. If it needs to see more (to PCRE2 it is a partial match then) or to try more, the
// interpreter does it again, with a callback before each item of the pattern that counts the steps.
struct RegexMatcher {
    static constexpr size_t window = 128;
    static constexpr uint32_t quick_limit = 64;
    static constexpr ptrdiff_t undecided = -2;

    const AnchoredRegex& regex;
    std::string_view text;  // valid UTF-8
    RegexBudget& budget;
    bool goes_on = false;  // there is more of the text than is here
    std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data;
    std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> quick, counting;
    size_t position = 0;  // at the last callback

    RegexMatcher(const AnchoredRegex& r, std::string_view t, RegexBudget& b)
        : regex(r),
          text(t),
          budget(b),
          data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
          quick(pcre2_match_context_create(nullptr), pcre2_match_context_free),
          counting(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
        if (!data || !quick || !counting) throw std::bad_alloc();
        pcre2_set_match_limit(quick.get(), quick_limit);
        pcre2_set_callout(counting.get(), count, this);
        pcre2_set_match_limit(counting.get(), UINT32_MAX);
        pcre2_set_heap_limit(counting.get(), 64 * 1024);  // KiB
    }

    // The end of the match that starts at `at`, or -1 if there is none; of a text that goes on, `undecided`
    // if that depends on what follows. Throws std::runtime_error when the budget is spent (by a pattern whose
    // backtracking explodes).
    ptrdiff_t match(size_t at) {
        size_t end = std::min(text.size(), at + window);
        while (end < text.size() && (text[end] & 0xC0) == 0x80) end--;  // whole characters
        const uint32_t open = goes_on ? PCRE2_PARTIAL_HARD : 0;
        int rc = run(*regex.code, end, at, end < text.size() ? PCRE2_PARTIAL_HARD : open, *quick);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            position = at;
            rc = run(*regex.counted, text.size(), at, open, *counting);
        }
        if (rc == PCRE2_ERROR_PARTIAL) return undecided;
        if (rc == PCRE2_ERROR_NOMATCH) return -1;
        if (rc < 0) {
            throw std::runtime_error("tokenizer: pattern fails at byte " + std::to_string(at) +
                                     " of a text of " + std::to_string(text.size()) + ": " +
                                     (rc == PCRE2_ERROR_CALLOUT
                                          ? "it takes more than " + std::to_string(budget.total) + " steps"
                                          : AnchoredRegex::message(rc)));
        }
        return static_cast<ptrdiff_t>(std::max(pcre2_get_ovector_pointer(data.get())[1], at));
    }

  private:
    int run(const pcre2_code& code, size_t end, size_t at, uint32_t options, pcre2_match_context& context) {
        return pcre2_match(&code, reinterpret_cast<PCRE2_SPTR>(text.data()), end, at,
                           PCRE2_NO_UTF_CHECK | options, data.get(), &context);
    }
    // PCRE2's callback before each item of the pattern: a step, and one for each byte since the last.
    static int count(pcre2_callout_block* at, void* matcher) {
        RegexMatcher& m = *static_cast<RegexMatcher*>(matcher);
        const size_t now = at->current_position;
        const size_t steps = 1 + (now > m.position ? now - m.position : m.position - now);
        m.position = now;
        if (steps > m.budget.left) return PCRE2_ERROR_CALLOUT;
        m.budget.left -= steps;
        return 0;
    }
};

#endif  // NO_TOKENIZER
