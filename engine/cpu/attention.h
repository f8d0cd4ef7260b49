// Attention in fp32 over a cache of keys and values, the same whatever the scheme of the weights and the
// format of the cache: numbers are widened to fp32 as they are loaded.
#pragma once

#include "engine/cpu/kv_cache.h"
#include "engine/cpu/rows.h"

// Attention of a chunk: q (n_tokens, n_heads * head_dim), rotated, of tokens at positions pos, pos + 1, ...,
// each against all positions up to its own -> out, same shape. Their keys and values are in the cache. If
// `scores` and `probs` are wanted, they get what every head makes of every position.
void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
               int layer, int pos);
