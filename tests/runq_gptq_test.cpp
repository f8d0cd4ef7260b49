// runq_gptq.cpp itself, over the engine or alone: the tests of any program, its loops against the golden
// vectors and against the fast paths, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq_gptq.cpp"

namespace {
const char* const models[] = {"tiny-llama.gptq-w8",     "tiny-llama.gptq-w4",     "tiny-llama.gptq-ladder",
                              "tiny-llama.gptq-sparse", "tiny-qwen3.gptq-w8",     "tiny-qwen3.gptq-w4",
                              "tiny-qwen3.gptq-ladder", "tiny-qwen3.gptq-sparse", "random-llama.gptq-order"};
}

#include "int8_cases.h"
#ifdef ENGINE
#include "engine/cpu/expand_rows.h"
#include "lowbit_cases.h"
#endif
#include "program_tests.h"

namespace {

// Row i of w as Q8 has it.
Int8Rows expanded_row(const LowbitMatrix& w, int i) {
    Int8Rows row(1, w.n_cols, w.group_size);
    expand(row.row_codes(0), row.row_scales(0), w, i);
    return row;
}

// Row t of x times row i of w by the plain loops, all of them: (n_tokens, n_rows).
[[maybe_unused]] std::vector<float> plain_products(const Int8Rows& x, const LowbitMatrix& w) {
    std::vector<float> out;
    for (int t = 0; t < x.n_rows; t++) {
        const std::vector<int16_t> codes(x.row_codes(t), x.row_codes(t) + x.n_cols);
        for (int i = 0; i < w.n_rows; i++) {
            const Int8Rows row = expanded_row(w, i);
            out.push_back(0);
            dot<1, 0>(&out.back(), codes.data(), x.row_scales(t), row.row_codes(0), row.row_scales(0),
                      w.n_cols, w.group_size);
        }
    }
    return out;
}

#ifdef ENGINE
LowbitMatrix matrix_of(const LowbitCase& m) {
    const QuantMatrix q = m.view();
    LowbitMatrix w;
    w.codes = q.codes, w.mask = q.mask, w.zeros = q.zeros, w.levels = q.levels, w.table = q.table;
    if (q.scale_type != QUANT_GEMM_GROUP_FP16) {
        w.row_scales = m.row_scales.data();
    } else {
        w.scales = m.scales.data();
    }
    w.n_codes = q.mask != nullptr ? q.n_cols / 2 : q.n_cols;
    w.bits = q.bits, w.n_rows = q.n_rows, w.n_cols = q.n_cols, w.group = q.group, w.group_size = q.group_size;
    w.zero_point = q.zero_point;
    return w;
}
#endif

}  // namespace

// ----------------------------------------------------------------------------
// The arithmetic: plain loops against the golden vectors, fast paths against the plain loops

TEST_CASE("expand: the plain loop gives the golden's codes and scales, and so do the fast ones") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("gptq_expand.") || !name.ends_with(".w.codes")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("w.codes").size());
        CAPTURE(p);
        auto bytes = [&](const char* part) -> const char* {
            const auto found = golden_ops().find(p + part);
            return found == golden_ops().end() ? nullptr : found->second.bytes.data();
        };
        // "gptq_expand.w4sg64.576.": bits, "x" two levels, "s" sparse or "i" int8 scales, the group, the
        // columns
        LowbitMatrix w;
        w.bits = p[std::string("gptq_expand.w").size()] - '0';
        w.n_rows = tensor.shape[0], w.n_cols = tensor.shape[1];
        w.n_codes = bytes("mask") != nullptr ? w.n_cols / 2 : w.n_cols;
        const int group = std::stoi(p.substr(p.find('g', p.find('w')) + 1));
        w.group = group > 0 ? group : w.n_cols, w.group_size = group == 32 ? 32 : 64;
        w.codes = reinterpret_cast<const uint8_t*>(bytes("codes"));
        w.mask = reinterpret_cast<const uint8_t*>(bytes("mask"));
        w.zeros = reinterpret_cast<const uint8_t*>(bytes("zeros"));
        w.levels = reinterpret_cast<const uint8_t*>(bytes("groups"));
        w.table = reinterpret_cast<const int8_t*>(bytes("table"));
        if (w.bits == 6) w.zero_point = 32;
        const bool per_row = w.levels != nullptr || (w.bits == 8 && group == 0);
        const char* scales_of_file = bytes(w.levels != nullptr ? "row_scales" : "scales");
        if (per_row) {
            w.row_scales = reinterpret_cast<const float*>(scales_of_file);
        } else {
            w.scales = reinterpret_cast<const Half*>(scales_of_file);
        }
        const std::vector<int8_t> codes = tensor.i8();
        const std::vector<float> scales = golden_ops().at(p + "w.scales").f32();
        std::vector<int8_t> plain;
        std::vector<float> plain_scales;
        for (int i = 0; i < w.n_rows; i++) {
            const Int8Rows row = expanded_row(w, i);
            plain.insert(plain.end(), row.row_codes(0), row.row_codes(1));
            plain_scales.insert(plain_scales.end(), row.row_scales(0), row.row_scales(1));
        }
        CHECK(plain == codes);
        CHECK(plain_scales == scales);
#ifdef ENGINE
        std::vector<int8_t> fast(codes.size());
        std::vector<float> fast_scales(scales.size());
        for (int i = 0; i < w.n_rows; i++) {
            expand_columns(fast.data() + size_t(i) * w.n_cols, view_of(w), i, 0, w.n_cols);
            expand_scales(fast_scales.data() + size_t(i) * (w.n_cols / w.group_size), view_of(w), i);
        }
        CHECK(fast == codes);
        CHECK(fast_scales == scales);
#endif
    }
    CHECK(cases == 30);
}

TEST_CASE("embed: the golden's rows of a table of more than 2^16, 8 bits with a scale for a row") {
    const GoldenTable table(64);
    const std::vector<int32_t> tokens = golden_ops().at("embedding.64.tokens").i32();
    LowbitMatrix w;
    w.bits = 8, w.n_rows = table.n_rows, w.n_cols = w.n_codes = w.group = w.group_size = table.n_cols;
    w.codes = reinterpret_cast<const uint8_t*>(table.codes.data()), w.row_scales = table.scales.data();
    Rows out(tokens.size(), table.n_cols);
    embed(out, w, tokens);
    CHECK(out.values == golden_ops().at("embedding.64.out").f32());
}

TEST_CASE("gather and quantize: the golden's values, codes and scales, bit for bit") {
    for (const std::string p : {"gptq_gather.", "gptq_gather.320."}) {
        CAPTURE(p);
        const Tensor& values = golden_ops().at(p + "x");
        const std::vector<int> order = golden_ops().at(p + "order").i32();
        Rows x(values.shape[0], values.shape[1]), gathered(values.shape[0], 512);
        x.values = values.f32(), x.n_rows = values.shape[0];
        gather(gathered, x, order.data());
        const std::vector<float> expected = golden_ops().at(p + "gathered").f32();
        CHECK(std::equal(expected.begin(), expected.end(), gathered.values.begin()));
        Int8Rows found;
        quantize(found, gathered, 64);
        CHECK(found.codes == golden_ops().at(p + "codes").i8());
        CHECK(found.scales == golden_ops().at(p + "scales").f32());
    }
}

#ifdef ENGINE
TEST_CASE("matmul: any path gives what expanding and multiplying as Q8 gives") {
    std::mt19937 rng(2);
    for (const LowbitFormat& f : all_formats()) {
        for (const int n_tokens : {1, 3, 17}) {
            CAPTURE(format_text(f));
            CAPTURE(n_tokens);
            const int n_cols = 384, n_rows = 21, group_size = f.group == 32 ? 32 : 64;
            Rows values(size_t(n_tokens), n_cols), out(size_t(n_tokens), n_rows),
                again(size_t(n_tokens), n_rows);
            values.values = random_values(rng, values.values.size());
            values.n_rows = n_tokens;
            Int8Rows x;
            quantize(x, values, group_size);
            const LowbitCase m = make_lowbit(rng, f, group_size, n_rows, n_cols, LowbitFill::uniform, false);
            const LowbitMatrix w = matrix_of(m);
            const std::vector<float> plain = plain_products(x, w);
            matmul(x, {{out, w}, {again, w}});
            CHECK(out.n_rows == n_tokens);
            CHECK(same_bits(plain, out.values));
            CHECK(again.values == out.values);
            PackedMatrices packed;
            LowbitMatrix with_copy = w;
            with_copy.packed = packed.add(view_of(w));
            matmul(x, {{again, with_copy}});
            CHECK(again.values == out.values);
        }
    }
}
#endif

// ----------------------------------------------------------------------------
// Files

namespace {

constexpr MatrixFormat bytes{8, 0, 0}, nibbles{4, 0, 128}, ladder{2, MatrixFormat::two_level_flag, 64};
[[maybe_unused]] constexpr MatrixFormat sparse{4, MatrixFormat::sparse_flag, 128};

// Llama 3.2 1B.
Config large(const MatrixFormat& embedding, const MatrixFormat& attention, const MatrixFormat& feed_forward) {
    Config c;
    c.dim = 2048, c.hidden_dim = 8192, c.n_layers = 16, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.shared_classifier = true, c.group_size = 64;
    c.formats.fill(attention);
    for (const int which : {kind::gate_proj, kind::down_proj, kind::up_proj}) c.formats[which] = feed_forward;
    c.formats[kind::embed] = c.formats[kind::classifier] = embedding;
    return c;
}

#ifdef ENGINE
uint64_t weight_bytes(const Config& c) {
    check_config(c);
    return Weights{TensorList(nullptr, 0, 64, 64), c}.file.weight_bytes();
}
#endif

}  // namespace

#ifdef ENGINE
TEST_CASE("weights: the bytes that a header implies") {
    const uint64_t table = 128256ull * 2048, norms = (2 * 16 + 1) * 2048 * 4;
    const uint64_t attention = 16ull * (2 * 2048 * 2048 + 2 * 512 * 2048), ffn = 16ull * 3 * 8192 * 2048;
    // Bits of a weight; rows of 2-bit codes have four bytes more.
    const double nibble_bits = 4 + 20.0 / 128, ladder_bits = 2 + 8.0 / 64, sparse_bits = 3 + 20.0 / 128;
    CHECK(weight_bytes(large(nibbles, nibbles, nibbles)) ==
          norms + uint64_t(double(table + attention + ffn) * nibble_bits / 8));
    CHECK(weight_bytes(large(bytes, nibbles, ladder)) ==
          norms + table + 4 * 128256 + uint64_t(double(attention) * nibble_bits / 8) +
              uint64_t(double(ffn) * ladder_bits / 8) + 16ull * (2 * 8192 + 2048) * 4);
    CHECK(weight_bytes(large(bytes, sparse, sparse)) ==
          norms + table + 4 * 128256 + uint64_t(double(attention + ffn) * sparse_bits / 8));
}

TEST_CASE("header: the format of each kind of matrix is read as it stands, and what follows is reserved") {
    const std::string path = "build/models/tiny-llama.gptq-w4.bin";
    std::vector<std::byte> file;
    for (const char c : read_file(path)) file.push_back(std::byte(c));
    auto read = [&](size_t offset, uint8_t value) {
        std::vector<std::byte> changed = file;
        changed[offset] = std::byte(value);
        Config c;
        const HeaderReader h{changed};
        check_reserved(h, read_own_fields(h, c));
        return c;
    };
    for (size_t i = 0; i < n_kinds; i++) {
        const size_t at = 0xC0 + 4 * i;
        CHECK(read(at, 77).formats[i].bits == 77);
        CHECK(read(at + 1, 78).formats[i].flags == 78);
        CHECK(read(at + 3, 1).formats[i].group == 256 + unsigned(file[at + 2]));
    }
    for (const int has_order : {0, 1, 2}) CHECK(read(0xE4, uint8_t(has_order)).has_order == has_order);
    CHECK_THROWS_WITH(read(0xE5, 1), "reserved byte at 229 is not 0");
}
#endif

TEST_CASE("weights: formats that there are not, and what does not fit") {
    auto refused = [](auto change, const char* why) {
        Config c = large(nibbles, nibbles, ladder);
        change(c);
        CHECK_THROWS_WITH(check_config(c), why);
    };
    auto with = [](int which, const MatrixFormat& f) { return [=](Config& c) { c.formats[which] = f; }; };
    refused(with(kind::q_proj, {}), "the format of q_proj is bits 0, flags 0, group 0, which is none");
    refused(with(kind::o_proj, {3, 0, 64}),
            "the format of o_proj is bits 3, flags 0, group 64, which is none");
    refused(with(kind::up_proj, {4, 0, 96}),
            "the format of up_proj is bits 4, flags 0, group 96, which is none");
    refused(with(kind::up_proj, {4, 2, 64}),
            "the format of up_proj is bits 4, flags 2, group 64, which is none");
    refused(with(kind::up_proj, {2, 1, 64}),
            "the format of up_proj is bits 2, flags 1, group 64, which is none");
    refused(with(kind::up_proj, {4, 1, 32}),
            "the format of up_proj is bits 4, flags 1, group 32, which is none");
    refused(with(kind::up_proj, {2, 4, 64}),
            "the format of up_proj is bits 2, flags 4, group 64, which is none");
    refused(with(kind::up_proj, {5, 0, 64}),
            "the format of up_proj is bits 5, flags 0, group 64, which is none");
    refused(with(kind::up_proj, {7, 4, 64}),
            "the format of up_proj is bits 7, flags 4, group 64, which is none");
    refused(with(kind::up_proj, {6, 4, 0}),
            "the format of up_proj is bits 6, flags 4, group 0, which is none");
    refused(with(kind::classifier, bytes),
            "the classifier is the embedding, but its format is 8 bits per row, not 4 bits in groups of 128");
    refused(with(kind::k_proj, {4, 0, 32}), "group_size is 64, expected 32, the activations'");
    refused([](Config& c) { c.has_order = 2; }, "has_order is 2, expected 0 to 1");
    refused([](Config& c) { c.group_size = 32; }, "group_size is 32, expected 64, the activations'");
    refused([](Config& c) { c.hidden_dim = 8224; }, "down_proj has 8224 columns, not a multiple of 64");
    refused([](Config& c) { c.dim = 2112; }, "embed has 2112 columns, not a multiple of 128");
}

#ifdef ENGINE
TEST_CASE("weights: an order has every channel once, or is refused by its name") {
    Config c = large(bytes, nibbles, bytes);
    c.has_order = 1, c.n_layers = 2, c.vocab_size = 8;
    c.dim = 128, c.hidden_dim = 256, c.n_heads = 2, c.n_kv_heads = 1, c.head_dim = 64;
    const TensorList list = Weights{TensorList(nullptr, 0, 64, 64), c}.file;
    std::vector<std::byte> memory(list.memory_bytes());
    int32_t* last = nullptr;  // the order that is read last
    for (const TensorInfo& t : list.all()) {
        if (!t.name.ends_with(".order")) continue;
        last = reinterpret_cast<int32_t*>(memory.data() + t.memory_offset);
        for (int k = 0; k < t.shape[0]; k++) last[k] = t.shape[0] - 1 - k;
    }
    auto make = [&] { return Weights{TensorList(memory.data(), memory.size(), 64, 64), c}; };
    CHECK(make().ffn_swiglu_order[1] == last);
    for (const int32_t wrong : {-1, 256, 1 << 30, 5}) {
        last[77] = wrong;
        CHECK_THROWS_WITH(make(), "layers.1.ffn.swiglu.order does not have every channel once");
    }
}
#endif
