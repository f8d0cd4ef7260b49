// Traces: what is written can be read back.
#include "common/app/trace.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "safetensors.h"

namespace {
const std::string folder = std::filesystem::temp_directory_path().string() + "/runq_trace_test/";
}

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
