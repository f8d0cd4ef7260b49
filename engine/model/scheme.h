// The schemes: what a model file begins with, and the program that runs it. A new scheme adds a row. All else
// that a scheme's files have of their own, its program says (FileFormat, engine/model/header.h).
#pragma once

#include <cstdint>

struct Scheme {
    const char* file;      // as messages call such a file
    const char* program;   // runs it
    const char* exporter;  // makes it: the arguments of python -m export
    uint32_t magic;        // a file's first word
    int version;           // and its second
};

constexpr Scheme scheme_q8{"a Q8 file", "runq", "q8", 0x616b3432, 2};  // "ak42", llama2.c's version 2
constexpr Scheme scheme_w8a8{"a W8A8 file", "runq_w8a8", "w8a8 --calib text.txt", 0x616b3838, 1};  // "ak88"
constexpr Scheme scheme_awq{"an AWQ file", "runq_awq", "awq --calib text.txt", 0x616b3438,
                            5};  // "ak48", KuiperLLama's Qwen3 AWQ
constexpr Scheme scheme_gptq{"a GPTQ file", "runq_gptq", "gptq --calib text.txt", 0x616b6770, 1};  // "akgp"
constexpr Scheme scheme_moe{"a MoE file", "runq_moe", "moe --calib text.txt", 0x616b6d65, 1};      // "akme"

constexpr Scheme schemes[] = {scheme_q8, scheme_w8a8, scheme_awq, scheme_gptq, scheme_moe};

// The scheme whose files begin with `magic`, which is that of one of them.
constexpr const Scheme& scheme_of(uint32_t magic) {
    const Scheme* scheme = schemes;
    while (scheme->magic != magic) scheme++;
    return *scheme;
}
