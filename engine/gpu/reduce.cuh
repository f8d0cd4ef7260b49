// Reductions inside kernels: over a warp, over a block, and over the blocks that share a result.
#pragma once

#include "simt/cuda.h"
#include "simt/ptx.h"

__device__ inline float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// The sum over a block of up to 1024 threads, the same in every thread and in every run.
__device__ inline float block_sum(float x) {
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();  // a second call in a kernel would need another, before `sums` is written again
    return warp_sum(lane < n_warps ? sums[lane] : 0.0f);
}

// Called by each of n blocks once it has written its partial result to memory. Returns true, in all threads,
// in the block that arrives last: it may read the partial results of all n blocks. *arrivals counts the
// blocks; it has to be 0 before the launch and is 0 again after it.
__device__ inline bool is_last(unsigned* arrivals, unsigned n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_arrival(arrivals) == n - 1;
        if (last) *arrivals = 0;
    }
    __syncthreads();
    return last;
}
