// A stand-in for cuBLAS on a CPU, by the names of its header, for tests of what calls it: -DSIMT_CUBLAS. Not
// fast. cuBLAS Library documentation, "cublasGemmEx()": which arguments are refused, and with what status.
#pragma once

#include <cstddef>

#include "simt/cuda.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
struct cublasContext {};
using cublasHandle_t = cublasContext*;

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    static cublasContext context;
    *handle = &context;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }

// C (m, n) fp32 = alpha op(A) op(B) + beta C, op(A) (m, k) and op(B) (k, n) fp16, all by columns: element (i,
// j) of a matrix lies at i + j * its leading dimension. Products are exact, sums fp32, one after the other
// along k; cuBLAS adds up in an order of its own.
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                                   int m, int n, int k, const void* alpha, const void* a, cudaDataType a_type,
                                   int lda, const void* b, cudaDataType b_type, int ldb, const void* beta,
                                   void* c, cudaDataType c_type, int ldc, cublasComputeType_t,
                                   cublasGemmAlgo_t) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || lda < (op_a == CUBLAS_OP_N ? m : k) ||
        ldb < (op_b == CUBLAS_OP_N ? k : n) || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a_type != CUDA_R_16F || b_type != CUDA_R_16F || c_type != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const float times = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
    const auto element = [](const void* matrix, cublasOperation_t op, int ld, int i, int j) {
        const size_t at = op == CUBLAS_OP_N ? i + size_t(j) * ld : j + size_t(i) * ld;
        return __half2float(static_cast<const half*>(matrix)[at]);
    };
    simt::for_each_block(n, [&](long j) {
        for (int i = 0; i < m; i++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += element(a, op_a, lda, i, l) * element(b, op_b, ldb, l, int(j));
            float& out = static_cast<float*>(c)[i + size_t(j) * ldc];
            out = times * sum + (keep == 0 ? 0 : keep * out);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
