// Model files: a 256-byte header, the weights, the tokenizer section; little-endian, used in place.
//
// This file knows the header, which the three programs share, and how to hand out the weights one tensor
// after another. It does not know which tensors there are, or how they are quantized: that is each program's
// own business. The byte layout is written down in docs/model-files.md and written by export/model_file.py.
//
// Everything is checked before the first pointer is made. Each failure is a std::runtime_error whose text
// names the file, the field and the value; main() turns it into one line and exit code 1.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static_assert(std::endian::native == std::endian::little, "model files are little-endian and read in place");

// ----------------------------------------------------------------------------
// What a header says

enum class Arch : uint32_t { llama = 1, qwen3 = 2 };

// Llama 3's rescaling of the RoPE frequencies (config.json: rope_scaling, type "llama3").
struct RopeScaling {
    bool llama3 = false;  // false: the frequencies are used as they are
    float factor = 1;
    float low_freq_factor = 1;
    float high_freq_factor = 4;
    int original_max_position_embeddings = 0;
};

struct ModelConfig {
    Arch arch = Arch::llama;
    int dim = 0;         // length of a token's vector (hidden_size)
    int hidden_dim = 0;  // length inside the feed-forward block (intermediate_size)
    int n_layers = 0;
    int n_heads = 0;                  // query heads
    int n_kv_heads = 0;               // key/value heads; n_heads / n_kv_heads query heads share one
    int head_dim = 0;                 // length of one head; n_heads * head_dim need not be dim
    int vocab_size = 0;               // rows of the embedding and of the classifier
    int max_seq_len = 0;              // positions the model was made for
    bool shared_classifier = false;   // the classifier is the embedding (tied)
    int group_size = 0;               // weights that share one scale; 0: the whole row (W8A8)
    bool static_activations = false;  // W8A8: one scale a place, from calibration, not one a token
    float norm_eps = 1e-5f;
    float rope_theta = 500000;
    RopeScaling rope_scaling;
    int bos_id = -1;           // -1: none
    std::vector<int> eos_ids;  // generation ends at any of these
    float temperature = 1;     // sampling defaults, from generation_config.json; 0 is greedy
    float top_p = 0.9f;
    int top_k = 0;  // 0: off

    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
    int heads_per_kv() const { return n_heads / n_kv_heads; }
};

// The first word of a file names its scheme.
constexpr uint32_t magic_q8 = 0x616b3432;    // "ak42", llama2.c's version 2
constexpr uint32_t magic_w8a8 = 0x616b3838;  // "ak88"
constexpr uint32_t magic_awq = 0x616b3438;   // "ak48", KuiperLLama's Qwen3 AWQ
constexpr int version_q8 = 2;
constexpr int version_w8a8 = 1;
constexpr int version_awq = 5;

constexpr size_t header_size = 256;
constexpr uint32_t extension_magic = 0x31584b41;  // "AKX1"; 0 in files made by other programs
constexpr size_t max_eos_ids = 8;

// ----------------------------------------------------------------------------
// A whole file in memory, for reading. A small one is mapped. A large one is read into huge pages, if it
// takes no more than half of the machine's memory: a mapped file lies in pages of 4 KB, and at each of their
// ends the hardware stops fetching ahead, which costs decode a fifth of its speed (docs/performance.md).
constexpr size_t min_bytes_to_read = size_t(64) << 20;

class MappedFile {
  public:
    MappedFile() = default;

    // Throws std::runtime_error "PATH: cannot open: reason".
    explicit MappedFile(const std::string& path) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) throw std::runtime_error(path + ": cannot open: " + std::strerror(errno));
        struct stat info {};
        if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
            close(fd);
            throw std::runtime_error(path + ": not a regular file");
        }
        size_ = static_cast<size_t>(info.st_size);
        if (size_ > 0) {
            void* p = read_into_huge_pages(fd);
            if (p == MAP_FAILED) p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
            const int reason = errno;
            close(fd);
            if (p == MAP_FAILED) throw std::runtime_error(path + ": cannot map: " + std::strerror(reason));
            data_ = static_cast<const std::byte*>(p);
        } else {
            close(fd);
        }
    }

    ~MappedFile() {
        if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
    }
    MappedFile(MappedFile&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }

  private:
    // The file's bytes in anonymous memory, or MAP_FAILED where mapping is the better or the only way.
    void* read_into_huge_pages(int fd) const {
        const size_t memory = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
        if (size_ < min_bytes_to_read || size_ > memory / 2) return MAP_FAILED;
        void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return p;
        madvise(p, size_, MADV_HUGEPAGE);  // a wish: without it the pages are small, and all else is the same
        for (size_t at = 0; at < size_;) {
            const ssize_t n = pread(fd, static_cast<char*>(p) + at, size_ - at, static_cast<off_t>(at));
            if (n <= 0) {
                munmap(p, size_);
                return MAP_FAILED;
            }
            at += static_cast<size_t>(n);
        }
        return p;
    }

    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// ----------------------------------------------------------------------------
// A model file: its header, its weights, its tokenizer

struct ModelFile {
    std::string path;
    MappedFile map;
    ModelConfig config;
    std::span<const std::byte> weights;    // between the header and the tokenizer section
    std::span<const std::byte> tokenizer;  // empty in files made by other programs
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
                 tokenizer_size = 0xA8, checksum = 0xB0, activations = 0xB4, reserved = 0xB8;
}  // namespace header_offset

// Reads and checks the header of `file`, everything but the length of the weights. `magic` and `version` are
// those of the program that asks.
inline ModelConfig read_header(const std::string& path, std::span<const std::byte> file, uint32_t magic,
                               int version) {
    auto fail = [&](const std::string& what) -> void { throw std::runtime_error(path + ": " + what); };
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

    if (u32(0) != magic) {
        const char* other = u32(0) == magic_q8     ? " (a Q8 file: use runq)"
                            : u32(0) == magic_w8a8 ? " (a W8A8 file: use runq_w8a8)"
                            : u32(0) == magic_awq  ? " (an AWQ file: use runq_awq)"
                                                   : "";
        char text[120];
        std::snprintf(text, sizeof text, "magic is 0x%08x, expected 0x%08x%s", u32(0), magic, other);
        fail(text);
    }
    if (i32(4) != version) {
        fail("version is " + std::to_string(i32(4)) + ", expected " + std::to_string(version));
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
    const bool awq = magic == magic_awq;
    c.group_size = i32(awq ? header_offset::awq_group_size : header_offset::group_size);

    if (const uint32_t ext = u32(header_offset::extension); ext == 0) {  // made by another program
        if (awq) {
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
        c.arch = static_cast<Arch>(checked_int("arch", i32(header_offset::arch), 1, 2));
        c.head_dim = i32(header_offset::head_dim);
        if (awq && i32(header_offset::awq_head_dim) != c.head_dim) {
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
        c.static_activations =
            checked_int("activations", i32(header_offset::activations), 0, magic == magic_w8a8 ? 1 : 0) != 0;
        for (size_t i = header_offset::reserved; i < header_size; i++) {
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

// Opens and checks a model file. `weight_bytes` gives how many bytes of weights a config implies in the
// asking program's scheme (and throws a text without the path if it cannot hold such a config).
inline ModelFile open_model_file(const std::string& path, uint32_t magic, int version,
                                 const std::function<uint64_t(const ModelConfig&)>& weight_bytes) {
    ModelFile file;
    file.path = path;
    file.map = MappedFile(path);
    const std::span<const std::byte> bytes = file.map.bytes();
    file.config = read_header(path, bytes, magic, version);
    uint64_t expected = 0;
    try {
        expected = weight_bytes(file.config);
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
    uint64_t end = bytes.size();
    uint32_t ext;
    std::memcpy(&ext, bytes.data() + header_offset::extension, sizeof ext);
    if (ext != 0) std::memcpy(&end, bytes.data() + header_offset::tokenizer_offset, sizeof end);
    if (end - header_size != expected) {
        throw std::runtime_error(path + ": weights are " + std::to_string(end - header_size) +
                                 " bytes, but the header implies " + std::to_string(expected));
    }
    file.weights = bytes.subspan(header_size, expected);
    file.tokenizer = bytes.subspan(end);
    return file;
}

// Hands out the weights front to back. open_model_file() has checked the total, so a cursor that takes what
// weight_bytes() counted ends exactly at the end.
class WeightCursor {
  public:
    explicit WeightCursor(const ModelFile& file) : rest_(file.weights), path_(file.path) {}

    // The next n values of type T, in place. Throws if they are not there.
    template <class T>
    const T* take(uint64_t n) {
        if (rest_.size() / sizeof(T) < n) throw std::runtime_error(path_ + ": weights end early");
        const auto* p = reinterpret_cast<const T*>(rest_.data());
        rest_ = rest_.subspan(n * sizeof(T));
        return p;
    }

    bool at_end() const { return rest_.empty(); }

  private:
    std::span<const std::byte> rest_;
    std::string path_;
};
