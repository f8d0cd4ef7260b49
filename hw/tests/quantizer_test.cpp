// The quantizer against the golden vectors of every scheme that quantizes to int8, and against quantize_group
// of runq.cpp and runq_w8a8.cpp as plain loops.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "Vquantizer.h"
#include "Vquantizer_4.h"
#include "sim.h"
#include "vectors.h"

struct Group {
    std::vector<uint32_t> x;
    std::vector<int> codes;
    uint32_t scale;
    bool is_static;
};

static Group by_loops(std::vector<uint32_t> x, bool is_static, float scale) {
    constexpr float largest_float = std::numeric_limits<float>::max();
    float amax = 0;
    for (uint32_t u : x) amax = std::max(amax, std::fabs(float_of(u)));
    float inv = is_static ? 1.0f / scale : 127.0f / amax;
    if (!(inv > 0 && inv <= largest_float)) inv = 0;
    Group g{
        std::move(x), {}, is_static ? bits_of(scale) : bits_of(inv > 0 ? amax / 127.0f : 0.0f), is_static};
    for (uint32_t u : g.x) {
        const float r = std::nearbyint(float_of(u) * inv);
        const float low = r > -127.0f ? r : -127.0f;
        g.codes.push_back(int(low < 127.0f ? low : 127.0f));
    }
    return g;
}

// Feeds the groups one behind the other and compares all that comes out. Returns the clocks, and in
// first_code those until the first code.
template <class Model>
static int64_t check(const std::vector<Group>& groups, bool stalls, int64_t* first_code = nullptr) {
    Sim<Model> sim;
    sim.reset();
    auto& top = sim.top;
    Random random(23);
    size_t in = 0, in_at = 0, out = 0, out_at = 0;
    uint64_t wrong = 0;
    int64_t now = 0, held = -1;
    bool offered = false;
    int64_t limit = 1000;  // of a quantizer that loses codes
    for (const Group& g : groups) limit += 200 + 20 * int64_t(g.x.size());
    for (; out < groups.size(); now++) {
        if (now == limit) FAIL((groups.size() - out) << " groups are missing");
        offered = in < groups.size() && (offered || !(stalls && random.one_in(4)));
        top.valid_i = offered, top.ready_i = !(stalls && random.one_in(random.one_in(2) ? 2 : 8));
        top.x_i = offered ? groups[in].x[in_at] : uint32_t(random());
        top.last_i = offered ? in_at + 1 == groups[in].x.size() : random() & 1;
        // The static scale counts with the last number.
        top.static_i = offered && top.last_i ? groups[in].is_static : random() & 1;
        top.static_scale_i =
            offered && top.last_i && groups[in].is_static ? groups[in].scale : uint32_t(random());
        sim.settle();
        const int64_t all =
            int64_t(uint64_t(top.scale_o) << 9 | uint64_t(uint8_t(top.code_o)) << 1 | top.last_o);
        if (held >= 0) CHECK((top.valid_o && all == held));
        held = top.valid_o && !top.ready_i ? all : -1;
        if (top.valid_o && top.ready_i) {
            if (first_code != nullptr && out == 0 && out_at == 0) *first_code = now;
            const Group& g = groups[out];
            const bool last = out_at + 1 == g.x.size();
            const bool right = int8_t(top.code_o) == g.codes[out_at] && same_float(top.scale_o, g.scale) &&
                               bool(top.last_o) == last;
            if (!right && wrong++ < 5)
                MESSAGE("group " << out << ", number " << out_at << ": " << int(int8_t(top.code_o))
                                 << ", not " << g.codes[out_at]);
            out_at++;
            if (last) out++, out_at = 0;
        }
        if (top.valid_i && top.ready_o) {
            offered = false;
            in_at++;
            if (in_at == groups[in].x.size()) in++, in_at = 0;
        }
        sim.tick();
    }
    CHECK(wrong == 0);
    return now;
}

static std::vector<uint32_t> numbers(const std::string& name) {
    const std::vector<int64_t> values = op(name);
    return {values.begin(), values.end()};
}

// Groups of an op vector: as many as it has scales.
static std::vector<Group> golden_groups(const std::string& name, const std::string& input) {
    const std::vector<uint32_t> x = numbers(name + "." + input), scales = numbers(name + ".scales");
    const std::vector<int64_t> codes = op(name + ".codes");
    const size_t size = x.size() / scales.size();
    std::vector<Group> groups;
    for (size_t g = 0; g < scales.size(); g++) {
        const auto at = ptrdiff_t(g * size), end = ptrdiff_t((g + 1) * size);
        groups.push_back(
            {{x.begin() + at, x.begin() + end}, {codes.begin() + at, codes.begin() + end}, scales[g], false});
    }
    return groups;
}

TEST_CASE("quantizer: golden vectors") {
    std::vector<std::string> names = op_cases("quantize.", "codes");
    for (const std::string& name : names) {
        INFO(name);
        check<Vquantizer>(golden_groups(name, "x"), false);
        check<Vquantizer>(golden_groups(name, "x"), true);
    }
    CHECK(names.size() == 11);
    check<Vquantizer>(golden_groups("gptq_gather", "gathered"), true);
}

TEST_CASE("quantizer: golden vectors, static scales") {
    const std::vector<std::string> names = op_cases("quantize_static.", "codes");
    for (const std::string& name : names) {
        INFO(name);
        const std::vector<uint32_t> x = numbers(name + ".x"), scale = numbers(name + ".scale");
        const std::vector<int64_t> codes = op(name + ".codes");
        check<Vquantizer>({{x, {codes.begin(), codes.end()}, scale[0], true}}, true);
    }
    CHECK(names.size() == 10);
}

// Groups of the kinds that go wrong: zeros, tiny and subnormal numbers, amax at the edge of what is treated
// as 0, infinity, NaN, NaN alone, numbers that share amax, halves.
static std::vector<Group> odd_groups(int longest) {
    Random random(29);
    std::vector<Group> groups;
    const auto length = [&] { return size_t(random.in(1, longest)); };
    const auto draw = [&](uint32_t base, uint32_t spread) {
        std::vector<uint32_t> x(length());
        for (uint32_t& u : x) u = (base + uint32_t(random() % (spread + 1))) | uint32_t(random() & 1) << 31;
        return x;
    };
    for (int i = 0; i < 300; i++) {
        std::vector<uint32_t> x;
        switch (i % 10) {
            case 0:
                x = draw(0, 0);
                break;
            case 1:
                x = draw(0, 0x7fffff);
                break;
            case 2:
                x = draw(0x02fdffff - 200, 400);
                break;  // 127 / amax is about the largest number
            case 3:
                x = draw(0x7f000000, 0x7fffff);
                break;
            case 4:
                x = draw(0, 0x7f800000);
                break;
            case 5:
                x = draw(0x7f800000, 3);
                break;
            case 6:
                x = draw(0x7fc00000, 3);
                break;
            case 7:
                x = draw(0x3f800000, 0x2000000), x[random() % x.size()] = 0x7fc00001;
                break;
            case 8:
                x = draw(0x42fe0000, 0);
                break;
            case 9:
                x.assign(length(), bits_of(127));
                for (size_t j = 1; j < x.size(); j++) x[j] = bits_of(float(random.in(-254, 254)) / 2);
                break;
        }
        if (i % 7 == 0) {
            const uint32_t scales[] = {bits_of(0.1f), 0,          1,          0x7f800000, 0x7f7fffff,
                                       0x00200000,    bits_of(2), 0x7fc00000, 0x001fffff};
            groups.push_back(by_loops(x, true, float_of(scales[i / 7 % 9])));
        } else {
            groups.push_back(by_loops(x, false, 0));
        }
    }
    return groups;
}

TEST_CASE("quantizer: odd groups") {
    for (const bool stalls : {false, true}) {
        check<Vquantizer>(odd_groups(100), stalls);
        check<Vquantizer_4>(odd_groups(4), stalls);
    }
}

TEST_CASE("quantizer: random groups") {
    Random random(31);
    std::vector<Group> groups;
    for (int i = 0; i < 2000; i++) {
        std::vector<uint32_t> x(64);
        const float size = std::ldexp(1.0f, random.in(-20, 20));
        for (uint32_t& u : x) u = bits_of(size * (float(random() >> 40) / float(1 << 23) - 1));
        groups.push_back(by_loops(x, false, 0));
    }
    check<Vquantizer>(groups, false);
}

// As the header of quantizer.sv has it.
TEST_CASE("quantizer: clocks") {
    std::vector<Group> groups;
    for (int i = 0; i < 50; i++)
        groups.push_back(by_loops(std::vector<uint32_t>(64, bits_of(float(i))), false, 0));
    int64_t first = 0;
    const int64_t took = check<Vquantizer>(groups, false, &first);
    MESSAGE(took << " clocks for 50 groups of 64, the first code after " << first);
    CHECK(first == 64 + 40);
    CHECK(took <= 50 * (64 + 18));
}

TEST_CASE("quantizer: reset in the middle") {
    Sim<Vquantizer_4> sim;
    auto& top = sim.top;
    Random random(37);
    for (int before = 1; before < 120; before++) {
        for (int i = 0; i < before; i++) {
            top.valid_i = 1, top.x_i = uint32_t(random()), top.last_i = random() & 1,
            top.ready_i = before % 3 != 0;
            sim.tick();
        }
        top.valid_i = 0, top.ready_i = 1, top.static_i = 0;
        sim.reset(1);
        CHECK((top.ready_o && !top.valid_o));
        for (int i = 0; i < 3; i++) {
            top.valid_i = 1, top.x_i = bits_of(float(i + 1)), top.last_i = i == 2;
            sim.tick();
        }
        top.valid_i = 0;
        for (int i = 0; i < 60 && !top.valid_o; i++) sim.tick();
        for (const int code : {42, 85, 127}) {
            CHECK((top.valid_o && int8_t(top.code_o) == code && top.scale_o == bits_of(3.0f / 127)));
            sim.tick();
        }
        CHECK(!top.valid_o);
    }
}
