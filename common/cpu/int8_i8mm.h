// Int8 on Arm with the matrix products of Armv8.6 (i8mm).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/cpu/int8_neon.h"
#include "common/cpu/int8_panels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
// smmla multiplies 2 x 8 codes by 8 x 2 and adds to 2 x 2 int32: twice the products of sdot, given two
// tokens. Few tokens go a row at a time with sdot. Eight codes of a row, or of a token, lie side by side:
// [k / 8][row or token][k % 8], so that a vector is a 2 x 8 block.
struct NeonI8mm : NeonDot {
    static constexpr const char* name = "neon-i8mm";
};

// The same as pack_words in words of 8 bytes.
template <int n>
inline void pack_eights(void* packed, const int8_t* rows, size_t stride, int n_valid, int n_eights) {
    char* to = static_cast<char*>(packed);
    for (int i = 0; i < n_eights; i++) {
        for (int row = 0; row < n; row++, to += 8) {
            if (row < n_valid) {
                std::memcpy(to, rows + row * stride + 8 * i, 8);
            } else {
                std::memset(to, 0, 8);
            }
        }
    }
}
// Pairs of tokens, always.
template <>
constexpr int tile_width<NeonI8mm>(int) {
    return NeonI8mm::tile_tokens;
}
template <>
inline void pack_tokens<NeonI8mm>(const PackedTokens& to, const Int8Matrix& x, int t) {
    const int n_valid = std::min(NeonI8mm::tile_tokens, x.n_rows - t), n_groups = x.n_groups();
    pack_eights<NeonI8mm::tile_tokens>(to.codes, x.row_codes(t), x.n_cols, n_valid, x.n_cols / 8);
    pack_words<NeonI8mm::tile_tokens>(to.scales, NeonI8mm::tile_tokens, x.row_scales(t), n_groups, n_valid,
                                      n_groups, 0);
}
template <>
inline void pack_codes<NeonI8mm>(uint32_t* to, const Int8Matrix& w, int i, int k, int n_cols) {
    pack_eights<panel_rows<NeonI8mm>>(to, w.row_codes(i) + k, w.n_cols, w.n_rows - i, n_cols / 8);
}

template <>
constexpr size_t packed_place<NeonI8mm>(int row, int k) {
    return (size_t(k / 8) * panel_rows<NeonI8mm> + row) * 8 + k % 8;
}

// 2 * n_pairs tokens; those past the last one are zeros. Until the row is complete, `out` holds the 2 x 2
// blocks as they are, and then out[token][row].
template <int n_pairs>
inline void tile_i8mm(float* out, PackedTokens x, PackedPanel w, const Block& block, Ahead& next) {
    Ahead ahead = next;  // a copy, so that it stays in registers
    // [pair][i]: rows 2i and 2i + 1 of the panel times the pair's two tokens, as smmla leaves them:
    // (row 0, token 0), (row 0, token 1), (row 1, token 0), (row 1, token 1).
    constexpr int n_rows = panel_rows<NeonI8mm>, row_pairs = n_rows / 2;
    const int8_t *x_codes = reinterpret_cast<const int8_t*>(x.codes),
                 *w_codes = reinterpret_cast<const int8_t*>(w.codes);
    auto at = [&](int j, int i) { return out + (j * row_pairs + i) * 4; };
    float32x4_t sums[n_pairs][row_pairs];
    for (int j = 0; j < n_pairs; j++) {
        for (int i = 0; i < row_pairs; i++) sums[j][i] = block.first ? vdupq_n_f32(0) : vld1q_f32(at(j, i));
    }
    for (int g = 0; g < block.n_groups; g++, x.scales += NeonI8mm::tile_tokens, w.scales += n_rows) {
        int32x4_t acc[n_pairs][row_pairs];
        for (int j = 0; j < n_pairs; j++) {
            for (int i = 0; i < row_pairs; i++) {
                acc[j][i] = block.resumes ? vreinterpretq_s32_f32(vld1q_f32(at(j, i))) : vdupq_n_s32(0);
            }
        }
        for (int k = 0; k < block.group_size;
             k += 8, x_codes += 8 * NeonI8mm::tile_tokens, w_codes += 8 * n_rows) {
            ahead.prefetch();  // twice: for eight columns
            ahead.prefetch();
            int8x16_t rows[row_pairs];
            for (int i = 0; i < row_pairs; i++) rows[i] = vld1q_s8(w_codes + 16 * i);
            for (int j = 0; j < n_pairs; j++) {
                const int8x16_t tokens = vld1q_s8(x_codes + 16 * j);
                for (int i = 0; i < row_pairs; i++) acc[j][i] = vmmlaq_s32(acc[j][i], rows[i], tokens);
            }
        }
        for (int j = 0; j < n_pairs; j++) {
            const float32x2_t two = vld1_f32(x.scales + 2 * j);
            const float32x4_t xs = vcombine_f32(two, two);
            for (int i = 0; i < row_pairs; i++) {
                if (block.suspends) {
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
    if (block.suspends) return;
    for (int j = 0; j < n_pairs; j++) {
        for (int i = 0; i < row_pairs; i++) {
            if (!block.last) vst1q_f32(at(j, i), sums[j][i]);
        }
        for (int i = 0; i < row_pairs && block.last;
             i += 2) {  // even lanes are the first token's, odd ones the second's
            vst1q_f32(out + 2 * j * n_rows + 2 * i, vuzp1q_f32(sums[j][i], sums[j][i + 1]));
            vst1q_f32(out + (2 * j + 1) * n_rows + 2 * i, vuzp2q_f32(sums[j][i], sums[j][i + 1]));
        }
    }
}
template <>
inline void tile_of<NeonI8mm>(int n_tokens, float* out, const PackedTokens& x, const PackedPanel& w,
                              const Block& block, Ahead& next) {
    auto* pairs = n_tokens > 6   ? tile_i8mm<4>
                  : n_tokens > 4 ? tile_i8mm<3>
                  : n_tokens > 2 ? tile_i8mm<2>
                                 : tile_i8mm<1>;
    pairs(out, x, w, block, next);
}
#endif
