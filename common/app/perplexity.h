// --ppl: perplexity of a text, over the same windows as golden/perplexity.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/app/generate.h"
#include "common/app/session.h"
#include "common/app/streams.h"
#include "common/os/signals.h"
#include "common/os/threads.h"

struct Perplexity {
    double nll = 0;  // negative log-likelihood, summed over the scored tokens
    size_t n_scored = 0;
    double value() const { return std::exp(nll / static_cast<double>(n_scored)); }
};

// -log softmax(logits)[id], in double
inline double negative_log_likelihood(std::span<const float> logits, int id) {
    const auto max = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
    return std::log(sum) + max - static_cast<double>(logits[static_cast<size_t>(id)]);
}

// The ids are cut into windows that fill the context, each run from position 0; every token that has another
// before it in its window is scored. A model whose texts begin with a BOS (bos_id >= 0) gets one in front of
// every window, which takes a position. `progress` hears how many ids are done. Throws NotFinite.
inline Perplexity perplexity(const Model& m, std::span<const int> ids, int bos_id, int context,
                             const std::function<void(size_t)>& progress) {
    Perplexity result;
    const size_t bos = bos_id >= 0 ? 1 : 0, length = static_cast<size_t>(context) - bos,
                 vocab = static_cast<size_t>(m.config.vocab_size);
    std::vector<int> window;
    std::vector<double> nll;
    for (size_t begin = 0; begin < ids.size() && length > 0; begin += length) {
        const std::span<const int> part = ids.subspan(begin, std::min(length, ids.size() - begin));
        window.assign(bos, bos_id);
        window.insert(window.end(), part.begin(), part.end());
        // Token i predicts token i + 1, so the last one need not be run.
        for (size_t i = 0; i + 1 < window.size(); i += nll.size()) {
            if (interrupted) return result;
            nll.resize(std::min(static_cast<size_t>(m.max_chunk), window.size() - 1 - i));
            const std::span<const float> logits =  // (n, vocab_size)
                m.forward(std::span(window).subspan(i, nll.size()), static_cast<int>(i), true);
            parallel_for(int64_t(nll.size()), [&](size_t k) {
                const auto row = logits.subspan(k * vocab, vocab);
                const bool good = all_finite(row.data(), vocab);
                nll[k] = good ? negative_log_likelihood(row, window[i + k + 1]) : NAN;
            });
            for (size_t k = 0; k < nll.size(); k++) {  // here, so that the threads do not change the sum
                if (std::isnan(nll[k])) {
                    window.resize(i + nll.size());
                    throw NotFinite(i + k, window);
                }
                result.nll += nll[k];
            }
            result.n_scored += nll.size();
            progress(begin + i + nll.size() + 1 - bos);
        }
    }
    return result;
}

inline Stop run_perplexity(Session& s, const Options& o, const Streams& io) {
    const Tokenizer& tokenizer = need_tokenizer(s.model, "--ppl");
    std::string text;
    TextFile("--ppl", *o.ppl, io.in).read(text, SIZE_MAX);
    const std::vector<int> ids = tokenizer.encode(text, false);
    const int bos_id = tokenizer.encode("", true).empty() ? -1 : s.model.config.bos_id;
    const bool terminal = is_terminal(io.err);
    make_room(s, std::min(ids.size(), static_cast<size_t>(s.context)));
    const double start = seconds_now();
    const Perplexity p = perplexity(s.model, ids, bos_id, s.context, [&](size_t n) {
        if (terminal) note(io.err, format("\r%zu of %zu tokens", n, ids.size()));
    });
    if (terminal) note(io.err, "\r\033[K");
    s.statistics.n_prefill = static_cast<int>(p.n_scored);
    s.statistics.prefill_seconds = seconds_now() - start;
    if (p.n_scored > 0) {
        put(io.out,
            format("perplexity %.4f over %zu tokens (windows of %d)\n", p.value(), p.n_scored, s.context));
    } else if (!interrupted) {
        throw std::runtime_error(format("--ppl: '%s' is %zu tokens long, too short with a context of %d",
                                        o.ppl->c_str(), ids.size(), s.context));
    }
    return interrupted ? Stop::ctrl_c : Stop::end_of_text;
}
