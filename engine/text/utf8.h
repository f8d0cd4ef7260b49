// UTF-8: one character at a time, with ill-formed bytes replaced as Python's errors="replace" does; text for
// a terminal, which obeys control characters; and errors that say what their parts do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

// Throws an error that says its parts, one after another.
template <class Error = std::runtime_error>
[[noreturn]] void fail(const auto&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

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
    const auto byte = [&](size_t i) { return uint8_t(s[i]); };
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
        if (size_t(i) == s.size()) return {i, false, true, 0xFFFD};
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
        return std::string(std::exchange(pending, "").empty() ? "" : kReplacementCharacter);
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

// `s`, valid UTF-8, without the white space (as `is_space` sees it) that it starts or ends with.
inline std::string_view without_leading(std::string_view s, bool (*is_space)(char32_t)) {
    while (!s.empty() && is_space(utf8_first(s).code)) s.remove_prefix(utf8_first(s).length);
    return s;
}
inline std::string_view without_trailing(std::string_view s, bool (*is_space)(char32_t)) {
    while (!s.empty() && is_space(utf8_first(utf8_last(s)).code)) s.remove_suffix(utf8_last(s).size());
    return s;
}

// The text with control characters spelled out: U+0000 to U+001F, U+007F to U+009F, and bytes that are not
// UTF-8 (a terminal may take 80 to 9F for controls). ESC becomes the four characters \x1b. Those in `kept`
// stay as they are.
inline std::string printable(std::string_view text, std::string_view kept = "") {
    std::string out;
    constexpr const char* digits = "0123456789abcdef";
    while (!text.empty()) {
        const Utf8Char c = utf8_first(text);
        const std::string_view bytes = text.substr(0, c.valid ? size_t(c.length) : 1);
        const char32_t code = c.valid ? c.code : uint8_t(text[0]);
        const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
        if (c.valid && (!is_control || kept.find(bytes) != kept.npos))
            out += bytes;
        else
            out += {'\\', 'x', digits[code >> 4], digits[code & 0xF]};
        text.remove_prefix(bytes.size());
    }
    return out;
}
