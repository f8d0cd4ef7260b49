// Finds out which lane of a warp holds which element: of the matrices that ldmatrix loads, of the three
// operands of mma.m16n8k16, and of the weights in AWQ's operand A. docs/figures.py draws the answers.
//
//     g++ -std=c++20 -pthread -fno-strict-aliasing -DNO_TOKENIZER -DENGINE -I. -x c++ docs/fragments.cu -o
//     fragments
//     ./fragments [LANE]
//
// prints a line for each element, of all lanes or of one: operand, lane, register, half, row, column. The
// functions under test are those of runq_awq.cu. Compiled by nvcc (without -pthread and the
// like), it runs on a GPU.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define RUNQ_NO_MAIN
#include "runq_awq.cu"

// The contents of a lane's registers. Each number encodes the element that is there, as 16 * row + column
// unless said otherwise.
struct Held {
    half ldmatrix[4][2];    // of four 8 x 8 matrices, 64 * matrix + 8 * row + column
    half a[4][2];           // of A, 16 x 16
    half b[2][2];           // of B, 16 x 8
    float c[4];             // of C, 16 x 8
    bool agree;             // every choice of nonzero inputs gives the same c
    half weights[4][4][2];  // operand A made from words: [pair][register][half], 64 * input + column of 64
};

__device__ inline void unpack(half (&two)[2], uint32_t bits) {
    two[0] = __low2half(as_half2(bits)), two[1] = __high2half(as_half2(bits));
}

// One warp.
__global__ void ask(Held* held) {
    __shared__ __align__(16) half matrices[4][8][8], a_rows[16][16], b_columns[8][16];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    Held mine;

    // Fill shared memory with the numbers; ldmatrix then loads known elements.
    for (int i = lane; i < 4 * 64; i += 32) matrices[i / 64][i / 8 % 8][i % 8] = __float2half(float(i));
    for (int i = lane; i < 256; i += 32) a_rows[i / 16][i % 16] = __float2half(float(i));
    for (int i = lane; i < 128; i += 32)
        b_columns[i / 16][i % 16] = __float2half(float(i % 16 * 16 + i / 16));
    __syncwarp();
    uint32_t r[4], a[4], b[4];
    ldmatrix_x4(r, &matrices[lane / 8][lane % 8][0]);
    for (int i = 0; i < 4; i++) unpack(mine.ldmatrix[i], r[i]);

    // Operand A is four 8 x 8 matrices: upper left, lower left, upper right, lower right. B is stored by
    // columns.
    ldmatrix_x4(a, &a_rows[lane % 16][lane / 16 * 8]);
    ldmatrix_x4(b, &b_columns[lane % 8][lane / 8 % 2 * 8]);
    for (int i = 0; i < 4; i++) unpack(mine.a[i], a[i]);
    for (int i = 0; i < 2; i++) unpack(mine.b[i], b[i]);

    // C: a product whose element (row, column) is 16 * row + column, computed from two of the 16 inputs at a
    // time, in 16 ways. Had ldmatrix put A and B in other registers than mma reads, the results would differ.
    mine.agree = true;
    for (int k = 0; k < 16; k++) {
        __syncwarp();
        for (int i = lane; i < 256; i += 32) {
            const int row = i / 16, at = i % 16;
            a_rows[row][at] = __float2half(at == k ? float(row) : at == (k + 5) % 16 ? 1.0f : 0.0f);
        }
        for (int i = lane; i < 128; i += 32) {
            const int column = i / 16, at = i % 16;
            b_columns[column][at] = __float2half(at == k ? 16.0f : at == (k + 5) % 16 ? float(column) : 0.0f);
        }
        __syncwarp();
        ldmatrix_x4(a, &a_rows[lane % 16][lane / 16 * 8]);
        ldmatrix_x4(b, &b_columns[lane % 8][lane / 8 % 2 * 8]);
        float c[4] = {};
        mma_m16n8k16(c, a, {b[0], b[1]});
        for (int i = 0; i < 4; i++) {
            mine.agree = mine.agree && (k == 0 || c[i] == mine.c[i]);
            mine.c[i] = c[i];
        }
    }

    // Weights: words of 16 inputs by 64 columns. A number has three hexadecimal digits and a weight only one,
    // so it takes three passes, one per digit.
    const Columns as_they_are = columns_of(0, make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00));
    float numbers[4][4][2] = {};
    for (int digit = 0; digit < 3; digit++) {
        uint32_t word[4];
        for (int i = 0; i < 4; i++) {
            const int input = 2 * t + i % 2 + i / 2 * 8;
            word[i] = 0;
            for (int j = 0; j < 8; j++) {
                const uint32_t number = 64 * input + 8 * g + j, nibble = number >> (4 * digit) & 15;
                word[i] |= nibble << 4 * (j / 2 + j % 2 * 4);
            }
        }
        const RowPairs pairs = pair_rows(word[0], word[1], word[2], word[3]);
        for (int p = 0; p < 4; p++) {
            dequantize(a, pairs, p, as_they_are);
            for (int i = 0; i < 4; i++) {
                numbers[p][i][0] += __low2float(as_half2(a[i])) * float(1 << 4 * digit);
                numbers[p][i][1] += __high2float(as_half2(a[i])) * float(1 << 4 * digit);
            }
        }
    }
    for (int p = 0; p < 4; p++) {
        for (int i = 0; i < 4; i++) {
            for (int h = 0; h < 2; h++) mine.weights[p][i][h] = __float2half(numbers[p][i][h]);
        }
    }
    held[lane] = mine;
}

int main(int argc, char** argv) {
    DeviceBuffer<Held> held(32);
    launch<ask>({.grid = 1, .block = 32, .stream = device().stream}, held.get());
    std::vector<Held> lanes(32);
    download(lanes.data(), held.get(), 32);
    const int only = argc > 1 ? std::atoi(argv[1]) : -1;
    for (int lane = 0; lane < 32; lane++) {
        if (only >= 0 && lane != only) continue;
        const Held& h = lanes[lane];
        if (!h.agree) {
            std::fprintf(stderr, "lane %d: mma does not take A and B as ldmatrix loads them\n", lane);
            return 1;
        }
        auto say = [&](const char* what, int i, int half_of, float number, int width) {
            std::printf("%s %d %d %d %d %d\n", what, lane, i, half_of, int(number) / width,
                        int(number) % width);
        };
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 2; j++)
                say("ldmatrix", i, j, __half2float(h.ldmatrix[i][j]) - float(64 * i), 8);
        }
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 2; j++) say("a", i, j, __half2float(h.a[i][j]), 16);
        }
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 2; j++) say("b", i, j, __half2float(h.b[i][j]), 16);
        }
        for (int i = 0; i < 4; i++) say("c", i, 0, h.c[i], 16);
        for (int p = 0; p < 4; p++) {
            const std::string name = "pair" + std::to_string(p);
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 2; j++) say(name.c_str(), i, j, __half2float(h.weights[p][i][j]), 64);
            }
        }
    }
}
