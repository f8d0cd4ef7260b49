// How fast the device's memory is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/device.h"

// Bytes per second that the device copies, counting those read and those written. It is the limit for reading
// weights. 0 if there is too little free memory to measure it with, and in the emulator.
inline double copy_bandwidth() {
#ifdef __CUDACC__
    // A GiB, or half of what is free; less than 64 MiB would stay in the second-level cache.
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    const size_t n = std::min(size_t(1) << 30, free / 4);
    if (n < size_t(64) << 20) return 0;
    const uint64_t peak = device().peak;
    DeviceBuffer<std::byte> from(n), to(n);
    device().peak = peak;  // these buffers are not the model's
    cudaEvent_t start, end;
    check(cudaEventCreate(&start), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    float best = INFINITY;
    for (int i = 0; i < 8; i++) {
        check(cudaEventRecord(start, device().stream), "cudaEventRecord");
        check(cudaMemcpyAsync(to.get(), from.get(), n, cudaMemcpyDeviceToDevice, device().stream), "copy");
        check(cudaEventRecord(end, device().stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), "copy");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
        best = std::min(best, ms);
    }
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    return 2.0 * double(n) / (best * 1e-3);
#else
    return 0;
#endif
}
