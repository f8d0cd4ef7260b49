// Model files: a 256-byte header, the weights, the tokenizer section; little-endian, used in place. The byte
// layout is written down in docs/model-files.md and written by formats/model_file.py. What a program's files
// have of their own, it hands in as a FileFormat; which tensors the weights are, and how they are quantized,
// it says in its Weights (below).
//
// Everything is checked before the first value of a tensor is read. Each failure is a std::runtime_error
// whose text names the file, the field and the value; main() turns it into one line and exit code 1.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ios>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/scheme.h"
#include "engine/os/files.h"
#include "engine/text/utf8.h"

static_assert(std::endian::native == std::endian::little, "model files are little-endian and read in place");

constexpr size_t header_size = 256;
constexpr uint32_t extension_magic = 0x31584b41;  // "AKX1"; 0 in files made by other programs

// Throws "NAME is VALUE, WHY" unless the value fits: what a FileFormat's check() is made of.
void check_value(bool fits, const std::string& name, int value, const auto&... why) {
    if (!fits) fail(name, " is ", value, ", ", why...);
}

// The fields of a file that has at least a header.
struct HeaderReader {
    std::span<const std::byte> file;

    template <class T>
    T value(size_t offset) const {
        T v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    }
    // The value, if it is within limits, which NaN is not.
    template <class T>
    T number(const char* field, size_t offset, T low, T high) const {
        const T v = value<T>(offset);
        if (!(v >= low && v <= high)) fail(field, " is ", v, ", expected ", low, " to ", high);
        return v;
    }
};

// The header in front of the extension block. Files of other programs have no more than this.
struct BaseHeader {
    size_t group_size = 0x25;  // where the field is
    size_t head_dim = 0;       // and this one; 0: nowhere, it is dim / n_heads
    // What holds without an extension block.
    Arch arch = Arch::llama;
    float norm_eps = 1e-5f, rope_theta = 500000;
};

// What a program says of its files. Config is ModelConfig, or has it and fields of the program's own.
template <class Config>
struct FileFormat {
    uint32_t magic;  // a file's first word
    int version;     // and its second
    // Throws a text without the path if the program cannot run such a model.
    void (*check)(const Config&) = [](const Config&) {};
    // Reads the fields from byte 0xC0 on. Returns where they end: what follows is reserved, and 0.
    size_t (*read_own)(const HeaderReader&, Config&) = [](const HeaderReader&, Config&) {
        return size_t{0xC0};
    };
    BaseHeader base{};
    Arch first_arch = Arch::llama, last_arch = Arch::qwen3;  // that it runs, and those between
    int max_activations = 0;                                 // the highest value of that field
    int alignment = 1;                                       // bytes: every tensor begins at a multiple of it
};

template <class Config>
struct ModelFileOf {
    std::string path;
    std::unique_ptr<const MappedFile> map;
    Config config;
    std::span<const std::byte> weights;    // between the header and the tokenizer section
    std::span<const std::byte> tokenizer;  // empty in files made by other programs
    int alignment = 1;                     // of each tensor, the format's
};
using ModelFile = ModelFileOf<ModelConfig>;

// CRC-32 as in zlib and PNG (polynomial 0xEDB88320, reflected), continued from `crc`.
inline uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; i++) {
            t[i] = i;
            for (int k = 0; k < 8; k++) t[i] = (t[i] & 1) ? 0xEDB88320u ^ (t[i] >> 1) : t[i] >> 1;
        }
        return t;
    }();
    crc = ~crc;
    for (const std::byte b : bytes) crc = table[(crc ^ uint32_t(b)) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

inline std::string hex_word(uint32_t word) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", word);
    return text;
}

// Throws unless the file begins as those of the scheme do. Says what it is instead, where that can be seen.
inline void check_beginning(const std::string& path, const HeaderReader& h, const Scheme& scheme,
                            int expected_version) {
    refuse_other_file(path, h.file, scheme);
    if (h.file.size() < header_size)
        fail("file is ", h.file.size(), " bytes, shorter than the 256-byte header");
    if (const auto magic = h.value<uint32_t>(0); magic != scheme.magic) {
        std::string hint =
            "no model file: python -m export makes one of a Hugging Face directory or a GGUF file";
        for (const Scheme& other : schemes)
            if (magic == other.magic) hint = std::string(other.file) + ": use " + other.program;
        fail("magic is ", hex_word(magic), ", expected ", hex_word(scheme.magic), " (", hint, ")");
    }
    if (const auto version = h.value<int>(4); version != expected_version)
        fail("version is ", version, ", expected ", expected_version);
}

inline void check_reserved(const HeaderReader& h, size_t first) {
    for (size_t i = first; i < header_size; i++)
        if (h.value<uint8_t>(i) != 0) fail("reserved byte at ", i, " is not 0");
}

// Reads and checks the extension block. Some fields stand there for the second time.
template <class Config>
void read_extension(const HeaderReader& h, const FileFormat<Config>& format, Config& c) {
    if (const auto magic = h.value<uint32_t>(0x40); magic != extension_magic)
        fail("extension magic is ", hex_word(magic), ", expected ", hex_word(extension_magic), " or 0");
    c.arch = Arch(h.number("arch", 0x44, int(format.first_arch), int(format.last_arch)));
    c.head_dim = h.value<int>(0x48);
    if (const size_t at = format.base.head_dim; at != 0 && h.value<int>(at) != c.head_dim)
        fail("head_dim is ", h.value<int>(at), " at 0x", std::hex, at, std::dec, " and ", c.head_dim,
             " at 0x48");
    if (const auto again = h.value<int>(0x4C); again != c.group_size)
        fail("group_size is ", c.group_size, " in the header and ", again, " at 0x4c");
    c.norm_eps = h.number("norm_eps", 0x50, 0.0f, 1.0f);
    c.rope_theta = h.number("rope_theta", 0x54, 1.0f, 1e12f);
    c.rope_type = h.number("rope_scaling type", 0x58, 0, 3);
    if (c.rope_type > 1) c.attention_factor = h.number("attention_factor", 0x30, 0.01f, 100.0f);
    if (c.rope_type > 0) {
        c.rope_factor = h.number("rope_scaling factor", 0x5C, 1.0f, 1e6f);
        c.low_freq_factor = h.number("low_freq_factor", 0x60, 1e-6f, 1e6f);
        c.high_freq_factor = h.number("high_freq_factor", 0x64, 1e-6f, 1e6f);
        c.original_max_position = h.number("original_max_position_embeddings", 0x68, 1, 1 << 24);
        if (!(c.high_freq_factor > c.low_freq_factor)) fail("high_freq_factor is not above low_freq_factor");
    }
    if (const int block = c.rotation_block = h.number("rotation_block", 0x34, 0, c.dim); block > 0)
        check_value(c.dim % block == 0 && (block & (block - 1)) == 0, "rotation_block", block,
                    "expected a power of two that divides dim");
    c.bos_id = h.number("bos_id", 0x6C, -1, c.vocab_size - 1);
    c.eos_ids.resize(size_t(h.number("n_eos", 0x70, 0, 8)));
    for (size_t i = 0; i < c.eos_ids.size(); i++)
        c.eos_ids[i] = h.number("eos_id", 0x74 + 4 * i, 0, c.vocab_size - 1);
    c.temperature = h.number("temperature", 0x94, 0.0f, 100.0f);
    c.top_p = h.number("top_p", 0x98, 0.0f, 1.0f);
    c.top_k = h.number("top_k", 0x9C, 0, 1 << 24);
    c.min_p = h.number("min_p", 0xB8, 0.0f, 1.0f);
    if (h.value<uint32_t>(0xBC) != 0)
        c.repetition_penalty = h.number("repetition_penalty", 0xBC, 0.01f, 100.0f);
    c.static_activations = h.number("activations", 0xB4, 0, format.max_activations) == 1;
    check_reserved(h, format.read_own(h, c));

    // The place of the tokenizer section, and the checksum over it and the header.
    const auto offset = h.value<uint64_t>(0xA0), size = h.value<uint64_t>(0xA8);
    const size_t n = h.file.size();
    if (offset < header_size || offset > n || n - offset != size)
        fail("file is ", n, " bytes, but its tokenizer section is ", size, " bytes at ", offset);
    std::array<std::byte, header_size> blank;
    std::memcpy(blank.data(), h.file.data(), header_size);
    std::memset(blank.data() + 0xB0, 0, 4);
    const uint32_t crc = crc32(h.file.subspan(offset), crc32(blank)), expected = h.value<uint32_t>(0xB0);
    if (crc != expected)
        fail("checksum is ", hex_word(expected), ", but header and tokenizer give ", hex_word(crc));
}

// Reads and checks the header, everything but the length of the weights. The limits are far above any model
// of these families, and low enough that no product of fields that the loaders form overflows 64 bits:
// n_layers * dim * hidden_dim * 4 <= 2^56.
template <class Config>
Config read_header(const std::string& path, std::span<const std::byte> file,
                   const FileFormat<Config>& format) {
    const HeaderReader h{file};
    check_beginning(path, h, scheme_of(format.magic), format.version);
    Config c;
    c.dim = h.number("dim", 0x08, 1, 1 << 20);
    c.hidden_dim = h.number("hidden_dim", 0x0C, 1, 1 << 22);
    c.n_layers = h.number("n_layers", 0x10, 1, 1 << 12);
    c.n_heads = h.number("n_heads", 0x14, 1, 1 << 12);
    c.n_kv_heads = h.number("n_kv_heads", 0x18, 1, c.n_heads);
    c.vocab_size = h.number("vocab_size", 0x1C, 1, 1 << 24);
    c.max_seq_len = h.number("max_seq_len", 0x20, 1, 1 << 24);
    const int shared = h.value<uint8_t>(0x24);
    check_value(shared <= 1, "shared_classifier", shared, "expected 0 to 1");
    c.shared_classifier = shared == 1;
    check_value(c.n_heads % c.n_kv_heads == 0, "n_heads", c.n_heads, "not a multiple of n_kv_heads ",
                c.n_kv_heads);
    const BaseHeader& base = format.base;
    c.group_size = h.value<int>(base.group_size);
    if (h.value<uint32_t>(0x40) != 0) {
        read_extension(h, format, c);
    } else {  // made by another program
        c.arch = base.arch, c.norm_eps = base.norm_eps, c.rope_theta = base.rope_theta;
        check_value(base.head_dim != 0 || c.dim % c.n_heads == 0, "dim", c.dim, "not a multiple of n_heads ",
                    c.n_heads);
        c.head_dim = base.head_dim == 0 ? c.dim / c.n_heads : h.value<int>(base.head_dim);
    }
    check_value(c.head_dim >= 2 && c.head_dim <= 1 << 12, "head_dim", c.head_dim, "expected 2 to 4096");
    check_value(c.head_dim % 2 == 0, "head_dim", c.head_dim, "RoPE needs an even number");
    return c;
}

// Opens a model file and checks its header, which with the tokenizer section is all that is read of it here.
// The length of the weights is checked by TensorList::check_end.
template <class Config>
ModelFileOf<Config> open_model_file(const std::string& path, const FileFormat<Config>& format) {
    refuse_directory(path, scheme_of(format.magic));
    ModelFileOf<Config> file{
        path, std::make_unique<const MappedFile>(path, printable(path)), {}, {}, {}, format.alignment};
    const HeaderReader h{file.map->bytes};
    try {
        file.config = read_header(path, h.file, format);
        format.check(file.config);
    } catch (const std::runtime_error& e) {
        fail(path, ": ", e.what());
    }
    const size_t end = h.value<uint32_t>(0x40) != 0 ? size_t(h.value<uint64_t>(0xA0)) : h.file.size();
    file.weights = h.file.subspan(header_size, end - header_size);
    file.tokenizer = h.file.subspan(end);
    return file;
}

// ----------------------------------------------------------------------------
// The tensors of a file, one after another from the end of the header on
//
// Each program names its tensors once, in the order of the file, as the members of its Weights. Making a
// Weights walks along the file: every tensor gets its pointer and enters the list, from which the file's
// length, --info and the figures of the command line follow. formats/tensors.py has the same lists in Python.

struct TensorInfo {
    std::string name;        // of the step that uses it, as in a trace: "layers.0.attn.q_proj.codes"
    const char* type;        // "F32", ...
    std::vector<int> shape;  // outermost dimension first
    uint64_t offset;         // in the file, bytes
    uint64_t memory_offset;  // from the start of the list's memory, bytes
    uint64_t n_bytes;
};

class TensorList {
  public:
    // The list is of a file's weights, or of a copy of them in n_bytes of `memory` in which each tensor
    // begins at a multiple of `alignment` bytes; in the file it is one of file_alignment.
    TensorList(const std::byte* memory, uint64_t n_bytes, uint64_t alignment, uint64_t file_alignment = 1)
        : memory_(memory), n_bytes_(n_bytes), alignment_(alignment), file_alignment_(file_alignment) {}
    template <class Config>
    explicit TensorList(const ModelFileOf<Config>& file)
        : TensorList(file.weights.data(), file.weights.size(), uint64_t(file.alignment),
                     uint64_t(file.alignment)) {}

    // The next tensor of the file, in place; null if the memory ends before it does.
    template <class T>
    const T* next(const std::string& name, std::vector<int> shape) {
        static_assert(tensor_type<T> != nullptr);
        uint64_t n_bytes = sizeof(T);
        for (const int n : shape) n_bytes *= uint64_t(n);
        const uint64_t in_file = next_multiple(weight_bytes_, file_alignment_);
        const bool is_there = end_ <= n_bytes_ && n_bytes <= n_bytes_ - end_;
        const auto* p = is_there ? reinterpret_cast<const T*>(memory_ + end_) : nullptr;
        all_.push_back({name, tensor_type<T>, std::move(shape), header_size + in_file, end_, n_bytes});
        weight_bytes_ = in_file + n_bytes;
        end_ = next_multiple(end_ + n_bytes, alignment_);
        return p;
    }

    // What make(name) gives for each layer's tensor: "layers.0.NAME", "layers.1.NAME", ...
    template <class Make>
    auto layers(const ModelConfig& c, const std::string& name, Make make) {
        std::vector<decltype(make(name))> found;
        for (int l = 0; l < c.n_layers; l++)
            found.push_back(make("layers." + std::to_string(l) + "." + name));
        return found;
    }
    // A vector of n values for each layer, n_layers of (n,).
    template <class T>
    std::vector<const T*> vectors(const ModelConfig& c, const std::string& name, int n) {
        return layers(c, name, [&](const std::string& full_name) { return next<T>(full_name, {n}); });
    }

    const std::vector<TensorInfo>& all() const { return all_; }
    const std::byte* data(const TensorInfo& t) const { return memory_ + t.memory_offset; }  // one of these
    uint64_t weight_bytes() const { return weight_bytes_; }  // in the file, with what alignment leaves free
    uint64_t memory_bytes() const { return end_; }           // with every tensor aligned

    // Bytes of the tensors that a decode step reads: of experts the active ones'; nothing of an embedding
    // that is not also the classifier, of which a step reads a row, nor of what is for other hardware, the
    // assist matrix of A8W4 (docs/moe.md). With a ModelConfig, which has no experts, of all of them.
    template <class Config>
    uint64_t bytes_per_token(const Config& c) const {
        uint64_t n = 0;
        for (const TensorInfo& t : all_) {
            const bool is_embedding = t.name == "embed" || t.name.starts_with("embed.");
            if ((is_embedding && !c.shared_classifier) || t.name.ends_with(".assist")) continue;
            uint64_t n_bytes = t.n_bytes;
            if constexpr (requires { c.moe; })
                if (t.name.find(".moe.") != t.name.npos && !t.name.ends_with(".moe.router"))
                    n_bytes = n_bytes / uint64_t(c.moe.n_experts) * uint64_t(c.moe.n_active);
            n += n_bytes;
        }
        return n;
    }

    // Throws std::runtime_error unless the tensors fill the file's weights exactly.
    template <class Config>
    void check_end(const ModelFileOf<Config>& file) const {
        if (file.weights.size() != weight_bytes_)
            fail(file.path, ": weights are ", file.weights.size(), " bytes, but the header implies ",
                 weight_bytes_);
    }

  private:
    static uint64_t next_multiple(uint64_t n, uint64_t of) { return (n + of - 1) / of * of; }

    const std::byte* memory_;
    uint64_t n_bytes_, alignment_, file_alignment_;
    uint64_t weight_bytes_ = 0, end_ = 0;
    std::vector<TensorInfo> all_;
};
