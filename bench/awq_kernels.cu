// awq_kernels: checks and times the ladder of kernels that led to runq_awq's two matrix products. The rungs
// and what each improves are in awq_kernels.cuh.
//
// Every rung multiplies the same random numbers. Each is first compared with a float64 product on the host,
// on outputs from all columns; a wrong one is reported and not timed. Then the tables: microseconds, and
// bytes and operations per second as percentages of what this device copies and of what cuBLAS reaches in a
// large fp16 product, both measured in the same run.
//
//     make build/gpu/awq_kernels && build/gpu/awq_kernels [--quick] [--tune] [--seed N] [--json FILE]
//
// Weights are cold, as in a model that is larger than the cache: consecutive runs read different copies of
// them. Activations are warm, as if the kernel before had just written them.
//
// --quick: three numbers of tokens instead of ten. --tune: also awq_gemv in several numbers of splits, and
// awq_gemm of every tile by several numbers of blocks, to see whether runq_awq picks well. Without a GPU, the
// emulator checks the rungs on small matrices.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/awq_harness.cuh"
#include "engine/app/options.h"
#include "engine/gpu/device.h"
#include "engine/os/system.h"

// ----------------------------------------------------------------------------
// Time

#ifdef __CUDACC__

// The most that this device can do.
struct Limits {
    double bytes_per_s = 0;  // of a copy, read and written counted once each
    double flops = 0;        // of cuBLAS, 8192 x 8192 x 8192 in fp16; 0: there is no cuBLAS
};

struct Events {
    cudaEvent_t start = nullptr, end = nullptr;
    Events() {
        check(cudaEventCreate(&start), "cudaEventCreate");
        check(cudaEventCreate(&end), "cudaEventCreate");
    }
    ~Events() {
        cudaEventDestroy(start);
        cudaEventDestroy(end);
    }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    // Seconds that the device takes for what `work` starts.
    template <class Work>
    double seconds(Work work) {
        check(cudaEventRecord(start, device().stream), "cudaEventRecord");
        work();
        check(cudaEventRecord(end, device().stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), "a timed kernel");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
        return ms * 1e-3;
    }
};

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

inline Limits measure_limits([[maybe_unused]] Random& random) {
    Limits limits;
    limits.bytes_per_s = copy_bandwidth();
#ifdef HAVE_CUBLAS
    // Random numbers, as products of zeros are faster.
    constexpr size_t n = 8192, pool = size_t(1) << 20;
    std::vector<half> values(pool);
    for (half& v : values) v = __float2half(uniform(random, -1, 1));
    DeviceBuffer<half> a(n * n), b(n * n);
    DeviceBuffer<float> c(n * n);
    for (size_t i = 0; i < n * n; i += pool) a.upload(values.data(), pool, i);
    std::shuffle(values.begin(), values.end(), random);
    for (size_t i = 0; i < n * n; i += pool) b.upload(values.data(), pool, i);
    Events events;
    std::vector<double> seconds;
    for (int i = 0; i < 40; i++) {
        const double s = events.seconds([&] { run_cublas(a.get(), n, b.get(), n, n, c.get(), false); });
        if (i >= 10) seconds.push_back(s);
    }
    limits.flops = 2.0 * n * n * n / median(seconds);
#endif
    return limits;
}

struct Patience {
    double batch = 2e-3;  // seconds of launches between two events; launching a graph takes about 1e-5
    int n_batches = 15;
    double slow = 20e-3;  // seconds; a launch that takes longer is timed only once
    double all = 0.15;    // seconds of all batches
};

// Seconds of one run, the median over batches. run(i) uses copy i of the weights. A batch is a graph, as a
// decoded token is in runq_awq: launching kernels one by one takes longer than the short ones run.
inline double time_runs(Events& events, const std::function<void(size_t)>& run, size_t n_copies,
                        const Patience& patience) {
    run(0);
    const double once = events.seconds([&] { run(1); });
    if (once > patience.slow) return once;
    const double wanted = std::max(1.0, patience.batch / once);
    // A batch reads all copies in turn, unless that takes too long, so that none is still in the cache when
    // it is read again.
    const auto rounds = size_t(std::ceil(wanted / double(n_copies)));
    const size_t n = once * double(n_copies) > patience.slow ? size_t(std::ceil(patience.slow / once))
                                                             : std::min<size_t>(rounds * n_copies, 2048);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t batch = nullptr;
    check(cudaStreamBeginCapture(device().stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (size_t i = 0; i < n; i++) run(i);
    check(cudaStreamEndCapture(device().stream, &graph), "capture");
    check(cudaGraphInstantiate(&batch, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    const int affordable = int(patience.all / (once * double(n)));
    const int n_batches = std::clamp(affordable, 3, patience.n_batches);
    std::vector<double> seconds;
    for (int i = 0; i < n_batches + 1; i++) {  // the first one warms up
        const double s = events.seconds([&] { check(cudaGraphLaunch(batch, device().stream), "a batch"); });
        if (i >= 1) seconds.push_back(s / double(n));
    }
    check(cudaGraphExecDestroy(batch), "cudaGraphExecDestroy");
    return median(seconds);
}

// ----------------------------------------------------------------------------
// The tables

const std::vector<Problem> problems = {
    {"Qwen3-8B", "q and o", 4096, {4096}},
    {"Qwen3-8B", "k and v", 4096, {1024}},
    {"Qwen3-8B", "gate and up", 4096, {12288}},
    {"Qwen3-8B", "down", 12288, {4096}},
    {"Qwen3-8B", "q, k, v in one launch", 4096, {4096, 1024, 1024}},
    {"Qwen3-8B", "gate, up in one launch", 4096, {12288, 12288}},
    {"Llama-3.2-1B", "q and o", 2048, {2048}},
    {"Llama-3.2-1B", "k and v", 2048, {512}},
    {"Llama-3.2-1B", "gate and up", 2048, {8192}},
    {"Llama-3.2-1B", "down", 8192, {2048}},
    {"Llama-3.2-1B", "q, k, v in one launch", 2048, {2048, 512, 512}},
    {"Llama-3.2-1B", "gate, up in one launch", 2048, {8192, 8192}},
};
constexpr int max_tokens = 2048;
constexpr size_t cold_bytes = size_t(256) << 20;  // several times the second-level cache of any GPU so far
constexpr int n_samples = 1024;

struct Measurement {
    const Problem* problem;
    int n_tokens;
    std::string kernel;
    double error, seconds, gb_per_s, tflops;  // seconds 0: wrong, and not timed
};

// Bytes that have to move: the weights in the form that the rung reads, x once and the results once.
inline double bytes_moved(const Rung& rung, const DeviceProblem& d, int n_tokens) {
    double bytes = double(n_tokens) * d.n_in * sizeof(half);
    for (const HostMatrix& m : d.host) {
        bytes +=
            rung.reads == WeightsRead::fp16 ? double(m.n_in) * m.n_out * sizeof(half) : double(m.bytes());
        bytes += double(n_tokens) * m.n_out * (rung.result == Result::fp16 ? sizeof(half) : sizeof(float));
    }
    return bytes;
}

struct Arguments {
    bool quick = false, tune = false;
    std::string json;
    uint64_t seed = std::random_device{}();
};

class LadderRun {
  public:
    explicit LadderRun(const Arguments& arguments) : arguments_(arguments), random_(arguments.seed) {
        if (arguments.quick) patience_ = {.batch = 1e-3, .n_batches = 5};
        limits_ = measure_limits(random_);
    }

    // Returns the exit code.
    int run() {
        const double start = seconds_now();
        save();  // the limits, whatever comes later
        std::printf("%s, seed %llu\n\n", device().name.c_str(),
                    static_cast<unsigned long long>(arguments_.seed));
        std::printf(
            "Limits: a copy moves %.0f GB/s, cuBLAS multiplies 8192 x 8192 x 8192 in fp16 at %.0f "
            "TFLOP/s.\n\n",
            limits_.bytes_per_s / 1e9, limits_.flops / 1e12);
        std::printf("Microseconds, in parentheses GB/s and TFLOP/s in %% of these limits.\n");
        std::vector<int> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048};
        if (arguments_.quick) tokens = {1, 16, 512};
        for (const Problem& problem : problems) {
            DeviceProblem d = make_device_problem(problem, 128, max_tokens, cold_bytes, true, random_);
            for (const int n : tokens) measure_all(problem, d, n);
            print_table(problem, tokens);
            if (!arguments_.quick) find_crossover(problem, d);
            if (arguments_.tune) tune(problem, d, tokens);
            std::fflush(stdout);
            save();
        }
        print_crossovers();
        print_token("Qwen3-8B", 36);
        print_token("Llama-3.2-1B", 16);
        print_errors();
        std::printf("\nTook %.0f s.\n", seconds_now() - start);
        return n_wrong_ > 0 ? 1 : 0;
    }

  private:
    struct Crossover {
        const Problem* problem;
        int from;  // 0: never
    };

    double time(const Rung& rung, DeviceProblem& d, int n_tokens) {
        const size_t n = rung.reads == WeightsRead::fp16 ? d.fp16.size() : d.copies.size();
        auto run = [&](size_t i) { rung.run(d.s, d.x.get(), n_tokens, d.products(i, n_tokens)); };
        return time_runs(events_, run, n, patience_);
    }

    void measure_all(const Problem& problem, DeviceProblem& d, int n_tokens) {
        const std::vector<Sample> samples = sample_outputs(d, n_tokens, n_samples, random_);
        for (const Rung& rung : rungs_) {
            if (can_run(rung, d, n_tokens)) measure(problem, rung, d, n_tokens, samples);
        }
    }

    const Measurement& measure(const Problem& problem, const Rung& rung, DeviceProblem& d, int n_tokens,
                               const std::vector<Sample>& samples) {
        Measurement m{&problem, n_tokens, rung.name, relative_error_of(rung, d, n_tokens, samples), 0, 0, 0};
        if (m.error < tolerance(rung)) {
            m.seconds = time(rung, d, n_tokens);
            m.gb_per_s = bytes_moved(rung, d, n_tokens) / m.seconds / 1e9;
            m.tflops = 2 * problem.weights() * n_tokens / m.seconds / 1e12;
        } else {
            n_wrong_++;
            std::printf("\nWRONG: %s, %s %s, %d tokens: relative error %.3g, at most %.0e allowed\n",
                        rung.name.c_str(), problem.model, problem.name, n_tokens, m.error, tolerance(rung));
        }
        all_.push_back(m);
        return all_.back();
    }

    const Measurement* find(const Problem& problem, int n_tokens, const std::string& kernel) const {
        for (const Measurement& m : all_) {
            if (m.problem == &problem && m.n_tokens == n_tokens && m.kernel == kernel) return &m;
        }
        return nullptr;
    }

    void print_table(const Problem& problem, const std::vector<int>& tokens) const {
        std::string n_outs;
        for (const int n : problem.n_outs) n_outs += (n_outs.empty() ? "" : " + ") + std::to_string(n);
        std::printf("\n### %s, %s: %d x %s\n\n| tokens |", problem.model, problem.name, problem.n_in,
                    n_outs.c_str());
        for (const Rung& rung : rungs_) std::printf(" %s |", rung.name.c_str());
        std::printf("\n|---:|");
        for (size_t i = 0; i < rungs_.size(); i++) std::printf("---:|");
        for (const int n : tokens) {
            std::printf("\n| %d |", n);
            for (const Rung& rung : rungs_) {
                const Measurement* m = find(problem, n, rung.name);
                if (m == nullptr) {
                    std::printf(" |");
                } else if (m->seconds == 0) {
                    std::printf(" wrong |");
                } else {
                    std::printf(" %.*f (%.0f, %.0f) |", m->seconds < 1e-4 ? 2 : 0, m->seconds * 1e6,
                                m->gb_per_s * 1e11 / limits_.bytes_per_s,
                                limits_.flops > 0 ? m->tflops * 1e14 / limits_.flops : 0);
                }
            }
        }
        std::printf("\n");
    }

    // Finds from how many tokens on dequantizing for cuBLAS is faster than awq_gemm<64>: dequantize_from in
    // engine/gpu/program.cuh.
    void find_crossover(const Problem& problem, DeviceProblem& d) {
        const Rung* fused = rung_named("awq_gemm<64>");
        const Rung* expand = rung_named("dequantize + cuBLAS");
        if (fused == nullptr || expand == nullptr) return;
        int from = 0;
        for (const int n : {64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048}) {
            double seconds[2];
            for (int i = 0; i < 2; i++) {
                const Rung& rung = i == 0 ? *fused : *expand;
                const Measurement* m = find(problem, n, rung.name);
                seconds[i] = m != nullptr ? m->seconds : time(rung, d, n);
            }
            if (seconds[0] == 0 || seconds[1] == 0) return;  // wrong ones have no time
            if (seconds[1] >= seconds[0]) {
                from = 0;
            } else if (from == 0) {
                from = n;
            }
        }
        crossovers_.push_back({&problem, from});
    }

    void print_crossovers() const {
        if (crossovers_.empty()) return;
        std::printf(
            "\n### Where dequantize + cuBLAS becomes faster than awq_gemm<64>\n\n| matrices | from tokens |\n"
            "|---|---:|\n");
        for (const Crossover& c : crossovers_) {
            const std::string from = c.from > 0 ? std::to_string(c.from) : "never";
            std::printf("| %s, %s | %s |\n", c.problem->model, c.problem->name, from.c_str());
        }
        std::printf("\nrunq_awq has dequantize_from = %d.\n", dequantize_from);
    }

    // Times all tiles and splits, and prints the fastest beside runq_awq's choice. They are not checked
    // again, since only the grid differs.
    void tune(const Problem& problem, DeviceProblem& d, const std::vector<int>& tokens) {
        std::printf("\n| tokens | runq_awq us | fastest us | how |\n|---:|---:|---:|---|\n");
        for (const int n : tokens) {
            double best = INFINITY;
            std::string how;
            const AwqProducts p = d.products(0, n);
            auto attempt = [&](const std::string& kernel, const auto& run) {
                const double s = time_runs(
                    events_, [&](size_t i) { run(d.products(i, n)); }, d.copies.size(), tuning_);
                tuned_.push_back({&problem, n, kernel, 0, s, 0, 0});
                if (s < best) best = s, how = kernel;
            };
            auto attempt_gemm = [&]<int tile>() {
                if (n > 16 * tile) return;  // far slower than wider tiles
                const int all = GemmShape<tile>::blocks_per_sm * device().n_sms;
                for (const int n_blocks : {all / 4, all / 2, 3 * all / 4, all, 2 * all}) {
                    attempt("awq_gemm<" + std::to_string(tile) + ">, " + std::to_string(n_blocks) + " blocks",
                            [&](const AwqProducts& q) {
                                run_gemm<tile>(d.s.scratch(), d.x.get(), n, q, n_blocks);
                            });
                }
            };
            auto attempt_gemv = [&]<int words, int warps>() {
                const size_t values = size_t(count_tiles(p, 64 * words)) * 64 * words;
                for (const int n_splits : {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32}) {
                    if (n_splits * warps * gemv_inputs > d.n_in) break;
                    if (n_splits * values > max_partials) break;
                    attempt("awq_gemv<" + std::to_string(words) + ", " + std::to_string(warps) + ">, " +
                                std::to_string(n_splits) + " splits",
                            [&](const AwqProducts& q) {
                                run_gemv<words, warps>(d.s.scratch(), d.x.get(), q, n_splits);
                            });
                }
            };
            if (n == 1) {
                attempt_gemv.template operator()<1, 8>();
                attempt_gemv.template operator()<4, 4>();
                attempt_gemv.template operator()<4, 8>();
            } else {
                attempt_gemm.template operator()<16>();
                attempt_gemm.template operator()<32>();
                attempt_gemm.template operator()<64>();
            }
            const Measurement* chosen = find(problem, n, "runq_awq");
            std::printf("| %d | %.2f | %.2f | %s |\n", n, chosen != nullptr ? chosen->seconds * 1e6 : 0,
                        best * 1e6, how.c_str());
        }
    }

    // The matrices of one token, in the launches that runq_awq makes.
    void print_token(const char* model, int n_layers) const {
        for (const char* kernel : {"runq_awq", "fp16 cuBLAS"}) {
            double seconds = 0, bytes = 0;
            for (const Problem& p : problems) {
                const std::string name = p.name;
                if (std::string(p.model) != model ||
                    (name != "q and o" && name != "down" && p.n_outs.size() == 1))
                    continue;
                const Measurement* m = find(p, 1, kernel);
                if (m == nullptr || m->seconds == 0) return;
                seconds += m->seconds, bytes += m->gb_per_s * 1e9 * m->seconds;
            }
            std::printf(
                "\n%s, one token, %s: the matrices of %d layers in %.0f us, %.0f GB/s, %.0f%% of the copy.\n",
                model, kernel, n_layers, n_layers * seconds * 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / limits_.bytes_per_s);
        }
    }

    void print_errors() const {
        std::printf("\n### Largest relative errors\n\n| kernel | error | allowed |\n|---|---:|---:|\n");
        for (const Rung& rung : rungs_) {
            double largest = 0;
            for (const Measurement& m : all_) {
                if (m.kernel == rung.name) largest = std::max(largest, m.error);
            }
            std::printf("| %s | %.2g | %.0e |\n", rung.name.c_str(), largest, tolerance(rung));
        }
        std::printf("\n%zu measured, %d wrong.\n", all_.size(), n_wrong_);
    }

    // Writes the measurements so far to the file that --json names.
    void save() const {
        if (arguments_.json.empty()) return;
        std::FILE* f = std::fopen(arguments_.json.c_str(), "w");
        if (f == nullptr)
            throw std::runtime_error(arguments_.json + ": cannot write: " + std::strerror(errno));
        std::fprintf(
            f, "{\"device\": \"%s\", \"seed\": %llu, \"copy_gb_per_s\": %.1f, \"cublas_tflops\": %.1f,\n",
            device().name.c_str(), static_cast<unsigned long long>(arguments_.seed),
            limits_.bytes_per_s / 1e9, limits_.flops / 1e12);
        auto list = [&](const char* key, const std::vector<Measurement>& items) {
            std::fprintf(f, " \"%s\": [", key);
            for (const Measurement& m : items) {
                std::string n_outs;
                for (const int n : m.problem->n_outs)
                    n_outs += (n_outs.empty() ? "" : ", ") + std::to_string(n);
                std::fprintf(
                    f,
                    "%s\n  {\"model\": \"%s\", \"matrices\": \"%s\", \"n_in\": %d, \"n_out\": [%s], "
                    "\"tokens\": %d, \"kernel\": \"%s\", \"error\": %.3g, \"us\": %.3f, \"gb_per_s\": %.1f, "
                    "\"tflops\": %.2f}",
                    &m == items.data() ? "" : ",", m.problem->model, m.problem->name, m.problem->n_in,
                    n_outs.c_str(), m.n_tokens, m.kernel.c_str(), std::isfinite(m.error) ? m.error : -1.0,
                    m.seconds * 1e6, m.gb_per_s, m.tflops);
            }
            std::fprintf(f, "],\n");
        };
        list("measured", all_);
        list("tuned", tuned_);
        std::fprintf(f, " \"dequantize_wins_from\": [");
        for (const Crossover& c : crossovers_) {
            std::fprintf(f, "%s{\"model\": \"%s\", \"matrices\": \"%s\", \"tokens\": %d}",
                         &c == crossovers_.data() ? "" : ", ", c.problem->model, c.problem->name, c.from);
        }
        std::fprintf(f, "]}\n");
        if (std::fclose(f) != 0) throw std::runtime_error(arguments_.json + ": cannot write");
    }

    const Rung* rung_named(const std::string& name) const {
        for (const Rung& rung : rungs_) {
            if (rung.name == name) return &rung;
        }
        return nullptr;
    }

    Arguments arguments_;
    Random random_;
    Limits limits_;
    Events events_;
    Patience patience_, tuning_{.batch = 1e-3, .n_batches = 5};
    std::vector<Rung> rungs_ = all_rungs();
    std::vector<Measurement> all_, tuned_;
    std::vector<Crossover> crossovers_;
    int n_wrong_ = 0;
};

#endif

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    try {
#ifdef __CUDACC__
        Arguments arguments;
        for (int i = 1; i < argc; i++) {
            const std::string name = argv[i];
            const bool takes_value = name == "--json" || name == "--seed";
            if (takes_value && i + 1 == argc) throw UsageError(name + ": needs a value");
            if (name == "--quick") {
                arguments.quick = true;
            } else if (name == "--tune") {
                arguments.tune = true;
            } else if (name == "--json") {
                arguments.json = argv[++i];
            } else if (name == "--seed") {
                arguments.seed = parse_number<uint64_t>(name, argv[++i], 0, UINT64_MAX);
            } else {
                throw UsageError("unknown option '" + name + "'");
            }
        }
        device();  // or one line that says why there is none
        return LadderRun(arguments).run();
#else
        if (argc > 1)
            throw UsageError(std::string("unknown option '") + argv[1] + "': this build only checks");
        Random random(std::random_device{}());
        int n_wrong = 0;
        for (const Problem& problem :
             {Problem{"", "one", 256, {384}}, Problem{"", "three", 256, {256, 128, 128}}}) {
            DeviceProblem d = make_device_problem(problem, 128, 40, 0, false, random);
            for (const int n : {1, 16, 40}) {
                const std::vector<Sample> samples = sample_outputs(d, n, 256, random);
                for (const Rung& rung : all_rungs()) {
                    if (!can_run(rung, d, n)) continue;
                    const double error = relative_error_of(rung, d, n, samples);
                    const bool right = error < tolerance(rung);
                    std::printf("%-20s %-6s %3d tokens: relative error %.2g%s\n", rung.name.c_str(),
                                problem.name, n, error, right ? "" : "  WRONG");
                    n_wrong += right ? 0 : 1;
                }
            }
        }
        return n_wrong > 0 ? 1 : 0;
#endif
    } catch (const UsageError& e) {
        std::fprintf(stderr, "awq_kernels: %s\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "awq_kernels: %s\n", e.what());
        return 1;
    }
}
