/* A quantized matrix and the activations that it is multiplied by, as kernels and back ends take them. In
   plain C, for the latter: engine/backend/quant_gemm.h. */
#ifndef QUANT_GEMM_MATRIX_H
#define QUANT_GEMM_MATRIX_H

#include <stdint.h>

/* What a code means. Value (i, k) of a matrix, with s = k / group and the scale of row i's group s: */
typedef enum QuantGemmKind {
    QUANT_GEMM_SIGNED = 0,    /* 8 bits: code * scale; codes are int8 */
    QUANT_GEMM_UNSIGNED = 1,  /* 2, 4, 6 bits: (code - zero) * scale */
    QUANT_GEMM_TWO_LEVEL = 2, /* 2 bits: (5 * code - high nibble of level) * (low nibble of level * scale) */
    QUANT_GEMM_SPARSE = 3,    /* 2:4 of 4 bits: (code - zero) * scale where the mask has a 1, otherwise 0 */
    QUANT_GEMM_TABLE = 4      /* 4 bits, 5 bits: table[code] * scale */
} QuantGemmKind;

/* What a matrix has scales of. */
typedef enum QuantGemmScales {
    QUANT_GEMM_ROW_FP32 = 0,   /* (n_rows,) fp32: one per row */
    QUANT_GEMM_GROUP_FP16 = 1, /* (n_rows, n_cols / group) fp16 */
    QUANT_GEMM_GROUP_FP32 = 2, /* (n_rows, n_cols / group) fp32 */
    QUANT_GEMM_GROUP_INT8 = 3  /* (n_rows,) fp32, times int8 of groups in `levels` */
} QuantGemmScales;

/* A matrix of n_rows output channels and n_cols input channels, row after row, laid out as in a model file:
   see docs/model-files.md. Addresses that a kind has no use for are null. */
typedef struct QuantGemmMatrix {
    const uint8_t* codes; /* (n_rows, n_cols * bits / 8), half as many if sparse */
    const uint8_t* mask;  /* (n_rows, n_cols / 8), bit k % 8 of byte k / 8 is column k's, two 1s in each four
                             columns: the program has made sure; sparse only */
    const void* scales;   /* as scale_type says */
    const uint8_t* zeros; /* (n_rows, (n_cols / group + 1) / 2), two each, the first in the low half; null: */
    int32_t zero_point;   /* ... what is taken off all codes */
    const uint8_t* levels;  /* (n_rows, n_cols / group); two levels, and int8 scales */
    const int8_t* table;    /* (2^bits,); QUANT_GEMM_TABLE only */
    int32_t kind;           /* QuantGemmKind */
    int32_t scale_type;     /* QuantGemmScales */
    int32_t bits;           /* of a code: 2, 4, 5, 6 or 8; of 5 and 6 a row is two planes: 4, then 1 or 2 */
    int32_t n_rows, n_cols; /* for less than 8 bits n_cols is a multiple of 64 */
    int32_t group;          /* columns that share a scale: n_cols, or a multiple of group_size */
    int32_t group_size;     /* activations that share a scale; divides n_cols */
} QuantGemmMatrix;

/* Quantized activations, a row for each token. Value (t, k) is codes[t][k] * scales[t][k / group_size]. */
typedef struct QuantGemmRows {
    const int8_t* codes; /* (n_rows, n_cols), each in -127..127 */
    const float* scales; /* (n_rows, n_cols / group_size) */
    const int32_t* sums; /* (n_rows, n_cols / group_size), the sum of each group's codes */
    int32_t n_rows, n_cols, group_size;
} QuantGemmRows;

#endif
