// UNROLL(n) before a loop: all of its n passes one after the other. Without it, g++ would keep an array of
// vectors that the loop goes through in memory. Not where instructions are emulated, which would take the
// compiler minutes, nor for nvcc, which does not know it. Nor in WebAssembly: its compilers are clang++,
// which needs no such request, and then the browser's, which has 16 registers on x86 and keeps a short loop
// in them.
#pragma once

#if defined(RUNQ_SIMDE) || defined(__CUDACC__) || defined(__wasm__)
#define UNROLL(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#endif
