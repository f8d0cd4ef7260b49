// The back end `rtl` of runq_gptq: activations are quantized and every product is computed by
// hw/rtl/matmul_axi.sv, which Verilator has compiled. docs/rtl.md.
//
// If RTL_LOG names a file, each command appends a line of JSON to it, with its sizes and what the core
// counted; RTL_WEIGHT_EVERY=n lets a beat of weights come every n clocks, as from a memory that is n times as
// narrow.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include "engine/backend/quant_gemm.h"
#include "hw/sim/pack_matrix.h"
#include "hw/sim/rtl_session.h"

namespace {

thread_local std::string latest_error = "no error";

int32_t fail(QuantGemmStatus status, const std::string& why) {
    latest_error = why;
    return status;
}
// Calls work(); what it throws becomes a status.
template <class Work>
int32_t guarded(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return fail(QUANT_GEMM_NO_MEMORY, "out of memory");
    } catch (const std::exception& e) {
        return fail(QUANT_GEMM_FAILED, e.what());
    }
}

struct Context {
    RtlSession rtl;
    std::deque<RtlMatrix> matrices;
};
Context& of(void* context) { return *static_cast<Context*>(context); }

int32_t rank() { return 1; }
int32_t open(void** context, QuantGemmRunLoop) {
    *context = nullptr;
    return guarded([&] { return *context = new Context, QUANT_GEMM_OK; });
}
void close(void* context) { delete static_cast<Context*>(context); }

int32_t accepts(void* context, const QuantGemmMatrix* w) {
    const MatmulRtl& core = of(context).rtl.core;
    if (core.fits(w->n_cols, w->group_size)) return QUANT_GEMM_OK;
    return fail(QUANT_GEMM_UNSUPPORTED, "rows of " + std::to_string(w->n_cols) + " in groups of " +
                                            std::to_string(w->group_size) + " do not fit the core: at most " +
                                            std::to_string(core.max_inputs) + " inputs, in groups of " +
                                            std::to_string(core.min_group) + " or more");
}
int32_t load(void* context, const QuantGemmMatrix* w, int32_t, void** matrix) {
    return guarded([&] {
        Context& c = of(context);
        *matrix = &c.matrices.emplace_back(pack_matrix(c.rtl.core, *w));
        return QUANT_GEMM_OK;
    });
}

int32_t quantize(void* context, int8_t* codes, float* scales, int32_t* sums, const float* x, int32_t n_rows,
                 int32_t n_cols, int32_t group_size) {
    return guarded([&] {
        of(context).rtl.quantize(codes, scales, x, n_rows, n_cols, group_size, nullptr);
        for (size_t g = 0; g < size_t(n_rows) * size_t(n_cols / group_size); g++)
            sums[g] = std::accumulate(codes + g * group_size, codes + (g + 1) * group_size, 0);
        return QUANT_GEMM_OK;
    });
}

int32_t multiply(void* context, const QuantGemmRows* x, const QuantGemmProduct* products,
                 int32_t n_products) {
    return guarded([&] {
        std::vector<RtlProduct> list;
        for (const QuantGemmProduct* p = products; p < products + n_products; p++)
            list.push_back({p->out, static_cast<const RtlMatrix*>(p->matrix)});
        of(context).rtl.multiply(x->codes, x->scales, x->n_rows, x->n_cols, x->group_size, list);
        return QUANT_GEMM_OK;
    });
}

const char* error_text() { return latest_error.c_str(); }

const QuantGemmBackend backend = {QUANT_GEMM_VERSION, "rtl",    rank,      open, close, accepts, load,
                                  quantize,           multiply, error_text};

}  // namespace

const QuantGemmBackend* quant_gemm_backend() { return &backend; }
