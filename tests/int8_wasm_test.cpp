// The cases of quant_matmul_test.cpp and lowbit_matmul_test.cpp with WebAssembly's intrinsics emulated by
// SIMDe, in place of <wasm_simd128.h>. `make test-web-node` runs them in WebAssembly itself.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/wasm/simd128.h>

// Now the kernels may believe that this is WebAssembly. Compiled without -march, so that they choose no
// other.
#define RUNQ_SIMDE
#define __wasm_simd128__ 1
#include "engine/cpu/quant_matmul.cpp"
#include "lowbit_matmul_test.cpp"
#include "quant_matmul_test.cpp"
