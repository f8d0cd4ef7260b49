// Every back end that runs on this machine, through the C interface, against plain arithmetic.
#include "common/backend/backend.h"

#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "int8_cases.h"
#include "lowbit_cases.h"

namespace {

#ifdef __x86_64__
const std::filesystem::path folder = "build/portable/x86_64/backends";
#else
const std::filesystem::path folder = "build/portable/aarch64/backends";
#endif

// An open back end, and the memory that it gave.
struct Opened {
    const QuantGemmBackend* api;
    void* context = nullptr;
    std::vector<void*> memory;

    explicit Opened(const QuantGemmBackend* a) : api(a) { REQUIRE(api->open(&context) == QUANT_GEMM_OK); }
    ~Opened() { api->close(context); }
    void release() {
        for (void* m : memory) api->release(context, m);
        memory.clear();
    }
    void* allocate(size_t n_bytes) {
        void* m = nullptr;
        REQUIRE(api->allocate(context, &m, n_bytes) == QUANT_GEMM_OK);
        return memory.emplace_back(m);
    }
    template <class T>
    void* upload(const T* from, size_t n) {
        if (from == nullptr) return nullptr;
        void* to = allocate(n * sizeof(T));
        REQUIRE(api->upload(context, to, from, n * sizeof(T)) == QUANT_GEMM_OK);
        return to;
    }
    template <class T>
    std::vector<T> download(const void* from, size_t n) {
        std::vector<T> to(n);
        REQUIRE(api->download(context, to.data(), from, n * sizeof(T)) == QUANT_GEMM_OK);
        return to;
    }
    QuantGemmMatrix upload(const LowbitMatrix& w) {
        QuantGemmMatrix m = to_c(w);
        const size_t n_scales = size_t(w.n_rows * w.n_scales());
        m.codes = upload(w.codes, size_t(w.n_rows) * w.n_code_bytes());
        m.mask = upload(w.mask, size_t(w.n_rows * w.n_cols / 8));
        m.scales = upload(w.scales, n_scales);
        m.zeros = upload(w.zeros, size_t(w.n_rows) * w.n_zero_bytes());
        m.levels = upload(w.levels, n_scales);
        m.row_scales = upload(w.row_scales, size_t(w.n_rows));
        return m;
    }
    QuantGemmRows upload(const Int8Matrix& x) {
        const size_t n_groups = size_t(x.n_rows * x.n_groups());
        return {upload(x.codes, size_t(x.n_rows * x.n_cols)),
                upload(x.scales, n_groups),
                upload(x.sums, n_groups),
                x.n_rows,
                x.n_cols,
                x.group_size};
    }
};

constexpr float unwritten = 1e30f;

// Whether it multiplies such matrices. The example in docs/ does not take all formats.
bool accepts(const Opened& b, const LowbitMatrix& w) {
    const QuantGemmMatrix m = to_c(w);
    const int32_t status = b.api->accepts(b.context, &m);
    CHECK((status == QUANT_GEMM_OK || status == QUANT_GEMM_UNSUPPORTED));
    CHECK((status == QUANT_GEMM_OK || std::string(b.api->name) == "example"));
    return status == QUANT_GEMM_OK;
}

// x times w, twice in one call. Checks that both are the same and that nothing is written behind them.
std::vector<float> outputs(Opened& b, const Int8Matrix& x, const LowbitMatrix& w) {
    const size_t n = size_t(x.n_rows * w.n_rows);
    const std::vector<float> before(n + 8, unwritten);
    QuantGemmProduct list[2];
    for (QuantGemmProduct& p : list) p = {b.upload(before.data(), before.size()), b.upload(w)};
    const QuantGemmRows rows = b.upload(x);
    const int32_t status = b.api->multiply(b.context, &rows, list, 2);
    CHECK_MESSAGE(status == QUANT_GEMM_OK, b.api->error_text());
    std::vector<float> out = b.download<float>(list[0].out, n + 8);
    CHECK(out == b.download<float>(list[1].out, n + 8));
    CHECK(std::count(out.end() - 8, out.end(), unwritten) == 8);
    b.release();
    out.resize(n);
    return out;
}

// Calls check(back end) for each that runs here.
void for_each_backend(const std::function<void(Opened&)>& check) {
    int n = 0;
    for (const std::string& name : backend_names(folder)) {
        const QuantGemmBackend* api = load_backend(folder / ("quant_gemm_" + name + ".so"));
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
bool is_slow(const Opened& b) { return std::string(b.api->name).starts_with("emulated"); }

}  // namespace

// With scales that are small whole numbers and halves an output is exact, and so is each accumulator.
TEST_CASE("back ends: the accumulators of every format are exact, for few tokens and many") {
    for_each_backend([](Opened& b) {
        std::mt19937 rng(3);
        for (const MatrixFormat& f : all_formats()) {
            for (const int n_cols : {64, 192, 320, 448, 1152}) {
                if (f.group > 0 && n_cols % f.group != 0) continue;
                for (const int group_size : group_sizes(f)) {
                    for (const int n_tokens : {1, 3, 9, 70}) {
                        if (is_slow(b) && n_cols > 448) continue;
                        const auto fill = LowbitFill(n_tokens % 3);
                        const Fill x_fill = fill == LowbitFill::uniform ? uniform : all_minus_127;
                        const int n_rows = n_tokens == 70 ? 133 : 3 + n_cols / 64 % 7;
                        const LowbitCase w = make_lowbit(rng, f, group_size, n_rows, n_cols, fill, true);
                        const Matrix x = filled_matrix(rng, x_fill, false, n_tokens, n_cols, group_size);
                        CAPTURE(format_text(f));
                        CAPTURE(n_cols);
                        CAPTURE(group_size);
                        CAPTURE(n_tokens);
                        if (!accepts(b, w.view())) continue;
                        CHECK(outputs(b, x.view(), w.view()) == exact_outputs(x.view(), w));
                    }
                }
            }
        }
    });
}

TEST_CASE("back ends: outputs with any scales are close") {
    for_each_backend([](Opened& b) {
        std::mt19937 rng(4);
        for (const MatrixFormat& f : all_formats()) {
            const int n_cols = 576 + 64 * (f.group == 128), group_size = group_sizes(f).back();
            for (const int n_tokens : {1, 17}) {
                CAPTURE(format_text(f));
                CAPTURE(n_tokens);
                const LowbitCase w = make_lowbit(rng, f, group_size, 37, n_cols, LowbitFill::uniform, false);
                const Matrix x = filled_matrix(rng, uniform, true, n_tokens, n_cols, group_size);
                if (!accepts(b, w.view())) continue;
                CHECK(relative_error(exact_outputs(x.view(), w), outputs(b, x.view(), w.view())) < 1e-6);
            }
        }
    });
}

TEST_CASE("back ends: codes, scales and sums of activations are those of the plain loop, bit for bit") {
    for_each_backend([](Opened& b) {
        std::mt19937 rng(5);
        for (int trial = 0; trial < 140; trial++) {
            const int group_size = trial % 2 ? 32 : 64, n = 8 * group_size;
            CAPTURE(trial);
            const std::vector<float> x = awkward_groups(rng, trial, group_size);
            std::vector<int8_t> codes(x.size());
            std::vector<float> scales(8);
            reference_quantize(codes.data(), scales.data(), x.data(), n, group_size);
            const QuantGemmRows rows = {
                b.allocate(x.size()), b.allocate(32), b.allocate(32), 2, n / 2, group_size};
            REQUIRE(b.api->quantize(b.context, &rows, b.upload(x.data(), x.size())) == QUANT_GEMM_OK);
            CHECK(b.download<int8_t>(rows.codes, x.size()) == codes);
            CHECK(b.download<float>(rows.scales, 8) == scales);
            CHECK(b.download<int32_t>(rows.sums, 8) == make_matrix(codes, scales, 2, n / 2, group_size).sums);
        }
    });
}

TEST_CASE("back ends: the loader refuses what is none") {
    CHECK_THROWS_WITH(load_backend("/nowhere/quant_gemm_x.so"),
                      doctest::Contains("/nowhere/quant_gemm_x.so: cannot open shared object file"));
    auto none = [](const std::string&) { FAIL("no warning expected"); };
    CHECK(open_backend("builtin", {}, none) == nullptr);
    CHECK_THROWS_AS(open_backend("no such thing", {}, none), UsageError);
}
