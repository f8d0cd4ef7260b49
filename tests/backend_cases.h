// A back end through the C interface, with matrices to multiply.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/backend/quant_gemm.h"
#include "engine/os/threads.h"
#include "int8_cases.h"
#include "lowbit_cases.h"

// An open back end.
struct Opened {
    const QuantGemmBackend* const api;
    void* context = nullptr;

    explicit Opened(const QuantGemmBackend* a) : api(a) {
        REQUIRE(api->open(&context, run_loop) == QUANT_GEMM_OK);
    }
    ~Opened() { api->close(context); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    // w as multiply() takes it; in place, if it is a back end on a CPU.
    const void* load(const QuantMatrix& w, bool in_place) {
        void* matrix = nullptr;
        CHECK_MESSAGE(api->load(context, &w, in_place ? 1 : 0, &matrix) == QUANT_GEMM_OK, api->error_text());
        return matrix;
    }
};

constexpr float unwritten_output = 1e30f;

// Whether it multiplies such matrices. The example in docs/ does not take all formats; the back ends that run
// on a device take all but int8 scales.
inline bool accepts(const Opened& b, const QuantMatrix& w) {
    const int32_t status = b.api->accepts(b.context, &w);
    const std::string name = b.api->name;
    const bool on_device =
        name == "cuda" || name == "hip" || name.starts_with("emulated") || name == "opencl";
    const bool int8_scales = w.levels != nullptr && w.bits > 2;
    CHECK((status == QUANT_GEMM_OK || status == QUANT_GEMM_UNSUPPORTED));
    if (name != "example") CHECK((status == QUANT_GEMM_UNSUPPORTED) == (on_device && int8_scales));
    return status == QUANT_GEMM_OK;
}

// x times w, twice in one call. Checks that both are the same and, of a back end on a CPU, that nothing is
// written behind them.
inline std::vector<float> outputs(Opened& b, const QuantRows& x, const QuantMatrix& w,
                                  bool in_place = false) {
    const size_t n = size_t(x.n_rows * w.n_rows);
    std::vector<float> out(n + 8, unwritten_output), again = out;
    const QuantGemmProduct list[] = {{out.data(), b.load(w, in_place)}, {again.data(), b.load(w, in_place)}};
    const int32_t status = b.api->multiply(b.context, &x, list, 2);
    CHECK_MESSAGE(status == QUANT_GEMM_OK, b.api->error_text());
    CHECK(out == again);
    CHECK(std::count(out.end() - 8, out.end(), unwritten_output) == 8);
    out.resize(n);
    return out;
}
