// What a program's file has behind forward() when it is compiled alone: everything from a loaded model to
// words on the screen. It is included there, as it takes the program's own names: Transformer, forward,
// file_format, max_chunk, program_name, program_summary, scheme_text and scheme_options. A program with back
// ends includes engine/backend/command_line.h instead.
#pragma once

#include <memory>
#include <vector>

#include "engine/cpu_model.h"

// Opens and checks a model file. Throws std::runtime_error that names it, UsageError for options that do not
// fit.
inline std::unique_ptr<Model> load_model(const Options& options, Trace* trace) {
    return std::make_unique<CpuModel<Transformer>>(options, trace);
}

// All options that other programs may not have.
const std::vector<OwnOption> own_options = [] {
    std::vector<OwnOption> all = scheme_options;
    all.insert(all.end(), {kv_option, mmap_option});
    return all;
}();

inline int run_command_line(int argc, char** argv) {
    return run_command_line(argc, argv, {program_name, program_summary, load_model, own_options});
}
