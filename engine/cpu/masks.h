// The masks of 2:4 sparse matrices, looked through when a model is loaded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/cpu/expand_sparse.h"
#include "engine/model/tensors.h"
#include "engine/os/threads.h"

// A program need not look at a mask where it finds it: check_masks() comes later, if at all.
inline bool fast_check_mask(const uint8_t*) { return true; }

// Looks through all masks in one loop: threads do not meet between one and the next. Of the first that does
// not keep two of each four columns, the program's own check_mask() says why.
template <class Weights>
void check_masks(const Weights& w) {
    std::vector<TensorInfo> masks;
    for (const TensorInfo& t : w.file.all())
        if (t.name.ends_with(".mask")) masks.push_back(t);
    const auto rows = [&](const TensorInfo& t, int64_t i) {
        return reinterpret_cast<const uint8_t*>(w.file.data(t)) + i * t.shape[1];
    };
    std::atomic<bool> good = true;
    parallel_lists(
        masks, [](const TensorInfo& t) { return t.shape[0]; },
        [&](const TensorInfo& t, int64_t begin, int64_t end) {
            if (!is_two_of_four(rows(t, begin), size_t(end - begin) * size_t(t.shape[1]))) good = false;
        });
    if (good) return;
    for (const TensorInfo& t : masks) Weights::check_mask(t.name, rows(t, 0), t.shape[0], 8 * t.shape[1]);
}
