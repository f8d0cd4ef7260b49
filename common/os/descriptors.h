// The three descriptors that a process begins with: standard input, output and error.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <initializer_list>

// A standard descriptor that is not open would be the number of the next file that is opened, and what is
// meant for standard output would go into that file. So first of all such a descriptor gets /dev/null, to be
// used the wrong way round: reading it, or writing to it, fails as before (EBADF).
inline void hold_standard_descriptors() {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        [[maybe_unused]] const int same = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
}
