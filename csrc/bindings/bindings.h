// What the files of this folder share: pointers as integers, checks, and running without the GIL.
//
// fastbert._C takes raw pointers, sizes, strides and dtype codes as integers. It knows no torch. Tensors are
// checked by the ops and laid out by fastbert/backends; here only what would crash is refused.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../cpu/linear.h"
#include "../layer_norm.h"

namespace fastbert {

namespace py = pybind11;

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int code) {
    if (code < 0 || code > 2)
        throw py::value_error("dtype: expected code 0, 1 or 2, got " + std::to_string(code));
    return static_cast<DType>(code);
}

inline Activation activation_of(int code) {
    if (code < 0 || code > 4)
        throw py::value_error("activation: expected code 0 … 4, got " + std::to_string(code));
    return static_cast<Activation>(code);
}

inline Param param(Address address, int code) { return {pointer(address), dtype_of(code)}; }

inline void check_shape(std::int64_t rows, std::int64_t hidden) {
    if (rows < 0 || hidden < 1)
        throw py::value_error("expected rows >= 0 and hidden >= 1, got " + std::to_string(rows) + " and " +
                              std::to_string(hidden));
}

// Runs without the GIL; a reason that comes back is raised.
template <class F>
void run(F&& f) {
    const char* reason;
    {
        py::gil_scoped_release release;
        reason = f();
    }
    if (reason != nullptr) throw std::runtime_error(reason);
}

// Each file defines the functions of its op.
void bind_attention(py::module_& m);
void bind_cross_entropy(py::module_& m);
void bind_embedding(py::module_& m);
void bind_encoder_layer(py::module_& m);
void bind_layer_norm(py::module_& m);
void bind_linear(py::module_& m);
void bind_padding(py::module_& m);

}  // namespace fastbert
