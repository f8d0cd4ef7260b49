// See cpu_kernels.h. Nothing here may run before main asks for it: no static object with a constructor.
#include "engine/backend/cpu_kernels.h"

#include <deque>
#include <exception>
#include <new>
#include <vector>

#include "engine/cpu/quant_matmul.cpp"  // compiled for the processors of this back end

namespace {

struct Context {
    PackedMatrices packed;
    std::deque<QuantProduct> matrices;  // loaded, packed unless read in place; `out` is null
};

int32_t no_memory() { return cpu_fail(QUANT_GEMM_NO_MEMORY, "out of memory"); }

}  // namespace

int32_t cpu_open(void** context, QuantGemmRunLoop loop) noexcept {
    run_loop = loop;
    *context = new (std::nothrow) Context;
    return *context != nullptr ? QUANT_GEMM_OK : no_memory();
}
void cpu_close(void* context) noexcept { delete static_cast<Context*>(context); }

int32_t cpu_load(void* context, const QuantGemmMatrix* w, int32_t in_place, void** matrix) noexcept try {
    auto* c = static_cast<Context*>(context);
    const PackedMatrix* packed = in_place != 0 ? nullptr : c->packed.add(*w);
    *matrix = &c->matrices.emplace_back(QuantProduct{nullptr, *w, packed});
    return QUANT_GEMM_OK;
} catch (const std::exception&) {
    return no_memory();
}

int32_t cpu_quantize(void*, int8_t* codes, float* scales, int32_t* sums, const float* x, int32_t n_rows,
                     int32_t n_cols, int32_t group_size) noexcept {
    const size_t n_groups = size_t(n_cols / group_size);
    parallel_for(n_rows, [&](size_t t) {
        quantize_groups(codes + t * n_cols, scales + t * n_groups, sums + t * n_groups, x + t * n_cols,
                        n_cols, group_size);
    });
    return QUANT_GEMM_OK;
}

int32_t cpu_multiply(void*, const QuantGemmRows* x, const QuantGemmProduct* products,
                     int32_t n_products) noexcept try {
    std::vector<QuantProduct> list;
    for (int i = 0; i < n_products; i++) {
        list.push_back(*static_cast<const QuantProduct*>(products[i].matrix));
        list.back().out = products[i].out;
    }
    quant_matmul(*x, list);  // every level has a path for such groups
    return QUANT_GEMM_OK;
} catch (const std::bad_alloc&) {
    return no_memory();
}
