// Memory that stays from call to call.
#pragma once

#include <cstddef>
#include <vector>

#include "common/os/memory_count.h"

// Room for n values in `buffer`, which grows if it has to. What was there is lost or not: do not read it.
// Null, and no room, where memory is counted (MemoryCount).
template <class T>
inline T* scratch(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n && !MemoryCount::counts_at_once(n * sizeof(T))) buffer.resize(n);
    return buffer.data();
}
