// The operations between matrix products, on the device and the same whatever the scheme: the embedding,
// RMSNorm, RoPE, SwiGLU, the residual sum, the classifier. Weights are fp16, sums fp32. Each function takes
// all tokens of a chunk and launches the kernel that stands before it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/reduce.cuh"
#include "engine/gpu/rows.cuh"
#include "engine/model/config.h"
#include "engine/model/rope.h"

// ----------------------------------------------------------------------------
// The embedding

// grid: n_tokens.
static __global__ void embed_kernel(float* x, const half* table, const int* tokens, int dim) {
    const half* from = table + size_t(tokens[blockIdx.x]) * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        x[size_t(blockIdx.x) * dim + i] = __half2float(from[i]);
}

// out (n_tokens, dim) = the table's row of each token. table: (vocab_size, dim); tokens: on the device.
inline void embed(DeviceRows<float>& out, const half* table, const int* tokens, int n_tokens) {
    out.n_rows = n_tokens;
    launch<embed_kernel>({.grid = n_tokens, .block = 256, .stream = device().stream}, out.get(), table,
                         tokens, out.n_cols);
}

// ----------------------------------------------------------------------------
// RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)

// grid: rows.
static __global__ void rmsnorm_kernel(half* out, const float* x, const half* weight, int dim, float eps) {
    x += size_t(blockIdx.x) * dim, out += size_t(blockIdx.x) * dim;
    float squares = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    const float inv = rsqrtf(block_sum(squares) / float(dim) + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        out[i] = __float2half(__half2float(weight[i]) * (x[i] * inv));
    }
}

// out = weight * x / sqrt(mean(x^2) + eps) per row. weight: (n_cols,).
inline void rmsnorm(DeviceRows<half>& out, RowSlice<float> x, const half* weight, float eps) {
    out.n_rows = x.n_rows;
    launch<rmsnorm_kernel>({.grid = x.n_rows, .block = 256, .stream = device().stream}, out.get(), x.values,
                           weight, x.n_cols, eps);
}

// ----------------------------------------------------------------------------
// From q, k and v to attention: Qwen3's norm over each head, RoPE (Su et al. 2021, arXiv 2104.09864), fp16

// The kernel's arguments.
struct Heads {
    const float *q, *k, *v;       // (n_tokens, heads * head_dim)
    half* q_out;                  // (n_tokens, n_heads, head_dim)
    half *keys, *values;          // of this layer: (n_kv_heads, context, head_dim)
    const half *q_norm, *k_norm;  // (head_dim,), or null
    const float2* rotations;      // (context, head_dim / 2) cos and sin
    const int* pos;               // of token 0
    int n_heads, n_kv_heads, head_dim, context;
    float eps;
    float *traced_q, *traced_k;  // the normalized heads, if a trace wants them
};

// Pairs to rotate are (i, i + head_dim / 2), as Hugging Face stores them.
// grid: (n_heads + 2 n_kv_heads, n_tokens); block: a warp.
static __global__ void prepare_heads_kernel(Heads h) {
    const int lane = threadIdx.x, half_dim = h.head_dim / 2, token = blockIdx.y, pos = *h.pos + token;
    const bool is_q = int(blockIdx.x) < h.n_heads, is_v = int(blockIdx.x) >= h.n_heads + h.n_kv_heads;
    const int head = is_q ? blockIdx.x : (blockIdx.x - h.n_heads) % h.n_kv_heads;
    const int n_heads = is_q ? h.n_heads : h.n_kv_heads;
    const float* in = (is_q ? h.q : is_v ? h.v : h.k) + (size_t(token) * n_heads + head) * h.head_dim;
    const size_t cached = (size_t(head) * h.context + pos) * h.head_dim;
    if (is_v) {
        for (int i = lane; i < h.head_dim; i += 32) h.values[cached + i] = __float2half(in[i]);
        return;
    }
    const half* norm = is_q ? h.q_norm : h.k_norm;
    float inv = 1;
    if (norm != nullptr) {
        float squares = 0;
        for (int i = lane; i < h.head_dim; i += 32) squares = fmaf(in[i], in[i], squares);
        inv = rsqrtf(warp_sum(squares) / float(h.head_dim) + h.eps);
    }
    half* out = is_q ? h.q_out + (size_t(token) * n_heads + head) * h.head_dim : h.keys + cached;
    float* traced = is_q ? h.traced_q : h.traced_k;
    if (traced != nullptr) traced += (size_t(token) * n_heads + head) * h.head_dim;
    for (int i = lane; i < half_dim; i += 32) {
        float a = in[i], b = in[i + half_dim];
        if (norm != nullptr) {
            a = __half2float(norm[i]) * (a * inv);
            b = __half2float(norm[i + half_dim]) * (b * inv);
            if (traced != nullptr) traced[i] = a, traced[i + half_dim] = b;
        }
        const float2 rotation = h.rotations[size_t(pos) * half_dim + i];
        out[i] = __float2half(a * rotation.x - b * rotation.y);
        out[i + half_dim] = __float2half(a * rotation.y + b * rotation.x);
    }
}

// Qwen3's weights (head_dim,) of the norms over each head of q and k; null: no such norms.
struct QkNorms {
    const half *q = nullptr, *k = nullptr;
    float eps = 0;
};

// One kernel for q_norm, k_norm and RoPE: rotates q and k (n_tokens, heads * head_dim), normalized if there
// are norms, by their positions *pos, *pos + 1, ...; writes q_rope, and k and v into the layer's cache.
// q_norm and k_norm get the normalized heads if they have memory, which only traces need.
inline void prepare_heads(DeviceRows<half>& q_rope, DeviceKvCache& cache, int layer,
                          DeviceRows<float>& q_norm, DeviceRows<float>& k_norm, const DeviceRows<float>& q,
                          const DeviceRows<float>& k, const DeviceRows<float>& v, const QkNorms& norms,
                          const DeviceBuffer<float2>& rotations, const int* pos) {
    q_rope.n_rows = q_norm.n_rows = k_norm.n_rows = q.n_rows;
    Heads h{};
    h.q = q.get(), h.k = k.get(), h.v = v.get(), h.q_out = q_rope.get();
    h.keys = cache.keys(layer), h.values = cache.values(layer);
    h.q_norm = norms.q, h.k_norm = norms.k, h.eps = norms.eps;
    h.rotations = rotations.get(), h.pos = pos;
    h.n_heads = q.n_cols / cache.head_dim, h.n_kv_heads = cache.n_kv_heads;
    h.head_dim = cache.head_dim, h.context = cache.context;
    h.traced_q = q_norm.get(), h.traced_k = k_norm.get();
    launch<prepare_heads_kernel>(
        {.grid = dim3(h.n_heads + 2 * h.n_kv_heads, q.n_rows), .block = 32, .stream = device().stream}, h);
}

// cos and sin of every position and pair, (context, head_dim / 2), on the device. They are computed as a run
// comes to its positions, some thousand at a time: those of a long context would take seconds.
class RotationTable {
  public:
    RotationTable() = default;
    RotationTable(const ModelConfig& c, int context)
        : context_(context),
          frequencies_(rope_frequencies(c)),
          table_(size_t(context) * frequencies_.size()) {}

    // Before positions up to end - 1 are used.
    void reach(int end) {
        if (end <= n_ready_) return;
        constexpr int step = 4096;
        const int first = n_ready_;
        n_ready_ = std::min(context_, (end + step - 1) / step * step);
        std::vector<float2> rows;
        rows.reserve(size_t(n_ready_ - first) * frequencies_.size());
        for (int pos = first; pos < n_ready_; pos++) {
            for (const float frequency : frequencies_) {
                const Rotation r = rotation(pos, frequency);
                rows.push_back(make_float2(r.cos, r.sin));
            }
        }
        table_.upload(rows.data(), rows.size(), size_t(first) * frequencies_.size());
    }
    operator const DeviceBuffer<float2>&() const { return table_; }

  private:
    int context_ = 0, n_ready_ = 0;   // positions
    std::vector<float> frequencies_;  // (head_dim / 2,)
    DeviceBuffer<float2> table_;
};

// ----------------------------------------------------------------------------
// SwiGLU (Shazeer 2020, arXiv 2002.05202) and the residual sum

static __global__ void swiglu_kernel(half* out, const float* gate, const float* up, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2half(gate[i] / (1.0f + expf(-gate[i])) * up[i]);
}

// out = silu(gate) * up, silu(z) = z / (1 + exp(-z))
inline void swiglu(DeviceRows<half>& out, const DeviceRows<float>& gate, const DeviceRows<float>& up) {
    out.n_rows = gate.n_rows;
    const size_t n = gate.size();
    launch<swiglu_kernel>({.grid = dim3((n + 255) / 256), .block = 256, .stream = device().stream}, out.get(),
                          gate.get(), up.get(), n);
}

static __global__ void add_kernel(float* x, const float* y, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}

// x += y
inline void add(DeviceRows<float>& x, const DeviceRows<float>& y) {
    const size_t n = x.size();
    launch<add_kernel>({.grid = dim3((n + 255) / 256), .block = 256, .stream = device().stream}, x.get(),
                       y.get(), n);
}

// ----------------------------------------------------------------------------
// The classifier, and the most probable token

// out (n_tokens, n_rows) = x (n_tokens, n_in) by each row of a matrix (n_rows, n_in). A warp computes one
// output. grid: (n_rows / 8, n_tokens); block: 256; n_in a multiple of 8.
static __global__ void fp16_gemv(float* out, const half* x, const half* matrix, int n_rows, int n_in) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= n_rows) return;
    const uint4* w = reinterpret_cast<const uint4*>(matrix + size_t(row) * n_in);
    const uint4* v = reinterpret_cast<const uint4*>(x + size_t(blockIdx.y) * n_in);
    float sum = 0;
    for (int i = lane; i < n_in / 8; i += 32) {
        const uint4 a = __ldg(w + i), b = __ldg(v + i);
        const uint32_t aw[4] = {a.x, a.y, a.z, a.w}, bw[4] = {b.x, b.y, b.z, b.w};
        for (int j = 0; j < 4; j++) {
            const float2 p = __half22float2(as_half2(aw[j])), q = __half22float2(as_half2(bw[j]));
            sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[size_t(blockIdx.y) * n_rows + row] = sum;
}

// out (n_tokens, n_out) = x (n_tokens, n_in) times the transpose of an fp16 matrix (n_out, n_in): by cuBLAS,
// if there is one and more than one token.
inline void fp16_matmul(DeviceRows<float>& out, const DeviceRows<half>& x, const half* matrix) {
    out.n_rows = x.n_rows;
#ifdef HAVE_CUBLAS
    if (x.n_rows > 1) {
        run_cublas(x.get(), x.n_rows, matrix, x.n_cols, out.n_cols, out.get(), false, true);
        return;
    }
#endif
    launch<fp16_gemv>({.grid = dim3((out.n_cols + 7) / 8, x.n_rows), .block = 256, .stream = device().stream},
                      out.get(), static_cast<const half*>(x.get()), matrix, out.n_cols, x.n_cols);
}

// grid: 1; block: 1024.
static __global__ void arg_max_kernel(int* best, const float* logits, int n) {
    __shared__ float values[32];
    __shared__ int indices[32];
    float value = -INFINITY;
    int index = 0x7fffffff;
    auto take = [&](float v, int i) {
        if (v > value || (v == value && i < index)) value = v, index = i;
    };
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        isfinite(logits[i]) ? take(logits[i], i) : take(INFINITY, -1);
    }
    auto over_warp = [&] {
        for (int distance = 16; distance > 0; distance /= 2) {
            const float v = __shfl_xor_sync(0xffffffff, value, distance);
            const int i = __shfl_xor_sync(0xffffffff, index, distance);
            take(v, i);
        }
    };
    over_warp();
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    value = threadIdx.x < blockDim.x / 32 ? values[threadIdx.x] : -INFINITY;
    index = threadIdx.x < blockDim.x / 32 ? indices[threadIdx.x] : 0x7fffffff;
    over_warp();
    if (threadIdx.x == 0) *best = index;
}

// *best = the index of the largest of a row of logits (n,), the first of equals; -1 if one is not finite.
inline void arg_max(DeviceBuffer<int>& best, const float* logits, int n) {
    launch<arg_max_kernel>({.grid = 1, .block = 1024, .stream = device().stream}, best.get(), logits, n);
}
