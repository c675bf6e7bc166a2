// Products by cuBLASLt. Its types and numbers are declared here; the headers of CUDA 12 and 13 have the same,
// and building fastbert needs neither. Descriptors are made by its own functions, because their sizes differ
// between versions.
//
// cuBLASLt counts columns first: cᵀ (columns, rows) = b aᵀ, with b transposed and a as it lies.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>
#include <link.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "cublas_lt.h"

namespace fastbert {
namespace cuda {
namespace {

using Status = int;  // 0: success
struct Algorithm {
    std::uint64_t data[8];
};
struct Heuristic {
    Algorithm algorithm;
    std::size_t work;
    Status status;
    float waves;
    int reserved[4];
};
enum ComputeType : int { kFloat = 68, kFastTf32 = 77 };
enum DescAttribute : int { kTransA = 3, kEpilogue = 7, kBiasPointer = 8 };
enum PreferenceAttribute : int { kMostWork = 1, kReductions = 3, kAlignmentA = 5, kAlignmentD = 8 };
constexpr std::int32_t kTransposed = 1;
constexpr std::uint32_t kAddBias = 4;
// Parts of the depth are added in the type of the sums, in a fixed order.
constexpr std::uint32_t kSumsOfComputeType = 2;
constexpr std::uint32_t kAlignment = 16;

struct Functions {
    Status (*create)(void** handle);
    Status (*desc_create)(void** desc, ComputeType, cudaDataType scale);
    Status (*desc_set)(void* desc, DescAttribute, const void* value, std::size_t bytes);
    Status (*desc_destroy)(void* desc);
    Status (*layout_create)(void** layout, cudaDataType, std::uint64_t rows, std::uint64_t columns,
                            std::int64_t stride);
    Status (*layout_destroy)(void* layout);
    Status (*preference_create)(void** preference);
    Status (*preference_set)(void* preference, PreferenceAttribute, const void* value, std::size_t bytes);
    Status (*preference_destroy)(void* preference);
    Status (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                        int wanted, Heuristic* found, int* count);
    Status (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                     const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* d,
                     void* d_layout, const Algorithm*, void* work, std::size_t work_bytes, cudaStream_t);
};

// The path of the library that the process has loaded.
int note_path(dl_phdr_info* info, std::size_t, void* path) {
    const char* const slash = std::strrchr(info->dlpi_name, '/');
    const char* const name = slash == nullptr ? info->dlpi_name : slash + 1;
    if (std::strncmp(name, "libcublasLt.so", 14) != 0) return 0;
    *static_cast<std::string*>(path) = info->dlpi_name;
    return 1;
}

template <class F>
bool find_function(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    return function != nullptr;
}

const Functions* find_functions() {
    static Functions found;
    std::string path;
    if (dl_iterate_phdr(note_path, &path) == 0) return nullptr;
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    const bool all = library != nullptr && find_function(library, "cublasLtCreate", found.create) &&
                     find_function(library, "cublasLtMatmulDescCreate", found.desc_create) &&
                     find_function(library, "cublasLtMatmulDescSetAttribute", found.desc_set) &&
                     find_function(library, "cublasLtMatmulDescDestroy", found.desc_destroy) &&
                     find_function(library, "cublasLtMatrixLayoutCreate", found.layout_create) &&
                     find_function(library, "cublasLtMatrixLayoutDestroy", found.layout_destroy) &&
                     find_function(library, "cublasLtMatmulPreferenceCreate", found.preference_create) &&
                     find_function(library, "cublasLtMatmulPreferenceSetAttribute", found.preference_set) &&
                     find_function(library, "cublasLtMatmulPreferenceDestroy", found.preference_destroy) &&
                     find_function(library, "cublasLtMatmulAlgoGetHeuristic", found.heuristic) &&
                     find_function(library, "cublasLtMatmul", found.matmul);
    return all ? &found : nullptr;
}

const Functions* functions() {
    static const Functions* const found = find_functions();
    return found;
}

// A handle per device, never destroyed: when the process ends, the driver may be gone before it.
void* handle_of(int device) {
    static std::mutex mutex;
    static auto* const handles = new std::map<int, void*>;
    const std::lock_guard<std::mutex> lock(mutex);
    void*& handle = (*handles)[device];
    if (handle == nullptr && functions()->create(&handle) != 0) handle = nullptr;
    return handle;
}

// A description that its library destroys.
using Owned = std::unique_ptr<void, Status (*)(void*)>;

Owned layout(cudaDataType type, std::int64_t rows, std::int64_t columns) {
    void* made = nullptr;
    if (functions()->layout_create(&made, type, rows, columns, rows) != 0) made = nullptr;
    return {made, functions()->layout_destroy};
}

// What is computed, but for the bias's address: the caller's own, because products may run side by side.
Owned description(const LtProduct& args) {
    const Functions& lt = *functions();
    void* made = nullptr;
    const auto type = args.dtype == DType::kFloat32 && args.tf32 ? kFastTf32 : kFloat;
    if (lt.desc_create(&made, type, CUDA_R_32F) != 0) made = nullptr;
    Owned desc(made, lt.desc_destroy);
    const bool set =
        made != nullptr && lt.desc_set(made, kTransA, &kTransposed, sizeof kTransposed) == 0 &&
        (args.bias == nullptr || (lt.desc_set(made, kEpilogue, &kAddBias, sizeof kAddBias) == 0 &&
                                  lt.desc_set(made, kBiasPointer, &args.bias, sizeof args.bias) == 0));
    if (!set) desc.reset();
    return desc;
}

// The algorithm for one shape.
struct Plan {
    Owned a, b, c;
    Algorithm algorithm;
};

Owned preference() {
    const Functions& lt = *functions();
    void* made = nullptr;
    if (lt.preference_create(&made) != 0) made = nullptr;
    Owned found(made, lt.preference_destroy);
    const std::uint64_t most = kLtWork;
    bool set = made != nullptr && lt.preference_set(made, kMostWork, &most, sizeof most) == 0 &&
               lt.preference_set(made, kReductions, &kSumsOfComputeType, sizeof kSumsOfComputeType) == 0;
    for (int at = kAlignmentA; set && at <= kAlignmentD; ++at)
        set = lt.preference_set(made, static_cast<PreferenceAttribute>(at), &kAlignment, sizeof kAlignment) ==
              0;
    if (!set) found.reset();
    return found;
}

// nullptr where the library refuses.
std::shared_ptr<const Plan> make_plan(const LtProduct& args, void* handle, void* desc) {
    const auto type = args.dtype == DType::kFloat32    ? CUDA_R_32F
                      : args.dtype == DType::kBFloat16 ? CUDA_R_16BF
                                                       : CUDA_R_16F;
    Plan plan{layout(type, args.depth, args.columns),
              layout(type, args.depth, args.rows),
              layout(type, args.columns, args.rows),
              {}};
    const Owned wishes = preference();
    if (!plan.a || !plan.b || !plan.c || !wishes) return nullptr;
    Heuristic found{};
    int count = 0;
    const Status status = functions()->heuristic(handle, desc, plan.a.get(), plan.b.get(), plan.c.get(),
                                                 plan.c.get(), wishes.get(), 1, &found, &count);
    if (status != 0 || count < 1 || found.status != 0 || found.work > kLtWork) return nullptr;
    plan.algorithm = found.algorithm;
    return std::make_shared<const Plan>(std::move(plan));
}

std::shared_ptr<const Plan> plan_of(const LtProduct& args, int device, void* handle, void* desc) {
    constexpr std::size_t kMostPlans = 8192;
    using Key = std::tuple<int, DType, bool, bool, std::int64_t, std::int64_t, std::int64_t>;
    static std::mutex mutex;
    static auto* const plans = new std::map<Key, std::shared_ptr<const Plan>>;
    const Key key{device, args.dtype, args.tf32, args.bias != nullptr, args.rows, args.columns, args.depth};
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = plans->find(key);
        if (found != plans->end()) return found->second;
    }
    auto made = make_plan(args, handle, desc);
    const std::lock_guard<std::mutex> lock(mutex);
    if (plans->size() >= kMostPlans) plans->clear();
    // of two threads' plans the first is kept, so that a shape has one algorithm
    return made == nullptr ? made : plans->emplace(key, made).first->second;
}

}  // namespace

bool has_cublas_lt() { return functions() != nullptr; }

const char* lt_product(const LtProduct& args, void* work, int device, std::uintptr_t stream) {
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (!has_cublas_lt()) return "cuBLASLt: not loaded in this process";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    void* const handle = handle_of(device);
    const Owned desc = description(args);
    if (handle == nullptr || !desc) return "cuBLASLt: no handle or no description of a product";
    const auto plan = plan_of(args, device, handle, desc.get());
    if (plan == nullptr) return "cuBLASLt: has no algorithm for a product";
    const bool adds = args.residual != nullptr;
    const float one = 1.0f, beta = adds ? 1.0f : 0.0f;
    const Status status =
        functions()->matmul(handle, desc.get(), &one, args.b, plan->a.get(), args.a, plan->b.get(), &beta,
                            adds ? args.residual : args.c, plan->c.get(), args.c, plan->c.get(),
                            &plan->algorithm, work, kLtWork, reinterpret_cast<cudaStream_t>(stream));
    return status == 0 ? nullptr : "cuBLASLt: a product failed";
}

}  // namespace cuda
}  // namespace fastbert
