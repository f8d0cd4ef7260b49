// Back end on GPUs: cuda by nvcc, hip by hipcc, and emulated by a C++ compiler (simt/), for tests.
//
// Both products take the weights as they lie in the file and turn sixteen codes at a time into int8: one word
// is four columns, and an instruction multiplies it by four codes of a token (dp4a). For a few tokens a warp
// takes a row. For many, a block takes 64 rows and 64 tokens, and on NVIDIA's GPUs the tensor cores multiply.
// Each group is an exact int32 sum, and one thread adds an output's groups, first to last, as everywhere.
#include <cmath>
#include <cstdint>

#include "simt/cuda.h"

// After it, because it defines __device__.
#include "engine/backend/device.h"
#include "engine/backend/quant_gemm.h"

// The target. HAS_MMA: tensor cores multiply a tile; otherwise dp4a does (on AMD, and in the emulator with
// wavefronts of 64).
#if defined(__HIPCC__)
#define HAS_MMA 0
constexpr const char* backend_name = "hip";
constexpr int32_t backend_rank = 110;
constexpr auto all_lanes = ~0u;
#elif defined(__CUDACC__)
#define HAS_MMA 1
constexpr const char* backend_name = "cuda";
constexpr int32_t backend_rank = 120;
constexpr auto all_lanes = ~0u;
#else
#define HAS_MMA (SIMT_WARP_SIZE == 32)
constexpr const char* backend_name = SIMT_WARP_SIZE == 32 ? "emulated" : "emulated64";
constexpr int32_t backend_rank = 1;
using simt::all_lanes;
#endif
#if HAS_MMA
#include "simt/ptx.h"
#endif

namespace {

// ----------------------------------------------------------------------------
// Weights and activations

// The formats of a matrix, known when a kernel is compiled.
template <int bits_, bool is_sparse_, bool two_level_>
struct Format {
    static constexpr int bits = bits_;
    static constexpr bool is_sparse = is_sparse_, two_level = two_level_;
};

// The four bytes of a code word, each minus those of z; none borrows from its neighbour, because codes and
// zero points are less than 128.
__device__ uint32_t subtract(uint32_t codes, uint32_t z) { return ((codes | 0x80808080u) - z) ^ 0x80808080u; }

// Columns k .. k + 15 of row i, k a multiple of 16, as the int8 codes that are multiplied.
template <class F>
__device__ uint4 load_codes(const QuantGemmMatrix& w, int i, int k) {
    const int n_codes = F::is_sparse ? w.n_cols / 2 : w.n_cols;
    const uint8_t* row = w.codes + size_t(i) * size_t(n_codes / (8 / F::bits));
    if constexpr (F::bits == 8) return *reinterpret_cast<const uint4*>(row + k);

    const int s = k / w.group, n_scales = w.n_cols / w.group;
    uint32_t zero = 0;
    if constexpr (F::two_level) {
        zero = w.levels[size_t(i) * size_t(n_scales) + size_t(s)] >> 4;
    } else {
        const uint8_t* zeros = w.zeros + size_t(i) * size_t((n_scales + 1) / 2);
        zero = zeros[s / 2] >> s % 2 * 4 & 15;
    }
    zero *= 0x01010101u;
    const Place at = place_of(F::is_sparse ? k / 2 : k, n_codes, F::bits);
    constexpr uint32_t mask = ((1u << F::bits) - 1) * 0x01010101u;
    if constexpr (F::is_sparse) {
        // Eight columns have four codes; where the mask has a 1, the next of them.
        const uint2 kept = *reinterpret_cast<const uint2*>(row + at.byte);
        const uint8_t* ones = w.mask + (size_t(i) * size_t(w.n_cols) + size_t(k)) / 8;
        uint32_t words[4] = {};
        for (int half = 0; half < 2; half++) {
            uint32_t codes = subtract((half == 0 ? kept.x : kept.y) >> at.shift & mask, zero);
            for (int j = 0; j < 8; j++) {
                if ((ones[half] >> j & 1) == 0) continue;
                words[half * 2 + j / 4] |= (codes & 255) << j % 4 * 8;
                codes >>= 8;
            }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        const uint4 v = *reinterpret_cast<const uint4*>(row + at.byte);
        auto code = [&](uint32_t word) {
            const uint32_t codes = word >> at.shift & mask;
            return subtract(F::two_level ? 5 * codes : codes, zero);
        };
        return make_uint4(code(v.x), code(v.y), code(v.z), code(v.w));
    }
}

// The scale of columns k and on of row i.
template <class F>
__device__ float load_scale(const QuantGemmMatrix& w, int i, int k) {
    const size_t s = size_t(i) * size_t(w.n_cols / w.group) + size_t(k / w.group);
    if constexpr (F::two_level) {
        return float(w.levels[s] & 15) * static_cast<const float*>(w.scales)[i];
    }
    if (F::bits == 8 && w.scale_type == QUANT_GEMM_ROW_FP32) return static_cast<const float*>(w.scales)[i];
    return __half2float(static_cast<const __half*>(w.scales)[s]);
}

__device__ uint4 load_tokens(const QuantGemmRows& x, int t, int k) {
    return *reinterpret_cast<const uint4*>(x.codes + size_t(t) * size_t(x.n_cols) + k);
}
__device__ float load_token_scale(const QuantGemmRows& x, int t, int g) {
    return x.scales[size_t(t) * size_t(x.n_cols / x.group_size) + size_t(g)];
}

__device__ int dot4(uint32_t a, uint32_t b, int sum) { return __dp4a(int(a), int(b), sum); }
__device__ int dot16(uint4 a, uint4 b, int sum) {
    return dot4(a.w, b.w, dot4(a.z, b.z, dot4(a.y, b.y, dot4(a.x, b.x, sum))));
}

// ----------------------------------------------------------------------------
// Kernels

// out[t][i] for n_tokens tokens from t0 on: a warp of `lanes` threads takes a row. A thread takes sixteen
// columns at a time, so that two threads, or four, have a group. Its sum and the product of its scales go
// through shared memory to the thread that adds the groups of a token.
constexpr int block_warps = 4;
template <class F, int lanes, int n_tokens>
__global__ void multiply_rows(QuantGemmMatrix w, QuantGemmRows x, int t0, float* out) {
    __shared__ float2 shared_groups[block_warps][lanes / 2 * n_tokens];
    const int lane = int(threadIdx.x) % lanes, warp = int(threadIdx.x) / lanes;
    const int i = int(blockIdx.x) * block_warps + warp;
    if (i >= w.n_rows) return;
    float2* groups = shared_groups[warp];  // of the warp's columns, each with its tokens
    const int per_group = x.group_size / 16;
    float sum = 0;  // of the token that is the lane's number
    for (int first = 0; first < w.n_cols; first += 16 * lanes) {
        const int k = first + 16 * lane;
        const bool there = k < w.n_cols;
        const uint4 codes = there ? load_codes<F>(w, i, k) : make_uint4(0, 0, 0, 0);
        const float scale = there ? load_scale<F>(w, i, k) : 0;
        for (int t = 0; t < n_tokens; t++) {
            int acc = there ? dot16(codes, load_tokens(x, t0 + t, k), 0) : 0;
            acc += __shfl_xor_sync(all_lanes, acc, 1, 2);
            if (per_group == 4) acc += __shfl_xor_sync(all_lanes, acc, 2, 4);
            if (there && lane % per_group == 0)
                groups[lane / per_group * n_tokens + t] =
                    make_float2(float(acc), scale * load_token_scale(x, t0 + t, k / x.group_size));
        }
        __syncwarp();
        const int n_groups = min(lanes / per_group, (w.n_cols - first) / x.group_size);
        for (int g = 0; lane < n_tokens && g < n_groups; g++) {
            const float2 group = groups[g * n_tokens + lane];
            sum = fmaf(group.x, group.y, sum);
        }
        __syncwarp();  // the next columns' groups overwrite these
    }
    if (lane < n_tokens) out[size_t(t0 + lane) * size_t(w.n_rows) + size_t(i)] = sum;
}

// out for 64 rows and 64 tokens: 64 columns of each are expanded into shared memory, then multiplied. Four
// units of 32 threads take sixteen rows each, whatever the size of a warp. Thread 4 g + t of a unit has the
// outputs of rows g and g + 8 and, of each eight tokens, 2 t and 2 t + 1, as mma leaves them.
constexpr int tile_size = 64, tile_threads = 128;
constexpr int tile_words = tile_size / 4 + 4;  // of a row in shared memory: four more, so that banks differ
template <class F>
__global__ void __launch_bounds__(tile_threads)
    multiply_tile(QuantGemmMatrix w, QuantGemmRows x, float* out) {
    __shared__ __align__(16) uint32_t w_codes[tile_size * tile_words];
    __shared__ __align__(16) uint32_t x_codes[tile_size * tile_words];
    __shared__ float w_scales[2 * tile_size];  // of two groups of 32, or one of 64
    __shared__ float x_scales[2 * tile_size];
    const int thread = int(threadIdx.x), unit = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int first_row = int(blockIdx.x) * tile_size, first_token = int(blockIdx.y) * tile_size;
    const int n_groups = 64 / x.group_size, group_words = x.group_size / 4;
    // What it expands. Eight threads store to all banks at once: two rows, as a fourth row is 16 banks on.
    const int own_row = thread / 32 * 8 + thread / 4 % 2 * 4 + thread / 8 % 4, col = thread % 4 * 16;
    float sums[8][4] = {};
    for (int k = 0; k < w.n_cols; k += 64) {
        for (int row = own_row; row < tile_size; row += tile_threads / 4) {
            const int i = first_row + row, token = first_token + row;
            const uint4 none = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(w_codes + row * tile_words + col / 4) =
                i < w.n_rows ? load_codes<F>(w, i, k + col) : none;
            *reinterpret_cast<uint4*>(x_codes + row * tile_words + col / 4) =
                token < x.n_rows ? load_tokens(x, token, k + col) : none;
        }
        for (int j = thread; j < n_groups * tile_size; j += tile_threads) {
            const int row = j % tile_size, first = k + j / tile_size * x.group_size;
            const int i = first_row + row, token = first_token + row;
            w_scales[j] = i < w.n_rows ? load_scale<F>(w, i, first) : 0;
            x_scales[j] = token < x.n_rows ? load_token_scale(x, token, first / x.group_size) : 0;
        }
        __syncthreads();
        for (int group = 0; group < n_groups; group++) {
            int acc[8][4] = {};
            for (int word = group * group_words; word < (group + 1) * group_words; word += 8) {
                const uint32_t* rows = w_codes + (unit * 16 + g) * tile_words + word;
#if HAS_MMA
                const uint32_t a[4] = {rows[t], rows[8 * tile_words + t], rows[t + 4],
                                       rows[8 * tile_words + t + 4]};
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const uint32_t* tokens = x_codes + (n * 8 + g) * tile_words + word;
                    const uint32_t b[2] = {tokens[t], tokens[t + 4]};
                    mma_m16n8k32(acc[n], a, b);
                }
#else
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const uint32_t* tokens = x_codes + (n * 8 + 2 * t) * tile_words + word;
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        for (int c = 0; c < 4; c++)
                            acc[n][c] = dot4(rows[c / 2 * 8 * tile_words + j], tokens[c % 2 * tile_words + j],
                                             acc[n][c]);
                    }
                }
#endif
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                for (int c = 0; c < 4; c++) {
                    const int row = unit * 16 + g + c / 2 * 8, token = n * 8 + 2 * t + c % 2;
                    const float scale =
                        w_scales[group * tile_size + row] * x_scales[group * tile_size + token];
                    sums[n][c] = fmaf(float(acc[n][c]), scale, sums[n][c]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        for (int c = 0; c < 4; c++) {
            const int i = first_row + unit * 16 + g + c / 2 * 8, token = first_token + n * 8 + 2 * t + c % 2;
            if (i < w.n_rows && token < x.n_rows)
                out[size_t(token) * size_t(w.n_rows) + size_t(i)] = sums[n][c];
        }
    }
}

// ----------------------------------------------------------------------------
// The functions of a back end

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    throw DeviceError(error == cudaErrorMemoryAllocation ? QUANT_GEMM_NO_MEMORY : QUANT_GEMM_FAILED,
                      cudaGetErrorString(error));
}

// With more tokens than this, tiles cost less than reading the weights again for each four.
constexpr int most_tokens_by_rows = 8;

template <class F, int lanes>
void by_rows(const QuantGemmMatrix& w, const QuantGemmRows& x, float* out) {
    const Launch how{.grid = unsigned(w.n_rows + block_warps - 1) / block_warps,
                     .block = lanes * block_warps};
    int t = 0;
    for (; t + 4 <= x.n_rows; t += 4) launch<multiply_rows<F, lanes, 4>>(how, w, x, t, out);
    for (; t < x.n_rows; t++) launch<multiply_rows<F, lanes, 1>>(how, w, x, t, out);
}
template <class F>
void multiply_matrix([[maybe_unused]] int warp_lanes, const QuantGemmMatrix& w, const QuantGemmRows& x,
                     float* out) {
    if (x.n_rows > most_tokens_by_rows) {
        const dim3 grid(unsigned(w.n_rows + tile_size - 1) / tile_size,
                        unsigned(x.n_rows + tile_size - 1) / tile_size);
        return launch<multiply_tile<F>>({.grid = grid, .block = tile_threads}, w, x, out);
    }
#ifndef __CUDACC__
    if (warp_lanes == 64) return by_rows<F, 64>(w, x, out);
#endif
    by_rows<F, 32>(w, x, out);
}

struct Gpu {
    int warp_lanes = 32;

    static int32_t rank() {
        int n = 0;
        return cudaGetDeviceCount(&n) == cudaSuccess && n > 0 ? backend_rank : 0;
    }
    explicit Gpu([[maybe_unused]] QuantGemmRunLoop loop) {
        if (rank() == 0) throw DeviceError(QUANT_GEMM_NO_DEVICE, "there is no such GPU, or no driver for it");
#if defined(__HIPCC__)
        hipDeviceProp_t device;
        if (hipGetDeviceProperties(&device, 0) == hipSuccess) warp_lanes = device.warpSize;
#elif !defined(__CUDACC__)
        warp_lanes = simt::warp_size;
        simt::run_loop = loop;
#endif
    }

    void* allocate(size_t n_bytes) {
        void* memory = nullptr;
        check(cudaMalloc(&memory, n_bytes));
        return memory;
    }
    void release(void* memory) { (void)cudaFree(memory); }
    void upload(void* to, const void* from, size_t n_bytes) {
        check(cudaMemcpy(to, from, n_bytes, cudaMemcpyHostToDevice));
    }
    void download(void* to, const void* from, size_t n_bytes) {
        check(cudaMemcpy(to, from, n_bytes, cudaMemcpyDeviceToHost));
    }

    void multiply(const QuantGemmMatrix& w, const QuantGemmRows& x, float* out) {
        auto* run = w.bits == 8           ? multiply_matrix<Format<8, false, false>>
                    : w.mask != nullptr   ? multiply_matrix<Format<4, true, false>>
                    : w.bits == 4         ? multiply_matrix<Format<4, false, false>>
                    : w.levels != nullptr ? multiply_matrix<Format<2, false, true>>
                                          : multiply_matrix<Format<2, false, false>>;
        run(warp_lanes, w, x, out);
    }
};

}  // namespace

const QuantGemmBackend* quant_gemm_backend() { return Context<Gpu>::functions(backend_name); }
