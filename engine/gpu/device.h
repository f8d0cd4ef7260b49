// The device that a program runs on, its memory, and how fast that is. Without nvcc it is the emulator of
// simt/ on this machine's CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/os/memory.h"
#include "engine/os/threads.h"
#include "engine/text/utf8.h"
#include "simt/cuda.h"

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, which the next launch would report otherwise
    fail(what, ": ", cudaGetErrorString(error));
}

struct Device {
    std::string name = "emulated on the CPU (simt)";
    int n_sms = 4;                  // streaming multiprocessors; launches try to have at least as many blocks
    size_t shared_per_sm = 233472;  // bytes
    uint64_t allocated = 0, peak = 0;  // bytes of device memory: now, and the most at any time
    cudaStream_t stream = nullptr;     // everything runs in this one
};

// Opened at first use. Throws std::runtime_error if there is no device that can run these kernels.
inline Device& device() {
    static Device d = [] {
        Device found;
#ifdef __CUDACC__
        int n = 0;
        const cudaError_t error = cudaGetDeviceCount(&n);
        if (error != cudaSuccess || n == 0)
            fail("no CUDA device: ", error != cudaSuccess ? cudaGetErrorString(error) : "0 found");
        cudaDeviceProp p;
        check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
        found.name = std::string(p.name) + ", sm_" + std::to_string(p.major) + std::to_string(p.minor);
        if (p.major < 8)
            fail(found.name, ": compute capability ", p.major, ".", p.minor, ", these kernels need 8.0");
        found.n_sms = p.multiProcessorCount;
        found.shared_per_sm = p.sharedMemPerMultiprocessor;
        check(cudaStreamCreate(&found.stream), "cudaStreamCreate");
#else
        simt::run_loop = run_loop;
#endif
        return found;
    }();
    return d;
}

inline void wait_for_device() { check(cudaStreamSynchronize(device().stream), "a kernel"); }

// An array of n values on the device, not initialized. Where memory is counted (MemoryCount), it has none:
// nothing may be copied from it, and no kernel launched on it.
template <class T>
class DeviceBuffer {
  public:
    DeviceBuffer() = default;
    // Throws std::runtime_error with both sizes if that much memory is not free.
    explicit DeviceBuffer(size_t n) : p_(nullptr, {n}) {
        if (n == 0 || MemoryCount::counts_at_once(n * sizeof(T))) return;
        device();
        void* p = nullptr;
        if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) {
            cudaGetLastError();
            size_t free = 0, all = 0;
            cudaMemGetInfo(&free, &all);
            fail("device memory: ", n * sizeof(T), " bytes wanted, ", free, " of ", all, " are free");
        }
        p_.reset(static_cast<T*>(p));
        device().allocated += n * sizeof(T);
        device().peak = std::max(device().peak, device().allocated);
    }
    T* get() const { return p_.get(); }
    size_t size() const { return p_.get_deleter().n; }

    void upload(const T* from, size_t n, size_t at = 0) {
        if (MemoryCount::counts_at_once(0)) return;
        check(cudaMemcpyAsync(get() + at, from, n * sizeof(T), cudaMemcpyHostToDevice, device().stream),
              "upload");
        wait_for_device();
    }
    void clear() {
        if (MemoryCount::counts_at_once(0)) return;
        check(cudaMemsetAsync(get(), 0, size() * sizeof(T), device().stream), "cudaMemset");
    }

  private:
    struct Free {
        size_t n;  // values
        void operator()(T* p) const {
            cudaFree(p);
            device().allocated -= n * sizeof(T);
        }
    };
    std::unique_ptr<T, Free> p_{nullptr, {0}};
};

// n values from the device, once everything launched before is done.
template <class T>
void download(T* to, const T* from, size_t n) {
    check(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyDeviceToHost, device().stream), "download");
    wait_for_device();
}

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
    device().peak = peak;        // these buffers are not the model's
    constexpr int n_copies = 8;  // at once: what it takes to start and end them counts little
    double best = INFINITY;
    for (int round = 0; round < 4; round++) {
        const double start = seconds_now();
        for (int i = 0; i < n_copies; i++)
            check(cudaMemcpyAsync(to.get(), from.get(), n, cudaMemcpyDeviceToDevice, device().stream),
                  "copy");
        wait_for_device();
        best = std::min(best, seconds_now() - start);
    }
    return 2.0 * double(n) * n_copies / best;
#else
    return 0;
#endif
}
