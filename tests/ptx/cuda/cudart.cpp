// A stand-in for the CUDA runtime: the host code that nvcc compiled is linked with it in place of cudart.
//
// It keeps what the host code registers, PTX and kernels, and hands each launch to a function that Python
// sets (emulator/cudart.py), which runs the kernel in the emulator. There is one device, 0. Only what our
// host code calls is here: anything else must fail at link time, so that no answer is guessed.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Module {
    const char* ptx;
    std::size_t bytes;
};

struct Kernel {
    const void* host;  // address of the stub that the host code launches
    std::string name;  // in the PTX
    int module;
};

// The layout of a fat binary, as cuobjdump reads it.
struct Wrapper {
    std::uint32_t magic, version;
    const char* data;
    void* unused;
};
struct FatHeader {
    std::uint32_t magic;
    std::uint16_t version, header_bytes;
    std::uint64_t bytes;
};
struct EntryHeader {
    std::uint16_t kind, version;
    std::uint32_t header_bytes;
    std::uint64_t bytes;
    std::uint32_t compressed_bytes;
};
constexpr std::uint32_t kWrapperMagic = 0x466243b1, kFatMagic = 0xba55ed50;
constexpr std::uint16_t kPtx = 1;

// Never destroyed: the host code unregisters its binaries after the destructors of this file.
std::vector<Module>& modules() {
    static auto* all = new std::vector<Module>;
    return *all;
}
std::vector<Kernel>& kernels() {
    static auto* all = new std::vector<Kernel>;
    return *all;
}

struct Configuration {
    dim3 grid, block;
    std::size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// Both return a cudaError_t.
using Launch = int (*)(int kernel, const unsigned* grid_and_block, std::size_t shared, void** arguments);
using SetAttribute = int (*)(int kernel, int attribute, int value);
Launch launch_in_python = nullptr;
SetAttribute set_attribute_in_python = nullptr;
// Bytes of static shared memory, or minus a cudaError_t.
using StaticShared = int (*)(int kernel);
StaticShared static_shared_in_python = nullptr;

// What hopper.h of the emulator takes for a CUtensorMap.
struct TensorMap {
    std::uint64_t magic, base;
    std::uint32_t rank, element_bytes, swizzle, size[5], box[5], padding;
    std::uint64_t stride[5], unused[2];
};
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap), "as large as the driver's");

// So many maps are made before all are refused; -1: none is.
int maps_left = -1;
// Whether launches do nothing, as on a device without work: what is left is the host's
bool idle = false;

// Matrices and more of 16-bit elements, and what the driver refuses of them.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    constexpr std::uint32_t kElement = 2;
    const bool halves = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    if (maps_left == 0 || !halves || rank < 1 || rank > 5 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || reinterpret_cast<std::uintptr_t>(address) % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    TensorMap own = {0x70616D726F736E65, reinterpret_cast<std::uintptr_t>(address), rank, kElement};
    own.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE   ? 0
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_32B  ? 32
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                          : 1;
    if (own.swizzle == 1 || (own.swizzle != 0 && box[0] * kElement > own.swizzle))
        return CUDA_ERROR_INVALID_VALUE;
    for (std::uint32_t i = 0; i < 5; ++i) {
        own.size[i] = own.box[i] = 1;
        own.stride[i] = kElement;
        if (i >= rank) continue;
        if (sizes[i] == 0 || sizes[i] > 0xffffffffu || box[i] == 0 || box[i] > 256 || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        own.size[i] = static_cast<std::uint32_t>(sizes[i]), own.box[i] = box[i];
        if (i > 0) own.stride[i] = strides[i - 1];
        if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= std::uint64_t{1} << 40))
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (box[0] * kElement % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    if (maps_left > 0) --maps_left;
    std::memcpy(map, &own, sizeof own);
    return CUDA_SUCCESS;
}

int index_of(const void* host) {
    for (std::size_t i = 0; i < kernels().size(); ++i)
        if (kernels()[i].host == host) return static_cast<int>(i);
    return -1;
}

// The only PTX of a fat binary, uncompressed; empty if there is none, or more than that.
Module only_ptx(const char* fat) {
    FatHeader header;
    std::memcpy(&header, fat, sizeof header);
    if (header.magic != kFatMagic) return {nullptr, 0};
    Module found{nullptr, 0};
    for (std::uint64_t at = 0; at < header.bytes;) {
        const char* place = fat + header.header_bytes + at;
        EntryHeader entry;
        std::memcpy(&entry, place, sizeof entry);
        if (entry.kind != kPtx || entry.compressed_bytes != 0 || found.ptx != nullptr) return {nullptr, 0};
        found = {place + entry.header_bytes, entry.bytes};
        at += entry.header_bytes + entry.bytes;
    }
    return found;
}

}  // namespace

// --- what Python calls ---

EXPORTED void emulator_set_callbacks(Launch launch, SetAttribute set_attribute, StaticShared static_shared) {
    launch_in_python = launch;
    static_shared_in_python = static_shared;
    set_attribute_in_python = set_attribute;
}
EXPORTED void emulator_refuse_maps(int left) { maps_left = left; }
EXPORTED void emulator_idle(int wanted) { idle = wanted != 0; }
EXPORTED int emulator_modules() { return static_cast<int>(modules().size()); }
EXPORTED const char* emulator_ptx(int module, std::size_t* bytes) {
    *bytes = modules()[module].bytes;
    return modules()[module].ptx;
}
EXPORTED int emulator_kernels() { return static_cast<int>(kernels().size()); }
EXPORTED const char* emulator_kernel(int kernel, int* module) {
    *module = kernels()[kernel].module;
    return kernels()[kernel].name.c_str();
}

// --- what the host code registers when it is loaded ---

extern "C" {

void** __cudaRegisterFatBinary(void* fat) {
    Wrapper wrapper;
    std::memcpy(&wrapper, fat, sizeof wrapper);
    modules().push_back(wrapper.magic == kWrapperMagic ? only_ptx(wrapper.data) : Module{nullptr, 0});
    // The handle of a module is its number, and is never followed.
    return reinterpret_cast<void**>(modules().size());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
    kernels().push_back({host, name, static_cast<int>(reinterpret_cast<std::uintptr_t>(module)) - 1});
}
// Its first value is in the PTX, and no function here copies another one to it.
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

// --- kernel<<<grid, block, shared, stream>>>(arguments) ---

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, CUstream_st* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
    if (configurations.empty()) return result(cudaErrorMissingConfiguration);
    const Configuration& last = configurations.back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<cudaStream_t*>(stream) = last.stream;
    configurations.pop_back();
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
    return index_of(host) < 0 ? result(cudaErrorInvalidDeviceFunction) : cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
    if (idle) return cudaSuccess;
    const int kernel = index_of(host);
    if (kernel < 0) return result(cudaErrorInvalidDeviceFunction);
    if (launch_in_python == nullptr) return result(cudaErrorNoDevice);
    const dim3 grid = config->gridDim, block = config->blockDim;
    unsigned sizes[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z, 1, 0};
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttributeValue& value = config->attrs[i].val;
        const auto& cluster = value.clusterDim;
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            sizes[7] = value.programmaticStreamSerializationAllowed;
        else if (config->attrs[i].id == cudaLaunchAttributeClusterDimension && cluster.y == 1 &&
                 cluster.z == 1)
            sizes[6] = cluster.x;
        else
            return result(cudaErrorInvalidValue);
    }
    // what every device takes
    if (sizes[6] < 1 || sizes[6] > 8 || grid.x % sizes[6] != 0) return result(cudaErrorInvalidValue);
    return result(
        static_cast<cudaError_t>(launch_in_python(kernel, sizes, config->dynamicSmemBytes, arguments)));
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             cudaStream_t stream) {
    const cudaLaunchConfig_t config{grid, block, shared, stream, nullptr, 0};
    return cudaLaunchKernelExC(&config, host, arguments);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

// --- the device and its errors ---

cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
    if (idle) return cudaSuccess;
    const int kernel = index_of(host);
    if (kernel < 0) return result(cudaErrorInvalidDeviceFunction);
    if (set_attribute_in_python == nullptr) return result(cudaErrorNoDevice);
    return result(static_cast<cudaError_t>(set_attribute_in_python(kernel, attribute, value)));
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
    if (idle) {
        *attributes = {};
        attributes->sharedSizeBytes = 1024;
        return cudaSuccess;
    }
    const int kernel = index_of(host);
    if (kernel < 0) return result(cudaErrorInvalidDeviceFunction);
    if (static_shared_in_python == nullptr) return result(cudaErrorNoDevice);
    const int bytes = static_shared_in_python(kernel);
    if (bytes < 0) return result(static_cast<cudaError_t>(-bytes));
    *attributes = {};
    attributes->sharedSizeBytes = static_cast<std::size_t>(bytes);
    return cudaSuccess;
}

// The device has compute capability 9.0, and of shared memory what 8.0 has, as launches do.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device != 0) return result(cudaErrorInvalidDevice);
    if (attribute == cudaDevAttrComputeCapabilityMajor)
        *value = 9;
    else if (attribute == cudaDevAttrComputeCapabilityMinor)
        *value = 0;
    else if (attribute == cudaDevAttrMultiProcessorCount)
        *value = 132;
    else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin)
        *value = 163 * 1024;
    else
        return result(cudaErrorInvalidValue);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
    const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
    *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorInvalidConfiguration:
            return "invalid configuration argument";
        case cudaErrorMissingConfiguration:
            return "__global__ function call is not configured";
        case cudaErrorInvalidDeviceFunction:
            return "invalid device function";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorLaunchFailure:
            return "unspecified launch failure";
        default:
            return "unrecognized error code";
    }
}

}  // extern "C"
