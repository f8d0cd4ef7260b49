// The small units around the array that a whole token needs (hw/rtl/chip_axi.sv): RoPE, residual sums and
// rows of the embedding against the golden vectors and the processor's arithmetic; the vector memory, and the
// ports of memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "Vbeat_to_words.h"
#include "Vcode_packer.h"
#include "Vdequantizer.h"
#include "Vresidual_add.h"
#include "Vrope.h"
#include "Vvector_memory.h"
#include "Vword_reader.h"
#include "Vword_reader_4.h"
#include "Vword_writer.h"
#include "Vword_writer_4.h"
#include "sim.h"
#include "vectors.h"

using Words = std::vector<uint32_t>;

static size_t n_random() {
    const char* named = std::getenv("HW_PAIRS");
    return named == nullptr ? 1000000 : size_t(std::atoll(named));
}

// Any number: of any bits, near 1, or one of the special ones.
static uint32_t any_float(Random& random) {
    static const Words special = {0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x7f7fffff,
                                  0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001};
    switch (random() % 8) {
        case 0:
            return special[random() % special.size()];
        case 1:
            return uint32_t(random());
        default:
            return bits_of(float(int64_t(random()) % 1000003) / 65536.0f);
    }
}

// Offers n_in inputs, which offer(i) sets, and takes n_out results, result() of each. Either side pauses at
// random with `stalls`. What waits has to stay. after: not 0, ends after so many clocks, whatever has come.
template <class Model>
static std::vector<uint64_t> stream(Sim<Model>& sim, size_t n_in, size_t n_out, auto offer, auto result,
                                    bool stalls, int64_t after = 0) {
    auto& top = sim.top;
    Random random(5);
    std::vector<uint64_t> results;
    size_t in = 0;
    bool offered = false, waits = false;
    uint64_t waiting = 0;
    const int64_t limit = after != 0 ? after : 1000 + 100 * int64_t(n_in + n_out);
    for (int64_t now = 0; results.size() < n_out; now++) {
        if (now == limit) {
            if (after == 0) FAIL((n_out - results.size()) << " results are missing");
            break;
        }
        offered = in < n_in && (offered || !(stalls && random.one_in(3)));
        top.valid_i = offered, top.ready_i = !(stalls && random.one_in(3));
        if (offered) offer(in);
        sim.settle();
        const uint64_t value = result();
        if (waits) CHECK((top.valid_o && value == waiting));
        waits = top.valid_o && !top.ready_i, waiting = value;
        if (top.valid_o && top.ready_i) results.push_back(value);
        if (offered && top.ready_o) in++, offered = false;
        sim.tick();
    }
    top.valid_i = 0;
    return results;
}

// How many results are not those that are expected, NaN being NaN.
static size_t n_wrong(const std::vector<uint64_t>& found, const Words& wanted) {
    REQUIRE(found.size() == wanted.size());
    size_t wrong = 0;
    for (size_t i = 0; i < wanted.size(); i++) wrong += !same_float(uint32_t(found[i]), wanted[i]);
    return wrong;
}

// Pairs of words x and y through rope or residual_add.
template <class Model>
static std::vector<uint64_t> pairs(Sim<Model>& sim, const Words& x, const Words& y, bool stalls,
                                   int64_t after = 0) {
    auto& top = sim.top;
    if constexpr (requires { top.turn_i; })
        return stream(
            sim, x.size(), x.size(), [&](size_t i) { top.x_i = x[i], top.turn_i = y[i]; },
            [&] { return top.y_o; }, stalls, after);
    else
        return stream(
            sim, x.size(), x.size(), [&](size_t i) { top.x_i = x[i], top.y_i = y[i]; },
            [&] { return top.sum_o; }, stalls, after);
}

static Words rotated(const Words& x, const Words& turns) {
    Words out;
    for (size_t i = 0; i < x.size(); i += 2) {
        const float a = float_of(x[i]), b = float_of(x[i + 1]), cos = float_of(turns[i]),
                    sin = float_of(turns[i + 1]);
        out.push_back(bits_of(std::fma(a, cos, -(b * sin))));
        out.push_back(bits_of(std::fma(a, sin, b * cos)));
    }
    return out;
}

TEST_CASE("rope: golden vectors") {
    const std::vector<std::string> names = op_cases("rope.", "out");
    CHECK(names.size() == 7);
    for (const std::string& name : names) {
        INFO(name);
        const std::vector<int64_t> x = op(name + ".x"), cos = op(name + ".cos"), sin = op(name + ".sin"),
                                   out = op(name + ".out");
        const std::vector<int> shape = op_shape(name + ".x");  // tokens, heads, head_dim
        const size_t head = size_t(shape[1]) * size_t(shape[2]), half = size_t(shape[2]) / 2;
        Words values, turns;
        for (size_t i = 0; i < x.size(); i++) {
            const size_t at = i / head * half + i % size_t(shape[2]) / 2;
            values.push_back(uint32_t(x[i])), turns.push_back(uint32_t(i % 2 == 0 ? cos[at] : sin[at]));
        }
        Sim<Vrope> sim;
        sim.reset();
        const std::vector<uint64_t> found = pairs(sim, values, turns, false);
        double error = 0, norm = 0;
        for (size_t i = 0; i < out.size(); i++) {
            const double wanted = double(float_of(uint32_t(out[i])));
            error += std::pow(wanted - double(float_of(uint32_t(found[i]))), 2), norm += wanted * wanted;
        }
        CHECK(std::sqrt(error / norm) < 1e-6);
    }
}

TEST_CASE("rope and residual_add: any numbers, stalls, a reset in the middle") {
    Random random(7);
    Words x, y, sums;
    for (size_t i = 0; i < n_random() / 2 * 2; i++) {
        x.push_back(any_float(random)), y.push_back(any_float(random));
        sums.push_back(bits_of(float_of(x.back()) + float_of(y.back())));
    }
    const Words few_x(x.begin(), x.begin() + 2000), few_y(y.begin(), y.begin() + 2000);
    Sim<Vrope> rope;
    rope.reset();
    CHECK(n_wrong(pairs(rope, x, y, false), rotated(x, y)) == 0);
    CHECK(n_wrong(pairs(rope, few_x, few_y, true), rotated(few_x, few_y)) == 0);
    Sim<Vresidual_add> add;
    add.reset();
    CHECK(n_wrong(pairs(add, x, y, false), sums) == 0);
    CHECK(n_wrong(pairs(add, few_x, few_y, true), Words(sums.begin(), sums.begin() + 2000)) == 0);
    for (int after = 1; after < 40; after++) {
        pairs(rope, x, y, false, after), pairs(add, x, y, false, after);
        rope.reset(), add.reset();
        CHECK(n_wrong(pairs(rope, {x.begin(), x.begin() + 8}, {y.begin(), y.begin() + 8}, false),
                      rotated({x.begin(), x.begin() + 8}, {y.begin(), y.begin() + 8})) == 0);
        CHECK(n_wrong(pairs(add, {x.begin(), x.begin() + 8}, {y.begin(), y.begin() + 8}, false),
                      Words(sums.begin(), sums.begin() + 8)) == 0);
    }
}

// A group as dequantizer takes it and code_packer gives it: its scale, then its codes, four in a word.
static void append_group(Words& words, uint32_t scale, const std::vector<int>& codes) {
    words.push_back(scale);
    for (size_t i = 0; i < codes.size(); i++) {
        if (i % 4 == 0) words.push_back(0);
        words.back() |= uint32_t(uint8_t(codes[i])) << 8 * (i % 4);
    }
}

static std::vector<uint64_t> dequantized(Sim<Vdequantizer>& sim, const Words& words, int group, size_t n_out,
                                         bool stalls, int64_t after = 0) {
    auto& top = sim.top;
    top.group_i = uint16_t(group);
    return stream(
        sim, words.size(), n_out, [&](size_t i) { top.word_i = words[i]; }, [&] { return top.y_o; }, stalls,
        after);
}

TEST_CASE("dequantizer: golden rows of the embedding") {
    for (const int group : {32, 64}) {
        const std::string name = "embedding." + std::to_string(group);
        const std::vector<int64_t> tokens = op(name + ".tokens"), out = op(name + ".out");
        Words words;
        for (const int64_t row : tokens)
            for (int64_t first = 0; first < 64; first += group) {
                const int64_t g = first / group;
                std::vector<int> codes;  // by the rule of docs/numerics.md
                for (int64_t c = first; c < first + group; c++)
                    codes.push_back(int((7919 * row + 104729 * c) % 255 - 127));
                append_group(words, bits_of(float(1 + (31 * row + 17 * g) % 10007) / 1048576.0f), codes);
            }
        Sim<Vdequantizer> sim;
        sim.reset();
        CHECK(n_wrong(dequantized(sim, words, group, out.size(), false), Words(out.begin(), out.end())) == 0);
        CHECK(n_wrong(dequantized(sim, words, group, out.size(), true), Words(out.begin(), out.end())) == 0);
    }
}

TEST_CASE("dequantizer and code_packer: any codes and scales, stalls, a reset in the middle") {
    for (const int group : {4, 32, 64}) {
        Random random(uint64_t(group + 11));
        const size_t n_groups = n_random() / 3 / size_t(group);
        Words words, values, scales;
        std::vector<int> all;
        for (size_t g = 0; g < n_groups; g++) {
            std::vector<int> codes;
            scales.push_back(any_float(random));
            for (int i = 0; i < group; i++) {
                codes.push_back(random.in(-128, 127));
                values.push_back(bits_of(float(codes.back()) * float_of(scales.back())));
            }
            append_group(words, scales.back(), codes);
            all.insert(all.end(), codes.begin(), codes.end());
        }
        Sim<Vdequantizer> sim;
        sim.reset();
        dequantized(sim, words, group, values.size(), false, 30);
        sim.reset();
        for (const bool stalls : {false, true})
            CHECK(n_wrong(dequantized(sim, words, group, values.size(), stalls), values) == 0);

        Sim<Vcode_packer> packer;
        auto& top = packer.top;
        auto packed = [&](bool stalls, int64_t after) {
            return stream(
                packer, all.size(), words.size(),
                [&](size_t i) {
                    top.code_i = uint8_t(all[i]), top.scale_i = scales[i / size_t(group)];
                    top.last_i = (i + 1) % size_t(group) == 0;
                },
                [&] { return top.word_o; }, stalls, after);
        };
        packer.reset();
        packed(false, 23);
        packer.reset();
        for (const bool stalls : {false, true}) {
            const std::vector<uint64_t> found = packed(stalls, 0);
            CHECK(std::equal(found.begin(), found.end(), words.begin(), words.end()));
        }
    }
}

TEST_CASE("vector_memory: streams of numbers and of pairs") {
    Sim<Vvector_memory> sim;
    auto& top = sim.top;
    top.start_i = top.write_start_i = top.write_i = 0;
    sim.reset();
    Random random(3);
    Words memory(64);
    auto write = [&](size_t at, size_t n) {
        top.write_start_i = 1, top.write_at_i = uint8_t(at);
        sim.tick();
        top.write_start_i = 0;
        for (size_t i = 0; i < n; i++) {
            top.write_i = 1, top.data_i = memory[at + i] = uint32_t(random());
            sim.tick();
            top.write_i = 0;
            while (random.one_in(3)) sim.tick();
        }
    };
    write(0, 64);
    for (int i = 0; i < 3000; i++) {
        const size_t n = size_t(random.in(1, 30)), period = size_t(random.in(1, 30)),
                     a = size_t(random.in(0, 34)), b = size_t(random.in(0, 34));
        const bool two = random.one_in(2);
        if (i % 10 == 0) write(a, n);
        if (i % 50 == 49) {  // a stream that a reset ends
            top.start_i = 1, top.n_i = 20, top.pairs_i = 1;
            sim.tick();
            top.start_i = 0;
            for (int clock = random.in(0, 9); clock > 0; clock--) sim.tick();
            sim.reset();
            for (int clock = 0; clock < 4; clock++, sim.tick()) CHECK(!top.valid_o);
        }
        // Numbers are written over those that have come, unless these are read again.
        const bool in_place = !two || a + n <= b || b + std::min(n, period) <= a;
        top.start_i = 1, top.pairs_i = two, top.a_i = uint8_t(a), top.b_i = uint8_t(b);
        top.n_i = uint16_t(n), top.period_i = uint16_t(period), top.ready_i = 0;
        top.write_start_i = 1, top.write_at_i = uint8_t(a);
        sim.tick();
        top.start_i = top.write_start_i = 0;
        size_t came = 0, written = 0;
        const bool stalls = random.one_in(2);
        for (int clock = 0; clock < 400; clock++) {
            top.ready_i = !(stalls && random.one_in(2));
            top.write_i = in_place && written < came && random.one_in(2);
            if (top.write_i) top.data_i = memory[a + written++] = uint32_t(random());
            sim.settle();
            if (top.valid_o && top.ready_i) {
                REQUIRE(came < n);
                CHECK(top.b_o == memory[two ? b + came % period : a + came]);
                if (two) CHECK(top.a_o == memory[a + came]);
                came++;
                // A number a clock, a pair in two, behind the latency.
                if (!stalls && came == n) CHECK(clock == int(two ? 2 * n : n));
            }
            sim.tick();
        }
        CHECK(came == n);
    }
}

TEST_CASE("beat_to_words: words of beats, from any lane on") {
    Sim<Vbeat_to_words> sim;
    auto& top = sim.top;
    top.start_i = top.valid_i = 0;
    sim.reset();
    Random random(9);
    for (int i = 0; i < 300; i++) {
        const size_t n = size_t(random.in(1, 40)), lane = size_t(random.in(0, 3)), beats = (n + lane + 3) / 4;
        auto words = [&](bool stalls, int64_t after) {
            top.start_i = 1, top.lane_i = uint8_t(lane), top.words_i = uint32_t(n);
            sim.tick();
            top.start_i = 0;
            // Two beats more than are needed: they are thrown away.
            return stream(
                sim, beats + 2, n,
                [&](size_t beat) {
                    for (size_t j = 0; j < 4; j++)
                        set_lane(top.beat_i, int(j), 32, int32_t(1000 * i) + int32_t(4 * beat + j));
                },
                [&] { return top.word_o; }, stalls, after);
        };
        if (i % 10 == 0) {  // words that a reset drops
            words(false, random.in(1, 9));
            sim.reset();
            CHECK((!top.valid_o && !top.active_o));
        }
        const std::vector<uint64_t> found = words(random.one_in(2), 0);
        for (size_t j = 0; j < n; j++) CHECK(found[j] == uint64_t(1000 * i) + lane + j);
        for (int clock = 0; clock < 4; clock++) {
            top.ready_i = 1;
            sim.settle();
            CHECK((!top.valid_o && !top.active_o));
            sim.tick();
        }
    }
}

// Reads of any words from a memory that takes its time, by bursts that may not cross 4 KB.
template <class Model, int bytes>
static void check_reader() {
    Sim<Model> sim;
    auto& top = sim.top;
    top.start_i = top.r_valid_i = 0;
    sim.reset();
    Random random(13);
    constexpr uint64_t base = 0x1200000000 - 8192;  // 4 GB end among the words
    auto word_at = [](uint64_t address) { return uint32_t(address * 2654435761u >> 2); };
    for (int i = 0; i < 400; i++) {
        if (i % 20 == 0) {  // a read that a reset ends
            top.start_i = 1, top.address_i = base, top.words_i = 1000;
            sim.tick();
            top.start_i = 0;
            for (int clock = random.in(0, 9); clock > 0; clock--) {
                top.ar_ready_i = random.one_in(2);
                sim.tick();
            }
            sim.reset();
            CHECK((!top.active_o && !top.ar_valid_o));
        }
        const uint64_t address = base + 4 * uint64_t(random.in(0, 4000));
        const size_t n = size_t(random.in(1, i % 10 == 0 ? 2000 : 40));
        const bool stalls = random.one_in(2);
        struct Burst {
            uint64_t at;
            int beats;
        };
        std::deque<Burst> bursts;
        size_t came = 0, asked = 0;
        top.start_i = 1, top.address_i = address, top.words_i = uint32_t(n);
        sim.tick();
        top.start_i = 0;
        for (int clock = 0; top.active_o || !bursts.empty(); clock++) {
            REQUIRE(clock < 20000);
            top.ar_ready_i = !(stalls && random.one_in(3)), top.ready_i = !(stalls && random.one_in(3));
            if (!top.r_valid_i && !bursts.empty() && !(stalls && random.one_in(3))) {
                top.r_valid_i = 1, top.r_error_i = random.one_in(8);
                for (int j = 0; j < bytes / 4; j++)
                    set_lane(top.r_data_i, j, 32, int32_t(word_at(bursts.front().at + 4 * uint64_t(j))));
            }
            sim.settle();
            if (top.valid_o && top.ready_i) {
                CHECK(top.word_o == word_at(address + 4 * came));
                came++;
            }
            const bool r = top.r_valid_i && top.r_ready_o;
            CHECK(top.error_o == (r && top.r_error_i));
            if (top.ar_valid_o && top.ar_ready_i) {
                const uint64_t at = top.ar_address_o, end = at + uint64_t(top.ar_len_o + 1) * bytes;
                CHECK((at % bytes == 0 && at / 4096 == (end - 1) / 4096));
                bursts.push_back({at, top.ar_len_o + 1}), asked += size_t(top.ar_len_o + 1);
            }
            if (r) {
                bursts.front().at += bytes;
                if (--bursts.front().beats == 0) bursts.pop_front();
            }
            sim.tick();
            if (r) top.r_valid_i = 0;
        }
        CHECK(came == n);
        CHECK(asked == (address % bytes + 4 * n + bytes - 1) / bytes);
    }
}
TEST_CASE("word_reader: any words of memory") {
    check_reader<Vword_reader, 16>();
    check_reader<Vword_reader_4, 4>();
}

// Writes of any words to a memory that takes addresses and data when it likes.
template <class Model, int bytes>
static void check_writer() {
    Sim<Model> sim;
    auto& top = sim.top;
    top.start_i = top.b_valid_i = 0;
    sim.reset();
    Random random(19);
    constexpr uint64_t base = (uint64_t(1) << 32) - 512;  // 4 GB end among the words
    for (int i = 0; i < 400; i++) {
        if (i % 20 == 0) {  // a write that a reset ends
            top.start_i = top.valid_i = 1, top.address_i = base, top.words_i = 50;
            sim.tick();
            top.start_i = 0;
            for (int clock = random.in(0, 9); clock > 0; clock--) {
                top.aw_ready_i = random.one_in(2), top.w_ready_i = random.one_in(2);
                sim.tick();
            }
            sim.reset();
            CHECK((!top.active_o && !top.aw_valid_o && !top.w_valid_o));
        }
        Words memory(256), wanted(256);
        for (Words* m : {&memory, &wanted})
            for (size_t j = 0; j < m->size(); j++) (*m)[j] = uint32_t(j);
        const size_t first = size_t(random.in(0, 200)), n = size_t(random.in(1, 50));
        const bool stalls = random.one_in(2);
        std::deque<uint64_t> addresses;
        std::deque<std::pair<Words, uint32_t>> beats;
        int answers = 0;
        size_t in = 0;
        bool offered = false;
        top.start_i = 1, top.address_i = base + 4 * first, top.words_i = uint32_t(n);
        sim.tick();
        top.start_i = 0;
        for (int clock = 0; top.active_o; clock++) {
            REQUIRE(clock < 5000);
            offered = offered || !(stalls && random.one_in(3));  // behind the last one, too
            top.valid_i = offered, top.word_i = uint32_t(9000 * i) + uint32_t(in);
            top.aw_ready_i = !(stalls && random.one_in(2)), top.w_ready_i = !(stalls && random.one_in(2));
            if (!top.b_valid_i && answers > 0 && !(stalls && random.one_in(2))) top.b_valid_i = 1;
            top.b_error_i = random.one_in(4);
            sim.settle();
            CHECK(top.error_o == (top.b_valid_i && top.b_error_i));
            if (top.aw_valid_o && top.aw_ready_i) addresses.push_back(top.aw_address_o);
            if (top.w_valid_o && top.w_ready_i) {
                Words words;
                for (int j = 0; j < bytes / 4; j++) words.push_back(uint32_t(lane(top.w_data_o, j, 32)));
                beats.push_back({words, top.w_strb_o});
            }
            if (!addresses.empty() && !beats.empty()) {
                for (size_t j = 0; j < bytes / 4; j++) {
                    const uint32_t strobe = beats.front().second >> 4 * j & 15;
                    CHECK((strobe == 0 || strobe == 15));
                    if (strobe != 0) memory.at((addresses.front() - base) / 4 + j) = beats.front().first[j];
                }
                CHECK((beats.front().second != 0 && addresses.front() % bytes == 0));
                addresses.pop_front(), beats.pop_front(), answers++;
            }
            if (offered && top.ready_o) {
                REQUIRE(in < n);
                wanted[first + in++] = top.word_i, offered = false;
            }
            const bool b = top.b_valid_i && top.b_ready_o;
            sim.tick();
            if (b) top.b_valid_i = 0, answers--;
        }
        CHECK(in == n);
        CHECK(answers == 0);
        CHECK(memory == wanted);
    }
}
TEST_CASE("word_writer: any words of memory") {
    check_writer<Vword_writer, 16>();
    check_writer<Vword_writer_4, 4>();
}
