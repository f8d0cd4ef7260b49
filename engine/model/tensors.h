// The tensors of a model file, one after another from the end of the header on.
//
// Each program names its tensors once, in the order of the file, as the members of its Weights. Making a
// Weights walks along the file: every tensor gets its pointer and enters the list, from which the file's
// length, --info and the figures of the command line follow. formats/tensors.py has the same lists in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/model_file.h"

struct TensorInfo {
    std::string name;        // of the step that uses it, as in a trace: "layers.0.attn.q_proj.codes"
    const char* type;        // "F32", ...
    std::vector<int> shape;  // outermost dimension first
    uint64_t offset;         // in the file, bytes
    uint64_t memory_offset;  // from the start of the list's memory, bytes
    uint64_t n_bytes;
};

class TensorList {
  public:
    // The list is of a file's weights, or of a copy of them in n_bytes of `memory` in which each tensor
    // begins at a multiple of `alignment` bytes; in the file it is one of file_alignment.
    TensorList(const std::byte* memory, uint64_t n_bytes, uint64_t alignment, uint64_t file_alignment = 1)
        : memory_(memory), n_bytes_(n_bytes), alignment_(alignment), file_alignment_(file_alignment) {}
    template <class Config>
    explicit TensorList(const ModelFileOf<Config>& file)
        : TensorList(file.weights.data(), file.weights.size(), uint64_t(file.alignment),
                     uint64_t(file.alignment)) {}

    // The next tensor of the file, in place; null if the memory ends before it does.
    template <class T>
    const T* next(const std::string& name, std::vector<int> shape) {
        static_assert(tensor_type<T> != nullptr);
        uint64_t n_bytes = sizeof(T);
        for (const int n : shape) n_bytes *= uint64_t(n);
        const uint64_t in_file = next_multiple(weight_bytes_, file_alignment_);
        const bool is_there = end_ <= n_bytes_ && n_bytes <= n_bytes_ - end_;
        const auto* p = is_there ? reinterpret_cast<const T*>(memory_ + end_) : nullptr;
        all_.push_back({name, tensor_type<T>, std::move(shape), header_size + in_file, end_, n_bytes});
        weight_bytes_ = in_file + n_bytes;
        end_ = next_multiple(end_ + n_bytes, alignment_);
        return p;
    }

    // What make(name) gives for each layer's tensor: "layers.0.NAME", "layers.1.NAME", ...
    template <class Make>
    auto layers(const ModelConfig& c, const std::string& name, Make make) {
        std::vector<decltype(make(name))> found;
        for (int l = 0; l < c.n_layers; l++)
            found.push_back(make("layers." + std::to_string(l) + "." + name));
        return found;
    }
    // A vector of n values for each layer, n_layers of (n,).
    template <class T>
    std::vector<const T*> vectors(const ModelConfig& c, const std::string& name, int n) {
        return layers(c, name, [&](const std::string& full_name) { return next<T>(full_name, {n}); });
    }

    const std::vector<TensorInfo>& all() const { return all_; }
    const std::byte* data(const TensorInfo& t) const { return memory_ + t.memory_offset; }  // one of these
    uint64_t weight_bytes() const { return weight_bytes_; }  // in the file, with what alignment leaves free
    uint64_t memory_bytes() const { return end_; }           // with every tensor aligned

    // Bytes of the tensors that a decode step reads: of experts the active ones'; nothing of an embedding
    // that is not also the classifier, of which a step reads a row, nor of what is for other hardware, the
    // assist matrix of A8W4 (docs/moe.md).
    template <class Config>
    uint64_t bytes_per_token(const Config& c) const {
        uint64_t n = 0;
        for (const TensorInfo& t : all_) {
            const bool is_embedding = t.name == "embed" || t.name.starts_with("embed.");
            if ((is_embedding && !c.shared_classifier) || t.name.ends_with(".assist")) continue;
            uint64_t n_bytes = t.n_bytes;
            if constexpr (requires { c.moe; })
                if (t.name.find(".moe.") != t.name.npos && !t.name.ends_with(".moe.router"))
                    n_bytes = n_bytes / uint64_t(c.moe.n_experts) * uint64_t(c.moe.n_active);
            n += n_bytes;
        }
        return n;
    }
    // Bytes of those that all steps together read: of every expert, as this config has none.
    uint64_t bytes_in_use(const ModelConfig& c) const { return bytes_per_token(c); }

    // Throws std::runtime_error unless the tensors fill the file's weights exactly.
    template <class Config>
    void check_end(const ModelFileOf<Config>& file) const {
        if (file.weights.size() != weight_bytes_)
            fail(file.path, ": weights are ", file.weights.size(), " bytes, but the header implies ",
                 weight_bytes_);
    }

  private:
    static uint64_t next_multiple(uint64_t n, uint64_t of) { return (n + of - 1) / of * of; }

    const std::byte* memory_;
    uint64_t n_bytes_, alignment_, file_alignment_;
    uint64_t weight_bytes_ = 0, end_ = 0;
    std::vector<TensorInfo> all_;
};
