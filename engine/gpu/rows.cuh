// Values of some tokens on the device, a row per token: what operations hand to each other.
#pragma once

#include <cstddef>

#include "engine/gpu/device.h"

// Some rows of a DeviceRows, to read.
template <class T>
struct RowSlice {
    const T* values;  // (n_rows, n_cols)
    int n_rows, n_cols;
};

// (n_rows, n_cols), one row after another. Memory for max_rows rows is allocated once; operations set n_rows
// of what they write to the number of tokens that they were given.
template <class T>
struct DeviceRows {
    int n_rows = 0, n_cols = 0;
    DeviceBuffer<T> values;  // (max_rows, n_cols)

    DeviceRows() = default;
    DeviceRows(int max_rows, int columns) : n_cols(columns), values(size_t(max_rows) * size_t(columns)) {}

    T* get() const { return values.get(); }
    size_t size() const { return size_t(n_rows) * size_t(n_cols); }  // of the rows in use
    bool is_allocated() const { return values.size() > 0; }

    // n rows from `first` on.
    RowSlice<T> slice(int first, int n) const { return {get() + size_t(first) * size_t(n_cols), n, n_cols}; }
    operator RowSlice<T>() const { return slice(0, n_rows); }
};
