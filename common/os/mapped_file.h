// A whole file in memory. It is mapped: what is read of it comes from the disk then, and can be dropped again
// where memory is short.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

// Where the file lies that was mapped last, and its name. A file that gets shorter while it is mapped raises
// SIGBUS at the first read behind its new end; signals.h says so then.
struct MappedRange {
    const std::byte* begin = nullptr;
    size_t size = 0;
    std::string path;  // for an error line
};
inline MappedRange mapped_range;

// Gives back the memory of n bytes of that file from p on, from the page in which they begin to the last
// whole one: read again, they come from the disk or from what the system keeps of it.
inline void drop_mapped(const void* p, size_t n) {
    const auto* begin = static_cast<const std::byte*>(p);
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    if (begin < mapped_range.begin || begin + n > mapped_range.begin + mapped_range.size) return;
    const size_t first = size_t(begin - mapped_range.begin) / page * page;
    const size_t end = size_t(begin - mapped_range.begin + n) / page * page;
    if (first < end) madvise(const_cast<std::byte*>(mapped_range.begin) + first, end - first, MADV_DONTNEED);
}

class MappedFile {
  public:
    MappedFile() = default;

    // Maps the file and reads nothing of it. Throws std::runtime_error "PATH: cannot open: reason" or "PATH:
    // not a regular file".
    // `shown` is the path as an error line may have it.
    MappedFile(const std::string& path, const std::string& shown) {
        // Without O_NONBLOCK a FIFO would keep this waiting for a writer.
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (fd < 0) {
            const int code = errno;
            std::string reason = std::strerror(code);
            if (code == ENOENT && !path.starts_with('/'))
                reason += " in the folder " + std::filesystem::current_path().string();
            throw std::runtime_error(path + ": cannot open: " + reason);
        }
        struct stat info {};
        if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
            close(fd);
            throw std::runtime_error(path + ": not a regular file");
        }
        size_ = static_cast<size_t>(info.st_size);
        void* p = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
        const int reason = errno;
        close(fd);
        if (p == MAP_FAILED) throw std::runtime_error(path + ": cannot map: " + std::strerror(reason));
        if (p == nullptr) return;
        data_ = static_cast<const std::byte*>(p);
        mapped_range = {data_, size_, shown};
    }

    ~MappedFile() { release(); }
    MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }

  private:
    void release() {
        if (mapped_range.begin == data_) mapped_range = {};
        if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
        data_ = nullptr;
    }

    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};
