// a * b + c, rounded once, as the kernels' sums of groups are.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// The lowest 29 of a double's 52 bits of fraction are those that a float has not. Half of its last place is
// this.
constexpr uint64_t below_float = (uint64_t{1} << 29) - 1, half_of_float = uint64_t{1} << 28;

// By doubles, for processors that have no such instruction: the product is exact, and so is rounding the sum
// to a double and then to a float, but where the double lies halfway between two floats. There, what the
// first rounding has lost (Knuth's TwoSum) decides. For results that are normal numbers, or that are a
// multiple of 2^-149 to begin with, as sums of whole numbers times fp32 scales are.
inline float fused_by_doubles(float a, float b, float c) {
    const double product = double(a) * b, sum = product + c;
    auto bits = std::bit_cast<uint64_t>(sum);
    if ((bits & below_float) == half_of_float) {
        const double added = sum - product, lost = (product - (sum - added)) + (c - added);
        if (lost != 0) bits += (lost > 0) == (sum > 0) ? 1 : uint64_t(-1);
    }
    return float(std::bit_cast<double>(bits));
}

inline float fused_multiply_add(float a, float b, float c) {
#ifdef __wasm__  // std::fma is a function there, which musl gets wrong where rounding modes cannot be set
    return fused_by_doubles(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}
