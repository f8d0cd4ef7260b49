// posix.h on Linux: what the machine has and what of it is left to this process, as /proc and /sys say.
//
// A container is a process in control groups (cgroups), of whose limits /proc/meminfo and the number of
// processors say nothing. Version 2 and version 1 of the kernel's interface are both read, as machines have
// one, the other or both (man 7 cgroups; Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/).
// `root` is put in front of every path: tests bring a /proc and a /sys of their own.
#pragma once

#include <sched.h>

#include <fstream>
#include <set>
#include <sstream>

constexpr const char* library_suffix = ".so";  // how the names of shared libraries end

// The number in a file; no_limit if there is no such file, or a word ("max"), or a number below 0 in it.
inline uint64_t number_in(const std::string& path) {
    std::ifstream file(path);
    long long value = -1;
    return file >> value && value >= 0 ? static_cast<uint64_t>(value) : no_limit;
}

// The number after `field` in a /proc file of lines like "VmHWM:   1234 kB", in bytes; 0 if it is not there.
inline uint64_t proc_bytes(const std::string& path, const std::string& field) {
    std::ifstream file(path);
    unsigned long long kib = 0;
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(field) && std::sscanf(line.c_str() + field.size(), ": %llu", &kib) == 1) break;
    return uint64_t{kib} * 1024;
}

// ----------------------------------------------------------------------------
// Control groups

// Whether a list such as "cpu,cpuacct" has `word`.
inline bool list_has(const std::string& list, const std::string& word) {
    return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// The directories of the groups that this process is in and that may limit `controller` ("memory", "cpu"):
// its own group's, and those of all groups around it as far as they are mounted here.
inline std::vector<std::string> cgroup_directories(const std::string& controller, const std::string& root) {
    // A line for each hierarchy: "4:memory:/path" in version 1, "0::/path" in version 2.
    struct Group {
        std::string id, controllers, path;
    };
    std::vector<Group> groups;
    std::ifstream cgroups(root + "/proc/self/cgroup");
    for (Group g; std::getline(cgroups, g.id, ':') && std::getline(cgroups, g.controllers, ':') &&
                  std::getline(cgroups, g.path);)
        if (g.controllers.empty() || list_has(g.controllers, controller)) groups.push_back(g);

    // "36 35 0:29 FROM AT options... - cgroup source OPTIONS": the group FROM is the directory AT.
    std::vector<std::string> directories;
    std::ifstream mounts(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        std::istringstream words(line);
        std::string word, from, at, type, options;
        words >> word >> word >> word >> from >> at;
        while (words >> word && word != "-") {
        }
        words >> type >> word >> options;
        for (const Group& group : groups) {
            const bool is_v2 = group.controllers.empty();
            if (is_v2 ? type != "cgroup2" : type != "cgroup" || !list_has(options, controller)) continue;
            // The group's place below AT. A group that is not below FROM cannot be seen from here; then AT is
            // the closest that there is.
            std::string inside = group.path == "/" ? "" : group.path;
            if (from != "/")
                inside = (inside + "/").starts_with(from + "/") ? inside.substr(from.size()) : "";
            if (inside.find("/..") != std::string::npos) inside.clear();
            for (;; inside.resize(inside.rfind('/'))) {
                directories.push_back(root + at + inside);
                if (inside.empty()) break;
            }
        }
    }
    return directories;
}

// ----------------------------------------------------------------------------
// Memory

// The most memory this process ever had resident. Pages of a mapped file count once they are read.
inline uint64_t peak_memory_bytes() {
    if (const uint64_t bytes = proc_bytes("/proc/self/status", "VmHWM"); bytes > 0) return bytes;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

// Bytes of memory that the groups leave to this process; no_limit if none of them has a limit.
inline uint64_t cgroup_memory_left(const std::string& root = "") {
    uint64_t left = no_limit;
    for (const std::string& group : cgroup_directories("memory", root)) {
        // Over memory.max a process is killed; over memory.high all are slowed until the group has shrunk.
        const uint64_t limit = std::min({number_in(group + "/memory.max"), number_in(group + "/memory.high"),
                                         number_in(group + "/memory.limit_in_bytes")});
        if (limit == no_limit) continue;
        uint64_t used =
            std::min(number_in(group + "/memory.current"), number_in(group + "/memory.usage_in_bytes"));
        if (used == no_limit) used = 0;
        // What was read from files counts as used, but is dropped where memory gets short. Version 2 counts
        // the groups inside under these names, version 1 under "total_".
        std::ifstream stat(group + "/memory.stat");
        uint64_t value = 0, cache = 0, total_cache = 0;
        for (std::string field; stat >> field >> value;) {
            if (field == "inactive_file" || field == "active_file") cache += value;
            if (field == "total_inactive_file" || field == "total_active_file") total_cache += value;
        }
        used -= std::min(used, std::max(cache, total_cache));
        left = std::min(left, limit - std::min(limit, used));
    }
    return left;
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
// be dropped count as available. no_limit if the system does not say.
inline uint64_t available_memory(const std::string& root = "") {
    const uint64_t machine = proc_bytes(root + "/proc/meminfo", "MemAvailable");
    return std::min({machine > 0 ? machine : no_limit, cgroup_memory_left(root), address_space_left()});
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
    auto at_most = [&](uint64_t time, uint64_t period) {  // both in microseconds
        if (time != no_limit && period != no_limit && period > 0)
            quota = std::min(quota, static_cast<double>(time) / static_cast<double>(period));
    };
    for (const std::string& group : cgroup_directories("cpu", root)) {
        at_most(number_in(group + "/cpu.cfs_quota_us"), number_in(group + "/cpu.cfs_period_us"));
        std::ifstream file(group + "/cpu.max");  // "150000 100000", or "max 100000"
        uint64_t time = 0, period = 0;
        if (file >> time >> period) at_most(time, period);
    }
    return quota;
}

// Where this program's own file lies.
inline std::filesystem::path program_file() {
    std::error_code error;
    return std::filesystem::read_symlink("/proc/self/exe", error);
}
