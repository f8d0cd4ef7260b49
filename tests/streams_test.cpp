// What a terminal gets to see, and what files and pipes get.
#include "engine/app/streams.h"

#include <doctest/doctest.h>
#include <pty.h>

#include <csignal>
#include <string>
#include <thread>

TEST_CASE("printable: control characters are spelled out, all else stays") {
    CHECK(printable("") == "");
    CHECK(printable("naïve 漢字 🙂 \\ ~") == "naïve 漢字 🙂 \\ ~");
    CHECK(printable("a\x1b[31mb") == "a\\x1b[31mb");
    CHECK(printable(std::string("\0\x01\x1f\x7f", 4)) == "\\x00\\x01\\x1f\\x7f");
    CHECK(printable("line\nbreak\ttab\r") == "line\\x0abreak\\x09tab\\x0d");
    CHECK(printable("line\nbreak\ttab\r", "\n\t") == "line\nbreak\ttab\\x0d");
    // C1: U+0080 to U+009F, as two bytes of UTF-8 and as bytes that are none.
    CHECK(printable("\xC2\x80 \xC2\x9B \xC2\x9F \xC2\xA0") == "\\x80 \\x9b \\x9f \xC2\xA0");
    CHECK(printable("\x9B[31m \xC2 \xFF") == "\\x9b[31m \\xc2 \\xff");
    CHECK(printable("\xE2\x82") == "\\xe2\\x82");
    CHECK(printable("\xC3\x9B \xE2\x80\x9B") == "\xC3\x9B \xE2\x80\x9B");  // 9B as a part of a character
    CHECK(printable("\xC2\x85", "\n\t\x85") == "\\x85");
}

TEST_CASE("foreign text: a terminal obeys line breaks and tabs only, files get every byte") {
    const std::string text =
        "a\x1b]0;title\x07\xC2\x9B"
        "1m\tb\n";
    std::FILE* file = std::tmpfile();
    put_foreign(file, text);
    std::rewind(file);
    std::string got(100, '\0');
    got.resize(std::fread(got.data(), 1, got.size(), file));
    std::fclose(file);
    CHECK(got == text);

    int master = -1, slave = -1;
    REQUIRE(openpty(&master, &slave, nullptr, nullptr, nullptr) == 0);
    std::FILE* terminal = fdopen(slave, "w");
    put_foreign(terminal, text);
    got.assign(100, '\0');
    got.resize(size_t(read(master, got.data(), got.size())));
    CHECK(got == "a\\x1b]0;title\\x07\\x9b1m\tb\r\n");  // the terminal itself adds the \r
    std::fclose(terminal);
    close(master);
}

TEST_CASE("texts: one rule, wherever the pieces end in which a file is read") {
    struct Case {
        std::string bytes, text;
        const char* error = nullptr;
    };
    const Case cases[] = {
        {"", ""},
        {"a\r\nb\n\r\n\r\r\n\r", "a\nb\n\n\r\n\r"},
        {"\xEF\xBB\xBF\xEF\xBB\xBFnaïve 漢字 🙂", "\xEF\xBB\xBFnaïve 漢字 🙂"},
        {"\r\n\xEF\xBB\xBF", "\n\xEF\xBB\xBF"},
        {std::string("a\0b", 3), std::string("a\0b", 3)},
        {"\r\n\xE2\x82", "", "x is not UTF-8 at byte 2"},
        {"\xEF\xBB\xBF\xE2\x82 ", "", "x is not UTF-8 at byte 3"},
        {"\xF0\x9F\x99", "", "x is not UTF-8 at byte 0"},
        {"\xEF\xBB", "", "x is not UTF-8 at byte 0"},
        {std::string("\xFF\xFEh\0i\0", 6), "", "x is not UTF-8 at byte 0; it looks like UTF-16"},
    };
    for (const Case& c : cases) {
        const auto& [bytes, expected, error] = c;
        CAPTURE(c.bytes);
        for (size_t piece : {1u, 2u, 3u, 100u}) {
            TextRule rule("x");
            std::string text, said;
            try {
                for (size_t i = 0; i < bytes.size(); i += piece)
                    rule.add(std::string_view(bytes).substr(i, piece), false, text);
                rule.add("", true, text);
            } catch (const std::runtime_error& e) {
                said = e.what();
            }
            if (error == nullptr) CHECK(text == expected);
            if (error == nullptr || piece == 100) CHECK(said == (error == nullptr ? "" : error));
            if (error != nullptr) CHECK(std::string(error).starts_with(said.substr(0, said.find(';'))));
            CHECK(said.empty() == (error == nullptr));
        }
    }
}

TEST_CASE("a text from a pipe: what is there is taken at once, and Ctrl-C ends the wait for more") {
    void (*const before)(int) = std::signal(SIGINT, SIG_DFL);
    catch_ctrl_c();
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    std::FILE* in = fdopen(ends[0], "rb");
    char bytes[8];
    for (const std::string piece : {"a", "bc"}) {
        REQUIRE(write(ends[1], piece.data(), piece.size()) == ssize_t(piece.size()));
        CHECK(std::string(bytes, read_bytes(in, bytes, sizeof bytes)) ==
              piece);  // and does not wait for eight
    }
    std::thread writer([&] {
        REQUIRE(write(ends[1], "d", 1) == 1);
        kill(getpid(), SIGINT);  // before the reader's first wait, in it, or between it and the second
    });
    std::string text;
    TextFile file("--ppl", "-", in);
    CHECK_FALSE(file.read(text, 100));  // the pipe stays open
    CHECK(interrupted == 1);
    writer.join();
    interrupted = 0;
    CHECK((text.empty() || text == "d"));
    close(ends[1]);
    CHECK_FALSE(file.read(text, 100));
    CHECK(text == "d");
    std::fclose(in);

    std::FILE* folder = std::fopen("/", "rb");
    CHECK_THROWS_WITH(TextFile("-f", "-", folder).read(text, 100), "-f: cannot read '-': Is a directory");
    std::fclose(folder);
    std::signal(SIGINT, before);
}
