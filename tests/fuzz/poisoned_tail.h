// Reads behind the end of a mapped file, made visible to AddressSanitizer.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstddef>
#include <cstdint>

// A mapped file ends within a page, and reading on in that page is no error to the machine. While this
// exists, it is one to AddressSanitizer.
class PoisonedTail {
  public:
    explicit PoisonedTail(const std::byte* end) : end_(end), size_(-reinterpret_cast<uintptr_t>(end) % 4096) {
        if (__asan_address_is_poisoned(end)) size_ = 0;  // not mapped, but in memory that has its own guard
        ASAN_POISON_MEMORY_REGION(end_, size_);
    }
    ~PoisonedTail() { ASAN_UNPOISON_MEMORY_REGION(end_, size_); }
    PoisonedTail(const PoisonedTail&) = delete;
    PoisonedTail& operator=(const PoisonedTail&) = delete;

  private:
    const std::byte* end_;
    size_t size_;
};
