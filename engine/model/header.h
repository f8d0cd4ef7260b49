// The 256 bytes at the beginning of a model file, which are the same for all programs but for some fields.
// The byte layout is written down in docs/model-files.md and written by formats/model_file.py.
//
// What a program's files have of their own, it hands in as a FileFormat. Everything is checked as it is read.
// Each failure is a std::runtime_error whose text names the file, the field and the value; main() turns it
// into one line and exit code 1.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "engine/model/config.h"
#include "engine/model/other_file.h"
#include "engine/model/scheme.h"

static_assert(std::endian::native == std::endian::little, "model files are little-endian and read in place");

constexpr size_t header_size = 256;
constexpr uint32_t extension_magic = 0x31584b41;  // "AKX1"; 0 in files made by other programs
constexpr size_t max_eos_ids = 8;

// Offsets of the fields.
namespace header_offset {
constexpr size_t magic = 0x00, version = 0x04, dims = 0x08, shared_classifier = 0x24, group_size = 0x25;
constexpr size_t extension = 0x40, arch = 0x44, head_dim = 0x48, ext_group_size = 0x4C, norm_eps = 0x50,
                 rope_theta = 0x54, rope_scaling = 0x58, bos_id = 0x6C, n_eos = 0x70, eos_ids = 0x74,
                 temperature = 0x94, top_p = 0x98, top_k = 0x9C, tokenizer_offset = 0xA0,
                 tokenizer_size = 0xA8, checksum = 0xB0, activations = 0xB4, min_p = 0xB8,
                 repetition_penalty = 0xBC;
constexpr size_t own = 0xC0;  // the fields of read_own, in the programs; what they leave is reserved, and 0
}  // namespace header_offset

// The fields of a file that has at least a header.
struct HeaderReader {
    const std::string& path;
    std::span<const std::byte> file;

    template <class T>
    T value(size_t offset) const {
        T v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    }
    int u8(size_t offset) const { return value<uint8_t>(offset); }
    uint32_t u32(size_t offset) const { return value<uint32_t>(offset); }
    int i32(size_t offset) const { return value<int32_t>(offset); }
    float f32(size_t offset) const { return value<float>(offset); }
    uint64_t u64(size_t offset) const { return value<uint64_t>(offset); }

    [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(path + ": " + what); }
    // The value, if it is within limits.
    int checked_int(const char* field, int value, int low, int high) const {
        if (value < low || value > high) {
            fail(std::string(field) + " is " + std::to_string(value) + ", expected " + std::to_string(low) +
                 " to " + std::to_string(high));
        }
        return value;
    }
    int number(const char* field, size_t offset, int low, int high) const {
        return checked_int(field, i32(offset), low, high);
    }
    float checked_float(const char* field, float value, float low, float high) const {
        if (!(value >= low && value <= high)) {  // also refuses NaN
            char text[160];
            std::snprintf(text, sizeof text, "%s is %g, expected %g to %g", field, value, low, high);
            fail(text);
        }
        return value;
    }
};

// The header in front of the extension block. Files of other programs have no more than this.
struct BaseHeader {
    size_t group_size = header_offset::group_size;  // where the field is
    size_t head_dim = 0;                            // and this one; 0: nowhere, it is dim / n_heads
    // What holds without an extension block.
    Arch arch = Arch::llama;
    float norm_eps = 1e-5f, rope_theta = 500000;
};

// Throws an error that says its parts, one after another.
[[noreturn]] void fail(const auto&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

// Throws "NAME is VALUE, WHY" unless the value fits: what a FileFormat's check() is made of.
void check_value(bool fits, const std::string& name, int value, const auto&... why) {
    if (!fits) fail(name, " is ", value, ", ", why...);
}

// What a program says of its files. Config is ModelConfig, or has it and fields of the program's own.
template <class Config>
struct FileFormat {
    uint32_t magic;  // a file's first word
    int version;     // and its second
    // Throws a text without the path if the program cannot run such a model.
    void (*check)(const Config&) = [](const Config&) {};
    // Reads the fields from header_offset::own on. Returns where they end.
    size_t (*read_own)(const HeaderReader&, Config&) = [](const HeaderReader&, Config&) {
        return header_offset::own;
    };
    BaseHeader base{};
    Arch first_arch = Arch::llama, last_arch = Arch::qwen3;  // that it runs, and those between
    int max_activations = 0;                                 // the highest value of that field
    int alignment = 1;                                       // bytes: every tensor begins at a multiple of it
};

// CRC-32 as in zlib and PNG (polynomial 0xEDB88320, reflected), continued from `crc`.
inline uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            t[i] = c;
        }
        return t;
    }();
    crc = ~crc;
    for (const std::byte b : bytes) crc = table[(crc ^ static_cast<uint32_t>(b)) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

// Throws unless the file begins as those of the scheme do. Says what it is instead, where that can be seen.
inline void check_beginning(const HeaderReader& h, const Scheme& scheme) {
    if (const std::string other = describe_other_file(h.path, h.file, scheme); !other.empty()) h.fail(other);
    if (h.file.size() < header_size)
        h.fail("file is " + std::to_string(h.file.size()) + " bytes, shorter than the 256-byte header");
    if (const uint32_t magic = h.u32(header_offset::magic); magic != scheme.magic) {
        char text[80];
        std::snprintf(text, sizeof text, "magic is 0x%08x, expected 0x%08x", magic, scheme.magic);
        std::string hint =
            "no model file: python -m export makes one of a Hugging Face directory or a GGUF file";
        for (const Scheme& other : schemes) {
            if (magic == other.magic) hint = std::string(other.file) + ": use " + other.program;
        }
        h.fail(std::string(text) + " (" + hint + ")");
    }
    if (const int version = h.i32(header_offset::version); version != scheme.version)
        h.fail("version is " + std::to_string(version) + ", expected " + std::to_string(scheme.version));
}

// Reads what stands in front of the extension block. The limits are far above any model of these families,
// and low enough that no product of fields that the loaders form overflows 64 bits: n_layers * dim *
// hidden_dim * 4 < 2^56.
inline void read_base(const HeaderReader& h, const BaseHeader& base, ModelConfig& c) {
    c.dim = h.number("dim", 0x08, 1, 1 << 20);
    c.hidden_dim = h.number("hidden_dim", 0x0C, 1, 1 << 22);
    c.n_layers = h.number("n_layers", 0x10, 1, 1 << 12);
    c.n_heads = h.number("n_heads", 0x14, 1, 1 << 12);
    c.n_kv_heads = h.number("n_kv_heads", 0x18, 1, c.n_heads);
    c.vocab_size = h.number("vocab_size", 0x1C, 1, 1 << 24);
    c.max_seq_len = h.number("max_seq_len", 0x20, 1, 1 << 24);
    c.shared_classifier =
        h.checked_int("shared_classifier", h.u8(header_offset::shared_classifier), 0, 1) != 0;
    if (c.n_heads % c.n_kv_heads != 0) {
        h.fail("n_heads is " + std::to_string(c.n_heads) + ", not a multiple of n_kv_heads " +
               std::to_string(c.n_kv_heads));
    }
    c.group_size = h.i32(base.group_size);
}

// Completes the configuration of a file without extension block.
inline void complete_base(const HeaderReader& h, const BaseHeader& base, ModelConfig& c) {
    c.arch = base.arch;
    c.norm_eps = base.norm_eps;
    c.rope_theta = base.rope_theta;
    if (base.head_dim == 0 && c.dim % c.n_heads != 0)
        h.fail("dim is " + std::to_string(c.dim) + ", not a multiple of n_heads " +
               std::to_string(c.n_heads));
    c.head_dim = base.head_dim == 0 ? c.dim / c.n_heads : h.i32(base.head_dim);
}

// Reads what the extension block says of the model's shape. Some fields stand there for the second time.
inline void read_shape(const HeaderReader& h, const BaseHeader& base, Arch first_arch, Arch last_arch,
                       ModelConfig& c) {
    if (const uint32_t magic = h.u32(header_offset::extension); magic != extension_magic) {
        char text[80];
        std::snprintf(text, sizeof text, "extension magic is 0x%08x, expected 0x%08x or 0", magic,
                      extension_magic);
        h.fail(text);
    }
    c.arch = Arch(h.number("arch", header_offset::arch, int(first_arch), int(last_arch)));
    c.head_dim = h.i32(header_offset::head_dim);
    char text[160];
    if (base.head_dim != 0 && h.i32(base.head_dim) != c.head_dim) {
        std::snprintf(text, sizeof text, "head_dim is %d at 0x%zx and %d at 0x%zx", h.i32(base.head_dim),
                      base.head_dim, c.head_dim, header_offset::head_dim);
        h.fail(text);
    }
    if (const int again = h.i32(header_offset::ext_group_size); again != c.group_size) {
        std::snprintf(text, sizeof text, "group_size is %d in the header and %d at 0x%zx", c.group_size,
                      again, header_offset::ext_group_size);
        h.fail(text);
    }
    c.norm_eps = h.checked_float("norm_eps", h.f32(header_offset::norm_eps), 0, 1);
}

inline void read_rope(const HeaderReader& h, ModelConfig& c) {
    c.rope_theta = h.checked_float("rope_theta", h.f32(header_offset::rope_theta), 1, 1e12f);
    constexpr size_t at = header_offset::rope_scaling;
    RopeScaling& s = c.rope_scaling;
    s.llama3 = h.number("rope_scaling type", at, 0, 1) != 0;
    if (!s.llama3) return;
    s.factor = h.checked_float("rope_scaling factor", h.f32(at + 4), 1, 1e6f);
    s.low_freq_factor = h.checked_float("low_freq_factor", h.f32(at + 8), 1e-6f, 1e6f);
    s.high_freq_factor = h.checked_float("high_freq_factor", h.f32(at + 12), 1e-6f, 1e6f);
    s.original_max_position_embeddings = h.number("original_max_position_embeddings", at + 16, 1, 1 << 24);
    if (!(s.high_freq_factor > s.low_freq_factor)) h.fail("high_freq_factor is not above low_freq_factor");
}

// Reads the ids at which texts begin and end, and the sampling defaults.
inline void read_generation(const HeaderReader& h, ModelConfig& c) {
    c.bos_id = h.number("bos_id", header_offset::bos_id, -1, c.vocab_size - 1);
    const int n_eos = h.number("n_eos", header_offset::n_eos, 0, max_eos_ids);
    for (int i = 0; i < n_eos; i++) {
        c.eos_ids.push_back(h.number("eos_id", header_offset::eos_ids + 4 * size_t(i), 0, c.vocab_size - 1));
    }
    c.temperature = h.checked_float("temperature", h.f32(header_offset::temperature), 0, 100);
    c.top_p = h.checked_float("top_p", h.f32(header_offset::top_p), 0, 1);
    c.top_k = h.number("top_k", header_offset::top_k, 0, 1 << 24);
    c.min_p = h.checked_float("min_p", h.f32(header_offset::min_p), 0, 1);
    if (h.u32(header_offset::repetition_penalty) == 0) return;
    c.repetition_penalty =
        h.checked_float("repetition_penalty", h.f32(header_offset::repetition_penalty), 0.01f, 100);
}

inline void check_reserved(const HeaderReader& h, size_t first) {
    for (size_t i = first; i < header_size; i++) {
        if (h.u8(i) != 0) h.fail("reserved byte at " + std::to_string(i) + " is not 0");
    }
}

// Checks the place of the tokenizer section, and the checksum over it and the header.
inline void check_tokenizer(const HeaderReader& h) {
    const uint64_t offset = h.u64(header_offset::tokenizer_offset),
                   size = h.u64(header_offset::tokenizer_size);
    if (offset < header_size || offset > h.file.size() || h.file.size() - offset != size) {
        h.fail("file is " + std::to_string(h.file.size()) + " bytes, but its tokenizer section is " +
               std::to_string(size) + " bytes at " + std::to_string(offset));
    }
    std::array<std::byte, header_size> blank;
    std::memcpy(blank.data(), h.file.data(), header_size);
    std::memset(blank.data() + header_offset::checksum, 0, 4);
    const uint32_t crc = crc32(h.file.subspan(offset), crc32(blank));
    if (crc == h.u32(header_offset::checksum)) return;
    char text[120];
    std::snprintf(text, sizeof text, "checksum is 0x%08x, but header and tokenizer give 0x%08x",
                  h.u32(header_offset::checksum), crc);
    h.fail(text);
}

// Reads and checks the header of `file`, everything but the length of the weights and what the program's
// check() is for.
template <class Config>
Config read_header(const std::string& path, std::span<const std::byte> file,
                   const FileFormat<Config>& format) {
    const HeaderReader h{path, file};
    check_beginning(h, scheme_of(format.magic));
    Config c;
    read_base(h, format.base, c);
    if (h.u32(header_offset::extension) == 0) {  // made by another program
        complete_base(h, format.base, c);
    } else {
        read_shape(h, format.base, format.first_arch, format.last_arch, c);
        read_rope(h, c);
        read_generation(h, c);
        c.static_activations =
            h.number("activations", header_offset::activations, 0, format.max_activations) == 1;
        check_reserved(h, format.read_own(h, c));
        check_tokenizer(h);
    }
    h.checked_int("head_dim", c.head_dim, 2, 1 << 12);
    if (c.head_dim % 2 != 0)
        h.fail("head_dim is " + std::to_string(c.head_dim) + ", RoPE needs an even number");
    return c;
}
