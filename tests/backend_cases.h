// A back end through the C interface, with matrices to multiply.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/backend/matrix.h"
#include "common/backend/quant_gemm.h"
#include "int8_cases.h"
#include "lowbit_cases.h"

// An open back end, and the memory that it gave.
struct Opened {
    const QuantGemmBackend* api;
    void* context = nullptr;
    std::vector<void*> memory;

    explicit Opened(const QuantGemmBackend* a) : api(a) {
        REQUIRE(api->open(&context, run_loop) == QUANT_GEMM_OK);
    }
    ~Opened() { api->close(context); }
    void release() {
        for (void* m : memory) api->release(context, m);
        memory.clear();
    }
    void* allocate(size_t n_bytes) {
        void* m = nullptr;
        REQUIRE(api->allocate(context, &m, n_bytes) == QUANT_GEMM_OK);
        return memory.emplace_back(m);
    }
    template <class T>
    void* upload(const T* from, size_t n) {
        if (from == nullptr) return nullptr;
        void* to = allocate(n * sizeof(T));
        REQUIRE(api->upload(context, to, from, n * sizeof(T)) == QUANT_GEMM_OK);
        return to;
    }
    template <class T>
    std::vector<T> download(const void* from, size_t n) {
        std::vector<T> to(n);
        REQUIRE(api->download(context, to.data(), from, n * sizeof(T)) == QUANT_GEMM_OK);
        return to;
    }
    QuantGemmMatrix upload(const LowbitMatrix& w) {
        QuantGemmMatrix m = to_c(w);
        const size_t n_scales = size_t(w.n_rows * w.n_scales());
        m.codes = upload(w.codes, size_t(w.n_rows) * w.n_code_bytes());
        m.mask = upload(w.mask, size_t(w.n_rows * w.n_cols / 8));
        m.scales = upload(w.scales, n_scales);
        m.zeros = upload(w.zeros, size_t(w.n_rows) * w.n_zero_bytes());
        m.levels = upload(w.levels, n_scales);
        m.row_scales = upload(w.row_scales, size_t(w.n_rows));
        return m;
    }
    QuantGemmRows upload(const Int8Matrix& x) {
        const size_t n_groups = size_t(x.n_rows * x.n_groups());
        return {upload(x.codes, size_t(x.n_rows * x.n_cols)),
                upload(x.scales, n_groups),
                upload(x.sums, n_groups),
                x.n_rows,
                x.n_cols,
                x.group_size};
    }
};

constexpr float unwritten_output = 1e30f;

// Whether it multiplies such matrices. The example in docs/ does not take all formats.
inline bool accepts(const Opened& b, const LowbitMatrix& w) {
    const QuantGemmMatrix m = to_c(w);
    const int32_t status = b.api->accepts(b.context, &m);
    CHECK((status == QUANT_GEMM_OK || status == QUANT_GEMM_UNSUPPORTED));
    CHECK((status == QUANT_GEMM_OK || std::string(b.api->name) == "example"));
    return status == QUANT_GEMM_OK;
}

// Whether it wants them packed: those for CPUs do, but not the plain loops.
inline bool wants_packed(const Opened& b, const LowbitMatrix& w) {
    QuantGemmMatrix m = to_c(w);
    m.packed = 1;
    const std::string name = b.api->name;
    const bool expected = b.api->host_memory != 0 && name != "portable" && name != "example";
    CHECK((b.api->accepts(b.context, &m) == QUANT_GEMM_OK) == expected);
    return expected;
}

// x times w, twice in one call. Checks that both are the same and that nothing is written behind them.
inline std::vector<float> outputs(Opened& b, const Int8Matrix& x, const LowbitMatrix& w) {
    const size_t n = size_t(x.n_rows * w.n_rows);
    const std::vector<float> before(n + 8, unwritten_output);
    QuantGemmProduct list[2];
    for (QuantGemmProduct& p : list) p = {b.upload(before.data(), before.size()), b.upload(w)};
    const QuantGemmRows rows = b.upload(x);
    const int32_t status = b.api->multiply(b.context, &rows, list, 2);
    CHECK_MESSAGE(status == QUANT_GEMM_OK, b.api->error_text());
    std::vector<float> out = b.download<float>(list[0].out, n + 8);
    CHECK(out == b.download<float>(list[1].out, n + 8));
    CHECK(std::count(out.end() - 8, out.end(), unwritten_output) == 8);
    b.release();
    out.resize(n);
    return out;
}
