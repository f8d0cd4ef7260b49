// How each kind of matrix of a GPTQ file is stored, as the file's header says it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

// An entry of the header. What its fields mean is written down in docs/model-files.md.
struct MatrixFormat {
    uint8_t bits = 0;    // of a code: 2, 4 or 8
    uint8_t flags = 0;   // the sum of those below
    uint16_t group = 0;  // weights along a row that share a scale; 0: the whole row

    static constexpr uint8_t sparse_flag = 1;     // two of each four weights are 0 and not stored
    static constexpr uint8_t two_level_flag = 2;  // groups have 4-bit scales under one fp32 scale per row

    bool sparse() const { return (flags & sparse_flag) != 0; }
    bool two_level() const { return (flags & two_level_flag) != 0; }
    bool operator==(const MatrixFormat&) const = default;
};
static_assert(sizeof(MatrixFormat) == 4);

// "4 bits in groups of 64, 2:4 sparse"
inline std::string format_text(const MatrixFormat& f) {
    std::string text = std::to_string(f.bits) + " bits ";
    text += f.group > 0 ? "in groups of " + std::to_string(f.group) : "per row";
    if (f.two_level()) text += ", two-level";
    if (f.sparse()) text += ", 2:4 sparse";
    return text;
}

// The kinds of matrices, in the order of the header; formats/gptq.py has the same list.
namespace kind {
enum Index { embed, q_proj, k_proj, v_proj, o_proj, gate_proj, down_proj, up_proj, classifier };
}  // namespace kind
constexpr int n_kinds = 9;
constexpr const char* kind_names[n_kinds] = {"embed",     "q_proj",    "k_proj",  "v_proj",    "o_proj",
                                             "gate_proj", "down_proj", "up_proj", "classifier"};

struct Layout {
    std::array<MatrixFormat, n_kinds> formats;
    bool has_order = false;  // activations are gathered before they are quantized
};
