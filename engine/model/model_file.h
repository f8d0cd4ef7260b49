// Model files: a 256-byte header (header.h), the weights, the tokenizer section; little-endian, used in
// place. Which tensors the weights are, and how they are quantized, each program says in its Weights
// (tensors.h).
//
// Everything is checked before the first value of a tensor is read. Each failure is a std::runtime_error
// whose text names the file; main() turns it into one line and exit code 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "engine/model/config.h"
#include "engine/model/header.h"
#include "engine/model/other_file.h"
#include "engine/os/files.h"
#include "engine/text/printable.h"

// Config is ModelConfig, or has it and fields of the program's own.
template <class Config>
struct ModelFileOf {
    std::string path;
    MappedFile map;
    Config config;
    std::span<const std::byte> weights;    // between the header and the tokenizer section
    std::span<const std::byte> tokenizer;  // empty in files made by other programs
    int alignment = 1;                     // of each tensor, the format's
};
using ModelFile = ModelFileOf<ModelConfig>;

// Opens a model file and checks its header, which with the tokenizer section is all that is read of it here.
// The length of the weights is checked by TensorList::check_end.
template <class Config>
ModelFileOf<Config> open_model_file(const std::string& path, const FileFormat<Config>& format) {
    ModelFileOf<Config> file;
    file.path = path;
    file.alignment = format.alignment;
    if (const std::string other = describe_directory(path, scheme_of(format.magic)); !other.empty()) {
        throw std::runtime_error(path + ": " + other);
    }
    file.map = MappedFile(path, printable(path));
    const std::span<const std::byte> bytes = file.map.bytes();
    file.config = read_header(path, bytes, format);
    try {
        format.check(file.config);
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
    const HeaderReader h{path, bytes};
    const bool is_extended = h.u32(header_offset::extension) != 0;
    const uint64_t end = is_extended ? h.u64(header_offset::tokenizer_offset) : bytes.size();
    file.weights = bytes.subspan(header_size, end - header_size);
    file.tokenizer = bytes.subspan(end);
    return file;
}
