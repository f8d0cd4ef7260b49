// The kernels of engine/backend/gpu.cu with every load and store looked at: simt/checks.cpp. What they
// compute is tested in backend_test.cpp.
#include "../engine/backend/gpu.cu"

#include <doctest/doctest.h>

#include <random>

#include "backend_cases.h"

TEST_CASE("the kernels of the GPU's back end: every access is inside, no two threads race") {
    std::mt19937 rng(6);
    for (const LowbitFormat& f : all_formats()) {
        for (const int n_cols : {192, 640}) {
            if (f.group > 0 && n_cols % f.group != 0) continue;
            for (const int group_size : group_sizes(f)) {
                for (const int n_tokens : {1, 5, 9}) {
                    const int n_rows = n_tokens == 9 ? 65 : 5;
                    CAPTURE(format_text(f));
                    CAPTURE(n_cols);
                    CAPTURE(group_size);
                    CAPTURE(n_tokens);
                    const LowbitCase w =
                        make_lowbit(rng, f, group_size, n_rows, n_cols, LowbitFill::uniform, false);
                    Opened b(quant_gemm_backend());  // each time, as its memory for activations only grows
                    if (!accepts(b, w.view())) continue;
                    const Matrix x = filled_matrix(rng, uniform, true, n_tokens, n_cols, group_size);
                    CHECK(outputs(b, x.rows(), w.view()) == plain_outputs(x.rows(), w));
                }
            }
        }
    }
}

TEST_CASE("back ends on a device: what no GPTQ file has is refused") {
    Opened b(quant_gemm_backend());
    auto refused = [&](QuantMatrix w) { return b.api->accepts(b.context, &w) == QUANT_GEMM_UNSUPPORTED; };
    std::mt19937 rng(7);
    const LowbitCase nibbles = make_lowbit(rng, {4, 0, 64}, 64, 3, 64, LowbitFill::uniform, true);
    QuantMatrix w = nibbles.view();
    CHECK_FALSE(refused(w));
    w.zeros = nullptr, w.zero_point = 8;
    CHECK(refused(w));
    w = nibbles.view(), w.scale_type = QUANT_GEMM_ROW_FP32;
    CHECK(refused(w));
    w = nibbles.view(), w.group_size = 16;
    CHECK(refused(w));
    CHECK(refused(filled_matrix(rng, uniform, false, 3, 64, 64).weights()));
}
