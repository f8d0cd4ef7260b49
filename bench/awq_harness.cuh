// Where the rungs of awq_kernels.cuh are checked and timed: random matrices on host and device, and the
// comparison with a float64 product on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "bench/awq_kernels.cuh"
#include "engine/os/threads.h"

// ----------------------------------------------------------------------------
// What is multiplied

// A projection, or several of the same input, which runq_awq computes in one launch.
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

    // A weight, rounded to fp16; before that, the product of two numbers of few bits is exact in fp32.
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

// A problem's random matrices and activations, on the device and on the host: all that a rung reads and
// writes.
struct DeviceProblem {
    RungMemory s;
    DeviceBuffer<half> x;     // (n_tokens, n_in)
    DeviceBuffer<float> out;  // (n_tokens, n_out) of each product in turn; some rungs write fp16
    std::vector<HostMatrix> host;
    std::vector<half> host_x;
    DeviceBuffer<std::byte> packed;              // copies of the matrices, more than the cache holds
    DeviceBuffer<half> expanded;                 // copies of the same in fp16
    std::vector<std::vector<AwqMatrix>> copies;  // [copy][product]
    std::vector<std::vector<const half*>> fp16;  // [copy][product]
    int n_in = 0;

    // What a rung gets: copy i % (number of copies) of the matrices, and where the results go.
    AwqProducts products(size_t i, int n_tokens) const {
        AwqProducts p{};
        float* to = out.get();
        for (const AwqMatrix& w : copies[i % copies.size()]) {
            p.items[p.n] = {w, to, false};
            if (!fp16.empty()) p.items[p.n].w.fp16 = fp16[i % fp16.size()][p.n];
            to += size_t(n_tokens) * w.n_out;
            p.n++;
        }
        return p;
    }
};

// min_bytes: of all copies together, at least. with_fp16: also expanded to fp16.
inline DeviceProblem make_device_problem(const Problem& problem, int group_size, int max_tokens,
                                         size_t min_bytes, bool with_fp16, Random& random) {
    DeviceProblem d;
    d.n_in = problem.n_in;
    d.host_x.resize(size_t(max_tokens) * problem.n_in);
    for (half& x : d.host_x) x = __float2half(uniform(random, -1, 1));
    d.x = DeviceBuffer<half>(d.host_x.size());
    d.x.upload(d.host_x.data(), d.host_x.size());
    d.out = DeviceBuffer<float>(size_t(max_tokens) * problem.n_columns() + 64);

    constexpr size_t alignment = 256;
    auto aligned = [](size_t n) { return (n + alignment - 1) / alignment * alignment; };
    size_t bytes = 0, values = 0, largest = 0;
    for (const int n_out : problem.n_outs) {
        d.host.push_back(random_matrix(problem.n_in, n_out, group_size, random));
        const HostMatrix& m = d.host.back();
        bytes += aligned(m.qweight.size() * 4) + aligned(m.qzeros.size() * 4) + aligned(m.scales.size() * 2);
        values += size_t(m.n_in) * m.n_out;
        largest = std::max(largest, size_t(m.n_in) * m.n_out);
    }
    const size_t n_copies = std::max<size_t>(1, (min_bytes + bytes - 1) / bytes);
    d.packed = DeviceBuffer<std::byte>(n_copies * bytes);
    size_t end = 0;
    auto put = [&](const auto& values_of) {
        std::byte* to = d.packed.get() + end;
        d.packed.upload(reinterpret_cast<const std::byte*>(values_of.data()),
                        values_of.size() * sizeof(values_of[0]), end);
        end += aligned(values_of.size() * sizeof(values_of[0]));
        return to;
    };
    for (size_t i = 0; i < n_copies; i++) {
        d.copies.emplace_back();
        for (size_t j = 0; j < d.host.size(); j++) {
            const HostMatrix& m = d.host[j];
            AwqMatrix w{};
            w.n_in = m.n_in, w.n_out = m.n_out, w.group_size = m.group_size;
            if (i == 0) {
                w.qweight = reinterpret_cast<const uint32_t*>(put(m.qweight));
                w.qzeros = reinterpret_cast<const uint32_t*>(put(m.qzeros));
                w.scales = reinterpret_cast<const half*>(put(m.scales));
            } else {
                const AwqMatrix& first = d.copies[0][j];
                w.qweight = first.qweight + i * bytes / 4;
                w.qzeros = first.qzeros + i * bytes / 4;
                w.scales = first.scales + i * bytes / 2;
            }
            d.copies.back().push_back(w);
        }
        if (i > 0) {
            check(cudaMemcpyAsync(d.packed.get() + i * bytes, d.packed.get(), bytes, cudaMemcpyDeviceToDevice,
                                  device().stream),
                  "copying weights");
        }
    }
    if (with_fp16) {
        d.s.expanded = DeviceBuffer<half>(largest);
        const size_t n_fp16 = std::max<size_t>(1, (min_bytes + 2 * values - 1) / (2 * values));
        d.expanded = DeviceBuffer<half>(n_fp16 * values);
        half* next = d.expanded.get();
        for (size_t i = 0; i < n_fp16; i++) {
            d.fp16.emplace_back();
            for (const AwqMatrix& w : d.copies[0]) {
                run_dequantize(w, next);
                d.fp16.back().push_back(next);
                next += size_t(w.n_in) * w.n_out;
            }
        }
    }
    wait_for_device();
    return d;
}

// ----------------------------------------------------------------------------
// Correctness

inline bool can_run(const Rung& rung, const DeviceProblem& d, int n_tokens) {
    if (n_tokens < rung.min_tokens || n_tokens > rung.max_tokens) return false;
    if (rung.reads == WeightsRead::fp16 && d.fp16.empty()) return false;
    for (const AwqMatrix& w : d.copies[0]) {
        if (!rung.fits(w)) return false;
    }
    return true;
}

// An output and its expected value.
struct Sample {
    size_t at;  // in a buffer of all products' results
    double value;
};

// n_samples outputs spread over all columns, of random tokens; the last token and the last column among them.
inline std::vector<Sample> sample_outputs(const DeviceProblem& d, int n_tokens, int n_samples,
                                          Random& random) {
    struct Place {
        size_t product;
        int token, column;
    };
    std::vector<Sample> samples;
    std::vector<Place> places;
    size_t first = 0;
    for (size_t j = 0; j < d.host.size(); j++) {
        const int n_out = d.host[j].n_out, n = std::max(1, n_samples / int(d.host.size()));
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
    parallel_for(n, [&](int i) {
        const Place& p = places[i];
        const half* x = d.host_x.data() + size_t(p.token) * d.n_in;
        double sum = 0;
        for (int k = 0; k < d.n_in; k++)
            sum += double(__half2float(x[k])) * d.host[p.product].weight(k, p.column);
        samples[i].value = sum;
    });
    return samples;
}

// Relative errors. A result rounded to fp16 is off by up to 2^-11. A sum in fp32 that is rounded at each step
// is off by far less than 1e-5. Tensor cores truncate instead, always towards zero, so that errors
// accumulate: over 12288 inputs to some 1e-5 if they add 16 products at a time, to 6e-5 if they add 4. A
// mistake in a lane or a group gives errors of 1e-2 and more.
constexpr double fp16_tolerance = 1e-3, fp32_tolerance = 1e-4;

inline double tolerance(const Rung& rung) {
    return rung.result == Result::fp16 ? fp16_tolerance : fp32_tolerance;
}

// ||out - expected|| / ||expected|| over the samples; infinity if any output is not finite, or if the rung
// wrote behind the last one.
inline double relative_error_of(const Rung& rung, DeviceProblem& d, int n_tokens,
                                const std::vector<Sample>& samples) {
    d.s.arrivals.clear();  // a wrong rung may have left counts
    const size_t all_bytes = d.out.size() * sizeof(float);
    check(cudaMemsetAsync(d.out.get(), 0xff, all_bytes, device().stream), "cudaMemset");  // NaN
    rung.run(d.s, d.x.get(), n_tokens, d.products(0, n_tokens));
    wait_for_device();
    size_t n = 0;
    for (const HostMatrix& m : d.host) n += size_t(n_tokens) * m.n_out;
    constexpr size_t behind = 64;
    const bool is_half = rung.result == Result::fp16;
    std::vector<float> values(n + behind);  // or twice as many fp16 values
    download(values.data(), d.out.get(), values.size());
    const half* halves = reinterpret_cast<const half*>(values.data());
    auto value = [&](size_t i) { return is_half ? __half2float(halves[i]) : values[i]; };
    int64_t n_bad = 0;
    for (size_t i = 0; i < n + behind; i++) n_bad += std::isfinite(value(i)) != (i < n);
    if (n_bad > 0) return INFINITY;
    double difference = 0, norm = 0;
    for (const Sample& sample : samples) {
        const double off = value(sample.at) - sample.value;
        difference += off * off, norm += sample.value * sample.value;
    }
    return std::sqrt(difference / norm);
}
