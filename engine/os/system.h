// What this project asks of the operating system. posix.h describes each function, and windows.h has the same
// ones; all else of engine/ is the same everywhere.
#pragma once

#if defined(_WIN32)
#include "engine/os/windows.h"
#else
#include "engine/os/posix.h"
#endif
