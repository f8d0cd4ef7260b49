// A back end through the C interface, with matrices to multiply.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine/backend/quant_gemm.h"
#include "engine/os/threads.h"
#include "int8_cases.h"
#include "lowbit_cases.h"

// The functions of a back end. Where memory is the program's own, those for memory are this one's.
inline QuantGemmBackend with_memory(QuantGemmBackend api) {
    if (api.host_memory == 0) return api;
    api.allocate = [](void*, void** memory, size_t n_bytes) -> int32_t {
        *memory = std::malloc(n_bytes);
        return *memory != nullptr ? QUANT_GEMM_OK : QUANT_GEMM_NO_MEMORY;
    };
    api.release = [](void*, void* memory) { std::free(memory); };
    api.upload = api.download = [](void*, void* to, const void* from, size_t n_bytes) -> int32_t {
        std::memcpy(to, from, n_bytes);
        return QUANT_GEMM_OK;
    };
    return api;
}

// An open back end, and the memory that it gave.
struct Opened {
    const QuantGemmBackend functions;
    const QuantGemmBackend* const api = &functions;
    void* context = nullptr;
    std::vector<void*> memory;

    explicit Opened(const QuantGemmBackend* a) : functions(with_memory(*a)) {
        REQUIRE(api->open(&context, run_loop) == QUANT_GEMM_OK);
    }
    ~Opened() {
        if (api->host_memory != 0) release();  // otherwise it goes with the context
        api->close(context);
    }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
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
    // w as multiply() takes it; in place, where addresses are the program's.
    const void* load(const QuantMatrix& w, bool in_place) {
        void* matrix = nullptr;
        CHECK_MESSAGE(api->load(context, &w, in_place ? 1 : 0, &matrix) == QUANT_GEMM_OK, api->error_text());
        return matrix;
    }
    QuantGemmRows upload(const QuantRows& x) {
        const size_t n = size_t(x.n_rows) * size_t(n_groups(x));
        return {static_cast<int8_t*>(upload(x.codes, size_t(x.n_rows * x.n_cols))),
                static_cast<float*>(upload(x.scales, n)),
                static_cast<int32_t*>(upload(x.sums, n)),
                x.n_rows,
                x.n_cols,
                x.group_size};
    }
};

constexpr float unwritten_output = 1e30f;

// Whether it multiplies such matrices. The example in docs/ does not take all formats; the back ends that run
// on a device take all but int8 scales.
inline bool accepts(const Opened& b, const QuantMatrix& w) {
    const int32_t status = b.api->accepts(b.context, &w);
    const std::string name = b.api->name;
    const bool on_device =
        name == "cuda" || name == "hip" || name.starts_with("emulated") || name == "opencl" || name == "sycl";
    const bool int8_scales = w.levels != nullptr && w.bits > 2;
    CHECK((status == QUANT_GEMM_OK || status == QUANT_GEMM_UNSUPPORTED));
    if (name != "example") CHECK((status == QUANT_GEMM_UNSUPPORTED) == (on_device && int8_scales));
    return status == QUANT_GEMM_OK;
}

// x times w, twice in one call. Checks that both are the same and that nothing is written behind them.
inline std::vector<float> outputs(Opened& b, const QuantRows& x, const QuantMatrix& w,
                                  bool in_place = false) {
    const size_t n = size_t(x.n_rows * w.n_rows);
    const std::vector<float> before(n + 8, unwritten_output);
    QuantGemmProduct list[2];
    for (QuantGemmProduct& p : list)
        p = {static_cast<float*>(b.upload(before.data(), before.size())), b.load(w, in_place)};
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
