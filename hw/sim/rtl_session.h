// Products of any number of tokens on the simulated core, in batches that it holds, and a log of what it
// counted.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "hw/sim/matmul_rtl.h"

struct RtlProduct {
    float* out;  // (n_tokens, matrix->n_rows)
    const RtlMatrix* matrix;
};

class RtlSession {
  public:
    RtlSession();  // reads RTL_LOG and RTL_WEIGHT_EVERY
    ~RtlSession();
    RtlSession(const RtlSession&) = delete;
    RtlSession& operator=(const RtlSession&) = delete;

    MatmulRtl core;

    // codes (n_tokens, n_cols) and scales (n_tokens, n_cols / group_size) of x, by the core's quantizer.
    // fixed_scale: if not null, the scale of all.
    void quantize(int8_t* codes, float* scales, const float* x, int n_tokens, int n_cols, int group_size,
                  const float* fixed_scale);

    // Products of activations with matrices that have their n_cols and group_size. What the core holds
    // already is not loaded again.
    void multiply(const int8_t* codes, const float* scales, int n_tokens, int n_cols, int group_size,
                  std::span<const RtlProduct> products);

  private:
    void log(const char* what, int n_tokens, int n_rows, int n_cols, int group_size, double seconds);
    std::FILE* log_ = nullptr;
    // What the core's memory of activations has.
    std::vector<int8_t> held_codes_;
    std::vector<float> held_scales_;
    int held_cols_ = 0, held_group_ = 0;
};
