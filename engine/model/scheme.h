// The schemes: what a model file begins with, and the program that runs it. A new scheme adds a row. All else
// that a scheme's files have of their own, its program says (FileFormat, engine/model/model_file.h). And what
// people take for model files: what it is, and the command that makes a model file of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "engine/os/system.h"
#include "engine/text/utf8.h"

struct Scheme {
    const char* file;      // as messages call such a file
    const char* program;   // runs it
    const char* exporter;  // makes it: the arguments of python -m export
    uint32_t magic;        // a file's first word
};

constexpr Scheme schemes[] = {
    {"a Q8 file", "runq", "q8", 0x616b3432},                            // "ak42", llama2.c's version 2
    {"a W8A8 file", "runq_w8a8", "w8a8 --calib text.txt", 0x616b3838},  // "ak88"
    {"an AWQ file", "runq_awq", "awq --calib text.txt", 0x616b3438},    // "ak48", KuiperLLama's Qwen3 AWQ
    {"a GPTQ file", "runq_gptq", "gptq --calib text.txt", 0x616b6770},  // "akgp"
    {"a MoE file", "runq_moe", "moe --calib text.txt", 0x616b6d65},     // "akme"
};

// The scheme whose files begin with `magic`, which is that of one of them.
constexpr const Scheme& scheme_of(uint32_t magic) {
    return *std::find_if(std::begin(schemes), std::end(schemes), [&](auto& s) { return s.magic == magic; });
}

// A path as a shell takes it for one word.
inline std::string shell_word(const std::string& path) {
    constexpr std::string_view plain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+,:@%=";
    if (!path.empty() && path.find_first_not_of(plain) == std::string::npos) return path;
    std::string word = "'";
    for (const char c : path) word += c == '\'' ? "'\\''" : std::string(1, c);
    return word + "'";
}

// What a user types to get a file of `scheme` from a GGUF file or a Hugging Face directory.
inline std::string export_command(const std::string& from, const Scheme& scheme) {
    return std::string(".venv/bin/python -m export ") + scheme.exporter + " " + shell_word(from) +
           " model.bin";
}

// Throws what a file is by its first bytes, such as "is a GGUF file; ...", if they say it.
inline void refuse_other_file(const std::string& path, std::span<const std::byte> file,
                              const Scheme& scheme) {
    const std::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
    // https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    if (bytes.starts_with("version https://git-lfs"))
        fail("a Git LFS pointer, which stands for the file; `git lfs pull` fetches the file itself");
    if (bytes.starts_with("GGUF"))
        fail("is a GGUF file; make a model file of it: ", export_command(path, scheme));
    // The length of a JSON object in 8 bytes, then the object.
    uint64_t header = 0;
    if (bytes.size() > sizeof header) std::memcpy(&header, bytes.data(), sizeof header);
    if (header > 0 && header <= bytes.size() - sizeof header && bytes[sizeof header] == '{') {
        const std::string folder = name_of(path_of(path).parent_path());
        fail("is a safetensors file; make a model file of its directory: ",
             export_command(folder.empty() ? "." : folder, scheme));
    }
    if (bytes.starts_with("PK\x03\x04"))
        fail("is a ZIP file, such as PyTorch writes; the exporter reads safetensors or GGUF: download those");
}

// Throws what a directory is instead of a model file, if `path` is one.
inline void refuse_directory(const std::string& path, const Scheme& scheme) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(path_of(path), ignored)) return;
    if (!std::filesystem::exists(path_of(path + "/config.json"), ignored))
        fail(path, ": is a directory, expected a model file");
    fail(path, ": is a Hugging Face directory; make a model file of it: ", export_command(path, scheme));
}
