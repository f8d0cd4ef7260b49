// What the engine adds to a program's operations on the device: angles that are computed as a run comes to
// their positions, cuBLAS for the classifier, and the most probable token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/model/config.h"

// RoPE (Su et al. 2021, arXiv 2104.09864): radians per position of each pair, theta^(-2i / head_dim),
// (head_dim / 2,) fp32. A rescaling divides the frequencies of long wavelengths by `factor`, leaves short
// wavelengths alone and blends in between, over turns (Llama 3.1 and later) or over pairs (YaRN, Peng et al.
// 2023, arXiv 2309.00071; linear, which divides all).
inline std::vector<float> rope_frequencies(const ModelConfig& c) {
    std::vector<float> all(size_t(c.head_dim) / 2);
    for (size_t i = 0; i < all.size(); i++) {
        double f = std::pow(double(c.rope_theta), -2.0 * double(i) / c.head_dim);
        if (c.rope_type > 0) {
            // Turns within the context that the model was first trained on.
            const double turns = c.original_max_position * f / (2 * std::numbers::pi);
            const double x = c.rope_type == 1 ? turns : c.head_dim - double(i);
            const double low = c.low_freq_factor, high = c.high_freq_factor;
            const double smooth = std::clamp((x - low) / (high - low), 0.0, 1.0);
            f = (1 - smooth) * f / c.rope_factor + smooth * f;
        }
        all[i] = float(f);
    }
    return all;
}

// cos and sin of every position and pair, (context, head_dim / 2), on the device. They are computed as a run
// comes to its positions, some thousand at a time: those of a long context would take seconds.
class RotationTable {
  public:
    RotationTable(const ModelConfig& c, int context)
        : context_(context),
          frequencies_(rope_frequencies(c)),
          attention_factor_(c.attention_factor),
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
                const double angle = double(pos) * frequency;  // in fp64, rounded once
                rows.push_back(make_float2(float(attention_factor_ * std::cos(angle)),
                                           float(attention_factor_ * std::sin(angle))));
            }
        }
        table_.upload(rows.data(), rows.size(), size_t(first) * frequencies_.size());
    }
    operator const DeviceBuffer<float2>&() const { return table_; }

  private:
    int context_, n_ready_ = 0;       // positions
    std::vector<float> frequencies_;  // (head_dim / 2,)
    double attention_factor_;         // YaRN's, of both
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

constexpr int arg_max_threads = 256, arg_max_blocks = 256;  // of a block; of a launch, at most as many

// A logit, and where it stands in its row.
struct alignas(8) Logit {
    float value;
    int index;
};

// The larger; of equals, the first.
__device__ inline Logit larger(Logit a, Logit b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

// The largest of a block's. In thread 0.
__device__ inline Logit block_largest(Logit x) {
    __shared__ Logit of_warps[arg_max_threads / 32];
    const auto over_warp = [&x] {
        for (int distance = 16; distance > 0; distance /= 2)
            x = larger(x, {__shfl_xor_sync(0xffffffff, x.value, distance),
                           __shfl_xor_sync(0xffffffff, x.index, distance)});
    };
    over_warp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) x = of_warps[threadIdx.x % (arg_max_threads / 32)], over_warp();
    return x;
}

// A thread takes 16 bytes of the row at a time, and up to three logits before and behind these. grid: up to
// arg_max_blocks, the last of which takes the largest of all blocks.
static __global__ void __launch_bounds__(arg_max_threads)
    arg_max_kernel(int* best, const float* logits, int n, Logit* partials, unsigned* arrivals) {
    Logit largest{-INFINITY, 0x7fffffff};
    const auto take = [&](float v, int i) {
        largest = larger(largest, isfinite(v) ? Logit{v, i} : Logit{INFINITY, -1});
    };
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
    const int before = min(n, int(-reinterpret_cast<uintptr_t>(logits) % 16 / 4)), n_fours = (n - before) / 4;
    const int behind = before + 4 * n_fours;
    wait_for_previous();
#pragma unroll 1
    for (int i = thread; i < n_fours; i += n_threads) {
        const float4 four = reinterpret_cast<const float4*>(logits + before)[i];
        const int at = before + 4 * i;
        take(four.x, at), take(four.y, at + 1), take(four.z, at + 2), take(four.w, at + 3);
    }
    if (thread < before) take(logits[thread], thread);
    if (thread < n - behind) take(logits[behind + thread], behind + thread);
    largest = block_largest(largest);
    if (threadIdx.x == 0) partials[blockIdx.x] = largest;
    if (!is_last(arrivals, gridDim.x)) return;
    largest = block_largest(partials[min(threadIdx.x, gridDim.x - 1)]);
    if (threadIdx.x == 0) *best = largest.index;
}

// The most probable token, and what the blocks that look for it leave for the last of them.
struct BestToken {
    DeviceBuffer<int> index{1};
    DeviceBuffer<Logit> partials{arg_max_blocks};
    DeviceBuffer<unsigned> arrivals{1};

    BestToken() { arrivals.clear(); }
};

// best.index = that of the largest of a row of logits (n,), the first of equals; -1 if one is not finite.
inline void arg_max(const BestToken& best, const float* logits, int n) {
    const int n_blocks = std::min((n + 4 * arg_max_threads - 1) / (4 * arg_max_threads), arg_max_blocks);
    launch<arg_max_kernel>(
        {.grid = n_blocks, .block = arg_max_threads, .stream = device().stream, .is_early = true},
        best.index.get(), logits, n, best.partials.get(), best.arrivals.get());
}
