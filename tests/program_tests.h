// A program's own functions, operation by operation and layer by layer, against the golden vectors. The
// program's source is included before this, and `models`, the names that its model files and golden vectors
// share.
#pragma once

#include <doctest/doctest.h>
#include <omp.h>

#include <nlohmann/json.hpp>

#include "safetensors.h"

namespace {

const Tensors& golden_ops() {
    static const Tensors ops = read_safetensors("golden/data/ops.safetensors");
    return ops;
}

Transformer load(const std::string& name, Trace* trace = nullptr) {
    return load_transformer("build/models/" + name + ".bin", Options{}, trace);
}

Tensors golden_trace(const std::string& name) {
    return read_safetensors("golden/data/" + name + ".trace.safetensors");
}

nlohmann::json golden_json(const std::string& name) {
    return nlohmann::json::parse(read_file("golden/data/" + name + ".json"));
}

// Runs the tokens in chunks of the given size. Returns the logits of every token, (n_tokens, vocab_size).
std::vector<float> run(Transformer& m, std::span<const int> tokens, int chunk) {
    std::vector<float> all;
    for (size_t pos = 0; pos < tokens.size(); pos += size_t(chunk)) {
        const auto part = tokens.subspan(pos, std::min(size_t(chunk), tokens.size() - pos));
        const std::span<const float> logits = forward(m, part, int(pos), int(part.size()));
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

// n greedy ids after a prompt that is fed in chunks of the given size.
std::vector<int> greedy(Transformer& m, const std::vector<int>& prompt, int n, int chunk) {
    const int vocab_size = m.file.config.vocab_size;
    const std::vector<float> logits = run(m, prompt, chunk);
    std::vector<int> ids;
    auto arg_max = [](std::span<const float> row) {
        return int(std::max_element(row.begin(), row.end()) - row.begin());
    };
    ids.push_back(arg_max(std::span(logits).last(vocab_size)));
    while (int(ids.size()) < n) {
        const int pos = int(prompt.size() + ids.size()) - 1;
        ids.push_back(arg_max(forward(m, std::span(ids).last(1), pos, 1)));
    }
    return ids;
}

}  // namespace

// ----------------------------------------------------------------------------
// Each operation alone

TEST_CASE("rmsnorm") {
    const std::vector<float> x = golden_ops().at("rmsnorm.x").f32(),
                             weight = golden_ops().at("rmsnorm.weight").f32();
    for (const auto& [eps, name] :
         {std::pair{1e-5f, "rmsnorm.out1e-05"}, std::pair{1e-6f, "rmsnorm.out1e-06"}}) {
        std::vector<float> out(x.size());
        for (int t = 0; t < 3; t++)
            rmsnorm(out.data() + t * 128, x.data() + t * 128, weight.data(), 128, eps);
        CHECK(relative_error(golden_ops().at(name).f32(), out) < 1e-6);
    }
}

TEST_CASE("rope: frequencies with and without llama3 scaling, and the rotation") {
    struct Case {
        const char* name;
        int head_dim;
        float theta;
        RopeScaling scaling;
    };
    const std::vector<int32_t> positions = golden_ops().at("rope.positions").i32();
    for (const Case& k :
         {Case{"plain", 64, 500000, {}}, Case{"llama-3.2-1b", 64, 500000, {true, 32, 1, 4, 8192}},
          Case{"tiny", 32, 1000000, {true, 8, 1, 4, 128}}}) {
        const std::string p = std::string("rope.") + k.name + ".";
        CAPTURE(p);
        ModelConfig c;
        c.head_dim = k.head_dim;
        c.rope_theta = k.theta;
        c.rope_scaling = k.scaling;
        CHECK(relative_error(golden_ops().at(p + "frequencies").f32(), rope_frequencies(c)) < 1e-7);

        const std::vector<float> cos = golden_ops().at(p + "cos").f32(),
                                 sin = golden_ops().at(p + "sin").f32();
        std::vector<float> x = golden_ops().at(p + "x").f32();  // (positions, 2 heads, head_dim)
        const size_t half = size_t(k.head_dim) / 2;
        for (size_t i = 0; i < positions.size() * 2; i++) {
            rope(x.data() + i * 2 * half, cos.data() + i / 2 * half, sin.data() + i / 2 * half, k.head_dim);
        }
        CHECK(relative_error(golden_ops().at(p + "out").f32(), x) < 1e-6);
    }
}

TEST_CASE("attention: scores, probabilities and the weighted sum, query heads sharing key heads") {
    const int n = 9, d = 32;
    for (const int at_once : {9, 4, 1}) {  // tokens of a chunk
        CAPTURE(at_once);
        Transformer m;
        m.file.config.n_layers = 1;
        m.file.config.n_heads = 6;
        m.file.config.n_kv_heads = 2;
        m.file.config.head_dim = d;
        m.file.config.group_size = 32;
        m.file.config.dim = m.file.config.hidden_dim = m.file.config.vocab_size = 32;
        m.state = make_run_state(m.file.config, 20);
        Trace trace;
        m.trace = &trace;
        const std::vector<float> q = golden_ops().at("attention.q").f32(),
                                 k = golden_ops().at("attention.k").f32();
        const std::vector<float> v = golden_ops().at("attention.v").f32();
        std::vector<float> out;
        for (int pos = 0; pos < n; pos += at_once) {
            const int n_tokens = std::min(at_once, n - pos);
            for (int t = pos; t < pos + n_tokens; t++) {
                for (int h = 0; h < 2; h++)
                    m.state.cache.keep(0, h, t, k.data() + (t * 2 + h) * d, v.data() + (t * 2 + h) * d);
            }
            m.state.q.assign(q.begin() + pos * 6 * d, q.end());
            m.state.mix.assign(n * 6 * d, 99.0f);
            attention(m, 0, n_tokens, pos);
            out.insert(out.end(), m.state.mix.begin(), m.state.mix.begin() + n_tokens * 6 * d);
        }
        CHECK(relative_error(golden_ops().at("attention.out").f32(), out) < 1e-6);
        trace.write("build/attention_test.safetensors");
        const Tensors found = read_safetensors("build/attention_test.safetensors");
        CHECK(relative_error(golden_ops().at("attention.scores").f32(),
                             found.at("layers.0.attn.scores").f32()) < 1e-6);
        CHECK(relative_error(golden_ops().at("attention.probs").f32(),
                             found.at("layers.0.attn.probs").f32()) < 1e-6);
    }
}

TEST_CASE("attention: more query heads share a kv head than are computed at once") {
    const int n = 3, n_heads = 20, d = 8;
    Transformer m;
    ModelConfig& c = m.file.config;
    c.n_layers = c.n_kv_heads = 1, c.n_heads = n_heads, c.head_dim = d;
    c.dim = c.hidden_dim = c.vocab_size = c.group_size = 32;
    m.state = make_run_state(c, n);
    for (size_t i = 0; i < m.state.q.size(); i++) m.state.q[i] = std::sin(float(i));
    std::vector<float> k(n * d), v(n * d);
    for (int i = 0; i < n * d; i++) k[i] = std::cos(float(i)), v[i] = float(i % 7) - 3;
    for (int t = 0; t < n; t++) m.state.cache.keep(0, 0, t, k.data() + t * d, v.data() + t * d);
    attention(m, 0, n, 0);
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < n_heads; h++) {
            const float* q = m.state.q.data() + (t * n_heads + h) * d;
            double weights[n], sum = 0;
            for (int p = 0; p <= t; p++) {
                double dot = 0;
                for (int i = 0; i < d; i++) dot += double(q[i]) * k[p * d + i];
                sum += weights[p] = std::exp(dot / std::sqrt(double(d)));
            }
            for (int i = 0; i < d; i++) {
                double expected = 0;
                for (int p = 0; p <= t; p++) expected += weights[p] / sum * v[p * d + i];
                CHECK(m.state.mix[(t * n_heads + h) * d + i] == doctest::Approx(expected).epsilon(1e-5));
            }
        }
    }
}

TEST_CASE("swiglu") {
    const std::vector<float> gate = golden_ops().at("swiglu.gate").f32(),
                             up = golden_ops().at("swiglu.up").f32();
    std::vector<float> out(gate.size());
    swiglu(out.data(), gate.data(), up.data(), gate.size());
    CHECK(relative_error(golden_ops().at("swiglu.out").f32(), out) < 1e-6);
}

// ----------------------------------------------------------------------------
// Layers and whole passes

TEST_CASE("each layer alone, from the golden's input") {
    for (const char* name : models) {
        const Tensors golden = golden_trace(name);
        const std::vector<int> tokens = golden.at("tokens").i32();
        const int n = int(tokens.size());
        Transformer m = load(name);
        forward(m, tokens, 0, 0);  // fills the tables of angles
        for (int l = 0; l < m.file.config.n_layers; l++) {
            CAPTURE(name);
            CAPTURE(l);
            const std::string before = l == 0 ? "embed" : step_name(l - 1, "ffn.residual");
            m.state.x = golden.at(before).f32();
            attention_block(m, l, n, 0);
            CHECK(relative_error(golden.at(step_name(l, "attn.residual")).f32(), m.state.x) < 1e-5);
            m.state.x = golden.at(step_name(l, "attn.residual")).f32();
            feed_forward_block(m, l, n);
            CHECK(relative_error(golden.at(step_name(l, "ffn.residual")).f32(), m.state.x) < 1e-5);
        }
    }
}

TEST_CASE("every step of the trace: codes equal, values within the contract, however the tokens are fed") {
    for (const char* name : models) {
        const Tensors golden = golden_trace(name);
        const std::vector<int> tokens = golden.at("tokens").i32();
        for (const int chunk : {64, 3, 1}) {
            CAPTURE(name);
            CAPTURE(chunk);
            Trace trace;
            Transformer m = load(name, &trace);
            run(m, tokens, chunk);
            const std::string path = "build/" + std::string(name) + ".test.trace.safetensors";
            trace.write(path);
            const Tensors found = read_safetensors(path);
            CHECK(found.size() == golden.size());
            for (const auto& item : golden) {
                const std::string& step = item.first;
                const Tensor& expected = item.second;
                CAPTURE(step);
                REQUIRE(found.contains(step));
                REQUIRE(found.at(step).shape == expected.shape);
                if (expected.type == "F32") {
                    CHECK(relative_error(expected.f32(), found.at(step).f32()) < 1e-5);
                } else {
                    CHECK(found.at(step).bytes == expected.bytes);
                }
            }
        }
    }
}

TEST_CASE("logits do not depend on threads or chunks, and are the golden's") {
    for (const char* name : models) {
        CAPTURE(name);
        const nlohmann::json golden = golden_json(name)["generations"][0];
        std::vector<int> tokens = golden["prompt_ids"];
        tokens.insert(tokens.end(), golden["new_ids"].begin(), golden["new_ids"].end());
        const int threads = omp_get_max_threads();
        std::vector<float> reference;
        for (const int j : {1, 2, 3}) {
            for (const int chunk : {64, 7, 1}) {
                CAPTURE(j);
                CAPTURE(chunk);
                omp_set_num_threads(j);
                Transformer m = load(name);
                const std::vector<float> logits = run(m, tokens, chunk);
                if (reference.empty()) reference = logits;
                CHECK(logits == reference);
            }
        }
        omp_set_num_threads(threads);

        const Tensors trace = golden_trace(name);
        const std::vector<float> expected = trace.at("logits").f32();
        Transformer m = load(name);
        const std::vector<float> logits = run(m, trace.at("tokens").i32(), 64);
        float largest = 0, apart = 0;
        for (size_t i = 0; i < expected.size(); i++) {
            largest = std::max(largest, std::fabs(expected[i]));
            apart = std::max(apart, std::fabs(expected[i] - logits[i]));
        }
        CHECK(apart < 1e-3f * largest);
    }
}

TEST_CASE("greedy generation gives the golden's 64 ids") {
    for (const char* name : models) {
        const nlohmann::json golden = golden_json(name);
        size_t all_determined = 0;
        for (const nlohmann::json& generation : golden["generations"]) {
            const std::vector<int> prompt = generation["prompt_ids"], expected = generation["new_ids"];
            // Two logits may each be off by 1e-3: up to the first lead below twice that, the ids are
            // determined.
            const std::vector<double> leads = generation["leads"];
            const auto n =
                std::find_if(leads.begin(), leads.end(), [](double x) { return x < 2e-3; }) - leads.begin();
            REQUIRE(expected.size() == 64);
            REQUIRE(n > 5);
            all_determined += n == 64;
            const int threads = omp_get_max_threads();
            for (const int j : {1, 2, 3}) {
                for (const int chunk : {64, 1}) {
                    CAPTURE(name);
                    CAPTURE(generation["prompt"]);
                    CAPTURE(j);
                    CAPTURE(chunk);
                    omp_set_num_threads(j);
                    Transformer m = load(name);
                    const std::vector<int> ids = greedy(m, prompt, 64, chunk);
                    CHECK(std::equal(ids.begin(), ids.begin() + n, expected.begin()));
                }
            }
            omp_set_num_threads(threads);
        }
        CHECK(all_determined >= 1);
    }
}
