// attention against the golden vectors of fp32, fp16, q8 and int8, and against plain loops in its order of
// operations: scores from their inputs, probabilities from the scores, weights, codes and the result from the
// probabilities. All are equal to the bit but probabilities, as exp is right to a unit in the last place.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "Vattention.h"
#include "Vattention_8.h"
#include "sim.h"
#include "vectors.h"

enum Format { fp32, fp16, q8 };

// Rows of keys or of values: numbers of fp32; or bits of fp16; or codes with a scale a row.
struct Rows {
    std::vector<uint32_t> numbers;  // (positions, dim): bits of fp32 or fp16, or codes
    std::vector<uint32_t> scales;   // (positions,) fp32; empty but for q8
};

// A query, and what its head has in the cache.
struct Head {
    int dim, positions;
    Format format;
    bool int8;
    std::vector<uint32_t> q;  // (dim,) fp32
    Rows k, v;
    uint32_t scale() const { return bits_of(1.0f / std::sqrt(float(dim))); }
};

// What comes out, step by step.
struct Steps {
    std::vector<uint32_t> scores, probs, weights;  // (positions,) fp32
    std::vector<int> codes;                        // int8: (dim + positions,), of the query and of weights
    std::vector<uint32_t> code_scales;             // the same
    std::vector<uint32_t> out;                     // (dim,) fp32
    int64_t clocks = 0;                            // in which it was busy
};

// ---- plain loops
// -------------------------------------------------------------------------------------------------

static float half_to_float(uint32_t h) {
    const uint32_t exp = h >> 10 & 31, fraction = h & 1023;
    const float magnitude = exp == 31  ? (fraction == 0 ? std::numeric_limits<float>::infinity()
                                                        : std::numeric_limits<float>::quiet_NaN())
                            : exp == 0 ? std::ldexp(float(fraction), -24)
                                       : std::ldexp(float(1024 + fraction), int(exp) - 25);
    return h >> 15 ? -magnitude : magnitude;
}

// A number of a row; in q8 without its scale.
static float number(const Head& h, const Rows& rows, int p, int i) {
    const uint32_t u = rows.numbers[size_t(p) * size_t(h.dim) + size_t(i)];
    return h.format == q8 ? float(int32_t(u)) : h.format == fp16 ? half_to_float(u) : float_of(u);
}

// Codes of x (n,) under one scale, which is returned, as quantize_group of runq_w8a8.cpp has it.
static float quantize_group(int* codes, const float* x, int n) {
    float amax = 0;
    for (int i = 0; i < n; i++) amax = std::max(amax, std::fabs(x[i]));
    float inv = 127.0f / amax;
    if (!(inv > 0 && inv <= std::numeric_limits<float>::max())) inv = 0;
    for (int i = 0; i < n; i++) {
        const float r = std::nearbyint(x[i] * inv);
        const float low = r > -127.0f ? r : -127.0f;
        codes[i] = int(low < 127.0f ? low : 127.0f);
    }
    return inv > 0 ? amax / 127.0f : 0.0f;
}

// x . y in the order of attention.sv: six sums side by side.
template <class X, class Y>
static float dot(int n, const X& x, const Y& y) {
    std::array<float, 6> sums{};
    for (int i = 0; i < n; i++) sums[size_t(i % 6)] = std::fma(x(i), y(i), sums[size_t(i % 6)]);
    // The first of them is that of element n - 6.
    const auto sum = [&](int i) { return sums[size_t((n + i) % 6)]; };
    return ((sum(0) + sum(1)) + (sum(2) + sum(3))) + (sum(4) + sum(5));
}

static std::vector<float> floats(const std::vector<uint32_t>& bits) {
    std::vector<float> f;
    for (uint32_t u : bits) f.push_back(float_of(u));
    return f;
}

// All steps but probabilities, which are given.
static Steps by_loops(const Head& h, const std::vector<uint32_t>& probs) {
    Steps s;
    const std::vector<float> q = floats(h.q);
    std::vector<int> q_codes(q.size());
    float scale = float_of(h.scale());
    const auto add_codes = [&](const std::vector<int>& codes, float its_scale) {
        s.codes.insert(s.codes.end(), codes.begin(), codes.end());
        s.code_scales.insert(s.code_scales.end(), codes.size(), bits_of(its_scale));
    };
    if (h.int8) {
        const float q_scale = quantize_group(q_codes.data(), q.data(), h.dim);
        add_codes(q_codes, q_scale);
        scale = q_scale * scale;
    }
    for (int p = 0; p < h.positions; p++) {
        const float factor = h.format == q8 ? scale * float_of(h.k.scales[size_t(p)]) : scale;
        int32_t sum = 0;
        for (int i = 0; i < h.dim && h.int8; i++) sum += q_codes[size_t(i)] * int(number(h, h.k, p, i));
        const float product = h.int8 ? float(sum)
                                     : dot(
                                           h.dim, [&](int i) { return q[size_t(i)]; },
                                           [&](int i) { return number(h, h.k, p, i); });
        s.scores.push_back(bits_of(product * factor));
    }
    std::vector<float> weights = floats(probs);
    for (int p = 0; p < h.positions && h.format == q8; p++)
        weights[size_t(p)] *= float_of(h.v.scales[size_t(p)]);
    std::vector<int> codes(weights.size());
    float weights_scale = 1;
    if (h.int8) {
        for (float w : weights) s.weights.push_back(bits_of(w));
        weights_scale = quantize_group(codes.data(), weights.data(), h.positions);
        add_codes(codes, weights_scale);
    }
    for (int i = 0; i < h.dim; i++) {
        float out = 0;
        int32_t sum = 0;
        for (int p = 0; p < h.positions; p++) {
            if (h.int8)
                sum += codes[size_t(p)] * int(number(h, h.v, p, i));
            else
                out = std::fma(weights[size_t(p)], number(h, h.v, p, i), out);
        }
        s.out.push_back(bits_of(h.int8 ? float(sum) * weights_scale : out));
    }
    return s;
}

// ---- the module
// --------------------------------------------------------------------------------------------------

static void add_rows(std::vector<uint32_t>& words, const Head& h, const Rows& rows) {
    const int lanes = h.format == q8 ? 4 : h.format == fp16 ? 2 : 1, bits = 32 / lanes;
    for (int p = 0; p < h.positions; p++) {
        if (h.format == q8) words.push_back(rows.scales[size_t(p)]);
        for (int i = 0; i < h.dim; i += lanes) {
            uint32_t word = 0;
            for (int l = 0; l < lanes; l++)
                word |= (rows.numbers[size_t(p) * size_t(h.dim) + size_t(i + l)] &
                         (lanes == 1 ? ~0u : (1u << bits) - 1))
                        << l * bits % 32;
            words.push_back(word);
        }
    }
}

// One head through the module. With `stalls` every stream pauses at random. Stops after `limit` clocks.
template <class Model>
static Steps run(Sim<Model>& sim, const Head& h, Random& random, bool stalls, int64_t limit = -1) {
    auto& top = sim.top;
    Steps s;
    std::vector<uint32_t> words;
    add_rows(words, h, h.k);
    for (int times = h.int8 ? 2 : 1; times > 0; times--) add_rows(words, h, h.v);
    const auto pauses = [&] { return stalls && random.one_in(random.one_in(2) ? 2 : 6); };

    sim.settle();
    CHECK((!top.busy_o && !top.out_valid_o && !top.q_ready_o && !top.kv_ready_o));
    top.dim_i = h.dim, top.positions_i = h.positions, top.scale_i = h.scale();
    top.kv_format_i = h.format == q8 ? (h.int8 ? int(random() & 3) : 2 + int(random() & 1)) : int(h.format);
    top.int8_i = h.int8, top.start_i = 1;
    top.q_valid_i = top.kv_valid_i = top.out_ready_i = 0;
    sim.tick();
    // Only what was there with start_i counts.
    top.start_i = 0;
    top.dim_i = random() & 15, top.positions_i = random() & 7, top.scale_i = uint32_t(random());
    top.kv_format_i = random() & 3, top.int8_i = random() & 1;

    size_t q_at = 0, kv_at = 0;
    bool q_offered = false, kv_offered = false, is_last = false;
    int64_t held = -1;
    const bool cut = limit >= 0;
    if (!cut) limit = 5000 + 30 * int64_t(h.dim) + 3 * int64_t(h.positions) * (2 * h.dim + 50);
    for (; top.busy_o; s.clocks++) {
        if (s.clocks == limit) {
            if (!cut) FAIL("does not end: " << s.out.size() << " numbers of " << h.dim);
            return s;
        }
        q_offered = q_at < h.q.size() && (q_offered || !pauses());
        kv_offered = kv_at < words.size() && (kv_offered || !pauses());
        top.q_valid_i = q_offered, top.q_i = q_offered ? h.q[q_at] : uint32_t(random());
        top.kv_valid_i = kv_offered, top.kv_i = kv_offered ? words[kv_at] : uint32_t(random());
        top.out_ready_i = !pauses();
        sim.settle();
        const int64_t out = int64_t(uint64_t(top.out_last_o) << 32 | top.out_o);
        if (held >= 0) CHECK((top.out_valid_o && out == held));
        held = top.out_valid_o && !top.out_ready_i ? out : -1;
        if (top.score_valid_o) s.scores.push_back(top.step_o);
        if (top.prob_valid_o) s.probs.push_back(top.step_o);
        if (top.weight_valid_o) s.weights.push_back(top.step_o);
        if (top.code_valid_o)
            s.codes.push_back(int8_t(top.code_o)), s.code_scales.push_back(top.code_scale_o);
        if (top.out_valid_o && top.out_ready_i) {
            CHECK(!is_last);
            s.out.push_back(top.out_o);
            is_last = top.out_last_o;
        }
        if (q_offered && top.q_ready_o) q_at++, q_offered = false;
        if (kv_offered && top.kv_ready_o) kv_at++, kv_offered = false;
        sim.tick();
    }
    CHECK((is_last && q_at == h.q.size() && kv_at == words.size()));
    return s;
}

static bool same(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    return std::ranges::equal(a, b, same_float);
}

// Whether probabilities are those of the scores: exp in fp64, of the difference as fp32 has it.
static bool is_softmax(const std::vector<uint32_t>& prob_bits, const std::vector<uint32_t>& score_bits) {
    const std::vector<float> scores = floats(score_bits), probs = floats(prob_bits);
    if (probs.size() != scores.size()) return false;
    const float largest = *std::ranges::max_element(scores);
    const bool nan =
        std::isinf(largest) || std::ranges::any_of(scores, [](float f) { return std::isnan(f); });
    if (nan) return std::ranges::all_of(probs, [](float f) { return std::isnan(f); });
    double sum = 0;
    for (float f : scores) sum += std::exp(double(f - largest));
    for (size_t p = 0; p < scores.size(); p++) {
        const double want = std::exp(double(scores[p] - largest)) / sum;
        if (!(std::fabs(double(probs[p]) - want) <= 1e-6 * want + 3e-45)) return false;
    }
    return true;
}

static void check(const Head& h, const Steps& have) {
    INFO("dim " << h.dim << ", positions " << h.positions << ", format " << int(h.format) << ", int8 "
                << h.int8);
    REQUIRE(have.probs.size() == size_t(h.positions));
    const Steps want = by_loops(h, have.probs);
    CHECK(same(have.scores, want.scores));
    CHECK(is_softmax(have.probs, have.scores));
    CHECK(same(have.weights, want.weights));
    CHECK(have.codes == want.codes);
    CHECK(same(have.code_scales, want.code_scales));
    CHECK(same(have.out, want.out));
}

// ---- golden vectors
// ----------------------------------------------------------------------------------------------

static std::vector<uint32_t> numbers(const std::string& name) {
    const std::vector<int64_t> values = op(name);
    std::vector<uint32_t> n;
    for (int64_t v : values) n.push_back(uint32_t(v));
    return n;
}

// ||a - b|| / ||b||
static double distance(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    double difference = 0, norm = 0;
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); i++) {
        const double x = float_of(a[i]), y = float_of(b[i]);
        difference += (x - y) * (x - y), norm += y * y;
    }
    return difference == 0 ? 0 : std::sqrt(difference / norm);
}

// Tensors of a case: x (n, heads, dim). Of head `head`, the first n_rows rows.
struct Tensor {
    std::vector<uint32_t> values;
    int rows = 1, heads = 1, dim = 1;
    explicit Tensor(const std::string& name) : values(numbers(name)) {
        const std::vector<int> shape = op_shape(name);
        rows = shape[0], heads = shape[1];
        if (shape.size() == 3) dim = shape[2];
    }
    std::vector<uint32_t> of(int head, int first, int n) const {
        std::vector<uint32_t> x;
        for (int r = first; r < first + n; r++) {
            const auto at = values.begin() + (ptrdiff_t(r) * heads + head) * dim;
            x.insert(x.end(), at, at + dim);
        }
        return x;
    }
};

// Whether the module has heads of this size.
static bool has_dim(int dim) { return dim >= 8 && dim <= 128; }

TEST_CASE("attention: golden vectors, fp32") {
    Sim<Vattention> sim;
    sim.reset();
    Random random(41);
    const std::vector<std::string> names = op_cases("attention.", "q");
    CHECK(names.size() == 10);
    for (const std::string& name : names) {
        INFO(name);
        const Tensor q(name + ".q"), k(name + ".k"), v(name + ".v"), out(name + ".out"),
            scores(name + ".scores"), probs(name + ".probs");
        if (!has_dim(q.dim)) continue;
        std::vector<uint32_t> all_scores, all_probs, all_out, golden_scores, golden_probs, golden_out;
        const auto add = [](std::vector<uint32_t>& to, const std::vector<uint32_t>& x, int n) {
            to.insert(to.end(), x.begin(), x.begin() + n);
        };
        for (int t = 0; t < q.rows; t++)
            for (int head = 0; head < q.heads; head++) {
                const int n = k.rows - q.rows + t + 1, g = head / (q.heads / k.heads);
                const Head h{
                    q.dim, n, fp32, false, q.of(head, t, 1), {k.of(g, 0, n), {}}, {v.of(g, 0, n), {}}};
                const Steps s = run(sim, h, random, t % 2 == 1);
                check(h, s);
                add(all_scores, s.scores, n), add(golden_scores, scores.of(head, t, 1), n);
                add(all_probs, s.probs, n), add(golden_probs, probs.of(head, t, 1), n);
                add(all_out, s.out, h.dim), add(golden_out, out.of(head, t, 1), h.dim);
            }
        CHECK(distance(all_scores, golden_scores) < 1e-5);
        CHECK(distance(all_probs, golden_probs) < 1e-5);
        CHECK(distance(all_out, golden_out) < 1e-5);
    }
}

TEST_CASE("attention: golden vectors, caches of fp16 and q8") {
    Sim<Vattention> sim;
    sim.reset();
    Random random(43);
    const std::vector<std::string> names = op_cases("attention_kv.", "q");
    CHECK(names.size() == 12);
    for (const std::string& name : names) {
        INFO(name);
        const bool is_q8 = name.find("q8") != std::string::npos;
        const std::string kept = is_q8 ? "_codes" : "_kept";
        const Tensor q(name + ".q"), k(name + ".k" + kept), v(name + ".v" + kept), out(name + ".out");
        const Tensor k_scales(name + (is_q8 ? ".k_scales" : ".k")),
            v_scales(name + (is_q8 ? ".v_scales" : ".v"));
        if (!has_dim(q.dim)) continue;
        std::vector<uint32_t> all_out;
        for (int t = 0; t < q.rows; t++)
            for (int head = 0; head < q.heads; head++) {
                const int n = k.rows - q.rows + t + 1, g = head / (q.heads / k.heads);
                Head h{q.dim,
                       n,
                       is_q8 ? q8 : fp16,
                       false,
                       q.of(head, t, 1),
                       {k.of(g, 0, n), {}},
                       {v.of(g, 0, n), {}}};
                if (is_q8) {
                    h.k.scales = k_scales.of(g, 0, n);
                    h.v.scales = v_scales.of(g, 0, n);
                }
                const Steps s = run(sim, h, random, t % 2 == 1);
                check(h, s);
                all_out.insert(all_out.end(), s.out.begin(), s.out.end());
            }
        CHECK(distance(all_out, out.values) < 1e-5);
    }
}

// Numbers that have these codes and this scale.
static std::vector<uint32_t> with_codes(const std::vector<uint32_t>& codes, float scale) {
    float amax = scale * 127;
    for (int tries = 0; tries < 8 && amax / 127 != scale; tries++)
        amax = std::nextafter(amax, amax / 127 < scale ? std::numeric_limits<float>::infinity() : 0.0f);
    std::vector<uint32_t> x;
    for (uint32_t code : codes) x.push_back(bits_of(float(double(int32_t(code)) * double(amax) / 127)));
    return x;
}

TEST_CASE("attention: golden vectors, int8") {
    Sim<Vattention> sim;
    sim.reset();
    Random random(47);
    const std::vector<std::string> names = op_cases("attention_int8", "q_codes");
    CHECK(names.size() == 10);
    for (const std::string& name : names) {
        INFO(name);
        const Tensor q(name + ".q_codes"), q_scales(name + ".q_scales"), k(name + ".k_codes"),
            k_scales(name + ".k_scales"), sums(name + ".sums"), scores(name + ".scores");
        if (!has_dim(q.dim)) continue;
        // Values: those of the second product of the same case.
        const std::string mix = name.substr(0, name.rfind('.')) + ".mix";
        const Tensor v(mix + ".v_codes"), v_scales(mix + ".v_scales");
        std::vector<uint32_t> all_scores, golden_scores;
        for (int t = 0; t < q.rows; t++)
            for (int head = 0; head < q.heads; head++) {
                const int n = k.rows - q.rows + t + 1, g = head / (q.heads / k.heads);
                const float scale = float_of(q_scales.of(head, t, 1)[0]);
                const std::vector<uint32_t> codes = q.of(head, t, 1);
                const Head h{q.dim,
                             n,
                             q8,
                             true,
                             with_codes(codes, scale),
                             {k.of(g, 0, n), k_scales.of(g, 0, n)},
                             {v.of(g, 0, n), v_scales.of(g, 0, n)}};
                const Steps s = run(sim, h, random, t % 2 == 1);
                check(h, s);
                for (int i = 0; i < q.dim; i++) {
                    CHECK(s.codes[size_t(i)] == int32_t(codes[size_t(i)]));
                    CHECK(s.code_scales[size_t(i)] == bits_of(scale));
                }
                // The golden's exact sums, and their scores.
                const std::vector<uint32_t> sum = sums.of(head, t, 1), score = scores.of(head, t, 1);
                for (size_t p = 0; p < size_t(n); p++) {
                    const float factor = scale * float_of(h.scale()) * float_of(h.k.scales[p]);
                    CHECK(s.scores[p] == bits_of(float(int32_t(sum[p])) * factor));
                    all_scores.push_back(s.scores[p]), golden_scores.push_back(score[p]);
                }
            }
        CHECK(distance(all_scores, golden_scores) < 1e-5);
    }
}

// The loops that the module is compared with give the golden's codes, scales and sums, from the golden's
// probabilities; and the module is equal to the loops where its probabilities are nearly these.
TEST_CASE("attention: golden vectors, int8, from probabilities on") {
    Sim<Vattention> sim;
    sim.reset();
    Random random(53);
    const std::vector<std::string> names = op_cases("attention_int8", "probs");
    CHECK(names.size() == 13);
    for (const std::string& name : names) {
        INFO(name);
        const Tensor probs(name + ".probs"), v(name + ".v_codes"), v_scales(name + ".v_scales"),
            codes(name + ".weight_codes"), scales(name + ".weight_scales"), sums(name + ".sums"),
            out(name + ".out");
        if (!has_dim(v.dim)) continue;
        std::vector<uint32_t> all_out;
        for (int t = 0; t < probs.rows; t++)
            for (int head = 0; head < probs.heads; head++) {
                const int n = v.rows, g = head / (probs.heads / v.heads);
                Head h{v.dim,
                       n,
                       q8,
                       true,
                       std::vector<uint32_t>(size_t(v.dim), 0),
                       {},
                       {v.of(g, 0, n), v_scales.of(g, 0, n)}};
                // Keys of one number, so that scores are logarithms of probabilities.
                h.q[0] = bits_of(1);
                h.k.numbers.assign(size_t(n) * size_t(h.dim), 0);
                const std::vector<uint32_t> prob = probs.of(head, t, 1), code = codes.of(head, t, 1),
                                            sum = sums.of(head, t, 1);
                for (size_t p = 0; p < size_t(n); p++) {
                    h.k.numbers[p * size_t(h.dim)] = 1;
                    h.k.scales.push_back(bits_of(float_of(prob[p]) == 0 ? -1e30f
                                                                        : std::log(float_of(prob[p])) *
                                                                              std::sqrt(float(h.dim))));
                }
                if (t % 4 == 0) check(h, run(sim, h, random, false));
                const Steps s = by_loops(h, prob);
                const float scale = float_of(scales.of(head, t, 1)[0]);
                for (size_t p = 0; p < size_t(n); p++) {
                    CHECK(s.codes[size_t(h.dim) + p] == int32_t(code[p]));
                    CHECK(s.code_scales[size_t(h.dim) + p] == bits_of(scale));
                }
                for (size_t i = 0; i < size_t(h.dim); i++)
                    CHECK(s.out[i] == bits_of(float(int32_t(sum[i])) * scale));
                all_out.insert(all_out.end(), s.out.begin(), s.out.end());
            }
        CHECK(distance(all_out, out.values) < 1e-5);
    }
}

// ---- random numbers
// ----------------------------------------------------------------------------------------------

// With `odd` a number in three is 0, subnormal, infinite, NaN or huge.
struct Draws {
    Random random;
    bool odd = false;
    uint32_t fp32_bits(float size) {
        if (odd && random.one_in(3)) {
            const uint32_t list[] = {0,          1,          0x7fffff,   0x800000, 0x7f800000,
                                     0x7fc00001, 0x7f7fffff, 0x7e967699, 0x2fdb};
            return list[random() % std::size(list)] | uint32_t(random() & 1) << 31;
        }
        return bits_of(size * (float(random() >> 40) / float(1 << 23) - 1));
    }
    Rows rows(const Head& h, float size) {
        Rows r;
        for (int p = 0; p < h.positions; p++) {
            for (int i = 0; i < h.dim; i++) {
                const int exp = int(13 + std::ilogb(size)) + random.in(-3, 0);
                const uint32_t half = odd && random.one_in(3)
                                          ? uint32_t(random() & 0xffff)
                                          : uint32_t(random() & 0x83ff) | uint32_t(exp) << 10;
                r.numbers.push_back(h.format == fp32   ? fp32_bits(size)
                                    : h.format == fp16 ? half
                                                       : uint32_t(random.in(-127, 127)));
            }
            if (h.format == q8)
                r.scales.push_back(odd ? fp32_bits(size)
                                       : bits_of(std::fabs(float_of(fp32_bits(size))) / 64));
        }
        return r;
    }
    Head head(int dim, int positions, int kind) {
        Head h{dim, positions, Format(std::min(kind, 2)), kind == 3, {}, {}, {}};
        const float size = float(1 << random.in(0, 3));
        for (int i = 0; i < dim; i++) h.q.push_back(fp32_bits(size));
        h.k = rows(h, size), h.v = rows(h, 1);
        return h;
    }
};

// As many keys and values as HW_PAIRS says.
TEST_CASE("attention: random heads, without and with stalls") {
    const char* pairs = std::getenv("HW_PAIRS");
    const int64_t n_values = pairs != nullptr ? std::stoll(pairs) : 1000000;
    Draws draws{Random(59)};
    Sim<Vattention> sim;
    sim.reset();
    int64_t values = 0;
    for (int i = 0; values < n_values; i++) {
        const int dim = 4 * draws.random.in(2, draws.random.one_in(3) ? 32 : 10);
        const int positions = draws.random.in(1, draws.random.one_in(3) ? 200 : 14);
        const Head h = draws.head(dim, positions, i % 4);
        check(h, run(sim, h, draws.random, i % 8 >= 4));
        values += 2 * int64_t(dim) * positions;
    }
    MESSAGE(values << " keys and values");
}

TEST_CASE("attention: zeros, subnormal, huge and infinite numbers, NaN") {
    Draws draws{Random(61)};
    Sim<Vattention> sim;
    sim.reset();
    for (int i = 0; i < 400; i++) {
        // One part of three has such numbers.
        const int dim = 4 * draws.random.in(2, 5), positions = draws.random.in(1, 9), kind = i % 4;
        Head h = draws.head(dim, positions, kind);
        draws.odd = true;
        const Head odd = draws.head(dim, positions, kind);
        draws.odd = false;
        if (i / 4 % 4 == 0) h.q = odd.q;
        if (i / 4 % 4 == 1) h.k = odd.k;
        if (i / 4 % 4 == 2) h.v = odd.v;
        if (i / 4 % 4 == 3) {
            // Zeros, and scores of both signs that are far apart.
            for (uint32_t& u : i % 16 < 8 ? h.q : h.k.numbers) u = 0;
            for (uint32_t& u : h.k.scales) u = bits_of(float_of(u) * 1e4f);
        }
        check(h, run(sim, h, draws.random, i % 3 == 0));
    }
}

TEST_CASE("attention: the largest sizes") {
    Draws draws{Random(67)};
    Sim<Vattention> sim;
    sim.reset();
    const Head large = draws.head(128, 2048, 3);
    check(large, run(sim, large, draws.random, false));
    const Head whole = draws.head(8, 2048, 0);
    check(whole, run(sim, whole, draws.random, false));
}

// A module for fewer positions than numbers.
TEST_CASE("attention: a small one") {
    Draws draws{Random(79)};
    Sim<Vattention_8> small;
    small.reset();
    for (int i = 0; i < 200; i++) {
        const Head h = draws.head(8, draws.random.in(1, 4), i % 4);
        check(h, run(small, h, draws.random, i % 8 >= 4));
    }
}

// As the header of attention.sv has it.
TEST_CASE("attention: clocks") {
    Draws draws{Random(71)};
    Sim<Vattention> sim;
    sim.reset();
    for (const int dim : {20, 64})
        for (const int n : {6, 100})
            for (int kind = 0; kind < 4; kind++) {
                const Head h = draws.head(dim, n, kind);
                const int row = kind == 3 ? 9 * dim / 4 + 33 : 2 * dim + (kind == 2 ? 48 : 36);
                CHECK(run(sim, h, draws.random, false).clocks ==
                      n * row + (kind == 3 ? 19 * dim / 4 + 177 : 3 * dim + 81));
            }
}

TEST_CASE("attention: reset in the middle") {
    Draws draws{Random(73)};
    Sim<Vattention_8> sim;
    sim.reset();
    for (int kind : {0, 2, 3}) {
        const Head other = draws.head(8, 4, 3 - kind), h = draws.head(8, 3, kind);
        for (int before = 0; before < 700; before += draws.random.in(1, 7)) {
            run(sim, other, draws.random, before % 2 == 0, before);
            sim.top.q_valid_i = sim.top.kv_valid_i = 0;
            sim.reset(1);
            check(h, run(sim, h, draws.random, false));
        }
    }
}
