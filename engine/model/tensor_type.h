// The safetensors names of the types that model files hold.
#pragma once

#include <cstdint>

// engine/gpu/half2.h adds half, engine/cpu/half.h Half.
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
