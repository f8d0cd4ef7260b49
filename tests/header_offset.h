// Offsets of the fields in a model file's header (docs/model-files.md), for files that tests make.
#pragma once

#include <cstddef>

namespace header_offset {
constexpr size_t magic = 0x00, version = 0x04, dims = 0x08, shared_classifier = 0x24, group_size = 0x25,
                 attention_factor = 0x30;
constexpr size_t extension = 0x40, arch = 0x44, head_dim = 0x48, ext_group_size = 0x4C, norm_eps = 0x50,
                 rope_theta = 0x54, rope_scaling = 0x58, bos_id = 0x6C, n_eos = 0x70, eos_ids = 0x74,
                 temperature = 0x94, top_p = 0x98, top_k = 0x9C, tokenizer_offset = 0xA0,
                 tokenizer_size = 0xA8, checksum = 0xB0, activations = 0xB4, min_p = 0xB8,
                 repetition_penalty = 0xBC;
constexpr size_t own = 0xC0;  // the first of the programs' own fields
}  // namespace header_offset
