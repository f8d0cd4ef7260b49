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

#include "engine/cpu/kv_cache.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/rows.h"
#include "engine/os/memory.h"
#include "engine/os/threads.h"

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

// The matrices of all layers, packed, and one token's products with them. A scale for each `group` of columns
// (Q8) or, if that is 0, for each row (W8A8). What the weights are makes no difference to the time: they are
// zeros.
class Products {
  public:
    Products(const Shape& s, int group) : group_(group) {
        const size_t largest = size_t(s.dim) * size_t(std::max(s.hidden_dim, s.n_heads * s.head_dim));
        const LazyMemory zeros(largest * sizeof(float), "zeros");
        auto matrix = [&](int n_rows, int n_cols) {
            const int size = group > 0 ? group : n_cols;
            n_bytes_ += size_t(n_rows) * n_cols + size_t(n_rows) * (n_cols / size) * sizeof(float);
            const QuantMatrix w = int8_matrix(zeros.as<int8_t>(), zeros.as<float>(), n_rows, n_cols, size);
            const PackedMatrix* packed = memory_.add(w);
            if (packed == nullptr) {
                std::fprintf(stderr, "in_turns: this build has no fast path\n");
                std::exit(1);
            }
            outputs_.resize(std::max(outputs_.size(), size_t(3) * n_rows));
            return QuantProduct{nullptr, w, packed};
        };
        const int q_dim = s.n_heads * s.head_dim, kv_dim = s.n_kv_heads * s.head_dim;
        for (int l = 0; l < s.n_layers; l++) {
            lists_.push_back({matrix(q_dim, s.dim), matrix(kv_dim, s.dim), matrix(kv_dim, s.dim)});
            lists_.push_back({matrix(s.dim, q_dim)});
            lists_.push_back({matrix(s.hidden_dim, s.dim), matrix(s.hidden_dim, s.dim)});
            lists_.push_back({matrix(s.dim, s.hidden_dim)});
        }
        for (auto& list : lists_) {
            float* out = outputs_.data();
            for (QuantProduct& p : list) p.out = out, out += p.w.n_rows;
        }
        codes_.assign(outputs_.size(), 1), scales_.assign(outputs_.size(), 1.0f),
            sums_.assign(outputs_.size(), 64);
    }

    size_t n_bytes() const { return n_bytes_; }  // of codes and scales
    void multiply() const {
        for (const auto& list : lists_) {
            const int n = list[0].w.n_cols;
            quant_matmul({codes_.data(), scales_.data(), sums_.data(), 1, n, group_ > 0 ? group_ : n}, list);
        }
    }

  private:
    int group_;
    size_t n_bytes_ = 0;
    PackedMatrices memory_;
    std::vector<std::vector<QuantProduct>> lists_;  // that read the same input
    std::vector<int8_t> codes_;
    std::vector<float> scales_, outputs_;
    std::vector<int32_t> sums_;
};

// One token's attention in all layers, the last of `context`.
void attend_all_layers(const Shape& s, const KvCache& cache) {
    Rows query(1, s.n_heads * s.head_dim), out(1, s.n_heads * s.head_dim);
    std::fill(query.values.begin(), query.values.end(), 0.01f);
    query.n_rows = 1;
    HeadScores none;
    for (int l = 0; l < s.n_layers; l++) attention(out, none, none, query, cache, l, context - 1);
}

// The one of sorted values that a share of the others lies below.
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
    const Products q8(s, 64), w8a8(s, 0);
    const size_t cache_bytes = size_t(2) * s.n_layers * context * s.n_kv_heads * s.head_dim * sizeof(float);
    KvCache cache(KvFormat::f32, s.n_layers, s.n_kv_heads, s.head_dim, context);
    const std::vector<float> row(s.head_dim, 0.01f);
    for (int pos = 0; pos < context; pos++) {
        for (int l = 0; l < s.n_layers; l++) {
            for (int head = 0; head < s.n_kv_heads; head++)
                cache.append(l, head, pos, row.data(), row.data());
        }
    }
    std::printf("%s, %d threads, medians of %d rounds (quartiles)\n", s.name, n_threads, n_rounds);
    compare("products q8", q8.n_bytes(), n_rounds, n_threads, [&] { q8.multiply(); });
    compare("products w8a8", w8a8.n_bytes(), n_rounds, n_threads, [&] { w8a8.multiply(); });
    compare("attention", cache_bytes, n_rounds, n_threads, [&] { attend_all_layers(s, cache); });
    return 0;
}
