// The command line that all the programs share: its help text, and argv -> Options.
//
// Everything that can be known to be wrong before the model is opened is refused here, by a UsageError whose
// one line names the option and the value.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <climits>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/app/streams.h"

constexpr const char* program_version = "0.1.0";

// 80 columns. %s: the program's name, its summary, its name, what own_help() says.
constexpr const char* help_text =
    R"(%s: %s

usage: %s <model.bin> [options]

Usual (without a prompt the model starts from its beginning-of-text token)
  -i, --prompt TEXT     the prompt; - reads standard input
  -m, --mode MODE       generate (default) or chat; chat goes on with a line of
                        standard input for every turn; /help on a terminal
  -n, --steps N         new tokens, in chat for each turn
                        (default 256; 0: to the end of the context)
  -t, --temp F          temperature, 0 to 100; 0 takes the most probable token
  -c, --ctx N           context length (default: the model's, at most 4096)
  -j, --threads N       threads, 1 to 1024 (default: all physical cores, in a
                        container no more than its CPU quota)

Prompts and chat
  -f, --file PATH       the prompt is a file's text; - reads standard input
                        (as with -i, one newline at the end is dropped)
      --ids 1,2,3       the prompt as token ids
  -y, --system TEXT     chat: system prompt
  -r, --think 0|1       chat: Qwen3's thinking (default 1)

Sampling (defaults: the model's generation_config; in chat, where that has no
temperature: -t 0.1 -p 0.9 and a penalty of 1.15 for the answer's last tokens)
  -k, --top-k N         only the N most probable tokens; 0: all
  -p, --top-p F         only the most probable tokens, up to probability F
      --min-p F         only tokens with F times the best one's probability
      --repetition-penalty F
                        make tokens of the prompt and the output so far less
                        likely: divide their logits by F, or multiply
                        negative ones; 1: off
  -s, --seed N          random seed (default: from the clock)
      --lookup N        guess up to N tokens from where the last ones stood
                        before and run them in one pass: the same text,
                        sooner where it repeats itself (default 0)

Instead of generating
      --info            print the model's header and sizes
      --ppl PATH        perplexity of a text file
      --bench P,N[,D]   time a prompt of P tokens and N generated ones, behind D
                        positions that are made up (default 0)
  -h, --help            print this and exit
  -V, --version         print the version and exit

Other
      --print-ids       print token ids instead of text
      --digest          print a hash of the logits, the same on every machine
      --trace PATH      write every intermediate tensor to a safetensors file
      --cache-rule N    begin at position N, behind keys and values by a rule
      --trace-from POS  of these only those of positions POS and up, but
                        tokens, keys and values of all
      --rope-theta F    replace the model's RoPE base
%s
Text goes to standard output; statistics and errors go to standard error.
Ctrl-C ends a run cleanly, a second one kills it; in a chat on a terminal it
ends an answer. Where SIGINT is ignored when the program starts, as behind a
script's &, it goes on being ignored. What is typed in a chat on a terminal is
kept in ~/.local/state/runq/history, or in the file that RUNQ_HISTORY names;
RUNQ_HISTORY= keeps nothing.
Exit codes: 0 done, 1 bad file or failure, 2 bad usage, 130 ended by Ctrl-C.
)";

// A wrong command line: exit code 2.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An option that one program has and the others do not. Its value is one of `choices`, the first by default;
// or, where `others` says what --help calls them, anything else, which the program then checks. Without
// choices it takes no value.
struct OwnOption {
    const char* name;  // "--name"
    std::vector<const char*> choices;
    const char* help;  // up to 56 columns
    const char* others = nullptr;
};

// The lines of --help on a program's own options.
inline std::string own_help(std::span<const OwnOption> own) {
    std::string text;
    for (const OwnOption& option : own) {
        const bool has_value = !option.choices.empty();
        text += format("      %-18s%s%s\n", option.name, option.help, has_value ? ":" : "");
        if (!has_value) continue;
        text += format("%24s%s (default)", "", option.choices[0]);
        for (const char* choice : std::span(option.choices).subspan(1)) text += std::string(", ") + choice;
        if (option.others != nullptr) text += std::string(", ") + option.others;
        text += "\n";
    }
    return text;
}

struct BenchSize {
    int n_prompt = 0, n_generated = 0;  // tokens
    int depth = 0;                      // positions before them
};

struct Options {
    std::string model_path;
    // At most one of these three is there.
    std::optional<std::string> prompt;  // "-": standard input
    std::optional<std::string> file;    // "-": standard input
    std::optional<std::vector<int>> ids;
    bool chat = false;                  // --mode chat
    int steps = 256;                    // new tokens; 0: to the end of the context
    int ctx = 0;                        // 0: the default; see context_length()
    std::optional<std::string> system;  // chat
    bool think = true;                  // chat
    std::optional<float> temp;          // these five: the model's if not given
    std::optional<int> top_k;
    std::optional<float> top_p, min_p, repetition_penalty;
    std::optional<uint64_t> seed;  // from the clock if not given (cli.cpp)
    int lookup = 0;                // tokens of a guess
    // At most one of these three is there.
    bool info = false;
    std::optional<std::string> ppl;  // path
    std::optional<BenchSize> bench;
    int threads = 0;  // 0: default_threads()
    bool print_ids = false, digest = false;
    std::optional<std::string> trace;  // path
    std::optional<int> trace_from;     // position
    int cache_rule = 0;                // positions whose keys and values are made up
    std::optional<float> rope_theta;
    std::map<std::string, std::string> own;  // the program's own options; those without a value if given
    bool help = false, version = false;

    // What an option of the program's own has been given or has by default; empty if it has no value, or if
    // these are not the options of a command line.
    std::string chosen(const std::string& name) const {
        const auto given = own.find(name);
        return given == own.end() ? "" : given->second;
    }
};

// Reads all of `text` as a T from low to high: no blanks, no trailing characters, no NaN.
template <class T>
T parse_number(const std::string& option, const std::string& text, T low, T high) {
    T value{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || !(value >= low && value <= high)) {
        const char* kind = std::is_integral_v<T> ? "whole number" : "number";
        fail<UsageError>(option, ": '", text, "' is not a ", kind, " from ", low, " to ", high);
    }
    return value;
}

// "1,2,3", or with a blank after each comma as Python prints it -> {1, 2, 3}
inline std::vector<int> parse_list(const std::string& option, const std::string& text) {
    std::vector<int> values;
    const char *p = text.data(), *end = p + text.size();
    while (true) {
        int value = -1;
        const auto [stop, error] = std::from_chars(p, end, value);
        if (error != std::errc() || value < 0 || (stop != end && *stop != ','))
            fail<UsageError>(option, ": '", text, "' is not a list of whole numbers like 1,2,3");
        values.push_back(value);
        if (stop == end) return values;
        p = stop + 1;
        if (p != end && *p == ' ') p++;
    }
}

// Whether one is the other but for a letter more, a letter less, another letter, or two neighbours swapped.
inline bool differ_by_a_letter(std::string_view a, std::string_view b) {
    const auto n_equal = size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    a.remove_prefix(n_equal), b.remove_prefix(n_equal);
    while (!a.empty() && !b.empty() && a.back() == b.back()) a.remove_suffix(1), b.remove_suffix(1);
    return std::max(a.size(), b.size()) == 1 ||
           (a.size() == 2 && b.size() == 2 && a[0] == b[1] && a[1] == b[0]);
}

// Options of llama.cpp and llama2.c that are called otherwise here, or are not there.
struct Habit {
    std::string_view names, here;  // names: each between blanks
};
constexpr Habit habits[] = {
    {" -cnv --conversation --interactive -st --single-turn ", "here it is -m chat"},
    {" -no-cnv --no-conversation ", "here it is -m generate, the default"},
    {" --n-predict --predict --max-tokens --max-new-tokens ", "here it is -n"},
    {" --ctx-size --n-ctx ", "here it is -c"},
    {" -sys --system-prompt ", "here it is -y"},
    {" --repeat-penalty ", "here it is --repetition-penalty"},
    {" --perplexity ", "here it is --ppl"},
    {" -tb --threads-batch ", "here it is -j, for prompts too"},
    {" -ctk -ctv --cache-type-k --cache-type-v ", "here it is --kv"},
    {" --model ", "the model's file name stands by itself"},
    {" -z --tokenizer ", "the tokenizer is in the model file"},
    {" -hf --hf-repo ", "python -m export makes a model file of a downloaded directory"},
    {" -ngl --gpu-layers --n-gpu-layers ", "layers are on the GPU all, with runq_awq, or none"},
    {" -b -ub --batch-size --ubatch-size -fa --flash-attn -co --color ", "nothing has to be set for that"},
};

// "; did you mean '--temp'?" for an option that is none: what `habits` says; or one in --help that differs by
// a letter; or one that it begins with or is the beginning of. Empty if there is none.
inline std::string suggestion(const std::string& typed, std::span<const OwnOption> own) {
    for (const auto& [names, here] : habits)
        if (names.find(" " + typed + " ") != names.npos) return "; " + std::string(here);
    const std::string help = help_text + own_help(own);
    std::string meant;
    for (size_t at = help.find(" --"); at != std::string::npos; at = help.find(" --", at + 1)) {
        const size_t end = help.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", at + 1);
        const std::string name = help.substr(at + 1, end - at - 1);
        const bool is_beginning =
            std::min(typed.size(), name.size()) >= 6 && (typed.starts_with(name) || name.starts_with(typed));
        if (differ_by_a_letter(typed, name)) return "; did you mean '" + name + "'?";
        if (is_beginning && meant.empty()) meant = name;
    }
    return meant.empty() ? "" : "; did you mean '" + meant + "'?";
}

// A text that was given as an option's value, by the rule for texts.
inline std::string option_text(const std::string& option, const std::string& value) try {
    return text_by_rule(option + ": the text", value);
} catch (const std::runtime_error& e) {
    throw UsageError(e.what());
}

// Throws UsageError. After -h or -V nothing more is read or checked.
inline Options parse_options(int argc, const char* const* argv, std::span<const OwnOption> own = {}) {
    Options o;
    std::string name;                  // of the option in hand, as it was typed
    std::optional<std::string> glued;  // its value if written --name=value, -n=5 or -n5 (a number)
    const char* chat_only = nullptr;   // an option that only a chat has a use for
    int i = 1;

    auto value = [&]() -> std::string {
        if (glued) return *std::exchange(glued, std::nullopt);
        if (i + 1 >= argc) fail<UsageError>(name, ": needs a value");
        return argv[++i];
    };
    auto whole = [&](int low, int high) { return parse_number<int>(name, value(), low, high); };
    // Read as double so that 1e-50 is a small number and not an error, then rounded.
    auto real = [&](double low, double high) {
        return float(parse_number<double>(name, value(), low, high));
    };
    const auto is_chat = [&] {
        const std::string text = value();
        if (text == "generate" || text == "chat") return text == "chat";
        const bool is_file = text.find_first_of("./\\") != text.npos;
        fail<UsageError>(name, ": '", text, "' is not generate or chat",
                         is_file ? "; the model's file name stands by itself" : "");
    };
    const auto probability = [&] {
        const std::string text = value();
        if (text.find_first_not_of("0123456789+-.eE") != text.npos)
            fail<UsageError>(name, ": '", text, "' is not a number from 0 to 1; a prompt goes behind -i");
        return float(parse_number<double>(name, text, 0, 1));
    };
    const auto bench_size = [&] {
        const std::string text = value();
        std::vector<int> sizes = parse_list(name, text);
        if (sizes.size() < 2 || sizes.size() > 3 || (sizes[0] == 0 && sizes[1] == 0))
            fail<UsageError>(name, ": '", text, "' is not P,N or P,N,D: whole numbers, P and N not both 0");
        sizes.resize(3);
        return BenchSize{sizes[0], sizes[1], sizes[2]};
    };
    const auto own_choice = [&](const OwnOption& option) -> std::string {
        if (option.choices.empty()) return "";
        std::string text = value();
        std::string choices;
        for (const char* choice : option.choices) {
            if (text == choice || option.others != nullptr) return text;
            choices += (choices.empty() ? "" : ", ") + std::string(choice);
        }
        fail<UsageError>(name, ": '", text, "' is not one of ", choices);
    };
    struct Known {
        std::string_view short_name, long_name;
        std::function<void()> read;
    };
    std::vector<Known> all_options = {
        {"-i", "--prompt", [&] { o.prompt = value(); }},
        {"-f", "--file", [&] { o.file = value(); }},
        {"", "--ids", [&] { o.ids = parse_list(name, value()); }},
        {"-m", "--mode", [&] { o.chat = is_chat(); }},
        {"-n", "--steps", [&] { o.steps = whole(0, INT_MAX); }},
        {"-c", "--ctx", [&] { o.ctx = whole(1, INT_MAX); }},
        {"-y", "--system", [&] { o.system = value(), chat_only = "--system"; }},
        {"-r", "--think", [&] { o.think = whole(0, 1) != 0, chat_only = "--think"; }},
        {"-t", "--temp", [&] { o.temp = real(0, 100); }},
        {"-k", "--top-k", [&] { o.top_k = whole(0, INT_MAX); }},
        {"-p", "--top-p", [&] { o.top_p = probability(); }},
        {"", "--min-p", [&] { o.min_p = real(0, 1); }},
        {"", "--repetition-penalty", [&] { o.repetition_penalty = real(0.01, 100); }},
        {"-s", "--seed", [&] { o.seed = parse_number<uint64_t>(name, value(), 0, UINT64_MAX); }},
        {"", "--lookup", [&] { o.lookup = whole(0, 1024); }},
        {"", "--info", [&] { o.info = true; }},
        {"", "--ppl", [&] { o.ppl = value(); }},
        {"", "--bench", [&] { o.bench = bench_size(); }},
        {"-j", "--threads", [&] { o.threads = whole(1, 1024); }},
        {"", "--print-ids", [&] { o.print_ids = true; }},
        {"", "--digest", [&] { o.digest = true; }},
        {"", "--trace", [&] { o.trace = value(); }},
        {"", "--cache-rule", [&] { o.cache_rule = whole(0, INT_MAX); }},
        {"", "--trace-from", [&] { o.trace_from = whole(0, INT_MAX); }},
        {"", "--rope-theta", [&] { o.rope_theta = real(1, 1e12); }},
        {"-h", "--help", [&] { o.help = true; }},
        {"-V", "--version", [&] { o.version = true; }},
    };
    for (const OwnOption& option : own) {
        if (!option.choices.empty()) o.own[option.name] = option.choices.front();
        all_options.push_back({"", option.name, [&] { o.own[option.name] = own_choice(option); }});
    }

    for (; i < argc; i++) {
        name = argv[i];
        if (name.size() < 2 || name[0] != '-') {
            if (!o.model_path.empty())
                fail<UsageError>("unexpected argument '", name,
                                 "': a prompt goes behind -i, and what has blanks into quotes");
            if (name.empty()) throw UsageError("the model's file name is empty");
            o.model_path = name;
            continue;
        }
        const size_t equals = name.find('=');
        if (equals == 2 || (equals != std::string::npos && name.starts_with("--"))) {
            glued = name.substr(equals + 1);
            name.resize(equals);
        } else if (name.size() > 2 && name[1] != '-' && (std::isdigit(name[2]) != 0 || name[2] == '.')) {
            glued = name.substr(2);
            name.resize(2);
        }
        const auto known = std::find_if(all_options.begin(), all_options.end(), [&](const Known& x) {
            return name == x.short_name || name == x.long_name;
        });
        if (known == all_options.end())
            fail<UsageError>("unknown option '", name, "'", suggestion(name, own));
        known->read();
        if (glued) fail<UsageError>(name, ": takes no value, got '", *glued, "'");
        if (o.help || o.version) return o;
    }

    if (o.model_path.empty()) throw UsageError("no model file given; -h shows how to use this program");
    const auto at_most_one = [](std::initializer_list<std::pair<bool, const char*>> options) {
        const char* first = nullptr;
        for (const auto& [is_given, option] : options) {
            if (is_given && first != nullptr)
                fail<UsageError>(option, ": cannot be used together with ", first);
            if (is_given) first = option;
        }
        return first;
    };
    const char* prompt = at_most_one(
        {{o.prompt.has_value(), "--prompt"}, {o.file.has_value(), "--file"}, {o.ids.has_value(), "--ids"}});
    const char* task = at_most_one({{o.info, "--info"},
                                    {o.ppl.has_value(), "--ppl"},
                                    {o.bench.has_value(), "--bench"},
                                    {o.chat, "--mode chat"}});
    if (prompt != nullptr && task != nullptr && (o.ids || !o.chat))
        fail<UsageError>(prompt, ": cannot be used together with ", task);
    if (chat_only != nullptr && !o.chat) fail<UsageError>(chat_only, ": has no meaning without --mode chat");
    if (o.trace && task != nullptr && !o.info)  // --info says what memory it takes
        fail<UsageError>("--trace: cannot be used together with ", task);
    if (o.trace && o.lookup > 0) throw UsageError("--trace: cannot be used together with --lookup");
    if (o.cache_rule > 0 && (task != nullptr || o.trace_from))
        fail<UsageError>("--cache-rule: cannot be used together with ",
                         task != nullptr ? task : "--trace-from");
    if (o.trace_from && !o.trace) throw UsageError("--trace-from: has no meaning without --trace");
    return o;
}
