// What system.h says of the machine, on macOS: what sysctl and Mach say. Nobody of this project has run it.
#pragma once

#include <mach-o/dyld.h>
#include <mach/mach.h>
#include <sys/sysctl.h>

constexpr const char* library_suffix = ".dylib";

// A number that the system knows under this name; 0 if it does not.
inline int system_number(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && size == sizeof value ? value : 0;
}

inline uint64_t peak_memory_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss);  // bytes here: man 2 getrusage
}

// Pages that are free, or that hold what can be dropped or was not used lately.
inline uint64_t available_memory(const std::string& = "") {
    vm_statistics64_data_t pages{};
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    const mach_port_t host = mach_host_self();
    const kern_return_t status =
        host_statistics64(host, HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages), &count);
    mach_port_deallocate(mach_task_self(), host);
    if (status != KERN_SUCCESS) return no_limit;
    // free_count has the speculative ones.
    return (uint64_t{pages.free_count} + pages.inactive_count + pages.purgeable_count) * page_size();
}

// Of Apple's own processors those of performance level 0 are the fast ones.
inline int system_cores() {
    const int fast = system_number("hw.perflevel0.physicalcpu");
    return fast > 0 ? fast : system_number("hw.physicalcpu");
}

inline std::filesystem::path program_file() {
    char path[PATH_MAX];
    uint32_t size = sizeof path;
    if (_NSGetExecutablePath(path, &size) != 0) return {};
    std::error_code error;
    return std::filesystem::canonical(path, error);  // from the folder where a link leads
}
inline double granted_processors(const std::string&) { return std::numeric_limits<double>::infinity(); }
