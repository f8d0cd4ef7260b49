// The parts of CUDA that a .cu file uses, with or without a GPU. Under nvcc this is CUDA itself; under hipcc
// it is HIP under CUDA's names, hip.h; under g++ and clang++ it is the emulator in simt.h. Either way kernels
// are launched by
//
//     launch<kernel>({.grid = 8, .block = 128, .shared_bytes = 4096}, arguments...);
//
// because a C++ compiler cannot read kernel<<<8, 128, 4096>>>(arguments...). Instructions that CUDA has no
// function for are in ptx.h.
#pragma once

#include <cxxabi.h>

#include <cstddef>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <typeinfo>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif defined(__HIPCC__)
#include "hip.h"
#else
#include "launches.h"
#include "simt.h"
#endif

struct Launch {
    dim3 grid, block;         // blocks in the grid, threads in a block
    size_t shared_bytes = 0;  // dynamic shared memory of a block
    cudaStream_t stream = nullptr;
    // It may start while the kernels before it run: it calls wait_for_previous() (ptx.h) in front of all that
    // depends on them. On GPUs from sm_90 on, otherwise without effect.
    bool is_early = false;
};

namespace simt {

// "kernel<64>" out of "simt::Kernel<&(void kernel<64>(float*, int))>" or "kernel" out of
// "simt::Kernel<&kernel>", which is how g++ and clang++ name a type.
template <auto kernel>
struct Kernel {};
template <auto kernel>
std::string kernel_name() {
    const char* mangled = typeid(Kernel<kernel>).name();
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
    std::string name = demangled != nullptr ? demangled : mangled;
    std::free(demangled);
    if (name.find('&') == name.npos) return name;
    name = name.substr(name.find('&') + 1, name.rfind('>') - name.find('&') - 1);
    if (!name.starts_with('(') || !name.ends_with("))")) return name;
    size_t end = name.size() - 1;  // of the name: back from here over the parameters in their parentheses
    int depth = 0;
    do {
        end--;
        depth += (name[end] == ')') - (name[end] == '(');
    } while (depth > 0 && end > 0);
    const size_t begin = name.starts_with("(void ") ? 6 : 1;
    return name.substr(begin, end - begin);
}

}  // namespace simt

#if defined(__CUDACC__) || defined(__HIPCC__)

// A block's dynamic shared memory.
template <class T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
    return reinterpret_cast<T*>(dynamic_shared_memory);
}

template <class Kernel, class... Args>
void start_kernel(Kernel kernel, const Launch& how, Args... args) {
#ifdef __CUDACC__
    // CUDA C++ Programming Guide, Programmatic Dependent Launch
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{how.grid,   how.block, how.shared_bytes,
                              how.stream, &early,    how.is_early ? 1u : 0u};
    cudaLaunchKernelEx(&config, kernel, args...);
#else
    hipLaunchKernelGGL(kernel, how.grid, how.block, how.shared_bytes, how.stream, args...);
#endif
}

// Starts the kernel. Throws std::runtime_error if CUDA refuses.
template <auto kernel, class... Args>
void launch(const Launch& how, Args... args) {
    cudaError_t error = cudaSuccess;
    // More than 48 KB of shared memory, with what the kernel declares, has to be requested before its launch.
    static size_t limit = 0;
    if (how.shared_bytes > limit) {
        error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, int(how.shared_bytes));
        if (error == cudaSuccess) limit = how.shared_bytes;
    }
    if (error == cudaSuccess) {
        start_kernel(kernel, how, args...);
        error = cudaGetLastError();
    }
    if (error != cudaSuccess) {
        throw std::runtime_error(simt::kernel_name<kernel>() + ": " + cudaGetErrorString(error));
    }
}

#else

template <class T>
T* dynamic_shared() {
    const simt::Emulating emulating;
    return reinterpret_cast<T*>(simt::block().dynamic_shared());
}

// Runs the kernel to its end. Throws std::runtime_error if a check of the emulator fails.
template <auto kernel, class... Args>
void launch(const Launch& how, Args... args) {
    const std::tuple<Args...> stored(args...);
    const simt::Run run{
        .kernel = simt::kernel_name<kernel>(),
        .grid = how.grid,
        .block = how.block,
        .shared_bytes = how.shared_bytes,
        .call = [](const void* p) { std::apply(kernel, *static_cast<const std::tuple<Args...>*>(p)); },
        .args = &stored,
        .args_bytes = sizeof(stored)};
    simt::LaunchFile* file = simt::LaunchFile::get();
    if (file == nullptr) return simt::run_grid(run);
    file->record(run, simt::argument_bytes(kernel, args...), [&] { simt::run_grid(run); });
}

#endif
