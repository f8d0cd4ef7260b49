#include "engine/cpu/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "engine/cpu/rows.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

// Query heads that share a kv head read the same keys and values, so they go together, and with them those of
// the next tokens, up to max_attention_rows. Threads take such blocks dynamically.
void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
               int layer, int pos) {
    const Stopwatch time(phase_seconds.attention);
    const int head_dim = cache.head_dim(), n_tokens = q.n_rows;
    const int n_heads = q.n_cols / head_dim, heads_per_kv = n_heads / cache.n_kv_heads();
    const int n_queries = n_tokens * heads_per_kv;  // of one kv head: token by token, then head by head
    const int n_blocks = (n_queries + max_attention_rows - 1) / max_attention_rows;
    const size_t width = size_t(padded(pos + n_tokens));  // of a row of scores
    out.n_rows = n_tokens;
    scores.resize(n_tokens, n_heads, pos, width);
    probs.resize(n_tokens, n_heads, pos, width);
    parallel_for(cache.n_kv_heads() * n_blocks, [&](int i) {
        const int kv = i / n_blocks, first = i % n_blocks * max_attention_rows;
        const int n_rows = std::min(max_attention_rows, n_queries - first);
        const float* q_rows[max_attention_rows];
        float *out_rows[max_attention_rows], *score_rows[max_attention_rows];
        int kv_len[max_attention_rows];
        auto token_of = [&](int r) { return (first + r) / heads_per_kv; };
        auto head_of = [&](int r) { return kv * heads_per_kv + (first + r) % heads_per_kv; };
        for (int r = 0; r < n_rows; r++) {
            q_rows[r] = q.row(token_of(r)) + head_of(r) * head_dim;
            out_rows[r] = out.row(token_of(r)) + head_of(r) * head_dim;
            score_rows[r] = scores.row(token_of(r) * n_heads + head_of(r));
            kv_len[r] = pos + token_of(r) + 1;
        }
        static thread_local std::vector<float> buffer;
        float* all_probs = scratch(buffer, attention_room(width, cache.context()));
        with_kv_type(cache.format(), [&](auto number) {
            attend<decltype(number)>(out_rows, cache, layer, kv, q_rows, kv_len, n_rows, all_probs, width,
                                     scores.wanted ? score_rows : nullptr);
        });
        for (int r = 0; r < n_rows && probs.wanted; r++)
            std::copy_n(all_probs + size_t(r) * width, kv_len[r],
                        probs.row(token_of(r) * n_heads + head_of(r)));
    });
}
