// Products of fp16 matrices by cuBLAS. HAVE_CUBLAS says whether there is one: it comes with CUDA, -DNO_CUBLAS
// leaves it out, and the emulator has a stand-in for tests alone.
#pragma once

#ifdef SIMT_CUBLAS
#define HAVE_CUBLAS
#include "simt/cublas.h"
#elif defined(__CUDACC__) && __has_include(<cublas_v2.h>) && !defined(NO_CUBLAS)
#define HAVE_CUBLAS
#include <cublas_v2.h>
#endif

#ifdef HAVE_CUBLAS
#include <cstddef>
#include <stdexcept>
#include <string>

#include "engine/gpu/device.h"

// Opened at first use, on the device's stream. Throws std::runtime_error if that fails.
inline cublasHandle_t cublas() {
    // A workspace of our own: without one, cuBLAS would allocate while a graph is captured. 32 MiB is its own
    // choice on Hopper (cuBLAS manual, cublasSetWorkspace).
    static const DeviceBuffer<std::byte> workspace(size_t(32) << 20);
    static const cublasHandle_t opened = [] {
        cublasHandle_t handle = nullptr;
        if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(handle, device().stream) != CUBLAS_STATUS_SUCCESS ||
            cublasSetWorkspace(handle, workspace.get(), workspace.size()) != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error("cublasCreate failed");
        return handle;
    }();
    return opened;
}

// out (n_tokens, n_out) = x (n_tokens, n_in) * w, or += with `add`; w (n_in, n_out), or (n_out, n_in) if
// transposed. cuBLAS stores matrices by columns: it sees the transpose of each, so the operands change
// places.
inline void run_cublas(const half* x, int n_tokens, const half* w, int n_in, int n_out, float* out, bool add,
                       bool transposed = false) {
    const float one = 1, beta = add ? 1 : 0;
    const cublasStatus_t status =
        cublasGemmEx(cublas(), transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, n_out, n_tokens, n_in,
                     &one, w, CUDA_R_16F, transposed ? n_in : n_out, x, CUDA_R_16F, n_in, &beta, out,
                     CUDA_R_32F, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS)
        throw std::runtime_error("cublasGemmEx: status " + std::to_string(status));
}
#endif
