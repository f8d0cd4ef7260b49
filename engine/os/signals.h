// Ctrl-C, as a loop looks for it: `interrupted` of system.h.
#pragma once

#include "engine/os/system.h"

// Once a Ctrl-C has been obeyed and the program goes on.
inline void hear_ctrl_c_again() { interrupted = 0; }
