// Tiles on Arm with the matrix products of Armv8.6 (i8mm).
//
// smmla multiplies 2 x 8 codes by 8 x 2 and adds to 2 x 2 int32: twice the products of sdot, given two
// tokens. Eight codes of a token lie side by side: [k / 8][token][k % 8], so that a vector is two tokens.
// Weights lie as for every instruction set, a word of four codes to a row; two zips of two vectors make pairs
// of rows of eight codes each, once for all tokens.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/cpu/tile_kernel.h"

// Pairs of tokens, always.
template <>
constexpr int tile_width<NeonI8mm>(int) {
    return NeonI8mm::tile_tokens;
}
template <>
inline void pack_tokens<NeonI8mm>(int8_t* codes, float* scales, int32_t*, int width, const QuantRows& x,
                                  int t) {
    const int n_valid = std::min(width, x.n_rows - t), groups = n_groups(x);
    for (int k = 0; k < x.n_cols; k += 8) {
        for (int j = 0; j < width; j++, codes += 8) {
            std::memset(codes, 0, 8);
            if (j < n_valid) std::memcpy(codes, row_codes(x, t + j) + k, 8);
        }
    }
    pack_words<NeonI8mm::tile_tokens>(scales, width, row_scales(x, t), groups, n_valid, groups, 0);
}

// As tile() for 2 * n_pairs tokens; those past the last one are zeros. Until the row is complete, `out` holds
// 2 x 2 blocks as smmla leaves them: (row 0, token 0), (row 0, token 1), (row 1, token 0), (row 1, token 1).
template <bool once, int n_pairs>
inline void tile_i8mm(float* out, PackedTokens x, BlockColumns w, const RowPart& part, Prefetcher& next) {
    Prefetcher ahead = next;  // a copy, so that it stays in registers
    constexpr int width = NeonI8mm::tile_tokens, row_pairs = 4, n = block_rows<NeonI8mm>;
    auto at = [&](int j, int i) { return out + (2 * j + i / 2) * n + i % 2 * 4; };
    float32x4_t sums[n_pairs][row_pairs];
    for (int j = 0; j < n_pairs; j++)
        for (int i = 0; i < row_pairs; i++) sums[j][i] = part.first ? vdupq_n_f32(0) : vld1q_f32(at(j, i));
    for (int g = 0; g < part.n_groups; g++, x.scales += width, w.scales += n) {
        int32x4_t acc[n_pairs][row_pairs];
        for (int j = 0; j < n_pairs; j++)
            for (int i = 0; i < row_pairs; i++)
                acc[j][i] = part.resumes ? vreinterpretq_s32_f32(vld1q_f32(at(j, i))) : vdupq_n_s32(0);
        for (int k = 0; k < part.group_size; k += 8, x.codes += 8 * width, w.codes += 2 * n) {
            for (int word = 0; word < 2; word++) {
                if constexpr (once) {
                    prefetch_once<4 * n>(
                        reinterpret_cast<const char*>(w.codes + word * n) + prefetch_distance, false);
                } else {
                    ahead.prefetch();
                }
            }
            int8x16_t rows[row_pairs];
            for (int i = 0; i < row_pairs; i += 2) {
                const uint32x4_t low = vld1q_u32(w.codes + 2 * i), high = vld1q_u32(w.codes + n + 2 * i);
                rows[i] = vreinterpretq_s8_u32(vzip1q_u32(low, high));
                rows[i + 1] = vreinterpretq_s8_u32(vzip2q_u32(low, high));
            }
            for (int j = 0; j < n_pairs; j++) {
                const int8x16_t tokens = vld1q_s8(x.codes + 16 * j);
                for (int i = 0; i < row_pairs; i++) acc[j][i] = vmmlaq_s32(acc[j][i], rows[i], tokens);
            }
        }
        for (int j = 0; j < n_pairs; j++) {
            const float32x2_t two = vld1_f32(x.scales + 2 * j);
            const float32x4_t xs = vcombine_f32(two, two);
            for (int i = 0; i < row_pairs; i++) {
                if (part.suspends) {
                    vst1q_f32(at(j, i), vreinterpretq_f32_s32(acc[j][i]));
                    continue;
                }
                const float32x4_t ws =
                    vcombine_f32(vdup_n_f32(w.scales[2 * i]), vdup_n_f32(w.scales[2 * i + 1]));
                sums[j][i] = vfmaq_f32(sums[j][i], vcvtq_f32_s32(acc[j][i]), vmulq_f32(ws, xs));
            }
        }
    }
    next = ahead;
    if (part.suspends) return;
    for (int j = 0; j < n_pairs; j++) {
        for (int i = 0; i < row_pairs && !part.last; i++) vst1q_f32(at(j, i), sums[j][i]);
        for (int i = 0; i < row_pairs && part.last; i += 2) {
            // Even lanes are the first token's, odd ones the second's.
            vst1q_f32(out + 2 * j * n + 2 * i, vuzp1q_f32(sums[j][i], sums[j][i + 1]));
            vst1q_f32(out + (2 * j + 1) * n + 2 * i, vuzp2q_f32(sums[j][i], sums[j][i + 1]));
        }
    }
}
template <>
inline void multiply_columns<Int8Format<NeonI8mm>, 8>(int n_tokens, float* out, PackedTokens x,
                                                      BlockColumns w, const RowPart& part, bool once,
                                                      Prefetcher& next) {
    static constexpr decltype(&tile_i8mm<true, 1>) tiles[2][4] = {
        {tile_i8mm<false, 1>, tile_i8mm<false, 2>, tile_i8mm<false, 3>, tile_i8mm<false, 4>},
        {tile_i8mm<true, 1>, tile_i8mm<true, 2>, tile_i8mm<true, 4>, tile_i8mm<true, 4>}};
    for (int r = 0; r < block_rows<NeonI8mm>; r += 8)
        tiles[once][(n_tokens - 1) / 2](out + r, x, w.from(r), part, next);
}
