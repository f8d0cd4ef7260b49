// Input and output: text goes to standard output, everything else to standard error.
#pragma once

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

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
// "\n", and a byte order mark in front is no part of it. golden/calibration.py has the same.
class TextRule {
  public:
    explicit TextRule(std::string name) : name_(std::move(name)) {}

    // Appends to `text` what is sure of the next bytes; at the end, all that there is. Throws
    // std::runtime_error "NAME is not UTF-8 at byte N".
    void add(std::string_view bytes, bool at_end, std::string& text) {
        pending_.append(bytes);
        size_t n = utf8_valid_prefix(pending_);
        const std::string_view rest = std::string_view(pending_).substr(n, 4);
        if (!rest.empty() && (at_end || !utf8_first(rest).partial)) {
            const bool wide = rest.starts_with("\xFF\xFE") || rest.starts_with("\xFE\xFF") ||
                              pending_.find('\0') != std::string::npos;
            fail(name_, " is not UTF-8 at byte ", n_done_ + n, wide ? "; it looks like UTF-16" : "");
        }
        if (!at_end && n > 0 && pending_[n - 1] == '\r') n--;  // what follows?
        std::string_view sure = std::string_view(pending_).substr(0, n);
        if (n_done_ == 0 && sure.starts_with("\xEF\xBB\xBF")) sure.remove_prefix(3);
        for (size_t end; (end = sure.find("\r\n")) != sure.npos; sure.remove_prefix(end + 1))
            text.append(sure.substr(0, end));
        text.append(sure);
        n_done_ += n;
        pending_.erase(0, n);
    }

  private:
    std::string name_, pending_{};  // pending: the start of a character, or a '\r' and what may be behind it
    size_t n_done_ = 0;             // bytes before these
};

// A text that was given as a whole, by that rule.
inline std::string text_by_rule(const std::string& name, std::string_view bytes) {
    std::string text;
    TextRule(name).add(bytes, true, text);
    return text;
}

// A text file, which is read piece by piece; "-" is standard input. Throws std::runtime_error.
class TextFile {
  public:
    TextFile(const std::string& option, const std::string& path, std::FILE* in)
        : option_(option),
          path_(path),
          rule_(option + ": '" + path + "'"),
          file_(in, [](std::FILE*) { return 0; }) {
        if (path != "-") file_ = {open_file(path, "rb"), std::fclose};
        if (file_ == nullptr) fail(option_, ": cannot read '", path_, "': ", std::strerror(errno));
    }

    // Appends what comes next until `text` has more than n_bytes, or to the file's end or Ctrl-C: then false.
    bool read(std::string& text, size_t n_bytes) {
        char buffer[1 << 16];
        while (!at_end_ && !interrupted && text.size() <= n_bytes) {
            const size_t n = read_bytes(file_.get(), buffer, sizeof buffer);
            if (n == 0 && interrupted) break;
            if (n == 0 && std::ferror(file_.get()) != 0)
                fail(option_, ": cannot read '", path_, "': ", std::strerror(errno));
            at_end_ = n == 0;
            rule_.add({buffer, n}, at_end_, text);
        }
        return !at_end_ && !interrupted;
    }

  private:
    std::string option_, path_;
    TextRule rule_;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;  // closes what it has opened
    bool at_end_ = false;
};
