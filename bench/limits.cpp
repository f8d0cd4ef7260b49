// limits: what this machine can do at most, as one line of JSON.
//
// A decode step reads every weight once and a prompt multiplies with every weight once a token, so two
// figures bound every program here: how fast all threads together read memory, and how many int8
// multiply-adds they do a second. The second is measured with the very operation that the kernels are made
// of, dot4 of engine/cpu/int8.h, in a loop that touches no memory: what a kernel loses to loading, packing
// and scaling shows as the distance from it.
//
//     make build/limits && build/limits [THREADS]

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "engine/cpu/instructions.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/vector.h"
#include "engine/os/memory.h"
#include "engine/os/threads.h"

namespace {

constexpr double seconds_per_try = 0.05;
constexpr int tries = 5;

#if defined(__AVX2__) || defined(__aarch64__)
// Uses v, so that the compiler cannot drop what made it. Costs no instruction.
template <class Vector>
void consume(Vector v) {
#ifdef __AVX2__
    asm volatile("" : : "v"(v));
#else
    asm volatile("" : : "w"(v));
#endif
}
#endif

// Multiply-adds a second of all threads. `work` does some and returns how many, and is called again and
// again; the best of several tries.
template <class Work>
double per_second(int n_threads, Work work) {
    double best = 0;
    for (int i = 0; i < tries; i++) {
        std::vector<double> rates(static_cast<size_t>(n_threads));
        std::barrier begin(n_threads);
        std::vector<std::jthread> team;
        for (double& rate : rates) {
            team.emplace_back([&] {
                begin.arrive_and_wait();
                const double start = seconds_now();
                double done = 0, seconds = 0;
                while (seconds < seconds_per_try) {
                    done += work();
                    seconds = seconds_now() - start;
                }
                rate = done / seconds;
            });
        }
        team.clear();  // waits for all
        best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
    }
    return best;
}

// Multiplying is pipelined: an addition to the same accumulator waits 4 or 5 cycles, and up to two start in
// each, so ten accumulators keep it busy. With them, both operands and what Avx2 needs beside, 16 registers
// are just enough.
constexpr int n_accumulators = 10, rounds = 10000;

#if defined(__AVX2__) || defined(__aarch64__)
// multiply(acc, w, x) for each accumulator, again and again. As in a tile, a vector of weights serves all
// tokens, and each token has an x of its own.
template <class Isa, class Multiply>
void multiply_rounds(Multiply multiply) {
    using Ints = typename Isa::Ints;
    Ints w = Isa::splat(0x01020304), x = Isa::splat(0x05060708);
    auto step = [&](Ints & acc) __attribute__((always_inline)) {
        pin_register(x);
        acc = multiply(acc, w, x);
        pin_register(acc);
    };
    // Ten names and not an array, which g++ 12 would keep in memory.
    Ints a = Isa::splat(0), b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
    for (int round = 0; round < rounds; round++) {
        pin_register(w);
        step(a), step(b), step(c), step(d), step(e), step(f), step(g), step(h), step(i), step(j);
    }
    consume(a), consume(b), consume(c), consume(d), consume(e), consume(f), consume(g), consume(h),
        consume(i), consume(j);
}

template <class Isa>
double dot4_rounds() {
    multiply_rounds<Isa>([](auto acc, auto w, auto x) { return Isa::dot4(acc, w, x); });
    return double{rounds} * n_accumulators * Isa::lanes * 4;
}
#endif

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
// smmla: 2 x 8 codes times 8 x 2, 32 multiply-adds an instruction.
double smmla_rounds() {
    auto smmla = [](int32x4_t acc, int32x4_t w, int32x4_t x) {
        return vmmlaq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
    };
    multiply_rounds<Neon>([&](Neon::Ints acc, Neon::Ints w, Neon::Ints x) { return smmla(acc, w, x); });
    return double{rounds} * n_accumulators * 32;
}
#endif

// The plain loop of runq.cpp and runq_w8a8.cpp, with operands that stay in the first-level cache.
double portable_rounds() {
    constexpr int n_groups = 64, group_size = 64;
    static int8_t w[n_groups * group_size], x[group_size];
    uint32_t total = 0;
    for (int g = 0; g < n_groups; g++) {
        const int8_t *group = w + size_t{group_size} * g, *token = x;
        asm volatile("" : "+r"(group), "+r"(token) : : "memory");
        int32_t sum = 0;
        for (int k = 0; k < group_size; k++) sum += int32_t{token[k]} * int32_t{group[k]};
        total += static_cast<uint32_t>(sum);
    }
    asm volatile("" : : "r"(total));
    return double{n_groups} * group_size;
}

// Bytes per second that the threads together read from a buffer far larger than the caches: the best of
// several passes. 0 if there is no memory for it.
double read_bandwidth(int n_threads) {
    const ReadBuffer buffer(uint64_t{1} << 30, n_threads);
    double best = 0;
    for (int pass = 0; pass < 8; pass++)
        best = std::max(best, static_cast<double>(buffer.size()) / buffer.seconds_to_read());
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const int n_threads = argc > 1 ? std::atoi(argv[1]) : physical_cores();
    if (argc > 2 || n_threads < 1 || n_threads > 1024) {
        std::fprintf(stderr, "usage: limits [THREADS]\n");
        return 2;
    }
    threads().resize(n_threads);
    const double bandwidth = read_bandwidth(n_threads);

    std::string peaks;
    auto peak = [&](const char* name, auto work) {
        char text[64];
        std::snprintf(text, sizeof text, "%s\"%s\": %.2f", peaks.empty() ? "" : ", ", name,
                      per_second(n_threads, work) / 1e9);
        peaks += text;
    };
    peak("portable", portable_rounds);
#ifdef __AVX2__
    peak(Avx2::name, dot4_rounds<Avx2>);
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    peak(AvxVnni::name, dot4_rounds<AvxVnni>);
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    peak(Avx512Vnni::name, dot4_rounds<Avx512Vnni>);
#endif
#ifdef __aarch64__
    peak(Neon::name, dot4_rounds<Neon>);
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    peak(NeonDot::name, dot4_rounds<NeonDot>);
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
    peak(NeonI8mm::name, smmla_rounds);
#endif
    std::printf("{\"threads\": %d, \"kernel\": \"%s\", \"read_gb_per_s\": %.2f, \"peak_gmac_per_s\": {%s}}\n",
                n_threads, int8_kernel_name(64), bandwidth / 1e9, peaks.c_str());
    return 0;
}
