// layer.h beside the golden trace: layer 1 of tiny-llama for the token at position 300, behind the keys and
// values of the tokens before it. weights.h and steps.h are what `golden hex` makes of the model file and of
// the trace (make hw-hls). Exit code 0: key, value and output are the golden's, to the bit with
// -DNORM_T=double, otherwise within 1e-5, relative by norm; TOLERANCE is another number.
#include "hw/hls/layer.h"

#include <cstdio>
#include <cstring>

#include "steps.h"
#include "weights.h"

#ifndef TOLERANCE
#define TOLERANCE 1e-5
#endif

namespace {

// llama3's scaling of angles, as config.json of tiny-llama has it.
void fill_angles(LayerWeights& w) {
    const double theta = 500000, factor = 8, low = 1, high = 4, original = 128;
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        const double f = std::pow(theta, -2.0 * i / HEAD_DIM), turns = original * f / (2 * std::acos(-1.0));
        const double smooth = std::min(std::max((turns - low) / (high - low), 0.0), 1.0);
        const float frequency = float((1 - smooth) * f / factor + smooth * f);
        for (int pos = 0; pos < CONTEXT; pos++) {
            w.cos[pos * (HEAD_DIM / 2) + i] = float(std::cos(pos * double(frequency)));
            w.sin[pos * (HEAD_DIM / 2) + i] = float(std::sin(pos * double(frequency)));
        }
    }
}

template <int rows, int cols, class Codes, class Scales>
void fill(Q8Weights<rows, cols>& w, const Codes& codes, const Scales& scales) {
    static_assert(sizeof codes == sizeof w.codes && sizeof scales == sizeof w.scales,
                  "the sizes of the model");
    std::memcpy(w.codes, codes, sizeof codes);
    std::memcpy(w.scales, scales, sizeof scales);
}

bool is_close(const char* name, const float* golden, const float* mine, int n) {
    double difference = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        difference += (double(golden[i]) - mine[i]) * (double(golden[i]) - mine[i]);
        norm += double(golden[i]) * golden[i];
    }
    const double error = std::sqrt(difference / norm);
    const bool is_exact = sizeof(NORM_T) == sizeof(double);
    const bool close = is_exact ? std::memcmp(golden, mine, sizeof(float) * n) == 0 : error <= TOLERANCE;
    std::printf("%s: %.2g%s\n", name, error, close ? "" : ", too far from the golden");
    return close;
}

LayerWeights weights;
LayerCache kv;

}  // namespace

int main() {
    constexpr int position = 300;
#define W(name) w_layers_1_##name
    std::memcpy(weights.attn_norm, W(attn_norm), sizeof weights.attn_norm);
    std::memcpy(weights.ffn_norm, W(ffn_norm), sizeof weights.ffn_norm);
    fill(weights.q_proj, W(attn_q_proj_codes), W(attn_q_proj_scales));
    fill(weights.k_proj, W(attn_k_proj_codes), W(attn_k_proj_scales));
    fill(weights.v_proj, W(attn_v_proj_codes), W(attn_v_proj_scales));
    fill(weights.o_proj, W(attn_o_proj_codes), W(attn_o_proj_scales));
    fill(weights.gate_proj, W(ffn_gate_proj_codes), W(ffn_gate_proj_scales));
    fill(weights.up_proj, W(ffn_up_proj_codes), W(ffn_up_proj_scales));
    fill(weights.down_proj, W(ffn_down_proj_codes), W(ffn_down_proj_scales));
    fill_angles(weights);
    kv.n_positions = position;
    std::memcpy(kv.keys, s_layers_1_attn_k_rope, sizeof(float) * position * kv_dim);
    std::memcpy(kv.values, s_layers_1_attn_v_proj, sizeof(float) * position * kv_dim);

    float out[DIM];
    const bool made = layer(s_layers_0_ffn_residual, weights, kv, out);
    const bool key =
        is_close("key", s_layers_1_attn_k_rope + position * kv_dim, kv.keys + position * kv_dim, kv_dim);
    const bool value =
        is_close("value", s_layers_1_attn_v_proj + position * kv_dim, kv.values + position * kv_dim, kv_dim);
    const bool result = is_close("output", s_layers_1_ffn_residual, out, DIM);
    kv.n_positions = CONTEXT;
    const bool full = layer(s_layers_0_ffn_residual, weights, kv, out);
    return made && key && value && result && !full ? 0 : 1;
}
