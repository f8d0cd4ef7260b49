// awq_kernels: the ladder of kernels that led to runq_awq's two matrix products, each rung checked, then
// timed.
//
// A rung is one way to multiply fp16 activations by int4 weights, from a loop for each output to what
// runq_awq does, with cuBLAS on fp16 weights beside it; its comment says what it does and what the next one
// removes. All see the same random numbers. Each is first compared with a float64 product on the host, on
// outputs from all columns. One that is wrong is reported and not timed. Then come microseconds, and bytes
// and operations per second as percentages of what this device copies and of what cuBLAS reaches in a large
// fp16 product, both measured in the same run.
//
//     make build/gpu/awq_kernels && build/gpu/awq_kernels [--quick] [--tune] [--seed N] [--json FILE]
//
// Weights are cold, as in a model that is larger than the cache: runs take turns among copies of them.
// Activations are warm, as the kernel before has just written them.
//
// --quick: three numbers of tokens instead of ten. --tune: also every tile and every number of splits of
// awq_gemv and awq_gemm, to see whether runq_awq picks well. Without a GPU, the rungs are checked on small
// matrices by the emulator.

#ifndef RUNQ_NO_MAIN
#define RUNQ_NO_MAIN
#define AWQ_KERNELS_MAIN
#endif
#include <functional>
#include <random>

#include "../runq_awq.cu"

// ----------------------------------------------------------------------------
// Rung 1: awq_plain, in runq_awq.cu. A thread for each output
//
// The specification. Each thread takes a nibble out of each word of its column: eight threads read the same
// word, and every token reads all the weights again.

// ----------------------------------------------------------------------------
// Rung 2, one token: fma_gemv. A warp for each word column
//
// A warp makes the eight outputs whose weights share a word, its lanes take every 32nd input, and a shuffle
// adds them up. A word is read once, and -scale * zero is multiplied out once a group, so that a weight costs
// a shift, a conversion and two multiply-adds in fp32.
//
// What awq_gemv removes: the lanes of a warp read words that lie a whole row apart, four bytes of each 32
// that the memory brings, and only the luck that the block's other warps want the neighbours keeps that from
// being eightfold traffic. Integers are converted one by one, and eight sums go through five shuffles each.

constexpr int fma_gemv_warps = 8;

// grid: words of a row / fma_gemv_warps; block: 32 * fma_gemv_warps.
__global__ void __launch_bounds__(32 * fma_gemv_warps) fma_gemv(half* out, const half* x, AwqMatrix w) {
    const int lane = threadIdx.x % 32, word = blockIdx.x * fma_gemv_warps + threadIdx.x / 32;
    const int row_words = w.n_out / 8;
    if (word >= row_words) return;
    float sums[8] = {};
    for (int group = 0; group < w.n_in / w.group_size; group++) {
        const uint32_t zeros = __ldg(w.qzeros + size_t(group) * row_words + word);
        const half* from = w.scales + size_t(group) * w.n_out + 8 * word;
        const uint4 scales = __ldg(reinterpret_cast<const uint4*>(from));
        const uint32_t scale_bits[4] = {scales.x, scales.y, scales.z, scales.w};
        float scale[8], offset[8];
        for (int i = 0; i < 8; i++) {
            const half2 pair = as_half2(scale_bits[i / 2]);
            scale[i] = __half2float(i % 2 == 0 ? __low2half(pair) : __high2half(pair));
            offset[i] = -scale[i] * float(zeros >> 4 * (i / 2 + i % 2 * 4) & 15);
        }
        for (int k = group * w.group_size + lane; k < (group + 1) * w.group_size; k += 32) {
            const float input = __half2float(x[k]);
            const uint32_t nibbles = __ldg(w.qweight + size_t(k) * row_words + word);
            for (int i = 0; i < 8; i++) {
                const float q = float(nibbles >> 4 * (i / 2 + i % 2 * 4) & 15);
                sums[i] = fmaf(input * scale[i], q, fmaf(input, offset[i], sums[i]));
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        sums[i] = warp_sum(sums[i]);
        if (lane == 0) out[8 * word + i] = __float2half(sums[i]);
    }
}

// ----------------------------------------------------------------------------
// Rung 2, several tokens: shared_gemm. Weights dequantized into shared memory
//
// As in AutoAWQ and vLLM: two warps make a tile of 16 tokens by `width` columns. For 32 inputs at a time they
// fetch the activations and the words, turn the words into fp16 weights by lop3, and leave both in shared
// memory, from where ldmatrix brings them into the shape that mma wants: weights are operand B, stored
// (input, column), so transposed.
//
// What awq_gemm removes: every weight goes out to shared memory as fp16 and back, four times the bytes that
// it came in. Nothing is fetched while the tensor cores work and they wait while it is: two barriers a step,
// and no copy under way between them. A tile of 16 tokens means that a prompt of 512 dequantizes every weight
// 32 times. And a narrow matrix has too few tiles for a large device, as nothing splits the inputs.

constexpr int shared_gemm_tokens = 16, shared_gemm_inputs = 32, shared_gemm_threads = 64;

// Pair p of a word's nibbles as numbers: columns 2p and 2p + 1.
__device__ inline half2 nibble_pair(uint32_t nibbles, int p) {
    const half2 q = __hsub2(with_magic(nibbles, p), __float2half2_rn(1024));
    return p % 2 == 0 ? q : __hmul2(q, __float2half2_rn(1.0f / 16));
}

// grid: (n_out / width, tiles of 16 tokens); block: 64; n_out a multiple of width, group_size of 32.
template <int width>
__global__ void __launch_bounds__(shared_gemm_threads)
    shared_gemm(half* out, const half* x, int n_tokens, AwqMatrix w) {
    // Rows are eight halves longer than they need be: ldmatrix reads eight rows at once, from different
    // banks.
    __shared__ __align__(16) half x_tile[shared_gemm_tokens][shared_gemm_inputs + 8];
    __shared__ __align__(16) half w_tile[shared_gemm_inputs][width + 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = blockIdx.x * width, first_token = blockIdx.y * shared_gemm_tokens;
    const int row_words = w.n_out / 8;

    constexpr int tile_words = width / 8, rows_at_once = shared_gemm_threads / tile_words;
    const int tile_word = threadIdx.x % tile_words, word = first_column / 8 + tile_word;
    const int x_row = threadIdx.x / 4, x_part = threadIdx.x % 4 * 8;  // 16 bytes for each thread
    const half* x_from = x + size_t(first_token + x_row) * w.n_in + x_part;

    float sums[width / 16][4] = {};  // of the warp's half of the columns, eight at a time
    for (int k = 0; k < w.n_in; k += shared_gemm_inputs) {
        __syncthreads();  // all are done with the tiles of before
        uint4 inputs = make_uint4(0, 0, 0, 0);
        if (first_token + x_row < n_tokens) inputs = *reinterpret_cast<const uint4*>(x_from + k);
        *reinterpret_cast<uint4*>(&x_tile[x_row][x_part]) = inputs;

        const int group = k / w.group_size;
        const uint32_t zeros = w.qzeros[size_t(group) * row_words + word];
        const half* scales_from = w.scales + size_t(group) * w.n_out + 8 * word;
        const uint4 scales = *reinterpret_cast<const uint4*>(scales_from);
        const uint32_t scale_bits[4] = {scales.x, scales.y, scales.z, scales.w};
        for (int row = threadIdx.x / tile_words; row < shared_gemm_inputs; row += rows_at_once) {
            const uint32_t nibbles = w.qweight[size_t(k + row) * row_words + word];
            uint32_t weights[4];
            for (int p = 0; p < 4; p++) {
                const half2 difference = __hsub2(nibble_pair(nibbles, p), nibble_pair(zeros, p));
                weights[p] = as_bits(__hmul2(difference, as_half2(scale_bits[p])));
            }
            *reinterpret_cast<uint4*>(&w_tile[row][8 * tile_word]) =
                make_uint4(weights[0], weights[1], weights[2], weights[3]);
        }
        __syncthreads();

#pragma unroll
        for (int step = 0; step < shared_gemm_inputs; step += 16) {
            uint32_t a[4];
            ldmatrix_x4(a, &x_tile[lane % 16][step + lane / 16 * 8]);
#pragma unroll
            for (int j = 0; j < width / 16; j += 2) {
                // Inputs 0 to 7 and 8 to 15 of eight columns, then of the next eight.
                uint32_t b[4];
                ldmatrix_x4_trans(b, &w_tile[step + lane % 16][warp * width / 2 + 8 * j + lane / 16 * 8]);
                mma_m16n8k16(sums[j], a, {b[0], b[1]});
                mma_m16n8k16(sums[j + 1], a, {b[2], b[3]});
            }
        }
    }

    const int token = first_token + lane / 4;
    for (int j = 0; j < width / 16; j++) {
        half* to = out + size_t(token) * w.n_out + first_column + warp * width / 2 + 8 * j + lane % 4 * 2;
        for (int i = 0; i < 2; i++) {
            if (token + 8 * i >= n_tokens) continue;
            *reinterpret_cast<uint32_t*>(to + size_t(8 * i) * w.n_out) =
                as_bits(__floats2half2_rn(sums[j][2 * i], sums[j][2 * i + 1]));
        }
    }
}

// ----------------------------------------------------------------------------
// What is multiplied

// A projection, or several of the same input that runq_awq makes in one launch.
struct Problem {
    const char *model, *name;
    int n_in;
    std::vector<int> n_outs;

    int n_columns() const {
        int n = 0;
        for (const int n_out : n_outs) n += n_out;
        return n;
    }
    double weights() const { return double(n_in) * n_columns(); }
};

// A matrix on the host.
struct HostMatrix {
    int n_in = 0, n_out = 0, group_size = 0;
    std::vector<uint32_t> qweight, qzeros;
    std::vector<half> scales;

    size_t bytes() const {
        return (qweight.size() + qzeros.size()) * sizeof(uint32_t) + scales.size() * sizeof(half);
    }

    // A weight as fp16 has it; the product of two numbers of few bits is exact in fp32.
    double weight(int k, int column) const {
        const int shift = 4 * (column % 8 / 2 + column % 2 * 4), group = k / group_size;
        const int q = qweight[size_t(k) * (n_out / 8) + column / 8] >> shift & 15;
        const int zero = qzeros[size_t(group) * (n_out / 8) + column / 8] >> shift & 15;
        const float scale = __half2float(scales[size_t(group) * n_out + column]);
        return __half2float(__float2half(float(q - zero) * scale));
    }
};

using Random = std::mt19937_64;

inline float uniform(Random& random, float low, float high) {
    return low + (high - low) * float(random() >> 40) * 0x1p-24f;
}

inline HostMatrix random_matrix(int n_in, int n_out, int group_size, Random& random) {
    const size_t n_groups = size_t(n_in) / group_size;
    HostMatrix m{n_in,
                 n_out,
                 group_size,
                 std::vector<uint32_t>(size_t(n_in) * n_out / 8),
                 std::vector<uint32_t>(n_groups * n_out / 8),
                 std::vector<half>(n_groups * n_out)};
    for (uint32_t& word : m.qweight) word = uint32_t(random());
    for (uint32_t& word : m.qzeros) word = uint32_t(random());
    for (half& scale : m.scales) scale = __float2half(uniform(random, 0.005f, 0.02f));
    return m;
}

// Everything that a rung reads and writes, on the device.
struct Ladder {
    RunState s;               // scratch for the kernels that split, and multiply()'s choices
    DeviceBuffer<half> x;     // (n_tokens, n_in)
    DeviceBuffer<float> out;  // (n_tokens, n_out) of each product in turn; some rungs write fp16
    std::vector<HostMatrix> host;
    std::vector<half> host_x;
    DeviceBuffer<std::byte> packed;  // copies of the matrices, so many that the cache cannot hold them
    DeviceBuffer<half> expanded;     // copies of the same in fp16
    std::vector<std::vector<AwqMatrix>> copies;  // [copy][product]
    std::vector<std::vector<const half*>> fp16;  // [copy][product]
    int n_in = 0;

    // What a rung gets: copy i of the matrices, and where the results go. A copy's number may be any.
    Products products(size_t i, int n_tokens) const {
        Products p{};
        float* to = out.get();
        for (const AwqMatrix& w : copies[i % copies.size()]) {
            p.of[p.n] = {w, to, false};
            if (!fp16.empty()) p.of[p.n].w.fp16 = fp16[i % fp16.size()][p.n];
            to += size_t(n_tokens) * w.n_out;
            p.n++;
        }
        return p;
    }
};

// min_bytes: how much all copies are together at least. `with_fp16`: also as fp16.
inline Ladder make_ladder(const Problem& problem, int group_size, int max_tokens, size_t min_bytes,
                          bool with_fp16, Random& random) {
    Ladder l;
    l.n_in = problem.n_in;
    l.s.partials = DeviceBuffer<float>(max_partials);
    l.s.tickets = DeviceBuffer<unsigned>(max_tiles);
    l.s.tickets.clear();
    l.host_x.resize(size_t(max_tokens) * problem.n_in);
    for (half& x : l.host_x) x = __float2half(uniform(random, -1, 1));
    l.x = DeviceBuffer<half>(l.host_x.size());
    l.x.upload(l.host_x.data(), l.host_x.size());
    l.out = DeviceBuffer<float>(size_t(max_tokens) * problem.n_columns() + 64);

    constexpr size_t alignment = 256;
    auto aligned = [](size_t n) { return (n + alignment - 1) / alignment * alignment; };
    size_t bytes = 0, values = 0, largest = 0;
    for (const int n_out : problem.n_outs) {
        l.host.push_back(random_matrix(problem.n_in, n_out, group_size, random));
        const HostMatrix& m = l.host.back();
        bytes += aligned(m.qweight.size() * 4) + aligned(m.qzeros.size() * 4) + aligned(m.scales.size() * 2);
        values += size_t(m.n_in) * m.n_out;
        largest = std::max(largest, size_t(m.n_in) * m.n_out);
    }
    const size_t n_copies = std::max<size_t>(1, (min_bytes + bytes - 1) / bytes);
    l.packed = DeviceBuffer<std::byte>(n_copies * bytes);
    size_t end = 0;
    auto put = [&](const auto& values_of) {
        std::byte* to = l.packed.get() + end;
        l.packed.upload(reinterpret_cast<const std::byte*>(values_of.data()),
                        values_of.size() * sizeof(values_of[0]), end);
        end += aligned(values_of.size() * sizeof(values_of[0]));
        return to;
    };
    for (size_t i = 0; i < n_copies; i++) {
        l.copies.emplace_back();
        for (size_t j = 0; j < l.host.size(); j++) {
            const HostMatrix& m = l.host[j];
            AwqMatrix w{};
            w.n_in = m.n_in, w.n_out = m.n_out, w.group_size = m.group_size;
            if (i == 0) {
                w.qweight = reinterpret_cast<const uint32_t*>(put(m.qweight));
                w.qzeros = reinterpret_cast<const uint32_t*>(put(m.qzeros));
                w.scales = reinterpret_cast<const half*>(put(m.scales));
            } else {
                const AwqMatrix& first = l.copies[0][j];
                w.qweight = first.qweight + i * bytes / 4;
                w.qzeros = first.qzeros + i * bytes / 4;
                w.scales = first.scales + i * bytes / 2;
            }
            l.copies.back().push_back(w);
        }
        if (i > 0) {
            check(cudaMemcpyAsync(l.packed.get() + i * bytes, l.packed.get(), bytes, cudaMemcpyDeviceToDevice,
                                  device().stream),
                  "copying weights");
        }
    }
    if (with_fp16) {
        l.s.dequantized = DeviceBuffer<half>(largest);
        const size_t n_fp16 = std::max<size_t>(1, (min_bytes + 2 * values - 1) / (2 * values));
        l.expanded = DeviceBuffer<half>(n_fp16 * values);
        half* next = l.expanded.get();
        for (size_t i = 0; i < n_fp16; i++) {
            l.fp16.emplace_back();
            for (const AwqMatrix& w : l.copies[0]) {
                run_dequantize(w, next);
                l.fp16.back().push_back(next);
                next += size_t(w.n_in) * w.n_out;
            }
        }
    }
    wait_for_device();
    return l;
}

// ----------------------------------------------------------------------------
// The rungs

enum class Result { fp32, fp16 };
enum class WeightsRead { int4, fp16 };

struct Rung {
    std::string name;
    Result result;
    WeightsRead reads;
    int min_tokens, max_tokens;
    std::function<bool(const AwqMatrix&)> fits;
    std::function<void(Ladder&, const Products&, int n_tokens)> run;
};

// The place of product i's results if they are fp16, which take half of what there is.
inline half* fp16_out(const Ladder& l, const Products& products, int i) {
    return reinterpret_cast<half*>(l.out.get()) + (products.of[i].out - products.of[0].out);
}

template <int width>
void run_shared_gemm(Ladder& l, const Products& products, int n_tokens) {
    for (int i = 0; i < products.n; i++) {
        const AwqMatrix& w = products.of[i].w;
        const int n_rows = (n_tokens + shared_gemm_tokens - 1) / shared_gemm_tokens;
        launch<shared_gemm<width>>(
            {.grid = dim3(w.n_out / width, n_rows), .block = shared_gemm_threads, .stream = device().stream},
            fp16_out(l, products, i), static_cast<const half*>(l.x.get()), n_tokens, w);
    }
}

inline void run_fma_gemv(Ladder& l, const Products& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqMatrix& w = products.of[i].w;
        const int n_blocks = (w.n_out / 8 + fma_gemv_warps - 1) / fma_gemv_warps;
        launch<fma_gemv>({.grid = n_blocks, .block = 32 * fma_gemv_warps, .stream = device().stream},
                         fp16_out(l, products, i), static_cast<const half*>(l.x.get()), w);
    }
}

// awq_gemv and awq_gemm with as many splits as are asked for, where runq_awq would choose.
template <int n_words>
void run_gemv_split(Ladder& l, const Products& products, int n_splits) {
    launch<awq_gemv<n_words>>({.grid = dim3(count_tiles(products, 64 * n_words), n_splits),
                               .block = 32 * gemv_warps,
                               .stream = device().stream},
                              static_cast<const half*>(l.x.get()), products,
                              Scratch{l.s.partials.get(), l.s.tickets.get()});
}

template <int tile_tokens>
void run_gemm_split(Ladder& l, const Products& products, int n_tokens, int n_splits) {
    const int n_rows = (n_tokens + tile_tokens - 1) / tile_tokens;
    launch<awq_gemm<tile_tokens>>({.grid = dim3(count_tiles(products, gemm_columns), n_rows, n_splits),
                                   .block = gemm_threads,
                                   .shared_bytes = gemm_stages * sizeof(GemmStage<tile_tokens>),
                                   .stream = device().stream},
                                  static_cast<const half*>(l.x.get()), n_tokens, products,
                                  Scratch{l.s.partials.get(), l.s.tickets.get()});
}

inline std::vector<Rung> all_rungs() {
    constexpr int any = 1 << 30;
    constexpr int plain_tokens = 128;  // with more it takes many times what all others take together
    auto always = [](const AwqMatrix&) { return true; };
    auto columns = [](int n) { return [n](const AwqMatrix& w) { return w.n_out % n == 0; }; };
    using L = Ladder&;
    using P = const Products&;
    std::vector<Rung> rungs = {
        {"plain", Result::fp32, WeightsRead::int4, 1, plain_tokens, always,
         [](L l, P p, int n) {
             launch<awq_plain>(
                 {.grid = dim3(count_tiles(p, 128), n), .block = 128, .stream = device().stream},
                 static_cast<const half*>(l.x.get()), n, p);
         }},
        {"fma_gemv", Result::fp16, WeightsRead::int4, 1, 1, always,
         [](L l, P p, int) { run_fma_gemv(l, p); }},
        {"awq_gemv<1>", Result::fp32, WeightsRead::int4, 1, 1, always,
         [](L l, P p, int) { run_gemv<1>(l.s, l.x.get(), p); }},
        {"awq_gemv<2>", Result::fp32, WeightsRead::int4, 1, 1, columns(16),
         [](L l, P p, int) { run_gemv<2>(l.s, l.x.get(), p); }},
        {"awq_gemv<4>", Result::fp32, WeightsRead::int4, 1, 1, columns(32),
         [](L l, P p, int) { run_gemv<4>(l.s, l.x.get(), p); }},
        {"shared_gemm<64>", Result::fp16, WeightsRead::int4, 1, any, columns(64),
         [](L l, P p, int n) { run_shared_gemm<64>(l, p, n); }},
        {"shared_gemm<128>", Result::fp16, WeightsRead::int4, 1, any, columns(128),
         [](L l, P p, int n) { run_shared_gemm<128>(l, p, n); }},
        {"awq_gemm<16>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](L l, P p, int n) { run_gemm<16>(l.s, l.x.get(), n, p); }},
        {"awq_gemm<32>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](L l, P p, int n) { run_gemm<32>(l.s, l.x.get(), n, p); }},
        {"awq_gemm<64>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](L l, P p, int n) { run_gemm<64>(l.s, l.x.get(), n, p); }},
        {"runq_awq", Result::fp32, WeightsRead::int4, 1, any, always,
         [](L l, P p, int n) { multiply(l.s, l.x.get(), n, p); }},
    };
#ifdef HAVE_CUBLAS
    rungs.push_back(
        {"dequantize + cuBLAS", Result::fp32, WeightsRead::int4, 1, any, always, [](L l, P p, int n) {
             for (int i = 0; i < p.n; i++) {
                 const Product& product = p.of[i];
                 run_dequantize(product.w, l.s.dequantized.get());
                 run_cublas(l.x.get(), n, l.s.dequantized.get(), product.w.n_in, product.w.n_out, product.out,
                            false);
             }
         }});
    rungs.push_back({"fp16 cuBLAS", Result::fp32, WeightsRead::fp16, 1, any, always, [](L l, P p, int n) {
                         for (int i = 0; i < p.n; i++) {
                             const Product& product = p.of[i];
                             run_cublas(l.x.get(), n, product.w.fp16, product.w.n_in, product.w.n_out,
                                        product.out, false);
                         }
                     }});
#endif
    return rungs;
}

inline bool can_run(const Rung& rung, const Ladder& l, int n_tokens) {
    if (n_tokens < rung.min_tokens || n_tokens > rung.max_tokens) return false;
    if (rung.reads == WeightsRead::fp16 && l.fp16.empty()) return false;
    for (const AwqMatrix& w : l.copies[0]) {
        if (!rung.fits(w)) return false;
    }
    return true;
}

// ----------------------------------------------------------------------------
// Correctness

// An output, and what it should be.
struct Sample {
    size_t at;  // in a buffer of all products' results
    double value;
};

// n_samples outputs spread over all columns, of random tokens; the last token and the last column among them.
inline std::vector<Sample> sample_outputs(const Ladder& l, int n_tokens, int n_samples, Random& random) {
    struct Place {
        size_t product;
        int token, column;
    };
    std::vector<Sample> samples;
    std::vector<Place> places;
    size_t first = 0;
    for (size_t j = 0; j < l.host.size(); j++) {
        const int n_out = l.host[j].n_out, n = std::max(1, n_samples / int(l.host.size()));
        for (int i = 0; i < n; i++) {
            const int low = int(int64_t(n_out) * i / n),
                      high = std::max(low + 1, int(int64_t(n_out) * (i + 1) / n));
            const bool last = i == n - 1;
            const int token = last ? n_tokens - 1 : int(random() % n_tokens);
            const int column = last ? n_out - 1 : low + int(random() % (high - low));
            places.push_back({j, token, column});
            samples.push_back({first + size_t(token) * n_out + column, 0});
        }
        first += size_t(n_tokens) * n_out;
    }
    const int n = int(places.size());
#pragma omp parallel for schedule(static)
    for (int i = 0; i < n; i++) {
        const Place& p = places[i];
        const half* x = l.host_x.data() + size_t(p.token) * l.n_in;
        double sum = 0;
        for (int k = 0; k < l.n_in; k++)
            sum += double(__half2float(x[k])) * l.host[p.product].weight(k, p.column);
        samples[i].value = sum;
    }
    return samples;
}

// A result rounded to fp16 is off by up to 2^-11. A sum in fp32 is off by far less than 1e-5 where it is
// rounded at each step; tensor cores cut off instead, always towards zero, which adds up: over 12288 inputs
// to some 1e-5 where they take 16 at a time, to 6e-5 where it is 4. A lane or a group mixed up gives errors
// of 1e-2 and more.
constexpr double fp16_tolerance = 1e-3, fp32_tolerance = 1e-4;

inline double tolerance(const Rung& rung) {
    return rung.result == Result::fp16 ? fp16_tolerance : fp32_tolerance;
}

// ||out - expected|| / ||expected|| over the samples; infinity if any output is not finite, or if something
// was written behind the last one.
inline double relative_error_of(const Rung& rung, Ladder& l, int n_tokens,
                                const std::vector<Sample>& samples) {
    l.s.tickets.clear();  // a rung that is wrong may have left some
    const size_t all_bytes = l.out.size() * sizeof(float);
    check(cudaMemsetAsync(l.out.get(), 0xff, all_bytes, device().stream), "cudaMemset");  // NaN
    rung.run(l, l.products(0, n_tokens), n_tokens);
    wait_for_device();
    size_t n = 0;
    for (const HostMatrix& m : l.host) n += size_t(n_tokens) * m.n_out;
    constexpr size_t behind = 64;
    const bool is_half = rung.result == Result::fp16;
    std::vector<float> values(n + behind);  // as fp16, it holds twice as many
    download(values.data(), l.out.get(), values.size());
    const half* halves = reinterpret_cast<const half*>(values.data());
    auto value = [&](size_t i) { return is_half ? __half2float(halves[i]) : values[i]; };
    int64_t n_bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : n_bad)
    for (size_t i = 0; i < n + behind; i++) n_bad += std::isfinite(value(i)) != (i < n);
    if (n_bad > 0) return INFINITY;
    double difference = 0, norm = 0;
    for (const Sample& sample : samples) {
        const double d = value(sample.at) - sample.value;
        difference += d * d, norm += sample.value * sample.value;
    }
    return std::sqrt(difference / norm);
}

// ----------------------------------------------------------------------------
// Time

#ifdef __CUDACC__

// What this device can do at most.
struct Limits {
    double bytes_per_s = 0;  // of a copy, read and written counted once each
    double flops = 0;        // of cuBLAS, 8192 x 8192 x 8192 in fp16; 0: there is no cuBLAS
};

struct Events {
    cudaEvent_t start = nullptr, end = nullptr;
    Events() {
        check(cudaEventCreate(&start), "cudaEventCreate");
        check(cudaEventCreate(&end), "cudaEventCreate");
    }
    ~Events() {
        cudaEventDestroy(start);
        cudaEventDestroy(end);
    }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    // Seconds that the device takes for what `work` starts.
    template <class Work>
    double seconds(Work work) {
        check(cudaEventRecord(start, device().stream), "cudaEventRecord");
        work();
        check(cudaEventRecord(end, device().stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), "a timed kernel");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
        return ms * 1e-3;
    }
};

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

inline Limits measure_limits([[maybe_unused]] Random& random) {
    Limits limits;
    limits.bytes_per_s = copy_bandwidth();
#ifdef HAVE_CUBLAS
    // Random numbers, as products of zeros are faster.
    constexpr size_t n = 8192, pool = size_t(1) << 20;
    std::vector<half> values(pool);
    for (half& v : values) v = __float2half(uniform(random, -1, 1));
    DeviceBuffer<half> a(n * n), b(n * n);
    DeviceBuffer<float> c(n * n);
    for (size_t i = 0; i < n * n; i += pool) a.upload(values.data(), pool, i);
    std::shuffle(values.begin(), values.end(), random);
    for (size_t i = 0; i < n * n; i += pool) b.upload(values.data(), pool, i);
    Events events;
    std::vector<double> seconds;
    for (int i = 0; i < 40; i++) {
        const double s = events.seconds([&] { run_cublas(a.get(), n, b.get(), n, n, c.get(), false); });
        if (i >= 10) seconds.push_back(s);
    }
    limits.flops = 2.0 * n * n * n / median(seconds);
#endif
    return limits;
}

struct Patience {
    double batch = 2e-3;  // seconds of launches between two events; launching a graph takes some 1e-5
    int n_batches = 15;
    double slow = 20e-3;  // seconds of a launch from which on it is not worth more than one look
    double all = 0.15;    // seconds of all batches
};

// Seconds of one run, the median over batches. run(i) uses copy i of the weights. A batch is a graph, as a
// token's decoding is in runq_awq: launching one by one takes longer than the short kernels do.
inline double time_runs(Events& events, const std::function<void(size_t)>& run, size_t n_copies,
                        const Patience& patience) {
    run(0);
    const double once = events.seconds([&] { run(1); });
    if (once > patience.slow) return once;
    const double wanted = std::max(1.0, patience.batch / once);
    // A batch goes through all copies if that does not take too long, so that none is in the cache when it
    // comes again.
    const auto rounds = size_t(std::ceil(wanted / double(n_copies)));
    const size_t n = once * double(n_copies) > patience.slow ? size_t(std::ceil(patience.slow / once))
                                                             : std::min<size_t>(rounds * n_copies, 2048);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t batch = nullptr;
    check(cudaStreamBeginCapture(device().stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (size_t i = 0; i < n; i++) run(i);
    check(cudaStreamEndCapture(device().stream, &graph), "capture");
    check(cudaGraphInstantiate(&batch, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    const int affordable = int(patience.all / (once * double(n)));
    const int n_batches = std::clamp(affordable, 3, patience.n_batches);
    std::vector<double> seconds;
    for (int i = 0; i < n_batches + 1; i++) {  // the first one warms up
        const double s = events.seconds([&] { check(cudaGraphLaunch(batch, device().stream), "a batch"); });
        if (i >= 1) seconds.push_back(s / double(n));
    }
    check(cudaGraphExecDestroy(batch), "cudaGraphExecDestroy");
    return median(seconds);
}

// ----------------------------------------------------------------------------
// The tables

const std::vector<Problem> problems = {
    {"Qwen3-8B", "q and o", 4096, {4096}},
    {"Qwen3-8B", "k and v", 4096, {1024}},
    {"Qwen3-8B", "gate and up", 4096, {12288}},
    {"Qwen3-8B", "down", 12288, {4096}},
    {"Qwen3-8B", "q, k, v in one launch", 4096, {4096, 1024, 1024}},
    {"Qwen3-8B", "gate, up in one launch", 4096, {12288, 12288}},
    {"Llama-3.2-1B", "q and o", 2048, {2048}},
    {"Llama-3.2-1B", "k and v", 2048, {512}},
    {"Llama-3.2-1B", "gate and up", 2048, {8192}},
    {"Llama-3.2-1B", "down", 8192, {2048}},
    {"Llama-3.2-1B", "q, k, v in one launch", 2048, {2048, 512, 512}},
    {"Llama-3.2-1B", "gate, up in one launch", 2048, {8192, 8192}},
};
constexpr int max_tokens = 2048;
constexpr size_t cold_bytes = size_t(256) << 20;  // several times the second-level cache of any GPU so far
constexpr int n_samples = 1024;

struct Measurement {
    const Problem* problem;
    int n_tokens;
    std::string kernel;
    double error, seconds, gb_per_s, tflops;  // seconds 0: wrong, and not timed
};

// Bytes that have to move: the weights in the form that the rung reads, x once and the results once.
inline double bytes_moved(const Rung& rung, const Ladder& l, int n_tokens) {
    double bytes = double(n_tokens) * l.n_in * sizeof(half);
    for (const HostMatrix& m : l.host) {
        bytes +=
            rung.reads == WeightsRead::fp16 ? double(m.n_in) * m.n_out * sizeof(half) : double(m.bytes());
        bytes += double(n_tokens) * m.n_out * (rung.result == Result::fp16 ? sizeof(half) : sizeof(float));
    }
    return bytes;
}

struct Arguments {
    bool quick = false, tune = false;
    std::string json;
    uint64_t seed = std::random_device{}();
};

class LadderRun {
  public:
    explicit LadderRun(const Arguments& arguments) : arguments_(arguments), random_(arguments.seed) {
        if (arguments.quick) patience_ = {.batch = 1e-3, .n_batches = 5};
#ifdef HAVE_CUBLAS
        // Memory of its own, so that cuBLAS does not take any while a batch is recorded.
        workspace_ = DeviceBuffer<std::byte>(size_t(32) << 20);
        if (cublasSetWorkspace(device().cublas, workspace_.get(), workspace_.size()) != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error("cublasSetWorkspace failed");
#endif
        limits_ = measure_limits(random_);
    }

    // Returns the exit code.
    int run() {
        const double start = seconds_now();
        save();  // the limits, whatever comes later
        std::printf("%s, seed %llu\n\n", device().name.c_str(),
                    static_cast<unsigned long long>(arguments_.seed));
        std::printf(
            "Limits: a copy moves %.0f GB/s, cuBLAS multiplies 8192 x 8192 x 8192 in fp16 at %.0f "
            "TFLOP/s.\n\n",
            limits_.bytes_per_s / 1e9, limits_.flops / 1e12);
        std::printf("Microseconds, in parentheses GB/s and TFLOP/s in %% of these limits.\n");
        std::vector<int> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048};
        if (arguments_.quick) tokens = {1, 16, 512};
        for (const Problem& problem : problems) {
            Ladder l = make_ladder(problem, 128, max_tokens, cold_bytes, true, random_);
            for (const int n : tokens) measure_all(problem, l, n);
            print_table(problem, tokens);
            if (!arguments_.quick) find_crossover(problem, l);
            if (arguments_.tune) tune(problem, l, tokens);
            std::fflush(stdout);
            save();
        }
        print_crossovers();
        print_token("Qwen3-8B", 36);
        print_token("Llama-3.2-1B", 16);
        print_errors();
        std::printf("\nTook %.0f s.\n", seconds_now() - start);
        return n_wrong_ > 0 ? 1 : 0;
    }

  private:
    struct Crossover {
        const Problem* problem;
        int from;  // 0: never
    };

    double time(const Rung& rung, Ladder& l, int n_tokens) {
        const size_t n = rung.reads == WeightsRead::fp16 ? l.fp16.size() : l.copies.size();
        auto run = [&](size_t i) { rung.run(l, l.products(i, n_tokens), n_tokens); };
        return time_runs(events_, run, n, patience_);
    }

    void measure_all(const Problem& problem, Ladder& l, int n_tokens) {
        const std::vector<Sample> samples = sample_outputs(l, n_tokens, n_samples, random_);
        for (const Rung& rung : rungs_) {
            if (can_run(rung, l, n_tokens)) measure(problem, rung, l, n_tokens, samples);
        }
    }

    const Measurement& measure(const Problem& problem, const Rung& rung, Ladder& l, int n_tokens,
                               const std::vector<Sample>& samples) {
        Measurement m{&problem, n_tokens, rung.name, relative_error_of(rung, l, n_tokens, samples), 0, 0, 0};
        if (m.error < tolerance(rung)) {
            m.seconds = time(rung, l, n_tokens);
            m.gb_per_s = bytes_moved(rung, l, n_tokens) / m.seconds / 1e9;
            m.tflops = 2 * problem.weights() * n_tokens / m.seconds / 1e12;
        } else {
            n_wrong_++;
            std::printf("\nWRONG: %s, %s %s, %d tokens: relative error %.3g, at most %.0e allowed\n",
                        rung.name.c_str(), problem.model, problem.name, n_tokens, m.error, tolerance(rung));
        }
        all_.push_back(m);
        return all_.back();
    }

    const Measurement* find(const Problem& problem, int n_tokens, const std::string& kernel) const {
        for (const Measurement& m : all_) {
            if (m.problem == &problem && m.n_tokens == n_tokens && m.kernel == kernel) return &m;
        }
        return nullptr;
    }

    void print_table(const Problem& problem, const std::vector<int>& tokens) const {
        std::string n_outs;
        for (const int n : problem.n_outs) n_outs += (n_outs.empty() ? "" : " + ") + std::to_string(n);
        std::printf("\n### %s, %s: %d x %s\n\n| tokens |", problem.model, problem.name, problem.n_in,
                    n_outs.c_str());
        for (const Rung& rung : rungs_) std::printf(" %s |", rung.name.c_str());
        std::printf("\n|---:|");
        for (size_t i = 0; i < rungs_.size(); i++) std::printf("---:|");
        for (const int n : tokens) {
            std::printf("\n| %d |", n);
            for (const Rung& rung : rungs_) {
                const Measurement* m = find(problem, n, rung.name);
                if (m == nullptr) {
                    std::printf(" |");
                } else if (m->seconds == 0) {
                    std::printf(" wrong |");
                } else {
                    std::printf(" %.*f (%.0f, %.0f) |", m->seconds < 1e-4 ? 2 : 0, m->seconds * 1e6,
                                m->gb_per_s * 1e11 / limits_.bytes_per_s,
                                limits_.flops > 0 ? m->tflops * 1e14 / limits_.flops : 0);
                }
            }
        }
        std::printf("\n");
    }

    // From how many tokens on dequantizing for cuBLAS is faster than the widest tile: dequantize_from in
    // runq_awq.cu.
    void find_crossover(const Problem& problem, Ladder& l) {
        const Rung* fused = rung_named("awq_gemm<64>");
        const Rung* expand = rung_named("dequantize + cuBLAS");
        if (fused == nullptr || expand == nullptr) return;
        int from = 0;
        for (const int n : {64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048}) {
            double seconds[2];
            for (int i = 0; i < 2; i++) {
                const Rung& rung = i == 0 ? *fused : *expand;
                const Measurement* m = find(problem, n, rung.name);
                seconds[i] = m != nullptr ? m->seconds : time(rung, l, n);
            }
            if (seconds[0] == 0 || seconds[1] == 0) return;  // wrong ones have no time
            if (seconds[1] >= seconds[0]) {
                from = 0;
            } else if (from == 0) {
                from = n;
            }
        }
        crossovers_.push_back({&problem, from});
    }

    void print_crossovers() const {
        if (crossovers_.empty()) return;
        std::printf(
            "\n### Where dequantize + cuBLAS becomes faster than awq_gemm<64>\n\n| matrices | from tokens |\n"
            "|---|---:|\n");
        for (const Crossover& c : crossovers_) {
            const std::string from = c.from > 0 ? std::to_string(c.from) : "never";
            std::printf("| %s, %s | %s |\n", c.problem->model, c.problem->name, from.c_str());
        }
        std::printf("\nrunq_awq has dequantize_from = %d.\n", dequantize_from);
    }

    // All tiles and splits, and the fastest of them beside runq_awq's choice. Not checked again: only the
    // grid differs.
    void tune(const Problem& problem, Ladder& l, const std::vector<int>& tokens) {
        std::printf("\n| tokens | runq_awq us | fastest us | how |\n|---:|---:|---:|---|\n");
        for (const int n : tokens) {
            double best = INFINITY;
            std::string how;
            auto attempt = [&](const std::string& name, auto run, size_t n_tiles, size_t tile_values,
                               int most) {
                for (const int n_splits : {1, 2, 3, 4, 6, 8, 12, 16}) {
                    if (n_splits > std::min(most, max_splits)) break;
                    if (n_splits > 1 &&
                        (n_tiles > size_t(max_tiles) || n_splits * n_tiles * tile_values > max_partials))
                        break;
                    const std::string kernel = name + ", " + std::to_string(n_splits) + " splits";
                    const double s = time_runs(
                        events_, [&](size_t i) { run(l.products(i, n), n_splits); }, l.copies.size(),
                        tuning_);
                    tuned_.push_back({&problem, n, kernel, 0, s, 0, 0});
                    if (s < best) best = s, how = kernel;
                }
            };
            const Products p = l.products(0, n);
            const int most_gemm = std::max(1, problem.n_in / gemm_inputs / 2);
            auto attempt_gemm = [&]<int tile>() {
                if (n > 16 * tile) return;  // hopeless
                const size_t n_tiles = size_t(count_tiles(p, gemm_columns)) * ((n + tile - 1) / tile);
                attempt(
                    "awq_gemm<" + std::to_string(tile) + ">",
                    [&](const Products& q, int splits) { run_gemm_split<tile>(l, q, n, splits); }, n_tiles,
                    size_t(tile) * gemm_columns, most_gemm);
            };
            auto attempt_gemv = [&]<int words>() {
                const int most = (problem.n_in / p.of[0].w.group_size + gemv_warps - 1) / gemv_warps;
                attempt(
                    "awq_gemv<" + std::to_string(words) + ">",
                    [&](const Products& q, int splits) { run_gemv_split<words>(l, q, splits); },
                    size_t(count_tiles(p, 64 * words)), size_t(64) * words, most);
            };
            if (n == 1) {
                attempt_gemv.template operator()<1>();
                attempt_gemv.template operator()<2>();
                attempt_gemv.template operator()<4>();
            } else {
                attempt_gemm.template operator()<16>();
                attempt_gemm.template operator()<32>();
                attempt_gemm.template operator()<64>();
            }
            const Measurement* chosen = find(problem, n, "runq_awq");
            std::printf("| %d | %.2f | %.2f | %s |\n", n, chosen != nullptr ? chosen->seconds * 1e6 : 0,
                        best * 1e6, how.c_str());
        }
    }

    // The matrices of one token, in the launches that runq_awq makes.
    void print_token(const char* model, int n_layers) const {
        for (const char* kernel : {"runq_awq", "fp16 cuBLAS"}) {
            double seconds = 0, bytes = 0;
            for (const Problem& p : problems) {
                const std::string name = p.name;
                if (std::string(p.model) != model ||
                    (name != "q and o" && name != "down" && p.n_outs.size() == 1))
                    continue;
                const Measurement* m = find(p, 1, kernel);
                if (m == nullptr || m->seconds == 0) return;
                seconds += m->seconds, bytes += m->gb_per_s * 1e9 * m->seconds;
            }
            std::printf(
                "\n%s, one token, %s: the matrices of %d layers in %.0f us, %.0f GB/s, %.0f%% of the copy.\n",
                model, kernel, n_layers, n_layers * seconds * 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / limits_.bytes_per_s);
        }
    }

    void print_errors() const {
        std::printf("\n### Largest relative errors\n\n| kernel | error | allowed |\n|---|---:|---:|\n");
        for (const Rung& rung : rungs_) {
            double largest = 0;
            for (const Measurement& m : all_) {
                if (m.kernel == rung.name) largest = std::max(largest, m.error);
            }
            std::printf("| %s | %.2g | %.0e |\n", rung.name.c_str(), largest, tolerance(rung));
        }
        std::printf("\n%zu measured, %d wrong.\n", all_.size(), n_wrong_);
    }

    // What there is so far, in the file that --json names.
    void save() const {
        if (arguments_.json.empty()) return;
        std::FILE* f = std::fopen(arguments_.json.c_str(), "w");
        if (f == nullptr)
            throw std::runtime_error(arguments_.json + ": cannot write: " + std::strerror(errno));
        std::fprintf(
            f, "{\"device\": \"%s\", \"seed\": %llu, \"copy_gb_per_s\": %.1f, \"cublas_tflops\": %.1f,\n",
            device().name.c_str(), static_cast<unsigned long long>(arguments_.seed),
            limits_.bytes_per_s / 1e9, limits_.flops / 1e12);
        auto list = [&](const char* key, const std::vector<Measurement>& items) {
            std::fprintf(f, " \"%s\": [", key);
            for (const Measurement& m : items) {
                std::string n_outs;
                for (const int n : m.problem->n_outs)
                    n_outs += (n_outs.empty() ? "" : ", ") + std::to_string(n);
                std::fprintf(
                    f,
                    "%s\n  {\"model\": \"%s\", \"matrices\": \"%s\", \"n_in\": %d, \"n_out\": [%s], "
                    "\"tokens\": %d, \"kernel\": \"%s\", \"error\": %.3g, \"us\": %.3f, \"gb_per_s\": %.1f, "
                    "\"tflops\": %.2f}",
                    &m == items.data() ? "" : ",", m.problem->model, m.problem->name, m.problem->n_in,
                    n_outs.c_str(), m.n_tokens, m.kernel.c_str(), std::isfinite(m.error) ? m.error : -1.0,
                    m.seconds * 1e6, m.gb_per_s, m.tflops);
            }
            std::fprintf(f, "],\n");
        };
        list("measured", all_);
        list("tuned", tuned_);
        std::fprintf(f, " \"dequantize_wins_from\": [");
        for (const Crossover& c : crossovers_) {
            std::fprintf(f, "%s{\"model\": \"%s\", \"matrices\": \"%s\", \"tokens\": %d}",
                         &c == crossovers_.data() ? "" : ", ", c.problem->model, c.problem->name, c.from);
        }
        std::fprintf(f, "]}\n");
        if (std::fclose(f) != 0) throw std::runtime_error(arguments_.json + ": cannot write");
    }

    const Rung* rung_named(const std::string& name) const {
        for (const Rung& rung : rungs_) {
            if (rung.name == name) return &rung;
        }
        return nullptr;
    }

    Arguments arguments_;
    Random random_;
    DeviceBuffer<std::byte> workspace_;
    Limits limits_;
    Events events_;
    Patience patience_, tuning_{.batch = 1e-3, .n_batches = 5};
    std::vector<Rung> rungs_ = all_rungs();
    std::vector<Measurement> all_, tuned_;
    std::vector<Crossover> crossovers_;
    int n_wrong_ = 0;
};

#endif

// ----------------------------------------------------------------------------

#ifdef AWQ_KERNELS_MAIN
int main(int argc, char** argv) {
    try {
#ifdef __CUDACC__
        Arguments arguments;
        for (int i = 1; i < argc; i++) {
            const std::string name = argv[i];
            const bool takes_value = name == "--json" || name == "--seed";
            if (takes_value && i + 1 == argc) throw UsageError(name + ": needs a value");
            if (name == "--quick") {
                arguments.quick = true;
            } else if (name == "--tune") {
                arguments.tune = true;
            } else if (name == "--json") {
                arguments.json = argv[++i];
            } else if (name == "--seed") {
                arguments.seed = parse_number<uint64_t>(name, argv[++i], 0, UINT64_MAX);
            } else {
                throw UsageError("unknown option '" + name + "'");
            }
        }
        device();  // or one line that says why there is none
        return LadderRun(arguments).run();
#else
        if (argc > 1)
            throw UsageError(std::string("unknown option '") + argv[1] + "': this build only checks");
        Random random(std::random_device{}());
        int n_wrong = 0;
        for (const Problem& problem :
             {Problem{"", "one", 256, {384}}, Problem{"", "three", 256, {256, 128, 128}}}) {
            Ladder l = make_ladder(problem, 128, 40, 0, false, random);
            for (const int n : {1, 16, 40}) {
                const std::vector<Sample> samples = sample_outputs(l, n, 256, random);
                for (const Rung& rung : all_rungs()) {
                    if (!can_run(rung, l, n)) continue;
                    const double error = relative_error_of(rung, l, n, samples);
                    const bool right = error < tolerance(rung);
                    std::printf("%-20s %-6s %3d tokens: relative error %.2g%s\n", rung.name.c_str(),
                                problem.name, n, error, right ? "" : "  WRONG");
                    n_wrong += right ? 0 : 1;
                }
            }
        }
        return n_wrong > 0 ? 1 : 0;
#endif
    } catch (const UsageError& e) {
        std::fprintf(stderr, "awq_kernels: %s\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "awq_kernels: %s\n", e.what());
        return 1;
    }
}
#endif
