// The KV cache in fp16 on the device.
#pragma once

#include <cstddef>

#include "engine/gpu/device.h"
#include "engine/model/config.h"

struct DeviceKvCache {
    int n_kv_heads = 0, head_dim = 0, context = 0;  // context: positions
    DeviceBuffer<half> all_keys, all_values;        // each (n_layers, n_kv_heads, context, head_dim)

    DeviceKvCache() = default;
    DeviceKvCache(const ModelConfig& c, int n_positions)
        : n_kv_heads(c.n_kv_heads),
          head_dim(c.head_dim),
          context(n_positions),
          all_keys(c.n_layers * layer_size()),
          all_values(c.n_layers * layer_size()) {}

    // A layer's keys and values: (n_kv_heads, context, head_dim).
    half* keys(int layer) const { return all_keys.get() + layer * layer_size(); }
    half* values(int layer) const { return all_values.get() + layer * layer_size(); }

  private:
    size_t layer_size() const { return size_t(n_kv_heads) * size_t(context) * size_t(head_dim); }
};
