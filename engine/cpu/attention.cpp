#include "engine/cpu/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "engine/cpu/rows.h"
#include "engine/os/system.h"

// attend(), by the format of the cache (KvFormat). With ATTEND_AVX2, in a program for any x86-64, this file
// is compiled once more, for AVX2, to give it that one: the linker sees no other name of it (vector.h).
using Attend = decltype(attend<float>)*;
static constexpr Attend by_format[] = {attend<float>, attend<Half>, attend<int8_t>};
extern const Attend* const attend_avx2;
static_assert(key_block == 16 || vector_lanes == 16);  // the order of the keys, in both
#if defined(ATTEND_AVX2) && defined(__AVX2__)
const Attend* const attend_avx2 = by_format;
#else
void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
               int layer, int pos) {
    const Stopwatch time(phase_seconds.attention);
    const int head_dim = cache.head_dim(), n_tokens = q.n_rows, n_heads = q.n_cols / head_dim;
    const size_t width = size_t(padded(pos + n_tokens));  // of a row of scores
    const Attend* fastest = by_format;
#ifdef ATTEND_AVX2
    if (has_avx2) fastest = attend_avx2;
#endif
    out.n_rows = n_tokens;
    scores.resize(n_tokens, n_heads, pos, width);
    probs.resize(n_tokens, n_heads, pos, width);
    for_query_blocks(cache, n_tokens, n_heads, [&](int kv, int n_rows, auto head_of) {
        const float* q_rows[max_attention_rows];
        float *out_rows[max_attention_rows], *score_rows[max_attention_rows];
        int kv_len[max_attention_rows];
        for (int r = 0; r < n_rows; r++) {
            q_rows[r] = q.row(0) + size_t(head_of(r)) * head_dim;
            out_rows[r] = out.row(0) + size_t(head_of(r)) * head_dim;
            score_rows[r] = scores.row(head_of(r));
            kv_len[r] = pos + head_of(r) / n_heads + 1;
        }
        static thread_local std::vector<float> buffer;
        float* all_probs = scratch(buffer, attention_room(width, cache.context()));
        fastest[int(cache.format())](out_rows, cache, layer, kv, q_rows, kv_len, n_rows, all_probs, width,
                                     scores.wanted ? score_rows : nullptr);
        for (int r = 0; r < n_rows && probs.wanted; r++)
            std::copy_n(all_probs + size_t(r) * width, kv_len[r], probs.row(head_of(r)));
    });
}
#endif
