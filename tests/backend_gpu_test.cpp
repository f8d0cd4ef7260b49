// The kernels of common/backend/gpu.cu with every load and store looked at: simt/checks.cpp. What they
// compute is tested in backend_test.cpp.
#include "../common/backend/gpu.cu"

#include <doctest/doctest.h>

#include <random>

#include "backend_cases.h"

TEST_CASE("the kernels of the GPU's back end: every access is inside, no two threads race") {
    Opened b(quant_gemm_backend());
    std::mt19937 rng(6);
    for (const MatrixFormat& f : all_formats()) {
        for (const int n_cols : {192, 384}) {
            if (f.group > 0 && n_cols % f.group != 0) continue;
            for (const int group_size : group_sizes(f)) {
                for (const int n_tokens : {1, 5, 9}) {
                    const int n_rows = n_tokens == 9 ? 65 : 5;
                    CAPTURE(format_text(f));
                    CAPTURE(n_cols);
                    CAPTURE(group_size);
                    CAPTURE(n_tokens);
                    const LowbitCase w =
                        make_lowbit(rng, f, group_size, n_rows, n_cols, LowbitFill::uniform, true);
                    const Matrix x = filled_matrix(rng, uniform, false, n_tokens, n_cols, group_size);
                    CHECK(outputs(b, x.view(), w.view()) == exact_outputs(x.view(), w));
                }
            }
        }
    }
    const std::vector<float> x = random_values(rng, 3 * 192);
    const QuantGemmRows rows = {b.allocate(3 * 192), b.allocate(72), b.allocate(72), 3, 192, 32};
    CHECK(b.api->quantize(b.context, &rows, b.upload(x.data(), x.size())) == QUANT_GEMM_OK);
    std::vector<int8_t> codes(x.size());
    std::vector<float> scales(18);
    reference_quantize(codes.data(), scales.data(), x.data(), 3 * 192, 32);
    CHECK(b.download<int8_t>(rows.codes, x.size()) == codes);
}
