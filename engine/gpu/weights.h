// A model file's weights in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/gpu/device.h"
#include "engine/model/model_file.h"
#include "engine/model/tensors.h"

// Each tensor begins at a multiple of it in device memory: what cudaMalloc itself gives, and enough for any
// vector load.
constexpr uint64_t device_alignment = 256;

// A list to make a Weights of before there is device memory: of names, shapes, sizes and places. Its pointers
// are null.
inline TensorList planned_tensors() { return {nullptr, 0, device_alignment}; }

// Copies every tensor of the file to its place.
inline DeviceBuffer<std::byte> upload_weights(const ModelFile& file, const TensorList& planned) {
    DeviceBuffer<std::byte> memory(planned.memory_bytes());
    for (const TensorInfo& t : planned.all())
        memory.upload(file.map.bytes().data() + t.offset, t.n_bytes, t.memory_offset);
    return memory;
}

// The list that a Weights with pointers into that memory is made of.
inline TensorList tensors_in(const DeviceBuffer<std::byte>& memory) {
    return {memory.get(), memory.size(), device_alignment};
}
