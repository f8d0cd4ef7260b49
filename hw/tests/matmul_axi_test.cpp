// The top, hw/rtl/matmul_axi.sv, through its AXI ports: products equal to the bit whatever pauses on its streams, a reset
// in the middle, registers, and what is refused.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "hw/sim/matmul_rtl.h"

namespace {

// Activations, a matrix, and their product as out.mul_add of golden/passes.py has it.
struct Case {
    int n_tokens, n_rows, n_cols, group_size;
    std::vector<int8_t> x, w;             // (n_tokens, n_cols), (n_rows, n_cols)
    std::vector<float> x_scales, w_scales;  // a scale per group
    std::vector<float> out;               // (n_tokens, n_rows)

    // codes within -limit..limit; every seventh is the lowest.
    Case(int tokens, int rows, int cols, int group, uint32_t seed, int limit = 127)
        : n_tokens(tokens), n_rows(rows), n_cols(cols), group_size(group) {
        std::mt19937 random(seed);
        auto codes = [&](size_t n, int lowest, int highest) {
            std::vector<int8_t> c(n);
            for (int8_t& v : c)
                v = int8_t(random() % 7 == 0 ? lowest : lowest + int(random() % uint32_t(highest - lowest + 1)));
            return c;
        };
        auto scales = [&](size_t n) {
            std::vector<float> s(n);
            for (float& v : s) v = std::ldexp(float(random() % 8388608 + 1), int(random() % 12) - 30);
            return s;
        };
        const size_t groups = size_t(cols / group);
        x = codes(size_t(tokens * cols), -127, 127), w = codes(size_t(rows * cols), -limit - 1, limit);
        x_scales = scales(size_t(tokens) * groups), w_scales = scales(size_t(rows) * groups);
        for (int t = 0; t < tokens; t++) {
            for (int i = 0; i < rows; i++) {
                float sum = 0;
                for (size_t g = 0; g < groups; g++) {
                    int32_t acc = 0;
                    for (int k = int(g) * group; k < int(g + 1) * group; k++) acc += x[size_t(t * cols + k)] * w[size_t(i * cols + k)];
                    const volatile float scale = w_scales[size_t(i) * groups + g] * x_scales[size_t(t) * groups + g];
                    const volatile float product = float(acc) * scale;
                    sum = product + sum;
                }
                out.push_back(sum);
            }
        }
    }
};

// Loads the activations and multiplies; the number of outputs with other bits.
int differences(MatmulRtl& rtl, const Case& c, bool nibbles = false) {
    const RtlMatrix w = rtl.pack(c.w.data(), c.w_scales.data(), c.n_rows, c.n_cols, c.group_size, nibbles);
    rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
    std::vector<float> out(c.out.size(), NAN);
    rtl.multiply(w, out.data(), size_t(c.n_rows));
    int n = 0;
    for (size_t i = 0; i < out.size(); i++) n += std::bit_cast<uint32_t>(out[i]) != std::bit_cast<uint32_t>(c.out[i]);
    return n;
}

}  // namespace

TEST_CASE("products are equal to the bit") {
    MatmulRtl rtl;
    CHECK(differences(rtl, {1, 1, 64, 64, 1}) == 0);
    CHECK(differences(rtl, {1, 2 * rtl.cols, 128, 64, 2}) == 0);
    CHECK(differences(rtl, {rtl.max_tokens, 3 * rtl.cols - 1, 384, 64, 3}) == 0);
    CHECK(differences(rtl, {5, rtl.cols + 1, 512, 32, 4}) == 0);
    CHECK(differences(rtl, {3, 2 * rtl.cols, 512, 512, 5}) == 0);  // W8A8: a row is a group
    CHECK(differences(rtl, {2, 5 * rtl.cols, 32, 32, 6}) == 0);
    CHECK(differences(rtl, {7, 3 * rtl.cols, 256, 64, 7, 7}, true) == 0);  // 4 bits
}

TEST_CASE("pauses on streams change nothing") {
    MatmulRtl rtl;
    const Case c{5, 4 * rtl.cols, 128, 64, 8}, nibbles{5, 4 * rtl.cols, 128, 64, 9, 7};
    for (double share : {0.1, 0.5, 0.9}) {
        for (int which = 1; which < 8; which++) {
            CAPTURE(share);
            CAPTURE(which);
            rtl.stalls = {which & 1 ? share : 0, which & 2 ? share : 0, which & 4 ? share : 0, uint32_t(which)};
            rtl.reset();
            CHECK(differences(rtl, c) == 0);
            CHECK(differences(rtl, nibbles, true) == 0);
        }
    }
}

TEST_CASE("a reset in the middle leaves nothing behind") {
    MatmulRtl rtl;
    const Case c{4, 6 * rtl.cols, 256, 64, 10};
    const RtlMatrix w = rtl.pack(c.w.data(), c.w_scales.data(), c.n_rows, c.n_cols, c.group_size);
    for (int after = 1; after < 500; after += 23) {
        CAPTURE(after);
        rtl.stalls = {0.2, 0.2, 0.4, uint32_t(after)};
        rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
        rtl.set_sizes({4, uint32_t(64 / rtl.rows), 4, 6}, 0);
        rtl.run(rtl_command::multiply, w.stream, {}, true, uint64_t(after));
        CHECK((rtl.read(rtl_register::status) & rtl_status::busy) != 0);
        rtl.reset(1);
        CHECK(rtl.read(rtl_register::status) == 0);
        CHECK(rtl.read(rtl_register::passes) == 0);
        CHECK(differences(rtl, c) == 0);
    }
}

TEST_CASE("registers") {
    MatmulRtl rtl;
    using namespace rtl_register;
    for (uint8_t at : {tokens, passes, groups, rows_of_tiles}) {
        rtl.write(at, 3);
        CHECK(rtl.read(at) == 3);
    }
    rtl.write(mode, 7);
    CHECK(rtl.read(mode) == 7);
    rtl.write(scale, 0x3f800001);
    CHECK(rtl.read(scale) == 0x3f800001);
    rtl.write(passes, 0x10001);
    CHECK(rtl.read(passes) == 0);  // not cut to 16 bits
    rtl.write(id, 0), rtl.write(0xfc, 1);
    CHECK(rtl.read(0xfc) == 0);
    CHECK(rtl.read(id) == 0x716e7572);
}

TEST_CASE("what cannot be is refused") {
    MatmulRtl rtl;
    using namespace rtl_register;
    const uint32_t most = uint32_t(rtl.max_inputs / rtl.rows);
    auto refused = [&](RtlSizes s, uint32_t command) {
        rtl.set_sizes(s, 0);
        rtl.write(control, command);
        const bool yes = (rtl.read(status) & rtl_status::refused) != 0;
        CHECK(((rtl.read(status) & rtl_status::busy) != 0) == !yes);
        rtl.reset();
        return yes;
    };
    CHECK(!refused({1, 4, 1, 1}, rtl_command::multiply));
    CHECK(!refused({uint32_t(rtl.max_tokens), most, 1, 1}, rtl_command::load));
    CHECK(refused({0, 4, 1, 1}, rtl_command::multiply));
    CHECK(refused({uint32_t(rtl.max_tokens) + 1, 4, 1, 1}, rtl_command::load));
    CHECK(refused({1, 0, 1, 1}, rtl_command::load));
    CHECK(refused({1, 4, 0, 1}, rtl_command::read));
    CHECK(refused({1, 4, 1, 0}, rtl_command::multiply));
    CHECK(refused({1, most + 1, 1, 1}, rtl_command::load));
    CHECK(refused({1, 1, uint32_t(rtl.max_inputs / rtl.min_group) + 1, 1}, rtl_command::multiply));
    // While a command runs, another one is, and sizes stay.
    rtl.set_sizes({1, 4, 1, 1}, 0);
    rtl.write(control, rtl_command::multiply);
    rtl.write(control, rtl_command::load);
    CHECK((rtl.read(status) & rtl_status::refused) != 0);
    rtl.write(groups, 2);
    CHECK(rtl.read(groups) == 1);
}
