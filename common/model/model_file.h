// Model files: a 256-byte header, the weights, the tokenizer section; little-endian, used in place.
//
// This file knows the header, which all programs share. Which tensors lie behind it, and how they are
// quantized, each program says in its Weights (tensors.h). The byte layout is written down in
// docs/model-files.md and written by formats/model_file.py.
//
// Everything is checked before the first value of a tensor is read. Each failure is a std::runtime_error
// whose text names the file, the field and the value; main() turns it into one line and exit code 1.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "common/model/config.h"
#include "common/model/other_file.h"
#include "common/model/scheme.h"
#include "common/os/mapped_file.h"
#include "common/text/printable.h"

static_assert(std::endian::native == std::endian::little, "model files are little-endian and read in place");

constexpr size_t header_size = 256;
constexpr uint32_t extension_magic = 0x31584b41;  // "AKX1"; 0 in files made by other programs
constexpr size_t max_eos_ids = 8;

struct ModelFile {
    std::string path;
    MappedFile map;
    ModelConfig config;
    std::span<const std::byte> weights;    // between the header and the tokenizer section
    std::span<const std::byte> tokenizer;  // empty in files made by other programs
    int alignment = 1;                     // of each tensor, the scheme's
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

// Offsets of the extension's fields; docs/model-files.md has the table.
namespace header_offset {
constexpr size_t dims = 0x08, shared_classifier = 0x24, group_size = 0x25, awq_head_dim = 0x25,
                 awq_group_size = 0x29;
constexpr size_t extension = 0x40, arch = 0x44, head_dim = 0x48, ext_group_size = 0x4C, norm_eps = 0x50,
                 rope_theta = 0x54, rope_scaling = 0x58, bos_id = 0x6C, n_eos = 0x70, eos_ids = 0x74,
                 temperature = 0x94, top_p = 0x98, top_k = 0x9C, tokenizer_offset = 0xA0,
                 tokenizer_size = 0xA8, checksum = 0xB0, activations = 0xB4, min_p = 0xB8,
                 repetition_penalty = 0xBC, reserved = 0xC0;
// In a file with a layout (GPTQ).
constexpr size_t formats = 0xC0, has_order = 0xE4, reserved_behind_layout = 0xE5;
// In a file with experts (MoE).
constexpr size_t expert_format = 0xC0, n_experts = 0xC4, n_active = 0xC8, moe_hidden_dim = 0xCC,
                 norm_topk_prob = 0xD0, expert_group = 0xD4, pure = 0xD8, reserved_behind_experts = 0xDC;
}  // namespace header_offset

// Reads and checks the header of `file`, everything but the length of the weights. `scheme` is
// that of the program that asks.
inline ModelConfig read_header(const std::string& path, std::span<const std::byte> file,
                               const Scheme& scheme) {
    auto fail = [&](const std::string& what) -> void { throw std::runtime_error(path + ": " + what); };
    if (const std::string other = describe_other_file(path, file, scheme); !other.empty()) fail(other);
    if (file.size() < header_size) {
        fail("file is " + std::to_string(file.size()) + " bytes, shorter than the 256-byte header");
    }
    auto u32 = [&](size_t offset) {
        uint32_t v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    };
    auto i32 = [&](size_t offset) { return std::bit_cast<int32_t>(u32(offset)); };
    auto f32 = [&](size_t offset) { return std::bit_cast<float>(u32(offset)); };
    auto u64 = [&](size_t offset) {
        uint64_t v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    };
    auto checked_int = [&](const char* field, int value, int low, int high) {
        if (value < low || value > high) {
            fail(std::string(field) + " is " + std::to_string(value) + ", expected " + std::to_string(low) +
                 " to " + std::to_string(high));
        }
        return value;
    };
    auto checked_float = [&](const char* field, float value, float low, float high) {
        if (!(value >= low && value <= high)) {  // also refuses NaN
            char text[160];
            std::snprintf(text, sizeof text, "%s is %g, expected %g to %g", field, value, low, high);
            fail(text);
        }
        return value;
    };

    if (u32(0) != scheme.magic) {
        char text[80];
        std::snprintf(text, sizeof text, "magic is 0x%08x, expected 0x%08x", u32(0), scheme.magic);
        std::string what = text;
        for (const Scheme& other : schemes) {
            if (u32(0) == other.magic)
                what += std::string(" (") + other.file + ": use " + other.program + ")";
        }
        fail(what);
    }
    if (i32(4) != scheme.version) {
        fail("version is " + std::to_string(i32(4)) + ", expected " + std::to_string(scheme.version));
    }

    // The limits are far above any model of these families, and low enough that no product of fields that the
    // loaders form overflows 64 bits: n_layers * dim * hidden_dim * 4 < 2^56.
    ModelConfig c;
    c.dim = checked_int("dim", i32(0x08), 1, 1 << 20);
    c.hidden_dim = checked_int("hidden_dim", i32(0x0C), 1, 1 << 22);
    c.n_layers = checked_int("n_layers", i32(0x10), 1, 1 << 12);
    c.n_heads = checked_int("n_heads", i32(0x14), 1, 1 << 12);
    c.n_kv_heads = checked_int("n_kv_heads", i32(0x18), 1, c.n_heads);
    c.vocab_size = checked_int("vocab_size", i32(0x1C), 1, 1 << 24);
    c.max_seq_len = checked_int("max_seq_len", i32(0x20), 1, 1 << 24);
    c.shared_classifier = checked_int("shared_classifier", static_cast<uint8_t>(file[0x24]), 0, 1) != 0;
    if (c.n_heads % c.n_kv_heads != 0) {
        fail("n_heads is " + std::to_string(c.n_heads) + ", not a multiple of n_kv_heads " +
             std::to_string(c.n_kv_heads));
    }
    c.group_size = i32(scheme.is_kuiper ? header_offset::awq_group_size : header_offset::group_size);

    if (const uint32_t ext = u32(header_offset::extension); ext == 0) {  // made by another program
        if (scheme.is_kuiper) {
            c.arch = Arch::qwen3;
            c.head_dim = i32(header_offset::awq_head_dim);
            c.norm_eps = 1e-6f;
            c.rope_theta = 1e6f;
        } else {
            if (c.dim % c.n_heads != 0) {
                fail("dim is " + std::to_string(c.dim) + ", not a multiple of n_heads " +
                     std::to_string(c.n_heads));
            }
            c.head_dim = c.dim / c.n_heads;
        }
    } else {
        if (ext != extension_magic) {
            char text[80];
            std::snprintf(text, sizeof text, "extension magic is 0x%08x, expected 0x%08x or 0", ext,
                          extension_magic);
            fail(text);
        }
        c.arch = static_cast<Arch>(checked_int("arch", i32(header_offset::arch), scheme.has_experts ? 3 : 1,
                                               scheme.has_experts ? 3 : 2));
        c.head_dim = i32(header_offset::head_dim);
        if (scheme.is_kuiper && i32(header_offset::awq_head_dim) != c.head_dim) {
            fail("head_dim is " + std::to_string(i32(header_offset::awq_head_dim)) + " at 0x25 and " +
                 std::to_string(c.head_dim) + " at 0x48");
        }
        if (i32(header_offset::ext_group_size) != c.group_size) {
            fail("group_size is " + std::to_string(c.group_size) + " in the header and " +
                 std::to_string(i32(header_offset::ext_group_size)) + " at 0x4c");
        }
        c.norm_eps = checked_float("norm_eps", f32(header_offset::norm_eps), 0, 1);
        c.rope_theta = checked_float("rope_theta", f32(header_offset::rope_theta), 1, 1e12f);
        const size_t scaling = header_offset::rope_scaling;
        c.rope_scaling.llama3 = checked_int("rope_scaling type", i32(scaling), 0, 1) != 0;
        if (c.rope_scaling.llama3) {
            c.rope_scaling.factor = checked_float("rope_scaling factor", f32(scaling + 4), 1, 1e6f);
            c.rope_scaling.low_freq_factor = checked_float("low_freq_factor", f32(scaling + 8), 1e-6f, 1e6f);
            c.rope_scaling.high_freq_factor =
                checked_float("high_freq_factor", f32(scaling + 12), 1e-6f, 1e6f);
            c.rope_scaling.original_max_position_embeddings =
                checked_int("original_max_position_embeddings", i32(scaling + 16), 1, 1 << 24);
            if (!(c.rope_scaling.high_freq_factor > c.rope_scaling.low_freq_factor)) {
                fail("high_freq_factor is not above low_freq_factor");
            }
        }
        c.bos_id = checked_int("bos_id", i32(header_offset::bos_id), -1, c.vocab_size - 1);
        const int n_eos = checked_int("n_eos", i32(header_offset::n_eos), 0, max_eos_ids);
        for (int i = 0; i < n_eos; i++) {
            c.eos_ids.push_back(checked_int(
                "eos_id", i32(header_offset::eos_ids + 4 * static_cast<size_t>(i)), 0, c.vocab_size - 1));
        }
        c.temperature = checked_float("temperature", f32(header_offset::temperature), 0, 100);
        c.top_p = checked_float("top_p", f32(header_offset::top_p), 0, 1);
        c.top_k = checked_int("top_k", i32(header_offset::top_k), 0, 1 << 24);
        c.min_p = checked_float("min_p", f32(header_offset::min_p), 0, 1);
        if (u32(header_offset::repetition_penalty) != 0) {
            c.repetition_penalty =
                checked_float("repetition_penalty", f32(header_offset::repetition_penalty), 0.01f, 100);
        }
        c.static_activations =
            checked_int("activations", i32(header_offset::activations), 0, scheme.may_be_static ? 1 : 0) != 0;
        size_t reserved = header_offset::reserved;
        if (scheme.has_layout) {
            std::memcpy(c.layout.formats.data(), file.data() + header_offset::formats,
                        sizeof c.layout.formats);
            c.layout.has_order =
                checked_int("has_order", static_cast<uint8_t>(file[header_offset::has_order]), 0, 1) != 0;
            reserved = header_offset::reserved_behind_layout;
        }
        if (scheme.has_experts) {
            MoeConfig& m = c.moe;
            m.experts.kind = WeightKind(checked_int("format", i32(header_offset::expert_format), 0, 2));
            m.n_experts = checked_int("n_experts", i32(header_offset::n_experts), 1, 1 << 10);
            m.n_active = checked_int("n_active", i32(header_offset::n_active), 1, m.n_experts);
            m.hidden_dim = checked_int("moe_hidden_dim", i32(header_offset::moe_hidden_dim), 1, 5120);
            m.norm_topk_prob = checked_int("norm_topk_prob", i32(header_offset::norm_topk_prob), 0, 1) != 0;
            m.experts.group = checked_int("group", i32(header_offset::expert_group), 0, 1024);
            m.pure = checked_int("pure", i32(header_offset::pure), 0, 1) != 0;
            // The table of dense layers is the first tensor: the others follow from it.
            if (file.size() < header_size + size_t(c.n_layers)) fail("dense_layers ends too soon");
            for (int l = 0; l < c.n_layers; l++)
                m.is_dense.push_back(uint8_t(
                    checked_int("dense_layers", static_cast<uint8_t>(file[header_size + size_t(l)]), 0, 1)));
            reserved = header_offset::reserved_behind_experts;
        }
        for (size_t i = reserved; i < header_size; i++) {
            if (file[i] != std::byte{0}) fail("reserved byte at " + std::to_string(i) + " is not 0");
        }
        const uint64_t offset = u64(header_offset::tokenizer_offset),
                       size = u64(header_offset::tokenizer_size);
        if (offset < header_size || offset > file.size() || file.size() - offset != size) {
            fail("file is " + std::to_string(file.size()) + " bytes, but its tokenizer section is " +
                 std::to_string(size) + " bytes at " + std::to_string(offset));
        }
        std::array<std::byte, header_size> header;
        std::memcpy(header.data(), file.data(), header_size);
        std::memset(header.data() + header_offset::checksum, 0, 4);
        const uint32_t crc = crc32(file.subspan(offset), crc32(header));
        if (crc != u32(header_offset::checksum)) {
            char text[120];
            std::snprintf(text, sizeof text, "checksum is 0x%08x, but header and tokenizer give 0x%08x",
                          u32(header_offset::checksum), crc);
            fail(text);
        }
    }
    checked_int("head_dim", c.head_dim, 2, 1 << 12);
    if (c.head_dim % 2 != 0)
        fail("head_dim is " + std::to_string(c.head_dim) + ", RoPE needs an even number");
    return c;
}

// Opens a model file and checks its header, which with the tokenizer section is all that is read of it here.
// `check_config` throws a text without the path if the asking program cannot run such a model. The length of
// the weights is checked by TensorList::check_end.
inline ModelFile open_model_file(const std::string& path, const Scheme& scheme,
                                 void (*check_config)(const ModelConfig&)) {
    ModelFile file;
    file.path = path;
    file.alignment = scheme.alignment;
    if (const std::string other = describe_directory(path, scheme); !other.empty()) {
        throw std::runtime_error(path + ": " + other);
    }
    file.map = MappedFile(path, printable(path));
    const std::span<const std::byte> bytes = file.map.bytes();
    file.config = read_header(path, bytes, scheme);
    try {
        check_config(file.config);
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
    uint64_t end = bytes.size();
    uint32_t ext;
    std::memcpy(&ext, bytes.data() + header_offset::extension, sizeof ext);
    if (ext != 0) std::memcpy(&end, bytes.data() + header_offset::tokenizer_offset, sizeof end);
    file.weights = bytes.subspan(header_size, end - header_size);
    file.tokenizer = bytes.subspan(end);
    return file;
}
