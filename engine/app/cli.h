// The command line of the programs, which is the same whatever the scheme: a program gives its name and a
// function that loads a model. Text goes to standard output and nothing else does. Every error becomes one
// line on standard error and an exit code.
#pragma once

#include <string>

#include "engine/app/model.h"
#include "engine/app/streams.h"

// The tokenizer of the model's file, if it has one. Throws std::runtime_error with the file's name if the
// section is unsound.
void load_tokenizer(Model& model, const std::string& path);

// All of a program's main(). Returns the exit code.
int run_command_line(int argc, const char* const* argv, const Program& program);

// The same with streams of the caller's.
int run_with_streams(int argc, const char* const* argv, const Program& program, const Streams& io);
