// Reads safetensors files for the tests: golden vectors and traces.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

struct Tensor {
    std::string type;        // "F32", "F16", "I8", "I32"
    std::vector<int> shape;  // outermost first
    std::vector<char> bytes;

    template <class T>
    std::vector<T> values() const {
        const char* expected = std::is_same_v<T, float> ? "F32"
                               : sizeof(T) == 1         ? "I8"
                               : sizeof(T) == 2         ? "F16"
                                                        : "I32";
        if (type != expected) {
            throw std::runtime_error("tensor is " + type);
        }
        std::vector<T> v(bytes.size() / sizeof(T));
        std::memcpy(v.data(), bytes.data(), bytes.size());
        return v;
    }
    std::vector<uint16_t> f16_bits() const { return values<uint16_t>(); }
    // The values in fp32; those of fp16 are widened.
    std::vector<float> f32() const {
        if (type != "F16") return values<float>();
        std::vector<float> v;
        for (const uint16_t bits :
             f16_bits()) {  // IEEE 754 binary16: sign, 5 bits of exponent, 10 of fraction
            const int exponent = bits >> 10 & 31, fraction = bits & 1023;
            const float size = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                               : exponent > 0 ? std::ldexp(float(1024 + fraction), exponent - 25)
                                              : std::ldexp(float(fraction), -24);
            v.push_back((bits & 0x8000) != 0 ? -size : size);
        }
        return v;
    }
    std::vector<int8_t> i8() const { return values<int8_t>(); }
    std::vector<int32_t> i32() const { return values<int32_t>(); }
};

using Tensors = std::map<std::string, Tensor>;

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in)
        throw std::runtime_error(
            path + ": cannot open (tests run in the repository's root; `make golden` writes golden/data)");
    return {std::istreambuf_iterator<char>(in), {}};
}

inline Tensors read_safetensors(const std::string& path) {
    const std::string file = read_file(path);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file.data(), 8);
    const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
    Tensors tensors;
    for (const auto& [name, about] : header.items()) {
        if (name == "__metadata__") continue;
        const size_t begin = about["data_offsets"][0], end = about["data_offsets"][1];
        const char* data = file.data() + 8 + header_bytes;
        tensors[name] = {about["dtype"], about["shape"], {data + begin, data + end}};
    }
    return tensors;
}

// |a - b| / |a| by norm, as golden/trace.py defines it; infinite if the sizes differ or a value is not
// finite.
inline double relative_error(std::span<const float> a, std::span<const float> b) {
    if (a.size() != b.size()) return INFINITY;
    double norm = 0, difference = 0;
    for (size_t i = 0; i < a.size(); i++) {
        norm += double(a[i]) * a[i];
        difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    }
    if (!std::isfinite(norm) || !std::isfinite(difference)) return INFINITY;
    return norm > 0 ? std::sqrt(difference / norm) : difference > 0 ? INFINITY : 0;
}
