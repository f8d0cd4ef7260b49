// The fp32 modules against the processor's own arithmetic: every pair of a list of edges, and random pairs of
// several kinds. HW_PAIRS says how many random pairs each module gets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "Vfp16_to_fp32.h"
#include "Vfp32_add.h"
#include "Vfp32_div.h"
#include "Vfp32_exp.h"
#include "Vfp32_fma.h"
#include "Vfp32_mul.h"
#include "Vfp32_to_code.h"
#include "Vint_to_fp32.h"
#include "Vint_to_fp32_20.h"
#include "sim.h"
#include "tests/safetensors.h"

static uint64_t n_pairs() {
    const char* n = std::getenv("HW_PAIRS");
    return n != nullptr ? std::stoull(n) : 1000000;
}

// Both sides of everything that can go wrong: zeros, subnormals, powers of two and their neighbours, halves
// of the last place, the largest numbers, infinity, NaN.
static std::vector<uint32_t> edges() {
    std::vector<uint32_t> list;
    for (uint32_t exp : {0,   1,   2,   22,  23,  24,  25,  26,  63,  64,  102, 103,
                         104, 126, 127, 128, 149, 150, 151, 152, 190, 191, 253, 254})
        for (uint32_t fraction :
             {0u, 1u, 2u, 3u, 0x400000u, 0x3fffffu, 0x400001u, 0x555555u, 0x7ffffdu, 0x7ffffeu, 0x7fffffu})
            list.push_back(exp << 23 | fraction);
    for (uint32_t f : {0x7f800000u, 0x7fc00000u, 0x7f800001u, 0x7fffffffu}) list.push_back(f);
    const size_t n = list.size();
    for (size_t i = 0; i < n; i++) list.push_back(list[i] | 0x80000000);
    return list;
}

struct Operands {
    uint32_t a, b, c;
};

// Operands of all kinds: any bits; exponents near each other, where sums cancel; products near the smallest
// numbers, and near the largest; few bits set, so that exact halves occur. c is any number, or one near -a *
// b.
struct Draws {
    Random random;
    Operands next() {
        const uint64_t r = random(), s = random();
        uint32_t a = uint32_t(r), b = uint32_t(r >> 32), c = uint32_t(s >> 32);
        const auto with_exp = [](uint32_t f, int exp) {
            return (f & 0x807fffff) | uint32_t(std::clamp(exp, 0, 254)) << 23;
        };
        const int exp_a = int(a >> 23 & 255), spread = int(s >> 8 & 63) - 32;
        switch (s & 7) {
            case 0:
                break;
            case 1:
            case 2:
                b = with_exp(b, exp_a + spread);
                break;
            case 3:
                b = a ^ 0x80000000 ^ uint32_t(s >> 16 & 7);
                break;
            case 4:
                b = with_exp(b, 127 - exp_a + spread / 2);
                break;
            case 5:
                b = with_exp(b, 381 - exp_a + spread / 8);
                break;
            case 6:
                b = with_exp(b, exp_a + spread) & ~0u << (s >> 16 & 31), a &= ~0u << (s >> 24 & 31);
                break;
            case 7:
                a &= 0x80ffffff, b = with_exp(b, spread > 0 ? spread / 4 : 127 + spread);
                break;
        }
        if (s & 8) {
            const uint32_t product = bits_of(float_of(a) * float_of(b));
            const int exp = int(product >> 23 & 255);
            c = s & 16 ? product ^ 0x80000000 ^ uint32_t(s >> 40 & 3)
                       : with_exp(c, exp + int(s >> 48 & 127) - 64);
        }
        return {a, b, c};
    }
};

struct Tally {
    uint64_t compared = 0, wrong = 0;
    void operator()(const Operands& o, uint32_t have, uint32_t want) {
        compared++;
        if (same_float(want, have)) return;
        if (wrong++ < 5) {
            char line[99];
            std::snprintf(line, sizeof(line), "%08x, %08x, %08x: %08x, not %08x", o.a, o.b, o.c, have, want);
            MESSAGE(line);
        }
    }
    void check() const {
        MESSAGE(compared << " compared");
        CHECK(compared >= n_pairs());
        CHECK(wrong == 0);
    }
};

// Every pair of edges, each with a third edge, then random operands.
static void for_all(auto feed, uint64_t n = n_pairs()) {
    const std::vector<uint32_t> list = edges();
    Random random(2);
    for (uint32_t a : list)
        for (uint32_t b : list) feed(Operands{a, b, list[random() % list.size()]});
    Draws draws{Random(1)};
    for (uint64_t i = 0; i < n; i++) feed(draws.next());
}

// Feeds operands one a clock, with a pause now and then, and compares what comes out `latency` clocks later.
template <class Model>
static void compare(int latency, auto set, auto get, auto expected) {
    Sim<Model> sim;
    std::vector<Operands> on_the_way(latency);
    uint64_t clocks = 0;
    Random pauses(7);
    Tally tally;
    const auto feed = [&](const Operands& o) {
        while ((pauses() & 15) == 0) {
            sim.top.en_i = 0;
            set(sim.top, Operands{uint32_t(pauses()), uint32_t(pauses()), uint32_t(pauses())});
            sim.tick();
        }
        sim.top.en_i = 1;
        set(sim.top, o);
        sim.tick();
        on_the_way[clocks++ % latency] = o;
        if (clocks < uint64_t(latency)) return;
        const Operands& first = on_the_way[clocks % latency];
        tally(first, get(sim.top), expected(first));
    };
    for_all(feed);
    for (int i = 0; i < latency; i++) feed({0, 0, 0});
    tally.check();
}

static const auto set_both = [](auto& top, const Operands& o) { top.a_i = o.a, top.b_i = o.b; };

TEST_CASE("fp32_add") {
    compare<Vfp32_add>(
        6, set_both, [](const auto& top) { return top.s_o; },
        [](const Operands& o) { return bits_of(float_of(o.a) + float_of(o.b)); });
}

TEST_CASE("fp32_mul") {
    compare<Vfp32_mul>(
        5, set_both, [](const auto& top) { return top.p_o; },
        [](const Operands& o) { return bits_of(float_of(o.a) * float_of(o.b)); });
}

TEST_CASE("fp32_fma") {
    compare<Vfp32_fma>(
        6, [](auto& top, const Operands& o) { top.a_i = o.a, top.b_i = o.b, top.c_i = o.c; },
        [](const auto& top) { return top.f_o; },
        [](const Operands& o) { return bits_of(std::fma(float_of(o.a), float_of(o.b), float_of(o.c))); });
}

// Integers of all sizes.
TEST_CASE("int_to_fp32") {
    const auto number = [](const Operands& o) { return int32_t(o.a) >> (o.b & 31); };
    compare<Vint_to_fp32>(
        4, [&](auto& top, const Operands& o) { top.int_i = uint32_t(number(o)); },
        [](const auto& top) { return top.f_o; },
        [&](const Operands& o) { return bits_of(float(number(o))); });
    Sim<Vint_to_fp32> sim;
    for (const int32_t extreme : {INT32_MIN, INT32_MIN + 1, INT32_MAX, 0, 1, -1, 1 << 24, (1 << 24) + 1,
                                  (1 << 24) + 3, -(1 << 24) - 1}) {
        sim.top.int_i = uint32_t(extreme);
        for (int i = 0; i < 4; i++) sim.tick();
        CHECK(sim.top.f_o == bits_of(float(extreme)));
    }
}

TEST_CASE("int_to_fp32 of 20 bits: every integer") {
    Sim<Vint_to_fp32_20> sim;
    uint64_t wrong = 0;
    for (int i = -(1 << 19); i < (1 << 19) + 3; i++) {
        sim.top.int_i = uint32_t(i) & 0xfffff;
        sim.tick();
        const int before = i - 3;
        if (before >= -(1 << 19)) wrong += sim.top.f_o != bits_of(float(before));
    }
    CHECK(wrong == 0);
}

TEST_CASE("fp16_to_fp32: every number") {
    Sim<Vfp16_to_fp32> sim;
    uint64_t wrong = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        sim.top.h_i = uint16_t(h);
        sim.settle();
        Tensor one{"F16", {1}, {char(h & 255), char(h >> 8)}};
        wrong += !same_float(sim.top.f_o, bits_of(one.f32()[0]));
    }
    CHECK(wrong == 0);
}

static uint32_t divide(Sim<Vfp32_div>& sim, uint32_t a, uint32_t b, int wait, int& clocks) {
    auto& top = sim.top;
    top.a_i = a, top.b_i = b, top.valid_i = 1, top.ready_i = 0;
    sim.settle();
    REQUIRE(top.ready_o == 1);
    sim.tick();
    top.valid_i = 0, top.a_i = ~a, top.b_i = ~b;
    for (clocks = 1; !top.valid_o && clocks < 100; clocks++) sim.tick();
    const uint32_t q = top.q_o;
    for (int i = 0; i < wait; i++) {
        sim.tick();
        CHECK((top.valid_o && top.q_o == q && !top.ready_o));
    }
    top.ready_i = 1;
    sim.tick();
    CHECK(!top.valid_o);
    return q;
}

// A division takes 31 clocks, so that it gets a tenth of the random pairs where there are few.
TEST_CASE("fp32_div") {
    Sim<Vfp32_div> sim;
    sim.reset();
    Random random(3);
    Tally tally;
    int clocks = 0;
    const auto one = [&](const Operands& o) {
        tally(o, divide(sim, o.a, o.b, random.one_in(64) ? 3 : 0, clocks),
              bits_of(float_of(o.a) / float_of(o.b)));
        if (clocks != 31) FAIL("takes " << clocks << " clocks");
    };
    // The quotients that the quantizer takes, then all.
    for (int i = 0; i < 20000; i++) {
        const uint32_t amax = uint32_t(random()) & 0x7fffffff;
        one({bits_of(127), amax, 0});
        one({amax, bits_of(127), 0});
        one({bits_of(1), amax, 0});
    }
    const uint64_t n = n_pairs() > 1000000 ? n_pairs() : n_pairs() / 10;
    for_all(one, n);
    MESSAGE(tally.compared << " compared");
    CHECK(tally.compared > n);
    CHECK(tally.wrong == 0);
    // A reset drops a division, and the next is right.
    for (int i = 0; i < 33; i++) {
        sim.top.a_i = bits_of(1), sim.top.b_i = bits_of(3), sim.top.valid_i = 1, sim.top.ready_i = 0;
        for (int j = 0; j < i; j++) sim.tick();
        sim.top.valid_i = 0;
        sim.reset(1);
        CHECK((sim.top.ready_o && !sim.top.valid_o));
        CHECK(divide(sim, bits_of(float(i)), bits_of(7), 0, clocks) == bits_of(float(i) / 7));
    }
}

// As quantize_group has it.
static int code_of(float product) {
    const float r = std::nearbyint(product);
    const float low = r > -127.0f ? r : -127.0f;
    return int(low < 127.0f ? low : 127.0f);
}

TEST_CASE("fp32_to_code") {
    compare<Vfp32_to_code>(
        1, [](auto& top, const Operands& o) { top.f_i = o.a; },
        [](const auto& top) { return uint32_t(int32_t(int8_t(top.code_o))); },
        [](const Operands& o) { return uint32_t(code_of(float_of(o.a))); });
    // Every half from -130 to 130, and its neighbours of both sides.
    Sim<Vfp32_to_code> sim;
    for (int half = -260; half <= 260; half++) {
        for (int step = -2; step <= 2; step++) {
            const float f = float_of(bits_of(float(half) / 2) + uint32_t(step));
            sim.top.f_i = bits_of(f);
            sim.tick();
            if (int8_t(sim.top.code_o) != code_of(f)) FAIL(f << " becomes " << int(int8_t(sim.top.code_o)));
        }
    }
}

// Every number in steps of about 2^32 / n_pairs, and all edges, against exp in fp64: infinity, 0 and NaN are
// the same, any other result differs by less than one unit in its last place.
TEST_CASE("fp32_exp") {
    constexpr size_t latency = 12;
    Sim<Vfp32_exp> sim;
    std::vector<uint32_t> on_the_way(latency);
    uint64_t fed = 0, wrong = 0;
    double worst = 0;  // units in the last place
    Random random(41);
    const auto feed = [&](uint32_t x) {
        while (random.one_in(16)) {
            sim.top.en_i = 0, sim.top.x_i = uint32_t(random());
            sim.tick();
        }
        sim.top.en_i = 1, sim.top.x_i = x;
        sim.tick();
        on_the_way[fed++ % latency] = x;
        if (fed < latency) return;
        const uint32_t before = on_the_way[fed % latency], y = sim.top.y_o;
        const double e = std::exp(double(float_of(before)));
        const float nearest = float(e);
        double off = 0;
        if (std::isnan(nearest) || std::isinf(nearest)) {
            if (y != (std::isnan(nearest) ? 0x7fc00000 : 0x7f800000)) off = 9;
        } else {
            off = std::abs(double(float_of(y)) - e) / std::ldexp(1.0, std::max(std::ilogb(e) - 23, -149));
            if (nearest == 0 || nearest == 1) off = std::max(off, y == bits_of(nearest) ? 0.0 : 9.0);
        }
        worst = std::max(worst, off);
        if (!(off < 1) && wrong++ < 5) {
            char line[99];
            std::snprintf(line, sizeof(line), "e^%a: %08x, not %a", float_of(before), y, e);
            MESSAGE(line);
        }
    };
    const uint64_t step = (uint64_t(1) << 32) / n_pairs() | 1;
    for (uint64_t x = 0; x >> 32 == 0; x += step) feed(uint32_t(x));
    // Results from the smallest subnormal to the largest finite number, and both sides of each k.
    for (int i = 0; i < 200000; i++) feed(bits_of(float(random.in(-10500000, 9000000)) / 100000));
    for (int k = -151; k <= 129; k++)
        for (int near = -3; near <= 3; near++) feed(bits_of(float(k * std::log(2.0))) + uint32_t(near));
    for (uint32_t x : edges()) feed(x);
    for (size_t i = 0; i < latency; i++) feed(0);
    MESSAGE(fed << " compared, the worst is " << worst << " units in the last place off");
    CHECK(wrong == 0);
}
