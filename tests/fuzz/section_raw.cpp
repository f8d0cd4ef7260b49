// Fuzzes the tokenizer section. The input is the section.
#include <cstring>
#include <span>
#include <stdexcept>

#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/use_tokenizer.h"

namespace {

void fuzz_section_raw(FuzzBytes bytes) {
    // The number of tokens has to be the model's; it is the fourth number of the section.
    uint32_t vocab_size = 1;
    if (bytes.size() >= 16) std::memcpy(&vocab_size, bytes.data() + 12, sizeof vocab_size);
    if (vocab_size > 1 << 16) vocab_size = 1 << 16;
    try {
        const Tokenizer tokenizer = Tokenizer(std::as_bytes(bytes), int(vocab_size));
        use_tokenizer(tokenizer, awkward_text);
    } catch (const std::runtime_error& e) {
        expect(std::string_view(e.what()).starts_with("tokenizer: "), "the message says where");
    }
}

}  // namespace

FUZZ_TARGET(fuzz_section_raw)

#ifndef FUZZ_REPLAY
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Mutates, and mostly puts the section's size right, without which nothing else of it is read. Begins with a
// sound section.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    if (size < 48) {
        Section sound = smallest_section();
        sound.pattern = sound.word_pattern = R"(\w|\s)";
        sound.flags = section::chat_flag;
        sound.chat = chat_bytes(0, std::vector<std::string>(13, "x"));
        const std::string bytes = sound.bytes();
        size = std::min(bytes.size(), max_size);
        std::copy_n(bytes.begin(), size, data);
    }
    size = LLVMFuzzerMutate(data, size, max_size);
    const auto total = uint32_t(size);
    if (seed % 16 != 0 && size >= 12) std::memcpy(data + 8, &total, sizeof total);
    return size;
}
#endif
