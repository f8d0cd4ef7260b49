// How a program uses back ends: it finds and opens one, loads the model's matrices into it, and asks it for
// products. quant_gemm.h is the interface to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/app/options.h"
#include "engine/backend/quant_gemm.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"
#include "engine/text/utf8.h"

// The folder of back ends: $RUNQ_BACKENDS, or else `backends` beside the program.
inline std::filesystem::path backend_folder() {
    if (const std::string folder = environment("RUNQ_BACKENDS"); !folder.empty()) return path_of(folder);
    return program_file().parent_path() / "backends";
}

// The back ends in a folder, by name: files quant_gemm_NAME.so (library_suffix).
inline std::map<std::string, std::filesystem::path> backends_in(const std::filesystem::path& folder) {
    const std::string prefix = "quant_gemm_";
    std::map<std::string, std::filesystem::path> found;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
        const std::string stem = name_of(entry.path().stem());
        if (!stem.starts_with(prefix) || entry.path().extension() != library_suffix) continue;
        if (!entry.is_regular_file(error)) continue;  // opening a FIFO would wait for a writer
        if (stem != prefix) found[stem.substr(prefix.size())] = entry.path();
    }
    return found;
}

// Whether a back end has all that it has to have.
inline bool is_whole(const QuantGemmBackend& api) {
    return api.name && api.rank && api.open && api.close && api.accepts && api.load && api.multiply &&
           api.error_text;
}

// Loads a back end, which stays loaded until the process ends, because its threads' memory does. Throws
// std::runtime_error if the file is none, is for another version of the interface, or lacks something.
inline const QuantGemmBackend* load_backend(const std::filesystem::path& file) {
    void* symbol = library_function(file, "quant_gemm_backend");
    const std::string name = name_of(file);
    if (symbol == nullptr) fail(name, " has no function quant_gemm_backend");
    const auto* api = reinterpret_cast<decltype(&quant_gemm_backend)>(symbol)();
    if (api == nullptr || api->version != QUANT_GEMM_VERSION)
        fail(name, " is for version ", api != nullptr ? api->version : 0,
             " of the interface, this program for ", QUANT_GEMM_VERSION);
    if (!is_whole(*api)) fail(name, " lacks a name, or a function other than quantize");
    return api;
}

// An open back end, and the matrices that it was given. Each function throws std::runtime_error with the back
// end's own text if it fails.
class Backend : public OtherKernels {
  public:
    explicit Backend(const QuantGemmBackend* api) : api_(api) {
        check("open", api->open(&context_, run_loop));
    }
    ~Backend() override { api_->close(context_); }
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    const char* name() const { return api_->name; }

    // Throws if it does not multiply such matrices.
    void check_format(const QuantMatrix& w) { check("matrix", api_->accepts(context_, &w)); }

    // Loads w for multiply(). in_place: w is read where it is, and has to stay there, if the back end can.
    void load(const QuantMatrix& w, bool in_place) {
        void* matrix = nullptr;
        check("load", api_->load(context_, &w, in_place ? 1 : 0, &matrix));
        loaded_.push_back({{}, matrix});
    }
    // The i-th matrix that was loaded; it lives as long as this.
    const PackedMatrix* loaded(size_t i) const { return &loaded_[i]; }

    void quantize(Int8Rows& out, const Rows& x, int group_size) override {
        out.resize(x.n_rows, x.n_cols, group_size);
        if (api_->quantize != nullptr)
            check("quantize", api_->quantize(context_, out.codes.data(), out.scales.data(), out.sums.data(),
                                             x.row(0), x.n_rows, x.n_cols, group_size));
        parallel_for(x.n_rows, [&](int t) {
            if (api_->quantize == nullptr)
                quantize_groups(out.row_codes(t), out.row_scales(t), out.row_sums(t), x.row(t), x.n_cols,
                                group_size);
            keep_nan(out, t, x.row(t));
        });
    }

    // All matrices have to be loaded.
    void multiply(const QuantRows& x, std::span<const QuantProduct> products) override {
        std::vector<QuantGemmProduct> list;
        for (const QuantProduct& p : products) list.push_back({p.out, p.packed->loaded});
        check("multiply", api_->multiply(context_, &x, list.data(), int32_t(list.size())));
    }

  private:
    void check(const char* what, int32_t status) {
        if (status == QUANT_GEMM_OK) return;
        const char* text = api_->error_text();
        fail("back end ", name(), ", ", what, ": ", text != nullptr ? text : "it says nothing", " (code ",
             status, ")");
    }

    const QuantGemmBackend* api_;
    void* context_ = nullptr;
    std::deque<PackedMatrix> loaded_;
};

// The back end that --backend asks for, with all matrices loaded: by name; `auto`, the one that runs best
// here; or `builtin`, none (null), and the program's own kernels run. What fails is reported through warn(one
// line) with `auto`, and the next best is tried; by name, std::runtime_error says it. A name of no file is a
// UsageError. in_place: as Backend::load() has it.
template <class Warn>
std::unique_ptr<Backend> open_backend(const std::string& choice, std::span<const QuantMatrix> matrices,
                                      bool in_place, Warn warn) {
    if (choice == "builtin") return nullptr;
    const std::filesystem::path folder = backend_folder();
    const auto found = backends_in(folder);
    auto open = [&](const QuantGemmBackend* api) {
        auto backend = std::make_unique<Backend>(api);
        for (const QuantMatrix& w : matrices) backend->check_format(w);
        for (const QuantMatrix& w : matrices) backend->load(w, in_place);
        return backend;
    };
    if (choice != "auto") {
        if (found.contains(choice)) return open(load_backend(found.at(choice)));
        std::string list;
        for (const auto& [name, file] : found) list += ", " + name;
        fail<UsageError>("--backend: '", choice, "' is not one of auto, builtin", list, " (those in ",
                         name_of(folder), ")");
    }
    std::multimap<int32_t, const QuantGemmBackend*, std::greater<>> usable;  // by rank, the best first
    for (const auto& [name, file] : found) {
        try {
            const QuantGemmBackend* api = load_backend(file);
            if (const int32_t rank = api->rank(); rank > 1) usable.emplace(rank, api);
        } catch (const std::runtime_error& e) {
            warn(std::string(e.what()) + "; it is left out");
        }
    }
    for (const auto& [rank, api] : usable) {
        try {
            return open(api);
        } catch (const std::runtime_error& e) {
            warn(std::string(e.what()) + "; the next one is used");
        }
    }
    return nullptr;
}
