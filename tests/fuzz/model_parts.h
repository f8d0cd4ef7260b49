// Model files in their three parts, to be changed one by one and put together again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/fuzz/built_section.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/model_bytes.h"
#include "tests/fuzz/program.h"

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

    std::vector<uint8_t> bytes() const {
        std::vector<uint8_t> file = header.bytes;
        file.insert(file.end(), weights.begin(), weights.end());
        file.insert(file.end(), section.begin(), section.end());
        return file;
    }
};

// The smallest file, with a tokenizer of single letters.
inline Parts smallest_file() {
    const ProgramConfig c = smallest_config();
    const std::string section = smallest_section().bytes();
    std::vector<uint8_t> weights = tame_weights(weight_bytes(c), 1);
    tame_mxfp8(weights, c);
    put_in_form(weights, c);
    return Parts(model_bytes(c, weights, {reinterpret_cast<const uint8_t*>(section.data()), section.size()}));
}

// Fields that stand twice agree, and magic and version are the program's.
inline void agree(Header& h) {
    h.set(0x00, file_format.magic);
    h.set(0x04, file_format.version);
    if (!h.has_extension()) return;
    h.set(header_offset::extension, extension_magic);
    h.set(header_offset::ext_group_size, h.get<int>(file_format.base.group_size));
    if (file_format.base.head_dim != 0) h.set(header_offset::head_dim, h.get<int>(file_format.base.head_dim));
    const size_t reserved = has_formats ? 0xE5 : has_experts ? 0xDC : header_offset::own;
    std::fill(h.bytes.begin() + ptrdiff_t(reserved), h.bytes.end(), uint8_t(0));
}

// The weights get the length that the header implies; none, where the program refuses the header, so that
// such inputs stay small.
inline void fit_weights(Parts& file, size_t longest) {
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
    if (n_old < n) tame_mxfp8(file.weights, c), put_in_form(file.weights, c);
}

// The magic of a stored header that is no program's: each program makes a file of its own of it, so that all
// of them share the corpus `header`. What differs between schemes is not in it.
constexpr uint32_t any_program = 0x3f3f6b61;  // "ak??"

// Such a header as the program's file: with its magic and version, its own fields, the weights that the
// header implies and the smallest tokenizer. Any other input is a file as it is.
inline std::vector<uint8_t> completed(FuzzBytes bytes) {
    if (bytes.size() != header_size) return {bytes.begin(), bytes.end()};
    Parts file(bytes);
    Header& h = file.header;
    if (h.get<uint32_t>(header_offset::magic) != any_program) return {bytes.begin(), bytes.end()};
    if (h.has_extension()) {
        const std::string section = smallest_section().bytes();
        file.section.assign(section.begin(), section.end());
        h.set(file_format.base.group_size, h.get<int>(header_offset::ext_group_size));
        if (file_format.base.head_dim != 0)
            h.set(file_format.base.head_dim, h.get<int>(header_offset::head_dim));
        put_own_fields(h, smallest_config());
        const auto arch = h.get<Arch>(header_offset::arch);
        if (has_experts && (arch == Arch::llama || arch == Arch::qwen3))
            h.set(header_offset::arch, Arch::qwen3_moe);
    }
    // An extension that is none is to be seen as such.
    const auto extension = h.get<uint32_t>(header_offset::extension);
    agree(h);
    h.set(header_offset::extension, extension);
    fit_weights(file, 1 << 15);
    if (h.has_extension()) h.seal(file.weights.size(), file.section);
    return file.bytes();
}
