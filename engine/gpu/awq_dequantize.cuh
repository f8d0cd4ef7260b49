// AWQ's int4 -> fp16, two weights at a time and without a conversion instruction: in the registers of the
// thread that multiplies by them, or a whole matrix into memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/device.h"
#include "engine/gpu/half2.h"
#include "simt/ptx.h"

// ----------------------------------------------------------------------------
// int4 -> fp16, in registers
//
// 0x6400 is 1024 in fp16, and the lowest of its ten mantissa bits is worth 1. So 0x6400 | q is 1024 + q for a
// nibble q (four bits): setting the bits converts it. One lop3, (word & mask) | 0x64006400, does that for two
// nibbles 16 bits apart; one subtraction removes 1024 and the zero point, exactly. A nibble four bits higher
// gives 1024 + 16 q, and one multiply-add removes the factor, too: (1024 + 16 q) / 16 - (64 + zero) = q -
// zero, also exact. Only the multiplication by the scale rounds.

constexpr unsigned and_or = (0xF0 & 0xCC) | 0xAA;  // lop3's truth table of (a & b) | c: PTX ISA, lop3

// Pair p (0 to 3) of eight nibbles: the one at bit 4p and the one at bit 4p + 16, each + 1024 if p is even,
// * 16 + 1024 if it is odd.
__device__ inline half2 with_magic(uint32_t nibbles, int p) {
    const uint32_t mask = p % 2 == 0 ? 0x000f000f : 0x00f000f0;
    return as_half2(lop3<and_or>(p >= 2 ? nibbles >> 8 : nibbles, mask, 0x64006400));
}

// Zero points and scales of a word's eight columns, each in both halves of a register. Columns 2p and 2p + 1
// are pair p.
struct Columns {
    half2 zero[8];  // 1024 + zero point if the column's pair is even, -(64 + zero point) if it is odd
    half2 scale[8];
};

__device__ inline Columns columns_of(uint32_t zeros, uint4 scales) {
    Columns c;
    const uint32_t packed[4] = {scales.x, scales.y, scales.z, scales.w};
    for (int p = 0; p < 4; p++) {
        half2 zero = with_magic(zeros, p);
        if (p % 2 == 1) zero = __hmul2(zero, __float2half2_rn(-1.0f / 16));
        const half2 scale = as_half2(packed[p]);
        c.zero[2 * p] = __half2half2(__low2half(zero));
        c.zero[2 * p + 1] = __half2half2(__high2half(zero));
        c.scale[2 * p] = __half2half2(__low2half(scale));
        c.scale[2 * p + 1] = __half2half2(__high2half(scale));
    }
    return c;
}

// The weights of column 2p (2p + 1 if `odd`) in two rows. nibbles: the even (odd) columns of one row in the
// low half, of the other row in the high half.
__device__ inline uint32_t dequantize(uint32_t nibbles, int p, int odd, const Columns& c) {
    const half2 q = with_magic(nibbles, p);
    const half2 difference = p % 2 == 0 ? __hsub2(q, c.zero[2 * p + odd])
                                        : __hfma2(q, __float2half2_rn(1.0f / 16), c.zero[2 * p + odd]);
    return as_bits(__hmul2(difference, c.scale[2 * p + odd]));
}

// The tensor core's operand A has 16 rows by 16 columns of fp16: here 16 output channels by 16 inputs. Lane
// 4g + t holds, of rows g and g + 8, the columns 2t, 2t + 1, 2t + 8, 2t + 9 (PTX ISA, mma.m16n8k16). It makes
// them from four words, one for each of these four inputs: columns 2p and 2p + 1 of a word (pair p) become
// rows g and g + 8. A register of operand A holds two inputs of one output channel, but half a word holds
// channels of one input only. So pair_rows() first exchanges halves between two words: four prmt, then all 32
// weights of the four words are in place.
struct RowPairs {
    uint32_t even[2], odd[2];  // nibbles of the even (odd) columns in inputs 2t, 2t + 1, and 2t + 8, 2t + 9
};

__device__ inline RowPairs pair_rows(uint32_t w0, uint32_t w1, uint32_t w8, uint32_t w9) {
    constexpr uint32_t low_halves = 0x5410, high_halves = 0x7632;
    return {{prmt(w0, w1, low_halves), prmt(w8, w9, low_halves)},
            {prmt(w0, w1, high_halves), prmt(w8, w9, high_halves)}};
}

__device__ inline void dequantize(uint32_t (&a)[4], const RowPairs& w, int p, const Columns& c) {
    a[0] = dequantize(w.even[0], p, 0, c);
    a[1] = dequantize(w.odd[0], p, 1, c);
    a[2] = dequantize(w.even[1], p, 0, c);
    a[3] = dequantize(w.odd[1], p, 1, c);
}

// ----------------------------------------------------------------------------
// Expanding a matrix: awq_dequantize

// out (n_in, n_out), the weights as fp16. grid: (words of a row / 256, n_in); one thread per word.
static __global__ void awq_dequantize(AwqMatrix w, half* out) {
    const int row_words = w.n_out / 8, word = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (word >= row_words) return;
    const int group = row / w.group_size;
    const Columns columns =
        columns_of(w.qzeros[size_t(group) * row_words + word],
                   *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.n_out + 8 * word));
    const uint32_t nibbles = w.qweight[size_t(row) * row_words + word];
    uint32_t pairs[4];
    for (int p = 0; p < 4; p++) {  // the halves of the word are columns 2p and 2p + 1 of one row
        const half2 even = as_half2(dequantize(nibbles, p, 0, columns)),
                    odd = as_half2(dequantize(nibbles, p, 1, columns));
        pairs[p] = as_bits(__halves2half2(__low2half(even), __high2half(odd)));
    }
    *reinterpret_cast<uint4*>(out + size_t(row) * w.n_out + 8 * word) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

inline void run_dequantize(const AwqMatrix& w, half* out) {
    launch<awq_dequantize>(
        {.grid = dim3((w.n_out / 8 + 255) / 256, w.n_in), .block = 256, .stream = device().stream}, w, out);
}
