// See cpu_kernels.h. Nothing here may run before main asks for it: no static object with a constructor.
#include "common/backend/cpu_kernels.h"

#include <cmath>
#include <new>
#include <vector>

#include "common/backend/matrix.h"
#include "common/cpu/lowbit_matmul.h"

namespace {

// Where there are no instructions for it (level `portable`): what int8_quantize does with a group, plainly.
void quantize_group(int8_t* codes, float* scale, int32_t* sum, const float* x, int group_size) {
    float amax = 0;
    for (int i = 0; i < group_size; i++) amax = std::max(amax, std::fabs(x[i]));
    const float inv = choose_scale(scale, amax, nullptr);
    *sum = 0;
    for (int i = 0; i < group_size; i++) {
        const float r = std::nearbyintf(x[i] * inv);
        const float low = r > -127.0f ? r : -127.0f;  // NaN: -127
        codes[i] = int8_t(low < 127.0f ? low : 127.0f);
        *sum += codes[i];
    }
}

// And what lowbit_matmul does: each row is expanded once, and multiplied by all tokens.
void multiply_plainly(const Int8Matrix& x, const LowbitProduct& p) {
    const int n_groups = x.n_groups(), size = x.group_size;
    parallel_ranges(p.w.n_rows, [&](int begin, int end) {
        std::vector<int8_t> codes(size_t(x.n_cols));
        std::vector<float> scales(size_t(x.n_groups()));
        for (int i = begin; i < end; i++) {
            expand_columns(codes.data(), p.w, i, 0, x.n_cols);
            expand_scales(scales.data(), p.w, i);
            for (int t = 0; t < x.n_rows; t++) {
                const int8_t* from = x.row_codes(t);
                float sum = 0;
                for (int g = 0; g < n_groups; g++) {
                    int32_t acc = 0;
                    for (int k = g * size; k < (g + 1) * size; k++) acc += int32_t(from[k]) * codes[k];
                    sum += float(acc) * (scales[g] * x.row_scales(t)[g]);
                }
                p.out[size_t(t) * p.w.n_rows + i] = sum;
            }
        }
    });
}

}  // namespace

void cpu_open(QuantGemmRunLoop loop) noexcept { run_loop = loop; }

void cpu_quantize(const QuantGemmRows& rows, const float* x) noexcept {
    const int n = rows.n_cols, size = rows.group_size, n_groups = n / size;
    for_each_row(rows.n_rows, [&](int t) {
        auto* codes = static_cast<int8_t*>(rows.codes) + size_t(t) * n;
        auto* scales = static_cast<float*>(rows.scales) + size_t(t) * n_groups;
        auto* sums = static_cast<int32_t*>(rows.sums) + size_t(t) * n_groups;
        const float* from = x + size_t(t) * n;
        if (int8_quantize(codes, scales, sums, from, n, size)) return;
        for (int g = 0; g < n_groups; g++)
            quantize_group(codes + g * size, scales + g, sums + g, from + g * size, size);
    });
}

bool cpu_multiply(const QuantGemmRows& x, const QuantGemmProduct* products, int n_products) noexcept try {
    const Int8Matrix rows{static_cast<const int8_t*>(x.codes),
                          static_cast<const float*>(x.scales),
                          static_cast<const int32_t*>(x.sums),
                          x.n_rows,
                          x.n_cols,
                          x.group_size};
    std::vector<LowbitProduct> list;
    for (int i = 0; i < n_products; i++)
        list.push_back({static_cast<float*>(products[i].out), from_c(products[i].w)});
    if (lowbit_matmul(rows, list)) return true;
    for (const LowbitProduct& p : list) multiply_plainly(rows, p);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}
