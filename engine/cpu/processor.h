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
    // Intel SDM, CPUID. Leaf 1, ecx: bit 29 F16C; leaf 7, subleaf 1, eax: bit 4 AVX-VNNI. Of these the
    // compilers' function (GCC manual, "x86 Built-in Functions") does not know in all versions.
    unsigned a = 0, b = 0, c = 0, d = 0;
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
    if (level == avx2) return has_avx2;
    if (level == avxvnni)
        return has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
    if (level == avx512vnni)
        return has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
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
