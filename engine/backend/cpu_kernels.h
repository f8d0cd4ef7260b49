// What a back end on a CPU is made of: quantize.h and quant_matmul.h, compiled for a level of its
// instructions, as functions of QuantGemmBackend for groups of 32 or 64 activations.
#pragma once

#include "engine/backend/quant_gemm.h"

int32_t cpu_open(void** context, QuantGemmRunLoop loop) noexcept;
void cpu_close(void* context) noexcept;
int32_t cpu_load(void* context, const QuantGemmMatrix* w, int32_t in_place, void** matrix) noexcept;
int32_t cpu_quantize(void* context, int8_t* codes, float* scales, int32_t* sums, const float* x,
                     int32_t n_rows, int32_t n_cols, int32_t group_size) noexcept;
int32_t cpu_multiply(void* context, const QuantGemmRows* x, const QuantGemmProduct* products,
                     int32_t n_products) noexcept;

// Keeps `why` for error_text() and returns the status. In cpu.cpp.
int32_t cpu_fail(QuantGemmStatus status, const char* why) noexcept;
