// Memory that exists once it is used, and memory that is counted instead of taken: what a run needs is known
// before it takes any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine/os/system.h"

// A part of what a run takes, of this machine's memory or a device's.
struct MemoryPart {
    std::string what;  // "the logits of 128 tokens"
    uint64_t bytes;
    const char* advice = "";  // what makes it smaller, if anything does
};

// While one exists, scratch() (engine/cpu/rows.h) and LazyMemory of this thread take no memory and say here
// how much they would have: cpu_memory() in app/model.h counts a run so. What was made is only destroyed.
//
//     const MemoryCount count;
//     const RunState counted(...);
//     count.at_once();
class MemoryCount {
  public:
    MemoryCount() : outer_(current_) { current_ = this; }
    ~MemoryCount() { current_ = outer_; }
    MemoryCount(const MemoryCount&) = delete;
    MemoryCount& operator=(const MemoryCount&) = delete;

    uint64_t at_once() const { return at_once_; }  // bytes that are taken when they are asked for
    uint64_t as_used() const { return as_used_; }  // bytes that are taken as they are used, at most

    // Whether memory is counted; if so, n_bytes have been.
    static bool counts_at_once(uint64_t n_bytes) {
        if (current_ != nullptr) current_->at_once_ += n_bytes;
        return current_ != nullptr;
    }
    static bool counts_as_used(uint64_t n_bytes) {
        if (current_ != nullptr) current_->as_used_ += n_bytes;
        return current_ != nullptr;
    }

  private:
    static inline thread_local MemoryCount* current_ = nullptr;
    MemoryCount* outer_;
    uint64_t at_once_ = 0, as_used_ = 0;
};

// Zeroed memory in huge pages, by take_pages() of posix.h. The page behind it is nobody's: an index that
// runs over the end ends the program and changes nothing.
class LazyMemory {
  public:
    LazyMemory() = default;
    // Throws std::runtime_error if the system refuses. Where memory is counted (MemoryCount), none is asked
    // for.
    LazyMemory(size_t n_bytes, const std::string& what) {
        if (MemoryCount::counts_as_used(n_bytes)) return;
        const size_t page = page_size();
        const size_t used = (n_bytes + page - 1) / page * page;
        data_ = {take_pages(used + page), {used + page}};
        if (data_ == nullptr) {
            throw std::runtime_error("not enough memory for " + what + ": " + std::to_string(n_bytes) +
                                     " bytes");
        }
        forbid_pages(as<char>() + used, page);
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_.get());
    }

  private:
    struct Release {
        size_t size;  // bytes that are mapped
        void operator()(void* p) const { release_pages(p, size); }
    };
    std::unique_ptr<void, Release> data_{nullptr, {0}};
};
