// Memory that exists once it is used.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/os/memory_count.h"

// Zeroed memory that the system provides as it is first touched, in huge pages where it has them: hardware
// stops fetching ahead at the end of each page of memory. The page behind it is nobody's: an index that runs
// over the end ends the program and changes nothing.
class LazyMemory {
  public:
    LazyMemory() = default;
    // Throws std::runtime_error if the system refuses. Where memory is counted (MemoryCount), none is asked
    // for.
    LazyMemory(size_t n_bytes, const std::string& what) {
        if (MemoryCount::counts_as_used(n_bytes)) return;
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        const size_t used = (n_bytes + page - 1) / page * page;
        size_ = used + page;
        void* p =
            mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            throw std::runtime_error("not enough memory for " + what + ": " + std::to_string(n_bytes) +
                                     " bytes");
        }
        mprotect(static_cast<char*>(p) + used, page, PROT_NONE);
#ifdef MADV_HUGEPAGE
        madvise(p, used, MADV_HUGEPAGE);
#endif
        data_ = p;
    }
    ~LazyMemory() {
        if (data_ != nullptr) munmap(data_, size_);
    }
    LazyMemory(LazyMemory&& other) noexcept { *this = std::move(other); }
    LazyMemory& operator=(LazyMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;  // bytes that are mapped
};
