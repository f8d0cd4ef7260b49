// swiglu against the golden vectors and against fp64. HW_PAIRS says how many random pairs there are.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "Vswiglu.h"
#include "sim.h"
#include "vectors.h"

struct Pair {
    uint32_t gate, up;
};

// How far y is from the fp64 result, in 2^-23 of it; 99 if it is no number and should be one, or the other
// way round. Below a gate of -88.7228, where e^-gate is infinite in fp32, and for numbers that are not
// finite, y is what fp32 gives. A subnormal quotient may be wrong by half its last place, and so may a
// subnormal result.
static double units_off(const Pair& p, uint32_t y) {
    const float gate = float_of(p.gate), up = float_of(p.up);
    const float by_program = gate / (1.0f + std::exp(-gate)) * up;
    if (!std::isfinite(gate) || !std::isfinite(up) || std::exp(-gate) > 3.4028235e38f)
        return same_float(bits_of(by_program), y) ? 0 : 99;
    const double quotient = double(gate) / (1 + std::exp(-double(gate))), want = quotient * up;
    if (std::isnan(float_of(y)) || std::signbit(float_of(y)) != std::signbit(want)) return 99;
    double unit = std::max(std::ldexp(std::abs(want), -23), std::ldexp(1.0, -149));
    if (std::abs(quotient) < 1.2e-38) unit += std::ldexp(std::abs(double(up)), -149);
    if (std::isinf(float_of(y))) return std::abs(want) >= 3.402823e38 ? 0 : 99;
    return std::abs(double(float_of(y)) - want) / unit;
}

// Feeds pairs and takes results; returns these, and in clocks how long it took.
static std::vector<uint32_t> run(const std::vector<Pair>& pairs, bool stalls, int64_t* clocks = nullptr) {
    Sim<Vswiglu> sim;
    sim.reset();
    auto& top = sim.top;
    Random random(67);
    std::vector<uint32_t> results;
    bool offered = false, held = false;
    uint32_t was = 0;
    int64_t now = 0;
    for (size_t in = 0; results.size() < pairs.size(); now++) {
        if (now == 1000 + 200 * int64_t(pairs.size()))
            FAIL((pairs.size() - results.size()) << " results are missing");
        offered = in < pairs.size() && (offered || !(stalls && random.one_in(random.one_in(2) ? 2 : 40)));
        top.valid_i = offered, top.ready_i = !(stalls && !random.one_in(random.one_in(2) ? 2 : 40));
        top.gate_i = offered ? pairs[in].gate : uint32_t(random());
        top.up_i = offered ? pairs[in].up : uint32_t(random());
        sim.settle();
        if (held && (!top.valid_o || top.y_o != was)) FAIL("a result that waits is another a clock later");
        held = top.valid_o && !top.ready_i, was = top.y_o;
        if (top.valid_o && top.ready_i) results.push_back(top.y_o);
        if (top.valid_i && top.ready_o) in++, offered = false;
        sim.tick();
    }
    if (clocks != nullptr) *clocks = now;
    return results;
}

static void check(const std::vector<Pair>& pairs, bool stalls) {
    const std::vector<uint32_t> results = run(pairs, stalls);
    double worst = 0;
    uint64_t wrong = 0;
    for (size_t i = 0; i < pairs.size(); i++) {
        const double off = units_off(pairs[i], results[i]);
        worst = std::max(worst, off);
        if (off > 2.3 && wrong++ < 5) {
            char line[99];
            std::snprintf(line, sizeof(line), "%a, %a: %a, %g * 2^-23 off", float_of(pairs[i].gate),
                          float_of(pairs[i].up), float_of(results[i]), off);
            MESSAGE(line);
        }
    }
    MESSAGE(pairs.size() << " compared, the worst is " << worst << " * 2^-23 off");
    CHECK(wrong == 0);
}

static std::vector<uint32_t> numbers(const std::string& name) {
    const std::vector<int64_t> values = op(name);
    return {values.begin(), values.end()};
}

// As `golden diff` has it: within 1e-5, relative by norm; and each number by itself.
TEST_CASE("swiglu: golden vectors") {
    const std::vector<std::string> names = op_cases("swiglu", "gate");
    CHECK(names.size() == 3);
    for (const std::string& name : names) {
        INFO(name);
        const std::vector<uint32_t> gate = numbers(name + ".gate"), up = numbers(name + ".up"),
                                    out = numbers(name + ".out");
        std::vector<Pair> pairs;
        for (size_t i = 0; i < gate.size(); i++) pairs.push_back({gate[i], up[i]});
        const std::vector<uint32_t> y = run(pairs, true);
        double off = 0, norm = 0;
        for (size_t i = 0; i < y.size(); i++) {
            off += std::pow(double(float_of(y[i])) - float_of(out[i]), 2);
            norm += std::pow(double(float_of(out[i])), 2);
        }
        MESSAGE(name << ": " << std::sqrt(off / norm) << " relative by norm");
        CHECK(off <= 1e-14 * norm);
        check(pairs, false);
    }
}

TEST_CASE("swiglu: random pairs, and special ones") {
    Random random(71);
    const uint32_t odd[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x00800000,
                            0x80800000, 0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000,
                            0xff800000, 0x7fc00000, 0x7f800001, 0xc2b17217, 0xc2b17218, 0xc2b17219,
                            0xc2b17200, 0x42b17218, 0xc2cff1b5, 0x42cff1b5, 0xc2b00000, 0x42b00000,
                            0xc3480000, 0x43480000};
    std::vector<Pair> pairs;
    for (uint32_t gate : odd)
        for (uint32_t up : odd) pairs.push_back({gate, up});
    check(pairs, true);
    const char* n = std::getenv("HW_PAIRS");
    const auto uniform = [&](float from, float to) {
        return bits_of(from + (to - from) * (float(random() >> 40) / float(1 << 24)));
    };
    // A number takes 32 clocks: where there are many, a tenth of the pairs.
    const uint64_t given = n != nullptr ? std::stoull(n) : 1000000;
    for (uint64_t left = given > 1000000 ? given / 10 : given; left > 0; left -= pairs.size()) {
        pairs.resize(std::min(left, uint64_t(1000000)));
        for (Pair& p : pairs) {
            const int kind = random.in(0, 7);
            p.gate = kind < 3 ? uniform(-8, 8) : kind < 6 ? uniform(-100, 100) : uint32_t(random());
            p.up = random.one_in(3) ? uint32_t(random()) : uniform(-4, 4);
        }
        check(pairs, false);
    }
}

// As the header of swiglu.sv has it.
TEST_CASE("swiglu: clocks") {
    const std::vector<Pair> pairs(1000, {bits_of(1), bits_of(2)});
    int64_t one = 0, all = 0;
    run({pairs[0]}, false, &one);
    run(pairs, false, &all);
    MESSAGE(one << " clocks for one number, " << all << " for 1000");
    CHECK(one == 55 + 1);
    CHECK(all == 55 + 1 + 999 * 32);
}

TEST_CASE("swiglu: reset in the middle") {
    Sim<Vswiglu> sim;
    sim.reset();
    auto& top = sim.top;
    for (int before = 1; before < 130; before++) {
        top.valid_i = 1, top.gate_i = bits_of(float(before)), top.up_i = bits_of(3.0f),
        top.ready_i = before % 3 != 0;
        for (int i = 0; i < before; i++) sim.tick();
        top.valid_i = 0, top.ready_i = 1;
        sim.reset(1);
        CHECK((top.ready_o && !top.valid_o));
        top.valid_i = 1, top.gate_i = bits_of(200.0f), top.up_i = bits_of(0.5f);
        sim.tick();
        top.valid_i = 0;
        int clocks = 1;
        for (; clocks < 100 && !top.valid_o; clocks++) sim.tick();
        CHECK((clocks == 55 && top.y_o == bits_of(100.0f)));
        sim.tick();
        CHECK(!top.valid_o);
    }
}
