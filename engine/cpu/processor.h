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
constexpr int level_ranks[] = {10, 20, 30, 40, 20, 30, 40};

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
    // Intel SDM, CPUID. Leaf 1, ecx: bits 12 FMA, 27 OSXSAVE, 28 AVX, 29 F16C. Leaf 7, ebx: 5 AVX2, 16
    // AVX512F, 17 AVX512DQ, 30 AVX512BW, 31 AVX512VL; ecx: 11 AVX512_VNNI; subleaf 1, eax: 4 AVX-VNNI.
    constexpr unsigned avx_bits = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
    constexpr unsigned avx512_bits = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    unsigned a = 0, b1 = 0, b7 = 0, c1 = 0, c7 = 0, d = 0;
    const bool has_leaf1 = __get_cpuid(1, &a, &b1, &c1, &d) != 0;
    const bool has_leaf7 = __get_cpuid_count(7, 0, &a, &b7, &c7, &d) != 0;
    // Which registers the system saves (XCR0): bits 1 and 2 are SSE's and AVX's, 5 to 7 AVX-512's.
    unsigned saved = 0;
    if (has_leaf1 && (c1 & avx_bits) == avx_bits) asm volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    const bool has_avx2 = has_leaf7 && (saved & 0x6) == 0x6 && (b7 >> 5 & 1) != 0;
    if (level == avx2) return has_avx2;
    if (level == avx512vnni)
        return has_avx2 && (saved & 0xE6) == 0xE6 && (b7 & avx512_bits) == avx512_bits && (c7 >> 11 & 1) != 0;
    if (level == avxvnni) {
        unsigned b = 0, c = 0;
        return has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
    }
#elif defined(__aarch64__) && defined(__APPLE__)
    const bool has_dotprod = apple_has("hw.optional.arm.FEAT_DotProd");
    if (level == neon) return true;
    if (level == dotprod) return has_dotprod;
    if (level == i8mm) return has_dotprod && apple_has("hw.optional.arm.FEAT_I8MM");
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
