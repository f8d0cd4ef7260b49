// --ppl: perplexity of a text, over the same windows as golden/perplexity.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/generate.h"
#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/os/process.h"
#include "engine/os/threads.h"

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

// The ids of a file, a few at a time, however long it is.
class FileIds {
  public:
    FileIds(const Tokenizer& tokenizer, const std::string& path, std::FILE* in)
        : tokenizer_(tokenizer),
          file_("--ppl", path, in),
          name_("--ppl: a stretch of '" + path + "' that cannot be cut") {}

    // The next n ids; fewer only at the end.
    std::vector<int> next(size_t n) {
        while (ids_.size() - n_given_ < n && goes_on_) {
            ids_.erase(ids_.begin(), ids_.begin() + ptrdiff_t(std::exchange(n_given_, 0)));
            const TextLimit limit = memory_limit();
            goes_on_ = file_.read(text_, std::min(limit.n_bytes, std::max(piece, 4 * text_.size())));
            size_t n_done = text_.size();
            if (goes_on_) {
                n_done = tokenizer_.encode_beginning(text_, ids_);
            } else {
                const std::vector<int> last = tokenizer_.encode(text_, false);
                ids_.insert(ids_.end(), last.begin(), last.end());
            }
            text_.erase(0, n_done);
            if (text_.size() > limit.n_bytes) throw std::runtime_error(limit.line(name_));
        }
        const auto begin = ids_.begin() + ptrdiff_t(n_given_);
        n = std::min(n, ids_.size() - n_given_);
        n_given_ += n;
        return {begin, begin + ptrdiff_t(n)};
    }

  private:
    static constexpr size_t piece = 1 << 18;  // bytes

    const Tokenizer& tokenizer_;
    TextFile file_;
    std::string name_, text_{};  // text: what has been read and is no ids yet
    std::vector<int> ids_{};
    size_t n_given_ = 0;  // of these
    bool goes_on_ = true;
};

// The next n ids of a text; fewer only at its end.
using NextIds = std::function<std::vector<int>(size_t n)>;

// The ids are cut into windows that fill the context, each run from position 0; every token that has another
// before it in its window is scored. A model whose texts begin with a BOS (bos_id >= 0) gets one in front of
// every window, which takes a position. `progress` hears how many ids are done. Throws NotFinite.
inline Perplexity perplexity(const Model& m, const NextIds& next, int bos_id, int context,
                             const std::function<void(size_t)>& progress) {
    Perplexity result;
    const size_t bos = bos_id >= 0 ? 1 : 0, length = static_cast<size_t>(context) - bos,
                 vocab = static_cast<size_t>(m.config.vocab_size);
    std::vector<int> window;
    std::vector<double> nll;
    for (size_t begin = 0; length > 0; begin += length) {
        const std::vector<int> part = next(length);
        if (part.empty()) break;
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
    FileIds file(tokenizer, *o.ppl, io.in);
    const int bos_id = tokenizer.encode("", true).empty() ? -1 : s.model.config.bos_id;
    const bool terminal = is_terminal(io.err);
    size_t n_ids = 0;
    const auto next = [&](size_t n) {
        std::vector<int> ids = file.next(n);
        n_ids += ids.size();
        make_room(s, ids.size());
        return ids;
    };
    const double start = seconds_now();
    const Perplexity p = perplexity(s.model, next, bos_id, s.context, [&](size_t n) {
        if (terminal) note(io.err, format("\r%zu tokens", n));
    });
    if (terminal) note(io.err, "\r\033[K");
    s.statistics.n_prefill = static_cast<int>(p.n_scored);
    s.statistics.prefill_seconds = seconds_now() - start;
    if (p.n_scored > 0) {
        put(io.out,
            format("perplexity %.4f over %zu tokens (windows of %d)\n", p.value(), p.n_scored, s.context));
    } else if (!interrupted) {
        throw std::runtime_error(format("--ppl: '%s' is %zu tokens long, too short with a context of %d",
                                        o.ppl->c_str(), n_ids, s.context));
    }
    return interrupted ? Stop::ctrl_c : Stop::end_of_text;
}
