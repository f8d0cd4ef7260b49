// system.h on Linux: what it says in /proc and /sys.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "engine/os/posix.h"

constexpr const char* library_suffix = ".so";

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

inline uint64_t peak_memory_bytes() {
    if (const uint64_t bytes = proc_bytes("/proc/self/status", "VmHWM"); bytes > 0) return bytes;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

// Bytes that this process may still map where its address space is limited (ulimit -v).
inline uint64_t address_space_left() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return no_limit;
    const uint64_t used = proc_bytes("/proc/self/status", "VmSize");
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

// What the machine has available, or what is left to a container or of the address space if that is less.
inline uint64_t available_memory(const std::string& root) {
    const uint64_t machine = proc_bytes((root + "/proc/meminfo").c_str(), "MemAvailable");
    return std::min({machine > 0 ? machine : no_limit, cgroup_memory_left(root), address_space_left()});
}

inline int system_cores() {
    std::set<std::pair<int, int>> cores;  // (package, core)
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
    return static_cast<int>(cores.size());
}

inline double granted_processors(const std::string& root) { return cgroup_cpu_quota(root); }

// The number of threads on this machine, of all programs, that run or wait for a core; 0 if the system does
// not say. The fourth field of /proc/loadavg is RUNNING/ALL (man 5 proc_loadavg).
inline int runnable_threads() {
    int running = 0;
    if (std::FILE* file = std::fopen("/proc/loadavg", "r"); file != nullptr) {
        if (std::fscanf(file, "%*f %*f %*f %d/", &running) != 1) running = 0;
        std::fclose(file);
    }
    return running;
}

// What runs on the whole machine says nothing of the processors of a process that has only some of them.
inline int processors_left(int n_awake) {
    const int running = runnable_threads(), online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    cpu_set_t ours;
    if (running > 0 && sched_getaffinity(0, sizeof ours, &ours) == 0 && CPU_COUNT(&ours) == online)
        return std::max(0, online - (running - n_awake));
    return -1;
}

inline std::filesystem::path program_file() {
    std::error_code error;
    return std::filesystem::read_symlink("/proc/self/exe", error);
}
