#include "hw/sim/rtl_session.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {
double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace

RtlSession::RtlSession() {
    if (const char* every = std::getenv("RTL_WEIGHT_EVERY"))
        core.stalls.weight_every = std::max(1, std::atoi(every));
    if (const char* path = std::getenv("RTL_LOG")) {
        log_ = std::fopen(path, "a");
        if (log_ == nullptr) throw std::runtime_error(std::string("RTL_LOG: cannot write ") + path);
    }
}
RtlSession::~RtlSession() {
    if (log_ != nullptr) std::fclose(log_);
}

void RtlSession::log(const char* what, int n_tokens, int n_rows, int n_cols, int group_size, double seconds) {
    if (log_ == nullptr) return;
    const RtlCounters c = core.counters();
    std::fprintf(
        log_,
        "{\"command\": \"%s\", \"rows\": %d, \"cols\": %d, \"weight_every\": %d, \"n_tokens\": %d, "
        "\"n_outputs\": %d, \"n_inputs\": %d, \"group_size\": %d, \"cycles\": %u, \"sum_cycles\": %u, "
        "\"weight_beats\": %u, \"weight_waits\": %u, \"weight_stalls\": %u, \"result_stalls\": %u, "
        "\"seconds\": %.6f}\n",
        what, core.rows, core.cols, core.stalls.weight_every, n_tokens, n_rows, n_cols, group_size, c.cycles,
        c.sum_cycles, c.weight_beats, c.weight_waits, c.weight_stalls, c.result_stalls, seconds);
    std::fflush(log_);
}

void RtlSession::quantize(int8_t* codes, float* scales, const float* x, int n_tokens, int n_cols,
                          int group_size, const float* fixed_scale) {
    const size_t n_groups = size_t(n_cols / group_size);
    for (int t = 0; t < n_tokens; t += core.max_tokens) {
        const int n = std::min(core.max_tokens, n_tokens - t);
        const double start = now();
        core.quantize(x + size_t(t) * size_t(n_cols), n, n_cols, group_size, fixed_scale);
        log("quantize", n, 0, n_cols, group_size, now() - start);
        int8_t* batch = codes + size_t(t) * size_t(n_cols);
        float* batch_scales = scales + size_t(t) * n_groups;
        core.read_activations(batch, batch_scales);
        held_codes_.assign(batch, batch + size_t(n) * size_t(n_cols));
        held_scales_.assign(batch_scales, batch_scales + size_t(n) * n_groups);
        held_cols_ = n_cols, held_group_ = group_size;
    }
}

void RtlSession::multiply(const int8_t* codes, const float* scales, int n_tokens, int n_cols, int group_size,
                          std::span<const RtlProduct> products) {
    const size_t n_groups = size_t(n_cols / group_size);
    for (int t = 0; t < n_tokens; t += core.max_tokens) {
        const int n = std::min(core.max_tokens, n_tokens - t);
        const int8_t* batch = codes + size_t(t) * size_t(n_cols);
        const float* batch_scales = scales + size_t(t) * n_groups;
        const size_t n_codes = size_t(n) * size_t(n_cols), n_scales = size_t(n) * n_groups;
        const bool held = held_cols_ == n_cols && held_group_ == group_size &&
                          held_codes_.size() == n_codes &&
                          std::equal(held_codes_.begin(), held_codes_.end(), batch) &&
                          std::memcmp(held_scales_.data(), batch_scales, n_scales * sizeof(float)) == 0;
        if (!held) {
            core.load(batch, batch_scales, n, n_cols, group_size);
            held_codes_.assign(batch, batch + n_codes),
                held_scales_.assign(batch_scales, batch_scales + n_scales);
            held_cols_ = n_cols, held_group_ = group_size;
        }
        for (const RtlProduct& p : products) {
            const double start = now();
            const size_t n_rows = size_t(p.matrix->n_rows);
            core.multiply(*p.matrix, p.out + size_t(t) * n_rows, n_rows);
            log("multiply", n, p.matrix->n_rows, n_cols, group_size, now() - start);
        }
    }
}
