// runq_moe: Qwen3-MoE inference around one fused operator, to read from top to bottom.
//
// A layer has many feed-forward networks, its experts, and a token goes through a few of them. The operator
// takes rows sorted by expert, multiplies each by its expert's gate and up, puts the first half through
// swish, multiplies by the second half and quantizes the product: nothing in between is written to memory.
// Experts are in A8W8 (int8 by int8), A8W4 (int8 by int4) or MXFP8 (blocks of 8-bit floats under one power of
// two), as the file says. Attention, dense layers, embedding and classifier are in A8W8, or as experts are.
// docs/moe.md tells the whole story.
//
// This file has what is its own: matrices, quantizers, products and the operator as plain loops, the tensors
// of a file, and the forward pass. The rest is in common/, as runq.cpp says.
//
//     make runq_moe model_moe.bin && ./runq_moe model_moe.bin -i "Once upon a time"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/app/model.h"
#include "common/app/options.h"
#include "common/app/trace.h"
#include "common/cpu/attention.h"
#include "common/cpu/fp64_matmul.h"
#include "common/cpu/half.h"
#include "common/cpu/ops.h"
#include "common/cpu/quant_matmul.h"
#include "common/cpu/rows.h"
#include "common/model/header.h"
#include "common/model/model_file.h"
#include "common/model/scheme.h"
#include "common/model/tensors.h"
#include "common/os/clock.h"
#include "common/os/threads.h"

// ----------------------------------------------------------------------------
// What the header says besides a model's usual numbers: docs/moe.md

// How a matrix is stored.
enum class WeightKind : uint32_t { a8w8 = 0, a8w4 = 1, mxfp8 = 2 };
struct WeightFormat {
    WeightKind kind = WeightKind::a8w8;
    int group = 0;  // weights of a row that share a scale; 0: the whole row
};

// The mixtures of experts.
struct MoeConfig {
    WeightFormat experts;
    bool pure = false;              // all other matrices are stored as experts are, not in A8W8
    int n_experts = 0;              // of each layer that has any
    int n_active = 0;               // experts that a token goes to
    int hidden_dim = 0;             // length inside an expert (moe_intermediate_size)
    bool norm_topk_prob = false;    // weights of the active experts are divided by their sum
    std::vector<uint8_t> is_dense;  // (n_layers,), 1: no experts

    WeightFormat others() const { return pure ? experts : WeightFormat{}; }
};

struct Config : ModelConfig {
    MoeConfig moe;

    // Whether the feed-forward block of layer l is a mixture of experts.
    bool has_experts(int l) const { return moe.n_experts > 0 && moe.is_dense[size_t(l)] == 0; }
};

// ----------------------------------------------------------------------------
// int8 with a scale per row

// codes (n,) of x (n,) under one scale, which is returned: max|x| / 127. Codes are x / scale rounded half to
// even. Both are 0 where 127 / max|x| is not finite.
float quantize_row(int8_t* codes, const float* x, int n) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
    float inv = 127.0f / largest;
    if (!(inv > 0 && inv <= std::numeric_limits<float>::max())) inv = 0;
    for (int i = 0; i < n; i++) {
        const float whole = std::nearbyintf(x[i] * inv);
        codes[i] = int8_t(std::min(127.0f, whole > -127.0f ? whole : -127.0f));
    }
    return inv > 0 ? largest / 127.0f : 0.0f;
}

// The exact sum of n products.
int32_t dot(const int8_t* x, const int8_t* w, int n) {
    int32_t sum = 0;
    for (int k = 0; k < n; k++) sum += int32_t(x[k]) * int32_t(w[k]);
    return sum;
}

// ----------------------------------------------------------------------------
// MXFP8: E4M3 elements in blocks under E8M0 scales (OCP Microscaling Formats 1.0)

constexpr int e4m3_emax = 8, scale_bias = 127, scale_nan = 255;
constexpr float e4m3_largest = 448;

// What an element means: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN.
float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value =
        exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    return code & 0x80 ? -value : value;
}

// Of all codes.
const std::array<float, 256> e4m3_values = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; code++) all[code] = e4m3_value(uint8_t(code));
    return all;
}();

// The element nearest to x, halves to even; beyond the largest the largest; 0x7f for NaN.
uint8_t e4m3_code(float x) {
    if (std::isnan(x)) return 0x7f;
    const float magnitude = std::min(std::fabs(x), e4m3_largest);
    int exponent = -6;  // of the subnormals, and of the smallest normals
    if (magnitude >= 0x1p-6f) exponent = std::ilogb(magnitude);
    // In steps of 2^(exponent - 3): 8 to 16, or 0 to 8 for subnormals. 16 is the next exponent's 8.
    const int steps = int(std::nearbyintf(std::ldexp(magnitude, 3 - exponent)));
    const int code = std::min(steps + (exponent + 6) * 8, 0x7e);
    return uint8_t(code | (std::signbit(x) ? 0x80 : 0));
}

// codes (n,) of a block x (n,), and its scale.
uint8_t quantize_mx_block(uint8_t* codes, const float* x, int n) {
    float largest = 0;
    bool has_nan = false;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, std::fabs(x[i]));
        has_nan = has_nan || std::isnan(x[i]);
    }
    int shared = -scale_bias;
    if (largest > 0) shared = std::max(shared, (std::isinf(largest) ? 128 : std::ilogb(largest)) - e4m3_emax);
    for (int i = 0; i < n; i++)
        codes[i] =
            e4m3_code(has_nan && !std::isnan(x[i]) ? std::copysign(0.0f, x[i]) : std::ldexp(x[i], -shared));
    return has_nan ? scale_nan : uint8_t(shared + scale_bias);
}

// ----------------------------------------------------------------------------
// Matrices, and the rows that they are multiplied by

// What a matrix reads: rows of int8 with a scale each, or of MXFP8.
struct InputRows {
    WeightFormat of;  // the matrix's format
    Int8Rows int8;  // A8W4: a row's scale stands once for each group of weights, as the fast kernels want it
    std::vector<uint8_t> codes, scales;  // MXFP8: (n_rows, n_cols), (n_rows, n_cols / group)
    std::vector<float> values;           // MXFP8: (n_rows, n_cols), what codes mean, without the scales
    int n_rows = 0, n_cols = 0;

    void resize(int rows, int columns, const WeightFormat& format);
    bool is_mx() const { return of.kind == WeightKind::mxfp8; }
    int block() const { return of.group; }
    int n_blocks() const { return n_cols / block(); }
    uint8_t* row_codes(int t) { return codes.data() + size_t(t) * n_cols; }
    const uint8_t* row_codes(int t) const { return codes.data() + size_t(t) * n_cols; }
    float* row_values(int t) { return values.data() + size_t(t) * n_cols; }
    const float* row_values(int t) const { return values.data() + size_t(t) * n_cols; }
    uint8_t* row_scales(int t) { return scales.data() + size_t(t) * n_blocks(); }
    const uint8_t* row_scales(int t) const { return scales.data() + size_t(t) * n_blocks(); }
};

// The columns that go through the fast kernels under one scale of each side.
int kernel_group(const WeightFormat& format, int n_cols) {
    if (format.kind == WeightKind::a8w8 || n_cols % 32 != 0) return n_cols;
    return format.group == 32 || n_cols % 64 != 0 ? 32 : 64;
}

void InputRows::resize(int rows, int columns, const WeightFormat& format) {
    of = format, n_rows = rows, n_cols = columns;
    if (!is_mx()) return int8.resize(rows, columns, kernel_group(format, columns));
    scratch(codes, size_t(rows) * columns);
    scratch(values, size_t(rows) * columns);
    scratch(scales, size_t(rows) * n_blocks());
}

// One matrix of all experts of a layer, one expert behind the other; or another matrix, as if there were one
// expert.
struct MoeMatrix {
    WeightFormat format;
    const uint8_t* codes = nullptr;      // (n_experts, n_rows, n_cols); A8W8: int8; A8W4: (..., n_cols / 2)
    const float* row_scales = nullptr;   // A8W8, and A8W4 without groups: (n_experts, n_rows)
    const Half* group_scales = nullptr;  // A8W4 in groups: (n_experts, n_rows, n_cols / group)
    const uint8_t* mx_scales = nullptr;  // MXFP8: (n_experts, n_rows, n_cols / group)
    const float* assist = nullptr;       // A8W4: (n_experts, n_rows), see dot_by_digits
    int n_experts = 1, n_rows = 0, n_cols = 0, group = 0;  // group: columns that share a scale
    std::vector<const PackedMatrix*>
        packed{};  // each expert's matrix as the kernels read it fastest, or empty

    int n_groups() const { return n_cols / group; }
    // Whether the kernels multiply it: A8W8, and A8W4 in groups.
    bool has_kernel() const {
        return format.kind == WeightKind::a8w8 ||
               (format.kind == WeightKind::a8w4 && format.group > 0 && n_cols % 64 == 0);
    }
    // The matrix of expert e as the kernels know it: int4 codes are 8 too large.
    QuantMatrix view(int e = 0) const {
        const size_t row = size_t(e) * n_rows, n = size_t(n_cols);
        if (format.kind == WeightKind::a8w8) {
            const auto* int8_codes = reinterpret_cast<const int8_t*>(codes + row * n);
            return int8_matrix(int8_codes, row_scales + row, n_rows, n_cols, n_cols);
        }
        QuantMatrix m{};
        m.codes = codes + row * (n / 2), m.scales = group_scales + row * n_groups(), m.zero_point = 8;
        m.kind = QUANT_GEMM_UNSIGNED, m.scale_type = QUANT_GEMM_GROUP_FP16, m.bits = 4;
        m.n_rows = n_rows, m.n_cols = n_cols, m.group = group, m.group_size = kernel_group(format, n_cols);
        return m;
    }
};

// x (n_cols,) becomes row t of `out`.
void quantize_row(InputRows& out, int t, const float* x) {
    const int n = out.n_cols;
    if (out.is_mx()) {
        for (int b = 0; b < out.n_blocks(); b++)
            out.row_scales(t)[b] =
                quantize_mx_block(out.row_codes(t) + b * out.block(), x + b * out.block(), out.block());
        for (int k = 0; k < n; k++) out.row_values(t)[k] = e4m3_values[out.row_codes(t)[k]];
        return;
    }
    int8_t* codes = out.int8.row_codes(t);
    float scale;
    int32_t sum;
    if (!int8_quantize(codes, &scale, &sum, x, n, n)) scale = quantize_row(codes, x, n);
    for (int g = 0; g < out.int8.n_groups(); g++) {
        const int8_t* group = codes + g * out.int8.group_size;
        out.int8.row_scales(t)[g] = scale;
        out.int8.row_sums(t)[g] = std::accumulate(group, group + out.int8.group_size, 0);
    }
}

// All rows of x, for matrices of a format: the input of the products that follow.
void quantize(InputRows& out, const Rows& x, const WeightFormat& format) {
    out.resize(x.n_rows, x.n_cols, format);
    for_each_row(x.n_rows, [&](int t) { quantize_row(out, t, x.row(t)); });
}

// Row i of `out` becomes row rows[i] of x.
void gather(InputRows& out, const InputRows& x, std::span<const int> rows) {
    out.resize(int(rows.size()), x.n_cols, x.of);
    for (int i = 0; i < out.n_rows; i++) {
        const int from = rows[size_t(i)];
        if (x.is_mx()) {
            std::copy_n(x.row_codes(from), x.n_cols, out.row_codes(i));
            std::copy_n(x.row_values(from), x.n_cols, out.row_values(i));
            std::copy_n(x.row_scales(from), x.n_blocks(), out.row_scales(i));
            continue;
        }
        const size_t at = size_t(from) * x.int8.n_groups();
        std::copy_n(x.int8.row_codes(from), x.n_cols, out.int8.row_codes(i));
        std::copy_n(x.int8.row_scales(from), x.int8.n_groups(), out.int8.row_scales(i));
        std::copy_n(x.int8.sums.data() + at, x.int8.n_groups(), out.int8.row_sums(i));
    }
}

// int4 codes -8..7 of n values, from n / 2 bytes in the order of formats/low_bits.py: blocks of 64 bytes,
// then of 32 and 16; in a block of B bytes, byte j has the codes j (low half) and j + B, each 8 too large.
void unpack_int4(int8_t* codes, const uint8_t* bytes, int n) {
    int left = n / 2;
    for (const int size : {64, 32, 16})
        for (; left >= size; left -= size, bytes += size, codes += 2 * size)
            for (int j = 0; j < size; j++) {
                codes[j] = int8_t((bytes[j] & 15) - 8);
                codes[j + size] = int8_t((bytes[j] >> 4) - 8);
            }
}

// A row of a matrix, as one row of x meets it.
struct MatrixRow {
    std::vector<int8_t> codes;           // int8 or int4
    std::vector<float> scales;           // (n_groups,), of these
    std::vector<float> values;           // MXFP8: what the elements mean, without the scales
    const uint8_t* mx_scales = nullptr;  // (n_groups,)

    // What column i means; so many columns share a scale.
    float value(int i, int group) const {
        if (mx_scales == nullptr) return float(codes[size_t(i)]) * scales[size_t(i / group)];
        const int scale = mx_scales[i / group];
        return scale == scale_nan ? std::numeric_limits<float>::quiet_NaN()
                                  : std::ldexp(values[size_t(i)], scale - scale_bias);
    }
};

// Row i of expert e.
void load_row(MatrixRow& row, const MoeMatrix& w, int e, int i) {
    const size_t at = size_t(e) * w.n_rows + i, n = size_t(w.n_cols);
    if (w.format.kind == WeightKind::mxfp8) {
        row.values.resize(n);
        for (size_t k = 0; k < n; k++) row.values[k] = e4m3_values[w.codes[at * n + k]];
        row.mx_scales = w.mx_scales + at * w.n_groups();
        return;
    }
    row.codes.resize(n), row.scales.resize(size_t(w.n_groups()));
    if (w.format.kind == WeightKind::a8w8) {
        std::memcpy(row.codes.data(), w.codes + at * n, n);
    } else {
        unpack_int4(row.codes.data(), w.codes + at * (n / 2), w.n_cols);
    }
    for (int g = 0; g < w.n_groups(); g++)
        row.scales[g] =
            w.row_scales != nullptr ? w.row_scales[at] : to_float(w.group_scales[at * w.n_groups() + g]);
}

// Row t of x times such a row: exact int32 sums of groups, scaled and added up in fp32; then x's scale. If
// the row is one group, both scales are multiplied first.
float dot(const InputRows& x, int t, const MatrixRow& w, int group) {
    float out = 0;
    if (!x.is_mx()) {
        if (w.scales.size() == 1)
            return float(dot(x.int8.row_codes(t), w.codes.data(), group)) *
                   (w.scales[0] * x.int8.row_scales(t)[0]);
        for (size_t g = 0; g < w.scales.size(); g++)
            out +=
                float(dot(x.int8.row_codes(t) + g * group, w.codes.data() + g * group, group)) * w.scales[g];
        return out * x.int8.row_scales(t)[0];
    }
    for (int g = 0; g < x.n_blocks(); g++) {
        const int x_scale = x.row_scales(t)[g], w_scale = w.mx_scales[g];
        if (x_scale == scale_nan || w_scale == scale_nan) return std::numeric_limits<float>::quiet_NaN();
        float sum = 0;  // products of two elements are exact
        const float *a = x.row_values(t) + g * group, *b = w.values.data() + g * group;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < group; k++) sum += a[k] * b[k];
        out += std::ldexp(sum, x_scale + w_scale - 2 * scale_bias);
    }
    return out;
}

// A8W4 as hardware computes it that multiplies int4 by int4: a code of x is 16 * high + low + 8, two digits
// in -8..7 each (MSD, the most significant digit first). The eights add the same to every product with a row,
// 8 * sum(scale * w): `assist`, which the file has, so that they cost one addition.
float dot_by_digits(const InputRows& x, int t, const MatrixRow& w, int group, float assist) {
    float out = 0;
    for (size_t g = 0; g < w.scales.size(); g++) {
        int32_t high_sum = 0, low_sum = 0;
        for (size_t k = g * group; k < (g + 1) * group; k++) {
            const int code = x.int8.row_codes(t)[k], high = code >> 4, low = (code & 15) - 8;
            high_sum += high * w.codes[k], low_sum += low * w.codes[k];
        }
        out += float(16 * high_sum + low_sum) * w.scales[g];
    }
    return (out + assist) * x.int8.row_scales(t)[0];
}

// out (x.n_rows, w.n_rows) = x times the matrix of one expert, or the only one, transposed.
struct Product {
    float* out;
    const MoeMatrix& w;
    int expert = 0;
};

// The same by the kernels in common/cpu/; false, and nothing written, if there is none.
bool fast_matmul(const InputRows& x, std::span<const Product> products) {
    std::vector<QuantProduct> list;
    for (const Product& p : products) {
        if (!p.w.has_kernel()) return false;
        list.push_back({p.out, p.w.view(p.expert), p.w.packed.empty() ? nullptr : p.w.packed[p.expert]});
    }
    return quant_matmul(x.int8.view(), list);
}

// The same as plain loops.
void plain_matmul(const InputRows& x, const Product& p) {
    parallel_ranges(p.w.n_rows, [&](int begin, int end) {
        MatrixRow row;
        for (int i = begin; i < end; i++) {
            load_row(row, p.w, p.expert, i);
            for (int t = 0; t < x.n_rows; t++) p.out[size_t(t) * p.w.n_rows + i] = dot(x, t, row, p.w.group);
        }
    });
}

// The products of one input with several matrices: of experts, or q, k and v.
void matmul(const InputRows& x, std::span<const Product> list) {
    const Stopwatch time(phase_seconds.matmul);
    if (fast_matmul(x, list)) return;
    for (const Product& p : list) plain_matmul(x, p);
}
void matmul(const InputRows& x, std::initializer_list<MatrixProduct<MoeMatrix>> products) {
    std::vector<Product> list;
    for (const MatrixProduct<MoeMatrix>& p : products) {
        p.out.n_rows = x.n_rows;
        list.push_back({p.out.row(0), p.w});
    }
    matmul(x, list);
}

// One row of the table per token, dequantized.
void embed(Rows& out, const MoeMatrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    MatrixRow row;
    for (int t = 0; t < out.n_rows; t++) {
        load_row(row, table, 0, tokens[t]);
        for (int i = 0; i < out.n_cols; i++) out.row(t)[i] = row.value(i, table.group);
    }
}

// ----------------------------------------------------------------------------
// Routing: which experts each token goes to

// A pair is a token and one of its k experts: t * k + r, r = 0 the best.
struct Routing {
    std::vector<int32_t> experts;  // (n_tokens, k)
    std::vector<float> weights;    // (n_tokens, k)
    std::vector<int> by_expert;    // all pairs, sorted by expert: the rows of what experts compute
    std::vector<int> row_of;       // (n_tokens, k), where a pair is in by_expert
};

// The k largest of a token's logits (n_experts,), of equal ones the lowest index, and their softmax over all.
void route(int32_t* experts, float* weights, const float* logits, const MoeConfig& moe) {
    std::vector<int32_t> all(size_t(moe.n_experts));
    std::iota(all.begin(), all.end(), 0);
    std::partial_sort(all.begin(), all.begin() + moe.n_active, all.end(),
                      [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    std::copy_n(all.begin(), moe.n_active, experts);
    const int n_summed = moe.norm_topk_prob ? moe.n_active : moe.n_experts;
    double sum = 0;
    for (int i = 0; i < n_summed; i++) sum += std::exp(double(logits[all[i]]) - double(logits[all[0]]));
    for (int r = 0; r < moe.n_active; r++)
        weights[r] = float(std::exp(double(logits[experts[r]]) - double(logits[all[0]])) / sum);
}

// The same for all tokens.
void route(Routing& out, const Rows& logits, const MoeConfig& moe) {
    const auto k = size_t(moe.n_active), n_pairs = size_t(logits.n_rows) * k;
    out.experts.resize(n_pairs), out.weights.resize(n_pairs);
    out.by_expert.resize(n_pairs), out.row_of.resize(n_pairs);
    for (int t = 0; t < logits.n_rows; t++)
        route(&out.experts[size_t(t) * k], &out.weights[size_t(t) * k], logits.row(t), moe);
    std::iota(out.by_expert.begin(), out.by_expert.end(), 0);
    std::stable_sort(out.by_expert.begin(), out.by_expert.end(),
                     [&](int a, int b) { return out.experts[size_t(a)] < out.experts[size_t(b)]; });
    for (size_t row = 0; row < n_pairs; row++) out.row_of[size_t(out.by_expert[row])] = int(row);
}

// Calls use(expert, first, n) for each expert that has rows: first, first + 1, ... of by_expert.
template <class Use>
void for_each_expert(const Routing& routing, Use use) {
    const auto n_pairs = int(routing.by_expert.size());
    for (int first = 0, end = 0; first < n_pairs; first = end) {
        const int32_t expert = routing.experts[size_t(routing.by_expert[size_t(first)])];
        while (end < n_pairs && routing.experts[size_t(routing.by_expert[size_t(end)])] == expert) end++;
        use(expert, first, end - first);
    }
}

// ----------------------------------------------------------------------------
// What experts compute: a row for each pair, sorted by expert

// Room for what one expert, or one token, has in hand.
struct Workspace {
    InputRows x;
    Rows product;
    std::vector<int> rows;
};

// Calls use(first, product) for the rows of each expert: `product` (n, w.n_rows) is the rows of x times the
// expert's matrix, those of pairs first, first + 1, ... of by_expert. of_tokens: x has a row for each token;
// otherwise it has one for each pair, sorted. One token's experts all read one row and go together.
template <class Use>
void expert_products(Workspace& space, const InputRows& x, bool of_tokens, const MoeMatrix& w,
                     const Routing& routing, const MoeConfig& moe, Use use) {
    const int k = moe.n_active;
    space.product.n_cols = w.n_rows;
    if (of_tokens && x.n_rows == 1) {
        space.product.reserve(k), space.product.n_rows = k;
        std::vector<Product> list;
        for_each_expert(routing, [&](int expert, int first, int) {
            list.push_back({space.product.row(first), w, expert});
        });
        matmul(x, list);
        return use(0, space.product);
    }
    for_each_expert(routing, [&](int expert, int first, int n) {
        space.rows.resize(size_t(n));
        for (int i = 0; i < n; i++) {
            const int slot = first + i;
            space.rows[size_t(i)] = of_tokens ? routing.by_expert[size_t(slot)] / k : slot;
        }
        gather(space.x, x, space.rows);
        space.product.reserve(n), space.product.n_rows = n;
        const Product product{space.product.row(0), w, expert};
        matmul(space.x, {&product, 1});
        use(first, space.product);
    });
}

// out (n_pairs, w.n_rows) = the rows of x, each times its expert's matrix.
void grouped_matmul(Rows& out, Workspace& space, const InputRows& x, bool of_tokens, const MoeMatrix& w,
                    const Routing& routing, const MoeConfig& moe) {
    out.n_rows = int(routing.by_expert.size());
    expert_products(space, x, of_tokens, w, routing, moe, [&](int first, const Rows& product) {
        std::copy(product.row(0), product.row(product.n_rows), out.row(first));
    });
}

// out (n_pairs, n) = silu(first half) * second half of each row of x (n_pairs, 2 n).
void swiglu(Rows& out, const Rows& x) {
    out.n_rows = x.n_rows;
    for_each_row(x.n_rows, [&](int i) { swiglu(out.row(i), x.row(i), x.row(i) + out.n_cols, out.n_cols); });
}

// The fused operator (golden/grouped.py): the three steps above, matmul, swiglu and quantize, for one
// expert's rows after another. fp32 results of one expert are all that there is at a time, and stay in the
// cache.
void grouped_matmul_swiglu_quant(InputRows& out, Workspace& space, const InputRows& x, const MoeMatrix& w,
                                 const Routing& routing, const MoeConfig& moe) {
    const int half = w.n_rows / 2;
    out.resize(int(routing.by_expert.size()), half, x.of);
    expert_products(space, x, true, w, routing, moe, [&](int first, Rows& product) {
        for_each_row(product.n_rows, [&](int i) {
            swiglu(product.row(i), product.row(i), product.row(i) + half, half);
            quantize_row(out, first + i, product.row(i));
        });
    });
}

// out (n_tokens, dim) = the sum of each token's experts' outputs (n_pairs, dim) times their weights, in
// rising order of index.
void combine(Rows& out, const Rows& down, const Routing& routing, int k) {
    out.n_rows = down.n_rows / k;
    for_each_row(out.n_rows, [&](int t) {
        const auto first = size_t(t) * size_t(k);
        std::vector<size_t> pairs(size_t(k), 0);
        std::iota(pairs.begin(), pairs.end(), first);
        std::sort(pairs.begin(), pairs.end(),
                  [&](size_t a, size_t b) { return routing.experts[a] < routing.experts[b]; });
        std::fill_n(out.row(t), out.n_cols, 0.0f);
        for (const size_t pair : pairs)
            for (int i = 0; i < out.n_cols; i++)
                out.row(t)[i] += routing.weights[pair] * down.row(routing.row_of[pair])[i];
    });
}

// ----------------------------------------------------------------------------
// The tensors of a file

size_t read_own_fields(const HeaderReader& h, Config& c) {
    constexpr size_t format = 0xC0, n_experts = 0xC4, n_active = 0xC8, hidden_dim = 0xCC,
                     norm_topk_prob = 0xD0, group = 0xD4, pure = 0xD8;
    MoeConfig& m = c.moe;
    m.experts.kind = WeightKind(h.checked_int("format", h.i32(format), 0, 2));
    m.n_experts = h.checked_int("n_experts", h.i32(n_experts), 1, 1 << 10);
    m.n_active = h.checked_int("n_active", h.i32(n_active), 1, m.n_experts);
    m.hidden_dim = h.checked_int("moe_hidden_dim", h.i32(hidden_dim), 1, 5120);
    m.norm_topk_prob = h.checked_int("norm_topk_prob", h.i32(norm_topk_prob), 0, 1) == 1;
    m.experts.group = h.checked_int("group", h.i32(group), 0, 1024);
    m.pure = h.checked_int("pure", h.i32(pure), 0, 1) == 1;
    // The table of dense layers is the first tensor: the others follow from it.
    if (h.file.size() < header_size + size_t(c.n_layers)) h.fail("dense_layers ends too soon");
    for (int l = 0; l < c.n_layers; l++)
        m.is_dense.push_back(uint8_t(h.checked_int("dense_layers", h.u8(header_size + size_t(l)), 0, 1)));
    return pure + sizeof(int32_t);
}

// Throws for groups that a format has not, and for rows that are no multiple of what they have to be.
void check_config(const Config& c) {
    auto fail = [](const std::string& what) { throw std::runtime_error(what); };
    if (c.group_size != 0)
        fail("group_size is " + std::to_string(c.group_size) + ", expected 0 (whole rows)");
    for (const auto& [name, n] : {std::pair{"dim", c.dim}, std::pair{"hidden_dim", c.hidden_dim},
                                  std::pair{"n_heads * head_dim", c.q_dim()}}) {
        if (n % 4 != 0 || n > max_group_size)
            fail(std::string(name) + " is " + std::to_string(n) + ", expected a multiple of 4, at most " +
                 std::to_string(max_group_size));
    }
    const auto [kind, group] = c.moe.experts;
    const bool fits = kind == WeightKind::a8w8   ? group == 0
                      : kind == WeightKind::a8w4 ? group == 0 || group == 32 || group == 64 || group == 128
                                                 : group > 0 && group % 32 == 0;
    if (!fits) fail("group is " + std::to_string(group) + ", which the experts' format has not");
    if (c.moe.pure && kind == WeightKind::a8w8) fail("pure is 1, but all of A8W8 is int8: expected 0");
    const int unit = std::max(group, kind == WeightKind::a8w4 ? 32 : 4);
    std::vector<std::pair<const char*, int>> widths{{"dim", c.dim}, {"moe_hidden_dim", c.moe.hidden_dim}};
    const auto& is_dense = c.moe.is_dense;
    const bool any_dense = std::find(is_dense.begin(), is_dense.end(), 1) != is_dense.end();
    if (c.moe.pure) widths.push_back({"n_heads * head_dim", c.q_dim()});
    if (c.moe.pure && any_dense) widths.push_back({"hidden_dim", c.hidden_dim});
    for (const auto& [name, n] : widths) {
        if (n % unit != 0)
            fail(std::string(name) + " is " + std::to_string(n) + ", not a multiple of " +
                 std::to_string(unit));
    }
}

const FileFormat<Config> file_format{.scheme = scheme_moe,
                                     .check = check_config,
                                     .read_own = read_own_fields,
                                     .first_arch = Arch::qwen3_moe,
                                     .last_arch = Arch::qwen3_moe,
                                     .alignment = 64};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    Config c;

    const uint8_t* dense_layers = file.next<uint8_t>("dense_layers", {c.n_layers});  // read with the header
    LayerNorms<float> norms = file.layer_norms<float>(c);     // attn, ffn: n_layers of (dim,); last: (dim,)
    HeadNorms<float> head_norms = file.head_norms<float>(c);  // q, k: n_layers of (head_dim,)
    std::vector<const float*> router = routers();             // of each layer with experts: (n_experts, dim)

    MoeMatrix embedding = other("embed", c.vocab_size, c.dim);
    std::vector<MoeMatrix> q_proj = others("attn.q_proj", c.q_dim(), c.dim);
    std::vector<MoeMatrix> k_proj = others("attn.k_proj", c.kv_dim(), c.dim);
    std::vector<MoeMatrix> v_proj = others("attn.v_proj", c.kv_dim(), c.dim);
    std::vector<MoeMatrix> o_proj = others("attn.o_proj", c.dim, c.q_dim());
    std::vector<MoeMatrix> gate_proj = others("ffn.gate_proj", c.hidden_dim, c.dim);  // of dense layers
    std::vector<MoeMatrix> down_proj = others("ffn.down_proj", c.dim, c.hidden_dim);
    std::vector<MoeMatrix> up_proj = others("ffn.up_proj", c.hidden_dim, c.dim);
    MoeMatrix classifier = c.shared_classifier ? embedding : other("classifier", c.vocab_size, c.dim);
    std::vector<MoeMatrix> gate_up{};  // of each layer with experts: 2 * moe.hidden_dim rows of dim columns
    std::vector<MoeMatrix> down{};     // dim rows of moe.hidden_dim columns
    bool experts_listed = list_experts();  // layer by layer, gate_up and down of each together

    static std::string layer_name(int l, const char* part) {
        return "layers." + std::to_string(l) + "." + part;
    }
    std::vector<const float*> routers() {
        std::vector<const float*> found(size_t(c.n_layers), nullptr);
        for (int l = 0; l < c.n_layers; l++)
            if (c.has_experts(l))
                found[l] = file.next<float>(layer_name(l, "moe.router"), {c.moe.n_experts, c.dim});
        return found;
    }
    // The matrices of n_experts experts, or, if that is 0, another one: codes, then scales.
    MoeMatrix matrix(const std::string& name, const WeightFormat& format, int n_experts, int n_rows,
                     int n_cols) {
        MoeMatrix w;
        w.format = format, w.n_experts = std::max(1, n_experts), w.n_rows = n_rows, w.n_cols = n_cols;
        w.group = format.group > 0 ? format.group : n_cols;
        const Share read = n_experts > 0 ? Share{c.moe.n_active, n_experts} : Share{};
        auto shape = [&](std::initializer_list<int> behind_rows) {
            std::vector<int> all{n_experts, n_rows};
            if (n_experts == 0) all.erase(all.begin());
            all.insert(all.end(), behind_rows);
            return all;
        };
        if (format.kind == WeightKind::a8w8) {
            w.codes =
                reinterpret_cast<const uint8_t*>(file.next<int8_t>(name + ".codes", shape({n_cols}), read));
            w.row_scales = file.next<float>(name + ".scales", n_experts > 0 ? shape({}) : shape({1}), read);
        } else if (format.kind == WeightKind::mxfp8) {
            w.codes = file.next<uint8_t>(name + ".codes", shape({n_cols}), read);
            w.mx_scales = file.next<uint8_t>(name + ".scales", shape({w.n_groups()}), read);
        } else {
            w.codes = file.next<uint8_t>(name + ".codes", shape({n_cols / 2}), read);
            if (format.group > 0)
                w.group_scales = file.next<Half>(name + ".scales", shape({w.n_groups()}), read);
            else
                w.row_scales = file.next<float>(name + ".scales", shape({}), read);
            w.assist = file.next<float>(name + ".assist", shape({}), {0, 1});
        }
        return w;
    }
    // A matrix that is no expert's, and those of all layers.
    MoeMatrix other(const std::string& name, int n_rows, int n_cols) {
        return matrix(name, c.moe.others(), 0, n_rows, n_cols);
    }
    std::vector<MoeMatrix> others(const char* part, int n_rows, int n_cols) {
        std::vector<MoeMatrix> found(size_t(c.n_layers), MoeMatrix{});
        for (int l = 0; l < c.n_layers; l++)
            if (part[0] == 'a' || !c.has_experts(l)) found[l] = other(layer_name(l, part), n_rows, n_cols);
        return found;
    }
    // Packs the matrices that are multiplied for the kernels.
    void pack(PackedMatrices& packed) {
        auto pack_all = [&](MoeMatrix& m) {
            for (int e = 0; e < m.n_experts && m.n_rows > 0 && m.has_kernel(); e++)
                m.packed.push_back(packed.add(m.view(e)));
        };
        for (auto* layers :
             {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj, &gate_up, &down})
            for (MoeMatrix& m : *layers) pack_all(m);
        pack_all(classifier);
    }
    bool list_experts() {
        gate_up.resize(size_t(c.n_layers)), down.resize(size_t(c.n_layers));
        for (int l = 0; l < c.n_layers; l++) {
            if (!c.has_experts(l)) continue;
            auto experts = [&](const char* part, int n_rows, int n_cols) {
                return matrix(layer_name(l, part), c.moe.experts, c.moe.n_experts, n_rows, n_cols);
            };
            gate_up[l] = experts("moe.gate_up_proj", 2 * c.moe.hidden_dim, c.dim);
            down[l] = experts("moe.down_proj", c.dim, c.moe.hidden_dim);
        }
        return true;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights

constexpr int max_chunk = 512;  // tokens of a prompt that go through together: each expert gets a few of them

// Whether experts go through the fused operator: --no-fuse.
bool is_fused(const Options& options) { return !options.own.contains("--no-fuse"); }

struct RunState {
    // A row per token of the chunk.
    Rows x;         // (max_chunk, dim), the residual stream
    Rows normed;    // (max_chunk, dim), normalized x
    Rows q;         // (max_chunk, n_heads * head_dim)
    Rows k;         // (max_chunk, n_kv_heads * head_dim)
    Rows v;         // (max_chunk, n_kv_heads * head_dim)
    Rows attn_out;  // (max_chunk, n_heads * head_dim)
    Rows proj;      // (max_chunk, dim), the output of o_proj and of down_proj
    Rows gate;      // (max_chunk, hidden_dim), of dense layers
    Rows up;        // (max_chunk, hidden_dim)
    Rows router;    // (max_chunk, n_experts)
    Rows down;      // (max_chunk * n_active, dim), a row per pair of token and expert
    Rows gate_up;   // (max_chunk * n_active, 2 * moe.hidden_dim), if experts are not fused
    Rows hidden;    // (max_chunk * n_active, moe.hidden_dim), if experts are not fused
    Rows logits;    // (1 or max_chunk, vocab_size)

    InputRows xq;             // the quantized input of the products that come next, a row per token
    InputRows expert_hidden;  // and of experts' second product, a row per pair
    Routing routing;
    Workspace workspace;
    RopeAngles angles;         // of the chunk's positions
    HeadScores scores, probs;  // attention's, if there is a trace
    KvCache cache;             // keys and values of `context` positions

    // Allocates a run's memory; `context` is the number of positions to keep.
    RunState(const Config& c, const Options& options, int context, bool traced) {
        const int n = std::min(max_chunk, context);
        for (Rows* rows : {&x, &normed, &proj}) *rows = Rows(n, c.dim);
        for (Rows* rows : {&q, &attn_out}) *rows = Rows(n, c.q_dim());
        for (Rows* rows : {&k, &v}) *rows = Rows(n, c.kv_dim());
        for (Rows* rows : {&gate, &up}) *rows = Rows(n, c.hidden_dim);
        router = Rows(n, c.moe.n_experts);
        const size_t n_pairs = size_t(n) * size_t(c.moe.n_active);
        down = Rows(n_pairs, c.dim);
        const size_t n_unfused = is_fused(options) && !traced ? 0 : n_pairs;
        gate_up = Rows(n_unfused, 2 * c.moe.hidden_dim);
        hidden = Rows(n_unfused, c.moe.hidden_dim);
        logits = Rows(n_logits(options, traced, n), c.vocab_size);
        xq.resize(n, std::max({c.dim, c.q_dim(), c.hidden_dim}), c.moe.others());
        if (c.moe.n_experts > 0) {
            if (c.moe.experts.kind == WeightKind::mxfp8 && !c.moe.pure) xq.resize(n, c.dim, c.moe.experts);
            expert_hidden.resize(int(n_pairs), c.moe.hidden_dim, c.moe.experts);
            workspace.x.resize(n, std::max(c.dim, c.moe.hidden_dim), c.moe.experts);
            workspace.product =
                Rows(size_t(std::max(n, c.moe.n_active)), std::max(c.dim, 2 * c.moe.hidden_dim));
        }
        angles = RopeAngles(c, n);
        scores.wanted = probs.wanted = traced;
        cache = KvCache(kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, context);
        count_attention(context);
    }
};

struct Transformer {
    ModelFileOf<Config> file;
    Weights weights;
    PackedMatrices packed;
    RunState state;
    Trace* trace = nullptr;  // not null: record every step
    bool fused = true;       // experts by the fused operator, or step by step, which gives the same bits
};

// ----------------------------------------------------------------------------
// What a trace has of quantized inputs, and of experts: a row per pair, the best expert of each token first

// Calls use(".q", codes, n_cols) and use(".s", scales, n) with n values of each row of x: a scale per row, or
// those of its blocks.
template <class Use>
void with_codes(const InputRows& x, Use use) {
    if (x.is_mx()) {
        use(".q", x.codes.data(), x.n_cols);
        return use(".s", x.scales.data(), x.n_blocks());
    }
    std::vector<float> scales;
    for (int i = 0; i < x.n_rows; i++) scales.push_back(x.int8.row_scales(i)[0]);
    use(".q", x.int8.codes.data(), x.n_cols);
    use(".s", scales.data(), 1);
}

void record_input(const Recorder& record, const std::string& name, const InputRows& x) {
    if (!record) return;
    with_codes(x, [&](const char* part, auto* values, int n) {
        record((name + part).c_str(), values, x.n_rows, {n});
    });
}
void record_pairs(const Recorder& record, const std::string& name, const InputRows& x, const Routing& routing,
                  int k) {
    if (!record) return;
    with_codes(x, [&](const char* part, auto* values, int n) {
        record.in_order(name + part, values, n, routing.row_of, k);
    });
}
void record_pairs(const Recorder& record, const char* name, const Rows& x, const Routing& routing, int k) {
    record.in_order(name, x.row(0), x.n_cols, routing.row_of, k);
}

// Appends the sums of row t of x and each row of an expert's matrix.
void append_sums(std::vector<int32_t>& sums, const InputRows& x, int t, const MoeMatrix& w, int expert) {
    MatrixRow row;
    append_sums(sums, x.int8.row_codes(t), w.n_rows, w.n_cols, w.group, [&](int i) {
        load_row(row, w, expert, i);
        return row.codes.data();
    });
}

// Experts' sums, each token's k: (n_tokens, k, w.n_rows, n_groups). MXFP8 has none.
void record_sums(const Recorder& record, const std::string& name, const InputRows& x, bool of_tokens,
                 const MoeMatrix& w, const Routing& routing, int k) {
    if (x.is_mx()) return;
    record.sums(name, int(routing.experts.size()) / k, {k, w.n_rows, w.n_groups()},
                [&](std::vector<int32_t>& sums, int t) {
                    const size_t first = size_t(t) * size_t(k);
                    for (size_t pair = first; pair < first + size_t(k); pair++)
                        append_sums(sums, x, of_tokens ? t : routing.row_of[pair], w, routing.experts[pair]);
                });
}

// Another product, and its sums (n_tokens, w.n_rows, n_groups).
void record_product(const Recorder& record, const std::string& name, const Rows& out, const InputRows& x,
                    const MoeMatrix& w) {
    record(name.c_str(), out);
    if (x.is_mx()) return;
    record.sums(name, x.n_rows, {w.n_rows, w.n_groups()},
                [&](std::vector<int32_t>& sums, int t) { append_sums(sums, x, t, w, 0); });
}

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions pos, pos + 1, ...
void attention_block(Transformer& m, int l, int pos) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.attn[l], c.dim, c.norm_eps);          record("attn.norm", s.normed);
    quantize(s.xq, s.normed, c.moe.others());                            record_input(record, "attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                    // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                  record_product(record, "attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                         record_product(record, "attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                         record_product(record, "attn.v_proj", s.v, s.xq, w.v_proj[l]);
    if (c.has_head_norms()) {                                            // each head on its own
        rmsnorm(s.q, s.q, w.head_norms.q[l], c.head_dim, c.norm_eps);    record("attn.q_norm", s.q, c.head_dim);
        rmsnorm(s.k, s.k, w.head_norms.k[l], c.head_dim, c.norm_eps);    record("attn.k_norm", s.k, c.head_dim);
    }
    rope(s.q, s.angles, c.head_dim);                                     record("attn.q_rope", s.q, c.head_dim);
    rope(s.k, s.angles, c.head_dim);                                     record("attn.k_rope", s.k, c.head_dim);
    s.cache.append(l, pos, s.k, s.v);
    attention(s.attn_out, s.scores, s.probs, s.q, s.cache, l, pos);      record("attn.scores", s.scores);
                                                                         record("attn.probs", s.probs);
                                                                         record("attn.mix", s.attn_out);
    quantize(s.xq, s.attn_out, c.moe.others());                          record_input(record, "attn.mix", s.xq);
    matmul(s.xq, {{s.proj, w.o_proj[l]}});                               record_product(record, "attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                    record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void dense_block(Transformer& m, int l) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim,  c.norm_eps);          record("ffn.norm", s.normed);
    quantize(s.xq, s.normed, c.moe.others());                            record_input(record, "ffn.norm", s.xq);
    matmul(s.xq, {{s.gate, w.gate_proj[l]},
                  {s.up, w.up_proj[l]}});                                record_product(record, "ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                         record_product(record, "ffn.up_proj", s.up, s.xq, w.up_proj[l]);
    swiglu(s.gate, s.gate, s.up);                                        record("ffn.swiglu", s.gate);
    quantize(s.xq, s.gate, c.moe.others());                              record_input(record, "ffn.swiglu", s.xq);
    matmul(s.xq, {{s.proj, w.down_proj[l]}});                            record_product(record, "ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
    add(s.x, s.proj);                                                    record("ffn.residual", s.x);
}

// x (n_tokens, dim) += the weighted sum of what each token's experts make of it, in layer l.
void moe_block(Transformer& m, int l) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);
    const MoeConfig& moe = c.moe;
    const int n = s.x.n_rows, k = moe.n_active;

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim, c.norm_eps);           record("ffn.norm", s.normed);
    fp64_matmul(s.router, s.normed, w.router[l]);                        record("moe.router", s.router);
    route(s.routing, s.router, moe);                                     record("moe.experts", s.routing.experts.data(), n, {k});
                                                                         record("moe.weights", s.routing.weights.data(), n, {k});
    quantize(s.xq, s.normed, moe.experts);                               record_input(record, "ffn.norm", s.xq);
    if (m.fused && !m.trace) {
        grouped_matmul_swiglu_quant(s.expert_hidden, s.workspace, s.xq, w.gate_up[l], s.routing, moe);
    } else {                                                             // the same, and every step is kept
        grouped_matmul(s.gate_up, s.workspace, s.xq, true, w.gate_up[l], s.routing, moe);
                                                                         record_sums(record, "moe.gate_up_proj", s.xq, true, w.gate_up[l], s.routing, k);
                                                                         record_pairs(record, "moe.gate_up_proj", s.gate_up, s.routing, k);
        swiglu(s.hidden, s.gate_up);                                     record_pairs(record, "moe.swiglu", s.hidden, s.routing, k);
        quantize(s.expert_hidden, s.hidden, moe.experts);                record_pairs(record, std::string("moe.swiglu"), s.expert_hidden, s.routing, k);
    }
    grouped_matmul(s.down, s.workspace, s.expert_hidden, false, w.down[l], s.routing, moe);
                                                                         record_sums(record, "moe.down_proj", s.expert_hidden, false, w.down[l], s.routing, k);
                                                                         record_pairs(record, "moe.down_proj", s.down, s.routing, k);
    combine(s.proj, s.down, s.routing, k);                               record("moe.mix", s.proj);
    add(s.x, s.proj);                                                    record("ffn.residual", s.x);
}

// x (n_tokens, dim) += what the feed-forward block of layer l makes of it, dense or a mixture of experts.
void feed_forward_block(Transformer& m, int l) {
    m.file.config.has_experts(l) ? moe_block(m, l) : dense_block(m, l);
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const Recorder record(m.trace, -1);

    embed(s.x, w.embedding, tokens);                                     record("tokens", tokens.data(), n_tokens, {});
                                                                         record("embed", s.x);
    s.angles.set_positions(pos, n_tokens);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, pos);
        feed_forward_block(m, l);
    }
    if (n_logits == 0) return {};
    s.x.keep_last(n_logits);
    rmsnorm(s.normed, s.x, w.norms.last, c.dim, c.norm_eps);             record("norm", s.normed);
    quantize(s.xq, s.normed, c.moe.others());                            record_input(record, "norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                            record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

// Opens a MoE file and allocates a run's memory. Throws std::runtime_error with one line that names the file.
Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    Transformer m = load_cpu<Transformer>(path, file_format, max_chunk, options, trace);
    if (packs_weights(m.file, options)) m.weights.pack(m.packed);
    return m;
}

// Multiply-adds of one token in the layers' matrices, of the active experts alone.
uint64_t macs_per_token(const Config& c) {
    uint64_t width = 0;  // of all layers' feed-forward blocks
    for (int l = 0; l < c.n_layers; l++)
        width +=
            c.has_experts(l) ? uint64_t(c.moe.n_active) * uint64_t(c.moe.hidden_dim) : uint64_t(c.hidden_dim);
    return uint64_t(c.dim) *
           (uint64_t(c.n_layers) * (2 * uint64_t(c.q_dim()) + 2 * uint64_t(c.kv_dim())) + 3 * width);
}

// What multiplies all matrices but the experts'.
const char* kernel_name(const Config& c) {
    const WeightFormat format = c.moe.others();
    const bool is_plain = format.kind == WeightKind::mxfp8 ||
                          (format.kind == WeightKind::a8w4 && (format.group == 0 || c.dim % 64 != 0));
    return is_plain ? "portable" : int8_kernel_name(kernel_group(format, c.dim));
}

Model load_model(const Options& options, Trace* trace) {
    auto m = std::make_shared<Transformer>(load_transformer(options.model_path, options, trace));
    m->fused = is_fused(options);
    const MoeConfig& moe = m->file.config.moe;
    const std::string experts =
        std::to_string(moe.n_active) + " of " + std::to_string(moe.n_experts) + " experts in ";
    const int group = moe.experts.group;
    const std::string groups = group > 0 ? ", groups of " + std::to_string(group) : ", one scale a row";
    const char* const names[] = {"A8W8", "A8W4", "MXFP8"};
    Model model = cpu_model(m, options,
                            experts + names[int(moe.experts.kind)] + groups +
                                (moe.pure ? "; all else the same" : "; all else W8A8, one scale a row"),
                            kernel_name(m->file.config), max_chunk);
    model.macs_per_token = macs_per_token(m->file.config);
    return model;
}

const OwnOption own_options[] = {
    kv_option, mmap_option, {"--no-fuse", {}, "experts step by step, without the fused operator"}};

#ifndef RUNQ_NO_MAIN
#include "common/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(
        argc, argv, {"runq_moe", "Qwen3-MoE with experts in A8W8, A8W4 or MXFP8", load_model, own_options});
}
#endif
