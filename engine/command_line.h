// What a program's file has behind forward() when it is compiled alone: everything from a loaded model to
// words on the screen. It is included there, as it takes the program's own names: Transformer, forward,
// file_format, max_chunk, program_name, program_summary, scheme_text and scheme_options.
#pragma once

#ifndef ENGINE
#error "this header is the engine's: compile with -DENGINE (make does)"
#endif

#include <memory>
#include <string>
#include <vector>

#include "engine/app/cli.h"
#include "engine/app/model.h"
#include "engine/backend/program.h"

// What is different with attention in int8, in a program that has it: its cache is another.
template <class T>
void set_int8_attention(Model& model, const std::shared_ptr<T>& m) {
    if constexpr (requires { m->state.int8_attention; }) {
        if (!m->state.int8_attention) return;
        model.scheme += "; attention in int8";
        model.kv_bytes_per_position = kv_bytes(model.config, KvFormat::q8);
        model.fill_cache = [m](int n) { m->state.int8.cache.fill(n); };
    }
}

// Opens and checks a model file. Throws std::runtime_error that names it, UsageError for options that do not
// fit.
inline Model load_model(const Options& options, Trace* trace) {
    if (options.chosen("--attn") == "int8" && options.chosen(kv_option.name) != "f32")
        throw UsageError("--kv: has no meaning with --attn int8, whose cache is int8");
    const bool packs = !takes_backends<decltype(Weights::c)>;  // or a back end has them
    auto m = load_cpu<Transformer>(file_format, max_chunk, options, trace, packs);
    const std::string kernel = choose_kernels(*m, options, program_name);
    Model model = cpu_model(m, options, scheme_text(m->file.config), kernel, max_chunk);
    model.own_fields = format_fields(*m);
    set_int8_attention(model, m);
    return model;
}

// All options that other programs may not have.
const std::vector<OwnOption> own_options = [] {
    std::vector<OwnOption> all = scheme_options;
    all.insert(all.end(), {kv_option, mmap_option});
    if (takes_backends<decltype(Weights::c)>) all.push_back(backend_option);
    return all;
}();

inline int run_command_line(int argc, char** argv) {
    return run_command_line(argc, argv, {program_name, program_summary, load_model, own_options});
}
