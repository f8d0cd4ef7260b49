// CUDA's words for a CPU. cuda.h includes this where the compiler is not nvcc. It is written to be exact and
// to notice mistakes, not to be fast.
#pragma once

#include <math.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <fstream>
#include <string>
#include <tuple>

#include "block.h"
#include "half.h"

// ----------------------------------------------------------------------------
// CUDA's words

#define __global__
#define __device__
#define __host__
#define __constant__
// A CPU thread runs one block at a time, so thread_local memory is the block's. With constinit, g++ knows
// that a variable of type half needs no initialization at run time; clang++ does not accept constinit there.
#ifdef __clang__
#define __shared__ static thread_local
#else
#define __shared__ static constinit thread_local
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 __half22float2(half2 h) { return {float(h.x), float(h.y)}; }
inline half2 __float22half2_rn(float2 f) { return {half(f.x), half(f.y)}; }

namespace simt {
[[noreturn]] inline void fail_misaligned(const char* what, size_t n) {
    const Emulating emulating;
    const std::string bytes = std::to_string(n);
    block().fail(what + (" of " + bytes) + " bytes from an address that is no multiple of " + bytes);
}
}  // namespace simt

template <class T>
T __ldg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) simt::fail_misaligned("__ldg", alignof(T));
    return *p;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline unsigned __float_as_uint(float f) { return std::bit_cast<unsigned>(f); }
inline int __float_as_int(float f) { return std::bit_cast<int>(f); }
inline float __uint_as_float(unsigned u) { return std::bit_cast<float>(u); }
inline float __int_as_float(int i) { return std::bit_cast<float>(i); }
inline float __fdividef(float a, float b) { return a / b; }
// c + the products of the four int8 of a with those of b.
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(unsigned(a) >> 8 * i)) * int(int8_t(unsigned(b) >> 8 * i));
    return c;
}
inline int __float2int_rn(float f) { return int(rintf(f)); }
// C libraries declare functions of these names, some of them with another meaning.
#define __expf(x) expf(x)
#define rsqrtf(x) (1.0f / sqrtf(x))

// ----------------------------------------------------------------------------
// Memory. What cudaMalloc returns is ordinary memory of the host.

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

inline cudaError_t cudaMalloc(void** p, size_t n) {
    return simt::memory.allocate(p, n) ? cudaSuccess : cudaErrorMemoryAllocation;
}
template <class T>
cudaError_t cudaMalloc(T** p, size_t n) {
    return cudaMalloc(reinterpret_cast<void**>(p), n);
}
inline cudaError_t cudaFree(void* p) { return simt::memory.free(p) ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (n > 0 && from_device && !simt::memory.contains(from, n, false)) return cudaErrorInvalidValue;
    if (n > 0 && !simt::memory.contains(to, n, true) && to_device) return cudaErrorInvalidValue;
    std::memmove(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, size_t n) {
    if (n > 0 && !simt::memory.contains(p, n, true)) return cudaErrorInvalidValue;
    std::memset(p, value, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind,
                                   cudaStream_t = nullptr) {
    return cudaMemcpy(to, from, n, kind);
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t = nullptr) {
    return cudaMemset(p, value, n);
}
// Free is what the machine has available, MemAvailable of /proc/meminfo: what is unused (MemFree) is little
// on a machine that has read many files, and their pages can be dropped.
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    *free = page * size_t(sysconf(_SC_AVPHYS_PAGES));
    *total = page * size_t(sysconf(_SC_PHYS_PAGES));
    std::ifstream meminfo("/proc/meminfo");
    for (std::string line; std::getline(meminfo, line);) {
        if (line.starts_with("MemAvailable:")) *free = size_t(std::stoull(line.substr(13))) * 1024;
    }
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // launch() throws
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess             ? "no error"
           : error == cudaErrorInvalidValue ? "invalid argument"
                                            : "out of memory";
}

// ----------------------------------------------------------------------------
// What the threads of a block or of a warp do together

inline void __syncthreads() { simt::block().sync_threads(); }
inline void __syncwarp(simt::Mask mask = simt::all_lanes) {
    int none = 0;
    simt::block().sync_warp(simt::At::syncwarp, mask, none, [](int* const*) {});
}
inline void __threadfence() {
    const simt::Emulating emulating;
    if (simt::checks != nullptr) simt::checks->fence(simt::block());
    __sync_synchronize();  // as std::atomic_thread_fence, of which -fsanitize=thread warns
}

namespace simt {

// Each thread gets the value of the thread that from(its own number) names in its group of `width` threads,
// or keeps its own where the group has none of that number.
template <class T, class From>
T shuffle(At at, Mask mask, T value, int width, From from) {
    static_assert(sizeof(T) == 4);
    const Emulating emulating;
    const int lane = block().lane() % warp_size, group = lane / width * width, source = from(lane - group);
    struct {
        T value, result;
        int source;
    } mine{value, value, source >= 0 && source < width ? group + source : lane};
    block().sync_warp(at, mask, mine, [&](auto* const* lanes) {
        for (int i = 0; i < warp_size; i++) {
            if (lanes[i] == nullptr) continue;
            const int j = lanes[i]->source;
            if (lanes[j] == nullptr) {
                block().fail(block().lane() / warp_size * warp_size + i,
                             name(at) + " from lane " + std::to_string(j) + ", which takes no part in it");
            }
            lanes[i]->result = lanes[j]->value;
        }
    });
    return mine.result;
}

}  // namespace simt

template <class T>
T __shfl_sync(simt::Mask mask, T value, int source, int width = simt::warp_size) {
    return simt::shuffle(simt::At::shfl, mask, value, width, [=](int) { return source & (width - 1); });
}
template <class T>
T __shfl_xor_sync(simt::Mask mask, T value, int lane_mask, int width = simt::warp_size) {
    return simt::shuffle(simt::At::shfl_xor, mask, value, width, [=](int lane) { return lane ^ lane_mask; });
}
template <class T>
T __shfl_down_sync(simt::Mask mask, T value, unsigned delta, int width = simt::warp_size) {
    return simt::shuffle(simt::At::shfl_down, mask, value, width,
                         [=](int lane) { return lane + int(delta); });
}

namespace simt {

// A bit for each thread whose predicate holds.
inline Mask votes(At at, Mask mask, bool predicate) {
    struct {
        bool predicate;
        Mask result;
    } mine{predicate, 0};
    block().sync_warp(at, mask, mine, [](auto* const* lanes) {
        Mask result = 0;
        for (int i = 0; i < warp_size; i++) result |= Mask(lanes[i] && lanes[i]->predicate) << i;
        for (int i = 0; i < warp_size; i++) {
            if (lanes[i]) lanes[i]->result = result;
        }
    });
    return mine.result;
}

}  // namespace simt

inline simt::Mask __ballot_sync(simt::Mask mask, int predicate) {
    return simt::votes(simt::At::ballot, mask, predicate != 0);
}
inline int __any_sync(simt::Mask mask, int predicate) {
    return simt::votes(simt::At::any, mask, predicate != 0) != 0;
}

template <class T>
T atomicAdd(T* p, T value) {
    const simt::Emulating emulating;
    simt::Block& b = simt::block();
    if (simt::checks != nullptr) simt::checks->access(b, p, sizeof(T), simt::Access::atomic);
    return std::atomic_ref<T>(*p).fetch_add(value, std::memory_order_relaxed);
}
