// The part of system.h on Linux, macOS and in WebAssembly.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

#define PRINTF_FORMAT printf  // for compilers: what format() in engine/app/streams.h takes

// ----------------------------------------------------------------------------
// Memory

inline size_t page_size() { return size_t(sysconf(_SC_PAGESIZE)); }  // bytes

// Zeroed memory that the system provides as it is first touched, in huge pages where it has them: hardware
// stops fetching ahead at the end of each page of memory. n_bytes: a number of whole pages. The last one is
// a guard page, which ends the program if it is touched. Null if the system refuses.
inline void* take_pages(size_t n_bytes) {
    void* pages =
        mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(pages, n_bytes, MADV_HUGEPAGE);  // a refusal does no harm
#endif
    mprotect(static_cast<char*>(pages) + n_bytes - page_size(), page_size(), PROT_NONE);
    return pages;
}
inline void release_pages(void* pages, size_t n_bytes) { munmap(pages, n_bytes); }

// Sleeps while `value` is `old`; who changes it calls wake_all(value) then. May return earlier.
template <class T>
void sleep_while(const std::atomic<T>& value, T old) {
    value.wait(old);
}
template <class T>
void wake_all(std::atomic<T>& value) {
    value.notify_all();
}

// What the machine has.
#if defined(__APPLE__)
#include "engine/os/macos.h"
#elif defined(__wasm__)
#include "engine/os/wasm.h"
#else
#include "engine/os/linux.h"
#endif

// ----------------------------------------------------------------------------
// Files

// As std::fopen. Null and errno if it fails.
inline std::FILE* open_file(const std::string& path, const char* mode) {
    return std::fopen(path.c_str(), mode);
}

// Maps a file; of an empty one there is nothing. Throws std::runtime_error "PATH: cannot map: reason".
inline std::span<const std::byte> map_stream(std::FILE* file, const std::string& path) {
    struct stat info {};
    fstat(fileno(file), &info);
    const auto size = static_cast<size_t>(info.st_size);
    if (size == 0) return {};
    void* p = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fileno(file), 0);
    if (p == MAP_FAILED) throw std::runtime_error(path + ": cannot map: " + std::strerror(errno));
    return {static_cast<const std::byte*>(p), size};
}
inline void unmap_file(std::span<const std::byte> file) {
    munmap(const_cast<std::byte*>(file.data()), file.size());
}
// Frees the memory of some pages of a mapped file, which may be none.
inline void drop_pages(std::span<const std::byte> pages) {
    madvise(const_cast<std::byte*>(pages.data()), pages.size(), MADV_DONTNEED);
}
// Starts to read such pages from the disk, and does not wait for them.
inline void want_pages(std::span<const std::byte> pages) {
    madvise(const_cast<std::byte*>(pages.data()), pages.size(), MADV_WILLNEED);
}

// Grows whenever this process reads from a disk, or waits for one.
inline long disk_reads() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_inblock + usage.ru_majflt;
}

// ----------------------------------------------------------------------------
// Standard streams and the command line

// First of all in main().
//
// A standard descriptor that is not open would be the number of the next file that is opened, and what is
// meant for standard output would go into that file. So such a descriptor gets /dev/null, to be used the
// wrong way round: reading it, or writing to it, fails as before (EBADF).
// Whoever writes more to a file than is allowed (ulimit -f) is told so by EFBIG, and not killed by a signal.
inline void set_up_streams() {
    std::signal(SIGXFSZ, SIG_IGN);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        [[maybe_unused]] const int same = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
}

// argv in UTF-8.
inline std::vector<std::string> utf8_arguments(int argc, const char* const* argv) {
    return {argv, argv + argc};
}

// A variable of the environment; empty if there is none.
inline std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// Where a person's own files lie; empty if the system does not say.
inline std::string home_folder() { return environment("HOME"); }

inline bool is_terminal(std::FILE* file) { return isatty(fileno(file)) == 1; }

// Whether bytes are there to be read at once, in a file or a pipe of which nothing has been read.
inline bool has_input(std::FILE* in) {
    struct stat info {};
    int n_waiting = 0;
    if (fstat(fileno(in), &info) != 0) return false;
    if (S_ISREG(info.st_mode)) return lseek(fileno(in), 0, SEEK_CUR) < info.st_size;
    return S_ISFIFO(info.st_mode) && ioctl(fileno(in), FIONREAD, &n_waiting) == 0 && n_waiting > 0;
}

// As write(2), at once and past the stream's buffer. EPIPE: the reader has gone.
inline ptrdiff_t write_bytes(std::FILE* out, const char* bytes, size_t n) {
    return write(fileno(out), bytes, n);
}
// As std::getc; EOF also when Ctrl-C interrupts the wait.
inline int read_byte(std::FILE* in) { return std::getc(in); }

// Waits until a terminal has something to read: true. False if Ctrl-C has come, before or meanwhile, and may
// also be false otherwise: a signal may come after the last look at what its handler sets and before the wait
// begins, or be taken by another thread. So no wait is long.
inline bool wait_for_input([[maybe_unused]] std::FILE* in) {
    if (interrupted) return false;
#ifdef __wasm__
    return true;  // nothing comes meanwhile there
#else
    timeval longest{0, 250000};  // microseconds
    fd_set ready;                // not poll(), which does not take terminals on every macOS
    FD_ZERO(&ready);
    FD_SET(fileno(in), &ready);
    const int n_ready = select(fileno(in) + 1, &ready, nullptr, nullptr, &longest);
    return !interrupted && (n_ready > 0 || (n_ready < 0 && errno != EINTR));
#endif
}

// As std::fread, except that what a person types is UTF-8.
inline size_t read_bytes(std::FILE* in, char* bytes, size_t n) { return std::fread(bytes, 1, n, in); }

// ----------------------------------------------------------------------------
// Signals

// The first Ctrl-C only sets `interrupted`, and ends a wait for input (no SA_RESTART); the second one kills.
// A program that was started with Ctrl-C ignored goes on ignoring it: so a shell without job control starts
// what it runs in the background, which a Ctrl-C at the terminal is not for.
inline void catch_ctrl_c() {
    struct sigaction action {};
    if (sigaction(SIGINT, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) return;
    action = {};
    action.sa_handler = [](int) {
        if (interrupted) {
            std::signal(SIGINT, SIG_DFL);
            std::raise(SIGINT);  // delivered when this returns
        }
        interrupted = 1;
    };
    sigaction(SIGINT, &action, nullptr);
}

// A read from the mapped model file behind its end ends the process with one line, which begins with the
// program's name, and exit code 1. A SIGBUS outside the mapped file kills, as it does without a handler.
inline void catch_bus_errors(const char* program) {
    static const char* name;
    name = program;
    struct sigaction action {};
    // Only calls that a handler may make (man 7 signal-safety).
    action.sa_sigaction = [](int, siginfo_t* info, void*) {
        const auto* at = static_cast<const std::byte*>(info->si_addr);
        // A signal that a process sent (si_code <= 0) has no address.
        if (info->si_code > 0 && at >= mapped_range.begin && at < mapped_range.begin + mapped_range.size) {
            for (const std::string_view part :
                 {std::string_view(name), std::string_view(": "), mapped_range.path,
                  std::string_view(": the file has become shorter during the run\n")})
                [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, part.data(), part.size());
            _exit(1);
        }
        std::signal(SIGBUS, SIG_DFL);
        std::raise(SIGBUS);  // delivered when this returns
    };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

// ----------------------------------------------------------------------------
// Shared libraries

// A function of a shared library, which stays loaded until the process ends; null if it has no such one.
// Throws std::runtime_error if it cannot be loaded.
//
// A program without the C library beside it (make dist) has nothing that a library could be linked with.
inline void* library_function(const std::filesystem::path& file, [[maybe_unused]] const char* name) {
#ifdef STATIC_PROGRAM
    throw std::runtime_error(file.string() + ": this program is static and loads no libraries");
#else
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return dlsym(library, name);
#endif
}
