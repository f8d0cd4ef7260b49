// How model files store numbers: the types of tensors, and the format of a matrix of few bits in the four
// bytes that a header has for it.
#pragma once

#include <cstdint>
#include <string>

// The safetensors name of a type. engine/gpu/half2.h adds half, engine/cpu/half.h Half.
template <class T>
constexpr const char* tensor_type = nullptr;
template <>
inline constexpr const char* tensor_type<float> = "F32";
template <>
inline constexpr const char* tensor_type<int8_t> = "I8";
template <>
inline constexpr const char* tensor_type<uint8_t> = "U8";
template <>
inline constexpr const char* tensor_type<int32_t> = "I32";
template <>
inline constexpr const char* tensor_type<uint32_t> = "I32";  // eight 4-bit codes

// What the fields mean is written down in docs/model-files.md.
struct MatrixFormat {
    uint8_t bits = 0;    // of a code: 2, 4, 5, 6 or 8
    uint8_t flags = 0;   // the sum of those below
    uint16_t group = 0;  // weights along a row that share a scale; 0: the whole row

    static constexpr uint8_t sparse_flag = 1;       // two of each four weights are 0 and not stored
    static constexpr uint8_t two_level_flag = 2;    // groups have 4-bit scales under one fp32 scale per row
    static constexpr uint8_t int8_scales_flag = 4;  // int8 ones, and of 4 and 5 bits a table of values

    bool sparse() const { return (flags & sparse_flag) != 0; }
    bool two_level() const { return (flags & two_level_flag) != 0; }
    bool int8_scales() const { return (flags & int8_scales_flag) != 0; }
    bool has_table() const { return int8_scales() && bits <= 5; }
    // Whether there is such a format.
    bool known() const {
        if (flags == sparse_flag) return bits == 4 && (group == 64 || group == 128);
        if (flags == two_level_flag) return bits == 2 && group == 64;
        const bool has_group = group == 0 || group == 32 || group == 64 || group == 128;
        if (flags == int8_scales_flag) return bits >= 4 && bits <= 6 && has_group && group > 0;
        return flags == 0 && has_group && (bits == 2 || bits == 4 || bits == 8);
    }
    bool operator==(const MatrixFormat&) const = default;
};
static_assert(sizeof(MatrixFormat) == 4);

// "4 bits in groups of 64, 2:4 sparse"
inline std::string format_text(const MatrixFormat& f) {
    std::string text = std::to_string(f.bits) + " bits ";
    text += f.group > 0 ? "in groups of " + std::to_string(f.group) : "per row";
    if (f.two_level()) text += ", two-level";
    if (f.has_table()) text += ", by table";
    if (f.sparse()) text += ", 2:4 sparse";
    return text;
}
