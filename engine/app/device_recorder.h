// Records steps whose values lie on the device into a trace, as engine/app/trace.h's Recorder does for those
// in the host's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "engine/app/trace.h"
#include "engine/gpu/device.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/rows.cuh"

// Records the steps of one layer, or those outside the layers (layer -1), if there is a trace:
//
//     rmsnorm(s.normed, s.x, ...);  record("attn.norm", s.normed);
class DeviceRecorder {
  public:
    DeviceRecorder(Trace* trace, int layer) : trace_(trace), layer_(layer) {}

    // n_tokens values of the given shape, as Trace::add() has it. fp16 values are recorded as fp16.
    template <class T>
    void operator()(const char* name, const T* values, int n_tokens, std::initializer_list<int> shape) const {
        if (trace_ == nullptr) return;
        size_t n = size_t(n_tokens);
        for (const int size : shape) n *= size_t(size);
        std::vector<T> host(n);
        download(host.data(), values, n);
        add(name, host, n_tokens, shape);
    }
    // (n_tokens, n_cols)
    template <class T>
    void operator()(const char* name, const DeviceRows<T>& x) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols});
    }
    // (n_tokens, heads, head_dim)
    template <class T>
    void operator()(const char* name, const DeviceRows<T>& x, int head_dim) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols / head_dim, head_dim});
    }
    // The cache's keys of n_tokens tokens at positions *pos, *pos + 1, ...: (n_tokens, n_kv_heads, head_dim).
    void operator()(const char* name, const DeviceKvCache& cache, const int* pos, int n_tokens) const {
        if (trace_ == nullptr) return;
        int first = 0;
        download(&first, pos, 1);
        const size_t n = size_t(n_tokens), heads = size_t(cache.n_kv_heads), length = size_t(cache.head_dim);
        std::vector<half> of_head(n * length), keys(n * heads * length);
        for (size_t h = 0; h < heads; h++) {
            const size_t row = h * size_t(cache.context) + size_t(first);
            download(of_head.data(), cache.keys(layer_) + row * length, of_head.size());
            for (size_t t = 0; t < n; t++)
                std::copy_n(of_head.data() + t * length, length, keys.data() + (t * heads + h) * length);
        }
        add(name, keys, n_tokens, {cache.n_kv_heads, cache.head_dim});
    }

  private:
    template <class T>
    void add(const char* name, const std::vector<T>& values, int n_tokens,
             std::initializer_list<int> shape) const {
        if constexpr (std::is_same_v<T, half>) {
            std::vector<uint16_t> bits(values.size());
            std::memcpy(bits.data(), values.data(), values.size() * sizeof(half));
            trace_->add(step_name(layer_, name), bits.data(), size_t(n_tokens), shape);
        } else {
            trace_->add(step_name(layer_, name), values.data(), size_t(n_tokens), shape);
        }
    }

    Trace* trace_;
    int layer_;
};
