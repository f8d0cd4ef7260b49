// The golden vectors as the tests read them, and inputs that several tests make.
#pragma once

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "safetensors.h"

// Each operation alone.
inline const Tensors& golden_ops() {
    static const Tensors ops = read_safetensors("golden/data/ops.safetensors");
    return ops;
}

// The contract's limits, relative by norm, as golden/trace.py has them: of one operation, and of the logits
// of a whole pass.
constexpr double op_tolerance = 1e-5, pass_tolerance = 1e-3;

// Whether sweeps that `make test` does in part are to be done whole: FULL=1, which `make test-all` sets.
inline bool full_sweeps() {
    const char* full = std::getenv("FULL");
    return full != nullptr && *full != '\0' && std::string(full) != "0";
}

inline std::vector<float> random_values(std::mt19937& rng, size_t n, float size = 1) {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> values(n);
    for (float& v : values) v = normal(rng);
    return values;
}
