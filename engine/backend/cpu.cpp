// Back end on this CPU, for one level of its instructions (BACKEND): the table of functions, those that are
// called before open() has succeeded, and errors. cpu_kernels.cpp has the rest.
//
// This file is compiled for any processor of the architecture, the other one for those with BACKEND's
// instructions. So rank() and open() run anywhere, and keep the other file from running where it cannot.
// There is no template and no inline function here: the linker would keep one copy for both files.
#include "engine/backend/cpu_kernels.h"
#include "engine/cpu/processor.h"

namespace {

thread_local const char* latest_error = "no error";
const char* error_text() { return latest_error; }

#define TEXT(x) #x
#define NAME(x) TEXT(x)
constexpr Level level = BACKEND;

int32_t rank() { return processor_has(level) ? level_ranks[level] : 0; }

int32_t open(void** context, QuantGemmRunLoop run_loop) {
    if (processor_has(level)) return cpu_open(context, run_loop);
    return cpu_fail(QUANT_GEMM_NO_DEVICE, "this processor lacks its instructions");
}

int32_t accepts(void*, const QuantGemmMatrix* w) {
    return w->group_size == 32 || w->group_size == 64
               ? QUANT_GEMM_OK
               : cpu_fail(QUANT_GEMM_UNSUPPORTED, "groups of activations have to be of 32 or 64");
}

constexpr QuantGemmBackend backend = {QUANT_GEMM_VERSION, NAME(BACKEND), rank,     open,
                                      cpu_close,          accepts,       cpu_load, cpu_quantize,
                                      cpu_multiply,       error_text};

}  // namespace

int32_t cpu_fail(QuantGemmStatus status, const char* why) noexcept {
    latest_error = why;
    return status;
}
const QuantGemmBackend* quant_gemm_backend() { return &backend; }
