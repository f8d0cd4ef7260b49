// Back end on this CPU, for one level of its instructions: everything but the two kernels, which
// cpu_kernels.cpp has.
//
// This file is compiled for any processor of the architecture and the other one for those with BACKEND's
// instructions. So rank() can run anywhere, and nothing of the other file does before it said that it may.
// There is no template and no inline function here: of those the linker would keep one copy of the two.
#include <cstdlib>
#include <cstring>

#include "common/backend/cpu_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace {

thread_local const char* latest_error = "no error";

int32_t fail(QuantGemmStatus status, const char* why) {
    latest_error = why;
    return status;
}

enum Level { portable, avx2, avxvnni, avx512vnni, neon, dotprod, i8mm };
#define TEXT(x) #x
#define NAME(x) TEXT(x)
constexpr Level level = BACKEND;

// Whether this processor, and its operating system, have the level's instructions.
bool supported() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // Intel SDM, CPUID: leaf 1, ecx bit 29 is F16C; leaf 7, subleaf 1, eax bit 4 is AVX-VNNI. Their registers
    // are AVX2's.
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
    const bool vnni256 = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    if (level == avx2) return has_avx2;
    if (level == avxvnni) return has_avx2 && vnni256;
    if (level == avx512vnni) {
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
#elif defined(__aarch64__)
    // Linux, Documentation/arch/arm64/elf_hwcaps.rst: bit 20 of AT_HWCAP is ASIMDDP, bit 13 of AT_HWCAP2
    // I8MM.
    const bool has_dotprod = (getauxval(AT_HWCAP) >> 20 & 1) != 0;
    if (level == neon) return true;
    if (level == dotprod) return has_dotprod;
    if (level == i8mm) return has_dotprod && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
#endif
    return level == portable;
}

int32_t rank() {
    constexpr int32_t ranks[] = {10, 20, 30, 40, 20, 30, 40};  // by Level
    return supported() ? ranks[level] : 0;
}

int32_t open(void** context, QuantGemmRunLoop run_loop) {
    *context = nullptr;
    if (!supported()) return fail(QUANT_GEMM_NO_DEVICE, "this processor lacks its instructions");
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
