// Memory that stays from call to call.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/os/memory.h"

// Happens once in a run: not a part of the loops that ask for room.
template <class T>
[[gnu::noinline, gnu::cold]] void grow_scratch(std::vector<T>& buffer, size_t n) {
    if (!MemoryCount::counts_at_once(n * sizeof(T))) buffer.resize(n);
}

// Room for n values in `buffer`, which grows if it has to. What was there is lost or not: do not read it.
// Null, and no room, where memory is counted (MemoryCount).
template <class T>
inline T* scratch(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) grow_scratch(buffer, n);
    return buffer.data();
}
