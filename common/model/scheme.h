// The schemes: what a model file begins with, and the program that runs it. A new scheme adds a row.
#pragma once

#include <cstdint>

struct Scheme {
    const char* file;      // as messages call such a file
    const char* program;   // runs it
    const char* exporter;  // makes it: the arguments of python -m export
    uint32_t magic;        // a file's first word
    int version;           // and its second
    // KuiperLLama's header has head_dim where llama2.c's has group_size, and group_size behind it. Its files
    // have no extension block, and are Qwen3.
    bool is_kuiper = false;
    bool may_be_static = false;  // activations may have scales of their own in the file
    bool has_layout = false;     // the header says how each kind of matrix is stored (layout.h)
    bool has_experts = false;    // a mixture of experts: the header has ModelConfig::moe
    int alignment = 1;           // bytes: every tensor begins at a multiple of it
};

// "ak42", llama2.c's version 2
constexpr Scheme scheme_q8{"a Q8 file", "runq", "q8", 0x616b3432, 2};
// "ak88"
constexpr Scheme scheme_w8a8{"a W8A8 file",         "runq_w8a8", "w8a8 --calib text.txt", 0x616b3838, 1,
                             /*is_kuiper*/ false,
                             /*may_be_static*/ true};
// "ak48", KuiperLLama's Qwen3 AWQ
constexpr Scheme scheme_awq{"an AWQ file", "runq_awq", "awq --calib text.txt",
                            0x616b3438,    5,          /*is_kuiper*/ true};
// "akgp"
constexpr Scheme scheme_gptq{"a GPTQ file",           "runq_gptq", "gptq --calib text.txt", 0x616b6770, 1,
                             /*is_kuiper*/ false,
                             /*may_be_static*/ false,
                             /*has_layout*/ true,
                             /*has_experts*/ false,
                             /*alignment*/ 64};

// "akme"
constexpr Scheme scheme_moe{"a MoE file",
                            "runq_moe",
                            "moe --calib text.txt",
                            0x616b6d65,
                            1,
                            /*is_kuiper*/ false,
                            /*may_be_static*/ false,
                            /*has_layout*/ false,
                            /*has_experts*/ true,
                            /*alignment*/ 64};

constexpr Scheme schemes[] = {scheme_q8, scheme_w8a8, scheme_awq, scheme_gptq, scheme_moe};
