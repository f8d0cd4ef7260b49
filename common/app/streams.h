// Input and output: text goes to standard output, everything else to standard error.
#pragma once

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/os/system.h"
#include "common/text/printable.h"

inline std::string format(const char* pattern, ...) __attribute__((format(PRINTF_FORMAT, 1, 2)));
inline std::string format(const char* pattern, ...) {
    va_list arguments, again;
    va_start(arguments, pattern);
    va_copy(again, arguments);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
    std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    va_end(arguments);
    return text;
}

struct Streams {
    std::FILE *in, *out, *err;  // standard input, output and error, or a test's own
};

// The reader of our output has gone away: nothing is wrong, and there is no one to tell.
struct OutputClosed {};

// Writes at once, so that a token shows as soon as it is there and a full disk is noticed. By write() and not
// through the stream's buffer, because only write() can go on after a signal without losing anything.
inline void put(std::FILE* out, std::string_view text) {
    while (!text.empty()) {
        const ptrdiff_t n = write_bytes(out, text.data(), text.size());
        if (n >= 0) {
            text.remove_prefix(static_cast<size_t>(n));
        } else if (errno == EPIPE) {
            throw OutputClosed();
        } else if (errno != EINTR) {
            throw std::runtime_error(std::string("cannot write the output: ") + std::strerror(errno));
        }
    }
}

// As put(), for text that this program has not made up itself. A terminal gets no control characters but line
// breaks and tabs; files and pipes get every byte as it is.
inline void put_foreign(std::FILE* out, std::string_view text) {
    put(out, is_terminal(out) ? printable(text, "\n\t") : text);
}

// For standard error: when that is closed there is no one to tell, and the run goes on.
inline void note(std::FILE* err, std::string_view text) {
    try {
        put(err, text);
    } catch (...) {
        return;
    }
}

// The whole file; "-" is standard input.
inline std::string read_text(const std::string& option, const std::string& path, std::FILE* in) {
    const bool standard_input = path == "-";
    std::FILE* file = standard_input ? in : open_file(path, "rb");
    std::string text;
    bool ok = file != nullptr;
    if (ok) {
        char buffer[1 << 16];
        for (size_t n; (n = read_bytes(file, buffer, sizeof buffer)) > 0;) text.append(buffer, n);
        ok = std::ferror(file) == 0;
    }
    const int reason = errno;
    if (file != nullptr && !standard_input) std::fclose(file);
    if (!ok) throw std::runtime_error(option + ": cannot read '" + path + "': " + std::strerror(reason));
    return text;
}

// A line without its end. False at the end of the input, and when Ctrl-C interrupts the wait for it.
inline bool read_line(std::FILE* in, std::string& line) {
    line.clear();
    int c;
    while ((c = read_byte(in)) != EOF && c != '\n') line.push_back(static_cast<char>(c));
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return c == '\n' || (!line.empty() && std::ferror(in) == 0);
}
