// A matrix of any format as the stream of weights has it: codes with a scale, and a zero point if they are of
// few bits, for each group of activations.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/cpu/expand_rows.h"
#include "engine/cpu/quant_matrix.h"
#include "hw/sim/matmul_rtl.h"

// What MatmulRtl::pack takes. A sparse matrix is filled up with codes that are its zero points; where groups
// have int8 scales, the core gets in 8 bits what codes stand for.
inline RtlMatrix pack_matrix(const MatmulRtl& core, const QuantMatrix& w) {
    std::vector<int8_t> codes;
    std::vector<uint8_t> stored, zeros;
    std::vector<float> scales;
    const bool in_8_bits = w.kind == QUANT_GEMM_SIGNED || w.scale_type == QUANT_GEMM_GROUP_INT8;
    codes.reserve(size_t(w.n_rows) * size_t(w.n_cols));
    for (int i = 0; i < w.n_rows; i++) {
        stored.resize(size_t(w.n_cols));
        if (w.scale_type == QUANT_GEMM_GROUP_INT8) {
            expand_columns(reinterpret_cast<int8_t*>(stored.data()), w, i, 0, w.n_cols);
        } else {
            unpack_columns(stored.data(), w, i, 0, w.kind == QUANT_GEMM_SPARSE ? w.n_cols / 2 : w.n_cols);
        }
        scales.resize(scales.size() + size_t(n_groups(w)));
        expand_scales(scales.data() + scales.size() - n_groups(w), w, i);
        size_t next = 0;
        for (int k = 0; k < w.n_cols; k++) {
            const int zero = in_8_bits ? 0 : RowZeros(w, i)[k / w.group];
            if (k % w.group_size == 0) zeros.push_back(uint8_t(zero));
            const bool absent = w.kind == QUANT_GEMM_SPARSE &&
                                (w.mask[size_t(i) * mask_bytes(w) + size_t(k) / 8] >> k % 8 & 1) == 0;
            codes.push_back(int8_t(absent ? zero : stored[next++]));
        }
    }
    const RtlFormat format = in_8_bits                        ? RtlFormat::int8
                             : w.kind == QUANT_GEMM_TWO_LEVEL ? RtlFormat::two_level
                             : w.bits == 4                    ? RtlFormat::four_bits
                                                              : RtlFormat::two_bits;
    return core.pack(format, codes.data(), zeros.data(), scales.data(), w.n_rows, w.n_cols, w.group_size);
}
