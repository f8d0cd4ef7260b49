// --info: what a model file says, and where each of its tensors lies.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/streams.h"
#include "engine/text/tokenizer.h"

// Prints a field and its value in a line each. The last lines are the tensors, in the order of the file:
// name, type, shape and offset in the file in bytes.
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
    for (const OwnField& field : m.own_fields) line(field.name, field.value);
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
    if (c.min_p > 0) line("min_p", format("%g", static_cast<double>(c.min_p)));
    if (c.repetition_penalty != 1) {
        line("repetition_penalty", format("%g", static_cast<double>(c.repetition_penalty)));
    }
    line("tokenizer", m.tokenizer ? "yes" : "no");
    line("chat_template", m.tokenizer && m.tokenizer->has_chat() ? "yes" : "no");
    integer("context", context);
    number("file_bytes", m.file_bytes);
    number("weight_bytes", m.weight_bytes);
    number("weight_bytes_per_token", m.weight_bytes_per_token);
    number("kv_bytes_per_position", m.kv_bytes_per_position);
    number("kv_cache_bytes", m.kv_bytes_per_position * static_cast<uint64_t>(context));
    if (m.memory_bytes > 0) {
        number("memory_bytes", m.memory_bytes + m.trace_size.bytes(0, static_cast<uint64_t>(context)));
    }
    for (const TensorInfo& t : m.tensors) {
        std::string shape;
        for (const int n : t.shape) {
            if (!shape.empty()) shape += ",";
            shape += std::to_string(n);
        }
        line("tensor", t.name + " " + t.type + " [" + shape + "] " + std::to_string(t.offset));
    }
    put_foreign(out, text);  // a file's name may hold anything
}
