// Regular expressions: the few calls of PCRE2 that the pre-tokenizer needs. Left out with -DNO_TOKENIZER.
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

// One compiled regular expression, matched only where it is told to (anchored).
struct AnchoredRegex {
    std::shared_ptr<pcre2_code> code;

    // `what` names the pattern in the error message. Throws std::runtime_error.
    void compile(std::string_view pattern, const char* what) {
        int error = 0;
        size_t offset = 0;
        // UCP: \p{..} and caseless matching by Unicode's tables. \C would cut characters in two.
        const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C;
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                                 &error, &offset, nullptr),
                   pcre2_code_free);
        if (!code) {
            throw std::runtime_error(std::string("tokenizer: ") + what + " does not compile at byte " +
                                     std::to_string(offset) + ": " + message(error));
        }
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // where there is no JIT, the interpreter is used
    }

    static std::string message(int error) {
        unsigned char text[200] = "";
        pcre2_get_error_message(error, text, sizeof text);
        return reinterpret_cast<const char*>(text);
    }
};

// Matches an AnchoredRegex at positions of one string. Not shared between threads.
struct RegexMatcher {
    const AnchoredRegex& regex;
    std::string_view text;  // valid UTF-8
    std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data;
    std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context;

    RegexMatcher(const AnchoredRegex& r, std::string_view t)
        : regex(r),
          text(t),
          data(pcre2_match_data_create_from_pattern(r.code.get(), nullptr), pcre2_match_data_free),
          context(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
        if (!data || !context) throw std::bad_alloc();
        // `\s*[\r\n]+` steps back once a character over a run of spaces, and runs may be as long as the text;
        // a pattern whose backtracking explodes is stopped by the same number within a second.
        pcre2_set_match_limit(
            context.get(), static_cast<uint32_t>(std::min<size_t>(10'000'000 + 8 * text.size(), 0xFFFFFFFF)));
        pcre2_set_heap_limit(context.get(), 1024 * 1024);  // KiB; only the interpreter needs a heap
    }

    // The end of the match that starts at `at`, or -1 if there is none. Throws std::runtime_error when the
    // pattern gives up (a pattern whose backtracking explodes).
    ptrdiff_t match(size_t at) {
        const int rc = pcre2_match(regex.code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                   at, PCRE2_NO_UTF_CHECK, data.get(), context.get());
        if (rc == PCRE2_ERROR_NOMATCH) return -1;
        if (rc < 0) {
            throw std::runtime_error("tokenizer: pattern fails at byte " + std::to_string(at) +
                                     " of a text of " + std::to_string(text.size()) + ": " +
                                     AnchoredRegex::message(rc));
        }
        const size_t end = pcre2_get_ovector_pointer(data.get())[1];
        return static_cast<ptrdiff_t>(std::max(end, at));
    }
};

#endif  // NO_TOKENIZER
