// What runq_awq.cu has before its operations when it is compiled alone, under the same names: a header and
// tensors, the device and rows on it, the KV cache, options and trace. And what its products, its attention
// and its classifier ask first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/gpu/attention.cuh"
#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/graph.cuh"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/ops.cuh"
#include "engine/gpu/reduce.cuh"
#include "engine/gpu/rows.cuh"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "simt/ptx.h"

#ifdef __CUDACC__
constexpr bool is_gpu = true;
#else
constexpr bool is_gpu = false;
#endif

// How products are computed. `fused` is what runq_awq is for. The others are the steps that led to it, and
// what it has to beat: --matmul. They need cuBLAS.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
};

// What --matmul chooses, but for `plain`, which runq_awq.cu has itself.
inline Matmul matmul_option(const Options& o) {
    const std::string& name = o.own.at("--matmul");
    return name == "dequant"      ? Matmul::dequant
           : name == "predequant" ? Matmul::predequant
           : name == "fp16"       ? Matmul::fp16
                                  : Matmul::fused;
}

// Whether all matrices are expanded to fp16 when loading: AwqMatrix::fp16.
inline bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// Tokens from which on expanding a matrix for cuBLAS is faster than awq_gemm: docs/gpu-results.md.
[[maybe_unused]] constexpr int dequantize_from = 256;

enum class AwqKernel {
    own,            // runq_awq.cu's
    expand_cublas,  // awq_dequantize into a buffer, then cuBLAS
    fp16_cublas,    // cuBLAS with the weights that keeps_fp16() says are there
};

// What multiplies n_tokens tokens.
inline AwqKernel choose_kernel([[maybe_unused]] Matmul how, [[maybe_unused]] bool plain,
                               [[maybe_unused]] int n_tokens) {
#ifdef HAVE_CUBLAS
    if (how == Matmul::fp16 || (how == Matmul::predequant && n_tokens > 1)) return AwqKernel::fp16_cublas;
    if ((how == Matmul::dequant && n_tokens > 1) ||
        (how == Matmul::fused && !plain && n_tokens >= dequantize_from))
        return AwqKernel::expand_cublas;
#endif
    return AwqKernel::own;
}

// How products are computed, and the memory that it takes, in chunks of up to max_tokens tokens.
struct FastMatmul {
    Matmul how;
    bool plain;
    DeviceBuffer<half> expanded;  // one matrix at a time, see AwqKernel::expand_cublas

    FastMatmul(const ModelConfig& c, const Options& o, int max_tokens)
        : how(matmul_option(o)),
          plain(o.own.at("--matmul") == "plain"),
          expanded(choose_kernel(how, plain, max_tokens) == AwqKernel::expand_cublas
                       ? size_t(c.dim) * size_t(std::max(c.hidden_dim, c.q_dim()))  // the largest
                       : 0) {}
};

// False, and nothing done, where the program's own kernels are the fastest. See awq_matmul.cuh.
struct AwqProducts;
inline bool fast_matmul(const FastMatmul& fast, const half* x, int n_tokens, const AwqProducts& products);

// A loaded model, and all that a run of it needs. Weights and RunState are the program's own.
template <class Weights, class RunState>
struct DeviceTransformerOf {
    ModelFile file;
    Weights weights;
    RunState state;
    Trace* trace = nullptr;                   // not null: record every step
    DeviceBuffer<std::byte> weight_memory{};  // of all tensors
    DeviceBuffer<half> fp16_memory{};         // all matrices, only with predequant and fp16
    BestToken best{};
    uint64_t memory_bytes = 0;              // of the host that a run takes, with the file's weights
    Graphs<std::pair<int, bool>> graphs{};  // by the arguments of run_step()
};

// Records steps whose values lie on the device into a trace, as Recorder (engine/app/trace.h) does for those
// in the host's memory. fp16 values are recorded as fp16.
class DeviceRecorder {
  public:
    DeviceRecorder(Trace* trace, int layer) : record_(trace, layer), layer_(layer) {}

    template <class T>
    void operator()(std::string_view name, const T* values, int n_tokens,
                    std::initializer_list<int> shape) const {
        if (!record_) return;
        size_t n = size_t(n_tokens);
        for (const int size : shape) n *= size_t(size);
        std::vector<T> host(n);
        download(host.data(), values, n);
        add(name, host, n_tokens, shape);
    }
    template <class T>
    void operator()(std::string_view name, const DeviceRows<T>& x) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols});
    }
    template <class T>
    void operator()(std::string_view name, const DeviceRows<T>& x, int head_dim) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols / head_dim, head_dim});
    }
    // The cache's keys of n_tokens tokens at positions *pos, *pos + 1, ...: (n_tokens, n_kv_heads, head_dim).
    void operator()(std::string_view name, const DeviceKvCache& cache, const int* pos, int n_tokens) const {
        if (!record_) return;
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
    void add(std::string_view name, const std::vector<T>& values, int n_tokens,
             std::initializer_list<int> shape) const {
        if constexpr (std::is_same_v<T, half>) {
            std::vector<uint16_t> bits(values.size());
            std::memcpy(bits.data(), values.data(), values.size() * sizeof(half));
            record_(name, bits.data(), n_tokens, shape);
        } else {
            record_(name, values.data(), n_tokens, shape);
        }
    }

    Recorder record_;
    int layer_;
};
