// What this process can use of the machine, cores and memory, and how fast the memory can be read.
//
// A decode step reads every weight once, so tokens/s can never exceed read bandwidth / bytes of weights. That
// is why the programs measure the bandwidth themselves, with the same threads and in the same run.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "common/os/cgroup.h"
#include "common/os/clock.h"
#include "common/os/threads.h"

// The number after `field` in a /proc file of lines like "VmHWM:   1234 kB", in bytes; 0 if it is not there.
inline uint64_t proc_bytes(const char* path, const char* field) {
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) return 0;
    const size_t length = std::strlen(field);
    unsigned long long kib = 0;
    char line[256];
    while (std::fgets(line, sizeof line, file) != nullptr) {
        if (std::strncmp(line, field, length) == 0 && std::sscanf(line + length, ": %llu", &kib) == 1) break;
    }
    std::fclose(file);
    return uint64_t{kib} * 1024;
}

#ifdef __wasm__
// A module's memory, in bytes: it grows, up to 4 GiB, and never shrinks.
inline uint64_t wasm_memory() { return uint64_t{__builtin_wasm_memory_size(0)} * 65536; }
#endif

// The most memory this process ever had resident. Pages of the mapped model file count once they are read.
inline uint64_t peak_memory_bytes() {
#ifdef __wasm__
    return wasm_memory();
#else
    if (const uint64_t bytes = proc_bytes("/proc/self/status", "VmHWM"); bytes > 0) return bytes;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
#endif
}

// Bytes that this process may still map where its address space is limited (ulimit -v).
inline uint64_t address_space_left() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return no_limit;
    const uint64_t used = proc_bytes("/proc/self/status", "VmSize");
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

// Bytes of memory that this process can still take without another giving some up: what the machine has
// available, or what is left to a container or of the address space if that is less. Files in memory that can
// be dropped count as available. no_limit if the system does not say. `root`: see cgroup.h.
inline uint64_t available_memory([[maybe_unused]] const std::string& root = "") {
#ifdef __wasm__
    return (uint64_t{1} << 32) - wasm_memory();
#else
    const uint64_t machine = proc_bytes((root + "/proc/meminfo").c_str(), "MemAvailable");
    return std::min({machine > 0 ? machine : no_limit, cgroup_memory_left(root), address_space_left()});
#endif
}

// Physical cores among the CPUs that this process may run on. Two hardware threads of one core share its load
// ports, so a second one adds nothing to loops that wait for memory or keep the vector units full.
inline int physical_cores() {
    std::set<std::pair<int, int>> cores;  // (package, core)
#ifdef __linux__
    auto topology = [](int cpu, const char* what) {
        const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + what;
        int value = -1;
        if (std::FILE* file = std::fopen(path.c_str(), "r"); file != nullptr) {
            if (std::fscanf(file, "%d", &value) != 1) value = -1;
            std::fclose(file);
        }
        return value;
    };
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (!CPU_ISSET(cpu, &allowed)) continue;
            const int core = topology(cpu, "core_id");
            // Without a core_id (some containers hide /sys) every CPU counts as a core of its own.
            cores.insert(core >= 0 ? std::pair(topology(cpu, "physical_package_id"), core)
                                   : std::pair(-2, cpu));
        }
    }
#endif
    const unsigned n =
        cores.empty() ? std::thread::hardware_concurrency() : static_cast<unsigned>(cores.size());
    return std::clamp(static_cast<int>(n), 1, 1024);
}

// Threads where the command line names none: a physical core each, but no more than the processors' time that
// a container is granted, rounded down. One thread too many and the kernel stops some of them for the rest of
// each period (100 ms) once the quota is used up, while the others spend it waiting for them at the end of
// the loop that they share.
inline int default_threads(const std::string& root = "") {
    const double quota = std::floor(cgroup_cpu_quota(root));
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
        size_ = per_thread_ * static_cast<size_t>(n_threads);
        void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            size_ = 0;
            return;
        }
        words_ = static_cast<uint32_t*>(memory);
#ifdef MADV_HUGEPAGE
        madvise(memory, size_, MADV_HUGEPAGE);  // fewer page-table walks; a refusal does no harm
#endif
        // Written, so that every page exists, near the thread that will read it.
        each_part([&](uint32_t* part) -> uint32_t {
            std::memset(part, 1, per_thread_);
            return 0;
        });
    }
    ReadBuffer(const ReadBuffer&) = delete;
    ReadBuffer& operator=(const ReadBuffer&) = delete;
    ~ReadBuffer() {
        if (size_ > 0) munmap(words_, size_);
    }

    // In bytes; 0 if there was no memory.
    size_t size() const { return size_; }

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
        parallel_for(size_ > 0 ? n_threads_ : 0, [&](int t) {
            total += work(words_ + static_cast<size_t>(t) * per_thread_ / sizeof(uint32_t));
        });
        volatile uint32_t sink = total;  // uses the sum; without a use the compiler drops the loop
        (void)sink;
    }

    int n_threads_;
    size_t per_thread_ = 0, size_ = 0;  // bytes
    uint32_t* words_ = nullptr;
};

// Bytes per second that `n_threads` threads together read from a buffer far larger than the caches: the best
// of several passes. 0 if there is no memory for it.
inline double read_bandwidth(int n_threads) {
    const ReadBuffer buffer(uint64_t{1} << 30, n_threads);
    double best = 0;
    for (int pass = 0; pass < 8; pass++) {
        best = std::max(best, static_cast<double>(buffer.size()) / buffer.seconds_to_read());
    }
    return best;
}
