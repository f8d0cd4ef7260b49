// The fp32 modules against the processor's own arithmetic: every pair of a list of edges, and random pairs of several
// kinds. HW_PAIRS says how many random pairs each module gets.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "Vfp32_add.h"
#include "Vfp32_mul.h"
#include "Vint_to_fp32.h"
#include "sim.h"

static uint64_t n_pairs() {
    const char* n = std::getenv("HW_PAIRS");
    return n ? std::stoull(n) : 1000000;
}

// Both sides of everything that can go wrong: zeros, subnormals, powers of two and their neighbours, halves of the last
// place, the largest numbers, infinity, NaN.
static std::vector<uint32_t> edges() {
    std::vector<uint32_t> list;
    for (uint32_t exp : {0, 1, 2, 22, 23, 24, 25, 26, 63, 64, 102, 103, 104, 126, 127, 128, 149, 150, 151, 152, 190, 191, 253, 254})
        for (uint32_t fraction : {0u, 1u, 2u, 3u, 0x400000u, 0x3fffffu, 0x400001u, 0x555555u, 0x7ffffdu, 0x7ffffeu, 0x7fffffu})
            list.push_back(exp << 23 | fraction);
    for (uint32_t f : {0x7f800000u, 0x7fc00000u, 0x7f800001u, 0x7fffffffu}) list.push_back(f);
    const size_t n = list.size();
    for (size_t i = 0; i < n; i++) list.push_back(list[i] | 0x80000000);
    return list;
}

// Pairs of all kinds: any bits; exponents near each other, where sums cancel; products near the smallest numbers, and
// near the largest; few bits set, so that exact halves occur.
struct Pairs {
    Random random;
    uint32_t a = 0, b = 0;
    void next() {
        const uint64_t r = random();
        a = uint32_t(r), b = uint32_t(r >> 32);
        const uint64_t s = random();
        const auto with_exp = [](uint32_t f, int exp) {
            return (f & 0x807fffff) | uint32_t(exp < 0 ? 0 : exp > 254 ? 254 : exp) << 23;
        };
        const int exp_a = int(a >> 23 & 255), spread = int(s >> 8 & 63) - 32;
        switch (s & 7) {
            case 0: break;
            case 1:
            case 2: b = with_exp(b, exp_a + spread); break;
            case 3: b = a ^ 0x80000000 ^ uint32_t(s >> 16 & 7); break;
            case 4: b = with_exp(b, 127 - exp_a + (spread >> 1)); break;
            case 5: b = with_exp(b, 381 - exp_a + (spread >> 3)); break;
            case 6: b = with_exp(b, exp_a + spread) & ~0u << (s >> 16 & 31), a &= ~0u << (s >> 24 & 31); break;
            case 7: a &= 0x80ffffff, b = with_exp(b, spread > 0 ? spread >> 2 : 127 + spread); break;
        }
    }
};

// Feeds pairs, one a clock with a pause now and then, and compares what comes out `latency` clocks later.
template <class Model, class Result>
static void compare(int latency, auto set, auto get, Result expected) {
    Sim<Model> sim;
    std::deque<std::pair<uint32_t, uint32_t>> on_the_way;
    uint64_t wrong = 0, compared = 0;
    Random pauses(7);
    const auto feed = [&](uint32_t a, uint32_t b) {
        while ((pauses() & 15) == 0) {
            sim.top.en_i = 0;
            set(sim.top, uint32_t(pauses()), uint32_t(pauses()));
            sim.tick();
        }
        sim.top.en_i = 1;
        set(sim.top, a, b);
        sim.tick();
        on_the_way.push_back({a, b});
        if (int(on_the_way.size()) < latency) return;
        const auto [x, y] = on_the_way.front();
        on_the_way.pop_front();
        const uint32_t want = expected(x, y), have = get(sim.top);
        compared++;
        if (same_float(want, have)) return;
        if (wrong++ < 5) MESSAGE(std::hex << x << " and " << y << ": " << have << ", not " << want);
    };
    const std::vector<uint32_t> list = edges();
    for (uint32_t a : list)
        for (uint32_t b : list) feed(a, b);
    Pairs pairs{Random(1)};
    for (uint64_t i = 0; i < n_pairs(); i++) {
        pairs.next();
        feed(pairs.a, pairs.b);
    }
    for (int i = 0; i < latency; i++) feed(0, 0);
    MESSAGE(compared << " pairs compared");
    CHECK(compared >= list.size() * list.size() + n_pairs());
    CHECK(wrong == 0);
}

static const auto set_both = [](auto& top, uint32_t a, uint32_t b) { top.a_i = a, top.b_i = b; };

TEST_CASE("fp32_add") {
    compare<Vfp32_add>(
        4, set_both, [](const auto& top) { return top.s_o; },
        [](uint32_t a, uint32_t b) { return bits_of(float_of(a) + float_of(b)); });
}

TEST_CASE("fp32_mul") {
    compare<Vfp32_mul>(
        3, set_both, [](const auto& top) { return top.p_o; },
        [](uint32_t a, uint32_t b) { return bits_of(float_of(a) * float_of(b)); });
}

TEST_CASE("int_to_fp32") {
    compare<Vint_to_fp32>(
        3, [](auto& top, uint32_t a, uint32_t b) { top.int_i = a >> (b & 31); }, [](const auto& top) { return top.f_o; },
        [](uint32_t a, uint32_t b) { return bits_of(float(int32_t(a >> (b & 31)))); });
}
