// The rungs of bench/awq_kernels.cuh on small matrices of every kind: all of them against a product in
// float64, and with inputs of which all but one are 0, where each output is a single weight and has to be
// exact.
#include <doctest/doctest.h>

#include "bench/awq_harness.cuh"

namespace {

const std::vector<Problem> small_problems = {
    {"", "a group, a word", 128, {8}},
    {"", "rows that begin anywhere", 256, {136}},
    {"", "half a tile", 256, {192}},
    {"", "more than a tile, several groups", 384, {320}},
    {"", "several products", 256, {128, 64, 256}},
    {"", "tiles of 128", 128, {256}},
};

// Gives every token the input 1 at its own place and 0 elsewhere. Returns the places.
std::vector<int> set_unit_inputs(DeviceProblem& d, int n_tokens, Random& random) {
    std::vector<int> places;
    for (half& x : d.host_x) x = __float2half(0);
    for (int token = 0; token < n_tokens; token++) {
        places.push_back(int(random() % d.n_in));
        d.host_x[size_t(token) * d.n_in + places.back()] = __float2half(1);
    }
    d.x.upload(d.host_x.data(), d.host_x.size());
    return places;
}

bool is_cublas(const Rung& rung) { return rung.name.find("cuBLAS") != std::string::npos; }

void check_against_float64(bool cublas) {
    Random random(1);
    for (const Problem& problem : small_problems) {
        for (const int group_size : {128, 64}) {
            DeviceProblem d = make_device_problem(problem, group_size, 40, 0, true, random);
            for (const int n_tokens : {1, 2, 16, 17, 40}) {
                const std::vector<Sample> samples = sample_outputs(d, n_tokens, 200, random);
                int n_run = 0;
                for (const Rung& rung : all_rungs()) {
                    if (is_cublas(rung) != cublas || !can_run(rung, d, n_tokens)) continue;
                    n_run++;
                    CAPTURE(problem.name);
                    CAPTURE(group_size);
                    CAPTURE(n_tokens);
                    CAPTURE(rung.name);
                    const double error = relative_error_of(rung, d, n_tokens, samples);
                    // With so few inputs, what tensor cores cut off does not add up to anything.
                    CHECK(error < (rung.result == Result::fp16 ? 1e-3 : 1e-5));
                }
                CHECK(n_run >= (cublas ? 2 : 5));
            }
        }
    }
}

void check_every_weight(bool cublas) {
    Random random(2);
    for (const Problem& problem : small_problems) {
        DeviceProblem d = make_device_problem(problem, 128, 17, 0, true, random);
        for (const int n_tokens : {1, 17}) {
            const std::vector<int> places = set_unit_inputs(d, n_tokens, random);
            std::vector<Sample> all;  // every output is one
            for (const HostMatrix& m : d.host) {
                for (const int place : places) {
                    for (int column = 0; column < m.n_out; column++)
                        all.push_back({all.size(), m.weight(place, column)});
                }
            }
            for (const Rung& rung : all_rungs()) {
                if (is_cublas(rung) != cublas || !can_run(rung, d, n_tokens)) continue;
                CAPTURE(problem.name);
                CAPTURE(n_tokens);
                CAPTURE(rung.name);
                CHECK(relative_error_of(rung, d, n_tokens, all) == 0);
            }
        }
    }
}

}  // namespace

TEST_CASE("kernel: every rung of the ladder agrees with float64") { check_against_float64(false); }

TEST_CASE("kernel: every rung of the ladder dequantizes exactly") { check_every_weight(false); }

// Apart from ours, so that tools that look into kernels can leave cuBLAS out.
#ifdef HAVE_CUBLAS
TEST_CASE("cuBLAS: its rungs agree with float64, and their weights are exact") {
    check_against_float64(true);
    check_every_weight(true);
}
#endif

TEST_CASE(
    "kernel: awq_gemv and awq_gemm in any number of splits or blocks, even more than there is work for") {
    Random random(3);
    const Problem problem{"", "", 640, {320, 64}};
    const int n_tokens = 20;
    DeviceProblem d = make_device_problem(problem, 128, n_tokens, 0, false, random);
    const std::vector<Sample> one = sample_outputs(d, 1, 384, random),
                              several = sample_outputs(d, n_tokens, 384, random);
    auto error = [&](int n, const std::vector<Sample>& samples, auto run) {
        const Rung rung{"", Result::fp32, WeightsRead::int4, 1, n, {}, run};
        return relative_error_of(rung, d, n, samples);
    };
    for (const int n_splits : {1, 2, 5, 16, 1000}) {  // of a tile, or blocks of all tiles
        CAPTURE(n_splits);
        using S = RungMemory&;
        using X = const half*;
        using P = const AwqProducts&;
        if (n_splits <= max_splits) {
            const auto check = [&]<int words, int warps>() {
                CHECK(error(1, one, [=](S s, X x, int, P p) {
                          run_gemv<words, warps>(s.scratch(), x, p, n_splits);
                      }) < 1e-5);
            };
            check.template operator()<1, 4>(), check.template operator()<1, 8>();
            check.template operator()<4, 4>(), check.template operator()<4, 8>();
        }
        CHECK(error(n_tokens, several,
                    [=](S s, X x, int n, P p) { run_gemm<16>(s.scratch(), x, n, p, n_splits); }) < 1e-5);
        CHECK(error(n_tokens, several,
                    [=](S s, X x, int n, P p) { run_gemm<32>(s.scratch(), x, n, p, n_splits); }) < 1e-5);
        CHECK(error(n_tokens, several,
                    [=](S s, X x, int n, P p) { run_gemm<64>(s.scratch(), x, n, p, n_splits); }) < 1e-5);
    }
}

TEST_CASE("kernel: the ladder notices what is wrong") {
    Random random(4);
    DeviceProblem d = make_device_problem({"", "", 256, {128}}, 128, 18, 0, false, random);
    const std::vector<Sample> samples = sample_outputs(d, 17, 128, random);
    auto error = [&](auto run) {
        const Rung rung{"", Result::fp32, WeightsRead::int4, 1, 17, {}, run};
        return relative_error_of(rung, d, 17, samples);
    };
    using S = RungMemory&;
    using X = const half*;
    using P = const AwqProducts&;
    CHECK(error([](S s, X x, int n, P p) { run_gemm<16>(s.scratch(), x, n, p); }) < fp32_tolerance);
    // A token that is not there, a token too many, wrong zero points.
    CHECK(std::isinf(error([](S s, X x, int n, P p) { run_gemm<16>(s.scratch(), x, n - 1, p); })));
    CHECK(std::isinf(error([](S s, X x, int n, P p) { run_gemm<16>(s.scratch(), x, n + 1, p); })));
    CHECK(error([](S s, X x, int n, P p) {
              AwqProducts other = p;
              other.items[0].w.qzeros = other.items[0].w.qweight;
              run_gemm<16>(s.scratch(), x, n, other);
          }) > 1e-2);
}
