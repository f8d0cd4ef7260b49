// The tokenizer on sections that the test makes itself: characters out of bytes, ids by hand, chat texts, and
// broken sections, none of which may do more than throw. Ids against Hugging Face: tests/test_tokenizer.py.
#include "engine/text/tokenizer.h"

#include <doctest/doctest.h>

#include <random>

#include "section.h"

namespace {

using namespace section;

// ----------------------------------------------------------------------------
// A small section

Tokenizer load(const std::string& bytes, int vocab_size) {
    return Tokenizer(std::as_bytes(std::span(bytes)), vocab_size);
}
Tokenizer load(const Section& s) { return load(s.bytes(), s.vocab_size()); }

// Ids 0..255 are the bytes, then come the merges, <s>, </s> and a gap such as a padded vocabulary has.
Section small_section() {
    Section s;
    for (int b = 0; b < 256; b++) s.add(std::string(1, static_cast<char>(b)), defined | word);
    const auto merge = [&](uint32_t left, uint32_t right) {
        s.merges.push_back(
            {left, right, s.add(s.tokens[left].bytes + s.tokens[right].bytes, defined | word)});
        return s.merges.back()[2];
    };
    const uint32_t he = merge('h', 'e'), ll = merge('l', 'l');
    const uint32_t hell = merge(he, ll);
    merge(hell, 'o');
    merge(ll, 'o');
    s.bos_id = s.add("<s>", defined | special);
    s.added.push_back({s.bos_id, 1});
    s.added.push_back({s.add("</s>", defined), 4 | 8 | 16});  // lstrip, rstrip, single_word
    s.add("", 0);
    s.pattern = R"(\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    s.word_pattern = R"([\p{L}\p{N}_])";
    s.flags = nfc_flag | add_bos_flag | chat_flag;
    s.chat = chat_bytes(8 | 16, {"<none>", "<sys>", "</sys>", "<late>", "</late>", "<user>", "</user>",
                                 "<bot>", "</bot>", "<bot>", "<bot>no thoughts", "{", "}"});
    return s;
}

const std::string awkward_text = "hello hell </s>\xC3\xA9 e\xCC\x81 x</s> <s>\xFF\xF0\x9F 12   \n";

// Every thing a program does with a tokenizer, for sections that load although something in them was changed.
void use(const Tokenizer& t) {
    try {
        for (const int id : t.encode(awkward_text, true)) {
            if (id < 0 || id >= t.vocab_size()) throw std::logic_error("an id that is none");
        }
    } catch (const std::runtime_error&) {  // the pattern gave up
    }
    for (int id = -1; id <= t.vocab_size(); id++) {
        (void)t.token_bytes(id);
        (void)t.is_special(id);
    }
    if (t.has_chat()) {
        const std::vector<ChatMessage> messages{{"system", "s"}, {"user", "u"}, {"assistant", "</think> a"}};
        (void)t.render_chat(messages, true, true);
    }
}

// True if the section loads, and then can be used; false if loading throws what it may.
bool loads(const std::string& bytes, int vocab_size) {
    try {
        use(load(bytes, vocab_size));
        return true;
    } catch (const std::runtime_error& e) {
        CHECK_MESSAGE(std::string_view(e.what()).starts_with("tokenizer: "), e.what());
        return false;
    }
}

std::string error_of(const Section& s) {
    try {
        (void)load(s);
    } catch (const std::runtime_error& e) {
        return e.what();
    }
    return "";
}

}  // namespace

// ----------------------------------------------------------------------------

TEST_CASE("Utf8Stream: whole characters, ill-formed bytes as Python replaces them") {
    // The right sides are bytes.decode("utf-8", errors="replace") of the left, with R for U+FFFD.
    const std::vector<std::pair<std::string, std::string>> cases{
        {"", ""},
        {"abc", "abc"},
        {"\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80", "\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80"},
        {"\xF4\x8F\xBF\xBF\xEF\xBF\xBF\xED\x9F\xBF", "\xF4\x8F\xBF\xBF\xEF\xBF\xBF\xED\x9F\xBF"},
        {"\x80", "R"},
        {"a\xFF"
         "b",
         "aRb"},
        {"\xC0\x80\xC1\xBF", "RRRR"},                 // overlong
        {"\xE0\x80\x80\xF0\x8F\xBF\xBF", "RRRRRRR"},  // overlong
        {"\xED\xA0\x80", "RRR"},                      // a surrogate
        {"\xF4\x90\x80\x80\xF5\x80", "RRRRRR"},       // above U+10FFFF
        {"\xE2\x82", "R"},                            // ends too early: one each
        {"\xF0\x9F\x98", "R"},
        {"\xE2\x82x\xF0\x9Fx\xF0\x9F\x98x", "RxRxRx"},
        {"\xE2\xE2\x82\xAC\xC3", "R\xE2\x82\xACR"},
    };
    for (const auto& [bytes, text] : cases) {
        std::string expected;
        for (const char c : text)
            expected += c == 'R' ? std::string(kReplacementCharacter) : std::string(1, c);
        CHECK(utf8_replace_invalid(bytes) == expected);
        CHECK(utf8_valid_prefix(bytes) == (bytes == expected ? bytes.size() : utf8_valid_prefix(bytes)));
        // Cut anywhere, it comes to the same, and what has been handed out is always whole.
        for (size_t cut = 0; cut <= bytes.size(); cut++) {
            Utf8Stream stream;
            std::string out = stream.push(bytes.substr(0, cut));
            CHECK(utf8_valid_prefix(out) == out.size());
            for (const char c : bytes.substr(cut)) out += stream.push(std::string_view(&c, 1));
            CHECK(out + stream.flush() == expected);
            CHECK(stream.flush().empty());
        }
    }
}

TEST_CASE("Utf8Stream holds a character back until it is whole") {
    Utf8Stream stream;
    CHECK(stream.push("a\xF0\x9F") == "a");
    CHECK(stream.push("\x98").empty());
    CHECK(stream.push("\x80z") == "\xF0\x9F\x98\x80z");
    CHECK(stream.flush().empty());
}

TEST_CASE("tokens: bytes, special ones, ids out of range") {
    const Section s = small_section();
    const Tokenizer t = load(s);
    CHECK(t.vocab_size() == s.vocab_size());
    CHECK(t.bos_id() == static_cast<int>(s.bos_id));
    for (int id = 0; id < s.vocab_size(); id++) CHECK(t.token_bytes(id) == s.tokens[id].bytes);
    for (const int id : {-1, s.vocab_size(), INT32_MAX, INT32_MIN}) {
        CHECK(t.token_bytes(id).empty());
        CHECK_FALSE(t.is_special(id));
    }
    CHECK(t.is_special(t.bos_id()));
    CHECK_FALSE(t.is_special('a'));
    CHECK_FALSE(t.is_special(t.bos_id() + 1));
}

TEST_CASE("chat: the pieces, thoughts of earlier answers left out") {
    const Tokenizer t = load(small_section());
    REQUIRE(t.has_chat());
    const auto text = [&](std::vector<ChatMessage> m, bool think = true, bool prompt = false) {
        return t.render_chat(m, think, prompt);
    };
    CHECK(text({{"user", " u "}}) == "<none><user> u </user>");
    CHECK(text({{"system", "s"}, {"user", "u"}}, true, true) == "<sys>s</sys><user>u</user><bot>");
    CHECK(text({{"user", "u"}}, false, true) == "<none><user>u</user><bot>no thoughts");
    CHECK(text({{"user", "u"}, {"system", "s"}}) == "<none><user>u</user><late>s</late>");
    const std::string answer = "<think>\nhm\n</think>\n\nyes";
    CHECK(text({{"user", "u"}, {"assistant", answer}}) == "<none><user>u</user><bot>{hm}yes</bot>");
    CHECK(text({{"user", "u"}, {"assistant", answer}, {"user", "v"}}) ==
          "<none><user>u</user><bot>yes</bot><user>v</user>");
    CHECK(text({{"user", "\xFF"}}) == "<none><user>\xEF\xBF\xBD</user>");
    CHECK_THROWS_AS(text({}), std::runtime_error);
    CHECK_THROWS_AS(text({{"tool", "x"}}), std::runtime_error);

    Section s = small_section();
    s.chat[0] = 1 | 2 | 4;  // trim, no system message but the first, no thoughts
    const Tokenizer trims = load(s);
    const std::vector<ChatMessage> padded{
        {"system", "\n s\t"}, {"user", "\xE3\x80\x80u\x1C"}, {"assistant", " </think> "}};
    CHECK(trims.render_chat(padded, true, false) == "<sys>s</sys><user>u</user><bot></think></bot>");
    CHECK_THROWS_AS(trims.render_chat(std::vector<ChatMessage>{{"user", "u"}, {"system", "s"}}, true, false),
                    std::runtime_error);
    s.chat[0] = 8 | 16 | 32;  // only for conversations that take turns
    const Tokenizer strict = load(s);
    const ChatMessage system{"system", "s"}, user{"user", "u"}, bot{"assistant", "</think>a"};
    for (const std::vector<ChatMessage>& m : std::vector<std::vector<ChatMessage>>{{system},
                                                                                   {bot},
                                                                                   {user, user},
                                                                                   {system, bot},
                                                                                   {user, bot, bot},
                                                                                   {user, system},
                                                                                   {system, system, user}}) {
        CHECK_THROWS_AS(strict.render_chat(m, true, false), std::runtime_error);
    }
    CHECK(strict.render_chat(std::vector{system, user, bot, user}, true, false) ==
          "<sys>s</sys><user>u</user><bot>a</bot><user>u</user>");
    s.chat[0] = static_cast<char>(128);  // an answer is what follows its last </think>
    const std::vector<ChatMessage> thoughts{{"user", "u"}, {"assistant", "t</think>t</think>\n a "}};
    CHECK(load(s).render_chat(thoughts, true, false) == "<none><user>u</user><bot>\n a </bot>");
    s.chat[0] = static_cast<char>(128 | 64);
    CHECK(load(s).render_chat(thoughts, true, false) == "<none><user>u</user><bot> a </bot>");
    s.chat[0] = static_cast<char>(128 | 4);
    CHECK(load(s).render_chat(thoughts, true, false) == "<none><user>u</user><bot>a</bot>");
    s.flags &= ~chat_flag;
    s.chat.clear();
    CHECK_FALSE(load(s).has_chat());
    CHECK_THROWS_AS(load(s).render_chat(padded, true, false), std::runtime_error);
}

#ifdef NO_TOKENIZER
TEST_CASE("encode says that it was left out") {
    CHECK_THROWS_AS(load(small_section()).encode("a", false), std::runtime_error);
}
#else
TEST_CASE("encode: merges by rank, added tokens, BOS") {
    Section s = small_section();
    const Tokenizer t = load(s);
    const int he = 256, ll = 257, hell = 258, hello = 259, bos = 261, end = 262;
    using Ids = std::vector<int>;
    CHECK(t.encode("", false) == Ids{});
    CHECK(t.encode("", true) == Ids{bos});
    CHECK(t.encode("hello hell", true) == Ids{bos, hello, ' ', hell});
    CHECK(t.encode("he lll", false) == Ids{he, ' ', ll, 'l'});
    CHECK(t.encode("<s>hello<s>", false) == Ids{bos, hello, bos});
    CHECK(t.encode("e\xCC\x81", false) == Ids{0xC3, 0xA9});  // NFC
    CHECK(t.encode("\xC3", false) == Ids{0xEF, 0xBF, 0xBD});
    CHECK(t.encode("a  </s> \n,", false) == Ids{'a', end, ','});      // the spaces belong to </s>
    CHECK(t.encode("a</s>", false) == Ids{'a', '<', '/', 's', '>'});  // not a word of its own

    s.flags |= ignore_merges_flag;
    s.merges.clear();
    CHECK(load(s).encode("hello hell helloo", false) ==
          Ids{hello, ' ', hell, ' ', 'h', 'e', 'l', 'l', 'o', 'o'});
}

TEST_CASE("encode: of added tokens that begin alike, the longest that is there") {
    Section s = small_section();
    const auto add = [&](const std::string& text) {
        s.added.push_back({s.add(text, defined), 0});
        return static_cast<int>(s.added.back()[0]);
    };
    const int two = add("qq"), four = add("qqrr"), six = add("qqrrss"), other = add("qqrst"),
              behind = add("qs");
    const Tokenizer t = load(s);
    using Ids = std::vector<int>;
    CHECK(t.encode("qqrrss", false) == Ids{six});
    CHECK(t.encode("qqrrsq", false) == Ids{four, 's', 'q'});
    CHECK(t.encode("qqrsr", false) == Ids{two, 'r', 's', 'r'});
    CHECK(t.encode("qqrt", false) == Ids{two, 'r', 't'});
    CHECK(t.encode("qqrstqq", false) == Ids{other, two});
    CHECK(t.encode("qrqsqqz", false) == Ids{'q', 'r', behind, two, 'z'});
}

TEST_CASE("encode: each step cuts the pieces that the one before it left, and sees nothing around them") {
    Section s;
    for (int b = 0; b < 256; b++) s.add(std::string(1, static_cast<char>(b)), defined | word);
    const auto merge = [&](const std::string& both) {
        const auto left = static_cast<uint8_t>(both[0]), right = static_cast<uint8_t>(both[1]);
        s.merges.push_back({left, right, s.add(both, defined | word)});
        return static_cast<int>(s.merges.back()[2]);
    };
    const int ab = merge("ab"), bc = merge("bc"), cd = merge("cd");
    const auto ids = [&](const std::string& text) { return load(s).encode(text, false); };
    using Ids = std::vector<int>;
    s.flags = steps_flag;
    CHECK(ids("abcd") == Ids{ab, cd});  // no step at all
    s.pattern = step_bytes(0, "a");
    CHECK(ids("abcd") == Ids{'a', bc, 'd'});
    s.pattern = step_bytes(0, "a") + step_bytes(0, "b");
    CHECK(ids("abcd") == Ids{'a', 'b', cd});
    s.pattern = step_bytes(0, "d") + step_bytes(0, "b(?!cd)");  // nothing is behind c in "abc"
    CHECK(ids("abcd") == Ids{'a', 'b', 'c', 'd'});
    s.pattern = step_bytes(1, "[bc]");  // what no match covers is dropped
    CHECK(ids("abcd") == Ids{'b', 'c'});
    s.pattern = step_bytes(1, "bc|d+") + step_bytes(0, "c");
    CHECK(ids("abcdda") == Ids{'b', 'c', 'd', 'd'});
    CHECK(ids("a") == Ids{});

    const std::string a = step_bytes(0, "a");
    std::string many;
    for (int i = 0; i < 16; i++) many += a;
    s.pattern = many;
    CHECK(ids("abcd") == Ids{'a', bc, 'd'});
    const auto error = [&](const std::string& pattern) {
        s.pattern = pattern;
        return error_of(s);
    };
    CHECK(error(many + a) == "tokenizer: pattern_size 153 holds more than 16 steps");
    CHECK(error(step_bytes(2, "a")) == "tokenizer: pattern flags 2 has unknown bits");
    CHECK(error(a.substr(0, 8)) == "tokenizer: pattern of 1 bytes, but only 0 are left");
    CHECK(error(a + "x") == "tokenizer: pattern flags 4 bytes, but only 1 are left");
    CHECK(error(step_bytes(0, "\xFF")) == "tokenizer: pattern byte 0 is not valid UTF-8");
    CHECK(error(step_bytes(0, "a(")).starts_with("tokenizer: pattern does not compile at byte 2"));
}

TEST_CASE("encode: the heap for long words merges as the loop for short ones") {
    // Random merges over three letters. The plain definition is the third opinion.
    std::mt19937 random(1);
    Section s;
    for (const char c : {'a', 'b', 'c'}) s.add(std::string(1, c), defined | word);
    while (s.merges.size() < 60) {
        const auto pick = [&] { return static_cast<uint32_t>(random() % s.tokens.size()); };
        const uint32_t left = pick(), right = pick();
        const std::string both = s.tokens[left].bytes + s.tokens[right].bytes;
        const auto same = [&](const auto& m) { return m[0] == left && m[1] == right; };
        if (both.size() > 9 || std::any_of(s.merges.begin(), s.merges.end(), same)) continue;
        uint32_t merged = 0;
        while (merged < s.tokens.size() && s.tokens[merged].bytes != both) merged++;
        if (merged == s.tokens.size()) s.add(both, defined | word);
        s.merges.push_back({left, right, merged});
    }
    const Tokenizer t = load(s);
    for (size_t length = 1; length < 300; length += 1 + length / 10) {
        for (int repeat = 0; repeat < 20; repeat++) {
            std::string text;
            std::vector<int> ids;
            for (size_t i = 0; i < length; i++) {
                ids.push_back(static_cast<int>(random() % 3));
                text += static_cast<char>('a' + ids.back());
            }
            for (bool merged = true; merged;) {
                merged = false;
                for (const auto& m :
                     s.merges) {  // by rank: the first that occurs at all, where it first occurs
                    for (size_t i = 0; i + 1 < ids.size() && !merged; i++) {
                        if (ids[i] != static_cast<int>(m[0]) || ids[i + 1] != static_cast<int>(m[1]))
                            continue;
                        ids[i] = static_cast<int>(m[2]);
                        ids.erase(ids.begin() + static_cast<ptrdiff_t>(i) + 1);
                        merged = true;
                    }
                    if (merged) break;
                }
            }
            CHECK(t.encode(text, false) == ids);
        }
    }
}

TEST_CASE("encode: a pattern that backtracks without end is an error, not a hang") {
    Section s = small_section();
    // [bc] and not b: PCRE2 sees at once when a single character that a match needs is missing.
    const std::array<std::string, 5> patterns{"(a+)+[bc]", "(?:a|a)*[bc]", "a*a*a*a*a*a*[bc]",
                                              "(?:(?:a?)*)*[bc]", "(?:a(?:a|b?)?)+[bc]"};
    for (const std::string& pattern : patterns) {
        CAPTURE(pattern);
        s.pattern = pattern;
        const Tokenizer t = load(s);
        CHECK_THROWS_WITH_AS((void)t.encode(std::string(3000, 'a'), false),
                             doctest::Contains("tokenizer: pattern fails at byte 0"), std::runtime_error);
    }
    s.pattern = "a(";
    CHECK(error_of(s).find("tokenizer: pattern does not compile at byte 2") == 0);
    s.pattern = R"(\C)";  // would cut characters in two
    CHECK(error_of(s).find("tokenizer: pattern does not compile") == 0);
}
#endif

// ----------------------------------------------------------------------------
// Broken sections

TEST_CASE("a section that ends too early or too late") {
    const Section s = small_section();
    const std::string whole = s.bytes();
    REQUIRE(loads(whole, s.vocab_size()));
    for (size_t n = 0; n < whole.size(); n++) {
        // At its own word about its size, and with the size put right, so that later checks get to see it.
        std::string cut = whole.substr(0, n);
        CHECK_FALSE(loads(cut, s.vocab_size()));
        const auto size = static_cast<uint32_t>(n);
        if (n >= 12) std::memcpy(cut.data() + 8, &size, 4);
        CHECK_FALSE(loads(cut, s.vocab_size()));
    }
    CHECK_FALSE(loads(whole + '\0', s.vocab_size()));
    CHECK_FALSE(loads(whole, s.vocab_size() + 1));
    CHECK_FALSE(loads(whole, 0));
    CHECK_FALSE(loads(whole, -1));
}

TEST_CASE("every number of a section at extreme values") {
    const Section s = small_section();
    const std::string whole = s.bytes();
    const size_t n_numbers = 12 + s.tokens.size() + 1 + 3 * s.merges.size() + 2 * s.added.size();
    const size_t chat_start = whole.size() - s.chat.size();
    std::vector<size_t> places;
    for (size_t i = 0; i < n_numbers; i++) places.push_back(4 * i);
    for (size_t i = 0; i + 4 <= s.chat.size(); i++) places.push_back(chat_start + i);
    for (const size_t place : places) {
        uint32_t original;
        std::memcpy(&original, whole.data() + place, 4);
        for (const uint32_t value : {0u, 1u, original - 1, original + 1, original ^ 0x80000000u, 0x7FFFFFFFu,
                                     0x80000000u, 0xFFFFFFFEu, 0xFFFFFFFFu}) {
            std::string changed = whole;
            std::memcpy(changed.data() + place, &value, 4);
            const bool ok = loads(changed, s.vocab_size());
            if (place < 16 && value != original) CHECK_FALSE(ok);  // magic, version, size, vocab_size
        }
    }
}

TEST_CASE("random changes to a section") {
    const Section s = small_section();
    const std::string whole = s.bytes();
    std::mt19937 random(2024);
    int sound = 0;
    for (int i = 0; i < 6000; i++) {
        std::string changed = whole;
        for (uint32_t n = 1 + random() % 3; n > 0; n--) {
            // Half of them among the patterns and the chat, which are small at the end of it.
            const size_t tail = s.pattern.size() + s.word_pattern.size() + s.chat.size();
            const size_t place = random() % 2 ? random() % whole.size() : whole.size() - 1 - random() % tail;
            changed[place] =
                static_cast<char>(random() % 4 ? random() : changed[place] ^ (1 << random() % 8));
        }
        sound += loads(changed, s.vocab_size());
    }
    CHECK(sound > 100);
    CHECK(sound < 6000);
}

TEST_CASE("errors name the field and the value") {
    const auto with = [](auto change) {
        Section s = small_section();
        change(s);
        return error_of(s);
    };
    CHECK(with([](Section&) {}).empty());
    CHECK(with([](Section& s) { s.flags = 32; }) == "tokenizer: flags 32 has unknown bits");
    CHECK(with([](Section& s) { s.bos_id = 1000; }) == "tokenizer: bos_id 1000 is not an id");
    CHECK(with([](Section& s) { s.bos_id = 0xFFFFFFFF; }) ==
          "tokenizer: flags 13 asks for BOS without a bos_id");
    CHECK(with([](Section& s) { s.merges[1][0] = 999; }) ==
          "tokenizer: merges[1] 999 is not a token that words consist of");
    CHECK(with([](Section& s) { s.merges[1][0] = 'x'; }) ==
          "tokenizer: merges[1] 257 is not its two parts put together");
    CHECK(with([](Section& s) { s.merges[1] = s.merges[0]; }) ==
          "tokenizer: merges[1] 104 and its partner repeat");
    CHECK(with([](Section& s) { s.added[0][0] = 999; }) == "tokenizer: added[0].id 999 is not below 264");
    CHECK(with([](Section& s) { s.added[0][0] = 263; }) ==
          "tokenizer: added[0].id 263 is a token without text");
    CHECK(with([](Section& s) { s.added[0][1] = 32; }) == "tokenizer: added[0].flags 32 has unknown bits");
    CHECK(with([](Section& s) { s.word_pattern = ""; }) ==
          "tokenizer: added[1].flags 28 needs a word_pattern");
    CHECK(with([](Section& s) { s.tokens[5].flags = 0; }) ==
          "tokenizer: token_flags[5] 0 does not fit a token of 1 bytes");
    CHECK(with([](Section& s) { s.tokens[261].bytes = "\xFF"; }) ==
          "tokenizer: added token byte 0 is not valid UTF-8");
    CHECK(with([](Section& s) { s.pattern = "a\xFF"; }) == "tokenizer: pattern byte 1 is not valid UTF-8");
    CHECK(with([](Section& s) { s.chat.pop_back(); }) ==
          "tokenizer: chat literal of 1 bytes, but only 0 are left");
    CHECK(with([](Section& s) { s.chat += "x"; }) == "tokenizer: chat_size 134 leaves bytes over");
    CHECK(with([](Section& s) { s.chat[3] = 1; }) == "tokenizer: chat.flags 16777240 has unknown bits");
    CHECK(with([](Section& s) { s.flags = nfc_flag; }) ==
          "tokenizer: chat_size 133 but the flags say there is no chat");
}
