// What this project asks of the operating system. Here is what there is to ask for; windows.h, macos.h,
// wasm.h and linux.h (and posix.h, which the last three share) have it for their system. All else of engine/
// is the same everywhere.
//
// Names of files, arguments and what is typed are UTF-8, on every system.
#pragma once

#ifndef ENGINE
#error "this header is the engine's: compile with -DENGINE (make does)"
#endif

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "engine/os/cgroup.h"  // no_limit

// ----------------------------------------------------------------------------
// Memory

inline size_t page_size();  // bytes

// Zeroed memory that the system provides as it is first touched, in huge pages where it has them: hardware
// stops fetching ahead at the end of each page of memory. Null if the system refuses.
inline void* take_pages(size_t n_bytes);
inline void release_pages(void* pages, size_t n_bytes);
// From now on these pages are nobody's: touching them ends the program.
inline void forbid_pages(void* pages, size_t n_bytes);

// The most memory this process ever had resident. Pages of a mapped file count once they are read.
inline uint64_t peak_memory_bytes();

// Bytes of memory that this process can still take without another giving some up. Files in memory that can
// be dropped count as available. no_limit if the system does not say. `root`: see cgroup.h.
inline uint64_t available_memory(const std::string& root = "");

// ----------------------------------------------------------------------------
// Processors

// Physical cores among the processors that this process may run on, the fast ones if there are two kinds; 0
// if the system does not say. Two hardware threads of one core share its load ports, so a second one adds
// nothing to loops that wait for memory or keep the vector units full.
inline int system_cores();

// Processors' worth of time that this process is granted, such as 1.5; infinite without a limit.
inline double granted_processors(const std::string& root);

// How many processors there are for this process's threads, of which n_awake run now; -1 if nobody knows.
inline int processors_left(int n_awake);

// Sleeps while `value` is `old`; who changes it calls wake_all(value) then. May return earlier.
template <class T>
void sleep_while(const std::atomic<T>& value, T old);
template <class T>
void wake_all(std::atomic<T>& value);

// ----------------------------------------------------------------------------
// Files

// A UTF-8 name as this system takes it, and back.
inline std::filesystem::path path_of(const std::string& name) {
    return std::u8string(name.begin(), name.end());
}
inline std::string name_of(const std::filesystem::path& path) {
    const std::u8string name = path.u8string();
    return {name.begin(), name.end()};
}

// As std::fopen. Null and errno if it fails.
inline std::FILE* open_file(const std::string& path, const char* mode);

// A whole file in memory, or why it is not there.
struct Mapping {
    const std::byte* data = nullptr;  // null: the file is empty, or there is an error
    size_t size = 0;
    std::string error{};    // "cannot open: reason", "not a regular file", "cannot map: reason"
    bool no_entry = false;  // the error is that there is no such file
};
inline Mapping map_file(const std::string& path);
inline void unmap_file(const Mapping& mapping);
// Gives back the memory of some pages of a mapped file. Read again, they come from the disk, or from what the
// system keeps of it.
inline void drop_mapped_pages(const std::byte* pages, size_t n_bytes);

// Where the file lies that was mapped last, and its name: see catch_bus_errors(). No static object here has a
// constructor: it would run before anybody asks whether the processor has its instructions
// (engine/backend/cpu_kernels.cpp).
struct MappedRange {
    const std::byte* begin = nullptr;
    size_t size = 0;
    std::string_view path{};  // for an error line; whoever mapped the file keeps it
};
inline constinit MappedRange mapped_range;

// Whether both names lead to one file, by links or not.
inline bool same_file(const std::string& a, const std::string& b);

enum class FileKind { none, regular, folder, other, error };  // error: errno says which
inline FileKind file_kind(const std::string& path);

// For NewFile (new_file.h). Each returns -1 or false, and errno, if it fails.
// Opens a new file to be written that has no name yet, in this folder.
inline int create_unnamed(const std::filesystem::path& folder);
inline bool give_name(int fd, const std::filesystem::path& name);
// The same with a name, of no file that is there.
inline int create_named(const std::filesystem::path& name);
// Removes a file that create_named() made in a process that has ended; one that is still open stays.
inline void remove_stale(const std::filesystem::path& name);
inline std::FILE* stream_of(int fd);
// Waits until what was written is on the disk: without that a crash of the machine could leave a name with
// nothing behind it.
inline bool flush_to_disk(int fd);
// Closes the stream, which has written `from`. That is then `to`, which may have been there; at no time is
// there a part of it.
inline bool replace_file(std::FILE* stream, const std::filesystem::path& from,
                         const std::filesystem::path& to);
inline unsigned long process_id();

// ----------------------------------------------------------------------------
// Standard streams and the command line

// First of all in main().
inline void set_up_streams();

// argv in UTF-8.
inline std::vector<std::string> utf8_arguments(int argc, const char* const* argv);

// A variable of the environment; empty if there is none.
inline std::string environment(const char* name);

// Where a person's own files lie; empty if the system does not say.
inline std::string home_folder();

inline bool is_terminal(std::FILE* file);

// Whether bytes are there to be read at once, in a file or a pipe of which nothing has been read.
inline bool has_input(std::FILE* in);

// As write(2), at once and past the stream's buffer. EPIPE: the reader has gone.
inline ptrdiff_t write_bytes(std::FILE* out, const char* bytes, size_t n);

// As std::fread and std::getc, except that what a person types is UTF-8, and that read_bytes() may end with
// what a pipe or terminal holds (0: the end). With Ctrl-C during the wait they are 0 and EOF. A stream is
// read by one of the two.
inline size_t read_bytes(std::FILE* in, char* bytes, size_t n);
inline int read_byte(std::FILE* in);

// Waits until a terminal has something to read: true. False if Ctrl-C has come, before or meanwhile, and may
// also be false otherwise.
inline bool wait_for_input(std::FILE* in);

// ----------------------------------------------------------------------------
// Ctrl-C, and a model file that gets shorter

inline volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C only sets `interrupted`, and ends a wait for input; the second one kills. A program that
// was started with Ctrl-C ignored goes on ignoring it: so a shell without job control starts what it runs in
// the background, which a Ctrl-C at the terminal is not for.
inline void catch_ctrl_c();

// What the error line of a mapped file that gets shorter begins with.
inline const char* program_in_error_lines = "";

// A read from the mapped model file behind its end ends the process with one line and exit code 1.
inline void catch_bus_errors();

// ----------------------------------------------------------------------------
// Shared libraries

// library_suffix: how their names end, ".so" for example.

// Null, and why in `error`, if it cannot be loaded. It stays loaded until the process ends.
inline void* load_library(const std::filesystem::path& file, std::string& error);
inline void* find_symbol(void* library, const char* name);  // null: it has no such function

// Where this program's own file lies.
inline std::filesystem::path program_file();

#if defined(_WIN32)
#include "engine/os/windows.h"
#elif defined(__APPLE__)
#include "engine/os/macos.h"
#elif defined(__wasm__)
#include "engine/os/wasm.h"
#else
#include "engine/os/linux.h"
#endif
