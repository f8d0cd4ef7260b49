// Text for a terminal, which obeys control characters: a model's token or a file's name may hold any.
#pragma once

#include <string>
#include <string_view>

#include "engine/text/utf8.h"

// The text with control characters spelled out: U+0000 to U+001F, U+007F to U+009F, and bytes that are not
// UTF-8 (a terminal may take 80 to 9F for controls). ESC becomes the four characters \x1b. Those in `kept`
// stay as they are.
inline std::string printable(std::string_view text, std::string_view kept = "") {
    std::string out;
    auto spell = [&](unsigned code) {
        const char* const digits = "0123456789abcdef";
        out += {'\\', 'x', digits[code >> 4 & 0xF], digits[code & 0xF]};
    };
    while (!text.empty()) {
        const Utf8Char c = utf8_first(text);
        const std::string_view bytes = text.substr(0, static_cast<size_t>(c.length));
        const bool is_control = c.code < 0x20 || (c.code >= 0x7F && c.code < 0xA0);
        if (!c.valid) {
            for (const char byte : bytes) spell(static_cast<unsigned char>(byte));
        } else if (is_control && kept.find(bytes) == kept.npos) {
            spell(static_cast<unsigned>(c.code));
        } else {
            out += bytes;
        }
        text.remove_prefix(bytes.size());
    }
    return out;
}
