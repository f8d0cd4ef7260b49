// The numbers of a model, as its header has them, and the types of its tensors.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

enum class Arch : uint32_t { llama = 1, qwen3 = 2, qwen3_moe = 3 };

inline const char* arch_name(Arch arch) {
    return arch == Arch::llama ? "llama" : arch == Arch::qwen3 ? "qwen3" : "qwen3_moe";
}

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
    int rope_type = 0;  // config.json's rope_scaling of the frequencies: 0 none, 1 llama3, 2 linear, 3 yarn
    int original_max_position = 0;
    float rope_factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    float attention_factor = 1;  // what cos and sin are multiplied by
    int bos_id = -1;             // -1: none
    std::vector<int> eos_ids;    // generation ends at any of these
    float temperature = 1;       // sampling defaults, from generation_config.json; 0 is greedy
    float top_p = 0.9f;
    int top_k = 0;                 // 0: off
    float min_p = 0;               // 0: off
    float repetition_penalty = 1;  // 1: off

    // Whether queries and keys are normalized, each head on its own.
    bool has_head_norms() const { return arch != Arch::llama; }

    int q_dim() const { return n_heads * head_dim; }
    int kv_dim() const { return n_kv_heads * head_dim; }
    int heads_per_kv() const { return n_heads / n_kv_heads; }
};

// The safetensors name of a type; uint32_t is eight 4-bit codes. engine/gpu/program.cuh adds half,
// engine/cpu/half.h Half.
template <class T>
constexpr const char* tensor_type = std::is_same_v<T, float>                                    ? "F32"
                                    : std::is_same_v<T, int8_t>                                 ? "I8"
                                    : std::is_same_v<T, uint8_t>                                ? "U8"
                                    : std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t> ? "I32"
                                                                                                : nullptr;
