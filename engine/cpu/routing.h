// Mixtures of experts: which experts each token goes to, and what becomes of what they compute.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "engine/cpu/rows.h"

// A pair is a token and one of its k experts: t * k + r, r = 0 the best.
struct Routing {
    int k = 0;                     // experts that a token goes to
    std::vector<int32_t> experts;  // (n_tokens, k)
    std::vector<float> weights;    // (n_tokens, k)
    std::vector<int> by_expert;    // all pairs, sorted by expert: the rows of what experts compute
    std::vector<int> row_of;       // (n_tokens, k), where a pair is in by_expert
    std::vector<int> token_of;     // (n_pairs,), the token of each row
    std::vector<int> every_row;    // (n_pairs,), 0, 1, 2, ...
};

// The k largest of a token's logits (n_experts,), of equal ones the lowest index, and their softmax: over all
// experts, or over these k (norm_topk_prob of Qwen3's config.json). experts, weights: (k,).
inline void route(int32_t* experts, float* weights, const float* logits, int n_experts, int k,
                  bool norm_topk_prob) {
    std::vector<int32_t> all(size_t(n_experts), 0);
    std::iota(all.begin(), all.end(), 0);
    std::partial_sort(all.begin(), all.begin() + k, all.end(),
                      [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    std::copy_n(all.begin(), k, experts);
    const int n_summed = norm_topk_prob ? k : n_experts;
    double sum = 0;
    for (int i = 0; i < n_summed; i++) sum += std::exp(double(logits[all[i]]) - double(logits[all[0]]));
    for (int r = 0; r < k; r++)
        weights[r] = float(std::exp(double(logits[experts[r]]) - double(logits[all[0]])) / sum);
}

// Sorts the pairs of tokens and experts by expert; those of one expert stay in the order of tokens.
inline void sort_pairs(Routing& r) {
    r.every_row.resize(r.experts.size());
    std::iota(r.every_row.begin(), r.every_row.end(), 0);
    r.by_expert = r.row_of = r.token_of = r.every_row;
    std::stable_sort(r.by_expert.begin(), r.by_expert.end(),
                     [&](int a, int b) { return r.experts[a] < r.experts[b]; });
    for (const int row : r.every_row) {
        r.row_of[r.by_expert[row]] = row;
        r.token_of[row] = r.by_expert[row] / r.k;
    }
}

// The k experts of each token, given the router's logits (n_tokens, n_experts).
inline void route(Routing& out, const Rows& logits, int k, bool norm_topk_prob) {
    out.k = k;
    out.experts.resize(size_t(logits.n_rows) * k), out.weights.resize(out.experts.size());
    for (int t = 0; t < logits.n_rows; t++)
        route(&out.experts[size_t(t) * k], &out.weights[size_t(t) * k], logits.row(t), logits.n_cols, k,
              norm_topk_prob);
    sort_pairs(out);
}

// Calls use(expert, first, n) for each expert that has rows: first, first + 1, ... of by_expert.
template <class Use>
void for_each_expert(const Routing& routing, Use use) {
    const auto n_pairs = int(routing.by_expert.size());
    for (int first = 0, end = 0; first < n_pairs; first = end) {
        const int32_t expert = routing.experts[routing.by_expert[first]];
        while (end < n_pairs && routing.experts[routing.by_expert[end]] == expert) end++;
        use(expert, first, end - first);
    }
}

// out (n_tokens, dim) = the sum of each token's rows of x (n_pairs, dim) times their weights, in rising order
// of expert, which is that of the rows.
inline void combine(Rows& out, const Rows& x, const Routing& routing) {
    out.n_rows = x.n_rows / routing.k;
    for_each_row(out.n_rows, [&](int t) {
        const auto first = routing.row_of.begin() + t * routing.k;
        std::vector<int> rows(first, first + routing.k);
        std::sort(rows.begin(), rows.end());
        std::fill_n(out.row(t), out.n_cols, 0.0f);
        for (const int row : rows)
            for (int i = 0; i < out.n_cols; i++)
                out.row(t)[i] += routing.weights[routing.by_expert[row]] * x.row(row)[i];
    });
}
