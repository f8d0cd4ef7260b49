// A kernel to step through with a debugger: docs/simt.md. It turns the order of the numbers in each block
// around.
#include <cstdio>
#include <cstring>
#include <vector>

#include "simt/cuda.h"

template <bool with_barrier>
__global__ void reverse(int* x) {
    __shared__ int shared[64];
    const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    shared[t] = x[i];
    if (with_barrier) __syncthreads();
    x[i] = shared[blockDim.x - 1 - t];
}

int main(int argc, char** argv) {
    const bool with_barrier = argc == 1 || std::strcmp(argv[1], "no-barrier") != 0;
    std::vector<int> numbers(128);
    for (int i = 0; i < 128; i++) numbers[i] = i;
    int* x = nullptr;
    cudaMalloc(&x, 128 * sizeof(int));
    cudaMemcpy(x, numbers.data(), 128 * sizeof(int), cudaMemcpyHostToDevice);
    try {
        if (with_barrier) {
            launch<reverse<true>>({.grid = 2, .block = 64}, x);
        } else {
            launch<reverse<false>>({.grid = 2, .block = 64}, x);
        }
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
    cudaMemcpy(numbers.data(), x, 128 * sizeof(int), cudaMemcpyDeviceToHost);
    std::printf("%d %d ... %d, %d ...\n", numbers[0], numbers[1], numbers[63], numbers[64]);
    cudaFree(x);
}
