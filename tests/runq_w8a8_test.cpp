// runq_w8a8.cpp itself, over the engine or alone: the tests of any program, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq_w8a8.cpp"

namespace {
const char* const models[] = {"tiny-llama.w8a8",         "tiny-qwen3.w8a8",        "tiny-llama.w8a8-block32",
                              "tiny-qwen3.w8a8-block32", "tiny-llama.w8a8-static", "tiny-qwen3.w8a8-static",
                              "tiny-llama.w8a8-rotate",  "tiny-qwen3.w8a8-rotate"};
}

#include "int8_cases.h"
#include "program_tests.h"

namespace {
// Row t of x times row i of w, by the plain loop.
float plain_dot(const Int8Rows& x, int t, const W8A8Matrix& w, int i) {
    const std::vector<int16_t> codes(x.row_codes(t), x.row_codes(t) + x.n_cols);
    float out;
    dot<1>(&out, codes.data(), x.row_scales(t), w.codes + size_t(i) * w.n_cols,
           w.scales + size_t(i) * w.n_groups(), w.n_cols, w.group_size);
    return out;
}
}  // namespace

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
            scales.push_back(quantize_group(&codes[i], &x[i], n, nullptr));
        CHECK(codes == golden_ops().at(p + "codes").i8());
        CHECK(scales == golden_ops().at(p + "scales").f32());
    }
    for (const char* name : {"one", "two", "tenth", "tiny", "zero", "subnormal"}) {
        const std::string p = std::string("quantize_static.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        const float scale = golden_ops().at(p + "scale").f32()[0];
        std::vector<int8_t> codes(x.size());
        CHECK(quantize_group(codes.data(), x.data(), int(x.size()), &scale) == scale);
        CHECK(codes == golden_ops().at(p + "codes").i8());
    }
}

TEST_CASE(
    "quantize: rows, groups and static scales, whatever path they take, give what the plain loop gives") {
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
            scales.push_back(quantize_group(&codes[i], &x.values[i], block, scale));
        CHECK(found.codes == codes);
        for (int t = 0; t < x.n_rows; t++) {  // NaN where a value of the row is not finite
            const std::span<const float> all(found.row_scales(t), size_t(found.n_groups()));
            const auto expected = scales.begin() + t * found.n_groups();
            if (all_finite(x.row(t), size_t(x.n_cols))) {
                CHECK(std::equal(all.begin(), all.end(), expected));
            } else {
                CHECK(std::all_of(all.begin(), all.end(), [](float value) { return std::isnan(value); }));
            }
        }
    }
}

TEST_CASE("matmul: one scale per row or per group; any path gives the plain loop's outputs") {
    std::mt19937 rng(2);
    for (const int group_size : {0, 32}) {
        for (const int n_cols : {64, 100, 384, 8192}) {
            if (group_size == 32 && n_cols % 32 != 0) continue;
            for (const int n_tokens : {1, 5, 17}) {
                CAPTURE(group_size);
                CAPTURE(n_cols);
                CAPTURE(n_tokens);
                const int n_rows = 37, block = group_of(group_size, n_cols);
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
                        plain.push_back(plain_dot(x, t, w, i));
                        double sum = 0;
                        for (int k = 0; k < n_cols; k++) {
                            sum += double(x.row_codes(t)[k]) * x.row_scales(t)[k / block] *
                                   w.codes[i * n_cols + k] * w.scales[i * w.n_groups() + k / block];
                        }
                        exact.push_back(float(sum));
                    }
                }
                CHECK(relative_error(exact, plain) < 1e-6);
                matmul(x, {{out, w}});
                CHECK(same_bits(plain, out.values));
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
// Attention in int8

TEST_CASE("attention in int8: every step of the trace, however the tokens are fed") {
    for (const std::string name : {"tiny-llama.w8a8", "tiny-qwen3.w8a8"}) {
        const Tensors golden = golden_trace(name + "-attn8");
        const std::vector<int> tokens = golden.at("tokens").i32();
        Options options;
        options.own["--attn"] = "int8";
        for (const int chunk : {64, 3, 1}) {
            CAPTURE(name);
            CAPTURE(chunk);
            Trace trace;
            Transformer m = load(name, &trace, options);
            run(m, tokens, chunk);
            const std::string path = "build/" + name + "-attn8.test.trace.safetensors";
            trace.write(path);
            const Tensors found = read_safetensors(path);
            CHECK(found.size() == golden.size());
            for (const auto& item : golden) {
                const std::string& step = item.first;
                const Tensor& expected = item.second;
                CAPTURE(step);
                REQUIRE(found.contains(step));
                REQUIRE(found.at(step).shape == expected.shape);
                if (expected.type == "F32") {
                    CHECK(same_bits(expected.f32(), found.at(step).f32()));
                } else {
                    CHECK(found.at(step).bytes == expected.bytes);
                }
            }
        }
    }
}

#ifndef ENGINE
TEST_CASE("attention in int8: the plain loops give the golden vectors") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("attention_int8") || !name.ends_with("scores.q_codes")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("q_codes").size());
        CAPTURE(p);
        const int n = tensor.shape[0], n_heads = tensor.shape[1], head_dim = tensor.shape[2];
        const std::vector<int8_t> q = tensor.i8(), k = golden_ops().at(p + "k_codes").i8();
        const std::vector<float> q_scales = golden_ops().at(p + "q_scales").f32(),
                                 k_scales = golden_ops().at(p + "k_scales").f32();
        const int n_positions = golden_ops().at(p + "k_codes").shape[0],
                  n_kv_heads = golden_ops().at(p + "k_codes").shape[1];
        std::vector<float> found(size_t(n) * n_heads * n_positions);
        for (int i = 0; i < n * n_heads; i++) {
            const int kv = i % n_heads / (n_heads / n_kv_heads);
            scores_int8(&found[size_t(i) * n_positions], &q[size_t(i) * head_dim], q_scales[i],
                        &k[size_t(kv) * head_dim], &k_scales[kv], n_positions - n + i / n_heads + 1,
                        n_kv_heads, head_dim);
        }
        CHECK(same_bits(golden_ops().at(p + "scores").f32(), found));
    }
    CHECK(cases == 10);

    cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("attention_int8.") || !name.ends_with("mix.probs")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("probs").size());
        CAPTURE(p);
        const int n = tensor.shape[0], n_heads = tensor.shape[1], n_positions = tensor.shape[2];
        const std::vector<float> probs = tensor.f32(), v_scales = golden_ops().at(p + "v_scales").f32(),
                                 scales = golden_ops().at(p + "weight_scales").f32();
        const std::vector<int8_t> codes = golden_ops().at(p + "weight_codes").i8(),
                                  v = golden_ops().at(p + "v_codes").i8();
        const int n_kv_heads = golden_ops().at(p + "v_codes").shape[1],
                  head_dim = golden_ops().at(p + "v_codes").shape[2];
        std::vector<float> out(size_t(n) * n_heads * head_dim);
        std::vector<int32_t> sums(head_dim);
        for (int i = 0; i < n * n_heads; i++) {
            const int kv = i % n_heads / (n_heads / n_kv_heads);
            std::vector<float> weights;
            std::vector<int8_t> found(n_positions);
            for (int t = 0; t < n_positions; t++)
                weights.push_back(probs[size_t(i) * n_positions + t] * v_scales[size_t(t) * n_kv_heads + kv]);
            const float scale = quantize_group(found.data(), weights.data(), n_positions);
            CHECK(scale == scales[i]);
            CHECK(std::equal(found.begin(), found.end(), &codes[size_t(i) * n_positions]));
            mix_int8(&out[size_t(i) * head_dim], sums.data(), found.data(), scale, &v[size_t(kv) * head_dim],
                     n_positions, n_kv_heads, head_dim);
        }
        CHECK(same_bits(golden_ops().at(p + "out").f32(), out));
    }
    CHECK(cases == 13);
}

TEST_CASE("attention in int8: a context whose sums could leave int32 is refused") {
    ModelConfig c;
    c.n_layers = c.n_kv_heads = 1, c.head_dim = 4;
    CHECK_NOTHROW(Int8Attention(c, 1, Int8Attention::max_context, false));
    CHECK_THROWS_WITH(
        Int8Attention(c, 1, Int8Attention::max_context + 1, false),
        "--attn int8: the context is 133145, expected at most 133144, so that sums stay within int32");
}
#endif

// ----------------------------------------------------------------------------
// Files

#ifdef ENGINE
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
#endif
