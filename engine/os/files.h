// Files mapped into memory, and new files that replace the old ones as a whole or not at all, unless the
// machine itself stops.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "engine/os/system.h"

// The pages that have n bytes of the file that was mapped last, from p on; none, if they are not the file's.
inline std::span<const std::byte> mapped_pages(const void* p, size_t n) {
    const auto* begin = static_cast<const std::byte*>(p);
    if (n == 0 || begin < mapped_range.begin || begin + n > mapped_range.begin + mapped_range.size) return {};
    const size_t before = size_t(begin - mapped_range.begin) % page_size();
    return {begin - before, before + n};
}
// Frees their memory: read again, they come from the disk or from the system's page cache. The last page
// stays, unless these bytes fill it: to read the rest of it would bring its neighbours back.
inline void drop_mapped(const void* p, size_t n) {
    const auto pages = mapped_pages(p, n);
    drop_pages(pages.first(pages.size() / page_size() * page_size()));
}
// Starts to read them from the disk: they are used soon.
inline void want_mapped(const void* p, size_t n) { want_pages(mapped_pages(p, n)); }

// A whole file in memory; null, if it is empty. Throws std::runtime_error "PATH: cannot open: reason", "PATH:
// not a regular file" or "PATH: cannot map: reason".
inline std::span<const std::byte> map_file(const std::string& path) {
    const std::filesystem::path name = path_of(path);
    std::error_code ignored;
    const std::filesystem::file_status status = std::filesystem::status(name, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
        throw std::runtime_error(path + ": not a regular file");  // to open a FIFO would wait for a writer
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(open_file(path, "rb"), std::fclose);
    if (file == nullptr) {
        const int reason = errno;
        std::string line = path + ": cannot open: " + std::strerror(reason);
        if (reason == ENOENT && name.is_relative())
            line += " in the folder " + name_of(std::filesystem::current_path());
        throw std::runtime_error(line);
    }
    return map_stream(file.get(), path);
}

// A file mapped into memory: its pages come from the disk when they are first read, and the system can drop
// them again where memory is short.
struct MappedFile {
    const std::span<const std::byte> bytes;
    const std::string shown;  // the path as an error line may have it

    // Maps the file and reads nothing of it. Throws as map_file().
    MappedFile(const std::string& path, const std::string& shown_path)
        : bytes(map_file(path)), shown(shown_path) {
        if (!bytes.empty()) mapped_range = {bytes.data(), bytes.size(), shown};
    }
    ~MappedFile() {
        if (bytes.empty()) return;
        if (mapped_range.begin == bytes.data()) mapped_range = {};
        unmap_file(bytes);
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
};

// Until commit() it is ".runq-NUMBER.part" beside its place, which only a signal that kills leaves behind.
class NewFile {
  public:
    // Throws std::runtime_error "PATH: cannot write: reason": if the path cannot be written, or is there and
    // no regular file. A link is followed, also to a file that is not there yet.
    explicit NewFile(const std::string& path) : path_(path), target_(path_of(path)) {
        std::error_code error;
        const std::filesystem::file_status status = std::filesystem::status(target_, error);
        if (status.type() == std::filesystem::file_type::none) fail(error.default_error_condition().value());
        if (std::filesystem::is_directory(status)) fail(EISDIR);
        if (std::filesystem::is_other(status))
            throw std::runtime_error(path_ + ": cannot write: not a regular file");
        while (std::filesystem::is_symlink(std::filesystem::symlink_status(target_)))
            target_ = target_.parent_path() / std::filesystem::read_symlink(target_);
        if (target_.filename().empty()) fail(path.empty() ? ENOENT : EISDIR);
        const std::string name = ".runq-" + std::to_string(std::random_device()()) + ".part";
        temporary_ = target_.parent_path() / name;
        stream_ = open_file(name_of(temporary_), "wb");
        if (stream_ == nullptr) fail();
    }
    ~NewFile() {
        if (stream_ != nullptr) std::fclose(stream_);
        std::error_code ignored;
        if (!temporary_.empty()) std::filesystem::remove(temporary_, ignored);
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    void write(const void* bytes, size_t n) {
        if (std::fwrite(bytes, 1, n, stream_) != n) fail();
    }

    // Puts what has been written under the path, in place of what is there. Throws as the constructor.
    void commit() {
        if (std::fclose(std::exchange(stream_, nullptr)) != 0) fail();
        std::error_code error;
        std::filesystem::rename(temporary_, target_, error);
        if (error) fail(error.default_error_condition().value());
        temporary_.clear();
    }

  private:
    [[noreturn]] void fail(int reason = errno) const {
        throw std::runtime_error(path_ + ": cannot write: " + std::strerror(reason));
    }

    std::string path_;                          // as it was given
    std::filesystem::path target_, temporary_;  // temporary: empty once the file is in place
    std::FILE* stream_ = nullptr;
};
