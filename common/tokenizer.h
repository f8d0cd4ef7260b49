// Text <-> token ids: a byte-level BPE tokenizer (Llama 3, Qwen3, GPT-2 style), read from the tokenizer
// section of a model file, with ids equal to those of Hugging Face `tokenizers` for any input.
//
//   bytes -> valid UTF-8 -> added tokens -> NFC -> added tokens -> regex split -> byte-level BPE -> ids
//
// The section is written by export/tokenizer.py; its byte layout and every step above, with a worked
// example, are in docs/tokenizer.md. Chat templates arrive as literal strings (export/chat_template.py),
// so no template language is interpreted here.
//
// Not here: training, offsets, other models than BPE, other normalizers than NFC. The exporter refuses those.
//
// Needs PCRE2 (the regular expression) and utf8proc (NFC). With -DNO_TOKENIZER neither is used, and encode()
// throws; everything else works.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <queue>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef NO_TOKENIZER
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#endif

// ----------------------------------------------------------------------------
// UTF-8

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// What the bytes at the start of a string are.
struct Utf8Char {
    int length = 0;        // bytes that belong together: 1..4, at most s.size()
    bool valid = false;    // they are one whole character
    bool partial = false;  // not valid yet, but the string ended before it could be decided
    char32_t code = 0xFFFD;
};

// Decodes the first character of a non-empty `s` by table 3-7 of the Unicode standard. When it is ill-formed,
// `length` is its maximal subpart: the longest start of a well-formed character, or one byte. Replacing each
// of those by one U+FFFD is what Python's bytes.decode("utf-8", errors="replace") does.
inline Utf8Char utf8_first(std::string_view s) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
    const uint8_t lead = byte(0);
    if (lead < 0x80) return {1, true, false, lead};
    if (lead < 0xC2 || lead > 0xF4) return {1, false, false, 0xFFFD};
    const int need = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    char32_t code = lead & (0x7F >> need);
    // The second byte's range is narrower where a wider one would allow an overlong form (E0, F0), a
    // surrogate (ED) or a number above U+10FFFF (F4).
    uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < need; i++) {
        if (static_cast<size_t>(i) == s.size()) return {i, false, true, 0xFFFD};
        if (byte(i) < low || byte(i) > high) return {i, false, false, 0xFFFD};
        code = code << 6 | (byte(i) & 0x3F);
        low = 0x80, high = 0xBF;
    }
    return {need, true, false, code};
}

// Where `s` stops being valid UTF-8 (s.size() if it never does).
inline size_t utf8_valid_prefix(std::string_view s) {
    size_t i = 0;
    while (i < s.size()) {
        const Utf8Char c = utf8_first(s.substr(i, 4));
        if (!c.valid) break;
        i += c.length;
    }
    return i;
}

// Bytes in, whole characters out: a token may end in the middle of a character, and a terminal must not see
// half of one. Ill-formed bytes become U+FFFD as utf8_first() says.
struct Utf8Stream {
    std::string pending;  // at most 3 bytes: the start of a character that may still become whole

    // Returns every character that is complete (or known to be ill-formed) once `bytes` has arrived.
    std::string push(std::string_view bytes) {
        pending.append(bytes);
        std::string out;
        size_t i = 0;
        while (i < pending.size()) {
            const std::string_view rest = std::string_view(pending).substr(i, 4);
            const Utf8Char c = utf8_first(rest);
            if (c.partial) break;
            out.append(c.valid ? rest.substr(0, c.length) : kReplacementCharacter);
            i += c.length;
        }
        pending.erase(0, i);
        return out;
    }
    // At the end of the text: U+FFFD if a character was left unfinished, else nothing.
    std::string flush() {
        const bool dangling = !pending.empty();
        pending.clear();
        return std::string(dangling ? kReplacementCharacter : "");
    }
};

inline std::string utf8_replace_invalid(std::string_view bytes) {
    Utf8Stream stream;
    std::string out = stream.push(bytes);
    return out + stream.flush();
}

// Unicode's White_Space property, which has been the same since Unicode 6.3.
inline bool is_white_space(char32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

// The last character of a non-empty valid UTF-8 string, as bytes.
inline std::string_view utf8_last(std::string_view s) {
    size_t i = s.size() - 1;
    while (i > 0 && (s[i] & 0xC0) == 0x80) i--;
    return s.substr(i);
}

// How many bytes of white space (as `is_space` sees it) `s`, valid UTF-8, starts or ends with.
template <typename IsSpace>
size_t leading_space(std::string_view s, IsSpace is_space) {
    size_t i = 0;
    while (i < s.size()) {
        const Utf8Char c = utf8_first(s.substr(i));
        if (!is_space(c.code)) break;
        i += c.length;
    }
    return i;
}
template <typename IsSpace>
size_t trailing_space(std::string_view s, IsSpace is_space) {
    size_t n = 0;
    while (n < s.size()) {
        const std::string_view last = utf8_last(s.substr(0, s.size() - n));
        if (!is_space(utf8_first(last).code)) break;
        n += last.size();
    }
    return n;
}

#ifndef NO_TOKENIZER
// ----------------------------------------------------------------------------
// PCRE2 and utf8proc, the few calls of them we need

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

// Appends the NFC form of `s`, valid UTF-8, to `out`, by utf8proc's tables.
inline void append_nfc(std::string_view s, std::string& out) {
    if (s.empty()) return;
    utf8proc_uint8_t* composed = nullptr;
    const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const utf8proc_ssize_t n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(s.data()),
                                            static_cast<utf8proc_ssize_t>(s.size()), &composed, options);
    const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(composed, std::free);
    if (n < 0) throw std::runtime_error(std::string("tokenizer: NFC: ") + utf8proc_errmsg(n));
    out.append(reinterpret_cast<const char*>(composed), static_cast<size_t>(n));
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

// ----------------------------------------------------------------------------
// Chat templates, as literal text around each message

struct ChatMessage {
    std::string role, content;  // role: system, user or assistant
};

// The pieces of a chat template, in the order in which the section stores them.
struct ChatTemplate {
    enum Flag : uint32_t {
        // White space at both ends of a message is dropped (Llama 3).
        trim_system = 1,
        trim_user = 2,
        trim_assistant = 4,
        think_blocks = 8,  // <think>..</think> of earlier answers is dropped (Qwen3)
        late_system = 16,  // a system message may come after the first message
        turns_only = 32,   // only for [system,] user, assistant, user, ...
        strip_answer = 64  // think_blocks: newlines in front of the last answer are dropped (Qwen3)
    };
    uint32_t flags = 0;
    // What stands before the first message when that is not a system message.
    std::string no_system;
    std::string system_prefix, system_suffix;            // a system message that comes first
    std::string late_system_prefix, late_system_suffix;  // one that does not
    std::string user_prefix, user_suffix, assistant_prefix, assistant_suffix;
    std::string generate, generate_no_think;  // what the model is given to continue, thinking on and off
    std::string think_open, think_close;      // think_blocks: around the thoughts of the last answer

    std::array<std::string*, 13> pieces() {
        return {&no_system,          &system_prefix, &system_suffix,     &late_system_prefix,
                &late_system_suffix, &user_prefix,   &user_suffix,       &assistant_prefix,
                &assistant_suffix,   &generate,      &generate_no_think, &think_open,
                &think_close};
    }
};

// Python's str.strip(): White_Space and the four ASCII separators U+001C to U+001F.
inline std::string_view chat_trim(std::string_view s) {
    const auto is_space = [](char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); };
    s.remove_prefix(leading_space(s, is_space));
    s.remove_suffix(trailing_space(s, is_space));
    return s;
}
inline std::string_view trim_newlines(std::string_view s, bool left, bool right) {
    while (left && !s.empty() && s.front() == '\n') s.remove_prefix(1);
    while (right && !s.empty() && s.back() == '\n') s.remove_suffix(1);
    return s;
}

// The conversation as Hugging Face's apply_chat_template() writes it, for the templates that consist of
// literal pieces; the exporter has compared the two. Throws std::runtime_error for a conversation that is
// empty or has a role or an order that the template lacks.
inline std::string chat_text(const ChatTemplate& chat, std::span<const ChatMessage> messages, bool think,
                             bool generation_prompt) {
    if (messages.empty()) throw std::runtime_error("chat: no messages");
    const auto has = [&](ChatTemplate::Flag flag) { return (chat.flags & flag) != 0; };

    // Qwen3: an answer keeps its thoughts only while no user has spoken since. (A user message that is one
    // <tool_response> is a tool speaking.) Without any user message, no answer keeps them.
    size_t last_user = messages.size();
    for (size_t i = 0, first = messages[0].role == "system"; i < messages.size(); i++) {
        const auto& [role, text] = messages[i];
        const bool tool = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
        if (role == "user" && (!tool || has(ChatTemplate::turns_only))) last_user = i;
        const bool in_turn =
            i < first ? messages.size() > 1 : role == ((i - first) % 2 ? "assistant" : "user");
        if (has(ChatTemplate::turns_only) && !in_turn) {
            throw std::runtime_error("chat: with this template, user and assistant must take turns");
        }
    }

    std::string out = messages[0].role == "system" ? "" : chat.no_system;
    for (size_t i = 0; i < messages.size(); i++) {
        const std::string text = utf8_replace_invalid(messages[i].content);
        const auto content = [&](bool trim) { return trim ? chat_trim(text) : std::string_view(text); };
        const std::string& role = messages[i].role;
        if (role == "system" && i == 0) {
            out.append(chat.system_prefix).append(content(has(ChatTemplate::trim_system)));
            out.append(chat.system_suffix);
        } else if (role == "system") {
            if (!has(ChatTemplate::late_system)) {
                throw std::runtime_error("chat: the system message must be the first");
            }
            out.append(chat.late_system_prefix).append(content(has(ChatTemplate::trim_system)));
            out.append(chat.late_system_suffix);
        } else if (role == "user") {
            out.append(chat.user_prefix).append(content(has(ChatTemplate::trim_user)));
            out.append(chat.user_suffix);
        } else if (role == "assistant") {
            std::string_view answer = content(has(ChatTemplate::trim_assistant)), thoughts;
            if (has(ChatTemplate::think_blocks)) {
                // "<think>\nthoughts\n</think>\n\nanswer", with text that has no </think> all answer.
                const std::string_view whole = answer;
                if (const size_t end = whole.rfind("</think>"); end != std::string_view::npos) {
                    answer = trim_newlines(whole.substr(end + 8), true, false);
                    thoughts = trim_newlines(whole.substr(0, whole.find("</think>")), false, true);
                    if (const size_t open = thoughts.rfind("<think>"); open != std::string_view::npos) {
                        thoughts.remove_prefix(open + 7);
                    }
                    thoughts = trim_newlines(thoughts, true, false);
                }
            }
            out.append(chat.assistant_prefix);
            const bool current =
                has(ChatTemplate::think_blocks) && last_user < messages.size() && i > last_user;
            if (current && (i + 1 == messages.size() || !thoughts.empty())) {
                out.append(chat.think_open).append(trim_newlines(thoughts, true, true));
                out.append(chat.think_close);
                out.append(trim_newlines(answer, has(ChatTemplate::strip_answer), false));
            } else {
                out.append(answer);
            }
            out.append(chat.assistant_suffix);
        } else {
            throw std::runtime_error("chat: role '" + role + "' is not system, user or assistant");
        }
    }
    if (generation_prompt) out.append(think ? chat.generate : chat.generate_no_think);
    return out;
}

// ----------------------------------------------------------------------------
// The tokenizer

class Tokenizer {
  public:
    // Reads a tokenizer section (docs/tokenizer.md) and keeps a copy of what it needs. `vocab_size` is the
    // model's. Throws std::runtime_error, "tokenizer: <field> <value> ...", for anything but a sound section.
    static Tokenizer load(std::span<const std::byte> section, int vocab_size);

    // Text, any bytes, to ids, as Hugging Face's encode() of bytes.decode(errors="replace"); tokens such as
    // <|eot_id|> inside the text become their ids. `add_bos` puts the BOS id first, if this tokenizer does
    // so. Throws std::runtime_error if the section's pattern explodes on this text (no real model's does).
    std::vector<int> encode(std::string_view text, bool add_bos) const;

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
    static constexpr uint32_t kNfc = 1, kIgnoreMerges = 2, kAddBos = 4, kHasChat = 8;  // the section's flags
    static constexpr uint8_t kDefined = 1, kWord = 2, kSpecial = 4;                    // a token's flags

    struct AddedToken {
        enum Flag : uint32_t { special = 1, normalized = 2, lstrip = 4, rstrip = 8, single_word = 16 };
        int id = 0;
        uint32_t flags = 0;
        std::string text;  // what is looked for
    };
    // Added tokens by their first byte, longest first.
    using AddedTokens = std::array<std::vector<AddedToken>, 256>;

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
    std::vector<Merge> merges_;         // open addressing, a power of two of slots
    std::vector<int32_t> words_;  // ids by the hash of their bytes, the same way; only for kIgnoreMerges
    AddedTokens raw_tokens_, normalized_tokens_;  // found before normalizing, and after
#ifndef NO_TOKENIZER
    AnchoredRegex pattern_, word_pattern_;
#endif
    bool has_pattern_ = false;

    static size_t hash_pair(int32_t left, int32_t right) {
        // Fibonacci hashing (Knuth, TAOCP 6.4): the high bits of a product with 2^64 / golden ratio.
        const uint64_t key =
            static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
        return static_cast<size_t>((key ^ key >> 29) * 0x9E3779B97F4A7C15ull >> 24);
    }
    static size_t hash_bytes(std::string_view s) {
        uint64_t h = s.size();
        for (; s.size() >= 8; s.remove_prefix(8)) {
            uint64_t eight;
            std::memcpy(&eight, s.data(), 8);
            h = (h ^ eight) * 0x9E3779B97F4A7C15ull, h ^= h >> 32;
        }
        uint64_t rest = 0;
        std::memcpy(&rest, s.data(), s.size());
        h = (h ^ rest) * 0x9E3779B97F4A7C15ull;
        return static_cast<size_t>(h ^ h >> 32);
    }
    // The slot of a pair or a word, or else the empty slot where it would go.
    size_t merge_slot(int32_t left, int32_t right) const {
        size_t slot = hash_pair(left, right) & (merges_.size() - 1);
        while (merges_[slot].left >= 0 && (merges_[slot].left != left || merges_[slot].right != right)) {
            slot = (slot + 1) & (merges_.size() - 1);
        }
        return slot;
    }
    size_t word_slot(std::string_view word) const {
        size_t slot = hash_bytes(word) & (words_.size() - 1);
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
    void read_chat(std::string_view bytes);

#ifndef NO_TOKENIZER
    template <typename Text, typename Token>
    void split_added(const AddedTokens& tokens, std::string_view s, Text on_text, Token on_token) const;
    bool is_word_char(std::string_view character) const;
    void encode_text(std::string_view s, std::vector<int>& ids) const;
    void encode_word(std::string_view word, std::vector<int>& ids) const;
    void merge_short(std::vector<int>& ids, size_t start) const;
    void merge_long(std::vector<int>& ids, size_t start) const;
#endif
};

// ----------------------------------------------------------------------------
// Loading

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
    if (t.flags_ > (kNfc | kIgnoreMerges | kAddBos | kHasChat)) fail("flags", t.flags_, "has unknown bits");
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

    Reader::check_text(pattern, "pattern");
    Reader::check_text(word_pattern, "word_pattern");
    t.has_pattern_ = !pattern.empty();
#ifndef NO_TOKENIZER
    if (!pattern.empty()) t.pattern_.compile(pattern, "pattern");
    if (!word_pattern.empty()) t.word_pattern_.compile(word_pattern, "word_pattern");
#endif

    for (uint32_t i = 0; i < n_added; i++) {
        const uint32_t id = added.u32("added id"), f = added.u32("added flags");
        const std::string field = "added[" + std::to_string(i) + "]";
        if (id >= vocab) fail(field + ".id", id, "is not below " + std::to_string(vocab));
        if (f > 31) fail(field + ".flags", f, "has unknown bits");
        if (f & AddedToken::single_word && word_pattern.empty()) {
            fail(field + ".flags", f, "needs a word_pattern");
        }
        AddedToken token{static_cast<int>(id), f, std::string(t.token_bytes(static_cast<int>(id)))};
        if (token.text.empty()) fail(field + ".id", id, "is a token without text");
        Reader::check_text(token.text, "added token");
#ifndef NO_TOKENIZER
        if (f & AddedToken::normalized && t.flags_ & kNfc) token.text = nfc(token.text);
#endif
        AddedTokens& tokens = f & AddedToken::normalized ? t.normalized_tokens_ : t.raw_tokens_;
        tokens[static_cast<uint8_t>(token.text[0])].push_back(std::move(token));
    }
    for (AddedTokens* tokens : {&t.raw_tokens_, &t.normalized_tokens_}) {
        for (std::vector<AddedToken>& bucket : *tokens) {
            std::stable_sort(bucket.begin(), bucket.end(), [](const AddedToken& a, const AddedToken& b) {
                return a.text.size() > b.text.size();
            });
        }
    }
    if (t.has_chat_) t.read_chat(chat);
    if (!t.has_chat_ && chat_size != 0) fail("chat_size", chat_size, "but the flags say there is no chat");
    return t;
}

// Merges are stored by rank, lowest first: left id, right id, id of the result.
inline void Tokenizer::read_merges(SectionReader& in, uint32_t n_merges) {
    merges_.resize(slots_for(n_merges));
    for (uint32_t rank = 0; rank < n_merges; rank++) {
        const auto fail = [&](uint32_t id, const char* what) {
            SectionReader::fail("merges[" + std::to_string(rank) + "]", id, what);
        };
        const uint32_t left = in.u32("merge"), right = in.u32("merge"), merged = in.u32("merge");
        for (const uint32_t id : {left, right, merged}) {
            if (id >= token_flags_.size() || !(token_flags_[id] & kWord)) {
                fail(id, "is not a token that words consist of");
            }
        }
        const std::string_view a = token_bytes(static_cast<int>(left)),
                               b = token_bytes(static_cast<int>(right)),
                               ab = token_bytes(static_cast<int>(merged));
        if (ab.size() != a.size() + b.size() || !ab.starts_with(a) || !ab.ends_with(b)) {
            fail(merged, "is not its two parts put together");
        }
        Merge& slot = merges_[merge_slot(static_cast<int>(left), static_cast<int>(right))];
        if (slot.left >= 0) fail(left, "and its partner repeat");
        slot = {static_cast<int>(left), static_cast<int>(right), static_cast<int>(merged), rank};
    }
}

inline void Tokenizer::read_chat(std::string_view bytes) {
    SectionReader in{bytes};
    chat_.flags = in.u32("chat.flags");
    if (chat_.flags > 127) SectionReader::fail("chat.flags", chat_.flags, "has unknown bits");
    for (std::string* piece : chat_.pieces()) {
        *piece = in.take(in.u32("chat literal"), "chat literal of");
        SectionReader::check_text(*piece, "chat literal");
    }
    if (!in.rest.empty()) SectionReader::fail("chat_size", bytes.size(), "leaves bytes over");
}

// ----------------------------------------------------------------------------
// Encoding

#ifdef NO_TOKENIZER
inline std::vector<int> Tokenizer::encode(std::string_view, bool) const {
    throw std::runtime_error(
        "tokenizer: built without PCRE2 and utf8proc (TOKENIZER=0), so it takes ids only");
}
#else
inline std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos) const {
    std::vector<int> ids;
    if (add_bos && flags_ & kAddBos) ids.push_back(bos_id_);
    std::string repaired;
    if (utf8_valid_prefix(text) != text.size()) text = repaired = utf8_replace_invalid(text);

    const auto push = [&](int id) { ids.push_back(id); };
    const auto encode_normalized = [&](std::string_view s) { encode_text(s, ids); };
    const auto normalize = [&](std::string_view s) {
        if (flags_ & kNfc) {
            const std::string normal = nfc(s);
            split_added(normalized_tokens_, normal, encode_normalized, push);
        } else {
            split_added(normalized_tokens_, s, encode_normalized, push);
        }
    };
    split_added(raw_tokens_, text, normalize, push);
    return ids;
}

// Cuts `s` at the added tokens in it: on_text(stretch) for what is between them, on_token(id) for each. Of
// the tokens that match at one place the longest is taken. This follows `find_matches` of Hugging Face's
// added_vocabulary.rs, also where that is peculiar: the search goes on behind a token's own text, not behind
// the white space that `rstrip` takes along, and behind a token that `single_word` turns down.
template <typename Text, typename Token>
void Tokenizer::split_added(const AddedTokens& tokens, std::string_view s, Text on_text,
                            Token on_token) const {
    size_t done = 0;  // everything before it has been handed out
    for (size_t i = 0; i < s.size();) {
        const std::string_view rest = s.substr(i);
        const AddedToken* found = nullptr;
        for (const AddedToken& token : tokens[static_cast<uint8_t>(rest[0])]) {
            if (rest.starts_with(token.text)) {
                found = &token;
                break;
            }
        }
        if (!found) {
            i++;
            continue;
        }
        size_t start = i, stop = i + found->text.size();
        i = stop;
        if (found->flags & AddedToken::single_word) {
            const bool word_before = start > 0 && is_word_char(utf8_last(s.substr(0, start)));
            const bool word_after = stop < s.size() && is_word_char(s.substr(stop));
            if (word_before || word_after) continue;
        }
        if (found->flags & AddedToken::lstrip) {
            start = std::max(start - trailing_space(s.substr(0, start), is_white_space), done);
        }
        if (found->flags & AddedToken::rstrip) stop += leading_space(s.substr(stop), is_white_space);
        if (done < start) on_text(s.substr(done, start - done));
        on_token(found->id);
        done = stop;
    }
    if (done < s.size()) on_text(s.substr(done));
}

// Whether the first character of `s` may be part of a word (\w of Rust's regular expressions).
inline bool Tokenizer::is_word_char(std::string_view s) const {
    const std::string_view character = s.substr(0, utf8_first(s).length);
    return RegexMatcher(word_pattern_, character).match(0) > 0;
}

// Splits normalized text by the pattern and encodes each word. What no match covers is a word too ("isolated"
// in Hugging Face's terms). An empty match also cuts, but one right behind the last match does not count.
inline void Tokenizer::encode_text(std::string_view s, std::vector<int>& ids) const {
    if (!has_pattern_) return encode_word(s, ids);
    RegexMatcher matcher(pattern_, s);
    size_t start = 0;           // of the stretch not yet encoded
    bool just_matched = false;  // a match ended at `i`
    for (size_t i = 0; i < s.size();) {
        const ptrdiff_t end = matcher.match(i);
        if (end < 0 || (just_matched && static_cast<size_t>(end) == i)) {
            i += utf8_first(s.substr(i)).length;
            just_matched = false;
            continue;
        }
        if (start < i) encode_word(s.substr(start, i - start), ids);
        if (i < static_cast<size_t>(end)) encode_word(s.substr(i, end - i), ids);
        start = i = static_cast<size_t>(end);
        just_matched = true;
    }
    if (start < s.size()) encode_word(s.substr(start), ids);
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

// The same in O(n log n): a linked list of ids, and a heap of the merges that were possible when they were
// pushed. One whose ids have changed since is skipped.
inline void Tokenizer::merge_long(std::vector<int>& ids, size_t start) const {
    struct Candidate {
        uint32_t rank, left, right;  // left and right: positions
        bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
    };
    if (ids.size() - start > UINT32_MAX) throw std::runtime_error("tokenizer: a word of 4 GB");
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
