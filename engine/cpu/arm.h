// Instruction sets of Arm (instructions.h): Armv8.0, and with the dot products of Armv8.2.
#pragma once

#include <arm_neon.h>

#include "engine/cpu/int8.h"

// NEON multiplies signed by signed bytes, so w stays as it is. A vector holds only four int32, and a panel is
// two of them, so that a token's four codes, once loaded, serve twice.
struct Neon : VectorOps<FourLanes> {
    static constexpr const char* name = "neon";
    static constexpr int panel_vectors = 2, tile_tokens = 8;
    // Armv8.0: products in int16 (smull), two neighbours added in int16 (addp), two of these in int32
    // (sadalp). As with AVX2, two products stay within int16: 2 * 127 * 128 = 32512.
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const int8x16_t wb = vreinterpretq_s8_s32(w), xb = vreinterpretq_s8_s32(x);
        const int16x8_t low = vmull_s8(vget_low_s8(wb), vget_low_s8(xb));
        return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(wb, xb)));
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return vfmaq_f32(sums, vcvtq_f32_s32(acc), scales);
    }
    // fcvtns rounds half to even (Arm ARM, FCVTNS).
    static void store_codes(int8_t* codes, Floats a, Floats b, Floats c, Floats d) {
        const auto rounded = [](Floats v) {
            const float32x4_t low = vdupq_n_f32(-127);
            const float32x4_t at_least = vbslq_f32(vcgtq_f32(v, low), v, low);  // NaN: becomes -127
            return vmovn_s32(vcvtnq_s32_f32(vminq_f32(at_least, vdupq_n_f32(127))));
        };
        const int16x8_t ab = vcombine_s16(rounded(a), rounded(b)), cd = vcombine_s16(rounded(c), rounded(d));
        vst1q_s8(codes, vcombine_s8(vmovn_s16(ab), vmovn_s16(cd)));
    }
};

#ifdef __ARM_FEATURE_DOTPROD
// One instruction for all of dot4 (sdot): signed by signed, straight into int32.
struct NeonDot : Neon {
    static constexpr const char* name = "neon-dotprod";
    static Ints dot4(Ints acc, Ints w, Ints x) {
        return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
    }
};
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
// With the matrix products of Armv8.6, which tile_i8mm.h takes for several tokens; one goes by sdot.
struct NeonI8mm : NeonDot {
    static constexpr const char* name = "neon-i8mm";
};
#endif
