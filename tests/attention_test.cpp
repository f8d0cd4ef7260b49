// Attention's kernels, against the golden vectors and against plain loops in double precision.
#include "engine/cpu/kv_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "golden.h"

TEST_CASE("exp of a vector") {
    for (float x = -86; x < 87; x += 0.0137f) {
        const float e = exp(splat(x))[vector_lanes - 1];
        CHECK(e == doctest::Approx(std::exp(double(x))).epsilon(2e-7));
    }
    CHECK(exp(splat(-1e30f))[0] < 1e-37f);
    CHECK(exp(splat(0))[vector_lanes - 1] == 1);
    CHECK(std::isnan(exp(splat(NAN))[0]));
}

TEST_CASE("softmax") {
    for (const std::string name : {"softmax", "softmax.long", "softmax.wide"}) {
        CAPTURE(name);
        const Tensor& tensor = golden_ops().at(name + ".x");
        const std::vector<float> x = tensor.f32(), expected = golden_ops().at(name + ".out").f32();
        const int n = tensor.shape[1];
        for (int i = 0; i < tensor.shape[0]; i++) {
            std::vector<float> row(padded(n), 99.0f);  // what lies beyond the end must not matter
            std::copy_n(x.begin() + i * n, n, row.begin());
            softmax(row.data(), n);
            CHECK(same_bits(std::span(expected).subspan(i * n, n), std::span(row).first(n)));
            for (int j = n; j < padded(n); j++) CHECK(row[j] == 0);
        }
    }
}

// What attention is: one query (head_dim,) against the keys and values of its kv head, (kv_len, head_dim)
// each, with a factor for each -> scores and probs (kv_len,), out (head_dim,). docs/forward-pass.md shows it.
void plain_attention(std::vector<float>& out, std::vector<float>& scores, std::vector<float>& probs,
                     const float* q, const float* k, const float* k_scales, const float* v,
                     const float* v_scales, int head_dim) {
    const float scale = 1.0f / std::sqrt(float(head_dim));
    for (size_t t = 0; t < scores.size(); t++) {
        float sum = 0;
        for (int d = 0; d < head_dim; d++) sum = std::fma(q[d], k[t * size_t(head_dim) + d], sum);
        scores[t] = sum * (scale * k_scales[t]);
    }
    probs = scores;
    reference_softmax(probs, exp_fp32);
    for (int d = 0; d < head_dim; d++) {
        for (size_t t = 0; t < scores.size(); t++)
            out[d] = std::fma(probs[t] * v_scales[t], v[t * size_t(head_dim) + d], out[d]);
    }
}

// What a cache of this format keeps of x, heads of head_dim numbers each, and their factors: by plain loops.
struct Kept {
    std::vector<float> values, scales;

    Kept(KvFormat format, const std::vector<float>& x, int head_dim)
        : values(x), scales(x.size() / size_t(head_dim), 1.0f) {
        for (size_t i = 0; i < scales.size() && format == KvFormat::q8; i++) {
            float* head = &values[i * size_t(head_dim)];
            float amax = 0;
            for (int d = 0; d < head_dim; d++) amax = std::max(amax, std::fabs(head[d]));
            for (int d = 0; d < head_dim; d++) head[d] = std::nearbyintf(head[d] * (127 / amax));
            scales[i] = amax / 127;
        }
        for (float& value : values) {
            if (format == KvFormat::f16) value = to_float(round_to_half(value));
        }
    }
};

// Positions over more than one page of the cache, head sizes that are no multiple of a vector, every number
// of queries, each seeing its own number of positions; two layers and two kv heads, so that a wrong offset
// shows.
template <class T>
void check_attend(KvFormat format) {
    const int n_layers = 2, n_kv_heads = 2, context = 2 * KvCache::page + 37;
    std::mt19937 rng(1);
    for (const int head_dim : {8, 20, 64, 128}) {
        KvCache cache(format, n_layers, n_kv_heads, head_dim, context);
        const std::vector<float> k = random_values(rng, size_t(4) * context * head_dim),
                                 v = random_values(rng, size_t(4) * context * head_dim);
        auto at = [&](int layer, int head, int pos) {
            return (size_t(layer * 2 + head) * context + pos) * head_dim;
        };
        for (int pos = 0; pos < context; pos++) {
            for (int i = 0; i < 4; i++) {
                cache.append(i / 2, i % 2, pos, &k[at(i / 2, i % 2, pos)], &v[at(i / 2, i % 2, pos)]);
            }
        }
        const Kept k_kept(format, k, head_dim), v_kept(format, v, head_dim);
        for (int n_rows = 1; n_rows <= max_attention_rows; n_rows++) {
            for (const int n_positions : {17, 65, KvCache::page, context}) {
                CAPTURE(head_dim);
                CAPTURE(n_rows);
                CAPTURE(n_positions);
                const int layer = n_rows % 2, head = n_rows / 2 % 2;
                const std::vector<float> q = random_values(rng, size_t(n_rows) * head_dim);
                std::vector<float> out(q.size(), 99.0f), scores(size_t(n_rows) * n_positions);
                std::vector<float> probs(size_t(n_rows) * padded(n_positions), 99.0f);
                std::vector<const float*> q_rows;
                std::vector<float*> out_rows, score_rows;
                std::vector<int> kv_len;
                for (int r = 0; r < n_rows; r++) {
                    q_rows.push_back(&q[r * head_dim]);
                    out_rows.push_back(&out[r * head_dim]);
                    score_rows.push_back(&scores[r * n_positions]);
                    kv_len.push_back(n_positions - (n_rows - 1 - r) / 2);
                }
                attend<T>(out_rows.data(), cache, layer, head, q_rows.data(), kv_len.data(), n_rows,
                          probs.data(), padded(n_positions), score_rows.data());
                std::vector<float> expected, found_probs, expected_probs, found_scores, expected_scores;
                for (int r = 0; r < n_rows; r++) {
                    const size_t n = size_t(kv_len[r]), first = at(layer, head, 0), one = first / head_dim;
                    std::vector<float> plain_scores(n), plain_probs, mix(head_dim);
                    plain_attention(mix, plain_scores, plain_probs, q_rows[r], &k_kept.values[first],
                                    &k_kept.scales[one], &v_kept.values[first], &v_kept.scales[one],
                                    head_dim);
                    expected_scores.insert(expected_scores.end(), plain_scores.begin(), plain_scores.end());
                    expected_probs.insert(expected_probs.end(), plain_probs.begin(), plain_probs.end());
                    expected.insert(expected.end(), mix.begin(), mix.end());
                    const float* row = &probs[size_t(r) * padded(n_positions)];
                    found_probs.insert(found_probs.end(), row, row + kv_len[r]);
                    found_scores.insert(found_scores.end(), score_rows[r], score_rows[r] + kv_len[r]);
                    CHECK(std::all_of(row + kv_len[r], row + padded(n_positions),
                                      [](float x) { return x == 0; }));
                }
                CHECK(same_bits(expected, out));
                CHECK(same_bits(expected_probs, found_probs));
                CHECK(same_bits(expected_scores, found_scores));
            }
        }
    }
}

TEST_CASE("attend: equal to plain loops on what each format keeps") {
    check_attend<float>(KvFormat::f32);
    check_attend<Half>(KvFormat::f16);
    check_attend<int8_t>(KvFormat::q8);
}

TEST_CASE("kv cache: a head of zeros, NaN") {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::q8}) {
        KvCache cache(format, 1, 1, 8, 40);
        const std::vector<float> zeros(8, 0.0f), ones(8, 1.0f);
        cache.append(0, 0, 0, zeros.data(), zeros.data());
        cache.append(0, 0, 1, zeros.data(), ones.data());
        HeadScores none;
        Rows q(1, 8), out(1, 8);
        q.n_rows = 1;
        std::fill(q.values.begin(), q.values.end(), 3.0f);
        attention(out, none, none, q, cache, 0, 1);
        for (const float x : out.values) CHECK(x == doctest::Approx(0.5));
    }
    // NaN becomes -127, as everywhere else, and the scale says that it was there; -0.5 lies halfway between
    // two codes.
    KvCache cache(KvFormat::q8, 1, 1, 4, 40);
    const float odd[] = {std::nanf(""), 1.0f, -0.5f, 0.0f};
    cache.append(0, 0, 0, odd, odd);
    const int8_t* codes = cache.values<int8_t>(0, 0, 0);
    CHECK(std::vector<int>(codes, codes + 4) == std::vector<int>{-127, 127, -64, 0});
    CHECK(std::isnan(cache.value_scales(0, 0, 0)[0]));
}

// A chunk: what is in the cache and in Rows, by several tokens at once.
TEST_CASE("attention: scores, probabilities and the weighted sum of the golden vectors, in chunks") {
    for (const std::string name : {"attention", "attention.prompt"}) {
        CAPTURE(name);
        const Tensor& shapes = golden_ops().at(name + ".q");
        const int n = shapes.shape[0], n_heads = shapes.shape[1], d = shapes.shape[2],
                  n_kv = golden_ops().at(name + ".k").shape[1];
        const std::vector<float> q = shapes.f32(), k = golden_ops().at(name + ".k").f32(),
                                 v = golden_ops().at(name + ".v").f32();
        for (const int at_once : {n, 4, 1}) {  // tokens of a chunk
            CAPTURE(at_once);
            KvCache cache(KvFormat::f32, 1, n_kv, d, n + 11);
            Rows q_rows(n, n_heads * d), k_rows(n, n_kv * d), v_rows(n, n_kv * d), out(n, n_heads * d);
            std::vector<float> found, found_scores(n * n_heads * n), found_probs(n * n_heads * n);
            for (int pos = 0; pos < n; pos += at_once) {
                const int n_tokens = std::min(at_once, n - pos);
                q_rows.n_rows = k_rows.n_rows = v_rows.n_rows = n_tokens;
                std::copy_n(q.begin() + pos * n_heads * d, n_tokens * n_heads * d, q_rows.row(0));
                std::copy_n(k.begin() + pos * n_kv * d, n_tokens * n_kv * d, k_rows.row(0));
                std::copy_n(v.begin() + pos * n_kv * d, n_tokens * n_kv * d, v_rows.row(0));
                cache.append(0, pos, k_rows, v_rows);
                HeadScores scores, probs;
                scores.wanted = probs.wanted = true;
                attention(out, scores, probs, q_rows, cache, 0, pos);
                REQUIRE(out.n_rows == n_tokens);
                found.insert(found.end(), out.row(0), out.row(n_tokens));
                for (int t = 0; t < n_tokens; t++) {
                    for (int head = 0; head < n_heads; head++) {
                        const int at = ((pos + t) * n_heads + head) * n;
                        std::copy_n(scores.row(t * n_heads + head), pos + t + 1, found_scores.begin() + at);
                        std::copy_n(probs.row(t * n_heads + head), pos + t + 1, found_probs.begin() + at);
                    }
                }
                HeadScores none;
                const std::vector<float> before = out.values;
                attention(out, none, none, q_rows, cache, 0, pos);
                CHECK(out.values == before);
                CHECK(none.values.empty());
            }
            CHECK(same_bits(golden_ops().at(name + ".out").f32(), found));
            CHECK(same_bits(golden_ops().at(name + ".scores").f32(), found_scores));
            CHECK(same_bits(golden_ops().at(name + ".probs").f32(), found_probs));
        }
    }
}

// What --kv f16 and --kv q8 keep, to the bit, and attention over it.
template <class T>
void check_kept(KvFormat format, const std::string& name) {
    CAPTURE(name);
    auto of = [&](const char* tensor) -> const Tensor& { return golden_ops().at(name + "." + tensor); };
    const int n = of("q").shape[0], n_heads = of("q").shape[1], d = of("q").shape[2], n_kv = of("k").shape[1],
              n_positions = of("k").shape[0];
    KvCache cache(format, 1, n_kv, d, n_positions);
    Rows q(size_t(n), n_heads * d), k(size_t(n_positions), n_kv * d), v(size_t(n_positions), n_kv * d),
        out(size_t(n), n_heads * d);
    q.values = of("q").f32(), k.values = of("k").f32(), v.values = of("v").f32();
    q.n_rows = n, k.n_rows = v.n_rows = n_positions;
    cache.append(0, 0, k, v);
    std::vector<float> keys, values, key_scales, value_scales;
    for (int pos = 0; pos < n_positions; pos++) {
        for (int head = 0; head < n_kv; head++) {
            const int lane = pos % key_block;
            const T* key = cache.keys<T>(0, head, pos - lane) + lane;
            const T* value = cache.values<T>(0, head, pos);
            for (int i = 0; i < d; i++) keys.push_back(to_float(key[i * key_block]));
            for (int i = 0; i < d; i++) values.push_back(to_float(value[i]));
            if (format != KvFormat::q8) continue;
            key_scales.push_back(*cache.key_scales(0, head, pos));
            value_scales.push_back(*cache.value_scales(0, head, pos));
        }
    }
    if (format == KvFormat::q8) {
        const std::vector<int8_t> k_codes = of("k_codes").i8(), v_codes = of("v_codes").i8();
        CHECK(std::equal(keys.begin(), keys.end(), k_codes.begin(), k_codes.end()));
        CHECK(std::equal(values.begin(), values.end(), v_codes.begin(), v_codes.end()));
        CHECK(key_scales == of("k_scales").f32());
        CHECK(value_scales == of("v_scales").f32());
    } else {
        CHECK(keys == of("k_kept").f32());
        CHECK(values == of("v_kept").f32());
    }
    HeadScores none;
    attention(out, none, none, q, cache, 0, n_positions - n);
    CHECK(same_bits(of("out").f32(), out.values));
}

TEST_CASE("kv cache: the golden's codes, scales and fp16 numbers, and attention over them") {
    for (const char* name : {"at256", "edges", "5x128", "1x256", "8x8", "long"}) {
        check_kept<Half>(KvFormat::f16, std::string("attention_kv.f16.") + name);
        check_kept<int8_t>(KvFormat::q8, std::string("attention_kv.q8.") + name);
    }
}

// The tokens before, at and behind the boundary of a chunk and of a page; what is earlier is in the cache.
TEST_CASE("attention: the golden vectors around a boundary, in chunks that end there and in one") {
    for (const std::string name :
         {"attention.at128", "attention.at256", "attention.decode", "attention.at512", "attention.5x128",
          "attention.1x256", "attention.8x8", "attention.long"}) {
        const Tensor &q = golden_ops().at(name + ".q"), &k = golden_ops().at(name + ".k");
        const int n = q.shape[0], n_heads = q.shape[1], d = q.shape[2], n_kv = k.shape[1],
                  n_positions = k.shape[0];
        const std::vector<float> queries = q.f32(), keys = k.f32(),
                                 values = golden_ops().at(name + ".v").f32();
        auto copy = [](Rows& rows, const std::vector<float>& from, int first, int n_rows) {
            std::copy_n(from.begin() + first * rows.n_cols, n_rows * rows.n_cols, rows.row(0));
            rows.n_rows = n_rows;
        };
        for (const int at_once : {3, 1}) {
            CAPTURE(name);
            CAPTURE(at_once);
            KvCache cache(KvFormat::f32, 1, n_kv, d, n_positions);
            Rows q_rows(size_t(n), n_heads * d), out(size_t(n), n_heads * d);
            Rows k_rows(size_t(n_positions), n_kv * d), v_rows(size_t(n_positions), n_kv * d);
            copy(k_rows, keys, 0, n_positions - n), copy(v_rows, values, 0, n_positions - n);
            cache.append(0, 0, k_rows, v_rows);
            std::vector<float> found;
            for (int pos = n_positions - n; pos < n_positions; pos += at_once) {
                const int n_tokens = std::min(at_once, n_positions - pos);
                copy(q_rows, queries, pos - (n_positions - n), n_tokens);
                copy(k_rows, keys, pos, n_tokens), copy(v_rows, values, pos, n_tokens);
                cache.append(0, pos, k_rows, v_rows);
                HeadScores none;
                attention(out, none, none, q_rows, cache, 0, pos);
                found.insert(found.end(), out.row(0), out.row(n_tokens));
            }
            CHECK(same_bits(golden_ops().at(name + ".out").f32(), found));
        }
    }
}

TEST_CASE("attention: more query heads share a kv head than are computed at once") {
    const int n = 3, n_heads = 20, d = 8;
    KvCache cache(KvFormat::f32, 1, 1, d, n);
    Rows q(n, n_heads * d), k(n, d), v(n, d), out(n, n_heads * d);
    q.n_rows = k.n_rows = v.n_rows = n;
    for (size_t i = 0; i < q.values.size(); i++) q.values[i] = std::sin(float(i));
    for (int i = 0; i < n * d; i++) k.values[i] = std::cos(float(i)), v.values[i] = float(i % 7) - 3;
    cache.append(0, 0, k, v);
    HeadScores none;
    attention(out, none, none, q, cache, 0, 0);
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < n_heads; h++) {
            const float* query = q.row(t) + h * d;
            double weights[n], sum = 0;
            for (int p = 0; p <= t; p++) {
                double dot = 0;
                for (int i = 0; i < d; i++) dot += double(query[i]) * k.row(p)[i];
                sum += weights[p] = std::exp(dot / std::sqrt(double(d)));
            }
            for (int i = 0; i < d; i++) {
                double expected = 0;
                for (int p = 0; p <= t; p++) expected += weights[p] / sum * v.row(p)[i];
                CHECK(out.row(t)[h * d + i] == doctest::Approx(expected).epsilon(1e-5));
            }
        }
    }
}
