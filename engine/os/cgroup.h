// What the control groups (cgroups) that this process is in leave it: memory, and time on the processors. A
// container is a process in such groups, and /proc/meminfo and the number of processors say nothing of their
// limits.
//
// Version 2 and version 1 of the kernel's interface are both read, as machines have one, the other or both
// (man 7 cgroups; Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/). `root` is put in front of
// every path: tests bring a /proc and a /sys of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

constexpr uint64_t no_limit = std::numeric_limits<uint64_t>::max();  // of bytes

// Whether a list such as "cpu,cpuacct" has `word`.
inline bool list_has(const std::string& list, const std::string& word) {
    return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// The directories of the groups that this process is in and that may limit `controller` ("memory", "cpu"):
// its own group's, and those of all groups around it as far as they are mounted here.
inline std::vector<std::string> cgroup_directories(const std::string& controller, const std::string& root) {
    // A line for each hierarchy: "4:memory:/path" in version 1, "0::/path" in version 2.
    struct Group {
        bool is_v2;
        std::string path;
    };
    std::vector<Group> groups;
    std::ifstream cgroups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(cgroups, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (controllers.empty() || list_has(controllers, controller))
            groups.push_back({controllers.empty(), line.substr(second + 1)});
    }

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
            if (group.is_v2 ? type != "cgroup2" : type != "cgroup" || !list_has(options, controller))
                continue;
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

// The number in a file; no_limit if there is no such file, or a word ("max"), or a number below 0 in it.
inline uint64_t cgroup_number(const std::string& path) {
    std::ifstream file(path);
    long long value = -1;
    return file >> value && value >= 0 ? static_cast<uint64_t>(value) : no_limit;
}

// Bytes of memory that the groups leave to this process; no_limit if none of them has a limit.
inline uint64_t cgroup_memory_left(const std::string& root = "") {
    uint64_t left = no_limit;
    for (const std::string& group : cgroup_directories("memory", root)) {
        // Over memory.max a process is killed; over memory.high all are held up until the group has shrunk.
        const uint64_t limit =
            std::min({cgroup_number(group + "/memory.max"), cgroup_number(group + "/memory.high"),
                      cgroup_number(group + "/memory.limit_in_bytes")});
        if (limit == no_limit) continue;
        uint64_t used = std::min(cgroup_number(group + "/memory.current"),
                                 cgroup_number(group + "/memory.usage_in_bytes"));
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

// Processors' worth of time that the groups grant, such as 1.5; infinite if none of them has a quota.
inline double cgroup_cpu_quota(const std::string& root = "") {
    double quota = std::numeric_limits<double>::infinity();
    auto at_most = [&](uint64_t time, uint64_t period) {  // both in microseconds
        if (time != no_limit && period != no_limit && period > 0)
            quota = std::min(quota, static_cast<double>(time) / static_cast<double>(period));
    };
    for (const std::string& group : cgroup_directories("cpu", root)) {
        at_most(cgroup_number(group + "/cpu.cfs_quota_us"), cgroup_number(group + "/cpu.cfs_period_us"));
        std::ifstream file(group + "/cpu.max");  // "150000 100000", or "max 100000"
        uint64_t time = 0, period = 0;
        if (file >> time >> period) at_most(time, period);
    }
    return quota;
}
