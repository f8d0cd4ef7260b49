#include "vectors.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

static const std::string folder = VECTORS "/";

static nlohmann::json first_line(std::ifstream& in, const std::string& file) {
    std::string line;
    if (!std::getline(in, line) || line.rfind("// ", 0) != 0)
        throw std::runtime_error(file + ": not there, or no vectors: make hw-unit writes them");
    return nlohmann::json::parse(line.substr(3));
}

std::vector<int64_t> read_hex(const std::string& file) {
    std::ifstream in(file);
    const nlohmann::json head = first_line(in, file);
    const size_t digits = (size_t(head["bits"]) + 3) / 4, bits = size_t(head["bits"]);
    const bool is_signed = std::string(head["type"]).rfind("int", 0) == 0;
    std::vector<int64_t> values;
    for (std::string word; std::getline(in, word);) {
        if (word.size() % digits)
            throw std::runtime_error(file + ": a word of " + std::to_string(word.size()) + " digits");
        for (size_t end = word.size(); end > 0; end -= digits) {
            int64_t value = std::stoll(word.substr(end - digits, digits), nullptr, 16);
            if (is_signed && value >> (bits - 1)) value -= int64_t(1) << bits;
            values.push_back(value);
        }
    }
    return values;
}

std::vector<int64_t> op(const std::string& name) { return read_hex(folder + "ops/" + name + ".hex"); }

std::vector<int> op_shape(const std::string& name) {
    const std::string file = folder + "ops/" + name + ".hex";
    std::ifstream in(file);
    return first_line(in, file)["shape"];
}

std::vector<std::string> op_cases(const std::string& beginning, const std::string& tensor) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder + "ops")) {
        const std::string name = entry.path().stem(), end = "." + tensor;
        if (name.rfind(beginning, 0) == 0 && name.size() > end.size() && name.ends_with(end))
            names.insert(name.substr(0, name.size() - end.size()));
    }
    if (names.empty()) throw std::runtime_error("no vectors " + beginning + "*." + tensor + " in " + folder);
    return {names.begin(), names.end()};
}

std::vector<int64_t> Passes::read(const std::string& tensor) const {
    return read_hex(folder + array + "/passes-" + name + "/" + tensor + ".hex");
}

std::vector<Passes> all_passes() {
    const char* named = std::getenv("HW_ARRAY");
    Passes p;
    p.array = named == nullptr ? "16x16" : named;
    p.rows = std::stoi(p.array), p.cols = std::stoi(p.array.substr(p.array.find('x') + 1));
    std::ifstream in(folder + p.array + "/cases.txt");
    std::vector<Passes> cases;
    while (in >> p.name >> p.n_tokens >> p.n_outputs >> p.n_inputs >> p.group_size) cases.push_back(p);
    if (cases.empty()) throw std::runtime_error("no cases in " + folder + p.array);
    return cases;
}
