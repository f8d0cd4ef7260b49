/* Between a program and a back end: a shared library that quantizes activations and multiplies quantized
   matrices by them, on some kind of processor. In plain C, so that anything can be on either side.
   docs/backends.md shows how to write one.

   A back end exports one function, quant_gemm_backend(), which returns a table of functions. Activations and
   outputs are in the program's memory; a back end on a device copies what it needs.

   One thread at a time calls a back end, and what a function does is done when it returns. No exception
   leaves a function. One that can fail returns a QuantGemmStatus; 0 is success. None is null, but that
   quantize may be. */
#ifndef QUANT_GEMM_H
#define QUANT_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cpu/quant_gemm_matrix.h" /* QuantGemmMatrix, QuantGemmRows */

#define QUANT_GEMM_VERSION 8 /* of this file; a program takes no back end of another */

typedef enum QuantGemmStatus {
    QUANT_GEMM_OK = 0,
    QUANT_GEMM_NO_DEVICE = 1,   /* no processor of this kind, or it cannot be used */
    QUANT_GEMM_NO_MEMORY = 2,   /* not enough memory for what was asked */
    QUANT_GEMM_UNSUPPORTED = 3, /* a format, or a group size, that this back end does not multiply */
    QUANT_GEMM_FAILED = 4       /* anything else: error_text() says what */
} QuantGemmStatus;

/* One of the products that read the same activations x. With acc[g] the exact int32 sum, over group g of
   group_size columns, of x's codes times w's (code, code - zero, ...), out[t][i] starts from 0, and for each
   g, first to last, out = fma(float(acc[g]), w's scale * x's scale, out): the product of the scales is
   rounded to fp32, and so is the fused multiply-add, once. docs/numerics.md, "Products". */
typedef struct QuantGemmProduct {
    float* out;         /* (x.n_rows, w.n_rows) */
    const void* matrix; /* w, as load() has it */
} QuantGemmProduct;

/* Items begin .. end - 1 of a loop. */
typedef void (*QuantGemmLoopBody)(void* argument, int64_t begin, int64_t end);

/* Calls body for runs of items that together are 0 .. n - 1, in the program's threads, and returns when all
   are done. */
typedef void (*QuantGemmRunLoop)(int64_t n, QuantGemmLoopBody body, void* argument);

typedef struct QuantGemmBackend {
    uint32_t version; /* QUANT_GEMM_VERSION, first in every version */
    const char* name; /* as in --backend and in the file's name, quant_gemm_NAME.so */

    /* How well this back end runs here; the program takes the highest. 0: not at all. 1: only by name. CPUs
       have 10 to 99, GPUs 100 and more. Called before open, and on any processor: it must not use an
       instruction that may not be there. */
    int32_t (*rank)(void);

    /* *context is what the other functions take. run_loop: the program's threads, for a back end that needs
       some; valid as long as the program. */
    int32_t (*open)(void** context, QuantGemmRunLoop run_loop);
    void (*close)(void* context); /* loaded matrices go with it */

    /* Whether multiply() takes such matrices: QUANT_GEMM_UNSUPPORTED if not. Asked for all of a model's
       before any is loaded. */
    int32_t (*accepts)(void* context, const QuantGemmMatrix* w);

    /* *matrix is what multiply() takes for w: a copy, in the layout and the memory that suit the back end. If
       `in_place` is 1, a back end on a CPU reads w where it lies, and copies nothing; its memory stays.
       Matrices are there until close(). */
    int32_t (*load)(void* context, const QuantGemmMatrix* w, int32_t in_place, void** matrix);

    /* Writes the codes, scales and sums of QuantGemmRows for x, (n_rows, n_cols) fp32. Null: the program does
       it, by what any processor has; a back end for some CPU does it faster. Of each group amax is the
       largest magnitude, NaN not counting; inv = 127 / amax; a code is x * inv, rounded half to even and
       clamped to -127..127, NaN to -127; the scale is amax / 127. Where inv is not finite (amax 0, or
       below 3.74e-37), scale and inv are 0. Every operation is rounded to fp32. */
    int32_t (*quantize)(void* context, int8_t* codes, float* scales, int32_t* sums, const float* x,
                        int32_t n_rows, int32_t n_cols, int32_t group_size);

    /* Products of x with loaded matrices that have its n_cols and group_size. */
    int32_t (*multiply)(void* context, const QuantGemmRows* x, const QuantGemmProduct* products,
                        int32_t n_products);

    const char* (*error_text)(void); /* one line on the latest call that failed, valid until the next call */
} QuantGemmBackend;

/* What a library is seen by from outside. */
#ifdef _WIN32
#define QUANT_GEMM_EXPORT __attribute__((dllexport))
#else
#define QUANT_GEMM_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif
QUANT_GEMM_EXPORT const QuantGemmBackend* quant_gemm_backend(void);
#ifdef __cplusplus
}
#endif

#endif
