// What back ends with memory of their own share: which matrices of a model file they multiply, and the tables
// to upload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "engine/backend/quant_gemm.h"

// Why a back end that takes scales of rows, or fp16 scales and zero points of groups, does not multiply w;
// null if it does.
inline const char* why_unsupported(const QuantGemmMatrix& w) {
    const bool per_row = w.scale_type == QUANT_GEMM_ROW_FP32, has_zeros = w.bits < 8 && w.levels == nullptr;
    if (w.group_size != 32 && w.group_size != 64) return "groups of activations have to be of 32 or 64";
    if (w.scale_type == QUANT_GEMM_GROUP_FP32) return "scales of groups have to be fp16";
    if (has_zeros && (per_row || w.zeros == nullptr))
        return "each group has to have a scale and a zero point";
    return nullptr;
}

// Calls use(address, n_bytes) for each table that w has. The address is w's own and may be replaced.
template <class Use>
inline void for_each_table(QuantGemmMatrix& w, Use use) {
    const size_t n_rows = size_t(w.n_rows), groups = size_t(w.n_cols / w.group);
    const size_t n_codes = size_t(w.kind == QUANT_GEMM_SPARSE ? w.n_cols / 2 : w.n_cols);
    const size_t scale_bytes = w.scale_type == QUANT_GEMM_GROUP_FP16   ? groups * sizeof(uint16_t)
                               : w.scale_type == QUANT_GEMM_GROUP_FP32 ? groups * sizeof(float)
                                                                       : sizeof(float);
    use(w.codes, n_rows * n_codes * size_t(w.bits) / 8);
    use(w.scales, n_rows * scale_bytes);
    if (w.mask != nullptr) use(w.mask, n_rows * size_t(w.n_cols) / 8);
    if (w.zeros != nullptr) use(w.zeros, n_rows * ((groups + 1) / 2));
    if (w.levels != nullptr) use(w.levels, n_rows * groups);
}

// Uploads the tables of m into memory of the back end and replaces their addresses. allocate(void** memory,
// n_bytes) and upload(to, from, n_bytes) return a QuantGemmStatus; the first that is no success ends it and
// is returned.
template <class Allocate, class Upload>
inline int32_t upload_tables(QuantGemmMatrix& m, Allocate allocate, Upload upload) {
    int32_t status = QUANT_GEMM_OK;
    for_each_table(m, [&](auto& address, size_t n_bytes) {
        void* to = nullptr;
        if (status == QUANT_GEMM_OK) status = allocate(&to, n_bytes);
        if (status == QUANT_GEMM_OK) status = upload(to, address, n_bytes);
        address = static_cast<std::remove_reference_t<decltype(address)>>(to);
    });
    return status;
}
