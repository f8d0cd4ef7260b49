// runq.cpp itself, over the engine or alone: the tests of any program, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq.cpp"

namespace {
const char* const models[] = {"tiny-llama.q8", "tiny-qwen3.q8"};
}

#include "int8_cases.h"
#include "program_tests.h"
#include "rope_cases.h"

namespace {
// Row t of x times row i of w, by the plain loop.
float plain_dot(const Int8Rows& x, int t, const Q8Matrix& w, int i) {
    const std::vector<int16_t> codes(x.row_codes(t), x.row_codes(t) + x.n_cols);
    float out;
    dot<1, 0>(&out, codes.data(), x.row_scales(t), w.codes + size_t(i) * w.n_cols,
              w.scales + size_t(i) * w.n_groups(), w.n_cols, w.group_size);
    return out;
}

Rows rows_of(const std::vector<float>& values, int n_rows) {
    Rows rows(n_rows, int(values.size()) / n_rows);
    rows.values = values;
    rows.n_rows = n_rows;
    return rows;
}
}  // namespace

// ----------------------------------------------------------------------------
// The operations between matrix products, against the golden vectors

TEST_CASE("rmsnorm: rows, and runs of a row") {
    for (const auto& [name, eps] : {std::pair{"128eps1e-05", 1e-5f},
                                    {"128eps1e-06", 1e-6f},
                                    {"2048eps1e-05", 1e-5f},
                                    {"2048eps1e-06", 1e-6f},
                                    {"limits", 1e-5f}}) {
        const std::string p = std::string("rmsnorm.") + name + ".";
        CAPTURE(p);
        const std::vector<float> weight = golden_ops().at(p + "weight").f32();
        const int n_rows = golden_ops().at(p + "x").shape[0], n = int(weight.size());
        const Rows x = rows_of(golden_ops().at(p + "x").f32(), n_rows);
        Rows out(size_t(n_rows), n);
        rmsnorm(out, x, weight.data(), n, eps);
        CHECK(out.n_rows == n_rows);
        CHECK(golden_ops().at(p + "out").f32() == out.values);  // rounded once: the same bits
        Rows heads = rows_of(x.values, 1);                      // one token with as many heads, in place
        rmsnorm(heads, heads, weight.data(), n, eps);
        CHECK(heads.values == out.values);
    }
}

TEST_CASE("rope: frequencies with and without rescaling, angles, and the rotation") {
    for (const auto& [name, c] : rope_cases<ModelConfig>()) {
        const std::string p = name;
        CAPTURE(p);
        const std::vector<int32_t> positions = golden_ops().at(p + "positions").i32();
        const int n = int(positions.size()), half = c.head_dim / 2;
        RopeAngles angles(c, n);
        CHECK(golden_ops().at(p + "frequencies").f32() == angles.frequencies);
        std::vector<float> cos, sin, out;
        const std::vector<float> x = golden_ops().at(p + "x").f32();  // (positions, heads, head_dim)
        const ptrdiff_t n_values = ptrdiff_t(x.size()) / n;
        for (int i = 0; i < n; i++) {
            angles.set_positions(positions[i], 1);
            cos.insert(cos.end(), angles.cos.row(0), angles.cos.row(0) + half);
            sin.insert(sin.end(), angles.sin.row(0), angles.sin.row(0) + half);
            Rows heads = rows_of({x.begin() + i * n_values, x.begin() + (i + 1) * n_values}, 1);
            rope(heads, angles, c.head_dim);
            out.insert(out.end(), heads.values.begin(), heads.values.end());
        }
        CHECK(same_bits(golden_ops().at(p + "cos").f32(), cos));
        CHECK(same_bits(golden_ops().at(p + "sin").f32(), sin));
        CHECK(same_bits(golden_ops().at(p + "out").f32(), out));
        // Several tokens at once are each at their own position.
        Rows two = rows_of(std::vector<float>(4 * size_t(half), 1.0f), 2), one = rows_of(two.values, 2);
        angles.set_positions(127, 2);
        rope(two, angles, c.head_dim);
        for (int t = 0; t < 2; t++) {
            angles.set_positions(127 + t, 1);
            rope(one.row(t), angles.cos.row(0), angles.sin.row(0), c.head_dim);
        }
        CHECK(two.values == one.values);
    }
}

TEST_CASE("swiglu and add: all rows") {
    const std::vector<float> gate = golden_ops().at("swiglu.gate").f32(),
                             up = golden_ops().at("swiglu.up").f32(),
                             out = golden_ops().at("swiglu.out").f32();
    Rows many(1, 2500), all_up(1, 2500);  // more than a thread takes at once
    many.n_rows = all_up.n_rows = 1;
    for (size_t i = 0; i < 2500; i++)
        many.values[i] = gate[i % gate.size()], all_up.values[i] = up[i % up.size()];
    swiglu(many, many, all_up);
    for (size_t i = 0; i < 2500; i++)
        CHECK(many.values[i] == doctest::Approx(out[i % out.size()]).epsilon(1e-6));
    Rows x = rows_of({1, 2, 3, 4, 5, 6}, 3);
    add(x, rows_of({10, 20, 30, 40, 50, 60}, 3));
    CHECK(x.values == std::vector<float>{11, 22, 33, 44, 55, 66});
}

// ----------------------------------------------------------------------------
// The arithmetic: plain loops against the golden vectors, fast paths against the plain loops

TEST_CASE("quantize: the plain loop gives the golden's codes and scales, bit for bit") {
    for (const auto& [name, group_size] :
         {std::pair{"16", 16}, {"32", 32}, {"64", 64}, {"128", 128}, {"limits", 32}, {"heads", 20}}) {
        const std::string p = std::string("quantize.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        std::vector<int8_t> codes(x.size());
        std::vector<float> scales;
        for (size_t i = 0; i < x.size(); i += group_size)
            scales.push_back(quantize_group(&codes[i], &x[i], group_size));
        CHECK(codes == golden_ops().at(p + "codes").i8());
        CHECK(scales == golden_ops().at(p + "scales").f32());
    }
}

TEST_CASE("quantize: whatever path a group size takes, it gives what the plain loop gives") {
    std::mt19937 rng(1);
    for (int trial = 0; trial < 400; trial++) {
        const int group_sizes[] = {4, 20, 16, 32, 64, 128}, group_size = group_sizes[trial % 6];
        Rows x(2, 4 * group_size);
        x.values = awkward_groups(rng, trial, std::max(8, group_size));
        x.values.resize(8 * size_t(group_size));
        x.n_rows = 2;
        Int8Rows found;
        quantize(found, x, group_size);
        std::vector<int8_t> codes(x.values.size());
        std::vector<float> scales;
        for (size_t i = 0; i < codes.size(); i += group_size)
            scales.push_back(quantize_group(&codes[i], &x.values[i], group_size));
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

TEST_CASE("rotate: the golden's values there and back, bit for bit") {
    for (const int block : {64, 128, 1024}) {
        const std::string p = "rotate." + std::to_string(block) + ".";
        const std::vector<float> s = golden_ops().at(p + "s").f32();
        const int n = golden_ops().at(p + "x").shape[0];
        Rows x(n, int(s.size())), back(n, int(s.size()));
        x.values = back.values = golden_ops().at(p + "x").f32();
        x.n_rows = back.n_rows = n;
        rotate(x, s.data(), block);
        CHECK(x.values == golden_ops().at(p + "rotated").f32());
        rotate_back(back, s.data(), block);
        CHECK(back.values == golden_ops().at(p + "back").f32());
    }
}

TEST_CASE("matmul: the plain loop gives the golden's outputs, and any path gives the plain loop's") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("matmul.") || !name.ends_with(".accumulators")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("accumulators").size());
        CAPTURE(p);
        const int n = tensor.shape[0], m = tensor.shape[1], n_groups = tensor.shape[2];
        const std::vector<int8_t> w_codes = golden_ops().at(p + "w.codes").i8();
        const std::vector<float> w_scales = golden_ops().at(p + "w.scales").f32();
        const int k = int(w_codes.size()) / m, group_size = k / n_groups;
        const Q8Matrix w{w_codes.data(), w_scales.data(), m, k, group_size};
        Int8Rows x;
        x.resize(n, k, group_size);
        x.codes = golden_ops().at(p + "x.codes").i8();
        x.scales = golden_ops().at(p + "x.scales").f32();
#ifdef ENGINE
        for (int i = 0; i < n * k; i++) x.sums[i / group_size] += x.codes[i];
#endif
        std::vector<float> plain;
        for (int t = 0; t < n; t++) {
            for (int i = 0; i < m; i++) plain.push_back(plain_dot(x, t, w, i));
        }
        CHECK(same_bits(golden_ops().at(p + "out").f32(), plain));
        Rows a(n, m), b(n, m);
        matmul(x, {{a, w}, {b, w}});
        CHECK(a.n_rows == n);
        CHECK(same_bits(plain, a.values));
        CHECK(b.values == a.values);
    }
    CHECK(cases == 19);
}

TEST_CASE("matmul: random matrices, with and without a fast path for their groups") {
    std::mt19937 rng(2);
    for (const int group_size : {12, 20, 32, 64, 128}) {
        for (const int n_tokens : {1, 2, 5, 6, 17}) {
            CAPTURE(group_size);
            CAPTURE(n_tokens);
            const int n_cols = 3 * group_size, n_rows = 37;
            Rows values(n_tokens, n_cols), out(n_tokens, n_rows);
            values.values = random_values(rng, values.values.size());
            values.n_rows = n_tokens;
            Int8Rows x;
            quantize(x, values, group_size);
            const Matrix m = filled_matrix(rng, uniform, true, n_rows, n_cols, group_size);
            const Q8Matrix w{m.row_codes(0), m.row_scales(0), n_rows, n_cols, group_size};
            std::vector<float> plain;
            for (int t = 0; t < n_tokens; t++) {
                for (int i = 0; i < n_rows; i++) plain.push_back(plain_dot(x, t, w, i));
            }
            matmul(x, {{out, w}});
            CHECK(same_bits(plain, out.values));
        }
    }
}

TEST_CASE("embed: the golden's rows of a table of more than 2^16") {
    for (const int group_size : {32, 64}) {
        const GoldenTable table(group_size);
        const std::string p = "embedding." + std::to_string(group_size) + ".";
        const std::vector<int32_t> tokens = golden_ops().at(p + "tokens").i32();
        Rows out(tokens.size(), table.n_cols);
        embed(out, {table.codes.data(), table.scales.data(), table.n_rows, table.n_cols, group_size}, tokens);
        CHECK(out.values == golden_ops().at(p + "out").f32());
    }
}

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

TEST_CASE("weights: the bytes that a header implies, and group sizes that do not fit") {
    ModelConfig c;  // Llama 3.2 1B
    c.dim = 2048, c.hidden_dim = 8192, c.n_layers = 16, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.shared_classifier = true, c.group_size = 64;
    const uint64_t weights = 128256ull * 2048 + 16ull * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048);
    CHECK(weight_bytes(c) == weights + weights / 64 * 4 + (2 * 16 + 1) * 2048 * 4);
    c.shared_classifier = false;
    c.arch = Arch::qwen3;
    const uint64_t table = 128256ull * 2048, head_norms = 2ull * 16 * 64;
    CHECK(weight_bytes(c) ==
          weights + table + (weights + table) / 64 * 4 + ((2 * 16 + 1) * 2048 + head_norms) * sizeof(float));
    c.group_size = 96;
    CHECK_THROWS_WITH(check_config(c), "dim is 2048, not a multiple of group_size 96");
    c.group_size = 0;
    CHECK_THROWS_WITH(check_config(c), "group_size is 0, expected a multiple of 4 up to 65536");
    c.group_size = 6;
    CHECK_THROWS_WITH(check_config(c), "group_size is 6, expected a multiple of 4 up to 65536");
    c.group_size = 1 << 17;
    CHECK_THROWS_WITH(check_config(c), "group_size is 131072, expected a multiple of 4 up to 65536");
    c.group_size = 64;
    c.hidden_dim = 8200;
    CHECK_THROWS_WITH(check_config(c), "hidden_dim is 8200, not a multiple of group_size 64");
}
#endif
