// Every back end that runs on this machine, through the C interface, against plain arithmetic.
#include "engine/backend/backend.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backend_cases.h"
#include "golden.h"
#include "own_folder.h"

namespace {

#ifdef __x86_64__
const std::filesystem::path folder = "build/portable/x86_64/backends";
#else
const std::filesystem::path folder = "build/portable/aarch64/backends";
#endif

// Calls check(back end) for each that runs here.
void for_each_backend(const std::function<void(Opened&)>& check) {
    int n = 0;
    for (const auto& found : backends_in(folder)) {
        const std::string& name = found.first;
        CHECK(found.second == folder / ("quant_gemm_" + name + ".so"));
        const QuantGemmBackend* api = load_backend(found.second);
        CHECK(api->name == name);
        if (api->rank() == 0) {
            MESSAGE(name << " does not run here and is not tested");
            continue;
        }
        CAPTURE(name);
        Opened opened(api);
        check(opened);
        n++;
    }
    CHECK(n >= 2);
}
// Emulated GPUs, and the simulated circuit of hw/.
bool is_slow(const Opened& b) {
    return std::string(b.api->name).starts_with("emulated") || std::string(b.api->name) == "rtl";
}

}  // namespace

TEST_CASE("back ends: only regular files are one") {
    const std::filesystem::path here = own_folder() / "back ends";
    const auto file = [&](const char* name) { return here / (std::string(name) + library_suffix); };
    std::filesystem::create_directories(file("quant_gemm_folder"));
    for (const char* name : {"quant_gemm_b", "quant_gemm_a", "quant_gemm_", "another"})
        std::ofstream(file(name)) << "";
    std::filesystem::create_symlink(file("quant_gemm_a"), file("quant_gemm_link"));
    std::filesystem::create_symlink(here / "nothing", file("quant_gemm_nothing"));
    REQUIRE(mkfifo(file("quant_gemm_fifo").c_str(), 0600) == 0);  // opening it would wait for a writer
    std::vector<std::string> names;
    for (const auto& [name, path] : backends_in(here)) names.push_back(name);
    CHECK(names == std::vector<std::string>{"a", "b", "link"});
    CHECK(backends_in(here / "nothing").empty());
}

TEST_CASE("back ends: each member that has to be there is missed") {
    const QuantGemmBackend whole = *load_backend(folder / "quant_gemm_emulated.so");
    CHECK(is_whole(whole));
#define CHECK_MISSED(member)                    \
    do {                                        \
        QuantGemmBackend api = whole;           \
        api.member = nullptr;                   \
        CHECK_MESSAGE(!is_whole(api), #member); \
    } while (false)
    CHECK_MISSED(name);
    CHECK_MISSED(rank);
    CHECK_MISSED(open);
    CHECK_MISSED(close);
    CHECK_MISSED(accepts);
    CHECK_MISSED(load);
    CHECK_MISSED(multiply);
    CHECK_MISSED(error_text);
#undef CHECK_MISSED
    QuantGemmBackend api = whole;
    api.quantize = nullptr;
    CHECK(is_whole(api));
}

// With scales that are small whole numbers and halves an output is exact, and so is each accumulator.
TEST_CASE("back ends: the accumulators of every format are exact, for few tokens and many") {
    for_each_backend([](Opened& b) {
        std::mt19937 rng(3);
        for (const LowbitFormat& f : all_formats()) {
            for (const int n_cols : {64, 192, 320, 448, 1152}) {
                if (f.group > 0 && n_cols % f.group != 0) continue;
                for (const int group_size : group_sizes(f)) {
                    for (const int n_tokens : {1, 3, 9, 70}) {
                        if (is_slow(b) && n_cols > (full_sweeps() ? 448 : 320)) continue;
                        const auto fill = LowbitFill(n_tokens % 3);
                        const Fill x_fill = fill == LowbitFill::uniform ? uniform : all_minus_127;
                        const int n_rows = n_tokens == 70 ? 133 : 13 + n_cols / 64 % 7;
                        const LowbitCase w = make_lowbit(rng, f, group_size, n_rows, n_cols, fill, true);
                        const Matrix x = filled_matrix(rng, x_fill, false, n_tokens, n_cols, group_size);
                        CAPTURE(format_text(f));
                        CAPTURE(n_cols);
                        CAPTURE(group_size);
                        CAPTURE(n_tokens);
                        if (!accepts(b, w.view())) continue;
                        const std::vector<float> exact = plain_outputs(x.rows(), w);
                        CHECK(outputs(b, x.rows(), w.view()) == exact);
                        CHECK(outputs(b, x.rows(), w.view(), true) == exact);
                    }
                }
            }
        }
    });
}

TEST_CASE("back ends: outputs with any scales are those of plain loops, bit for bit") {
    for_each_backend([](Opened& b) {
        std::mt19937 rng(4);
        for (const LowbitFormat& f : all_formats()) {
            const int n_cols = 576 + 64 * (f.group == 128), group_size = group_sizes(f).back();
            for (const int n_tokens : {1, 17}) {
                CAPTURE(format_text(f));
                CAPTURE(n_tokens);
                const LowbitCase w = make_lowbit(rng, f, group_size, 37, n_cols, LowbitFill::uniform, false);
                const Matrix x = filled_matrix(rng, uniform, true, n_tokens, n_cols, group_size);
                if (!accepts(b, w.view())) continue;
                CHECK(outputs(b, x.rows(), w.view()) == plain_outputs(x.rows(), w));
            }
        }
    });
}

TEST_CASE("back ends: codes, scales and sums of activations are those of the plain loop, bit for bit") {
    for_each_backend([](Opened& b) {
        if (b.api->quantize == nullptr) return;  // the program does it
        std::mt19937 rng(5);
        for (int trial = 0; trial < 140; trial++) {
            const int group_size = trial % 2 ? 32 : 64, n = 8 * group_size;
            CAPTURE(trial);
            const std::vector<float> x = awkward_groups(rng, trial, group_size);
            std::vector<int8_t> codes(x.size());
            std::vector<float> scales(8);
            reference_quantize(codes.data(), scales.data(), x.data(), n, group_size);
            std::vector<int8_t> own_codes(x.size());
            std::vector<float> own_scales(8);
            std::vector<int32_t> sums(8);
            REQUIRE(b.api->quantize(b.context, own_codes.data(), own_scales.data(), sums.data(), x.data(), 2,
                                    n / 2, group_size) == QUANT_GEMM_OK);
            CHECK(own_codes == codes);
            CHECK(own_scales == scales);
            CHECK(sums == make_matrix(codes, scales, 2, n / 2, group_size).sums);
        }
    });
}

TEST_CASE("back ends: what leaves quantizing to the program gets codes, scales, sums, and NaN for a scale") {
    QuantGemmBackend api = *load_backend(folder / "quant_gemm_emulated.so");
    api.quantize = nullptr;
    Backend backend(&api);
    std::mt19937 rng(8);
    Rows x(2, 192);
    x.n_rows = 2;
    x.values = random_values(rng, 2 * 192);
    Int8Rows rows;
    backend.quantize(rows, x, 64);
    std::vector<int8_t> codes(2 * 192);
    std::vector<float> scales(6);
    reference_quantize(codes.data(), scales.data(), x.row(0), 2 * 192, 64);
    CHECK(std::vector<int8_t>(rows.codes.begin(), rows.codes.begin() + 2 * 192) == codes);
    CHECK(std::vector<float>(rows.scales.begin(), rows.scales.begin() + 6) == scales);
    CHECK(std::vector<int32_t>(rows.sums.begin(), rows.sums.begin() + 6) ==
          make_matrix(codes, scales, 2, 192, 64).sums);
    x.row(1)[100] = NAN;
    backend.quantize(rows, x, 64);
    CHECK(std::isfinite(rows.row_scales(0)[1]));
    CHECK(std::isnan(rows.row_scales(1)[1]));
}

TEST_CASE("back ends: the loader refuses what is none") {
    CHECK_THROWS_WITH(load_backend("/nowhere/quant_gemm_x.so"),
                      doctest::Contains("/nowhere/quant_gemm_x.so: cannot open shared object file"));
    auto none = [](const std::string&) { FAIL("no warning expected"); };
    CHECK(open_backend("builtin", {}, false, none) == nullptr);
    CHECK_THROWS_AS(open_backend("no such thing", {}, false, none), UsageError);
}
