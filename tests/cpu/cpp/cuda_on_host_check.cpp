// Small kernels, right ones and faulty ones, for tests of cuda_on_host.h itself: extern "C" functions.
#include <cstring>

#include "cuda/tensor_core.cuh"

using namespace fastbert;
using namespace fastbert::cuda;

namespace {

enum Fault {
    kNone,
    kNoBarrier,       // between writing and reading shared memory
    kNoWait,          // for a copy under way
    kWaitTooShort,    // one group too few
    kNoCommit,        // of the copies
    kBarrierForSome,  // __syncthreads within a branch
    kShuffleForSome,  // a shuffle within a branch
    kMixed,           // lanes of a warp at different instructions
};

constexpr int kThreads = 128;

// out[i] = in[kThreads - 1 - i], by single words.
__global__ void reverse_kernel(const float* in, float* out, int fault) {
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x);
    shared[thread] = in[thread];
    if (fault == kBarrierForSome) {
        if (thread < 64) __syncthreads();
    } else if (fault != kNoBarrier) {
        __syncthreads();
    }
    out[thread] = shared[kThreads - 1 - thread];
}

// The same by asynchronous copies of two groups: the second half of `in`, then the first.
__global__ void copied_kernel(const float* in, float* out, int fault) {
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int kChunks = kThreads / 4;
    // What the copies bring is there already: only what holds their place meanwhile can be wrong.
    shared[thread] = in[thread];
    __syncthreads();
    for (int half = 1; half >= 0; --half) {
        if (thread < kChunks / 2) {
            const int element = half * kThreads / 2 + thread * 4;
            copy_chunk(shared + element, in + element, true);
        }
        if (fault != kNoCommit) commit_copies();
    }
    if (fault == kWaitTooShort)
        wait_copies<1>();
    else if (fault != kNoWait)
        wait_copies<0>();
    __syncthreads();
    out[thread] = shared[kThreads - 1 - thread];
}

__global__ void warp_kernel(const float* in, float* out, int fault) {
    const int thread = static_cast<int>(threadIdx.x);
    float x = in[thread];
    if (fault == kShuffleForSome) {
        if (thread % 32 < 16) x = __shfl_xor_sync(kAllLanes, x, 31);
    } else if (fault == kMixed) {
        if (thread % 32 < 16)
            x = __shfl_xor_sync(kAllLanes, x, 31);
        else
            __syncwarp();
    } else {
        x = __shfl_xor_sync(kAllLanes, x, 31);
    }
    out[thread] = x;
}

// out = in, backwards within each warp, through shared memory; the fault leaves the warp's barrier out.
__global__ void exchange_kernel(const float* in, float* out, int fault) {
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x);
    shared[thread] = in[thread];
    if (fault != kNoBarrier) __syncwarp();
    out[thread] = shared[thread ^ 31];
}

// c (16, 16) = 1 + a (16, 16) b, with b (16, 16) stored by rows; or b transposed.
template <class T>
__global__ void product_kernel(const T* a, const T* b, float* c, bool transposed) {
    T* a_tile = reinterpret_cast<T*>(dynamic_shared());
    T* b_tile = a_tile + 256;
    const int lane = static_cast<int>(threadIdx.x);
    copy_chunk(a_tile + chunk_of<T, 16>(lane / 2, lane % 2), a + lane * 8, true);
    copy_chunk(b_tile + chunk_of<T, 16>(lane / 2, lane % 2), b + lane * 8, true);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    std::uint32_t a_words[4], b_words[4];
    load_matrices(a_words, a_tile + chunk_of<T, 16>(lane % 16, lane / 16));
    if (transposed)
        load_matrices(b_words, b_tile + chunk_of<T, 16>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    else
        load_matrices_transposed(b_words, b_tile + chunk_of<T, 16>(lane % 16, lane / 16));
    for (int half = 0; half < 2; ++half) {
        float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        const std::uint32_t words[2] = {b_words[2 * half], b_words[2 * half + 1]};
        mma<T>(sums, a_words, words);
        for (int i = 0; i < 4; ++i)
            c[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2] = sums[i];
    }
}

}  // namespace

extern "C" {

// Which of the four kernels; returns whether copies landed late.
int run_small(int which, int fault, unsigned long long seed, const float* in, float* out) {
    cuda_on_host::reseed(seed);
    void (*const kernels[])(const float*, float*, int) = {reverse_kernel, copied_kernel, warp_kernel,
                                                          exchange_kernel};
    launch_shared(kernels[which], dim3(1), dim3(kThreads), kThreads * sizeof(float), 0, in, out, fault);
    return cuda_on_host::late;
}

void run_product(int fp16_wanted, unsigned long long seed, const void* a, const void* b, float* c,
                 int transposed) {
    cuda_on_host::reseed(seed);
    const bool flag = transposed != 0;
    if (fp16_wanted)
        launch_shared(product_kernel<fp16>, dim3(1), dim3(32), 1024, 0, static_cast<const fp16*>(a),
                      static_cast<const fp16*>(b), c, flag);
    else
        launch_shared(product_kernel<bf16>, dim3(1), dim3(32), 1024, 0, static_cast<const bf16*>(a),
                      static_cast<const bf16*>(b), c, flag);
}

// Whether copies of the last launch of run_shape landed late.
int checked_late = 0;

const char* run_shape(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared, float* out) {
    static float in[kThreads];
    const char* reason = launch_shared(reverse_kernel, dim3(x, y, z), dim3(threads), shared, 0,
                                       static_cast<const float*>(in), out, 0);
    checked_late = cuda_on_host::late;
    return reason;
}
}
