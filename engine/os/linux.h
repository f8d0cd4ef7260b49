// posix.h on Linux: what the machine has and what of it is left to this process, as /proc and /sys say.
//
// A container is a process in control groups (cgroups, version 2), of whose limits /proc/meminfo and the
// number of processors say nothing (Linux, Documentation/admin-guide/cgroup-v2.rst). `root` is put in front
// of every path: tests bring a /proc and a /sys of their own.
#pragma once

#include <sched.h>

#include <fstream>
#include <set>

constexpr const char* library_suffix = ".so";  // how the names of shared libraries end

// The number at the beginning of a file; no_limit if there is no such file, or a word ("max") in it.
inline uint64_t number_in(const std::string& path) {
    std::ifstream file(path);
    uint64_t value = 0;
    return file >> value ? value : no_limit;
}

// The number behind a word of a file; 0 if it is not there. Of memory /proc has kB, "VmHWM:  1234 kB".
inline uint64_t number_after(const std::string& word, const std::string& path) {
    std::ifstream file(path);
    uint64_t value = 0;
    for (std::string next; next != word && file >> next;) {
    }
    file >> value;
    return value;
}

// The directories of the group that this process is in, "0::/outer/inner", and of all groups around it, where
// every system and container mounts them. A group that cannot be seen from here has no files there.
inline std::vector<std::string> cgroup_directories(const std::string& root) {
    std::vector<std::string> directories;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        if (!line.starts_with("0::/")) continue;
        for (std::string group = line.substr(3); !group.empty(); group.resize(group.rfind('/')))
            directories.push_back(root + "/sys/fs/cgroup" + group);
        directories.push_back(root + "/sys/fs/cgroup");
    }
    return directories;
}

// ----------------------------------------------------------------------------
// Memory

// The most memory this process ever had resident. Pages of a mapped file count once they are read.
inline uint64_t peak_memory_bytes() {
    if (const uint64_t kib = number_after("VmHWM:", "/proc/self/status"); kib > 0) return kib * 1024;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

// Bytes of memory that the groups leave to this process; no_limit if none of them has a limit.
inline uint64_t cgroup_memory_left(const std::string& root) {
    uint64_t left = no_limit;
    for (const std::string& group : cgroup_directories(root)) {
        // Over memory.max a process is killed; over memory.high all are slowed until the group has shrunk.
        const uint64_t limit = std::min(number_in(group + "/memory.max"), number_in(group + "/memory.high"));
        if (limit == no_limit) continue;
        // What was read from files counts as used, but is dropped where memory gets short.
        const std::string stat = group + "/memory.stat";
        const uint64_t cache = number_after("inactive_file", stat) + number_after("active_file", stat);
        uint64_t used = number_in(group + "/memory.current");
        used = used == no_limit ? 0 : used - std::min(used, cache);
        left = std::min(left, limit - std::min(limit, used));
    }
    return left;
}

// Bytes that this process may still map where its address space is limited (ulimit -v).
inline uint64_t address_space_left() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return no_limit;
    const uint64_t used = number_after("VmSize:", "/proc/self/status") * 1024;
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

// Bytes of memory that this process can still take without another giving some up: what the machine has
// available, or what is left to a container or of the address space if that is less. Files in memory that can
// be dropped count as available. no_limit if the system does not say.
inline uint64_t available_memory(const std::string& root = "") {
    const uint64_t machine = number_after("MemAvailable:", root + "/proc/meminfo");
    return std::min(
        {machine > 0 ? machine * 1024 : no_limit, cgroup_memory_left(root), address_space_left()});
}

// ----------------------------------------------------------------------------
// Processors

// Physical cores among the processors that this process may run on, the fast ones if there are two kinds; 0
// if the system does not say. Two hardware threads of one core share its load ports, so a second one adds
// nothing to loops that wait for memory or keep the vector units full.
inline int system_cores() {
    std::set<std::string> cores;  // the hardware threads of each: "0,64"
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        std::string siblings = std::to_string(cpu);  // a core of its own, where a container hides /sys
        std::ifstream list("/sys/devices/system/cpu/cpu" + siblings + "/topology/thread_siblings_list");
        list >> siblings;
        cores.insert(siblings);
    }
    return static_cast<int>(cores.size());
}

// Processors' worth of time that this process is granted, such as 1.5; infinite if no group has a quota.
inline double granted_processors(const std::string& root) {
    double quota = std::numeric_limits<double>::infinity();
    for (const std::string& group : cgroup_directories(root)) {
        std::ifstream file(group + "/cpu.max");  // microseconds: "150000 100000", or "max 100000"
        double time = 0, period = 0;
        if (file >> time >> period) quota = std::min(quota, time / period);
    }
    return quota;
}

// Where this program's own file lies.
inline std::filesystem::path program_file() {
    std::error_code error;
    return std::filesystem::read_symlink("/proc/self/exe", error);
}
