// What the fuzzing harnesses share. docs/contributing.md says how to run them.
//
// A harness is a function of bytes that returns whatever they are: it hands them to the code that it is about
// and catches the errors that this code documents. Anything else is a find: a crash, a report of a
// sanitizer, another exception, an expect() that fails. Built with -fsanitize=fuzzer a harness is a program
// of its own; tests/fuzz/replay.cpp calls several, for inputs that lie in files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "engine/os/threads.h"

using FuzzBytes = std::span<const uint8_t>;

#ifdef FUZZ_REPLAY
#define FUZZ_TARGET(harness)
#else
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
#define FUZZ_TARGET(harness)                                                  \
    extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
        harness({data, size});                                                \
        return 0;                                                             \
    }
#endif

// One thread: inputs are too small for more, and runs are the same each time.
inline const bool is_single_threaded = (threads().resize(1), true);

// What has to hold whatever the input is.
inline void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "expected: %s\n", what);
    std::abort();
}

// Decisions taken from the bytes of an input, in their order. When these are used up, every number is the
// lowest that it may be and every text is empty.
class Choices {
  public:
    explicit Choices(FuzzBytes bytes) : rest_(bytes) {}

    // From low to high, by as many bytes as that takes.
    int number(int low, int high) {
        const uint64_t n = uint64_t(int64_t{high} - low) + 1;
        uint64_t value = 0;
        for (uint64_t range = 1; range < n; range *= 256) value = value * 256 + byte();
        return int(low + int64_t(value % n));
    }
    bool yes() { return number(0, 1) == 1; }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[number(0, int(values.size()) - 1)];
    }
    // Up to `longest` bytes, at most 255.
    std::string text(int longest) { return take(size_t(number(0, longest))); }
    std::string rest() { return take(rest_.size()); }
    bool done() const { return rest_.empty(); }

  private:
    uint8_t byte() {
        if (rest_.empty()) return 0;
        const uint8_t first = rest_[0];
        rest_ = rest_.subspan(1);
        return first;
    }
    std::string take(size_t n) {
        const FuzzBytes taken = rest_.first(std::min(n, rest_.size()));
        rest_ = rest_.subspan(taken.size());
        return {taken.begin(), taken.end()};
    }

    FuzzBytes rest_;
};

// A regular file that lies in memory alone and has a path.
class MemoryFile {
  public:
    MemoryFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { expect(fd_ >= 0, "memfd_create works"); }
    ~MemoryFile() { close(fd_); }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }
    // Replaces what is in it.
    void write(FuzzBytes bytes) {
        expect(ftruncate(fd_, 0) == 0 && pwrite(fd_, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()),
               "a file in memory takes its bytes");
    }

  private:
    int fd_;
};

// Where output goes that nobody reads.
inline std::FILE* nowhere() {
    static std::FILE* const file = std::fopen("/dev/null", "w");
    return file;
}
