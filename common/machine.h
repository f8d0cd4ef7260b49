// What this machine has and what it is doing: cores, memory, the time, and how fast it can read memory.
//
// A decode step reads every weight once, so tokens/s can never exceed read bandwidth / bytes of weights. That
// is why the programs measure the bandwidth themselves, with the same threads and in the same run.
#pragma once

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

// The most memory this process ever had resident. Pages of the mapped model file count once they are read.
inline uint64_t peak_memory_bytes() {
    if (const uint64_t bytes = proc_bytes("/proc/self/status", "VmHWM"); bytes > 0) return bytes;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
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

// Adds up n 32-bit words (n a multiple of 16), a cache line at a time into four sums that do not wait for
// each other, with a prefetch 4 KB ahead: fast enough that the loads are all it waits for.
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

// Bytes per second that `n_threads` threads together read from memory: each sums its own part of a buffer far
// larger than the caches, best of several passes. 0 if there is no memory for the buffer.
inline double read_bandwidth(int n_threads) {
    constexpr size_t part = size_t{1} << 20;  // bytes; the buffer is a whole number of them for each thread
    const uint64_t available = proc_bytes("/proc/meminfo", "MemAvailable");
    uint64_t size = uint64_t{1} << 30;
    if (available > 0) size = std::min(size, available / 4);
    const size_t parts = std::max<size_t>(1, size / part / static_cast<size_t>(n_threads));
    const size_t per_thread = parts * part;
    size = per_thread * static_cast<size_t>(n_threads);

    void* buffer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) return 0;
#ifdef MADV_HUGEPAGE
    madvise(buffer, size, MADV_HUGEPAGE);  // fewer page-table walks; a refusal does no harm
#endif
    auto* words = static_cast<uint32_t*>(buffer);
    double best = 0;
    uint32_t total = 0;
    for (int pass = -1; pass < 8; pass++) {
        const double start = seconds_now();
#pragma omp parallel num_threads(n_threads) reduction(+ : total)
        {
            // A share for each of the threads that there really are: OpenMP may give fewer than asked for.
            const auto n = static_cast<size_t>(omp_get_num_threads());
            for (auto t = static_cast<size_t>(omp_get_thread_num()); t < static_cast<size_t>(n_threads);
                 t += n) {
                uint32_t* mine = words + t * per_thread / sizeof(uint32_t);
                // Pass -1 writes, so that every page exists, near the thread that will read it.
                if (pass < 0) {
                    std::memset(mine, 1, per_thread);
                } else {
                    total += sum_words(mine, per_thread / sizeof(uint32_t));
                }
            }
        }
        if (pass >= 0) best = std::max(best, static_cast<double>(size) / (seconds_now() - start));
    }
    volatile uint32_t sink = total;  // the sum must be wanted by someone, or the compiler drops the loop
    (void)sink;
    munmap(buffer, size);
    return best;
}
