// Tensor maps of matrices, for the copies of tiles (hopper.cuh): made by the host, handed over at a launch.
#pragma once

#include <cuda.h>

#include "hopper.cuh"

namespace fastbert {
namespace cuda {

// cuTensorMapEncodeTiled, from the driver that runs: the library is not linked with it.
using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode find_encode() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();  // the next launch must not meet it
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                         : nullptr;
}

// Null where the driver has none.
inline Encode encode() {
    static const Encode found = find_encode();
    return found;
}

// The map of a (rows, columns) matrix in tiles of `box_rows` x 64; false if the driver refuses.
inline bool make_map(CUtensorMap& map, DType dtype, const void* data, std::int64_t rows, std::int64_t columns,
                     std::int64_t stride, int box_rows) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
    const cuuint32_t box[] = {kSwizzled, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
    const auto type =
        dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return encode()(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace cuda
}  // namespace fastbert
