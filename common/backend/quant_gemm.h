/* Between a program and a back end: a shared library that quantizes activations and multiplies low-bit
   matrices by them, on some kind of processor. In plain C, so that anything can be on either side.
   docs/backends.md shows how to write one.

   A back end exports one function, quant_gemm_backend(), which returns a table of functions. Memory is the
   back end's: it hands out opaque addresses, which the program stores and passes back as they are, without
   arithmetic. Where they are ordinary memory (host_memory), any address of the program's will do, and nothing
   has to be uploaded.

   One thread at a time calls a back end. Calls take effect in their order. quantize and multiply may return
   before their work is done; download waits for it, and upload has read its source when it returns. Where
   there is nothing to download (host_memory), everything is done on return. No exception leaves a function.
   One that can fail returns a QuantGemmStatus; 0 is success. */
#ifndef QUANT_GEMM_H
#define QUANT_GEMM_H

#include <stddef.h>
#include <stdint.h>

#define QUANT_GEMM_VERSION 4 /* of this file; a program takes no back end of another */

typedef enum QuantGemmStatus {
    QUANT_GEMM_OK = 0,
    QUANT_GEMM_NO_DEVICE = 1,   /* no processor of this kind, or it cannot be used */
    QUANT_GEMM_NO_MEMORY = 2,   /* not enough memory for what was asked */
    QUANT_GEMM_UNSUPPORTED = 3, /* a format, or a group size, that this back end does not multiply */
    QUANT_GEMM_FAILED = 4       /* anything else: error_text() says what */
} QuantGemmStatus;

/* A matrix of n_rows output channels and n_cols input channels, laid out as in a model file: see
   docs/model-files.md. Value (i, k), with s = k / group, is

       8 bits           code * scale
       4 bits, 2 bits   (code - zero) * scale
       two levels       (5 * code - high nibble of levels) * (low nibble of levels * row_scale)
       2:4 sparse       (code - zero) * scale where the mask has a 1, otherwise 0

   Of the addresses a format has some; the others are null.

   Packed, the rows are in blocks of 16. A block lies where its rows did. Value j of its row i, with n values
   a row, is at [j][i] and no longer at [i][j]: of the codes and the mask, in words of 4 bytes; and of scales,
   zeros and levels. The last rows, fewer than 16, are as in the file. A packed mask keeps two of each four
   columns. */
typedef struct QuantGemmMatrix {
    const void* codes;  /* (n_rows, n_cols * bits / 8) bytes, half as many if sparse; 8 bits: int8 */
    const void* mask;   /* (n_rows, n_cols / 8) bytes, bit k % 8 of byte k / 8; 2:4 sparse only */
    const void* scales; /* (n_rows, n_cols / group) fp16 */
    const void* zeros;  /* (n_rows, (n_cols / group + 1) / 2) bytes, two each, the first in the low half */
    const void* levels; /* (n_rows, n_cols / group) bytes; two levels only */
    const void* row_scales; /* (n_rows,) fp32; two levels, or 8 bits where a row is one group */
    int32_t bits;           /* of a code: 2, 4 or 8 */
    int32_t n_rows, n_cols; /* n_cols is a multiple of 64 */
    int32_t group;          /* columns that share a scale: 32, 64, 128 or n_cols, a multiple of group_size */
    int32_t group_size;     /* activations that share a scale: 32 or 64 */
    int32_t packed;         /* 1: in blocks of rows, 0: as in the file */
} QuantGemmMatrix;

/* Quantized activations, a row for each token. Value (t, k) is codes[t][k] * scales[t][k / group_size]. */
typedef struct QuantGemmRows {
    void* codes;  /* (n_rows, n_cols) int8, each in -127..127 */
    void* scales; /* (n_rows, n_cols / group_size) fp32 */
    void* sums;   /* (n_rows, n_cols / group_size) int32, the sum of each group's codes */
    int32_t n_rows, n_cols, group_size;
} QuantGemmRows;

/* One of the products that read the same activations x. With acc[g] the exact int32 sum, over group g of
   group_size columns, of x's codes times w's (code, code - zero, ...), out[t][i] is the fp32 sum over g of
   acc[g] * (w's scale * x's scale), in any order. */
typedef struct QuantGemmProduct {
    void* out; /* (x.n_rows, w.n_rows) fp32 */
    QuantGemmMatrix w;
} QuantGemmProduct;

/* Items begin .. end - 1 of a loop. */
typedef void (*QuantGemmLoopBody)(void* argument, int64_t begin, int64_t end);

/* Calls body for runs of items that together are 0 .. n - 1, in the program's threads, and returns when all
   are done. */
typedef void (*QuantGemmRunLoop)(int64_t n, QuantGemmLoopBody body, void* argument);

typedef struct QuantGemmBackend {
    uint32_t version;     /* QUANT_GEMM_VERSION, first in every version */
    uint32_t host_memory; /* 1: addresses are the program's own */
    const char* name;     /* as in --backend and in the file's name, quant_gemm_NAME.so */

    /* How well this back end runs here; the program takes the highest. 0: not at all. 1: only by name. CPUs
       have 10 to 99, GPUs 100 and more. Called before open, and on any processor: it must not use an
       instruction that may not be there. */
    int32_t (*rank)(void);

    /* *context is what the other functions take. run_loop: the program's threads, for a back end that needs
       some; valid as long as the program. */
    int32_t (*open)(void** context, QuantGemmRunLoop run_loop);
    void (*close)(void* context); /* memory that was not released goes with it */

    /* Asked for each matrix, with addresses of the program's, before anything is uploaded. Whether multiply()
       takes its format: QUANT_GEMM_UNSUPPORTED if not. Where addresses are the program's own, it may ask with
       `packed` first, and packs the matrix if the answer is yes; if not, it asks again without. */
    int32_t (*accepts)(void* context, const QuantGemmMatrix* w);

    int32_t (*allocate)(void* context, void** memory, size_t n_bytes); /* for any type; contents undefined */
    void (*release)(void* context, void* memory);
    int32_t (*upload)(void* context, void* to, const void* from, size_t n_bytes); /* `from`: the program's */
    int32_t (*download)(void* context, void* to, const void* from, size_t n_bytes); /* `to`: the program's */

    /* Fills in the codes, scales and sums of `rows`, whose sizes are set, from x, (n_rows, n_cols) fp32. Of
       each group amax is the largest magnitude, NaN not counting; inv = 127 / amax; a code is x * inv,
       rounded half to even and clamped to -127..127, NaN to -127; the scale is amax / 127. Where inv is
       not finite (amax 0, or below 3.74e-37), scale and inv are 0. Every operation is rounded to fp32. */
    int32_t (*quantize)(void* context, const QuantGemmRows* rows, const void* x);

    /* Products of x with matrices that have its n_cols and group_size. */
    int32_t (*multiply)(void* context, const QuantGemmRows* x, const QuantGemmProduct* products,
                        int32_t n_products);

    const char* (*error_text)(void); /* one line on the latest call that failed, valid until the next call */
} QuantGemmBackend;

#ifdef __cplusplus
extern "C" {
#endif
__attribute__((visibility("default"))) const QuantGemmBackend* quant_gemm_backend(void);
#ifdef __cplusplus
}
#endif

#endif
