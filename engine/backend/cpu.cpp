// Back end on this CPU, for one level of its instructions: everything but the two kernels, which
// cpu_kernels.cpp has.
//
// This file is compiled for any processor of the architecture and the other one for those with BACKEND's
// instructions. So rank() can run anywhere, and nothing of the other file does before it said that it may.
// There is no template and no inline function here: of those the linker would keep one copy of the two.
#include <cstdlib>
#include <cstring>

#include "engine/backend/cpu_kernels.h"
#include "engine/cpu/processor.h"

namespace {

thread_local const char* latest_error = "no error";

int32_t fail(QuantGemmStatus status, const char* why) {
    latest_error = why;
    return status;
}

#define TEXT(x) #x
#define NAME(x) TEXT(x)
constexpr Level level = BACKEND;

int32_t rank() { return processor_has(level) ? level_ranks[level] : 0; }

int32_t open(void** context, QuantGemmRunLoop run_loop) {
    *context = nullptr;
    if (!processor_has(level)) return fail(QUANT_GEMM_NO_DEVICE, "this processor lacks its instructions");
    *context = cpu_open(run_loop);
    return *context != nullptr ? QUANT_GEMM_OK : fail(QUANT_GEMM_NO_MEMORY, "out of memory");
}
void close(void* context) { cpu_close(context); }

int32_t accepts(void*, const QuantGemmMatrix* w) {
    return w->group_size == 32 || w->group_size == 64
               ? QUANT_GEMM_OK
               : fail(QUANT_GEMM_UNSUPPORTED, "groups of activations have to be of 32 or 64");
}
int32_t load(void* context, const QuantGemmMatrix* w, int32_t in_place, void** matrix) {
    *matrix = cpu_load(context, *w, in_place != 0);
    return *matrix != nullptr ? QUANT_GEMM_OK : fail(QUANT_GEMM_NO_MEMORY, "out of memory");
}

int32_t allocate(void*, void** memory, size_t n_bytes) {
    *memory = std::malloc(n_bytes);
    return *memory != nullptr || n_bytes == 0 ? QUANT_GEMM_OK : fail(QUANT_GEMM_NO_MEMORY, "out of memory");
}
void release(void*, void* memory) { std::free(memory); }
int32_t copy(void*, void* to, const void* from, size_t n_bytes) {
    std::memcpy(to, from, n_bytes);
    return QUANT_GEMM_OK;
}

int32_t quantize(void*, const QuantGemmRows* rows, const float* x) {
    cpu_quantize(*rows, x);
    return QUANT_GEMM_OK;
}
int32_t multiply(void*, const QuantGemmRows* x, const QuantGemmProduct* products, int32_t n_products) {
    return cpu_multiply(*x, products, n_products) ? QUANT_GEMM_OK
                                                  : fail(QUANT_GEMM_NO_MEMORY, "out of memory");
}
const char* error_text() { return latest_error; }

constexpr QuantGemmBackend backend = {
    QUANT_GEMM_VERSION, 1,       NAME(BACKEND), rank, open,     close,    accepts,   load,
    allocate,           release, copy,          copy, quantize, multiply, error_text};

}  // namespace

const QuantGemmBackend* quant_gemm_backend() { return &backend; }
