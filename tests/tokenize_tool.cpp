// What test_tokenizer.py talks to: engine/text/tokenizer.h behind a pipe.
//
//   tokenize_tool SECTION VOCAB_SIZE [--bos]        strings from stdin -> ids to stdout
//   tokenize_tool SECTION VOCAB_SIZE --decode       ids from stdin -> bytes to stdout, streamed as characters
//   tokenize_tool SECTION VOCAB_SIZE --chat         conversations from stdin -> texts to stdout
//   tokenize_tool SECTION VOCAB_SIZE --bench FILE   prints how long loading and encoding FILE takes
//
// SECTION is a tokenizer section in a file of its own. On the pipes, everything is a 32-bit little-endian
// count and that many items: bytes of a string, or int32 ids. A conversation is one byte of options (1:
// thinking, 2: generation prompt), a count of messages, and for each message two strings, role and content; a
// conversation that the template has no text for gives FF (which is in no text) and the error.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "engine/text/tokenizer.h"

namespace {

std::string read_file(const char* path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error(std::string("cannot read ") + path);
    return {std::istreambuf_iterator<char>(in), {}};
}

bool read_bytes(void* to, size_t n) { return std::fread(to, 1, n, stdin) == n; }

uint32_t read_count() {
    uint32_t n = 0;
    if (!read_bytes(&n, 4)) throw std::runtime_error("input ends too early");
    return n;
}

std::string read_string(uint32_t n) {
    std::string s(n, '\0');
    if (!read_bytes(s.data(), n)) throw std::runtime_error("input ends too early");
    return s;
}

template <typename Items>
void write_items(const Items& items) {
    const auto n = static_cast<uint32_t>(items.size());
    std::fwrite(&n, 4, 1, stdout);
    std::fwrite(items.data(), sizeof items[0], n, stdout);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of several runs: the machine may have other things to do.
template <typename Function>
double best_seconds(int runs, Function f) {
    double best = 1e9;
    for (int i = 0; i < runs; i++) {
        const auto start = std::chrono::steady_clock::now();
        f();
        best = std::min(best, seconds_since(start));
    }
    return best;
}

void bench(std::span<const std::byte> section, int vocab_size, const char* path) {
    const double load = best_seconds(5, [&] { Tokenizer(section, vocab_size); });
    const Tokenizer tokenizer = Tokenizer(section, vocab_size);
    const std::string text = read_file(path);
    size_t n_ids = 0;
    const double encode = best_seconds(5, [&] { n_ids = tokenizer.encode(text, false).size(); });
    std::printf("load %.1f ms, encode %.1f MB/s (%zu bytes, %zu ids)\n", 1e3 * load,
                text.size() / encode / 1e6, text.size(), n_ids);
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 3) throw std::runtime_error("usage: tokenize_tool SECTION VOCAB_SIZE [option]");
    const std::string section = read_file(argv[1]);
    const auto bytes = std::as_bytes(std::span(section));
    const int vocab_size = std::atoi(argv[2]);
    const std::string_view mode = argc > 3 ? argv[3] : "";
    if (mode == "--bench" && argc > 4) {
        bench(bytes, vocab_size, argv[4]);
        return 0;
    }
    const Tokenizer tokenizer = Tokenizer(bytes, vocab_size);
    for (uint32_t n = 0; mode != "--chat" && read_bytes(&n, 4);) {
        if (mode == "--decode") {
            std::vector<int> ids(n);
            if (!read_bytes(ids.data(), 4 * size_t{n})) throw std::runtime_error("input ends too early");
            Utf8Stream stream;
            std::string text;
            for (const int id : ids) text += stream.push(tokenizer.token_bytes(id));
            write_items(text + stream.flush());
        } else {
            write_items(tokenizer.encode(read_string(n), mode == "--bos"));
        }
    }
    for (uint8_t options = 0; mode == "--chat" && read_bytes(&options, 1);) {
        std::vector<ChatMessage> messages(read_count());
        for (ChatMessage& m : messages) {
            m.role = read_string(read_count());
            m.content = read_string(read_count());
        }
        try {
            write_items(tokenizer.render_chat(messages, options & 1, options & 2));
        } catch (const std::runtime_error& e) {
            write_items("\xFF" + std::string(e.what()));
        }
    }
    return 0;
} catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
