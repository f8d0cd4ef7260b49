// Memory that the system provides as it is first touched; a count of what a run would take, before it takes
// any; and how fast memory can be read.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine/os/system.h"
#include "engine/os/threads.h"

// A part of what a run takes, of this machine's memory or a device's.
struct MemoryPart {
    std::string what;  // "the logits of 128 tokens"
    uint64_t bytes;
    const char* advice = "";  // what makes it smaller, if anything does
};

// While one exists, scratch() (cpu/rows.h), LazyMemory and DeviceBuffer (gpu/device.h) of this thread
// allocate nothing and add here how much they would have: so cpu_memory() in app/model.h counts a run.
// Objects made meanwhile can only be destroyed.
//
//     MemoryCount count;
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

// Zeroed memory in huge pages, by take_pages() of posix.h, which puts a guard page behind it: an index past
// the end ends the program and changes nothing.
class LazyMemory {
  public:
    LazyMemory() = default;
    // Throws std::runtime_error if the system refuses. Where memory is counted (MemoryCount), none is asked
    // for.
    LazyMemory(size_t n_bytes, const std::string& what) {
        if (MemoryCount::counts_as_used(n_bytes)) return;
        const size_t page = page_size(), n_taken = (n_bytes + page - 1) / page * page + page;
        data_ = {take_pages(n_taken), {n_taken}};
        if (data_ == nullptr) {
            throw std::runtime_error("not enough memory for " + what + ": " + std::to_string(n_bytes) +
                                     " bytes");
        }
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

// Adds up n 32-bit words (n a multiple of 16), a cache line at a time into four sums that do not wait for
// each other, with a prefetch 4 KiB ahead: fast enough that the loads are all it waits for.
inline uint32_t sum_words(const uint32_t* words, size_t n) {
    typedef uint32_t Vector __attribute__((vector_size(16)));
    static_assert(4 * sizeof(Vector) == 64);
    const auto* v = reinterpret_cast<const Vector*>(words);
    Vector a{}, b{}, c{}, d{};
    for (size_t i = 0; i < n / 4; i += 4) {
        __builtin_prefetch(v + i + 256);
        a += v[i];
        b += v[i + 1];
        c += v[i + 2];
        d += v[i + 3];
    }
    const Vector sum = (a + b) + (c + d);
    return sum[0] + sum[1] + sum[2] + sum[3];
}

// Memory that all threads read, each its own part, doing nothing else with it: what any program that has to
// read its weights is compared with. A decode step reads every weight once, so tokens/s can never exceed read
// bandwidth / bytes of weights. That is why the programs measure the bandwidth themselves, with the same
// threads and in the same run.
class ReadBuffer {
  public:
    // About n_bytes for n_threads threads, but no more than a quarter of the memory that is available.
    ReadBuffer(uint64_t n_bytes, int n_threads) : n_threads_(n_threads) {
        constexpr size_t page = 4096;
        n_bytes = std::min(n_bytes, available_memory() / 4);
        per_thread_ = std::max<size_t>(1, n_bytes / page / static_cast<size_t>(n_threads)) * page;
        try {
            memory_ = LazyMemory(size(), "reading");
        } catch (const std::runtime_error&) {
            n_threads_ = 0;
        }
        // Written, so that every page exists, near the thread that will read it.
        parallel_for(n_threads_, [&](int t) { std::memset(part(t), 1, per_thread_); });
    }

    // In bytes; 0 if there was no memory.
    size_t size() const { return per_thread_ * static_cast<size_t>(n_threads_); }

    // How many seconds it takes to read all of it once.
    double seconds_to_read() const {
        const double start = seconds_now();
        std::atomic<uint32_t> total = 0;
        parallel_for(n_threads_, [&](int t) { total += sum_words(part(t), per_thread_ / sizeof(uint32_t)); });
        volatile uint32_t sink = total;  // uses the sum; without a use the compiler drops the loop
        (void)sink;
        return seconds_now() - start;
    }

  private:
    uint32_t* part(int t) const {
        return memory_.as<uint32_t>() + static_cast<size_t>(t) * per_thread_ / sizeof(uint32_t);
    }

    int n_threads_;
    size_t per_thread_ = 0;  // bytes
    LazyMemory memory_;
};
