// --bench: tokens per second of a prompt and of decoding, against what the memory can deliver.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/os/machine.h"
#include "engine/os/process.h"

// The line that says where `seconds` went, given what the program had counted before and after them.
inline std::string time_split(const char* what, double seconds, const PhaseSeconds& before,
                              const PhaseSeconds& after) {
    const double matmul = after.matmul - before.matmul, attention = after.attention - before.attention;
    return format("%s took %.6f s: matmul %.6f, attention %.6f, rest %.6f\n", what, seconds, matmul,
                  attention, std::max(0.0, seconds - matmul - attention));
}

inline Stop run_bench(Session& s, const Options& o, const Streams& io) {
    const auto [n_prompt, n_generated, depth] = *o.bench;
    const int64_t n = int64_t{n_prompt} + n_generated + depth;
    if (n > s.context) {
        throw UsageError(format("--bench: %d + %d tokens%s do not fit in the context of %d", n_prompt,
                                n_generated, depth > 0 ? format(" behind %d", depth).c_str() : "",
                                s.context));
    }
    // Which tokens they are makes no difference to the time; these are spread over the vocabulary.
    std::vector<int> ids(static_cast<size_t>(n));
    for (size_t i = 0; i < ids.size(); i++) {
        ids[i] = static_cast<int>((i + 1) * 7919 % static_cast<size_t>(s.model.config.vocab_size));
    }
    const auto prompt = std::span<const int>(ids).subspan(size_t(depth), size_t(n_prompt));
    make_room(s, ids.size());
    // Not timed: this reads the file into memory and touches every page of the KV cache (256 positions), but
    // those that are filled, where each pass would read all of them before it.
    const bool fills = depth > 0 && s.model.fill_cache;
    if (fills) s.model.fill_cache(depth);
    for (int pos = fills ? depth : 0; pos < n && !interrupted; pos += 128) {
        s.model.forward(std::span(ids).first(1), pos, false);
    }
    // Not timed either: at its first runs a device loads kernels and captures graphs.
    for (int i = 0; s.model.forward_greedy && i < 2; i++) {
        if (n_generated > 0) s.model.forward_greedy(std::span(ids).first(1), 0);
        Session first{s.model, s.sampler, s.context};
        if (n_prompt > 0) prefill(first, prompt, true);
    }
    auto phases = [&] { return s.model.phases != nullptr ? *s.model.phases : PhaseSeconds{}; };
    // What stands before the prompt: where it would take long to run, numbers that take as long to read.
    if (fills && s.model.forward_greedy) s.model.fill_cache(depth);  // the runs have been in it
    if (depth > 0 && !fills) prefill(s, std::span(ids).first(size_t(depth)), true);
    s.held.assign(ids.begin(), ids.begin() + depth);
    s.statistics = {};
    const PhaseSeconds at_start = phases();
    if (n_prompt > 0) prefill(s, prompt, true);
    const PhaseSeconds at_decode = phases();
    Statistics& t = s.statistics;
    t.peak_memory = peak_memory_bytes();
    // The memory bus of a shared machine may be half as fast in the next second. So between any two tokens
    // all threads read as many bytes as a token does, and decode's average is compared with that average; on
    // a device, with what it can copy.
    const bool decodes = n_generated > 0 && !interrupted;
    const double device_limit = decodes && s.model.device_bandwidth ? s.model.device_bandwidth() : 0;
    std::optional<ReadBuffer> buffer;
    if (decodes && device_limit == 0) {
        buffer.emplace(std::min<uint64_t>(s.model.weight_bytes_per_token, 1 << 30), threads().size());
    }
    double read_bytes = 0, read_seconds = 0;
    for (size_t i = size_t(depth) + size_t(n_prompt); i < ids.size() && !interrupted; i++) {
        feed(s, std::span(ids).subspan(i, 1), Feed::decode, true);
        if (!buffer) continue;
        read_seconds += buffer->seconds_to_read();
        read_bytes += static_cast<double>(buffer->size());
    }
    const PhaseSeconds at_end = phases();
    const double read_limit = per_second(read_bytes, read_seconds);
    t.peak_memory = std::max(t.peak_memory, peak_memory_bytes() - (buffer ? buffer->size() : 0));
    std::string text;
    if (t.n_prefill > 0) {
        const double rate = per_second(t.n_prefill, t.prefill_seconds);
        text += format("prefill %d tokens: %.2f tokens/s", t.n_prefill, rate);
        if (s.model.macs_per_token > 0) {
            // In the layers: only the last token goes through the classifier.
            text += format(", %.2f GMAC/s, at most %d tokens at a time",
                           rate * static_cast<double>(s.model.macs_per_token) / 1e9, s.model.max_chunk);
        }
        text += "\n";
    }
    if (t.n_decode > 0) {
        const double rate = per_second(t.decode_bytes, t.decode_seconds);
        text += format("decode %d tokens: %.2f tokens/s, %.2f GB/s", t.n_decode,
                       per_second(t.n_decode, t.decode_seconds), rate / 1e9);
        if (device_limit > 0) {
            text += format(", %.0f%% of the %.2f GB/s that the device can copy", 100 * rate / device_limit,
                           device_limit / 1e9);
        } else if (read_limit > 0) {
            text += format(", %.0f%% of the %.2f GB/s that %d threads read between the tokens",
                           100 * rate / read_limit, read_limit / 1e9, threads().size());
            if (rate > read_limit) text += " (above 100%: what fits into the caches is read from there)";
        }
        text += "\n";
    }
    if (s.model.phases != nullptr) {
        if (t.n_prefill > 0) text += time_split("prefill", t.prefill_seconds, at_start, at_decode);
        if (t.n_decode > 0) text += time_split("decode", t.decode_seconds, at_decode, at_end);
    }
    put(io.out, text + format("memory %.3f GB at its peak\n", static_cast<double>(t.peak_memory) / 1e9));
    return interrupted ? Stop::ctrl_c : Stop::steps;
}
