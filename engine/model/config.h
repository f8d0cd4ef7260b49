// The numbers of a model, as its header has them, and the angles of its rotary position embeddings.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

enum class Arch : uint32_t { llama = 1, qwen3 = 2, qwen3_moe = 3 };

inline const char* arch_name(Arch arch) {
    return arch == Arch::llama ? "llama" : arch == Arch::qwen3 ? "qwen3" : "qwen3_moe";
}

// A rescaling of the RoPE frequencies (config.json: rope_scaling).
struct RopeScaling {
    int type = 0;  // 0: the frequencies are used as they are; 1 llama3, 2 linear, 3 yarn
    float factor = 1;
    float low_freq_factor = 1;
    float high_freq_factor = 4;
    int original_max_position_embeddings = 0;
    float attention_factor = 1;  // what cos and sin are multiplied by
};

// What the header of every model file says. A program whose files say more has a Config of its own, with
// these and its fields.
struct ModelConfig {
    Arch arch = Arch::llama;
    int dim = 0;         // length of a token's vector (hidden_size)
    int hidden_dim = 0;  // length inside the feed-forward block (intermediate_size)
    int n_layers = 0;
    int n_heads = 0;                  // query heads
    int n_kv_heads = 0;               // key/value heads; n_heads / n_kv_heads query heads share one
    int head_dim = 0;                 // length of one head; n_heads * head_dim need not be dim
    int vocab_size = 0;               // rows of the embedding and of the classifier
    int max_seq_len = 0;              // positions the model was made for
    bool shared_classifier = false;   // the classifier is the embedding (tied)
    int group_size = 0;               // weights that share one scale; 0: the whole row
    bool static_activations = false;  // activations' scales are in the file, not found at run time
    int rotation_block = 0;           // rows of the embedding are rotated, in such blocks; 0: they are not
    float norm_eps = 1e-5f;
    float rope_theta = 500000;
    RopeScaling rope_scaling;
    int bos_id = -1;           // -1: none
    std::vector<int> eos_ids;  // generation ends at any of these
    float temperature = 1;     // sampling defaults, from generation_config.json; 0 is greedy
    float top_p = 0.9f;
    int top_k = 0;                 // 0: off
    float min_p = 0;               // 0: off
    float repetition_penalty = 1;  // 1: off

    // Whether queries and keys are normalized, each head on its own.
    bool has_head_norms() const { return arch != Arch::llama; }

    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
    int heads_per_kv() const { return n_heads / n_kv_heads; }

    // How long the rows of the layers' matrices are, by name.
    std::array<std::pair<const char*, int>, 3> row_lengths() const {
        return {{{"dim", dim}, {"hidden_dim", hidden_dim}, {"n_heads * head_dim", q_dim()}}};
    }

    int longest_row() const { return std::max({dim, hidden_dim, q_dim()}); }

    // Multiply-adds of one token in the layers' matrices, given the feed-forward blocks' lengths together.
    uint64_t macs_per_token(uint64_t hidden_dims) const {
        const uint64_t attention = uint64_t(n_layers) * (2 * uint64_t(q_dim()) + 2 * uint64_t(kv_dim()));
        return uint64_t(dim) * (attention + 3 * hidden_dims);
    }
};

// RoPE (Su et al. 2021, arXiv 2104.09864), whose rotating is each program's, or engine/cpu/ops.h's.
// Radians per position of each pair, theta^(-2i / head_dim), (head_dim / 2,) fp32. A rescaling divides the
// frequencies of long wavelengths by `factor`, leaves short wavelengths alone and blends in between, over
// turns (Llama 3.1 and later) or over pairs (YaRN, Peng et al. 2023, arXiv 2309.00071; linear, which divides
// all).
inline std::vector<float> rope_frequencies(const ModelConfig& c) {
    std::vector<float> freq(size_t(c.head_dim) / 2);
    for (size_t i = 0; i < freq.size(); i++) {
        double f = std::pow(double(c.rope_theta), -2.0 * double(i) / c.head_dim);
        if (const RopeScaling& s = c.rope_scaling; s.type > 0) {
            // Turns within the context that the model was first trained on.
            const double turns = s.original_max_position_embeddings * f / (2 * std::numbers::pi);
            const double x = s.type == 1 ? turns : c.head_dim - double(i);
            const double low = s.low_freq_factor, high = s.high_freq_factor;
            const double smooth = std::clamp((x - low) / (high - low), 0.0, 1.0);
            f = (1 - smooth) * f / s.factor + smooth * f;
        }
        freq[i] = float(f);
    }
    return freq;
}

// cos and sin of the angle of a pair at a position, times YaRN's factor, computed in fp64 and rounded once.
struct Rotation {
    float cos, sin;
};
inline Rotation rotation(int pos, float frequency, double attention_factor = 1) {
    const double angle = double(pos) * frequency;
    return {float(attention_factor * std::cos(angle)), float(attention_factor * std::sin(angle))};
}
