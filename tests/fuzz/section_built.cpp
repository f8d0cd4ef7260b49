// Fuzzes the tokenizer section as a sound or nearly sound one. The input is the choices that it is made by,
// and then a text to encode.
#include <array>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/use_tokenizer.h"

namespace {

// Byte-pair encoding as it is defined: of all neighbours the leftmost pair of the lowest rank merges, again
// and again.
std::vector<int> plain_bpe(const Section& s, std::string_view text) {
    std::vector<int> ids;
    for (const char c : text) {
        int id = -1;  // of two tokens for one byte the later counts
        for (size_t i = 0; i < s.tokens.size(); i++) {
            if (s.tokens[i].flags & section::word && s.tokens[i].bytes == std::string_view(&c, 1))
                id = int(i);
        }
        if (id >= 0) ids.push_back(id);
    }
    while (true) {
        size_t best_rank = s.merges.size(), at = 0;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            for (size_t rank = 0; rank < best_rank; rank++) {
                if (s.merges[rank][0] == uint32_t(ids[i]) && s.merges[rank][1] == uint32_t(ids[i + 1])) {
                    best_rank = rank, at = i;
                }
            }
        }
        if (best_rank == s.merges.size()) return ids;
        ids[at] = int(s.merges[best_rank][2]);
        ids.erase(ids.begin() + ptrdiff_t(at) + 1);
    }
}

void fuzz_section_built(FuzzBytes bytes) {
    Choices choices(bytes);
    const BuiltSection built = build_section(choices);
    std::string section_bytes = built.section.bytes();
    const bool is_broken = choices.number(0, 7) == 7;
    if (is_broken) {  // by one byte
        const auto at = size_t(choices.number(0, int(section_bytes.size()) - 1));
        section_bytes[at] = char(choices.number(0, 255));
    }
    const std::string text = choices.rest().substr(0, 4096);

    const Section& s = built.section;
    try {
        const Tokenizer t =
            Tokenizer(std::as_bytes(std::span(std::string_view(section_bytes))), s.vocab_size());
        const std::vector<int> ids = use_tokenizer(t, text);
        if (is_broken) return;
        const std::string repaired = utf8_replace_invalid(text);
        if (built.keeps_text) expect(bytes_of(t, ids) == repaired, "the tokens are the text");
        if (s.pattern.empty() && s.added.empty() && s.flags == 0) {
            expect(ids == plain_bpe(s, repaired), "words are merged as byte-pair encoding says");
        }
    } catch (const std::runtime_error& e) {
        expect(std::string_view(e.what()).starts_with("tokenizer: "), "the message says where");
        expect(is_broken || built.may_be_refused, "a sound section loads");
    }
}

}  // namespace

FUZZ_TARGET(fuzz_section_built)
