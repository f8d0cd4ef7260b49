// The int8 kernels: every path against the golden vectors and against the portable loops, which specify them.
#include "common/int8_matmul.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "safetensors.h"

namespace {

const Tensors& golden_ops() {
    static const Tensors ops = read_safetensors("golden/data/ops.safetensors");
    return ops;
}

std::vector<int8_t> random_codes(std::mt19937& rng, size_t n) {
    std::uniform_int_distribution<int> code(-127, 127);
    std::vector<int8_t> codes(n);
    for (int8_t& c : codes) c = static_cast<int8_t>(code(rng));
    return codes;
}

std::vector<float> random_values(std::mt19937& rng, size_t n, float size = 1) {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> values(n);
    for (float& v : values) v = normal(rng);
    return values;
}

}  // namespace

TEST_CASE("quantize: codes and scales are the golden's, bit for bit") {
    for (const int group_size : {16, 32, 64, 128}) {
        CAPTURE(group_size);
        const std::string p = "quantize." + std::to_string(group_size) + ".";
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        const std::vector<int8_t> codes = golden_ops().at(p + "codes").i8();
        const std::vector<float> scales = golden_ops().at(p + "scales").f32();
        const int n = static_cast<int>(x.size());
        REQUIRE(n > 40 * group_size);
        std::vector<int8_t> found_codes(x.size());
        std::vector<float> found_scales(scales.size());
        quantize_portable(found_codes.data(), found_scales.data(), x.data(), n, group_size);
        CHECK(found_codes == codes);
        CHECK(found_scales == scales);
        found_codes.assign(x.size(), 99);
        found_scales.assign(scales.size(), 99);
        quantize(found_codes.data(), found_scales.data(), x.data(), n, group_size);
        CHECK(found_codes == codes);
        CHECK(found_scales == scales);
    }
}

TEST_CASE("quantize: the fast path equals the portable loop on random and extreme values") {
    std::mt19937 rng(1);
    for (int trial = 0; trial < 300; trial++) {
        const int group_size = trial % 2 ? 64 : 32, n = 6 * group_size;
        std::vector<float> x = random_values(rng, n, std::pow(10.0f, float(trial % 70) - 35));
        // Values that lie exactly between two codes: amax is a power of two times 127.
        for (int i = 0; i < group_size; i++) x[i] = (i == 7 ? 127.0f : float(i % 41) - 20.5f) * 0.25f;
        if (trial % 5 == 0) std::fill(x.begin() + group_size, x.begin() + 2 * group_size, 0.0f);
        if (trial % 7 == 0) x[2 * group_size + 3] = std::numeric_limits<float>::infinity();
        if (trial % 11 == 0) x[3 * group_size + 5] = std::numeric_limits<float>::quiet_NaN();
        if (trial % 13 == 0) std::fill(x.begin() + 4 * group_size, x.begin() + 5 * group_size, 1e-38f);
        std::vector<int8_t> a(n), b(n);
        std::vector<float> as(6), bs(6);
        quantize_portable(a.data(), as.data(), x.data(), n, group_size);
        quantize(b.data(), bs.data(), x.data(), n, group_size);
        CHECK(a == b);
        CHECK(as == bs);
        for (const int8_t code : b) CHECK(code >= -127);
    }
}

TEST_CASE("dot products: int32 accumulators are exact in every path") {
    std::mt19937 rng(2);
    for (int trial = 0; trial < 500; trial++) {
        const int n = 32 * (1 + trial % 9);
        std::vector<int8_t> x = random_codes(rng, n), w = random_codes(rng, n);
        if (trial % 4 == 0) std::fill(x.begin(), x.end(), 127);
        if (trial % 4 == 1) std::fill(x.begin(), x.end(), -127);
        if (trial % 3 == 0) std::fill(w.begin(), w.end(), 127);
        if (trial % 3 == 1) std::fill(w.begin(), w.end(), -127);
        if (trial % 10 == 9) std::fill(w.begin(), w.end(), -128);  // not ours, but a foreign file may hold it
        if (trial % 10 == 8) std::fill(w.begin(), w.end(), 0);
        int64_t exact = 0;
        for (int i = 0; i < n; i++) exact += int64_t(x[i]) * w[i];
        CHECK(dot_group_portable(x.data(), w.data(), n) == exact);
#ifdef __AVX2__
        CHECK(dot_group_avx2(x.data(), w.data(), n) == exact);
#endif
    }
}

TEST_CASE("matmul: accumulators and outputs are the golden's") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        const std::string end = ".accumulators";
        if (!name.starts_with("matmul.") || !name.ends_with(end)) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - end.size() + 1);
        CAPTURE(p);
        const int n = tensor.shape[0], m = tensor.shape[1], groups = tensor.shape[2];
        const std::vector<int8_t> x = golden_ops().at(p + "x.codes").i8(),
                                  w = golden_ops().at(p + "w.codes").i8();
        const std::vector<float> xs = golden_ops().at(p + "x.scales").f32(),
                                 ws = golden_ops().at(p + "w.scales").f32();
        const std::vector<int32_t> acc = tensor.i32();
        const int k = static_cast<int>(x.size()) / n, group_size = k / groups;
        for (int i = 0; i < n * m * groups; i++) {
            const int8_t* xg = x.data() + (i / groups / m) * k + (i % groups) * group_size;
            const int8_t* wg = w.data() + (i / groups % m) * k + (i % groups) * group_size;
            CHECK(dot_group_portable(xg, wg, group_size) == acc[i]);
#ifdef __AVX2__
            if (group_size % 32 == 0) CHECK(dot_group_avx2(xg, wg, group_size) == acc[i]);
#endif
        }
        const std::vector<float> expected = golden_ops().at(p + "out").f32();
        std::vector<float> out(expected.size());
        int8_matmul(out.data(), {x.data(), xs.data(), n, k, group_size},
                    {w.data(), ws.data(), m, k, group_size});
        CHECK(relative_error(expected, out) < 1e-6);
        for (int i = 0; i < n * m; i++) {
            out[i] = dot_row_portable(x.data() + (i / m) * k, xs.data() + (i / m) * groups,
                                      w.data() + (i % m) * k, ws.data() + (i % m) * groups, k, group_size);
        }
        CHECK(relative_error(expected, out) < 1e-6);
    }
    CHECK(cases == 5);
}

TEST_CASE("matmul: the same bits for any number of threads and tokens") {
    std::mt19937 rng(3);
    const int n = 13, m = 37, k = 192, group_size = 64;
    const std::vector<int8_t> x = random_codes(rng, n * k), w = random_codes(rng, m * k);
    const std::vector<float> xs = random_values(rng, n * k / group_size),
                             ws = random_values(rng, m * k / group_size);
    std::vector<float> reference(n * m);
    int8_matmul(reference.data(), {x.data(), xs.data(), n, k, group_size},
                {w.data(), ws.data(), m, k, group_size});
    const int threads = omp_get_max_threads();
    for (const int j : {1, 2, 3}) {
        omp_set_num_threads(j);
        std::vector<float> out(n * m);
        int8_matmul(out.data(), {x.data(), xs.data(), n, k, group_size},
                    {w.data(), ws.data(), m, k, group_size});
        CHECK(out == reference);
        for (int t = 0; t < n; t++) {  // a token at a time
            const Int8Matrix one{x.data() + t * k, xs.data() + t * (k / group_size), 1, k, group_size};
            int8_matmul(out.data() + t * m, one, {w.data(), ws.data(), m, k, group_size});
        }
        CHECK(out == reference);
    }
    omp_set_num_threads(threads);
}
