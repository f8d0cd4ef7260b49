// engine/command_line.h for a program whose matrices back ends multiply: with the option --backend, and lines
// of --info on its formats, one for each kind of matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/app/streams.h"
#include "engine/backend/backend.h"
#include "engine/cpu_model.h"
#include "engine/text/utf8.h"

const OwnOption backend_option = {
    "--backend", {"auto", "builtin"}, "what quantizes and multiplies (docs/backends.md)", "or a NAME"};

// Loads the model's matrices into the back end that --backend chooses, or packs them for this build's
// kernels; with --info neither. Returns the name of what will quantize and multiply. Throws as open_backend()
// does; warnings are notes.
inline std::string choose_kernels(Transformer& m, const Options& options) {
    const bool packs = packs_weights(m.file, options);
    auto matrices = multiplied(m.weights);
    if (options.info) matrices.clear();
    std::vector<QuantMatrix> views;
    for (const auto* w : matrices) views.push_back(view_of(*w));
    const auto warn = [](const std::string& line) {
        note(stderr, std::string(program_name) + ": " + printable(line) + "\n");
    };
    const std::string choice = options.own.at(backend_option.name);
    if (std::shared_ptr<Backend> backend = open_backend(choice, views, !packs, warn)) {
        for (size_t i = 0; i < matrices.size(); i++) matrices[i]->packed = backend->loaded(i);
        m.state.xq.kernels = backend;
        return "back end " + std::string(backend->name());
    }
    for (size_t i = 0; i < matrices.size() && packs; i++) matrices[i]->packed = m.packed.add(views[i]);
    return kernel_name(m);
}

// What --info says of all matrices of a kind together: "q_proj: 4 bits in groups of 64, 1.2 MB, 4.375 bits
// per weight", or that it has none of its own. Of q_proj they are layers.0.attn.q_proj.codes and so on.
inline std::string kind_text(const TensorList& file, const std::string& kind, const MatrixFormat& f,
                             int n_cols) {
    uint64_t n_bytes = 0, n_rows = 0;
    for (const TensorInfo& t : file.all()) {
        const std::string matrix = t.name.substr(0, t.name.rfind('.'));
        if (matrix != kind && !matrix.ends_with("." + kind)) continue;
        n_bytes += t.n_bytes;
        if (t.name.ends_with(".codes")) n_rows += uint64_t(t.shape[0]);
    }
    if (n_rows == 0) return kind + ": the embedding";
    return kind + ": " + format_text(f) + ", " + size_text(n_bytes) +
           format(", %.3f bits per weight", 8 * double(n_bytes) / (double(n_rows) * n_cols));
}

inline std::unique_ptr<Model> load_model(const Options& options, Trace* trace) {
    auto model = std::make_unique<CpuModel<Transformer>>(options, trace, false);
    model->kernel = choose_kernels(*model->m, options);
    const auto& c = model->m->file.config;
    for (size_t i = 0; i < c.formats.size(); i++) {
        const TensorList& file = model->m->weights.file;
        model->formats.push_back(kind_text(file, c.kind_names[i], c.formats[i], c.columns(int(i))));
    }
    return model;
}

const std::vector<OwnOption> own_options = [] {
    std::vector<OwnOption> all = scheme_options;
    all.insert(all.end(), {kv_option, mmap_option, backend_option});
    return all;
}();

inline int run_command_line(int argc, char** argv) {
    return run_command_line(argc, argv, {program_name, program_summary, load_model, own_options});
}
