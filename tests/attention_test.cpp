// Attention's kernels, against the golden vectors and against plain loops in double precision.
#include "common/attention.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "safetensors.h"

namespace {

const Tensors& golden_ops() {
    static const Tensors ops = read_safetensors("golden/data/ops.safetensors");
    return ops;
}

std::vector<float> random_values(std::mt19937& rng, size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& v : values) v = normal(rng);
    return values;
}

}  // namespace

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
    const std::vector<float> x = golden_ops().at("softmax.x").f32(),
                             expected = golden_ops().at("softmax.out").f32();
    for (int i = 0; i < 3; i++) {
        std::vector<float> row(padded(77), 99.0f);  // what lies beyond the end must not matter
        std::copy_n(x.begin() + i * 77, 77, row.begin());
        softmax(row.data(), 77);
        CHECK(relative_error(std::span(expected).subspan(i * 77, 77), std::span(row).first(77)) < 1e-6);
        for (int j = 77; j < padded(77); j++) CHECK(row[j] == 0);
    }
}

// Positions over more than one page of the cache, head sizes that are no multiple of a vector, every number
// of queries, each seeing its own number of positions; two layers and two kv heads, so that a wrong offset
// shows.
TEST_CASE("attend: equal to plain loops") {
    const int n_layers = 2, n_kv_heads = 2, context = 2 * KvCache::page + 37;
    std::mt19937 rng(1);
    for (const int head_dim : {8, 20, 64, 128}) {
        KvCache cache(n_layers, n_kv_heads, head_dim, context);
        const std::vector<float> k = random_values(rng, size_t(4) * context * head_dim),
                                 v = random_values(rng, size_t(4) * context * head_dim);
        auto at = [&](int layer, int head, int pos) {
            return (size_t(layer * 2 + head) * context + pos) * head_dim;
        };
        for (int pos = 0; pos < context; pos++) {
            for (int i = 0; i < 4; i++) {
                cache.keep(i / 2, i % 2, pos, &k[at(i / 2, i % 2, pos)], &v[at(i / 2, i % 2, pos)]);
            }
        }
        for (int n_rows = 1; n_rows <= 2 * query_rows + 1; n_rows++) {
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
                std::vector<int> n_seen;
                for (int r = 0; r < n_rows; r++) {
                    q_rows.push_back(&q[r * head_dim]);
                    out_rows.push_back(&out[r * head_dim]);
                    score_rows.push_back(&scores[r * n_positions]);
                    n_seen.push_back(n_positions - (n_rows - 1 - r) / 2);
                }
                attend(out_rows.data(), cache, layer, head, q_rows.data(), n_seen.data(), n_rows,
                       probs.data(), padded(n_positions), score_rows.data());
                std::vector<float> expected, found_probs, expected_probs, found_scores, expected_scores;
                for (int r = 0; r < n_rows; r++) {
                    std::vector<double> weights(n_seen[r]), mix(head_dim);
                    double sum = 0;
                    for (int p = 0; p < n_seen[r]; p++) {
                        double dot = 0;
                        for (int d = 0; d < head_dim; d++)
                            dot += double(q_rows[r][d]) * k[at(layer, head, p) + d];
                        expected_scores.push_back(float(dot / std::sqrt(double(head_dim))));
                        sum += weights[p] = std::exp(dot / std::sqrt(double(head_dim)));
                    }
                    for (int p = 0; p < n_seen[r]; p++) {
                        expected_probs.push_back(float(weights[p] / sum));
                        for (int d = 0; d < head_dim; d++)
                            mix[d] += weights[p] / sum * v[at(layer, head, p) + d];
                    }
                    expected.insert(expected.end(), mix.begin(), mix.end());
                    const float* row = &probs[size_t(r) * padded(n_positions)];
                    found_probs.insert(found_probs.end(), row, row + n_seen[r]);
                    found_scores.insert(found_scores.end(), score_rows[r], score_rows[r] + n_seen[r]);
                    CHECK(std::all_of(row + n_seen[r], row + padded(n_positions),
                                      [](float x) { return x == 0; }));
                }
                CHECK(relative_error(expected, out) < 1e-6);
                CHECK(relative_error(expected_probs, found_probs) < 1e-6);
                CHECK(relative_error(expected_scores, found_scores) < 1e-6);
            }
        }
    }
}
