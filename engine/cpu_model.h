// A program's model on a CPU: loaded, and run by its forward(). Included behind that, as it takes the
// program's own names: Transformer, RunState, forward, file_format, max_chunk, program_name and scheme_text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/model/model_file.h"
#include "engine/os/threads.h"

// What quantizes and multiplies where this build's kernels do.
template <class T>
const char* kernel_name(const T& m) {
    if constexpr (requires { kernel_group(m.weights.classifier); }) {
        return int8_kernel_name(kernel_group(m.weights.classifier));
    } else if constexpr (requires { multiplied(m.weights); }) {
        // With a scale a row, rows of different lengths may take different paths: the name is that of the
        // model's width.
        const int group = m.file.config.group_size;
        return int8_kernel_name(group > 0 ? group : m.file.config.dim);
    }
    return "portable";
}

// Opens the model file and allocates a run's memory. Throws std::runtime_error with one line that names the
// file. Nothing but the header and the tokenizer section is read before everything has been checked. packs:
// unless the caller does it.
template <class T = Transformer>  // whose members are asked for: programs do not have all of them
std::unique_ptr<T> load_transformer(const Options& options, Trace* trace, bool packs = true) {
    if (options.chosen("--attn") == "int8" && kv_format(options) != KvFormat::f32)
        throw UsageError("--kv: has no meaning with --attn int8, whose cache is int8");
    using OwnWeights = decltype(T::weights);
    const std::string& path = options.model_path;
    auto file = open_model_file(path, file_format);
    const auto alignment = uint64_t(file_format.alignment);
    OwnWeights{TensorList(nullptr, 0, alignment, alignment), file.config}.file.check_end(file);
    if (options.rope_theta) file.config.rope_theta = *options.rope_theta;
    const int context = context_length(options, file.config);
    const bool traced = trace != nullptr;
    const uint64_t available = available_memory();
    try {
        check_memory(cpu_memory<RunState>(file, options, traced, max_chunk, sure_positions(options, context)),
                     available);
        OwnWeights weights{TensorList(file), file.config};
        RunState state{file.config, options, context, traced};
        auto m = std::make_unique<T>(T{std::move(file), std::move(weights), std::move(state), trace});
        if constexpr (requires { &OwnWeights::check_mask; })     // reads tensors: --info has no use for that
            if (!options.info) check_masks(m->weights);          // expand_rows.h
        if constexpr (requires { m->weights.pack(m->packed); })  // or load_model() packs, or nothing does
            if (packs_weights(m->file, options)) m->weights.pack(m->packed);
        if constexpr (requires { multiplied(m->weights)[0]->packed; })
            if (packs && packs_weights(m->file, options))
                for (auto* w : multiplied(m->weights)) w->packed = m->packed.add(view_of(*w));
        return m;
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

// The program's model as the command line runs it.
template <class T>
struct CpuModel : Model {
    std::unique_ptr<T> m;

    // As load_transformer().
    CpuModel(const Options& options, Trace* trace, bool packs = true)
        : m(load_transformer<T>(options, trace, packs)) {
        kernel = kernel_name(*m);
        describe(*this, m->file, m->weights.file, m->state.cache.format());
        scheme = scheme_text(m->file.config);
        max_chunk = ::max_chunk;
        kv_page = decltype(m->state.cache)::page;
        if constexpr (requires { m->state.int8_attention; }) {
            if (m->state.int8_attention) {
                scheme += "; attention in int8";
                kv_bytes_per_position = kv_bytes(config, KvFormat::q8);
            }
        }
        const auto memory = [&](int n_positions) {
            return check_memory(
                cpu_memory<RunState>(m->file, options, trace != nullptr, max_chunk, n_positions), no_limit);
        };
        bytes_per_position = memory(1) - memory(0);
        memory_bytes = m->weights.file.bytes_per_token(config) + memory(context_length(options, config));
        if (trace != nullptr && !options.own.contains(mmap_option.name)) {
            // Accumulators are computed from the file, which otherwise is packed and given back.
            for (const TensorInfo& t : tensors)
                if (t.name.starts_with(step_name(accumulator_layer, ""))) memory_bytes += t.n_bytes;
        }
    }

    // A trace has the logits of every token, so that it does not depend on how the tokens were fed.
    std::span<const float> forward(std::span<const int> tokens, int pos, int n_logits) override {
        const auto logits = ::forward(*m, tokens, pos, m->trace != nullptr ? int(tokens.size()) : n_logits);
        return logits.last(size_t(n_logits) * size_t(config.vocab_size));
    }
    bool fill_cache(int n) override {
        const int width = m->file.config.kv_dim(), head_dim = m->file.config.head_dim;
        parallel_for(int64_t(config.n_layers) * n, [&](int64_t i) {
            const int l = int(i / n), pos = int(i % n);
            std::vector<float> k(size_t(width), 0), v = k;
            made_up(k.data(), width, l, 0, pos), made_up(v.data(), width, l, 1, pos);
            for (int h = 0; h < width / head_dim; h++)
                fill_head(l, h, pos, &k[h * head_dim], &v[h * head_dim]);
        });
        return true;
    }

  private:
    void fill_head(int layer, int head, int pos, const float* k, const float* v) {
        if constexpr (requires { m->state.int8_attention; }) {
            if (m->state.int8_attention) {
                const int n = config.head_dim;
                std::vector<int8_t> codes(2 * size_t(n));
                const float k_scale = quantize_group(codes.data(), 1, k, n);
                const float v_scale = quantize_group(codes.data() + n, 1, v, n);
                return m->state.int8.cache.append(layer, head, pos, codes.data(), k_scale, codes.data() + n,
                                                  v_scale);
            }
        }
        m->state.cache.append(layer, head, pos, k, v);
    }
};
