// The emulator against what CUDA's manuals say: fp16 arithmetic, the PTX instructions, shuffles, barriers,
// and the mistakes that it always notices. Those that only the checked build notices are in
// simt_checks_test.cpp.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/os/threads.h"
#include "simt/cuda.h"
#include "simt/ptx.h"

// The kernels' names are in the messages, so they have a namespace with a name.
namespace simt_test {

[[maybe_unused]] const bool has_threads = (simt::run_loop = run_loop) != nullptr;

// Memory of the device.
template <class T>
struct Device {
    explicit Device(size_t count, T value = {}) : Device(std::vector<T>(count, value)) {}
    explicit Device(const std::vector<T>& values) : n(values.size()) {
        REQUIRE(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess);
        REQUIRE(cudaMemcpy(p, values.data(), n * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    ~Device() { cudaFree(p); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    std::vector<T> host() const {
        std::vector<T> values(n);
        REQUIRE(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        return values;
    }

    T* p = nullptr;
    size_t n;
};

// What a launch throws.
template <class Run>
std::string error_of(Run run) {
    try {
        run();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "no error";
}

// ----------------------------------------------------------------------------
// fp16

// The value of a finite fp16 number, by its definition.
double value(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}
bool is_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }
bool is_nan(uint16_t h) { return (h & 0x7fff) > 0x7c00; }

// fp16 numbers as whole multiples of 2^-24, and their products and sums as multiples of 2^-48: all exact.
using Exact = __int128;
Exact units(uint16_t h) { return Exact(std::ldexp(value(h), 24)); }

// The fp16 number nearest to n * 2^-48, the even one of two that are equally near.
uint16_t rounded(Exact n, bool negative_zero) {
    const uint16_t sign = n < 0 || (n == 0 && negative_zero) ? 0x8000 : 0;
    const Exact magnitude = n < 0 ? -n : n;
    int place = 24;  // the last one kept: 2^-24 among subnormal numbers, otherwise 11 bits
    while (magnitude >> place >= 2048) place++;
    Exact kept = magnitude >> place;
    const Exact rest = magnitude - (kept << place), half_unit = Exact(1) << (place - 1);
    if (rest > half_unit || (rest == half_unit && kept % 2 != 0)) kept++;
    // Consecutive numbers have consecutive bits, through carries into the exponent.
    const int bits = int(kept) + (place - 24) * 1024;
    return sign | uint16_t(bits >= 0x7c00 ? 0x7c00 : bits);
}

const uint16_t corners[] = {0x0000, 0x0001, 0x0002, 0x03ff, 0x0400, 0x0401, 0x1400, 0x2c00, 0x37ff, 0x3800,
                            0x3bff, 0x3c00, 0x3c01, 0x3d55, 0x4200, 0x4955, 0x63ff, 0x6400, 0x77ff, 0x7800,
                            0x7bfe, 0x7bff, 0x7c00, 0x7e00, 0x8000, 0x8001, 0x83ff, 0x8400, 0x8401, 0x9400,
                            0xbbff, 0xbc00, 0xbc01, 0xe400, 0xf7ff, 0xfbff, 0xfc00, 0xfe00};

TEST_CASE("fp16 to fp32, all numbers") {
    for (auto convert : {simt::half_to_float, simt::half_to_float_portable}) {
        for (int h = 0; h < 65536; h++) {
            const float f = convert(uint16_t(h));
            CAPTURE(h);
            if (is_nan(uint16_t(h))) {
                REQUIRE(std::isnan(f));
            } else if (!is_finite(uint16_t(h))) {
                REQUIRE(std::isinf(f));
            } else {
                REQUIRE(f == value(uint16_t(h)));
            }
            if (!is_nan(uint16_t(h))) REQUIRE(std::signbit(f) == (h >= 32768));
        }
    }
}

TEST_CASE("fp32 to fp16 at and around every number and every tie") {
    const float infinity = std::numeric_limits<float>::infinity();
    for (auto convert : {simt::float_to_half, simt::float_to_half_portable}) {
        for (int h = 0; h < 0x7c00; h++) {
            const float here = float(value(uint16_t(h)));
            const float next = h == 0x7bff ? 65536.0f : float(value(uint16_t(h + 1)));
            const float tie = (here + next) / 2;  // exact
            CAPTURE(h);
            for (int sign : {0, 0x8000}) {
                const auto of = [&](float f) { return convert(sign ? -f : f); };
                REQUIRE(of(here) == (h | sign));
                REQUIRE(of(std::nextafter(here, infinity)) == (h | sign));
                REQUIRE(of(std::nextafter(tie, 0.0f)) == (h | sign));
                REQUIRE(of(tie) == ((h % 2 == 0 ? h : h + 1) | sign));
                REQUIRE(of(std::nextafter(tie, infinity)) == ((h + 1) | sign));
                REQUIRE(of(std::nextafter(next, 0.0f)) == ((h + 1) | sign));
            }
        }
        for (float f : {65536.0f, 1e30f, infinity}) {
            CHECK(convert(f) == 0x7c00);
            CHECK(convert(-f) == 0xfc00);
        }
        CHECK(convert(1e-30f) == 0);
        CHECK(convert(-1e-45f) == 0x8000);
        CHECK(convert(std::nanf("")) == 0x7fff);
        CHECK(convert(-std::nanf("")) == 0x7fff);
    }
}

// Compares all operations on three numbers with the exact ones. Infinity and NaN follow fp64's rules, and so
// does the sign of zero.
void check_arithmetic(uint16_t a, uint16_t b, uint16_t c) {
    const half ha = __ushort_as_half(a), hb = __ushort_as_half(b), hc = __ushort_as_half(c);
    const double x = float(ha), y = float(hb), z = float(hc);
    const bool finite = is_finite(a) && is_finite(b), all_finite = finite && is_finite(c);
    const auto check = [&](const char* what, half got, double by_fp64, bool exact, Exact n) {
        CAPTURE(what);
        CAPTURE(a);
        CAPTURE(b);
        CAPTURE(c);
        uint16_t expected = uint16_t(by_fp64 < 0 ? 0xfc00 : 0x7c00);
        if (std::isnan(by_fp64)) expected = 0x7fff;
        if (exact) expected = rounded(n, std::signbit(by_fp64));
        REQUIRE(__half_as_ushort(got) == expected);
    };
    const Exact one = Exact(1) << 24, zero = 0;
    check("add", __hadd(ha, hb), x + y, finite, finite ? (units(a) + units(b)) * one : zero);
    check("sub", __hsub(ha, hb), x - y, finite, finite ? (units(a) - units(b)) * one : zero);
    check("mul", __hmul(ha, hb), x * y, finite, finite ? units(a) * units(b) : zero);
    check("fma", __hfma(ha, hb, hc), x * y + z, all_finite,
          all_finite ? units(a) * units(b) + units(c) * one : zero);
}

TEST_CASE("fp16 arithmetic is exact but for one rounding") {
    for (uint16_t a : corners) {
        for (uint16_t b : corners) {
            for (uint16_t c : corners) check_arithmetic(a, b, c);
        }
    }
    std::mt19937 rng(1);
    for (int i = 0; i < 300000; i++) {
        const uint16_t a = uint16_t(rng()), b = uint16_t(rng()), c = uint16_t(rng());
        check_arithmetic(a, b, c);
        // A c that nearly cancels the product, and one far below it.
        const uint16_t product = __half_as_ushort(__hmul(__ushort_as_half(a), __ushort_as_half(b)));
        check_arithmetic(a, b, uint16_t((product ^ 0x8000) + int(rng() % 3) - 1));
        check_arithmetic(a, b, uint16_t(rng() % 64 | (rng() & 0x8000)));
    }
    // 3 * 683/2048 is 1 + 2^-11, a tie. What is added is lost in fp32, and decides the tie.
    const half product_of[] = {half(3.0f), half(683.0f / 2048)}, tiny(0x1p-24f);
    CHECK(float(__hfma(product_of[0], product_of[1], tiny)) == 1 + 0x1p-10f);
    CHECK(float(half(std::fma(float(product_of[0]), float(product_of[1]), float(tiny)))) == 1);
}

TEST_CASE("half2 does the same to both, and the low half is first") {
    const half2 a = __floats2half2_rn(1.5f, -2), b = __halves2half2(half(4.0f), half(0.5f));
    const auto is = [](half2 h, float low, float high) {
        return __low2float(h) == low && __high2float(h) == high && __half2float(__low2half(h)) == low &&
               __half2float(__high2half(h)) == high && __half22float2(h).x == low &&
               __half22float2(h).y == high;
    };
    CHECK(is(a, 1.5f, -2));
    CHECK(is(__hadd2(a, b), 5.5f, -1.5f));
    CHECK(is(__hsub2(a, b), -2.5f, -2.5f));
    CHECK(is(__hmul2(a, b), 6, -1));
    CHECK(is(__hfma2(a, b, __half2half2(__float2half(0.25f))), 6.25f, -0.75f));
    CHECK(is(__float22half2_rn(make_float2(1, 2)), 1, 2));
    CHECK(is(__float2half2_rn(3), 3, 3));
    CHECK(std::bit_cast<uint32_t>(b) == 0x38004400);
}

// ----------------------------------------------------------------------------
// PTX

template <unsigned lut>
void check_lop3(const std::vector<uint32_t>& words) {
    for (size_t i = 0; i + 2 < words.size(); i++) {
        const uint32_t a = words[i], b = words[i + 1], c = words[i + 2];
        uint32_t expected = 0;
        for (int bit = 0; bit < 32; bit++) {
            const unsigned row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1);
            expected |= (lut >> row & 1) << bit;
        }
        CAPTURE(lut);
        REQUIRE(lop3<lut>(a, b, c) == expected);
    }
}

TEST_CASE("lop3, all immediates") {
    std::mt19937 rng(2);
    std::vector<uint32_t> words(20);
    for (uint32_t& w : words) w = uint32_t(rng());
    [&]<size_t... lut>(std::index_sequence<lut...>) { (check_lop3<lut>(words), ...); }
    (std::make_index_sequence<256>());
    // The manual: the immediate for a function is the function of 0xf0, 0xcc and 0xaa.
    CHECK(lop3<(0xf0 & 0xcc) | 0xaa>(words[0], words[1], words[2]) == ((words[0] & words[1]) | words[2]));
    CHECK(lop3<0xf0 ^ 0xcc ^ 0xaa>(words[0], words[1], words[2]) == (words[0] ^ words[1] ^ words[2]));
}

TEST_CASE("prmt") {
    CHECK(prmt(0x33221100, 0x77665544, 0x3210) == 0x33221100);
    CHECK(prmt(0x33221100, 0x77665544, 0x7654) == 0x77665544);
    CHECK(prmt(0x33221100, 0x77665544, 0x1504) == 0x11550044);
    CHECK(prmt(0x007f80ff, 0x807f00ff, 0xba98) == 0x0000ffff);
    CHECK(prmt(0x007f80ff, 0x807f00ff, 0xfedc) == 0xff0000ff);
    std::mt19937 rng(3);
    for (int i = 0; i < 20000; i++) {
        const uint32_t a = uint32_t(rng()), b = uint32_t(rng()), selector = uint32_t(rng());
        uint8_t bytes[8], expected[4];
        std::memcpy(bytes, &a, 4);
        std::memcpy(bytes + 4, &b, 4);
        for (int k = 0; k < 4; k++) {
            const unsigned nibble = selector >> (4 * k) & 15;
            const int8_t byte = int8_t(bytes[nibble % 8]);
            expected[k] = uint8_t(nibble < 8 ? byte : byte >> 7);
        }
        const uint32_t got = prmt(a, b, selector);
        REQUIRE(std::memcmp(&got, expected, 4) == 0);
    }
}

struct Fragments {
    half a[32][8], b[32][4];
    float c[32][4];
};

__global__ void multiply(Fragments* f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t a[4], b[2];
    float c[4];
    for (int i = 0; i < 4; i++) a[i] = reinterpret_cast<const uint32_t*>(f[warp].a[lane])[i];
    for (int i = 0; i < 2; i++) b[i] = reinterpret_cast<const uint32_t*>(f[warp].b[lane])[i];
    for (int i = 0; i < 4; i++) c[i] = f[warp].c[lane][i];
    mma_m16n8k16(c, a, b);
    for (int i = 0; i < 4; i++) f[warp].c[lane][i] = c[i];
}

// Where element i of a lane's fragment lies in its matrix: the formulas of the manual, "Matrix Fragments for
// mma.m16n8k16 with floating point type".
struct At {
    int row, col;
};
At of_a(int lane, int i) {
    const int group_id = lane >> 2, thread_id_in_group = lane % 4;
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group_id : group_id + 8,
            i < 4 ? thread_id_in_group * 2 + (i & 1) : thread_id_in_group * 2 + (i & 1) + 8};
}
At of_b(int lane, int i) {
    const int group_id = lane >> 2, thread_id_in_group = lane % 4;
    return {i < 2 ? thread_id_in_group * 2 + (i & 1) : thread_id_in_group * 2 + (i & 1) + 8, group_id};
}
At of_c(int lane, int i) {
    const int group_id = lane >> 2, thread_id_in_group = lane % 4;
    return {i < 2 ? group_id : group_id + 8, thread_id_in_group * 2 + (i & 1)};
}

TEST_CASE("mma_m16n8k16") {
    std::mt19937 rng(4);
    // Small whole numbers have an exact product, whatever the order of the sums; others nearly.
    for (bool whole : {true, false}) {
        const auto random = [&] {
            return whole ? float(int(rng() % 33) - 16) : std::normal_distribution<float>()(rng);
        };
        const int n_warps = 3;
        std::vector<Fragments> fragments(n_warps);
        std::vector<std::array<double, 16 * 8>> expected(n_warps);
        for (int w = 0; w < n_warps; w++) {
            double a[16][16], b[16][8], c[16][8];
            Fragments& f = fragments[w];
            for (int lane = 0; lane < 32; lane++) {
                for (int i = 0; i < 8; i++) {
                    f.a[lane][i] = half(random());
                    a[of_a(lane, i).row][of_a(lane, i).col] = float(f.a[lane][i]);
                }
                for (int i = 0; i < 4; i++) {
                    f.b[lane][i] = half(random());
                    b[of_b(lane, i).row][of_b(lane, i).col] = float(f.b[lane][i]);
                    f.c[lane][i] = random();
                    c[of_c(lane, i).row][of_c(lane, i).col] = f.c[lane][i];
                }
            }
            for (int row = 0; row < 16; row++) {
                for (int col = 0; col < 8; col++) {
                    double sum = c[row][col];
                    for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][col];
                    expected[w][row * 8 + col] = sum;
                }
            }
        }
        const Device<Fragments> device(fragments);
        launch<multiply>({.grid = 1, .block = n_warps * 32}, device.p);
        const std::vector<Fragments> got = device.host();
        for (int w = 0; w < n_warps; w++) {
            for (int lane = 0; lane < 32; lane++) {
                for (int i = 0; i < 4; i++) {
                    const double sum = expected[w][of_c(lane, i).row * 8 + of_c(lane, i).col];
                    if (whole) {
                        REQUIRE(got[w].c[lane][i] == sum);
                    } else {
                        REQUIRE(std::abs(got[w].c[lane][i] - sum) < 1e-5);
                    }
                }
            }
        }
    }
}

// Rows lie `stride` apart, in a shuffled order.
constexpr int stride = 24;
__global__ void load_matrices(const uint16_t* matrices, const int* order, uint32_t* plain,
                              uint32_t* transposed) {
    uint16_t* shared = dynamic_shared<uint16_t>();
    const int lane = threadIdx.x;
    uint16_t* row = shared + order[lane] * stride;
    for (int i = 0; i < 8; i++) row[i] = matrices[lane * 8 + i];
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, row);
    for (int i = 0; i < 4; i++) plain[lane * 4 + i] = r[i];
    ldmatrix_x4_trans(r, row);
    for (int i = 0; i < 4; i++) transposed[lane * 4 + i] = r[i];
}

TEST_CASE("ldmatrix") {
    std::mt19937 rng(5);
    std::vector<uint16_t> matrices(4 * 8 * 8);  // [matrix][row][column]
    for (uint16_t& x : matrices) x = uint16_t(rng());
    std::vector<int> order(32);
    for (int i = 0; i < 32; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    const Device<uint32_t> plain(128), transposed(128);
    launch<load_matrices>({.grid = 1, .block = 32, .shared_bytes = 32 * stride * 2},
                          Device<uint16_t>(matrices).p, Device<int>(order).p, plain.p, transposed.p);
    const auto element = [&](int m, int row, int col) { return uint32_t(matrices[(m * 8 + row) * 8 + col]); };
    for (int lane = 0; lane < 32; lane++) {
        for (int m = 0; m < 4; m++) {
            // The manual's figure: lanes 0 to 3 hold row 0, two elements each, lanes 4 to 7 row 1, and so on.
            const int row = lane / 4, col = lane % 4 * 2;
            CHECK(plain.host()[lane * 4 + m] == (element(m, row, col) | element(m, row, col + 1) << 16));
            CHECK(transposed.host()[lane * 4 + m] == (element(m, col, row) | element(m, col + 1, row) << 16));
        }
    }
}

template <int bytes>
__global__ void copy(const char* from, char* seen, int n_valid) {
    alignas(16) __shared__ char first[32 * bytes], second[32 * bytes];
    const int t = threadIdx.x;
    for (int i = 0; i < bytes; i++) first[t * bytes + i] = second[t * bytes + i] = 1;
    cp_async<bytes>(first + t * bytes, from + t * bytes, t < n_valid);
    cp_async_commit();
    cp_async<bytes>(second + t * bytes, from + (32 + t) * bytes, true);
    cp_async_commit();
    cp_async<bytes>(second + t * bytes, from, true);  // in no group: waited for by nobody
    const auto look = [&](int step) {
        for (int i = 0; i < bytes; i++) {
            seen[(step * 2 + 0) * 32 * bytes + t * bytes + i] = first[t * bytes + i];
            seen[(step * 2 + 1) * 32 * bytes + t * bytes + i] = second[t * bytes + i];
        }
    };
    look(0);
    cp_async_wait<2>();
    look(1);
    cp_async_wait<1>();
    look(2);
    cp_async_wait<0>();
    look(3);
}

template <int bytes>
void check_copy() {
    std::vector<char> from(64 * bytes);
    for (size_t i = 0; i < from.size(); i++) from[i] = char(i % 100 + 2);
    const int n_valid = 29, n = 32 * bytes;
    const Device<char> seen(8 * n);
    launch<copy<bytes>>({.grid = 1, .block = 32}, Device<char>(from).p, seen.p, n_valid);
    const std::vector<char> got = seen.host();
    for (int i = 0; i < n; i++) {
        CAPTURE(i);
        const char first = i < n_valid * bytes ? from[i] : char(0), second = from[n + i];
        const char expected[] = {1, 1, 1, 1, first, 1, first, second};
        for (int k = 0; k < 8; k++) REQUIRE(got[k * n + i] == expected[k]);
    }
}

TEST_CASE("cp_async copies when it is waited for, group by group, and fills with zeros") {
    check_copy<4>();
    check_copy<8>();
    check_copy<16>();
}

// ----------------------------------------------------------------------------
// Threads together

__global__ void shuffles(int* ints, float* floats, unsigned* votes) {
    const int t = threadIdx.x, n = blockDim.x;
    const unsigned all = ~0u;
    ints[0 * n + t] = __shfl_sync(all, t, 5);
    ints[1 * n + t] = __shfl_sync(all, t, t % 32 + 1);  // the last takes the first's
    ints[2 * n + t] = __shfl_xor_sync(all, t, 16);
    ints[3 * n + t] = __shfl_xor_sync(all, t, 3);
    ints[4 * n + t] = __shfl_down_sync(all, t, 4);  // the last four keep their own
    ints[5 * n + t] = __shfl_down_sync(all, t, 4, 8);
    ints[6 * n + t] = __shfl_sync(all, t, 2, 8);
    floats[t] = __shfl_xor_sync(all, t + 0.5f, 1);
    floats[n + t] = float(__shfl_sync(all, 3000000000u + unsigned(t), 1) - 3000000000u);
    votes[t] = __ballot_sync(all, t % 3 == 0);
    votes[n + t] = unsigned(__any_sync(all, t == 40));
    // Half a warp may go on without the other one.
    if (t % 32 < 16) {
        ints[7 * n + t] = __shfl_xor_sync(0xffffu, t, 8);
        __syncwarp(0xffff);
    } else {
        ints[7 * n + t] = -1;
    }
}

TEST_CASE("shuffles and votes") {
    const int n = 96;
    const Device<int> ints(8 * n);
    const Device<float> floats(2 * n);
    const Device<unsigned> votes(2 * n);
    launch<shuffles>({.grid = 1, .block = n}, ints.p, floats.p, votes.p);
    for (int t = 0; t < n; t++) {
        const int lane = t % 32, base = t - lane;
        unsigned ballot = 0;
        for (int i = 0; i < 32; i++) ballot |= unsigned((base + i) % 3 == 0) << i;
        const int expected[] = {base + 5,
                                base + (lane + 1) % 32,
                                base + (lane ^ 16),
                                base + (lane ^ 3),
                                lane < 28 ? t + 4 : t,
                                lane % 8 < 4 ? t + 4 : t,
                                t / 8 * 8 + 2,
                                lane < 16 ? base + (lane ^ 8) : -1};
        CAPTURE(t);
        for (int k = 0; k < 8; k++) CHECK(ints.host()[k * n + t] == expected[k]);
        CHECK(floats.host()[t] == float(t ^ 1) + 0.5f);
        CHECK(floats.host()[n + t] == float(base + 1));
        CHECK(votes.host()[t] == ballot);
        CHECK(votes.host()[n + t] == unsigned(base == 32));
    }
}

__global__ void partial_warp(int* out) {
    __shared__ int given[64];
    const int t = threadIdx.x;
    given[t] = t;
    __syncwarp();
    __syncthreads();
    out[t] = __shfl_xor_sync(~0u, given[t], 1) + __shfl_sync(~0u, 100, 0) + int(__ballot_sync(~0u, 1) * 1000);
}
__global__ void shuffle_from_nobody(int* out) { out[threadIdx.x] = __shfl_down_sync(~0u, 1, 16); }

TEST_CASE("a warp that is not full, alone and behind a full one") {
    const Device<int> out(64);
    launch<partial_warp>({.grid = 1, .block = 2}, out.p);
    CHECK(out.host()[0] == 1 + 100 + 3000);
    CHECK(out.host()[1] == 0 + 100 + 3000);
    launch<partial_warp>({.grid = 1, .block = 36}, out.p);
    CHECK(out.host()[31] == 30 + 100 - 1000);
    CHECK(out.host()[34] == 35 + 100 + 15000);
    CHECK(error_of([&] { launch<shuffle_from_nobody>({.grid = 1, .block = 62}, out.p); }) ==
          "simt: simt_test::shuffle_from_nobody, block (0,0,0), thread 46: __shfl_down_sync from lane 30, "
          "which takes "
          "no part in it");
}

// Sums x over the grid, in shared memory and then by an atomic operation.
template <class T, int n_threads>
__global__ void __launch_bounds__(n_threads) sum(const T* x, T* out, int n) {
    __shared__ T partial[n_threads];
    T* last_warp = dynamic_shared<T>();
    const int t = threadIdx.x;
    partial[t] = 0;
    for (int i = blockIdx.x * n_threads + t; i < n; i += gridDim.x * n_threads) partial[t] += __ldg(x + i);
    __syncthreads();
    for (int k = n_threads / 2; k >= 32; k /= 2) {
        if (t < k) partial[t] += partial[t + k];
        __syncthreads();
    }
    if (t < 32) {
        last_warp[t] = partial[t];
        __syncwarp();
        T s = last_warp[31 - t];
        for (int k = 16; k > 0; k /= 2) s += __shfl_xor_sync(~0u, s, k);
        if (t == 0) atomicAdd(out, s);
    }
}

template <class T>
void check_sum() {
    const int n = 10000;
    std::vector<T> x(n);
    for (int i = 0; i < n; i++) x[i] = T(i % 7);
    const Device<T> device(x), out(1);
    T expected = 0;
    for (T v : x) expected += v;
    launch<sum<T, 1024>>({.grid = 5, .block = 1024, .shared_bytes = 32 * sizeof(T)}, device.p, out.p, n);
    CHECK(out.host()[0] == expected);
    launch<sum<T, 64>>({.grid = 33, .block = 64, .shared_bytes = 32 * sizeof(T)}, device.p, out.p, n);
    CHECK(out.host()[0] == 2 * expected);
}

TEST_CASE("blocks of many warps, shared memory, atomics") {
    check_sum<int>();
    check_sum<unsigned>();
    check_sum<float>();
}

__global__ void count(unsigned* counts, int n_x, int n_y, short scale) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    const int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x < n_x) counts[(z * n_y + y) * n_x + x] += unsigned(scale) + gridDim.x * 10 + blockDim.y;
}

TEST_CASE("grids and blocks of three dimensions; arguments become the kernel's types") {
    const int n_x = 11, n_y = 6, n_z = 10;
    const Device<unsigned> counts(n_x * n_y * n_z, 1000u);
    launch<count>({.grid = dim3(3, 2, 5), .block = dim3(4, 3, 2)}, counts.p, size_t(n_x), n_y, 500L);
    for (unsigned c : counts.host()) REQUIRE(c == 1000 + 500 + 30 + 3);
}

TEST_CASE("free memory of the device is what the machine has available, not only what is unused") {
    size_t free = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    size_t available = 0, all = 0, value = 0;
    std::ifstream meminfo("/proc/meminfo");
    for (std::string field; meminfo >> field >> value; std::getline(meminfo, field)) {
        if (field == "MemAvailable:") available = value * 1024;
        if (field == "MemTotal:") all = value * 1024;
    }
    CHECK(total == all);
    // Other processes take and give some between the two looks.
    CHECK(double(free) == doctest::Approx(double(available)).epsilon(0.05));
}

TEST_CASE("memory of the device") {
    char* p = nullptr;
    REQUIRE(cudaMalloc(&p, 1000) == cudaSuccess);
    CHECK(reinterpret_cast<uintptr_t>(p) % 256 == 0);
    std::vector<char> host(2000, 'x');
    CHECK(cudaMemset(p, 'y', 1000) == cudaSuccess);
    CHECK(cudaMemset(p, 'y', 1001) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(p + 1, host.data(), 999, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaMemcpy(p + 1, host.data(), 1000, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(host.data(), p, 2, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(std::string(host.data(), 3) == "yxx");
    CHECK(cudaMemcpy(host.data(), p - 1, 2, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(host.data(), host.data() + 1, 2, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(p, p + 500, 400, cudaMemcpyDeviceToDevice) == cudaSuccess);
    CHECK(cudaFree(p + 1) == cudaErrorInvalidValue);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(cudaFree(p) == cudaErrorInvalidValue);
    CHECK(cudaFree(nullptr) == cudaSuccess);
    CHECK(std::string(cudaGetErrorString(cudaErrorInvalidValue)) == "invalid argument");
}

// ----------------------------------------------------------------------------
// Mistakes

template <int n>
__global__ void leaves_early(int*) {
    if (threadIdx.x >= n) return;
    __syncthreads();
}
__global__ void waits_elsewhere(int* out) {
    if (threadIdx.x == 40) {
        out[0] = __shfl_sync(1u << 8, 1, 8);  // alone, which is fine
        out[0] = __shfl_xor_sync(~0u, 1, 1);
    } else {
        __syncthreads();
    }
}
__global__ void mates_left(float* c) {
    float sums[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    if (threadIdx.x == 3 || threadIdx.x > 29) return;
    mma_m16n8k16(sums, a, b);
    c[0] = sums[0];
}
__global__ void two_operations(int* out) {
    out[0] = threadIdx.x < 8 ? __shfl_down_sync(~0u, 1, 1u) : __shfl_xor_sync(~0u, 1, 1);
}
__global__ void two_masks(int* out) { out[0] = __shfl_sync(threadIdx.x < 16 ? ~0u : 0xffff0000u, 1, 16); }
__global__ void not_in_mask(int* out) { out[0] = __shfl_sync(0xfffffffeu, 1, 1); }
__global__ void part_of_a_warp(float* c) {
    float sums[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    mma_m16n8k16(sums, a, b);
    c[0] = sums[0];
}
__global__ void misaligned_row(uint32_t* out) {
    uint32_t r[4];
    ldmatrix_x4(r, dynamic_shared<char>() + threadIdx.x * 16 + (threadIdx.x == 9 ? 2 : 0));
    out[threadIdx.x] = r[0];
}
__global__ void row_outside(uint32_t* out) {
    uint32_t r[4];
    ldmatrix_x4(r, dynamic_shared<char>() + threadIdx.x * 16);
    out[threadIdx.x] = r[0];
}
__global__ void row_in_global_memory(uint32_t* out) {
    uint32_t r[4];
    ldmatrix_x4(r, out);
    out[threadIdx.x] = r[0];
}
// Copies 16 bytes of p + from to shared memory + to.
__global__ void copies(const char* p, int to, int from) {
    cp_async<16>(dynamic_shared<char>() + to, p + from, true);
    cp_async_commit();
    cp_async_wait<0>();
}

TEST_CASE("barriers that threads never reach") {
    const Device<int> out(1);
    CHECK(error_of([&] { launch<leaves_early<128>>({.grid = 2, .block = 128}, out.p); }) == "no error");
    CHECK(error_of([&] { launch<leaves_early<64>>({.grid = 1, .block = 128}, out.p); }) ==
          "simt: simt_test::leaves_early<64>, block (0,0,0), thread 0: __syncthreads was never reached by "
          "threads "
          "64..127, which returned");
    CHECK(error_of([&] { launch<leaves_early<1>>({.grid = 1, .block = dim3(1, 1, 2)}, out.p); }) ==
          "no error");
    CHECK(error_of([&] { launch<leaves_early<1>>({.grid = 1, .block = dim3(2, 1, 2)}, out.p); }) ==
          "simt: simt_test::leaves_early<1>, block (0,0,0), thread (0,0,0): __syncthreads was never reached "
          "by thread "
          "(1,0,0), which returned, and by thread (1,0,1), which returned");
    CHECK(error_of([&] { launch<waits_elsewhere>({.grid = 1, .block = 64}, out.p); }) ==
          "simt: simt_test::waits_elsewhere, block (0,0,0), thread 40: __shfl_xor_sync was never reached by "
          "threads "
          "32..39, waiting at __syncthreads, and by threads 41..63, waiting at __syncthreads");
    // The block in question is named; and after all this, the next launch runs.
    CHECK(error_of([&] { launch<leaves_early<2>>({.grid = dim3(1, 1, 1), .block = 3}, out.p); }) ==
          "simt: simt_test::leaves_early<2>, block (0,0,0), thread 0: __syncthreads was never reached by "
          "thread 2, "
          "which returned");
    CHECK(error_of([&] { launch<leaves_early<128>>({.grid = 9, .block = 128}, out.p); }) == "no error");
}

TEST_CASE("operations of a warp in which threads are missing") {
    const Device<int> out(1);
    const Device<float> c(1);
    CHECK(error_of([&] { launch<mates_left>({.grid = 1, .block = 32}, c.p); }) ==
          "simt: simt_test::mates_left, block (0,0,0), thread 0: mma was never reached by thread 3, which "
          "returned, "
          "and by threads 30..31, which returned");
    CHECK(error_of([&] { launch<two_operations>({.grid = 1, .block = 32}, out.p); }) ==
          "simt: simt_test::two_operations, block (0,0,0), thread 0: __shfl_down_sync was never reached by "
          "threads "
          "8..31, waiting at __shfl_xor_sync");
    CHECK(error_of([&] { launch<two_masks>({.grid = 1, .block = 32}, out.p); }) ==
          "simt: simt_test::two_masks, block (0,0,0), thread 0: __shfl_sync was never reached by threads "
          "16..31, "
          "which returned");
    CHECK(error_of([&] { launch<not_in_mask>({.grid = 1, .block = 32}, out.p); }) ==
          "simt: simt_test::not_in_mask, block (0,0,0), thread 0: __shfl_sync with a mask that leaves out "
          "the thread "
          "itself");
    CHECK(error_of([&] { launch<part_of_a_warp>({.grid = 1, .block = 48}, c.p); }) ==
          "simt: simt_test::part_of_a_warp, block (0,0,0), thread 32: mma needs 32 threads, and the warp has "
          "16");
}

TEST_CASE("addresses that ldmatrix and cp.async do not take") {
    const Device<uint32_t> out(32);
    CHECK(error_of([&] { launch<misaligned_row>({.grid = 1, .block = 32, .shared_bytes = 1024}, out.p); }) ==
          "simt: simt_test::misaligned_row, block (0,0,0), thread 9: ldmatrix from an address that is no "
          "multiple of "
          "16");
    CHECK(error_of([&] { launch<row_outside>({.grid = 1, .block = 32, .shared_bytes = 511}, out.p); }) ==
          "simt: simt_test::row_outside, block (0,0,0), thread 31: ldmatrix from outside shared memory");
    CHECK(error_of([&] { launch<row_in_global_memory>({.grid = 1, .block = 32}, out.p); }) ==
          "simt: simt_test::row_in_global_memory, block (0,0,0), thread 0: ldmatrix from outside shared "
          "memory");

    const Device<char> p(64);
    const auto error = [&](int to, int from) {
        return error_of([&] { launch<copies>({.grid = 1, .block = 1, .shared_bytes = 64}, p.p, to, from); });
    };
    const std::string where = "simt: simt_test::copies, block (0,0,0), thread 0: cp.async ";
    CHECK(error(48, 48) == "no error");
    CHECK(error(8, 0) == where + "of 16 bytes to an address that is no multiple of that");
    CHECK(error(0, 4) == where + "of 16 bytes from an address that is no multiple of that");
    CHECK(error(64, 0) == where + "to outside shared memory");
    CHECK(error(0, 64) == where + "from outside all allocations");
    CHECK(error(0, -16) == where + "from outside all allocations");
}

TEST_CASE("launches that CUDA refuses") {
    const Device<int> out(1);
    const auto error = [&](dim3 grid, dim3 block, size_t bytes) {
        return error_of([&] { launch<leaves_early<9999>>({grid, block, bytes}, out.p); });
    };
    CHECK(error(1, 1024, 227 * 1024) == "no error");
    for (const std::string& e :
         {error(1, 1025, 0), error(0, 1, 0), error(1, 0, 0), error(dim3(1, 65536), 1, 0),
          error(1, dim3(1, 1, 65), 0), error(1, 1, 227 * 1024 + 1)}) {
        CHECK(e == "simt_test::leaves_early<9999>: invalid configuration argument");
    }
}

}  // namespace simt_test
