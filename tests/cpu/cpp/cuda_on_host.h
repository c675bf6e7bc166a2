// As much of CUDA as our kernels use, on the host: a test double for <cuda_runtime.h>. No speed is meant.
//
// The threads of a block are fibers; blocks run one after another. The next warp to run, and the order of its
// lanes, is drawn from `seed` (FASTBERT_HOST_SEED, or set by a test), so that a missing barrier shows itself
// under some seed. A barrier or a shuffle that not all its threads reach aborts, as does one that a thread
// reaches after others ended: on a GPU that is undefined. With -fsanitize=address,undefined the indices into
// memory are checked as well.
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
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 163 * 1024;
    return device == 0 ? 0 : 1;
}

namespace cuda_on_host {

enum class State { kReady, kWarp, kBlock, kDone };

// What the lanes of a warp do together; all of them must be at the same.
enum class Together { kShuffle, kBallot, kSync, kProduct, kMatrices, kMatricesTransposed };

// A copy under way; nothing is read where `source` is null.
struct Copy {
    void* target;
    const void* source;
    std::size_t bytes;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = State::kReady;
    Together together = Together::kSync;
    dim3 thread;
    // What the lane gives to the others, in turn, so that one wait is enough: a lane writes into one only
    // after all have read what was there two waits before.
    std::uint64_t given[2][8] = {};
    int turn = 0;
    std::vector<std::vector<Copy>> copies;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current = 0;
inline dim3 block_index, block_size, grid_size;
inline std::function<void()> entry;
constexpr std::size_t kStack = 256 * 1024;

inline std::uint64_t seed_from_environment() {
    const char* text = std::getenv("FASTBERT_HOST_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}
inline std::uint64_t seed = seed_from_environment();
// The seed's generator (SplitMix64); each launch goes on in it.
inline std::uint64_t drawn = seed;
// Whether asynchronous copies land when they are waited for, and not at once; drawn at each launch.
inline bool late = false;

inline void reseed(std::uint64_t value) { seed = drawn = value; }

inline unsigned draw(unsigned below) {
    std::uint64_t x = drawn += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return static_cast<unsigned>((x ^ (x >> 31)) % below);
}

inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_on_host: %s (FASTBERT_HOST_SEED=%llu)\n", what,
                 static_cast<unsigned long long>(seed));
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

// Runs the ready lanes of one warp, in an order drawn, to their next waits, and opens that of the warp.
inline void run_warp(int first) {
    const int count = static_cast<int>(fibers.size());
    const int lanes = count - first < 32 ? count - first : 32;
    int order[32];
    for (int i = 0; i < lanes; ++i) {
        const int j = static_cast<int>(draw(static_cast<unsigned>(i + 1)));
        order[i] = order[j];
        order[j] = first + i;
    }
    for (int i = 0; i < lanes; ++i) {
        if (fibers[order[i]].state != State::kReady) continue;
        current = order[i];
        swapcontext(&scheduler, &fibers[current].context);
    }
    int waiting = 0;
    for (int i = first; i < first + lanes; ++i) waiting += fibers[i].state == State::kWarp;
    if (waiting == 0) return;
    if (waiting != 32) fail("an instruction of a whole warp that not all its lanes reach");
    for (int i = first; i < first + lanes; ++i) {
        if (fibers[i].together != fibers[first].together)
            fail("lanes of a warp at different instructions of a whole warp");
        fibers[i].state = State::kReady;
    }
}

// Runs the warps, the next one drawn each time, and opens the barrier of the block once all are there.
inline void run_block() {
    const int count = static_cast<int>(fibers.size());
    std::vector<int> ready;
    for (;;) {
        ready.clear();
        int done = 0, at_block = 0;
        for (int i = 0; i < count; ++i) {
            done += fibers[i].state == State::kDone;
            at_block += fibers[i].state == State::kBlock;
            if (fibers[i].state == State::kReady && (ready.empty() || ready.back() != i / 32 * 32))
                ready.push_back(i / 32 * 32);
        }
        if (!ready.empty()) {
            run_warp(ready[draw(static_cast<unsigned>(ready.size()))]);
            continue;
        }
        if (done == count) return;
        if (at_block != count) fail("__syncthreads that not all threads of a block reach");
        for (Fiber& fiber : fibers) fiber.state = State::kReady;
    }
}

// Gives `words` to the other lanes; returns when all have given theirs. given_by reads them.
inline void give(Together together, const std::uint64_t* words, int count) {
    Fiber& self = fibers[current];
    self.turn ^= 1;
    for (int i = 0; i < count; ++i) self.given[self.turn][i] = words[i];
    self.together = together;
    wait(State::kWarp);
}

inline const std::uint64_t* given_by(int lane) {
    const Fiber& self = fibers[current];
    return fibers[current / 32 * 32 + lane].given[self.turn];
}

inline int lane_index() { return current % 32; }

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) fail("only full warps are modelled");
}

template <class T>
T shuffle(T value, int from) {
    static_assert(sizeof(T) <= 8, "shuffled values have at most 64 bits");
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    give(Together::kShuffle, &word, 1);
    std::memcpy(&value, given_by(from), sizeof(T));
    return value;
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::fibers[cuda_on_host::current].thread)
#define blockIdx (cuda_on_host::block_index)
#define blockDim (cuda_on_host::block_size)
#define gridDim (cuda_on_host::grid_size)

inline void __syncthreads() { cuda_on_host::wait(cuda_on_host::State::kBlock); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_on_host::check_mask(mask);
    cuda_on_host::give(cuda_on_host::Together::kSync, nullptr, 0);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane) {
    cuda_on_host::check_mask(mask);
    return cuda_on_host::shuffle(value, cuda_on_host::lane_index() ^ lane);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    cuda_on_host::check_mask(mask);
    return cuda_on_host::shuffle(value, lane & 31);
}

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    cuda_on_host::check_mask(mask);
    const std::uint64_t word = predicate;
    cuda_on_host::give(cuda_on_host::Together::kBallot, &word, 1);
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane)
        out |= static_cast<unsigned>(cuda_on_host::given_by(lane)[0]) << lane;
    return out;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }

// Blocks run one after another: nothing to wait for.
inline void __threadfence() {}
template <class T>
T atomicAdd(T* address, T value) {
    const T old = *address;
    *address = old + value;
    return old;
}

namespace cuda_on_host {

inline void make_fiber(Fiber& fiber, dim3 thread) {
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.state = State::kReady;
    fiber.thread = thread;
    fiber.copies.assign(1, {});
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

// The dynamic shared memory of the block that runs, of exactly the bytes asked for.
inline char* block_shared = nullptr;
inline char* dynamic_shared() { return block_shared; }

template <class... Params>
const char* launch_shared(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared,
                          std::uintptr_t, Params... params) {
    using namespace cuda_on_host;
    const unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
        grid.z > 65535)
        return "invalid configuration argument";
    // What a block of sm_80 can have.
    if (shared > 163 * 1024) return "invalid argument";
    entry = [&] { kernel(params...); };
    block_size = block;
    grid_size = grid;
    late = draw(2) != 0;
    if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
    const unsigned blocks = grid.x * grid.y * grid.z;
    for (unsigned b = 0; b < blocks; ++b) {
        block_index = dim3(b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y));
        if (shared != 0) {
            void* memory = nullptr;
            if (posix_memalign(&memory, 128, shared) != 0) fail("no memory");
            std::memset(memory, 0xff, shared);  // NaN in every type
            block_shared = static_cast<char*>(memory);
        }
        for (unsigned i = 0; i < threads; ++i)
            make_fiber(fibers[i], dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y)));
        run_block();
        std::free(block_shared);
        block_shared = nullptr;
    }
    return nullptr;
}

template <class... Params>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::uintptr_t stream,
                   Params... params) {
    return launch_shared(kernel, grid, block, 0, stream, params...);
}

}  // namespace cuda
}  // namespace fastbert
