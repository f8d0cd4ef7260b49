// Prompts in chunks: Ctrl-C between them, and memory for their keys and values.
#include <doctest/doctest.h>

#include <utility>

#include "engine/app/measure.h"
#include "engine/os/threads.h"
#include "table_model.h"

namespace {

// A model that takes chunks of 3 tokens and gets a Ctrl-C in the n-th call, counted from 0.
struct Interrupted : Bigram {
    const OnSigint default_action{SIG_DFL};
    explicit Interrupted(int n) {
        raise_at_call = n;
        context = 64;
    }
};

}  // namespace

TEST_CASE("prefill: without logits up to the last chunk") {
    Interrupted table(-1);
    TableModel model = table.model();
    Session s = greedy_session(model);
    s.max_new = 1;
    std::vector<int> ids = {0, 1, 2, 3, 4, 5, 6, 0};
    CHECK(generate(s, ids, [](int) {}) == Stop::steps);
    CHECK(table.fed == std::vector<Fed>{{0, {0, 1, 2}, 0}, {3, {3, 4, 5}, 0}, {6, {6, 0}, 1}});
    CHECK(s.held == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 0});
    CHECK(s.statistics.n_prefill == 8);
}

TEST_CASE("prefill: Ctrl-C ends it after the chunk that runs, with the statistics so far and exit code 130") {
    Interrupted table(1);
    loaded = &table;
    const Result r = run_cli(table_program, {"m", "--ids", "0,1,2,3,4,5,6,0,1,2,3,4", "-n", "0"});
    CHECK(r.code == 130);
    CHECK(r.out == "\n");
    CHECK(table.fed.size() == 2);
    CHECK(r.err.find("prefill   6 tokens") != std::string::npos);
}

TEST_CASE("prefill: Ctrl-C ends --bench within the prompt, untimed or timed") {
    Interrupted timed(2);
    loaded = &timed;
    Result r = run_cli(table_program, {"m", "--bench", "40,20"});
    CHECK(r.code == 130);
    CHECK(timed.fed.size() == 1 + 2);  // the one that goes ahead, and two chunks
    CHECK(r.out.starts_with("prefill 6 tokens: "));
    CHECK(r.out.find("decode") == std::string::npos);

    struct OnDevice {
        static std::unique_ptr<Model> load(const Options&, Trace*) {
            auto m = std::make_unique<TableModel>(*loaded);
            m->finds_best = true;
            m->greedy = [](std::span<const int>, int) { return 0; };
            return m;
        }
    };
    Interrupted untimed(2);
    loaded = &untimed;
    r = run_cli({"runq", "", OnDevice::load}, {"m", "--bench", "40,20"});
    CHECK(r.code == 130);
    CHECK(untimed.fed.size() == 1 + 2);
    CHECK(r.out.find("prefill") == std::string::npos);
}

TEST_CASE("prefill: Ctrl-C ends --ppl after the chunk that runs") {
    const OnSigint default_action(SIG_DFL);
    Bigram table;
    table.raise_at_call = 2;
    TableModel model = table.model();
    catch_ctrl_c();
    Session s = greedy_session(model, 20);
    const Perplexity p = perplexity(s, std::vector<int>(100, 1), -1, [](size_t) {});
    CHECK(interrupted == 1);
    interrupted = 0;
    CHECK(table.fed.size() == 3);
    CHECK(p.n_scored == 9);
}

TEST_CASE("KV cache: no memory for the next page of positions is one line, not the kernel's kill") {
    Bigram table;
    table.kv_page = 4;
    table.kv_bytes = uint64_t{1} << 50;
    loaded = &table;
    Result r = run_cli(table_program, {"m", "--ids", "0,1,2,3,4"});
    CHECK(r.code == 1);
    CHECK(r.out == "");
    CHECK(r.err.starts_with("runq: needs 9007199.25 GB of memory, "));
    CHECK(
        r.err.ends_with(" are available: 9007199.25 GB for the keys and values of positions 0 to 7; fewer "
                        "tokens take less\n"));
    CHECK(table.fed.empty());
    CHECK(run_cli(table_program, {"m", "--bench", "3,6"}).code == 1);
    CHECK(table.fed.empty());
    table.kv_page = 0;  // all of it was allocated when loading
    CHECK(run_cli(table_program, {"m", "--ids", "0,1,2,3,4"}).code == 0);

    // Asked once a page, and before decoding comes to it.
    table.kv_page = 4, table.kv_bytes = 1;
    TableModel model = table.model();
    Session s = greedy_session(model);
    make_room(s, 5);
    CHECK(s.kv_room == 8);
    model.bytes_per_position = uint64_t{1} << 50;
    make_room(s, 8);
    CHECK_THROWS_WITH_AS(make_room(s, 9), doctest::Contains("positions 8 to 11"), std::runtime_error);
    // What takes less: each thread beyond the cores has a stack.
    const int n_threads = threads().size();
    for (const auto& [n, advice] : {std::pair(1, "; fewer tokens take less"),
                                    std::pair(default_threads() + 1, "; fewer threads (-j) take less")}) {
        threads().resize(n);
        CHECK_THROWS_WITH_AS(make_room(s, 9), doctest::Contains(advice), std::runtime_error);
    }
    threads().resize(n_threads);
    model.config.eos_ids = {};
    std::vector<int> ids = {0, 1, 2, 3, 4};
    CHECK_THROWS_AS(generate(s, ids, [](int) {}), std::runtime_error);
    CHECK(ids.size() == 9);  // the ninth token is there; it cannot be run
}

TEST_CASE(
    "trace: no memory for the next positions is one line, asked for the prompt and then token by token") {
    Bigram table;
    TableModel model = table.model();
    Session s = greedy_session(model);
    make_room(s, 1000);  // no trace
    CHECK(s.trace_room == 0);
    model.trace_size = {0, 1, 0, 1};
    make_room(s, 5);
    CHECK(s.trace_room == 5);
    model.trace_size = {7, uint64_t{1} << 50, 0, 1};
    make_room(s, 7);             // the first seven have next to nothing
    for (int i = 0; i < 2; i++)  // what was refused is not there
        CHECK_THROWS_WITH_AS(make_room(s, 9),
                             doctest::Contains("for the trace of positions 7 to 8; --trace-from takes less"),
                             std::runtime_error);
    CHECK(s.trace_room == 7);
}
