/* A Q8 layer in C, written from docs/forward-pass.md and docs/numerics.md: one token at POSITION, behind the keys and values
 * of the tokens before it. weights.h and steps.h are what `python -m golden hex --format c` makes of tiny-llama's file and of
 * its golden decode trace: docs/hardware.md has the commands, this program's own among them, and tests/test_hex.py types them.
 * Nothing of this repository's sources is included.
 * Exit code 0: codes and accumulators are the golden's, all else is within 1e-5, relative by norm. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "steps.h"
#include "weights.h"

enum { DIM = 128, HIDDEN = 384, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, GROUP = 64, POSITION = 300 };
enum { Q_DIM = HEADS * HEAD_DIM, KV_DIM = KV_HEADS * HEAD_DIM };
static const double THETA = 500000.0, FACTOR = 8.0, LOW = 1.0, HIGH = 4.0, ORIGINAL = 128.0;
static const float EPS = 1e-5f;
static int failures = 0;

static void fail(const char* step, double error) {
    printf("%s: %g\n", step, error);
    failures++;
}

static void close_to(const char* step, const float* golden, const float* mine, int n) {
    double difference = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        difference += ((double)golden[i] - mine[i]) * ((double)golden[i] - mine[i]);
        norm += (double)golden[i] * golden[i];
    }
    if (!(difference <= 1e-10 * norm)) fail(step, sqrt(difference / norm));
}

static void equal(const char* step, const void* golden, const void* mine, size_t size) {
    if (memcmp(golden, mine, size) != 0) fail(step, 1);
}

/* weight * x / sqrt(mean(x^2) + eps), in double, rounded once */
static void rmsnorm(float* out, const float* x, const float* weight) {
    double sum = 0;
    for (int i = 0; i < DIM; i++) sum += (double)x[i] * x[i];
    const double root = sqrt(sum / DIM + (double)EPS);
    for (int i = 0; i < DIM; i++) out[i] = (float)(weight[i] * (x[i] / root));
}

static void quantize(signed char* codes, float* scales, const float* x, int n) {
    for (int g = 0; g < n / GROUP; g++) {
        float largest = 0;
        for (int i = 0; i < GROUP; i++) largest = fmaxf(largest, fabsf(x[g * GROUP + i]));
        const float inverse = 127.0f / largest;
        const int usable = inverse > 0 && inverse <= 3.4028234664e38f;
        scales[g] = usable ? largest / 127.0f : 0.0f;
        for (int i = 0; i < GROUP; i++) {
            const float product = usable ? x[g * GROUP + i] * inverse : 0.0f;
            codes[g * GROUP + i] = (signed char)fmaxf(-127, fminf(127, rintf(product)));
        }
    }
}

/* out (n_out) = x (n_in) times w (n_out, n_in); sums (n_out, groups) are what is between */
static void matmul(float* out, int* sums, const signed char* x, const float* xs, const signed char* w,
                   const float* ws, int n_out, int n_in) {
    const int groups = n_in / GROUP;
    for (int i = 0; i < n_out; i++) {
        out[i] = 0;
        for (int g = 0; g < groups; g++) {
            int sum = 0;
            for (int k = g * GROUP; k < (g + 1) * GROUP; k++) sum += x[k] * w[i * n_in + k];
            sums[i * groups + g] = sum;
            out[i] += (float)sum * (ws[i * groups + g] * xs[g]);
        }
    }
}

/* adjacent pairs (2i, 2i + 1) of each head */
static void rope(float* x, int heads) {
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        double f = pow(THETA, -2.0 * i / HEAD_DIM);
        double part = (ORIGINAL * f / (2 * acos(-1.0)) - LOW) / (HIGH - LOW);
        part = part < 0 ? 0 : part > 1 ? 1 : part;
        const float frequency = (float)((1 - part) * f / FACTOR + part * f);
        const float c = (float)cos(POSITION * (double)frequency), s = (float)sin(POSITION * (double)frequency);
        for (int h = 0; h < heads; h++) {
            float* p = x + h * HEAD_DIM + 2 * i;
            const float a = p[0], b = p[1];
            p[0] = a * c - b * s;
            p[1] = a * s + b * c;
        }
    }
}

static void attention(float* out, const float* q, const float* k, const float* v) {
    static double p[POSITION + 1];
    for (int h = 0; h < HEADS; h++) {
        const int kv = h / (HEADS / KV_HEADS) * HEAD_DIM;
        double largest = -INFINITY, sum = 0;
        for (int t = 0; t <= POSITION; t++) {
            const float* key = t < POSITION ? s_layers_1_attn_k_rope + t * KV_DIM + kv : k + kv;
            p[t] = 0;
            for (int d = 0; d < HEAD_DIM; d++) p[t] += (double)q[h * HEAD_DIM + d] * key[d];
            p[t] /= sqrt(HEAD_DIM);
            if (p[t] > largest) largest = p[t];
        }
        for (int t = 0; t <= POSITION; t++) sum += p[t] = exp(p[t] - largest);
        for (int d = 0; d < HEAD_DIM; d++) {
            double mix = 0;
            for (int t = 0; t <= POSITION; t++)
                mix += p[t] / sum * (t < POSITION ? s_layers_1_attn_v_proj + t * KV_DIM : v)[kv + d];
            out[h * HEAD_DIM + d] = (float)mix;
        }
    }
}

#define W(name) w_layers_1_##name /* a weight */
#define S(name) s_layers_1_##name /* a step's golden result */
#define QUANTIZE(step, x, n) \
    quantize(codes, scales, x, n); \
    equal(#step ".q", S(step##_q), codes, n); \
    close_to(#step ".s", S(step##_s), scales, n / GROUP)
#define MATMUL(step, out, n_out, n_in) \
    matmul(out, sums, codes, scales, W(step##_codes), W(step##_scales), n_out, n_in); \
    equal(#step ".acc", S(step##_acc), sums, n_out * (n_in / GROUP) * sizeof(int))

int main(void) {
    static float x[DIM], normed[DIM], q[Q_DIM], k[KV_DIM], v[KV_DIM], mix[Q_DIM], proj[DIM], gate[HIDDEN], up[HIDDEN];
    static float scales[HIDDEN / GROUP];
    static signed char codes[HIDDEN];
    static int sums[HIDDEN * DIM];

    memcpy(x, s_layers_0_ffn_residual, sizeof x);
    rmsnorm(normed, x, W(attn_norm));
    QUANTIZE(attn_norm, normed, DIM);
    equal("attn_norm.s", S(attn_norm_s), scales, sizeof(float) * DIM / GROUP); /* the same input, so the same bits */
    MATMUL(attn_q_proj, q, Q_DIM, DIM);
    MATMUL(attn_k_proj, k, KV_DIM, DIM);
    MATMUL(attn_v_proj, v, KV_DIM, DIM);
    rope(q, HEADS);
    rope(k, KV_HEADS);
    close_to("attn.q_rope", S(attn_q_rope), q, Q_DIM);
    close_to("attn.k_rope", S(attn_k_rope) + POSITION * KV_DIM, k, KV_DIM);
    attention(mix, q, k, v);
    close_to("attn.mix", S(attn_mix), mix, Q_DIM);
    QUANTIZE(attn_mix, mix, Q_DIM);
    MATMUL(attn_o_proj, proj, DIM, Q_DIM);
    for (int i = 0; i < DIM; i++) x[i] += proj[i];
    close_to("attn.residual", S(attn_residual), x, DIM);

    rmsnorm(normed, x, W(ffn_norm));
    QUANTIZE(ffn_norm, normed, DIM);
    MATMUL(ffn_gate_proj, gate, HIDDEN, DIM);
    MATMUL(ffn_up_proj, up, HIDDEN, DIM);
    for (int i = 0; i < HIDDEN; i++) gate[i] = (float)(gate[i] / (1 + exp(-(double)gate[i])) * up[i]);
    QUANTIZE(ffn_swiglu, gate, HIDDEN);
    MATMUL(ffn_down_proj, proj, DIM, HIDDEN);
    for (int i = 0; i < DIM; i++) x[i] += proj[i];
    close_to("ffn.residual", S(ffn_residual), x, DIM);
    printf("%d steps differ\n", failures);
    return failures != 0;
}
