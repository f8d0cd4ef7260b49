// The top, hw/rtl/matmul_axi.sv, through its AXI ports: products equal to the bit whatever pauses on its
// streams, a reset in the middle, registers, and what is refused.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hw/sim/matmul_rtl.h"
#include "hw/tests/product_case.h"

namespace {

// Loads the activations and multiplies; the number of outputs with other bits.
RtlMatrix packed(const MatmulRtl& rtl, const Case& c) {
    return rtl.pack(c.format, c.codes.data(), c.zeros.data(), c.w_scales.data(), c.n_rows, c.n_cols,
                    c.group_size);
}
int differences(MatmulRtl& rtl, const Case& c) {
    const RtlMatrix w = packed(rtl, c);
    rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
    std::vector<float> out(c.out.size(), NAN);
    rtl.multiply(w, out.data(), size_t(c.n_rows));
    int n = 0;
    for (size_t i = 0; i < out.size(); i++)
        n += std::bit_cast<uint32_t>(out[i]) != std::bit_cast<uint32_t>(c.out[i]);
    return n;
}

}  // namespace

TEST_CASE("the array is the one that make names") {
    MatmulRtl rtl;
    const std::string found = std::to_string(rtl.rows) + "x" + std::to_string(rtl.cols);
    std::printf("array: %d rows x %d columns, up to %d tokens\n", rtl.rows, rtl.cols, rtl.max_tokens);
    if (const char* array = std::getenv("RTL_ARRAY")) CHECK(found == std::string(array));
}

TEST_CASE("products are equal to the bit") {
    MatmulRtl rtl;
    CHECK(differences(rtl, {1, 1, 64, 64, 1}) == 0);
    CHECK(differences(rtl, {1, 2 * rtl.cols, 128, 64, 2}) == 0);
    CHECK(differences(rtl, {rtl.max_tokens, 3 * rtl.cols - 1, 384, 64, 3}) == 0);
    CHECK(differences(rtl, {5, rtl.cols + 1, 512, 32, 4}) == 0);
    CHECK(differences(rtl, {3, 2 * rtl.cols, 512, 512, 5}) == 0);  // W8A8: a row is a group
    CHECK(differences(rtl, {2, 5 * rtl.cols, 32, 32, 6}) == 0);
    // Groups as high as the array: the stream runs as many groups ahead as it can.
    CHECK(differences(rtl, {rtl.max_tokens, 3 * rtl.cols, 24 * rtl.rows, rtl.rows, 8}) == 0);
    CHECK(differences(rtl, {1, 3 * rtl.cols, 24 * rtl.rows, rtl.rows, 9}) == 0);
    // A product with an odd number of groups, and more rows of tiles than results are kept of, faster than
    // they go out.
    CHECK(differences(rtl, {rtl.max_tokens, 7 * rtl.cols, rtl.rows, rtl.rows, 10}) == 0);
    CHECK(differences(rtl, {1, 7 * rtl.cols, rtl.rows, rtl.rows, 11}) == 0);
    for (RtlFormat f : {RtlFormat::four_bits, RtlFormat::two_bits, RtlFormat::two_level})
        CHECK(differences(rtl, {7, 3 * rtl.cols + 1, 256, 64, 7, f}) == 0);
}

TEST_CASE("the largest sums are exact") {
    MatmulRtl rtl;
    for (RtlFormat f : {RtlFormat::int8, RtlFormat::four_bits, RtlFormat::two_bits, RtlFormat::two_level})
        for (int group : {64, 512}) {
            CAPTURE(int(f));
            CAPTURE(group);
            CHECK(differences(rtl, {3, rtl.cols, 512, group, 12, f, true}) == 0);
        }
    for (int group : {rtl.min_group, 64, rtl.max_inputs}) {
        CAPTURE(group);
        CHECK(differences(rtl, {3, 2 * rtl.cols, rtl.max_inputs, group, 13, RtlFormat::int8, true}) == 0);
        CHECK(differences(rtl, {rtl.max_tokens, 2 * rtl.cols, rtl.max_inputs, group, 14}) == 0);
    }
}

TEST_CASE("no stream gives more than its command takes") {
    MatmulRtl rtl;
    rtl.stalls.more = true;
    CHECK(differences(rtl, {rtl.max_tokens, 3 * rtl.cols, 128, 64, 15}) == 0);
    CHECK(differences(rtl, {3, 3 * rtl.cols, 128, 64, 16, RtlFormat::two_bits}) == 0);
    std::vector<float> x(128, 0.5f);
    rtl.quantize(x.data(), 1, 128, 64);
    // Nor to a product that nothing was loaded for since the reset.
    const RtlMatrix w = packed(rtl, {1, rtl.cols, 64, 64, 24});
    rtl.reset();
    rtl.set_sizes({1, uint32_t(64 / rtl.rows), 1, 1}, 0);
    CHECK_NOTHROW(rtl.run(rtl_command::multiply, w.stream, {}, true));
}

// As decode_cycles of bench/systolic.py says where the stream is the limit: the last tile is loaded, the last
// sum goes through the rows and on to the last column, and there are 3 registers.
TEST_CASE("SUM_CYCLES end with the last sum") {
    MatmulRtl rtl;
    REQUIRE(differences(rtl, {1, 2 * rtl.cols, 16 * rtl.rows, 16 * rtl.rows, 17}) == 0);
    const RtlCounters c = rtl.counters();
    CHECK(c.sum_cycles == c.weight_beats + uint32_t(rtl.rows + rtl.cols + 4));
}

TEST_CASE("pauses on streams change nothing") {
    MatmulRtl rtl;
    const Case c{5, 4 * rtl.cols, 128, 64, 8}, four{5, 4 * rtl.cols, 128, 64, 9, RtlFormat::four_bits},
        two{3, 2 * rtl.cols, 256, 32, 9, RtlFormat::two_level}, flat{9, 7 * rtl.cols, rtl.rows, rtl.rows, 10},
        short_turns{1, 9 * rtl.cols, 4 * rtl.rows, rtl.rows, 12};
    for (double share : {0.1, 0.5, 0.9}) {
        for (int which = 1; which < 8; which++) {
            CAPTURE(share);
            CAPTURE(which);
            rtl.stalls = {which & 1 ? share : 0, which & 2 ? share : 0, which & 4 ? share : 0,
                          uint32_t(which)};
            rtl.reset();
            CHECK(differences(rtl, c) == 0);
            CHECK(differences(rtl, four) == 0);
            CHECK(differences(rtl, two) == 0);
            CHECK(differences(rtl, flat) == 0);
            // One token: when results have room again, groups follow each other as fast as they ever do.
            CHECK(differences(rtl, short_turns) == 0);
        }
    }
}

TEST_CASE("a reset in the middle leaves nothing behind") {
    MatmulRtl rtl;
    const Case c{4, 6 * rtl.cols, 256, 64, 10};
    const RtlMatrix w = packed(rtl, c);
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
    // In each of the last clocks, in which results go out.
    auto begin = [&](uint64_t after) {
        rtl.stalls = {1.0 / 3, 1.0 / 3, 1.0 / 3, 77};
        rtl.reset(1);
        rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
        rtl.set_sizes({4, uint32_t(64 / rtl.rows), 4, 6}, 0);
        const uint64_t from = rtl.clocks;
        rtl.run(rtl_command::multiply, w.stream, {}, true, after);
        return rtl.clocks - from;
    };
    rtl.stalls.registers = 0;
    const uint64_t all = begin(0);
    for (uint64_t before = 0; before < 80; before++) {
        CAPTURE(before);
        begin(all - before);
        rtl.reset(1);
        CHECK(rtl.read(rtl_register::status) == 0);
        CHECK(differences(rtl, c) == 0);
    }
    // Nor a result that nobody has taken.
    rtl.stalls = {0, 0, 1, 1};
    rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
    rtl.set_sizes({4, uint32_t(64 / rtl.rows), 4, 6}, 0);
    rtl.run(rtl_command::multiply, w.stream, {}, true, 3000);
    CHECK(rtl.result_is_there());
    rtl.reset(1);
    CHECK(!rtl.result_is_there());
}

TEST_CASE("stop ends a command, and leaves the registers as they are") {
    MatmulRtl rtl;
    const Case c{4, 6 * rtl.cols, 256, 64, 18};
    const RtlMatrix w = packed(rtl, c);
    std::vector<float> x(size_t(c.n_tokens * c.n_cols), 1.5f);
    const auto* numbers = reinterpret_cast<const uint32_t*>(x.data());
    const RtlSizes sizes{4, uint32_t(64 / rtl.rows), 4, 6};
    for (uint64_t after = 2; after < 600; after += 19) {
        CAPTURE(after);
        rtl.stalls = {0.2, 0.2, 0.4, uint32_t(after)};
        rtl.load(c.x.data(), c.x_scales.data(), c.n_tokens, c.n_cols, c.group_size);
        rtl.set_sizes(sizes, 0);
        const bool loads = after % 2 == 0;
        if (loads)
            rtl.run(rtl_command::load, {}, {numbers, x.size()}, false, after);
        else
            rtl.run(rtl_command::multiply, w.stream, {}, true, after);
        CHECK(rtl.read(rtl_register::status) == rtl_status::busy);
        rtl.stop();
        CHECK(rtl.read(rtl_register::status) == 0);
        CHECK(rtl.read(rtl_register::groups) == sizes.groups);
        CHECK(rtl.read(rtl_register::cycles) == 0);
        CHECK(!rtl.result_is_there());
        CHECK(differences(rtl, c) == 0);
    }
}

TEST_CASE("the interrupt is done, if it is enabled") {
    MatmulRtl rtl;
    const Case c{1, rtl.cols, 64, 64, 19};
    CHECK(differences(rtl, c) == 0);
    CHECK(!rtl.interrupts());
    rtl.write(rtl_register::interrupt, 1);
    CHECK(rtl.interrupts());
    CHECK(rtl.read(rtl_register::interrupt) == 1);
    rtl.set_sizes({1, uint32_t(64 / rtl.rows), 1, 1}, rtl_mode::coded);
    rtl.write(rtl_register::control, rtl_command::load);
    CHECK(!rtl.interrupts());
    rtl.write(rtl_register::interrupt, 0);  // while the command runs, too
    CHECK(rtl.read(rtl_register::interrupt) == 0);
    rtl.write(rtl_register::interrupt, 3);
    rtl.stop();
    CHECK(!rtl.interrupts());
    CHECK(differences(rtl, c) == 0);
    CHECK(rtl.interrupts());
    rtl.reset();
    CHECK(!rtl.interrupts());
    CHECK(rtl.read(rtl_register::interrupt) == 0);
}

// Five channels that wait for each other in all ways.
TEST_CASE("registers are written and read at any pace") {
    MatmulRtl rtl;
    using namespace rtl_register;
    std::mt19937 random(20);
    for (double share : {0.0, 0.3, 0.7}) {
        rtl.stalls = {0, 0, 0, 21, 1, share};
        rtl.reset();
        std::vector<RtlAccess> accesses;
        uint32_t held[16] = {};
        for (int round = 0; round < 100; round++) {
            CAPTURE(round);
            accesses.clear();
            for (int i = 0; i < 8; i++) {
                const uint8_t at =
                    std::array<uint8_t, 6>{tokens, passes, groups, rows_of_tiles, mode, scale}[random() % 6];
                accesses.push_back({true, at, held[at / 4] = at == scale ? random() : random() % 16});
            }
            rtl.access(accesses);
            for (RtlAccess& a : accesses) a.writes = false, a.value = 0;
            rtl.access(accesses);
            for (const RtlAccess& a : accesses) CHECK(a.value == held[a.address / 4]);
        }
        // A product with its commands at that pace.
        CHECK(differences(rtl, {3, 2 * rtl.cols, 128, 64, 22}) == 0);
        // Reset takes back answers that wait.
        rtl.ask();
        rtl.reset(1);
        CHECK(rtl.read(id) == 0x716e7572);
        rtl.write(tokens, 5);
    }
}

TEST_CASE("reset sets all registers to 0") {
    MatmulRtl rtl;
    using namespace rtl_register;
    CHECK(differences(rtl, {2, 2 * rtl.cols, 128, 64, 23}) == 0);
    rtl.write(scale, 1), rtl.write(mode, 15);
    CHECK(rtl.read(status) == rtl_status::done);
    rtl.write(control, 3);
    CHECK(rtl.read(status) == (rtl_status::done | rtl_status::refused));
    rtl.reset(1);
    for (uint8_t at = status; at <= result_stalls; at += 4) {
        CAPTURE(int(at));
        CHECK(rtl.read(at) == 0);
    }
}

TEST_CASE("registers") {
    MatmulRtl rtl;
    using namespace rtl_register;
    for (uint8_t at : {tokens, passes, groups, rows_of_tiles}) {
        rtl.write(at, 3);
        CHECK(rtl.read(at) == 3);
    }
    rtl.write(mode, 15);
    CHECK(rtl.read(mode) == 15);
    rtl.write(scale, 0x3f800001);
    CHECK(rtl.read(scale) == 0x3f800001);
    for (uint8_t at : {passes, groups, rows_of_tiles}) {
        rtl.write(at, 0x10001);
        CHECK(rtl.read(at) == 0);  // not cut to 16 bits
    }
    rtl.write(tokens, 0x10001);
    CHECK(rtl.read(tokens) > uint32_t(rtl.max_tokens));
    CHECK(rtl.max_tokens == 16);
    CHECK(rtl.max_inputs == 2048);
    CHECK(rtl.min_group == rtl.rows);
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
    for (uint32_t several : {3u, 5u, 6u, 7u}) CHECK(refused({1, 4, 1, 1}, several));
    CHECK(refused({1, 1, uint32_t(rtl.max_inputs / rtl.min_group) + 1, 1}, rtl_command::multiply));
    // While a command runs, another one is, and sizes stay.
    rtl.set_sizes({1, 4, 1, 1}, 0);
    rtl.write(control, rtl_command::multiply);
    rtl.write(control, rtl_command::load);
    CHECK((rtl.read(status) & rtl_status::refused) != 0);
    rtl.write(groups, 2);
    CHECK(rtl.read(groups) == 1);
    // What was refused is forgotten when a command begins.
    rtl.stop();
    rtl.write(control, 3);
    CHECK(rtl.read(status) == rtl_status::refused);
    rtl.write(control, rtl_command::multiply);
    CHECK(rtl.read(status) == rtl_status::busy);
}

// Activations by the quantizer, and by the plain loop of runq.cpp and runq_w8a8.cpp.
TEST_CASE("codes and scales are equal to the bit, whatever pauses") {
    MatmulRtl rtl;
    std::mt19937 random(11);
    struct Sizes {
        int n_tokens, n_cols, group;
    };
    for (const auto& [n, k, group] :
         {Sizes{1, 64, 64}, {3, 384, 64}, {2, 384, 384}, {rtl.max_tokens, 64, std::max(32, rtl.rows)}}) {
        for (int which = 0; which < 4; which++) {
            CAPTURE(group);
            CAPTURE(which);
            rtl.stalls = {0, which & 1 ? 0.6 : 0, which & 2 ? 0.6 : 0, 5};
            rtl.reset();
            std::vector<float> x(size_t(n * k)), scales(size_t(n * k / group)), found_scales(scales.size());
            std::vector<int8_t> codes(x.size()), found(x.size());
            for (float& v : x) v = std::ldexp(float(int(random() % 65536) - 32768), int(random() % 8) - 20);
            if (which == 3) std::fill(x.begin(), x.begin() + group, 0.0f);
            const float fixed = 0.01f;
            const bool is_fixed = which == 2;
            for (size_t g = 0; g < scales.size(); g++) {
                const float* from = x.data() + g * size_t(group);
                float amax = 0;
                for (int i = 0; i < group; i++) amax = std::max(amax, std::fabs(from[i]));
                const float inv = is_fixed ? 1 / fixed : amax > 0 ? 127 / amax : 0;
                scales[g] = is_fixed ? fixed : amax / 127;
                for (int i = 0; i < group; i++)
                    codes[g * size_t(group) + size_t(i)] =
                        int8_t(std::clamp(std::nearbyint(from[i] * inv), -127.0f, 127.0f));
            }
            rtl.quantize(x.data(), n, k, group, is_fixed ? &fixed : nullptr);
            rtl.read_activations(found.data(), found_scales.data());
            CHECK(found == codes);
            CHECK(found_scales == scales);
        }
    }
}
