// Where PyTorch's tensors lie, what they hold and whether they were written, by PyTorch's own functions and
// without its headers.
//
// A tensor is named by the address of its TensorImpl (`tensor._cdata` in Python). PyTorch's C functions take
// an `AtenTensorHandle`, the address of an at::Tensor, which is one pointer to a TensorImpl. The caller tries
// all this on tensors of known place before it relies on it (fastbert/runtime/loader.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastbert {

// Addresses of torch_get_const_data_ptr, aoti_torch_get_dim, aoti_torch_get_sizes, aoti_torch_get_strides,
// aoti_torch_get_dtype and aoti_torch_get_device_type; 0: this PyTorch lacks it, and nothing can be read.
struct TensorFunctions {
    std::uintptr_t data, dim, sizes, strides, dtype, device_type;
};
void set_tensor_functions(const TensorFunctions& functions);
// Addresses of torch::autograd::impl::version_counter and c10::impl::cow::has_simple_data_ptr, or 0.
void set_write_functions(std::uintptr_t version_counter, std::uintptr_t has_simple_data_ptr);
bool has_tensor_functions();
bool has_write_functions();

// What a tensor is. Codes of dtypes and devices are PyTorch's (c10::ScalarType, c10::DeviceType).
struct TensorFacts {
    const void* data;
    std::int64_t dim;
    const std::int64_t *sizes, *strides;  // in elements
    std::int32_t dtype, device_type;
};

// False if PyTorch does not return them.
bool facts_of(void* tensor, TensorFacts* facts);

class TensorPlaces {
  public:
    // Remembers where the tensors lie now. They must be alive here and at every call of `same`.
    explicit TensorPlaces(std::vector<void*> tensors);

    // Whether PyTorch returned all places.
    bool known() const { return known_; }

    // Address of the first element, number of dimensions, sizes and strides of each tensor.
    const std::vector<std::int64_t>& places() const { return places_; }

    // Whether all tensors still lie where they did.
    bool same() const;

  private:
    // Where PyTorch keeps a tensor's sizes and strides: inside the TensorImpl, if there are few dimensions.
    struct Inside {
        const std::int64_t *sizes, *strides;
    };

    std::vector<void*> tensors_;
    std::vector<Inside> inside_;
    std::vector<std::int64_t> places_;
    bool known_;
};

// Whether tensors were written: their version counters, and the marks of their storages. A storage is marked
// by PyTorch as one to be copied before it is written; the first write removes the mark.
class TensorWrites {
  public:
    // Remembers the versions. Needs `has_write_functions`. `tensors` and `storages` (addresses of
    // StorageImpls, `_cdata` in Python) must be alive here and at every call of `none`.
    TensorWrites(std::vector<void*> tensors, std::vector<void*> marked_storages);

    // The version of each tensor.
    const std::vector<std::uint32_t>& versions() const { return versions_; }

    // Whether no version has changed and all storages have their mark.
    bool none() const;

  private:
    std::vector<void*> tensors_, storages_;
    std::vector<std::uint32_t> versions_;
};

}  // namespace fastbert
