// The command line of the programs, and what they do once their model is loaded: print what it says of
// itself, generate, chat, measure.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <exception>
#include <iomanip>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/chat.h"
#include "engine/app/measure.h"
#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/session.h"
#include "engine/app/streams.h"
#include "engine/app/trace.h"
#include "engine/os/files.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

void load_tokenizer(Model& model, const std::string& path) try {
    if (model.tokenizer_section.empty()) return;
    model.tokenizer = std::make_shared<Tokenizer>(model.tokenizer_section, model.config.vocab_size);
} catch (const std::runtime_error& e) {
    fail(path, ": ", e.what());
}

void print_info(std::FILE* out, const Model& m, const Options& o, int context) {
    const ModelConfig& c = m.config;
    std::ostringstream text;
    const auto line = [&](const char* field, const auto& value) {
        text << std::left << std::setw(24) << field << value << "\n";
    };
    const auto list = [](const std::vector<int>& numbers) {
        std::string all;
        for (const int n : numbers) all += (all.empty() ? "" : ",") + std::to_string(n);
        return all;
    };
    line("file", o.model_path);
    line("arch", arch_name(c.arch));
    line("scheme", m.scheme);
    line("kernel", m.kernel);
    line("threads", o.threads);
    line("dim", c.dim);
    line("hidden_dim", c.hidden_dim);
    line("n_layers", c.n_layers);
    line("n_heads", c.n_heads);
    line("n_kv_heads", c.n_kv_heads);
    line("head_dim", c.head_dim);
    line("vocab_size", c.vocab_size);
    line("max_seq_len", c.max_seq_len);
    line("shared_classifier", c.shared_classifier ? "yes" : "no");
    line("group_size", c.group_size > 0 ? std::to_string(c.group_size) : "whole rows");
    if (c.rotation_block > 0) line("rotation_block", c.rotation_block);
    for (const std::string& kind : m.formats) line("format", kind);
    line("norm_eps", c.norm_eps);
    line("rope_theta", format("%.9g", double(c.rope_theta)));
    const char* const rescalings[] = {"none", "llama3", "linear", "yarn"};
    std::string rope = rescalings[c.rope_type];
    if (c.rope_type > 0) rope += format(", factor %g", double(c.rope_factor));
    if (c.rope_type == 1 || c.rope_type == 3)
        rope += format(", low_freq_factor %g, high_freq_factor %g, original_max_position_embeddings %d",
                       double(c.low_freq_factor), double(c.high_freq_factor), c.original_max_position);
    if (c.rope_type == 3) rope += format(", attention_factor %g", double(c.attention_factor));
    line("rope_scaling", rope);
    line("bos_id", c.bos_id >= 0 ? std::to_string(c.bos_id) : "none");
    line("eos_ids", c.eos_ids.empty() ? "none" : list(c.eos_ids));
    line("temperature", c.temperature);
    line("top_k", c.top_k);
    line("top_p", c.top_p);
    if (c.min_p > 0) line("min_p", c.min_p);
    if (c.repetition_penalty != 1) line("repetition_penalty", c.repetition_penalty);
    line("tokenizer", m.tokenizer ? "yes" : "no");
    line("chat_template", m.tokenizer && m.tokenizer->has_chat() ? "yes" : "no");
    line("context", context);
    line("file_bytes", m.file_bytes);
    line("weight_bytes", m.weight_bytes);
    line("weight_bytes_per_token", m.weight_bytes_per_token);
    line("kv_bytes_per_position", m.kv_bytes_per_position);
    line("kv_cache_bytes", m.kv_bytes_per_position * uint64_t(context));
    line("memory_bytes", m.memory_bytes + m.trace_size.bytes(0, uint64_t(context)));
    for (const TensorInfo& t : m.tensors)
        line("tensor", t.name + " " + t.type + " [" + list(t.shape) + "] " + std::to_string(t.offset));
    put_foreign(out, text.str());  // a file's name may hold anything
}

namespace {

void print_statistics(std::FILE* err, const Session& s, const Options& o) {
    const Model& m = s.model;
    const ModelConfig& c = m.config;
    const Statistics& t = s.statistics;
    const Sampler& draw = s.sampler;
    const int n_threads = threads().size();
    std::string text =
        format("model     %s, %d layers, dim %d, vocabulary %d; %s; %s\n", arch_name(c.arch), c.n_layers,
               c.dim, c.vocab_size, m.scheme.c_str(), size_text(m.file_bytes).c_str());
    text += format("run       %s, %d thread%s, context %d, peak memory %s", m.kernel.c_str(), n_threads,
                   n_threads == 1 ? "" : "s", s.context,
                   size_text(t.peak_memory > 0 ? t.peak_memory : peak_memory_bytes()).c_str());
    if (m.device_bytes() > 0) text += ", of the device " + size_text(m.device_bytes());
    text += "\n";
    if (!o.ppl && !o.bench) {
        text += draw.temperature == 0 ? "sampling  temperature 0, the most probable token each time"
                                      : format("sampling  temperature %g, top-k %d, top-p %g, seed %llu",
                                               double(draw.temperature), draw.top_k, double(draw.top_p),
                                               static_cast<unsigned long long>(*o.seed));
        if (draw.min_p > 0 && draw.temperature != 0) text += format(", min-p %g", double(draw.min_p));
        if (draw.repetition_penalty != 1)
            text += format(", repetition penalty %g", double(draw.repetition_penalty));
        if (s.penalty_window) text += format(" within %zu tokens", *s.penalty_window);
        text += "\n";
    }
    if (t.n_prefill > 0) {
        text += format("prefill   %d tokens in %.2f s, %.1f tokens/s\n", t.n_prefill, t.prefill_seconds,
                       per_second(t.n_prefill, t.prefill_seconds));
    }
    if (t.n_decode > 0) {
        text += format("decode    %d tokens in %.2f s, %.1f tokens/s, %.1f GB/s", t.n_decode,
                       t.decode_seconds, per_second(t.n_decode, t.decode_seconds),
                       per_second(t.decode_bytes, t.decode_seconds) / 1e9);
        if (t.n_passes < t.n_decode) text += format(", %.2f tokens a pass", double(t.n_decode) / t.n_passes);
        text += "\n";
    }
    if (s.digest) text += format("digest    %016llx\n", static_cast<unsigned long long>(*s.digest));
    note(err, text);
}

// The error line: the first step that is not finite when these tokens are run again, at the first position
// that has one. The model is loaded once more, with a trace. A value at one position can make those before it
// in its chunk NaN (times attention's weights of 0), so these are run again without it. A device sums one
// token and several in different orders, and only one of the two may overflow: if chunks show nothing, tokens
// are run one by one.
std::string not_finite_text(const Program& program, const Options& o, const NotFinite& e) try {
    std::optional<NotFiniteValue> found;
    Trace trace;
    const std::unique_ptr<Model> model = program.load(o, &trace);
    for (const auto chunk : {size_t(model->max_chunk), size_t{1}}) {
        for (size_t i = 0; i < e.ids.size() && !found && !interrupted; i += chunk) {
            for (size_t end = std::min(i + chunk, e.ids.size()); end > i;) {
                trace.find_not_finite(i);
                model->forward(std::span(e.ids).subspan(i, end - i), int(i), 1);
                if (!trace.not_finite()) break;
                found = trace.not_finite();
                end = found->position;
            }
        }
    }
    if (!found) return e.what();
    const char* value = std::isnan(found->value) ? "nan" : found->value > 0 ? "inf" : "-inf";
    return format("position %zu: %s is the first step that is not finite: %s in %s", found->position,
                  found->step.c_str(), value, found->is_half ? "fp16, which ends at 65504" : "fp32");
} catch (const std::exception&) {  // there may be no memory for every step
    return e.what();
}

// Throws whatever goes wrong. Returns the exit code.
int run(Options o, const Program& program, const Streams& io) {
    if (o.trace && !o.info) {
        for (const auto& input : {std::optional(o.model_path), o.file})
            if (input && same_file(*o.trace, *input))
                fail<UsageError>("--trace: '", *o.trace, "' would replace the file that is read, '", *input,
                                 "'");
        const NewFile check(*o.trace);  // a path that cannot be written is noticed before anything runs
    }
    std::optional<TextFile> prompt = prompt_file(o, io.in);
    if (o.prompt) o.prompt = option_text("--prompt", *o.prompt);
    if (o.system) o.system = option_text("--system", *o.system);
    if (o.threads == 0) o.threads = default_threads();
    threads().resize(o.threads);
    Trace trace(o.trace_from.value_or(0));
    std::unique_ptr<Model> loaded = program.load(o, o.trace ? &trace : nullptr);
    Model& model = *loaded;
    const ModelConfig& c = model.config;
    const int context = context_length(o, c);
    load_tokenizer(model, o.model_path);
    if (o.trace) {  // any token, at the first two positions
        model.trace_size = trace.size_of(std::min(context, 2), [&](int position) {
            const int id = 0;
            model.forward(std::span(&id, 1), position, 1);
        });
    }
    if (o.info) {
        print_info(io.out, model, o, context);
        return 0;
    }
#ifdef NO_TOKENIZER
    model.tokenizer.reset();  // it could still decode, but such a program takes and prints ids
#endif

    const std::optional<size_t> penalty_window = set_chat_sampling(o, c);
    using std::chrono::microseconds, std::chrono::system_clock;
    if (!o.seed) o.seed = uint64_t(system_clock::now().time_since_epoch() / microseconds(1));
    Session s{.model = model,
              .sampler = {o.temp.value_or(c.temperature), o.top_k.value_or(c.top_k),
                          o.top_p.value_or(c.top_p), std::mt19937_64(*o.seed), o.min_p.value_or(c.min_p),
                          o.repetition_penalty.value_or(c.repetition_penalty)},
              .context = context,
              .max_new = o.steps > 0 ? o.steps : INT_MAX,
              .lookup = {size_t(o.lookup)},
              .penalty_window = penalty_window};
    if (o.digest) s.digest = empty_digest;
    if (is_terminal(io.err))
        s.progress = [&](size_t n_done, size_t n_tokens) {  // in one line, which is empty again at the end
            const std::string line = format("reading: %zu of %zu tokens", n_done, n_tokens);
            note(io.err, "\r" + (n_done < n_tokens ? line : std::string(line.size(), ' ') + "\r"));
        };
    const std::optional<std::string> text = prompt ? prompt_text(std::move(*prompt), o) : o.prompt;
    const std::vector<int> ids = o.ppl ? file_ids(model, *o.ppl, io.in) : std::vector<int>{};
    catch_ctrl_c();  // not before: reading and loading just die
    std::optional<NotFinite> not_finite;
    try {
        o.ppl     ? run_perplexity(s, o, ids, io)
        : o.bench ? run_bench(s, o, io)
        : o.chat  ? run_chat(s, o, text, io)
                  : run_generate(s, o, text, io);
    } catch (NotFinite& e) {
        if (!o.ppl) put(io.out, "\n");  // behind what there is of the text
        if (is_terminal(io.err)) note(io.err, "\r\033[K");
        not_finite = std::move(e);
    }
    const bool has_trace = !o.trace_from || size_t(*o.trace_from) < trace.n_tokens();
    if (!has_trace && !not_finite)
        fail<UsageError>("--trace-from: ", *o.trace_from, " is no position of this run, which has ",
                         trace.n_tokens());
    if (o.trace && has_trace) trace.write(*o.trace);
    if (not_finite) {
        loaded.reset();  // its memory
        throw std::runtime_error(o.model_path + ": " + not_finite_text(program, o, *not_finite));
    }
    print_statistics(io.err, s, o);
    return interrupted ? 130 : 0;
}

}  // namespace

int run_with_streams(int argc, const char* const* argv, const Program& program, const Streams& io) {
    auto fail = [&](const std::string& message, int code) {
        // A name may hold a line break; an error is one line.
        note(io.err, std::string(program.name) + ": " + printable(message) + "\n");
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
    }
}

int run_command_line(int argc, const char* const* argv, const Program& program) {
    set_up_streams();
    catch_bus_errors(program.name);
    if (!rounds_products()) note(stderr, std::string(program.name) + unrounded_products);
    const std::vector<std::string> words = utf8_arguments(argc, argv);
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    return run_with_streams(int(words.size()), arguments.data(), program, {stdin, stdout, stderr});
}
