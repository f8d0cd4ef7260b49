// runq_moe.cpp itself: the tests of any program, its loops against the golden vectors and against the fast
// paths, the fused operator against its steps, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq_moe.cpp"

namespace {
const char* const models[] = {"tiny-qwen3-moe.moe-a8w8",      "tiny-qwen3-moe.moe-a8w4",
                              "tiny-qwen3-moe.moe-a8w4-pure", "tiny-qwen3-moe.moe-mxfp8",
                              "tiny-qwen3-moe.moe-ladder",    "random-qwen3-moe.moe-a8w8"};
}

#include <array>
#include <set>

#include "int8_cases.h"
#include "program_tests.h"

namespace {

std::vector<uint8_t> bytes_of(const Tensor& t) {
    return std::vector<uint8_t>(t.bytes.begin(), t.bytes.end());
}

MoeConfig moe_config(WeightKind kind, int group, int n_experts, int n_active, int hidden_dim) {
    MoeConfig c;
    c.expert_format = {kind, group}, c.n_experts = n_experts, c.n_active = n_active;
    c.hidden_dim = hidden_dim;
    return c;
}

// All matrices of one format of the ladder.
MoeConfig ladder_config(const MatrixFormat& f) {
    MoeConfig c = moe_config(WeightKind::ladder, f.group == 32 ? 32 : 64, 5, 2, f.group == 128 ? 128 : 64);
    c.ladder.fill(f);
    return c;
}

// A matrix of each expert, with their memory.
struct ExpertCase {
    WeightFormat format;
    MatrixFormat ladder;
    std::vector<uint8_t> codes, mx_scales, mask, zeros, levels;
    std::vector<int8_t> tables;
    std::vector<float> row_scales;
    std::vector<Half> group_scales;
    int n_experts = 0, n_rows = 0, n_cols = 0, group = 0;

    std::vector<MoeMatrix> all() const {
        const bool is_ladder = format.kind == WeightKind::ladder, is_int4 = format.kind == WeightKind::a8w4;
        std::vector<MoeMatrix> experts;
        for (int e = 0; e < n_experts; e++) {
            const size_t row = size_t(e) * n_rows, n_groups = size_t(n_cols / group);
            const auto at = [&](const auto& v, size_t of_row) {
                return v.empty() ? nullptr : v.data() + row * of_row;
            };
            MoeMatrix w;
            w.format = format, w.n_rows = n_rows, w.n_cols = n_cols, w.group = group;
            w.bits = is_ladder ? ladder.bits : is_int4 ? 4 : 8, w.zero_point = is_int4 ? 8 : 0;
            w.n_codes = ladder.sparse() ? n_cols / 2 : n_cols,
            w.group_size = is_ladder ? format.group : group;
            w.codes = at(codes, size_t(w.row_bytes())), w.mask = at(mask, size_t(n_cols) / 8);
            w.row_scales = at(row_scales, 1), w.scales = at(group_scales, n_groups);
            w.zeros = at(zeros, (n_groups + 1) / 2), w.levels = at(levels, n_groups);
            w.mx_scales = at(mx_scales, n_groups);
            if (ladder.has_table()) w.table = tables.data() + (size_t(e) << ladder.bits);
            if (ladder.int8_scales() && !ladder.has_table()) w.zero_point = 32;
            experts.push_back(w);
        }
        return experts;
    }
};

// int4 codes -8..7 of a row, two in a byte: the inverse of unpack_codes.
void pack_int4(std::vector<uint8_t>& out, std::span<const int8_t> row) {
    size_t at = 0;
    for (const size_t size : {64, 32, 16})
        for (; row.size() - at >= 2 * size; at += 2 * size)
            for (size_t j = 0; j < size; j++)
                out.push_back(uint8_t((row[at + j] + 8) | (row[at + j + size] + 8) << 4));
}

// The fp16 number that x is.
Half half_of(float x) {
    for (uint32_t bits = 0; bits < 0x7c00; bits++)
        if (to_float(Half{uint16_t(bits)}) == x) return {uint16_t(bits)};
    FAIL("no fp16 number");
    return {};
}

// Row t of x alone.
CodedRows row_of(const CodedRows& x, int t) {
    CodedRows row;
    row.is_mx = x.is_mx;
    gather(row, x, std::span(&t, 1));
    return row;
}

// Random experts: any codes, scales about 1.
ExpertCase random_experts(std::mt19937& rng, const MoeConfig& moe, int n_rows, int n_cols) {
    ExpertCase w;
    w.format = moe.expert_format, w.n_experts = moe.n_experts, w.n_rows = n_rows, w.n_cols = n_cols,
    w.group = moe.expert_format.group > 0 ? moe.expert_format.group : n_cols;
    const size_t n = size_t(moe.n_experts) * n_rows * n_cols;
    if (w.format.kind == WeightKind::ladder) {
        const MatrixFormat& f = w.ladder = moe.ladder[3];
        w.group = f.group > 0 ? f.group : n_cols;
        for (size_t i = 0; i < n / (f.sparse() ? 2 : 1) * f.bits / 8; i++)
            w.codes.push_back(f.bits < 8 ? uint8_t(rng()) : uint8_t(int(rng() % 255) - 127));
        const uint8_t pairs[] = {0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100};
        for (size_t i = 0; i < n / 8 && f.sparse(); i++)
            w.mask.push_back(uint8_t(pairs[rng() % 6] | pairs[rng() % 6] << 4));
        const size_t rows = size_t(moe.n_experts) * n_rows, n_groups = size_t(n_cols / w.group);
        const bool has_levels = f.two_level() || f.int8_scales();
        const bool has_row_scales = has_levels || (f.bits == 8 && f.group == 0);
        for (int i = 0; i < moe.n_experts << f.bits && f.has_table(); i++) w.tables.push_back(int8_t(rng()));
        for (size_t i = 0; i < rows * n_groups; i++) {
            if (has_levels) w.levels.push_back(uint8_t(rng()));
            if (!has_row_scales) w.group_scales.push_back({uint16_t(0x3800 + rng() % 0x800)});
        }
        for (size_t i = 0; i < rows && has_row_scales; i++) w.row_scales.push_back(float(1 + rng() % 7) / 4);
        for (size_t i = 0; i < rows * ((n_groups + 1) / 2) && f.bits < 8 && !has_levels; i++)
            w.zeros.push_back(uint8_t(rng() & (f.bits == 4 ? 0xff : 0x33)));
        return w;
    }
    const size_t n_groups = n / w.group;
    for (size_t i = 0; i < n; i++) {
        if (moe.expert_format.kind == WeightKind::a8w8) w.codes.push_back(uint8_t(int(rng() % 255) - 127));
        if (moe.expert_format.kind == WeightKind::mxfp8)
            w.codes.push_back(uint8_t(rng() % 0x7e | rng() % 2 << 7));
        if (moe.expert_format.kind == WeightKind::a8w4 && i % 2 == 0) w.codes.push_back(uint8_t(rng()));
    }
    for (size_t i = 0; i < n_groups; i++) {
        if (moe.expert_format.kind == WeightKind::mxfp8)
            w.mx_scales.push_back(uint8_t(124 + rng() % 6));
        else if (moe.expert_format.group == 0)
            w.row_scales.push_back(float(1 + rng() % 7) / 4);
        else
            w.group_scales.push_back({uint16_t(0x3800 + rng() % 0x800)});
    }
    return w;
}

// As `route` makes them: each token's experts, all different.
Routing random_routing(std::mt19937& rng, int n_tokens, const MoeConfig& moe) {
    Rows logits(size_t(n_tokens), moe.n_experts);
    logits.values = random_values(rng, logits.values.size());
    logits.n_rows = n_tokens;
    Routing routing;
    route(routing, logits, moe.n_active, moe.norm_topk_prob);
    return routing;
}

// Rows sorted by expert, as the golden's group list has them: a token goes to one expert.
Routing routing_of(const std::vector<int>& ends) {
    Routing r;
    r.k = 1;
    for (int e = 0; e < int(ends.size()); e++)
        while (int(r.experts.size()) < ends[size_t(e)]) r.experts.push_back(e), r.weights.push_back(1);
    sort_pairs(r);
    return r;
}

const MoeConfig all_kinds[] = {
    moe_config(WeightKind::a8w8, 0, 5, 2, 64),
    moe_config(WeightKind::a8w4, 0, 5, 2, 64),
    moe_config(WeightKind::a8w4, 32, 5, 2, 64),
    moe_config(WeightKind::a8w4, 64, 5, 2, 64),
    moe_config(WeightKind::a8w4, 128, 5, 2, 128),
    moe_config(WeightKind::mxfp8, 32, 5, 2, 64),
    moe_config(WeightKind::mxfp8, 64, 5, 2, 64),
    ladder_config({8, 0, 0}),
    ladder_config({8, 0, 64}),
    ladder_config({4, 0, 128}),
    ladder_config({4, 0, 32}),
    ladder_config({2, 0, 64}),
    ladder_config({2, MatrixFormat::two_level_flag, 64}),
    ladder_config({4, MatrixFormat::sparse_flag, 64}),
    ladder_config({4, MatrixFormat::sparse_flag, 128}),
    ladder_config({4, MatrixFormat::int8_scales_flag, 32}),
    ladder_config({5, MatrixFormat::int8_scales_flag, 64}),
    ladder_config({6, MatrixFormat::int8_scales_flag, 64}),
};

}  // namespace

// ----------------------------------------------------------------------------
// The arithmetic: plain loops against the golden vectors, fast paths against the plain loops

TEST_CASE("mxfp8: elements mean what the golden's do, and are quantized alike, bit for bit") {
    const std::vector<uint8_t> codes = bytes_of(golden_ops().at("mx_values.e4m3.codes"));
    const std::vector<float> values = golden_ops().at("mx_values.e4m3.values").f32();
    for (size_t i = 0; i < codes.size(); i++) {
        CHECK(e4m3_value(codes[i]) == values[i]);
        CHECK(e4m3_values[codes[i]] == values[i]);
        CHECK(e4m3_code(values[i]) == codes[i]);
    }
    for (const int block : {32, 64}) {
        const std::string p = "mx_quantize.e4m3b" + std::to_string(block) + ".";
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        std::vector<uint8_t> found(x.size()), scales;
        for (size_t i = 0; i < x.size(); i += size_t(block))
            scales.push_back(quantize_mx_block(&found[i], &x[i], block));
        CHECK(found == bytes_of(golden_ops().at(p + "codes")));
        CHECK(scales == bytes_of(golden_ops().at(p + "scales")));
    }
}

TEST_CASE("mxfp8: a NaN leaves zeros of the others' signs in its block") {  // as in tests/test_grouped.py
    const std::vector<float> x{NAN, INFINITY, -INFINITY, -2, 3};
    std::vector<uint8_t> codes(x.size());
    CHECK(quantize_mx_block(codes.data(), x.data(), int(x.size())) == 255);
    CHECK(codes == std::vector<uint8_t>{0x7f, 0, 0x80, 0x80, 0});
}

TEST_CASE("mxfp8: scale bytes mean what the golden's do") {
    const std::vector<uint8_t> scales = bytes_of(golden_ops().at("mx_scales.scales"));
    const std::vector<float> values = golden_ops().at("mx_scales.values").f32();
    for (size_t i = 0; i < scales.size(); i++) {
        CHECK(e8m0_value(scales[i]) == values[i]);
        CHECK(e8m0_values[scales[i]] == values[i]);
    }
    CHECK(std::isnan(e8m0_value(255)));
}

TEST_CASE("embed: the golden's rows of a table of more than 2^16") {
    const GoldenTable table(64);
    const std::vector<int32_t> tokens = golden_ops().at("embedding.64.tokens").i32();
    MoeMatrix w;
    w.bits = 8, w.n_rows = table.n_rows, w.n_cols = w.n_codes = w.group = w.group_size = table.n_cols;
    w.codes = reinterpret_cast<const uint8_t*>(table.codes.data()), w.row_scales = table.scales.data();
    Rows out(tokens.size(), table.n_cols);
    embed(out, w, tokens);
    CHECK(out.values == golden_ops().at("embedding.64.out").f32());
}

TEST_CASE("quantize: the plain loop gives the golden's codes and scales, and a row of experts the same") {
    for (const auto& [name, n] :
         {std::pair{"row64", 64}, {"row384", 384}, {"row2048", 2048}, {"rowlimits", 64}}) {
        const std::string p = std::string("quantize.") + name + ".";
        CAPTURE(p);
        const std::vector<float> x = golden_ops().at(p + "x").f32();
        const int n_rows = int(x.size()) / n;
        for (const MoeConfig& moe : {all_kinds[0], all_kinds[2], all_kinds[3]}) {
            CodedRows rows(n_rows, n, moe.expert_format);
            std::vector<int8_t> codes(x.size());
            std::vector<float> scales, found;
            for (int t = 0; t < n_rows; t++) {
                scales.push_back(quantize_group(&codes[size_t(t) * n], &x[size_t(t) * n], n));
                quantize_row(rows, t, &x[size_t(t) * n]);
                found.push_back(rows.row_scales(t)[0]);
            }
            CHECK(rows.n_groups() == 1);
            CHECK(codes == golden_ops().at(p + "codes").i8());
            CHECK(scales == golden_ops().at(p + "scales").f32());
            CHECK(std::equal(codes.begin(), codes.end(), rows.codes.begin()));
            CHECK(found == scales);
        }
    }
}

TEST_CASE(
    "quantize: groups of the ladder are the golden's of Q8, a row that is not finite has scales of NaN") {
    const std::vector<float> x = golden_ops().at("quantize.64.x").f32();
    CodedRows rows(1, int(x.size()), {WeightKind::ladder, 64});
    quantize_row(rows, 0, x.data());
    CHECK(rows.codes == golden_ops().at("quantize.64.codes").i8());
    CHECK(rows.scales == golden_ops().at("quantize.64.scales").f32());
    std::vector<float> bad = x;
    bad[70] = INFINITY;
    quantize_row(rows, 0, bad.data());
    CHECK(std::all_of(rows.scales.begin(), rows.scales.end(), [](float s) { return std::isnan(s); }));
}

TEST_CASE("fp64_matmul: every eighth product goes into the same sum, where another order shows") {
    constexpr int n = 29;
    std::mt19937 rng(9);
    int n_others = 0;
    for (int trial = 0; trial < 500; trial++) {
        Rows x(1, n), found(1, 1);
        x.n_rows = 1;
        x.values = random_values(rng, n);
        std::vector<float> w = random_values(rng, n);
        const auto sum_of = [&](int n_sums) {
            std::vector<double> sums(size_t(n_sums), 0);
            double sum = 0;
            for (int k = 0; k < n; k++)
                sums[size_t(k % n_sums)] += double(x.values[size_t(k)]) * w[size_t(k)];
            for (const double part : sums) sum += part;
            return sum;
        };
        // The last two products bring the sum to the middle between two floats.
        x.values[n - 2] = x.values[n - 1] = 1, w[n - 2] = w[n - 1] = 0;
        const auto near = float(sum_of(8));
        const double middle = (double(near) + std::nextafter(near, 99.0f)) / 2;
        w[n - 2] = float(middle - sum_of(8)), w[n - 1] = float(middle - sum_of(8));
        fp64_matmul(found, x, w.data());
        CHECK(found.values[0] == float(sum_of(8)));
        n_others += float(sum_of(4)) != float(sum_of(8));
    }
    CHECK(n_others > 50);
}

TEST_CASE("fp64_matmul: the fp64 sums rounded once, each token's the same in any company") {
    std::mt19937 rng(9);
    for (const int n_cols : {4, 12, 64, 100, 2048}) {
        for (const int n_experts : {1, 3, 4, 9}) {
            const int n_tokens = 9;
            CAPTURE(n_cols);
            CAPTURE(n_experts);
            Rows x(n_tokens, n_cols), found(n_tokens, n_experts), one(1, n_cols), alone(1, n_experts);
            x.values = random_values(rng, x.values.size()), x.n_rows = n_tokens, one.n_rows = 1;
            const std::vector<float> w = random_values(rng, size_t(n_experts) * n_cols);
            fp64_matmul(found, x, w.data());
            CHECK(found.n_rows == n_tokens);
            for (int t = 0; t < n_tokens; t++) {
                for (int e = 0; e < n_experts; e++) {
                    double sum = 0, size = 0;
                    for (int i = 0; i < n_cols; i++) {
                        const double product = double(x.row(t)[i]) * double(w[size_t(e) * n_cols + i]);
                        sum += product, size += std::fabs(product);
                    }
                    // Half a unit in the last place of fp32, and what the order of the sum makes in fp64.
                    CHECK(std::fabs(found.row(t)[e] - sum) <= std::fabs(sum) * 0x1p-24 + size * 0x1p-40);
                }
                std::copy_n(x.row(t), n_cols, one.row(0));
                fp64_matmul(alone, one, w.data());
                CHECK(std::equal(alone.row(0), alone.row(1), found.row(t)));
            }
        }
    }
}

TEST_CASE("route: the golden's experts, and their weights") {
    int cases = 0;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("route.") || !name.ends_with(".logits")) continue;
        cases++;
        const std::string p = name.substr(0, name.size() - std::string("logits").size());
        CAPTURE(p);
        const Tensor& experts = golden_ops().at(p + "experts");
        Rows logits(size_t(tensor.shape[0]), tensor.shape[1]);
        logits.values = tensor.f32(), logits.n_rows = tensor.shape[0];
        MoeConfig moe = moe_config(WeightKind::a8w8, 0, tensor.shape[1], experts.shape[1], 64);
        moe.norm_topk_prob = p.find('n') != std::string::npos;
        Routing found;
        route(found, logits, moe.n_active, moe.norm_topk_prob);
        CHECK(found.experts == experts.i32());
        CHECK(same_bits(golden_ops().at(p + "weights").f32(), found.weights));
        for (size_t i = 0; i < found.by_expert.size(); i++) {
            CHECK(found.row_of[size_t(found.by_expert[i])] == int(i));
            if (i == 0) continue;
            const int before = found.by_expert[i - 1], pair = found.by_expert[i];
            const auto key = [&](int j) { return std::pair(found.experts[size_t(j)], j); };
            CHECK(key(before) < key(pair));
        }
    }
    CHECK(cases == 10);
}

TEST_CASE("combine: the golden's weighted sums") {
    for (const std::string name : {"1", "3", "8", "8of128"}) {
        const std::string p = "moe_combine." + name + ".";
        CAPTURE(p);
        const Tensor& outputs = golden_ops().at(p + "outputs");
        const int n = outputs.shape[0], k = outputs.shape[1], dim = outputs.shape[2];
        const std::vector<float> values = outputs.f32();
        Routing r;
        r.k = k, r.experts = golden_ops().at(p + "experts").i32(),
        r.weights = golden_ops().at(p + "weights").f32();
        sort_pairs(r);
        Rows down(size_t(n * k), dim), out(size_t(n), dim);
        down.n_rows = n * k;
        for (int row = 0; row < n * k; row++)
            std::copy_n(&values[size_t(r.by_expert[size_t(row)]) * dim], dim, down.row(row));
        combine(out, down, r);
        CHECK(same_bits(golden_ops().at(p + "out").f32(), out.values));
    }
    // In rising order of expert, whichever is the best: the other way round, 1 + 1e8 would lose the 1.
    Routing r;
    r.k = 3, r.experts = {2, 0, 1}, r.weights = {1, 1, 1};
    sort_pairs(r);
    Rows down(3, 1), out(1, 1);
    for (int i = 0; i < 3; i++) down.row(i)[0] = std::array{1e8f, -1e8f, 1.0f}[size_t(i)];
    down.n_rows = 3;
    combine(out, down, r);
    CHECK(out.row(0)[0] == 1);
}

TEST_CASE("the fused operator: products, codes and scales of the golden") {
    std::set<std::string> formats;
    for (const auto& [name, tensor] : golden_ops()) {
        if (!name.starts_with("grouped_") || !name.ends_with(".weight.codes")) continue;
        const std::string p = name.substr(0, name.size() - std::string("weight.codes").size());
        if (p.find("e5m2") != std::string::npos) continue;  // runs in the reference alone
        const std::string format = p.substr(8, p.find('.') - 8);
        CAPTURE(p);
        auto at = [&](const char* part) -> const Tensor& { return golden_ops().at(p + part); };
        const int n_experts = tensor.shape[0], n_rows = tensor.shape[1], n_cols = tensor.shape[2];
        const Tensor &x = at("x.codes"), &scales = at("weight.scales");
        std::vector<int> ends = at("group_list").i32();
        if (p == "grouped_a8w8.count.")
            for (size_t e = 1; e < ends.size(); e++) ends[e] += ends[e - 1];
        if (ends.back() > x.shape[0] || n_cols % 4 != 0) continue;

        ExpertCase w;
        w.n_experts = n_experts, w.n_rows = n_rows, w.n_cols = n_cols;
        MoeConfig moe = moe_config(WeightKind::a8w8, 0, n_experts, 1, n_rows / 2);
        const int group = n_cols / (scales.shape.size() == 3 ? scales.shape[2] : 1);
        if (format == "mxfp8") {
            moe.expert_format.kind = WeightKind::mxfp8, moe.expert_format.group = w.group = group;
            w.codes = bytes_of(tensor), w.mx_scales = bytes_of(scales);
        } else if (format == "a8w8") {
            w.codes = bytes_of(tensor), w.row_scales = scales.f32(), w.group = n_cols;
        } else {
            moe.expert_format.kind = WeightKind::a8w4, moe.expert_format.group = group == n_cols ? 0 : group,
            w.group = group;
            const std::vector<int8_t> codes = tensor.i8();
            for (size_t i = 0; i < codes.size(); i += size_t(n_cols))
                pack_int4(w.codes, std::span(codes).subspan(i, size_t(n_cols)));
            if (moe.expert_format.group == 0)
                w.row_scales = scales.f32();
            else
                for (const float s : scales.f32()) w.group_scales.push_back(half_of(s));
        }
        const int n = ends.back();  // rows behind the last expert's are nobody's
        CodedRows rows(n, n_cols, moe.expert_format), out;
        bool is_ours = true;  // our quantizer gives no -128, which some kernels would not take
        if (format == "mxfp8") {
            const std::vector<uint8_t> codes = bytes_of(x), x_scales = bytes_of(at("x.scales"));
            std::copy_n(codes.begin(), n * n_cols, rows.codes.begin());
            for (int g = 0; g < n * rows.n_groups(); g++)
                rows.scales[size_t(g)] = e8m0_value(x_scales[size_t(g)]);
        } else {
            const std::vector<int8_t> codes = x.i8();
            const std::vector<float> x_scales = at("x.scales").f32();
            std::copy_n(codes.begin(), n * n_cols, rows.codes.begin());
            std::copy_n(x_scales.begin(), n, rows.scales.begin());
            is_ours = std::find(codes.begin(), codes.end(), -128) == codes.end();
#ifdef ENGINE
            for (int t = 0; t < n; t++)
                rows.sums[size_t(t)] = std::accumulate(rows.row_codes(t), rows.row_codes(t) + n_cols, 0);
#endif
        }
        const Routing routing = routing_of(ends);
        w.format = moe.expert_format;
        const std::vector<MoeMatrix> all = w.all();
        if (golden_ops().contains(p + "product")) {
            const std::vector<float> expected = at("product").f32();
            Rows found(n, n_rows), one(1, n_rows);
            for (int t = 0; t < n; t++) {
                plain_matmul(rows, {one, all[size_t(routing.experts[size_t(t)])]},
                             routing.by_expert[size_t(t)], 1);
                std::copy_n(one.row(0), n_rows, found.row(t));
            }
            CHECK(same_bits(expected, found.values));
        }
        if (!is_ours) continue;
        formats.insert(format);
        grouped_matmul_swiglu_quant(out, rows, all, routing);
        if (format == "mxfp8") {
            const std::vector<uint8_t> codes = bytes_of(at("out.codes")),
                                       expected = bytes_of(at("out.scales"));
            for (int i = 0; i < n * out.n_cols; i++) CHECK(uint8_t(out.codes[size_t(i)]) == codes[size_t(i)]);
            for (int g = 0; g < n * out.n_groups(); g++) {
                const float scale = e8m0_value(expected[size_t(g)]);
                CHECK((out.scales[size_t(g)] == scale || std::isnan(scale)));
                CHECK(std::isnan(out.scales[size_t(g)]) == std::isnan(scale));
            }
        } else {
            const std::vector<int8_t> codes = at("out.codes").i8();
            CHECK(std::equal(codes.begin(), codes.begin() + n * out.n_cols, out.codes.begin()));
            for (int t = 0; t < n; t++)
                CHECK(out.row_scales(t)[0] ==
                      doctest::Approx(at("out.scales").f32()[size_t(t)]).epsilon(1e-5));
        }
    }
    CHECK(formats == std::set<std::string>{"a8w8", "a8w4", "mxfp8"});
}

TEST_CASE("the fused operator: the ladder's golden, and mistakes at an expert's edge are seen") {
    int n_cases = 0, n_mistakes = 0;
    for (const auto& [name, x_codes] : golden_ops()) {
        if (!name.starts_with("ladder_experts.") || !name.ends_with(".x.codes")) continue;
        n_cases++;
        // "ladder_experts.w4sg64.128.": bits, "x" two levels, "s" sparse or "i" int8 scales, the group, the
        // columns
        const std::string p = name.substr(0, name.size() - std::string("x.codes").size());
        CAPTURE(p);
        auto at = [&](const char* part) -> const Tensor& { return golden_ops().at(p + part); };
        auto bytes = [&](const char* part) {
            return golden_ops().contains(p + part) ? bytes_of(at(part)) : std::vector<uint8_t>();
        };
        MatrixFormat f{uint8_t(p[std::string("ladder_experts.w").size()] - '0')};
        f.flags = uint8_t((p.find("xg") != p.npos ? MatrixFormat::two_level_flag : 0) |
                          (p.find("sg") != p.npos ? MatrixFormat::sparse_flag : 0) |
                          (p.find("ig") != p.npos ? MatrixFormat::int8_scales_flag : 0));
        f.group = uint16_t(std::stoi(p.substr(p.find('g', p.find('w')) + 1)));
        ExpertCase w;
        w.ladder = f, w.n_experts = at("weight.codes").shape[0], w.n_rows = at("weight.codes").shape[1];
        w.n_cols = x_codes.shape[1], w.group = f.group > 0 ? f.group : w.n_cols;
        w.codes = bytes("weight.codes"), w.mask = bytes("weight.mask"), w.zeros = bytes("weight.zeros");
        w.levels = bytes("weight.groups");
        if (f.has_table()) w.tables = at("weight.table").i8();
        const bool has_levels = !w.levels.empty();
        const Tensor& scales = at(has_levels ? "weight.row_scales" : "weight.scales");
        if (has_levels || (f.bits == 8 && f.group == 0)) {
            w.row_scales = scales.f32();
        } else {
            w.group_scales.resize(scales.bytes.size() / sizeof(Half));
            std::memcpy(w.group_scales.data(), scales.bytes.data(), scales.bytes.size());
        }
        w.format = {WeightKind::ladder, x_codes.shape[1] / at("x.scales").shape[1]};

        const Routing routing = routing_of(at("group_list").i32());
        const int n = int(routing.experts.size());
        CodedRows x(n, w.n_cols, w.format);
        const std::vector<int8_t> codes = x_codes.i8(), expected = at("out.codes").i8();
        const std::vector<float> x_scales = at("x.scales").f32(), product = at("product").f32();
        const std::vector<float> expected_scales = at("out.scales").f32();
        std::copy_n(codes.begin(), x.codes.size(), x.codes.begin());
        std::copy_n(x_scales.begin(), x.scales.size(), x.scales.begin());
#ifdef ENGINE
        for (size_t k = 0; k < x.codes.size(); k++) x.sums[k / size_t(x.group_size)] += x.codes[k];
#endif
        // Whether products, and the operator's codes and scales, are the golden's.
        const auto is_golden = [&](const std::vector<MoeMatrix>& experts) {
            Rows found(n, w.n_rows);
            CodedRows out;
            grouped_matmul(found, x, routing.token_of, experts, routing);
            grouped_matmul_swiglu_quant(out, x, experts, routing);
            for (int t = 0; t < n; t++) {  // by the plain loop, too
                Rows one(1, w.n_rows);
                plain_matmul(x, {one, experts[size_t(routing.experts[size_t(t)])]}, t, 1);
                const std::vector<float> of_row(found.row(t), found.row(t + 1));
                CHECK(same_bits(one.values, of_row));
            }
            const std::vector<float> used(product.begin(), product.begin() + ptrdiff_t(found.values.size()));
            const std::vector<float> used_scales(expected_scales.begin(),
                                                 expected_scales.begin() + ptrdiff_t(out.scales.size()));
            return same_bits(used, found.values) &&
                   std::equal(out.codes.begin(), out.codes.end(), expected.begin()) &&
                   same_bits(used_scales, out.scales);
        };
        const std::vector<MoeMatrix> all = w.all();
        CHECK(is_golden(all));
        // Expert 1 with a table of expert 0, and with groups that are one off.
        const auto is_seen = [&](auto table, int off) {
            std::vector<MoeMatrix> experts = all;
            if (experts[1].*table == nullptr) return;
            experts[1].*table = off == 0 ? experts[0].*table : experts[1].*table + off;
            CHECK(!is_golden(experts));
            n_mistakes++;
        };
        is_seen(&MoeMatrix::scales, 0), is_seen(&MoeMatrix::row_scales, 0), is_seen(&MoeMatrix::zeros, 0);
        is_seen(&MoeMatrix::levels, 0), is_seen(&MoeMatrix::mask, 0), is_seen(&MoeMatrix::codes, 0);
        is_seen(&MoeMatrix::scales, -1), is_seen(&MoeMatrix::levels, -1), is_seen(&MoeMatrix::table, 0);
    }
    CHECK(n_cases == 24);
    // A row's scale of 8 bits; groups of 8; 4 and 2; two levels; sparse; by table; 6 bits.
    CHECK(n_mistakes == 1 * 2 + 3 * 3 + 4 * 4 + 4 * 4 + 1 * 4 + 2 * 5 + 6 * 5 + 3 * 4);
}

TEST_CASE("matmul: fast paths give the plain loop's outputs, and each the same in any company") {
    std::mt19937 rng(3);
    for (const MoeConfig& moe : all_kinds) {
        for (const int n_cols : {128, 384}) {
            CAPTURE(int(moe.expert_format.kind));
            CAPTURE(moe.expert_format.group);
            CAPTURE(n_cols);
            const int n_tokens = 9, n_rows = 21;
            const ExpertCase experts = random_experts(rng, moe, n_rows, n_cols);
            const MoeMatrix w = experts.all()[3];
            Rows values(n_tokens, n_cols), plain(n_tokens, n_rows), found = plain, again = plain;
            Rows one(1, n_rows);
            values.values = random_values(rng, values.values.size());
            values.n_rows = n_tokens;
            CodedRows x;
            quantize(x, values, moe.expert_format);
            plain_matmul(x, {plain, w}, 0, n_tokens);
            matmul(x, {{found, w}});
            CHECK(plain.n_rows == n_tokens);
            CHECK(found.n_rows == n_tokens);
            CHECK(same_bits(plain.values, found.values));
            for (int t = 0; t < n_tokens; t++) {
                matmul(row_of(x, t), {{one, w}});
                CHECK(one.n_rows == 1);
                CHECK(std::equal(one.row(0), one.row(1), found.row(t)));
            }
            MoeMatrix packed = w;
#ifdef ENGINE
            PackedMatrices memory;
            packed.packed = memory.add(view_of(w));
#endif
            matmul(x, {{again, packed}});
            CHECK(again.values == found.values);
        }
    }
}

TEST_CASE("a8w4: int4 by int4, digit by digit, gives what int8 by int4 gives") {
    std::mt19937 rng(6);
    for (const MoeConfig& moe : all_kinds) {
        if (moe.expert_format.kind != WeightKind::a8w4) continue;
        CAPTURE(moe.expert_format.group);
        const int n_cols = 384, n_rows = 21;
        const ExpertCase experts = random_experts(rng, moe, n_rows, n_cols);
        Rows values(3, n_cols);
        values.values = random_values(rng, values.values.size());
        values.n_rows = 3;
        CodedRows x;
        quantize(x, values, moe.expert_format);
        const int8_t extremes[] = {-128, 127, -1, 0};
        std::copy_n(extremes, 4, x.row_codes(2));
        std::vector<float> direct, by_digits;
        WideCodes row;
        for (int i = 0; i < n_rows; i++) {
            row.load_row(experts.all()[1], i);
            double sum = 0;
            for (int k = 0; k < n_cols; k++) sum += double(row.codes[k]) * row.scales[k / experts.group];
            for (int t = 0; t < 3; t++) {
                const std::vector<int16_t> codes(x.row_codes(t), x.row_codes(t) + n_cols);
                const float scale = x.row_scales(t)[0], *scales = row.scales.data();
                direct.push_back(
                    dot(codes.data(), &scale, 1, row.codes.data(), scales, n_cols, experts.group, 32));
                by_digits.push_back(dot_by_digits(codes.data(), scale, row.codes.data(), scales, n_cols,
                                                  experts.group, float(8 * sum)));
            }
        }
        CHECK(relative_error(direct, by_digits) < 1e-5);
    }
}

TEST_CASE("embed: code times scale in every format") {
    std::mt19937 rng(5);
    for (MoeConfig moe : all_kinds) {
        const WeightKind kind = moe.expert_format.kind;
        if (kind == WeightKind::ladder) continue;  // of which runq_gptq's tests are
        CAPTURE(int(kind));
        CAPTURE(moe.expert_format.group);
        moe.n_experts = 1;
        const int n_rows = 37, n_cols = 128;
        const ExpertCase c = random_experts(rng, moe, n_rows, n_cols);
        auto value = [&](size_t row, size_t i) {
            const size_t at = row * n_cols + i, s = at / size_t(c.group);
            if (kind == WeightKind::a8w8) return float(int8_t(c.codes[at])) * c.row_scales[row];
            if (kind == WeightKind::mxfp8)
                return e4m3_values[c.codes[at]] * std::ldexp(1.0f, c.mx_scales[s] - 127);
            const int byte = c.codes[row * 64 + i % 64];  // of 128 codes, the first 64 are in the low halves
            const float scale = c.row_scales.empty() ? to_float(c.group_scales[s]) : c.row_scales[row];
            return float((i < 64 ? byte & 15 : byte >> 4) - 8) * scale;
        };
        const MoeMatrix table = c.all()[0];
        const std::vector<int> tokens{36, 0, 17, 3};
        Rows found(tokens.size(), n_cols);
        embed(found, table, tokens);
        CHECK(found.n_rows == 4);
        for (int t = 0; t < found.n_rows; t++)
            for (int i = 0; i < n_cols; i++)
                CHECK(found.row(t)[i] == value(size_t(tokens[size_t(t)]), size_t(i)));
    }
}

TEST_CASE(
    "the fused operator and its steps: the same codes and scales, one token or many, however many threads") {
    std::mt19937 rng(4);
    const int n_before = n_threads();
    for (const MoeConfig& moe : all_kinds) {
        const int n_tokens = 13, n_cols = 128, half = moe.hidden_dim, k = moe.n_active;
        CAPTURE(int(moe.expert_format.kind));
        CAPTURE(moe.expert_format.group);
        const ExpertCase experts = random_experts(rng, moe, 2 * half, n_cols);
        const std::vector<MoeMatrix> w = experts.all();
        const Routing routing = random_routing(rng, n_tokens, moe);
        Rows values(n_tokens, n_cols), gate_up(size_t(n_tokens * k), 2 * half),
            hidden(size_t(n_tokens * k), half);
        values.values = random_values(rng, values.values.size(), 0.01f);
        values.n_rows = n_tokens;
        CodedRows x, steps, fused, alone;
        quantize(x, values, moe.expert_format);
        grouped_matmul(gate_up, x, routing.token_of, w, routing);
        swiglu_halves(hidden, gate_up);
        quantize(steps, hidden, moe.expert_format);
        for (const int j : {1, 2, 3}) {
            set_threads(j);
            grouped_matmul_swiglu_quant(fused, x, w, routing);
            CHECK(fused.n_rows == n_tokens * k);
            CHECK(fused.codes == steps.codes);
            CHECK(fused.scales == steps.scales);
        }
        set_threads(n_before);
        for (int t = 0; t < n_tokens; t++) {
            Routing of_token;
            of_token.experts.assign(&routing.experts[size_t(t * k)], &routing.experts[size_t(t * k)] + k);
            of_token.k = k;
            sort_pairs(of_token);
            grouped_matmul_swiglu_quant(alone, row_of(x, t), w, of_token);
            for (int r = 0; r < k; r++) {
                const int mine = of_token.row_of[size_t(r)], theirs = routing.row_of[size_t(t * k + r)];
                CHECK(
                    std::equal(alone.row_codes(mine), alone.row_codes(mine) + half, steps.row_codes(theirs)));
            }
        }
    }
}

TEST_CASE("recorder: a token's experts from the best on, bytes of MXFP8, and sums of one layer") {
    const std::string path = "build/moe_recorder.test.trace.safetensors";
    Rows values(4, 2), out(1, 2);
    values.values = {0, 1, 10, 11, 20, 21, 30, 31}, values.n_rows = 4, out.n_rows = 1;
    Routing order;
    order.k = 2, order.row_of = {2, 0, 3, 1}, order.experts = {0, 1, 0, 1};
    CodedRows mx(1, 32, {WeightKind::mxfp8, 32}), x(1, 4, {});
    std::fill(mx.codes.begin(), mx.codes.end(), int8_t(0xff)), mx.scales = {e8m0_value(200)};
    x.codes = {1, 2, 3, 4}, x.scales = {1};
    const int8_t rows[] = {1, 1, 1, 1, 0, -1, 2, 0};
    MoeMatrix w;
    w.codes = reinterpret_cast<const uint8_t*>(rows), w.bits = 8, w.n_rows = 2;
    w.n_cols = w.n_codes = w.group = w.group_size = 4;
    const float scales[] = {1, 1};
    w.row_scales = scales;
    Trace trace;
    for (const int layer : {0, accumulator_layer}) {
        const MoeRecorder record(&trace, layer);
        record("sorted", values, order);
        record("mx", mx);
        record("product", out, x, w);
    }
    MoeRecorder(nullptr, accumulator_layer)("nothing", values, order);
    trace.write(path);
    const Tensors t = read_safetensors(path);
    CHECK(t.size() == 9);
    CHECK(t.at("layers.0.sorted").shape == std::vector<int>{2, 2, 2});
    CHECK(t.at("layers.0.sorted").f32() == std::vector<float>{20, 21, 0, 1, 30, 31, 10, 11});
    CHECK(t.at("layers.1.mx.q").type == "U8");
    CHECK(bytes_of(t.at("layers.1.mx.q")) == std::vector<uint8_t>(32, 255));
    CHECK(bytes_of(t.at("layers.1.mx.s")) == std::vector<uint8_t>{200});
    CHECK(t.at("layers.1.product.acc").shape == std::vector<int>{1, 2, 1});
    CHECK(t.at("layers.1.product.acc").i32() == std::vector<int32_t>{10, 4});
}

// ----------------------------------------------------------------------------
// Files

namespace {

// Qwen3-30B-A3B.
Config large(WeightKind kind, int group) {
    Config c;
    c.arch = Arch::qwen3_moe;
    c.dim = 2048, c.hidden_dim = 6144, c.n_layers = 48, c.n_heads = 32, c.n_kv_heads = 4, c.head_dim = 128;
    c.vocab_size = 151936, c.group_size = 0;
    c.moe = moe_config(kind, group, 128, 8, 768);
    c.moe.is_dense.assign(48, 0);
    return c;
}

// The same by the ladder of docs/moe.md: experts in 2 bits, attention in 4.
Config large_ladder() {
    Config c = large(WeightKind::ladder, 64);
    const MatrixFormat nibbles{4, 0, 128}, pairs{2, MatrixFormat::two_level_flag, 64};
    c.moe.ladder = {MatrixFormat{8, 0, 0}, nibbles, nibbles, pairs, pairs, nibbles};
    c.group_size = 64;
    return c;
}

#ifdef ENGINE
TensorList tensors(const Config& c) {
    check_config(c);
    return Weights{TensorList(nullptr, 0, 64, 64), c}.file;
}
#endif

}  // namespace

#ifdef ENGINE
TEST_CASE("weights: the bytes that a header implies, and those that a token reads") {
    const uint64_t n = 48ull * 128 * 3 * 768 * 2048;  // weights of experts
    const uint64_t rows = 48ull * 128 * (2 * 768 + 2048);
    const Config c = large(WeightKind::a8w8, 0);
    const uint64_t rest = tensors(c).weight_bytes() - n - 4 * rows;
    CHECK(tensors(large(WeightKind::a8w4, 64)).weight_bytes() == rest + n / 2 + n / 64 * 2 + 4 * rows);
    CHECK(tensors(large(WeightKind::a8w4, 0)).weight_bytes() == rest + n / 2 + 8 * rows);
    CHECK(tensors(large(WeightKind::mxfp8, 32)).weight_bytes() == rest + n + n / 32);
    // With all matrices in 4 bits, scales of rows give way to the assist matrix.
    const uint64_t others = 48ull * 2048 * (2 * 4096 + 2 * 512) + 2ull * 151936 * 2048;
    Config pure = large(WeightKind::a8w4, 64);
    pure.moe.pure = true;
    CHECK(tensors(pure).weight_bytes() ==
          tensors(large(WeightKind::a8w4, 64)).weight_bytes() - others + others / 2 + others / 64 * 2);
    // Of an expert in sixteen, and of the embedding a row; nothing of what alignment leaves free, which is 16
    // bytes behind the table of dense layers.
    CHECK(tensors(c).bytes_per_token(c) == rest - 16 - 151936ull * (2048 + 4) + (n + 4 * rows) / 16);
    // And nothing of the assist matrix, which is for other hardware.
    const uint64_t read = others - 151936ull * 2048 + n / 16,
                   rows_of_others = 48ull * (2048 + 4096 + 2 * 512);
    CHECK(tensors(pure).bytes_per_token(pure) ==
          read / 2 + read / 64 * 2 + rest - 16 - others - 4 * (rows_of_others + 2 * 151936));
    // The ladder: 2 bits and a byte for 64 weights of experts, four bytes for a row; 4 bits and 20 for 128.
    const uint64_t table = 151936ull * 2048, attention = others - 2 * table;
    CHECK(tensors(large_ladder()).weight_bytes() ==
          rest - others - 4 * (rows_of_others + 2 * 151936) + n / 4 + n / 64 + 4 * rows + table + 4 * 151936 +
              uint64_t(double(attention + table) * (4 + 20.0 / 128) / 8));
}

TEST_CASE("weights: an expert of the ladder has its own rows of every tensor") {
    for (const MatrixFormat& f : {MatrixFormat{2, MatrixFormat::two_level_flag, 64},
                                  {4, MatrixFormat::sparse_flag, 64},
                                  {4, 0, 64}}) {
        CAPTURE(format_text(f));
        Config c = large_ladder();
        c.moe.ladder[3] = c.moe.ladder[4] = f, c.n_layers = 1, c.moe.is_dense = {0}, c.vocab_size = 8;
        c.moe.n_experts = 3, c.moe.n_active = 2, c.moe.hidden_dim = 64;
        const TensorList list = tensors(c);
        std::vector<std::byte> memory(list.memory_bytes(), std::byte{0x33});
        const Weights w{TensorList(memory.data(), memory.size(), 64, 64), c};
        size_t n_seen = 0;
        for (const TensorInfo& t : w.file.all()) {
            if (!t.name.starts_with("layers.0.moe.") || t.name.ends_with("router")) continue;
            const bool is_down = t.name.find("down") != t.name.npos;
            const size_t n_bytes = t.n_bytes / 3, n_before = n_seen;
            for (int e = 0; e < 3; e++) {
                const MoeMatrix& m = (is_down ? w.experts[0].down : w.experts[0].gate_up)[size_t(e)];
                const std::byte* at = w.file.data(t) + size_t(e) * n_bytes;
                for (const void* p :
                     {static_cast<const void*>(m.codes), static_cast<const void*>(m.mask),
                      static_cast<const void*>(m.scales), static_cast<const void*>(m.zeros),
                      static_cast<const void*>(m.row_scales), static_cast<const void*>(m.levels)})
                    n_seen += p == at;
            }
            CHECK(n_seen == n_before + 3);
        }
        CHECK(n_seen == 2 * 3 * (f.sparse() ? 4u : 3u));
    }
}

#endif

TEST_CASE("weights: formats that there are not, and what does not fit") {
    auto refused = [](WeightKind kind, int group, auto change, const char* why) {
        Config c = large(kind, group);
        change(c);
        CHECK_THROWS_WITH(check_config(c), why);
    };
    auto same = [](Config&) {};
    refused(WeightKind::a8w8, 32, same, "group is 32, which the experts' format has not");
    refused(WeightKind::a8w4, 96, same, "group is 96, which the experts' format has not");
    refused(WeightKind::mxfp8, 0, same, "group is 0, which the experts' format has not");
    refused(WeightKind::mxfp8, 512, same, "moe_hidden_dim is 768, not a multiple of 512");
    auto pure = [](Config& c) { c.moe.pure = true; };
    refused(WeightKind::a8w8, 0, pure, "pure is 1, but all of A8W8 is int8: expected 0");
    refused(
        WeightKind::mxfp8, 256,
        [](Config& c) { c.moe.pure = true, c.hidden_dim = 1152, c.moe.is_dense[7] = 1; },
        "hidden_dim is 1152, not a multiple of 256");
    refused(
        WeightKind::a8w4, 128, [](Config& c) { c.moe.pure = true, c.head_dim = 94; },
        "n_heads * head_dim is 3008, not a multiple of 128");
    refused(
        WeightKind::a8w8, 0, [](Config& c) { c.group_size = 64; },
        "group_size is 64, expected 0 (whole rows)");
    refused(
        WeightKind::a8w8, 0, [](Config& c) { c.dim = 2046; },
        "dim is 2046, expected a multiple of 4, at most 65536");
    auto ladder = [](auto change, const char* why) {
        Config c = large_ladder();
        change(c);
        CHECK_THROWS_WITH(check_config(c), why);
    };
    CHECK_NOTHROW(check_config(large_ladder()));
    ladder(
        [](Config& c) {
            c.moe.ladder[3] = {3, 0, 64};
        },
        "the format of gate_up_proj is bits 3, flags 0, group 64, which is none");
    ladder(
        [](Config& c) {
            c.moe.ladder[4] = {2, 2, 32};
        },
        "the format of down_proj is bits 2, flags 2, group 32, which is none");
    ladder(
        [](Config& c) {
            c.moe.ladder[1] = {4, 0, 32};
        },
        "group_size is 64, expected 32, the activations'");
    ladder([](Config& c) { c.group_size = 0; }, "group_size is 0, expected 64, the activations'");
    ladder([](Config& c) { c.shared_classifier = true; },
           "the classifier is the embedding, but its format is 4 bits in groups of 128, not 8 bits per row");
    ladder([](Config& c) { c.moe.hidden_dim = 96; }, "down_proj has 96 columns, not a multiple of 64");
    ladder([](Config& c) { c.head_dim = 66; }, "attn has 2112 columns, not a multiple of 128");
    ladder([](Config& c) { c.hidden_dim = 1088, c.moe.is_dense[3] = 1; },
           "ffn has 1088 columns, not a multiple of 128");
    ladder([](Config& c) { c.moe.is_dense[3] = 2; }, "dense_layers is 2, expected 0 or 1");
    Config without_dense = large_ladder();
    without_dense.hidden_dim = 1088;
    CHECK_NOTHROW(check_config(without_dense));
}
