// An int4 matrix of AWQ on the device, and what a launch multiplies. runq_awq.cu says what the numbers mean
// and has the product as a plain loop; awq_matmul.cuh has the fast products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simt/cuda.h"

// A matrix of n_in rows (input channels) and n_out columns (output channels). A word holds eight columns of a
// row, in AutoAWQ's order: the even ones in its low half and the odd ones in its high half, four bits each.
// So column 8c + i is in bits 4 * {0, 4, 1, 5, 2, 6, 3, 7}[i] of word c.
struct AwqMatrix {
    const uint32_t* qweight = nullptr;  // (n_in, n_out / 8)
    const uint32_t* qzeros = nullptr;   // (n_in / group_size, n_out / 8)
    const half* scales = nullptr;       // (n_in / group_size, n_out)
    const half* fp16 = nullptr;         // (n_in, n_out), the weights expanded; null unless keeps_fp16()
    int n_in = 0, n_out = 0, group_size = 128;

    size_t n_weights() const { return size_t(n_in) * size_t(n_out); }
    size_t n_groups() const { return n_weights() / size_t(group_size); }
    size_t n_bytes() const {  // quantized
        return (n_weights() + n_groups()) / 8 * sizeof(uint32_t) + n_groups() * sizeof(half);
    }
};

// A product, out (n_tokens, n_out) = x * w, or += with `add`.
struct AwqProduct {
    AwqMatrix w;
    float* out = nullptr;
    bool add = false;
};

// The products of one launch. They read the same x (n_tokens, n_in).
struct AwqProducts {
    AwqProduct items[3];
    int n = 0;
};
