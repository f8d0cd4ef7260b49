// What this project asks of the operating system: names of files, the time, what signal handlers read; then
// posix.h, which says what each function does, or windows.h with the same functions. All else of engine/ is
// the same everywhere.
//
// Names of files, arguments and what is typed are UTF-8, on every system. No static object of engine/os/ has
// a constructor: it would run before anybody asks whether the processor has its instructions
// (engine/backend/cpu_kernels.cpp).
#pragma once

#ifndef ENGINE
#error "this header is the engine's: compile with -DENGINE (make does)"
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// A UTF-8 name as this system takes it, and back.
inline std::filesystem::path path_of(const std::string& name) {
    return std::u8string(name.begin(), name.end());
}
inline std::string name_of(const std::filesystem::path& path) {
    const std::u8string name = path.u8string();
    return {name.begin(), name.end()};
}

// Whether both names lead to one regular file or folder, by links or not.
inline bool same_file(const std::string& a, const std::string& b) {
    std::error_code error;
    return std::filesystem::equivalent(path_of(a), path_of(b), error) && !error;
}

constexpr uint64_t no_limit = std::numeric_limits<uint64_t>::max();  // of bytes

// ----------------------------------------------------------------------------
// The time, and where a program's time goes

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds spent in matrix products and in attention since the process began. What is left of a run is
// everything else.
struct PhaseSeconds {
    double matmul = 0;
    double attention = 0;
};
inline PhaseSeconds phase_seconds;

// Adds the time of its own life to one of these.
class Stopwatch {
  public:
    explicit Stopwatch(double& total) : total_(total) {}
    ~Stopwatch() { total_ += seconds_now() - start_; }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

  private:
    double& total_;
    double start_ = seconds_now();
};

// ----------------------------------------------------------------------------
// Ctrl-C, and a model file that gets shorter

// catch_ctrl_c() sets it. 0 again once a Ctrl-C has been obeyed and the program goes on.
inline volatile std::sig_atomic_t interrupted = 0;

// Where the file lies that was mapped last (files.h), and its name: see catch_bus_errors().
struct MappedRange {
    const std::byte* begin = nullptr;
    size_t size = 0;
    std::string_view path{};  // for an error line; whoever mapped the file keeps it
};
inline constinit MappedRange mapped_range;

#ifdef _WIN32
#include "engine/os/windows.h"
#else
#include "engine/os/posix.h"
#endif
