// A whole file in memory, for reading. A small one is mapped. A large one is read into huge pages, if it
// takes no more than half of the machine's memory: a mapped file lies in pages of 4 KB, and at each of their
// ends the hardware stops fetching ahead, which costs decode a fifth of its speed (docs/performance.md).
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

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
        madvise(p, size_,
                MADV_HUGEPAGE);  // where it is refused, the pages are small and all else is the same
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
