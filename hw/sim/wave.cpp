// wave VCD: a product of 2 tokens with 4 outputs of 4 inputs, one tile of an array of 4 x 4, as docs/rtl.md
// draws it.
#include <cstdio>
#include <exception>

#include "hw/sim/matmul_rtl.h"

int main(int argc, char** argv) {
    if (argc != 2) return std::fprintf(stderr, "usage: wave FILE.vcd\n"), 2;
    try {
        MatmulRtl rtl;
        const int8_t x[] = {1, 2, 3, 4, 5, 6, 7, 8};
        const int8_t w[] = {1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, -1, 2, -3, 4};
        const float x_scales[] = {0.5f, 0.25f}, w_scales[] = {1, 2, 1, 0.5f};
        rtl.load(x, x_scales, 2, 4, 4);
        const RtlMatrix matrix = rtl.pack(RtlFormat::int8, w, nullptr, w_scales, 4, 4, 4);
        rtl.trace_to(argv[1]);
        float out[8];
        rtl.multiply(matrix, out, 4);
        for (int t = 0; t < 2; t++)
            std::printf("%g %g %g %g\n", out[4 * t], out[4 * t + 1], out[4 * t + 2], out[4 * t + 3]);
    } catch (const std::exception& e) {
        return std::fprintf(stderr, "wave: %s\n", e.what()), 1;
    }
}
