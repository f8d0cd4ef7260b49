// A matrix of any format as the stream of weights has it: codes with a scale, and a zero point if they are of
// few bits, for each group of activations.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/cpu/quant_matrix.h"
#include "hw/sim/matmul_rtl.h"

// What MatmulRtl::pack takes. A sparse matrix is filled up with codes that are its zero points.
inline RtlMatrix pack_matrix(const MatmulRtl& core, const QuantMatrix& w) {
    std::vector<int8_t> codes;
    std::vector<uint8_t> stored, zeros;
    std::vector<float> scales;
    codes.reserve(size_t(w.n_rows) * size_t(w.n_cols));
    for (int i = 0; i < w.n_rows; i++) {
        stored.resize(size_t(w.n_cols));
        unpack_row(stored.data(), w, i);
        size_t next = 0;
        for (int k = 0; k < w.n_cols; k++) {
            const int zero = w.kind == QUANT_GEMM_SIGNED ? 0 : weight_zero(w, i, k / w.group);
            if (k % w.group_size == 0)
                scales.push_back(weight_scale(w, i, k / w.group)), zeros.push_back(uint8_t(zero));
            const bool absent = w.kind == QUANT_GEMM_SPARSE &&
                                (w.mask[size_t(i) * mask_bytes(w) + size_t(k) / 8] >> k % 8 & 1) == 0;
            codes.push_back(int8_t(absent ? zero : stored[next++]));
        }
    }
    const RtlFormat format = w.kind == QUANT_GEMM_SIGNED      ? RtlFormat::int8
                             : w.kind == QUANT_GEMM_TWO_LEVEL ? RtlFormat::two_level
                             : w.bits == 4                    ? RtlFormat::four_bits
                                                              : RtlFormat::two_bits;
    return core.pack(format, codes.data(), zeros.data(), scales.data(), w.n_rows, w.n_cols, w.group_size);
}
