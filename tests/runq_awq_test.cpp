// runq_awq.cu itself, over the engine (ENGINE) or alone: its plain loop and its kernels, and over the engine
// those of engine/gpu/, against the golden vectors, each other and sums in double, and then whole layers and
// models. On the CPU the kernels run in the emulator (simt/).
// Built a second time with the emulator's checks of every memory access (-DCHECKED_BUILD), where whole models
// would take too long. nvcc compiles the same file for a GPU.
#define RUNQ_NO_MAIN
#include "../runq_awq.cu"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <random>

#ifdef ENGINE
#include "engine/app/sampler.h"
#endif
#include "golden.h"
#include "rope_cases.h"

namespace {

const char* const models[] = {"tiny-llama.awq", "tiny-qwen3.awq", "tiny-llama.awq-g64", "tiny-qwen3.awq-g64"};

// Whether a model takes part in what would take long for all: each architecture and each group size once.
[[maybe_unused]] bool in_part(const std::string& name) {
    return full_sweeps() || name == models[0] || name == models[3];
}

template <class T>
DeviceBuffer<T> on_device(const std::vector<T>& values) {
    DeviceBuffer<T> buffer(values.size());
    buffer.upload(values.data(), values.size());
    return buffer;
}

template <class T>
std::vector<T> from_device(const DeviceBuffer<T>& buffer) {
    std::vector<T> values(buffer.size());
    download(values.data(), buffer.get(), values.size());
    return values;
}

std::vector<half> halves(const std::vector<float>& values) {
    std::vector<half> h;
    for (const float x : values) h.push_back(__float2half(x));
    return h;
}

std::vector<float> floats(const std::vector<half>& values) {
    std::vector<float> f;
    for (const half x : values) f.push_back(__half2float(x));
    return f;
}

// A quantized matrix that lives on the device.
struct DeviceMatrix {
    DeviceBuffer<uint32_t> qweight, qzeros;
    DeviceBuffer<half> scales;
    AwqMatrix matrix;
};

DeviceMatrix matrix_on_device(const std::vector<uint32_t>& qweight, const std::vector<uint32_t>& qzeros,
                              const std::vector<half>& scales, int n_in, int n_out, int group_size) {
    DeviceMatrix m{on_device(qweight), on_device(qzeros), on_device(scales), {}};
    m.matrix.qweight = m.qweight.get(), m.matrix.qzeros = m.qzeros.get(), m.matrix.scales = m.scales.get();
    m.matrix.n_in = n_in, m.matrix.n_out = n_out, m.matrix.group_size = group_size;
    return m;
}

std::vector<uint32_t> words_of(const Tensor& t) {
    const std::vector<int32_t> v = t.i32();
    return {v.begin(), v.end()};
}

DeviceMatrix golden_matrix(const std::string& p, int group_size) {
    const Tensor &qweight = golden_ops().at(p + "qweight"), &scales = golden_ops().at(p + "scales");
    return matrix_on_device(words_of(qweight), words_of(golden_ops().at(p + "qzeros")), halves(scales.f32()),
                            qweight.shape[0], scales.shape[1], group_size);
}

DeviceMatrix random_matrix(std::mt19937& rng, int n_in, int n_out, int group_size) {
    std::vector<uint32_t> qweight(size_t(n_in) * n_out / 8), qzeros(size_t(n_in) / group_size * n_out / 8);
    for (uint32_t& w : qweight) w = rng();
    for (uint32_t& w : qzeros) w = rng();
    std::vector<float> scales(size_t(n_in) / group_size * n_out);
    for (float& s : scales) s = std::uniform_real_distribution<float>(0.002f, 0.03f)(rng);
    return matrix_on_device(qweight, qzeros, halves(scales), n_in, n_out, group_size);
}

// Whether every arrival counter is 0, as it has to be between launches.
bool all_zero(const DeviceBuffer<unsigned>& arrivals) {
    const std::vector<unsigned> counts = from_device(arrivals);
    return std::all_of(counts.begin(), counts.end(), [](unsigned n) { return n == 0; });
}

// Rows on the device that hold the values, with n_cols columns.
template <class T>
DeviceRows<T> rows_on_device(const std::vector<T>& values, int n_cols) {
    DeviceRows<T> rows(values.size() / size_t(n_cols), n_cols);
    rows.n_rows = int(values.size()) / n_cols;
    rows.values.upload(values.data(), values.size());
    return rows;
}

// The product by each kernel that can do it. run(name, launch) is called for every one; the launch fills
// products.
template <class Run>
void for_each_kernel(const half* x, int n_tokens, const AwqProducts& products, const SplitScratch& scratch,
                     const Run& run) {
    run("reference", [&] { run_reference(x, n_tokens, products); });
    bool wide = true;
    for (int i = 0; i < products.n; i++) wide = wide && products.items[i].w.n_out % 32 == 0;
    for (const int n_splits : {1, 2, 3}) {
        const std::string in_splits = ", " + std::to_string(n_splits) + " splits";
        if (n_tokens == 1) {
            run("gemv<1, 8>" + in_splits, [&] { run_gemv<1, 8>(scratch, x, products, n_splits); });
            if (!wide) continue;
            run("gemv<4, 4>" + in_splits, [&] { run_gemv<4, 4>(scratch, x, products, n_splits); });
            run("gemv<4, 8>" + in_splits, [&] { run_gemv<4, 8>(scratch, x, products, n_splits); });
        }
    }
    for (const int n_blocks : {1, 2, 5}) {  // which cut no tile, or tiles where they come to an end
        const std::string by_blocks = ", " + std::to_string(n_blocks) + " blocks";
        run("gemm<16>" + by_blocks, [&] { run_gemm<16>(scratch, x, n_tokens, products, n_blocks); });
        run("gemm<32>" + by_blocks, [&] { run_gemm<32>(scratch, x, n_tokens, products, n_blocks); });
        run("gemm<64>" + by_blocks, [&] { run_gemm<64>(scratch, x, n_tokens, products, n_blocks); });
    }
}

}  // namespace

// ----------------------------------------------------------------------------
// Kernels

#ifdef ENGINE
TEST_CASE("kernel: dequantize is exact to the bit, for every code, zero point and kind of scale") {
    const DeviceMatrix m = golden_matrix("awq_dequantize.", 64);
    DeviceBuffer<half> out(size_t(m.matrix.n_in) * m.matrix.n_out);
    run_dequantize(m.matrix, out.get());
    const std::vector<half> found = from_device(out);
    const std::vector<uint16_t> expected = golden_ops().at("awq_dequantize.w16").f16_bits();
    REQUIRE(found.size() == expected.size());
    CHECK(std::memcmp(found.data(), expected.data(), 2 * found.size()) == 0);
}
#endif

TEST_CASE("kernel: every product of the golden vectors, by every kernel") {
    struct Case {
        int n_tokens, n_out, n_in, group_size;
    };
    const SplitMemory state;
    for (const Case& k :
         {Case{1, 8, 128, 128}, Case{1, 136, 256, 64}, Case{2, 24, 256, 128}, Case{15, 64, 128, 64},
          Case{16, 72, 128, 128}, Case{17, 136, 256, 64}, Case{64, 64, 64, 64}, Case{100, 104, 256, 128}}) {
        const std::string p = "awq_matmul." + std::to_string(k.n_tokens) + "x" + std::to_string(k.n_out) +
                              "x" + std::to_string(k.n_in) + "g" + std::to_string(k.group_size) + ".";
        const DeviceMatrix m = golden_matrix(p, k.group_size);
        REQUIRE(m.matrix.n_in == k.n_in);
        REQUIRE(m.matrix.n_out == k.n_out);
        const DeviceBuffer<half> x = on_device(halves(golden_ops().at(p + "x").f32()));
        const std::vector<float> expected = golden_ops().at(p + "out").f32();
        DeviceBuffer<float> out(expected.size());
        for_each_kernel(x.get(), k.n_tokens, {{{m.matrix, out.get()}}, 1}, state.scratch(),
                        [&](const std::string& kernel, const auto& start) {
                            CAPTURE(p);
                            CAPTURE(kernel);
                            out.upload(std::vector<float>(expected.size(), NAN).data(), expected.size());
                            start();
                            CHECK(relative_error(expected, from_device(out)) < 1e-5);
                        });
    }
    CHECK(all_zero(state.arrivals));
}

TEST_CASE("kernel: several matrices in one launch, several tiles of columns, and adding to what is there") {
    std::mt19937 rng(1);
    const SplitMemory state;
    for (const int n_tokens : {1, 5, 33}) {
        const int n_in = 576;  // so that awq_gemm cuts tiles
        const DeviceMatrix a = random_matrix(rng, n_in, 264, 64), b = random_matrix(rng, n_in, 8, 64),
                           c = random_matrix(rng, n_in, 320, 64);
        const DeviceBuffer<half> x = on_device(halves(random_values(rng, size_t(n_tokens) * n_in)));
        const std::vector<float> before = random_values(rng, size_t(n_tokens) * 320);
        DeviceBuffer<float> out_a(size_t(n_tokens) * 264), out_b(size_t(n_tokens) * 8), out_c(before.size());
        const AwqProducts products{
            {{a.matrix, out_a.get()}, {b.matrix, out_b.get()}, {c.matrix, out_c.get(), true}}, 3};
        std::vector<float> expected[3];
        for_each_kernel(x.get(), n_tokens, products, state.scratch(),
                        [&](const std::string& kernel, const auto& start) {
                            CAPTURE(n_tokens);
                            CAPTURE(kernel);
                            out_c.upload(before.data(), before.size());
                            start();
                            if (kernel == "reference") {
                                expected[0] = from_device(out_a), expected[1] = from_device(out_b),
                                expected[2] = from_device(out_c);
                                return;
                            }
                            CHECK(relative_error(expected[0], from_device(out_a)) < 1e-5);
                            CHECK(relative_error(expected[1], from_device(out_b)) < 1e-5);
                            CHECK(relative_error(expected[2], from_device(out_c)) < 1e-5);
                        });
        // With rows at multiples of 16 bytes, copies and loads are wide.
        const AwqProducts aligned{{{c.matrix, out_c.get(), true}}, 1};
        for_each_kernel(x.get(), n_tokens, aligned, state.scratch(),
                        [&](const std::string& kernel, const auto& start) {
                            CAPTURE(n_tokens);
                            CAPTURE(kernel);
                            out_c.upload(before.data(), before.size());
                            start();
                            CHECK(relative_error(expected[2], from_device(out_c)) < 1e-5);
                        });
    }
    CHECK(all_zero(state.arrivals));
}

#ifdef ENGINE
TEST_CASE("kernel: the reference is the product with the dequantized matrix, in double") {
    std::mt19937 rng(2);
    const int n_in = 256, n_out = 40, n_tokens = 3;
    const DeviceMatrix m = random_matrix(rng, n_in, n_out, 128);
    const std::vector<half> x = halves(random_values(rng, size_t(n_tokens) * n_in));
    DeviceBuffer<half> w(size_t(n_in) * n_out);
    run_dequantize(m.matrix, w.get());
    const std::vector<half> weights = from_device(w);
    std::vector<float> expected;
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n_out; i++) {
            double sum = 0;
            for (int k = 0; k < n_in; k++)
                sum += double(__half2float(x[t * n_in + k])) * __half2float(weights[k * n_out + i]);
            expected.push_back(float(sum));
        }
    }
    const DeviceBuffer<half> inputs = on_device(x);
    DeviceBuffer<float> out(expected.size());
    run_reference(inputs.get(), n_tokens, {{{m.matrix, out.get()}}, 1});
    CHECK(relative_error(expected, from_device(out)) < 1e-6);
}
#endif

TEST_CASE("kernel: rmsnorm") {
    const std::vector<float> x = golden_ops().at("rmsnorm.128eps1e-05.x").f32(),
                             weight = golden_ops().at("rmsnorm.128eps1e-05.weight").f32();
    const DeviceRows<float> in = rows_on_device(x, 128);
    const DeviceBuffer<half> norm = on_device(halves(weight));
    std::vector<float> rounded = floats(halves(weight)), expected;
    for (int t = 0; t < 3; t++) {
        double sum = 0;
        for (int i = 0; i < 128; i++) sum += double(x[t * 128 + i]) * x[t * 128 + i];
        for (int i = 0; i < 128; i++)
            expected.push_back(float(rounded[i] * x[t * 128 + i] / std::sqrt(sum / 128 + 1e-5)));
    }
    DeviceRows<half> out(3, 128);
    rmsnorm(out, in, norm.get(), 1e-5f);
    CHECK(out.n_rows == 3);
    CHECK(relative_error(expected, floats(from_device(out.values))) < 5e-4);
    rmsnorm(out, in.slice(2, 1), norm.get(), 1e-5f);  // into row 0
    CHECK(out.n_rows == 1);
    const std::vector<float> rows = floats(from_device(out.values));
    CHECK(relative_error(std::span(expected).last(128), std::span(rows).first(128)) < 5e-4);
    // Blocks with idle threads, and rows with more values than the registers of a block hold.
    std::mt19937 rng(6);
    for (const int dim : {64, 192, 2048, 4096, 4160, 16384, 16448, 40000}) {
        CAPTURE(dim);
        const std::vector<float> values = random_values(rng, 2 * size_t(dim));
        const std::vector<half> scales = halves(random_values(rng, dim));
        std::vector<float> wanted;
        for (int t = 0; t < 2; t++) {
            double sum = 0;
            for (int i = 0; i < dim; i++) sum += double(values[t * dim + i]) * values[t * dim + i];
            for (int i = 0; i < dim; i++)
                wanted.push_back(
                    float(__half2float(scales[i]) * values[t * dim + i] / std::sqrt(sum / dim + 1e-5)));
        }
        DeviceRows<half> found(2, dim);
        rmsnorm(found, rows_on_device(values, dim), on_device(scales).get(), 1e-5f);
        CHECK(relative_error(wanted, floats(from_device(found.values))) < 5e-4);
    }
}

TEST_CASE("kernel: rotation in halves, norms of heads, and the cache") {
    for (const char* name : {"plain", "tiny"}) {
        const std::string p = std::string("rope_halves.") + name + ".";
        CAPTURE(p);
        const Tensor& x = golden_ops().at(p + "x");
        const std::vector<int32_t> positions = golden_ops().at(p + "positions").i32();
        const std::vector<float> cos = golden_ops().at(p + "cos").f32(),
                                 sin = golden_ops().at(p + "sin").f32();
        const int n_heads = 2, head_dim = x.shape[2], half_dim = head_dim / 2;
        for (const bool normalized : {false, true}) {
            for (size_t t = 0; t < positions.size(); t++) {
                // One token at a time, at position 1 of a context of 2, whose angles are the wanted ones.
                std::vector<float2> rotations(2 * half_dim, make_float2(NAN, NAN));
                for (int i = 0; i < half_dim; i++)
                    rotations[half_dim + i] = make_float2(cos[t * half_dim + i], sin[t * half_dim + i]);
                const std::vector<float> all = x.f32();
                std::vector<float> heads(all.begin() + t * n_heads * head_dim,
                                         all.begin() + (t + 1) * n_heads * head_dim);
                const std::vector<float> all_out = golden_ops().at(p + "out").f32();
                std::vector<float> expected(all_out.begin() + t * n_heads * head_dim,
                                            all_out.begin() + (t + 1) * n_heads * head_dim);
                if (normalized) {  // a norm of 1 everywhere only divides by the root of the mean square
                    for (int h = 0; h < n_heads; h++) {
                        double sum = 0;
                        for (int i = 0; i < head_dim; i++)
                            sum += double(heads[h * head_dim + i]) * heads[h * head_dim + i];
                        for (int i = 0; i < head_dim; i++)
                            expected[h * head_dim + i] /= float(std::sqrt(sum / head_dim + 1e-6));
                    }
                }
                const DeviceRows<float> in = rows_on_device(heads, n_heads * head_dim);
                const DeviceBuffer<float2> table = on_device(rotations);
                const DeviceBuffer<half> ones = on_device(halves(std::vector<float>(head_dim, 1)));
                const DeviceBuffer<int> pos = on_device(std::vector<int>{1});
                ModelConfig c;
                c.n_layers = 1, c.n_kv_heads = n_heads, c.head_dim = head_dim;
                DeviceKvCache cache(c, 2);
                cache.all_keys.clear(), cache.all_values.clear();
                DeviceRows<half> q(1, n_heads * head_dim);
                DeviceRows<float> none;
                QkNorms norms;
                if (normalized) norms = {ones.get(), ones.get(), 1e-6f};
                prepare_heads(q, cache, 0, none, none, in, in, in, norms, table, pos.get());
                CHECK(relative_error(expected, floats(from_device(q.values))) < 5e-4);
                const std::vector<float> k = floats(from_device(cache.all_keys)),
                                         v = floats(from_device(cache.all_values));
                for (int head = 0; head < n_heads; head++) {
                    const auto part = [&](const std::vector<float>& from, int at) {
                        return std::span(from).subspan(at, head_dim);
                    };
                    CHECK(relative_error(part(expected, head * head_dim),
                                         part(k, (2 * head + 1) * head_dim)) < 5e-4);
                    CHECK(relative_error(part(heads, head * head_dim), part(v, (2 * head + 1) * head_dim)) <
                          5e-4);
                }
            }
        }
    }
}

TEST_CASE("kernel: heads of every length, of several tokens, with weights of norms") {
    std::mt19937 rng(7);
    const int n_tokens = 3, n_heads = 6, n_kv_heads = 2, first = 2;
    for (const int d : {32, 64, 96, 128}) {
        CAPTURE(d);
        ModelConfig c;
        c.n_layers = 1, c.n_kv_heads = n_kv_heads, c.head_dim = d;
        DeviceKvCache cache(c, first + n_tokens);
        cache.all_keys.clear(), cache.all_values.clear();
        const std::vector<float> q = random_values(rng, n_tokens * n_heads * d),
                                 k = random_values(rng, n_tokens * n_kv_heads * d),
                                 v = random_values(rng, n_tokens * n_kv_heads * d),
                                 angles = random_values(rng, (first + n_tokens) * d / 2, 3);
        const std::vector<half> q_weights = halves(random_values(rng, d)),
                                k_weights = halves(random_values(rng, d));
        std::vector<float2> turns;
        for (const float a : angles) turns.push_back(make_float2(std::cos(a), std::sin(a)));
        const DeviceBuffer<half> q_norm = on_device(q_weights), k_norm = on_device(k_weights);
        const DeviceBuffer<float2> rotations = on_device(turns);
        const DeviceBuffer<int> pos = on_device(std::vector<int>{first});
        DeviceRows<half> q_out(n_tokens, n_heads * d);
        DeviceRows<float> traced_q(n_tokens, n_heads * d), traced_k(n_tokens, n_kv_heads * d);
        prepare_heads(q_out, cache, 0, traced_q, traced_k, rows_on_device(q, n_heads * d),
                      rows_on_device(k, n_kv_heads * d), rows_on_device(v, n_kv_heads * d),
                      {q_norm.get(), k_norm.get(), 1e-6f}, rotations, pos.get());
        const std::vector<float> traces[2] = {from_device(traced_q.values), from_device(traced_k.values)};
        const std::vector<float> out = floats(from_device(q_out.values)),
                                 keys = floats(from_device(cache.all_keys)),
                                 values = floats(from_device(cache.all_values));
        for (int t = 0; t < n_tokens; t++) {
            for (int head = 0; head < n_heads + n_kv_heads; head++) {
                const bool is_q = head < n_heads;
                const int h = is_q ? head : head - n_heads, at = (t * (is_q ? n_heads : n_kv_heads) + h) * d;
                const int cached = (h * (first + n_tokens) + first + t) * d;
                double squares = 0;
                std::vector<float> normed(d), turned(d);
                for (int i = 0; i < d; i++) squares += std::pow(double((is_q ? q : k)[at + i]), 2);
                for (int i = 0; i < d; i++)
                    normed[i] = float(__half2float((is_q ? q_weights : k_weights)[i]) *
                                      (is_q ? q : k)[at + i] / std::sqrt(squares / d + 1e-6));
                for (int i = 0; i < d / 2; i++) {
                    const float2 turn = turns[(first + t) * d / 2 + i];
                    turned[i] = normed[i] * turn.x - normed[i + d / 2] * turn.y;
                    turned[i + d / 2] = normed[i] * turn.y + normed[i + d / 2] * turn.x;
                }
                const auto part = [&](const std::vector<float>& all, int begin) {
                    return std::span(all).subspan(begin, d);
                };
                CHECK(relative_error(normed, part(traces[is_q ? 0 : 1], at)) < 1e-5);
                CHECK(relative_error(turned, part(is_q ? out : keys, is_q ? at : cached)) < 5e-4);
                if (!is_q) CHECK(relative_error(part(v, at), part(values, cached)) < 5e-4);
            }
        }
    }
}

TEST_CASE("kernel: swiglu, embedding, addition") {
    for (const std::string name : {"swiglu", "swiglu.slope"}) {
        const std::vector<float> gate = golden_ops().at(name + ".gate").f32(),
                                 up = golden_ops().at(name + ".up").f32();
        const int n = int(gate.size());
        const DeviceRows<float> g = rows_on_device(gate, n), u = rows_on_device(up, n);
        DeviceRows<half> out(1, n);
        swiglu(out, g, u);
        CHECK(relative_error(golden_ops().at(name + ".out").f32(), floats(from_device(out.values))) < 5e-4);
    }

    const DeviceBuffer<half> table = on_device(halves({1, 2, 3, 4, 5, 6, 7, 8}));
    const DeviceBuffer<int> tokens = on_device(std::vector<int>{3, 0, 3});
    DeviceRows<float> rows(3, 2);
    embed(rows, table.get(), tokens.get(), 3);
    CHECK(from_device(rows.values) == std::vector<float>{7, 8, 1, 2, 7, 8});
    // A table of more than 2^16 rows, whose numbers are those of the golden's codes.
    const GoldenTable large(64);
    const std::vector<int32_t> ids = golden_ops().at("embedding.64.tokens").i32();
    const DeviceBuffer<half> all = on_device(halves({large.codes.begin(), large.codes.end()}));
    const DeviceBuffer<int> large_ids = on_device(std::vector<int>(ids.begin(), ids.end()));
    DeviceRows<float> found(ids.size(), large.n_cols);
    embed(found, all.get(), large_ids.get(), int(ids.size()));
    const std::vector<float> values = from_device(found.values);
    for (size_t i = 0; i < values.size(); i++)
        CHECK(values[i] == large.codes[size_t(ids[i / 64]) * 64 + i % 64]);

    const DeviceRows<float> more = rows_on_device(std::vector<float>{1, 1, 2, 2, 3, 3}, 2);
    add(rows, more);
    CHECK(from_device(rows.values) == std::vector<float>{8, 9, 3, 4, 10, 11});
}

TEST_CASE("kernel: the classifier") {
    std::mt19937 rng(3);
    const int n_rows = 37, n_in = 264, n_tokens = 2;
    const std::vector<half> w = halves(random_values(rng, n_rows * n_in)),
                            x = halves(random_values(rng, n_tokens * n_in));
    std::vector<float> expected;
    for (int t = 0; t < n_tokens; t++) {
        for (int r = 0; r < n_rows; r++) {
            double sum = 0;
            for (int i = 0; i < n_in; i++)
                sum += double(__half2float(w[r * n_in + i])) * __half2float(x[t * n_in + i]);
            expected.push_back(float(sum));
        }
    }
    const DeviceBuffer<half> matrix = on_device(w), inputs = on_device(x);
    DeviceBuffer<float> out(expected.size());
    launch<fp16_gemv>({.grid = dim3((n_rows + 7) / 8, n_tokens), .block = 256, .stream = device().stream},
                      out.get(), inputs.get(), matrix.get(), n_rows, n_in);
    CHECK(relative_error(expected, from_device(out)) < 1e-6);
    DeviceRows<float> rows(n_tokens, n_rows);
    fp16_matmul(rows, rows_on_device(x, n_in), matrix.get());  // the same, or cuBLAS
    CHECK(relative_error(expected, from_device(rows.values)) < 1e-5);
}

#ifdef ENGINE
TEST_CASE("kernel: the largest logit, the first of equals; -1 if one is not finite") {
    std::mt19937 rng(4);
    const BestToken best;
    const int more = 4 * arg_max_threads * arg_max_blocks + 9;  // than the largest grid takes at once
    for (const int n : {1, 2, 3, 4, 31, 1000, 5000, more}) {
        for (int kind = 0; kind < 28; kind += n == more ? 5 : 1) {
            CAPTURE(n);
            CAPTURE(kind);
            const int begin = kind % 4;  // of the row, in floats behind a multiple of 16 bytes
            std::vector<float> all(begin + n, 9), logits = random_values(rng, n);
            const size_t place = kind % 3 == 0 ? 0 : kind % 3 == 1 ? n - 1 : rng() % n;
            if (kind / 4 == 1) {  // ties
                for (float& x : logits) x = std::round(x);
            } else if (kind / 4 > 1) {
                logits[place] = std::array{8.0f, 8.0f, NAN, INFINITY, -INFINITY}[kind / 4 - 2];
            }
            std::copy(logits.begin(), logits.end(), all.begin() + begin);
            const DeviceBuffer<float> in = on_device(all);
            arg_max(best, in.get() + begin, n);
            CHECK(from_device(best.index)[0] == (kind / 4 > 3 ? -1 : argmax(logits)));
            CHECK(all_zero(best.arrivals));
        }
    }
}

TEST_CASE("kernel: attention against sums in double: shapes, positions, keys shared by warps") {
    std::mt19937 rng(5);
    struct Case {
        int n_tokens, pos, n_heads, n_kv_heads, head_dim, n_splits;
    };
    for (const Case& k :
         {Case{9, 0, 6, 2, 32, 1}, Case{37, 3, 4, 1, 64, 1}, Case{5, 40, 3, 3, 96, 1},
          Case{70, 10, 2, 1, 32, 1}, Case{2, 300, 20, 1, 128, 1},
          // Several blocks of 128 rows and stages of 64 keys; warps that have no rows, or skip the last
          // stage.
          Case{100, 60, 4, 2, 64, 1}, Case{130, 200, 3, 1, 96, 1}, Case{33, 500, 8, 1, 128, 1},
          // One token: one block, of which some warps have no keys, up to 128 keys.
          Case{1, 0, 2, 1, 32, 1}, Case{1, 5, 2, 2, 128, 16}, Case{1, 15, 4, 2, 96, 8},
          Case{1, 16, 2, 2, 64, 8}, Case{1, 70, 8, 2, 64, 8}, Case{1, 127, 4, 1, 96, 8},
          Case{1, 300, 4, 2, 128, 1},  // the warps take more than one step
          // More blocks, as many as have four steps of 16 keys each.
          Case{1, 128, 2, 1, 64, 8}, Case{1, 255, 2, 1, 32, 12}, Case{1, 256, 9, 1, 128, 12},
          Case{1, 300, 4, 2, 128, 4}, Case{1, 1022, 2, 1, 96, 32}, Case{1, 1023, 4, 1, 128, 16},
          Case{1, 2111, 4, 1, 32, 33}, Case{1, 2999, 10, 2, 64, 5}, Case{1, 2999, 2, 1, 128, 3},
          // Row tiles of 16 heads, the last one not full.
          Case{1, 33, 20, 1, 32, 4}, Case{1, 200, 16, 1, 64, 4}, Case{1, 1100, 40, 1, 96, 20},
          Case{1, 150, 34, 2, 128, 2}}) {
        CAPTURE(k.n_tokens);
        CAPTURE(k.pos);
        CAPTURE(k.head_dim);
        CAPTURE(k.n_splits);
        const int context = k.pos + k.n_tokens, per_kv = k.n_heads / k.n_kv_heads, d = k.head_dim;
        const std::vector<half> q = halves(random_values(rng, size_t(k.n_tokens) * k.n_heads * d, 2)),
                                keys = halves(random_values(rng, size_t(k.n_kv_heads) * context * d)),
                                values = halves(random_values(rng, size_t(k.n_kv_heads) * context * d));
        const DeviceBuffer<half> q_in = on_device(q), k_in = on_device(keys), v_in = on_device(values);
        const DeviceBuffer<int> pos = on_device(std::vector<int>{k.pos});
        const int n_tiles = (per_kv + 15) / 16, n_rows = n_tiles * k.n_kv_heads * std::min(per_kv, 16);
        DeviceBuffer<half> out(q.size());
        const DeviceBuffer<float> partials = on_device(std::vector<float>(n_rows * k.n_splits * d, NAN));
        const DeviceBuffer<float2> statistics =
            on_device(std::vector<float2>(n_rows * k.n_splits, float2{NAN, NAN}));
        DeviceBuffer<unsigned> arrivals(size_t(n_tiles) * k.n_kv_heads);
        arrivals.clear();
        Attention at{};
        at.q = q_in.get(), at.keys = k_in.get(), at.values = v_in.get(), at.out = out.get(),
        at.pos = pos.get();
        at.n_tokens = k.n_tokens, at.heads_per_kv = per_kv, at.n_kv_heads = k.n_kv_heads,
        at.context = context;
        at.scale = float(1 / std::sqrt(double(d))), at.n_splits = k.n_splits;
        at.partials = partials.get(), at.statistics = statistics.get(), at.arrivals = arrivals.get();
        run_attention(at, d);
        std::vector<float> expected;
        for (int t = 0; t < k.n_tokens; t++) {
            for (int h = 0; h < k.n_heads; h++) {
                const int kv = h / per_kv, n_keys = k.pos + t + 1;
                std::vector<double> probs(n_keys), mix(d);
                double total = 0;
                for (int i = 0; i < n_keys; i++) {
                    double dot = 0;
                    for (int e = 0; e < d; e++)
                        dot += double(__half2float(q[(size_t(t) * k.n_heads + h) * d + e])) *
                               __half2float(keys[(size_t(kv) * context + i) * d + e]);
                    total += probs[i] = std::exp(dot / std::sqrt(double(d)));
                }
                for (int i = 0; i < n_keys; i++) {
                    for (int e = 0; e < d; e++)
                        mix[e] += probs[i] / total * __half2float(values[(size_t(kv) * context + i) * d + e]);
                }
                expected.insert(expected.end(), mix.begin(), mix.end());
            }
        }
        CHECK(relative_error(expected, floats(from_device(out))) < 1e-3);
        CHECK(all_zero(arrivals));
    }
}
#endif

TEST_CASE("kernel: attention of the golden vectors, a prompt at once") {
    for (const std::string p :
         {"attention_half.9x6x2x32.", "attention_half.37x4x1x64.", "attention_half.values.",
          "attention_half.keys.", "attention_half.queries.", "attention_half.at128.", "attention_half.at256.",
          "attention_half.at512.", "attention_half.5x128.", "attention_half.8x96."}) {
        CAPTURE(p);
        const Tensor &q = golden_ops().at(p + "q"), &k = golden_ops().at(p + "k"),
                     &v = golden_ops().at(p + "v");
        const int n = k.shape[0], n_kv_heads = k.shape[1], d = q.shape[2];
        const auto cache = [&](const Tensor& t) {  // (n, heads, d) -> (heads, n, d)
            const std::vector<float> in = t.f32();
            std::vector<float> out;
            for (int h = 0; h < n_kv_heads; h++) {
                for (int i = 0; i < n; i++) {
                    const auto row = in.begin() + (i * n_kv_heads + h) * d;
                    out.insert(out.end(), row, row + d);
                }
            }
            return on_device(halves(out));
        };
        const DeviceBuffer<half> q_in = on_device(halves(q.f32())), keys = cache(k), values = cache(v);
        const DeviceBuffer<int> pos = on_device(std::vector<int>{n - q.shape[0]});
        DeviceBuffer<half> out(q_in.size());
        launch<plain_attention>(
            {.grid = dim3(q.shape[1], q.shape[0]), .block = 32, .stream = device().stream}, out.get(),
            static_cast<const half*>(q_in.get()), static_cast<const half*>(keys.get()),
            static_cast<const half*>(values.get()), static_cast<const int*>(pos.get()),
            q.shape[1] / n_kv_heads, d, n, float(1 / std::sqrt(double(d))));
        CHECK(relative_error(golden_ops().at(p + "out").f32(), floats(from_device(out))) < 1e-3);
#ifdef ENGINE
        Attention at{};
        at.q = q_in.get(), at.keys = keys.get(), at.values = values.get(), at.out = out.get(),
        at.pos = pos.get();
        at.n_tokens = q.shape[0], at.context = n, at.heads_per_kv = q.shape[1] / n_kv_heads;
        at.n_kv_heads = n_kv_heads;
        at.scale = float(1 / std::sqrt(double(d))), at.n_splits = 1;
        run_attention(at, d);
        CHECK(relative_error(golden_ops().at(p + "out").f32(), floats(from_device(out))) < 1e-3);
#endif
    }
}

TEST_CASE("fp16: where a value rounds to, on this side and on the device") {
    const std::vector<float> x = golden_ops().at("half.x").f32();
    const std::vector<uint16_t> expected = golden_ops().at("half.out").f16_bits();
    const std::vector<half> found = halves(x);
    CHECK(std::memcmp(found.data(), expected.data(), 2 * x.size()) == 0);
    // silu(z) = z for a large z, so that swiglu(z, x / z) rounds what is nearly x: only whole numbers stay
    // exact.
    const int n = int(x.size());
    std::vector<float> divided = x;
    for (float& value : divided) value /= 128;  // a power of two: exact, but for subnormals
    DeviceRows<half> out(1, n);
    swiglu(out, rows_on_device(std::vector<float>(x.size(), 128), n), rows_on_device(divided, n));
    const std::vector<half> rounded = from_device(out.values);
    for (size_t i = 0; i < x.size(); i++) {
        CAPTURE(x[i]);
        if (std::fabs(x[i]) < 1e-30f && x[i] != 0) continue;
        uint16_t bits;
        std::memcpy(&bits, &rounded[i], 2);
        CHECK(bits == expected[i]);
    }
}

#ifdef ENGINE
TEST_CASE("weights: the tensors that a header implies, and sizes that do not fit") {
    ModelConfig c;  // Qwen3 8B
    c.arch = Arch::qwen3;
    c.dim = 4096, c.hidden_dim = 12288, c.n_layers = 36, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 128;
    c.vocab_size = 151936, c.group_size = 128;
    const uint64_t weights = 36ull * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288);
    const uint64_t norms = 2ull * ((2 * 36 + 1) * 4096 + 2 * 36 * 128), table = 2ull * 151936 * 4096;
    const auto list = [&] { return Weights{tensors_in(), c}; };
    const auto bytes = [&] { return list().file.weight_bytes(); };
    // A group of 128 weights: 64 bytes of codes, half a byte of zero point, 2 of scale.
    CHECK(bytes() == weights / 128 * 133 / 2 + 2 * table + norms);
    CHECK(list().file.bytes_per_token(c) == weights / 128 * 133 / 2 + table + norms);
    uint64_t of_matrices = 0, n_weights = 0;
    Weights all = list();
    for (const AwqMatrix* m : all.matrices()) of_matrices += m->n_bytes(), n_weights += m->n_weights();
    CHECK(of_matrices == weights / 128 * 133 / 2);
    CHECK(n_weights == weights);
    c.shared_classifier = true;
    CHECK(bytes() == weights / 128 * 133 / 2 + table + norms);
    c.group_size = 64;
    CHECK(bytes() == weights / 64 * 69 / 2 + table + norms);
    check_config(c);

    // Order, names, types and shapes; in the file one tensor follows the other, on the device each begins at
    // a multiple of 256 bytes.
    const std::vector<TensorInfo> tensors = list().file.all();
    CHECK(tensors.size() == 36 * (2 + 7 * 3 + 2) + 2);
    CHECK(tensors.front().name == "layers.0.attn.norm");
    CHECK(tensors[72].name == "norm");
    CHECK(tensors[73].name == "embed");
    CHECK(tensors[73].type == std::string("F16"));
    const TensorInfo& qzeros = tensors[74 + 6 * 36 * 3 + 1];
    CHECK(qzeros.name == "layers.0.ffn.up_proj.qzeros");
    CHECK(qzeros.type == std::string("I32"));
    CHECK(qzeros.shape == std::vector<int>{4096 / 64, 12288 / 8});
    CHECK(tensors.back().name == "layers.35.attn.k_norm");
    CHECK(tensors.back().shape == std::vector<int>{128});
    uint64_t offset = header_size, end = 0;
    for (const TensorInfo& t : tensors) {
        CHECK(t.offset == offset);
        CHECK(t.memory_offset % 256 == 0);
        CHECK(t.memory_offset >= end);
        CHECK(t.memory_offset < end + 256);
        offset += t.n_bytes, end = t.memory_offset + t.n_bytes;
    }

    c.hidden_dim = 12256;
    CHECK_THROWS_WITH(check_config(c), "hidden_dim is 12256, not a multiple of group_size 64");
    c.hidden_dim = 12288, c.group_size = 32;
    CHECK_THROWS_WITH(check_config(c), "group_size is 32, expected a multiple of 64");
    c.group_size = 0;
    CHECK_THROWS_WITH(check_config(c), "group_size is 0, expected a multiple of 64");
    c.group_size = 128, c.head_dim = 80, c.n_heads = 128, c.n_kv_heads = 8;
    CHECK_THROWS_WITH(check_config(c), "head_dim is 80, expected 32, 64, 96 or 128");
}

TEST_CASE("weights: each tensor's bytes in device memory are those of the file") {
    for (const char* name : models) {
        CAPTURE(name);
        const ModelFile file = open_model_file("build/models/" + std::string(name) + ".bin", file_format);
        const Weights planned{tensors_in(), file.config};
        const DeviceBuffer<std::byte> memory = upload_weights(file, planned.file);
        Weights weights{tensors_in(memory), file.config};
        const std::vector<std::byte> bytes = from_device(memory);
        const std::byte* in_file = file.map->bytes.data();
        for (const TensorInfo& t : weights.file.all()) {
            CAPTURE(t.name);
            CHECK(std::memcmp(bytes.data() + t.memory_offset, in_file + t.offset, t.n_bytes) == 0);
        }
        const auto* at = reinterpret_cast<const std::byte*>(weights.down_proj.back().scales);
        const auto is_that = [](const TensorInfo& t) { return t.name == "layers.3.ffn.down_proj.scales"; };
        const auto found = std::find_if(weights.file.all().begin(), weights.file.all().end(), is_that);
        REQUIRE(found != weights.file.all().end());
        CHECK(at == memory.get() + found->memory_offset);
        CHECK(planned.down_proj.back().scales == nullptr);

        struct : Model {
            std::span<const float> forward(std::span<const int>, int, int) override { return {}; }
        } model;
        describe(model, file, weights.file, KvFormat::f16);
        uint64_t n_weights = 0;
        for (const AwqMatrix* m : weights.matrices()) n_weights += m->n_weights();
        CHECK(model.macs_per_token == n_weights);
    }
}
#endif

namespace {

// A run's options, as the command line would have them.
Options options_of(const char* matmul, int ctx = 0) {
    Options options;
    options.own["--matmul"] = matmul;
    options.ctx = ctx;
    return options;
}

#ifdef ENGINE
uint64_t bytes_of(const std::vector<MemoryPart>& parts) {
    uint64_t n = 0;
    for (const MemoryPart& part : parts) n += part.bytes;
    return n;
}
#endif

}  // namespace

#ifdef ENGINE
TEST_CASE("memory: where it is counted, none is taken") {
    Device& d = device();
    const uint64_t before = d.allocated, peak = d.peak;
    {
        MemoryCount count;
        const DeviceBuffer<half> five(5);
        DeviceRows<float> rows(3, 7);
        CHECK(rows.is_allocated());
        CHECK(rows.get() == nullptr);
        const std::vector<float> values(21);
        rows.values.upload(values.data(), values.size());
        rows.values.clear();
        rows = DeviceRows<float>(2, 7);  // a second time, beside the first
        CHECK(count.at_once() == 5 * sizeof(half) + (21 + 14) * sizeof(float));
    }
    CHECK(d.allocated == before);
    CHECK(d.peak == peak);
    CHECK(DeviceBuffer<int>(1).get() != nullptr);
}

TEST_CASE("memory: the parts of a run") {
    const ModelFile file = open_model_file("build/models/tiny-llama.awq.bin", file_format);
    Weights planned{tensors_in(), file.config};
    const std::vector<MemoryPart> parts = device_parts(file, planned, options_of("fused"), 300, false);
    std::vector<std::string> names;
    for (const MemoryPart& part : parts) names.push_back(part.what);
    CHECK(names == std::vector<std::string>{
                       "the weights", "the weights as fp16 (--matmul)",
                       "a chunk of " + std::to_string(std::min(max_chunk, 300)) + " tokens",
                       "the keys and values of positions 0 to 299", "RoPE", "the logits of 16 tokens"});
    REQUIRE(parts.size() == 6);
    CHECK(parts[0].bytes == planned.file.memory_bytes());
    CHECK(parts[1].bytes == 0);
    CHECK(parts[3].bytes == 300 * kv_bytes(file.config, KvFormat::f16));
    CHECK(parts[3].advice == std::string("a smaller --ctx takes less"));
    CHECK(parts[4].bytes == 300 * size_t(file.config.head_dim / 2) * sizeof(float2));
    CHECK(parts[5].bytes == 16 * size_t(file.config.vocab_size) * sizeof(float));
}

TEST_CASE("memory: what is asked for before loading is what a run has taken in the end") {
#ifdef HAVE_CUBLAS
    cublas();  // whose workspace is not a run's
    const std::vector<const char*> ways = {"fused", "plain", "dequant", "predequant", "fp16"};
#else
    const std::vector<const char*> ways = {"fused", "plain"};
#endif
    for (const char* name : {"tiny-llama.awq", "tiny-qwen3.awq-g64"}) {
        for (const bool traced : {false, true}) {
            for (const char* matmul : ways) {
                for (const int ctx : {1, 70, 300}) {
                    CAPTURE(name);
                    CAPTURE(traced);
                    CAPTURE(matmul);
                    CAPTURE(ctx);
                    const std::string path = "build/models/" + std::string(name) + ".bin";
                    const Options options = options_of(matmul, ctx);
                    const ModelFile file = open_model_file(path, file_format);
                    Weights planned{tensors_in(), file.config};
                    const uint64_t promised = bytes_of(device_parts(file, planned, options, ctx, traced));

                    Trace trace;
                    const uint64_t before = device().allocated;
                    device().peak = before;
                    Transformer m = load_transformer(path, options, traced ? &trace : nullptr);
#ifndef CHECKED_BUILD
                    const std::vector<int> tokens(size_t(std::min(ctx, 2)), 5);
                    forward(m, tokens, 0, int(tokens.size()));
                    forward(m, std::span(tokens).first(1), int(tokens.size()) - 1, 1);
#endif
                    const auto measured = double(device().peak - before);
                    CHECK(measured <= double(promised));
                    CHECK(measured >= 0.95 * double(promised));
                }
            }
        }
    }
}

TEST_CASE("rotations: computed as positions are used, the same as all at once") {
    ModelConfig c;
    c.head_dim = 32;
    RotationTable little(c, 10000), all(c, 10000);
    const DeviceBuffer<float2>&a = little, &b = all;
    CHECK(a.size() == 10000 * 16);
    all.reach(10000);
    for (const int end : {1, 4096, 4097, 4000, 10000}) little.reach(end);
    const std::vector<float2> x = from_device(a), y = from_device(b);
    CHECK(std::memcmp(x.data(), y.data(), x.size() * sizeof(float2)) == 0);
    const double last = 9999.0 * little.frequencies[15];
    CHECK(x.back().x == float(std::cos(last)));
    CHECK(x.back().y == float(std::sin(last)));
    CHECK(x[3].x == 1);
}

TEST_CASE("rotations: frequencies with and without rescaling, and angles") {
    for (const auto& [name, c] : rope_cases<ModelConfig>()) {
        const std::string p = name;
        CAPTURE(p);
        RotationTable table(c, 4096);
        CHECK(golden_ops().at(p + "frequencies").f32() == table.frequencies);
        table.reach(4096);
        const std::vector<float2> all = from_device<float2>(table);
        std::vector<float> cos, sin, golden_cos = golden_ops().at(p + "cos").f32(),
                                     golden_sin = golden_ops().at(p + "sin").f32();
        for (const int pos : golden_ops().at(p + "positions").i32()) {
            for (int i = 0; i < c.head_dim / 2 && pos < 4096; i++) {
                const float2 at = all[size_t(pos) * size_t(c.head_dim / 2) + size_t(i)];
                cos.push_back(at.x), sin.push_back(at.y);
            }
        }
        golden_cos.resize(cos.size()), golden_sin.resize(sin.size());  // without the last, 131071
        CHECK(relative_error(golden_cos, cos) < 1e-7);
        CHECK(relative_error(golden_sin, sin) < 1e-7);
    }
}
#endif

// ----------------------------------------------------------------------------
// Layers and whole passes

namespace {

#ifdef ENGINE
Transformer load(const std::string& name, Trace* trace = nullptr, const char* matmul = "fused") {
    return load_transformer("build/models/" + name + ".bin", options_of(matmul), trace);
}
#else
Transformer load(const std::string& name, Trace* trace = nullptr, const char* matmul = "fused") {
    Options options = options_of(matmul);
    options.model_path = "build/models/" + name + ".bin";
    return std::move(*load_transformer(options, trace));
}
// The most probable next token of a chunk.
int forward_greedy(Transformer& m, std::span<const int> tokens, int pos) {
    const std::span<const float> logits = forward(m, tokens, pos, 1);
    return int(std::max_element(logits.begin(), logits.end()) - logits.begin());
}
#endif

Tensors golden_trace(const std::string& name) {
    return read_safetensors("golden/data/" + name + ".trace.safetensors");
}

// Runs the tokens in chunks of the given size. Returns the logits of every token, (n_tokens, vocab_size).
std::vector<float> run(Transformer& m, std::span<const int> tokens, int chunk) {
    std::vector<float> all;
    for (size_t pos = 0; pos < tokens.size(); pos += size_t(chunk)) {
        const auto part = tokens.subspan(pos, std::min(size_t(chunk), tokens.size() - pos));
        const std::span<const float> logits = forward(m, part, int(pos), int(part.size()));
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

double largest_difference(const std::vector<float>& expected, const std::vector<float>& found) {
    REQUIRE(expected.size() == found.size());
    float largest = 0, apart = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        largest = std::max(largest, std::fabs(expected[i]));
        apart = std::max(apart, std::fabs(expected[i] - found[i]));
    }
    return apart / largest;
}

}  // namespace

TEST_CASE("each layer alone, from the golden's input") {
    for (const char* name : models) {
        const Tensors golden = golden_trace(name);
        const std::vector<int> tokens = golden.at("tokens").i32();
        const int n = int(tokens.size());
        Transformer m = load(name);
        set_inputs(m.state, tokens, 0);
        m.state.x.n_rows = n;
        for (int l = 0; l < m.file.config.n_layers; l++) {
            CAPTURE(name);
            CAPTURE(l);
            const std::string before = l == 0 ? "embed" : step_name(l - 1, "ffn.residual");
            std::vector<float> x = golden.at(before).f32();
            m.state.x.values.upload(x.data(), x.size());
            attention_block(m, l);
            download(x.data(), m.state.x.get(), x.size());
            CHECK(relative_error(golden.at(step_name(l, "attn.residual")).f32(), x) < 1e-3);
            x = golden.at(step_name(l, "attn.residual")).f32();
            m.state.x.values.upload(x.data(), x.size());
            feed_forward_block(m, l);
            download(x.data(), m.state.x.get(), x.size());
            CHECK(relative_error(golden.at(step_name(l, "ffn.residual")).f32(), x) < 1e-3);
        }
    }
}

TEST_CASE("every step of the trace is within the contract, however the tokens are fed") {
    for (const char* name : models) {
        const Tensors golden = golden_trace(name);
        const std::vector<int> tokens = golden.at("tokens").i32();
        struct Case {
            int chunk;
            const char* matmul;
        };
        std::vector<Case> cases{{64, "fused"}, {4, "fused"}, {1, "fused"}, {64, "plain"}};
#ifdef HAVE_CUBLAS
        cases.insert(cases.end(), {{64, "dequant"}, {64, "predequant"}, {64, "fp16"}, {1, "fp16"}});
#endif
        for (const Case& k : cases) {
            const int chunk = k.chunk;
            const char* matmul = k.matmul;
            CAPTURE(name);
            CAPTURE(chunk);
            CAPTURE(matmul);
            Trace trace;
            Transformer m = load(name, &trace, matmul);
            run(m, tokens, chunk);
            const std::string path = "build/" + std::string(name) + ".test.trace.safetensors";
            trace.write(path);
            const Tensors found = read_safetensors(path);
            CHECK(found.size() == golden.size());
            for (const auto& item : golden) {
                const std::string& step = item.first;
                const Tensor& expected = item.second;
                CAPTURE(step);
                REQUIRE(found.contains(step));
                REQUIRE(found.at(step).shape == expected.shape);
                REQUIRE(found.at(step).type == expected.type);
                if (expected.type == "I32") {
                    CHECK(found.at(step).bytes == expected.bytes);
                } else {
                    CHECK(relative_error(expected.f32(), found.at(step).f32()) < 1e-2);
                }
            }
            CHECK(largest_difference(golden.at("logits").f32(), found.at("logits").f32()) < 1e-2);
        }
    }
}

#ifndef CHECKED_BUILD
TEST_CASE("logits do not depend on threads, and hardly on chunks") {
    for (const char* name : models) {
        if (!in_part(name)) continue;
        CAPTURE(name);
        const nlohmann::json golden =
            nlohmann::json::parse(read_file("golden/data/" + std::string(name) + ".json"))["generations"][0];
        std::vector<int> tokens = golden["prompt_ids"];
        tokens.insert(tokens.end(), golden["new_ids"].begin(), golden["new_ids"].end());
        tokens.resize(40);
        Transformer m = load(name);
        const std::vector<float> reference = run(m, tokens, 32);
#ifdef ENGINE
        const int n_threads = threads().size();
        threads().resize(n_threads + 1);
        CHECK(run(m, tokens, 32) == reference);
        threads().resize(n_threads);
#endif
        CHECK(largest_difference(reference, run(m, tokens, 20)) < 1e-2);
    }
}

TEST_CASE("greedy generation gives the golden's 64 ids, with the prompt at once or one token at a time") {
#ifdef HAVE_CUBLAS
    const std::vector<const char*> ways = {"fused", "dequant", "predequant", "fp16"};
#else
    const std::vector<const char*> ways = {"fused"};
#endif
    for (const std::string name : models) {
        const nlohmann::json golden = nlohmann::json::parse(read_file("golden/data/" + name + ".json"));
        const size_t most_at_once = in_part(name) ? 64 : 8;
        // The last prompt was chosen for its leads: no rounding changes a winner. The first one's ids are
        // determined as long as the leads are above what logits may differ by.
        for (const nlohmann::json& generation : golden["generations"]) {
            const bool clear = &generation == &golden["generations"].back();
            const std::vector<int> prompt = generation["prompt_ids"], expected = generation["new_ids"];
            const std::vector<double> leads = generation["leads"];
            const auto determined =
                std::find_if(leads.begin(), leads.end(), [](double x) { return x < 2e-2; }) - leads.begin();
            REQUIRE(expected.size() == 64);
            for (const char* way : ways) {
                for (const bool at_once : {true, false}) {
                    // After the prompt both do the same.
                    const bool is_long = at_once && way == ways[0];
                    const size_t n = std::min<size_t>(clear ? 64 : determined, is_long ? most_at_once : 8);
                    CAPTURE(name);
                    CAPTURE(generation["prompt"]);
                    CAPTURE(way);
                    CAPTURE(at_once);
                    Transformer m = load(name, nullptr, way);
                    if (!at_once) {
                        for (size_t i = 0; i + 1 < prompt.size(); i++)
                            forward_greedy(m, std::span(prompt).subspan(i, 1), int(i));
                    }
                    const auto rest = std::span(prompt).subspan(at_once ? 0 : prompt.size() - 1);
                    std::vector<int> ids{forward_greedy(m, rest, int(prompt.size() - rest.size()))};
                    while (ids.size() < n) {
                        const int pos = int(prompt.size() + ids.size()) - 1;
                        ids.push_back(forward_greedy(m, std::span(ids).last(1), pos));
                    }
                    CHECK(std::equal(ids.begin(), ids.begin() + n, expected.begin()));
                }
            }
        }
    }
}
#endif
