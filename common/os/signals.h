// Signals: Ctrl-C, and a model file that gets shorter while it is mapped.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <string_view>

#include "common/os/mapped_file.h"

inline volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C only sets `interrupted`; SA_RESETHAND makes the second one kill. Without SA_RESTART the
// first also ends a wait for input. A program that was started with SIGINT ignored goes on ignoring it: so a
// shell without job control starts what it runs in the background, which a Ctrl-C at the terminal is not for.
inline void catch_ctrl_c() {
    struct sigaction action {};
    if (sigaction(SIGINT, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) return;
    action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = SA_RESETHAND;
    sigaction(SIGINT, &action, nullptr);
}

// Once a Ctrl-C has been obeyed and the program goes on.
inline void hear_ctrl_c_again() {
    interrupted = 0;
    catch_ctrl_c();
}

// What the handler below begins its line with.
inline const char* program_in_error_lines = "";

// A read from the mapped model file behind its end ends the process with one line and exit code 1. Any other
// SIGBUS kills, as it does without a handler. Only calls that a handler may make (man 7 signal-safety).
inline void handle_bus_error(int, siginfo_t* info, void*) {
    const auto* at = static_cast<const std::byte*>(info->si_addr);
    // A signal that a process sent (si_code <= 0) has no address.
    if (info->si_code > 0 && at >= mapped_range.begin && at < mapped_range.begin + mapped_range.size) {
        for (const std::string_view part :
             {std::string_view(program_in_error_lines), std::string_view(": "),
              std::string_view(mapped_range.path),
              std::string_view(": the file has become shorter during the run\n")})
            [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, part.data(), part.size());
        _exit(1);
    }
    std::signal(SIGBUS, SIG_DFL);
    std::raise(SIGBUS);  // delivered when this returns
}

inline void catch_bus_errors(const char* program) {
    program_in_error_lines = program;
    struct sigaction action {};
    action.sa_sigaction = handle_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}
