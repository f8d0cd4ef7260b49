// What runq_awq.cu has before its operations when it is compiled alone, under the same names: a header and
// tensors, options and trace. And the faster forms of its products, attention and classifier, which these try
// first, and the most probable token. Included there after the rows and the KV cache, which it uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/gpu/attention.cuh"
#include "engine/gpu/device.h"
#include "engine/model/config.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "simt/ptx.h"

// HAVE_CUBLAS says whether there is one: it comes with CUDA, -DNO_CUBLAS leaves it out, and the emulator has
// a stand-in for tests alone.
#ifdef SIMT_CUBLAS
#define HAVE_CUBLAS
#include "simt/cublas.h"
#elif defined(__CUDACC__) && __has_include(<cublas_v2.h>) && !defined(NO_CUBLAS)
#define HAVE_CUBLAS
#include <cublas_v2.h>
#endif

template <>
inline constexpr const char* tensor_type<half> = "F16";

// ----------------------------------------------------------------------------
// Products of fp16 matrices by cuBLAS

#ifdef HAVE_CUBLAS
constexpr bool has_cublas = true;

// Opened at first use, on the device's stream. Throws std::runtime_error if that fails.
inline cublasHandle_t cublas() {
    // A workspace of our own: without one, cuBLAS would allocate while a graph is captured. 32 MiB is its own
    // choice on Hopper (cuBLAS manual, cublasSetWorkspace).
    static const DeviceBuffer<std::byte> workspace(size_t(32) << 20);
    static const cublasHandle_t opened = [] {
        cublasHandle_t handle = nullptr;
        if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(handle, device().stream) != CUBLAS_STATUS_SUCCESS ||
            cublasSetWorkspace(handle, workspace.get(), workspace.size()) != CUBLAS_STATUS_SUCCESS)
            fail("cublasCreate failed");
        return handle;
    }();
    return opened;
}

// out (n_tokens, n_out) = x (n_tokens, n_in) * w, or += with `add`; w (n_in, n_out), or (n_out, n_in) if
// transposed. cuBLAS stores matrices by columns: it sees the transpose of each, so the operands change
// places.
inline void run_cublas(const half* x, int n_tokens, const half* w, int n_in, int n_out, float* out, bool add,
                       bool transposed = false) {
    const float one = 1, beta = add ? 1 : 0;
    const cublasStatus_t status =
        cublasGemmEx(cublas(), transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, n_out, n_tokens, n_in,
                     &one, w, CUDA_R_16F, transposed ? n_in : n_out, x, CUDA_R_16F, n_in, &beta, out,
                     CUDA_R_32F, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) fail("cublasGemmEx: status ", status);
}
#else  // then nothing calls these
constexpr bool has_cublas = false;
inline void cublas() {}
inline void run_cublas(const half*, int, const half*, int, int, float*, bool, bool = false) {}
#endif

// ----------------------------------------------------------------------------
// The classifier, and the most probable token

// out (n_tokens, n_out) = x (n_tokens, n_in) times the transpose of an fp16 matrix (n_out, n_in), by cuBLAS.
// False, and nothing done, if there is none, or only one token.
inline bool fast_classifier(DeviceRows<float>& out, const DeviceRows<half>& x, const half* matrix) {
    if (!has_cublas || x.n_rows <= 1) return false;
    run_cublas(x.get(), x.n_rows, matrix, x.n_cols, out.n_cols, out.get(), false, true);
    return true;
}

constexpr int arg_max_threads = 256, arg_max_blocks = 256;  // of a block; of a launch, at most as many

// A logit, and where it stands in its row.
struct alignas(8) Logit {
    float value;
    int index;
};

// The larger; of equals, the first.
__device__ inline Logit larger(Logit a, Logit b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

// The largest of a block's. In thread 0.
__device__ inline Logit block_largest(Logit x) {
    __shared__ Logit of_warps[arg_max_threads / 32];
    const auto over_warp = [&x] {
        for (int distance = 16; distance > 0; distance /= 2)
            x = larger(x, {__shfl_xor_sync(0xffffffff, x.value, distance),
                           __shfl_xor_sync(0xffffffff, x.index, distance)});
    };
    over_warp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) x = of_warps[threadIdx.x % (arg_max_threads / 32)], over_warp();
    return x;
}

// A thread takes 16 bytes of the row at a time, and up to three logits before and behind these. grid: up to
// arg_max_blocks, the last of which takes the largest of all blocks.
static __global__ void __launch_bounds__(arg_max_threads)
    arg_max_kernel(int* best, const float* logits, int n, Logit* partials, unsigned* arrivals) {
    Logit largest{-INFINITY, 0x7fffffff};
    const auto take = [&](float v, int i) {
        largest = larger(largest, isfinite(v) ? Logit{v, i} : Logit{INFINITY, -1});
    };
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
    const int before = min(n, int(-reinterpret_cast<uintptr_t>(logits) % 16 / 4)), n_fours = (n - before) / 4;
    const int behind = before + 4 * n_fours;
    wait_for_previous();
#pragma unroll 1
    for (int i = thread; i < n_fours; i += n_threads) {
        const float4 four = reinterpret_cast<const float4*>(logits + before)[i];
        const int at = before + 4 * i;
        take(four.x, at), take(four.y, at + 1), take(four.z, at + 2), take(four.w, at + 3);
    }
    if (thread < before) take(logits[thread], thread);
    if (thread < n - behind) take(logits[behind + thread], behind + thread);
    largest = block_largest(largest);
    if (threadIdx.x == 0) partials[blockIdx.x] = largest;
    if (!is_last(arrivals, gridDim.x)) return;
    largest = block_largest(partials[min(threadIdx.x, gridDim.x - 1)]);
    if (threadIdx.x == 0) *best = largest.index;
}

// The most probable token, and what the blocks that look for it leave for the last of them.
struct BestToken {
    DeviceBuffer<int> index{1};
    DeviceBuffer<Logit> partials{arg_max_blocks};
    DeviceBuffer<unsigned> arrivals{1};

    BestToken() { arrivals.clear(); }
};

// best.index = that of the largest of a row of logits (n,), the first of equals; -1 if one is not finite.
inline void arg_max(const BestToken& best, const float* logits, int n) {
    const int n_blocks = std::min((n + 4 * arg_max_threads - 1) / (4 * arg_max_threads), arg_max_blocks);
    launch<arg_max_kernel>(
        {.grid = n_blocks, .block = arg_max_threads, .stream = device().stream, .is_early = true},
        best.index.get(), logits, n, best.partials.get(), best.arrivals.get());
}

// ----------------------------------------------------------------------------
// Which products take cuBLAS, and a run's steps

// How products are computed: --matmul. `fused` is what runq_awq is for. The next three are the steps that led
// to it, and what it has to beat. They need cuBLAS.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
    plain,       // runq_awq.cu's plain loop
};

constexpr const char* matmul_names[] = {"fused", "dequant", "predequant", "fp16", "plain"};

inline Matmul matmul_option(const Options& o) {
    const auto* name = std::find(std::begin(matmul_names), std::end(matmul_names), o.own.at("--matmul"));
    return Matmul(name - std::begin(matmul_names));
}

// Whether all matrices are expanded to fp16 when loading: AwqMatrix::fp16.
inline bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// Tokens from which on expanding a matrix for cuBLAS is faster than awq_gemm: docs/gpu-results.md.
constexpr int dequantize_from = 256;

// Whether cuBLAS multiplies n_tokens tokens, and not a kernel of runq_awq.cu.
inline bool takes_cublas(Matmul how, int n_tokens) {
    if (!has_cublas) return false;
    return how == Matmul::fp16 || (n_tokens > 1 && (how == Matmul::dequant || how == Matmul::predequant)) ||
           (n_tokens >= dequantize_from && how == Matmul::fused);
}

// How products are computed, and the memory that it takes, in chunks of up to max_tokens tokens.
struct FastMatmul {
    Matmul how;
    DeviceBuffer<half> expanded;  // where cuBLAS takes one matrix at a time; otherwise empty

    FastMatmul(const ModelConfig& c, const Options& o, int max_tokens)
        : how(matmul_option(o)),
          expanded(takes_cublas(how, max_tokens) && !keeps_fp16(how)
                       ? size_t(c.dim) * size_t(std::max(c.hidden_dim, c.q_dim()))  // the largest
                       : 0) {}
};

// False, and nothing done, where the program's own kernels are the fastest. See command_line.cuh.
struct AwqProducts;
inline bool fast_matmul(const FastMatmul& fast, const half* x, int n_tokens, const AwqProducts& products);

// Runs steps that launch the same kernels with the same arguments each time, apart from what the arguments
// point to. A key tells the steps apart. A token takes some hundred launches, and launching a kernel costs
// the host more time than a short kernel takes on the device: steps are captured as CUDA graphs, each of
// which launches all of its kernels at once. In the emulator a step simply runs.
class Graphs {
  public:
    using Key = std::pair<int, bool>;

#ifdef __CUDACC__
    // Runs step(). The first run of a key launches directly: capturing costs more than one run saves, many
    // keys come only once (prompt lengths), and at first use CUDA and cuBLAS allocate what no graph can hold.
    // The second run captures a graph, from then on that graph is launched.
    template <class Step>
    void run(const Key& key, Step step) {
        const auto [entry, is_first] = graphs_.try_emplace(key, nullptr, cudaGraphExecDestroy);
        Graph& graph = entry->second;
        if (!is_first && !graph && n_graphs_ < max_graphs) graph.reset(capture(step)), n_graphs_++;
        if (!graph) return step();
        check(cudaGraphLaunch(graph.get(), device().stream), "cudaGraphLaunch");
    }

  private:
    using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, cudaError_t (*)(cudaGraphExec_t)>;
    static constexpr int max_graphs = 16;  // each takes some device memory

    template <class Step>
    static cudaGraphExec_t capture(Step step) {
        cudaGraph_t captured = nullptr;
        check(cudaStreamBeginCapture(device().stream, cudaStreamCaptureModeRelaxed), "capture");
        try {
            step();
        } catch (...) {  // end the capture, so that the stream can be used again
            cudaStreamEndCapture(device().stream, &captured);
            cudaGetLastError();
            if (captured != nullptr) cudaGraphDestroy(captured);
            throw;
        }
        check(cudaStreamEndCapture(device().stream, &captured), "capture");
        cudaGraphExec_t graph = nullptr;
        check(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
        check(cudaGraphDestroy(captured), "cudaGraphDestroy");
        return graph;
    }

    std::map<Key, Graph> graphs_;  // of all keys that were run; null: not captured
    int n_graphs_ = 0;             // that are not null
#else
    template <class Step>
    void run(const Key&, Step step) {
        step();
    }
#endif
};

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
    uint64_t memory_bytes = 0;  // of the host that a run takes, with the file's weights
    Graphs graphs{};            // by the arguments of run_step()
};
