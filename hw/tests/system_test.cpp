// The master m_axi and the queue of hw/rtl/matmul_axi.sv, under the driver that a host has,
// hw/driver/matmul.h: products whose matrices come from a memory of any latency, equal to the bit; errors,
// stops, and what is refused.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "hw/sim/matmul_system.h"
#include "hw/tests/product_case.h"

namespace {

constexpr size_t memory_bytes = 8 << 20;

// A host: the driver on a system; matrices stand one behind the other in memory, from `shift` beats on.
struct Host {
    MatmulSystem system{memory_bytes};
    matmul_device device;
    int opened = matmul_open(&device, &system.bus);
    size_t used = 0;

    void* pack(const Case& c, const matmul_matrix& m) {
        uint8_t* at = system.data() + used;
        used += matmul_packed_bytes(&device, &m);
        REQUIRE(used <= memory_bytes);
        matmul_pack(&device, &m, c.codes.data(), c.zeros.data(), c.w_scales.data(), at);
        return at;
    }
    // Loads the codes of a case, by registers that the driver does not need, as it lets the core quantize.
    void load(const Case& c) {
        const matmul_bus& b = system.bus;
        device.n_tokens = uint32_t(c.n_tokens), device.n_cols = uint32_t(c.n_cols);
        device.group_size = uint32_t(c.group_size);
        const uint32_t passes = device.group_size / device.rows, groups = device.n_cols / device.group_size;
        std::vector<uint32_t> words;
        for (size_t i = 0; i < c.x.size(); i += 4) {
            if (i % device.group_size == 0)
                words.push_back(std::bit_cast<uint32_t>(c.x_scales[i / device.group_size]));
            words.emplace_back();
            std::memcpy(&words.back(), c.x.data() + i, 4);
        }
        for (const auto& [at, value] :
             std::vector<std::pair<uint32_t, uint32_t>>{{MATMUL_TOKENS, device.n_tokens},
                                                        {MATMUL_PASSES, passes},
                                                        {MATMUL_GROUPS, groups},
                                                        {MATMUL_MODE, 4},
                                                        {MATMUL_CONTROL, 1}})
            b.write(b.context, at, value);
        b.send(b.context, words.data(), words.size() * 4);
        REQUIRE(matmul_wait(&device) == MATMUL_OK);
        b.write(b.context, MATMUL_MODE, 0);
    }
    uint32_t status() { return system.bus.read(&system, MATMUL_STATUS); }
};

matmul_matrix matrix_of(const Case& c) {
    return {uint32_t(c.n_rows), uint32_t(c.n_cols), uint32_t(c.group_size), uint32_t(c.format)};
}

// Up to four products of the same activations in the queue; outputs that differ in a bit.
struct Batch {
    std::vector<Case> cases;
    std::vector<matmul_matrix> matrices;
    std::vector<void*> packed;
    std::vector<std::vector<float>> results;

    // Cases of a batch have one x, that of the first: the others are drawn with the same seed.
    Batch(Host& h, int tokens, int cols, int group, uint32_t seed,
          const std::vector<std::pair<int, RtlFormat>>& of) {
        for (const auto& [rows, format] : of) cases.emplace_back(tokens, rows, cols, group, seed, format);
        for (Case& c : cases) {
            c.x = cases[0].x, c.x_scales = cases[0].x_scales, c.multiply();
            matrices.push_back(matrix_of(c)), packed.push_back(h.pack(c, matrices.back()));
        }
    }
    int push(Host& h) {
        results.assign(cases.size(), {});
        for (size_t i = 0; i < cases.size(); i++) {
            results[i].resize(size_t(cases[i].n_tokens) * matmul_rows_of_tiles(&h.device, &matrices[i]) *
                              h.device.cols);
            if (int e = matmul_push(&h.device, &matrices[i], packed[i], results[i].data()); e != MATMUL_OK)
                return e;
        }
        return MATMUL_OK;
    }
    int differences(Host& h) const {
        int n = 0;
        for (size_t i = 0; i < cases.size(); i++) {
            std::vector<float> out(cases[i].out.size());
            matmul_unpack(&h.device, &matrices[i], results[i].data(), out.data(), matrices[i].n_rows);
            for (size_t k = 0; k < out.size(); k++)
                n += std::bit_cast<uint32_t>(out[k]) != std::bit_cast<uint32_t>(cases[i].out[k]);
        }
        return n;
    }
};

bool has_queue() { return Host().opened == MATMUL_OK; }

}  // namespace

TEST_CASE("a core without a queue says so") {
    Host h;
    if (h.opened == MATMUL_OK) return;
    CHECK(h.device.cols != 0);
    h.system.bus.write(&h.system, MATMUL_QUEUE, 1);
    CHECK(h.status() == MATMUL_REFUSED);
}

TEST_CASE("products from memory are equal to the bit at any latency") {
    if (!has_queue()) return;
    uint32_t seed = 0;
    uint64_t products = 0, bursts = 0, beats = 0;
    for (int latency : {1, 2, 3, 7, 20, 64, 200}) {
        for (double pauses : {0.0, 0.3, 0.7}) {
            CAPTURE(latency);
            CAPTURE(pauses);
            Host h;
            const int cols = int(h.device.cols), rows = int(h.device.rows);
            h.used = size_t(cols) * (seed * 7 % 64);  // bursts begin anywhere
            h.system.memory = {latency, pauses, -1};
            using enum RtlFormat;
            seed += 3;
            Batch mixed(h, 1 + int(seed % 5), 256, 64, seed,
                        {{3 * cols + 1, int8}, {cols, four_bits}, {1, two_bits}, {5 * cols - 1, two_level}});
            Batch flat(h, 2, rows, rows, seed + 1,
                       {{7 * cols, int8}, {2, int8}});                   // the shortest rows of tiles
            Batch whole(h, 16, 512, 512, seed + 2, {{2 * cols, int8}});  // W8A8
            for (Batch* b : {&mixed, &flat, &whole}) {
                h.load(b->cases[0]);
                for (int times = 0; times < 2; times++) {
                    REQUIRE(b->push(h) == MATMUL_OK);
                    REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
                    CHECK(b->differences(h) == 0);
                    CHECK(h.system.idle());
                    products += b->cases.size();
                }
            }
            bursts += h.system.counts.bursts, beats += h.system.counts.beats;
        }
    }
    std::printf("%d products from memory, %d beats in %d bursts, none across 4 KB\n", int(products),
                int(beats), int(bursts));
}

// The share of clocks, from the first address to the last beat, that have a beat.
TEST_CASE("memory delivers a beat in at least 90 % of the clocks") {
    if (!has_queue()) return;
    for (int latency : {20, 50, 100, 200}) {
        CAPTURE(latency);
        Host h;
        h.system.memory.latency = latency;
        const int cols = int(h.device.cols);
        Batch b(h, 1, 2048, 64, 5, {{8 * cols, RtlFormat::int8}, {8 * cols, RtlFormat::int8}});
        h.load(b.cases[0]);
        h.system.clear();
        REQUIRE(b.push(h) == MATMUL_OK);
        REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
        CHECK(b.differences(h) == 0);
        const SystemCounts& c = h.system.counts;
        const double share = double(c.beats) / double(c.last_clock - c.first_clock + 1);
        std::printf("latency %3d: %d beats in %.1f %% of the clocks, up to %d bursts at once\n", latency,
                    int(c.beats), 100 * share, c.most_bursts);
        CHECK(share >= 0.9);
    }
}

TEST_CASE("the driver, by interrupt and by polling") {
    if (!has_queue()) return;
    for (bool polls : {false, true}) {
        CAPTURE(polls);
        Host h;
        if (polls) h.system.bus.wait = nullptr;
        REQUIRE(matmul_open(&h.device, &h.system.bus) == MATMUL_OK);
        // Powers of two: codes and scales are known without the quantizer's arithmetic.
        const int cols = int(h.device.cols), k = 2 * 64;
        std::vector<float> x(size_t(k), 0.0f), out(size_t(2 * cols));
        x[3] = 127, x[70] = -127;
        std::vector<int8_t> w(size_t(2 * cols * k));
        std::vector<float> scales(size_t(2 * cols) * 2, 0.5f);
        for (size_t i = 0; i < w.size(); i++) w[i] = int8_t(i * 37);
        const matmul_matrix m{uint32_t(2 * cols), uint32_t(k), 64, MATMUL_INT8};
        uint8_t* packed = h.system.data();
        matmul_pack(&h.device, &m, w.data(), nullptr, scales.data(), packed);
        REQUIRE(matmul_load(&h.device, x.data(), 1, uint32_t(k), 64) == MATMUL_OK);
        std::vector<float> results(matmul_result_bytes(&h.device, &m) / 4);
        REQUIRE(matmul_push(&h.device, &m, packed, results.data()) == MATMUL_OK);
        REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
        matmul_unpack(&h.device, &m, results.data(), out.data(), m.n_rows);
        int wrong = 0;
        for (size_t i = 0; i < out.size(); i++)
            wrong += out[i] != 63.5f * float(w[i * size_t(k) + 3]) - 63.5f * float(w[i * size_t(k) + 70]);
        CHECK(wrong == 0);
    }
}

TEST_CASE("an error of memory ends the product with a flag, and no beat less") {
    if (!has_queue()) return;
    Host h;
    const int cols = int(h.device.cols);
    h.system.memory = {30, 0.2, -1};
    Batch b(h, 3, 256, 64, 6, {{2 * cols, RtlFormat::int8}, {cols, RtlFormat::int8}});
    for (int64_t at : {0, 5, 100, 400, -1}) {  // in the first product, and in the second
        CAPTURE(at);
        h.load(b.cases[0]);
        CHECK(h.status() == MATMUL_DONE);
        h.system.clear(), h.system.memory.error_at = at;
        REQUIRE(b.push(h) == MATMUL_OK);
        CHECK(matmul_wait(&h.device) == (at >= 0 ? MATMUL_BUS_ERROR : MATMUL_OK));
        CHECK(h.status() == (at >= 0 ? MATMUL_DONE | MATMUL_ERROR : MATMUL_DONE));
        CHECK(h.system.idle());
        CHECK(b.differences(h) == 0);  // this memory sends what it has, all the same
    }
    h.system.clear(), h.system.memory.error_at = 3;
    REQUIRE(b.push(h) == MATMUL_OK);
    CHECK(matmul_wait(&h.device) == MATMUL_BUS_ERROR);
    h.system.reset();
    CHECK(h.status() == 0);
}

TEST_CASE("a stop leaves nothing behind, whenever it comes") {
    if (!has_queue()) return;
    Host h;
    const int cols = int(h.device.cols);
    h.system.memory = {40, 0.3, -1};
    Batch b(h, 3, 256, 64, 7,
            {{2 * cols, RtlFormat::int8}, {cols, RtlFormat::four_bits}, {cols, RtlFormat::int8}});
    for (int after = 0; after < 700; after += 13) {
        CAPTURE(after);
        h.load(b.cases[0]);
        REQUIRE(b.push(h) == MATMUL_OK);
        h.system.run(after);
        h.system.memory.error_at = -1;
        const bool runs = (h.status() & MATMUL_BUSY) != 0;
        h.system.bus.write(&h.system, MATMUL_CONTROL, 8);
        h.system.drop_transfers();
        if (runs) CHECK((h.status() & MATMUL_DONE) == 0);
        h.system.run(1000);  // what memory still owes
        CHECK(h.status() == 0);
        CHECK(h.system.idle());
        CHECK(matmul_room(&h.device) == 4);
        // While it comes, nothing begins.
        h.load(b.cases[0]);
        REQUIRE(b.push(h) == MATMUL_OK);
        REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
        CHECK(b.differences(h) == 0);
    }
    // While an address waits.
    h.system.memory = {40, 0.8, -1};
    std::vector<float> results(matmul_result_bytes(&h.device, &b.matrices[0]) / sizeof(float));
    for (int after = 0; after < 15; after++) {
        CAPTURE(after);
        h.load(b.cases[0]);
        REQUIRE(matmul_push(&h.device, &b.matrices[0], b.packed[0], results.data()) == MATMUL_OK);
        h.system.run(after);
        h.system.bus.write(&h.system, MATMUL_CONTROL, 8);
        h.system.drop_transfers(), h.system.run(4000);
        CHECK(h.status() == 0);
        CHECK(h.system.idle());
    }
    // A command right behind it is refused until all has come.
    h.system.memory = {200, 0, -1};
    h.load(b.cases[0]);
    REQUIRE(b.push(h) == MATMUL_OK);
    h.system.run(30);
    h.system.bus.write(&h.system, MATMUL_CONTROL, 8);
    h.system.drop_transfers();
    CHECK(h.status() == MATMUL_BUSY);
    h.system.bus.write(&h.system, MATMUL_QUEUE, 1);
    h.system.bus.write(&h.system, MATMUL_CONTROL, 1);
    CHECK(h.status() == (MATMUL_BUSY | MATMUL_REFUSED));
    h.system.run(1000);
    CHECK(h.status() == MATMUL_REFUSED);
    // Products that nobody takes results of end by the driver's patience.
    h.load(b.cases[0]);
    h.system.patience = 5000;
    REQUIRE(b.push(h) == MATMUL_OK);
    h.system.drop_transfers();
    CHECK(matmul_wait(&h.device) == MATMUL_TIMED_OUT);
    CHECK(h.status() == 0);
    h.load(b.cases[0]);
    REQUIRE(b.push(h) == MATMUL_OK);
    REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
    CHECK(b.differences(h) == 0);
}

TEST_CASE("the queue refuses what cannot be") {
    if (!has_queue()) return;
    Host h;
    const int cols = int(h.device.cols);
    const matmul_bus& bus = h.system.bus;
    const Case c(1, cols, 64, 64, 8);
    Batch b(h, 1, 64, 64, 8,
            {{40 * cols, RtlFormat::int8},
             {cols, RtlFormat::int8},
             {cols, RtlFormat::int8},
             {cols, RtlFormat::two_bits}});
    auto push = [&](uint64_t address, uint32_t sizes) {
        bus.write(bus.context, MATMUL_FETCH_ADDRESS, uint32_t(address));
        bus.write(bus.context, MATMUL_FETCH_ADDRESS_HIGH, uint32_t(address >> 32));
        CHECK(bus.read(bus.context, MATMUL_FETCH_ADDRESS) == uint32_t(address));
        CHECK(bus.read(bus.context, MATMUL_FETCH_ADDRESS_HIGH) == uint32_t(address >> 32));
        bus.write(bus.context, MATMUL_QUEUE, sizes);
        return h.status();
    };
    const uint64_t good = bus.address(bus.context, b.packed[0]);
    CHECK(push(good, 1) == MATMUL_REFUSED);  // sizes are 0
    h.load(b.cases[0]);
    const uint32_t no = MATMUL_DONE | MATMUL_REFUSED;
    CHECK(push(good, 0) == no);             // no rows of tiles
    CHECK(push(good, 1u << 18 | 1) == no);  // no format
    CHECK(push(good + 1, 1) == no);         // no whole beat
    CHECK(push(good + uint64_t(cols) / 2, 1) == no);
    CHECK(push(good | 1ull << 40, 1) == no);  // 40 bits of address
    CHECK(matmul_room(&h.device) == 4);
    CHECK(h.system.counts.bursts == 0);
    // Four products fit. Sizes stay, and no command begins, as long as there is one.
    REQUIRE(b.push(h) == MATMUL_OK);
    CHECK(matmul_room(&h.device) == 0);
    CHECK(matmul_push(&h.device, &b.matrices[0], b.packed[0], nullptr) == MATMUL_QUEUE_FULL);
    CHECK(push(good, 1) == (MATMUL_BUSY | MATMUL_REFUSED));
    bus.write(bus.context, MATMUL_TOKENS, 2);
    CHECK(bus.read(bus.context, MATMUL_TOKENS) == 1);
    for (uint32_t command : {1u, 2u, 4u}) {
        bus.write(bus.context, MATMUL_CONTROL, command);
        CHECK(h.status() == (MATMUL_BUSY | MATMUL_REFUSED));
    }
    REQUIRE(matmul_wait(&h.device) == MATMUL_OK);
    CHECK(h.status() == no);
    CHECK(b.differences(h) == 0);
    CHECK(matmul_room(&h.device) == 4);
    // The driver refuses what no core takes, with the reason.
    std::vector<float> x(4096);
    const uint32_t rows = h.device.rows;
    CHECK(matmul_load(&h.device, x.data(), 0, 64, 64) == MATMUL_BAD_SIZES);
    CHECK(matmul_load(&h.device, x.data(), 17, 64, 64) == MATMUL_BAD_SIZES);
    CHECK(matmul_why(&h.device, 1, 4096, 64) == std::string("n_cols: up to max_inputs"));
    CHECK(matmul_why(&h.device, 1, 96 * rows, 64 * rows) == std::string("n_cols: a multiple of group_size"));
    CHECK(matmul_why(&h.device, 1, 64, rows + 1) ==
          std::string("group_size: a multiple of the array's rows"));
    CHECK(matmul_why(&h.device, 1, 64, 64) == nullptr);
    matmul_matrix other = b.matrices[1];
    other.n_cols *= 2;
    CHECK(matmul_push(&h.device, &other, b.packed[1], nullptr) == MATMUL_BAD_SIZES);
    CHECK(matmul_push(&h.device, &b.matrices[1], static_cast<uint8_t*>(b.packed[1]) + 1, nullptr) ==
          MATMUL_BAD_SIZES);
    // A reset empties the queue.
    h.load(b.cases[0]);
    REQUIRE(b.push(h) == MATMUL_OK);
    h.system.run(10);
    h.system.reset();
    CHECK(h.status() == 0);
    CHECK(matmul_room(&h.device) == 4);
    h.system.run(300);
    CHECK(h.system.idle());
    CHECK(bus.read(bus.context, MATMUL_FETCH_ADDRESS) == 0);
}
