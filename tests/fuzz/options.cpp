// Fuzzes the command line. The input is the arguments, a line each.
#include "engine/app/options.h"

#include <optional>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "tests/fuzz/fuzz.h"
#ifndef LIBRARY_IS_LINKED
#include "engine/app/cli.cpp"
#include "engine/app/line_editor.cpp"
#endif

namespace {

// One of each kind: with choices, with none, and with others than those it names.
const OwnOption own_options_of_a_program[] = {{"--matmul", {"fused", "plain"}, "how products are computed"},
                                              {"--mmap", {}, "weights are read where the file lies"},
                                              {"--backend", {"auto", "builtin"}, "who multiplies", "NAME"}};

// What parse_options promises of options that it returns.
void check_options(const Options& o) {
    if (o.help || o.version) return;
    expect(!o.model_path.empty(), "there is a model");
    expect(o.prompt.has_value() + o.file.has_value() + o.ids.has_value() <= 1, "at most one prompt");
    expect(int(o.info) + o.ppl.has_value() + o.bench.has_value() <= 1, "at most one task");
    expect(o.steps >= 0 && o.ctx >= 0 && o.threads >= 0 && o.threads <= 1024, "whole numbers in range");
    expect(!o.temp || (*o.temp >= 0 && *o.temp <= 100), "--temp in range");
    expect(!o.top_p || (*o.top_p >= 0 && *o.top_p <= 1), "--top-p in range");
    expect(!o.top_k || *o.top_k >= 0, "--top-k in range");
    expect(!o.min_p || (*o.min_p >= 0 && *o.min_p <= 1), "--min-p in range");
    const float penalty = o.repetition_penalty.value_or(1);
    expect(penalty >= 0.01f && penalty <= 100, "--repetition-penalty in range");
    expect(!o.rope_theta || (*o.rope_theta >= 1 && *o.rope_theta <= 1e12f), "--rope-theta in range");
    if (o.ids) {
        expect(!o.ids->empty(), "--ids has an id");
        for (const int id : *o.ids) expect(id >= 0, "ids are not negative");
    }
    if (o.bench) {
        expect(o.bench->n_prompt >= 0 && o.bench->n_generated >= 0, "--bench is not negative");
    }
    const std::string& own = o.own.at("--matmul");
    expect(own == "fused" || own == "plain", "a program's own option has one of its choices");
}

// A wrong command line ends with exit code 2 and one line that a terminal can be shown.
void check_message(const std::vector<const char*>& argv) {
    static MemoryFile output;
    static std::FILE* const err = std::fopen(output.path().c_str(), "r+");
    output.write({});
    lseek(fileno(err), 0, SEEK_SET);
    const Program program{"runq", "", nullptr, own_options_of_a_program};
    const int code =
        run_with_streams(int(argv.size()) - 1, argv.data(), program, {nowhere(), nowhere(), err});
    expect(code == 2, "wrong usage is exit code 2");
    std::string text(size_t(lseek(fileno(err), 0, SEEK_END)), 0);
    expect(pread(fileno(err), text.data(), text.size(), 0) == ssize_t(text.size()), "a message is read");
    expect(text.starts_with("runq: ") && text.find('\n') == text.size() - 1, "an error is one line");
    for (const char c : text.substr(0, text.size() - 1)) {
        expect(uint8_t(c) >= ' ', "an error has no control characters");
    }
}

void fuzz_options(FuzzBytes bytes) {
    std::vector<std::string> arguments{"runq"};
    for (const uint8_t byte : bytes) {
        if (byte == 0) break;
        if (arguments.size() == 1 || byte == '\n') arguments.emplace_back();
        if (byte != '\n') arguments.back().push_back(char(byte));
    }
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    argv.push_back(nullptr);
    std::optional<Options> options;
    try {
        options = parse_options(int(arguments.size()), argv.data(), own_options_of_a_program);
    } catch (const UsageError&) {
        check_message(argv);
        return;
    }
    check_options(*options);
}

}  // namespace

FUZZ_TARGET(fuzz_options)
