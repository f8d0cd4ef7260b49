// UNROLL(n) before a loop: all of its n passes one after the other. Without it, g++ would keep an array of
// vectors that the loop goes through in memory. UNROLL_BY(n) before a loop of any number of passes: n of them
// at a time. Neither where instructions are emulated, which would take the compiler minutes, nor for nvcc,
// which does not know them. And no UNROLL_BY in WebAssembly: a browser's compiler has 16 registers on x86,
// and keeps a short loop in them.
#pragma once

#if defined(RUNQ_SIMDE) || defined(__CUDACC__)
#define UNROLL(n)
#define UNROLL_BY(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#ifdef __wasm__
#define UNROLL_BY(n) UNROLL(1)
#else
#define UNROLL_BY(n) UNROLL(n)
#endif
#endif
