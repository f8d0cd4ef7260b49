// in_turns: what decode costs beside reading the same bytes, on a machine whose speed changes all the time.
//
// `make bench` has the whole program; this has its two parts that read most, each alone: the products of all
// layers, and attention. Plain reading and one token's work take turns, some milliseconds each, and the work
// is compared with the reading before and after it.
//
//     make build/in_turns && build/in_turns llama-3.2-1b|qwen3-0.6b [ROUNDS [THREADS]]

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/cpu/attention.h"
#include "common/cpu/int8_matmul.h"
#include "common/cpu/rows.h"
#include "common/os/lazy_memory.h"
#include "common/os/machine.h"
#include "common/os/threads.h"

namespace {

struct Shape {
    const char* name;
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, head_dim;
};
// From each model's published config.json; the last is for tests.
constexpr Shape shapes[] = {{"llama-3.2-1b", 2048, 8192, 16, 32, 8, 64},
                            {"qwen3-0.6b", 1024, 3072, 28, 16, 8, 128},
                            {"tiny", 128, 384, 2, 4, 2, 32}};
constexpr int context = 2048;

// One token's products with the matrices of all layers, codes and scales lying one behind the other from
// `memory` on; null: only counts. A scale for each `group` of columns (Q8) or, if that is 0, for each row
// (W8A8). They count as packed. Returns the bytes of codes and scales. What the weights are makes no
// difference to the time.
size_t products(const Shape& s, char* memory, int group) {
    static std::vector<int8_t> codes(std::max(s.dim, s.hidden_dim), 1);
    static std::vector<float> scales(codes.size(), 1), out(3 * codes.size());
    static std::vector<int32_t> sums(codes.size(), 64);
    size_t bytes = 0;
    auto matrix = [&](int n_rows, int n_cols) {
        const int group_size = group > 0 ? group : n_cols;
        Int8Matrix m{nullptr, nullptr, nullptr, n_rows, n_cols, group_size, true};
        const size_t n = size_t(n_rows) * n_cols;
        if (memory != nullptr) m.codes = reinterpret_cast<const int8_t*>(memory + bytes);
        if (memory != nullptr) m.scales = reinterpret_cast<const float*>(memory + bytes + n);
        bytes += n + n / group_size * sizeof(float);
        return m;
    };
    auto multiply = [&](int n_in, const std::vector<Int8Product>& list) {
        const Int8Matrix x{codes.data(), scales.data(), sums.data(), 1, n_in, group > 0 ? group : n_in};
        if (memory != nullptr && !int8_matmul(x, list)) {
            std::fprintf(stderr, "in_turns: this build has no fast path\n");
            std::exit(1);
        }
    };
    const int q_dim = s.n_heads * s.head_dim, kv_dim = s.n_kv_heads * s.head_dim;
    for (int l = 0; l < s.n_layers; l++) {
        const Int8Matrix q = matrix(q_dim, s.dim), k = matrix(kv_dim, s.dim), v = matrix(kv_dim, s.dim);
        const Int8Matrix o = matrix(s.dim, q_dim);
        const Int8Matrix gate = matrix(s.hidden_dim, s.dim), up = matrix(s.hidden_dim, s.dim);
        const Int8Matrix down = matrix(s.dim, s.hidden_dim);
        float *first = out.data(), *second = first + codes.size(), *third = second + codes.size();
        multiply(s.dim, {{first, q}, {second, k}, {third, v}});
        multiply(q_dim, {{first, o}});
        multiply(s.dim, {{first, gate}, {second, up}});
        multiply(s.hidden_dim, {{first, down}});
    }
    return bytes;
}

// One token's attention in all layers, the last of `context`.
void attend_all_layers(const Shape& s, const KvCache& cache) {
    Rows query(1, s.n_heads * s.head_dim), out(1, s.n_heads * s.head_dim);
    std::fill(query.values.begin(), query.values.end(), 0.01f);
    query.n_rows = 1;
    HeadScores none;
    for (int l = 0; l < s.n_layers; l++) attention(out, none, none, query, cache, l, context - 1);
}

// Of sorted values, the one that a share of the others lies below.
double quantile(const std::vector<double>& sorted, double share) {
    return sorted[size_t(share * double(sorted.size() - 1) + 0.5)];
}

// Times `work`, which reads n_bytes, between two times of plain reading. Prints medians and quartiles.
template <class Work>
void compare(const char* name, size_t n_bytes, int n_rounds, int n_threads, Work work) {
    const ReadBuffer buffer(n_bytes, n_threads);
    // The buffer is a whole number of pages, and smaller where memory is short.
    auto plain = [&] { return buffer.seconds_to_read() * double(n_bytes) / double(buffer.size()); };
    std::vector<double> ratios, seconds, plain_seconds;
    for (int i = -1; i < n_rounds; i++) {
        const double before = plain(), start = seconds_now();
        work();
        const double mine = seconds_now() - start, after = plain();
        if (i < 0) continue;  // threads, buffers and pages are there from now on
        ratios.push_back(mine / ((before + after) / 2));
        seconds.push_back(mine);
        plain_seconds.push_back((before + after) / 2);
    }
    for (auto* v : {&ratios, &seconds, &plain_seconds}) std::sort(v->begin(), v->end());
    std::printf("%-13s %8.3f MB  %7.3f ms, %7.3f ms to read it, ratio %.2f (%.2f-%.2f)\n", name,
                double(n_bytes) / 1e6, quantile(seconds, 0.5) * 1e3, quantile(plain_seconds, 0.5) * 1e3,
                quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75));
}

}  // namespace

int main(int argc, char** argv) {
    const std::string name = argc > 1 ? argv[1] : "";
    const auto* shape =
        std::find_if(std::begin(shapes), std::end(shapes), [&](auto& s) { return s.name == name; });
    const int n_rounds = argc > 2 ? std::atoi(argv[2]) : 40;
    const int n_threads = argc > 3 ? std::atoi(argv[3]) : physical_cores();
    if (shape == std::end(shapes) || n_rounds < 1 || n_threads < 1 || n_threads > 1024 || argc > 4) {
        std::fprintf(stderr, "usage: in_turns llama-3.2-1b|qwen3-0.6b [ROUNDS [THREADS]]\n");
        return 2;
    }
    threads().resize(n_threads);
    const Shape& s = *shape;
    const size_t weight_bytes = products(s, nullptr, 64), row_bytes = products(s, nullptr, 0);
    const size_t cache_bytes = size_t(2) * s.n_layers * context * s.n_kv_heads * s.head_dim * sizeof(float);
    const LazyMemory memory(weight_bytes, "the weights");
    std::fill_n(memory.as<float>(), weight_bytes / sizeof(float), 1.0f);
    KvCache cache(KvFormat::f32, s.n_layers, s.n_kv_heads, s.head_dim, context);
    const std::vector<float> row(s.head_dim, 0.01f);
    for (int pos = 0; pos < context; pos++) {
        for (int l = 0; l < s.n_layers; l++) {
            for (int head = 0; head < s.n_kv_heads; head++)
                cache.append(l, head, pos, row.data(), row.data());
        }
    }
    char* bytes = reinterpret_cast<char*>(memory.as<float>());
    std::printf("%s, %d threads, medians of %d rounds (quartiles)\n", s.name, n_threads, n_rounds);
    compare("products q8", weight_bytes, n_rounds, n_threads, [&] { products(s, bytes, 64); });
    compare("products w8a8", row_bytes, n_rounds, n_threads, [&] { products(s, bytes, 0); });
    compare("attention", cache_bytes, n_rounds, n_threads, [&] { attend_all_layers(s, cache); });
    return 0;
}
