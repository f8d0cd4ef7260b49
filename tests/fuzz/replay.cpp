// Calls harnesses on inputs that lie in files, without libFuzzer: what `make test` does with the inputs of
// tests/fuzz/corpus. With PROGRAM it has the two harnesses of that program, otherwise those of engine/.
//
//   replay NAME FILE...
//   replay_PROGRAM command_line OPTION...     see command_line.h
//   replay_PROGRAM plain_NAME FILE...         of the program's file alone (plain_form.h), if compiled with
//   WITH_PLAIN
#define FUZZ_REPLAY
#ifdef PROGRAM
#include "tests/fuzz/command_line.h"
#include "tests/fuzz/forward.cpp"
#include "tests/fuzz/load.cpp"
#ifdef WITH_PLAIN
#define PLAIN
#include "tests/fuzz/plain_form.h"
// The harnesses once more, with the types and functions of the file alone in place of the engine's.
namespace of_the_file {
namespace plain {
using ::plain::all_finite, ::plain::load_model, ::plain::ModelConfig, ::plain::Options, ::plain::Sampler,
    ::plain::Tokenizer, ::plain::Trace;
}
#include "tests/fuzz/forward.cpp"
#include "tests/fuzz/load.cpp"
}  // namespace of_the_file
#endif
#else
#include "tests/fuzz/chat.cpp"
#include "tests/fuzz/encode.cpp"
#include "tests/fuzz/options.cpp"
#include "tests/fuzz/section_built.cpp"
#include "tests/fuzz/section_raw.cpp"
#endif

#include <fstream>
#include <iterator>

namespace {

struct Harness {
    const char* name;
    void (*run)(FuzzBytes);
};

const Harness harnesses[] = {
#ifdef PROGRAM
    {"load", fuzz_load},
    {"forward", fuzz_forward},
#ifdef WITH_PLAIN
    {"plain_load", of_the_file::fuzz_load},
    {"plain_forward", of_the_file::fuzz_forward},
#endif
#else
    {"chat", fuzz_chat},
    {"encode", fuzz_encode},
    {"options", fuzz_options},
    {"section_built", fuzz_section_built},
    {"section_raw", fuzz_section_raw},
#endif
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: %s HARNESS FILE...\n", argv[0]);
        return 2;
    }
#ifdef PROGRAM
    if (std::string_view(argv[1]) == "command_line") {
        run_command_lines(std::span(argv, size_t(argc)).subspan(2));
        return 0;
    }
#endif
    for (const Harness& harness : harnesses) {
        if (!std::string_view(argv[1]).starts_with(harness.name)) continue;
        for (int i = 2; i < argc; i++) {
            std::ifstream file(argv[i], std::ios::binary);
            expect(file.is_open(), argv[i]);
            const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
            std::fprintf(stderr, "%s\n", argv[i]);  // the last one that is named did it
            harness.run(bytes);
        }
        return 0;
    }
    std::fprintf(stderr, "%s: there is no harness '%s' in this program\n", argv[0], argv[1]);
    return 2;
}
