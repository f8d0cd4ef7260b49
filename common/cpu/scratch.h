// Memory that stays from call to call.
#pragma once

#include <cstddef>
#include <vector>

// Room for n values in `buffer`, which grows if it has to. What was there is lost or not: do not read it.
template <class T>
inline T* scratch(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) buffer.resize(n);
    return buffer.data();
}
