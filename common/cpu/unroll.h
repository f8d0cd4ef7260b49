// UNROLL(n) before a loop: all of its n passes one after the other. Without it, g++ would keep an array of
// vectors that the loop goes through in memory. Not where instructions are emulated, which would take the
// compiler minutes, nor for nvcc, which does not know it.
#pragma once

#if defined(RUNQ_SIMDE) || defined(__CUDACC__)
#define UNROLL(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#endif
