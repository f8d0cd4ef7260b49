// Input and output: text goes to standard output, everything else to standard error.
#pragma once

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "engine/os/system.h"
#include "engine/text/utf8.h"

__attribute__((format(PRINTF_FORMAT, 1, 2))) inline std::string format(const char* pattern, ...) {
    va_list arguments, again;
    va_start(arguments, pattern);
    va_copy(again, arguments);
    std::string text(size_t(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
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
            text.remove_prefix(size_t(n));
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

// The rule for every text that a person gives, a prompt, a file or a line of a chat: it is UTF-8, "\r\n" is
// "\n", and a byte order mark in front is no part of it. golden/calibration.py has the same. Throws
// std::runtime_error "NAME is not UTF-8 at byte N". Of the beginning of a text (is_whole = false) the last
// character may be cut off.
inline std::string text_by_rule(const std::string& name, std::string_view bytes, bool is_whole = true) {
    const size_t n = utf8_valid_prefix(bytes);
    if (n < bytes.size() && (is_whole || !utf8_first(bytes.substr(n)).partial)) {
        const std::string_view rest = bytes.substr(n);
        const bool wide =
            rest.starts_with("\xFF\xFE") || rest.starts_with("\xFE\xFF") || bytes.find('\0') != bytes.npos;
        fail(name, " is not UTF-8 at byte ", n, wide ? "; it looks like UTF-16" : "");
    }
    if (bytes.starts_with("\xEF\xBB\xBF")) bytes.remove_prefix(3);
    std::string text;
    for (size_t end; (end = bytes.find("\r\n")) != bytes.npos; bytes.remove_prefix(end + 1))
        text.append(bytes.substr(0, end));
    return text.append(bytes);
}

// A text file; "-" is standard input. Throws std::runtime_error.
class TextFile {
  public:
    // Opens it and reads its beginning: what is no text file is noticed early.
    TextFile(const std::string& option, const std::string& path, std::FILE* in)
        : option_(option), path_(path), file_(in, [](std::FILE*) { return 0; }) {
        if (path != "-") file_ = {open_file(path, "rb"), std::fclose};
        if (file_ == nullptr) fail(option_, ": cannot read '", path_, "': ", std::strerror(errno));
        text(0);
    }

    // The whole text, by that rule; none if it has more than n_bytes, and then the rest is not read.
    std::optional<std::string> text(size_t n_bytes) {
        char buffer[1 << 16];
        // The rule leaves one byte of "\r\n", and none of a byte order mark.
        while (!at_end_ && bytes_.size() <= 2 * n_bytes + 3) {
            const size_t n = read_bytes(file_.get(), buffer, sizeof buffer);
            at_end_ = n < sizeof buffer;
            if (at_end_ && std::ferror(file_.get()) != 0)
                fail(option_, ": cannot read '", path_, "': ", std::strerror(errno));
            bytes_.append(buffer, n);
        }
        std::clearerr(file_.get());  // a terminal goes on behind the end of a text
        std::string text = text_by_rule(option_ + ": '" + path_ + "'", bytes_, at_end_);
        if (text.size() > n_bytes) return std::nullopt;
        return text;
    }

  private:
    std::string option_, path_;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;  // closes what it has opened
    std::string bytes_{};                                   // that have been read
    bool at_end_ = false;
};
