// Attention by the plain loop of runq.cpp, in place of engine/cpu/attention.cpp: in build/ladder/runq, with
// which bench/ladder.py measures what the tiles bring. Keys and values are kept once more, position by
// position, as the loop reads them.
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "engine/cpu/kv_cache.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

namespace plain {
// Taken out of runq.cpp by mk/bench.mk.
void attend(float* out, float* scores, float* probs, const float* q, const float* keys, const float* values,
            int n_positions, int head_dim, int stride);
}  // namespace plain

namespace {

// Of one layer: (n_kv_heads, context, head_dim) each.
struct LayerCache {
    std::vector<float> keys, values;
};

// Copies positions pos .. end - 1 of a layer out of the engine's cache.
void copy_positions(LayerCache& to, const KvCache& from, int layer, int pos, int end) {
    const size_t d = size_t(from.head_dim()), context = size_t(from.context());
    to.keys.resize(size_t(from.n_kv_heads()) * context * d);
    to.values.resize(to.keys.size());
    for (int h = 0; h < from.n_kv_heads(); h++) {
        for (int p = pos; p < end; p++) {
            const int lane = p % key_block;
            const float* key = from.keys<float>(layer, h, p - lane) + lane;
            const float* value = from.values<float>(layer, h, p);
            const size_t at = (size_t(h) * context + size_t(p)) * d;
            for (size_t i = 0; i < d; i++) {
                to.keys[at + i] = key[i * size_t(key_block)];
                to.values[at + i] = value[i];
            }
        }
    }
}

}  // namespace

void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
               int layer, int pos) {
    if (cache.format() != KvFormat::f32 || scores.wanted)
        throw std::runtime_error("this program is for measuring: no --kv, and no --trace");
    const Stopwatch time(phase_seconds.attention);
    static std::vector<LayerCache> layers;
    if (layers.size() <= size_t(layer)) layers.resize(size_t(layer) + 1);
    copy_positions(layers[size_t(layer)], cache, layer, pos, pos + q.n_rows);
    const int d = cache.head_dim(), n_heads = q.n_cols / d, heads_per_kv = n_heads / cache.n_kv_heads();
    out.n_rows = q.n_rows;
    probs.resize(q.n_rows, n_heads, pos, 0);
    parallel_for(q.n_rows * n_heads, [&](int i) {
        const int t = i / n_heads, h = i % n_heads, n_positions = pos + t + 1;
        std::vector<float> room(size_t(n_positions), 0.0f);
        const size_t first = size_t(h / heads_per_kv) * size_t(cache.context()) * size_t(d);
        plain::attend(out.row(t) + h * d, room.data(), room.data(), q.row(t) + h * d,
                      &layers[size_t(layer)].keys[first], &layers[size_t(layer)].values[first], n_positions,
                      d, d);
    });
}
