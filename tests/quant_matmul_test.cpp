// Products with int8 weights: every path of this build against the golden vectors and against plain
// arithmetic (int8_cases.h). int8_simde_test.cpp compiles the same cases with emulated intrinsics.
#include "engine/cpu/quant_matmul.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "engine/app/sampler.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_paths.h"
#include "engine/cpu/vector.h"
#include "int8_cases.h"
#include "int8_isas.h"

namespace {

// Whether a path takes groups of this size: whole vectors.
template <class Isa>
bool takes(int group_size) {
    return group_size % (4 * Isa::lanes) == 0;
}

constexpr float untouched = 1e30f;

// x times each of the matrices, as `multiply(x, products)` computes them. Checks that nothing is written
// behind the last output.
template <class Multiply>
std::vector<std::vector<float>> outputs(const QuantRows& x, const std::vector<QuantMatrix>& w,
                                        Multiply multiply) {
    std::vector<std::vector<float>> out;
    std::vector<QuantProduct> list;
    for (const QuantMatrix& m : w) out.emplace_back(size_t(x.n_rows) * m.n_rows + 32, untouched);
    for (size_t i = 0; i < w.size(); i++) list.push_back({out[i].data(), w[i], nullptr});
    multiply(x, list);
    for (size_t i = 0; i < w.size(); i++) {
        const size_t end = size_t(x.n_rows) * w[i].n_rows;
        CHECK(std::count(out[i].begin() + end, out[i].end(), untouched) == 32);
        out[i].resize(end);
    }
    return out;
}

// Calls check(name, multiply) for each way in which products with such groups can be computed: what
// quant_matmul chooses, and, by each instruction set, of matrices as they are and packed, what it would
// choose, and each path whatever the number of tokens.
template <class Check>
void for_each_path(int group_size, Check check) {
    auto packed = [](auto add, const std::vector<QuantProduct>& list) {
        std::vector<QuantProduct> copies = list;
        for (QuantProduct& p : copies) p.packed = add(p.w);
        return copies;
    };
    if (int8_kernel_name(group_size) != std::string("portable")) {
        check("quant_matmul", [](const QuantRows& x, const std::vector<QuantProduct>& list) {
            REQUIRE(quant_matmul(x, list));
        });
        check("quant_matmul, packed", [=](const QuantRows& x, const std::vector<QuantProduct>& list) {
            PackedMatrices memory;
            REQUIRE(quant_matmul(x, packed([&](const auto& w) { return memory.add(w); }, list)));
        });
    }
    for_each_isa([&](auto isa) {
        using Isa = decltype(isa);
        if (!takes<Isa>(group_size)) return;
        const std::string name = Isa::name;
        auto by = [](auto choose) {
            return [=](const QuantRows& x, const std::vector<QuantProduct>& list) {
                multiply_by<Isa, Int8Forms>(x, list, choose);
            };
        };
        check(name, by(choose_kernel));
        check(name + " rows", by([](auto&...) { return ProductKernel::rows; }));
        check(name + " tiles", by([](auto&...) { return ProductKernel::int8; }));
        check(name + " packed", [=](const QuantRows& x, const std::vector<QuantProduct>& list) {
            PackedMatrices memory;
            by(choose_kernel)(x, packed([&](const auto& w) { return memory.add<Isa, Int8Forms>(w); }, list));
        });
    });
}

// The same outputs summed in double precision, from exact accumulators.
std::vector<float> exact_outputs(const Matrix& x, const Matrix& w) {
    std::vector<float> out;
    for (int t = 0; t < x.n_rows; t++) {
        for (int i = 0; i < w.n_rows; i++) {
            double sum = 0;
            for (int g = 0; g < w.n_groups(); g++) {
                const int k = g * w.group_size;
                sum += double(reference_accumulator(x.row_codes(t) + k, w.row_codes(i) + k, w.group_size)) *
                       x.row_scales(t)[g] * w.row_scales(i)[g];
            }
            out.push_back(static_cast<float>(sum));
        }
    }
    return out;
}

}  // namespace

// ----------------------------------------------------------------------------
// Quantizing

TEST_CASE("quantize: codes and scales are the golden's, bit for bit") {
    // Groups, and whole rows.
    for (const auto& [name, group_size] : {std::pair{"16", 16},
                                           {"32", 32},
                                           {"64", 64},
                                           {"128", 128},
                                           {"ties", 64},
                                           {"limits", 32},
                                           {"rowlimits", 64},
                                           {"heads", 20},
                                           {"row64", 64},
                                           {"row384", 384},
                                           {"row2048", 2048}}) {
        const std::string p = std::string("quantize.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        const std::vector<int8_t> codes = golden_ops().at(p + "codes").i8();
        const std::vector<float> scales = golden_ops().at(p + "scales").f32();
        const int n = static_cast<int>(x.size());
        REQUIRE(n >= 4 * group_size);
        std::vector<int8_t> found(x.size());
        std::vector<float> found_scales(scales.size());
        std::vector<int32_t> sums(scales.size());
        reference_quantize(found.data(), found_scales.data(), x.data(), n, group_size);
        CHECK(found == codes);
        CHECK(found_scales == scales);
        found.assign(x.size(), 99);
        found_scales.assign(scales.size(), 99);
        if (int8_quantize(found.data(), found_scales.data(), sums.data(), x.data(), n, group_size)) {
            CHECK(found == codes);
            CHECK(found_scales == scales);
            CHECK(sums == make_matrix(codes, scales, 1, n, group_size).sums);
        } else {
            CHECK(int8_kernel_name(group_size) == std::string("portable"));
            CHECK(std::count(found.begin(), found.end(), 99) == n);
        }
    }
}

TEST_CASE("quantize: codes under a fixed scale are the golden's, bit for bit") {
    for (const char* name : {"one", "two", "tenth", "tiny", "zero", "inverse0", "inverse1", "inverse2",
                             "inverse3", "subnormal"}) {
        CAPTURE(name);
        const std::string p = std::string("quantize_static.") + name + ".";
        const std::vector<float> x = golden_ops().at(p + "x").f32(),
                                 scale = golden_ops().at(p + "scale").f32();
        const std::vector<int8_t> codes = golden_ops().at(p + "codes").i8();
        const int n = static_cast<int>(x.size()), width = 64;
        std::vector<int8_t> found(n);
        std::vector<float> scales(n / width);
        std::vector<int32_t> sums(n / width);
        reference_quantize(found.data(), scales.data(), x.data(), n, width, scale.data());
        CHECK(found == codes);
        found.assign(n, 99);
        if (!int8_quantize(found.data(), scales.data(), sums.data(), x.data(), n, width, scale.data()))
            continue;
        CHECK(found == codes);
        CHECK(sums == make_matrix(codes, scales, 1, n, width).sums);
        CHECK(std::count(scales.begin(), scales.end(), scale[0]) == n / width);
    }
}

TEST_CASE("quantize: the fast path equals plain arithmetic on random and extreme values") {
    std::mt19937 rng(1);
    for (int trial = 0; trial < 400; trial++) {
        const int group_size = 16 << trial % 4, n = 8 * group_size;
        const std::vector<float> x = awkward_groups(rng, trial, group_size);
        std::vector<int8_t> a(n), b(n);
        std::vector<float> as(8), bs(8);
        std::vector<int32_t> sums(8);
        reference_quantize(a.data(), as.data(), x.data(), n, group_size);
        if (!int8_quantize(b.data(), bs.data(), sums.data(), x.data(), n, group_size)) continue;
        CHECK(a == b);
        CHECK(as == bs);
        CHECK(sums == make_matrix(a, as, 1, n, group_size).sums);
        for (const int8_t code : b) CHECK(code >= -127);
    }
}

// ----------------------------------------------------------------------------
// Accumulators

// a * b + c rounded once, by a type that holds it exactly; or by the machine's instruction.
float fused_reference(float a, float b, float c) {
#ifdef __wasm__
    return float(static_cast<long double>(a) * b + c);  // of 128 bits
#else
    return std::fma(a, b, c);
#endif
}

// An accumulator, a scale and a sum for it: any; or, with `tie`, so that the result is halfway between two
// floats but for less than a double can tell, where rounding twice shows.
struct FusedCase {
    int32_t acc;
    float scale, sum;
};
FusedCase fused_case(std::mt19937& rng, bool tie) {
    if (!tie) {
        return {int32_t(rng() % (1u << 26)) - (1 << 25), std::ldexp(float(rng() % (1u << 24)), -40),
                std::ldexp(float(int32_t(rng())), int(rng() % 60) - 70)};
    }
    // The last place of the sum is 2, and the product is 1 - 2^-2n or 1 + 2^-36.
    const int n = 16 + int(rng() % 8);
    const bool below = rng() % 2 != 0;
    const int acc = below ? (1 << n) + 1 : (1 << 12) + 1;
    const float scale =
        below ? std::ldexp(float((1 << n) - 1), -2 * n) : std::ldexp(float((1 << 24) - (1 << 12) + 1), -36);
    const float sum = 2 * float((1 << 23) + int(rng() % (1 << 20)));
    return {rng() % 2 != 0 ? acc : -acc, scale, rng() % 2 != 0 ? sum : -sum};
}

TEST_CASE("a sum of groups is rounded once: fused_by_doubles, and add_scaled of each instruction set") {
    std::mt19937 rng(3);
    int n_twice = 0;  // where two roundings give something else
    for (int trial = 0; trial < 40000; trial++) {
        FusedCase cases[16];
        for (FusedCase& c : cases) c = fused_case(rng, rng() % 4 == 0);
        for (const FusedCase& c : cases) {
            const float expected = fused_reference(float(c.acc), c.scale, c.sum);
            n_twice += float(double(float(c.acc)) * double(c.scale) + double(c.sum)) != expected;
            if (fused_by_doubles(float(c.acc), c.scale, c.sum) == expected &&
                fused_multiply_add(float(c.acc), c.scale, c.sum) == expected)
                continue;
            CAPTURE(c.acc);
            CAPTURE(c.scale);
            CAPTURE(c.sum);
            CHECK(fused_by_doubles(float(c.acc), c.scale, c.sum) == expected);
            CHECK(fused_multiply_add(float(c.acc), c.scale, c.sum) == expected);
        }
        for_each_isa([&](auto isa) {
            using Isa = decltype(isa);
            int32_t acc[Isa::lanes];
            float scales[Isa::lanes], sums[Isa::lanes], found[Isa::lanes];
            for (int i = 0; i < Isa::lanes; i++)
                acc[i] = cases[i].acc, scales[i] = cases[i].scale, sums[i] = cases[i].sum;
            Isa::store(found,
                       Isa::add_scaled(Isa::load_floats(sums), Isa::load(acc), Isa::load_floats(scales)));
            for (int i = 0; i < Isa::lanes; i++) {
                const float expected = fused_reference(float(acc[i]), scales[i], sums[i]);
                if (found[i] == expected) continue;
                CAPTURE(Isa::name);
                CAPTURE(acc[i]);
                CAPTURE(scales[i]);
                CAPTURE(sums[i]);
                CHECK(found[i] == expected);
            }
        });
    }
    CHECK(n_twice > 1000);
}

TEST_CASE("dot4: each int32 lane is exact, and so is their sum") {
    for_each_isa([](auto isa) {
        using Isa = decltype(isa);
        CAPTURE(Isa::name);
        constexpr int lanes = Isa::lanes;
        std::mt19937 rng(2);
        for (const Fill x_fill : activation_fills) {
            for (const Fill w_fill : weight_fills) {
                const Matrix x = filled_matrix(rng, x_fill, false, 1, 4 * lanes, 4 * lanes);
                const Matrix w = filled_matrix(rng, w_fill, false, 1, 4 * lanes, 4 * lanes);
                const int8_t *xc = x.row_codes(0), *wc = w.row_codes(0);
                typename Isa::Ints acc = Isa::splat(-1000000);
                for (int repeat = 0; repeat < 3; repeat++) {
                    acc = Isa::dot4(acc, Isa::flipped(Isa::load(wc)), Isa::load(xc));
                }
                int32_t found[lanes];
                static_assert(sizeof(found) == sizeof(acc));
                std::memcpy(found, &acc, sizeof(acc));
                for (int lane = 0; lane < lanes; lane++) {
                    int32_t expected = -1000000;
                    for (int i = 4 * lane; i < 4 * lane + 4; i++)
                        expected += 3 * (wc[i] + Isa::offset) * xc[i];
                    CHECK(found[lane] == expected);
                }
                const auto b = Isa::splat(1), c = Isa::splat(-2), d = Isa::splat(1 << 20);
                const Int4 sums = Isa::add_lanes(acc, b, c, d);
                CHECK(sums[0] == -1000000 * lanes + 3 * (reference_accumulator(xc, wc, 4 * lanes) +
                                                         Isa::offset * x.sums[0]));
                CHECK(sums[1] == lanes);
                CHECK(sums[2] == -2 * lanes);
                CHECK(sums[3] == (1 << 20) * lanes);
            }
        }
    });
}

TEST_CASE("packing: words of rows become columns, rows that are not there zeros") {
    std::mt19937 rng(8);
    auto check = [&](auto size) {
        constexpr int n = size;
        for (const int n_words : {1, n - 1, n, 3 * n + 1, 64}) {
            for (const int n_valid : {n + 3, n, n - 1, 1}) {
                const int stride = n_words + 5, columns = 2 * n;
                std::vector<uint32_t> rows(size_t(n) * stride), packed(size_t(n_words) * columns, 7);
                for (uint32_t& word : rows) word = rng();
                pack_words<n>(packed.data(), columns, rows.data(), stride, n_valid, n_words, 0x80808080u);
                for (int word = 0; word < n_words; word++) {
                    for (int row = 0; row < columns; row++) {
                        const uint32_t value = row < n_valid ? rows[row % n * stride + word] : 0;
                        CHECK(packed[word * columns + row] == (row < n ? value ^ 0x80808080u : 7));
                    }
                }
            }
        }
    };
    check(std::integral_constant<int, 4>());
    check(std::integral_constant<int, 8>());
    check(std::integral_constant<int, 16>());
}

// With scales of 1 an output is the accumulator itself, as long as it fits into the 24 bits of a float: one
// group of up to 1024, or 3 of up to 256.
TEST_CASE("accumulators: every path gives the exact int32 for random and extreme codes") {
    struct Shape {
        int n_tokens, n_rows, group_size, n_groups;
    };
    const Shape shapes[] = {{1, 1, 64, 1},   {1, 17, 1024, 1}, {5, 3, 32, 3},    {7, 40, 64, 3},
                            {13, 9, 192, 1}, {6, 11, 128, 3},  {17, 16, 256, 3}, {11, 23, 1024, 1},
                            {2, 40, 64, 4},  {3, 19, 32, 2},   {4, 33, 64, 1},   {12, 18, 256, 2}};
    std::mt19937 rng(3);
    for (const Shape& s : shapes) {
        for (const Fill x_fill : activation_fills) {
            for (const Fill w_fill : weight_fills) {
                const int k = s.group_size * s.n_groups;
                const Matrix x = filled_matrix(rng, x_fill, false, s.n_tokens, k, s.group_size);
                const Matrix w = filled_matrix(rng, w_fill, false, s.n_rows, k, s.group_size);
                std::vector<float> exact;
                for (int i = 0; i < s.n_tokens * s.n_rows; i++) {
                    const int8_t *xr = x.row_codes(i / s.n_rows), *wr = w.row_codes(i % s.n_rows);
                    const int32_t acc = reference_accumulator(xr, wr, k);
                    REQUIRE(std::abs(acc) <= 1 << 24);
                    exact.push_back(static_cast<float>(acc));
                }
                for_each_path(s.group_size, [&](const std::string& path, auto multiply) {
                    CAPTURE(path);
                    CAPTURE(s.n_tokens);
                    CAPTURE(s.n_rows);
                    CAPTURE(s.group_size);
                    CAPTURE(x_fill);
                    CAPTURE(w_fill);
                    CHECK(outputs(x.rows(), {w.weights()}, multiply)[0] == exact);
                });
            }
        }
    }
}

// ----------------------------------------------------------------------------
// Outputs

TEST_CASE("matmul: accumulators and outputs are the golden's") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        const std::string end = ".accumulators";
        if (!name.starts_with("matmul.") || !name.ends_with(end)) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - end.size() + 1);
        CAPTURE(p);
        const int n = tensor.shape[0], m = tensor.shape[1], n_groups = tensor.shape[2];
        const std::vector<int8_t> x_codes = golden_ops().at(p + "x.codes").i8(),
                                  w_codes = golden_ops().at(p + "w.codes").i8();
        const int k = static_cast<int>(x_codes.size()) / n, group_size = k / n_groups;
        const Matrix x = make_matrix(x_codes, golden_ops().at(p + "x.scales").f32(), n, k, group_size);
        const Matrix w = make_matrix(w_codes, golden_ops().at(p + "w.scales").f32(), m, k, group_size);
        const std::vector<int32_t> acc = tensor.i32();
        for (int i = 0; i < n * m * n_groups; i++) {
            const int8_t* xg = x.row_codes(i / n_groups / m) + i % n_groups * group_size;
            const int8_t* wg = w.row_codes(i / n_groups % m) + i % n_groups * group_size;
            CHECK(reference_accumulator(xg, wg, group_size) == acc[i]);
        }
        const std::vector<float> expected = golden_ops().at(p + "out").f32();
        for_each_path(group_size, [&](const std::string& path, auto multiply) {
            CAPTURE(path);
            CHECK(outputs(x.rows(), {w.weights()}, multiply)[0] == expected);
        });
    }
    CHECK(cases == 19);
}

TEST_CASE("matmul: a classifier of 70,001 rows gives the golden's logits and chooses its tokens") {
    const GoldenTable table(32);
    auto of = [](const char* tensor) -> const Tensor& {
        return golden_ops().at("classifier." + std::string(tensor));
    };
    const std::vector<int8_t> x_codes = of("x.codes").i8();
    const std::vector<int32_t> rows = of("rows").i32(), ids = of("ids").i32(), acc = of("accumulators").i32();
    const int n = int(ids.size());
    const Matrix x = make_matrix(x_codes, of("x.scales").f32(), n, table.n_cols, 32);
    const Matrix w = make_matrix(table.codes, table.scales, table.n_rows, table.n_cols, 32);
    for (size_t i = 0; i < acc.size(); i++) {
        const int g = int(i) % 2, row = rows[i / 2 % rows.size()], t = int(i / 2 / rows.size());
        CHECK(reference_accumulator(x.row_codes(t) + g * 32, w.row_codes(row) + g * 32, 32) == acc[i]);
    }
    for_each_path(32, [&](const std::string& path, auto multiply) {
        CAPTURE(path);
        const std::vector<float> logits = outputs(x.rows(), {w.weights()}, multiply)[0];
        std::vector<float> found;
        for (int t = 0; t < n; t++) {
            const auto of_token = std::span(logits).subspan(size_t(t) * table.n_rows, table.n_rows);
            for (const int row : rows) found.push_back(of_token[size_t(row)]);
            CHECK(argmax(of_token) == ids[size_t(t)]);
        }
        CHECK(found == of("logits").f32());
    });
}

// Checks one path on one shape: outputs right, the same bits for any number of threads, for a chunk and for
// its tokens one at a time, and for one matrix and several at once.
template <class Multiply>
void check_path(const Matrix& x, const std::vector<Matrix>& matrices, Multiply multiply) {
    std::vector<QuantMatrix> w;
    for (const Matrix& m : matrices) w.push_back(m.weights());
    const int n = x.n_rows, n_threads = threads().size();
    std::vector<std::vector<float>> reference;
    for (const int j : {1, 2, 3}) {
        CAPTURE(j);
        threads().resize(j);
        const std::vector<std::vector<float>> out = outputs(x.rows(), w, multiply);
        if (reference.empty()) reference = out;
        CHECK(out == reference);
        for (int t = 0; t < n; t++) {
            const std::vector<std::vector<float>> one = outputs(x.rows(t, 1), w, multiply);
            for (size_t i = 0; i < w.size(); i++) {
                CHECK(std::equal(one[i].begin(), one[i].end(), reference[i].begin() + t * w[i].n_rows));
            }
        }
    }
    threads().resize(n_threads);
    for (size_t i = 0; i < w.size(); i++) {
        CHECK(outputs(x.rows(), {w[i]}, multiply)[0] == reference[i]);
        CHECK(relative_error(exact_outputs(x, matrices[i]), reference[i]) < 1e-6);
    }
}

TEST_CASE("matmul: right, and the same bits for any number of threads, tokens and matrices") {
    struct Shape {
        int n_tokens, n_rows, n_cols, group_size;
    };
    const Shape shapes[] = {{1, 1, 64, 64},      {2, 3, 192, 64},     {3, 40, 128, 128}, {5, 7, 320, 64},
                            {6, 17, 256, 32},    {7, 13, 384, 128},   {11, 8, 96, 32},   {12, 16, 128, 64},
                            {13, 5, 2048, 2048}, {17, 11, 512, 64},   {23, 2, 576, 192}, {31, 12, 192, 64},
                            {40, 33, 128, 64},   {7, 19, 8192, 8192}, {6, 6, 8192, 32}};
    std::mt19937 rng(4);
    for (const Shape& s : shapes) {
        CAPTURE(s.n_tokens);
        CAPTURE(s.n_rows);
        CAPTURE(s.n_cols);
        CAPTURE(s.group_size);
        const Matrix x = filled_matrix(rng, uniform, true, s.n_tokens, s.n_cols, s.group_size);
        const Matrix a = filled_matrix(rng, uniform, true, s.n_rows, s.n_cols, s.group_size),
                     b = filled_matrix(rng, zero_groups, true, 9, s.n_cols, s.group_size),
                     c = filled_matrix(rng, uniform, true, 1, s.n_cols, s.group_size);
        for_each_path(s.group_size, [&](const std::string& path, auto multiply) {
            CAPTURE(path);
            check_path(x, {a, b, c}, multiply);
        });
    }
}

TEST_CASE("matmul: every number of rows and tokens up to 40") {
    std::mt19937 rng(5);
    const Matrix x = filled_matrix(rng, uniform, true, 40, 128, 64),
                 w = filled_matrix(rng, uniform, true, 40, 128, 64);
    for_each_path(64, [&](const std::string& path, auto multiply) {
        CAPTURE(path);
        const std::vector<float> all = outputs(x.rows(), {w.weights()}, multiply)[0];
        CHECK(relative_error(exact_outputs(x, w), all) < 1e-6);
        for (int n = 1; n <= 40; n++) {
            for (int m = 1; m <= 40; m++) {
                const std::vector<float> out = outputs(x.rows(0, n), {w.weights(0, m)}, multiply)[0];
                bool same = true;
                for (int t = 0; t < n; t++) same &= std::equal(&out[t * m], &out[t * m] + m, &all[t * 40]);
                CHECK_MESSAGE(same, n << " tokens, " << m << " rows");
            }
        }
    });
}

TEST_CASE(
    "packed: four columns of each row of a block side by side, and their scales; rows of zeros fill it up") {
    std::mt19937 rng(8);
    for (const auto& [n_rows, n_cols, group_size] :
         {std::tuple{1, 64, 64}, {7, 128, 32}, {32, 192, 64}, {70, 256, 256}, {96, 64, 32}}) {
        const Matrix w = filled_matrix(rng, uniform, true, n_rows, n_cols, group_size);
        CAPTURE(w.n_rows);
        for_each_isa([&](auto isa) {
            using Isa = decltype(isa);
            if (!takes<Isa>(w.group_size)) return;
            CAPTURE(Isa::name);
            PackedMatrices memory;
            const QuantMatrix packed = memory.add<Isa, Int8Forms>(w.weights())->w;
            constexpr int n = block_rows<Isa>;
            for (int i = 0; i < (w.n_rows + n - 1) / n * n; i++) {
                const uint8_t* block = packed.codes + size_t(i / n) * n * size_t(w.n_cols);
                const auto* scales =
                    static_cast<const float*>(packed.scales) + size_t(i / n * n) * w.n_groups();
                bool same = true;
                for (int k = 0; k < w.n_cols; k++) {
                    const int expected = i < w.n_rows ? w.row_codes(i)[k] : 0;
                    const uint8_t found = block[(k / 4 * n + i % n) * 4 + k % 4] ^ Isa::flip;
                    same &= int8_t(found) == expected;
                }
                for (int g = 0; g < w.n_groups(); g++)
                    same &= scales[g * n + i % n] == (i < w.n_rows ? w.row_scales(i)[g] : 0.0f);
                CHECK_MESSAGE(same, "row " << i);
            }
        });
    }
}

TEST_CASE("matmul: groups that fill no vector have no fast path") {
    std::mt19937 rng(6);
    for (const int group_size : {4, 12, 16, 20, 36, 100}) {
        CAPTURE(group_size);
        CHECK(int8_kernel_name(group_size) == std::string("portable"));
        const Matrix x = filled_matrix(rng, uniform, true, 7, 3 * group_size, group_size);
        const Matrix w = filled_matrix(rng, uniform, true, 5, 3 * group_size, group_size);
        std::vector<float> out(35, untouched);
        const std::vector<QuantProduct> list = {{out.data(), w.weights(), nullptr}};
        CHECK_FALSE(quant_matmul(x.rows(), list));
        CHECK(PackedMatrices().add(w.weights()) == nullptr);
        CHECK(std::count(out.begin(), out.end(), untouched) == 35);
    }
}
