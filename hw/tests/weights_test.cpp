// file_codes, weight_expander and the conversions of scales against GPTQ's golden vectors: from the bytes of
// a file to w' and its fp32 scales.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "Vfile_codes.h"
#include "Vfp16_to_fp32.h"
#include "Vweights.h"
#include "sim.h"
#include "vectors.h"

constexpr int lanes = 16;

// What a row of weights has in a file. Zeros, or z, and scales are those of its groups.
struct Row {
    int bits;
    bool two_level, sparse;
    std::vector<int64_t> bytes, mask;
    std::vector<int> zeros;  // one per group
    int n;
};

// Code number k of a row is code slice of byte at: a row is cut into blocks of 64 bytes, then 32 and 16.
struct Place {
    int byte, slice;
};
static Place place_of(int k, int bits, int n_bytes) {
    const int per_byte = 8 / bits;
    int begin = 0;
    for (int size = 64; size >= 16; size /= 2)
        while (n_bytes - begin >= size) {
            if (k < size * per_byte) return {begin + k % size, k / size};
            k -= size * per_byte, begin += size;
        }
    FAIL("a row of " << n_bytes << " bytes");
    return {};
}

// 16 codes from code k on, through file_codes.
static void codes_of(Sim<Vfile_codes>& sim, const Row& row, int k, int n, uint32_t* codes) {
    for (int half = 0; half < n; half += lanes) {
        const Place place = place_of(k + half, row.bits, int(row.bytes.size()));
        sim.top.two_bits_i = row.bits == 2, sim.top.slice_i = uint8_t(place.slice);
        for (int i = 0; i < lanes; i++)
            set_bits(sim.top.bytes_i, i * 8, 8, uint32_t(row.bytes[size_t(place.byte + i)]));
        sim.settle();
        for (int i = 0; i < std::min(lanes, n - half); i++) codes[half + i] = bits(sim.top.codes_o, i * 4, 4);
    }
}

// w' of a row, through both modules. Pauses of the second between words.
static std::vector<int> expand(const Row& row, Random& random) {
    Sim<Vfile_codes> files;
    Sim<Vweights> sim;
    std::vector<int> w;
    const int group = row.n / int(row.zeros.size());
    for (int k = 0; k < row.n; k += lanes) {
        uint32_t codes[lanes] = {};
        // Of a sparse row half as many codes are stored. Two words of weights share the 16 codes of a word of
        // bytes.
        if (row.sparse) {
            uint32_t stored[lanes];
            codes_of(files, row, k / 2 / lanes * lanes, lanes, stored);
            std::copy_n(stored + k / 2 % lanes, lanes / 2, codes);
            for (int i = lanes / 2; i < lanes; i++) codes[i] = uint32_t(random());
        } else {
            codes_of(files, row, k, lanes, codes);
        }
        for (int i = 0; i < lanes; i++) {
            set_bits(sim.top.codes_i, i * 4, 4, codes[i]);
            set_bits(sim.top.zeros_i, i * 4, 4, uint32_t(row.zeros[size_t((k + i) / group)]));
            const bool kept = row.sparse ? row.mask[size_t((k + i) / 8)] >> ((k + i) % 8) & 1 : random() & 1;
            set_bits(sim.top.mask_i, i, 1, kept);
        }
        sim.top.two_level_i = row.two_level, sim.top.sparse_i = row.sparse;
        sim.tick();
        sim.top.en_i = 0, sim.top.two_level_i = random() & 1;
        set_bits(sim.top.codes_i, random.in(0, 63), 1, uint32_t(random()));
        sim.tick();
        sim.top.en_i = 1;
        for (int i = 0; i < lanes; i++) w.push_back(lane(sim.top.w_o, i, 5));
    }
    return w;
}

static float half_to_float(Sim<Vfp16_to_fp32>& sim, int64_t h) {
    sim.top.h_i = uint16_t(h);
    sim.settle();
    return float_of(sim.top.f_o);
}

TEST_CASE("golden weights of 4 and 2 bits") {
    Random random(41);
    Sim<Vfp16_to_fp32> halves;
    int seen[4] = {};
    for (const std::string& name : op_cases("gptq_expand.w", "w.codes")) {
        const std::string form = name.substr(name.find(".w") + 2);
        if (form[0] == '8' || form[1] == 'i') continue;  // w' as they are; the core gets them in 8 bits
        INFO(name);
        const bool two_level = form.starts_with("2x"), sparse = form.starts_with("4s");
        seen[two_level ? 0 : sparse ? 1 : form[0] == '4' ? 2 : 3]++;
        const std::vector<int64_t> codes = op(name + ".codes"), want = op(name + ".w.codes"),
                                   scales = op(name + ".w.scales");
        const std::vector<int64_t> zeros = op(name + (two_level ? ".groups" : ".zeros"));
        const std::vector<int64_t> own = op(name + (two_level ? ".row_scales" : ".scales"));
        const std::vector<int64_t> mask = sparse ? op(name + ".mask") : std::vector<int64_t>();
        const std::vector<int> shape = op_shape(name + ".w.codes");
        const size_t rows = size_t(shape[0]), n = size_t(shape[1]), n_scales = scales.size() / rows;
        const size_t groups = (two_level ? zeros.size() : own.size()) / rows;
        for (size_t r = 0; r < rows; r++) {
            const auto part = [&](const std::vector<int64_t>& all) {
                const auto size = ptrdiff_t(all.size() / rows);
                return std::vector<int64_t>(all.begin() + ptrdiff_t(r) * size,
                                            all.begin() + ptrdiff_t(r + 1) * size);
            };
            Row row{form[0] - '0', two_level, sparse, part(codes), mask.empty() ? mask : part(mask), {},
                    int(n)};
            const std::vector<int64_t> row_zeros = part(zeros);
            for (size_t g = 0; g < groups; g++)
                row.zeros.push_back(
                    int(two_level ? row_zeros[g] >> 4 : row_zeros[g / 2] >> (g % 2 * 4) & 15));
            const std::vector<int> w = expand(row, random);
            CHECK(std::equal(w.begin(), w.end(), want.begin() + ptrdiff_t(r * n)));
            // The scale of each of the activations' groups; with two levels that of the row times a whole
            // number.
            for (size_t s = 0; s < n_scales; s++) {
                const size_t g = s * groups / n_scales;
                const float scale = two_level ? float(row_zeros[g] & 15) * float_of(uint32_t(own[r]))
                                              : half_to_float(halves, own[r * groups + g]);
                CHECK(bits_of(scale) == uint32_t(scales[r * n_scales + s]));
            }
        }
    }
    for (const int n : seen) CHECK(n >= 2);
}

// Every code with every zero point, and every mask of two of four.
TEST_CASE("weight_expander: all codes, zero points and masks") {
    Sim<Vweights> sim;
    for (int code = 0; code < 16; code++) {
        for (int zero = 0; zero < 16; zero++) {
            for (int i = 0; i < lanes; i++)
                set_bits(sim.top.codes_i, i * 4, 4, uint32_t(code)),
                    set_bits(sim.top.zeros_i, i * 4, 4, uint32_t(zero));
            sim.top.sparse_i = 0, sim.top.two_level_i = 0;
            sim.tick();
            for (int i = 0; i < lanes; i++) CHECK(lane(sim.top.w_o, i, 5) == code - zero);
            sim.top.two_level_i = 1;
            sim.tick();
            if (code < 4)
                for (int i = 0; i < lanes; i++) CHECK(lane(sim.top.w_o, i, 5) == 5 * code - zero);
        }
    }
    sim.top.two_level_i = 0, sim.top.sparse_i = 1;
    for (int i = 0; i < lanes; i++)
        set_bits(sim.top.codes_i, i * 4, 4, uint32_t(i + 1)), set_bits(sim.top.zeros_i, i * 4, 4, 0);
    for (uint32_t mask : {3u, 5u, 9u, 6u, 10u, 12u}) {
        for (int q = 0; q < lanes / 4; q++) set_bits(sim.top.mask_i, q * 4, 4, mask);
        sim.tick();
        for (int q = 0; q < lanes / 4; q++) {
            int code = 2 * q + 1;
            for (int i = 0; i < 4; i++)
                CHECK(lane(sim.top.w_o, 4 * q + i, 5) == (mask >> i & 1 ? code++ : 0));
        }
    }
}
