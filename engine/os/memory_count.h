// Memory that is counted instead of taken: what a run needs is known before it takes any.
#pragma once

#include <cstdint>

// While one exists, scratch() (engine/cpu/scratch.h) and LazyMemory of this thread take no memory and say
// here how much they would have taken. What has been made then may be asked for nothing, only destroyed.
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
