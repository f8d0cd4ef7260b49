// Reads behind the end of a mapped file, made visible to AddressSanitizer.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)  // g++
#define HAS_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ADDRESS_SANITIZER
#endif
#endif
#ifdef HAS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

// A mapped file ends within a page, and reading on in that page is no error to the machine. While this
// exists, it is one to AddressSanitizer, where there is one.
class PoisonedTail {
  public:
    explicit PoisonedTail(const std::byte* end) : end_(end), size_(-reinterpret_cast<uintptr_t>(end) % 4096) {
#ifdef HAS_ADDRESS_SANITIZER
        if (__asan_address_is_poisoned(end)) size_ = 0;  // not mapped, but in memory that has its own guard
        ASAN_POISON_MEMORY_REGION(end_, size_);
#endif
    }
    ~PoisonedTail() {
#ifdef HAS_ADDRESS_SANITIZER
        ASAN_UNPOISON_MEMORY_REGION(end_, size_);
#endif
    }
    PoisonedTail(const PoisonedTail&) = delete;
    PoisonedTail& operator=(const PoisonedTail&) = delete;

  private:
    [[maybe_unused]] const std::byte* end_;
    [[maybe_unused]] size_t size_;
};
