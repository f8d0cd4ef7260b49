// The two kernels of a back end on a CPU: int8_matmul.h and lowbit_matmul.h, compiled for a level of its
// instructions.
#pragma once

#include "common/backend/quant_gemm.h"

// The threads that the kernels below run in.
void cpu_open(QuantGemmRunLoop loop) noexcept;

// As the functions of QuantGemmBackend, for groups of 32 or 64 activations. False: no memory.
void cpu_quantize(const QuantGemmRows& rows, const float* x) noexcept;
bool cpu_multiply(const QuantGemmRows& x, const QuantGemmProduct* products, int n_products) noexcept;
