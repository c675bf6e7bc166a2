// Launches of each kind, and kernels that show what they got: for tests of the stand-in for the CUDA runtime.
#include <cuda_runtime.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Mixed {
    char letter;
    double number;
    short three[3];
};

// Parameters of many sizes and alignments.
__global__ void mixed_kernel(char first, Mixed mixed, short second, const float* in, bool third,
                             double* out) {
    out[0] = first;
    out[1] = mixed.letter;
    out[2] = mixed.number;
    out[3] = mixed.three[2];
    out[4] = second;
    out[5] = in[1];
    out[6] = third;
}

extern __shared__ int turned[];

// Each block writes its threads' numbers backwards, through dynamic shared memory.
__global__ void __launch_bounds__(128) turned_kernel(int* out) {
    turned[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[block * blockDim.x + threadIdx.x] = turned[blockDim.x - 1 - threadIdx.x];
}

// The same with an array of 1 KB beside the dynamic shared memory.
__global__ void both_kernel(int* out) {
    __shared__ int own[256];
    own[threadIdx.x] = static_cast<int>(threadIdx.x) + 1;
    turned[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = turned[blockDim.x - 1 - threadIdx.x] * own[blockDim.x - 1 - threadIdx.x];
}

int error() { return static_cast<int>(cudaGetLastError()); }

}  // namespace

EXPORTED int mixed(const float* in, double* out) {
    mixed_kernel<<<1, 1>>>(-3, Mixed{7, 0.1, {1, 2, 515}}, -515, in, true, out);
    return error();
}
EXPORTED int turn(int* out, unsigned x, unsigned y, unsigned z, unsigned threads, size_t shared) {
    turned_kernel<<<dim3(x, y, z), threads, shared>>>(out);
    return error();
}
EXPORTED int both(int* out, size_t shared) {
    both_kernel<<<1, 256, shared>>>(out);
    return error();
}
EXPORTED int allow(int bytes) {
    const cudaError_t found =
        cudaFuncSetAttribute(turned_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return found == cudaGetLastError() ? static_cast<int>(found) : -1;
}
EXPORTED int allow_both(int bytes) {
    const cudaError_t found =
        cudaFuncSetAttribute(both_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return found == cudaGetLastError() ? static_cast<int>(found) : -1;
}
EXPORTED int set_device(int device) {
    cudaSetDevice(device);
    const cudaError_t seen = cudaPeekAtLastError();
    return seen == cudaGetLastError() && cudaGetLastError() == cudaSuccess ? static_cast<int>(seen) : -1;
}
EXPORTED const char* text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#ifdef UNKNOWN
EXPORTED int unknown() { return static_cast<int>(cudaDeviceSynchronize()); }
#endif
