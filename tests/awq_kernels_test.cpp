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

TEST_CASE("kernel: awq_gemv and awq_gemm in more splits or blocks than there is work for") {
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
    using S = RungMemory&;
    using X = const half*;
    using P = const AwqProducts&;
    const auto gemv = [&]<int words, int warps>() {
        CHECK(error(1, one, [](S s, X x, int, P p) {
                  run_gemv<words, warps>(s.scratch(), x, p, max_splits);
              }) < 1e-5);
    };
    gemv.template operator()<1, 4>(), gemv.template operator()<1, 8>();
    gemv.template operator()<4, 4>(), gemv.template operator()<4, 8>();
    const auto gemm = [&]<int tile_tokens>() {
        CHECK(error(n_tokens, several,
                    [](S s, X x, int n, P p) { run_gemm<tile_tokens>(s.scratch(), x, n, p, 1000); }) < 1e-5);
    };
    gemm.template operator()<16>(), gemm.template operator()<32>(), gemm.template operator()<64>();
}

// As many blocks as a device of 132 multiprocessors (H100, H200) gives a tile of long rows: Llama 3.2 1B's
// down_proj takes 32 splits, or 16 blocks; on the emulator's 4 multiprocessors there are few. Of the inputs
// of a block's share one is not 0, so that its sum is one product, which is exact: the result has to be their
// sum in the order of the blocks, to the bit.
TEST_CASE("kernel: up to 33 blocks share a tile, and their sums are added in order") {
    Random random(5);
    const Device before = device();
    device().n_sms = 132, device().shared_per_sm = 233472;
    // share: inputs from one that is not 0 to the next.
    const auto check = [&](int n_tokens, int n_in, int n_out, int share, auto run) {
        CAPTURE(n_in);
        CAPTURE(share);
        DeviceProblem d = make_device_problem({"", "", n_in, {n_out}}, 128, n_tokens, 0, false, random);
        d.s.arrivals.clear();
        std::vector<float> expected(size_t(n_tokens) * n_out), found(expected.size());
        for (half& x : d.host_x) x = __float2half(0);
        for (int token = 0; token < n_tokens; token++) {
            for (int k = 0; k < n_in; k += share) {
                const int place = k + int(random() % std::min({share, 256, n_in - k}));
                const float x = __half2float(__float2half(uniform(random, -4, 4)));
                d.host_x[size_t(token) * n_in + place] = __float2half(x);
                for (int column = 0; column < n_out; column++)
                    expected[size_t(token) * n_out + column] += x * float(d.host[0].weight(place, column));
            }
        }
        d.x.upload(d.host_x.data(), d.host_x.size());
        run(d.s.scratch(), d.x.get(), d.products(0, n_tokens));
        download(found.data(), d.out.get(), found.size());
        CHECK(found == expected);
    };

    const auto gemv = [&]<int words>(int n_in, int n_out, GemvShape expected) {
        const GemvShape shape = gemv_shape(n_in, (n_out + 64 * words - 1) / (64 * words), 256,
                                           gemv_steps * sizeof(GemvStep<words>));
        CHECK(shape.n_warps == expected.n_warps);
        CHECK(shape.n_splits == expected.n_splits);
        check(1, n_in, n_out, expected.n_warps * expected.steps(n_in) * gemv_inputs,
              [](const SplitScratch& s, const half* x, const AwqProducts& p) { run_gemv(s, x, p); });
    };
    gemv.template operator()<1>(1152, 72, {8, 9});  // rows that begin anywhere, a tile of 8 columns
    gemv.template operator()<4>(2176, 32, {8, 17});
    gemv.template operator()<4>(4096, 288, {8, 32});  // the most, of two tiles
    gemv.template operator()<4>(4736, 32, {4, 9});    // the last split has fewer inputs

    const auto gemm = [&]<int tile_tokens>(int n_in, int n_out, int most_blocks, int n_blocks, int share) {
        const int n_tokens = tile_tokens - 7;
        check(n_tokens, n_in, n_out, share, [=](const SplitScratch& s, const half* x, const AwqProducts& p) {
            CHECK(GemmPlan<tile_tokens>(p, n_tokens, most_blocks).n_blocks == n_blocks);
            run_gemm<tile_tokens>(s, x, n_tokens, p, most_blocks);
        });
    };
    gemm.template operator()<16>(8448, 136, 264, 66, 256);  // 33 sums of each tile
    gemm.template operator()<16>(8448, 160, 34, 33, 512);   // 17; one block has a part of both tiles
    gemm.template operator()<16>(8448, 160, 18, 17, 1024);  // 9, of unequal shares
    gemm.template operator()<64>(4224, 8, 264, 33, 128);
    device() = before;
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
