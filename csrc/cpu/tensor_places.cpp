#include "tensor_places.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastbert {
namespace {

// The C functions return 0 if they succeed. `tensor` is the address of an at::Tensor.
struct Functions {
    std::int32_t (*data)(const void* tensor, const void** address) = nullptr;
    std::int32_t (*dim)(const void* tensor, std::int64_t* dim) = nullptr;
    std::int32_t (*sizes)(const void* tensor, std::int64_t** sizes) = nullptr;
    std::int32_t (*strides)(const void* tensor, std::int64_t** strides) = nullptr;
    std::int32_t (*dtype)(const void* tensor, std::int32_t* code) = nullptr;
    std::int32_t (*device_type)(const void* tensor, std::int32_t* code) = nullptr;
    // A reference to the tensor's VariableVersion, which is one pointer to a VersionCounter
    const char* const& (*version_counter)(const void* tensor) = nullptr;
    // Whether a storage has no mark, if it had none when it was made
    bool (*has_simple_data_ptr)(const void* storage) = nullptr;
} g_torch;  // written when the extension is loaded

template <class F>
void set(F& function, std::uintptr_t address) {
    function = reinterpret_cast<F>(address);
}

// Numbers of a tensor, if they lie in its TensorImpl, where they stay; else null. PyTorch keeps up to five
// sizes and strides there, and others elsewhere.
const std::int64_t* inside(const void* tensor, const std::int64_t* numbers) {
    constexpr std::ptrdiff_t kImplBytes = 160;  // less than a TensorImpl has
    const std::ptrdiff_t offset = reinterpret_cast<const char*>(numbers) - static_cast<const char*>(tensor);
    return offset > 0 && offset < kImplBytes ? numbers : nullptr;
}

std::uint32_t version_of(void* const& tensor) {
    // a VersionCounter: its table of virtual functions, its counts of references, the version. Tensors made
    // in inference mode have none.
    const char* const counter = g_torch.version_counter(&tensor);
    std::uint32_t version = 0;
    if (counter != nullptr) std::memcpy(&version, counter + 16, sizeof version);
    return version;
}

}  // namespace

void set_tensor_functions(const TensorFunctions& functions) {
    set(g_torch.data, functions.data);
    set(g_torch.dim, functions.dim);
    set(g_torch.sizes, functions.sizes);
    set(g_torch.strides, functions.strides);
    set(g_torch.dtype, functions.dtype);
    set(g_torch.device_type, functions.device_type);
}

void set_write_functions(std::uintptr_t version_counter, std::uintptr_t has_simple_data_ptr) {
    set(g_torch.version_counter, version_counter);
    set(g_torch.has_simple_data_ptr, has_simple_data_ptr);
}

bool has_tensor_functions() {
    return g_torch.data != nullptr && g_torch.dim != nullptr && g_torch.sizes != nullptr &&
           g_torch.strides != nullptr && g_torch.dtype != nullptr && g_torch.device_type != nullptr;
}

bool has_write_functions() {
    return g_torch.version_counter != nullptr && g_torch.has_simple_data_ptr != nullptr;
}

bool facts_of(void* tensor, TensorFacts* facts) {
    std::int64_t *sizes = nullptr, *strides = nullptr;
    if (!has_tensor_functions() || tensor == nullptr || g_torch.data(&tensor, &facts->data) != 0 ||
        g_torch.dim(&tensor, &facts->dim) != 0 || g_torch.sizes(&tensor, &sizes) != 0 ||
        g_torch.strides(&tensor, &strides) != 0 || g_torch.dtype(&tensor, &facts->dtype) != 0 ||
        g_torch.device_type(&tensor, &facts->device_type) != 0)
        return false;
    facts->sizes = sizes;
    facts->strides = strides;
    return true;
}

TensorPlaces::TensorPlaces(std::vector<void*> tensors) : tensors_(std::move(tensors)), known_(true) {
    for (void* const tensor : tensors_) {
        TensorFacts facts;
        known_ = known_ && facts_of(tensor, &facts);
        if (!known_) return;
        const auto* const data = static_cast<const char*>(facts.data);
        places_.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data)));
        places_.push_back(facts.dim);
        places_.insert(places_.end(), facts.sizes, facts.sizes + facts.dim);
        places_.insert(places_.end(), facts.strides, facts.strides + facts.dim);
        inside_.push_back({inside(tensor, facts.sizes), inside(tensor, facts.strides)});
    }
}

bool TensorPlaces::same() const {
    if (!known_ || !has_tensor_functions()) return false;
    const std::int64_t* place = places_.data();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        void* const& tensor = tensors_[i];
        const void* address = nullptr;
        std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
        if (g_torch.data(&tensor, &address) != 0 || g_torch.dim(&tensor, &dim) != 0) return false;
        if (static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(address)) != *place++ ||
            dim != *place++)
            return false;
        const std::int64_t *now_sizes = inside_[i].sizes, *now_strides = inside_[i].strides;
        if (now_sizes == nullptr || now_strides == nullptr) {
            if (g_torch.sizes(&tensor, &sizes) != 0 || g_torch.strides(&tensor, &strides) != 0) return false;
            now_sizes = sizes;
            now_strides = strides;
        }
        for (std::int64_t d = 0; d < dim; ++d, ++place)
            if (now_sizes[d] != place[0] || now_strides[d] != place[dim]) return false;
        place += dim;
    }
    return true;
}

TensorWrites::TensorWrites(std::vector<void*> tensors, std::vector<void*> marked_storages)
    : tensors_(std::move(tensors)), storages_(std::move(marked_storages)) {
    for (void* const& tensor : tensors_) versions_.push_back(version_of(tensor));
}

bool TensorWrites::none() const {
    for (std::size_t i = 0; i < tensors_.size(); ++i)
        if (version_of(tensors_[i]) != versions_[i]) return false;
    return std::none_of(storages_.begin(), storages_.end(),
                        [](const void* storage) { return g_torch.has_simple_data_ptr(storage); });
}

}  // namespace fastbert
