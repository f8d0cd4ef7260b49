// What the programs do once their model runs: generate, chat, measure perplexity, measure speed.
//
// A program gives its name and a function that loads a model; the rest is here and is the same whatever the
// scheme. Text goes to standard output and nothing else does. Every error becomes one line on standard error
// and an exit code, in run_command_line().
#pragma once

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "machine.h"
#include "model_file.h"
#include "options.h"
#include "sampler.h"
#include "tokenizer.h"
#include "trace.h"

// ----------------------------------------------------------------------------
// Between a program and its command line

// Where a program's time goes, added up since it was loaded; what is left over is everything else.
struct PhaseSeconds {
    double matmul = 0;
    double attention = 0;
};

// What a program hands to the command line: one loaded model, ready to run.
struct Model {
    ModelConfig config;
    std::optional<Tokenizer> tokenizer;    // none in files made by other programs, or in a build without it
    std::string scheme;                    // e.g. "Q8, int8 groups of 64"
    std::string kernel;                    // the matmul path in use, e.g. "avx2"
    uint64_t file_bytes = 0;               // the whole model file
    uint64_t weight_bytes = 0;             // the weights in it
    uint64_t weight_bytes_per_token = 0;   // those that one decode step reads
    uint64_t kv_bytes_per_position = 0;    // of the KV cache
    uint64_t macs_per_token = 0;           // multiply-adds of one token in the layers' matrices
    const PhaseSeconds* phases = nullptr;  // lives as long as the model
    // Runs tokens[i] at position pos + i. Returns logits (n_rows, vocab_size): a row for every token with
    // all_logits, else one row, the last token's. They are valid until the next call. At most max_chunk
    // tokens with all_logits; without, any number.
    std::function<std::span<const float>(std::span<const int> tokens, int pos, bool all_logits)> forward;
    int max_chunk = 64;

    // Of programs that run on a device with its own memory; empty elsewhere.
    // As forward() for the last token, but the index of the largest logit: the device finds it itself.
    std::function<int(std::span<const int> tokens, int pos)> forward_greedy;
    std::function<uint64_t()> device_bytes;    // the most memory that was taken there
    std::function<double()> device_bandwidth;  // bytes/s it can read; 0 if its memory is this machine's
};

struct Program {
    const char* name;
    const char* summary;                          // one line for --help
    Model (*load)(const Options&, Trace* trace);  // trace is null unless there is a --trace
    std::span<const OwnOption> options{};         // that the other programs do not have
};

// The context that a run uses: --ctx, or by default what the model was made for but at most 4096 positions.
inline int context_length(const Options& options, const ModelConfig& config) {
    if (options.ctx == 0) return std::min(4096, config.max_seq_len);
    if (options.ctx > config.max_seq_len) {
        throw UsageError("--ctx: " + std::to_string(options.ctx) + " is more than the model's max_seq_len, " +
                         std::to_string(config.max_seq_len));
    }
    return options.ctx;
}

// ----------------------------------------------------------------------------
// Input, output, Ctrl-C

struct Streams {
    std::FILE *in, *out, *err;  // standard input, output and error, or a test's own
};

// The reader of our output has gone away: nothing is wrong, and there is no one to tell.
struct OutputClosed {};

// Writes at once, so that a token shows as soon as it is there and a full disk is noticed. By write() and not
// through the stream's buffer, because only write() can go on after a signal without losing anything.
inline void put(std::FILE* out, std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = write(fileno(out), text.data(), text.size());
        if (n >= 0) {
            text.remove_prefix(static_cast<size_t>(n));
        } else if (errno == EPIPE) {
            throw OutputClosed();
        } else if (errno != EINTR) {
            throw std::runtime_error(std::string("cannot write the output: ") + std::strerror(errno));
        }
    }
}

// For standard error: when that is closed there is no one to tell, and the run goes on.
inline void note(std::FILE* err, std::string_view text) {
    try {
        put(err, text);
    } catch (...) {
        return;
    }
}

// The whole file; "-" is standard input.
inline std::string read_text(const std::string& option, const std::string& path, std::FILE* in) {
    const bool standard_input = path == "-";
    std::FILE* file = standard_input ? in : std::fopen(path.c_str(), "rb");
    std::string text;
    bool ok = file != nullptr;
    if (ok) {
        char buffer[1 << 16];
        for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
        ok = std::ferror(file) == 0;
    }
    const int reason = errno;
    if (file != nullptr && !standard_input) std::fclose(file);
    if (!ok) throw std::runtime_error(option + ": cannot read '" + path + "': " + std::strerror(reason));
    return text;
}

// A line without its end. False at the end of the input, and when Ctrl-C interrupts the wait for it.
inline bool read_line(std::FILE* in, std::string& line) {
    line.clear();
    int c;
    while ((c = std::getc(in)) != EOF && c != '\n') line.push_back(static_cast<char>(c));
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return c == '\n' || (!line.empty() && std::ferror(in) == 0);
}

inline volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C only sets `interrupted`; SA_RESETHAND makes the second one kill. Without SA_RESTART the
// first also ends a wait for input.
inline void catch_ctrl_c() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = SA_RESETHAND;
    sigaction(SIGINT, &action, nullptr);
}

// ----------------------------------------------------------------------------
// Running a model, with a clock on it

struct Statistics {
    int n_prefill = 0;  // tokens
    double prefill_seconds = 0;
    int n_decode = 0;  // tokens run one at a time: one less than are generated, as the last is not run
    double decode_seconds = 0;
    uint64_t peak_memory = 0;  // bytes; 0: ask when the statistics are printed
    double decode_bytes = 0;   // read from memory: weights, and the keys and values of all earlier positions
};

struct Session {
    const Model& model;
    Sampler sampler;
    int context = 0;          // positions
    int max_new = INT_MAX;    // tokens generated in one go
    std::vector<int> held{};  // the tokens whose keys and values are in the KV cache, from position 0 on
    Statistics statistics{};
};

enum class Stop { end_of_text, steps, context, ctrl_c };

// What comes after tokens that were run.
struct Next {
    std::span<const float> logits;  // (vocab_size,), or empty and then
    int most_probable = -1;
};

// Runs `tokens` after those held. `greedy`: logits are wanted for nothing but the largest of them.
inline Next feed(Session& s, std::span<const int> tokens, bool decode, bool greedy) {
    const double start = seconds_now();
    const int pos = static_cast<int>(s.held.size());
    Next next;
    if (greedy && s.model.forward_greedy) {
        next.most_probable = s.model.forward_greedy(tokens, pos);
    } else {
        next.logits = s.model.forward(tokens, pos, false);
    }
    const double seconds = seconds_now() - start;
    s.held.insert(s.held.end(), tokens.begin(), tokens.end());
    if (decode) {
        s.statistics.n_decode++;
        s.statistics.decode_seconds += seconds;
        s.statistics.decode_bytes +=
            static_cast<double>(s.model.weight_bytes_per_token) +
            static_cast<double>(s.model.kv_bytes_per_position) * static_cast<double>(s.held.size());
    } else {
        s.statistics.n_prefill += static_cast<int>(tokens.size());
        s.statistics.prefill_seconds += seconds;
    }
    return next;
}

// Continues `ids` (1 to `context` of them) token by token, each appended to `ids` and handed to `emit`.
// What the KV cache already holds of `ids` is not run again.
inline Stop generate(Session& s, std::vector<int>& ids, const std::function<void(int)>& emit) {
    size_t same = 0;  // the last token always runs, for its logits
    while (same < s.held.size() && same + 1 < ids.size() && s.held[same] == ids[same]) same++;
    s.held.resize(same);

    Next next;
    while (s.held.size() < ids.size()) {
        if (interrupted) return Stop::ctrl_c;
        // A few chunks at a time, to look for Ctrl-C now and then
        const size_t n = std::min(8 * static_cast<size_t>(s.model.max_chunk), ids.size() - s.held.size());
        next = feed(s, std::span(ids).subspan(s.held.size(), n), false, s.sampler.greedy());
    }
    const std::vector<int>& eos_ids = s.model.config.eos_ids;
    for (int n_new = 0;; n_new++) {
        if (interrupted) return Stop::ctrl_c;
        if (n_new == s.max_new) return Stop::steps;
        if (ids.size() == static_cast<size_t>(s.context)) return Stop::context;
        if (n_new > 0) next = feed(s, std::span(&ids.back(), 1), true, s.sampler.greedy());
        const int id = next.logits.empty() ? next.most_probable : s.sampler.sample(next.logits);
        ids.push_back(id);
        emit(id);
        if (std::find(eos_ids.begin(), eos_ids.end(), id) != eos_ids.end()) return Stop::end_of_text;
    }
}

// Prints tokens as they come: as text in whole UTF-8 characters, or as ids separated by commas.
class TokenPrinter {
  public:
    TokenPrinter(std::FILE* out, const Model& model, bool print_ids)
        : out_(out), tokenizer_(model.tokenizer && !print_ids ? &*model.tokenizer : nullptr) {}

    bool prints_text() const { return tokenizer_ != nullptr; }

    void token(int id) {
        if (tokenizer_ == nullptr) {
            put(out_, (n_ids_++ > 0 ? "," : "") + std::to_string(id));
        } else if (!tokenizer_->is_special(id)) {
            put(out_, utf8_.push(tokenizer_->token_bytes(id)));
        }
    }
    void end() { put(out_, utf8_.flush() + "\n"); }

  private:
    std::FILE* out_;
    const Tokenizer* tokenizer_;  // null: print ids
    Utf8Stream utf8_;
    int n_ids_ = 0;
};

// ----------------------------------------------------------------------------
// Statistics and --info

inline std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* pattern, ...) {
    va_list arguments, again;
    va_start(arguments, pattern);
    va_copy(again, arguments);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
    std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    va_end(arguments);
    return text;
}

inline const char* arch_name(Arch arch) { return arch == Arch::llama ? "llama" : "qwen3"; }

inline double per_second(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

// `sampling` is empty where nothing was drawn.
inline void print_statistics(std::FILE* err, const Session& s, int n_threads, const std::string& sampling) {
    const Model& m = s.model;
    const ModelConfig& c = m.config;
    const Statistics& t = s.statistics;
    auto size = [](uint64_t bytes) {
        const auto b = static_cast<double>(bytes);
        return bytes < 1000000000 ? format("%.1f MB", b / 1e6) : format("%.2f GB", b / 1e9);
    };
    std::string text = format("model     %s, %d layers, dim %d, vocabulary %d; %s; %s\n", arch_name(c.arch),
                              c.n_layers, c.dim, c.vocab_size, m.scheme.c_str(), size(m.file_bytes).c_str());
    text += format("run       %s, %d thread%s, context %d, peak memory %s", m.kernel.c_str(), n_threads,
                   n_threads == 1 ? "" : "s", s.context,
                   size(t.peak_memory > 0 ? t.peak_memory : peak_memory_bytes()).c_str());
    if (m.device_bytes) text += ", of the device " + size(m.device_bytes());
    text += "\n";
    if (!sampling.empty()) text += "sampling  " + sampling + "\n";
    if (t.n_prefill > 0) {
        text += format("prefill   %d tokens in %.2f s, %.1f tokens/s\n", t.n_prefill, t.prefill_seconds,
                       per_second(t.n_prefill, t.prefill_seconds));
    }
    if (t.n_decode > 0) {
        text += format("decode    %d tokens in %.2f s, %.1f tokens/s, %.1f GB/s\n", t.n_decode,
                       t.decode_seconds, per_second(t.n_decode, t.decode_seconds),
                       per_second(t.decode_bytes, t.decode_seconds) / 1e9);
    }
    note(err, text);
}

inline void print_info(std::FILE* out, const Model& m, const Options& o, int context) {
    const ModelConfig& c = m.config;
    std::string text;
    auto line = [&](const char* field, const std::string& value) {
        text += format("%-24s%s\n", field, value.c_str());
    };
    auto number = [&](const char* field, uint64_t value) { line(field, std::to_string(value)); };
    auto integer = [&](const char* field, int value) { line(field, std::to_string(value)); };
    line("file", o.model_path);
    line("arch", arch_name(c.arch));
    line("scheme", m.scheme);
    line("kernel", m.kernel);
    integer("threads", o.threads);
    integer("dim", c.dim);
    integer("hidden_dim", c.hidden_dim);
    integer("n_layers", c.n_layers);
    integer("n_heads", c.n_heads);
    integer("n_kv_heads", c.n_kv_heads);
    integer("head_dim", c.head_dim);
    integer("vocab_size", c.vocab_size);
    integer("max_seq_len", c.max_seq_len);
    line("shared_classifier", c.shared_classifier ? "yes" : "no");
    line("group_size", c.group_size > 0 ? std::to_string(c.group_size) : "whole rows");
    line("norm_eps", format("%g", static_cast<double>(c.norm_eps)));
    line("rope_theta", format("%.9g", static_cast<double>(c.rope_theta)));
    const RopeScaling& r = c.rope_scaling;
    line("rope_scaling",
         r.llama3 ? format("llama3, factor %g, low_freq_factor %g, high_freq_factor %g, "
                           "original_max_position_embeddings %d",
                           static_cast<double>(r.factor), static_cast<double>(r.low_freq_factor),
                           static_cast<double>(r.high_freq_factor), r.original_max_position_embeddings)
                  : "none");
    line("bos_id", c.bos_id >= 0 ? std::to_string(c.bos_id) : "none");
    std::string eos;
    for (const int id : c.eos_ids) eos += (eos.empty() ? "" : ",") + std::to_string(id);
    line("eos_ids", eos.empty() ? "none" : eos);
    line("temperature", format("%g", static_cast<double>(c.temperature)));
    integer("top_k", c.top_k);
    line("top_p", format("%g", static_cast<double>(c.top_p)));
    line("tokenizer", m.tokenizer ? "yes" : "no");
    line("chat_template", m.tokenizer && m.tokenizer->has_chat() ? "yes" : "no");
    integer("context", context);
    number("file_bytes", m.file_bytes);
    number("weight_bytes", m.weight_bytes);
    number("weight_bytes_per_token", m.weight_bytes_per_token);
    number("kv_bytes_per_position", m.kv_bytes_per_position);
    number("kv_cache_bytes", m.kv_bytes_per_position * static_cast<uint64_t>(context));
    put(out, text);
}

// ----------------------------------------------------------------------------
// Generate mode

// The prompt of -i or -f as it was given, without reading the model. None if there is neither.
inline std::optional<std::string> prompt_text(const Options& o, std::FILE* in) {
    const std::string option = o.file ? "--file" : "--prompt", path = o.file.value_or("-");
    if (!o.file && o.prompt != "-") return o.prompt;
    std::string text = read_text(option, path, in);
    if (text.ends_with('\n')) text.pop_back();  // the file's last line has ended; the text may go on
    return text;
}

inline const Tokenizer& need_tokenizer(const Model& m, const std::string& option) {
    if (m.tokenizer) return *m.tokenizer;
#ifdef NO_TOKENIZER
    throw UsageError(option + ": this program was built without a tokenizer: use --ids");
#else
    throw UsageError(option + ": this file has no tokenizer: use --ids");
#endif
}

inline void check_fits(const std::string& option, size_t n_tokens, int context) {
    if (n_tokens > static_cast<size_t>(context)) {
        throw UsageError(option + ": the prompt is " + std::to_string(n_tokens) +
                         " tokens long, the context only " + std::to_string(context));
    }
}

// The prompt's token ids, at least one and at most the context's length.
inline std::vector<int> prompt_ids(const Model& m, const Options& o, const std::optional<std::string>& text,
                                   int context) {
    const ModelConfig& c = m.config;
    const std::string option = o.ids ? "--ids" : o.file ? "--file" : "--prompt";
    std::vector<int> ids;
    if (o.ids) {
        ids = *o.ids;
        for (const int id : ids) {
            if (id >= c.vocab_size) {
                throw UsageError("--ids: " + std::to_string(id) + " is outside the vocabulary, 0 to " +
                                 std::to_string(c.vocab_size - 1));
            }
        }
    } else if (text && !text->empty()) {
        ids = need_tokenizer(m, option).encode(*text, true);
    } else if (c.bos_id >= 0) {
        ids = {c.bos_id};
    }
    if (ids.empty()) {
        throw UsageError(option + ": the prompt is empty, and this model has no token to begin a text with");
    }
    check_fits(option, ids.size(), context);
    return ids;
}

inline Stop run_generate(Session& s, const Options& o, const std::optional<std::string>& text,
                         const Streams& io) {
    std::vector<int> ids = prompt_ids(s.model, o, text, s.context);
    TokenPrinter printer(io.out, s.model, o.print_ids);
    if (printer.prints_text()) {
        if (text) {
            Utf8Stream whole;  // a prompt that is not valid UTF-8 shows as the model gets to see it
            put(io.out, whole.push(*text));
            put(io.out, whole.flush());
        } else {
            for (const int id : ids) printer.token(id);
        }
    }
    const Stop stop = generate(s, ids, [&](int id) { printer.token(id); });
    printer.end();
    return stop;
}

// ----------------------------------------------------------------------------
// Chat mode

// A turn renders the whole conversation anew and runs what differs from the KV cache. That is usually just
// the turn itself, but not always: Qwen3's template drops the thoughts of earlier turns, so what followed
// them has moved. This way the model sees exactly what it would see in Hugging Face's apply_chat_template().
inline Stop run_chat(Session& s, const Options& o, std::optional<std::string> first, const Streams& io) {
    const Tokenizer& tokenizer = need_tokenizer(s.model, "--mode chat");
    if (!tokenizer.has_chat()) throw UsageError("--mode chat: this file has no chat template");
    const bool terminal = isatty(fileno(io.in)) == 1;

    std::vector<ChatMessage> messages;
    if (o.system) messages.push_back({"system", *o.system});
    while (true) {
        std::string user;
        if (first && !first->empty()) {
            user = *std::exchange(first, std::nullopt);
        } else {
            if (terminal) note(io.err, "> ");
            if (!read_line(io.in, user)) break;
            if (user.empty()) continue;
        }
        const bool opening = messages.size() == (o.system ? 1 : 0);
        messages.push_back({"user", user});
        std::vector<int> ids = tokenizer.encode(tokenizer.render_chat(messages, o.think, true), false);
        if (opening) check_fits("--mode chat", ids.size(), s.context);
        Stop stop = Stop::context;
        if (ids.size() < static_cast<size_t>(s.context)) {
            std::string answer;
            TokenPrinter printer(io.out, s.model, o.print_ids);
            stop = generate(s, ids, [&](int id) {
                printer.token(id);
                if (!tokenizer.is_special(id)) answer += tokenizer.token_bytes(id);
            });
            printer.end();
            messages.push_back({"assistant", answer});
        }
        if (stop == Stop::ctrl_c) return stop;
        if (stop == Stop::context) {
            note(io.err, format("the context of %d tokens is full: the conversation ends here\n", s.context));
            return stop;
        }
    }
    return interrupted ? Stop::ctrl_c : Stop::end_of_text;
}

// ----------------------------------------------------------------------------
// --ppl

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
// every window, which takes a position. `progress` hears how many ids are done.
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
#pragma omp parallel for schedule(static)
            for (size_t k = 0; k < nll.size(); k++) {
                nll[k] = negative_log_likelihood(logits.subspan(k * vocab, vocab), window[i + k + 1]);
            }
            for (const double x : nll) result.nll += x;  // here, so that the threads do not change the sum
            result.n_scored += nll.size();
            progress(begin + i + nll.size() + 1 - bos);
        }
    }
    return result;
}

inline Stop run_perplexity(Session& s, const Options& o, const Streams& io) {
    const Tokenizer& tokenizer = need_tokenizer(s.model, "--ppl");
    const std::string text = read_text("--ppl", *o.ppl, io.in);
    const std::vector<int> ids = tokenizer.encode(text, false);
    const int bos_id = tokenizer.encode("", true).empty() ? -1 : s.model.config.bos_id;
    const bool terminal = isatty(fileno(io.err)) == 1;
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

// ----------------------------------------------------------------------------
// --bench

// The line that says where `seconds` went, given what the program had counted before and after them.
inline std::string time_split(const char* what, double seconds, const PhaseSeconds& before,
                              const PhaseSeconds& after) {
    const double matmul = after.matmul - before.matmul, attention = after.attention - before.attention;
    return format("%s took %.6f s: matmul %.6f, attention %.6f, rest %.6f\n", what, seconds, matmul,
                  attention, std::max(0.0, seconds - matmul - attention));
}

inline Stop run_bench(Session& s, const Options& o, const Streams& io) {
    const auto [n_prompt, n_generated] = *o.bench;
    const int64_t n = int64_t{n_prompt} + n_generated;
    if (n > s.context) {
        throw UsageError(format("--bench: %d + %d tokens do not fit in the context of %d", n_prompt,
                                n_generated, s.context));
    }
    // Which tokens they are makes no difference to the time; these are spread over the vocabulary.
    std::vector<int> ids(static_cast<size_t>(n));
    for (size_t i = 0; i < ids.size(); i++) {
        ids[i] = static_cast<int>((i + 1) * 7919 % static_cast<size_t>(s.model.config.vocab_size));
    }
    const auto prompt = std::span<const int>(ids).first(static_cast<size_t>(n_prompt));
    // Not timed: brings the file into memory, and the KV cache into being, which grows by pages of some
    // hundred positions.
    for (int pos = 0; pos < n && !interrupted; pos += 128) {
        s.model.forward(std::span(ids).first(1), pos, false);
    }
    // Nor what a device loads and plans at first uses.
    for (int i = 0; s.model.forward_greedy && i < 2; i++) {
        if (n_generated > 0) s.model.forward_greedy(std::span(ids).first(1), 0);
        if (n_prompt > 0) s.model.forward_greedy(prompt, 0);
    }
    auto phases = [&] { return s.model.phases != nullptr ? *s.model.phases : PhaseSeconds{}; };
    const PhaseSeconds at_start = phases();
    if (n_prompt > 0) feed(s, prompt, false, true);
    const PhaseSeconds at_decode = phases();
    Statistics& t = s.statistics;
    t.peak_memory = peak_memory_bytes();
    // A machine may be half as fast in the next second, so between any two tokens it reads as many bytes, and
    // decode's average is compared with the average of that; on a device, with what it can copy.
    const double device_limit = n_generated > 0 && s.model.device_bandwidth ? s.model.device_bandwidth() : 0;
    std::optional<ReadBuffer> buffer;
    if (n_generated > 0 && device_limit == 0) {
        buffer.emplace(std::min<uint64_t>(s.model.weight_bytes_per_token, 1 << 30), o.threads);
    }
    double read_bytes = 0, read_seconds = 0;
    for (size_t i = prompt.size(); i < ids.size() && !interrupted; i++) {
        feed(s, std::span(ids).subspan(i, 1), true, true);
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
                           100 * rate / read_limit, read_limit / 1e9, o.threads);
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

// ----------------------------------------------------------------------------
// From argv to the exit code

// Throws whatever goes wrong. Returns the exit code.
inline int run(Options o, const Program& program, const Streams& io) {
    std::optional<std::string> text;
    if (!o.info && !o.ppl && !o.bench) text = prompt_text(o, io.in);  // before loading, which may take longer
    if (o.threads == 0) o.threads = physical_cores();
    omp_set_num_threads(o.threads);
    Trace trace;
    Model model = program.load(o, o.trace ? &trace : nullptr);
    const ModelConfig& c = model.config;
    const int context = context_length(o, c);
    if (o.info) {
        print_info(io.out, model, o, context);
        return 0;
    }
#ifdef NO_TOKENIZER
    model.tokenizer.reset();  // it could still decode, but such a program takes and prints ids
#endif

    const float temp = o.temp.value_or(c.temperature), top_p = o.top_p.value_or(c.top_p);
    const int top_k = o.top_k.value_or(c.top_k);
    const uint64_t seed = o.seed.value_or(static_cast<uint64_t>(
        std::chrono::system_clock::now().time_since_epoch() / std::chrono::microseconds(1)));
    Session s{model, Sampler(temp, top_k, top_p, seed), context};
    if (o.steps > 0) s.max_new = o.steps;
    std::string sampling =
        temp == 0 ? "temperature 0, the most probable token each time"
                  : format("temperature %g, top-k %d, top-p %g, seed %llu", static_cast<double>(temp), top_k,
                           static_cast<double>(top_p), static_cast<unsigned long long>(seed));
    if (o.ppl || o.bench) sampling.clear();

    catch_ctrl_c();  // not before: reading and loading just die
    const Stop stop = o.ppl                  ? run_perplexity(s, o, io)
                      : o.bench              ? run_bench(s, o, io)
                      : o.mode == Mode::chat ? run_chat(s, o, text, io)
                                             : run_generate(s, o, text, io);
    if (o.trace) trace.write(*o.trace);
    print_statistics(io.err, s, o.threads, sampling);
    return stop == Stop::ctrl_c ? 130 : 0;
}

// As run_command_line(), with streams of the caller's.
inline int run_with_streams(int argc, const char* const* argv, const Program& program, const Streams& io) {
    auto fail = [&](std::string message, int code) {
        for (char& ch : message) {
            if (static_cast<unsigned char>(ch) < ' ')
                ch = '?';  // a name may hold a line break; an error is one line
        }
        note(io.err, std::string(program.name) + ": " + message + "\n");
        return code;
    };
    try {
        Options options = parse_options(argc, argv, program.options);
        if (options.help) {
            put(io.out, format(help_text, program.name, program.summary, program.name,
                               own_help(program.options).c_str()));
            return 0;
        }
        if (options.version) {
            put(io.out, format("%s %s\n", program.name, program_version));
            return 0;
        }
        return run(std::move(options), program, io);
    } catch (const UsageError& e) {
        return fail(e.what(), 2);
    } catch (const OutputClosed&) {
        return 0;
    } catch (const std::bad_alloc&) {
        return fail("not enough memory", 1);
    } catch (const std::exception& e) {
        return fail(e.what(), 1);
    } catch (...) {
        return fail("unknown error", 1);
    }
}

// All of a program's main(). Returns the exit code; every error is one line on standard error.
inline int run_command_line(int argc, const char* const* argv, const Program& program) {
    return run_with_streams(argc, argv, program, {stdin, stdout, stderr});
}
