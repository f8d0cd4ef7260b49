// What the command line does for a program whose matrices back ends multiply, which is one that has a format
// for each kind of matrix (Config::formats): the option --backend, the back end, and lines of --info.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/backend/backend.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/text/utf8.h"

template <class Config>
constexpr bool takes_backends = requires(const Config& c) {
    c.formats;
};

const OwnOption backend_option = {
    "--backend", {"auto", "builtin"}, "what quantizes and multiplies (docs/backends.md)", "or a NAME"};

// Has the model's matrices loaded by the back end that --backend chooses, or packed for this build's kernels;
// with --info no matrix is. Returns what will quantize and multiply. Throws as open_backend() does; warnings
// are notes from `program`.
template <class Transformer>
std::string choose_kernels(Transformer& m, [[maybe_unused]] const Options& options,
                           [[maybe_unused]] const char* program) {
    [[maybe_unused]] const int group_size = m.file.config.group_size;
    if constexpr (takes_backends<decltype(m.file.config)>) {
        const bool packs = packs_weights(m.file, options);
        auto matrices = multiplied(m.weights);
        if (options.info) matrices.clear();
        std::vector<QuantMatrix> views;
        for (const auto* w : matrices) views.push_back(view_of(*w));
        const auto warn = [&](const std::string& line) {
            note(stderr, std::string(program) + ": " + printable(line) + "\n");
        };
        const std::string choice = options.own.at(backend_option.name);
        if (std::shared_ptr<Backend> backend =
                open_backend(choice, views, !packs, m.trace != nullptr, warn)) {
            for (size_t i = 0; i < matrices.size(); i++) matrices[i]->packed = backend->loaded(i);
            m.state.xq.kernels = backend;
            return "back end " + std::string(backend->name());
        }
        for (size_t i = 0; i < matrices.size() && packs; i++) matrices[i]->packed = m.packed.add(views[i]);
    }
    if constexpr (requires { kernel_group(m.weights.classifier); }) {
        const int group = kernel_group(m.weights.classifier);
        return group > 0 ? int8_kernel_name(group) : "portable";
    } else if constexpr (requires { multiplied(m.weights); }) {
        // With a scale a row, rows of different lengths may take different paths: the name is that of the
        // model's width.
        return int8_kernel_name(group_size > 0 ? group_size : m.file.config.dim);
    }
    return "portable";
}

// The lines of --info on the formats, if there are some.
template <class Transformer>
std::vector<OwnField> format_fields(const Transformer& m) {
    std::vector<OwnField> fields;
    const auto& c = m.file.config;
    if constexpr (takes_backends<decltype(m.file.config)>)
        for (size_t i = 0; i < c.formats.size(); i++)
            fields.push_back(format_field(m.weights.file, c.kind_names[i], c.formats[i], c.columns(int(i))));
    return fields;
}
