// What the engine adds to a program's operations on the device: angles that are computed as a run comes to
// their positions, cuBLAS for the classifier, and the most probable token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/rows.cuh"
#include "engine/model/config.h"

// cos and sin of every position and pair, (context, head_dim / 2), on the device. They are computed as a run
// comes to its positions, some thousand at a time: those of a long context would take seconds.
class RotationTable {
  public:
    RotationTable() = default;
    RotationTable(const ModelConfig& c, int context)
        : context_(context),
          frequencies_(rope_frequencies(c)),
          attention_factor_(c.rope_scaling.attention_factor),
          table_(size_t(context) * frequencies_.size()) {}

    // Before positions up to end - 1 are used.
    void reach(int end) {
        if (end <= n_ready_) return;
        constexpr int step = 4096;
        const int first = n_ready_;
        n_ready_ = std::min(context_, (end + step - 1) / step * step);
        std::vector<float2> rows;
        rows.reserve(size_t(n_ready_ - first) * frequencies_.size());
        for (int pos = first; pos < n_ready_; pos++) {
            for (const float frequency : frequencies_) {
                const Rotation r = rotation(pos, frequency, attention_factor_);
                rows.push_back(make_float2(r.cos, r.sin));
            }
        }
        table_.upload(rows.data(), rows.size(), size_t(first) * frequencies_.size());
    }
    operator const DeviceBuffer<float2>&() const { return table_; }

  private:
    int context_ = 0, n_ready_ = 0;   // positions
    std::vector<float> frequencies_;  // (head_dim / 2,)
    float attention_factor_ = 1;
    DeviceBuffer<float2> table_;
};

// ----------------------------------------------------------------------------
// The classifier, and the most probable token

// out (n_tokens, n_out) = x (n_tokens, n_in) times the transpose of an fp16 matrix (n_out, n_in), by cuBLAS.
// False, and nothing done, if there is none, or only one token.
inline bool fast_classifier([[maybe_unused]] DeviceRows<float>& out,
                            [[maybe_unused]] const DeviceRows<half>& x, [[maybe_unused]] const half* matrix) {
#ifdef HAVE_CUBLAS
    if (x.n_rows > 1) {
        run_cublas(x.get(), x.n_rows, matrix, x.n_cols, out.n_cols, out.get(), false, true);
        return true;
    }
#endif
    return false;
}

// grid: 1; block: 1024.
static __global__ void arg_max_kernel(int* best, const float* logits, int n) {
    __shared__ float values[32];
    __shared__ int indices[32];
    float value = -INFINITY;
    int index = 0x7fffffff;
    auto take = [&](float v, int i) {
        if (v > value || (v == value && i < index)) value = v, index = i;
    };
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        isfinite(logits[i]) ? take(logits[i], i) : take(INFINITY, -1);
    }
    auto over_warp = [&] {
        for (int distance = 16; distance > 0; distance /= 2) {
            const float v = __shfl_xor_sync(0xffffffff, value, distance);
            const int i = __shfl_xor_sync(0xffffffff, index, distance);
            take(v, i);
        }
    };
    over_warp();
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    value = threadIdx.x < blockDim.x / 32 ? values[threadIdx.x] : -INFINITY;
    index = threadIdx.x < blockDim.x / 32 ? indices[threadIdx.x] : 0x7fffffff;
    over_warp();
    if (threadIdx.x == 0) *best = index;
}

// *best = the index of the largest of a row of logits (n,), the first of equals; -1 if one is not finite.
inline void arg_max(DeviceBuffer<int>& best, const float* logits, int n) {
    launch<arg_max_kernel>({.grid = 1, .block = 1024, .stream = device().stream}, best.get(), logits, n);
}
