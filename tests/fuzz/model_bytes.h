// Small model files for the program that a harness is about.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/model_file.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/program.h"
#include "tests/header_offset.h"
#include "tests/section.h"

using ProgramConfig = decltype(Weights::c);

// What the program's files have of their own.
template <class C>
constexpr bool with_formats = requires(C c) {
    c.formats;
};
template <class C>
constexpr bool with_experts = requires(C c) {
    c.moe;
};
constexpr bool has_formats = with_formats<ProgramConfig>, has_experts = with_experts<ProgramConfig>;
// The program is emulated by simt, which takes its time; and its kernels take wide matrices alone.
constexpr bool is_emulated = std::string_view(PROGRAM).ends_with(".cu");

// The numbers of a header, at their offsets (docs/model-files.md).
struct Header {
    std::vector<uint8_t> bytes = std::vector<uint8_t>(header_size);

    template <class T>
    void set(size_t offset, T value) {
        std::memcpy(bytes.data() + offset, &value, sizeof value);
    }
    template <class T>
    T get(size_t offset) const {
        T value;
        std::memcpy(&value, bytes.data() + offset, sizeof value);
        return value;
    }
    bool has_extension() const { return get<uint32_t>(header_offset::extension) != 0; }

    // Puts checksum, and offset and size of the section in order.
    void seal(size_t n_weight_bytes, FuzzBytes section) {
        set<uint64_t>(header_offset::tokenizer_offset, header_size + n_weight_bytes);
        set<uint64_t>(header_offset::tokenizer_size, section.size());
        set<uint32_t>(header_offset::checksum, 0);
        set(header_offset::checksum, crc32(std::as_bytes(section), crc32(std::as_bytes(std::span(bytes)))));
    }
};

// Writes the field `activations` and those of the program's own.
template <class C>
void put_own_fields(Header& h, const C& c) {
    h.set(header_offset::activations, int(c.static_activations));
    if constexpr (with_formats<C>) {
        h.set(header_offset::own, c.formats);
        h.set(0xE4, uint8_t(c.has_order));
    }
    if constexpr (with_experts<C>) {
        const auto& m = c.moe;
        const bool is_ladder = m.expert_format.is_ladder();
        const int fields[] = {int(m.expert_format.kind),
                              m.n_experts,
                              m.n_active,
                              m.hidden_dim,
                              int(m.norm_topk_prob),
                              is_ladder ? 0 : m.expert_format.group,
                              int(m.pure)};
        std::memcpy(h.bytes.data() + header_offset::own, fields, sizeof fields);
        if (is_ladder) h.set(header_offset::own + sizeof fields, m.ladder);
    }
}

inline Header header_of(const ProgramConfig& c) {
    Header h;
    h.set(0x00, file_format.magic);
    h.set(0x04, file_format.version);
    size_t at = header_offset::dims;
    for (const int n :
         {c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len}) {
        h.set(at, n);
        at += sizeof n;
    }
    h.set(header_offset::shared_classifier, uint8_t(c.shared_classifier));
    if (file_format.base.head_dim != 0) h.set(file_format.base.head_dim, c.head_dim);
    h.set(file_format.base.group_size, c.group_size);
    h.set(header_offset::extension, extension_magic);
    h.set(header_offset::arch, c.arch);
    h.set(header_offset::head_dim, c.head_dim);
    h.set(header_offset::ext_group_size, c.group_size);
    h.set(header_offset::norm_eps, c.norm_eps);
    h.set(header_offset::rope_theta, c.rope_theta);
    h.set(header_offset::rope_scaling, c.rope_type);
    h.set(header_offset::rope_scaling + 4, c.rope_factor);
    h.set(header_offset::rope_scaling + 8, c.low_freq_factor);
    h.set(header_offset::rope_scaling + 12, c.high_freq_factor);
    h.set(header_offset::rope_scaling + 16, c.original_max_position);
    h.set(header_offset::attention_factor, c.attention_factor);
    h.set(header_offset::bos_id, c.bos_id);
    h.set(header_offset::n_eos, int(c.eos_ids.size()));
    for (size_t i = 0; i < c.eos_ids.size(); i++) h.set(header_offset::eos_ids + 4 * i, c.eos_ids[i]);
    h.set(header_offset::temperature, c.temperature);
    h.set(header_offset::top_p, c.top_p);
    h.set(header_offset::top_k, c.top_k);
    put_own_fields(h, c);
    h.set(header_offset::min_p, c.min_p);
    h.set(header_offset::repetition_penalty, c.repetition_penalty);
    return h;
}

// The tensors that follow such a header.
inline TensorList tensors_of(const ProgramConfig& c) {
    const auto alignment = uint64_t(file_format.alignment);
    return Weights{TensorList(nullptr, 0, alignment, alignment), c}.file;
}
inline size_t weight_bytes(const ProgramConfig& c) { return tensors_of(c).weight_bytes(); }

inline std::vector<uint8_t> model_bytes(const ProgramConfig& c, FuzzBytes weights, FuzzBytes section) {
    Header h = header_of(c);
    h.seal(weights.size(), section);
    std::vector<uint8_t> file = h.bytes;
    file.insert(file.end(), weights.begin(), weights.end());
    file.insert(file.end(), section.begin(), section.end());
    return file;
}

// The formats that GPTQ's matrices may have, as a header has them.
struct FormatBytes {
    uint8_t bits, flags;
    uint16_t group;
};
constexpr FormatBytes matrix_formats[] = {{4, 0, 64}, {2, 0, 0},   {2, 0, 32},  {2, 0, 64},  {2, 0, 128},
                                          {4, 0, 0},  {4, 0, 32},  {4, 0, 128}, {8, 0, 0},   {8, 0, 32},
                                          {8, 0, 64}, {8, 0, 128}, {4, 1, 64},  {4, 1, 128}, {2, 2, 64}};

// The i-th of them, as the program has it.
template <class Format>
void set_format(Format& f, int i) {
    f = {matrix_formats[i].bits, matrix_formats[i].flags, matrix_formats[i].group};
}

// The group size of the activations, which follows from those of the matrices.
template <class Formats>
int group_size_of(const Formats& formats) {
    const auto is_32 = [](const auto& f) { return f.group == 32; };
    return std::any_of(formats.begin(), formats.end(), is_32) ? 32 : 64;
}

// The smallest model that the program runs.
template <class C = ProgramConfig>
C smallest_config() {
    constexpr bool is_wide = has_formats || is_emulated;
    C c;
    c.arch = Arch::qwen3;
    c.dim = c.hidden_dim = is_wide ? 64 : 8;
    c.n_layers = 1;
    c.n_heads = 2;
    c.n_kv_heads = 1;
    c.head_dim = is_wide ? 32 : 4;
    c.vocab_size = 12;
    c.max_seq_len = 32;
    c.shared_classifier = true;
    if constexpr (with_formats<C>)
        for (auto& f : c.formats) set_format(f, 0);
    c.group_size = is_wide ? 64 : std::string_view(PROGRAM) == "runq.cpp" ? 4 : 0;
    if constexpr (with_experts<C>) {
        c.arch = Arch::qwen3_moe;
        c.moe.n_experts = 2, c.moe.n_active = 1, c.moe.hidden_dim = 4;
        c.moe.is_dense.assign(1, 0);
    }
    c.original_max_position = 16;
    c.bos_id = 10;
    c.eos_ids = {11};
    return c;
}

// Weights that are sound whatever they are read as: fp32 from 2^-15 to 2^-7, fp16 from 2^-7 to 1, int8 but
// -128, any int4.
inline std::vector<uint8_t> tame_weights(size_t n, uint32_t seed) {
    static const std::vector<uint8_t> some = [] {
        std::vector<uint8_t> bytes(1 << 18);
        uint32_t state = 1;
        for (size_t i = 0; i < bytes.size(); i += 4) {
            state = state * 1664525 + 1013904223;
            const auto any = [&](int shift) {
                return uint8_t((state >> shift) % 256 == 0x80 ? 0 : state >> shift);
            };
            bytes[i] = any(24);
            bytes[i + 1] = uint8_t(0x20 + (state >> 16) % 8);
            bytes[i + 2] = any(19);
            bytes[i + 3] = uint8_t(0x38 + (state >> 14) % 4);
        }
        return bytes;
    }();
    std::vector<uint8_t> bytes;
    bytes.reserve(n);
    for (size_t at = seed % 256 * 4; bytes.size() < n; at = 0) {
        const size_t count = std::min(n - bytes.size(), some.size() - at);
        bytes.insert(bytes.end(), some.begin() + ptrdiff_t(at), some.begin() + ptrdiff_t(at + count));
    }
    return bytes;
}

// Which layers are dense, at the beginning of the weights.
template <class C>
void put_dense_layers(std::vector<uint8_t>& weights, const C& c) {
    if constexpr (with_experts<C>) std::copy(c.moe.is_dense.begin(), c.moe.is_dense.end(), weights.begin());
}

// Makes what is otherwise refused be as it has to: an order has every channel once, a mask two of each four
// columns.
template <class C>
void put_in_form(std::vector<uint8_t>& weights, const C& c) {
    put_dense_layers(weights, c);
    constexpr std::array<uint8_t, 6> two_of_four{0x3, 0x5, 0x6, 0x9, 0xA, 0xC};
    const TensorList list = tensors_of(c);
    for (const TensorInfo& t : list.all()) {
        uint8_t* const at = weights.data() + t.offset - header_size;
        if (t.name.ends_with(".order")) {
            const auto n = int(t.n_bytes / sizeof(int32_t));
            for (int i = 0; i < n; i++) {
                const int32_t channel = n - 1 - i;
                std::memcpy(at + size_t(i) * sizeof channel, &channel, sizeof channel);
            }
        } else if (t.name.ends_with(".mask")) {
            for (size_t i = 0; i < t.n_bytes; i++)
                at[i] = uint8_t(two_of_four[at[i] % 6] | two_of_four[at[i] / 6 % 6] << 4);
        }
    }
}

// Makes what MXFP8 has be numbers, of a size.
template <class C>
void tame_mxfp8([[maybe_unused]] std::vector<uint8_t>& weights, [[maybe_unused]] const C& c) {
    if constexpr (with_experts<C>) {
        if (c.moe.expert_format.kind != decltype(c.moe.expert_format.kind)::mxfp8) return;
        const TensorList list = tensors_of(c);
        for (const TensorInfo& t : list.all()) {
            if (t.name.find('.') == std::string::npos || std::string_view(t.type) != "U8") continue;
            uint8_t* const at = weights.data() + t.offset - header_size;
            const bool are_scales = t.name.ends_with(".scales");
            for (size_t i = 0; i < t.n_bytes; i++)
                at[i] = are_scales ? uint8_t(118 + at[i] % 8) : (at[i] & 0x7f) == 0x7f ? uint8_t(0) : at[i];
        }
    }
}
