// The part of system.h on Windows, where names and text are UTF-16: the functions of posix.h.
#pragma once

#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#define PSAPI_VERSION 2
#include <windows.h>

// These need what is above.
#include <fcntl.h>
#include <io.h>
#include <psapi.h>
#include <shellapi.h>

// What compilers hold calls of format() to (engine/app/streams.h): C99, which MinGW's own printf() has.
#define PRINTF_FORMAT __MINGW_PRINTF_FORMAT

constexpr const char* library_suffix = ".dll";

// What is no UTF-8, or no UTF-16, becomes U+FFFD.
inline std::wstring to_utf16(std::string_view text) {
    const int n = MultiByteToWideChar(CP_UTF8, 0, text.data(), int(text.size()), nullptr, 0);
    std::wstring wide(size_t(n), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, text.data(), int(text.size()), wide.data(), n);
    return wide;
}
inline std::string to_utf8(std::wstring_view wide) {
    const int n =
        WideCharToMultiByte(CP_UTF8, 0, wide.data(), int(wide.size()), nullptr, 0, nullptr, nullptr);
    std::string text(size_t(n), '\0');
    WideCharToMultiByte(CP_UTF8, 0, wide.data(), int(wide.size()), text.data(), n, nullptr, nullptr);
    return text;
}

// ----------------------------------------------------------------------------
// Memory

inline size_t page_size() {
    SYSTEM_INFO info{};
    GetSystemInfo(&info);
    return info.dwPageSize;
}

// Windows promises all of it at once, and provides a page when it is touched.
inline void* take_pages(size_t n_bytes) {
    void* pages = VirtualAlloc(nullptr, n_bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    char* guard = static_cast<char*>(pages) + n_bytes - page_size();
    DWORD before = 0;
    if (pages != nullptr) VirtualProtect(guard, page_size(), PAGE_NOACCESS, &before);
    return pages;
}
inline void release_pages(void* pages, size_t) { VirtualFree(pages, 0, MEM_RELEASE); }

inline uint64_t peak_memory_bytes() {
    PROCESS_MEMORY_COUNTERS counters{};
    GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters);
    return counters.PeakWorkingSetSize;
}

// The least of the memory that nobody needs, of what Windows can still promise, and of addresses.
inline uint64_t available_memory(const std::string& = "") {
    MEMORYSTATUSEX status{};
    status.dwLength = sizeof status;
    if (!GlobalMemoryStatusEx(&status)) return no_limit;
    return std::min({status.ullAvailPhys, status.ullAvailPageFile, status.ullAvailVirtual});
}

// ----------------------------------------------------------------------------
// Processors

inline int system_cores() {
    DWORD_PTR ours = 0, all = 0;
    GetProcessAffinityMask(GetCurrentProcess(), &ours, &all);
    DWORD size = 0;
    GetLogicalProcessorInformation(nullptr, &size);
    std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> list(size /
                                                           sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
    if (!GetLogicalProcessorInformation(list.data(), &size)) return 0;
    return int(std::count_if(list.begin(), list.end(), [&](const auto& entry) {
        return entry.Relationship == RelationProcessorCore && (entry.ProcessorMask & ours) != 0;
    }));
}
inline double granted_processors(const std::string&) { return std::numeric_limits<double>::infinity(); }

// Not std::atomic::wait(): where there is no futex, libstdc++ (12) looks at the value, then takes a lock,
// then sleeps; notify_all() takes none, and if it comes between the two first, nobody wakes the sleeper.
template <class T>
void sleep_while(const std::atomic<T>& value, T old) {
    WaitOnAddress(const_cast<std::atomic<T>*>(&value), &old, sizeof old, INFINITE);
}
template <class T>
void wake_all(std::atomic<T>& value) {
    WakeByAddressAll(&value);
}

// ----------------------------------------------------------------------------
// Files

inline HANDLE handle_of(std::FILE* file) { return reinterpret_cast<HANDLE>(_get_osfhandle(_fileno(file))); }
inline std::FILE* open_file(const std::string& path, const char* mode) {
    return _wfopen(path_of(path).c_str(), to_utf16(mode).c_str());
}

inline std::span<const std::byte> map_stream(std::FILE* file, const std::string& path) {
    const auto size = static_cast<size_t>(_filelengthi64(_fileno(file)));
    if (size == 0) return {};
    const HANDLE mapping = CreateFileMappingW(handle_of(file), nullptr, PAGE_READONLY, 0, 0, nullptr);
    const void* p = mapping == nullptr ? nullptr : MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    const DWORD code = GetLastError();
    if (mapping != nullptr) CloseHandle(mapping);  // the view keeps what it needs
    if (p == nullptr) throw std::runtime_error(path + ": cannot map: error " + std::to_string(code));
    return {static_cast<const std::byte*>(p), size};
}
inline void unmap_file(std::span<const std::byte> file) { UnmapViewOfFile(file.data()); }
// To unlock what is not locked takes pages out of the working set: Microsoft's page on VirtualUnlock.
inline void drop_pages(std::span<const std::byte> pages) {
    VirtualUnlock(const_cast<std::byte*>(pages.data()), pages.size());
}
inline void want_pages(std::span<const std::byte> pages) {
    WIN32_MEMORY_RANGE_ENTRY range{const_cast<std::byte*>(pages.data()), pages.size()};
    PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

// The system does not say.
inline long disk_reads() {
    static long n = 0;
    return n++;
}

// ----------------------------------------------------------------------------
// Standard streams and the command line

// Bytes as they are: no line break becomes two characters.
inline void set_up_streams() {
    for (std::FILE* file : {stdin, stdout, stderr}) _setmode(_fileno(file), _O_BINARY);
}

inline std::vector<std::string> utf8_arguments(int, const char* const*) {
    int n = 0;
    wchar_t** list = CommandLineToArgvW(GetCommandLineW(), &n);  // stays until the process ends
    std::vector<std::string> arguments;
    for (int i = 0; i < n; i++) arguments.push_back(to_utf8(list[i]));
    return arguments;
}

inline std::string environment(const char* name) {
    const wchar_t* value = _wgetenv(to_utf16(name).c_str());
    return value == nullptr ? "" : to_utf8(value);
}

inline std::string home_folder() { return environment("USERPROFILE"); }

// A console alone has a mode; _isatty() also takes NUL for a terminal.
inline bool is_terminal(std::FILE* file) {
    DWORD mode = 0;
    return GetConsoleMode(handle_of(file), &mode) != 0;
}

inline bool has_input(std::FILE* in) {
    const HANDLE handle = handle_of(in);
    DWORD n_waiting = 0;
    if (GetFileType(handle) == FILE_TYPE_DISK) return _telli64(_fileno(in)) < _filelengthi64(_fileno(in));
    return GetFileType(handle) == FILE_TYPE_PIPE &&
           PeekNamedPipe(handle, nullptr, 0, nullptr, &n_waiting, nullptr) != 0 && n_waiting > 0;
}

inline ptrdiff_t write_bytes(std::FILE* out, const char* bytes, size_t n) {
    if (is_terminal(out)) {
        const std::wstring wide = to_utf16({bytes, n});
        DWORD n_written = 0;
        if (WriteConsoleW(handle_of(out), wide.data(), DWORD(wide.size()), &n_written, nullptr))
            return ptrdiff_t(n);
        errno = EIO;
        return -1;
    }
    const int n_written = _write(_fileno(out), bytes, unsigned(n));
    // The C library has a word for some of the ways in which a pipe has no reader.
    const DWORD code = n_written < 0 ? GetLastError() : ERROR_SUCCESS;
    if (code == ERROR_NO_DATA || code == ERROR_BROKEN_PIPE || code == ERROR_PIPE_NOT_CONNECTED) errno = EPIPE;
    return n_written;
}

// The next line of the console in UTF-8. Empty at the end of the input, which is Ctrl-Z or Ctrl-D at the
// beginning of a line, and at Ctrl-C.
inline std::string console_line(HANDLE console) {
    std::wstring line;
    while (!line.ends_with(L'\n') && !interrupted) {
        wchar_t part[1024];
        DWORD n = 0;
        if (!ReadConsoleW(console, part, DWORD(std::size(part)), &n, nullptr) || n == 0) {
            // The handler of Ctrl-C runs in a thread of its own, perhaps later than this.
            for (int i = 0; i < 100 && !interrupted; i++) Sleep(1);
            return "";
        }
        line.append(part, n);
    }
    return interrupted || line[0] == 0x1A || line[0] == 0x04 ? "" : to_utf8(line);
}

inline int read_byte(std::FILE* in) {
    if (!is_terminal(in)) return std::getc(in);
    static std::string line;
    static size_t next = 0;
    if (next == line.size()) line = console_line(handle_of(in)), next = 0;
    return line.empty() ? EOF : static_cast<unsigned char>(line[next++]);
}
inline size_t read_bytes(std::FILE* in, char* bytes, size_t n) {
    if (!is_terminal(in)) return std::fread(bytes, 1, n, in);
    size_t n_read = 0;
    for (int c; n_read < n && (c = read_byte(in)) != EOF;) bytes[n_read++] = static_cast<char>(c);
    return n_read;
}
// Windows ends the wait for a line itself when Ctrl-C comes.
inline bool wait_for_input(std::FILE*) { return !interrupted; }

// ----------------------------------------------------------------------------
// Ctrl-C

inline void catch_ctrl_c() {
    SetConsoleCtrlHandler(
        [](DWORD event) -> BOOL {
            if (event != CTRL_C_EVENT || interrupted) return FALSE;
            interrupted = 1;
            return TRUE;
        },
        TRUE);
}

// Windows does not make a file shorter while it is mapped.
inline void catch_bus_errors(const char*) {}

// ----------------------------------------------------------------------------
// Shared libraries

inline void* library_function(const std::filesystem::path& file, const char* name) {
    const HMODULE library = LoadLibraryW(file.c_str());
    if (library == nullptr)
        throw std::runtime_error(name_of(file) + ": cannot load: error " + std::to_string(GetLastError()));
    return reinterpret_cast<void*>(GetProcAddress(library, name));
}

inline std::filesystem::path program_file() {
    std::wstring path(32768, L'\0');  // the longest there is
    path.resize(GetModuleFileNameW(nullptr, path.data(), DWORD(path.size())));
    return path;
}
