// What this process can use of the machine, cores and memory, and how fast the memory can be read.
//
// A decode step reads every weight once, so tokens/s can never exceed read bandwidth / bytes of weights. That
// is why the programs measure the bandwidth themselves, with the same threads and in the same run.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/os/memory.h"
#include "engine/os/process.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

// Cores that threads are worth having on: see system_cores().
inline int physical_cores() {
    const int n = system_cores();
    return std::clamp(n > 0 ? n : static_cast<int>(std::thread::hardware_concurrency()), 1, 1024);
}

// Threads where the command line names none: a physical core each, but no more than the processors' time that
// a container is granted, rounded down. One thread too many and the kernel stops some of them for the rest of
// each period (100 ms) once the quota is used up, while the others spend it waiting for them at the end of
// the loop that they share.
inline int default_threads(const std::string& root = "") {
    const double quota = std::floor(granted_processors(root));
    return static_cast<int>(std::clamp(quota, 1.0, static_cast<double>(physical_cores())));
}

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
// read its weights is compared with.
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
        each_part([&](uint32_t* part) -> uint32_t {
            std::memset(part, 1, per_thread_);
            return 0;
        });
    }

    // In bytes; 0 if there was no memory.
    size_t size() const { return per_thread_ * static_cast<size_t>(n_threads_); }

    // How many seconds it takes to read all of it once.
    double seconds_to_read() const {
        const double start = seconds_now();
        each_part([&](const uint32_t* part) { return sum_words(part, per_thread_ / sizeof(uint32_t)); });
        return seconds_now() - start;
    }

  private:
    template <class Work>
    void each_part(Work work) const {
        std::atomic<uint32_t> total = 0;
        parallel_for(n_threads_, [&](int t) {
            total += work(memory_.as<uint32_t>() + static_cast<size_t>(t) * per_thread_ / sizeof(uint32_t));
        });
        volatile uint32_t sink = total;  // uses the sum; without a use the compiler drops the loop
        (void)sink;
    }

    int n_threads_;
    size_t per_thread_ = 0;  // bytes
    LazyMemory memory_;
};
