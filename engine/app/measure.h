// What is measured: perplexity (--ppl) and speed (--bench).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/os/memory.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"
#include "engine/text/tokenizer.h"

// ----------------------------------------------------------------------------
// Perplexity of a text, over the same windows as golden/perplexity.py

struct Perplexity {
    double nll = 0;  // negative log-likelihood, summed over the scored tokens
    size_t n_scored = 0;
    double value() const { return std::exp(nll / double(n_scored)); }
};

// -log softmax(logits)[id], in double
inline double negative_log_likelihood(std::span<const float> logits, int id) {
    const auto max = double(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double(logit) - max);
    return std::log(sum) + max - double(logits[size_t(id)]);
}

// The ids are cut into windows that fill the context, each run from position 0; every token that has another
// before it in its window is scored. A model whose texts begin with a BOS (bos_id >= 0) gets one in front of
// every window, which takes a position. `progress` hears how many ids are done. Throws NotFinite, and as
// make_room().
Perplexity perplexity(Session& s, std::span<const int> ids, int bos_id, const auto& progress) {
    Model& m = s.model;
    Perplexity result;
    const size_t bos = bos_id >= 0 ? 1 : 0, length = size_t(s.context) - bos,
                 vocab = size_t(m.config.vocab_size);
    std::vector<double> nll;
    for (size_t begin = 0; length > 0 && begin < ids.size(); begin += length) {
        const auto part = ids.subspan(begin, std::min(length, ids.size() - begin));
        make_room(s, part.size());
        std::vector<int> window(part.begin(), part.end());
        window.insert(window.begin(), bos, bos_id);
        // Token i predicts token i + 1, so the last one need not be run.
        for (size_t i = 0; i + 1 < window.size(); i += nll.size()) {
            if (interrupted) return result;
            nll.resize(std::min(size_t(m.max_chunk), window.size() - 1 - i));
            const std::span<const float> logits =  // (n, vocab_size)
                m.forward(std::span(window).subspan(i, nll.size()), int(i), int(nll.size()));
            parallel_for(int64_t(nll.size()), [&](size_t k) {
                const auto row = logits.subspan(k * vocab, vocab);
                nll[k] =
                    all_finite(row.data(), vocab) ? negative_log_likelihood(row, window[i + k + 1]) : NAN;
            });
            for (size_t k = 0; k < nll.size(); k++) {  // here, so that the threads do not change the sum
                if (std::isnan(nll[k])) {
                    window.resize(i + nll.size());
                    throw NotFinite(i + k, window);
                }
                result.nll += nll[k];
            }
            add_to_digest(s, logits);
            result.n_scored += nll.size();
            progress(begin + i + nll.size() + 1 - bos);
        }
    }
    return result;
}

// The ids of the text at `path`, as far as there is memory to encode it.
inline std::vector<int> file_ids(const Model& m, const std::string& path, std::FILE* in) {
    const Tokenizer& tokenizer = need_tokenizer(m, "--ppl");
    const size_t limit = text_limit(SIZE_MAX);
    const std::optional<std::string> text = TextFile("--ppl", path, in).text(limit);
    if (!text) throw std::runtime_error(too_long("--ppl: '" + path + "'", limit));
    return tokenizer.encode(*text, false);
}

inline void run_perplexity(Session& s, const Options& o, std::span<const int> ids, const Streams& io) {
    const int bos_id = s.model.tokenizer->encode("", true).empty() ? -1 : s.model.config.bos_id;
    const bool terminal = is_terminal(io.err);
    const double start = seconds_now();
    const Perplexity p = perplexity(s, ids, bos_id, [&](size_t n) {
        if (terminal) note(io.err, format("\r%zu tokens", n));
    });
    if (terminal) note(io.err, "\r\033[K");
    s.statistics.n_prefill = int(p.n_scored);
    s.statistics.prefill_seconds = seconds_now() - start;
    if (p.n_scored > 0) {
        put(io.out,
            format("perplexity %.4f over %zu tokens (windows of %d)\n", p.value(), p.n_scored, s.context));
    } else if (!interrupted) {
        throw std::runtime_error(format("--ppl: '%s' is %zu tokens long, too short with a context of %d",
                                        o.ppl->c_str(), ids.size(), s.context));
    }
}

// ----------------------------------------------------------------------------
// Tokens per second of a prompt and of decoding, against what the memory can deliver

// The line that says where `seconds` went, given what the program had counted before and after them; empty if
// it counts nothing.
inline std::string time_split(const char* what, double seconds, const PhaseSeconds& before,
                              const PhaseSeconds& after) {
    const double matmul = after.matmul - before.matmul, attention = after.attention - before.attention;
    if (matmul + attention == 0) return "";
    return format("%s took %.6f s: matmul %.6f, attention %.6f, rest %.6f\n", what, seconds, matmul,
                  attention, std::max(0.0, seconds - matmul - attention));
}

inline void run_bench(Session& s, const Options& o, const Streams& io) {
    const auto [n_prompt, n_generated, depth] = *o.bench;
    const int64_t n = int64_t{n_prompt} + n_generated + depth;
    if (n > s.context)
        fail<UsageError>("--bench: ", n_prompt, " + ", n_generated, " tokens",
                         depth > 0 ? format(" behind %d", depth) : "", " do not fit in the context of ",
                         s.context);
    // Which tokens they are makes no difference to the time; these are spread over the vocabulary.
    std::vector<int> ids(size_t(n), 0);
    for (size_t i = 0; i < ids.size(); i++) ids[i] = int((i + 1) * 7919 % size_t(s.model.config.vocab_size));
    const auto prompt = std::span<const int>(ids).subspan(size_t(depth), size_t(n_prompt));
    make_room(s, ids.size());
    s.sampler = Sampler{0, 0, 1, {}};
    // Not timed: reads the file into memory and touches each page of the KV cache (256 positions), except
    // those that are filled, where a pass would read all positions before its own.
    const bool fills = depth > 0 && s.model.fill_cache(depth);
    for (int pos = fills ? depth : 0; pos < n && !interrupted; pos += 128)
        s.model.forward(std::span(ids).first(1), pos, 1);
    // Not timed either: at its first runs a device loads kernels and captures graphs.
    for (int i = 0; s.model.finds_best && i < 2; i++) {
        if (n_generated > 0) s.model.forward_greedy(std::span(ids).first(1), 0);
        Session first{s.model, s.sampler, s.context};
        if (n_prompt > 0) prefill(first, prompt);
    }
    if (depth > 0 && !fills) prefill(s, std::span(ids).first(size_t(depth)));
    s.held.assign(ids.begin(), ids.begin() + depth);
    s.statistics = {};
    const PhaseSeconds at_start = phase_seconds;
    if (n_prompt > 0) prefill(s, prompt);
    const PhaseSeconds at_decode = phase_seconds;
    Statistics& t = s.statistics;
    t.peak_memory = peak_memory_bytes();
    // The memory bus of a shared machine may be half as fast in the next second. So between any two tokens
    // all threads read as many bytes as a token does, and decode's average is compared with that average; on
    // a device, with what it can copy.
    const bool decodes = n_generated > 0 && !interrupted;
    const double device_limit = decodes ? s.model.device_bandwidth() : 0;
    const bool reads = decodes && device_limit == 0;
    const ReadBuffer buffer(reads ? std::min<uint64_t>(s.model.weight_bytes_per_token, 1 << 30) : 0,
                            threads().size());
    double read_seconds = 0;
    for (size_t i = size_t(depth) + size_t(n_prompt); i < ids.size() && !interrupted; i++) {
        decode(s, std::span(ids).subspan(i, 1));
        if (reads) read_seconds += buffer.seconds_to_read();
    }
    const double read_limit = per_second(double(t.n_decode) * double(buffer.size()), read_seconds);
    t.peak_memory = std::max(t.peak_memory, peak_memory_bytes() - buffer.size());
    std::string text;
    if (t.n_prefill > 0) {
        const double rate = per_second(t.n_prefill, t.prefill_seconds);
        // GMAC in the layers: only the last token goes through the classifier.
        text += format("prefill %d tokens: %.2f tokens/s, %.2f GMAC/s, at most %d tokens at a time\n",
                       t.n_prefill, rate, rate * double(s.model.macs_per_token) / 1e9, s.model.max_chunk);
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
    text += time_split("prefill", t.prefill_seconds, at_start, at_decode);
    text += time_split("decode", t.decode_seconds, at_decode, phase_seconds);
    put(io.out, text + format("memory %.3f GB at its peak\n", double(t.peak_memory) / 1e9));
}
