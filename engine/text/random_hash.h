// A hash function drawn at random, so that no file can be made whose keys collide in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>

// The upper half of a x + b mod 2^128 with random a and b. Over the draw, the hashes of any two numbers are
// independent and uniform (Dietzfelbinger, "Universal hashing and k-wise independence via integer arithmetic
// without primes", 1996), so any two fall into the same of n slots with probability 1/n.
class RandomHash {
  public:
    uint64_t operator()(uint64_t x) const { return static_cast<uint64_t>((a_ * x + b_) >> 64); }

    uint64_t operator()(std::string_view s) const {
        uint64_t h = (*this)(s.size());
        for (; s.size() >= 8; s.remove_prefix(8)) {
            uint64_t eight;
            std::memcpy(&eight, s.data(), 8);
            h = (*this)(h ^ eight);
        }
        uint64_t rest = 0;
        std::memcpy(&rest, s.data(), s.size());
        return (*this)(h ^ rest);
    }

  private:
    using Wide = unsigned __int128;
    static Wide draw() {
        std::random_device random;  // 32 bits a call
        Wide bits = 0;
        for (int i = 0; i < 4; i++) bits = bits << 32 | random();
        return bits;
    }
    Wide a_ = draw(), b_ = draw();
};
