// Tokenizer sections and texts made to cost much: every one loads or is refused, and encodes or gives up, in
// memory and time that grow with its size and not with the square of it. docs/tokenizer.md lists the limits.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "section.h"

namespace {

using namespace section;

Tokenizer load(const Section& s) {
    const std::string bytes = s.bytes();
    return Tokenizer(std::as_bytes(std::span(bytes)), s.vocab_size());
}

// What `f` throws, "" if it does not.
std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const std::runtime_error& e) {
        return e.what();
    }
    return "";
}
std::string error_of(const Section& s) {
    return error_of([&] { (void)load(s); });
}

// A token for every byte, and no merges.
Section bytes_section() {
    Section s;
    for (int b = 0; b < 256; b++) s.add(std::string(1, static_cast<char>(b)), defined | word);
    return s;
}

[[maybe_unused]] std::string repeated(const std::string& text, size_t n) {
    std::string out;
    out.reserve(text.size() * n);
    for (size_t i = 0; i < n; i++) out += text;
    return out;
}

// Seconds of this thread's processor time, the best of three.
double cost(const std::function<void()>& f) {
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        timespec start, end;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        f();
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        best = std::min(best, static_cast<double>(end.tv_sec - start.tv_sec) +
                                  1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec));
    }
    return best;
}

// Runs `f` in a process that may take `bytes` more than this one has: 0 if it returns, 1 if it throws a
// std::runtime_error, 2 if it runs out of memory.
int in_memory(size_t bytes, const std::function<void()>& f) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        unsigned long pages = 0;
        std::FILE* statm = std::fopen("/proc/self/statm", "r");
        if (statm == nullptr || std::fscanf(statm, "%lu", &pages) != 1) _exit(3);
        const rlim_t limit = pages * static_cast<unsigned long>(sysconf(_SC_PAGESIZE)) + bytes;
        const rlimit both{limit, limit};
        if (setrlimit(RLIMIT_AS, &both) != 0) _exit(3);
        try {
            f();
        } catch (const std::bad_alloc&) {
            _exit(2);
        } catch (const std::runtime_error&) {
            _exit(1);
        }
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

// ----------------------------------------------------------------------------
// Loading

TEST_CASE("added tokens: each id once, in memory for their bytes") {
    Section s = bytes_section();
    const uint32_t id = s.add(std::string(1'000, 'x'), defined);
    s.added.assign(200'000, {id, 0});
    const std::string bytes = s.bytes();  // 1.6 MB
    CHECK(in_memory(64 << 20, [&] { (void)Tokenizer(std::as_bytes(std::span(bytes)), s.vocab_size()); }) ==
          1);
    s.added.resize(2);
    CHECK(error_of(s) == "tokenizer: added[1].id 256 is there twice");
    s.added.resize(1);
    CHECK(error_of(s).empty());

    // Different ones, of the greatest length.
    s = bytes_section();
    std::mt19937 random(1);
    for (int i = 0; i < 4096; i++) {
        std::string name;
        while (name.size() < 1024) name += static_cast<char>('a' + random() % 26);
        s.added.push_back({s.add(name, defined), 0});
    }
    const std::string many = s.bytes();
    CHECK(in_memory(32 * many.size(),
                    [&] { (void)Tokenizer(std::as_bytes(std::span(many)), s.vocab_size()); }) == 0);
    const uint32_t longer = s.add(std::string(1025, 'a'), defined);
    s.added.push_back({longer, 0});
    CHECK(error_of(s) ==
          "tokenizer: added[4096].id " + std::to_string(longer) + " is a token longer than 1024 bytes");
}

TEST_CASE("sizes of tokens, merges, patterns and chat") {
    Section s = bytes_section();
    s.add(std::string(16384, 'x'), defined);
    CHECK(error_of(s).empty());
    s.add(std::string(16385, 'x'), defined);
    CHECK(error_of(s) == "tokenizer: token 257 of 16385 bytes is longer than 16384");

    s = bytes_section();
    s.pattern = "[" + std::string(16382, 'a') + "]";
    CHECK(error_of(s).empty());
    s.pattern += 'a';
    CHECK(error_of(s) == "tokenizer: pattern_size 16385 is more than 16384");
    std::swap(s.pattern, s.word_pattern);
    CHECK(error_of(s) == "tokenizer: word_pattern_size 16385 is more than 16384");

    s = bytes_section();
    s.flags = chat_flag;
    std::vector<std::string> pieces(13);
    pieces[0] = std::string((1 << 20) - 4 - 13 * 4, 'x');
    s.chat = chat_bytes(0, pieces);
    CHECK(error_of(s).empty());
    pieces[0] += 'x';
    s.chat = chat_bytes(0, pieces);
    CHECK(error_of(s) == "tokenizer: chat_size 1048577 is more than 1048576");

    // Few and long tokens have many pairs, and every one is compared with its parts.
    s = bytes_section();
    const auto longs = static_cast<uint32_t>(s.tokens.size());
    for (int i = 0; i < 100; i++) s.add(std::string(8000, 'x'), defined | word);
    const uint32_t both = s.add(std::string(16000, 'x'), defined | word);
    for (uint32_t i = 0; i < 100; i++) {
        for (uint32_t k = 0; k < 100; k++) s.merges.push_back({longs + i, longs + k, both});
    }
    CHECK(error_of(s) == "tokenizer: merges[1208] 356 makes merges too long in all");
    s.merges.resize(1000);
    CHECK(error_of(s).empty());
}

TEST_CASE("hash: no keys collide in every process") {
    // Under one draw, many pairs in one slot of 2^16; under others these are spread. A single draw may be
    // unlucky: 1.4 % leave fewer than 900 slots. Half of 21 are not.
    const RandomHash one, other;
    std::vector<uint64_t> same;
    for (uint64_t pair = 0; same.size() < 1000; pair++) {
        if ((one(pair) & 0xFFFF) == 0) same.push_back(pair);
    }
    std::array<size_t, 21> n_slots;
    for (size_t& n : n_slots) {
        const RandomHash another;
        std::set<uint64_t> slots;
        for (const uint64_t pair : same) slots.insert(another(pair) & 0xFFFF);
        n = slots.size();
    }
    std::nth_element(n_slots.begin(), n_slots.begin() + 10, n_slots.end());
    CHECK(n_slots[10] > 900);  // 992 are expected
    CHECK(one(std::string_view("hello")) != other(std::string_view("hello")));
    CHECK(one(std::string_view("hello")) == one(std::string_view("hello")));
    CHECK(one(std::string_view("a")) != one(std::string_view("a\0", 2)));
}

TEST_CASE("merges that collide under a fixed multiplier load as fast as others") {
    // All tokens are one letter, so that any two merge. The slots are those of the first version of the
    // table.
    const auto first_slot = [](uint64_t left, uint64_t right, uint64_t slots) {
        const uint64_t key = left << 32 | right;
        return ((key ^ key >> 29) * 0x9E3779B97F4A7C15ull >> 24) & (slots - 1);
    };
    Section s;
    for (int i = 0; i < 20'000; i++) s.add("x", defined | word);
    const uint32_t both = s.add("xx", defined | word);
    Section harmless = s;
    for (uint32_t left = 0; s.merges.size() < 32'000; left++) {
        for (uint32_t right = 0; right < 20'000 && s.merges.size() < 32'000; right++) {
            if (first_slot(left, right, 1 << 16) < 32) s.merges.push_back({left, right, both});
        }
    }
    for (uint32_t i = 0; i < 32'000; i++) harmless.merges.push_back({i % 20'000, i / 20'000, both});
    const std::string bytes = s.bytes(), plain = harmless.bytes();
    const auto seconds = [&](const std::string& section) {
        return cost([&] { (void)Tokenizer(std::as_bytes(std::span(section)), s.vocab_size()); });
    };
    CHECK(seconds(bytes) < 20 * seconds(plain));
}

TEST_CASE("words that collide under a fixed multiplier load as fast as others") {
    // Flipping bit 63 of eight bytes, and bits 63 and 31 of the next eight, cancels out in h = (h ^ x) * odd,
    // h ^= h >> 32, whatever the odd number.
    Section s = bytes_section(), harmless = bytes_section();
    s.flags = harmless.flags = ignore_merges_flag;
    for (uint32_t i = 0; i < 1 << 13; i++) {
        std::string text(13 * 16, 'a');
        for (size_t bit = 0; bit < 13; bit++) {
            if (i >> bit & 1)
                text[16 * bit + 7] ^= '\x80', text[16 * bit + 15] ^= '\x80', text[16 * bit + 11] ^= '\x80';
        }
        s.add(text, defined | word);
        harmless.add(std::to_string(i) + std::string(200, 'a'), defined | word);
    }
    const std::string bytes = s.bytes(), plain = harmless.bytes();
    const auto seconds = [&](const std::string& section) {
        return cost([&] { (void)Tokenizer(std::as_bytes(std::span(section)), s.vocab_size()); });
    };
    CHECK(seconds(bytes) < 20 * seconds(plain));
}

#ifndef NO_TOKENIZER
// ----------------------------------------------------------------------------
// Regular expressions

TEST_CASE("patterns: what cannot be counted is refused") {
    Section s = bytes_section();
    const std::vector<std::pair<std::string, size_t>> refused{
        {R"((a)\1)", 3},           {R"(\g{1}(a))", 0},     {R"((?<n>a))", 0},        {R"(a(?R)?)", 1},
        {R"(a|(*sr:a*))", 2},      {R"((*NO_JIT)a)", 0},   {R"((?i)[a-z])", 0},      {R"((?i:[a-z]))", 0},
        {R"((?i:\p{Lu}))", 0},     {R"((?i:a(?:b)))", 0},  {R"((?#[)(?i)[a-z])", 0}, {R"(\Q[\E(?i)[a-z])", 0},
        {R"(\c[(?i)[a-z])", 0},    {R"([]](?i)[a-z])", 0}, {R"([^]](?i)[a-z])", 0},  {R"([a[:^alpha:]])", 2},
        {R"(a{1000})", 1},         {R"(\s{2,1000})", 2},   {R"(\p{L}{1000,})", 5},   {R"([a]{9999})", 3},
        {R"(\[(?i)[a-z])", 2},     {R"((?-i:a))", 0},      {R"((?>a))", 0},          {R"((?|(a)|(b)))", 0},
        {R"(\x{5b}(?i)[a-z])", 6}, {R"((?<=a)b)", 0},      {R"(a(?<!a))", 1}};
    for (const auto& [pattern, at] : refused) {
        s.pattern = pattern;
        CHECK(error_of(s) ==
              "tokenizer: pattern has something at byte " + std::to_string(at) + " that is not supported");
    }
    for (const char* pattern :
         {R"((a)|[(*?i](?:b)(?=c)(?!d))", R"([(?i)])", R"([^\]\[a-z]\(*)", R"((?i:'s|'t|re))",
          R"(\p{N}{1,3}|a{999}|2024|\{1000\})", R"([\x{1c89}-\x{1c8a}\t-\r]+.\b^$\w\d)", R"(\p{L}\[\]\\)"}) {
        s.pattern = pattern;
        CHECK(error_of(s) == "");
    }
}

TEST_CASE("a pattern has a number of steps for the whole text") {
    Section s = bytes_section();
    const auto error = [&](const std::string& pattern, const std::string& text) {
        s.pattern = pattern;
        const Tokenizer t = load(s);
        return error_of([&] { (void)t.encode(text, false); });
    };
    // No match alone takes the 119,200 steps of this text. Together they did take 20 seconds.
    CHECK(error("a*a*a*a*[bc]|a", std::string(300, 'a')) ==
          "tokenizer: pattern fails at byte 0 of a text of 300: it takes more than 119200 steps");
    CHECK(error("a*b|a*c|a*d|a*e|a*f", std::string(300, 'a')) ==
          "tokenizer: pattern fails at byte 47 of a text of 300: it takes more than 119200 steps");
    // What a repeat runs over counts, also where nothing is tried anew.
    for (const char* pattern : {"a+b", "(?:a*b|a)*c", "(?=a*b)a|(?!a*)b", "(?:a{200}b|a{199}c)"}) {
        CHECK(error(pattern, std::string(20'000, 'a')).ends_with("it takes more than 1380000 steps"));
    }
    CHECK(error(repeated("a*b|", 1000) + "c", std::string(300, 'a')).ends_with("more than 119200 steps"));
    // A stretch at a time, they have the same number of steps together.
    s.added.push_back({s.add("<s>", defined), 0});
    const std::string stretch = std::string(200, 'a') + "<s>";
    CHECK(error("a+b|a+c|a+d", stretch).empty());
    CHECK(error("a+b|a+c|a+d", repeated(stretch, 100)).ends_with("more than 1399200 steps"));
    s.added.clear();
    // The pattern of single_word is a hostile file's as well.
    s.added.push_back({s.add("w", defined), AddedToken::single_word});
    s.word_pattern = repeated("(?:|a|)", 40) + "[cd]";
    CHECK(error("", "awa").find("it takes more than 100192 steps") != std::string::npos);
}

TEST_CASE("real patterns take a fraction of their steps on any text") {
    const std::string llama3 =
        R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    std::string qwen2 = llama3;
    qwen2.replace(qwen2.find("{1,3}"), 5, "");
    const std::string gpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

    constexpr size_t n = 1'000'000;
    const auto line = [](char c, size_t length, const char* end) {
        return repeated(std::string(length, c) + end, n / length);
    };
    std::vector<std::string> texts{line(' ', n, ""),
                                   line(' ', n, "x"),
                                   line('a', n, ""),
                                   line('7', n, ""),
                                   line('\n', n, ""),
                                   line('-', n, ""),
                                   line('\'', n, ""),
                                   line(' ', 1000, "x"),
                                   line(' ', 200, "\n"),
                                   line('-', 300, "\n"),
                                   line('A', 200, " "),
                                   line('\n', 130, " "),
                                   line(' ', n / 2, std::string(n / 2, '\n').c_str()),
                                   repeated("\xE4\xB8\xAD", n / 3),
                                   repeated("\xC2\xA0", n / 2),
                                   repeated("\r\n", n / 2),
                                   repeated("e\xCC\x81", n / 3)};
    std::mt19937 random(1);
    std::string mixed;
    while (mixed.size() < n) {
        mixed += std::string(1 + random() % (random() % 20 ? 4 : 400), " \n\ra7-A'"[random() % 8]);
    }
    texts.push_back(mixed);
    for (const std::string& pattern : {llama3, qwen2, gpt2}) {
        AnchoredRegex regex;
        regex.compile(pattern, "pattern");
        for (const std::string& text : texts) {
            RegexBudget budget(text.size());
            ptrdiff_t i = 0, end = 0;
            for (; i < static_cast<ptrdiff_t>(text.size()); i = end) {
                end = regex.match(text, static_cast<size_t>(i), budget);
                if (end <= i) break;
            }
            CHECK(i == static_cast<ptrdiff_t>(text.size()));
            CHECK(budget.total - budget.left <= budget.total / 10);
        }
    }
}

TEST_CASE("matches are the same with few steps and with many") {
    // Words around the window, and short ones whose backtracking takes more than the steps of a quick try.
    AnchoredRegex regex;
    regex.compile(R"((?:a|b)*c|\p{L}+(?!-)|\p{L}+-+|\s+(?!\S)|\b\.|.)", "pattern");
    std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr),
                                                                        pcre2_match_data_free);
    std::mt19937 random(3);
    size_t slow = 0;
    for (int repeat = 0; repeat < 200; repeat++) {
        std::string text;
        while (text.size() < 600) {
            const char* piece =
                std::array{"a", "b", "c", " ", "-", "\xC3\xA9", "\xE4\xB8\xAD", "."}[random() % 8];
            text += ::repeated(piece, 1 + (random() % 4 ? 0 : random() % 150));
        }
        RegexBudget budget(text.size());
        for (size_t i = 0; i < text.size(); i += utf8_first(std::string_view(text).substr(i)).length) {
            const int rc = pcre2_match(regex.code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                       text.size(), i, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
            const ptrdiff_t expected =
                rc < 0 ? -1 : static_cast<ptrdiff_t>(pcre2_get_ovector_pointer(data.get())[1]);
            budget.left = budget.total;
            CHECK(regex.match(text, i, budget) == expected);
            slow += budget.left < budget.total;
        }
    }
    CHECK(slow > 1000);
}

// ----------------------------------------------------------------------------
// Normalization, added tokens, merging

TEST_CASE("NFC is utf8proc's, also of marks in any order") {
    const auto expected = [](const std::string& s) {
        utf8proc_uint8_t* composed = nullptr;
        const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(s.data()),
                                    static_cast<utf8proc_ssize_t>(s.size()), &composed,
                                    static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
        REQUIRE(n >= 0);
        const std::string out(reinterpret_cast<const char*>(composed), static_cast<size_t>(n));
        std::free(composed);
        return out;
    };
    // Marks of many classes, what they compose with, decompositions of two, three and four, Hangul.
    const std::vector<std::string> pieces{"a",
                                          "e",
                                          "\xCC\x81",
                                          "\xCC\x80",
                                          "\xCC\xA3",
                                          "\xCC\xB4",
                                          "\xCD\x85",
                                          "\xCC\x93",
                                          "\xCE\xB1",
                                          "\xE1\xBE\x82",
                                          "\xC3\xA9",
                                          "\xE1\xBA\xAD",
                                          "\xCE\x90",
                                          "\xE1\x84\x80",
                                          "\xE1\x85\xA1",
                                          "\xE1\x86\xA8",
                                          "\xEA\xB0\x80",
                                          "\xE3\x81\x8B",
                                          "\xE3\x82\x99",
                                          "\xD7\xA9",
                                          "\xD6\xBC",
                                          "\xD7\x81",
                                          "\xE0\xA5\x98",
                                          "\xE0\xA4\xBC",
                                          "\xF0\x9D\x85\xA0",
                                          "\xE2\x84\xAB",
                                          "\xE0\xBD\xB1",
                                          "\xE0\xBD\xB2",
                                          "x",
                                          " "};
    std::mt19937 random(7);
    for (int i = 0; i < 20'000; i++) {
        std::string s;
        const size_t n_kinds = 1 + random() % pieces.size(), first = random() % pieces.size();
        for (uint32_t n = random() % 40; n > 0; n--)
            s += pieces[(first + random() % n_kinds) % pieces.size()];
        CHECK(nfc(s) == expected(s));
    }
    for (const char* marks : {"\xCC\x81\xCC\xA3", "\xCC\xA3\xCC\x81"}) {
        const std::string s = "a" + repeated(marks, 1000);
        CHECK(nfc(s) == expected(s));
    }
}

TEST_CASE("NFC takes as long for marks in the wrong order as in the right one") {
    const std::string above = repeated("\xCC\x81", 20'000), below = repeated("\xCC\xA3", 20'000);  // 80 KB
    const double sorted = cost([&] { (void)nfc("a" + below + above); });
    CHECK(nfc("a" + above + below) == nfc("a" + below + above));
    CHECK(cost([&] { (void)nfc("a" + above + below); }) < 20 * sorted);
    CHECK(cost([&] { (void)nfc("a" + repeated("\xCC\x81\xCC\xA3", 20'000)); }) < 20 * sorted);
}

TEST_CASE("added tokens are found in a time that their number hardly changes") {
    const std::string text(300'000, 'a'), spaces(300'000, ' ');
    const Tokenizer none = load(bytes_section());
    const double plain = cost([&] { (void)none.encode(text, false); });

    Section s = bytes_section();  // all but the last byte of each matches at every place
    for (const char last : {'b', 'c', 'd'}) {
        s.added.push_back({s.add(std::string(1'000, 'a') + last, defined), 0});
        s.added.push_back({s.add(last + std::string(1'000, 'a'), defined), 0});
    }
    for (int i = 0; i < 20'000; i++) s.added.push_back({s.add("aa" + std::to_string(i), defined), 0});
    const Tokenizer many = load(s);
    CHECK(many.encode(text, false).size() == text.size());
    CHECK(cost([&] { (void)many.encode(text, false); }) < 50 * plain);

    // The most: a place where all of 1,000 tokens begin that each begin with the one before, but none ends.
    s = bytes_section();
    for (size_t n = 2; n <= 1000; n++) s.added.push_back({s.add(std::string(n, 'a'), defined), 0});
    const Tokenizer nested = load(s);
    std::string steps;
    while (steps.size() < text.size()) steps += "ab";
    CHECK(cost([&] { (void)nested.encode(steps, false); }) < 500 * plain);

    // The white space that a token takes along is measured once.
    for (const uint32_t flags : {4, 8, 4 | 8}) {
        s = bytes_section();
        s.added.push_back({s.add(" ", defined), flags});
        const Tokenizer strips = load(s);
        CHECK(strips.encode(spaces, false).size() == spaces.size());
        CHECK(cost([&] { (void)strips.encode(spaces, false); }) < 50 * plain);
    }
}

TEST_CASE("a word of 256 KB is merged as fast as many short ones") {
    Section s = bytes_section();
    uint32_t run = 'a';
    for (size_t length = 2; length <= 4096; length *= 2) {
        const uint32_t twice = s.add(std::string(length, 'a'), defined | word);
        s.merges.push_back({run, run, twice});
        run = twice;
    }
    s.pattern = "a+";
    const Tokenizer t = load(s);
    const std::string word_of_a(1 << 18, 'a'), words = repeated(std::string(31, 'a') + " ", 1 << 13);
    CHECK(t.encode(word_of_a, false) == std::vector<int>((1 << 18) / 4096, static_cast<int>(run)));
    CHECK(cost([&] { (void)t.encode(word_of_a, false); }) < 20 * cost([&] { (void)t.encode(words, false); }));
}
#endif
