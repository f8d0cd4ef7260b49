// dot_row against the accumulators of the golden vectors, and against plain sums, with stalls on both sides.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "Vdot_row.h"
#include "Vdot_row_5.h"
#include "sim.h"
#include "vectors.h"

// A sum to be taken: its codes, in whole words, and the result.
struct Dot {
    std::vector<int> x, w;
    int64_t sum;
};

template <class Model, int lanes, int w_width, int sum_width>
static void check(const std::vector<Dot>& dots, bool stalls, int64_t* clocks = nullptr) {
    Sim<Model> sim;
    sim.reset();
    auto& top = sim.top;
    Random random(17);
    size_t dot = 0, word = 0, came = 0;
    uint64_t wrong = 0;
    int64_t held = 0, now = 0;
    bool was_held = false, offered = false;
    int64_t limit = 1000;  // of a row that loses sums
    for (const Dot& d : dots) limit += 20 * int64_t(d.x.size() / lanes);
    for (; came < dots.size(); now++) {
        if (now == limit) FAIL((dots.size() - came) << " sums are missing");
        const bool more = dot < dots.size();
        // A word that was offered stays until it is taken.
        offered = more && (offered || !(stalls && random.one_in(3)));
        top.valid_i = offered, top.ready_i = !(stalls && random.one_in(3));
        for (int i = 0; i < lanes; i++) {
            set_lane(top.x_i, i, 8, offered ? dots[dot].x[word * lanes + size_t(i)] : int(random()));
            set_lane(top.w_i, i, w_width, offered ? dots[dot].w[word * lanes + size_t(i)] : int(random()));
        }
        top.last_i = offered ? (word + 1) * lanes == dots[dot].x.size() : random() & 1;
        sim.settle();
        const int64_t sum = int64_t(uint64_t(top.sum_o) << (64 - sum_width)) >> (64 - sum_width);
        if (was_held) CHECK((top.valid_o && sum == held));
        was_held = top.valid_o && !top.ready_i, held = sum;
        if (top.valid_o && top.ready_i) wrong += sum != dots[came++].sum;
        if (top.valid_i && top.ready_o) {
            offered = false;
            if (top.last_i)
                dot++, word = 0;
            else
                word++;
        }
        sim.tick();
    }
    CHECK(wrong == 0);
    if (clocks != nullptr) *clocks = now;
}
constexpr auto check_16 = check<Vdot_row, 16, 8, 32>;
constexpr auto check_5 = check<Vdot_row_5, 5, 5, 16>;

TEST_CASE("dot_row: golden accumulators") {
    for (const std::string& name : op_cases("matmul.", "accumulators")) {
        INFO(name);
        const std::vector<int> shape = op_shape(name + ".accumulators");
        const std::vector<int64_t> sums = op(name + ".accumulators"), x = op(name + ".x.codes"),
                                   w = op(name + ".w.codes");
        const int n = shape[0], m = shape[1], groups = shape[2], k = int(x.size()) / n, size = k / groups;
        std::vector<Dot> dots;
        for (int t = 0; t < n; t++)
            for (int i = 0; i < m; i++)
                for (int g = 0; g < groups; g++) {
                    Dot d{{}, {}, sums[size_t((t * m + i) * groups + g)]};
                    for (int j = g * size; j < (g + 1) * size; j++) {
                        d.x.push_back(int(x[size_t(t * k + j)]));
                        d.w.push_back(int(w[size_t(i * k + j)]));
                    }
                    dots.push_back(d);
                }
        check_16(dots, false, nullptr);
        if (k < 5000) check_16(dots, true, nullptr);
    }
}

static std::vector<Dot> draw(int lanes, int most_words, int x_max, int x_min, int w_max, int w_min, int n,
                             bool extreme) {
    Random random(19);
    std::vector<Dot> dots;
    for (int i = 0; i < n; i++) {
        Dot d{{}, {}, 0};
        const int words = extreme ? most_words : random.in(1, most_words), sign = random.in(0, 1);
        for (int j = 0; j < words * lanes; j++) {
            d.x.push_back(extreme ? (sign ? x_min : x_max) : random.in(x_min, x_max));
            d.w.push_back(extreme ? w_min : random.in(w_min, w_max));
            d.sum += int64_t(d.x.back()) * d.w.back();
        }
        dots.push_back(d);
    }
    return dots;
}

// Both operands -128 in a row of 65,536: the sum is 2^30, which takes 32 bits.
TEST_CASE("dot_row: extremes, random, and a word a clock") {
    check_16(draw(16, 4096, 127, -128, 127, -128, 2, true), false, nullptr);
    check_16(draw(16, 9, 127, -128, 127, -128, 300, false), true, nullptr);
    check_5(draw(5, 3, 127, -127, 15, -15, 300, true), true, nullptr);
    check_5(draw(5, 3, 127, -127, 15, -15, 300, false), true, nullptr);
    int64_t clocks = 0;
    check_16(draw(16, 1, 127, -128, 127, -128, 100, false), false, &clocks);
    CHECK(clocks == 100 + 2 + 4);
}

TEST_CASE("dot_row: reset in the middle") {
    Sim<Vdot_row_5> sim;
    auto& top = sim.top;
    for (int before = 1; before < 12; before++) {
        top.valid_i = 1, top.last_i = before % 3 == 0, top.ready_i = before % 2;
        for (int i = 0; i < before; i++) sim.tick();
        top.valid_i = 0, top.ready_i = 1;
        sim.reset(1);
        for (int i = 0; i < 10; i++) {
            CHECK(!top.valid_o);
            sim.tick();
        }
        // One word of ones: a sum that was open is gone.
        for (int i = 0; i < 5; i++) set_lane(top.x_i, i, 8, 1), set_lane(top.w_i, i, 5, 1);
        top.valid_i = top.last_i = 1;
        sim.tick();
        top.valid_i = 0;
        for (int i = 0; i < 4; i++) sim.tick();
        CHECK((top.valid_o && top.sum_o == 5));
        sim.tick();
    }
}
