// Fuzzes opening a model file of the program PROGRAM. The input is the file, or a header of no program, of
// which it is made (model_parts.h). A file that opens has to run: its header and tensors are printed, and a
// token of it is run. With PLAIN the program's file alone opens it.
#include "engine/app/model.h"
#include "engine/app/sampler.h"
#include "engine/app/session.h"
#include "engine/text/tokenizer.h"
#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/model_bytes.h"
#include "tests/fuzz/model_parts.h"
#include "tests/fuzz/poisoned_tail.h"
#include "tests/fuzz/program.h"
#ifdef PLAIN
#include "tests/fuzz/plain_form.h"

namespace plain {

void open_and_run(const std::string& path) {
    Options o;
    o.model_path = path;
    o.ctx = 1;
    const auto m = load_model(o, nullptr);
    const ModelConfig& c = m->transformer->file.config;
    std::optional<Tokenizer> tokenizer;
    const std::span<const std::byte> section = m->transformer->file.tokenizer;
    if (!section.empty()) tokenizer.emplace(section, c.vocab_size);
    std::vector<int> ids{c.vocab_size - 1};
    if (c.bos_id >= 0) ids.push_back(c.bos_id);
    ids.insert(ids.end(), c.eos_ids.begin(), c.eos_ids.end());
    for (const int id : ids) {
        const std::span<const float> logits = m->forward(std::span(&id, 1), 0, 1);
        expect(logits.size() == size_t(c.vocab_size), "there is a logit for each token");
        if (!all_finite(logits.data(), logits.size())) continue;  // of which the program draws none
        Sampler sampler{c.temperature, c.top_k, c.top_p, std::mt19937_64(1)};
        const int next = sampler.sample(logits);
        expect(next >= 0 && next < c.vocab_size, "a token is drawn");
    }
    if (!tokenizer) return;
    (void)tokenizer->token(ids[0]);
    (void)tokenizer->encode("Once upon\n a <s>\xC3\xA9", true);
    const std::string messages[] = {"a"};
    if (tokenizer->flags & Tokenizer::has_chat) (void)tokenizer->chat_text(messages);
}

}  // namespace plain
#endif

namespace {

#ifdef PLAIN
using plain::open_and_run;
#else
// Opens the file and runs two of its tokens at one position. Throws what a program's main() reports.
void open_and_run(const std::string& path) {
    Options o;
    o.model_path = path;
    o.ctx = 1;
    o.own["--matmul"] = "fused";
    o.own["--backend"] = "builtin";
    const std::unique_ptr<Model> loaded = load_model(o, nullptr);
    Model& m = *loaded;
    const PoisonedTail guard(m.tokenizer_section.data() + m.tokenizer_section.size());
    load_tokenizer(m, path);
    print_info(nowhere(), m, o, context_length(o, m.config));
    const ModelConfig& c = m.config;
    std::vector<int> ids{c.vocab_size - 1};
    if (c.bos_id >= 0) ids.push_back(c.bos_id);
    ids.insert(ids.end(), c.eos_ids.begin(), c.eos_ids.end());
    for (const int id : ids) {
        const std::span<const float> logits = m.forward(std::span(&id, 1), 0, 1);
        expect(logits.size() == size_t(c.vocab_size), "there is a logit for each token");
        Sampler sampler{c.temperature, c.top_k, c.top_p, std::mt19937_64(1), c.min_p, c.repetition_penalty};
        const int next = sampler.sample(logits, ids);
        expect(next >= 0 && next < c.vocab_size, "a token is drawn");
    }
    if (m.tokenizer) (void)m.tokenizer->token_bytes(ids[0]);
}
#endif

void fuzz_load(FuzzBytes bytes) {
    static MemoryFile file;
    file.write(completed(bytes));
    try {
        open_and_run(file.path());
    } catch (const std::runtime_error& e) {
        const std::string_view what = e.what();
#ifdef PLAIN
        if (what.starts_with("tokenizer: ")) return;
#endif
        expect(what.starts_with(file.path() + ": "), "the message names the file");
    }
}

}  // namespace

FUZZ_TARGET(fuzz_load)

#ifndef FUZZ_REPLAY
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

// One number of the header becomes another that fits there more often than chance would have it.
void change_field(Header& h, uint32_t random) {
    if (has_formats && random % 3 == 0) {
        constexpr size_t n_kinds = 9;
        const uint32_t which = random / 3 % (n_kinds + 1), format = random / 64 % std::size(matrix_formats);
        if (which == n_kinds) return h.set(0xE4, uint8_t(random / 64 % 2));  // has_order
        return h.set(header_offset::own + which * sizeof(FormatBytes), matrix_formats[format]);
    }
    if (has_experts && random % 3 == 0) {
        constexpr std::array<size_t, 7> own{0xC0, 0xC4, 0xC8, 0xCC, 0xD0, 0xD4, 0xD8};
        constexpr std::array<int, 9> numbers{0, 1, 2, 3, 4, 32, 64, 128, 1 << 10};
        return h.set(own[random / 3 % own.size()], numbers[random / 64 % numbers.size()]);
    }
    constexpr std::array<size_t, 28> fields{0x00, 0x04, 0x08, 0x0C, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24,
                                            0x25, 0x29, 0x40, 0x44, 0x48, 0x4C, 0x50, 0x54, 0x58, 0x5C,
                                            0x6C, 0x70, 0x74, 0x94, 0x9C, 0xB4, 0xB8, 0xBC};
    constexpr std::array<int, 20> values{0,  1,  2,  3,  4,  5,   8,  10,   11,      12,
                                         16, 31, 32, 64, 96, 128, -1, 4096, 1 << 24, INT32_MAX};
    h.set(fields[random % fields.size()], values[random / fields.size() % values.size()]);
}

}  // namespace

// Mutates one of a file's parts and mostly puts right what would keep the change from being looked at: the
// checksum, the length of the weights, fields that stand twice.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    uint32_t random = seed;
    const auto one_in = [&](uint32_t n) {
        random = random * 1664525 + 1013904223;
        return (random >> 16) % n == 0;
    };
    if (one_in(32)) return LLVMFuzzerMutate(data, size, max_size);
    Parts file = size < header_size ? smallest_file() : Parts(completed({data, size}));
    const auto mutate = [&](std::vector<uint8_t>& part, size_t longest) {
        const size_t n = part.size();
        part.resize(std::max(n, longest));
        part.resize(LLVMFuzzerMutate(part.data(), n, longest));
    };
    if (one_in(2)) {
        do {
            change_field(file.header, random >> 8);
        } while (one_in(2));
    } else if (one_in(3)) {
        mutate(file.header.bytes, header_size);
        file.header.bytes.resize(header_size);
    } else if (one_in(3)) {
        mutate(file.weights, std::max<size_t>(file.weights.size(), 256));
    } else if (!is_emulated || one_in(8)) {  // whose files are larger, and no other sections
        mutate(file.section, 2048);
        const auto n = uint32_t(file.section.size());
        if (n >= 12 && !one_in(8)) std::memcpy(file.section.data() + 8, &n, sizeof n);
    }
    if (!one_in(16)) agree(file.header);
    const size_t rest = header_size + file.section.size();
    if (!one_in(16) && max_size > rest) fit_weights(file, max_size - rest);
    if (file.header.has_extension() && !one_in(16)) file.header.seal(file.weights.size(), file.section);

    const std::vector<uint8_t> bytes = file.bytes();
    size = std::min(bytes.size(), max_size);
    std::copy_n(bytes.begin(), size, data);
    return size;
}
#endif
