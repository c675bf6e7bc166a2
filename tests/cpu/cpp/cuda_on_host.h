// As much of CUDA as our kernels use, on the host: a test double for <cuda_runtime.h>. No speed is meant.
//
// The threads of a block are fibers, run in turn until each waits at a barrier or ends; blocks run one after
// another. A barrier or a shuffle that not all its threads reach aborts, as does one that a thread reaches
// after others ended: on a GPU that is undefined. With -fsanitize=address,undefined the indices into memory
// are checked as well.
#pragma once

#include <immintrin.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "dtype.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaError_t = int;
using cudaStream_t = struct CudaStream*;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated device"; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? 0 : 1; }

namespace cuda_on_host {

enum class State { kReady, kWarp, kBlock, kDone };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = State::kReady;
    dim3 thread;
    float lane_value = 0.0f;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current = 0;
inline dim3 block_index, block_size, grid_size;
inline std::function<void()> entry;
constexpr std::size_t kStack = 256 * 1024;

inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_on_host: %s\n", what);
    std::abort();
}

inline void wait(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

inline void trampoline() {
    entry();
    fibers[current].state = State::kDone;
    swapcontext(&fibers[current].context, &scheduler);
}

// Runs every ready fiber to its next barrier, then opens the barriers that all threads have reached.
inline void run_block() {
    const int count = static_cast<int>(fibers.size());
    for (;;) {
        for (int i = 0; i < count; ++i) {
            if (fibers[i].state != State::kReady) continue;
            current = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        int done = 0, at_block = 0;
        bool progress = false;
        for (int warp = 0; warp < count; warp += 32) {
            const int end = warp + 32 < count ? warp + 32 : count;
            int waiting = 0;
            for (int i = warp; i < end; ++i) {
                waiting += fibers[i].state == State::kWarp;
                done += fibers[i].state == State::kDone;
                at_block += fibers[i].state == State::kBlock;
            }
            if (waiting == 0) continue;
            if (waiting != end - warp || waiting != 32) fail("a shuffle that not all lanes of a warp reach");
            for (int i = warp; i < end; ++i) fibers[i].state = State::kReady;
            progress = true;
        }
        if (progress) continue;
        if (done == count) return;
        if (at_block != count) fail("__syncthreads that not all threads of a block reach");
        for (Fiber& fiber : fibers) fiber.state = State::kReady;
    }
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::fibers[cuda_on_host::current].thread)
#define blockIdx (cuda_on_host::block_index)
#define blockDim (cuda_on_host::block_size)
#define gridDim (cuda_on_host::grid_size)

inline void __syncthreads() { cuda_on_host::wait(cuda_on_host::State::kBlock); }

// Two waits: all lanes have written, and all have read.
inline float __shfl_xor_sync(unsigned mask, float value, int lane) {
    using namespace cuda_on_host;
    if (mask != 0xffffffffu) fail("only full warps are modelled");
    fibers[current].lane_value = value;
    wait(State::kWarp);
    const float other = fibers[current ^ lane].lane_value;
    wait(State::kWarp);
    return other;
}

namespace cuda_on_host {

inline void make_fiber(Fiber& fiber, dim3 thread) {
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.state = State::kReady;
    fiber.thread = thread;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, trampoline, 0);
}

}  // namespace cuda_on_host

namespace fastbert {
namespace cuda {

inline float widen(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float widen(fp16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, bf16& out) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    out.bits = static_cast<std::uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, fp16& out) { out.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

template <class... Params>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::uintptr_t, Params... params) {
    using namespace cuda_on_host;
    const unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1)
        return "invalid configuration argument";
    entry = [&] { kernel(params...); };
    block_size = block;
    grid_size = grid;
    if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            block_index = dim3(x, y);
            for (unsigned i = 0; i < threads; ++i)
                make_fiber(fibers[i], dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y)));
            run_block();
        }
    }
    return nullptr;
}

}  // namespace cuda
}  // namespace fastbert
