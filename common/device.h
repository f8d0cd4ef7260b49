// The GPU that a program runs on: its memory, and small things that kernels need. Without nvcc it is the
// emulator of simt/ on this machine's CPU.
#pragma once

#include "simt/cuda.h"
#include "simt/ptx.h"

#if defined(__CUDACC__) && __has_include(<cublas_v2.h>) && !defined(NO_CUBLAS)
#define HAVE_CUBLAS
#include <cublas_v2.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

// ----------------------------------------------------------------------------
// The device

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // or the next launch would be blamed for it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct Device {
    std::string name = "emulated on the CPU (simt)";
    int n_sms = 4;  // streaming multiprocessors; work is cut into at least as many blocks where it can be
    uint64_t allocated = 0, peak = 0;  // bytes that DeviceBuffers hold
    cudaStream_t stream = nullptr;
#ifdef HAVE_CUBLAS
    cublasHandle_t cublas = nullptr;
    void* cublas_workspace = nullptr;
#endif
};

// Opened at first use. Throws std::runtime_error if there is no device that can run these kernels.
inline Device& device() {
    static Device d = [] {
        Device found;
#ifdef __CUDACC__
        int n = 0;
        const cudaError_t error = cudaGetDeviceCount(&n);
        if (error != cudaSuccess || n == 0) {
            throw std::runtime_error(std::string("no CUDA device: ") +
                                     (error != cudaSuccess ? cudaGetErrorString(error) : "0 found"));
        }
        cudaDeviceProp p;
        check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
        found.name = std::string(p.name) + ", sm_" + std::to_string(p.major) + std::to_string(p.minor);
        if (p.major < 8) {
            throw std::runtime_error(found.name + ": compute capability " + std::to_string(p.major) + "." +
                                     std::to_string(p.minor) + ", these kernels need 8.0");
        }
        found.n_sms = p.multiProcessorCount;
        check(cudaStreamCreate(&found.stream), "cudaStreamCreate");
#endif
#ifdef HAVE_CUBLAS
        // A workspace of our own, so that products which a graph holds need not allocate. 32 MB is what
        // cuBLAS takes on Hopper by itself (cuBLAS manual, cublasSetWorkspace).
        constexpr size_t workspace = size_t(32) << 20;
        check(cudaMalloc(&found.cublas_workspace, workspace), "cudaMalloc");
        found.allocated = found.peak = workspace;
        if (cublasCreate(&found.cublas) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(found.cublas, found.stream) != CUBLAS_STATUS_SUCCESS ||
            cublasSetWorkspace(found.cublas, found.cublas_workspace, workspace) != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error("cublasCreate failed");
#endif
        return found;
    }();
    return d;
}

inline void wait_for_device() { check(cudaStreamSynchronize(device().stream), "a kernel"); }

// An array of n values on the device, not initialized.
template <class T>
class DeviceBuffer {
  public:
    DeviceBuffer() = default;
    // Throws std::runtime_error with both sizes if that much is not there.
    explicit DeviceBuffer(size_t n) : n_(n) {
        if (n == 0) return;
        device();
        void* p = nullptr;
        if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) {
            cudaGetLastError();
            size_t free = 0, all = 0;
            cudaMemGetInfo(&free, &all);
            throw std::runtime_error("device memory: " + std::to_string(n * sizeof(T)) + " bytes wanted, " +
                                     std::to_string(free) + " of " + std::to_string(all) + " are free");
        }
        p_ = static_cast<T*>(p);
        device().allocated += n * sizeof(T);
        device().peak = std::max(device().peak, device().allocated);
    }
    ~DeviceBuffer() {
        if (p_ == nullptr) return;
        cudaFree(p_);
        device().allocated -= n_ * sizeof(T);
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept
        : p_(std::exchange(other.p_, nullptr)), n_(std::exchange(other.n_, 0)) {}
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(p_, other.p_);
        std::swap(n_, other.n_);
        return *this;
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    T* get() const { return p_; }
    size_t size() const { return n_; }

    void upload(const T* from, size_t n, size_t at = 0) {
        check(cudaMemcpyAsync(p_ + at, from, n * sizeof(T), cudaMemcpyHostToDevice, device().stream),
              "upload");
        wait_for_device();
    }
    void clear() { check(cudaMemsetAsync(p_, 0, n_ * sizeof(T), device().stream), "cudaMemset"); }

  private:
    T* p_ = nullptr;
    size_t n_ = 0;
};

// n values from the device, once everything before is done.
template <class T>
void download(T* to, const T* from, size_t n) {
    check(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyDeviceToHost, device().stream), "download");
    wait_for_device();
}

// Bytes a second that the device copies, read and written counted once each; the limit of what it can read.
// 0 if there is no memory left to measure it with.
inline double copy_bandwidth() {
#ifdef __CUDACC__
    // A GB, or half of what is free; less than 64 MB would stay in the second-level cache.
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    const size_t n = std::min(size_t(1) << 30, free / 4);
    if (n < size_t(64) << 20) return 0;
    const uint64_t peak = device().peak;
    DeviceBuffer<std::byte> from(n), to(n);
    device().peak = peak;  // not what the model took
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

// ----------------------------------------------------------------------------
// For kernels

__device__ inline half2 as_half2(uint32_t bits) {
    half2 h;
    memcpy(&h, &bits, sizeof h);
    return h;
}
__device__ inline uint32_t as_bits(half2 h) {
    uint32_t bits;
    memcpy(&bits, &h, sizeof bits);
    return bits;
}

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
    __syncthreads();
    float total = 0;
    for (int i = 0; i < n_warps; i++) total += sums[i];
    __syncthreads();  // before the next call writes
    return total;
}

// For blocks that each leave a part of one result in memory: true in all threads of the block that comes
// last, and then the parts of all n blocks can be read.
__device__ inline bool is_last(unsigned* ticket, unsigned n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what the block has written is out before its ticket is
        last = atomicAdd(ticket, 1u) == n - 1;
        if (last) *ticket = 0;
        __threadfence();  // and what the others have written is read after
    }
    __syncthreads();
    return last;
}
