// In the place of engine/cpu/quantize.h where a program is compiled for products in RTL (make rtl-story): its
// folder stands before the repository's among those that are searched. All is as there, but that
// int8_quantize is a function of hw/sim/programs.cpp.
#pragma once

#define int8_quantize int8_quantize_by_cpu
#include_next "engine/cpu/quantize.h"
#undef int8_quantize

bool int8_quantize(int8_t* codes, float* scales, int32_t* sums, const float* x, int n, int group_size,
                   const float* fixed_scale = nullptr);
