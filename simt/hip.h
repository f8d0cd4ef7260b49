// CUDA's words for hipcc: what the .cu files that AMD's GPUs run use of them. cuda.h includes this. HIP has
// the same functions under names of its own (HIP programming guide, https://rocm.docs.amd.com/projects/HIP).
#pragma once

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#define cudaStream_t hipStream_t
#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaErrorMemoryAllocation hipErrorOutOfMemory
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize
#define cudaFuncSetAttribute hipFuncSetAttribute
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaFree hipFree
#define cudaMalloc hipMalloc
#define cudaMemcpy hipMemcpy

// A warp is a wavefront here: 32 threads on RDNA, 64 on GCN and CDNA. All of them take part, and masks do not
// count.
template <class T>
__device__ T __shfl_xor_sync(unsigned long long, T value, int lane_mask, int width) {
    return __shfl_xor(value, lane_mask, width);
}

// Orders the shared memory of a warp, whose threads run in step (LLVM's AMDGPU user guide, "Memory Model").
__device__ inline void __syncwarp() {
#ifdef __HIP_DEVICE_COMPILE__
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
#endif
}

// v_dot4_i32_i8, of gfx906 and all later ones but gfx1010 and RDNA 3.
__device__ inline int __dp4a(int a, int b, int c) {
#ifdef __HIP_DEVICE_COMPILE__
    return __builtin_amdgcn_sdot4(a, b, c, false);
#else
    return a + b + c;  // never called: only the other pass of hipcc makes code for the device
#endif
}
