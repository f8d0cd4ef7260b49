// The numbers of a model, as its header has them.
#pragma once

#include <cstdint>
#include <vector>

#include "common/model/layout.h"

enum class Arch : uint32_t { llama = 1, qwen3 = 2, qwen3_moe = 3 };

inline const char* arch_name(Arch arch) {
    return arch == Arch::llama ? "llama" : arch == Arch::qwen3 ? "qwen3" : "qwen3_moe";
}

// Llama 3's rescaling of the RoPE frequencies (config.json: rope_scaling, type "llama3").
struct RopeScaling {
    bool llama3 = false;  // false: the frequencies are used as they are
    float factor = 1;
    float low_freq_factor = 1;
    float high_freq_factor = 4;
    int original_max_position_embeddings = 0;
};

// How matrices of a MoE file are stored; docs/moe.md.
enum class WeightKind : uint32_t { a8w8 = 0, a8w4 = 1, mxfp8 = 2 };
struct WeightFormat {
    WeightKind kind = WeightKind::a8w8;
    int group = 0;  // weights of a row that share a scale; 0: the whole row
};

// The mixtures of experts of a qwen3_moe model.
struct MoeConfig {
    WeightFormat experts;
    bool pure = false;              // all other matrices are stored as experts are, not in A8W8
    int n_experts = 0;              // of each layer that has any
    int n_active = 0;               // experts that a token goes to
    int hidden_dim = 0;             // length inside an expert (moe_intermediate_size)
    bool norm_topk_prob = false;    // weights of the active experts are divided by their sum
    std::vector<uint8_t> is_dense;  // (n_layers,), 1: no experts

    WeightFormat others() const { return pure ? experts : WeightFormat{}; }
};

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
    int group_size = 0;               // weights that share one scale; 0: the whole row (W8A8)
    bool static_activations = false;  // W8A8: one scale per place, from calibration, not one per token
    Layout layout;                    // GPTQ: how each kind of matrix is stored
    float norm_eps = 1e-5f;
    float rope_theta = 500000;
    RopeScaling rope_scaling;
    MoeConfig moe;             // of qwen3_moe
    int bos_id = -1;           // -1: none
    std::vector<int> eos_ids;  // generation ends at any of these
    float temperature = 1;     // sampling defaults, from generation_config.json; 0 is greedy
    float top_p = 0.9f;
    int top_k = 0;                 // 0: off
    float min_p = 0;               // 0: off
    float repetition_penalty = 1;  // 1: off

    // Whether queries and keys are normalized, each head on its own.
    bool has_head_norms() const { return arch != Arch::llama; }
    // Whether the feed-forward block of layer l is a mixture of experts.
    bool has_experts(int l) const { return moe.n_experts > 0 && moe.is_dense[size_t(l)] == 0; }

    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
    int heads_per_kv() const { return n_heads / n_kv_heads; }

    // Multiply-adds of one token in the layers' matrices, of the active experts alone.
    uint64_t macs_per_token() const {
        uint64_t width = 0;  // of all layers' feed-forward blocks
        for (int l = 0; l < n_layers; l++)
            width +=
                has_experts(l) ? uint64_t(moe.n_active) * uint64_t(moe.hidden_dim) : uint64_t(hidden_dim);
        return uint64_t(dim) *
               (uint64_t(n_layers) * (2 * uint64_t(q_dim()) + 2 * uint64_t(kv_dim())) + 3 * width);
    }
};
