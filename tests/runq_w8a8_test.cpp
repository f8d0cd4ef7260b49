// runq_w8a8.cpp itself: the tests of any program, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq_w8a8.cpp"

namespace {
const char* const models[] = {"tiny-llama.w8a8",         "tiny-qwen3.w8a8",        "tiny-llama.w8a8-block32",
                              "tiny-qwen3.w8a8-block32", "tiny-llama.w8a8-static", "tiny-qwen3.w8a8-static"};
}

#include "int8_cases.h"
#include "program_tests.h"

// ----------------------------------------------------------------------------
// The arithmetic: plain loops against the golden vectors, fast paths against the plain loops

TEST_CASE("quantize: the plain loop gives the golden's codes and scales, bit for bit") {
    for (const auto& [name, n] :
         {std::pair{"row64", 64}, {"row384", 384}, {"row2048", 2048}, {"rowlimits", 64}}) {
        const std::string p = std::string("quantize.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        std::vector<int8_t> codes(x.size());
        std::vector<float> scales;
        for (size_t i = 0; i < x.size(); i += n)
            scales.push_back(quantize_block(&codes[i], &x[i], n, nullptr));
        CHECK(codes == golden_ops().at(p + "codes").i8());
        CHECK(scales == golden_ops().at(p + "scales").f32());
    }
    for (const char* name : {"one", "two", "tenth", "tiny", "zero", "subnormal"}) {
        const std::string p = std::string("quantize_static.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        const float scale = golden_ops().at(p + "scale").f32()[0];
        std::vector<int8_t> codes(x.size());
        CHECK(quantize_block(codes.data(), x.data(), int(x.size()), &scale) == scale);
        CHECK(codes == golden_ops().at(p + "codes").i8());
    }
}

TEST_CASE(
    "quantize: rows, blocks and static scales, whatever path they take, give what the plain loop gives") {
    std::mt19937 rng(1);
    for (int trial = 0; trial < 400; trial++) {
        const int n_cols = trial % 4 == 3 ? 100 : 64 << trial % 4, group_size = trial % 8 == 0 ? 32 : 0;
        const float static_scale = 0.03f, *scale = trial % 3 == 0 ? &static_scale : nullptr;
        Rows x(8, n_cols);
        x.values = awkward_groups(rng, trial, n_cols);
        x.n_rows = 8;
        Int8Rows found;
        quantize(found, x, group_size, scale);
        const int block = group_size == 0 ? n_cols : 32;
        std::vector<int8_t> codes(x.values.size());
        std::vector<float> scales;
        for (size_t i = 0; i < codes.size(); i += block)
            scales.push_back(quantize_block(&codes[i], &x.values[i], block, scale));
        CHECK(found.codes == codes);
        for (int t = 0; t < x.n_rows; t++) {  // NaN where a value of the row is not finite
            const std::span<const float> all(found.row_scales(t), size_t(found.n_groups()));
            const auto expected = scales.begin() + t * found.n_groups();
            if (all_finite(x.row(t), size_t(x.n_cols))) {
                CHECK(std::equal(all.begin(), all.end(), expected));
            } else {
                CHECK(std::ranges::all_of(all, [](float value) { return std::isnan(value); }));
            }
        }
    }
}

TEST_CASE("matmul: one scale per row or per block; any path gives the plain loop's outputs") {
    std::mt19937 rng(2);
    for (const int group_size : {0, 32}) {
        for (const int n_cols : {64, 100, 384, 8192}) {
            if (group_size == 32 && n_cols % 32 != 0) continue;
            for (const int n_tokens : {1, 5, 17}) {
                CAPTURE(group_size);
                CAPTURE(n_cols);
                CAPTURE(n_tokens);
                const int n_rows = 37, block = block_of(group_size, n_cols);
                Rows values(n_tokens, n_cols), out(n_tokens, n_rows);
                values.values = random_values(rng, values.values.size());
                values.n_rows = n_tokens;
                Int8Rows x;
                quantize(x, values, group_size, nullptr);
                const Matrix m = filled_matrix(rng, uniform, true, n_rows, n_cols, block);
                const W8A8Matrix w{m.row_codes(0), m.row_scales(0), n_rows, n_cols, block};
                std::vector<float> plain, exact;
                for (int t = 0; t < n_tokens; t++) {
                    for (int i = 0; i < n_rows; i++) {
                        plain.push_back(dot(x, t, w, i));
                        double sum = 0;
                        for (int k = 0; k < n_cols; k++) {
                            sum += double(x.row_codes(t)[k]) * x.row_scales(t)[k / block] *
                                   w.codes[i * n_cols + k] * w.scales[i * w.n_blocks() + k / block];
                        }
                        exact.push_back(float(sum));
                    }
                }
                CHECK(relative_error(exact, plain) < 1e-6);
                matmul(x, {{out, w}});
                CHECK(relative_error(plain, out.values) < 1e-6);
            }
        }
    }
}

TEST_CASE("embed: the golden's rows of a table of more than 2^16") {
    for (const int block : {32, 64}) {
        const GoldenTable table(block);
        const std::string p = "embedding." + std::to_string(block) + ".";
        const std::vector<int32_t> tokens = golden_ops().at(p + "tokens").i32();
        Rows out(tokens.size(), table.n_cols);
        embed(out, {table.codes.data(), table.scales.data(), table.n_rows, table.n_cols, block}, tokens);
        CHECK(out.values == golden_ops().at(p + "out").f32());
    }
}

// ----------------------------------------------------------------------------
// Files

namespace {
// Bytes of all weights that a config implies.
uint64_t weight_bytes(const ModelConfig& c) {
    check_config(c);
    return Weights{TensorList(nullptr, 0, 1), c}.file.weight_bytes();
}
}  // namespace

TEST_CASE("weights: the bytes that a header implies, and sizes that do not fit") {
    ModelConfig c;  // Llama 3.2 1B
    c.dim = 2048, c.hidden_dim = 8192, c.n_layers = 16, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.shared_classifier = true;
    const uint64_t weights = 128256ull * 2048 + 16ull * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048);
    const uint64_t rows = 128256 + 16ull * (2 * 2048 + 2 * 512 + 2 * 8192 + 2048);
    CHECK(weight_bytes(c) == weights + rows * 4 + (2 * 16 + 1) * 2048 * 4);
    c.static_activations = true;
    CHECK(weight_bytes(c) == weights + rows * 4 + ((2 * 16 + 1) * 2048 + 16 * 4 + 1) * 4);
    c.group_size = 32;
    CHECK_THROWS_WITH(check_config(c), "activations is 1 (static) with group_size 32, expected 0");
    c.static_activations = false;
    CHECK(weight_bytes(c) == weights + weights / 32 * 4 + (2 * 16 + 1) * 2048 * 4);
    c.hidden_dim = 8200;
    CHECK_THROWS_WITH(check_config(c), "hidden_dim is 8200, not a multiple of 32");
    c.group_size = 64;
    CHECK_THROWS_WITH(check_config(c), "group_size is 64, expected 0 (whole rows) or 32");
    c.group_size = 0;
    c.hidden_dim = 8190;
    CHECK_THROWS_WITH(check_config(c), "hidden_dim is 8190, not a multiple of 4");
    c.hidden_dim = 1 << 17;
    CHECK_THROWS_WITH(check_config(c), "hidden_dim is 131072, expected at most 65536");
}
