// Two int8 products by one multiplier, hw/rtl/mac_cell_pair.sv, beside two cells: in every clock the same
// outputs, for all 2^24 products, and for random weights, swaps, loads and pauses.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <random>

#include "Vmac_pair.h"
#include "sim.h"

namespace {
void set(Vmac_pair& t, int x, int w0, int w1, bool load, bool swap) {
    t.x_i = uint8_t(x), t.w_0_i = uint8_t(w0), t.w_1_i = uint8_t(w1), t.load_i = load, t.swap_i = swap;
}
}  // namespace

TEST_CASE("mac_cell_pair: every product of two weights with an activation") {
    Sim<Vmac_pair> sim;
    sim.reset();
    int n_wrong = 0;
    sim.top.sum_0_i = 1, sim.top.sum_1_i = 2;
    for (int w0 = -128; w0 < 128; w0++) {
        for (int w1 = -128; w1 < 128; w1++) {
            set(sim.top, 0, w0, w1, true, false);
            sim.tick(), sim.tick();
            set(sim.top, -128, 0, w1, false, true);
            sim.tick();
            for (int x = -127; x < 128; x++) {
                set(sim.top, x, 0, 0, false, false);
                sim.tick();
                n_wrong += lane(sim.top.sum_0_o, 0, 20) != 1 + w0 * x;
                n_wrong += lane(sim.top.sum_1_o, 0, 20) != 2 + w1 * (x - 1);
            }
        }
    }
    CHECK(n_wrong == 0);
}

TEST_CASE("mac_cell_pair: two cells, whatever comes behind a reset") {
    Sim<Vmac_pair> sim;
    Random random(1);
    // Registers without a reset get values first.
    set(sim.top, 0, 0, 0, true, true);
    sim.reset(4);
    for (int i = 0; i < 4; i++) sim.tick();
    int n_wrong = 0;
    for (int i = 0; i < 1000000; i++) {
        set(sim.top, int(random()), int(random()), int(random()), random.one_in(3), random.one_in(3));
        sim.top.sum_0_i = uint32_t(random() & 0xfffff), sim.top.sum_1_i = uint32_t(random() & 0xfffff);
        sim.top.en_i = !random.one_in(5);
        sim.tick();
        n_wrong += !sim.top.same_o;
    }
    CHECK(n_wrong == 0);
}
