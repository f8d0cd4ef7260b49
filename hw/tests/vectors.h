// The vectors that hw/tests/make_vectors.py wrote, as C++ reads them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// The values of a .hex file in its order: word after word, of each the lowest lane first. They are as wide as
// the file's first line says; signed is what the line calls int.
std::vector<int64_t> read_hex(const std::string& file);

// The same of an op vector, such as "quantize.64.x". Its shape, and whether there is one of that name.
std::vector<int64_t> op(const std::string& name);
std::vector<int> op_shape(const std::string& name);
// The names of all cases that begin so.
std::vector<std::string> op_cases(const std::string& beginning, const std::string& tensor);

// A product on an array of rows x cols cells: golden/passes.py. Outputs are padded to whole tiles.
struct Passes {
    std::string array;  // "16x16"
    int rows, cols;
    std::string name;
    int n_tokens, n_outputs, n_inputs, group_size;

    int n_passes() const { return n_inputs / rows; }
    int n_groups() const { return n_inputs / group_size; }
    int n_row_tiles() const { return (n_outputs + cols - 1) / cols; }
    std::vector<int64_t> read(const std::string& tensor) const;
};
// All products on the array that the environment's HW_ARRAY names, 16x16 without it.
std::vector<Passes> all_passes();
