// The host's side of the kernels for compute capability 9.0: tensor maps, and whether a device runs them.
#pragma once

#include <atomic>

#include "hopper.cuh"

namespace fastbert {
namespace cuda {

// cuTensorMapEncodeTiled, from the driver that runs: the library is not linked with it.
using EncodeMap = decltype(&cuTensorMapEncodeTiled);

inline EncodeMap find_encode_map() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();  // the next launch must not see it
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeMap>(found)
                                                                         : nullptr;
}

// nullptr where the driver has none.
inline EncodeMap encode_map() {
    static const EncodeMap found = find_encode_map();
    return found;
}

// The map of a (rows, columns) matrix of 16-bit numbers in tiles of `box_rows` x 64; false if the driver
// refuses. `data` lies on 16 bytes, and so do rows.
inline bool make_map(CUtensorMap& map, DType dtype, const void* data, std::int64_t rows, std::int64_t columns,
                     std::int64_t stride, int box_rows) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
    const cuuint32_t box[] = {kSwizzled, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
    const auto type =
        dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return encode_map()(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the device has compute capability 9.0 and `kernel` was compiled for it. Compiled for anything but
// sm_90a, such a kernel is empty and has no barriers in shared memory.
template <class... Params>
bool runs_hopper(void (*kernel)(Params...), int device) {
    int major = 0, minor = 0;
    cudaFuncAttributes attributes = {};
    const bool known =
        cudaSetDevice(device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess;
    if (!known) cudaGetLastError();  // the next launch must not see it
    return known && major == 9 && minor == 0 && attributes.sharedSizeBytes > 0 && encode_map() != nullptr;
}

// runs_hopper, asked once per device: asking takes microseconds, and the answer does not change.
class HopperDevices {
  public:
    template <class... Params>
    bool run(void (*kernel)(Params...), int device) {
        if (device < 0 || device >= kDevices) return runs_hopper(kernel, device);
        int answer = answers_[device].load(std::memory_order_relaxed);
        if (answer == kUnknown) {
            answer = runs_hopper(kernel, device) ? kYes : kNo;
            answers_[device].store(answer, std::memory_order_relaxed);
        }
        return answer == kYes;
    }

  private:
    static constexpr int kDevices = 64, kUnknown = 0, kNo = 1, kYes = 2;
    std::atomic<int> answers_[kDevices] = {};
};

}  // namespace cuda
}  // namespace fastbert
