// Memory that exists once it is used.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/os/memory_count.h"
#include "engine/os/system.h"

// Zeroed memory, see take_pages(). The page behind it is nobody's: an index that runs over the end ends the
// program and changes nothing.
class LazyMemory {
  public:
    LazyMemory() = default;
    // Throws std::runtime_error if the system refuses. Where memory is counted (MemoryCount), none is asked
    // for.
    LazyMemory(size_t n_bytes, const std::string& what) {
        if (MemoryCount::counts_as_used(n_bytes)) return;
        const size_t page = page_size();
        const size_t used = (n_bytes + page - 1) / page * page;
        size_ = used + page;
        void* p = take_pages(size_);
        if (p == nullptr) {
            throw std::runtime_error("not enough memory for " + what + ": " + std::to_string(n_bytes) +
                                     " bytes");
        }
        forbid_pages(static_cast<char*>(p) + used, page);
        data_ = p;
    }
    ~LazyMemory() {
        if (data_ != nullptr) release_pages(data_, size_);
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
