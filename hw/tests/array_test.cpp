// systolic_array against plain sums, under the control of bench/systolic.py's `simulate`: the same sums in
// the same clocks, and random gaps, pauses and resets.
#include <doctest/doctest.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include ARRAY_HEADER
#include "Varray_16x16.h"
#include "Varray_4x3.h"
#include "Varray_5x2.h"
#include "Varray_5x4_paired.h"
#include "sim.h"
#include "vectors.h"

struct Operands {
    int n_tokens, n_tiles;
    std::vector<int> x, w;  // (n_tiles, n_tokens, rows), (n_tiles, rows, cols)
};

template <class Model, int rows, int cols>
struct ArrayTest {
    static constexpr int sum_width = std::bit_width(unsigned(rows * 128 * 128)) + 1;
    Sim<Model> sim;
    Random random{1};
    const std::vector<int64_t>* stored =
        nullptr;          // the sums, (n_tiles, n_tokens, cols), instead of computed ones
    int stop_after = -1;  // clocks, if not the product's end is to stop it

    Operands draw(int n_tokens, int n_tiles, bool extreme = false) {
        Operands o{n_tokens, n_tiles, {}, {}};
        const auto code = [&] {
            return extreme ? (random() & 1 ? -128 : random() & 1 ? 127 : -128) : random.in(-128, 127);
        };
        for (int i = 0; i < n_tiles * n_tokens * rows; i++) o.x.push_back(code());
        for (int i = 0; i < n_tiles * rows * cols; i++) o.w.push_back(code());
        return o;
    }
    int expected(const Operands& o, int tile, int token, int c) const {
        if (stored != nullptr) return int((*stored)[size_t(tile * o.n_tokens + token) * cols + c]);
        int sum = 0;
        for (int r = 0; r < rows; r++)
            sum += o.x[(tile * o.n_tokens + token) * rows + r] * o.w[(tile * rows + r) * cols + c];
        return sum;
    }

    // Runs the product. row_cycles: between rows of weights. gaps: tokens and weights come late now and then,
    // and the array is stopped. Returns the clocks from the first weight to the last sum, and counts sums
    // that are wrong.
    int64_t run(const Operands& o, int row_cycles, bool gaps, int& wrong) {
        auto& top = sim.top;
        const int n = o.n_tokens;
        std::vector<int> next(cols);  // for each column: tile and token of the sum that comes next
        int64_t now = 0, load_tile = 0, load_row = 0, load_at = 0, tile = -1, token = n, start = -1;
        int64_t remaining = int64_t(o.n_tiles) * n * cols;
        std::vector<int64_t> loaded(rows, -1);  // the clock in which each row of the latest tile came
        const int limit = 1000 + 40 * o.n_tiles * (n + rows * row_cycles);  // of an array that loses sums
        for (int clocks = 0; remaining > 0 && clocks != stop_after; clocks++) {
            if (clocks == limit) FAIL(remaining << " sums are missing");
            const auto noise = [&](auto& port, int width, int lanes) {
                for (int i = 0; i < lanes; i++) set_lane(port, i, width, int(random()));
            };
            top.en_i = !(gaps && random.one_in(5));
            top.w_valid_i = top.x_valid_i = 0;
            top.x_first_i = random() & 1, top.w_row_i = random() % rows;
            noise(top.x_i, 8, rows), noise(top.w_i, 8, cols);
            // A token: of the tile at work, or the first of the one that is loaded, if no cell will be
            // without its weight.
            bool begin = false;
            if (token == n && tile + 1 < o.n_tiles && load_tile == tile + 1) {
                // Rows that are not there yet come at their time if there are no gaps.
                begin = true;
                for (int r = 0; r < rows; r++) {
                    const int64_t at = r < load_row ? loaded[r] : load_at + int64_t(r) * row_cycles;
                    if ((gaps && r >= load_row) || now < at + 1 - r) begin = false;
                }
                if (load_row == 0) begin = false;
            }
            const bool token_comes = (begin || token < n) && !(gaps && random.one_in(3));
            if (token_comes) {
                const int of_tile = begin ? int(tile) + 1 : int(tile), t = begin ? 0 : int(token);
                top.x_valid_i = 1, top.x_first_i = begin;
                for (int r = 0; r < rows; r++) set_lane(top.x_i, r, 8, o.x[(of_tile * n + t) * rows + r]);
            }
            // A row of weights.
            const bool load_first = load_row == 0 && load_tile < o.n_tiles &&
                                    (load_tile == 0 || (tile == load_tile - 1 && now > start));
            const bool load_more = load_row > 0 && load_row < rows;
            bool row_comes = false;
            if (gaps) {
                row_comes =
                    (load_first || (load_more && (tile < 0 || now > start + load_row))) && !random.one_in(3);
            } else {
                row_comes = load_first || (load_more && now == load_at + load_row * row_cycles);
            }
            if (row_comes) {
                top.w_valid_i = 1, top.w_row_i = load_row;
                for (int c = 0; c < cols; c++)
                    set_lane(top.w_i, c, 8, o.w[(load_tile * rows + load_row) * cols + c]);
            }
            if (top.en_i) {
                if (row_comes) {
                    if (load_row == 0) load_at = now;
                    loaded[load_row++] = now;
                }
                if (token_comes) {
                    if (begin) tile++, token = 0, start = now;
                    token++;
                }
                now++;
            }
            const bool moved = top.en_i;
            // While it stands still no input counts.
            if (!moved) {
                top.w_valid_i = top.x_valid_i = top.x_first_i = 1, top.w_row_i = uint8_t(random() % rows);
                noise(top.x_i, 8, rows), noise(top.w_i, 8, cols);
            }
            sim.tick();
            // The loader may go on to the next tile when this one has begun and all its rows have come.
            if (load_row == rows && tile == load_tile &&
                (gaps || now >= load_at + int64_t(rows) * row_cycles))
                load_tile++, load_row = 0;
            if (!moved) continue;
            for (int c = 0; c < cols; c++) {
                if (bits(top.sum_valid_o, c, 1) == 0) continue;
                const int i = next[c]++;
                remaining--;
                if (i >= o.n_tiles * n || lane(top.sum_o, c, sum_width) != expected(o, i / n, i % n, c))
                    wrong++;
            }
        }
        return now;
    }

    void check() {
        for (int row_cycles = 1; row_cycles <= 3; row_cycles++) {
            for (int n : {1, 2, rows - 1, rows, 3 * rows + 1}) {
                for (int n_tiles : {1, 2, 5}) {
                    const Operands o = draw(n, n_tiles, n % 2 == 0);
                    int wrong = 0;
                    sim.reset();
                    const int64_t took = run(o, row_cycles, false, wrong);
                    const int period = std::max(n, rows * row_cycles);
                    CHECK(took ==
                          (rows - 1) * (row_cycles - 1) + 1 + (n_tiles - 1) * period + n + rows + cols - 2);
                    CHECK(wrong == 0);
                    sim.reset();
                    run(o, row_cycles, true, wrong);
                    CHECK(wrong == 0);
                }
            }
        }
    }
};

TEST_CASE("4 x 3") { ArrayTest<Varray_4x3, 4, 3>().check(); }
TEST_CASE("5 x 2") { ArrayTest<Varray_5x2, 5, 2>().check(); }
TEST_CASE("5 x 4, a multiplier for two cells") { ArrayTest<Varray_5x4_paired, 5, 4>().check(); }
TEST_CASE("16 x 16") { ArrayTest<Varray_16x16, 16, 16>().check(); }

// The array that ARRAY of make's command line names.
using ArrayOfMake = ArrayTest<ARRAY_MODEL, ARRAY_ROWS, ARRAY_COLS>;
TEST_CASE("ARRAY") {
    MESSAGE(ARRAY_ROWS << " rows x " << ARRAY_COLS << " columns");
    if (!std::is_same_v<ARRAY_MODEL, Varray_16x16>) ArrayOfMake().check();
}

// Every product of the golden vectors, pass by pass: the sums of each are the file's. Rows of tiles follow
// each other without a gap.
TEST_CASE("ARRAY: golden passes") {
    constexpr int rows = ARRAY_ROWS, cols = ARRAY_COLS;
    for (const Passes& p : all_passes()) {
        INFO(p.name);
        REQUIRE(p.rows == rows);
        REQUIRE(p.cols == cols);
        const std::vector<int64_t> x = p.read("x.codes"), w = p.read("w.codes"), sums = p.read("pass.sums");
        // One product: a tile is a pass of a row of tiles.
        ArrayOfMake test;
        const int n_tiles = p.n_row_tiles() * p.n_passes();
        Operands o{p.n_tokens, n_tiles, {}, std::vector<int>(w.begin(), w.end())};
        for (int row = 0; row < p.n_row_tiles(); row++) o.x.insert(o.x.end(), x.begin(), x.end());
        REQUIRE(o.x.size() == size_t(n_tiles * p.n_tokens * rows));
        REQUIRE(o.w.size() == size_t(n_tiles * rows * cols));
        REQUIRE(sums.size() == size_t(n_tiles * p.n_tokens * cols));
        test.stored = &sums;
        int wrong = 0;
        test.sim.reset();
        const int64_t took = test.run(o, 1, false, wrong);
        CHECK(took == 1 + int64_t(n_tiles - 1) * std::max(p.n_tokens, rows) + p.n_tokens + rows + cols - 2);
        CHECK(wrong == 0);
    }
}

// A reset while weights and tokens are on their way: nothing of them comes out afterwards, and the next
// product is right.
TEST_CASE("4 x 3: reset in the middle") {
    ArrayTest<Varray_4x3, 4, 3> test;
    for (int clocks = 1; clocks < 40; clocks++) {
        const Operands o = test.draw(5, 3);
        int wrong = 0;
        test.stop_after = clocks;
        test.sim.reset(1);
        test.run(o, 1, clocks % 2 == 0, wrong);
        CHECK(wrong == 0);
        test.sim.top.w_valid_i = test.sim.top.x_valid_i = 0;
        test.sim.reset(1);
        for (int i = 0; i < clocks % 9; i++) {
            CHECK(int(test.sim.top.sum_valid_o) == 0);
            test.sim.tick();
        }
        test.stop_after = -1;
        const Operands next = test.draw(5, 3);
        CHECK(test.run(next, 1, false, wrong) == 1 + 2 * 5 + 5 + 4 + 3 - 2);
        CHECK(wrong == 0);
    }
}
