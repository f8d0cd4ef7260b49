// system.h on Linux, macOS and in WebAssembly, as far as they do not differ.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include "engine/os/system.h"

#define PRINTF_FORMAT printf  // for compilers: what format() in engine/app/streams.h takes

// ----------------------------------------------------------------------------
// Memory

inline size_t page_size() { return size_t(sysconf(_SC_PAGESIZE)); }

inline void* take_pages(size_t n_bytes) {
    void* pages =
        mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(pages, n_bytes, MADV_HUGEPAGE);  // a refusal does no harm
#endif
    return pages;
}
inline void release_pages(void* pages, size_t n_bytes) { munmap(pages, n_bytes); }
inline void forbid_pages(void* pages, size_t n_bytes) { mprotect(pages, n_bytes, PROT_NONE); }

// ----------------------------------------------------------------------------
// Processors

template <class T>
void sleep_while(const std::atomic<T>& value, T old) {
    value.wait(old);
}
template <class T>
void wake_all(std::atomic<T>& value) {
    value.notify_all();
}

// ----------------------------------------------------------------------------
// Files

inline std::FILE* open_file(const std::string& path, const char* mode) {
    return std::fopen(path.c_str(), mode);
}

inline Mapping map_file(const std::string& path) {
    // Without O_NONBLOCK a FIFO would keep this waiting for a writer.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        const int reason = errno;
        return {.error = std::string("cannot open: ") + std::strerror(reason), .no_entry = reason == ENOENT};
    }
    struct stat info {};
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return {.error = "not a regular file"};
    }
    const auto size = static_cast<size_t>(info.st_size);
    void* p = size == 0 ? nullptr : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    const int reason = errno;
    close(fd);
    if (p == MAP_FAILED) return {.error = std::string("cannot map: ") + std::strerror(reason)};
    return {.data = static_cast<const std::byte*>(p), .size = size};
}
inline void unmap_file(const Mapping& mapping) { munmap(const_cast<std::byte*>(mapping.data), mapping.size); }
inline void drop_mapped_pages(const std::byte* pages, size_t n_bytes) {
    madvise(const_cast<std::byte*>(pages), n_bytes, MADV_DONTNEED);
}

inline bool same_file(const std::string& a, const std::string& b) {
    struct stat x {
    }, y{};
    return stat(a.c_str(), &x) == 0 && stat(b.c_str(), &y) == 0 && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}
inline FileKind file_kind(const std::string& path) {
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) return errno == ENOENT ? FileKind::none : FileKind::error;
    if (S_ISDIR(info.st_mode)) return FileKind::folder;
    return S_ISREG(info.st_mode) ? FileKind::regular : FileKind::other;
}

inline int create_unnamed([[maybe_unused]] const std::filesystem::path& folder) {
#ifdef O_TMPFILE
    return open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
#else
    return -1;
#endif
}
// A lock that lasts as long as the file is open. False where there is none, or another has it.
inline bool lock_file([[maybe_unused]] int fd, [[maybe_unused]] int how) {
#ifdef __wasm__
    return false;
#else
    return flock(fd, how) == 0;
#endif
}
inline bool give_name(int fd, const std::filesystem::path& name) {
    lock_file(fd, LOCK_EX | LOCK_NB);
    const std::string self = "/proc/self/fd/" + std::to_string(fd);
    return linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
}
inline int create_named(const std::filesystem::path& name) {
    const int fd = open(name.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    lock_file(fd, LOCK_EX);
    struct stat info {};
    if (fstat(fd, &info) == 0 && info.st_nlink > 0) return fd;
    close(fd);  // before it had its lock, another took it for stale
    errno = EEXIST;
    return -1;
}
inline void remove_stale(const std::filesystem::path& name) {
    const int fd = open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    struct stat info {};
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && lock_file(fd, LOCK_EX | LOCK_NB))
        unlink(name.c_str());
    close(fd);
}
inline std::FILE* stream_of(int fd) { return fdopen(fd, "wb"); }
inline bool flush_to_disk(int fd) {
    return fsync(fd) == 0 || errno == EINVAL;
}  // EINVAL: nothing to wait for
inline bool replace_file(std::FILE* stream, const std::filesystem::path& from,
                         const std::filesystem::path& to) {
    const bool is_renamed = std::rename(from.c_str(), to.c_str()) == 0;  // while it is locked
    const int reason = errno;
    if (std::fclose(stream) != 0) return false;
    errno = reason;
    return is_renamed;
}
inline unsigned long process_id() { return static_cast<unsigned long>(getpid()); }

// ----------------------------------------------------------------------------
// Standard streams and the command line

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

inline std::vector<std::string> utf8_arguments(int argc, const char* const* argv) {
    return {argv, argv + argc};
}

inline std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

inline std::string home_folder() { return environment("HOME"); }

inline bool is_terminal(std::FILE* file) { return isatty(fileno(file)) == 1; }

inline bool has_input(std::FILE* in) {
    struct stat info {};
    int n_waiting = 0;
    if (fstat(fileno(in), &info) != 0) return false;
    if (S_ISREG(info.st_mode)) return lseek(fileno(in), 0, SEEK_CUR) < info.st_size;
    return S_ISFIFO(info.st_mode) && ioctl(fileno(in), FIONREAD, &n_waiting) == 0 && n_waiting > 0;
}

inline ptrdiff_t write_bytes(std::FILE* out, const char* bytes, size_t n) {
    return write(fileno(out), bytes, n);
}
inline int read_byte(std::FILE* in) { return std::getc(in); }

// A signal may come after the last look at what its handler sets and before a wait begins, or be taken by
// another thread. So the handler also writes into this pipe, which a wait has an eye on.
inline constinit int wake_pipe[2] = {-1, -1};

// A handler may call this.
inline void wake_reader() {
    const int reason = errno;
    if (wake_pipe[1] >= 0) {
        [[maybe_unused]] const ssize_t n = write(wake_pipe[1], "", 1);
    }
    errno = reason;
}

#ifndef __wasm__  // nothing comes meanwhile there
inline bool wait_for_input(std::FILE* in) {
    if (wake_pipe[0] < 0 && pipe(wake_pipe) == 0) {
        for (const int fd : wake_pipe) {
            fcntl(fd, F_SETFL, O_NONBLOCK);
            fcntl(fd, F_SETFD, FD_CLOEXEC);
        }
    }
    if (interrupted) return false;
    const int input = fileno(in), wake = wake_pipe[0] < FD_SETSIZE ? wake_pipe[0] : -1;
    fd_set ready;  // not poll(), which does not take terminals on every macOS
    FD_ZERO(&ready);
    FD_SET(input, &ready);
    if (wake >= 0) FD_SET(wake, &ready);
    if (select(std::max(input, wake) + 1, &ready, nullptr, nullptr, nullptr) < 0) return errno != EINTR;
    char bytes[64];
    while (wake >= 0 && FD_ISSET(wake, &ready) && read(wake, bytes, sizeof bytes) == sizeof bytes) {
    }
    return FD_ISSET(input, &ready) && !interrupted;
}
#endif

// What is there, and no more: fread() would go on to wait for all n, and a Ctrl-C between two of its waits
// would be heard with the next byte only.
inline size_t read_bytes(std::FILE* in, char* bytes, size_t n) {
    struct stat info {};
    if (fstat(fileno(in), &info) != 0 || S_ISREG(info.st_mode)) return std::fread(bytes, 1, n, in);
    while (!wait_for_input(in))
        if (interrupted) return 0;
    const ssize_t n_read = read(fileno(in), bytes, n);
    return n_read >= 0 ? size_t(n_read) : std::fread(bytes, 1, n, in);  // which sets the stream's error
}

// ----------------------------------------------------------------------------
// Signals

// Without SA_RESTART the first also ends a wait for input.
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
        wake_reader();
    };
    sigaction(SIGINT, &action, nullptr);
}

// A SIGBUS outside the mapped file kills, as it does without a handler. Only calls that a handler may make
// (man 7 signal-safety).
inline void handle_bus_error(int, siginfo_t* info, void*) {
    const auto* at = static_cast<const std::byte*>(info->si_addr);
    // A signal that a process sent (si_code <= 0) has no address.
    if (info->si_code > 0 && at >= mapped_range.begin && at < mapped_range.begin + mapped_range.size) {
        for (const std::string_view part :
             {std::string_view(program_in_error_lines), std::string_view(": "), mapped_range.path,
              std::string_view(": the file has become shorter during the run\n")})
            [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, part.data(), part.size());
        _exit(1);
    }
    std::signal(SIGBUS, SIG_DFL);
    std::raise(SIGBUS);  // delivered when this returns
}
inline void catch_bus_errors() {
    struct sigaction action {};
    action.sa_sigaction = handle_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

// ----------------------------------------------------------------------------
// Shared libraries

// A program without the C library beside it (make dist) has nothing that a library could be linked with.
#ifdef STATIC_PROGRAM
inline void* load_library(const std::filesystem::path& file, std::string& error) {
    error = file.string() + ": this program is static and loads no libraries";
    return nullptr;
}
inline void* find_symbol(void*, const char*) { return nullptr; }
#else
inline void* load_library(const std::filesystem::path& file, std::string& error) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) error = dlerror();
    return library;
}
inline void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif
