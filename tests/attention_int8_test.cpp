// Attention in int8 on every instruction set of this build and in plain C++, against plain loops and the
// golden vectors.
#include "engine/cpu/attention_int8.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "golden.h"
#include "int8_cases.h"
#include "int8_isas.h"

namespace {

// Calls check(Isa{}) for each of them.
template <class Check>
void for_each_attention_isa(Check check) {
    check(PlainInt8{});
    for_each_isa(check);
}

// Quantized heads of a chunk: (n_tokens, heads * head_dim) in groups of head_dim.
struct Heads {
    int n_tokens, n_heads, head_dim;
    std::vector<int8_t> codes;
    std::vector<float> scales;

    const int8_t* head(int t, int h) const { return &codes[(size_t(t) * n_heads + h) * head_dim]; }
    float scale(int t, int h) const { return scales[size_t(t) * n_heads + h]; }
    // Those of some tokens, as the program has them.
    Int8Rows rows(int first, int n) const {
        Int8Rows x;
        x.resize(n, n_heads * head_dim, head_dim);
        std::copy_n(head(first, 0), size_t(n) * x.n_cols, x.codes.begin());
        std::copy_n(&scales[size_t(first) * n_heads], size_t(n) * n_heads, x.scales.begin());
        return x;
    }
};

Heads random_heads(std::mt19937& rng, int n_tokens, int n_heads, int head_dim, bool extreme) {
    Heads x{n_tokens, n_heads, head_dim, {}, {}};
    for (int i = 0; i < n_tokens * n_heads * head_dim; i++)
        x.codes.push_back(extreme ? (i / head_dim % 2 != 0 ? 127 : -127) : int8_t(int(rng() % 255) - 127));
    for (int i = 0; i < n_tokens * n_heads; i++)
        x.scales.push_back(std::ldexp(float(rng() % 1000 + 1), extreme ? -24 : -16));
    return x;
}

// All operations of attention_int8(), each from its own inputs as found: by plain loops.
template <class Isa>
void check_chunk(const Heads& q, const Heads& k, const Heads& v, const std::vector<int>& chunks) {
    const int head_dim = q.head_dim, n = q.n_tokens, per_kv = q.n_heads / k.n_heads, layer = 1;
    Int8KvCacheOf<Isa> cache(2, k.n_heads, head_dim, n);
    for (int pos = 0, c = 0; pos < n; c++) {
        const int n_tokens = std::min(chunks[size_t(c) % chunks.size()], n - pos);
        cache.append(layer, pos, k.rows(pos, n_tokens), v.rows(pos, n_tokens));
        Rows out(size_t(n_tokens), q.n_heads * head_dim);
        HeadScores scores, probs, weights;
        scores.wanted = probs.wanted = weights.wanted = true;
        attention_int8(out, scores, probs, weights, q.rows(pos, n_tokens), cache, layer, pos);
        REQUIRE(out.n_rows == n_tokens);
        std::vector<float> expected_scores, found_scores, expected_probs, found_probs;
        for (int t = 0; t < n_tokens; t++) {
            for (int h = 0; h < q.n_heads; h++) {
                const int i = t * q.n_heads + h;
                const int g = h / per_kv, seen = pos + t + 1;
                const float factor = q.scale(pos + t, h) * (1.0f / std::sqrt(float(head_dim)));
                std::vector<float> x(size_t(seen) + 31);
                for (int p = 0; p < seen; p++) {
                    const int32_t sum = reference_accumulator(q.head(pos + t, h), k.head(p, g), head_dim);
                    expected_scores.push_back(float(sum) * (k.scale(p, g) * factor));
                    found_scores.push_back(scores.row(i)[p]);
                }
                std::vector<float> plain_probs(scores.row(i), scores.row(i) + seen);
                reference_softmax(plain_probs, exp_fp32);
                for (int p = 0; p < seen; p++) {
                    expected_probs.push_back(plain_probs[size_t(p)]);
                    found_probs.push_back(probs.row(i)[p]);
                    x[size_t(p)] = probs.row(i)[p] * v.scale(p, g);
                    CHECK(weights.row(i)[p] == x[size_t(p)]);
                }
                std::vector<int8_t> codes(static_cast<size_t>(seen));
                float scale;
                reference_quantize(codes.data(), &scale, x.data(), seen, seen);
                for (int d = 0; d < head_dim; d++) {
                    int64_t sum = 0;
                    for (int p = 0; p < seen; p++) sum += int64_t{codes[size_t(p)]} * v.head(p, g)[d];
                    CHECK(out.row(t)[h * head_dim + d] == float(sum) * scale);
                }
            }
        }
        CHECK(same_bits(expected_scores, found_scores));
        CHECK(same_bits(expected_probs, found_probs));
        // Without a trace nothing else comes out.
        HeadScores none, no_weights;
        const std::vector<float> before = out.values;
        attention_int8(out, none, none, no_weights, q.rows(pos, n_tokens), cache, layer, pos);
        CHECK(out.values == before);
        CHECK(no_weights.values.empty());
        pos += n_tokens;
    }
}

}  // namespace

// Head sizes that are no multiple of a vector, chunks of several sizes, positions over more than a page.
TEST_CASE("attention in int8: equal to plain loops") {
    for_each_attention_isa([](auto isa) {
        std::mt19937 rng(1);
        for (const int head_dim : {4, 20, 32, 64, 128}) {
            for (const bool extreme : {false, true}) {
                CAPTURE(head_dim);
                CAPTURE(extreme);
                const int n = head_dim == 32 ? Int8KvCache::page + 45 : 37;
                const Heads q = random_heads(rng, n, 6, head_dim, extreme),
                            k = random_heads(rng, n, 2, head_dim, extreme),
                            v = random_heads(rng, n, 2, head_dim, extreme);
                check_chunk<decltype(isa)>(q, k, v, {1, 7, 23});
            }
        }
    });
}

// More positions than fit into fp32's 24 bits: sums of the largest codes, of both signs, stay exact.
TEST_CASE("attention in int8: sums of the largest codes over thousands of positions") {
    for_each_attention_isa([](auto isa) {
        const int n = 5000, head_dim = 32;
        Int8KvCacheOf<decltype(isa)> cache(1, 1, head_dim, n);
        std::vector<int8_t> zeros(head_dim, 0), ends(head_dim);
        for (int d = 0; d < head_dim; d++) ends[size_t(d)] = d % 2 != 0 ? 127 : -127;
        for (int pos = 0; pos < n; pos++) cache.append(0, 0, pos, zeros.data(), 1.0f, ends.data(), 1.0f);
        Int8Rows q;
        q.resize(1, head_dim, head_dim);
        std::fill(q.codes.begin(), q.codes.end(), int8_t(127));
        q.scales[0] = 1;
        Rows out(1, head_dim);
        HeadScores none, weights;
        weights.wanted = true;
        attention_int8(out, none, none, weights, q, cache, 0, n - 1);
        const float scale = weights.row(0)[0] / 127;  // all weights are the same
        for (int d = 0; d < head_dim; d++) CHECK(out.row(0)[d] == float(127 * ends[size_t(d)] * n) * scale);
    });
}

TEST_CASE("attention in int8: a context whose sums could leave int32 is refused") {
    CHECK_NOTHROW(Int8KvCache(1, 1, 4, Int8KvCache::max_context));
    CHECK_THROWS_WITH_AS(Int8KvCache(1, 1, 4, Int8KvCache::max_context + 1),
                         "--attn int8: the context is 133145, expected at most 133144, so that sums stay "
                         "within int32 (--ctx)",
                         std::runtime_error);
}

TEST_CASE("attention in int8: the golden vectors, of the scores") {
    for (const std::string name :
         {"attention_int8", "attention_int8.decode", "attention_int8.odd", "attention_int8.at128",
          "attention_int8.at256", "attention_int8.at512", "attention_int8.prompt", "attention_int8.5x128",
          "attention_int8.1x256", "attention_int8.8x8"}) {
        CAPTURE(name);
        auto of = [&](const char* tensor) -> const Tensor& { return golden_ops().at(name + "." + tensor); };
        const auto& shape = of("scores.q_codes").shape;
        const int n = shape[0], n_heads = shape[1], head_dim = shape[2];
        const int n_positions = of("scores.k_codes").shape[0], n_kv = of("scores.k_codes").shape[1],
                  start = n_positions - n;
        const Heads k{n_positions, n_kv, head_dim, of("scores.k_codes").i8(), of("scores.k_scales").f32()},
            v{n_positions, n_kv, head_dim, of("mix.v_codes").i8(), of("mix.v_scales").f32()};
        const Heads q{n, n_heads, head_dim, of("scores.q_codes").i8(), of("scores.q_scales").f32()};
        for_each_attention_isa([&](auto isa) {
            Int8KvCacheOf<decltype(isa)> cache(1, n_kv, head_dim, n_positions);
            cache.append(0, 0, k.rows(0, n_positions), v.rows(0, n_positions));
            Rows out(size_t(n), n_heads * head_dim);
            HeadScores scores, probs, weights;
            scores.wanted = true;
            attention_int8(out, scores, probs, weights, q.rows(0, n), cache, 0, start);
            const std::vector<float> expected = of("scores.scores").f32();
            std::vector<float> found(expected.size());
            for (int i = 0; i < n * n_heads; i++)
                std::copy_n(scores.row(i), start + i / n_heads + 1, &found[size_t(i) * n_positions]);
            CHECK(same_bits(expected, found));
        });
    }
}

// Queries of zeros see all positions alike, as head 0 of the golden does: its sums pass 2^24.
TEST_CASE("attention in int8: sums over 1100 positions are the golden's") {
    auto of = [](const char* tensor) -> const Tensor& {
        return golden_ops().at("attention_int8.long.mix." + std::string(tensor));
    };
    const auto& shape = of("v_codes").shape;
    const int n = shape[0], n_kv = shape[1], head_dim = shape[2];
    const Heads v{n, n_kv, head_dim, of("v_codes").i8(), of("v_scales").f32()};
    const Heads q{1, n_kv, head_dim, std::vector<int8_t>(size_t(n_kv) * head_dim),
                  std::vector<float>(size_t(n_kv), 1)};
    const std::vector<float> expected = of("out").f32();
    for_each_attention_isa([&](auto isa) {
        Int8KvCacheOf<decltype(isa)> cache(1, n_kv, head_dim, n);
        cache.append(0, 0, v.rows(0, n), v.rows(0, n));
        Rows out(1, n_kv * head_dim);
        HeadScores none, no_weights;
        attention_int8(out, none, none, no_weights, q.rows(0, 1), cache, 0, n - 1);
        CHECK(std::equal(expected.begin(), expected.begin() + head_dim, out.row(0)));
    });
}

TEST_CASE("attention in int8: the golden vectors, of the weights of their own probabilities") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("attention_int8.") || !name.ends_with(".probs")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("probs").size());
        CAPTURE(p);
        const int n = tensor.shape[0], n_heads = tensor.shape[1], n_positions = tensor.shape[2],
                  n_kv = golden_ops().at(p + "v_codes").shape[1];
        const std::vector<float> probs = tensor.f32(), v_scales = golden_ops().at(p + "v_scales").f32(),
                                 scales = golden_ops().at(p + "weight_scales").f32();
        const std::vector<int8_t> codes = golden_ops().at(p + "weight_codes").i8();
        for (int i = 0; i < n * n_heads; i++) {
            std::vector<float> row(size_t(n_positions + 31) / 32 * 32);
            for (int t = 0; t < n_positions; t++)
                row[size_t(t)] = probs[size_t(i) * n_positions + t] *
                                 v_scales[size_t(t * n_kv + i % n_heads / (n_heads / n_kv))];
            std::vector<int8_t> found(row.size());
            const int n_row = int(row.size());
            float scale;
            int32_t sum;
            quantize_groups(found.data(), &scale, &sum, row.data(), n_row, n_row);
            CHECK(scale == scales[size_t(i)]);
            CHECK(std::equal(found.begin(), found.begin() + n_positions, &codes[size_t(i) * n_positions]));
            int32_t expected_sum = 0;
            for (const int8_t code : found) expected_sum += code;
            CHECK(sum == expected_sum);
        }
    }
    CHECK(cases == 13);
}
