// What system.h says of the machine, in a module of Emscripten's: one thread, at most 4 GiB of memory, no
// libraries.
#pragma once

constexpr const char* library_suffix = ".wasm";

// A module's memory grows and never shrinks.
inline uint64_t peak_memory_bytes() { return uint64_t{__builtin_wasm_memory_size(0)} * 65536; }
inline uint64_t available_memory(const std::string& = "") {
    return (uint64_t{1} << 32) - peak_memory_bytes();
}

inline int system_cores() { return 1; }
inline std::filesystem::path program_file() { return {}; }
inline double granted_processors(const std::string&) { return std::numeric_limits<double>::infinity(); }
