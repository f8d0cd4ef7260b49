// Model files: every field of the header is checked before anything is read through it, and tensors lie one
// after another. Files are small ones that the tests make themselves.
#include "engine/model/model_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/os/system.h"
#include "header_offset.h"
#include "own_folder.h"

namespace {

constexpr const Scheme &q8 = schemes[0], &awq = schemes[2];
constexpr int q8_version = 2, awq_version = 5;
const std::string folder = own_folder().string() + "/model_file/";

// A header with an extension, 64 bytes of weights and a tokenizer section of 10 bytes.
struct Bytes {
    std::vector<char> data = std::vector<char>(header_size + 64 + 10);

    template <class T>
    void set(size_t offset, T value) {
        std::memcpy(data.data() + offset, &value, sizeof value);
    }
    void seal() {
        set<uint32_t>(header_offset::checksum, 0);
        const std::span<const char> all(data);
        const uint32_t head = crc32(std::as_bytes(all.first(header_size)));
        set(header_offset::checksum, crc32(std::as_bytes(all.subspan(header_size + 64)), head));
    }
};

Bytes good_file() {
    Bytes f;
    f.set(0x00, q8.magic);
    f.set(0x04, q8_version);
    const std::array dims{64, 128, 2, 4, 2, 100, 256};
    f.set(0x08, dims);
    f.set<uint8_t>(header_offset::shared_classifier, 1);
    f.set(header_offset::group_size, 64);
    f.set(header_offset::extension, extension_magic);
    f.set(header_offset::arch, 2);
    f.set(header_offset::head_dim, 32);
    f.set(header_offset::ext_group_size, 64);
    f.set(header_offset::norm_eps, 1e-6f);
    f.set(header_offset::rope_theta, 1e6f);
    f.set(header_offset::rope_scaling, 1);
    f.set(header_offset::rope_scaling + 4, 32.0f);
    f.set(header_offset::rope_scaling + 8, 1.0f);
    f.set(header_offset::rope_scaling + 12, 4.0f);
    f.set(header_offset::rope_scaling + 16, 8192);
    f.set(header_offset::bos_id, 7);
    f.set(header_offset::n_eos, 2);
    f.set(header_offset::eos_ids, 9);
    f.set(header_offset::eos_ids + 4, 99);
    f.set(header_offset::temperature, 0.6f);
    f.set(header_offset::top_p, 0.9f);
    f.set(header_offset::top_k, 20);
    f.set<uint64_t>(header_offset::tokenizer_offset, header_size + 64);
    f.set<uint64_t>(header_offset::tokenizer_size, 10);
    f.seal();
    return f;
}

std::string write(const Bytes& f, size_t size = SIZE_MAX) {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "model.bin";
    std::ofstream(path, std::ios::binary)
        .write(f.data.data(), std::streamsize(std::min(size, f.data.size())));
    return path;
}

ModelFile open_file(const std::string& path) {
    return open_model_file(path, FileFormat<ModelConfig>{.magic = q8.magic, .version = q8_version});
}

// Opens the file; returns what it was refused with, or "" if it was not. The scheme here has 64 bytes of
// weights, or `n`.
std::string refusal(const std::string& path, int n = 64) {
    try {
        const ModelFile file = open_file(path);
        TensorList tensors(file);
        tensors.next<int8_t>("weights", {n});
        tensors.check_end(file);
        return "";
    } catch (const std::runtime_error& e) {
        return e.what();
    }
}

}  // namespace

TEST_CASE("model file: a good header is read as written") {
    const ModelFile file = open_file(write(good_file()));
    const ModelConfig& c = file.config;
    CHECK(c.arch == Arch::qwen3);
    CHECK(c.dim == 64);
    CHECK(c.hidden_dim == 128);
    CHECK(c.n_layers == 2);
    CHECK(c.n_heads == 4);
    CHECK(c.n_kv_heads == 2);
    CHECK(c.head_dim == 32);
    CHECK(c.vocab_size == 100);
    CHECK(c.max_seq_len == 256);
    CHECK(c.shared_classifier);
    CHECK(c.group_size == 64);
    CHECK(c.norm_eps == 1e-6f);
    CHECK(c.rope_theta == 1e6f);
    CHECK(c.rope_type == 1);
    CHECK(c.rope_factor == 32);
    CHECK(c.low_freq_factor == 1);
    CHECK(c.high_freq_factor == 4);
    CHECK(c.original_max_position == 8192);
    CHECK(c.bos_id == 7);
    CHECK(c.eos_ids == std::vector<int>{9, 99});
    CHECK(c.temperature == 0.6f);
    CHECK(c.top_p == 0.9f);
    CHECK(c.top_k == 20);
    CHECK(c.min_p == 0);
    CHECK(c.repetition_penalty == 1);
    CHECK(c.q_dim() == 128);
    CHECK(c.kv_dim() == 64);
    CHECK(c.heads_per_kv() == 2);
    CHECK(file.weights.size() == 64);
    CHECK(file.tokenizer.size() == 10);

    Bytes f = good_file();
    f.set(header_offset::min_p, 0.05f);
    f.set(header_offset::repetition_penalty, 1.1f);
    f.seal();
    CHECK(open_file(write(f)).config.min_p == 0.05f);
    CHECK(open_file(write(f)).config.repetition_penalty == 1.1f);
}

TEST_CASE("model file: a file of llama2.c, without extension, gets the documented defaults") {
    Bytes f = good_file();
    std::fill(f.data.begin() + header_offset::extension, f.data.begin() + header_size, 0);
    f.data.resize(header_size + 64);
    const ModelFile file = open_file(write(f));
    CHECK(file.config.arch == Arch::llama);
    CHECK(file.config.head_dim == 16);
    CHECK(file.config.rope_theta == 500000);
    CHECK(file.config.norm_eps == 1e-5f);
    CHECK(file.config.rope_type == 0);
    CHECK(file.config.bos_id == -1);
    CHECK(file.config.eos_ids.empty());
    CHECK(file.tokenizer.empty());
    f.set(0x14, 6);  // 64 / 6 heads is no head_dim
    f.set(0x18, 3);
    CHECK(refusal(write(f)) == folder + "model.bin: dim is 64, not a multiple of n_heads 6");
}

TEST_CASE("model file: every bad field is named with its value") {
    const std::string p = folder + "model.bin: ";
    struct Case {
        size_t offset;
        int value;
        const char* text;
    };
    const Case cases[] = {
        {0x00, 0x46554746,
         "magic is 0x46554746, expected 0x616b3432 (no model file: python -m export makes one of a Hugging "
         "Face "
         "directory or a GGUF file)"},
        {0x00, int(awq.magic), "magic is 0x616b3438, expected 0x616b3432 (an AWQ file: use runq_awq)"},
        {0x04, 3, "version is 3, expected 2"},
        {0x08, 0, "dim is 0, expected 1 to 1048576"},
        {0x08, -5, "dim is -5, expected 1 to 1048576"},
        {0x0C, 1 << 30, "hidden_dim is 1073741824, expected 1 to 4194304"},
        {0x10, 0, "n_layers is 0, expected 1 to 4096"},
        {0x14, 5000, "n_heads is 5000, expected 1 to 4096"},
        {0x18, 3, "n_heads is 4, not a multiple of n_kv_heads 3"},
        {0x18, 8, "n_kv_heads is 8, expected 1 to 4"},
        {0x1C, -1, "vocab_size is -1, expected 1 to 16777216"},
        {0x20, 0, "max_seq_len is 0, expected 1 to 16777216"},
        {header_offset::group_size, 32, "group_size is 32 in the header and 64 at 0x4c"},
        {header_offset::extension, 5, "extension magic is 0x00000005, expected 0x31584b41 or 0"},
        {header_offset::arch, 3, "arch is 3, expected 1 to 2"},
        {header_offset::head_dim, 31, "head_dim is 31, RoPE needs an even number"},
        {header_offset::head_dim, 0, "head_dim is 0, expected 2 to 4096"},
        {header_offset::norm_eps, 0x7fc00000, "norm_eps is nan, expected 0 to 1"},
        {header_offset::rope_theta, 0, "rope_theta is 0, expected 1 to 1e+12"},
        {header_offset::rope_scaling, 4, "rope_scaling type is 4, expected 0 to 3"},
        {header_offset::rope_scaling, 3, "attention_factor is 0, expected 0.01 to 100"},
        {header_offset::rope_scaling + 4, 0, "rope_scaling factor is 0, expected 1 to 1e+06"},
        {header_offset::rope_scaling + 12, 0x3f800000, "high_freq_factor is not above low_freq_factor"},
        {header_offset::rope_scaling + 16, 0,
         "original_max_position_embeddings is 0, expected 1 to 16777216"},
        {header_offset::bos_id, 100, "bos_id is 100, expected -1 to 99"},
        {header_offset::n_eos, 9, "n_eos is 9, expected 0 to 8"},
        {header_offset::eos_ids + 4, 100, "eos_id is 100, expected 0 to 99"},
        {header_offset::temperature, 0x7f800000, "temperature is inf, expected 0 to 100"},
        {header_offset::top_p, 0x40000000, "top_p is 2, expected 0 to 1"},
        {header_offset::top_k, -1, "top_k is -1, expected 0 to 16777216"},
        {header_offset::activations, 1, "activations is 1, expected 0 to 0"},
        {header_offset::min_p, 0x40000000, "min_p is 2, expected 0 to 1"},
        {header_offset::repetition_penalty, 0x7fc00000, "repetition_penalty is nan, expected 0.01 to 100"},
        {header_offset::repetition_penalty, 0x38000000,
         "repetition_penalty is 3.05176e-05, expected 0.01 to 100"},
        {header_offset::own, 1, "reserved byte at 192 is not 0"},
        {header_size - 4, 1 << 24, "reserved byte at 255 is not 0"},
        {header_offset::tokenizer_offset, 8, "file is 330 bytes, but its tokenizer section is 10 bytes at 8"},
        {header_offset::tokenizer_size, 11,
         "file is 330 bytes, but its tokenizer section is 11 bytes at 320"},
    };
    for (const Case& c : cases) {
        Bytes f = good_file();
        f.set(c.offset, c.value);
        f.seal();
        CHECK(refusal(write(f)) == p + c.text);
    }
    Bytes f = good_file();
    f.set<uint8_t>(header_offset::shared_classifier, 2);
    f.seal();
    CHECK(refusal(write(f)) == p + "shared_classifier is 2, expected 0 to 1");
}

TEST_CASE("model file: a flipped bit in header or tokenizer, and a wrong length, do not pass") {
    const Bytes good = good_file();
    CHECK(refusal(write(good)).empty());
    for (size_t byte = 0; byte < good.data.size(); byte++) {
        if (byte >= header_size && byte < header_size + 64) continue;  // weights may be anything
        Bytes f = good;
        f.data[byte] = char(f.data[byte] ^ (1 << (byte % 8)));
        CHECK_FALSE(refusal(write(f)).empty());
    }
    for (size_t size = 0; size < good.data.size(); size++) CHECK_FALSE(refusal(write(good, size)).empty());
    Bytes longer = good;
    longer.data.push_back(0);
    CHECK_FALSE(refusal(write(longer)).empty());
    // The header is under the checksum also where no tokenizer follows.
    Bytes bare = good;
    bare.data.resize(header_size + 64);
    bare.set<uint64_t>(header_offset::tokenizer_size, 0);
    bare.seal();
    CHECK(refusal(write(bare)).empty());
    bare.set(header_offset::top_k, 21);
    CHECK(refusal(write(bare)).find("checksum is") != std::string::npos);

    // The header's dimensions imply another length than the file's: here the scheme says 63 bytes.
    for (const int n : {63, 65})
        CHECK(refusal(write(good), n) ==
              folder + "model.bin: weights are 64 bytes, but the header implies " + std::to_string(n));
    // What the program cannot run is refused under the file's name.
    const auto refuse = [](const ModelConfig&) { throw std::runtime_error("not this one"); };
    CHECK_THROWS_WITH(
        open_model_file(write(good),
                        FileFormat<ModelConfig>{.magic = q8.magic, .version = q8_version, .check = refuse}),
        (folder + "model.bin: not this one").c_str());
    CHECK(refusal(folder + "absent.bin") == folder + "absent.bin: cannot open: No such file or directory");
    CHECK(refusal("absent.bin") == "absent.bin: cannot open: No such file or directory in the folder " +
                                       std::filesystem::current_path().string());
    CHECK(refusal("/dev") == "/dev: is a directory, expected a model file");
}

TEST_CASE("model file: a FIFO is refused and not waited for, a pointer of Git LFS is called one") {
    std::filesystem::create_directories(folder);
    const std::string fifo = folder + "fifo.bin";
    std::filesystem::remove(fifo);
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    CHECK(refusal(fifo) == fifo + ": not a regular file");
    const std::string pointer = folder + "pointer.bin";
    std::ofstream(pointer) << "version https://git-lfs.github.com/spec/v1\noid sha256:"
                           << std::string(64, '7') << "\nsize 1234567\n";
    CHECK(refusal(pointer) ==
          pointer + ": a Git LFS pointer, which stands for the file; `git lfs pull` fetches the file itself");
}

TEST_CASE("model file: what else people have is named, with the command that makes a model file of it") {
    std::filesystem::create_directories(folder + "hf it's");
    auto refusal_of = [](const std::string& path, const std::string& content) {
        std::ofstream(path, std::ios::binary) << content;
        return refusal(path);
    };
    const std::string export_q8 = ".venv/bin/python -m export q8 ", gguf = folder + "a.gguf";
    for (const size_t size : {0u, 4u, 1000u}) {  // also shorter than a header
        CHECK(refusal_of(gguf, "GGUF" + std::string(size, '\3')) ==
              gguf + ": is a GGUF file; make a model file of it: " + export_q8 + gguf + " model.bin");
    }
    const std::string hf = folder + "hf it's", word = "'" + folder + "hf it'\\''s'";
    std::filesystem::remove(hf + "/config.json");
    CHECK(refusal(hf) == hf + ": is a directory, expected a model file");
    std::ofstream(hf + "/config.json") << "{}";
    CHECK(refusal(hf) ==
          hf + ": is a Hugging Face directory; make a model file of it: " + export_q8 + word + " model.bin");

    const std::string tensors = hf + "/model.safetensors", header("\x02\0\0\0\0\0\0\0{}", 10);
    const std::string is_safetensors =
        tensors + ": is a safetensors file; make a model file of its directory: " + export_q8 + word +
        " model.bin";
    CHECK(refusal_of(tensors, header) == is_safetensors);
    CHECK(refusal_of(tensors, header + std::string(1000, '\0')) == is_safetensors);
    CHECK(refusal_of(tensors, header.substr(0, 9)) ==
          tensors + ": file is 9 bytes, shorter than the 256-byte header");
    const std::string zip = folder + "pytorch_model.bin";
    CHECK(refusal_of(zip, "PK\x03\x04" + std::string(1000, '\0')) ==
          zip +
              ": is a ZIP file, such as PyTorch writes; the exporter reads safetensors or GGUF: download "
              "those");

    const std::string scheme[] = {"q8", "w8a8 --calib text.txt", "awq --calib text.txt",
                                  "gptq --calib text.txt", "moe --calib text.txt"};
    for (size_t i = 0; i < std::size(scheme); i++) {
        CHECK(export_command("m.gguf", schemes[i]) ==
              ".venv/bin/python -m export " + scheme[i] + " m.gguf model.bin");
    }
    CHECK(export_command("", q8) == export_q8 + "'' model.bin");
}

namespace {

// Bytes of the file that lie in the page cache.
size_t cached_bytes(const std::string& path) {
    const MappedFile file(path, path);
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> there(file.bytes.size() / page + 1);
    REQUIRE(mincore(const_cast<std::byte*>(file.bytes.data()), file.bytes.size(), there.data()) == 0);
    size_t n = 0;
    for (const unsigned char x : there) n += (x & 1) * page;
    return n;
}

}  // namespace

TEST_CASE("model file: of a file that is no model only the beginning is read") {
    const std::string path = write(good_file());
    std::filesystem::resize_file(path, size_t(300) << 20);  // a hole
    CHECK(refusal(path).find("but its tokenizer section is") != std::string::npos);
    std::ofstream(path, std::ios::binary | std::ios::in) << "GGUF";
    CHECK(refusal(path).find("is a GGUF file") != std::string::npos);
    CHECK(cached_bytes(path) < size_t(16) << 20);
    std::filesystem::remove(path);
}

TEST_CASE("mapped file: known as the one that is mapped, until it goes; its pages can be given back") {
    const std::string path = write(good_file());
    constexpr size_t size = size_t(3) << 20;
    std::filesystem::resize_file(path, size);
    auto file = std::make_unique<const MappedFile>(path, "its name");
    CHECK(mapped_range.begin == file->bytes.data());
    CHECK(mapped_range.size == size);
    CHECK(mapped_range.path == "its name");
    const std::vector begin(file->bytes.begin(), file->bytes.begin() + 400);
    drop_mapped(file->bytes.data() + 100, size - 200);
    CHECK(std::equal(begin.begin(), begin.end(), file->bytes.begin()));
    std::vector<char> own(size, 7);
    drop_mapped(own.data(), own.size());  // none of the file's: stays as it is
    CHECK(std::count(own.begin(), own.end(), 7) == ptrdiff_t(size));
    file.reset();
    CHECK(mapped_range.begin == nullptr);
    std::filesystem::resize_file(path, 0);
    CHECK(MappedFile(path, "").bytes.empty());
    std::filesystem::remove(path);
}

TEST_CASE("crc32: the check value of zlib and PNG") {
    const std::string text = "123456789";
    CHECK(crc32(std::as_bytes(std::span(text))) == 0xCBF43926);
    CHECK(crc32(std::as_bytes(std::span(text)).subspan(4), crc32(std::as_bytes(std::span(text)).first(4))) ==
          0xCBF43926);
}

TEST_CASE("tensors: one after another, each with its place in the file, and none beyond the end") {
    const ModelFile file = open_file(write(good_file()));  // 2 layers, 64 bytes of weights
    TensorList list(file);
    auto at = [&](size_t offset) { return static_cast<const void*>(file.weights.data() + offset); };
    const std::vector<const float*> norms = list.vectors<float>(file.config, "attn.norm", 3);
    REQUIRE(norms.size() == 2);
    CHECK(norms[0] == at(0));
    CHECK(norms[1] == at(12));
    CHECK(list.vectors<float>(file.config, "more", 32).size() == 2);  // 256 bytes: beyond 64
    CHECK(list.next<int8_t>("embed.codes", {4, 8}) == nullptr);
    REQUIRE(list.all().size() == 5);
    const TensorInfo &second = list.all()[1], &last = list.all()[4];
    CHECK(second.name == "layers.1.attn.norm");
    CHECK(std::string(second.type) == "F32");
    CHECK(second.shape == std::vector{3});
    CHECK(second.offset == header_size + 12);
    CHECK(std::string(last.type) == "I8");
    CHECK(last.offset == header_size + 24 + 256);
    CHECK(last.n_bytes == 32);
    CHECK(list.weight_bytes() == 24 + 256 + 32);
    ModelConfig c = file.config;
    CHECK(list.bytes_per_token(c) == 24 + 256 + 32);  // the embedding is the classifier
    c.shared_classifier = false;
    CHECK(list.bytes_per_token(c) == 24 + 256);
    list.next<int8_t>("of_others", {4, 10});
    list.next<int8_t>("of_nobody.assist", {7});
    CHECK(list.bytes_per_token(c) == 24 + 256 + 40);

    // A copy in which tensors begin at multiples of 16.
    TensorList copy(file.weights.data(), 64, 16);
    CHECK(copy.next<float>("a", {3}) == at(0));
    CHECK(copy.next<int8_t>("b", {17}) == at(16));
    CHECK(copy.next<int8_t>("c", {16}) == at(48));
    CHECK(copy.next<int8_t>("d", {1}) == nullptr);
    CHECK(copy.weight_bytes() == 12 + 17 + 16 + 1);
    CHECK(copy.all()[2].offset == header_size + 12 + 17);

    // A file in which they do.
    TensorList aligned(file.weights.data(), 64, 16, 16);
    CHECK(aligned.next<float>("a", {3}) == at(0));
    CHECK(aligned.next<uint8_t>("b", {17}) == at(16));
    CHECK(aligned.next<int32_t>("c", {4}) == at(48));
    CHECK(aligned.all()[1].offset == header_size + 16);
    CHECK(aligned.all()[2].offset == header_size + 48);
    CHECK(aligned.all()[2].memory_offset == 48);
    CHECK(aligned.weight_bytes() == 64);
    aligned.next<int8_t>("d", {1});
    CHECK(aligned.weight_bytes() == 65);  // nothing behind the last one
}

namespace {

// A scheme whose header has a number of its own, and the fields of another program's header elsewhere.
struct OtherConfig : ModelConfig {
    int number = 0;
};
size_t read_number(const HeaderReader& h, OtherConfig& c) {
    c.number = h.number("number", 0xC0, 1, 5);
    return 0xC4;
}
const FileFormat<OtherConfig> other_format{.magic = awq.magic,
                                           .version = awq_version,
                                           .read_own = read_number,
                                           .base = {.group_size = 0x29,
                                                    .head_dim = 0x25,
                                                    .arch = Arch::qwen3,
                                                    .norm_eps = 1e-6f,
                                                    .rope_theta = 1e6f},
                                           .first_arch = Arch::qwen3,
                                           .last_arch = Arch::qwen3,
                                           .max_activations = 1,
                                           .alignment = 64};
Bytes other_file() {
    Bytes f = good_file();
    f.set(0x00, awq.magic);
    f.set(0x04, awq_version);
    f.set(0x25, 32);
    f.set(0x29, 64);
    f.set(0xC0, 5);
    f.seal();
    return f;
}

}  // namespace

TEST_CASE("model file: what a program says of its header, and that what it does not read is 0") {
    const ModelFileOf<OtherConfig> file = open_model_file(write(other_file()), other_format);
    CHECK(file.config.number == 5);
    CHECK(file.config.group_size == 64);
    CHECK(file.alignment == 64);
    CHECK(open_file(write(good_file())).alignment == 1);
    struct Case {
        size_t offset;
        int value;
        const char* text;
    };
    const Case cases[] = {
        {0x25, 30, "head_dim is 30 at 0x25 and 32 at 0x48"},
        {0x29, 65, "group_size is 65 in the header and 64 at 0x4c"},
        {header_offset::arch, 1, "arch is 1, expected 2 to 2"},
        {header_offset::activations, 2, "activations is 2, expected 0 to 1"},
        {0xC0, 6, "number is 6, expected 1 to 5"},
        {0xC4, 1 << 8, "reserved byte at 197 is not 0"},
    };
    for (const Case& c : cases) {
        Bytes f = other_file();
        f.set(c.offset, c.value);
        f.seal();
        CHECK_THROWS_WITH(open_model_file(write(f), other_format), (folder + "model.bin: " + c.text).c_str());
    }
    Bytes f = other_file();
    std::fill(f.data.begin() + header_offset::extension, f.data.begin() + header_size, 0);
    f.set(0x25, 128);
    f.data.resize(header_size + 64);
    const ModelConfig c = open_model_file(write(f), other_format).config;
    CHECK(c.arch == Arch::qwen3);
    CHECK(c.head_dim == 128);
    CHECK(c.norm_eps == 1e-6f);
    CHECK(c.rope_theta == 1e6f);
}
