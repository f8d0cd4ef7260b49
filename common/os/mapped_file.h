// A whole file in memory. It is mapped, so that what is read of it comes from the disk then, and can be
// dropped again where memory is short. It is then copied into huge pages, if it takes no more than three
// quarters of the memory that is available: a mapped file lies in pages of 4 KiB, and at each of their ends
// the hardware stops fetching ahead, which costs decode a fifth of its speed (docs/performance.md). And
// weights in a copy can be packed for the kernels (common/cpu/int8_pack.h).
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

class MappedFile {
  public:
    MappedFile() = default;

    // Maps the file and reads nothing of it. Throws std::runtime_error "PATH: cannot open: reason" or "PATH:
    // not a regular file".
    // `shown` is the path as an error line may have it.
    MappedFile(const std::string& path, const std::string& shown) {
        // Without O_NONBLOCK a FIFO would keep this waiting for a writer.
        fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (fd_ < 0) throw std::runtime_error(path + ": cannot open: " + std::strerror(errno));
        struct stat info {};
        if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
            close(fd_);
            throw std::runtime_error(path + ": not a regular file");
        }
        size_ = static_cast<size_t>(info.st_size);
        if (size_ == 0) return;
        void* p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd_, 0);
        if (p == MAP_FAILED) {
            const int reason = errno;
            close(fd_);
            throw std::runtime_error(path + ": cannot map: " + std::strerror(reason));
        }
        data_ = static_cast<const std::byte*>(p);
        mapped_range = {data_, size_, shown};
    }

    // Puts a copy in huge pages in place of the mapping, if it fits. `available`: bytes of memory.
    // bytes() is another span then.
    void copy_into_huge_pages(uint64_t available) {
        if (!is_mapped() || size_ == 0 || size_ > available - available / 4) return;
        void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return;
        // Where it is refused, the pages are small and all else is the same.
        madvise(p, size_, MADV_HUGEPAGE);
        for (size_t at = 0; at < size_;) {
            const ssize_t n = pread(fd_, static_cast<char*>(p) + at, size_ - at, static_cast<off_t>(at));
            if (n <= 0) {
                munmap(p, size_);
                return;
            }
            at += static_cast<size_t>(n);
        }
        release();
        data_ = static_cast<const std::byte*>(p);
    }

    ~MappedFile() { release(); }
    MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(fd_, other.fd_);
        return *this;
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    bool is_mapped() const { return fd_ >= 0; }  // not copied

  private:
    void release() {
        if (mapped_range.begin == data_) mapped_range = {};
        if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
        if (fd_ >= 0) close(fd_);
        data_ = nullptr;
        fd_ = -1;
    }

    const std::byte* data_ = nullptr;
    size_t size_ = 0;
    int fd_ = -1;  // open as long as the file is mapped
};
