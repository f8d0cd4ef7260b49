// Steps captured as CUDA graphs. A token takes some hundred launches, and launching a kernel costs the host
// more time than a short kernel takes on the device; a graph launches all of them at once.
#pragma once

#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "engine/gpu/device.h"

// Runs steps that launch the same kernels with the same arguments each time, apart from what the arguments
// point to. A key tells the steps apart. In the emulator a step simply runs.
class Graphs {
  public:
    using Key = std::pair<int, bool>;

#ifdef __CUDACC__
    // Runs step(). The first run of a key launches directly: capturing costs more than one run saves, many
    // keys come only once (prompt lengths), and at first use CUDA and cuBLAS allocate what no graph can hold.
    // The second run captures a graph, from then on that graph is launched.
    template <class Step>
    void run(const Key& key, Step step) {
        Entry& entry = entries_[key];
        if (entry.n_runs++ > 0 && entry.graph == nullptr && n_captured_ < max_graphs) {
            entry.graph.reset(capture(step));
            n_captured_++;
        }
        if (entry.graph == nullptr) return step();
        check(cudaGraphLaunch(entry.graph.get(), device().stream), "cudaGraphLaunch");
    }

  private:
    static constexpr int max_graphs = 16;  // each takes some device memory

    template <class Step>
    static cudaGraphExec_t capture(Step step) {
        cudaGraph_t captured = nullptr;
        check(cudaStreamBeginCapture(device().stream, cudaStreamCaptureModeRelaxed), "capture");
        try {
            step();
        } catch (...) {  // end the capture, so that the stream can be used again
            cudaStreamEndCapture(device().stream, &captured);
            cudaGetLastError();
            if (captured != nullptr) cudaGraphDestroy(captured);
            throw;
        }
        check(cudaStreamEndCapture(device().stream, &captured), "capture");
        cudaGraphExec_t graph = nullptr;
        check(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
        check(cudaGraphDestroy(captured), "cudaGraphDestroy");
        return graph;
    }

    struct Destroy {
        void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
    };
    struct Entry {
        int n_runs = 0;
        std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> graph{};  // null: not captured
    };
    std::map<Key, Entry> entries_;
    int n_captured_ = 0;
#else
    template <class Step>
    void run(const Key&, Step step) {
        step();
    }
#endif
};
