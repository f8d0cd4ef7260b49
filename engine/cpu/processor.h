// Which instructions this processor has, asked when a program runs by app/levels.cpp and backend/cpu.cpp:
// levels of them, for what is compiled more than once. One build chooses in instructions.h.
//
// For sources that are compiled for any processor of the architecture. All is static: of an inline function
// the linker would keep one copy, perhaps another source's, for processors that have more.
#pragma once

#include <cstddef>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum Level { portable, avx2, avxvnni, avx512vnni, neon, dotprod, i8mm };
// The higher, the faster; by Level.
constexpr int level_ranks[] = {0, 20, 30, 40, 20, 30, 40};

#if defined(__aarch64__) && defined(__APPLE__)
// Apple's developer documentation, "Determining instruction set characteristics".
static bool apple_has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

// Whether this processor, and its operating system, have the level's instructions.
[[maybe_unused]] static bool processor_has(Level level) {
#if defined(__x86_64__)
    // Intel SDM, CPUID and XGETBV. The compilers' own function (GCC manual, "x86 Built-in Functions") says no
    // to everything in zig. kept: registers that the operating system saves.
    unsigned a = 0, b = 0, c = 0, d = 0, kept = 0;
    constexpr unsigned fma_osxsave_avx_f16c = 1u << 12 | 7u << 27, f_dq_bw_vl = 3u << 16 | 3u << 30;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (~c & fma_osxsave_avx_f16c) != 0) return level == portable;
    asm("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b >> 5 & 1) == 0 || (~kept & 6) != 0)
        return level == portable;
    if (level == avx2) return true;
    if (level == avx512vnni) return (~kept & 0xe6) == 0 && (~b & f_dq_bw_vl) == 0 && (c >> 11 & 1) != 0;
    if (level == avxvnni) return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
#elif defined(__aarch64__)
#ifdef __APPLE__
    const bool has_dotprod = apple_has("hw.optional.arm.FEAT_DotProd");
    const bool has_i8mm = has_dotprod && apple_has("hw.optional.arm.FEAT_I8MM");
#else  // Linux, Documentation/arch/arm64/elf_hwcaps.rst: AT_HWCAP's ASIMDDP, AT_HWCAP2's I8MM
    const bool has_dotprod = (getauxval(AT_HWCAP) >> 20 & 1) != 0;
    const bool has_i8mm = has_dotprod && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
#endif
    if (level == neon || (level == dotprod && has_dotprod)) return true;
    if (level == i8mm) return has_i8mm;
#endif
    return level == portable;
}
