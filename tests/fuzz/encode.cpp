// Fuzzes encoding with the tokenizers of the bundled models. The first byte of the input says which of them,
// the rest is the text.
#include <array>
#include <string>

#include "engine/model/model_file.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/use_tokenizer.h"

namespace {

Tokenizer tokenizer_of(const std::string& path) {
    const ModelFile file =
        open_model_file(path, FileFormat<ModelConfig>{.magic = schemes[0].magic, .version = 2});
    return Tokenizer(file.tokenizer, file.config.vocab_size);
}

void fuzz_encode(FuzzBytes bytes) {
    static const std::array tokenizers{tokenizer_of("build/models/tiny-llama.q8.bin"),
                                       tokenizer_of("build/models/tiny-qwen3.q8.bin")};
    Choices choices(bytes);
    const bool is_qwen3 = choices.yes();
    const Tokenizer& t = tokenizers[is_qwen3];
    const std::string text = choices.rest();
    // Real patterns give up on no text, so that nothing may be thrown here.
    const std::string again = bytes_of(t, use_tokenizer(t, text));
    const std::string repaired = utf8_replace_invalid(text);
    // Qwen3 brings text into NFC, but does not look at the added tokens in it.
    if (!is_qwen3) expect(again == repaired, "the tokens are the text");
    if (is_qwen3) expect(nfc(again) == nfc(repaired), "the tokens are the text in NFC");
}

}  // namespace

FUZZ_TARGET(fuzz_encode)
