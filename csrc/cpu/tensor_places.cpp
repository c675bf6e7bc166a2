#include "tensor_places.h"

#include <algorithm>
#include <utility>

namespace fastbert {
namespace {

// Each returns 0 if it succeeds. `tensor` is the address of an at::Tensor.
struct Functions {
    std::int32_t (*data)(const void* tensor, const void** address) = nullptr;
    std::int32_t (*dim)(const void* tensor, std::int64_t* dim) = nullptr;
    std::int32_t (*sizes)(const void* tensor, std::int64_t** sizes) = nullptr;
    std::int32_t (*strides)(const void* tensor, std::int64_t** strides) = nullptr;
} g_torch;  // written when the extension is loaded

// Calls number(n) for each number that describes the tensor's place, until it returns false.
template <class F>
bool describe(void* const& tensor, const F& number) {
    const void* address = nullptr;
    std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    if (g_torch.data(&tensor, &address) != 0 || g_torch.dim(&tensor, &dim) != 0 ||
        g_torch.sizes(&tensor, &sizes) != 0 || g_torch.strides(&tensor, &strides) != 0)
        return false;
    if (!number(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(address))) || !number(dim))
        return false;
    return std::all_of(sizes, sizes + dim, number) && std::all_of(strides, strides + dim, number);
}

}  // namespace

void set_tensor_functions(std::uintptr_t data, std::uintptr_t dim, std::uintptr_t sizes,
                          std::uintptr_t strides) {
    g_torch.data = reinterpret_cast<decltype(g_torch.data)>(data);
    g_torch.dim = reinterpret_cast<decltype(g_torch.dim)>(dim);
    g_torch.sizes = reinterpret_cast<decltype(g_torch.sizes)>(sizes);
    g_torch.strides = reinterpret_cast<decltype(g_torch.strides)>(strides);
}

bool has_tensor_functions() {
    return g_torch.data != nullptr && g_torch.dim != nullptr && g_torch.sizes != nullptr &&
           g_torch.strides != nullptr;
}

TensorPlaces::TensorPlaces(std::vector<void*> tensors) : tensors_(std::move(tensors)) {
    known_ =
        has_tensor_functions() && std::all_of(tensors_.begin(), tensors_.end(), [this](void* const& tensor) {
            return tensor != nullptr && describe(tensor, [this](std::int64_t n) {
                       places_.push_back(n);
                       return true;
                   });
        });
}

bool TensorPlaces::same() const {
    if (!known_) return false;
    auto place = places_.begin();
    return std::all_of(tensors_.begin(), tensors_.end(), [&place](void* const& tensor) {
        return describe(tensor, [&place](std::int64_t n) { return *place++ == n; });
    });
}

}  // namespace fastbert
