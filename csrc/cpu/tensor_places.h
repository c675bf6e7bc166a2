// Where PyTorch's tensors lie: address, sizes and strides, asked of PyTorch's C functions without its
// headers.
//
// A tensor is named by the address of its TensorImpl (`tensor._cdata` in Python). PyTorch's C functions take
// an `AtenTensorHandle`, the address of an at::Tensor, which is one pointer to a TensorImpl. The caller tries
// this once on a tensor of known place before it relies on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastbert {

// Addresses of torch_get_const_data_ptr, aoti_torch_get_dim, aoti_torch_get_sizes and aoti_torch_get_strides;
// 0: this PyTorch lacks it, and no places can be read.
void set_tensor_functions(std::uintptr_t data, std::uintptr_t dim, std::uintptr_t sizes,
                          std::uintptr_t strides);
bool has_tensor_functions();

class TensorPlaces {
  public:
    // Remembers where the tensors lie now. They must be alive here and at every call of `same`.
    explicit TensorPlaces(std::vector<void*> tensors);

    // Whether PyTorch told all places.
    bool known() const { return known_; }

    // Address of the first element, number of dimensions, sizes and strides of each tensor.
    const std::vector<std::int64_t>& places() const { return places_; }

    // Whether all tensors still lie where they did.
    bool same() const;

  private:
    std::vector<void*> tensors_;
    std::vector<std::int64_t> places_;
    bool known_;
};

}  // namespace fastbert
