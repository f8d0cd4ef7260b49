// What runq_awq.cu has behind forward() when it is compiled alone: everything from a loaded model to words on
// the screen. Included there, because it uses the program's own names: Transformer, forward, run_layers,
// file_format, max_chunk, program_name, program_summary, scheme_text and scheme_options.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/gpu/program.cuh"
#include "engine/os/memory.h"
#include "engine/os/system.h"

// ----------------------------------------------------------------------------
// Products through cuBLAS, for which a matrix is first expanded to fp16 in memory. Those that dequantize in
// registers are runq_awq.cu's.

constexpr int dequantize_rows = 8;  // of a thread. A group has a multiple of it

// out (n_in, n_out), the weights as fp16. grid: (words of a row / 128, n_in / dequantize_rows). A thread has
// the same word of several rows of a group, with one load of zero points and scales.
static __global__ void awq_dequantize(AwqMatrix w, half* out) {
    const int row_words = w.n_out / 8, word = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * dequantize_rows, group = row / w.group_size;
    if (word >= row_words) return;
    uint32_t nibbles[dequantize_rows];
    for (int i = 0; i < dequantize_rows; i++) nibbles[i] = w.qweight[size_t(row + i) * row_words + word];
    const PairScales scales =
        pair_scales(w.qzeros[size_t(group) * row_words + word],
                    *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.n_out + 8 * word));
    wait_for_previous();
    for (int i = 0; i < dequantize_rows; i++) {
        uint32_t pairs[4];
        for (int p = 0; p < 4; p++) pairs[p] = weight_pair(nibbles[i], p, scales);
        *reinterpret_cast<uint4*>(out + size_t(row + i) * w.n_out + 8 * word) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

inline void run_dequantize(const AwqMatrix& w, half* out) {
    const dim3 grid((w.n_out / 8 + 127) / 128, w.n_in / dequantize_rows);
    launch<awq_dequantize>({.grid = grid, .block = 128, .stream = device().stream, .is_early = true}, w, out);
}

// Each matrix is expanded into `buffer`, which has room for the largest. Null: by the copies in fp16.
inline void run_cublas(half* buffer, const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& p = products.items[i];
        if (buffer != nullptr) run_dequantize(p.w, buffer);
        run_cublas(x, n_tokens, buffer != nullptr ? buffer : p.w.fp16, p.w.n_in, p.w.n_out, p.out, p.add);
    }
}

inline bool fast_matmul(const FastMatmul& fast, const half* x, int n_tokens, const AwqProducts& products) {
    if (!takes_cublas(fast.how, n_tokens)) return false;
    run_cublas(fast.expanded.get(), x, n_tokens, products);
    return true;
}

// ----------------------------------------------------------------------------
// Steps that are captured as graphs

// All layers for a chunk, as forward() runs it, without a trace. With `next`, also the last token's logits
// and the most probable next token.
inline void run_step(Transformer& m, std::span<const int> tokens, int pos, bool next) {
    const int n_tokens = int(tokens.size());
    set_inputs(m.state, tokens, pos);
    m.graphs.run({n_tokens, next}, [&] {
        run_layers(m, n_tokens);
        if (!next) return;
        run_classifier(m, n_tokens - 1, 1);
        arg_max(m.best, m.state.logits.get(), m.file.config.vocab_size);
    });
}

// The most probable next token, which the device finds itself.
inline int forward_greedy(Transformer& m, std::span<const int> tokens, int pos) {
    run_step(m, tokens, pos, true);
    int best = 0;
    download(&best, m.best.index.get(), 1);
    return best;
}

// ----------------------------------------------------------------------------
// Loading

// The list that a Weights with pointers into that memory is made of. Without memory its pointers are null,
// and it has names, shapes, sizes and places. Each tensor begins at a multiple of 256 bytes: what cudaMalloc
// itself gives, and enough for any vector load.
inline TensorList tensors_in(const DeviceBuffer<std::byte>& memory = {}) {
    return {memory.get(), memory.size(), 256};
}

// Copies every tensor of the file to its place.
inline DeviceBuffer<std::byte> upload_weights(const ModelFile& file, const TensorList& planned) {
    DeviceBuffer<std::byte> memory(planned.memory_bytes());
    for (const TensorInfo& t : planned.all())
        memory.upload(file.map->bytes.data() + t.offset, t.n_bytes, t.memory_offset);
    return memory;
}

// Values of all matrices, if they are expanded to fp16 when loading.
inline size_t n_fp16_weights(Weights& planned, const Options& o) {
    size_t n = 0;
    if (keeps_fp16(matmul_option(o)))
        for (const AwqMatrix* w : planned.matrices()) n += w->n_weights();
    return n;
}

// What a run takes of the device's memory, by what it is for.
inline std::vector<MemoryPart> device_parts(const ModelFile& file, Weights& planned, const Options& o,
                                            int context, bool traced) {
    const ModelConfig& c = file.config;
    const int n = std::min(max_chunk, context);
    const char* advice = "a smaller --ctx takes less";
    MemoryCount count;
    [[maybe_unused]] const RunState counted{c, o, context, traced};
    [[maybe_unused]] const BestToken best;
    std::vector<MemoryPart> parts = {
        {"the weights", planned.file.memory_bytes()},
        {"the weights as fp16 (--matmul)", n_fp16_weights(planned, o) * sizeof(half)},
        {"a chunk of " + std::to_string(n) + " tokens", count.at_once()},
        kv_part(0, size_t(context), kv_bytes(c, KvFormat::f16), advice),
        {"RoPE", uint64_t(context) * uint64_t(c.head_dim / 2) * sizeof(float2), advice},
        logits_part(uint64_t(std::min(logit_rows, n)), c.vocab_size)};
    for (size_t i = 3; i < parts.size(); i++) parts[2].bytes -= parts[i].bytes;
    return parts;
}

// Expands all matrices to fp16, for --matmul predequant and fp16.
inline void expand_all(Weights& weights, half* to) {
    for (AwqMatrix* w : weights.matrices()) {
        run_dequantize(*w, to);
        w->fp16 = to;
        to += w->n_weights();
    }
    wait_for_device();
}

// Opens an AWQ file, copies it to the device and allocates a run's memory, once it is sure to be there.
// Throws std::runtime_error with one line that names the file.
inline Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    ModelFile file = open_model_file(path, file_format);
    Weights planned{tensors_in(), file.config};
    planned.file.check_end(file);
    if (options.rope_theta) file.config.rope_theta = *options.rope_theta;
    const int context = context_length(options, file.config);
    const bool traced = trace != nullptr;
    try {
        device();
        cublas();  // its workspace takes device memory, too
        const uint64_t n_logits = options.ppl || traced ? uint64_t(std::min(max_chunk, context)) : 1;
        const auto on_device = device_parts(file, planned, options, context, traced);
        std::vector<MemoryPart> on_host = {logits_part(n_logits, file.config.vocab_size),
                                           {"the tokenizer", file.tokenizer.size()}};
#ifdef __CUDACC__
        size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
        check_memory(on_device, free, "device memory");
#else
        on_host.insert(on_host.end(), on_device.begin(), on_device.end());  // the emulator's memory
#endif
        const uint64_t n_bytes = check_memory(on_host, available_memory()) + file.weights.size();
        DeviceBuffer<std::byte> memory = upload_weights(file, planned.file);
        DeviceBuffer<half> fp16(n_fp16_weights(planned, options));
        RunState state{file.config, options, context, traced};
        Weights weights{tensors_in(memory), file.config};
        if (fp16.size() > 0) expand_all(weights, fp16.get());
        return {std::move(file),   std::move(weights), std::move(state), trace,
                std::move(memory), std::move(fp16),    BestToken{},      n_bytes};
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

// ----------------------------------------------------------------------------
// What the command line takes

// The program's model as the command line runs it.
struct GpuModel : Model {
    Transformer m;

    GpuModel(const Options& options, Trace* trace) : m(load_transformer(options.model_path, options, trace)) {
        describe(*this, m.file, m.weights.file, KvFormat::f16);
        scheme = scheme_text(config);
        kernel = device().name;
        if (options.own.at("--matmul") != "fused") kernel += ", --matmul " + options.own.at("--matmul");
        if (matmul_option(options) == Matmul::fp16) {  // decode reads the expanded matrices
            for (const AwqMatrix* matrix : m.weights.matrices())
                weight_bytes_per_token += matrix->n_weights() * sizeof(half) - matrix->n_bytes();
        }
        memory_bytes = m.memory_bytes;
        max_chunk = ::max_chunk;
        finds_best = trace == nullptr;
    }

    // A trace has the logits of every token, so that it does not depend on how the tokens were fed.
    std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) override {
        const size_t vocab_size = size_t(config.vocab_size), n_values = size_t(n_logits) * vocab_size;
        if (m.trace != nullptr) return ::forward(m, tokens, pos, int(tokens.size())).last(n_values);
        if (n_logits > 1) return ::forward(m, tokens, pos, n_logits);
        run_step(m, tokens, pos, n_logits == 1);
        std::vector<float>& logits = m.state.host_logits;
        logits.resize(std::max(logits.size(), n_values));
        if (n_logits > 0) download(logits.data(), m.state.logits.get(), n_values);
        return {logits.data(), n_values};
    }
    int forward_greedy(std::span<const int> tokens, int pos) override {
        return ::forward_greedy(m, tokens, pos);
    }
    uint64_t device_bytes() const override { return device().peak; }
    double device_bandwidth() override { return copy_bandwidth(); }
};

inline std::unique_ptr<Model> load_model(const Options& options, Trace* trace) {
    return std::make_unique<GpuModel>(options, trace);
}

// All options that other programs may not have.
const std::vector<OwnOption> own_options = [] {
    std::vector<OwnOption> all = scheme_options;
    if (has_cublas) all[0].choices.assign(std::begin(matmul_names), std::end(matmul_names));
    return all;
}();

inline int run_command_line(int argc, char** argv) {
    return run_command_line(argc, argv, {program_name, program_summary, load_model, own_options});
}
