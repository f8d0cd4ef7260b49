// What a terminal gets to see, and what files and pipes get.
#include "engine/app/streams.h"

#include <doctest/doctest.h>
#include <pty.h>
#include <unistd.h>

#include <string>

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

TEST_CASE("texts: one rule, and of a beginning the last character may be cut off") {
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
        for (const bool is_whole : {true, false}) {
            const bool is_cut =
                !is_whole && (bytes == "\r\n\xE2\x82" || bytes == "\xF0\x9F\x99" || bytes == "\xEF\xBB");
            std::string text, said;
            try {
                text = text_by_rule("x", bytes, is_whole);
            } catch (const std::runtime_error& e) {
                said = e.what();
            }
            CHECK(said == (error == nullptr || is_cut ? "" : error));
            if (error == nullptr) CHECK(text == expected);
        }
    }
}

TEST_CASE("a text file: all of it by the rule, or none if it is longer, and then it is not read to its end") {
    std::string bytes = "\xEF\xBB\xBF", expected;
    while (bytes.size() < 1'000'000) bytes += "naïve 漢字 🙂\r\n", expected += "naïve 漢字 🙂\n";
    std::FILE* in = std::tmpfile();
    std::fwrite(bytes.data(), 1, bytes.size(), in);
    const auto file = [&] {
        std::rewind(in);
        return TextFile("--ppl", "-", in);
    };
    CHECK(file().text(expected.size()) == expected);
    CHECK(file().text(1 << 30) == expected);
    CHECK_FALSE(file().text(expected.size() - 1));
    CHECK_FALSE(file().text(100'000));
    CHECK(std::ftell(in) <= 200'003 + (1 << 16));

    // "\r\n" alone is half as many bytes.
    std::rewind(in);
    for (int i = 0; i < 500'000; i++) std::fwrite("\r\n", 1, 2, in);
    REQUIRE(ftruncate(fileno(in), 1'000'000) == 0);
    CHECK(file().text(500'000) == std::string(500'000, '\n'));
    CHECK_FALSE(file().text(499'999));

    // What is no text is said at once where the beginning has it, or else before the length.
    std::rewind(in);
    std::fwrite("a\xFF", 1, 2, in);
    CHECK_THROWS_WITH(file(), "--ppl: '-' is not UTF-8 at byte 1");
    std::rewind(in);
    std::fwrite("aa", 1, 2, in);
    std::fseek(in, 100'000, SEEK_SET);
    std::fwrite("\xFF", 1, 1, in);
    CHECK_THROWS_WITH(file().text(50'000), "--ppl: '-' is not UTF-8 at byte 100000");
    std::fclose(in);

    std::FILE* folder = std::fopen("/", "rb");
    CHECK_THROWS_WITH(TextFile("-f", "-", folder), "-f: cannot read '-': Is a directory");
    std::fclose(folder);
}
