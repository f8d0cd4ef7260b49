// Fuzzes opening a model file of the program PROGRAM. The input is the file. A file that opens has to run:
// its header and tensors are printed, and a token of it is run.
#include "common/app/cli.h"
#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/model_bytes.h"
#include "tests/fuzz/poisoned_tail.h"
#include "tests/fuzz/program.h"

namespace {

// Opens the file and runs two of its tokens at one position. Throws what a program's main() reports.
void open_and_run(const std::string& path) {
    Options o;
    o.model_path = path;
    o.ctx = 1;
    o.own["--matmul"] = "fused";
    o.own["--backend"] = "builtin";
    Model m = load_model(o, nullptr);
    const PoisonedTail guard(m.tokenizer_section.data() + m.tokenizer_section.size());
    load_tokenizer(m, path);
    print_info(nowhere(), m, o, context_length(o, m.config));
    const ModelConfig& c = m.config;
    std::vector<int> ids{c.vocab_size - 1};
    if (c.bos_id >= 0) ids.push_back(c.bos_id);
    ids.insert(ids.end(), c.eos_ids.begin(), c.eos_ids.end());
    for (const int id : ids) {
        const std::span<const float> logits = m.forward(std::span(&id, 1), 0, false);
        expect(logits.size() == size_t(c.vocab_size), "there is a logit for each token");
        Sampler sampler(c.temperature, c.top_k, c.top_p, 1, c.min_p, c.repetition_penalty);
        const int next = sampler.sample(logits, ids);
        expect(next >= 0 && next < c.vocab_size, "a token is drawn");
    }
    if (m.tokenizer) (void)m.tokenizer->token_bytes(ids[0]);
}

void fuzz_load(FuzzBytes bytes) {
    static MemoryFile file;
    file.write(bytes);
    try {
        open_and_run(file.path());
    } catch (const std::runtime_error& e) {
        expect(std::string_view(e.what()).starts_with(file.path() + ": "), "the message names the file");
    }
}

}  // namespace

FUZZ_TARGET(fuzz_load)

#ifndef FUZZ_REPLAY
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

// A file in its three parts.
struct Parts {
    Header header;
    std::vector<uint8_t> weights, section;

    // From a file's own offset; without one, there is no section.
    explicit Parts(FuzzBytes file) {
        std::copy_n(file.begin(), header_size, header.bytes.begin());
        const FuzzBytes rest = file.subspan(header_size);
        size_t n_weights = rest.size();
        if (const auto offset = header.get<uint64_t>(header_offset::tokenizer_offset);
            header.has_extension() && offset >= header_size && offset <= file.size()) {
            n_weights = size_t(offset) - header_size;
        }
        weights.assign(rest.begin(), rest.begin() + ptrdiff_t(n_weights));
        section.assign(rest.begin() + ptrdiff_t(n_weights), rest.end());
    }
};

// The smallest file, with a tokenizer of single letters.
Parts smallest_file() {
    const ProgramConfig c = smallest_config();
    const std::string section = smallest_section().bytes();
    std::vector<uint8_t> weights = tame_weights(weight_bytes(c), 1);
    put_in_form(weights, c);
    return Parts(model_bytes(c, weights, {reinterpret_cast<const uint8_t*>(section.data()), section.size()}));
}

// One number of the header becomes another that fits there more often than chance would have it.
void change_field(Header& h, uint32_t random) {
    if (has_formats && random % 3 == 0) {
        constexpr size_t n_kinds = 9;
        const uint32_t which = random / 3 % (n_kinds + 1), format = random / 64 % matrix_formats.size();
        if (which == n_kinds) return h.set(0xE4, uint8_t(random / 64 % 2));  // has_order
        return h.set(header_offset::own + which * sizeof(MatrixFormat), matrix_formats[format]);
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

// Fields that stand twice agree, and magic and version are the program's.
void agree(Header& h) {
    const Scheme& scheme = file_format.scheme;
    h.set(0x00, scheme.magic);
    h.set(0x04, scheme.version);
    if (!h.has_extension()) return;
    h.set(header_offset::extension, extension_magic);
    h.set(header_offset::ext_group_size, h.get<int>(file_format.base.group_size));
    if (file_format.base.head_dim != 0) h.set(header_offset::head_dim, h.get<int>(file_format.base.head_dim));
    const size_t reserved = has_formats ? 0xE5 : has_experts ? 0xDC : header_offset::own;
    std::fill(h.bytes.begin() + ptrdiff_t(reserved), h.bytes.end(), uint8_t(0));
}

// The weights get the length that the header implies; none, where the program refuses the header, so that
// such inputs stay small.
void fit_weights(Parts& file, size_t longest) {
    Parts alone = file;
    // Which layers have experts is in the first bytes of the weights.
    const size_t n_first = has_experts ? 8 : 0;
    file.weights.resize(std::max(file.weights.size(), n_first));
    alone.header.seal(n_first, {});
    size_t n = 0;
    ProgramConfig c;
    try {
        std::vector<uint8_t> bytes = alone.header.bytes;
        bytes.insert(bytes.end(), file.weights.begin(), file.weights.begin() + ptrdiff_t(n_first));
        c = read_header("", std::as_bytes(std::span(bytes)), file_format);
        check_config(c);
        if (c.n_layers <= 8) n = weight_bytes(c);
        if (n > longest) n = 0;
    } catch (const std::runtime_error&) {
        n = 0;
    }
    const std::vector<uint8_t> more = tame_weights(n, 2);
    const size_t n_old = std::min(n, file.weights.size());
    file.weights.resize(n_old);
    file.weights.insert(file.weights.end(), more.begin() + ptrdiff_t(n_old), more.end());
    if (n_old < n) put_in_form(file.weights, c);
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
    Parts file = size < header_size ? smallest_file() : Parts({data, size});
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

    std::vector<uint8_t> bytes = file.header.bytes;
    bytes.insert(bytes.end(), file.weights.begin(), file.weights.end());
    bytes.insert(bytes.end(), file.section.begin(), file.section.end());
    size = std::min(bytes.size(), max_size);
    std::copy_n(bytes.begin(), size, data);
    return size;
}
#endif
