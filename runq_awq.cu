// runq_awq: Llama 3 and Qwen3 inference in AWQ int4 on a GPU, to read from top to bottom.
//
// Weights are int4 with an integer zero point and an fp16 scale per output channel and group of 128 (or 64)
// input channels: w = (q - zero) * scale, rounded to fp16 (AWQ: Lin et al. 2023, arXiv 2306.00978).
// Activations are fp16 where a matrix reads them and in the KV cache, and fp32 elsewhere. Weights stay int4
// in memory.
//
// This file has what is AWQ's own: how the codes lie, the matrix product as a plain loop, the tensors of a
// file, and the forward pass. The fast products, which dequantize in registers and multiply on tensor cores,
// begin in engine/gpu/awq_matmul.cuh; tests hold them equal to the plain loop, and docs/awq.md explains them.
// The rest is in engine/, too: the other operations on a GPU (gpu/), model files (model/), the tokenizer
// (text/), the command line (app/). docs/forward-pass.md walks through the same steps with equations and
// numbers.
//
// The same source compiles for a GPU with nvcc, and for any CPU through simt/, an emulator that runs every
// lane of every warp. That is slow, and it checks everything: docs/simt.md.
//
//     make runq_awq model_awq.bin && ./runq_awq model_awq.bin -i "Once upon a time" -n 32

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/device_recorder.h"
#include "engine/app/memory.h"
#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/gpu/attention.cuh"
#include "engine/gpu/awq_matmul.cuh"
#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/bandwidth.h"
#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/dry_run.h"
#include "engine/gpu/graph.cuh"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/ops.cuh"
#include "engine/gpu/rows.cuh"
#include "engine/gpu/weights.h"
#include "engine/model/header.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "engine/os/machine.h"

// ----------------------------------------------------------------------------
// AWQ: the matrix, and its product as a plain loop
//
// An AwqMatrix (engine/gpu/awq_matrix.cuh) has n_in rows, the input channels, and n_out columns, the output
// channels:
//
//     qweight (n_in, n_out / 8)              eight int4 codes of a row per 32-bit word
//     qzeros  (n_in / group_size, n_out / 8) the zero points of a group's columns, packed alike
//     scales  (n_in / group_size, n_out)     fp16
//
// Word c of a row has columns 8c to 8c + 7 in AutoAWQ's order: the even ones in its low half, the odd ones in
// its high half.
//
//     bits    31-28  27-24  23-20  19-16  15-12  11-8   7-4    3-0
//     column  8c+7   8c+5   8c+3   8c+1   8c+6   8c+4   8c+2   8c

// Where a word has the code of a column: the lowest of its four bits.
__device__ inline int nibble_shift(int column) { return 4 * (column % 8 / 2 + column % 2 * 4); }

// The weight of input channel k for an output channel. q - zero is exact in fp16, only the product rounds.
__device__ inline half awq_weight(const AwqMatrix& w, int k, int column) {
    const int n_words = w.n_out / 8, group = k / w.group_size, shift = nibble_shift(column);
    const int q = w.qweight[size_t(k) * n_words + column / 8] >> shift & 15;
    const int zero = w.qzeros[size_t(group) * n_words + column / 8] >> shift & 15;
    return __hmul(__float2half(float(q - zero)), w.scales[size_t(group) * w.n_out + column]);
}

// The specification: one thread per output, sums in fp32. grid: (n_out / blockDim.x, n_tokens).
__global__ void awq_reference(const half* x, AwqProduct product) {
    const AwqMatrix& w = product.w;
    const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (column >= w.n_out) return;
    float sum = 0;
    for (int k = 0; k < w.n_in; k++)
        sum = fmaf(__half2float(x[size_t(token) * w.n_in + k]), __half2float(awq_weight(w, k, column)), sum);
    float* out = product.out + size_t(token) * w.n_out + column;
    *out = product.add ? *out + sum : sum;
}

void run_reference(const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& product = products.items[i];
        launch<awq_reference>(
            {.grid = dim3((product.w.n_out + 127) / 128, n_tokens), .block = 128, .stream = device().stream},
            x, product);
    }
}

// ----------------------------------------------------------------------------
// The tensors of a file

// Throws if the kernels cannot run such a model.
void check_config(const ModelConfig& c) {
    const int size = c.group_size;
    check_value(size > 0 && size % gemm_inputs == 0, "group_size", size,
                "expected a multiple of " + std::to_string(gemm_inputs));
    for (const auto& [name, n] : c.row_lengths())
        check_value(n % size == 0, name, n, "not a multiple of group_size " + std::to_string(size));
    check_value(has_attention(c.head_dim), "head_dim", c.head_dim, "expected 32, 64, 96 or 128");
}

// KuiperLLama's header has head_dim where llama2.c's has group_size, and group_size behind it. Its files have
// no extension block, and are Qwen3.
const FileFormat<ModelConfig> file_format{
    .magic = 0x616b3438,
    .version = 5,
    .check = check_config,
    .base = {
        .group_size = 0x29, .head_dim = 0x25, .arch = Arch::qwen3, .norm_eps = 1e-6f, .rope_theta = 1e6f}};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into device memory are the same
// lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    LayerNorms<half> norms = file.layer_norms<half>(c);  // attn, ffn: n_layers of (dim,); last: (dim,)
    const half* embedding = file.next<half>("embed", {c.vocab_size, c.dim});
    std::vector<AwqMatrix> q_proj = awq_layers("attn.q_proj", c.dim, c.q_dim());
    std::vector<AwqMatrix> k_proj = awq_layers("attn.k_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> v_proj = awq_layers("attn.v_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> o_proj = awq_layers("attn.o_proj", c.q_dim(), c.dim);
    std::vector<AwqMatrix> gate_proj = awq_layers("ffn.gate_proj", c.dim, c.hidden_dim);  // w1 in llama2.c
    std::vector<AwqMatrix> down_proj = awq_layers("ffn.down_proj", c.hidden_dim, c.dim);  // w2
    std::vector<AwqMatrix> up_proj = awq_layers("ffn.up_proj", c.dim, c.hidden_dim);      // w3
    const half* classifier =
        c.shared_classifier ? embedding : file.next<half>("classifier", {c.vocab_size, c.dim});
    HeadNorms<half> head_norms = file.head_norms<half>(c);  // q, k: n_layers of (head_dim,), Qwen3 only

    AwqMatrix awq(const std::string& name, int n_in, int n_out) {
        AwqMatrix m;
        m.n_in = n_in, m.n_out = n_out, m.group_size = c.group_size;
        m.qweight = file.next<uint32_t>(name + ".qweight", {n_in, n_out / 8});
        m.qzeros = file.next<uint32_t>(name + ".qzeros", {n_in / c.group_size, n_out / 8});
        m.scales = file.next<half>(name + ".scales", {n_in / c.group_size, n_out});
        return m;
    }
    std::vector<AwqMatrix> awq_layers(const char* part, int n_in, int n_out) {
        return file.layers(c, part, [&](const std::string& name) { return awq(name, n_in, n_out); });
    }
    // The matrices of all layers.
    std::vector<AwqMatrix*> matrices() {
        std::vector<AwqMatrix*> all;
        for (auto* part : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj}) {
            for (AwqMatrix& m : *part) all.push_back(&m);
        }
        return all;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights

#ifdef __CUDACC__
constexpr int max_chunk = 512;  // tokens of a prompt that go through together
#else
constexpr int max_chunk = 64;
#endif
constexpr int logit_rows = 16;  // tokens whose logits are computed at a time

// What --matmul chooses, but for `plain`: see RunState::plain.
Matmul matmul_option(const Options& o) {
    const std::string& name = o.own.at("--matmul");
    return name == "dequant"      ? Matmul::dequant
           : name == "predequant" ? Matmul::predequant
           : name == "fp16"       ? Matmul::fp16
                                  : Matmul::fused;
}

struct RunState {
    // A row per token of the chunk.
    DeviceRows<float> x;        // (max_chunk, dim), the residual stream
    DeviceRows<half> normed;    // (max_chunk, dim), normalized x
    DeviceRows<float> q;        // (max_chunk, n_heads * head_dim)
    DeviceRows<float> k;        // (max_chunk, n_kv_heads * head_dim)
    DeviceRows<float> v;        // (max_chunk, n_kv_heads * head_dim)
    DeviceRows<half> q_rope;    // (max_chunk, n_heads * head_dim), rotated
    DeviceRows<half> attn_out;  // (max_chunk, n_heads * head_dim)
    DeviceRows<float> gate;     // (max_chunk, hidden_dim)
    DeviceRows<float> up;       // (max_chunk, hidden_dim)
    DeviceRows<half> hidden;    // (max_chunk, hidden_dim), silu(gate) * up
    DeviceRows<float> logits;   // (logit_rows, vocab_size)
    DeviceRows<float> proj;     // (max_chunk, dim), the output of o_proj and down_proj; only for traces
    DeviceRows<float> q_norm, k_norm;  // as q and k, normalized heads; only for traces

    DeviceBuffer<int> inputs;        // (1 + max_chunk,), the position of the first token, then the tokens
    DeviceBuffer<int> best;          // (1,), the most probable token
    RotationTable rotations;         // (context, head_dim / 2) cos and sin
    DeviceKvCache cache;             // keys and values of `context` positions
    MatmulState matmul;              // how products are computed
    bool plain;                      // by awq_reference instead
    AttentionScratch attention;      // of single tokens
    std::vector<float> host_logits;  // (1 or max_chunk, vocab_size)
    Graphs<std::pair<int, bool>> graphs;  // by the arguments of run_step()

    // Allocates a run's memory. context: positions to keep; largest_matrix: weights in it.
    RunState(const ModelConfig& c, const Options& options, int context, bool traced, size_t largest_matrix) {
        const int n = std::min(max_chunk, context);
        const char* advice = "a smaller --ctx takes less";
        name_allocations("the keys and values of positions 0 to " + std::to_string(context - 1), advice);
        cache = DeviceKvCache(c, context);
        name_allocations("RoPE", advice);
        rotations = RotationTable(c, context);
        name_allocations("a chunk of " + std::to_string(n) + " tokens");
        x = DeviceRows<float>(n, c.dim);
        normed = DeviceRows<half>(n, c.dim);
        q = DeviceRows<float>(n, c.q_dim());
        k = DeviceRows<float>(n, c.kv_dim());
        v = DeviceRows<float>(n, c.kv_dim());
        q_rope = DeviceRows<half>(n, c.q_dim());
        attn_out = DeviceRows<half>(n, c.q_dim());
        gate = DeviceRows<float>(n, c.hidden_dim);
        up = DeviceRows<float>(n, c.hidden_dim);
        hidden = DeviceRows<half>(n, c.hidden_dim);
        proj = DeviceRows<float>(traced ? n : 0, c.dim);
        q_norm = DeviceRows<float>(traced ? n : 0, c.q_dim());
        k_norm = DeviceRows<float>(traced ? n : 0, c.kv_dim());
        name_allocations(logits_part(std::min(logit_rows, n), c.vocab_size).what);
        logits = DeviceRows<float>(std::min(logit_rows, n), c.vocab_size);
        name_allocations("products and attention");
        matmul = MatmulState(matmul_option(options), n, largest_matrix);
        plain = options.own.at("--matmul") == "plain";
        attention = AttentionScratch(c.n_kv_heads, c.heads_per_kv(), c.head_dim, context);
        inputs = DeviceBuffer<int>(1 + n);
        best = DeviceBuffer<int>(1);
    }

    const int* pos() const { return inputs.get(); }
    const int* tokens() const { return inputs.get() + 1; }
};

struct Transformer {
    ModelFile file;
    DeviceBuffer<std::byte> weight_memory;
    DeviceBuffer<half> fp16_memory;  // all matrices, only with predequant and fp16
    Weights weights;
    RunState state;
    Trace* trace = nullptr;     // not null: record every step
    uint64_t memory_bytes = 0;  // of the host that a run takes, with the file's weights
};

// ----------------------------------------------------------------------------
// Products in the forward pass

// Where a product goes: out (n_tokens, n_out) = x * w.
struct Projection {
    DeviceRows<float>& out;
    const AwqMatrix& w;
};

void run_products(const RunState& s, const DeviceRows<half>& x, const AwqProducts& products) {
    if (s.plain) {
        run_reference(x.get(), x.n_rows, products);
    } else {
        awq_matmul(s.matmul, x.get(), x.n_rows, products);
    }
}

// The products of one input with several matrices, in one launch: q, k and v; gate and up.
void matmul(const RunState& s, const DeviceRows<half>& x, std::initializer_list<Projection> projections) {
    AwqProducts products;
    for (const Projection& p : projections) {
        p.out.n_rows = x.n_rows;
        products.items[products.n++] = {p.w, p.out.get(), false};
    }
    run_products(s, x, products);
}

// x += input * w. The kernel adds to x itself; if s.proj has memory, which only traces need, it gets the
// product.
void matmul_add(RunState& s, DeviceRows<float>& x, const DeviceRows<half>& input, const AwqMatrix& w) {
    if (s.proj.is_allocated()) {
        matmul(s, input, {{s.proj, w}});
        add(x, s.proj);
    } else {
        run_products(s, input, {{{w, x.get(), true}}, 1});
    }
}

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result. Token ids and positions lie on the device (s.tokens(), s.pos()), so that the
// launches of a step do not depend on them and can be captured as a graph.
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions *s.pos(), *s.pos() + 1, ...
void attention_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, l);
    QkNorms norms;  // none in a Llama
    if (c.arch == Arch::qwen3) norms = {w.head_norms.q[l], w.head_norms.k[l], c.norm_eps};

    rmsnorm(s.normed, s.x, w.norms.attn[l], c.norm_eps);                   record("attn.norm", s.normed);
    matmul(s, s.normed, {{s.q, w.q_proj[l]},                               // q, k and v read the same input
                         {s.k, w.k_proj[l]},
                         {s.v, w.v_proj[l]}});                             record("attn.q_proj", s.q);
                                                                           record("attn.k_proj", s.k);
                                                                           record("attn.v_proj", s.v);
    prepare_heads(s.q_rope, s.cache, l, s.q_norm, s.k_norm,                // q_norm, k_norm, RoPE; k and v into
                  s.q, s.k, s.v, norms, s.rotations, s.pos());             // the cache
    if (c.arch == Arch::qwen3) {                                           record("attn.q_norm", s.q_norm, c.head_dim);
                                                                           record("attn.k_norm", s.k_norm, c.head_dim);
    }
                                                                           record("attn.q_rope", s.q_rope, c.head_dim);
                                                                           record("attn.k_rope", s.cache, s.pos(), s.k.n_rows);
    attention(s.attn_out, s.attention, s.q_rope, s.cache, l, s.pos());     record("attn.mix", s.attn_out);
    matmul_add(s, s.x, s.attn_out, w.o_proj[l]);                           record("attn.o_proj", s.proj);
                                                                           record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.norm_eps);                    record("ffn.norm", s.normed);
    matmul(s, s.normed, {{s.gate, w.gate_proj[l]},
                         {s.up, w.up_proj[l]}});                           record("ffn.gate_proj", s.gate);
                                                                           record("ffn.up_proj", s.up);
    swiglu(s.hidden, s.gate, s.up);                                        record("ffn.swiglu", s.hidden);
    matmul_add(s, s.x, s.hidden, w.down_proj[l]);                          record("ffn.down_proj", s.proj);
                                                                           record("ffn.residual", s.x);
}

// x (n_tokens, dim) of the first n_tokens tokens of s.tokens(): the embedding and all layers.
void run_layers(Transformer& m, int n_tokens) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, -1);

    embed(s.x, m.weights.embedding, s.tokens(), n_tokens);                 record("tokens", s.tokens(), n_tokens, {});
                                                                           record("embed", s.x);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l);
        feed_forward_block(m, l);
    }
}

// logits (n_tokens, vocab_size) of n_tokens rows of x, from `first` on. At most logit_rows.
void run_classifier(Transformer& m, int first, int n_tokens) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, -1);

    rmsnorm(s.normed, s.x.slice(first, n_tokens), w.norms.last, c.norm_eps);  record("norm", s.normed);
    fp16_matmul(s.logits, s.normed, w.classifier);                            record("logits", s.logits);
}
// clang-format on

// All layers for n_tokens tokens; with `next`, also the last one's logits and the most probable next token.
void run_step(Transformer& m, int n_tokens, bool next) {
    auto step = [&] {
        run_layers(m, n_tokens);
        if (!next) return;
        run_classifier(m, n_tokens - 1, 1);
        arg_max(m.state.best, m.state.logits.get(), m.file.config.vocab_size);
    };
    if (m.trace != nullptr) {
        step();
    } else {
        m.state.graphs.run({n_tokens, next}, step);
    }
}

// Puts a chunk's position and ids where a step finds them.
void set_inputs(RunState& s, std::span<const int> tokens, int pos) {
    s.rotations.reach(pos + int(tokens.size()));
    std::vector<int> inputs{pos};
    inputs.insert(inputs.end(), tokens.begin(), tokens.end());
    s.inputs.upload(inputs.data(), inputs.size());
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const size_t vocab_size = m.file.config.vocab_size;
    set_inputs(s, tokens, pos);
    s.host_logits.resize(std::max(s.host_logits.size(), n_logits * vocab_size));
    if (n_logits <= 1) {
        run_step(m, n_tokens, n_logits == 1);
        if (n_logits == 1) download(s.host_logits.data(), s.logits.get(), vocab_size);
    } else {
        run_layers(m, n_tokens);
        for (int i = 0; i < n_logits; i += logit_rows) {
            const int n = std::min(logit_rows, n_logits - i);
            run_classifier(m, n_tokens - n_logits + i, n);
            download(s.host_logits.data() + i * vocab_size, s.logits.get(), n * vocab_size);
        }
    }
    return {s.host_logits.data(), n_logits * vocab_size};
}

// Runs a chunk as forward() does. Returns the most probable next token, which the device finds itself.
int forward_greedy(Transformer& m, std::span<const int> tokens, int pos) {
    set_inputs(m.state, tokens, pos);
    run_step(m, int(tokens.size()), true);
    int best = 0;
    download(&best, m.state.best.get(), 1);
    return best;
}

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

const OwnOption own_options[] = {{
    "--matmul",
#ifdef HAVE_CUBLAS
    {"fused", "dequant", "predequant", "fp16", "plain"},
#else
    {"fused", "plain"},
#endif
    "how products are computed",
}};

// What a run takes of the device's memory, all of it.
struct RunMemory {
    DeviceBuffer<std::byte> weights;
    DeviceBuffer<half> fp16;  // all matrices, only with predequant and fp16
    RunState state;
};

RunMemory allocate_run(const ModelFile& file, Weights& planned, const Options& o, int context, bool traced) {
    size_t all = 0, largest = 0;
    for (const AwqMatrix* w : planned.matrices())
        all += w->n_weights(), largest = std::max(largest, w->n_weights());
    name_allocations("the weights");
    DeviceBuffer<std::byte> weights = upload_weights(file, planned.file);
    name_allocations("the weights as fp16 (--matmul)");
    DeviceBuffer<half> fp16(keeps_fp16(matmul_option(o)) ? all : 0);
    return {std::move(weights), std::move(fp16), RunState(file.config, o, context, traced, largest)};
}

// Throws std::runtime_error if a run's memory is not there, on the device or on the host. on_device: what a
// dry run of allocate_run() counted. Returns the host's bytes.
uint64_t check_run_memory(const std::vector<DevicePart>& on_device, const ModelFile& file, const Options& o,
                          int context, bool traced) {
    const uint64_t n_logits = o.ppl || traced ? uint64_t(std::min(max_chunk, context)) : 1;
    std::vector<MemoryPart> parts,
        on_host = {logits_part(n_logits, file.config.vocab_size), {"the tokenizer", file.tokenizer.size()}};
    for (const DevicePart& part : on_device) parts.push_back({part.what, part.bytes, part.advice});
#ifdef HAVE_CUBLAS
    cublas();  // its workspace takes device memory, too
#endif
#ifdef __CUDACC__
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    check_memory(parts, free, "device memory");
#else
    on_host.insert(on_host.end(), parts.begin(), parts.end());  // the emulator's memory is the host's
#endif
    check_memory(on_host, available_memory());
    uint64_t n_bytes = 0;
    for (const MemoryPart& part : on_host) n_bytes += part.bytes;
    return n_bytes;
}

// Expands all matrices to fp16, for --matmul predequant and fp16.
void expand_all(Weights& weights, half* to) {
    for (AwqMatrix* w : weights.matrices()) {
        run_dequantize(*w, to);
        w->fp16 = to;
        to += w->n_weights();
    }
    wait_for_device();
}

// Opens an AWQ file, copies it to the device and allocates a run's memory, once it is sure to be there.
// Throws std::runtime_error with one line that names the file.
Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    ModelFile file = open_model_file(path, file_format);
    Weights planned{planned_tensors(), file.config};
    planned.file.check_end(file);
    if (options.rope_theta) file.config.rope_theta = *options.rope_theta;
    const int context = context_length(options, file.config);
    const auto allocate = [&] { return allocate_run(file, planned, options, context, trace != nullptr); };
    try {
        device();
        const uint64_t on_host =
            check_run_memory(DryRun::parts_of(allocate), file, options, context, trace != nullptr);
        RunMemory memory = allocate();
        Weights weights{tensors_in(memory.weights), file.config};
        if (memory.fp16.size() > 0) expand_all(weights, memory.fp16.get());
        const uint64_t n_bytes = on_host + file.weights.size();
        return {std::move(file),
                std::move(memory.weights),
                std::move(memory.fp16),
                std::move(weights),
                std::move(memory.state),
                trace,
                n_bytes};
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

Model load_model(const Options& options, Trace* trace) {
    auto m = std::make_shared<Transformer>(load_transformer(options.model_path, options, trace));
    const ModelConfig& c = m->file.config;
    Model model = model_of(m->file, m->weights.file, KvFormat::f16);
    model.scheme = "AWQ: int4 groups of " + std::to_string(c.group_size) + ", fp16 activations";
    model.kernel = device().name;
    if (options.own.at("--matmul") != "fused") model.kernel += ", --matmul " + options.own.at("--matmul");
    if (m->state.matmul.how == Matmul::fp16) {  // decode reads the expanded matrices
        for (const AwqMatrix* matrix : m->weights.matrices())
            model.weight_bytes_per_token += matrix->n_weights() * sizeof(half) - matrix->n_bytes();
    }
    model.memory_bytes = m->memory_bytes;
    model.max_chunk = max_chunk;
    model.device_bytes = [] { return device().peak; };
    model.device_bandwidth = copy_bandwidth;
    const ForwardChunk chunk = [m](auto... arguments) { return forward(*m, arguments...); };
    model.forward = in_chunks(chunk, max_chunk, c.vocab_size, trace != nullptr);
    model.prefill = without_logits(chunk, trace != nullptr);
    if (trace == nullptr) {
        model.forward_greedy = [m](std::span<const int> tokens, int pos) {
            return forward_greedy(*m, tokens, pos);
        };
    }
    return model;
}

#ifndef RUNQ_NO_MAIN
#include "engine/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(argc, argv,
                            {"runq_awq", "Llama 3 and Qwen3 in AWQ (int4 by fp16)", load_model, own_options});
}
#endif
