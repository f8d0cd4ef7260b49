// Two fp16 numbers in a 32-bit register, as the arithmetic sees them and as bits; and fp16 in model files.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/model/matrix_format.h"
#include "simt/cuda.h"

template <>
inline constexpr const char* tensor_type<half> = "F16";

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
