// The command line of the program PROGRAM on one model file after another, in one process:
// tests/test_broken_files.py.
//
// Standard input is files, each as its length (u64) and its bytes. For each, standard output gets the exit
// code (i32), and what the program wrote to standard output and to standard error, each as its length (u64)
// and its bytes. A file is taken when the one before it has been answered: the one without an answer ended
// the process.
#pragma once

#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/poisoned_tail.h"
#include "tests/fuzz/program.h"

namespace {

// A stream of the program's, into memory.
class Output {
  public:
    Output() = default;
    ~Output() { std::fclose(stream_); }
    Output(const Output&) = delete;
    Output& operator=(const Output&) = delete;

    std::FILE* stream() const { return stream_; }
    // What was written since the last call.
    std::string taken() {
        std::string text(size_t(lseek(fd_, 0, SEEK_CUR)), '\0');
        expect(pread(fd_, text.data(), text.size(), 0) == ssize_t(text.size()), "a file in memory is read");
        expect(ftruncate(fd_, 0) == 0 && lseek(fd_, 0, SEEK_SET) == 0, "a file in memory is emptied");
        return text;
    }

  private:
    const int fd_ = memfd_create("output", MFD_CLOEXEC);
    std::FILE* const stream_ = fdopen(fd_, "w");  // the program writes to its descriptor, past any buffer
};

// Of the file that is open. Set when it is mapped, and taken away when the run is over.
std::optional<PoisonedTail> tail;

std::unique_ptr<Model> load_guarded(const Options& options, Trace* trace) {
    auto model = load_model(options, trace);
    const auto section = model->tokenizer_section;
    tail.emplace(section.data() + section.size());
    return model;
}

void put_text(const std::string& text) {
    const uint64_t n = text.size();
    std::cout.write(reinterpret_cast<const char*>(&n), sizeof n) << text;
}

// Runs the program with each of the files and these options behind it. A file may take two minutes.
void run_command_lines(std::span<const char* const> options) {
    MemoryFile file;
    const std::string path = file.path();
    std::vector<const char*> args{scheme_of(file_format.magic).program, path.c_str()};
    args.insert(args.end(), options.begin(), options.end());
    const Program program{scheme_of(file_format.magic).program, "", load_guarded, own_options};
    Output out, err;
    std::vector<uint8_t> bytes;
    for (uint64_t size; std::cin.read(reinterpret_cast<char*>(&size), sizeof size);) {
        bytes.resize(size);
        std::cin.read(reinterpret_cast<char*>(bytes.data()), std::streamsize(size));
        file.write(bytes);
        alarm(120);
        const int32_t code =
            run_with_streams(int(args.size()), args.data(), program, {nowhere(), out.stream(), err.stream()});
        alarm(0);
        tail.reset();
        std::cout.write(reinterpret_cast<const char*>(&code), sizeof code);
        put_text(out.taken());
        put_text(err.taken());
        std::cout.flush();
    }
}

}  // namespace
