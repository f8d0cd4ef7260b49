// What back ends with memory of their own share: errors, which matrices of a model file they multiply, and
// how those get there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <new>
#include <type_traits>

#include "engine/backend/quant_gemm.h"

// ----------------------------------------------------------------------------
// Errors

inline thread_local char latest_error[256] = "no error";
inline const char* error_text() { return latest_error; }

// The first line of `why` is what error_text() says.
inline int32_t fail(QuantGemmStatus status, const char* why) {
    std::snprintf(latest_error, sizeof latest_error, "%.*s", int(std::strcspn(why, "\n")), why);
    return status;
}

// What f returns, or the code for what it throws.
template <class F>
int32_t guarded(F f) try {
    return f();
} catch (const std::bad_alloc&) {
    return fail(QUANT_GEMM_NO_MEMORY, "out of memory");
} catch (const std::exception& e) {
    return fail(QUANT_GEMM_FAILED, e.what());
}

// ----------------------------------------------------------------------------
// Matrices

// Scales of rows, or fp16 scales and zero points of groups.
inline int32_t accepts(void*, const QuantGemmMatrix* w) {
    const bool per_row = w->scale_type == QUANT_GEMM_ROW_FP32, has_zeros = w->bits < 8 && !w->levels;
    const char* why = nullptr;
    if (w->group_size != 32 && w->group_size != 64)
        why = "groups of activations have to be of 32 or 64";
    else if (w->scale_type == QUANT_GEMM_GROUP_FP32 || w->scale_type == QUANT_GEMM_GROUP_INT8)
        why = "scales of groups have to be fp16";
    else if (has_zeros && (per_row || w->zeros == nullptr))
        why = "each group has to have a scale and a zero point";
    return why == nullptr ? QUANT_GEMM_OK : fail(QUANT_GEMM_UNSUPPORTED, why);
}

// load() of a back end: the matrix is kept in `loaded`, with the addresses of its tables' copies. allocate
// and upload are the back end's own. Matrices of other scales are not accepted.
inline int32_t load_tables(std::deque<QuantGemmMatrix>& loaded, const QuantGemmMatrix& w, void** matrix,
                           void* context, decltype(QuantGemmBackend::allocate) allocate,
                           decltype(QuantGemmBackend::upload) upload) {
    return guarded([&] {
        QuantGemmMatrix& m = loaded.emplace_back(w);
        *matrix = &m;
        int32_t status = QUANT_GEMM_OK;
        const auto copy = [&](auto& address, size_t n_bytes) {
            void* to = nullptr;
            if (address == nullptr) return;
            if (status == QUANT_GEMM_OK) status = allocate(context, &to, n_bytes);
            if (status == QUANT_GEMM_OK) status = upload(context, to, address, n_bytes);
            address = static_cast<std::remove_reference_t<decltype(address)>>(to);
        };
        const size_t n_rows = size_t(w.n_rows), groups = size_t(w.n_cols / w.group);
        const size_t n_codes = size_t(w.kind == QUANT_GEMM_SPARSE ? w.n_cols / 2 : w.n_cols);
        copy(m.codes, n_rows * n_codes * size_t(w.bits) / 8);
        copy(m.scales,
             n_rows * (w.scale_type == QUANT_GEMM_GROUP_FP16 ? groups * sizeof(uint16_t) : sizeof(float)));
        copy(m.mask, n_rows * size_t(w.n_cols) / 8);
        copy(m.zeros, n_rows * ((groups + 1) / 2));
        copy(m.levels, n_rows * groups);
        return status;
    });
}
