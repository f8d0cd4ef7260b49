// runq_w8a8.cpp itself: the tests of any program, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq_w8a8.cpp"

namespace {
const char* const models[] = {"tiny-llama.w8a8",         "tiny-qwen3.w8a8",        "tiny-llama.w8a8-block32",
                              "tiny-qwen3.w8a8-block32", "tiny-llama.w8a8-static", "tiny-qwen3.w8a8-static"};
}

#include "program_tests.h"

TEST_CASE("weights: the bytes that a header implies, and sizes that do not fit") {
    ModelConfig c;  // Llama 3.2 1B
    c.dim = 2048, c.hidden_dim = 8192, c.n_layers = 16, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.shared_classifier = true;
    const uint64_t weights = 128256ull * 2048 + 16ull * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048);
    const uint64_t rows = 128256 + 16ull * (2 * 2048 + 2 * 512 + 2 * 8192 + 2048);
    CHECK(weight_bytes(c) == weights + rows * 4 + (2 * 16 + 1) * 2048 * 4);
    c.static_activations = true;
    CHECK(weight_bytes(c) == weights + rows * 4 + ((2 * 16 + 1) * 2048 + 16 * 4 + 1) * 4);
    c.group_size = 32;
    CHECK_THROWS_WITH(weight_bytes(c), "activations is 1 (static) with group_size 32, expected 0");
    c.static_activations = false;
    CHECK(weight_bytes(c) == weights + weights / 32 * 4 + (2 * 16 + 1) * 2048 * 4);
    c.hidden_dim = 8200;
    CHECK_THROWS_WITH(weight_bytes(c), "hidden_dim is 8200, not a multiple of 32");
    c.group_size = 64;
    CHECK_THROWS_WITH(weight_bytes(c), "group_size is 64, expected 0 (whole rows) or 32");
    c.group_size = 0;
    c.hidden_dim = 8190;
    CHECK_THROWS_WITH(weight_bytes(c), "hidden_dim is 8190, not a multiple of 4");
    c.hidden_dim = 1 << 17;
    CHECK_THROWS_WITH(weight_bytes(c), "hidden_dim is 131072, expected at most 65536");
}
