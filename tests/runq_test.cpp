// runq.cpp itself: the tests of any program, and the files it takes.
#define RUNQ_NO_MAIN
#include "../runq.cpp"

namespace {
const char* const models[] = {"tiny-llama.q8", "tiny-qwen3.q8"};
}

#include "program_tests.h"

// ----------------------------------------------------------------------------
// Files

TEST_CASE("weights: the bytes that a header implies, and group sizes that do not fit") {
    ModelConfig c;  // Llama 3.2 1B
    c.dim = 2048, c.hidden_dim = 8192, c.n_layers = 16, c.n_heads = 32, c.n_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.shared_classifier = true, c.group_size = 64;
    const uint64_t weights = 128256ull * 2048 + 16ull * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048);
    CHECK(weight_bytes(c) == weights + weights / 64 * 4 + (2 * 16 + 1) * 2048 * 4);
    c.shared_classifier = false;
    c.arch = Arch::qwen3;
    const uint64_t table = 128256ull * 2048, head_norms = 2ull * 16 * 64;
    CHECK(weight_bytes(c) ==
          weights + table + (weights + table) / 64 * 4 + ((2 * 16 + 1) * 2048 + head_norms) * sizeof(float));
    c.group_size = 96;
    CHECK_THROWS_WITH(weight_bytes(c), "dim is 2048, not a multiple of group_size 96");
    c.group_size = 0;
    CHECK_THROWS_WITH(weight_bytes(c), "group_size is 0, expected a multiple of 4 up to 65536");
    c.group_size = 1 << 17;
    CHECK_THROWS_WITH(weight_bytes(c), "group_size is 131072, expected a multiple of 4 up to 65536");
    c.group_size = 64;
    c.hidden_dim = 8200;
    CHECK_THROWS_WITH(weight_bytes(c), "hidden_dim is 8200, not a multiple of group_size 64");
}
