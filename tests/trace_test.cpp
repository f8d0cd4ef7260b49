// Traces: what is written can be read back.
#include "engine/app/trace.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "engine/cpu/half.h"
#include "engine/cpu/quant_matrix.h"
#include "own_folder.h"
#include "safetensors.h"

namespace {
const std::string folder = own_folder().string() + "/trace/";

// As a device's fp16.
struct DeviceHalf : Half {
    explicit operator float() const { return to_float(*this); }
};
}  // namespace
template <>
inline constexpr const char* tensor_type<DeviceHalf> = "F16";

TEST_CASE("trace: values of several calls are joined along the tokens, and widening rows are padded") {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "trace.safetensors";
    Trace trace;
    const float first[] = {1, 2, 3, 4};
    trace.add("x", first, 2, {2});
    trace.add("x", first + 2, 1, {2});
    const float scores[] = {1, 2, 3, 4, 5, 6};
    trace.add(step_name(0, "scores"), scores, 1, {2, 1});      // 2 heads, 1 position
    trace.add(step_name(0, "scores"), scores + 2, 1, {2, 2});  // 2 heads, 2 positions
    const int8_t codes[] = {1, -2, 3};
    trace.add("x.q", codes, 1, {3});
    const int tokens[] = {5, 6};
    trace.add("tokens", tokens, 2, {});
    trace.add("one", first, 1, {1, 2});
    trace.write(path);

    const Tensors t = read_safetensors(path);
    CHECK(t.size() == 5);
    CHECK(t.at("x").shape == std::vector<int>{3, 2});
    CHECK(t.at("x").f32() == std::vector<float>{1, 2, 3, 4, 3, 4});
    CHECK(t.at("layers.0.scores").shape == std::vector<int>{2, 2, 2});
    CHECK(t.at("layers.0.scores").f32() == std::vector<float>{1, 0, 2, 0, 3, 4, 5, 6});
    CHECK(t.at("x.q").i8() == std::vector<int8_t>{1, -2, 3});
    CHECK(t.at("tokens").shape == std::vector<int>{2});
    CHECK(t.at("tokens").i32() == std::vector<int32_t>{5, 6});
    CHECK(t.at("one").shape == std::vector<int>{1, 1, 2});
    CHECK_THROWS_WITH_AS(trace.write("/no/such/folder/t"),
                         doctest::Contains("/no/such/folder/t: cannot write"), std::runtime_error);
}

TEST_CASE("trace: from a position on, but tokens, keys and values from the first") {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "late.safetensors";
    Trace trace(3);
    const int tokens[] = {5, 6, 7, 8, 9};
    const float x[] = {0, 1, 2, 3, 4};
    CHECK(trace.n_tokens() == 0);
    for (const size_t first : {size_t(0), size_t(2)}) {  // a chunk of two, and one of three
        const size_t n = first == 0 ? 2 : 3;
        trace.add("tokens", tokens + first, n, {});
        for (const char* step : {"attn.k_rope", "attn.v_proj", "attn.q_rope"})
            trace.add(step_name(0, step), x + first, n, {1});
        CHECK(trace.keeps_next("layers.0.attn.q_rope") == (first == 2));
    }
    CHECK(trace.n_tokens() == 5);
    trace.write(path);
    const Tensors t = read_safetensors(path);
    CHECK(t.size() == 5);
    CHECK(t.at("tokens").i32() == std::vector<int32_t>{5, 6, 7, 8, 9});
    CHECK(t.at("positions").shape == std::vector<int>{2});
    CHECK(t.at("positions").i32() == std::vector<int32_t>{3, 4});
    CHECK(t.at("layers.0.attn.k_rope").f32() == std::vector<float>{0, 1, 2, 3, 4});
    CHECK(t.at("layers.0.attn.v_proj").f32() == std::vector<float>{0, 1, 2, 3, 4});
    CHECK(t.at("layers.0.attn.q_rope").f32() == std::vector<float>{3, 4});
}

TEST_CASE("trace: what it will take is counted, and nothing of that is kept") {
    constexpr uint64_t token = 40;  // of a token of a step, besides its values
    const float x[64] = {};
    for (const int from : {0, 3}) {
        Trace trace(from);
        const auto run = [&](int position) {
            const int id = 7;
            trace.add("tokens", &id, 1, {});
            trace.add(step_name(0, "attn.k_rope"), x, 1, {2, 8});
            trace.add(step_name(0, "attn.scores"), x, 1, {4, position + 1});
            CHECK(!trace.keeps_next("x"));
        };
        const TraceSize size = trace.size_of(2, run);
        CHECK(trace.n_tokens() == 0);
        CHECK(size.at_first == 3 * token + 4 + 16 * 4 + 4 * 4);
        CHECK(size.growth == 4 * 4);
        CHECK(size.before == 2 * token + 4 + 16 * 4);
        uint64_t sum = 0;
        for (uint64_t position = 0; position < 9; position++) {
            const uint64_t bytes =
                position < uint64_t(from) ? size.before : size.at_first + position * size.growth;
            CHECK(size.bytes(position, position + 1) == bytes);
            sum += bytes;
        }
        CHECK(size.bytes(0, 9) == sum);
        CHECK(size.bytes(2, 9) + size.bytes(0, 2) == sum);
        CHECK(size.bytes(4, 4) == 0);
    }
    Trace one;
    const TraceSize size =
        one.size_of(1, [&](int) { one.add("x", x, 1, {8}); });  // a context of one position
    CHECK(size.bytes(0, 1) == token + 32);
    CHECK(TraceSize{}.bytes(0, 100) == 0);
}

TEST_CASE("trace: values stay as they are, however many and however large") {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "large.safetensors";
    Trace trace;
    std::vector<float> row(50000);
    for (int i = 0; i < 300; i++) {
        const int n = i % 3 == 0 ? int(row.size()) : i % 3 == 1 ? 1000 : 1;
        std::fill(row.begin(), row.end(), float(i));
        trace.add("x" + std::to_string(i % 3), row.data(), 1, {n});
    }
    trace.write(path);
    const Tensors t = read_safetensors(path);
    for (int i = 0; i < 300; i++) {
        const auto values = t.at("x" + std::to_string(i % 3)).f32();
        const size_t n = values.size() / 100, first = size_t(i / 3) * n;
        CHECK(values[first] == float(i));
        CHECK(values[first + n - 1] == float(i));
    }
}

TEST_CASE("recorder: accumulators of one layer's products") {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "accumulators.safetensors";
    struct Matrix {
        const int8_t* codes;
        const float* scales;
        int n_rows = 3, n_cols = 4, group_size = 2;
    };
    const int8_t codes[] = {1, 2, 3, 4, -128, 127, 0, 1, 0, 0, 0, -1};
    const float scales[6] = {};
    Int8Rows x;
    x.resize(2, 4, 2);
    x.codes = {1, 10, 100, -100, 127, -127, 0, 2};
    Rows out(2, 3);
    out.n_rows = 2;
    Trace trace;
    for (const int layer : {0, accumulator_layer}) {
        const Recorder record(&trace, layer);
        record("ffn.up_proj", out, x, Matrix{codes, scales});
    }
    trace.write(path);
    const Tensors t = read_safetensors(path);
    CHECK(t.size() == 3);
    CHECK(t.at("layers.1.ffn.up_proj.acc").shape == std::vector<int>{2, 3, 2});
    CHECK(t.at("layers.1.ffn.up_proj.acc").i32() ==
          std::vector<int32_t>{21, -100, 1142, -100, 0, 100, -127, 8, -32385, 2, 0, -2});
}

TEST_CASE("recorder: names, shapes, quantized rows and what each token sees") {
    std::filesystem::create_directories(folder);
    const std::string path = folder + "recorder.safetensors";
    Rows x(3, 4);
    for (size_t i = 0; i < x.values.size(); i++) x.values[i] = float(i);
    x.n_rows = 2;
    Int8Rows xq;
    xq.resize(2, 4, 2);
    xq.codes = {1, 2, 3, 4, 5, 6, 7, 8};
    xq.scales = {1, 2, 3, 4};
    HeadScores scores;
    scores.wanted = true;
    scores.resize(2, 2, 1, 4);  // two tokens at positions 1 and 2, two heads
    for (size_t i = 0; i < scores.values.size(); i++) scores.values[i] = float(i);
    Recorder(nullptr, 0)("nothing", x);
    Trace trace;
    const Recorder record(&trace, 3);
    record("x", x);
    record("x", xq);
    record("heads", x, 2);
    record("scores", scores);
    trace.write(path);
    const Tensors t = read_safetensors(path);
    CHECK(t.size() == 5);
    CHECK(t.at("layers.3.x").shape == std::vector<int>{2, 4});
    CHECK(t.at("layers.3.x").f32() == std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(t.at("layers.3.x.q").i8() == std::vector<int8_t>{1, 2, 3, 4, 5, 6, 7, 8});
    CHECK(t.at("layers.3.x.s").shape == std::vector<int>{2, 2});
    CHECK(t.at("layers.3.heads").shape == std::vector<int>{2, 2, 2});
    CHECK(t.at("layers.3.scores").f32() == std::vector<float>{0, 1, 0, 4, 5, 0, 8, 9, 10, 12, 13, 14});
}

TEST_CASE("trace: the first step that is not finite, and the first position at which it is not") {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> good(6, 1.0f), late{1, 1, 1, 1, inf, 1}, early{1, -inf, inf, 1, 1, 1};
    const std::vector<DeviceHalf> half{{to_half(1)}, {to_half(65504)}, {to_half(65520)}, {to_half(-70000)}};
    const std::vector<int8_t> codes(6, -128);
    Trace trace;
    trace.find_not_finite(10);
    const Recorder record(&trace, 2);
    record("norm", good.data(), 3, {2});
    record("norm.q", codes.data(), 3, {2});
    CHECK_FALSE(trace.not_finite());
    record("norm", late.data(), 3, {2});  // the next three tokens
    record("swiglu", early.data(), 3, {2});
    REQUIRE(trace.not_finite());
    CHECK(trace.not_finite()->position == 15);
    CHECK(trace.not_finite()->step == "layers.2.norm");
    CHECK(trace.not_finite()->value == inf);
    CHECK_FALSE(trace.not_finite()->is_half);
    trace.find_not_finite(4);
    CHECK_FALSE(trace.not_finite());
    record("swiglu", half.data(), 4, {});
    CHECK(trace.not_finite()->position == 6);
    CHECK(trace.not_finite()->is_half);
    CHECK(trace.n_tokens() == 0);  // nothing is kept
}
