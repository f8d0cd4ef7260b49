// Files mapped into memory, and new files that replace the old ones as a whole or not at all, whatever ends
// the process while they are written.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
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

// Written without a name (O_TMPFILE), in the directory where it will be, and renamed into place at the end.
// Where a system or a file system cannot do that it has a name of its own, ".runq-PID-N.part", which only a
// signal that kills leaves behind, until the next such file is written in the same folder.
class NewFile {
  public:
    // Throws std::runtime_error "PATH: cannot write: reason": if the path cannot be written, or is there and
    // no regular file. A link is followed, also to a file that is not there yet.
    explicit NewFile(const std::string& path) : path_(path), target_(path_of(path)) {
        std::error_code error;
        const std::filesystem::file_status status = std::filesystem::status(target_, error);
        if (error && error.value() != ENOENT) fail(error.value());
        if (std::filesystem::is_directory(status)) fail(EISDIR);
        if (std::filesystem::is_other(status))
            throw std::runtime_error(path_ + ": cannot write: not a regular file");
        while (std::filesystem::is_symlink(std::filesystem::symlink_status(target_)))
            target_ = target_.parent_path() / std::filesystem::read_symlink(target_);
        if (target_.filename().empty()) fail(path.empty() ? ENOENT : EISDIR);
        folder_ = target_.has_parent_path() ? target_.parent_path() : ".";
        stream_ = create_unnamed(folder_);
        if (stream_ != nullptr) return;
        remove_left_over();
        temporary_ = unused_name([&](const auto& name) { return (stream_ = create_named(name)) != nullptr; });
    }
    ~NewFile() {
        if (stream_ != nullptr) std::fclose(stream_);
        std::error_code ignored;
        if (!temporary_.empty()) std::filesystem::remove(temporary_, ignored);
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    void write(const void* bytes, size_t n) {
        if (std::fwrite(bytes, 1, n, stream_) != n) fail(errno);
    }

    // Puts what has been written under the path, in place of what is there. Throws as the constructor.
    void commit() {
        if (!flush_to_disk(stream_)) fail(errno);
        if (temporary_.empty())
            temporary_ = unused_name([&](const auto& name) { return give_name(stream_, name); });
        if (!replace_file(std::exchange(stream_, nullptr), temporary_, target_)) fail(errno);
        temporary_.clear();
    }

  private:
    [[noreturn]] void fail(int reason) const {
        throw std::runtime_error(path_ + ": cannot write: " + std::strerror(reason));
    }

    // What processes that were killed have left in the folder.
    void remove_left_over() const {
        std::error_code ignored;
        std::filesystem::directory_iterator entry(folder_, ignored);
        for (; entry != std::filesystem::directory_iterator(); entry.increment(ignored)) {
            const std::string name = name_of(entry->path().filename());
            if (name.starts_with(".runq-") && name.ends_with(".part") && entry->is_regular_file(ignored))
                remove_stale(entry->path());
        }
    }

    // The first name with which make(name) succeeds. Throws if it fails because of anything but the name
    // being taken. Runs that share a directory and, in two containers, a process id must not share a name.
    template <class Make>
    std::filesystem::path unused_name(Make make) const {
        for (int i = 0;; i++) {
            std::filesystem::path name =
                folder_ / (".runq-" + std::to_string(process_id()) + "-" + std::to_string(i) + ".part");
            if (make(name)) return name;
            if (errno != EEXIST) fail(errno);
        }
    }

    std::string path_;  // as it was given
    std::filesystem::path target_, folder_;
    std::filesystem::path temporary_;  // the file's name until it is in place; empty: it has none
    std::FILE* stream_ = nullptr;
};
