// What all test programs of hw/tests share: a clocked model, lanes of its ports, random numbers, bits of
// fp32.
#pragma once

#include <bit>
#include <cerrno>
#include <cstdint>
#include <random>
#include <string>

#include "hw/sim/assertions.h"
#include "verilated.h"
#if VM_COVERAGE
#include "verilated_cov.h"
#endif

// A model that Verilator made, with a clock. All inputs are 0 at first, but the reset is not active and the
// clock is enabled. Registers begin with random bits (models are made with --x-initial unique): what needs a
// reset shows.
template <class Model>
struct Sim {
    VerilatedContext context;
    Model top{with_random_registers(context)};

    Sim() {
        if constexpr (requires { top.rst_ni; }) top.rst_ni = 1;
        if constexpr (requires { top.en_i; }) top.en_i = 1;
    }
    ~Sim() {
        Verilated::threadContextp(&context);  // Verilator 5.006 takes scopes out of the thread's context
        top.final();
#if VM_COVERAGE
        static int n = 0;  // a file for each model of each program
        const std::string name = std::string(COVERAGE_DIR "/") + program_invocation_short_name + "-" +
                                 top.modelName() + std::to_string(n++) + ".dat";
        context.coveragep()->write(name.c_str());
#endif
    }
    static VerilatedContext* with_random_registers(VerilatedContext& context) {
        context.randReset(2);
        context.randSeed(1);
        return &context;
    }
    // Outputs that follow from the inputs in the same clock.
    void settle() {
        if constexpr (requires { top.clk_i; }) top.clk_i = 0;
        top.eval();
    }
    // A whole clock: inputs are taken in at its end, outputs are those of the next. Throws std::runtime_error
    // if an assertion of the RTL does not hold.
    void tick() {
        settle();
        top.clk_i = 1;
        top.eval();
        settle();
        check_assertions();
    }
    void reset(int clocks = 2) {
        top.rst_ni = 0;
        for (int i = 0; i < clocks; i++) tick();
        top.rst_ni = 1;
        settle();
    }
};

// Bits at .. at + width - 1 of a port of any width; width is at most 32.
template <class Port>
uint32_t bits(const Port& port, int at, int width) {
    const uint64_t mask = (uint64_t(1) << width) - 1;
    if constexpr (std::is_integral_v<Port>) {
        return uint32_t(uint64_t(port) >> at & mask);
    } else {
        const int word = at / 32;
        uint64_t two = port[word];
        if (at % 32 + width > 32) two |= uint64_t(port[word + 1]) << 32;
        return uint32_t(two >> at % 32 & mask);
    }
}
template <class Port>
void set_bits(Port& port, int at, int width, uint32_t value) {
    const uint64_t mask = (uint64_t(1) << width) - 1;
    if constexpr (std::is_integral_v<Port>) {
        port = Port((uint64_t(port) & ~(mask << at)) | (value & mask) << at);
    } else {
        for (int i = 0; i < width; i++) {
            const int word = (at + i) / 32, bit = (at + i) % 32;
            port[word] = (port[word] & ~(1u << bit)) | (value >> i & 1) << bit;
        }
    }
}

// Lane i of a word with lanes of `width` bits; as a signed number.
template <class Port>
int32_t lane(const Port& port, int i, int width) {
    return int32_t(bits(port, i * width, width) << (32 - width)) >> (32 - width);
}
template <class Port>
void set_lane(Port& port, int i, int width, int32_t value) {
    set_bits(port, i * width, width, uint32_t(value));
}

inline uint32_t bits_of(float f) { return std::bit_cast<uint32_t>(f); }
inline float float_of(uint32_t u) { return std::bit_cast<float>(u); }

// Equal to the bit, but that any NaN is as good as any other: a processor's has the bits of an operand, or a
// sign.
inline bool same_float(uint32_t a, uint32_t b) {
    const auto nan = [](uint32_t u) { return (u & 0x7fffffff) > 0x7f800000; };
    return a == b || (nan(a) && nan(b));
}

// Always the same numbers.
struct Random {
    std::mt19937_64 engine;
    explicit Random(uint64_t seed) : engine(seed) {}
    uint64_t operator()() { return engine(); }
    int in(int low, int high) { return low + int(engine() % uint64_t(high - low + 1)); }
    bool one_in(int n) { return engine() % uint64_t(n) == 0; }
};
