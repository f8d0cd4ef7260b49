// runq_moe: Qwen3-MoE inference around one fused operator, to read from top to bottom.
//
// A layer has many feed-forward networks, its experts, and a token goes through a few of them. The operator
// takes rows sorted by expert, multiplies each by its expert's gate and up, puts the first half through
// swish, multiplies by the second half and quantizes the product: nothing in between is written to memory.
// Experts are in A8W8 (int8 by int8), A8W4 (int8 by int4) or MXFP8 (blocks of 8-bit floats under one power of
// two), as the file says. Attention, dense layers, embedding and classifier are in A8W8, or as experts are.
// docs/moe.md tells the whole story.
//
// This file has its matrices, quantizer, products and operator as plain loops, the tensors of a file, and the
// forward pass. The rest is in engine/, as runq.cpp says; MXFP8 is cpu/mxfp8.h, routing cpu/routing.h.
//
//     make runq_moe model_moe.bin && ./runq_moe model_moe.bin -i "Once upon a time"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/app/trace.h"
#include "engine/cpu/attention.h"
#include "engine/cpu/coded_rows.h"
#include "engine/cpu/fp64_matmul.h"
#include "engine/cpu/half.h"
#include "engine/cpu/mxfp8.h"
#include "engine/cpu/ops.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/routing.h"
#include "engine/cpu/rows.h"
#include "engine/model/header.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "engine/os/clock.h"
#include "engine/os/threads.h"

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
    WeightFormat expert_format;
    bool pure = false;              // other matrices are stored as experts are, not in A8W8 (export --pure)
    int n_experts = 0;              // of each layer that has any
    int n_active = 0;               // experts that a token goes to
    int hidden_dim = 0;             // length inside an expert (moe_intermediate_size)
    bool norm_topk_prob = false;    // weights of the active experts are divided by their sum
    std::vector<uint8_t> is_dense;  // (n_layers,), 1: no experts

    // The format of all matrices but the experts'.
    WeightFormat other_format() const { return pure ? expert_format : WeightFormat{}; }
};

struct Config : ModelConfig {
    MoeConfig moe;

    // Whether the feed-forward block of layer l is a mixture of experts.
    bool has_experts(int l) const { return moe.n_experts > 0 && moe.is_dense[size_t(l)] == 0; }
};

// ----------------------------------------------------------------------------
// Matrices

// The columns that go through the fast kernels under one scale of each side.
int kernel_group(const WeightFormat& format, int n_cols) {
    if (format.kind == WeightKind::a8w8 || n_cols % 32 != 0) return n_cols;
    return format.group == 32 || n_cols % 64 != 0 ? 32 : 64;
}

// The weights of an expert, or others. A8W8 and A8W4 are described as to any kernel (cpu/quant_matrix.h),
// int4 codes as 8 too large. MXFP8 has E4M3 codes, and scales (n_rows, n_cols / group) of a byte each.
struct MoeMatrix : ModelMatrix {
    WeightFormat format;
    const float* assist = nullptr;  // (n_rows,), A8W4: see dot_by_digits

    bool is_mx() const { return format.kind == WeightKind::mxfp8; }
    const uint8_t* mx_scales() const { return static_cast<const uint8_t*>(scales); }
    // Whether the kernels multiply it: A8W8, and A8W4 in groups.
    bool has_kernel() const { return bits == 8 ? !is_mx() : format.group > 0 && n_cols % 64 == 0; }
    // The matrix that lies behind this one in the same tensors.
    MoeMatrix next() const {
        MoeMatrix w = *this;
        if (codes == nullptr) return w;
        w.codes += size_t(n_rows) * code_bytes(w);
        w.scales = mx_scales() + size_t(n_rows) * (is_mx() ? n_scales(w) : scale_bytes(w));
        if (assist != nullptr) w.assist += n_rows;
        return w;
    }
};

// A row of an int8 or int4 matrix as the plain loops multiply it.
struct MatrixRow {
    std::vector<int8_t> codes;  // (n_cols,)
    std::vector<float> scales;  // (n_groups,)
};

void load_row(MatrixRow& row, const MoeMatrix& w, int i) {
    row.codes.resize(size_t(w.n_cols)), row.scales.resize(size_t(n_scales(w)));
    unpack_row(reinterpret_cast<uint8_t*>(row.codes.data()), w, i);
    for (int8_t& code : row.codes) code = int8_t(code - w.zero_point);
    for (int g = 0; g < n_scales(w); g++) row.scales[g] = weight_scale(w, i, g);
}

// One row of the table per token, dequantized.
void embed(Rows& out, const MoeMatrix& table, std::span<const int> tokens) {
    out.n_rows = int(tokens.size());
    MatrixRow row;
    for (int t = 0; t < out.n_rows; t++) {
        if (!table.is_mx()) load_row(row, table, tokens[t]);
        const size_t at = size_t(tokens[t]) * size_t(table.n_cols);  // of the row's first code
        for (int i = 0; i < out.n_cols; i++)
            out.row(t)[i] = table.is_mx()
                                ? scaled_value(table.codes[at + i], table.mx_scales()[(at + i) / table.group])
                                : float(row.codes[i]) * row.scales[i / table.group];
    }
}

// ----------------------------------------------------------------------------
// Quantizing what matrices are multiplied by: to int8 with one scale a row, or to MXFP8 (engine/cpu/mxfp8.h).
// The loops are the specification of int8_quantize and quant_matmul.

// Makes room for rows that matrices of a format are multiplied by.
void resize(CodedRows& out, int n_rows, int n_cols, const WeightFormat& of_matrices) {
    if (of_matrices.kind == WeightKind::mxfp8) return out.resize_mx(n_rows, n_cols, of_matrices.group);
    out.resize_int8(n_rows, n_cols, kernel_group(of_matrices, n_cols));
}

// Such room for n_rows rows of n_cols values; none if there are no rows.
CodedRows coded_rows(int n_rows, int n_cols, const WeightFormat& of_matrices) {
    CodedRows rows;
    if (n_rows > 0) resize(rows, n_rows, n_cols, of_matrices);
    return rows;
}

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

// x (n_cols,) becomes row t of `out`.
void quantize_row(CodedRows& out, int t, const float* x) {
    if (out.is_mx) return quantize_row(out.mx, t, x);
    const int n = out.n_cols;
    int8_t* codes = out.int8.row_codes(t);
    float* scales = out.int8.row_scales(t);
    if (!int8_quantize(codes, scales, out.int8.row_sums(t), x, n, n)) scales[0] = quantize_row(codes, x, n);
    std::fill_n(scales, out.int8.n_groups(), scales[0]);
    sum_groups(out.int8.row_sums(t), codes, n, out.int8.group_size);
    keep_nan(out.int8, t, x);
}

// All rows of x, for matrices of a format: the input of the products that follow.
void quantize(CodedRows& out, const Rows& x, const WeightFormat& format) {
    resize(out, x.n_rows, x.n_cols, format);
    for_each_row(x.n_rows, [&](int t) { quantize_row(out, t, x.row(t)); });
}

// ----------------------------------------------------------------------------
// Products

// Row t of x times an int8 or int4 row: exact int32 sums of groups, scaled and added up in fp32; then x's
// scale. If the row is one group, both scales are multiplied first.
float dot(const Int8Rows& x, int t, const MatrixRow& w) {
    const int8_t* codes = x.row_codes(t);
    const float x_scale = x.row_scales(t)[0];
    const size_t group = w.codes.size() / w.scales.size();
    float out = 0;
    for (size_t g = 0; g < w.scales.size(); g++) {
        int32_t sum = 0;
        for (size_t k = g * group; k < (g + 1) * group; k++) sum += int32_t(codes[k]) * int32_t(w.codes[k]);
        if (w.scales.size() == 1) return float(sum) * (w.scales[0] * x_scale);
        out += float(sum) * w.scales[g];
    }
    return out * x_scale;
}

// A8W4 as hardware computes it that multiplies int4 by int4: a code of x is 16 * high + low + 8, two digits
// in -8..7 each (MSD, the most significant digit first). The eights add the same to every product with a row,
// 8 * sum(scale * w): `assist`, which the file has, so that they cost one addition. Tests hold it to dot().
float dot_by_digits(const Int8Rows& x, int t, const MatrixRow& w, float assist) {
    const int8_t* codes = x.row_codes(t);
    const size_t group = w.codes.size() / w.scales.size();
    float out = 0;
    for (size_t g = 0; g < w.scales.size(); g++) {
        int32_t high_sum = 0, low_sum = 0;
        for (size_t k = g * group; k < (g + 1) * group; k++) {
            high_sum += (codes[k] >> 4) * w.codes[k];
            low_sum += ((codes[k] & 15) - 8) * w.codes[k];
        }
        out += float(16 * high_sum + low_sum) * w.scales[g];
    }
    return (out + assist) * x.row_scales(t)[0];
}

// out (x.n_rows, w.n_rows) = x times the matrix transposed, as plain loops.
void plain_matmul(const CodedRows& x, const MatrixProduct<MoeMatrix>& p) {
    p.out.n_rows = p.first_row + x.n_rows;
    if (x.is_mx) return matmul(p.out, p.first_row, x.mx, p.w.codes, p.w.mx_scales());
    parallel_ranges(p.w.n_rows, [&](int begin, int end) {
        MatrixRow row;
        for (int i = begin; i < end; i++) {
            load_row(row, p.w, i);
            for (int t = 0; t < x.n_rows; t++) p.out.row(p.first_row + t)[i] = dot(x.int8, t, row);
        }
    });
}

// The products of one input with several matrices of a format: of experts, or q, k and v.
void matmul(const CodedRows& x, const std::vector<MatrixProduct<MoeMatrix>>& products) {
    const Stopwatch time(phase_seconds.matmul);
    if (products[0].w.has_kernel() && quant_matmul(x.int8, products)) return;
    for (const MatrixProduct<MoeMatrix>& p : products) plain_matmul(x, p);
}

// ----------------------------------------------------------------------------
// What experts compute: a row for each pair, sorted by expert

// Room for what one expert, or one token, has in hand.
struct Workspace {
    CodedRows x;
    Rows product;
};

// Calls use(first, product) for each expert: `product` (n, n_out) has rows first, first + 1, ... of
// by_expert, and row i is the expert's matrix times row rows[i] of x. One token's experts all read one row
// and go together.
template <class Use>
void expert_products(Workspace& space, const CodedRows& x, const std::vector<int>& rows,
                     const std::vector<MoeMatrix>& experts, const Routing& routing, Use use) {
    space.product.n_cols = experts[0].n_rows;
    if (x.n_rows == 1) {
        space.product.reserve(int(rows.size()));
        std::vector<MatrixProduct<MoeMatrix>> products;
        for_each_expert(routing, [&](int expert, int first, int) {
            products.push_back({space.product, experts[expert], first});
        });
        matmul(x, products);
        return use(0, space.product);
    }
    for_each_expert(routing, [&](int expert, int first, int n) {
        gather(space.x, x, std::span(rows).subspan(first, n));
        space.product.reserve(n);
        matmul(space.x, {{space.product, experts[expert]}});
        use(first, space.product);
    });
}

// out (n_pairs, n_out): row i is row rows[i] of x times the matrix of its expert.
void grouped_matmul(Rows& out, Workspace& space, const CodedRows& x, const std::vector<int>& rows,
                    const std::vector<MoeMatrix>& experts, const Routing& routing) {
    out.n_rows = int(rows.size());
    expert_products(space, x, rows, experts, routing, [&](int first, const Rows& product) {
        std::copy(product.row(0), product.row(product.n_rows), out.row(first));
    });
}

// The fused operator (golden/grouped.py): matmul, swiglu and quantize for one expert's rows after another. At
// a time there are fp32 results of one expert alone, which stay in the cache.
void grouped_matmul_swiglu_quant(CodedRows& out, Workspace& space, const CodedRows& x,
                                 const std::vector<MoeMatrix>& experts, const Routing& routing) {
    const int half = experts[0].n_rows / 2;
    resize(out, int(routing.by_expert.size()), half, experts[0].format);
    expert_products(space, x, routing.token_of, experts, routing, [&](int first, Rows& product) {
        for_each_row(product.n_rows, [&](int i) {
            swiglu(product.row(i), product.row(i), product.row(i) + half, half);
            quantize_row(out, first + i, product.row(i));
        });
    });
}

// ----------------------------------------------------------------------------
// The tensors of a file

size_t read_own_fields(const HeaderReader& h, Config& c) {
    MoeConfig& m = c.moe;
    m.expert_format.kind = WeightKind(h.checked_i32("format", 0xC0, 0, 2));
    m.n_experts = h.checked_i32("n_experts", 0xC4, 1, 1 << 10);
    m.n_active = h.checked_i32("n_active", 0xC8, 1, m.n_experts);
    m.hidden_dim = h.checked_i32("moe_hidden_dim", 0xCC, 1, 5120);
    m.norm_topk_prob = h.checked_i32("norm_topk_prob", 0xD0, 0, 1) == 1;
    m.expert_format.group = h.checked_i32("group", 0xD4, 0, 1024);
    m.pure = h.checked_i32("pure", 0xD8, 0, 1) == 1;
    // The table of dense layers is the first tensor: the others follow from it.
    if (h.file.size() < header_size + size_t(c.n_layers)) h.fail("dense_layers ends too soon");
    for (int l = 0; l < c.n_layers; l++)
        m.is_dense.push_back(uint8_t(h.checked_int("dense_layers", h.u8(header_size + size_t(l)), 0, 1)));
    return 0xDC;
}

// Throws for groups that a format has not, and for rows that are no multiple of what they have to be.
void check_config(const Config& c) {
    const auto [kind, group] = c.moe.expert_format;
    const bool a8w8 = kind == WeightKind::a8w8, a8w4 = kind == WeightKind::a8w4, pure = c.moe.pure;
    check_value(c.group_size == 0, "group_size", c.group_size, "expected 0 (whole rows)");
    for (const auto& [name, n] : c.row_lengths())
        check_value(n % 4 == 0 && n <= max_group_size, name, n,
                    "expected a multiple of 4, at most " + std::to_string(max_group_size));
    const bool has_group = a8w8   ? group == 0
                           : a8w4 ? group == 0 || group == 32 || group == 64 || group == 128
                                  : group > 0 && group % 32 == 0;
    check_value(has_group, "group", group, "which the experts' format has not");
    check_value(!(pure && a8w8), "pure", 1, "but all of A8W8 is int8: expected 0");
    auto check_row = [unit = std::max(group, a8w4 ? 32 : 4)](const char* name, int n) {
        check_value(n % unit == 0, name, n, "not a multiple of " + std::to_string(unit));
    };
    check_row("dim", c.dim);
    check_row("moe_hidden_dim", c.moe.hidden_dim);
    if (pure) check_row("n_heads * head_dim", c.q_dim());
    if (pure && std::ranges::count(c.moe.is_dense, 1) > 0) check_row("hidden_dim", c.hidden_dim);
}

const FileFormat<Config> file_format{.magic = 0x616b6d65,
                                     .version = 1,
                                     .check = check_config,
                                     .read_own = read_own_fields,
                                     .first_arch = Arch::qwen3_moe,
                                     .last_arch = Arch::qwen3_moe,
                                     .alignment = 64};

// The experts of a layer, (n_experts,) each.
struct Experts {
    std::vector<MoeMatrix> gate_up;  // 2 * moe.hidden_dim rows of dim columns
    std::vector<MoeMatrix> down;     // dim rows of moe.hidden_dim columns
};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into the file are the same lines.
struct Weights {
    TensorList file;
    Config c;

    const uint8_t* dense_layers = file.next<uint8_t>("dense_layers", {c.n_layers});  // read with the header
    LayerNorms<float> norms = file.layer_norms<float>(c);     // attn, ffn: n_layers of (dim,); last: (dim,)
    HeadNorms<float> head_norms = file.head_norms<float>(c);  // q, k: n_layers of (head_dim,)
    std::vector<const float*> router = routers();             // (n_experts, dim), of layers with experts

    MoeMatrix embedding = matrix("embed", c.vocab_size, c.dim);
    std::vector<MoeMatrix> q_proj = layers("attn.q_proj", c.q_dim(), c.dim);
    std::vector<MoeMatrix> k_proj = layers("attn.k_proj", c.kv_dim(), c.dim);
    std::vector<MoeMatrix> v_proj = layers("attn.v_proj", c.kv_dim(), c.dim);
    std::vector<MoeMatrix> o_proj = layers("attn.o_proj", c.dim, c.q_dim());
    std::vector<MoeMatrix> gate_proj = layers("ffn.gate_proj", c.hidden_dim, c.dim, true);
    std::vector<MoeMatrix> down_proj = layers("ffn.down_proj", c.dim, c.hidden_dim, true);
    std::vector<MoeMatrix> up_proj = layers("ffn.up_proj", c.hidden_dim, c.dim, true);
    MoeMatrix classifier = c.shared_classifier ? embedding : matrix("classifier", c.vocab_size, c.dim);
    std::vector<Experts> experts = all_experts();  // of layers with experts

    // A matrix that is no expert's; and those of all layers, or of the dense ones.
    MoeMatrix matrix(const std::string& name, int n_rows, int n_cols) {
        return tensors(name, c.moe.other_format(), {n_rows}, n_cols);
    }
    std::vector<MoeMatrix> layers(const char* part, int n_rows, int n_cols, bool dense_only = false) {
        auto make = [&](const std::string& name) { return matrix(name, n_rows, n_cols); };
        return file.layers(c, part, make, [&](int l) { return !dense_only || !c.has_experts(l); });
    }
    // What layers with experts have; that of others is empty.
    std::vector<const float*> routers() {
        auto make = [&](const std::string& name) { return file.next<float>(name, {c.moe.n_experts, c.dim}); };
        return file.layers(c, "moe.router", make, [&](int l) { return c.has_experts(l); });
    }
    std::vector<Experts> all_experts() {
        auto make = [&](const std::string& name) {
            return Experts{experts_of(name + ".gate_up_proj", 2 * c.moe.hidden_dim, c.dim),
                           experts_of(name + ".down_proj", c.dim, c.moe.hidden_dim)};
        };
        return file.layers(c, "moe", make, [&](int l) { return c.has_experts(l); });
    }
    // The matrices of a layer's experts: in the same tensors, one behind the other.
    std::vector<MoeMatrix> experts_of(const std::string& name, int n_rows, int n_cols) {
        std::vector<MoeMatrix> all{tensors(name, c.moe.expert_format, {c.moe.n_experts, n_rows}, n_cols,
                                           {c.moe.n_active, c.moe.n_experts})};
        while (int(all.size()) < c.moe.n_experts) all.push_back(all.back().next());
        return all;
    }
    // The tensors of a matrix, or of experts': codes, scales and, with A8W4, the assist matrix. `rows` is
    // their shape but n_cols, `read` what a token reads.
    MoeMatrix tensors(const std::string& name, const WeightFormat& format, const std::vector<int>& rows,
                      int n_cols, Share read = {}) {
        MoeMatrix w{};
        w.format = format, w.kind = QUANT_GEMM_SIGNED, w.bits = 8, w.scale_type = QUANT_GEMM_ROW_FP32;
        w.n_rows = rows.back(), w.n_cols = n_cols;
        w.group = format.group > 0 ? format.group : n_cols, w.group_size = kernel_group(format, n_cols);
        std::vector<int> of_codes = rows, of_scales = rows;  // shapes
        of_codes.push_back(format.kind == WeightKind::a8w4 ? n_cols / 2 : n_cols);
        of_scales.push_back(n_scales(w));
        if (format.kind == WeightKind::a8w8) {
            w.codes = as_bytes(file.next<int8_t>(name + ".codes", of_codes, read));
            w.scales = file.next<float>(name + ".scales", rows.size() == 1 ? of_scales : rows, read);
        } else if (format.kind == WeightKind::mxfp8) {
            w.codes = file.next<uint8_t>(name + ".codes", of_codes, read);
            w.scales = file.next<uint8_t>(name + ".scales", of_scales, read);
        } else {
            w.kind = QUANT_GEMM_UNSIGNED, w.bits = 4, w.zero_point = 8;
            if (format.group > 0) w.scale_type = QUANT_GEMM_GROUP_FP16;
            w.codes = file.next<uint8_t>(name + ".codes", of_codes, read);
            if (format.group == 0) w.scales = file.next<float>(name + ".scales", rows, read);
            if (format.group > 0) w.scales = file.next<Half>(name + ".scales", of_scales, read);
            w.assist = file.next<float>(name + ".assist", rows, {0, 1});
        }
        return w;
    }
    // Packs the matrices that are multiplied for the kernels.
    void pack(PackedMatrices& packed) {
        auto add = [&](std::span<MoeMatrix> matrices) {
            for (MoeMatrix& m : matrices)
                if (m.n_rows > 0 && m.has_kernel()) m.packed = packed.add(m);
        };
        for (auto* w : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj}) add(*w);
        for (Experts& e : experts) add(e.gate_up), add(e.down);
        add({&classifier, 1});
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights. Members are made where they stand, as those of Weights are

constexpr int max_chunk = 512;  // tokens of a prompt that go through together: each expert gets a few of them

struct RunState {
    Config c;
    Options options;
    int context;  // positions whose keys and values are kept
    bool traced;  // every step is recorded

    // A row per token of a chunk.
    int n = std::min(max_chunk, context);
    Rows x{n, c.dim};       // the residual stream
    Rows normed{n, c.dim};  // normalized x
    Rows q{n, c.q_dim()};   // n_heads * head_dim
    Rows k{n, c.kv_dim()};  // n_kv_heads * head_dim
    Rows v{n, c.kv_dim()};
    Rows attn_out{n, c.q_dim()};
    Rows proj{n, c.dim};         // the output of o_proj and of down_proj
    Rows gate{n, c.hidden_dim};  // of dense layers
    Rows up{n, c.hidden_dim};
    Rows router{n, c.moe.n_experts};
    Rows logits{n_logits(options, traced, n), c.vocab_size};  // of the last token, or of all

    // A row per pair of token and expert.
    int n_pairs = n * c.moe.n_active;
    bool fused = !traced && !options.own.contains("--no-fuse");  // or step by step, which gives the same bits
    Rows gate_up{fused ? 0 : n_pairs, 2 * c.moe.hidden_dim};
    Rows hidden{fused ? 0 : n_pairs, c.moe.hidden_dim};
    Rows down{n_pairs, c.dim};

    // The quantized input of the products that come next, and of experts' first and second product.
    CodedRows xq = coded_rows(n, c.longest_row(), c.moe.other_format());
    CodedRows expert_input = coded_rows(n, c.dim, c.moe.expert_format);
    CodedRows expert_hidden = coded_rows(n_pairs, c.moe.hidden_dim, c.moe.expert_format);
    Routing routing{};
    Workspace workspace{coded_rows(n, std::max(c.dim, c.moe.hidden_dim), c.moe.expert_format),
                        Rows(std::max(n, c.moe.n_active), std::max(c.dim, 2 * c.moe.hidden_dim))};
    RopeAngles angles{c, n};                           // of the chunk's positions
    HeadScores scores{traced, n, c.n_heads, context};  // attention's, if there is a trace
    HeadScores probs{traced, n, c.n_heads, context};
    KvCache cache{kv_format(options), c.n_layers, c.n_kv_heads, c.head_dim, context};
};

// Its members: file, weights, state and trace (engine/app/model.h).
using Transformer = TransformerOf<Config, Weights, RunState>;

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
    quantize(s.xq, s.normed, c.moe.other_format());                      record("attn.norm", s.xq);
    matmul(s.xq, {{s.q, w.q_proj[l]},                                    // q, k and v read the same input
                  {s.k, w.k_proj[l]},
                  {s.v, w.v_proj[l]}});                                  record("attn.q_proj", s.q, s.xq, w.q_proj[l]);
                                                                         record("attn.k_proj", s.k, s.xq, w.k_proj[l]);
                                                                         record("attn.v_proj", s.v, s.xq, w.v_proj[l]);
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
    quantize(s.xq, s.attn_out, c.moe.other_format());                    record("attn.mix", s.xq);
    matmul(s.xq, {{s.proj, w.o_proj[l]}});                               record("attn.o_proj", s.proj, s.xq, w.o_proj[l]);
    add(s.x, s.proj);                                                    record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void dense_block(Transformer& m, int l) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim,  c.norm_eps);          record("ffn.norm", s.normed);
    quantize(s.xq, s.normed, c.moe.other_format());                      record("ffn.norm", s.xq);
    matmul(s.xq, {{s.gate, w.gate_proj[l]},
                  {s.up, w.up_proj[l]}});                                record("ffn.gate_proj", s.gate, s.xq, w.gate_proj[l]);
                                                                         record("ffn.up_proj", s.up, s.xq, w.up_proj[l]);
    swiglu(s.gate, s.gate, s.up);                                        record("ffn.swiglu", s.gate);
    quantize(s.xq, s.gate, c.moe.other_format());                        record("ffn.swiglu", s.xq);
    matmul(s.xq, {{s.proj, w.down_proj[l]}});                            record("ffn.down_proj", s.proj, s.xq, w.down_proj[l]);
    add(s.x, s.proj);                                                    record("ffn.residual", s.x);
}

// x (n_tokens, dim) += the weighted sum of what each token's experts make of it, in layer l.
void moe_block(Transformer& m, int l) {
    const Config& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const Recorder record(m.trace, l);
    const Experts& experts = w.experts[l];
    const Routing& r = s.routing;

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.dim, c.norm_eps);           record("ffn.norm", s.normed);
    fp64_matmul(s.router, s.normed, w.router[l]);                        record("moe.router", s.router);
    route(s.routing, s.router, c.moe.n_active, c.moe.norm_topk_prob);    record("moe.experts", r.experts.data(), s.x.n_rows, {r.k});
                                                                         record("moe.weights", r.weights.data(), s.x.n_rows, {r.k});
    quantize(s.expert_input, s.normed, c.moe.expert_format);             record("ffn.norm", s.expert_input);
    if (s.fused) {
        grouped_matmul_swiglu_quant(s.expert_hidden, s.workspace, s.expert_input, experts.gate_up, r);
    } else {                                                             // the same, and every step is kept
        grouped_matmul(s.gate_up, s.workspace, s.expert_input, r.token_of, experts.gate_up, r);
                                                                         record("moe.gate_up_proj", s.gate_up, s.expert_input, r.token_of, experts.gate_up, r);
        swiglu(s.hidden, s.gate_up);                                     record("moe.swiglu", s.hidden, r);
        quantize(s.expert_hidden, s.hidden, c.moe.expert_format);        record("moe.swiglu", s.expert_hidden, r);
    }
    grouped_matmul(s.down, s.workspace, s.expert_hidden, r.every_row, experts.down, r);
                                                                         record("moe.down_proj", s.down, s.expert_hidden, r.every_row, experts.down, r);
    combine(s.proj, s.down, r);                                          record("moe.mix", s.proj);
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
    quantize(s.xq, s.normed, c.moe.other_format());                      record("norm", s.xq);
    s.logits.reserve(n_logits);
    matmul(s.xq, {{s.logits, w.classifier}});                            record("logits", s.logits);
    return {s.logits.row(0), size_t(n_logits) * c.vocab_size};
}
// clang-format on

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

// "2 of 8 experts in A8W8, one scale a row; all else W8A8, one scale a row"
std::string scheme_text(const MoeConfig& moe) {
    const char* const names[] = {"A8W8", "A8W4", "MXFP8"};
    const auto [kind, group] = moe.expert_format;
    return format("%d of %d experts in %s, ", moe.n_active, moe.n_experts, names[int(kind)]) +
           (group > 0 ? "groups of " + std::to_string(group) : "one scale a row") +
           (moe.pure ? "; all else the same" : "; all else W8A8, one scale a row");
}

Model load_model(const Options& options, Trace* trace) {
    auto m = load_cpu<Transformer>(file_format, max_chunk, options, trace);
    const Config& c = m->file.config;
    const MoeMatrix& w = m->weights.classifier;  // all matrices but the experts' are multiplied by its kernel
    const char* kernel = w.has_kernel() ? int8_kernel_name(w.group_size) : "portable";
    Model model = cpu_model(m, options, scheme_text(c.moe), kernel, max_chunk);
    uint64_t hidden_dims = 0;  // of the active experts alone
    for (int l = 0; l < c.n_layers; l++)
        hidden_dims += uint64_t(c.has_experts(l) ? c.moe.n_active * c.moe.hidden_dim : c.hidden_dim);
    model.macs_per_token = c.macs_per_token(hidden_dims);
    return model;
}

const OwnOption own_options[] = {
    kv_option, mmap_option, {"--no-fuse", {}, "experts step by step, without the fused operator"}};

#ifndef RUNQ_NO_MAIN
#include "engine/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(
        argc, argv, {"runq_moe", "Qwen3-MoE with experts in A8W8, A8W4 or MXFP8", load_model, own_options});
}
#endif
