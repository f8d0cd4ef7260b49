// Logits -> the next token.
//
// In Hugging Face's order: the repetition penalty makes the logits of tokens seen so far smaller: positive
// ones are divided by it, negative ones multiplied. Temperature 0 then takes the most probable token.
// Otherwise, divide the logits by the temperature, keep the top_k most probable tokens, of those keep the
// most probable until together they have top_p of the probability, of those keep the ones with at least min_p
// times the probability of the most probable, and draw one of what is left.
//
// The vocabulary is large (Llama 3: 128256), so no cut sorts it: top-k partitions, and top-p takes tokens
// from a heap until there are enough. Nothing is allocated after the first token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "engine/cpu/vector.h"

// The first of the largest logits. NaN is never the largest; if nothing is larger than -inf, it is token 0.
inline int argmax(std::span<const float> logits) {
    size_t best = 0;
    float best_logit = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < logits.size(); i++) {
        if (logits[i] > best_logit) {
            best = i;
            best_logit = logits[i];
        }
    }
    return int(best);
}

struct Sampler {
    float temperature;  // >= 0
    int top_k;          // 0: off
    float top_p;        // 1: off; at 0 only the most probable token is left
    std::mt19937_64 random;
    float min_p = 0;                 // 0: off
    float repetition_penalty = 1;    // > 0; 1: off
    std::vector<float> weights{};    // (vocab_size,): see sample()
    std::vector<float> penalized{};  // logits (vocab_size,)
    std::vector<int> kept{};         // ids, at most vocab_size

    // Whether sample() always takes the largest logit.
    bool greedy() const { return temperature == 0 && repetition_penalty == 1; }

    // logits (vocab_size,) -> token id. `seen`: the ids of the prompt and what was generated so far, each
    // below vocab_size, which are penalized once. `repeated`: those that are penalized once more for each
    // time they are in it. `weights` has then what was drawn by: probabilities up to a factor, 0 for tokens
    // that were cut.
    int sample(std::span<const float> logits, std::span<const int> seen = {},
               std::span<const int> repeated = {}) {
        if (repetition_penalty != 1) {
            const auto less = [this](float x) {
                return x < 0 ? x * repetition_penalty : x / repetition_penalty;
            };
            penalized.assign(logits.begin(), logits.end());
            for (const int id : seen) penalized[size_t(id)] = less(logits[size_t(id)]);
            for (const int id : repeated) penalized[size_t(id)] = less(penalized[size_t(id)]);
            logits = penalized;
        }
        const int best = argmax(logits);
        if (temperature == 0) return best;
        const float max = logits[size_t(best)];
        // +inf wins outright; all NaN or -inf leaves nothing to draw from.
        if (!std::isfinite(max)) return best;

        // softmax without its division: a token's weight is its probability relative to the best token's. Far
        // below it is 0: it could not win.
        const size_t n = logits.size();
        weights.resize(n);
        double total = 0;
        for (size_t i = 0; i < n; i++) {
            const float z = (logits[i] - max) / temperature;
            weights[i] = z >= -87 ? exp_fp32(z) : 0;  // NaN gets no weight
            total += weights[i];
        }
        const bool cut_k = top_k > 0 && size_t(top_k) < n, cut_p = top_p < 1;
        if (cut_k || cut_p) total = cut(cut_k, cut_p, total);
        if (min_p > 0) {  // the best token's weight is 1
            total = 0;
            for (float& w : weights) total += w = w < min_p ? 0 : w;
        }

        // The same on every machine: the standard fixes mt19937_64's sequence but not
        // std::uniform_real_distribution's. Walking in the order of the ids makes the draw independent of how
        // the cuts shuffled theirs.
        double r = double(random() >> 11) * 0x1p-53 * total;
        size_t last = size_t(best);
        for (size_t i = 0; i < n; i++) {
            if (weights[i] == 0) continue;
            r -= weights[i];
            last = i;
            if (r < 0) break;
        }
        return int(last);
    }

    // Zeroes the weights of the tokens that the two cuts drop. Returns the sum of the others.
    double cut(bool cut_k, bool cut_p, double total) {
        const auto before = [this](int a, int b) {  // the more probable first, of equals the lower id
            const float wa = weights[size_t(a)], wb = weights[size_t(b)];
            return wa != wb ? wa > wb : a < b;
        };
        const auto behind = [&](int a, int b) { return before(b, a); };
        // Without top_k, a token of less than (1 - top_p) / n cannot be among those that make up top_p: it
        // and the less probable ones together have less than 1 - top_p. That leaves out nearly the whole
        // vocabulary.
        const double least = cut_k ? 0 : (1.0 - top_p) * total / double(weights.size());
        kept.clear();
        kept.reserve(weights.size());
        for (size_t i = 0; i < weights.size(); i++) {
            if (weights[i] >= least) kept.push_back(int(i));
        }
        if (cut_k) {
            std::nth_element(kept.begin(), kept.begin() + ptrdiff_t(top_k), kept.end(), before);
            kept.resize(size_t(top_k));
            total = 0;
            for (const int id : kept) total += weights[size_t(id)];
        }
        auto first = kept.begin();  // of those that stay
        if (cut_p) {                // the most probable of a heap moves to its end, until there are enough
            std::make_heap(kept.begin(), kept.end(), behind);
            first = kept.end();
            double mass = 0;
            do {
                std::pop_heap(kept.begin(), first, behind);
                mass += weights[size_t(*--first)];
            } while (mass < top_p * total && first != kept.begin());
        }
        // What is kept is marked by its sign for a moment, so that one pass zeroes the rest.
        for (; first != kept.end(); ++first) weights[size_t(*first)] *= -1;
        total = 0;
        for (float& w : weights) {
            w = w < 0 ? -w : 0;
            total += w;
        }
        return total;
    }
};
