// Products of activations with quantized matrices, by the best path of this build.
#pragma once

#include <span>

#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"

// The products of x with several matrices that have its n_cols and group_size, or with row_each those of its
// row i with the i-th. Every output is computed with the same roundings whatever the number of threads or
// tokens, so results do not depend on either. False, and nothing written, if this build has no path for the
// group size.
bool quant_matmul(const QuantRows& x, std::span<const QuantProduct> list, bool row_each = false);

// What quantizes rows and multiplies by them in place of this build's kernels: engine/backend/backend.h.
struct OtherKernels {
    virtual ~OtherKernels() = default;
    // Quantizes the rows of x in groups of group_size.
    virtual void quantize(Int8Rows& out, const Rows& x, int group_size) = 0;
    virtual void multiply(const QuantRows& x, std::span<const QuantProduct> products) = 0;
};

// Name of the kernels for a group size; "portable" if a program's plain loops run.
const char* int8_kernel_name(int group_size);
