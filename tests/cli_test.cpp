// The command line, the sampler, and what the programs do with a model, on a model that is a small table.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <csignal>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/app/chat.h"
#include "engine/app/measure.h"
#include "engine/app/model.h"
#include "engine/app/sampler.h"
#include "engine/app/session.h"
#include "engine/os/system.h"
#include "safetensors.h"
#include "section.h"
#include "table_model.h"

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float qnan = std::numeric_limits<float>::quiet_NaN();

Options options_of(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "runq");
    return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

}  // namespace

// ----------------------------------------------------------------------------
// Options

TEST_CASE("cli: defaults") {
    const Options o = options_of({"model.bin"});
    CHECK(o.model_path == "model.bin");
    CHECK(!o.prompt);
    CHECK(!o.file);
    CHECK(!o.ids);
    CHECK(!o.chat);
    CHECK(o.steps == 256);
    CHECK(o.ctx == 0);
    CHECK(!o.system);
    CHECK(o.think);
    CHECK(!o.temp);
    CHECK(!o.top_k);
    CHECK(!o.top_p);
    CHECK(!o.min_p);
    CHECK(!o.repetition_penalty);
    CHECK(!o.seed);
    CHECK(o.threads == 0);
    CHECK(!o.print_ids);
    CHECK(!o.info);
    CHECK(!o.ppl);
    CHECK(!o.bench);
    CHECK(!o.trace);
    CHECK(!o.rope_theta);
}

TEST_CASE("cli: a number may follow a short option without a blank, and any value with an equals sign") {
    const Options o = options_of({"m", "-j8", "-n100", "-t.5", "-p0.25", "-k3", "-i", "8"});
    CHECK(o.threads == 8);
    CHECK(o.steps == 100);
    CHECK(o.temp == 0.5f);
    CHECK(o.top_p == 0.25f);
    CHECK(o.top_k == 3);
    CHECK(o.prompt == "8");
    const Options p = options_of({"m", "-t=0", "-n=5", "-p=.5", "-i=a=b", "-m=chat", "-y="});
    CHECK(p.temp == 0);
    CHECK(p.steps == 5);
    CHECK(p.top_p == 0.5f);
    CHECK(p.prompt == "a=b");
    CHECK(p.chat);
    CHECK(p.system == "");
}

TEST_CASE("cli: every option, short, long and with an equals sign") {
    const Options a = options_of({"-i",  "hi", "-m", "chat",     "-n",   "5",  "m",
                                  "-c",  "7",  "-y", "be brief", "-r",   "0",  "-t",
                                  "0.5", "-k", "3",  "-p",       "0.25", "-s", "18446744073709551615",
                                  "-j",  "2"});
    const Options b = options_of({"--prompt=hi", "--mode=chat", "--steps=5", "--ctx=7", "--system=be brief",
                                  "--think=0", "--temp=0.5", "--top-k=3", "--top-p=0.25",
                                  "--seed=18446744073709551615", "--threads=2", "m"});
    for (const Options& o : {a, b}) {
        CHECK(o.model_path == "m");
        CHECK(o.prompt == "hi");
        CHECK(o.chat);
        CHECK(o.steps == 5);
        CHECK(o.ctx == 7);
        CHECK(o.system == "be brief");
        CHECK(!o.think);
        CHECK(o.temp == 0.5f);
        CHECK(o.top_k == 3);
        CHECK(o.top_p == 0.25f);
        CHECK(o.seed == 18446744073709551615u);
        CHECK(o.threads == 2);
    }
    CHECK(options_of({"m", "-f", "p.txt"}).file == "p.txt");
    CHECK(options_of({"m", "--min-p", "0.05"}).min_p == 0.05f);
    CHECK(options_of({"m", "--repetition-penalty=1.1"}).repetition_penalty == 1.1f);
    CHECK(options_of({"m", "--ids", "3"}).ids == std::vector<int>{3});
    CHECK(options_of({"m", "--ids=1,2, 3"}).ids == std::vector<int>{1, 2, 3});
    CHECK(options_of({"m", "--prompt="}).prompt == "");
    CHECK(options_of({"m", "--prompt=a=b"}).prompt == "a=b");
    CHECK(options_of({"m", "-i", "--temp"}).prompt == "--temp");
    CHECK(options_of({"m", "--print-ids"}).print_ids);
    CHECK(options_of({"m", "--info"}).info);
    CHECK(options_of({"m", "--ppl", "t"}).ppl == "t");
    CHECK(options_of({"m", "--trace", "t"}).trace == "t");
    CHECK(options_of({"m", "--trace", "t", "--trace-from", "300"}).trace_from == 300);
    CHECK(options_of({"m", "--bench", "128,0"}).bench->n_prompt == 128);
    CHECK(options_of({"m", "--bench", "0,64"}).bench->n_generated == 64);
    CHECK(options_of({"m", "--rope-theta", "1e6"}).rope_theta == 1e6f);
    CHECK(options_of({"m", "-t", "1e-50"}).temp == 0);
    CHECK(options_of({"m", "-n", "1", "-n", "2"}).steps == 2);
    CHECK(options_of({"-h", "--nonsense"}).help);
    CHECK(options_of({"-V"}).version);
}

TEST_CASE("cli: every bad command line is exit code 2 and one line, before the model is opened") {
    const char *steps = " is not a whole number from 0 to 2147483647",
               *temp = " is not a number from 0 to 100", *list = " is not a list of whole numbers like 1,2,3",
               *bench = " is not P,N or P,N,D: whole numbers, P and N not both 0";
    auto both = [](const char* a, const char* b) { return std::string(a) + b; };
    const std::vector<std::pair<std::vector<const char*>, std::string>> table = {
        {{}, "no model file given; -h shows how to use this program"},
        {{"-n", "5"}, "no model file given; -h shows how to use this program"},
        {{""}, "the model's file name is empty"},
        {{"m", "n"}, "unexpected argument 'n': a prompt goes behind -i, and what has blanks into quotes"},
        {{"m", "-x"}, "unknown option '-x'"},
        {{"m", "-n5x"}, both("-n: '5x'", steps)},
        {{"m", "-n="}, both("-n: ''", steps)},
        {{"m", "-n=-1"}, both("-n: '-1'", steps)},
        {{"m", "-t=hot"}, both("-t: 'hot'", temp)},
        {{"m", "-x=1"}, "unknown option '-x'"},
        {{"m", "-h=1"}, "-h: takes no value, got '1'"},
        {{"m", "--"}, "unknown option '--'"},
        {{"m", "--nonsense=1"}, "unknown option '--nonsense'"},
        {{"m", "--a\nb"}, "unknown option '--a\\x0ab'"},
        {{"m", "--info=1"}, "--info: takes no value, got '1'"},
        {{"m", "--print-ids="}, "--print-ids: takes no value, got ''"},
        {{"m", "-i"}, "-i: needs a value"},
        {{"m", "--prompt"}, "--prompt: needs a value"},
        {{"m", "-f"}, "-f: needs a value"},
        {{"m", "--ids"}, "--ids: needs a value"},
        {{"m", "-m"}, "-m: needs a value"},
        {{"m", "-n"}, "-n: needs a value"},
        {{"m", "-c"}, "-c: needs a value"},
        {{"m", "-y"}, "-y: needs a value"},
        {{"m", "-r"}, "-r: needs a value"},
        {{"m", "-t"}, "-t: needs a value"},
        {{"m", "-k"}, "-k: needs a value"},
        {{"m", "-p"}, "-p: needs a value"},
        {{"m", "-s"}, "-s: needs a value"},
        {{"m", "-j"}, "-j: needs a value"},
        {{"m", "--ppl"}, "--ppl: needs a value"},
        {{"m", "--bench"}, "--bench: needs a value"},
        {{"m", "--trace"}, "--trace: needs a value"},
        {{"m", "--trace-from", "1"}, "--trace-from: has no meaning without --trace"},
        {{"m", "--cache-rule", "9", "--trace", "t", "--trace-from", "9"},
         "--cache-rule: cannot be used together with --trace-from"},
        {{"m", "--cache-rule", "9", "--ppl", "f"}, "--cache-rule: cannot be used together with --ppl"},
        {{"m", "--trace", "t", "--trace-from", "-1"},
         "--trace-from: '-1' is not a whole number from 0 to 2147483647"},
        {{"m", "--rope-theta"}, "--rope-theta: needs a value"},
        {{"m", "-n", "5x"}, both("-n: '5x'", steps)},
        {{"m", "-n", ""}, both("-n: ''", steps)},
        {{"m", "-n", " 5"}, both("-n: ' 5'", steps)},
        {{"m", "-n", "-1"}, both("-n: '-1'", steps)},
        {{"m", "-n", "2147483648"}, both("-n: '2147483648'", steps)},
        {{"m", "--steps=1.5"}, both("--steps: '1.5'", steps)},
        {{"m", "-c", "0"}, "-c: '0' is not a whole number from 1 to 2147483647"},
        {{"m", "--min-p"}, "--min-p: needs a value"},
        {{"m", "--min-p", "1.5"}, "--min-p: '1.5' is not a number from 0 to 1"},
        {{"m", "--repetition-penalty", "0"}, "--repetition-penalty: '0' is not a number from 0.01 to 100"},
        {{"m", "-t", "hot"}, both("-t: 'hot'", temp)},
        {{"m", "-t", "-0.1"}, both("-t: '-0.1'", temp)},
        {{"m", "-t", "100.5"}, both("-t: '100.5'", temp)},
        {{"m", "-t", "nan"}, both("-t: 'nan'", temp)},
        {{"m", "-t", "inf"}, both("-t: 'inf'", temp)},
        {{"m", "-t", "1,5"}, both("-t: '1,5'", temp)},
        {{"m", "-p", "1.01"}, "-p: '1.01' is not a number from 0 to 1"},
        {{"m", "-p", "-1"}, "-p: '-1' is not a number from 0 to 1"},
        {{"m", "-k", "-1"}, "-k: '-1' is not a whole number from 0 to 2147483647"},
        {{"m", "-k", "1.0"}, "-k: '1.0' is not a whole number from 0 to 2147483647"},
        {{"m", "-s", "-1"}, "-s: '-1' is not a whole number from 0 to 18446744073709551615"},
        {{"m", "-s", "18446744073709551616"},
         "-s: '18446744073709551616' is not a whole number from 0 to 18446744073709551615"},
        {{"m", "-j8x"}, "-j: '8x' is not a whole number from 1 to 1024"},
        {{"m", "-jx"}, "unknown option '-jx'"},
        {{"m", "-j", "0"}, "-j: '0' is not a whole number from 1 to 1024"},
        {{"m", "-j", "1025"}, "-j: '1025' is not a whole number from 1 to 1024"},
        {{"m", "-p", "Once upon"}, "-p: 'Once upon' is not a number from 0 to 1; a prompt goes behind -i"},
        {{"-m", "model.bin", "-p", "Once"},
         "-m: 'model.bin' is not generate or chat; the model's file name stands by itself"},
        {{"m", "-m", "talk"}, "-m: 'talk' is not generate or chat"},
        {{"m", "-r", "2"}, "-r: '2' is not a whole number from 0 to 1"},
        {{"m", "--rope-theta", "0"}, "--rope-theta: '0' is not a number from 1 to 1e+12"},
        {{"m", "--ids", ""}, both("--ids: ''", list)},
        {{"m", "--ids", "1,,2"}, both("--ids: '1,,2'", list)},
        {{"m", "--ids", "1,2,"}, both("--ids: '1,2,'", list)},
        {{"m", "--ids", "1 2"}, both("--ids: '1 2'", list)},
        {{"m", "--ids", "-1"}, both("--ids: '-1'", list)},
        {{"m", "--ids", "1,2x"}, both("--ids: '1,2x'", list)},
        {{"m", "--ids", "99999999999"}, both("--ids: '99999999999'", list)},
        {{"m", "--bench", "5"}, both("--bench: '5'", bench)},
        {{"m", "--bench", "0,0"}, both("--bench: '0,0'", bench)},
        {{"m", "--bench", "1,2,3,4"}, both("--bench: '1,2,3,4'", bench)},
        {{"m", "--bench", "1,-2"}, both("--bench: '1,-2'", list)},
        {{"m", "-i", "a", "-f", "b"}, "--file: cannot be used together with --prompt"},
        {{"m", "-i", "", "-f", "b"}, "--file: cannot be used together with --prompt"},
        {{"m", "--lookup", "1", "--trace", "a"}, "--trace: cannot be used together with --lookup"},
        {{"m", "--lookup", "1025"}, "--lookup: '1025' is not a whole number from 0 to 1024"},
        {{"m", "--ids", "1", "-i", "a"}, "--ids: cannot be used together with --prompt"},
        {{"m", "--ids", "1", "-f", "a"}, "--ids: cannot be used together with --file"},
        {{"m", "--info", "--bench", "1,1"}, "--bench: cannot be used together with --info"},
        {{"m", "--ppl", "t", "--bench", "1,1"}, "--bench: cannot be used together with --ppl"},
        {{"m", "-m", "chat", "--ids", "1"}, "--ids: cannot be used together with --mode chat"},
        {{"m", "-m", "chat", "--trace", "t"}, "--trace: cannot be used together with --mode chat"},
        {{"m", "--ppl", "x", "--trace", "t"}, "--trace: cannot be used together with --ppl"},
        {{"m", "-m", "chat", "--ppl", "t"}, "--mode chat: cannot be used together with --ppl"},
        {{"m", "--bench", "1,1", "-m", "chat"}, "--mode chat: cannot be used together with --bench"},
        {{"m", "-m", "chat", "--info"}, "--mode chat: cannot be used together with --info"},
        {{"m", "--ppl", "t", "-i", "a"}, "--prompt: cannot be used together with --ppl"},
        {{"m", "--ppl", "t", "-f", "a"}, "--file: cannot be used together with --ppl"},
        {{"m", "--bench", "1,1", "--ids", "1"}, "--ids: cannot be used together with --bench"},
        {{"m", "--info", "-i", "a"}, "--prompt: cannot be used together with --info"},
        {{"m", "-y", "be brief"}, "--system: has no meaning without --mode chat"},
        {{"m", "-r", "0", "-i", "a"}, "--think: has no meaning without --mode chat"},
        {{"m", "-y", "a", "--ppl", "t"}, "--system: has no meaning without --mode chat"},
    };
    for (const auto& row : table) {
        const auto& [arguments, line] = row;
        CAPTURE(row.second);
        const Result r = run_cli(no_program, arguments);
        CHECK(r.code == 2);
        CHECK(r.out == "");
        CHECK(r.err == "runq: " + line + "\n");
    }
}

TEST_CASE("cli: an unknown option is answered with the one that is meant") {
    const OwnOption own[] = {{"--kv", {"f32", "q8"}, "how keys and values are stored"}};
    const std::map<std::string, std::string> meant = {
        {"--tmep", "--temp"},
        {"-temp", "--temp"},
        {"--tmp", "--temp"},
        {"--temperature", "--temp"},
        {"--promt=x", "--prompt"},
        {"--sed", "--seed"},
        {"--top_k", "--top-k"},
        {"--topp", "--top-p"},
        {"--theads", "--threads"},
        {"--print-id", "--print-ids"},
        {"--vk", "--kv"},
        {"--repetition", "--repetition-penalty"},
        {"--trace-form", "--trace-from"},
        {"--hlep", "--help"},
        // nothing is near
        {"--gpu", ""},
        {"-q", ""},
        {"--", ""},
        {"---", ""},
        {"--kb9", ""},
        {"--frobnicate", ""},
        {"--predict-n", ""},
        {"--a\xff", ""},
    };
    for (const auto& row : meant) {
        const std::string typed = row.first, name = row.second;
        CAPTURE(typed);
        const std::string option = typed.substr(0, typed.find('='));
        const std::string line =
            "unknown option '" + option + "'" + (name.empty() ? "" : "; did you mean '" + name + "'?");
        const std::array arguments = {"runq", "m", typed.c_str()};
        CHECK_THROWS_WITH_AS(parse_options(arguments.size(), arguments.data(), own), line.c_str(),
                             UsageError);
    }
    CHECK(suggestion(std::string(100000, 'a'), own).empty());  // at once
    // What is called otherwise elsewhere. Whatever a line of these names, --help has.
    CHECK(suggestion("-cnv", own) == "; here it is -m chat");
    CHECK(suggestion("--n-predict", own) == "; here it is -n");
    CHECK(suggestion("--ctx-size", own) == "; here it is -c");
    CHECK(suggestion("-ngl", own) == "; layers are on the GPU all, with runq_awq, or none");
    CHECK(suggestion("--flash-attn", own) == "; nothing has to be set for that");
    CHECK(suggestion("n-predict", own).empty());
    const std::string help = help_text + own_help(own);
    for (const Habit& habit : habits) {
        const std::string_view names = habit.names, here = habit.here;
        CAPTURE(here);
        CHECK((names.starts_with(" -") && names.ends_with(" ")));
        if (const size_t at = here.find(" is -"); at != here.npos) {
            const std::string option(here.substr(at + 4, here.find_first_of(" ,", at + 4) - at - 4));
            CHECK(help.find("  " + option + (option.starts_with("--") ? " " : ", ")) != help.npos);
        }
    }
    for (const char* near : {"tmep", "tem", "emp", "tempo", "stemp", "tomp"})
        CHECK(differ_by_a_letter(near, "temp"));
    for (const char* far : {"temp", "", "te", "etpm", "tempus", "pemt"})
        CHECK(!differ_by_a_letter(far, "temp"));
}

TEST_CASE("cli: what a model makes wrong is exit code 2 and one line too") {
    Bigram table;
    loaded = &table;
    const std::vector<std::pair<std::vector<const char*>, std::string>> cases = {
        {{"m", "-c", "65", "--ids", "1"}, "--ctx: 65 is more than the model's max_seq_len, 64"},
        {{"m", "-c", "2", "--ids", "1,2,3"}, "--ids: the prompt is 3 tokens long, the context only 2"},
        {{"m", "--ids", "1,8"}, "--ids: 8 is outside the vocabulary, 0 to 7"},
        {{"m", "-m", "chat"}, "--mode chat: this file has no tokenizer: use --ids"},
        {{"m", "-i", "hi"}, "--prompt: this file has no tokenizer: use --ids"},
        {{"m", "-i", "-"}, "--prompt: this file has no tokenizer: use --ids"},
        {{"m", "--ppl", "/dev/null"}, "--ppl: this file has no tokenizer: use --ids"},
        {{"m", "-i", ""}, "--prompt: the prompt is empty, and this model has no token to begin a text with"},
        {{"m"}, "--prompt: the prompt is empty, and this model has no token to begin a text with"},
        {{"m", "--bench", "60,5"}, "--bench: 60 + 5 tokens do not fit in the context of 64"},
        {{"m", "--bench", "2147483647,2147483647"},
         "--bench: 2147483647 + 2147483647 tokens do not fit in the context of 64"},
    };
    for (const auto& row : cases) {
        const auto& [arguments, line] = row;
        CAPTURE(row.second);
        const Result r = run_cli(table_program, arguments, "text\n");
        CHECK(r.code == 2);
        CHECK(r.out == "");
        CHECK(r.err == "runq: " + line + "\n");
        CHECK(table.fed.empty());
    }
}

TEST_CASE("cli: failures are exit code 1 and one line") {
    Result r = run_cli(no_program, {"m"});
    CHECK(r.code == 1);
    CHECK(r.err == "runq: the model was opened\n");

    r = run_cli(no_program, {"m", "-f", "/nonexistent/prompt.txt"});
    CHECK(r.code == 1);
    CHECK(r.err == "runq: --file: cannot read '/nonexistent/prompt.txt': No such file or directory\n");

    r = run_cli(no_program, {"m", "-f", "/"});
    CHECK(r.code == 1);
    CHECK(r.err == "runq: --file: cannot read '/': Is a directory\n");

    const Program starving = {
        "runq", "", [](const Options&, Trace*) -> std::unique_ptr<Model> { throw std::bad_alloc(); }};
    r = run_cli(starving, {"m"});
    CHECK(r.code == 1);
    CHECK(r.err == "runq: not enough memory\n");

    Bigram table;
    loaded = &table;
    const std::array arguments = {"runq", "m", "--ids", "1"};
    const Streams io{std::tmpfile(), std::fopen("/dev/full", "w"), std::tmpfile()};
    REQUIRE(io.out != nullptr);
    CHECK(run_with_streams(arguments.size(), arguments.data(), table_program, io) == 1);
    std::fclose(io.in);
    std::fclose(io.out);
    CHECK(contents(io.err) == "runq: cannot write the output: No space left on device\n");
}

TEST_CASE("cli: help and version") {
    Result r = run_cli(no_program, {"-h"});
    CHECK(r.code == 0);
    CHECK(r.err == "");
    CHECK(r.out.starts_with("runq: loads nothing\n"));
    for (size_t begin = 0, end; (end = r.out.find('\n', begin)) != std::string::npos; begin = end + 1) {
        CHECK(end - begin <= 80);
    }
    for (const char* option : {"--prompt",     "--file",    "--ids",       "--mode",
                               "--steps",      "--ctx",     "--system",    "--think",
                               "--temp",       "--top-k",   "--top-p",     "--seed",
                               "--info",       "--ppl",     "--min-p",     "--repetition-penalty",
                               "--bench",      "--threads", "--print-ids", "--trace",
                               "--rope-theta", "--help",    "--version"}) {
        CAPTURE(option);
        CHECK(r.out.find(option) != std::string::npos);
    }
    r = run_cli(no_program, {"--version"});
    CHECK(r.code == 0);
    CHECK(r.out == std::string("runq ") + program_version + "\n");
}

TEST_CASE("cli: the context is the model's, at most 4096, or what --ctx says") {
    ModelConfig c;
    Options o;
    c.max_seq_len = 131072;
    CHECK(context_length(o, c) == 4096);
    c.max_seq_len = 100;
    CHECK(context_length(o, c) == 100);
    o.ctx = 100;
    CHECK(context_length(o, c) == 100);
    o.ctx = 101;
    CHECK_THROWS_WITH_AS(context_length(o, c), "--ctx: 101 is more than the model's max_seq_len, 100",
                         UsageError);
}

// ----------------------------------------------------------------------------
// Sampling

TEST_CASE("sampler: temperature 0 takes the first of the largest") {
    Sampler s = sampler_of(0, 0, 1, 1);
    const std::vector<float> logits = {-3, 2, 7, 7, 1};
    CHECK(s.sample(logits) == 2);
    CHECK(argmax(std::vector<float>{qnan, -1, qnan, -0.5f, qnan}) == 3);
    CHECK(argmax(std::vector<float>{1, inf, inf}) == 1);
    CHECK(argmax(std::vector<float>{qnan, qnan}) == 0);
    CHECK(argmax(std::vector<float>{-inf, -inf}) == 0);
}

namespace {

// How often each of n tokens is drawn in `draws`.
std::vector<double> frequencies(Sampler& s, const std::vector<float>& logits, int draws) {
    std::vector<double> f(logits.size());
    for (int i = 0; i < draws; i++) {
        const int id = s.sample(logits);
        if (id < 0 || id >= static_cast<int>(logits.size())) FAIL("drew " << id);
        f[static_cast<size_t>(id)] += 1;
    }
    return f;
}

// Pearson's statistic of the observed counts against probabilities p; tokens of probability 0 must not
// appear.
double chi_square(const std::vector<double>& observed, const std::vector<double>& p) {
    double n = 0, sum = 0;
    for (const double x : observed) n += x;
    for (size_t i = 0; i < p.size(); i++) {
        if (p[i] == 0) {
            CHECK(observed[i] == 0);
        } else {
            sum += (observed[i] - n * p[i]) * (observed[i] - n * p[i]) / (n * p[i]);
        }
    }
    return sum;
}

std::vector<float> logs(const std::vector<double>& p) {
    std::vector<float> logits;
    for (const double x : p) logits.push_back(static_cast<float>(std::log(x)));
    return logits;
}

std::vector<double> normalized(std::vector<double> p) {
    double sum = 0;
    for (const double x : p) sum += x;
    for (double& x : p) x /= sum;
    return p;
}

}  // namespace

TEST_CASE("sampler: draws from what the temperature and the cuts leave") {
    // Not sorted, so that a cut by position would show.
    const std::vector<double> p = {0.05, 0.30, 0.10, 0.20, 0.01, 0.24, 0.10};
    std::vector<double> hot, cold;
    for (const double x : p) hot.push_back(std::sqrt(x)), cold.push_back(x * x);
    struct Case {
        float temperature;
        int top_k;
        float top_p;
        std::vector<double> expected;
    };
    const std::vector<Case> cases = {
        {1, 0, 1, p},
        {2, 0, 1, hot},
        {0.5f, 0, 1, cold},
        {1, 7, 1, p},
        {1, 100, 1, p},
        {1, 1, 1, {0, 1, 0, 0, 0, 0, 0}},
        {1, 3, 1, {0, 0.30, 0, 0.20, 0, 0.24, 0}},
        {1, 4, 1, {0, 0.30, 0.10, 0.20, 0, 0.24, 0}},  // of two equals the first
        {1, 0, 0, {0, 1, 0, 0, 0, 0, 0}},
        {1, 0, 0.29f, {0, 1, 0, 0, 0, 0, 0}},
        {1, 0, 0.31f, {0, 0.30, 0, 0, 0, 0.24, 0}},  // the token that crosses top_p is in
        {1, 0, 0.70f, {0, 0.30, 0, 0.20, 0, 0.24, 0}},
        {1, 0, 0.80f, {0, 0.30, 0.10, 0.20, 0, 0.24, 0}},
        {1, 0, 0.90f, {0, 0.30, 0.10, 0.20, 0, 0.24, 0.10}},
        {1, 0, 0.985f, {0.05, 0.30, 0.10, 0.20, 0, 0.24, 0.10}},
        // top_p counts among what top_k left: 0.30 of 0.54 is 0.556
        {1, 2, 0.55f, {0, 1, 0, 0, 0, 0, 0}},
        {1, 2, 0.56f, {0, 0.30, 0, 0, 0, 0.24, 0}},
        // and after the temperature: 0.09 of 0.2102 is 0.428
        {0.5f, 0, 0.40f, {0, 1, 0, 0, 0, 0, 0}},
        {0.5f, 0, 0.43f, {0, 0.09, 0, 0, 0, 0.0576, 0}},
    };
    for (const Case& c : cases) {
        CAPTURE(c.temperature);
        CAPTURE(c.top_k);
        CAPTURE(c.top_p);
        Sampler s = sampler_of(c.temperature, c.top_k, c.top_p, 12345);
        const std::vector<double> expected = normalized(c.expected), f = frequencies(s, logs(p), 20000);
        for (size_t i = 0; i < p.size(); i++) CHECK((f[i] > 0) == (expected[i] > 0));
        // 22.5 is passed by chance once in a thousand times with 6 degrees of freedom; the seed is fixed.
        CHECK(chi_square(f, expected) < 22.5);
    }
    // What the most probable have together may be top_p to the bit: the next is out.
    Sampler half = sampler_of(1, 0, 0.5f, 1);
    for (int i = 0; i < 100; i++) CHECK(half.sample(std::vector<float>{0, 0}) == 0);
}

TEST_CASE("sampler: the cuts agree with a sort on a large vocabulary") {
    std::mt19937_64 random(5);
    std::vector<float> logits(20000);
    for (float& x : logits) x = static_cast<float>(random() % 100000) / 10000.0f;
    std::vector<std::pair<double, int>> sorted;
    double total = 0;
    for (size_t i = 0; i < logits.size(); i++) {
        sorted.push_back({-std::exp(static_cast<double>(logits[i])), static_cast<int>(i)});
        total -= sorted.back().first;
    }
    std::sort(sorted.begin(), sorted.end());
    for (const double top_p : {0.001, 0.1, 0.5, 0.9}) {
        size_t n = 0;
        for (double mass = 0; mass < top_p * total; n++) mass -= sorted[n].first;
        std::vector<bool> kept(logits.size());
        for (size_t i = 0; i < n; i++) kept[static_cast<size_t>(sorted[i].second)] = true;
        Sampler s = sampler_of(1, 0, static_cast<float>(top_p), 9);
        size_t wrong = 0;
        for (int i = 0; i < 2000; i++) wrong += kept[static_cast<size_t>(s.sample(logits))] ? 0 : 1;
        CAPTURE(top_p);
        CHECK(wrong == 0);
    }
}

TEST_CASE("sampler: penalty, temperature and cuts as the logits processors of transformers") {
    const Tensors t = read_safetensors("tests/hf/sampling.safetensors");  // tests/sampling_fixture.py
    const std::vector<float> all_settings = t.at("settings").f32(), all_logits = t.at("logits").f32(),
                             all_probabilities = t.at("probabilities").f32();
    const std::vector<int> all_seen = t.at("seen").i32();
    const auto n_rows = static_cast<size_t>(t.at("seen").shape[0]);
    const auto row = [&](const auto& values, size_t i) {
        return std::span(values).subspan(i * values.size() / n_rows, values.size() / n_rows);
    };
    REQUIRE(n_rows == 39);
    for (size_t i = 0; i < n_rows; i++) {
        CAPTURE(i);
        const auto set = row(all_settings, i), logits = row(all_logits, i), p = row(all_probabilities, i);
        Sampler s = sampler_of(set[0], static_cast<int>(set[1]), set[2], 7, set[3], set[4]);
        const int id = s.sample(logits, row(all_seen, i));
        REQUIRE((id >= 0 && id < static_cast<int>(p.size())));
        CHECK(p[static_cast<size_t>(id)] > 0);
        if (set[0] == 0) continue;  // greedy: one token has all the probability
        const std::span<const float> w = s.weights;
        double total = 0;
        for (const float x : w) total += x;
        REQUIRE(w.size() == p.size());
        for (size_t k = 0; k < w.size(); k++) {
            CHECK((w[k] > 0) == (p[k] > 0));
            CHECK(w[k] / total == doctest::Approx(p[k]).epsilon(1e-5));
        }
    }
}

TEST_CASE("sampler: a penalty moves each token once, and an infinite logit stays one") {
    const std::vector<float> logits = {4, 3, -1, -2, inf, -inf};
    const auto best_of = [&](std::vector<float> values, std::vector<int> seen, float penalty) {
        Sampler s = sampler_of(0, 0, 1, 1, 0, penalty);
        CHECK_FALSE(s.greedy());
        return s.sample(values, seen);
    };
    CHECK(best_of({4, 3}, {0}, 1.25f) == 0);        // 3.2
    CHECK(best_of({4, 3}, {0, 0, 0}, 1.25f) == 0);  // and not 2.048
    CHECK(best_of({4, 3}, {0}, 1.5f) == 1);         // 2.67
    CHECK(best_of({-1, -1.4f}, {0}, 1.5f) == 1);    // -1.5
    CHECK(best_of({-1, -0.8f}, {0}, 0.5f) == 0);    // -0.5
    CHECK(best_of({0, -0.1f}, {0, 1}, 1.5f) == 0);  // 0 stays
    CHECK(best_of(logits, {4, 5}, 2) == 4);
    CHECK(best_of({qnan, -inf, -5}, {0, 1, 2}, 2) == 2);
    CHECK(best_of({4, 3}, {}, 1.5f) == 0);
    CHECK(sampler_of(0, 0, 1, 1).greedy());
    CHECK(sampler_of(0, 0, 1, 1, 0.5f).greedy());
    CHECK_FALSE(sampler_of(1, 0, 1, 1).greedy());
}

TEST_CASE("sampler: the seed fixes the sequence") {
    const std::vector<float> logits(1000, 0.0f);
    Sampler a = sampler_of(1, 0, 1, 42), b = a, c = sampler_of(1, 0, 1, 43);
    std::vector<int> x, y, z;
    for (int i = 0; i < 20; i++) {
        x.push_back(a.sample(logits));
        y.push_back(b.sample(logits));
        z.push_back(c.sample(logits));
    }
    CHECK(x == y);
    CHECK(x != z);
    // mt19937_64's first number for its default seed, 5489, is 14514284786278117030 (C++ standard, Table
    // "rand.predef" fixes the sequence): 0.78682... of the range.
    Sampler d = sampler_of(1, 0, 1, 5489);
    CHECK(d.sample(logits) == 786);
}

TEST_CASE("sampler: NaN and infinities never draw anything impossible") {
    for (const auto& [k, p] :
         {std::pair(0, 1.0f), std::pair(2, 1.0f), std::pair(0, 0.9f), std::pair(3, 0.5f)}) {
        Sampler s = sampler_of(1, k, p, 3, 0.01f);
        for (int i = 0; i < 200; i++) {
            CHECK(s.sample(std::vector<float>{qnan, qnan, qnan}) == 0);
            CHECK(s.sample(std::vector<float>{-inf, -inf}) == 0);
            CHECK(s.sample(std::vector<float>{0, inf, 3, inf}) == 1);
            CHECK(s.sample(std::vector<float>{qnan, 1, -inf}) == 1);
            const int id = s.sample(std::vector<float>{qnan, 0, -inf, 0.5f, qnan});
            CHECK((id == 1 || id == 3));
            CHECK(s.sample(std::vector<float>{3e38f, -3e38f, -3e38f}) == 0);
            CHECK(s.sample(std::vector<float>{5}) == 0);
        }
    }
    Sampler cold = sampler_of(std::numeric_limits<float>::denorm_min(), 0, 0.9f, 3);
    CHECK(cold.sample(std::vector<float>{1, 2, 1.9999f}) == 1);
}

// ----------------------------------------------------------------------------
// Generating

TEST_CASE("generate: the prompt goes in pieces, then one token at a time, up to an eos id") {
    Bigram table;
    TableModel model = table.model();
    Session s = greedy_session(model);
    std::vector<int> ids = {0, 4}, emitted;
    CHECK(generate(s, ids, [&](int id) { emitted.push_back(id); }) == Stop::end_of_text);
    CHECK(ids == std::vector<int>{0, 4, 5, 6, 7});
    CHECK(emitted == std::vector<int>{5, 6, 7});
    // The eos id itself is never run.
    CHECK(table.fed == std::vector<Fed>{{0, {0, 4}, 1}, {2, {5}, 1}, {3, {6}, 1}});
    CHECK(s.held == std::vector<int>{0, 4, 5, 6});
    CHECK(s.statistics.n_prefill == 2);
    CHECK(s.statistics.n_decode == 2);
    CHECK(s.statistics.decode_bytes == 2 * 1000 + 10 * (3 + 4));

    table.fed.clear();
    std::vector<int> long_prompt(30, 1);
    Session t = greedy_session(model);
    t.max_new = 1;
    CHECK(generate(t, long_prompt, [](int) {}) == Stop::steps);
    REQUIRE(table.fed.size() == 10);  // chunks of 3
    for (size_t i = 0; i < 10; i++)
        CHECK(table.fed[i] == Fed{static_cast<int>(3 * i), std::vector<int>(3, 1), i < 9 ? 0 : 1});
}

TEST_CASE("generate: stops at its number of tokens and at the end of the context") {
    Bigram table;
    TableModel model = table.model();
    model.config.eos_ids = {};
    Session s = greedy_session(model, 10);
    s.max_new = 3;
    std::vector<int> ids = {6};
    CHECK(generate(s, ids, [](int) {}) == Stop::steps);
    CHECK(ids == std::vector<int>{6, 7, 0, 1});
    CHECK(table.fed.size() == 3);

    Session t = greedy_session(model, 10);
    ids = {0, 1, 2};
    CHECK(generate(t, ids, [](int) {}) == Stop::context);
    CHECK(ids == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 0, 1});
    CHECK(table.fed.back().pos == 8);

    Session u = greedy_session(model, 3);
    ids = {0, 1, 2};
    CHECK(generate(u, ids, [](int) {}) == Stop::context);
    CHECK(ids.size() == 3);
}

TEST_CASE("lookup: what followed the last three tokens, or two, at the last place where they stood before") {
    const std::vector<int> ids = {1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 1, 2, 3};
    CHECK(Lookup{8}.guess(ids, 8) == std::vector<int>{4, 9});  // 1 2 3, not 2 3; two at first
    CHECK(Lookup{1}.guess(ids, 8) == std::vector<int>{4});
    CHECK(Lookup{8}.guess(ids, 1) == std::vector<int>{4});
    CHECK(Lookup{8}.guess(ids, 0).empty());
    CHECK(Lookup{0}.guess(ids, 8).empty());
    CHECK(Lookup{8}.guess(std::span(ids).subspan(1), 8) == std::vector<int>{5, 6});  // 2 3, the last of two
    CHECK(Lookup{8}.guess(std::vector<int>{1, 2}, 8).empty());
    CHECK(Lookup{8}.guess(std::vector<int>{4, 4, 4}, 8) == std::vector<int>{4});  // no further than the text

    Lookup lookup{7};
    const std::vector<int> cycle = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    auto length = [&] { return lookup.guess(cycle, 99).size(); };
    lookup.judge(2, 2);
    CHECK(length() == 4);
    lookup.judge(4, 4);
    CHECK(length() == 7);
    lookup.judge(3, 7);
    CHECK(length() == 3);
    lookup.judge(0, 3);
    CHECK(length() == 1);
    lookup.judge(1, 1);
    CHECK(length() == 2);
}

TEST_CASE("lookup: the same text in fewer passes, greedy and drawn") {
    std::mt19937 rng(12);
    for (int round = 0; round < 200; round++) {
        Bigram table(5);
        for (float& logit : table.table) logit = float(rng() % 1000) / 300;
        table.context = 40, table.max_chunk = 6;
        const float temperature = round % 2 == 0 ? 0.0f : 0.3f, penalty = round % 3 == 0 ? 1.1f : 1.0f;
        const int max_new = round % 5 == 0 ? INT_MAX : 1 + round % 30, eos = round % 7 == 0 ? round % 5 : -1;
        std::vector<std::vector<int>> texts;
        std::vector<size_t> passes;
        for (const int most : {0, 1, 3, 9}) {
            table.fed.clear();
            TableModel model = table.model();
            model.config.eos_ids = {eos};
            Session s{model, sampler_of(temperature, 0, 1, uint64_t(round), 0, penalty), 40, max_new,
                      Lookup{size_t(most)}};
            std::vector<int> ids = {1, 2, 3}, emitted;
            generate(s, ids, [&](int id) { emitted.push_back(id); });
            CHECK(std::equal(emitted.begin(), emitted.end(), ids.begin() + 3, ids.end()));
            // The KV cache has what the text has.
            REQUIRE(s.held.size() < ids.size() + 1);
            CHECK(std::equal(s.held.begin(), s.held.end(), ids.begin()));
            CHECK(s.statistics.n_passes + 1 == int(table.fed.size()));
            CHECK(s.statistics.n_decode >= s.statistics.n_passes);
            std::vector<int> cache;
            for (const Fed& fed : table.fed) {  // each pass goes on behind what the text has
                const auto pos = static_cast<size_t>(fed.pos);
                REQUIRE(pos <= cache.size());
                REQUIRE(pos + fed.tokens.size() <= 40);
                cache.resize(pos);
                CHECK(std::equal(cache.begin(), cache.end(), ids.begin()));
                CHECK(fed.tokens[0] == ids[pos]);
                cache.insert(cache.end(), fed.tokens.begin(), fed.tokens.end());
            }
            texts.push_back(ids);
            passes.push_back(table.fed.size());
        }
        for (size_t i = 1; i < texts.size(); i++) {
            CHECK(texts[i] == texts[0]);
            CHECK(passes[i] <= passes[0]);
        }
        // Greedy and without a penalty, this text goes round in a circle of at most five tokens.
        if (temperature == 0 && penalty == 1 && texts[0].size() == 40) CHECK(passes[3] < passes[0] * 3 / 4);
    }
}

TEST_CASE("generate: what the KV cache holds is not run again") {
    Bigram table;
    TableModel model = table.model();
    Session s = greedy_session(model);
    s.max_new = 2;
    std::vector<int> ids = {0, 1, 2};
    generate(s, ids, [](int) {});
    CHECK(ids == std::vector<int>{0, 1, 2, 3, 4});
    CHECK(s.held == std::vector<int>{0, 1, 2, 3});  // 4 was never run

    struct Turn {
        std::vector<int> ids;
        Fed first;
    };
    const std::vector<Turn> turns = {
        {{0, 1, 2, 3, 4, 6, 1}, {4, {4, 6, 1}, 1}},  // goes on; held: 0 1 2 3 4 6 1 2
        {{0, 1, 5, 2}, {2, {5, 2}, 1}},              // parts at the third token; held: 0 1 5 2 3
        {{0, 1, 5, 2}, {3, {2}, 1}},                 // all there, but the last is run for its logits
        {{3, 2}, {0, {3, 2}, 1}},                    // nothing in common
    };
    for (const Turn& turn : turns) {
        table.fed.clear();
        ids = turn.ids;
        const int last = ids.back();
        generate(s, ids, [](int) {});
        CHECK(table.fed.front() == turn.first);
        CHECK(ids[turn.ids.size()] == last + 1);
    }
}

TEST_CASE(
    "generate: a penalty counts what was generated and the prompt, and no device picks the token then") {
    for (const float penalty : {1.0f, 2.0f}) {
        Bigram table;  // 5 for the next token, else 0
        for (int t = 0; t < 7; t++) table.row(t)[6] = 3;
        TableModel model = table.model();
        int picked = 0;
        model.finds_best = true;
        model.greedy = [&](std::span<const int> tokens, int pos) {
            picked++;
            return argmax(model.forward(tokens, pos, 1));
        };
        Session s{model, sampler_of(0, 0, 1, 0, 0, penalty), 64};
        std::vector<int> ids = {3, 0, 1};
        generate(s, ids, [](int) {});
        CHECK((picked > 0) == (penalty == 1));
        // With it, 3 is no longer worth 5 but 2.5 when 2 is the last token.
        CHECK(ids == (penalty == 1 ? std::vector<int>{3, 0, 1, 2, 3, 4, 5, 6, 7}
                                   : std::vector<int>{3, 0, 1, 2, 6, 7}));
    }
}

TEST_CASE("generate: logits that are not finite end it, behind the text and with the position") {
    for (const float bad : {qnan, inf, -inf}) {
        for (const bool by_device : {false, true}) {
            Bigram table;
            table.row(2)[4] = bad;
            TableModel model = table.model();
            model.finds_best = by_device;
            if (by_device)
                model.greedy = [&](std::span<const int> tokens, int pos) {
                    const auto logits = model.forward(tokens, pos, 1);
                    return all_finite(logits.data(), logits.size()) ? argmax(logits) : -1;
                };
            Session s{model, sampler_of(0, 0, 1, 0), 64};
            std::vector<int> ids = {0}, said;
            const auto run = [&] { generate(s, ids, [&](int id) { said.push_back(id); }); };
            CHECK_THROWS_WITH_AS(run(), "position 2: the logits are not finite", NotFinite);
            CHECK(said == std::vector<int>{1, 2});
            loaded = &table;
            const Result r = run_cli(table_program, {"m", "--ids", "0"});
            CHECK(r.code == 1);
            CHECK(r.out == "1,2\n");
            CHECK(r.err == "runq: m: position 2: the logits are not finite\n");
        }
    }
}

TEST_CASE("generate: a penalty with a window counts the last of the new tokens alone") {
    using Ids = std::vector<int>;
    Bigram table;  // 0 and 1 follow each other by 5 to 3
    table.row(1)[2] = 0;
    table.row(1)[0] = 5;
    table.row(0)[6] = table.row(1)[6] = 3;
    TableModel model = table.model();
    const std::vector<std::pair<std::optional<size_t>, Ids>> cases = {
        {std::nullopt, {0, 1, 6, 7}},  // 0 is in the prompt
        {64, {0, 1, 0, 6, 7}},         // 1 was said two tokens ago
        {2, {0, 1, 0, 6, 7}},         {1, {0, 1, 0, 1, 0, 1, 0}}, {0, {0, 1, 0, 1, 0, 1, 0}},
    };
    const auto answer = [&](std::optional<size_t> window, int max_new, float penalty) {
        Session s{model, sampler_of(0, 0, 1, 0, 0, penalty), 64, max_new};
        s.penalty_window = window;
        Ids ids = {0};
        generate(s, ids, [](int) {});
        return ids;
    };
    for (const auto& [window, expected] : cases) CHECK(answer(window, 6, 2) == expected);
    // What followed the last eight tokens each time that they stood there before is penalized as often.
    CHECK(answer(0, 40, 2) == Ids{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 6, 7});
    CHECK(answer(0, 40, 1.4f) == Ids{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 6, 7});
}

TEST_CASE("generate: the first Ctrl-C ends it between two tokens, with the statistics and exit code 130") {
    const OnSigint default_action(SIG_DFL);
    Bigram table;
    loaded = &table;
    table.raise_at_call = 2;  // the prompt, one token, this one
    const Result r = run_cli(table_program, {"m", "--ids", "0", "-n", "0"});
    CHECK(r.code == 130);
    CHECK(r.out == "1,2,3\n");
    CHECK(r.err.find("decode    2 tokens") != std::string::npos);
}

TEST_CASE("generate: a Ctrl-C that was ignored before the program started is ignored to the end") {
    const OnSigint ignored(SIG_IGN);
    Bigram table;
    loaded = &table;
    table.raise_at_call = 2;
    const Result r = run_cli(table_program, {"m", "--ids", "0", "-n", "0"});
    CHECK(r.code == 0);
    CHECK(r.out == "1,2,3,4,5,6,7\n");
}

TEST_CASE("cli: ids in, ids out, and the statistics") {
    Bigram table;
    loaded = &table;
    Result r = run_cli(table_program, {"m", "--ids", "3,4", "-j", "1"});
    CHECK(r.code == 0);
    CHECK(r.out == "5,6,7\n");
    CHECK(r.err.find("lookup, 1 thread, context 64") != std::string::npos);
    CHECK(r.err.find("temperature 0") != std::string::npos);
    CHECK(r.err.find("prefill   2 tokens") != std::string::npos);
    CHECK(r.err.find("decode    2 tokens") != std::string::npos);

    r = run_cli(table_program, {"m", "--ids", "3,4", "-t", "0.7", "-k", "2", "-p", "0.5", "-s", "99"});
    CHECK(r.err.find("temperature 0.7, top-k 2, top-p 0.5, seed 99\n") != std::string::npos);
    r = run_cli(table_program, {"m", "--ids", "3,4", "-t", "0.7", "-s", "99", "--min-p", "0.1",
                                "--repetition-penalty", "1.25"});
    CHECK(r.err.find("seed 99, min-p 0.1, repetition penalty 1.25\n") != std::string::npos);
    r = run_cli(table_program, {"m", "--ids", "3,4", "--min-p", "0.1", "--repetition-penalty", "100"});
    CHECK(r.err.find("the most probable token each time, repetition penalty 100\n") != std::string::npos);
}

TEST_CASE("cli: without a prompt generation starts from the BOS alone") {
    struct WithBos {
        static std::unique_ptr<Model> load(const Options&, Trace*) {
            auto m = std::make_unique<TableModel>(*loaded);
            m->config.bos_id = 4;
            return m;
        }
    };
    Bigram table;
    loaded = &table;
    for (const std::vector<const char*>& arguments :
         {std::vector<const char*>{"m"}, {"m", "-i", ""}, {"m", "-f", "/dev/null"}, {"m", "-i", "-"}}) {
        const Result r = run_cli({"runq", "", WithBos::load}, arguments, "\n");
        CHECK(r.code == 0);
        CHECK(r.out == "5,6,7\n");
    }
}

TEST_CASE("cli: min_p and the penalty are the model's unless given; --info names them where they are set") {
    struct Asking {
        static std::unique_ptr<Model> load(const Options&, Trace*) {
            auto m = std::make_unique<TableModel>(*loaded);
            m->config.min_p = 0.05f;
            m->config.repetition_penalty = 1.1f;
            return m;
        }
    };
    Bigram table;
    loaded = &table;
    const Program asking = {"runq", "", Asking::load};
    CHECK(run_cli(asking, {"m", "--info"})
              .out.find("min_p                   0.05\nrepetition_penalty      1.1\n") != std::string::npos);
    const std::string plain = run_cli(table_program, {"m", "--info"}).out;
    CHECK(plain.find("min_p") == std::string::npos);
    CHECK(plain.find("repetition_penalty") == std::string::npos);
    const auto sampling = [&](std::vector<const char*> options) {
        options.insert(options.begin(), {"m", "--ids", "3", "-s", "9"});
        const std::string err = run_cli(asking, options).err;
        const size_t begin = err.find("sampling  ") + 10;
        return err.substr(begin, err.find('\n', begin) - begin);
    };
    CHECK(sampling({}) == "temperature 0, the most probable token each time, repetition penalty 1.1");
    CHECK(sampling({"-t", "1", "-p", "1"}) ==
          "temperature 1, top-k 0, top-p 1, seed 9, min-p 0.05, repetition penalty 1.1");
    CHECK(sampling({"-t", "1", "-p", "1", "--min-p", "0", "--repetition-penalty", "1"}) ==
          "temperature 1, top-k 0, top-p 1, seed 9");
}

TEST_CASE("cli: --info names every field and runs nothing") {
    Bigram table;
    loaded = &table;
    const Result r = run_cli(table_program, {"m", "--info", "-c", "20", "-j", "1"});
    CHECK(r.code == 0);
    CHECK(r.err == "");
    CHECK(table.fed.empty());
    std::map<std::string, std::string> fields;
    for (size_t begin = 0, end; (end = r.out.find('\n', begin)) != std::string::npos; begin = end + 1) {
        const std::string line = r.out.substr(begin, end - begin);
        const size_t gap = line.find(' ');
        REQUIRE(gap != std::string::npos);
        fields[line.substr(0, gap)] = line.substr(line.find_first_not_of(' ', gap));
    }
    CHECK(fields["vocab_size"] == "8");
    CHECK(fields["eos_ids"] == "7");
    CHECK(fields["bos_id"] == "none");
    CHECK(fields["tokenizer"] == "no");
    CHECK(fields["chat_template"] == "no");
    CHECK(fields["kernel"] == "lookup");
    CHECK(fields["scheme"] == "table");
    CHECK(fields["weight_bytes_per_token"] == "1000");
    CHECK(fields["kv_cache_bytes"] == "200");
    CHECK(fields["rope_scaling"] == "none");
    // The tensors, which this model does not have but here.
    struct WithTensors {
        static std::unique_ptr<Model> load(const Options&, Trace*) {
            auto m = std::make_unique<TableModel>(*loaded);
            m->tensors = {{"norm", "F32", {8}, 256, 0, 32},
                          {"layers.0.attn.q_proj.codes", "I8", {4, 8}, 288, 32, 32}};
            return m;
        }
    };
    const Result list = run_cli({"runq", "", WithTensors::load}, {"m", "--info", "-c", "20", "-j", "1"});
    CHECK(list.out == r.out +
                          "tensor                  norm F32 [8] 256\n"
                          "tensor                  layers.0.attn.q_proj.codes I8 [4,8] 288\n");
}

// ----------------------------------------------------------------------------
// Text: a tokenizer of twelve tokens, and a chat template of them that drops old thoughts as Qwen3's does

namespace {

const std::vector<std::string> names = {"<b>", "<u>", "<a>", "<e>",  "<s>",     "a",
                                        "b",   "c",   "d",   "\xC3", "<think>", "</think>"};
enum : int { bos, user, assistant, end, sys, a, b, c, d, half, think, unthink };  // \xC3: half a character

// What it does to a conversation: no template, one that writes pieces around each message, one that does not.
enum class Chat { none, pieces, empty };

// The section as docs/tokenizer.md lays it out.
Tokenizer small_tokenizer(bool add_bos, Chat kind) {
    const bool with_chat = kind != Chat::none;
    std::string bytes, flags, offsets, added, chat;
    auto u32 = [](std::string& to, size_t value) {
        for (int i = 0; i < 4; i++) to.push_back(static_cast<char>(value >> (8 * i)));
    };
    for (size_t id = 0; id < names.size(); id++) {
        const bool word = names[id].size() == 1, special = id <= sys;
        u32(offsets, bytes.size());
        bytes += names[id];
        flags.push_back(static_cast<char>(1 | (word ? 2 : 0) | (special ? 4 : 0)));
        if (word) continue;
        u32(added, id);
        u32(added, special ? 1 : 0);
    }
    u32(offsets, bytes.size());
    if (with_chat) {
        u32(chat, 8);  // thoughts are dropped
        for (const char* piece : {"<b>", "<b><s>", "<e>", "", "", "<u>", "<e>", "<a>", "<e>", "<a>",
                                  "<a><think></think>", "<think>", "</think>"}) {
            const std::string text = kind == Chat::empty ? "" : piece;
            u32(chat, text.size());
            chat += text;
        }
    }
    std::string header;
    const size_t size = 48 + offsets.size() + added.size() + flags.size() + bytes.size() + chat.size();
    for (const size_t value : {size_t{0x6E6B6F74}, size_t{1}, size, names.size(),
                               size_t{(add_bos ? 4u : 0u) | (with_chat ? 8u : 0u)}, size_t{bos}, size_t{0},
                               added.size() / 8, size_t{0}, size_t{0}, chat.size(), bytes.size()}) {
        u32(header, value);
    }
    const std::string section = header + offsets + added + flags + bytes + chat;
    return Tokenizer(std::as_bytes(std::span(section)), static_cast<int>(names.size()));
}

// Answers with a thought, c, and then d.
struct Talker : Bigram {
    Talker() : Bigram(static_cast<int>(names.size())) {
        max_chunk = 64;
        std::fill(table.begin(), table.end(), 0.0f);
        for (const auto& [from, to] : {std::pair(assistant, think),
                                       {think, c},
                                       {c, unthink},
                                       {unthink, d},
                                       {d, end},
                                       {a, half},
                                       {half, b}}) {
            row(from)[static_cast<size_t>(to)] = 5;
        }
    }
};

template <bool add_bos, Chat chat>
std::unique_ptr<Model> load_talker(const Options& o, Trace*) {
    auto m = std::make_unique<TableModel>(*loaded);
    m->config.eos_ids = {end};
    m->config.bos_id = bos;
    m->tokenizer = std::make_shared<Tokenizer>(small_tokenizer(add_bos, chat));
    context_length(o, m->config);
    return m;
}
const Program talker = {"runq", "", load_talker<true, Chat::pieces>};

}  // namespace

TEST_CASE("generate mode: the prompt's text, then whole characters, without the special tokens") {
    Talker model;
    loaded = &model;
    Result r = run_cli(talker, {"m", "-i", "ab<u>c"});
    CHECK(r.code == 0);
    CHECK(r.out == "ab<u>c</think>d\n");
    CHECK(model.fed[0].tokens == std::vector<int>{bos, a, b, user, c});

    r = run_cli(talker, {"m", "-i", "-"}, "b\nc\n");  // one newline at the end is dropped
    CHECK(r.out.starts_with("b\nc</think>"));
    r = run_cli(talker, {"m", "-f", "-"}, "c\n\n");
    CHECK(r.out.starts_with("c\n"));

    r = run_cli(talker, {"m", "--ids", "0,5,6,7"});
    CHECK(r.out == "abc</think>d\n");
    r = run_cli(talker, {"m", "-i", "c", "--print-ids"});
    CHECK(r.out == "11,8,3\n");

    // a is followed by half a character and that by b: what cannot become a character shows as U+FFFD.
    r = run_cli(talker, {"m", "-i", "a", "-n", "1"});
    CHECK(r.out == "a\xEF\xBF\xBD\n");
    r = run_cli(talker, {"m", "-i", "a", "-n", "2"});
    CHECK(r.out ==
          "a\xEF\xBF\xBD"
          "b\n");
    r = run_cli(talker, {"m", "-i", "c\xFF", "-n", "1"});
    CHECK(r.code == 2);
    CHECK(r.err == "runq: --prompt: the text is not UTF-8 at byte 1\n");
}

TEST_CASE("chat mode: every turn runs only what has changed") {
    Talker model;
    loaded = &model;
    Result r = run_cli(talker, {"m", "-m", "chat"}, "a\n\nb\r\n");  // an empty line is no turn
    CHECK(r.code == 0);
    CHECK(r.out == "<think>c</think>d\n<think>c</think>d\n");
    auto prompts = [&] {
        std::vector<Fed> calls;
        for (const Fed& f : model.fed) {
            if (f.tokens.size() > 1) calls.push_back(f);
        }
        return calls;
    };
    // In the second turn the first one's thought has gone, so all after its <a> is new.
    CHECK(prompts() == std::vector<Fed>{{0, {bos, user, a, end, assistant}, 1},
                                        {5, {d, end, user, b, end, assistant}, 1}});
    CHECK(r.err.find("prefill   11 tokens") != std::string::npos);
    CHECK(r.err.find("decode    8 tokens") != std::string::npos);
    CHECK(r.err.find("> ") == std::string::npos);

    model.fed.clear();
    r = run_cli(talker, {"m", "-m", "chat", "-i", "a", "-y", "cc", "-r", "0"}, "b");
    CHECK(r.out == "d\nd\n");
    CHECK(prompts() ==
          std::vector<Fed>{{0, {bos, sys, c, c, end, user, a, end, assistant, think, unthink}, 1},
                           {9, {d, end, user, b, end, assistant, think, unthink}, 1}});

    // An answer that -n cut short is closed by the template, and otherwise stays: no </think>, no thought.
    model.fed.clear();
    r = run_cli(talker, {"m", "-m", "chat", "-n", "2", "--print-ids"}, "a\nb\n");
    CHECK(r.out == "10,7\n10,7\n");
    CHECK(prompts()[1] == Fed{6, {c, end, user, b, end, assistant}, 1});
}

TEST_CASE("chat mode: a conversation as JSON has every character of a message, those of a terminal escaped") {
    CHECK(chat_json({}) == "[\n]\n");
    CHECK(chat_json({{"user", "\"a\\b\"\n\t\x1b[1m\x7f\xc2\x9b"}, {"assistant", "\xe2\x82 \xc3\xa9"}}) ==
          "[\n {\"role\": \"user\", \"content\": \"\\\"a\\\\b\\\"\\u000a\\u0009\\u001b[1m\\u007f\\u009b\"},\n"
          " {\"role\": \"assistant\", \"content\": \"\xef\xbf\xbd \xc3\xa9\"}\n]\n");
}

TEST_CASE("chat mode: draws if neither the user nor the file asks for a temperature") {
    static ModelConfig file;
    struct Asking {
        static std::unique_ptr<Model> load(const Options& o, Trace* trace) {
            auto m = load_talker<true, Chat::pieces>(o, trace);
            m->config.temperature = file.temperature;
            m->config.top_p = file.top_p;
            m->config.top_k = file.top_k;
            m->config.repetition_penalty = file.repetition_penalty;
            return m;
        }
    };
    Talker model;
    loaded = &model;
    const auto sampling = [&](std::vector<const char*> options) {
        options.insert(options.begin(), {"m", "-i", "a", "-n", "1", "-s", "9"});
        const std::string err = run_cli({"runq", "", Asking::load}, options).err;
        const size_t begin = err.find("sampling  ") + 10;
        return err.substr(begin, err.find('\n', begin) - begin);
    };
    const std::string defaults =
        format("-t %g -p %g and a penalty of %g", static_cast<double>(chat_temperature),
               static_cast<double>(chat_top_p), static_cast<double>(chat_repetition_penalty));
    CHECK(std::string(help_text).find(defaults) != std::string::npos);
    const std::string greedy = "temperature 0, the most probable token each time";
    file.temperature = 0;
    file.top_p = 1;
    CHECK(sampling({"-m", "chat"}) ==
          "temperature 0.1, top-k 0, top-p 0.9, seed 9, repetition penalty 1.15 within 128 tokens");
    CHECK(sampling({}) == greedy);
    CHECK(sampling({"-m", "chat", "-t", "0"}) == greedy);
    CHECK(sampling({"-m", "chat", "-t", "0.5"}) == "temperature 0.5, top-k 0, top-p 1, seed 9");
    CHECK(sampling({"-m", "chat", "-k", "5", "-p", "1", "--repetition-penalty", "1"}) ==
          "temperature 0.1, top-k 5, top-p 1, seed 9");
    file.top_p = 0.5f;
    file.top_k = 7;
    file.repetition_penalty = 1.3f;
    CHECK(sampling({"-m", "chat"}) == "temperature 0.1, top-k 7, top-p 0.5, seed 9, repetition penalty 1.3");
    file.temperature = 0.6f;
    file.repetition_penalty = 1;
    CHECK(sampling({"-m", "chat"}) == "temperature 0.6, top-k 7, top-p 0.5, seed 9");
}

TEST_CASE("chat mode: a full context drops the oldest turns with one line, and ends an answer") {
    Talker model;
    loaded = &model;
    // A turn is 5 + 5 tokens, the prompt of the second 11; a quarter of the context is kept for the answer.
    for (const char* context : {"10", "11", "12", "13"}) {
        model.fed.clear();
        const Result r = run_cli(talker, {"m", "-m", "chat", "-c", context}, "a\na\n");
        CHECK(r.code == 0);
        CHECK(r.out == "<think>c</think>d\n<think>c</think>d\n");
        CHECK(r.err.find(
                  format("the context of %s tokens is full: the oldest turn is forgotten\n", context)) == 0);
    }
    // With a system prompt, which stays; and two turns at once.
    Result r = run_cli(talker, {"m", "-m", "chat", "-c", "24", "-y", "c"}, "a\na\nbbbbbbbb\n");
    CHECK(r.err.find("the context of 24 tokens is full: the oldest 2 turns are forgotten\n") !=
          std::string::npos);
    r = run_cli(talker, {"m", "-m", "chat", "-c", "7"}, "a\nb\n");
    CHECK(r.out == "<think>c\n<think>c\n");
    CHECK(r.err.find("the context of 7 tokens is full: the answer ends here\n") == 0);
    // A message that is too long by itself: nothing else is forgotten for it.
    r = run_cli(talker, {"m", "-m", "chat", "-c", "16"}, "a\nbbbbbbbbbbbbbbbbbbbb\nb\n");
    CHECK(r.out == "<think>c</think>d\n<think>c</think>d\n");
    CHECK(r.err.find("this message is too long: ") == 0);
    r = run_cli(talker, {"m", "-m", "chat", "-c", "9"}, "bbbbbbbbbbbbbbbbbbbb\na\n");
    CHECK(r.code == 0);
    CHECK(r.out == "<think>c</think>d\n");
    CHECK(r.err.find("this message is too long: 24 tokens, the context is 9 (--ctx)\n") == 0);
    // That of an option ends it.
    r = run_cli(talker, {"m", "-m", "chat", "-c", "4", "-i", "a"}, "b\n");
    CHECK(r.code == 2);
    CHECK(r.out == "");
    CHECK(r.err == "runq: --mode chat: the prompt is 5 tokens long, the context only 4\n");
}

TEST_CASE("chat mode: needs a template") {
    Talker model;
    loaded = &model;
    const Result r = run_cli({"runq", "", load_talker<true, Chat::none>}, {"m", "-m", "chat"}, "a\n");
    CHECK(r.code == 2);
    CHECK(r.err == "runq: --mode chat: this file has no chat template\n");
}

TEST_CASE("chat mode: a conversation that gives no tokens is refused, and nothing is run") {
    Talker model;
    loaded = &model;
    const Program empty = {"runq", "", load_talker<true, Chat::empty>};
    const Result r = run_cli(empty, {"m", "-m", "chat", "--print-ids"}, "x\n");  // no token has this letter
    CHECK(r.code == 2);
    CHECK(r.out == "");
    CHECK(r.err ==
          "runq: --mode chat: the prompt is empty, and this model has no token to begin a text with\n");
    CHECK(model.fed.empty());
    CHECK(run_cli(empty, {"m", "-m", "chat", "-n", "1", "--print-ids"}, "b\n").code == 0);
}

TEST_CASE("generate: a long prompt's progress is told before each chunk and at its end, a short one's not") {
    Bigram table;
    TableModel model = table.model();
    model.max_chunk = 2;
    std::vector<std::pair<size_t, size_t>> told;
    const auto run = [&](uint64_t macs_per_token) {
        model.macs_per_token = macs_per_token;
        Session s = greedy_session(model, 8);
        s.max_new = 1;
        s.progress = [&](size_t n_done, size_t n) { told.emplace_back(n_done, n); };
        std::vector<int> ids(5, 1);
        told.clear();
        generate(s, ids, [](int) {});
        return told;
    };
    CHECK(run(30'000'000'000) == std::vector<std::pair<size_t, size_t>>{{0, 5}, {2, 5}, {4, 5}, {5, 5}});
    CHECK(run(10'000'000'000).empty());
}

TEST_CASE("generate: takes 1 to `context` tokens") {
    Bigram table;
    TableModel model = table.model();
    Session s = greedy_session(model, 4);
    std::vector<int> none, five(5, 1);
    CHECK_THROWS_WITH_AS(generate(s, none, [](int) {}), "generate: 0 tokens to go on from, expected 1 to 4",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(generate(s, five, [](int) {}), "generate: 5 tokens to go on from, expected 1 to 4",
                         std::invalid_argument);
    CHECK(table.fed.empty());
}

TEST_CASE("--ppl: one line, and a BOS before every window only if the tokenizer puts it there") {
    Talker model;
    loaded = &model;
    auto first_window = [&](const Program& program) {
        model.fed.clear();
        const Result r = run_cli(program, {"m", "--ppl", "-", "-c", "4"}, "abcdabc");
        CHECK(r.code == 0);
        return std::pair(r.out, model.fed[0].tokens);
    };
    const double n = static_cast<double>(names.size());
    const double hit = std::log(std::exp(5.0) + n - 1) - 5, miss = hit + 5, even = std::log(n);
    // <b>abc <b>dab <b>c: after <b> and b everything is equally likely, a makes \xC3 likely, d <e>
    CHECK(first_window(talker) ==
          std::pair(format("perplexity %.4f over 7 tokens (windows of 4)\n",
                           std::exp((even + miss + even + even + miss + miss + even) / 7)),
                    std::vector<int>{bos, a, b}));
    // abcd abc: three and two scored
    CHECK(first_window({"runq", "", load_talker<false, Chat::pieces>}) ==
          std::pair(format("perplexity %.4f over 5 tokens (windows of 4)\n",
                           std::exp((miss + even + miss + miss + even) / 5)),
                    std::vector<int>{a, b, c}));

    Result r = run_cli(talker, {"m", "--ppl", "-"}, "");
    CHECK(r.code == 1);
    CHECK(r.out == "");
    CHECK(r.err == "runq: --ppl: '-' is 0 tokens long, too short with a context of 64\n");
    r = run_cli(talker, {"m", "--ppl", "/nonexistent"});
    CHECK(r.code == 1);
    CHECK(r.err == "runq: --ppl: cannot read '/nonexistent': No such file or directory\n");
}

// ----------------------------------------------------------------------------
// Perplexity and speed

TEST_CASE("perplexity: windows, chunks and scores, against a sum by hand") {
    Bigram table;
    TableModel model = table.model();
    // After t: 5 for t + 1, 0 for the seven others.
    const double hit = std::log(std::exp(5.0) + 7) - 5, miss = hit + 5;
    std::vector<size_t> progress;
    const auto run = [&](const std::vector<int>& text, int bos_id, int context) {
        Session s = greedy_session(model, context);
        return perplexity(s, text, bos_id, [&](size_t n) { progress.push_back(n); });
    };

    // Without a BOS, windows of 4: (0 1 2 3) (4 0 1 2) (3 5), each without its first token.
    const std::vector<int> ids = {0, 1, 2, 3, 4, 0, 1, 2, 3, 5};
    Perplexity p = run(ids, -1, 4);
    CHECK(p.n_scored == 7);
    CHECK(p.nll == doctest::Approx(5 * hit + 2 * miss).epsilon(1e-12));
    CHECK(p.value() == doctest::Approx(std::exp((5 * hit + 2 * miss) / 7)).epsilon(1e-12));
    CHECK(table.fed == std::vector<Fed>{{0, {0, 1, 2}, 3}, {0, {4, 0, 1}, 3}, {0, {3}, 1}});
    CHECK(progress == std::vector<size_t>{4, 8, 10});

    // With BOS 2 in front, windows of 3 ids: 2(0 1 2) 2(3 4 0) 2(1 2 3) 2(5); all ten are scored.
    table.fed.clear();
    progress.clear();
    p = run(ids, 2, 4);
    CHECK(p.n_scored == 10);
    // hits: 0>1 1>2, 2>3 3>4, 1>2 2>3; misses: 2>0, 4>0, 2>1, 2>5
    CHECK(p.nll == doctest::Approx(6 * hit + 4 * miss).epsilon(1e-12));
    CHECK(table.fed ==
          std::vector<Fed>{{0, {2, 0, 1}, 3}, {0, {2, 3, 4}, 3}, {0, {2, 1, 2}, 3}, {0, {2}, 1}});
    CHECK(progress == std::vector<size_t>{3, 6, 9, 10});

    // A window longer than max_chunk = 3 goes in chunks, at the right positions.
    table.fed.clear();
    p = run(ids, -1, 64);
    CHECK(p.n_scored == 9);
    CHECK(p.nll == doctest::Approx(7 * hit + 2 * miss).epsilon(1e-12));
    CHECK(table.fed == std::vector<Fed>{{0, {0, 1, 2}, 3}, {3, {3, 4, 0}, 3}, {6, {1, 2, 3}, 3}});

    // Nothing to score: no ids, one id without a BOS, a last window of one id, no room beside the BOS.
    CHECK(run({}, 2, 4).n_scored == 0);
    CHECK(run({1}, -1, 4).n_scored == 0);
    CHECK(run({1, 2, 3}, -1, 2).n_scored == 1);
    CHECK(run(ids, 2, 1).n_scored == 0);
    CHECK(run(ids, -1, 1).n_scored == 0);
}

TEST_CASE("perplexity: large logits neither overflow nor vanish") {
    const std::vector<float> logits = {1000, 998, -3e38f};
    CHECK(negative_log_likelihood(logits, 0) == doctest::Approx(std::log1p(std::exp(-2.0))).epsilon(1e-12));
    CHECK(negative_log_likelihood(logits, 1) ==
          doctest::Approx(2 + std::log1p(std::exp(-2.0))).epsilon(1e-12));
    CHECK(negative_log_likelihood(logits, 2) > 1e38);
}

TEST_CASE("bench: runs the prompt at once and then a token at a time") {
    Bigram table;
    table.max_chunk = 8;
    loaded = &table;
    Result r = run_cli(table_program, {"m", "--bench", "5,2", "-j", "2"});
    CHECK(r.code == 0);
    REQUIRE(table.fed.size() == 4);
    CHECK(table.fed[0].tokens.size() == 1);  // brings the weights into memory
    CHECK(table.fed[1].pos == 0);
    CHECK(table.fed[1].tokens.size() == 5);
    CHECK(table.fed[2].pos == 5);
    CHECK(table.fed[3].pos == 6);
    for (const Fed& f : table.fed) {
        for (const int t : f.tokens) CHECK((t >= 0 && t < 8));
    }
    CHECK(r.out.starts_with("prefill 5 tokens: "));
    CHECK(r.out.find("\ndecode 2 tokens: ") != std::string::npos);
    CHECK(r.out.find("GB/s that 2 threads read between the tokens") != std::string::npos);

    r = run_cli(table_program, {"m", "--bench", "3,0"});
    CHECK(r.out.find("decode") == std::string::npos);
    r = run_cli(table_program, {"m", "--bench", "0,1"});
    CHECK(r.out.starts_with("decode 1 tokens: "));
}

TEST_CASE("bench: a share above 100% is explained, and no other") {
    for (const uint64_t kv_bytes : {uint64_t{1} << 40, uint64_t{1}}) {
        Bigram table;
        table.kv_bytes = kv_bytes;
        if (kv_bytes == 1) {  // slower than a page is read, even by a process that stands still for a second
            table.weight_bytes = 1;
            table.pause = std::chrono::milliseconds(2);
        }
        loaded = &table;
        const Result r = run_cli(table_program, {"m", "--bench", "1,3", "-j", "1"});
        const bool above =
            r.out.find("tokens (above 100%: what fits into the caches is read from there)\n") !=
            std::string::npos;
        CHECK(above == (kv_bytes > 1));
    }
}

TEST_CASE("bench: behind positions that are made up nothing runs but the tokens that are timed, and one") {
    struct Filled {
        static std::unique_ptr<Model> load(const Options& o, Trace* trace) {
            auto m = load_table(o, trace);
            m->fill = [](int n) { CHECK(n == 1000); };
            return m;
        }
    };
    Bigram table;
    loaded = &table;
    table.context = table.max_chunk = 1024;
    CHECK(run_cli({"runq", "", Filled::load}, {"m", "--bench", "4,2,1000"}).code == 0);
    CHECK(table.fed.size() == 4);
    for (const Fed& f : table.fed) CHECK(f.pos >= 1000);
}

TEST_CASE("bench: one token in each page of the KV cache goes ahead, untimed") {
    Bigram table;
    loaded = &table;
    table.context = table.max_chunk = 300;
    const Result r = run_cli(table_program, {"m", "--bench", "298,2"});
    CHECK(r.code == 0);
    REQUIRE(table.fed.size() == 6);
    for (size_t i = 0; i < 3; i++) CHECK(table.fed[i] == Fed{static_cast<int>(i) * 128, {7}, 1});
    CHECK(table.fed[3].pos == 0);
    CHECK(table.fed[3].tokens.size() == 298);
    CHECK(table.fed.back().pos == 299);
}

TEST_CASE("bench: the memory it reads between the tokens is not the program's") {
    Bigram table;
    loaded = &table;
    table.weight_bytes = uint64_t{1} << 29;
    const uint64_t before = peak_memory_bytes();
    const Result r = run_cli(table_program, {"m", "--bench", "1,1"});
    const size_t at = r.out.find("memory ");
    REQUIRE(at != std::string::npos);
    CHECK(std::stod(r.out.substr(at + 7)) * 1e9 < static_cast<double>(before + (1 << 28)));
}
