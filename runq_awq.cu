// runq_awq: Llama 3 and Qwen3 inference in AWQ int4 on a GPU, in one file: from the bytes of a model file to
// words on the screen.
//
// Weights are int4 with an integer zero point and an fp16 scale per output channel and group of 128 (or 64)
// input channels: w = (q - zero) * scale, rounded to fp16 (AWQ: Lin et al. 2023, arXiv 2306.00978).
// Activations are fp16 where a matrix reads them and in the KV cache, and fp32 elsewhere. Weights stay int4
// in memory: the thread that multiplies by one converts it in its registers. docs/awq.md explains the scheme,
// its bits and the two fast kernels; docs/forward-pass.md walks through the same steps with equations and
// numbers.
//
// The file is complete. The first line compiles it for a GPU. The second one compiles the same text for any
// CPU, through simt/, an emulator that runs every lane of every warp: slow, and it checks everything
// (docs/simt.md). The third tells a story:
//
//     nvcc -std=c++20 -O3 -arch=sm_80 runq_awq.cu -o runq_awq -lpcre2-8 -lutf8proc
//     g++ -std=c++20 -O3 -fopenmp -fno-strict-aliasing -x c++ runq_awq.cu -o runq_awq -lpcre2-8 -lutf8proc
//     ./runq_awq model_awq.bin -i "Once upon a time" -n 32
//
// Without PCRE2 and utf8proc, -DNO_TOKENIZER makes a program that takes and prints token ids. Attention and
// what else is no product with an int4 matrix is plain here. With -DENGINE, which `make` sets, the three
// regions between #ifdef ENGINE and #endif come from engine/ instead, under the same names: attention on
// tensor cores, steps captured as CUDA graphs, cuBLAS for long prompts, memory that is counted before it is
// taken, a chat with a line editor, and much else, such as files that are damaged or cut while being read.

#ifdef ENGINE
#include "engine/gpu/device.h"
#include "engine/model/config.h"
#include "simt/ptx.h"
#else

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef NO_TOKENIZER
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#endif
#if __has_include(<sys/mman.h>)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

// main() turns an error into one line and an exit code: 2 for a wrong command line, else 1.
struct UsageError : std::logic_error {
    using std::logic_error::logic_error;
};

// Throws an error that says its parts, one after another.
template <class Error = std::runtime_error>
[[noreturn]] void fail(const auto&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

inline bool all_finite(const float* x, size_t n) {
    return std::all_of(x, x + n, [](float value) { return std::isfinite(value); });
}

// ---- section config --------------------------------------------------------
// The numbers of a model, as the header of its file has them

enum class Arch : uint32_t { llama = 1, qwen3 = 2, qwen3_moe = 3 };

struct ModelConfig {
    Arch arch = Arch::llama;
    int dim = 0;         // length of a token's vector (hidden_size)
    int hidden_dim = 0;  // length inside the feed-forward block (intermediate_size)
    int n_layers = 0;
    int n_heads = 0, n_kv_heads = 0;  // n_heads / n_kv_heads query heads share a key/value head
    int head_dim = 0;                 // n_heads * head_dim need not be dim
    int vocab_size = 0;               // rows of the embedding and of the classifier
    int max_seq_len = 0;              // positions the model was made for
    bool shared_classifier = false;   // the classifier is the embedding (tied)
    int group_size = 0;               // weights that share one scale; 0: the whole row
    bool static_activations = false;  // activations' scales are in the file, not found at run time
    int rotation_block = 0;           // rows of the embedding are rotated, in such blocks; 0: they are not
    float norm_eps = 1e-5f, rope_theta = 500000;
    int rope_type = 0, original_max_position = 0;  // config.json's rope_scaling: 1 llama3, 2 linear, 3 yarn
    float rope_factor = 1, low_freq_factor = 1, high_freq_factor = 4, attention_factor = 1;
    int bos_id = -1;                      // -1: none
    std::vector<int> eos_ids;             // generation ends at any of these
    float temperature = 1, top_p = 0.9f;  // sampling defaults; temperature 0 is greedy, top_p 1 off
    int top_k = 0;                        // 0: off

    bool has_head_norms() const { return arch != Arch::llama; }
    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
};
// ---- end of config ---------------------------------------------------------

// ---- section fp32 ----------------------------------------------------------
// fp32 arithmetic with one answer: every sum has an order, and a fused multiply-add is written where it is
// meant (docs/numerics.md)

#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ == 2
#error "runq needs fp32 as IEEE 754 has it: compile without -Ofast, -ffast-math and -mfpmath=387"
#endif

// lift fused_multiply_add
// a * b + c, rounded once. Where the processor has no instruction: in fp64 the product is exact, and rounding
// its sum with c, then that to fp32, is rounding once, but where the first result lies halfway between two
// fp32 numbers. There, what the first rounding has lost (Knuth's TwoSum) decides.
inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    const double product = double(a) * b;
    double sum = product + c;
    const double part = sum - product, lost = (product - (sum - part)) + (c - part);
    const double mirrored = sum + (sum - float(sum));  // if halfway, the fp32 number on the other side
    if (lost != 0 && mirrored == float(mirrored)) sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
    return float(sum);
#endif
}

// Whether a product is rounded before something is added to it, as the text says: -ffp-contract=off.
inline bool rounds_products() {
    volatile float a = 1 + 0x1p-12f, c = 1 + 0x1p-11f;
    const float product = a * a;
    return product - c == 0;
}

// lift exp_fp32
// e^x, within 1 unit in the last place; below -87 it is e^-87, above 88 it is e^88, NaN stays NaN. With
// x = n ln 2 + r, n whole and |r| <= ln 2 / 2, it is 2^n e^r, and e^r the first terms of its Taylor series.
// ln 2 is taken off in two parts, the first so short that n times it is exact (Cody and Waite 1980).
inline float exp_fp32(float x) {
    if (std::isnan(x)) return x;
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = fused_multiply_add(x, 1.44269504f, 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds
    const float r = fused_multiply_add(n, 2.12194440e-4f, fused_multiply_add(-n, 0.693359375f, x));
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    float sum = 1.0f / 5040;
    for (const float term : terms) sum = fused_multiply_add(sum, r, term);
    return std::ldexp(sum, int(n));
}
// ---- end of fp32 -----------------------------------------------------------

// ----------------------------------------------------------------------------
// The device. A kernel is launched by launch<kernel>({.grid = 8, .block = 128}, arguments...), as a C++
// compiler cannot read kernel<<<8, 128>>>(arguments...). What follows is for nvcc; the emulator in simt/ has
// the same

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>

struct Launch {
    dim3 grid, block;         // blocks in the grid, threads in a block
    size_t shared_bytes = 0;  // dynamic shared memory of a block
    cudaStream_t stream = nullptr;
    bool is_early = false;  // the engine's, see wait_for_previous()
};

// A block's dynamic shared memory.
template <class T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
    return reinterpret_cast<T*>(dynamic_shared_memory);
}

// Starts a kernel. More than 48 KB of shared memory, with what the kernel declares, has to be requested
// first.
template <auto kernel, class... Args>
void launch(const Launch& how, Args... args) {
    if (how.shared_bytes > 0)
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(how.shared_bytes));
    kernel<<<how.grid, how.block, how.shared_bytes, how.stream>>>(args...);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
        fail("a kernel: ", cudaGetErrorString(error));
}

// Throws if there is no device that can run these kernels. Returns how many streaming multiprocessors it has.
inline int open_device() {
    int n = 0;
    cudaDeviceProp p{};
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess || n == 0 || cudaGetDeviceProperties(&p, 0) != cudaSuccess)
        fail("no CUDA device: ", cudaGetErrorString(error));
    if (p.major < 8) fail(p.name, ": compute capability ", p.major, ", these kernels need 8.0");
    return p.multiProcessorCount;
}
inline size_t shared_memory() {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
    return size_t(bytes);
}

// The instructions that CUDA has no function for (PTX ISA,
// https://docs.nvidia.com/cuda/parallel-thread-execution).

// Bitwise function of three words: bit 4 a + 2 b + c of `lut` is its value for the bits a, b, c.
template <unsigned lut>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(lut));
    return d;
}

// Four of the eight bytes of a (0 to 3) and b (4 to 7): each nibble of the selector chooses one.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8x8 matrices of 16-bit numbers from shared memory. Lane 8 i + j passes the address of row j of
// matrix i, 16 bytes, and gets elements 2 (lane % 4) and the next of row lane / 4 of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c (16 x 8, fp32) += a (16 x 16, fp16) * b (16 x 8, fp16), each spread over the warp. With g = lane / 4 and
// t = lane % 4, a[0] holds row g, columns 2 t and 2 t + 1 of A; a[1] the same of row g + 8; a[2] and a[3]
// columns 2 t + 8 and on of the same rows. b[0] holds rows 2 t and 2 t + 1 of B, column g; b[1] rows 2 t + 8
// and on. c[0] and c[1] hold row g, columns 2 t and 2 t + 1 of C; c[2] and c[3] the same of row g + 8.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Begins to copy 4 or 16 bytes into shared memory; zeros, reading nothing, if not valid.
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                     "l"(global), "r"(valid ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                     "l"(global), "n"(bytes), "r"(valid ? bytes : 0)
                     : "memory");
    }
}
// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the n latest groups of this thread.
template <int n>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}
// Adds 1 to *count and returns what it was. What this thread's block wrote before a barrier is visible to
// whoever sees the new count; what others wrote before they counted is visible to this thread from here on,
// and to its block after a barrier (PTX ISA, Memory Consistency Model: release and acquire).
__device__ __forceinline__ unsigned count_arrival(unsigned* count) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
// Here launches are in order. In the engine a kernel may start while those before it run, and wait here.
__device__ __forceinline__ void wait_for_previous() {}
#else
#include "simt/ptx.h"
inline int open_device() { return 4; }
inline size_t shared_memory() { return 233472; }
#endif

struct Device {
    int n_sms = open_device();  // streaming multiprocessors; launches try to have at least as many blocks
    size_t shared_per_sm = shared_memory();  // bytes
    cudaStream_t stream = nullptr;           // the default stream: everything runs in order
};

// Opened at first use.
inline const Device& device() {
    static const Device opened;
    return opened;
}

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) fail(what, ": ", cudaGetErrorString(error));
}

// An array of n values on the device, not initialized.
template <class T>
struct DeviceBuffer {
    struct Free {
        void operator()(T* p) const { cudaFree(p); }
    };
    std::unique_ptr<T, Free> memory;
    size_t n_values = 0;

    DeviceBuffer() = default;
    explicit DeviceBuffer(size_t n) : n_values(n) {
        if (n == 0) return;
        device();
        void* p = nullptr;
        if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess)
            fail("device memory: ", n * sizeof(T), " bytes are not free");
        memory.reset(static_cast<T*>(p));
    }
    T* get() const { return memory.get(); }
    size_t size() const { return n_values; }
    void upload(const T* from, size_t n, size_t at = 0) {
        check(cudaMemcpy(get() + at, from, n * sizeof(T), cudaMemcpyHostToDevice), "upload");
    }
    void clear() { check(cudaMemset(get(), 0, n_values * sizeof(T)), "cudaMemset"); }
};

// n values from the device, once everything launched before is done.
template <class T>
void download(T* to, const T* from, size_t n) {
    check(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost), "a kernel or its result");
}
#endif  // ENGINE

#ifdef __CUDACC__
constexpr bool is_gpu = true;
#else
constexpr bool is_gpu = false;
#endif

// Two fp16 numbers in a 32-bit register, as the arithmetic sees them and as bits.
__device__ inline half2 as_half2(uint32_t bits) {
    half2 h;
    memcpy(&h, &bits, sizeof h);
    return h;
}
__device__ inline uint32_t as_bits(half2 h) {
    uint32_t bits;
    memcpy(&bits, &h, sizeof bits);
    return bits;
}

// The sum over a warp, in each of its lanes.
__device__ inline float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// The sum over a block of up to 1024 threads, the same in every thread and in every run.
__device__ inline float block_sum(float x) {
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();  // a second call in a kernel would need another, before `sums` is written again
    return warp_sum(lane < n_warps ? sums[lane] : 0.0f);
}

// Called by each of n blocks once it has written its partial result to memory. Returns true, in all threads,
// in the block that arrives last: it may read the partial results of all n blocks. *arrivals counts the
// blocks; it has to be 0 before the launch and is 0 again after it.
__device__ inline bool is_last(unsigned* arrivals, unsigned n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_arrival(arrivals) == n - 1;
        if (last) *arrivals = 0;
    }
    __syncthreads();
    return last;
}

// ----------------------------------------------------------------------------
// What the forward pass hands from one operation to the next, on the device: a row per token

// Some rows of a DeviceRows, to read.
template <class T>
struct RowSlice {
    const T* values;  // (n_rows, n_cols)
    int n_rows, n_cols;
};

// (n_rows, n_cols), with room for max_rows. An operation sets n_rows of what it writes.
template <class T>
struct DeviceRows {
    int n_rows = 0, n_cols = 0;
    DeviceBuffer<T> values;  // (max_rows, n_cols)

    DeviceRows() = default;
    DeviceRows(int max_rows, int columns) : n_cols(columns), values(size_t(max_rows) * size_t(columns)) {}

    T* get() const { return values.get(); }
    size_t size() const { return size_t(n_rows) * size_t(n_cols); }  // of the rows in use
    bool is_allocated() const { return values.size() > 0; }
    // n rows from `first` on.
    RowSlice<T> slice(int first, int n) const { return {get() + size_t(first) * size_t(n_cols), n, n_cols}; }
    operator RowSlice<T>() const { return slice(0, n_rows); }
};

// The keys and values of every position so far, in fp16.
struct DeviceKvCache {
    int n_kv_heads, head_dim, context;
    DeviceBuffer<half> all_keys, all_values;  // each (n_layers, n_kv_heads, context, head_dim)

    DeviceKvCache(const ModelConfig& c, int n_positions)
        : n_kv_heads(c.n_kv_heads),
          head_dim(c.head_dim),
          context(n_positions),
          all_keys(size_t(c.n_layers) * layer_size()),
          all_values(size_t(c.n_layers) * layer_size()) {}

    // A layer's keys and values: (n_kv_heads, context, head_dim).
    size_t layer_size() const { return size_t(n_kv_heads) * size_t(context) * size_t(head_dim); }
    half* keys(int layer) const { return all_keys.get() + size_t(layer) * layer_size(); }
    half* values(int layer) const { return all_values.get() + size_t(layer) * layer_size(); }
};

// lift rescaled_frequency
// What rope_scaling makes of a frequency, in radians per position: it is divided by `factor` for x up to low,
// stays from high on, with a blend between. x grows with the frequency.
inline double rescaled_frequency(double frequency, double factor, double x, double low, double high) {
    const double smooth = std::min(std::max((x - low) / (high - low), 0.0), 1.0);
    return (1 - smooth) * frequency / factor + smooth * frequency;
}

// cos and sin of every position and pair, (context, head_dim / 2), on the device. Pair i turns by
// theta^(-2i / head_dim) radians per position, rounded to fp32; angles are fp64 (Su et al. 2021, arXiv
// 2104.09864). They are computed as a run comes to its positions, some thousand at a time: those of a long
// context would take seconds.
struct RotationTable {
    int context, n_ready = 0;        // positions
    std::vector<float> frequencies;  // (head_dim / 2,)
    double attention_factor;         // YaRN's, of both
    DeviceBuffer<float2> table;

    RotationTable(const ModelConfig& c, int n_positions)
        : context(n_positions),
          attention_factor(c.attention_factor),
          table(size_t(n_positions) * size_t(c.head_dim / 2)) {
        for (int i = 0; i < c.head_dim / 2; i++) {
            double f = std::pow(double(c.rope_theta), -2.0 * i / c.head_dim);
            // llama3 goes by turns within the context that the model was first trained on, YaRN by the pair
            const double turns = c.original_max_position * f / (2 * 3.14159265358979323846);
            const double x = c.rope_type == 1 ? turns : c.head_dim - i;
            if (c.rope_type > 0)
                f = rescaled_frequency(f, c.rope_factor, x, c.low_freq_factor, c.high_freq_factor);
            frequencies.push_back(float(f));
        }
    }
    // Before positions up to end - 1 are used.
    void reach(int end) {
        if (end <= n_ready) return;
        const int first = n_ready, step = 4096;
        n_ready = std::min(context, (end + step - 1) / step * step);
        std::vector<float2> rows;
        for (int pos = first; pos < n_ready; pos++) {
            for (const float frequency : frequencies) {
                const double angle = double(pos) * frequency;
                rows.push_back(make_float2(float(attention_factor * std::cos(angle)),
                                           float(attention_factor * std::sin(angle))));
            }
        }
        table.upload(rows.data(), rows.size(), size_t(first) * frequencies.size());
    }
    operator const DeviceBuffer<float2>&() const { return table; }
};

#ifdef ENGINE
#include "engine/gpu/program.cuh"
#else
// ----------------------------------------------------------------------------
// The file of a model: 256 bytes of header, the weights, the tokenizer section; little-endian

static_assert(std::endian::native == std::endian::little);
constexpr size_t header_size = 256;

// Throws "NAME is VALUE, WHY" unless the value fits.
void check_value(bool fits, const std::string& name, int64_t value, const auto&... why) {
    if (!fits) fail(name, " is ", value, ", ", why...);
}

// What this program says of its files.
template <class Config>
struct FileFormat {
    uint32_t magic;                // a file's first word
    int version;                   // and its second
    void (*check)(const Config&);  // throws if the program cannot run such a model
    // Where two fields are, and what holds in a file of another program, without the header's extension.
    struct {
        size_t group_size, head_dim;
        Arch arch;
        float norm_eps, rope_theta;
    } base;
    int alignment = 1;  // bytes: every tensor begins at a multiple of it
};

// The tensors of a file, one after another from the end of the header on. Each is copied to the device, to
// memory of its own: there it begins where the widest loads may begin.
struct TensorList {
    std::span<const std::byte> weights;
    size_t alignment, end = 0;  // end: of the tensors so far
    std::vector<DeviceBuffer<std::byte>> copies = {};

    template <class T>
    const T* next(const std::string& name, std::vector<int> shape) {
        size_t n_bytes = sizeof(T);
        for (const int n : shape) n_bytes *= size_t(n);
        if (end > weights.size() || n_bytes > weights.size() - end)
            fail("weights are ", weights.size(), " bytes and end before those of ", name);
        copies.emplace_back(n_bytes).upload(weights.data() + end, n_bytes);
        end += n_bytes;
        return reinterpret_cast<const T*>(copies.back().get());
    }
    // What make(name) gives for each layer's tensor: "layers.0.NAME", "layers.1.NAME", ...
    auto layers(const ModelConfig& c, const std::string& name, auto make) {
        std::vector<decltype(make(name))> found;
        for (int l = 0; l < c.n_layers; l++)
            found.push_back(make("layers." + std::to_string(l) + "." + name));
        return found;
    }
    template <class T>
    std::vector<const T*> vectors(const ModelConfig& c, const std::string& name, int n) {
        return layers(c, name, [&](const std::string& full_name) { return next<T>(full_name, {n}); });
    }
};

template <class Config>
struct ModelFileOf {
    Config config;
    std::span<const std::byte> bytes, weights, tokenizer;  // of the whole file, and of its parts
};

// A loaded model, and all that a run of it needs.
template <class Weights, class RunState>
struct DeviceTransformerOf {
    ModelFileOf<ModelConfig> file;
    Weights weights;
    RunState state;
    struct Trace* trace = nullptr;  // not null: record every step
};

// ----------------------------------------------------------------------------
// What the command line asks for, and a record of all that a run computes

// An option of one program alone. Its value is one of `choices`, the first by default.
struct OwnOption {
    const char* name;
    std::vector<const char*> choices;
    const char* help;
};

struct Options {
    std::string model_path;
    std::optional<std::string> prompt, file;  // "-": standard input
    std::vector<int> ids;                     // the prompt as these; {}: not given
    bool chat = false, print_ids = false, digest = false;
    int steps = 256, ctx = 0, threads = 0;  // 0: to the end of the context; at most 4096; OpenMP's default
    std::optional<float> temp, top_p;       // these three: the model's if not given
    std::optional<int> top_k;
    std::optional<uint64_t> seed;            // another in each run if not given
    std::optional<std::string> ppl, trace;   // paths
    std::map<std::string, std::string> own;  // the program's own options
};

// How many tokens' logits a chunk of n tokens needs at most: those of all for perplexity or a trace.
inline int n_logits(const Options& o, bool is_traced, int n) { return o.ppl || is_traced ? n : 1; }

// Every intermediate tensor of a run, by step name; all tokens one after another, however they were fed.
struct Trace {
    struct Tensor {
        const char* type;        // safetensors' name
        std::vector<int> shape;  // of a token; {} is one number
        std::string bytes;       // of all tokens
        int n_tokens = 0;
    };
    std::map<std::string, Tensor> tensors;

    void write(const std::string& path) const;  // a safetensors file
    // Appends a step's values for n_tokens tokens, each of the given shape.
    template <class T>
    void add(const std::string& step, const T* values, size_t n_tokens, std::initializer_list<int> shape) {
        Tensor& t = tensors[step];
        t.type = std::is_same_v<T, float> ? "F32" : std::is_same_v<T, half> ? "F16" : "I32";
        t.shape = shape;
        t.n_tokens += int(n_tokens);
        for (const int n : shape) n_tokens *= size_t(n);
        t.bytes.append(reinterpret_cast<const char*>(values), n_tokens * sizeof(T));
    }
};

inline std::string step_name(int layer, std::string_view name) {  // "layers.3.norm"; of layer -1: "norm"
    return (layer < 0 ? "" : "layers." + std::to_string(layer) + ".").append(name);
}

// What the engine does faster, and is asked first: nothing, in a file that is compiled alone.
struct AwqProducts;
struct FastMatmul {
    FastMatmul(const ModelConfig&, const Options&, int) {}
};
struct FastAttention {
    FastAttention(const ModelConfig&, int) {}
};
inline bool fast_matmul(const FastMatmul&, const half*, int, const AwqProducts&) { return false; }
inline bool fast_attention(DeviceRows<half>&, const FastAttention&, const DeviceRows<half>&,
                           const DeviceKvCache&, int, const int*) {
    return false;
}
inline bool fast_classifier(DeviceRows<float>&, const DeviceRows<half>&, const half*) { return false; }

#endif  // ENGINE

// Appends the steps of one layer, or those outside the layers (layer -1), if there is a trace:
//
//     rmsnorm(s.normed, s.x, ...);  record("attn.norm", s.normed);
struct DeviceRecorder {
    Trace* trace;
    int layer;

    // n_tokens values of the given shape, on the device.
    template <class T>
    void operator()(std::string_view name, const T* values, int n_tokens,
                    std::initializer_list<int> shape) const {
        if (trace == nullptr) return;
        size_t n = size_t(n_tokens);
        for (const int size : shape) n *= size_t(size);
        std::vector<T> host(n);
        download(host.data(), values, n);
        trace->add(step_name(layer, name), host.data(), size_t(n_tokens), shape);
    }
    template <class T>  // (n_tokens, n_cols)
    void operator()(std::string_view name, const DeviceRows<T>& x) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols});
    }
    template <class T>  // (n_tokens, heads, head_dim)
    void operator()(std::string_view name, const DeviceRows<T>& x, int head_dim) const {
        (*this)(name, x.get(), x.n_rows, {x.n_cols / head_dim, head_dim});
    }
    // The cache's keys of n_tokens tokens at positions *pos, *pos + 1, ...: (n_tokens, n_kv_heads, head_dim).
    void operator()(std::string_view name, const DeviceKvCache& cache, const int* pos, int n_tokens) const {
        if (trace == nullptr) return;
        int first = 0;
        download(&first, pos, 1);
        const size_t n = size_t(n_tokens), heads = size_t(cache.n_kv_heads), length = size_t(cache.head_dim);
        std::vector<half> of_head(n * length), keys(n * heads * length);
        for (size_t h = 0; h < heads; h++) {
            const size_t row = h * size_t(cache.context) + size_t(first);
            download(of_head.data(), cache.keys(layer) + row * length, of_head.size());
            for (size_t t = 0; t < n; t++)
                std::copy_n(of_head.data() + t * length, length, keys.data() + (t * heads + h) * length);
        }
        trace->add(step_name(layer, name), keys.data(), n, {cache.n_kv_heads, cache.head_dim});
    }
};

// ----------------------------------------------------------------------------
// Operations between the matrix products: a kernel, and behind it what launches it for the rows of all
// tokens. Weights are fp16, sums fp32. A row has a multiple of 64 values: threads take two or four at a time

// x (n_tokens, dim) = the table's row of each token, (vocab_size, dim). grid: (dim / 2 / blockDim.x,
// n_tokens).
__global__ void embed_kernel(float* x, const half* table, const int* tokens, int dim) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    const half2* row = reinterpret_cast<const half2*>(table + size_t(tokens[token]) * dim);
    wait_for_previous();
    if (i < dim / 2) reinterpret_cast<float2*>(x + size_t(token) * dim)[i] = __half22float2(row[i]);
}

// tokens: on the device.
void embed(DeviceRows<float>& out, const half* table, const int* tokens, int n_tokens) {
    out.n_rows = n_tokens;
    const dim3 grid((out.n_cols / 2 + 255) / 256, n_tokens);
    launch<embed_kernel>({.grid = grid, .block = 256, .stream = device().stream, .is_early = true}, out.get(),
                         table, tokens, out.n_cols);
}

// out = weight * x / sqrt(mean(x^2) + eps) per row (Zhang & Sennrich 2019, arXiv 1910.07467). x: (rows, dim)
// -> out, the same in fp16. grid: rows, as all threads of a block add up the squares of one. A thread keeps
// up to norm_fours times four values with their weights; the rest of a longer row is loaded twice.
constexpr int norm_fours = 4;
__global__ void rmsnorm_kernel(half* out, const float* x, const half* weight, int dim, float eps) {
    const int first = threadIdx.x, step = blockDim.x, n = dim / 4;
    const uint2* weights = reinterpret_cast<const uint2*>(weight);
    const float4* in = reinterpret_cast<const float4*>(x + size_t(blockIdx.x) * dim);
    uint2* to = reinterpret_cast<uint2*>(out + size_t(blockIdx.x) * dim);
    uint2 w[norm_fours];
    float4 v[norm_fours];
    for (int j = 0; j < norm_fours; j++) w[j] = weights[min(first + j * step, n - 1)];
    wait_for_previous();
    for (int j = 0; j < norm_fours; j++) v[j] = in[min(first + j * step, n - 1)];
    float squares = 0;
    const auto add = [&](float4 a) { squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; };
    for (int j = 0; j < norm_fours; j++)
        if (first + j * step < n) add(v[j]);
    for (int i = first + norm_fours * step; i < n; i += step) add(in[i]);
    const float inv = rsqrtf(block_sum(squares) / float(dim) + eps);
    const auto put = [&](int i, float4 a, uint2 scales) {
        const float2 s = __half22float2(as_half2(scales.x)), t = __half22float2(as_half2(scales.y));
        to[i] = make_uint2(as_bits(__floats2half2_rn(s.x * (a.x * inv), s.y * (a.y * inv))),
                           as_bits(__floats2half2_rn(t.x * (a.z * inv), t.y * (a.w * inv))));
    };
    for (int j = 0; j < norm_fours; j++)
        if (first + j * step < n) put(first + j * step, v[j], w[j]);
    for (int i = first + norm_fours * step; i < n; i += step) put(i, in[i], weights[i]);
}

// weight: (n_cols,).
void rmsnorm(DeviceRows<half>& out, RowSlice<float> x, const half* weight, float eps) {
    out.n_rows = x.n_rows;
    const int n_threads = std::min(1024, (x.n_cols / (4 * norm_fours) + 31) / 32 * 32);
    launch<rmsnorm_kernel>(
        {.grid = x.n_rows, .block = n_threads, .stream = device().stream, .is_early = true}, out.get(),
        x.values, weight, x.n_cols, eps);
}

// The arguments of prepare_heads_kernel.
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

// From q, k and v to attention: Qwen3's norm over each head of q and k, RoPE, fp16, and k and v into the
// cache. Pairs to rotate are (i, i + head_dim / 2), as Hugging Face stores them. grid: ((n_heads + 2
// n_kv_heads) / 4, n_tokens); block: (32, 4). A warp has one head and adds up its squares without a barrier.
// Lane i has pairs 2i and 2i + 1; lanes from head_dim / 4 on only read.
__global__ void prepare_heads_kernel(Heads h) {
    const int lane = threadIdx.x, n_lanes = h.head_dim / 4, i = min(lane, n_lanes - 1), token = blockIdx.y;
    const int warp = blockIdx.x * blockDim.y + threadIdx.y, n_qk = h.n_heads + h.n_kv_heads;
    if (warp >= n_qk + h.n_kv_heads) return;
    const bool is_q = warp < h.n_heads, is_v = warp >= n_qk;
    const int head = warp - (is_q ? 0 : is_v ? n_qk : h.n_heads);
    // Offsets count two values as one: a is values 2i and 2i + 1, b those half a head further
    const size_t at = (size_t(token) * (is_q ? h.n_heads : h.n_kv_heads) + head) * 2 * n_lanes + i;
    const half2* norm = reinterpret_cast<const half2*>(is_q ? h.q_norm : is_v ? nullptr : h.k_norm);
    float2 wa{}, wb{};
    if (norm != nullptr) wa = __half22float2(norm[i]), wb = __half22float2(norm[i + n_lanes]);
    const int pos = *h.pos + token;
    float4 turns = make_float4(1, 0, 1, 0);  // of v: none
    if (!is_v) turns = reinterpret_cast<const float4*>(h.rotations)[size_t(pos) * n_lanes + i];
    wait_for_previous();
    const float2* in = reinterpret_cast<const float2*>(is_q ? h.q : is_v ? h.v : h.k) + at;
    float2 a = in[0], b = in[n_lanes];
    if (norm != nullptr) {
        const float squares = a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
        const float inv = rsqrtf(warp_sum(lane == i ? squares : 0) / float(h.head_dim) + h.eps);
        a = make_float2(wa.x * (a.x * inv), wa.y * (a.y * inv));
        b = make_float2(wb.x * (b.x * inv), wb.y * (b.y * inv));
    }
    if (lane != i) return;
    float2* traced = reinterpret_cast<float2*>(is_q ? h.traced_q : h.traced_k);
    if (norm != nullptr && traced != nullptr) traced[at] = a, traced[at + n_lanes] = b;
    half2* out = reinterpret_cast<half2*>(is_q ? h.q_out : is_v ? h.values : h.keys);
    out += is_q ? at : (size_t(head) * h.context + pos) * 2 * n_lanes + i;
    out[0] = __floats2half2_rn(a.x * turns.x - b.x * turns.y, a.y * turns.z - b.y * turns.w);
    out[n_lanes] = __floats2half2_rn(a.x * turns.y + b.x * turns.x, a.y * turns.w + b.y * turns.z);
}

// Qwen3's weights (head_dim,) of the norms over each head of q and k; null: no such norms.
struct QkNorms {
    const half *q = nullptr, *k = nullptr;
    float eps = 0;
};

// Rotates q and k (n_tokens, heads * head_dim), normalized if there are norms, by their positions *pos,
// *pos + 1, ...; writes q_rope, and k and v into the layer's cache. q_norm and k_norm get the normalized
// heads if they have memory, which only traces need.
void prepare_heads(DeviceRows<half>& q_rope, DeviceKvCache& cache, int layer, DeviceRows<float>& q_norm,
                   DeviceRows<float>& k_norm, const DeviceRows<float>& q, const DeviceRows<float>& k,
                   const DeviceRows<float>& v, const QkNorms& norms, const DeviceBuffer<float2>& rotations,
                   const int* pos) {
    q_rope.n_rows = q_norm.n_rows = k_norm.n_rows = q.n_rows;
    Heads h{};
    h.q = q.get(), h.k = k.get(), h.v = v.get(), h.q_out = q_rope.get();
    h.keys = cache.keys(layer), h.values = cache.values(layer);
    h.q_norm = norms.q, h.k_norm = norms.k, h.eps = norms.eps;
    h.rotations = rotations.get(), h.pos = pos;
    h.n_heads = q.n_cols / cache.head_dim, h.n_kv_heads = cache.n_kv_heads;
    h.head_dim = cache.head_dim, h.context = cache.context;
    h.traced_q = q_norm.get(), h.traced_k = k_norm.get();
    const dim3 grid((h.n_heads + 2 * h.n_kv_heads + 3) / 4, q.n_rows);
    launch<prepare_heads_kernel>(
        {.grid = grid, .block = dim3(32, 4), .stream = device().stream, .is_early = true}, h);
}

// The head lengths that the attention kernels are for.
inline bool has_attention(int head_dim) { return head_dim % 32 == 0 && head_dim <= 128; }

// out = softmax(q . keys / sqrt(head_dim)) times the values, of one head of one token. q and out: (n_tokens,
// n_heads, head_dim); keys and values: (n_kv_heads, context, head_dim), of which token t has the first
// *pos + t + 1 positions. grid: (n_heads, n_tokens); block: a warp. It takes 32 keys at a time, a lane's
// score is of one of them; then a lane has every 32nd element of the values. The softmax is online (Milakov &
// Gimelshein 2018, arXiv 1805.02867): when the largest score grows, the sums so far are scaled down to it.
__global__ void plain_attention(half* out, const half* q, const half* keys, const half* values,
                                const int* pos, int heads_per_kv, int head_dim, int context, float scale) {
    __shared__ float weights[32];
    const int lane = threadIdx.x, head = blockIdx.x, token = blockIdx.y, n_keys = *pos + token + 1;
    q += (size_t(token) * gridDim.x + head) * head_dim, out += (size_t(token) * gridDim.x + head) * head_dim;
    keys += size_t(head / heads_per_kv) * context * head_dim;
    values += size_t(head / heads_per_kv) * context * head_dim;
    float largest = -INFINITY, total = 0;
    float mix[4] = {};  // elements lane, lane + 32, lane + 64, lane + 96
    for (int first = 0; first < n_keys; first += 32) {
        float score = -INFINITY;  // beyond the last key
        if (first + lane < n_keys) {
            const half* key = keys + size_t(first + lane) * head_dim;
            float dot = 0;
            for (int i = 0; i < head_dim; i++) dot = fmaf(__half2float(q[i]), __half2float(key[i]), dot);
            score = dot * scale;
        }
        float new_largest = fmaxf(largest, score);
        for (int distance = 16; distance > 0; distance /= 2)
            new_largest = fmaxf(new_largest, __shfl_xor_sync(0xffffffff, new_largest, distance));
        const float shrink = expf(largest - new_largest);  // 0 for the first keys
        weights[lane] = expf(score - new_largest);
        largest = new_largest;
        total = total * shrink + weights[lane];  // of this lane's keys
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (32 * j >= head_dim) break;
            mix[j] *= shrink;
            for (int i = 0; i < min(32, n_keys - first); i++)
                mix[j] = fmaf(weights[i], __half2float(values[size_t(first + i) * head_dim + lane + 32 * j]),
                              mix[j]);
        }
        __syncwarp();  // the next keys' weights overwrite these
    }
    total = warp_sum(total);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (32 * j < head_dim) out[lane + 32 * j] = __float2half(mix[j] / total);
}

// Attention of a chunk: q (n_tokens, n_heads * head_dim), rotated, of tokens at positions *pos, *pos + 1,
// ..., whose keys and values are in the cache -> out, the same shape.
void attention(DeviceRows<half>& out, const FastAttention& fast, const DeviceRows<half>& q,
               const DeviceKvCache& cache, int layer, const int* pos) {
    out.n_rows = q.n_rows;
    if (fast_attention(out, fast, q, cache, layer, pos)) return;
    const int n_heads = q.n_cols / cache.head_dim;
    launch<plain_attention>({.grid = dim3(n_heads, q.n_rows), .block = 32, .stream = device().stream},
                            out.get(), static_cast<const half*>(q.get()),
                            static_cast<const half*>(cache.keys(layer)),
                            static_cast<const half*>(cache.values(layer)), pos, n_heads / cache.n_kv_heads,
                            cache.head_dim, cache.context, float(1 / std::sqrt(double(cache.head_dim))));
}

// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202), in fp16. A
// thread per two values.
__global__ void swiglu_kernel(half* out, const float* gate, const float* up, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n / 2) return;
    wait_for_previous();
    const float2 g = reinterpret_cast<const float2*>(gate)[i], u = reinterpret_cast<const float2*>(up)[i];
    const auto silu = [](float z) { return z / (1.0f + expf(-z)); };
    reinterpret_cast<half2*>(out)[i] = __floats2half2_rn(silu(g.x) * u.x, silu(g.y) * u.y);
}

void swiglu(DeviceRows<half>& out, const DeviceRows<float>& gate, const DeviceRows<float>& up) {
    out.n_rows = gate.n_rows;
    const size_t n = gate.size();
    launch<swiglu_kernel>(
        {.grid = dim3((n / 2 + 255) / 256), .block = 256, .stream = device().stream, .is_early = true},
        out.get(), gate.get(), up.get(), n);
}

// x[i] += y[i]. A thread per value. Only traces need it: otherwise products add to x themselves.
__global__ void add_kernel(float* x, const float* y, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}

void add(DeviceRows<float>& x, const DeviceRows<float>& y) {
    const size_t n = x.size();
    launch<add_kernel>({.grid = dim3((n + 255) / 256), .block = 256, .stream = device().stream}, x.get(),
                       y.get(), n);
}

// out (n_tokens, n_rows) = x (n_tokens, n_in) by each row of an fp16 matrix (n_rows, n_in), n_in a multiple
// of 8. grid: (n_rows / 8, n_tokens); block: 256. A warp computes one output, so that it reads 512
// consecutive bytes of the row at a time, 16 a lane.
__global__ void fp16_gemv(float* out, const half* x, const half* matrix, int n_rows, int n_in) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= n_rows) return;
    const uint4* w = reinterpret_cast<const uint4*>(matrix + size_t(row) * n_in);
    const uint4* v = reinterpret_cast<const uint4*>(x + size_t(blockIdx.y) * n_in);
    wait_for_previous();
    float sum = 0;
    for (int i = lane; i < n_in / 8; i += 32) {
        const uint4 a = __ldg(w + i), b = v[i];
        const uint32_t aw[4] = {a.x, a.y, a.z, a.w}, bw[4] = {b.x, b.y, b.z, b.w};
        for (int j = 0; j < 4; j++) {
            const float2 p = __half22float2(as_half2(aw[j])), q = __half22float2(as_half2(bw[j]));
            sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[size_t(blockIdx.y) * n_rows + row] = sum;
}

// The classifier: out (n_tokens, n_out) = x (n_tokens, n_in) times the transpose of an fp16 matrix (n_out,
// n_in).
void fp16_matmul(DeviceRows<float>& out, const DeviceRows<half>& x, const half* matrix) {
    out.n_rows = x.n_rows;
    if (fast_classifier(out, x, matrix)) return;
    launch<fp16_gemv>({.grid = dim3((out.n_cols + 7) / 8, x.n_rows),
                       .block = 256,
                       .stream = device().stream,
                       .is_early = true},
                      out.get(), static_cast<const half*>(x.get()), matrix, out.n_cols, x.n_cols);
}

// ----------------------------------------------------------------------------
// AWQ: the matrix, and its product as a plain loop

// A matrix of n_in rows, the input channels, and n_out columns, the output channels. A word of a row has
// eight columns' int4 codes. Word c has columns 8c to 8c + 7 in AutoAWQ's order: the even ones in its low
// half, the odd ones in its high half.
//
//     bits    31-28  27-24  23-20  19-16  15-12  11-8   7-4    3-0
//     column  8c+7   8c+5   8c+3   8c+1   8c+6   8c+4   8c+2   8c
//
struct AwqMatrix {
    const uint32_t* qweight = nullptr;  // (n_in, n_out / 8)
    const uint32_t* qzeros = nullptr;   // (n_in / group_size, n_out / 8), the zero points, packed alike
    const half* scales = nullptr;       // (n_in / group_size, n_out)
    const half* fp16 = nullptr;         // (n_in, n_out), expanded: the engine's copy, if it has one
    int n_in = 0, n_out = 0, group_size = 128;

    size_t n_weights() const { return size_t(n_in) * size_t(n_out); }
    size_t n_groups() const { return n_weights() / size_t(group_size); }
    size_t n_bytes() const {  // quantized
        return (n_weights() + n_groups()) / 8 * sizeof(uint32_t) + n_groups() * sizeof(half);
    }
};

// A product, out (n_tokens, n_out) = x * w, or += with `add`.
struct AwqProduct {
    AwqMatrix w;
    float* out = nullptr;
    bool add = false;
};

// The products of one launch. They read the same x (n_tokens, n_in).
struct AwqProducts {
    AwqProduct items[3];
    int n = 0;
};

// lift nibble_shift
// Where a word has the code of a column: the lowest of its four bits.
__device__ inline int nibble_shift(int column) {
    const int pair = column % 8 / 2, is_odd = column % 2;
    return 4 * (pair + 4 * is_odd);
}

// The weight of input channel k for an output channel. q - zero is exact in fp16, only the product rounds.
__device__ inline half awq_weight(const AwqMatrix& w, int k, int column) {
    const int n_words = w.n_out / 8, group = k / w.group_size, shift = nibble_shift(column);
    const int q = w.qweight[size_t(k) * n_words + column / 8] >> shift & 15;
    const int zero = w.qzeros[size_t(group) * n_words + column / 8] >> shift & 15;
    return __hmul(__float2half(float(q - zero)), w.scales[size_t(group) * w.n_out + column]);
}

// The specification: one thread per output, sums in fp32. grid: (n_out / blockDim.x, n_tokens).
__global__ void awq_reference(const half* x, AwqProduct product) {
    const AwqMatrix& w = product.w;
    const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (column >= w.n_out) return;
    float sum = 0;
    for (int k = 0; k < w.n_in; k++)
        sum = fmaf(__half2float(x[size_t(token) * w.n_in + k]), __half2float(awq_weight(w, k, column)), sum);
    float* out = product.out + size_t(token) * w.n_out + column;
    *out = product.add ? *out + sum : sum;
}

void run_reference(const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& product = products.items[i];
        launch<awq_reference>(
            {.grid = dim3((product.w.n_out + 127) / 128, n_tokens), .block = 128, .stream = device().stream},
            x, product);
    }
}

// ----------------------------------------------------------------------------
// Products in the forward pass

// Where there are too few tiles to occupy the device, n_splits blocks compute each tile, from different input
// channels. Each writes its sums to memory; the last to arrive adds them up.
struct SplitScratch {
    float* partials = nullptr;     // (n_splits, n_tiles, values of a tile)
    unsigned* arrivals = nullptr;  // (n_tiles,), 0 between launches; see is_last()
};

constexpr int max_splits = 32;            // blocks that share a tile
constexpr int max_tiles = 4096;           // of one launch that is split
constexpr size_t max_partials = 1 << 23;  // values; launches that would need more are split less

// The memory of splits, that of one launch after the other.
struct SplitMemory {
    DeviceBuffer<float> partials{max_partials};
    DeviceBuffer<unsigned> arrivals{max_tiles};

    SplitMemory() { arrivals.clear(); }
    SplitScratch scratch() const { return {partials.get(), arrivals.get()}; }
};

// By awq_gemv or awq_gemm, the kernels that follow the forward pass.
void run_fused(const SplitScratch& scratch, const half* x, int n_tokens, const AwqProducts& products);

// ----------------------------------------------------------------------------
// The tensors of a file

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into device memory are the same
// lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    using Vectors = std::vector<const half*>;  // one of each layer
    Vectors attn_norm = file.vectors<half>(c, "attn.norm", c.dim);
    Vectors ffn_norm = file.vectors<half>(c, "ffn.norm", c.dim);
    const half* norm = file.next<half>("norm", {c.dim});
    const half* embedding = file.next<half>("embed", {c.vocab_size, c.dim});
    std::vector<AwqMatrix> q_proj = awq_layers("attn.q_proj", c.dim, c.q_dim());
    std::vector<AwqMatrix> k_proj = awq_layers("attn.k_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> v_proj = awq_layers("attn.v_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> o_proj = awq_layers("attn.o_proj", c.q_dim(), c.dim);
    std::vector<AwqMatrix> gate_proj = awq_layers("ffn.gate_proj", c.dim, c.hidden_dim);  // w1 in llama2.c
    std::vector<AwqMatrix> down_proj = awq_layers("ffn.down_proj", c.hidden_dim, c.dim);  // w2
    std::vector<AwqMatrix> up_proj = awq_layers("ffn.up_proj", c.dim, c.hidden_dim);      // w3
    const half* classifier =
        c.shared_classifier ? embedding : file.next<half>("classifier", {c.vocab_size, c.dim});
    Vectors q_norm = c.has_head_norms() ? file.vectors<half>(c, "attn.q_norm", c.head_dim) : Vectors();
    Vectors k_norm = c.has_head_norms() ? file.vectors<half>(c, "attn.k_norm", c.head_dim) : Vectors();

    AwqMatrix awq(const std::string& name, int n_in, int n_out) {
        AwqMatrix m;
        m.n_in = n_in, m.n_out = n_out, m.group_size = c.group_size;
        m.qweight = file.next<uint32_t>(name + ".qweight", {n_in, n_out / 8});
        m.qzeros = file.next<uint32_t>(name + ".qzeros", {n_in / c.group_size, n_out / 8});
        m.scales = file.next<half>(name + ".scales", {n_in / c.group_size, n_out});
        return m;
    }
    std::vector<AwqMatrix> awq_layers(const char* part, int n_in, int n_out) {
        return file.layers(c, part, [&](const std::string& name) { return awq(name, n_in, n_out); });
    }
    // The matrices of all layers.
    std::vector<AwqMatrix*> matrices() {
        std::vector<AwqMatrix*> all;
        for (auto* part : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj})
            for (AwqMatrix& m : *part) all.push_back(&m);
        return all;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights. Members are made where they stand, as those of Weights are

constexpr int max_chunk = is_gpu ? 512 : 64;  // tokens of a prompt that go through together
constexpr int logit_rows = 16;                // tokens whose logits are computed at a time

struct RunState {
    ModelConfig c;
    Options options;
    int context;  // positions whose keys and values are kept
    bool traced;  // every step is recorded

    // A row per token of the chunk.
    int n = std::min(max_chunk, context), n_traced = traced ? n : 0;
    DeviceRows<float> x{n, c.dim};       // the residual stream
    DeviceRows<half> normed{n, c.dim};   // normalized x
    DeviceRows<float> q{n, c.q_dim()};   // n_heads * head_dim
    DeviceRows<float> k{n, c.kv_dim()};  // n_kv_heads * head_dim
    DeviceRows<float> v{n, c.kv_dim()};
    DeviceRows<half> q_rope{n, c.q_dim()};  // rotated
    DeviceRows<half> attn_out{n, c.q_dim()};
    DeviceRows<float> gate{n, c.hidden_dim};
    DeviceRows<float> up{n, c.hidden_dim};
    DeviceRows<half> hidden{n, c.hidden_dim};  // silu(gate) * up
    DeviceRows<float> logits{std::min(logit_rows, n), c.vocab_size};
    DeviceRows<float> proj{n_traced, c.dim};        // the output of o_proj and down_proj
    DeviceRows<float> q_norm{n_traced, c.q_dim()};  // as q and k, normalized heads
    DeviceRows<float> k_norm{n_traced, c.kv_dim()};

    DeviceBuffer<int> inputs{size_t(1 + n)};  // the position of the first token, then the tokens
    DeviceKvCache cache{c, context};
    RotationTable rotations{c, context};
    bool plain = options.own.at("--matmul") == "plain";  // products by awq_reference
    SplitMemory splits{};
    FastMatmul fast_matmul{c, options, n};  // what the engine needs for its forms of these
    FastAttention fast_attention{c, context};
    std::vector<float> host_logits{};  // (1 or n, vocab_size)

    const int* pos() const { return inputs.get(); }
    const int* tokens() const { return inputs.get() + 1; }
};

using Transformer = DeviceTransformerOf<Weights, RunState>;

// Where a product goes: out (n_tokens, n_out) = x * w.
struct Projection {
    DeviceRows<float>& out;
    const AwqMatrix& w;
};

void run_products(const RunState& s, const DeviceRows<half>& x, const AwqProducts& products) {
    if (fast_matmul(s.fast_matmul, x.get(), x.n_rows, products)) return;
    s.plain ? run_reference(x.get(), x.n_rows, products)
            : run_fused(s.splits.scratch(), x.get(), x.n_rows, products);
}

// The products of one input with several matrices, in one launch: q, k and v; gate and up.
void matmul(const RunState& s, const DeviceRows<half>& x, std::initializer_list<Projection> projections) {
    AwqProducts products;
    for (const Projection& p : projections) {
        p.out.n_rows = x.n_rows;
        products.items[products.n++] = {p.w, p.out.get(), false};
    }
    run_products(s, x, products);
}

// x += input * w. The kernel adds to x itself; if s.proj has memory, which only traces need, it gets the
// product.
void matmul_add(RunState& s, DeviceRows<float>& x, const DeviceRows<half>& input, const AwqMatrix& w) {
    if (s.proj.is_allocated()) {
        matmul(s, input, {{s.proj, w}});
        add(x, s.proj);
    } else {
        run_products(s, input, {{{w, x.get(), true}}, 1});
    }
}

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result. Token ids and positions lie on the device (s.tokens(), s.pos()), so that the
// launches of a step do not depend on them: the engine captures them as a graph.
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions *s.pos(), *s.pos() + 1, ...
void attention_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record{m.trace, l};
    QkNorms norms;  // none in a Llama
    if (c.arch == Arch::qwen3) norms = {w.q_norm[l], w.k_norm[l], c.norm_eps};

    rmsnorm(s.normed, s.x, w.attn_norm[l], c.norm_eps);                   record("attn.norm", s.normed);
    matmul(s, s.normed, {{s.q, w.q_proj[l]},                               // q, k and v read the same input
                         {s.k, w.k_proj[l]},
                         {s.v, w.v_proj[l]}});                             record("attn.q_proj", s.q);
                                                                           record("attn.k_proj", s.k);
                                                                           record("attn.v_proj", s.v);
    prepare_heads(s.q_rope, s.cache, l, s.q_norm, s.k_norm,                // q_norm, k_norm, RoPE; k and v into
                  s.q, s.k, s.v, norms, s.rotations, s.pos());             // the cache
    if (c.arch == Arch::qwen3) {                                           record("attn.q_norm", s.q_norm, c.head_dim);
                                                                           record("attn.k_norm", s.k_norm, c.head_dim);
    }
                                                                           record("attn.q_rope", s.q_rope, c.head_dim);
                                                                           record("attn.k_rope", s.cache, s.pos(), s.k.n_rows);
    attention(s.attn_out, s.fast_attention, s.q_rope, s.cache, l, s.pos()); record("attn.mix", s.attn_out);
    matmul_add(s, s.x, s.attn_out, w.o_proj[l]);                           record("attn.o_proj", s.proj);
                                                                           record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record{m.trace, l};

    rmsnorm(s.normed, s.x, w.ffn_norm[l], c.norm_eps);                    record("ffn.norm", s.normed);
    matmul(s, s.normed, {{s.gate, w.gate_proj[l]},
                         {s.up, w.up_proj[l]}});                           record("ffn.gate_proj", s.gate);
                                                                           record("ffn.up_proj", s.up);
    swiglu(s.hidden, s.gate, s.up);                                        record("ffn.swiglu", s.hidden);
    matmul_add(s, s.x, s.hidden, w.down_proj[l]);                          record("ffn.down_proj", s.proj);
                                                                           record("ffn.residual", s.x);
}

// x (n_tokens, dim) of the first n_tokens tokens of s.tokens(): the embedding and all layers.
void run_layers(Transformer& m, int n_tokens) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    const DeviceRecorder record{m.trace, -1};

    embed(s.x, m.weights.embedding, s.tokens(), n_tokens);                 record("tokens", s.tokens(), n_tokens, {});
                                                                           record("embed", s.x);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l);
        feed_forward_block(m, l);
    }
}

// logits (n_tokens, vocab_size) of n_tokens rows of x, from `first` on. At most logit_rows.
void run_classifier(Transformer& m, int first, int n_tokens) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record{m.trace, -1};

    rmsnorm(s.normed, s.x.slice(first, n_tokens), w.norm, c.norm_eps);  record("norm", s.normed);
    fp16_matmul(s.logits, s.normed, w.classifier);                            record("logits", s.logits);
}
// clang-format on

// Puts a chunk's position and ids where a step finds them.
void set_inputs(RunState& s, std::span<const int> tokens, int pos) {
    s.rotations.reach(pos + int(tokens.size()));
    std::vector<int> inputs{pos};
    inputs.insert(inputs.end(), tokens.begin(), tokens.end());
    s.inputs.upload(inputs.data(), inputs.size());
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const size_t vocab_size = size_t(m.file.config.vocab_size), n_values = size_t(n_logits) * vocab_size;
    set_inputs(s, tokens, pos);
    run_layers(m, n_tokens);
    s.host_logits.resize(std::max(s.host_logits.size(), n_values));
    for (int i = 0; i < n_logits; i += logit_rows) {
        const int n = std::min(logit_rows, n_logits - i);
        run_classifier(m, n_tokens - n_logits + i, n);
        download(s.host_logits.data() + size_t(i) * vocab_size, s.logits.get(), size_t(n) * vocab_size);
    }
    return {s.host_logits.data(), n_values};
}

// ----------------------------------------------------------------------------
// The kernels of run_fused, up to its body. First: int4 -> fp16, in registers
//
// 0x6400 is 1024 in fp16, and the lowest of its ten mantissa bits is worth 1. So 0x6400 | q is 1024 + q for a
// nibble q (four bits): setting the bits converts it. One lop3, (word & mask) | 0x64006400, does that for two
// nibbles 16 bits apart; one subtraction removes 1024 and the zero point, exactly. A nibble four bits higher
// gives 1024 + 16 q, and one multiply-add removes the factor, too: (1024 + 16 q) / 16 - (64 + zero) = q -
// zero, also exact. Only the multiplication by the scale rounds.

constexpr unsigned and_or = (0xF0 & 0xCC) | 0xAA;  // lop3's truth table of (a & b) | c: PTX ISA, lop3

// Pair p (0 to 3) of eight nibbles: the one at bit 4p and the one at bit 4p + 16, each + 1024 if p is even,
// * 16 + 1024 if it is odd.
__device__ inline half2 with_magic(uint32_t nibbles, int p) {
    const uint32_t mask = p % 2 == 0 ? 0x000f000f : 0x00f000f0;
    return as_half2(lop3<and_or>(p >= 2 ? nibbles >> 8 : nibbles, mask, 0x64006400));
}

// Zero points and scales of a word's eight columns, where with_magic() has the nibbles: [p] is pair p,
// columns 2p and 2p + 1.
struct PairScales {
    half2 zero[4];  // 1024 + zero point if p is even, -(64 + zero point) if it is odd
    half2 scale[4];
};

__device__ inline PairScales pair_scales(uint32_t zeros, uint4 scales) {
    PairScales s;
    const uint32_t packed[4] = {scales.x, scales.y, scales.z, scales.w};
    for (int p = 0; p < 4; p++) {
        s.zero[p] = with_magic(zeros, p);
        if (p % 2 == 1) s.zero[p] = __hmul2(s.zero[p], __float2half2_rn(-1.0f / 16));
        s.scale[p] = as_half2(packed[p]);
    }
    return s;
}

// The weights of nibbles, those of pair p; zero and scale: theirs.
__device__ inline uint32_t dequantize(uint32_t nibbles, int p, half2 zero, half2 scale) {
    const half2 q = with_magic(nibbles, p);
    const half2 difference = p % 2 == 0 ? __hsub2(q, zero) : __hfma2(q, __float2half2_rn(1.0f / 16), zero);
    return as_bits(__hmul2(difference, scale));
}

// The weights of a word's columns 2p and 2p + 1.
__device__ inline uint32_t weight_pair(uint32_t word, int p, const PairScales& s) {
    return dequantize(word, p, s.zero[p], s.scale[p]);
}

// The same, each in both halves of a register: of columns 0 to 7.
struct Columns {
    half2 zero[8], scale[8];
};

__device__ inline Columns columns_of(uint32_t zeros, uint4 scales) {
    Columns c;
    const PairScales s = pair_scales(zeros, scales);
    for (int p = 0; p < 4; p++) {
        c.zero[2 * p] = __half2half2(__low2half(s.zero[p]));
        c.zero[2 * p + 1] = __half2half2(__high2half(s.zero[p]));
        c.scale[2 * p] = __half2half2(__low2half(s.scale[p]));
        c.scale[2 * p + 1] = __half2half2(__high2half(s.scale[p]));
    }
    return c;
}

// The weights of column 2p (2p + 1 if `odd`) in two rows. nibbles: the even (odd) columns of one row in the
// low half, of the other row in the high half.
__device__ inline uint32_t dequantize(uint32_t nibbles, int p, int odd, const Columns& c) {
    return dequantize(nibbles, p, c.zero[2 * p + odd], c.scale[2 * p + odd]);
}

// The tensor core's operand A has 16 rows by 16 columns of fp16: here 16 output channels by 16 inputs. Lane
// 4g + t holds, of rows g and g + 8, the columns 2t, 2t + 1, 2t + 8, 2t + 9 (PTX ISA, mma.m16n8k16). It makes
// them from four words, one for each of these four inputs: columns 2p and 2p + 1 of a word (pair p) become
// rows g and g + 8. A register of operand A holds two inputs of one output channel, but half a word holds
// channels of one input only. So pair_rows() first exchanges halves between two words: four prmt, then all 32
// weights of the four words are in place.
struct RowPairs {
    uint32_t even[2], odd[2];  // nibbles of the even (odd) columns in inputs 2t, 2t + 1, and 2t + 8, 2t + 9
};

__device__ inline RowPairs pair_rows(uint32_t w0, uint32_t w1, uint32_t w8, uint32_t w9) {
    constexpr uint32_t low_halves = 0x5410, high_halves = 0x7632;
    return {{prmt(w0, w1, low_halves), prmt(w8, w9, low_halves)},
            {prmt(w0, w1, high_halves), prmt(w8, w9, high_halves)}};
}

__device__ inline void dequantize(uint32_t (&a)[4], const RowPairs& w, int p, const Columns& c) {
    a[0] = dequantize(w.even[0], p, 0, c);
    a[1] = dequantize(w.odd[0], p, 1, c);
    a[2] = dequantize(w.even[1], p, 0, c);
    a[3] = dequantize(w.odd[1], p, 1, c);
}

// ----------------------------------------------------------------------------
// How a launch is divided into thread blocks: tiles of output channels, and for each tile one block, or
// several that split its input channels (split-K)

// Which product a block computes, and from which of its columns on.
struct Tile {
    int product = 0, first_column = 0;
};

// Blocks are numbered over all products: each has ceil(n_out / width) tiles of `width` columns.
__device__ inline Tile find_tile(const AwqProducts& products, int block, int width) {
    Tile tile;
    for (; tile.product < products.n - 1; tile.product++) {
        const int n_tiles = (products.items[tile.product].w.n_out + width - 1) / width;
        if (block < n_tiles) break;
        block -= n_tiles;
    }
    tile.first_column = block * width;
    return tile;
}

inline int count_tiles(const AwqProducts& products, int width) {
    int n = 0;
    for (int i = 0; i < products.n; i++) n += (products.items[i].w.n_out + width - 1) / width;
    return n;
}

// For awq_gemv: n values of each thread, which are sums over its block's inputs. Returns whether the block is
// the one to write the result: then the values are the sums over all blocks that share its tile, in their
// order, so that the result does not depend on which is last.
template <int n>
__device__ inline bool add_splits(float* values, const SplitScratch& scratch, unsigned tile, unsigned n_tiles,
                                  unsigned split, unsigned n_splits) {
    if (n_splits == 1) return true;
    const auto partials_of = [&](unsigned from) {
        return scratch.partials + (size_t(from) * n_tiles + tile) * n * blockDim.x + threadIdx.x;
    };
#pragma unroll
    for (int i = 0; i < n; i++) partials_of(split)[i * blockDim.x] = values[i];
    if (!is_last(scratch.arrivals + tile, n_splits)) return false;
#pragma unroll
    for (int i = 0; i < n; i++) values[i] = 0;
    for (unsigned from = 0; from < n_splits; from++) {
#pragma unroll
        for (int i = 0; i < n; i++) values[i] += partials_of(from)[i * blockDim.x];
    }
    return true;
}

__device__ inline float4 operator+(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The compiler keeps this in a register, instead of computing it anew in each stage.
__device__ inline int kept(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// ----------------------------------------------------------------------------
// awq_gemv: one token by int4 matrices
//
// The time goes into reading the weights. So a warp copies 128 consecutive bytes of each row, four steps of
// 16 rows ahead of what it multiplies; its ring of steps is its own, and no barrier is needed. The block's
// warps take consecutive inputs, as do the gridDim.y blocks that share a tile of columns.
//
// Weights are operand A of the tensor core, but not as in awq_gemm: here a register holds a pair as it lies
// in the word, two columns of one input, and the sum runs over both. Operand B has eight columns, and there
// is only one token: its first column has the token's value for even columns of the weights and 0 for odd
// ones, the second the other way round. So the results' columns 0 and 1 are the sums of the even and of the
// odd column, and no bits have to be moved.

constexpr int gemv_warps = 8;    // of a block; or half of that
constexpr int gemv_inputs = 16;  // of a step
constexpr int gemv_steps = 4;    // that a warp has in flight

// n_words consecutive words, which one load fetches.
template <int n_words>
struct alignas(4 * n_words) Words {
    uint32_t word[n_words];
};

// What a warp copies for a step. Piece g of a row is of lanes 4g to 4g + 3, and lane 4g + t reads rows 4t to
// 4t + 3. Behind each four rows are 32 bytes that nothing uses, so that the lanes t read different banks.
template <int n_words>
struct GemvStep {
    Words<n_words> rows[4][4 * 8 + 8 / n_words];
    uint4 scales[8][n_words];  // of eight columns each; with zeros, at the start of a group only
    Words<n_words> zeros[8];
};

// grid: (tiles of 64 * n_words columns of all products, n_splits); block: 32 * n_warps; n_out a multiple of
// 8 * n_words; dynamic shared memory: see run_gemv().
template <int n_words, int n_warps>
__global__ void __launch_bounds__(32 * n_warps, 2 * gemv_warps / n_warps)
    awq_gemv(const half* x, AwqProducts products, SplitScratch scratch) {
    constexpr int width = 64 * n_words;
    const Tile tile = find_tile(products, blockIdx.x, width);
    const AwqProduct& product = products.items[tile.product];
    const AwqMatrix& w = product.w;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the compiler sees that all lanes agree

    // The warp's share of the inputs, in steps.
    const int n_all = w.n_in / gemv_inputs, all_warps = gridDim.y * n_warps;
    const int per_warp = (n_all + all_warps - 1) / all_warps;
    const int first = min(n_all, int(blockIdx.y * n_warps + warp) * per_warp);
    const int n_steps = min(n_all, first + per_warp) - first;
    auto* ring = dynamic_shared<GemvStep<n_words>>() + warp * gemv_steps;
    auto* inputs = reinterpret_cast<half*>(dynamic_shared<GemvStep<n_words>>() + n_warps * gemv_steps) +
                   warp * per_warp * gemv_inputs;

    // Copies go by rows: lane i copies piece i % 8 of every fourth row. Beyond the last column it is word
    // 0's, and nothing uses it.
    const int row_words = w.n_out / 8, group_steps = w.group_size / gemv_inputs;
    const int first_word = tile.first_column / 8, piece = first_word + lane % 8 * n_words,
              word = first_word + lane;
    const uint32_t* next =
        w.qweight + size_t(first * gemv_inputs + lane / 8) * row_words + (piece < row_words ? piece : 0);
    int group = first / group_steps, until = 0;  // the next step that starts a group
    auto copy = [&](int i, GemvStep<n_words>& step) {
        if (i < n_steps) {
#pragma unroll
            for (int j = 0; j < 4; j++, next += 4 * row_words)
                cp_async<4 * n_words>(&step.rows[j][lane], next, true);
            if (i == until) {
                const uint32_t* zeros =
                    w.qzeros + size_t(group) * row_words + (piece < row_words ? piece : 0);
                const half* scales = w.scales + size_t(group) * w.n_out + (word < row_words ? 8 * word : 0);
                if (lane < 8) cp_async<4 * n_words>(&step.zeros[lane], zeros, true);
                if (lane < 8 * n_words)
                    cp_async<16>(&step.scales[lane / n_words][lane % n_words], scales, true);
                group++, until = group * group_steps - first;
            }
        }
        cp_async_commit();  // past the last step, too: cp_async_wait counts groups
    };

    // Weights do not depend on the kernels before, x does.
#pragma unroll 1
    for (int i = 0; i < gemv_steps; i++) copy(i, ring[i]);
    wait_for_previous();
#pragma unroll 1
    for (int i = lane; i < n_steps * gemv_inputs / 8; i += 32)
        reinterpret_cast<uint4*>(inputs)[i] = reinterpret_cast<const uint4*>(x + first * gemv_inputs)[i];

    // prmt's selectors that put the lower (upper) half of a register where column g of operand B wants it.
    const uint32_t lower = kept(g == 0 ? 0x4410 : g == 1 ? 0x1044 : 0x4444);
    const uint32_t upper = kept(g == 0 ? 0x4432 : g == 1 ? 0x3244 : 0x4444);
    float sums[n_words][2][4] = {};
    PairScales scales[n_words];
    int next_scales = 0;
    const uint2* x_at = reinterpret_cast<const uint2*>(inputs) + t;
    auto multiply = [&](int i, int slot) {
        cp_async_wait<gemv_steps - 1>();  // this lane's copies of the step have landed,
        __syncwarp();                     // and so have the other lanes'
        GemvStep<n_words>& step = ring[slot];
        if (i == next_scales) {
            next_scales = i == 0 ? group_steps - first % group_steps : i + group_steps;
            for (int j = 0; j < n_words; j++)
                scales[j] = pair_scales(step.zeros[g].word[j], step.scales[g][j]);
        }
        Words<n_words> rows[4];
        for (int j = 0; j < 4; j++) rows[j] = step.rows[t][8 * j + g];
        const uint2 x_pairs = x_at[slot * gemv_inputs / 4];
        __syncwarp();  // all lanes have read the step that is overwritten here
        copy(i + gemv_steps, step);
        const uint32_t b[4] = {prmt(x_pairs.x, 0, lower), prmt(x_pairs.x, 0, upper),
                               prmt(x_pairs.y, 0, lower), prmt(x_pairs.y, 0, upper)};
        for (int j = 0; j < n_words; j++) {
            for (int r = 0; r < 4; r += 2) {
                const uint32_t w0 = rows[r].word[j], w1 = rows[r + 1].word[j];
                for (int p = 0; p < 4; p += 2) {
                    const uint32_t a[4] = {weight_pair(w0, p, scales[j]), weight_pair(w0, p + 1, scales[j]),
                                           weight_pair(w1, p, scales[j]), weight_pair(w1, p + 1, scales[j])};
                    mma_m16n8k16(sums[j][p / 2], a, {b[r], b[r + 1]});
                }
            }
        }
    };
#pragma unroll 1
    for (int i = 0; i < n_steps; i += gemv_steps, x_at += gemv_steps * gemv_inputs / 4) {
#pragma unroll  // so that the places in the ring are constants
        for (int slot = 0; slot < gemv_steps; slot++)
            if (i + slot < n_steps) multiply(i + slot, slot);
    }

    // Lane 4g has columns 0 and 1 of the results' rows g and g + 8: four consecutive columns of its words.
    // After each lane's columns are four floats that nothing uses, so that all lanes write to other banks.
    constexpr int lane_columns = 8 * n_words + 4;
    auto* parts = reinterpret_cast<float(*)[sizeof(*ring) / 4 * gemv_steps]>(dynamic_shared<float>());
    __syncwarp();  // the warp's ring has been read: now it has the sums
    if (t == 0) {
        for (int j = 0; j < n_words; j++) {
            for (int i = 0; i < 2; i++) {
                *reinterpret_cast<float4*>(&parts[warp][lane_columns * g + 8 * j + 4 * i]) =
                    make_float4(sums[j][i][0], sums[j][i][1], sums[j][i][2], sums[j][i][3]);
            }
        }
    }
    __syncthreads();
    constexpr int n_threads = 32 * n_warps, n_values = (width + n_threads - 1) / n_threads;
    float values[n_values] = {};  // of columns threadIdx.x, threadIdx.x + n_threads, ... of the tile
    for (int j = 0; j < n_values; j++) {
        const int i = threadIdx.x + j * n_threads, at = i / (8 * n_words) * lane_columns + i % (8 * n_words);
        for (int from = 0; from < n_warps && i < width; from++) values[j] += parts[from][at];
    }
    if (!add_splits<n_values>(values, scratch, blockIdx.x, gridDim.x, blockIdx.y, gridDim.y)) return;
    for (int j = 0; j < n_values; j++) {
        const int i = threadIdx.x + j * n_threads;
        if (i >= width || tile.first_column + i >= w.n_out) continue;
        float* out = product.out + tile.first_column + i;
        *out = product.add ? *out + values[j] : values[j];
    }
}

// How awq_gemv is launched: warps of a block, and blocks that share a tile.
struct GemvShape {
    int n_warps, n_splits;
    int steps(int n_in) const {  // of the warp that has most
        return (n_in / gemv_inputs + n_warps * n_splits - 1) / (n_warps * n_splits);
    }
};

// As many blocks as a device holds at once: two of eight warps or four of four on a multiprocessor; and of
// those numbers one that gives each warp either many steps or as many as the others. Blocks of eight warps
// leave fewer sums to add up; those of four may divide the work more evenly, and fit where shared memory is
// short (before sm_90).
inline GemvShape gemv_shape(int n_in, int n_tiles, size_t tile_values, size_t ring_bytes) {
    const auto shape_of = [&](int n_warps) {
        const int n_steps = std::max(1, n_in / gemv_inputs / n_warps);  // of a block that does not share
        const int room = 2 * gemv_warps / n_warps * device().n_sms / n_tiles;
        const int most = n_tiles <= max_tiles ? int(max_partials / (n_tiles * tile_values)) : 1;
        int n = std::max(1, std::min({room, n_steps, max_splits, most}));
        while (n_steps < 8 * n && n_steps % n != 0) n--;
        return GemvShape{n_warps, n};
    };
    const GemvShape wide = shape_of(gemv_warps), narrow = shape_of(gemv_warps / 2);
    const bool fits = 2 * gemv_warps * ring_bytes + 8192 <= device().shared_per_sm;
    return fits && wide.steps(n_in) <= narrow.steps(n_in) ? wide : narrow;
}

template <int n_words, int n_warps>
void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products, int n_splits) {
    // A ring of steps for each warp, and the block's inputs.
    const size_t inputs = GemvShape{n_warps, n_splits}.steps(products.items[0].w.n_in) * gemv_inputs;
    launch<awq_gemv<n_words, n_warps>>(
        {.grid = dim3(count_tiles(products, 64 * n_words), n_splits),
         .block = 32 * n_warps,
         .shared_bytes = n_warps * (gemv_steps * sizeof(GemvStep<n_words>) + inputs * sizeof(half)),
         .stream = device().stream,
         .is_early = true},
        x, products, scratch);
}

template <int n_words>
void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products) {
    constexpr int width = 64 * n_words;
    const size_t tile_values = std::max(width, 32 * gemv_warps);  // each thread of a block has at least one
    const GemvShape shape = gemv_shape(products.items[0].w.n_in, count_tiles(products, width), tile_values,
                                       gemv_steps * sizeof(GemvStep<n_words>));
    shape.n_warps == gemv_warps ? run_gemv<n_words, gemv_warps>(scratch, x, products, shape.n_splits)
                                : run_gemv<n_words, gemv_warps / 2>(scratch, x, products, shape.n_splits);
}

// A lane has four words of a row at once, 16 bytes, where rows begin at a multiple of that.
inline void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products) {
    bool wide = true;
    for (int i = 0; i < products.n; i++) wide = wide && products.items[i].w.n_out % 32 == 0;
    wide ? run_gemv<4>(scratch, x, products) : run_gemv<1>(scratch, x, products);
}

// ----------------------------------------------------------------------------
// awq_gemm: several tokens by int4 matrices
//
// A tile of the result is 128 output channels by 16, 32 or 64 tokens. It takes a number of stages: in each, a
// warp multiplies 64 inputs of 64 channels by all tokens, and k_groups sets of two warps take different
// inputs, whose sums they add up at the tile's end. The stages of all tiles, one tile after the other, are
// shared out equally to as many blocks as run at once (stream-K: Osama et al. 2023, arXiv 2301.03598), so a
// tile may be cut where one block ends and the next begins.
//
// Activations and packed weights go through shared memory, in a ring of stages that cp.async fills ahead.
// Weights are operand A, as in awq_gemv; tokens are operand B, which ldmatrix loads. Each weight is
// dequantized once for all tokens of the tile, into the registers that mma reads.

constexpr int gemm_inputs = 64;  // of a warp in a stage; a group of weights is a multiple of it
constexpr int gemm_stages = 3;   // of the ring

// How a block computes tiles of tile_tokens tokens.
template <int tile_tokens>
struct GemmShape {
    static constexpr int columns = 128, k_groups = tile_tokens > 32 ? 2 : 4;
    static constexpr int group_threads = columns / 64 * 32, threads = k_groups * group_threads;
    static constexpr int inputs = k_groups * gemm_inputs;  // of a stage
    static constexpr int blocks_per_sm = 2;                // registers and shared memory suffice for
    static constexpr int values = tile_tokens * columns;
    // Microseconds of an H200: a stage, and a part of a tile that several blocks add up.
    static constexpr float stage_us = tile_tokens == 16 ? 2.0f : tile_tokens == 32 ? 2.5f : 1.8f;
    static constexpr float part_us = tile_tokens > 32 ? 0.9f : 0.4f;
};

// What a k group multiplies in a stage, in pieces of 16 bytes. Pieces that a warp reads at once have to lie
// in different banks of shared memory, eight of them in all 32: ldmatrix reads the same piece of eight rows
// of x, and the lanes t read two pieces of every second row of words. So pieces of a row change places.
template <int tile_tokens>
struct __align__(128) GemmPart {
    static constexpr int row_pieces = GemmShape<tile_tokens>::columns / 32;
    uint4 x[tile_tokens * 8];               // (token, piece of 8 inputs)
    uint4 words[gemm_inputs * row_pieces];  // (input, piece of 32 columns)

    static __device__ int x_place(int token, int piece) { return token * 8 + (piece ^ token % 8); }
    static __device__ int words_place(int row, int piece) {
        return (row * row_pieces + piece) ^ (row / 2 % 4 * 2);
    }
};

// How stages are shared out: block b has stages first(b) to first(b + 1), `extra` of the blocks one more.
struct GemmShares {
    int token_tiles, tile_stages, each, extra;  // tiles are numbered (tile of columns, tile of tokens)
    uint32_t per_group;                         // 2^32 / group_size, rounded up

    __device__ int first(int block) const { return block * each + min(block, extra); }
    __device__ int block_of(int stage) const {
        const int of_extra = extra * (each + 1);
        return stage < of_extra ? stage / (each + 1) : extra + (stage - of_extra) / each;
    }
};

// sums[p][j]: pair p's columns by tokens 8j to 8j + 7, of the warp's columns and tokens. x_place: of the
// piece that the lane passes to ldmatrix; word_place: of its word of input 2t.
template <int tile_tokens, int n>
__device__ inline void multiply_part(float (&sums)[4][n][4], const GemmPart<tile_tokens>& part,
                                     const Columns& columns, int x_place, int word_place) {
    constexpr int row = 4 * GemmPart<tile_tokens>::row_pieces;  // words; places of eight rows repeat
    const auto* words = reinterpret_cast<const uint32_t*>(part.words);
    const uint32_t *word0 = words + word_place, *word1 = words + (word_place ^ row);  // inputs 2t, 2t + 1
#pragma unroll
    for (int k = 0; k < gemm_inputs; k += 16) {
        uint32_t b[n][2];
#pragma unroll
        for (int j = 0; j < n; j += 2) {
            uint32_t r[4];
            ldmatrix_x4(r, &part.x[(x_place ^ k / 8) + 64 * j]);  // 64 pieces are eight tokens
            b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
        }
        const RowPairs pairs =
            pair_rows(word0[k * row], word1[k * row], word0[(k + 8) * row], word1[(k + 8) * row]);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint32_t a[4];
            dequantize(a, pairs, p, columns);
#pragma unroll
            for (int j = 0; j < n; j++) mma_m16n8k16(sums[p][j], a, b[j]);
        }
    }
}

// grid: the blocks that `shares` is for; block: GemmShape::threads; dynamic shared memory: gemm_stages
// stages. The partial sums have room for two tiles per block.
template <int tile_tokens>
__global__ void __launch_bounds__(GemmShape<tile_tokens>::threads, GemmShape<tile_tokens>::blocks_per_sm)
    awq_gemm(const half* x, int n_tokens, GemmShares shares, AwqProducts products, SplitScratch scratch) {
    using Shape = GemmShape<tile_tokens>;
    using Part = GemmPart<tile_tokens>;
    auto* ring = dynamic_shared<Part>();  // (gemm_stages, k_groups)
    const int group = threadIdx.x / Shape::group_threads, thread = threadIdx.x % Shape::group_threads;
    const int lane = thread % 32, warp = thread / 32, t = lane % 4;
    const int warp_column = warp * 64;
    const unsigned n_in = products.items[0].w.n_in;
    const int tile_stages = shares.tile_stages;
    const int first = shares.first(blockIdx.x), end = shares.first(blockIdx.x + 1);

    // What this thread copies next: in each stage the same pieces of its group's part, each a few rows from
    // the one before.
    constexpr int x_rows = Shape::group_threads / 8, words_rows = Shape::group_threads / Part::row_pieces;
    const int x_row = thread / 8, words_row = thread / Part::row_pieces,
              first_word = thread % Part::row_pieces * 4, x_place = Part::x_place(x_row, thread % 8),
              words_place = Part::words_place(words_row, first_word / 4);
    unsigned from_x = 0;
    const uint32_t* from_words = nullptr;
    int to_load = end - first, tile_to_load = 0;  // stages
    int row_words = 0, words_left = 0, tokens_left = 0;
    auto load = [&](int slot) {
        Part& part = ring[slot * Shape::k_groups + group];
        if (tile_to_load == 0) {  // the first stage, or a tile's
            const unsigned stage = end - to_load, tile = stage / tile_stages, done = stage % tile_stages;
            const Tile at = find_tile(products, tile / shares.token_tiles, Shape::columns);
            const int token = tile % shares.token_tiles * tile_tokens, word = at.first_column / 8;
            const AwqMatrix& w = products.items[at.product].w;
            const int k = done * Shape::inputs + group * gemm_inputs;
            tile_to_load = tile_stages - done;
            row_words = w.n_out / 8, words_left = row_words - word, tokens_left = n_tokens - token;
            from_words = w.qweight + size_t(k + words_row) * row_words + word + first_word;
            from_x = (token + x_row) * n_in + k + thread % 8 * 8;
        }
        // The last stage of a tile may have fewer inputs.
        if (unsigned((tile_stages - tile_to_load) * Shape::inputs + group * gemm_inputs) < n_in) {
            uint4* to = part.words + words_place;
            if (row_words % 4 == 0) {
#pragma unroll
                for (int i = 0; i < gemm_inputs; i += words_rows)
                    cp_async<16>(to + i * Part::row_pieces, from_words + i * row_words,
                                 first_word < words_left);
            } else {  // rows begin at any multiple of 4 bytes
#pragma unroll 1
                for (int i = 0; i < 4 * gemm_inputs; i += words_rows) {
                    const int row = i / 4 / words_rows * words_rows, j = i / words_rows % 4;
                    cp_async<4>(reinterpret_cast<uint32_t*>(to + row * Part::row_pieces) + j,
                                from_words + row * row_words + j, first_word + j < words_left);
                }
            }
#pragma unroll
            for (int i = 0; i < tile_tokens; i += x_rows)
                cp_async<16>(part.x + x_place + i * 8, x + (from_x + i * n_in), x_row + i < tokens_left);
        }
        to_load--, tile_to_load--, from_x += Shape::inputs;
        from_words += Shape::inputs * row_words;
    };
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < gemm_stages - 1; i++) {
        if (to_load > 0) load(i);
        cp_async_commit();
    }

    // Lane i passes ldmatrix the address of row i % 8 of matrix i / 8. Matrices 0 and 1 are eight tokens by
    // inputs from k and from k + 8 on; matrices 2 and 3 are the next eight tokens by the same inputs.
    const int lane_x = kept(Part::x_place(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    const int word = warp_column / 8 + lane / 4,
              lane_word = kept(4 * Part::words_place(2 * t, word / 4) + word % 4);
    int slot = 0;  // of the ring
    auto slot_before = [&] { return slot > 0 ? slot - 1 : gemm_stages - 1; };
    for (int tile = first / tile_stages; tile * tile_stages < end; tile++) {
        const Tile at = find_tile(products, unsigned(tile) / shares.token_tiles, Shape::columns);
        const AwqProduct& product = products.items[at.product];
        const int n_out = product.w.n_out, column = at.first_column + warp_column + lane / 4 * 8;
        const int tile_first = tile * tile_stages;  // of the stages; the block has those of inputs k to k_end
        unsigned k = max(first - tile_first, 0) * Shape::inputs + group * gemm_inputs;
        const unsigned k_end = min(end - tile_first, tile_stages) * Shape::inputs;
        uint32_t zeros = 0;
        uint4 scales{};
        auto load_group = [&] {  // of the lane's word, for input k
            if (k >= n_in) return;
            const uint64_t products_of = uint64_t(k) * shares.per_group;
            // A lane without columns takes the last ones' scales for its words, which are 0.
            const unsigned i =
                unsigned(products_of >> 32) * product.w.n_out + min(column, product.w.n_out - 8);
            zeros = __ldg(product.w.qzeros + i / 8);
            scales = __ldg(reinterpret_cast<const uint4*>(product.w.scales + i));
        };
        load_group();
        float sums[4][tile_tokens / 8][4] = {};
        while (k < k_end) {
            cp_async_wait<gemm_stages - 2>();      // this thread's copies of the stage have landed;
            __syncthreads();                       // so have all threads', and all have used the one before,
            if (to_load > 0) load(slot_before());  // which is overwritten here
            cp_async_commit();                     // past the last stage, too: cp_async_wait counts groups
            const bool is_busy = k < n_in;
            const Columns columns = columns_of(zeros, scales);
            k += Shape::inputs;
            load_group();  // of the next stage
            if (is_busy)
                multiply_part(sums, ring[slot * Shape::k_groups + group], columns, lane_x, lane_word);
            slot = slot + 1 < gemm_stages ? slot + 1 : 0;
        }
        const int first_token = unsigned(tile) % shares.token_tiles * tile_tokens,
                  first_block = shares.block_of(tile_first),
                  last_block = shares.block_of(tile_first + tile_stages - 1);
        constexpr int pieces = Shape::columns / 4;  // of four columns, in a row
        auto partial = [&](int block) {  // a block has parts of two tiles at most, of one from its beginning
            return reinterpret_cast<float4*>(scratch.partials) +
                   size_t(2 * block + (block == first_block)) * tile_tokens * pieces;
        };
        float4* out = partial(blockIdx.x);  // (out_tokens, out_pieces) in rows of out_row
        int out_row = pieces, out_tokens = tile_tokens, out_pieces = pieces;
        bool adds = false;
        auto set_result = [&] {
            out = reinterpret_cast<float4*>(product.out + size_t(first_token) * n_out + at.first_column);
            out_row = n_out / 4, out_tokens = n_tokens - first_token;
            out_pieces = out_row - at.first_column / 4, adds = product.add;
        };
        auto store = [&](int token, int piece, float4 values) {
            float4* to = out + token * out_row + piece;
            if (token < out_tokens && piece < out_pieces) *to = adds ? *to + values : values;
        };
        const bool is_whole = first_block == last_block;
        if (is_whole) set_result();

        // A lane has rows g and g + 8 of each 16 by 8 result, which are columns 2p and 2p + 1 of its word,
        // for tokens 2t and 2t + 1. With p from 0 to 3 these are eight consecutive columns. They go through
        // memory of the ring, eight tokens at a time, where all threads add up the k groups.
        constexpr int pitch = pieces + 2;
        const int piece = threadIdx.x % pieces;
        auto* memory = reinterpret_cast<float4*>(&ring[slot_before() * Shape::k_groups]);
#pragma unroll
        for (int j = 0; j < tile_tokens / 8; j++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int odd = i / 2, p = i % 2 * 2, r = 2 * t + odd;
                memory[(group * 8 + r) * pitch + warp_column / 4 + lane / 4 * 2 + i % 2] = make_float4(
                    sums[p][j][odd], sums[p][j][2 + odd], sums[p + 1][j][odd], sums[p + 1][j][2 + odd]);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 8; i += Shape::threads / pieces) {
                const int r = i + threadIdx.x / pieces;
                float4 values = memory[r * pitch + piece];
                for (int from = 1; from < Shape::k_groups; from++)
                    values = values + memory[(from * 8 + r) * pitch + piece];
                store(8 * j + r, piece, values);
            }
        }
        if (is_whole || !is_last(scratch.arrivals + tile, last_block - first_block + 1)) continue;
        set_result();
        constexpr int at_once = 2, step = Shape::threads / pieces;  // tokens
        for (int token = threadIdx.x / pieces; token < tile_tokens; token += at_once * step) {
            float4 values[at_once] = {};
            for (int from = first_block; from <= last_block; from += 8) {
#pragma unroll
                for (int block = from; block < from + 8; block++) {
                    for (int j = 0; j < at_once; j++)
                        if (block <= last_block)
                            values[j] = values[j] + partial(block)[(token + j * step) * pieces + piece];
                }
            }
            for (int j = 0; j < at_once; j++) store(token + j * step, piece, values[j]);
        }
    }
}

// How a product is divided: among most_blocks blocks, or fewer if there is no work or no memory for so many.
template <int tile_tokens>
struct GemmPlan {
    using Shape = GemmShape<tile_tokens>;
    int token_tiles, tile_stages, n_tiles, n_stages, n_blocks;

    GemmPlan(const AwqProducts& products, int n_tokens, int most_blocks)
        : token_tiles((n_tokens + tile_tokens - 1) / tile_tokens),
          tile_stages((products.items[0].w.n_in + Shape::inputs - 1) / Shape::inputs),
          n_tiles(count_tiles(products, Shape::columns) * token_tiles),
          n_stages(n_tiles * tile_stages),
          n_blocks(std::min({most_blocks, n_stages, int(max_partials / (2 * Shape::values))})) {
        n_blocks = (n_stages + share() - 1) / share();  // more would not make the longest share shorter
        if (n_tiles > max_tiles) n_blocks = n_tiles;    // none is cut
    }
    int share() const { return (n_stages + n_blocks - 1) / n_blocks; }
    float us() const {
        const int parts = share() % tile_stages == 0 ? 0 : tile_stages / share() + 1;
        return float(share()) * Shape::stage_us + float(parts) * Shape::part_us;
    }
};

// By most_blocks blocks; the default is as many as run at once.
template <int tile_tokens>
void run_gemm(const SplitScratch& scratch, const half* x, int n_tokens, const AwqProducts& products,
              int most_blocks = GemmShape<tile_tokens>::blocks_per_sm * device().n_sms) {
    const GemmPlan<tile_tokens> plan(products, n_tokens, most_blocks);
    const GemmShares shares{plan.token_tiles, plan.tile_stages, plan.n_stages / plan.n_blocks,
                            plan.n_stages % plan.n_blocks, UINT32_MAX / products.items[0].w.group_size + 1};
    launch<awq_gemm<tile_tokens>>(
        {.grid = plan.n_blocks,
         .block = GemmShape<tile_tokens>::threads,
         .shared_bytes = gemm_stages * GemmShape<tile_tokens>::k_groups * sizeof(GemmPart<tile_tokens>),
         .stream = device().stream,
         .is_early = true},
        x, n_tokens, shares, products, scratch);
}

// By the kernel that suits the product. Tokens of a tile share a weight that is read, but a tile that is not
// full multiplies by zeros, and if tiles are few and large, adding up their parts takes long.
void run_fused(const SplitScratch& scratch, const half* x, int n_tokens, const AwqProducts& products) {
    if (n_tokens == 1) return run_gemv(scratch, x, products);
    const int n_blocks = 2 * device().n_sms;
    const float us[] = {GemmPlan<16>(products, n_tokens, n_blocks).us(),
                        GemmPlan<32>(products, n_tokens, n_blocks).us(),
                        GemmPlan<64>(products, n_tokens, n_blocks).us()};
    const float best = *std::min_element(us, us + 3);
    us[0] == best   ? run_gemm<16>(scratch, x, n_tokens, products)
    : us[1] == best ? run_gemm<32>(scratch, x, n_tokens, products)
                    : run_gemm<64>(scratch, x, n_tokens, products);
}

// ----------------------------------------------------------------------------
// What files and the command line have of this program

// Throws if the kernels cannot run such a model.
void check_config(const ModelConfig& c) {
    const int size = c.group_size;
    check_value(size > 0 && size % gemm_inputs == 0, "group_size", size,
                "expected a multiple of " + std::to_string(gemm_inputs));
    for (const auto& [name, n] :
         {std::pair{"dim", c.dim}, {"hidden_dim", c.hidden_dim}, {"n_heads * head_dim", c.q_dim()}})
        check_value(n % size == 0, name, n, "not a multiple of group_size " + std::to_string(size));
    check_value(c.rotation_block == 0, "rotation_block", c.rotation_block, "expected 0 in AWQ");
    check_value(has_attention(c.head_dim), "head_dim", c.head_dim, "expected 32, 64, 96 or 128");
}

// KuiperLLama's header has head_dim where llama2.c's has group_size, and group_size behind it. Its files have
// no extension block, and are Qwen3.
const FileFormat<ModelConfig> file_format{
    .magic = 0x616b3438,
    .version = 5,
    .check = check_config,
    .base = {
        .group_size = 0x29, .head_dim = 0x25, .arch = Arch::qwen3, .norm_eps = 1e-6f, .rope_theta = 1e6f}};

constexpr const char* program_name = "runq_awq";
constexpr const char* program_summary = "Llama 3 and Qwen3 in AWQ (int4 by fp16)";
inline std::string scheme_text(const ModelConfig& c) {
    return "AWQ: int4 groups of " + std::to_string(c.group_size) + ", fp16 activations";
}
const std::vector<OwnOption> scheme_options = {{"--matmul", {"fused", "plain"}, "how products are computed"}};

#ifdef ENGINE
#include "engine/gpu/command_line.cuh"
#else

// ---- section text ----------------------------------------------------------
// Files of text, and UTF-8

// All of a file, of standard input for "-". Throws.
inline std::string read_bytes(const std::string& path) {
    std::ifstream file;
    if (path != "-") file.open(path, std::ios::binary);
    if (!file) fail("cannot open '", path, "': ", std::strerror(errno));
    std::istream& in = path == "-" ? std::cin : file;
    return {std::istreambuf_iterator<char>(in), {}};
}

#ifdef NO_TOKENIZER
struct Pattern {
    bool drops_gaps;
    Pattern(std::string_view, bool drops) : drops_gaps(drops) {}
    std::pair<size_t, size_t> match(std::string_view s, size_t) const { return {s.size(), s.size()}; }
};
inline int utf8_length(std::string_view s) { return s.empty() ? 0 : 1; }
inline std::string to_nfc(std::string_view s) { return std::string(s); }
#else
// A regular expression of PCRE2 that cuts text at its matches.
struct Pattern {
    bool drops_gaps;  // what no match covers
    std::shared_ptr<pcre2_code> code;
    Pattern(std::string_view pattern, bool drops) : drops_gaps(drops) {
        int error = 0;
        size_t offset = 0;
        const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
        code = {pcre2_compile(PCRE2_SPTR(pattern.data()), pattern.size(), options, &error, &offset, nullptr),
                pcre2_code_free};
        if (!code) fail("tokenizer: a pattern does not compile at byte ", offset);
    }
    // The next match in s, valid UTF-8, that is not empty at byte `at`: begin and end, of s if there is none.
    std::pair<size_t, size_t> match(std::string_view s, size_t at) const {
        static pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
        static pcre2_match_context* limits = pcre2_match_context_create(nullptr);
        pcre2_set_match_limit(limits, 10'000'000);  // a damaged file's pattern may explode
        const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY_ATSTART;
        const int rc = pcre2_match(code.get(), PCRE2_SPTR(s.data()), s.size(), at, options, data, limits);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) fail("tokenizer: a pattern fails behind byte ", at);
        const size_t* found = pcre2_get_ovector_pointer(data);
        if (rc < 0 || found[0] < at || found[1] < std::max(found[0], at + 1)) return {s.size(), s.size()};
        return {found[0], found[1]};
    }
};

// How many bytes the first character of s has, negative if it is ill-formed.
inline int utf8_length(std::string_view s) {
    utf8proc_int32_t code = 0;
    return int(utf8proc_iterate(PCRE2_SPTR(s.data()), ptrdiff_t(s.size()), &code));
}

// Unicode's normalization form C.
inline std::string to_nfc(std::string_view s) {
    utf8proc_uint8_t* out = nullptr;
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto n = utf8proc_map(PCRE2_SPTR(s.data()), ptrdiff_t(s.size()), &out, options);
    if (n < 0) fail("tokenizer: NFC: ", utf8proc_errmsg(n));
    std::string normal(reinterpret_cast<const char*>(out), size_t(n));
    std::free(out);
    return normal;
}
#endif

// s as the rule for every text says that a person gives: it is UTF-8; "\r\n" is "\n"; a byte order mark in
// front is no part of it. What is ill-formed throws UsageError, or becomes U+FFFD where there is no name.
inline std::string valid_text(std::string_view s, const char* name = nullptr) {
    std::string out;
    for (size_t i = name && s.starts_with("\xEF\xBB\xBF") ? 3 : 0, n; i < s.size(); i += n) {
        const int length = utf8_length(s.substr(i));
        if (length < 0 && name) fail<UsageError>(name, " is not UTF-8 at byte ", i);
        n = size_t(std::max(length, 1));
        if (!name || !s.substr(i).starts_with("\r\n")) out += length < 0 ? "\xEF\xBF\xBD" : s.substr(i, n);
    }
    return out;
}
// ---- end of text -----------------------------------------------------------

// ----------------------------------------------------------------------------
// Opening a model file. All of the header is checked, by name; docs/model-files.md has every field

struct HeaderReader {
    std::span<const std::byte> file;  // at least 256 bytes

    template <class T>
    T value(size_t offset) const {
        T v;
        std::memcpy(&v, file.data() + offset, sizeof v);
        return v;
    }
    int i32(const char* name, size_t offset, int low, int high) const {
        const auto v = value<int32_t>(offset);
        check_value(v >= low && v <= high, name, v, "expected ", low, " to ", high);
        return v;
    }
    float f32(const char* name, size_t offset, float low, float high) const {
        const auto v = value<float>(offset);
        if (!(v >= low && v <= high)) fail(name, " is ", v);  // NaN, too
        return v;
    }
};

// The limits are far above any model's, and low enough that no product of sizes overflows 64 bits.
template <class Config>
Config read_header(const HeaderReader& h, const FileFormat<Config>& format) {
    Config c;
    c.dim = h.i32("dim", 0x08, 1, 1 << 20);
    c.hidden_dim = h.i32("hidden_dim", 0x0C, 1, 1 << 22);
    c.n_layers = h.i32("n_layers", 0x10, 1, 1 << 12);
    c.n_heads = h.i32("n_heads", 0x14, 1, 1 << 12);
    c.n_kv_heads = h.i32("n_kv_heads", 0x18, 1, c.n_heads);
    c.vocab_size = h.i32("vocab_size", 0x1C, 1, 1 << 24);
    c.max_seq_len = h.i32("max_seq_len", 0x20, 1, 1 << 24);
    c.shared_classifier = h.value<uint8_t>(0x24) != 0;
    c.group_size = h.value<int32_t>(format.base.group_size);
    c.head_dim = h.value<int32_t>(format.base.head_dim);
    c.arch = format.base.arch, c.norm_eps = format.base.norm_eps, c.rope_theta = format.base.rope_theta;
    check_value(c.n_heads % c.n_kv_heads == 0, "n_heads", c.n_heads, "not a multiple of n_kv_heads");
    if (h.value<uint32_t>(0x40) != 0) {  // the extension; KuiperLLama's own files have none
        h.i32("extension magic", 0x40, 0x31584b41, 0x31584b41);  // "AKX1"
        c.arch = Arch(h.i32("arch", 0x44, int(Arch::llama), int(Arch::qwen3)));
        h.i32("head_dim at 0x48", 0x48, c.head_dim, c.head_dim);
        h.i32("group_size at 0x4c", 0x4C, c.group_size, c.group_size);
        c.norm_eps = h.f32("norm_eps", 0x50, 0, 1);
        c.rope_theta = h.f32("rope_theta", 0x54, 1, 1e12f);
        c.rope_type = h.i32("rope_scaling type", 0x58, 0, 3);
        if (c.rope_type > 1) c.attention_factor = h.f32("attention_factor", 0x30, 0.01f, 100);
        if (c.rope_type > 0) {
            c.rope_factor = h.f32("rope_scaling factor", 0x5C, 1, 1e6f);
            c.high_freq_factor = h.f32("high_freq_factor", 0x64, 1e-6f, 1e6f);
            c.low_freq_factor =
                h.f32("low_freq_factor", 0x60, 1e-6f, std::nextafter(c.high_freq_factor, 0.0f));
            c.original_max_position = h.i32("original_max_position_embeddings", 0x68, 1, 1 << 24);
        }
        c.rotation_block = h.i32("rotation_block", 0x34, 0, c.dim);
        c.bos_id = h.i32("bos_id", 0x6C, -1, c.vocab_size - 1);
        c.eos_ids.resize(size_t(h.i32("n_eos", 0x70, 0, 8)));
        for (size_t i = 0; i < c.eos_ids.size(); i++)
            c.eos_ids[i] = h.i32("eos_id", 0x74 + 4 * i, 0, c.vocab_size - 1);
        c.temperature = h.f32("temperature", 0x94, 0, 100);
        c.top_p = h.f32("top_p", 0x98, 0, 1);
        c.top_k = h.i32("top_k", 0x9C, 0, 1 << 24);
        h.i32("activations", 0xB4, 0, 0);
        for (size_t i = 0xC0; i < header_size; i++)
            if (h.value<uint8_t>(i) != 0) fail("reserved byte ", i, " is not 0");
    }
    format.check(c);
    return c;
}

// The whole file in memory, until the program ends: mapped, or read where there is no mmap.
inline std::span<const std::byte> file_bytes(const std::string& path) {
#if __has_include(<sys/mman.h>)
    const int file = open(path.c_str(), O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) fail("cannot open: ", std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail("not a regular file");
    const auto n = size_t(status.st_size);
    void* p = n > 0 ? mmap(nullptr, n, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    close(file);
    if (p == MAP_FAILED) fail("cannot map: ", std::strerror(errno));
    return {static_cast<const std::byte*>(p), n};
#else
    static std::string bytes;
    bytes = read_bytes(path);
    return std::as_bytes(std::span(bytes));
#endif
}

template <class Config>
ModelFileOf<Config> open_model_file(const std::string& path, const FileFormat<Config>& format) {
    const auto bytes = file_bytes(path);
    const HeaderReader h{bytes};
    if (bytes.size() < header_size || h.value<uint32_t>(0) != format.magic)
        fail("no model file of ", program_name, " (python -m export makes one)");
    h.i32("version", 4, format.version, format.version);
    const Config c = read_header(h, format);
    if (h.value<uint32_t>(0x40) == 0) return {c, bytes, bytes.subspan(header_size), {}};
    const auto end = h.value<uint64_t>(0xA0), size = h.value<uint64_t>(0xA8);
    if (end < header_size || end > bytes.size() || bytes.size() - end != size)
        fail("file is ", bytes.size(), " bytes, but its tokenizer section is ", size, " bytes at ", end);
    return {c, bytes, bytes.subspan(header_size, end - header_size), bytes.subspan(end)};
}
// ---- section tokenizer and sampler -----------------------------------------
// Text <-> token ids: byte-level BPE (Sennrich et al. 2015, arXiv 1508.07909), read from the last section of
// the model file; ids are those of Hugging Face's tokenizers. docs/tokenizer.md has each step and byte:
//   UTF-8 -> added tokens -> NFC -> regular expressions -> byte-pair encoding of each word

struct Tokenizer {
    enum Flag : uint32_t { nfc = 1, ignore_merges = 2, adds_bos = 4, has_chat = 8, has_steps = 16 };
    enum TokenFlag : uint8_t { defined = 1, word = 2, special = 4 };
    enum AddedFlag : uint32_t { normalized = 2, unusual = 4 + 8 + 16 };
    enum ChatFlag : uint32_t { trims_user = 2, trims_answer = 4, drops_thoughts = 8 + 128, strips = 8 + 64 };
    enum Piece { opening, user = 5, user_end, answer, answer_end, generate, n_pieces = 13 };

    uint32_t flags = 0, chat_flags = 0;
    int bos_id = -1;
    std::string bytes;                                // every token's, one after the other
    std::vector<uint32_t> offsets;                    // (vocab_size + 1,) where each token starts in bytes
    std::string token_flags;                          // (vocab_size,)
    std::unordered_map<std::string_view, int> words;  // tokens that text becomes, each single byte among them
    std::map<std::pair<int, int>, size_t> ranks;      // of neighbours that may merge; the lowest does
    std::vector<int> merged;                          // by rank: what they become
    std::vector<int> added;                           // ids of those cut out of a text, the longest first
    std::vector<Pattern> steps;
    std::array<std::string, n_pieces> chat;

    // A token's bytes: maybe no whole character.
    std::string_view token(int id) const {
        return std::string_view(bytes).substr(offsets[id], offsets[id + 1] - offsets[id]);
    }
    // What a reader sees of it.
    std::string shown(int id) const { return std::string(token_flags[id] & special ? "" : token(id)); }

    // Throws std::runtime_error for a section that is cut short, or has ids that there are not.
    Tokenizer(std::span<const std::byte> section, int vocab_size) {
        std::string_view rest(reinterpret_cast<const char*>(section.data()), section.size());
        const auto check = [](bool is_good, const char* what) {
            if (!is_good) fail("tokenizer: ", what);
        };
        const auto take = [&](size_t n) {
            check(n <= rest.size(), "the section is cut short");
            const std::string_view taken = rest.substr(0, n);
            rest.remove_prefix(n);
            return taken;
        };
        const auto u32 = [&] {
            uint32_t v;
            std::memcpy(&v, take(4).data(), 4);
            return v;
        };
        const auto id = [&] {
            const uint32_t v = u32();
            check(v < uint32_t(vocab_size), "an id is outside the vocabulary");
            return int(v);
        };
        const uint32_t magic = u32(), version = u32(), size = u32(), vocab = u32();
        check(magic == 0x6E6B6F74 && version == 1, "the section does not begin as one");
        check(size == section.size() && vocab == uint32_t(vocab_size), "the section has another size");
        flags = u32(), bos_id = int(u32());
        check(bos_id >= (flags & adds_bos ? 0 : -1) && bos_id < vocab_size, "bos_id is no id");
        const uint32_t n_merges = u32(), n_added = u32(), pattern_size = u32(), word_size = u32();
        const uint32_t chat_size = u32(), bytes_size = u32();
        for (int i = 0; i <= vocab_size; i++) offsets.push_back(u32());
        check(std::ranges::is_sorted(offsets) && offsets.back() == bytes_size, "tokens overlap");
        for (size_t rank = 0; rank < n_merges; rank++) {
            const int left = id(), right = id();
            ranks.try_emplace({left, right}, rank);
            merged.push_back(id());
        }
        for (uint32_t i = 0; i < n_added; i++) {
            added.push_back(id());
            check((u32() & (flags & nfc ? unusual | normalized : unusual)) == 0,
                  "an added token looks around");
        }
        token_flags = take(size_t(vocab_size)), bytes = take(bytes_size);
        for (int i = 0; i < vocab_size; i++)
            if (token_flags[i] & word) words[token(i)] = i;
        std::ranges::stable_sort(added, std::greater{}, [&](int i) { return token(i).size(); });
        check(added.empty() || !token(added.back()).empty(), "an added token is empty");
        for (const size_t end = rest.size() - std::min<size_t>(pattern_size, rest.size());
             rest.size() > end;) {
            check(steps.size() < 16, "there are too many patterns");
            const bool drops_gaps = flags & has_steps && u32() == 1;
            steps.emplace_back(take(flags & has_steps ? u32() : pattern_size), drops_gaps);
        }
        take(word_size);  // what an added token that looks around takes for a word
        check(chat_size <= rest.size(), "the section is cut short");
        if (!(flags & has_chat)) return;
        chat_flags = u32();
        for (std::string& piece : chat) piece = take(u32());
    }

    // The ids of a text: of added tokens such as <|eot_id|> in it, at each place the longest, and of the
    // words between. wants_bos: with BOS in front, if this tokenizer does so.
    std::vector<int> encode(std::string_view text, bool wants_bos) const {
        std::vector<int> ids;
        if (wants_bos && flags & adds_bos) ids.push_back(bos_id);
        const std::string valid = valid_text(text);
        const std::string_view s = valid;
        for (size_t done = 0, i = 0; i <= s.size(); i++) {  // what is before done has its ids
            const auto begins = [&](int a) { return s.substr(i).starts_with(token(a)); };
            const auto found = std::ranges::find_if(added, begins);
            if (found == added.end() && i < s.size()) continue;
            const std::string part(s.substr(done, i - done));
            cut(flags & nfc ? to_nfc(part) : part, 0, ids);
            if (found == added.end()) break;
            ids.push_back(*found);
            done = i + token(*found).size();
            i = done - 1;
        }
        return ids;
    }

    // Cuts s at the matches of a step's pattern. Each part goes on to the next step, and so does what no
    // match covers, unless the step drops it; what the last step leaves is a word.
    void cut(std::string_view s, size_t step, std::vector<int>& ids) const {
        if (s.empty()) return;
        if (step == steps.size()) return encode_word(s, ids);
        for (size_t done = 0; done < s.size();) {
            const auto [begin, end] = steps[step].match(s, done);
            if (!steps[step].drops_gaps) cut(s.substr(done, begin - done), step + 1, ids);
            cut(s.substr(begin, end - begin), step + 1, ids);
            done = end;
        }
    }

    // Byte-pair encoding: of all neighbours that may merge, the pair with the lowest rank does, the leftmost
    // of equals, until none may.
    void encode_word(std::string_view text, std::vector<int>& ids) const {
        const auto whole = words.find(text);
        if (flags & ignore_merges && whole != words.end()) return ids.push_back(whole->second);
        std::vector<int> id;
        for (size_t i = 0; i < text.size(); i++) {
            const auto byte = words.find(text.substr(i, 1));
            if (byte != words.end()) id.push_back(byte->second);
        }
        while (true) {
            size_t best = merged.size(), left = 0;  // the rank of a pair, and where it is
            for (size_t i = 0; i + 1 < id.size(); i++) {
                const auto rank = ranks.find({id[i], id[i + 1]});
                if (rank != ranks.end() && rank->second < best) best = rank->second, left = i;
            }
            if (best == merged.size()) break;
            id[left] = merged[best];
            id.erase(id.begin() + ptrdiff_t(left) + 1);
        }
        ids.insert(ids.end(), id.begin(), id.end());
    }

    // A conversation of user and assistant in turn, the user's message last, as Hugging Face's
    // apply_chat_template() writes it, up to where the model goes on.
    std::string chat_text(std::span<const std::string> messages) const {
        constexpr const char* spaces = " \t\n\v\f\r";
        std::string out = chat[opening];
        for (size_t i = 0; i < messages.size(); i++) {
            std::string_view text = messages[i];
            const bool is_user = i % 2 == 0;
            const size_t thought = is_user ? text.npos : text.rfind("</think>");
            if (chat_flags & drops_thoughts && thought != text.npos) {
                text.remove_prefix(thought + 8);
                while (chat_flags & strips && text.starts_with('\n')) text.remove_prefix(1);
            }
            if (chat_flags & (is_user ? trims_user : trims_answer)) {
                text = text.substr(0, text.find_last_not_of(spaces) + 1);
                text.remove_prefix(std::min(text.find_first_not_of(spaces), text.size()));
            }
            out.append(chat[is_user ? user : answer]).append(text);
            out.append(chat[is_user ? user_end : answer_end]);
        }
        return out + chat[generate];
    }
};

// Logits -> the next token. Temperature 0 takes the most probable one. Otherwise divide by the temperature,
// keep the top_k most probable tokens, of those the most probable that together have top_p of the
// probability, and draw.
struct Sampler {
    float temperature;
    int top_k;
    float top_p;
    std::mt19937_64 random;

    int sample(std::span<const float> logits) {
        const auto best = std::ranges::max_element(logits) - logits.begin();
        if (temperature == 0) return int(best);
        std::vector<float> weights;  // softmax without its division
        std::vector<size_t> ids;     // that may be drawn
        double total = 0;            // of their weights
        for (size_t i = 0; i < logits.size(); i++) {
            const float z = (logits[i] - logits[best]) / temperature;
            weights.push_back(z < -87 ? 0 : exp_fp32(z));  // far below it is 0: it could not win
            if (weights[i] > 0) ids.push_back(i), total += weights[i];
        }
        const bool cuts_k = top_k > 0 && size_t(top_k) < ids.size();
        if (cuts_k || top_p < 1) {
            // Below (1 - top_p) / n a token is never among those of top_p: that leaves few to sort.
            const double least = cuts_k ? 0 : (1.0 - top_p) * total / double(logits.size());
            std::erase_if(ids, [&](size_t id) { return weights[id] < least; });
            std::ranges::stable_sort(ids, std::greater{}, [&](size_t id) { return weights[id]; });
            if (cuts_k) {
                ids.resize(size_t(top_k)), total = 0;
                for (const size_t id : ids) total += weights[id];
            }
            const double wanted = top_p * std::exchange(total, 0);
            size_t n = 0;
            while (n < ids.size() && (n == 0 || total < wanted)) total += weights[ids[n++]];
            ids.resize(n);
            std::ranges::sort(ids);
        }
        double r = double(random() >> 11) * 0x1p-53 * total;  // the same on every machine
        for (const size_t id : ids)
            if ((r -= weights[id]) < 0) return int(id);
        return int(ids.back());
    }
};
// ---- end of tokenizer and sampler ------------------------------------------

// ----------------------------------------------------------------------------
// Writing a trace

// A safetensors file (https://huggingface.co/docs/safetensors).
inline void Trace::write(const std::string& path) const {
    std::string json, data;
    for (const auto& [name, t] : tensors) {
        json += (json.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + t.type + "\",\"shape\":[" +
                std::to_string(t.n_tokens);
        for (const int d : t.shape) json += "," + std::to_string(d);
        json += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
        data += t.bytes;
        json += std::to_string(data.size()) + "]}";
    }
    json += "}" + std::string(7 - json.size() % 8, ' ');
    const auto size = uint64_t(json.size());
    std::FILE* file = std::fopen(path.c_str(), "wb");
    bool is_good = file != nullptr && std::fwrite(&size, sizeof size, 1, file) == 1;
    is_good = is_good && std::fputs(json.c_str(), file) >= 0;
    is_good = is_good && std::fwrite(data.data(), 1, data.size(), file) == data.size();
    if (file == nullptr || std::fclose(file) != 0 || !is_good) fail("--trace: cannot write '" + path + "'");
}

// ---- section command line --------------------------------------------------
// Options, and what a program does with a loaded model

constexpr const char* help_text = R"(%s: %s
usage: %s <model.bin> [options]
  -i TEXT       the prompt; - reads standard input
  -f PATH       the prompt is a file's text
  --ids 1,2,3   the prompt as token ids
  -m MODE       generate (default) or chat: a turn for each line of standard input
  -n N          new tokens, in chat for each turn (default 256; 0: to the context's end)
  -c N          context length (default: the model's, at most 4096)
  -t F          temperature; 0 takes the most probable token
  -k N          only the N most probable tokens; 0: all
  -p F          only the most probable tokens, up to probability F
  -s N          random seed (default: another in each run)
  -j N          threads (default: OpenMP's)
  --print-ids   print token ids instead of text
  --digest      print a hash of the logits, the same on every machine
  --trace PATH  write every intermediate tensor to a safetensors file
  --ppl PATH    perplexity of a text file
)";

// Throws UsageError. No model path: --help was printed.
inline Options parse_options(int argc, char** argv) {
    Options o;
    std::string name, value;
    // All of the value as a number from low to high.
    const auto number = [&](auto low, auto high) {
        auto found = low;
        const char* end = value.data() + value.size();
        const auto [rest, error] = std::from_chars(value.data(), end, found);
        if (error != std::errc() || rest != end || !(found >= low && found <= high))
            fail<UsageError>(name, ": '", value, "' is no number from ", low, " to ", high);
        return found;
    };
    const auto one_of = [&](const std::vector<const char*>& choices) {
        if (std::ranges::count(choices, value) > 0) return value;
        fail<UsageError>(name, ": '", value, "' is none of its choices, such as ", choices.back());
    };
    std::map<std::string, std::function<void()>> options{
        {"-i", [&] { (value == "-" ? o.file : o.prompt) = value; }},
        {"-f", [&] { o.file = value; }},
        {"-n", [&] { o.steps = number(0, INT32_MAX); }},
        {"-c", [&] { o.ctx = number(1, INT32_MAX); }},
        {"-t", [&] { o.temp = float(number(0.0, 100.0)); }},
        {"-k", [&] { o.top_k = number(0, INT32_MAX); }},
        {"-p", [&] { o.top_p = float(number(0.0, 1.0)); }},
        {"-s", [&] { o.seed = number(uint64_t{0}, UINT64_MAX); }},
        {"-j", [&] { o.threads = number(1, 1024); }},
        {"--trace", [&] { o.trace = value; }},
        {"--ppl", [&] { o.ppl = value; }},
    };
    options["-m"] = [&] { o.chat = one_of({"generate", "chat"}) == "chat"; };
    options["--ids"] = [&] {
        o.ids.clear();
        for (std::istringstream list(value + ","); std::getline(list, value, ',');)
            o.ids.push_back(number(0, INT32_MAX));
    };
    for (const OwnOption& x : scheme_options) {
        o.own[x.name] = x.choices.front();
        options[x.name] = [&] { o.own[name] = one_of(x.choices); };
    }
    for (int i = 1; i < argc; i++) {
        name = argv[i];
        if (name == "-h" || name == "--help") {
            std::printf(help_text, program_name, program_summary, program_name);
            for (const OwnOption& x : scheme_options) std::printf("  %-13s %s\n", x.name, x.help);
            return {};
        }
        if (name == "--print-ids") {
            o.print_ids = true;
        } else if (name == "--digest") {
            o.digest = true;
        } else if (options.contains(name)) {
            if (++i == argc) fail<UsageError>(name, ": needs a value");
            value = argv[i];
            options[name]();
        } else if (name.starts_with('-') || !o.model_path.empty()) {
            fail<UsageError>("unexpected argument '", name, "'; -h shows how to use this program");
        } else {
            o.model_path = name;
        }
    }
    if (o.model_path.empty()) fail<UsageError>("no model file given; -h shows how to use this program");
    if (o.trace && (o.chat || o.ppl)) fail<UsageError>("--trace: not together with -m chat or --ppl");
    return o;
}

// Opens the model file and allocates a run's memory.
inline std::unique_ptr<Transformer> load_transformer(const Options& o, Trace* trace) try {
    auto file = open_model_file(o.model_path, file_format);
    Weights weights{TensorList{file.weights, size_t(file_format.alignment)}, file.config};
    if (weights.file.end != file.weights.size())
        fail("weights are ", file.weights.size(), " bytes, but the header implies ", weights.file.end);
    const int most = file.config.max_seq_len, context = o.ctx > 0 ? o.ctx : std::min(most, 4096);
    if (context > most) fail<UsageError>("-c: ", context, " is more than the model's ", most);
    RunState state{file.config, o, context, trace != nullptr};
    return std::make_unique<Transformer>(Transformer{file, std::move(weights), std::move(state), trace});
} catch (const std::runtime_error& e) {
    fail(o.model_path, ": ", e.what());
}

// A model that runs, and what it was asked.
struct Session {
    Transformer& m;
    const std::optional<Tokenizer>& tokenizer;
    Sampler sampler;
    const ModelConfig& c = m.file.config;
    const Options& o = m.state.options;
    size_t context = size_t(m.state.context), vocab_size = size_t(c.vocab_size);
    std::vector<int> held{};                  // the tokens that the KV cache holds, from position 0 on
    int n_tokens[2]{};                        // that were run: of prompts, and one by one
    std::chrono::duration<double> time[2]{};  // that they took

    // FNV-1a of 64 bits (Fowler, Noll and Vo) over the bytes of all logits that something was drawn or scored
    // by.
    uint64_t digest = 0xcbf29ce484222325;

    void add_to_digest(std::span<const float> logits) {
        for (const std::byte byte : std::as_bytes(logits))
            if (o.digest) digest = (digest ^ uint64_t(byte)) * 0x100000001b3;
    }
    // Runs the next chunk of ids, which begin with the tokens held. Returns logits (n_logits, vocab_size).
    std::span<const float> run(std::span<const int> ids) {
        const auto start = std::chrono::steady_clock::now();
        const size_t n = std::min(ids.size() - held.size(), size_t(m.state.n));
        const auto chunk = ids.subspan(held.size(), n);
        const auto logits = forward(m, chunk, int(held.size()), n_logits(o, m.trace != nullptr, int(n)));
        held.insert(held.end(), chunk.begin(), chunk.end());
        if (!all_finite(logits.data(), logits.size()))
            fail("the logits of positions up to ", held.size() - 1, " are not finite");
        n_tokens[n == 1] += int(n);
        time[n == 1] += std::chrono::steady_clock::now() - start;
        return logits;
    }

    // Writes `prompt`, and what continues ids: to a token that ends the text, to the end of the context, or
    // as much as -n says. Returns its text. What the KV cache holds of ids is not run again.
    std::string generate(std::vector<int> ids, const std::string& prompt) {
        if (ids.empty()) fail<UsageError>("the prompt is empty, and no token begins a text of this model");
        if (ids.size() > context)
            fail<UsageError>("the prompt is ", ids.size(), " tokens long, the context only ", context);
        std::cout << prompt;
        const auto last = ids.end() - 1;  // always runs, for its logits
        held.erase(std::mismatch(held.begin(), held.end(), ids.begin(), last).first, held.end());
        const size_t end = o.steps > 0 ? std::min(context, ids.size() + size_t(o.steps)) : context;
        std::string answer, comma;
        while (ids.size() < end) {
            std::span<const float> logits;
            while (held.size() < ids.size()) logits = run(ids);
            add_to_digest(logits.last(vocab_size));
            const int id = sampler.sample(logits.last(vocab_size));
            ids.push_back(id);
            const std::string text = tokenizer ? tokenizer->shown(id) : "";
            const bool is_text = tokenizer && !o.print_ids;
            answer += text;
            std::cout << (is_text ? text : std::exchange(comma, ",") + std::to_string(id)) << std::flush;
            if (std::ranges::count(c.eos_ids, id) > 0) break;
        }
        std::cout << std::endl;
        return answer;
    }

    // The ids of the text are cut into windows that fill the context, each with BOS in front where the
    // tokenizer says so, and run from position 0; every token that has another before it is scored.
    void print_perplexity(std::string_view text) {
        const std::vector<int> ids = tokenizer->encode(text, false), bos = tokenizer->encode("", true);
        const size_t n_new = context - bos.size();  // of the text, in a window
        double nll = 0;                             // negative log-likelihood
        size_t n_scored = 0;
        for (size_t i = 0; i < ids.size() && n_new > 0; i += n_new) {
            std::vector<int> window = bos;
            window.insert(window.end(), &ids[i], &ids[i] + std::min(n_new, ids.size() - i));
            held.clear();
            while (held.size() + 1 < window.size()) {
                auto logits = run(std::span(window).first(window.size() - 1));
                for (; !logits.empty(); logits = logits.subspan(vocab_size), n_scored++) {
                    const auto row = logits.first(vocab_size);
                    add_to_digest(row);
                    const int next = window[held.size() + 1 - logits.size() / vocab_size];
                    const double max = *std::ranges::max_element(row);
                    double sum = 0;
                    for (const float logit : row) sum += std::exp(logit - max);
                    nll += std::log(sum) + max - row[size_t(next)];
                }
            }
        }
        if (n_scored == 0) fail<UsageError>("--ppl: the text is too short");
        std::printf("perplexity %.4f over %zu tokens (windows of %zu)\n", std::exp(nll / double(n_scored)),
                    n_scored, context);
    }
};

inline void run(const Options& o) {
    std::optional<std::string> text = o.file ? read_bytes(*o.file) : o.prompt;
    if (text) text = valid_text(*text, "the prompt");
    if (o.file && text->ends_with('\n')) text->pop_back();  // its last line has ended; the text may go on
    if (text && !o.ids.empty()) fail<UsageError>("there is a prompt twice: as text, and as --ids");
#ifdef _OPENMP
    if (o.threads > 0) omp_set_num_threads(o.threads);
#endif
    Trace trace;
    const auto m = load_transformer(o, o.trace ? &trace : nullptr);
    const ModelConfig& c = m->file.config;
    std::optional<Tokenizer> tokenizer;
#ifndef NO_TOKENIZER
    if (!m->file.tokenizer.empty()) tokenizer.emplace(m->file.tokenizer, c.vocab_size);
#endif
    if (!tokenizer && (text || o.ppl || o.chat))
        fail<UsageError>("there is no tokenizer, in this file or in this program: use --ids");
    if (o.chat && !(tokenizer->flags & Tokenizer::has_chat))
        fail<UsageError>("-m chat: this file has no chat template");
    const float temperature = o.temp.value_or(c.temperature), top_p = o.top_p.value_or(c.top_p);
    const uint64_t seed = o.seed.value_or(std::random_device()());
    Session s{*m, tokenizer, {temperature, o.top_k.value_or(c.top_k), top_p, std::mt19937_64(seed)}};
    if (o.ppl) {
        s.print_perplexity(valid_text(read_bytes(*o.ppl), "--ppl: the text"));
    } else if (!o.chat) {
        std::vector<int> ids = text ? tokenizer->encode(*text, true) : o.ids;
        if (ids.empty() && c.bos_id >= 0) ids = {c.bos_id};
        std::string shown = text.value_or("");
        for (const int id : o.ids) {
            if (id >= c.vocab_size) fail<UsageError>("--ids: ", id, " is outside the vocabulary");
            shown += tokenizer ? tokenizer->shown(id) : "";
        }
        s.generate(ids, o.print_ids ? "" : shown);
    }
    std::vector<std::string> messages;
    std::string line = text.value_or("");
    while (o.chat && (!line.empty() || std::getline(std::cin, line))) {
        if (line.ends_with('\r')) line.pop_back();
        if (line.empty()) continue;
        messages.push_back(valid_text(std::exchange(line, ""), "a line of standard input"));
        messages.push_back(s.generate(tokenizer->encode(tokenizer->chat_text(messages), false), ""));
    }
    if (o.trace) trace.write(*o.trace);
    for (const int i : {0, 1}) {
        const char* what = i == 0 ? "prefill" : "decode ";
        const int n = s.n_tokens[i];
        if (n > 0) std::fprintf(stderr, "%s %d tokens, %.1f tokens/s\n", what, n, n / s.time[i].count());
    }
    if (o.digest) std::fprintf(stderr, "digest  %016llx\n", static_cast<unsigned long long>(s.digest));
}

inline int run_command_line(int argc, char** argv) try {
    const Options o = parse_options(argc, argv);
    if (!rounds_products())
        std::fprintf(stderr, "%s: products are fused with sums: compile with -ffp-contract=off\n",
                     program_name);
    if (!o.model_path.empty()) run(o);
    if (!std::cout.flush()) fail("cannot write the output");
    return 0;
} catch (const std::exception& e) {
    const bool is_memory = dynamic_cast<const std::bad_alloc*>(&e) != nullptr;
    std::fprintf(stderr, "%s: %s\n", program_name, is_memory ? "not enough memory" : e.what());
    return dynamic_cast<const UsageError*>(&e) != nullptr ? 2 : 1;
}
// ---- end of command line ---------------------------------------------------
#endif  // ENGINE

#ifndef RUNQ_NO_MAIN
int main(int argc, char** argv) { return run_command_line(argc, argv); }
#endif
