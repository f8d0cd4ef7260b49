// The low-bit kernels: every path of this build against plain arithmetic, for every format and shape.
// int8_simde_test.cpp compiles the same cases with emulated intrinsics.
#include "engine/cpu/quant_matmul.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/cpu/lowbit_paths.h"
#include "engine/cpu/packed_matrix.h"
#include "int8_cases.h"
#include "int8_isas.h"
#include "lowbit_cases.h"

namespace {

// Columns of which a row has whole blocks of 64 bytes, halves, quarters, and several of them.
constexpr int widths[] = {64, 128, 192, 256, 320, 384, 448, 576, 1024, 1216};

constexpr float unwritten = 1e30f;

// x times w as `multiply` computes it. Checks that nothing is written behind the last output.
template <class Multiply>
std::vector<float> lowbit_outputs(const QuantRows& x, const QuantMatrix& w, Multiply multiply) {
    std::vector<float> out(size_t(x.n_rows) * w.n_rows + 8, unwritten);
    multiply(x, {{out.data(), w, nullptr}});
    CHECK(std::count(out.end() - 8, out.end(), unwritten) == 8);
    out.resize(out.size() - 8);
    return out;
}

using Products = std::vector<QuantProduct>;

// Calls check(name, multiply) for each instruction set that takes such groups, by every path, of matrices as
// they are and packed.
template <class Check>
void for_each_lowbit_path(int group_size, Check check) {
    for_each_isa([&](auto isa) {
        using Isa = decltype(isa);
        if (group_size % (4 * Isa::lanes) != 0) return;
        const std::string name = Isa::name;
        auto by = [](ProductKernel path) {
            return [=](const QuantRows& x, const Products& list, bool row_each = false) {
                const auto choose = [=](const QuantProduct& p, int) {
                    // Int8 has words of its own alone.
                    return path == ProductKernel::words && p.w.bits == 8 ? ProductKernel::int8 : path;
                };
                multiply_by<Isa, AllForms>(x, list, choose, row_each);
            };
        };
        auto packed_by = [=](ProductKernel path) {
            return [=](const QuantRows& x, Products list, bool row_each = false) {
                PackedMatrices memory;
                for (QuantProduct& p : list) p.packed = memory.add<Isa, AllForms>(p.w);
                by(path)(x, list, row_each);
            };
        };
        check(name + " rows", by(ProductKernel::rows));
        check(name + " int8", by(ProductKernel::int8));
        check(name + " packed, words", packed_by(ProductKernel::words));
        check(name + " packed, int8", packed_by(ProductKernel::int8));
    });
    if (int8_kernel_name(group_size) != std::string("portable")) {
        check("quant_matmul", [](const QuantRows& x, const Products& list, bool row_each = false) {
            REQUIRE(quant_matmul(x, list, row_each));
        });
        check("quant_matmul, packed", [](const QuantRows& x, Products list, bool row_each = false) {
            PackedMatrices memory;
            for (QuantProduct& p : list) p.packed = memory.add(p.w);
            REQUIRE(quant_matmul(x, list, row_each));
        });
    }
}

}  // namespace

TEST_CASE("half: all of them, as fp32") {
    for (int bits = 0; bits < 1 << 16; bits++) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        float expected = exponent == 31  ? (fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                                                          : std::numeric_limits<float>::infinity())
                         : exponent == 0 ? std::ldexp(float(fraction), -24)
                                         : std::ldexp(float(1024 + fraction), exponent - 25);
        if (bits >> 15 != 0) expected = -expected;
        const Half four[4] = {{uint16_t(bits)}, {0}, {uint16_t(bits)}, {0x3c00}};
        const float one = to_float(four[0]);
        float wide[4];
        widen(wide, four, 4);
        const bool same = std::isnan(expected) ? std::isnan(one) && std::isnan(wide[2])
                                               : one == expected && wide[2] == expected &&
                                                     std::signbit(one) == std::signbit(expected);
        CHECK_MESSAGE(same, bits);
        CHECK(wide[3] == 1);
    }
}

// Each half, the points halfway to the next one, and what lies beside these; and any other bits.
TEST_CASE("half: rounded to nearest even, alike by the plain loop and by the instruction") {
    auto check = [](float x, uint16_t expected) {
        CAPTURE(x);
        for (const int sign : {0, 0x8000}) {
            const float signed_x = sign != 0 ? -x : x;
            CHECK(round_to_half(signed_x).bits == (expected | sign));
            CHECK(to_half(signed_x).bits == (expected | sign));
        }
    };
    for (int bits = 0; bits < 0x7c00; bits++) {
        const float here = to_float(Half{uint16_t(bits)});
        const float next = bits == 0x7bff ? 65536.0f : to_float(Half{uint16_t(bits + 1)});
        const float middle = here + (next - here) / 2;  // exact
        check(here, uint16_t(bits));
        check(middle, uint16_t(bits + bits % 2));
        check(std::nextafter(middle, 0.0f), uint16_t(bits));
        check(std::nextafter(middle, next), uint16_t(bits + 1));
    }
    check(std::numeric_limits<float>::infinity(), 0x7c00);
    check(std::numeric_limits<float>::max(), 0x7c00);
    std::mt19937 rng(3);
    for (int i = 0; i < 100000; i++) {
        const uint32_t bits = rng();
        float x;
        std::memcpy(&x, &bits, sizeof x);
        if (!std::isnan(x)) CHECK(round_to_half(x).bits == to_half(x).bits);
    }
    for (const Half nan :
         {round_to_half(std::nanf("")), to_half(std::nanf("")), round_to_half(-std::nanf(""))})
        CHECK(std::isnan(to_float(nan)));
}

TEST_CASE("expand: codes, zero points and scales of every format, whole rows and parts of them") {
    std::mt19937 rng(1);
    for (const LowbitFormat& f : all_formats()) {
        for (const int n_cols : widths) {
            if (f.group > 0 && n_cols % f.group != 0) continue;
            for (const int group_size : group_sizes(f)) {
                CAPTURE(format_text(f));
                CAPTURE(n_cols);
                CAPTURE(group_size);
                const LowbitCase m = make_lowbit(rng, f, group_size, 18, n_cols, LowbitFill::uniform, false);
                const QuantMatrix w = m.view();
                for (int i = 0; i < 18; i++) {
                    const int8_t* expected = m.expanded.data() + i * n_cols;
                    std::vector<int8_t> found(size_t(n_cols) + 1, 99);
                    expand_columns(found.data(), w, i, 0, n_cols);
                    CHECK(std::equal(expected, expected + n_cols, found.data()));
                    CHECK(found.back() == 99);
                    const int step = f.bits == 5 ? 512 : 256;  // columns of a block
                    for (int k = step; k < n_cols; k += step) {
                        const int n = std::min(512, n_cols - k);
                        found.assign(size_t(n) + 1, 99);
                        expand_columns(found.data(), w, i, k, n);
                        CHECK(std::equal(expected + k, expected + k + n, found.data()));
                        CHECK(found.back() == 99);
                    }
                    const int n_groups = n_cols / group_size;
                    std::vector<float> scales(n_groups);
                    expand_scales(scales.data(), w, i);
                    CHECK(std::equal(scales.begin(), scales.end(), m.expanded_scales.data() + i * n_groups));
                    std::vector<int32_t> zeros(size_t(n_groups) + 1, 99);
                    expand_zeros(zeros.data(), w, i);
                    for (int g = 0; g < n_groups; g++)
                        CHECK(zeros[size_t(g)] == RowZeros(w, i)[g * group_size / w.group]);
                    CHECK(zeros.back() == 99);
                }
            }
        }
    }
}

TEST_CASE("expand: a sparse row whose mask has too many or too few ones reads nothing else") {
    std::mt19937 rng(2);
    LowbitCase m =
        make_lowbit(rng, {4, LowbitFormat::sparse_flag, 64}, 64, 1, 320, LowbitFill::uniform, false);
    for (const uint8_t bits : {0xff, 0x00, 0x0f, 0x81}) {
        std::fill(m.mask.begin(), m.mask.end(), bits);
        std::vector<int8_t> found(320);
        expand_columns(found.data(), m.view(), 0, 0, 320);
        for (const int8_t code : found) CHECK(std::abs(code) <= 15);
    }
}

// With scales that are small whole numbers and halves an output is exact, and so is each accumulator.
TEST_CASE("accumulators: every path gives the exact int32 for random and extreme codes of every format") {
    std::mt19937 rng(3);
    for (const LowbitFormat& f : all_formats()) {
        for (const int n_cols : widths) {
            if (f.group > 0 && n_cols % f.group != 0) continue;
            for (const int group_size : group_sizes(f)) {
                for (const LowbitFill fill :
                     {LowbitFill::uniform, LowbitFill::largest, LowbitFill::smallest}) {
                    for (const Fill x_fill : {uniform, all_127, all_minus_127}) {
                        if ((fill == LowbitFill::uniform) != (x_fill == uniform)) continue;
                        const int n_tokens = n_cols % 3 + 1, n_rows = 13 + n_cols / 64 % 7;
                        const LowbitCase w = make_lowbit(rng, f, group_size, n_rows, n_cols, fill, true);
                        const Matrix x = filled_matrix(rng, x_fill, false, n_tokens, n_cols, group_size);
                        const std::vector<float> exact = plain_outputs(x.rows(), w);
                        for_each_lowbit_path(group_size, [&](const std::string& path, auto multiply) {
                            CAPTURE(path);
                            CAPTURE(format_text(f));
                            CAPTURE(n_cols);
                            CAPTURE(group_size);
                            CAPTURE(int(fill));
                            CAPTURE(int(x_fill));
                            CHECK(lowbit_outputs(x.rows(), w.view(), multiply) == exact);
                        });
                    }
                }
            }
        }
    }
}

TEST_CASE("matmul: right, and the same bits by rows and by panels, for any number of threads and tokens") {
    std::mt19937 rng(4);
    const int n_threads = threads().size();
    for (const LowbitFormat& f : all_formats()) {
        for (const int n_cols : {128, 576, 1024, 2176}) {
            if (f.group > 0 && n_cols % f.group != 0) continue;
            for (const int group_size : group_sizes(f)) {
                const int n_tokens = 11, n_rows = 37;
                CAPTURE(format_text(f));
                CAPTURE(n_cols);
                CAPTURE(group_size);
                const LowbitCase w =
                    make_lowbit(rng, f, group_size, n_rows, n_cols, LowbitFill::uniform, false);
                const LowbitCase other =
                    make_lowbit(rng, f, group_size, n_rows, n_cols, LowbitFill::uniform, false);
                const Matrix x = filled_matrix(rng, uniform, true, n_tokens, n_cols, group_size);
                const std::vector<float> expected = plain_outputs(x.rows(), w);
                for_each_lowbit_path(group_size, [&](const std::string& path, auto multiply) {
                    CAPTURE(path);
                    for (const int j : {1, 3}) {
                        threads().resize(j);
                        const std::vector<float> all = lowbit_outputs(x.rows(), w.view(), multiply);
                        CHECK(all == expected);
                        // Rows with a matrix each: the same as alone.
                        std::vector<float> each(2 * size_t(n_rows));
                        multiply(x.rows(0, 2),
                                 {{each.data(), other.view(), nullptr},
                                  {&each[size_t(n_rows)], w.view(), nullptr}},
                                 true);
                        CHECK(std::equal(each.begin() + n_rows, each.end(), expected.begin() + n_rows));
                        const std::vector<float> of_other =
                            lowbit_outputs(x.rows(0, 1), other.view(), multiply);
                        CHECK(std::equal(of_other.begin(), of_other.end(), each.begin()));
                        for (const int n : {1, 4}) {
                            const std::vector<float> some = lowbit_outputs(x.rows(2, n), w.view(), multiply);
                            CHECK(std::equal(some.begin(), some.end(), all.begin() + 2 * n_rows));
                        }
                    }
                    threads().resize(n_threads);
                });
            }
        }
    }
}

TEST_CASE("matmul: one zero point for all is a table of it, by every path") {
    std::mt19937 rng(6);
    for (const int group : {32, 64, 128}) {
        LowbitCase m = make_lowbit(rng, {4, 0, uint16_t(group)}, std::min(group, 64), 21, 384,
                                   LowbitFill::uniform, false);
        std::fill(m.zeros.begin(), m.zeros.end(), uint8_t(0x88));
        QuantMatrix same = m.view();
        same.zeros = nullptr, same.zero_point = 8;
        const int size = m.shape.group_size;
        const Matrix x = filled_matrix(rng, uniform, true, 9, 384, size);
        CHECK(RowZeros(same, 20)[384 / group - 1] == 8);
        for_each_lowbit_path(size, [&](const std::string& path, auto multiply) {
            CAPTURE(path);
            CAPTURE(group);
            for (const int n : {1, 9})
                CHECK(lowbit_outputs(x.rows(0, n), same, multiply) ==
                      lowbit_outputs(x.rows(0, n), m.view(), multiply));
        });
    }
}

TEST_CASE("mask: each byte of it keeps two of each four columns, or it is none") {
    for (unsigned bits = 0; bits < 256; bits++) {
        const bool good = std::popcount(bits & 15) == 2 && std::popcount(bits >> 4) == 2;
        for (size_t at = 0; at < 24; at++) {
            std::vector<uint8_t> mask(24, 0x5a);
            mask[at] = uint8_t(bits);
            CHECK(is_two_of_four(mask.data(), mask.size()) == good);
        }
    }
}

TEST_CASE("matmul: groups of activations that fill no vector have no fast path") {
    const Matrix x = make_matrix(std::vector<int8_t>(64), std::vector<float>(4), 1, 64, 16);
    CHECK_FALSE(quant_matmul(x.rows(), std::span<const QuantProduct>()));
}
