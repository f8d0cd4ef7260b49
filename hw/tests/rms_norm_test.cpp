// rms_norm against the golden vectors, and against rmsnorm of runq.cpp. That one computes in fp64 and rounds
// once; where a result is another, fp64 has to lie within 2^-50 of the middle of both. HW_PAIRS says how many
// random numbers there are.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "Vrms_norm.h"
#include "Vrms_norm_4.h"
#include "sim.h"
#include "vectors.h"

struct Row {
    float eps;
    std::vector<uint32_t> x, w, y;  // (n,) each, fp32; y: to the bit, if exact
    std::vector<double> y64;        // (n,), before the rounding
    bool exact;
};

static Row by_loops(float eps, std::vector<uint32_t> x, std::vector<uint32_t> w) {
    Row row{eps, std::move(x), std::move(w), {}, {}, false};
    const size_t n = row.x.size();
    long double sum = 0;  // runq and numpy add in other orders, and differ in the last bits of fp64
    for (uint32_t u : row.x) sum += double(float_of(u)) * float_of(u);
    const double inv = 1.0 / std::sqrt(double(sum) / double(n) + eps);
    for (size_t i = 0; i < n; i++) {
        row.y64.push_back(float_of(row.w[i]) * (float_of(row.x[i]) * inv));
        row.y.push_back(bits_of(float(row.y64.back())));
    }
    return row;
}

struct Tally {
    uint64_t compared = 0, other = 0, wrong = 0;
    double farthest = 0;  // of a result that is another: how far fp64 is from the middle, relative
    void operator()(const Row& row, size_t i, uint32_t have) {
        compared++;
        if (same_float(row.y[i], have)) return;
        double distance = 1;
        if (!row.exact && std::isfinite(row.y64[i])) {
            const float y = float_of(row.y[i]), neighbour = float_of(have);
            if (neighbour == std::nextafter(y, neighbour))
                distance = std::abs((double(y) + double(neighbour)) / 2 / row.y64[i] - 1);
        }
        other++;
        farthest = std::max(farthest, distance);
        const bool is_wrong = !(distance <= std::ldexp(1.0, -50));
        wrong += is_wrong;
        if (is_wrong ? wrong < 5 : other < 20) {
            char line[160];
            std::snprintf(
                line, sizeof(line),
                "%zu numbers, number %zu, %08x * %08x: %08x, not %08x; fp64 has %a, 2^%.1f from the middle",
                row.x.size(), i, row.x[i], row.w[i], have, row.y[i], row.exact ? 0.0 : row.y64[i],
                std::log2(distance));
            MESSAGE(line);
        }
    }
};

// Feeds rows one behind the other and compares all that comes out. Returns the clocks.
template <class Model>
static int64_t check(const std::vector<Row>& rows, bool stalls, Tally& tally) {
    Sim<Model> sim;
    sim.reset();
    auto& top = sim.top;
    Random random(43);
    int64_t now = 0, limit = 1000;  // of a module that loses results
    for (const Row& row : rows) limit += 600 + 100 * int64_t(row.x.size());
    for (const Row& row : rows) {
        const size_t n = row.x.size();
        size_t x_at = 0, w_at = 0, out = 0;
        bool x_offered = false, w_offered = false, held = false;
        uint64_t was = 0;
        top.n_i = uint16_t(n), top.eps_i = bits_of(row.eps);
        for (; out < n; now++) {
            if (now == limit) FAIL((n - out) << " results of a row of " << n << " are missing");
            x_offered = x_at < n && (x_offered || !(stalls && random.one_in(4)));
            w_offered = w_at < n && (w_offered || !(stalls && random.one_in(4)));
            top.x_valid_i = x_offered, top.x_i = x_offered ? row.x[x_at] : uint32_t(random());
            top.w_valid_i = w_offered, top.w_i = w_offered ? row.w[w_at] : uint32_t(random());
            top.ready_i = !(stalls && random.one_in(random.one_in(2) ? 2 : 20));
            sim.settle();
            const uint64_t all = uint64_t(top.y_o) << 1 | top.last_o;
            if (held && (!top.valid_o || all != was)) FAIL("a result that waits is another a clock later");
            if (x_at == n && top.x_ready_o) FAIL("the next row may come in before the last result is out");
            held = top.valid_o && !top.ready_i, was = all;
            if (top.valid_o && top.ready_i) {
                if (bool(top.last_o) != (out + 1 == n)) FAIL("last_o with number " << out << " of " << n);
                tally(row, out, top.y_o);
                out++;
            }
            if (top.x_valid_i && top.x_ready_o) x_at++, x_offered = false;
            if (top.w_valid_i && top.w_ready_o) w_at++, w_offered = false;
            sim.tick();
        }
    }
    return now;
}

template <class Model>
static void check(const std::vector<Row>& rows, bool stalls) {
    Tally tally;
    check<Model>(rows, stalls, tally);
    MESSAGE(tally.compared << " compared; " << tally.other << " others, of which fp64 is up to "
                           << tally.farthest << " from the middle");
    CHECK(tally.wrong == 0);
}

static std::vector<uint32_t> numbers(const std::string& name) {
    const std::vector<int64_t> values = op(name);
    return {values.begin(), values.end()};
}

TEST_CASE("rms_norm: golden vectors") {
    const std::vector<std::string> names = op_cases("rmsnorm.", "out");
    std::vector<Row> rows;
    for (const std::string& name : names) {
        const std::vector<uint32_t> x = numbers(name + ".x"), w = numbers(name + ".weight"),
                                    y = numbers(name + ".out");
        const float eps = name.find("eps1e-06") != std::string::npos ? 1e-6f : 1e-5f;
        const auto n = ptrdiff_t(w.size());
        for (auto at = ptrdiff_t(0); at < ptrdiff_t(x.size()); at += n)
            rows.push_back({eps,
                            {x.begin() + at, x.begin() + at + n},
                            w,
                            {y.begin() + at, y.begin() + at + n},
                            {},
                            true});
    }
    CHECK(names.size() == 5);
    check<Vrms_norm>(rows, false);
    check<Vrms_norm>(rows, true);
}

// What rows are made of.
enum Kind { normal, codes, wide, any, subnormal, huge, tiny, ties, special, zeros, n_kinds };

static Row draw(Random& random, Kind kind, size_t n) {
    const auto bell = [&] {  // about a normal distribution
        double sum = 0;
        for (int i = 0; i < 4; i++) sum += double(random() >> 40) / double(1 << 24) - 0.5;
        return float(sum * std::sqrt(3.0));
    };
    const auto bf16 = [&](float f) { return (bits_of(f) + 0x8000u) & 0xffff0000u; };
    const auto number = [&] { return uint32_t(random()) & (random.one_in(2) ? 0xffffffffu : 0xfff00000u); };
    const auto with_exp = [&](int low, int high) {
        return (number() & 0x807fffff) | uint32_t(random.in(low, high)) << 23;
    };
    const float epses[] = {1e-5f, 1e-6f, 0, 1e-12f, 1.1754944e-38f, 1, 3e38f};
    float eps = epses[random.one_in(2) ? 0 : random.in(0, 6)];
    const float scale = std::ldexp(float(1 + double(random() >> 40) / double(1 << 24)), random.in(-12, 12));
    const int exp = random.in(0, 254);
    std::vector<uint32_t> x(n), w(n);
    for (size_t i = 0; i < n; i++) {
        w[i] = random.one_in(2) ? bf16(1 + bell() / 4) : bits_of(1 + bell() / 4);
        switch (kind) {
            case codes:  // the embedding of a Q8 file: layer 0
                x[i] = bits_of(float(random.in(-127, 127)) * scale), w[i] = bf16(1 + bell());
                break;
            case wide:
                x[i] = bits_of(std::ldexp(scale * bell(), random.in(-40, 4)));
                break;
            case any:  // exponents near another, and a few of any
                x[i] = random.one_in(8) ? with_exp(0, 254) : with_exp(std::max(exp - 20, 0), exp),
                w[i] = with_exp(0, 254);
                break;
            case subnormal:
                x[i] = with_exp(0, random.in(0, 2)), w[i] = random.one_in(2) ? with_exp(0, 2) : w[i];
                eps = random.one_in(3) ? 1e-5f : 0;
                break;
            case huge:  // squares overflow fp32
                x[i] = with_exp(200, 254);
                break;
            case tiny:  // eps decides
                x[i] = bits_of(1e-4f * scale * bell());
                break;
            case ties:  // of w x, as the root is a power of two
                w[i] = bits_of(scale * bell());
                break;
            case special: {
                const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0, 0x80000000};
                x[i] = random.one_in(int(2 * n)) ? odd[random() % 6] : bits_of(bell());
                w[i] = random.one_in(4) ? odd[random() % 6] : w[i];
                break;
            }
            case zeros:
                x[i] = uint32_t(random()) & 0x80000000;
                break;
            default:
                x[i] = bits_of(scale * bell());
        }
    }
    if (kind != ties) return by_loops(eps, std::move(x), std::move(w));
    // The root of the mean square is 2 of the first eight numbers, 4 of the second eight, 3 of the third
    // (times a power of two). By 1, 2 and 4 fp64 divides without a rounding, so that no result may be
    // another.
    const float eights[3][8] = {{5, 2, 1, 1, 1, 0, 0, 0}, {9, 6, 3, 1, 1, 0, 0, 0}, {1, 5, 1, 3, 1, 5, 1, 3}};
    const float power = std::ldexp(1.0f, random.in(-20, 20));
    const size_t which = n % 8 != 0 ? 3 : random() % 4;
    for (size_t i = 0; i < n; i++)
        x[i] = bits_of((which == 3 ? 1 : eights[which][i % 8]) * (random.one_in(2) ? -power : power));
    Row row = by_loops(0, std::move(x), std::move(w));
    row.exact = which != 2;
    return row;
}

static uint64_t n_numbers() {
    const char* n = std::getenv("HW_PAIRS");
    return n != nullptr ? std::stoull(n) : 1000000;
}

TEST_CASE("rms_norm: random rows of all lengths") {
    Random random(47);
    std::vector<Row> rows;
    for (int n = 1; n <= 40; n++)
        for (int kind = 0; kind < n_kinds; kind++) rows.push_back(draw(random, Kind(kind), size_t(n)));
    for (int n : {127, 128, 129, 512, 1000, 2047, 2048})
        for (int kind = 0; kind < n_kinds; kind++) rows.push_back(draw(random, Kind(kind), size_t(n)));
    check<Vrms_norm>(rows, true);
    rows.clear();
    for (int i = 0; i < 20000; i++) rows.push_back(draw(random, Kind(i % n_kinds), size_t(random.in(1, 4))));
    check<Vrms_norm_4>(rows, true);
}

TEST_CASE("rms_norm: random numbers") {
    Random random(53);
    Tally tally;
    while (tally.compared < n_numbers()) {
        std::vector<Row> rows;
        for (int i = 0; i < 200; i++)
            rows.push_back(draw(random, Kind(i % n_kinds), size_t(random.one_in(10) ? 1024 : 128)));
        check<Vrms_norm>(rows, false, tally);
    }
    MESSAGE(tally.compared << " compared; " << tally.other << " others, of which fp64 is up to "
                           << tally.farthest << " from the middle");
    CHECK(tally.wrong == 0);
}

// As the header of rms_norm.sv has it.
TEST_CASE("rms_norm: clocks") {
    Random random(59);
    Tally tally;
    for (const int n : {1, 128, 2048}) {
        const int64_t took = check<Vrms_norm>({draw(random, normal, size_t(n))}, false, tally);
        MESSAGE(took << " clocks for a row of " << n);
        CHECK((took > 14 * n && took <= 14 * n + 200));
    }
}

TEST_CASE("rms_norm: reset in the middle") {
    Sim<Vrms_norm_4> sim;
    sim.reset();
    auto& top = sim.top;
    Random random(61);
    for (int before = 1; before < 260; before++) {
        top.n_i = 3, top.eps_i = bits_of(1e-5f);
        for (int i = 0, x = 0; i < before; i++) {
            top.x_valid_i = 1, top.x_i = bits_of(float(x)), top.w_valid_i = 1, top.w_i = bits_of(2.0f),
            top.ready_i = before % 3 != 0;
            sim.settle();
            x += top.x_ready_o;
            sim.tick();
        }
        top.x_valid_i = top.w_valid_i = 0, top.ready_i = 1;
        sim.reset(1);
        CHECK((top.x_ready_o && !top.w_ready_o && !top.valid_o));
        const Row row =
            by_loops(0, {bits_of(1), bits_of(2), bits_of(2)}, {bits_of(3), bits_of(5), bits_of(7)});
        top.eps_i = 0;
        size_t x_at = 0, w_at = 0, out = 0;
        for (int i = 0; i < 400 && out < 3; i++) {
            top.x_valid_i = x_at < 3, top.x_i = x_at < 3 ? row.x[x_at] : 0;
            top.w_valid_i = w_at < 3, top.w_i = w_at < 3 ? row.w[w_at] : 0;
            sim.settle();
            if (top.valid_o) CHECK((top.y_o == row.y[out] && bool(top.last_o) == (out == 2)));
            out += top.valid_o, x_at += top.x_valid_i && top.x_ready_o,
                w_at += top.w_valid_i && top.w_ready_o;
            sim.tick();
        }
        CHECK(out == 3);
    }
}
