// What the golden vectors of RoPE were made with. Config: a program's ModelConfig.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

// Each with what its vectors' names begin with, such as "rope.yarn.".
template <class Config>
std::vector<std::pair<std::string, Config>> rope_cases() {
    struct Case {
        const char* name;
        int head_dim;
        float theta;
        int rope_type, original_max_position;
        float factor, low, high, attention;
    };
    std::vector<std::pair<std::string, Config>> all;
    for (const Case& k :
         {Case{"plain", 64, 500000, 0, 0, 1, 1, 4, 1}, Case{"llama-3.2-1b", 64, 500000, 1, 8192, 32, 1, 4, 1},
          Case{"tiny", 32, 1000000, 1, 128, 8, 1, 4, 1}, Case{"every", 2, 1000000, 0, 0, 1, 1, 4, 1},
          Case{"late", 128, 1000000, 0, 0, 1, 1, 4, 1}, Case{"linear", 128, 1000000, 2, 8192, 2, 128, 129, 1},
          Case{"yarn", 128, 1000000, 3, 32768, 4, 88, 105, float(0.1 * std::log(4.0) + 1)}}) {
        Config c;
        c.head_dim = k.head_dim;
        c.rope_theta = k.theta;
        c.rope_type = k.rope_type, c.original_max_position = k.original_max_position;
        c.rope_factor = k.factor, c.low_freq_factor = k.low, c.high_freq_factor = k.high;
        c.attention_factor = k.attention;
        all.push_back({"rope." + std::string(k.name) + ".", c});
    }
    return all;
}
