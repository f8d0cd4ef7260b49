// What a back end on a CPU is made of: quantize.h and quant_matmul.h, compiled for a level of its
// instructions.
#pragma once

#include "engine/backend/quant_gemm.h"

// A context, and the threads that the kernels below run in. Null: no memory.
void* cpu_open(QuantGemmRunLoop loop) noexcept;
void cpu_close(void* context) noexcept;

// As the functions of QuantGemmBackend, for groups of 32 or 64 activations. Null, false: no memory.
void* cpu_load(void* context, const QuantGemmMatrix& w, bool in_place) noexcept;
void cpu_quantize(const QuantGemmRows& rows, const float* x) noexcept;
bool cpu_multiply(const QuantGemmRows& x, const QuantGemmProduct* products, int n_products) noexcept;
