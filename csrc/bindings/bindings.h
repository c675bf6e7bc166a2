// Shared by the files of this folder: pointers as integers, checks, and running without the GIL.
//
// fastbert._C takes raw pointers, sizes, strides and dtype codes as integers. It knows no torch. The ops
// check tensors; fastbert/backends lays them out. The size of the memory at a pointer cannot be checked here.
// These are checked: the values of lengths and ids, which the ops cannot see under torch.compile, missing
// pointers, sizes and strides below zero, products that overflow, codes, and numbers of threads.
#pragma once

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpu/attention.h"
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
    if (code < 0 || code > 5)
        throw py::value_error("activation: expected code 0 … 5, got " + std::to_string(code));
    return static_cast<Activation>(code);
}

inline Gate gate_of(int code) {
    if (code < 0 || code > 2)
        throw py::value_error("gate: expected code 0, 1 or 2, got " + std::to_string(code));
    return static_cast<Gate>(code);
}

inline Param param(Address address, int code) { return {pointer(address), dtype_of(code)}; }

// Addresses that will be called: of functions that libraries export, or 0.
inline void check_functions(std::initializer_list<Address> addresses) {
    for (const Address address : addresses) {
        Dl_info found;
        void* const function = pointer(address);
        if (address != 0 && (dladdr(function, &found) == 0 || found.dli_saddr != function))
            throw py::value_error("expected 0 or the address of a function of a loaded library, got " +
                                  std::to_string(address));
    }
}

// A number in a tuple from Python.
template <class T>
T number(const py::handle& from) {
    try {
        return from.cast<T>();
    } catch (const py::cast_error&) {
        throw py::type_error("expected a number of " + std::to_string(8 * sizeof(T)) + " bits, got " +
                             std::string(py::repr(from)));
    }
}

// More elements than any machine can hold. Below this, sums and products of a few sizes fit in 64 bits.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 48;
inline constexpr int kMostThreads = 4096;

[[noreturn]] inline void refuse(const char* name, const std::string& expected, std::int64_t got) {
    throw py::value_error(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
}

inline void check_size(const char* name, std::int64_t size, std::int64_t least = 0) {
    if (size < least || size > kMostElements) refuse(name, std::to_string(least) + " to 2**48", size);
}

// The number of elements of a tensor of these sizes, none of them negative.
inline std::int64_t elements_of(const char* name, std::initializer_list<std::int64_t> sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes) {
        check_size(name, size);
        if (__builtin_mul_overflow(product, size, &product) || product > kMostElements)
            refuse(name, "at most 2**48 elements, and a size", size);
    }
    return product;
}

inline void check_shape(std::int64_t rows, std::int64_t hidden) {
    if (rows < 0 || hidden < 1)
        throw py::value_error("expected rows >= 0 and hidden >= 1, got " + std::to_string(rows) + " and " +
                              std::to_string(hidden));
    elements_of("rows * hidden", {rows, hidden});
}

// A tensor that must have an address if it has elements.
inline void check_given(const char* name, const void* data, std::int64_t elements) {
    if (data == nullptr && elements > 0)
        throw py::value_error(std::string(name) + ": expected an address, got none");
}

// The number of elements from the first to the last one of a strided, non-empty tensor.
struct Dim {
    std::int64_t size, stride;
};
inline void check_strides(const char* name, std::initializer_list<Dim> dims) {
    std::int64_t span = 1;
    for (const Dim& dim : dims) {
        if (dim.size == 0) return;
        if (dim.stride < 0) refuse(name, "strides >= 0", dim.stride);
        std::int64_t reach;
        if (__builtin_mul_overflow(dim.size - 1, dim.stride, &reach) ||
            __builtin_add_overflow(span, reach, &span) || span > kMostElements)
            refuse(name, "strides that stay within 2**48 elements", dim.stride);
    }
}

// A tensor of contiguous rows, `stride` elements apart.
inline void check_rows(const char* name, const void* data, std::int64_t rows, std::int64_t width,
                       std::int64_t stride) {
    check_given(name, data, rows * width);
    check_strides(name, {{rows, stride}, {width, 1}});
}

inline void check_threads(int threads) {
    if (threads < 1 || threads > kMostThreads)
        refuse("threads", "1 to " + std::to_string(kMostThreads), threads);
}

// Checks packed sequences: the lengths must stay within the rows, and none may exceed max_seqlen. Returns the
// end of the last sequence.
inline std::int64_t check_lengths(const std::int32_t* cu_seqlens, std::int64_t batch, std::int64_t total,
                                  std::int64_t max_seqlen) {
    check_size("batch", batch);
    check_size("total", total);
    check_size("max_seqlen", max_seqlen);
    check_given("cu_seqlens", cu_seqlens, 1);
    if (cu_seqlens[0] != 0) refuse("cu_seqlens", "to start at 0", cu_seqlens[0]);
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
        const std::int64_t length = static_cast<std::int64_t>(cu_seqlens[b + 1]) - cu_seqlens[b];
        if (length < 0)
            refuse("cu_seqlens",
                   "to be non-decreasing, got " + std::to_string(cu_seqlens[b]) + " then " +
                       std::to_string(cu_seqlens[b + 1]) + ": a length >= 0",
                   length);
        if (length > longest) longest = length;
    }
    if (cu_seqlens[batch] > total)
        refuse("cu_seqlens", "to end within the " + std::to_string(total) + " rows of q", cu_seqlens[batch]);
    if (longest > max_seqlen)
        refuse("max_seqlen", "at least the longest length " + std::to_string(longest), max_seqlen);
    return cu_seqlens[batch];
}

inline void check_bias(const Bias& bias, std::int64_t batch, std::int64_t nheads, std::int64_t max_seqlen) {
    if (bias.data == nullptr) return;
    check_strides("bias", {{batch, bias.batch_stride},
                           {nheads, bias.head_stride},
                           {max_seqlen, bias.row_stride},
                           {max_seqlen, 1}});
}

// A position of rotary tables of so many rows. Under torch.compile the op cannot look.
inline void check_position(std::int64_t position, std::int64_t rows) {
    if (position < 0 || position >= rows)
        throw py::value_error("positions: position " + std::to_string(position) +
                              " is out of range for tables of " + std::to_string(rows));
}

// Runs without the GIL; raises the reason that is returned, if any.
template <class F>
void run(F&& f) {
    const char* reason;
    {
        py::gil_scoped_release release;
        reason = f();
    }
    if (reason != nullptr) throw std::runtime_error(reason);
}

// Scores of distances, as `relative_args` in fastbert/backends/cpu/attention.py passes them; () for none.
// They read `runs`, which it fills.
Relative relative_of(const py::tuple& given, std::int64_t batch, std::int64_t nheads, std::int64_t total,
                     std::int64_t max_seqlen, std::vector<std::uint8_t>& runs);

// Each file defines the functions of its op.
void bind_attention(py::module_& m);
void bind_cross_entropy(py::module_& m);
void bind_embedding(py::module_& m);
void bind_encoder_layer(py::module_& m);
void bind_encoder_layers(py::module_& m);
void bind_host_batch(py::module_& m);
void bind_layer_norm(py::module_& m);
void bind_linear(py::module_& m);
void bind_model_watch(py::module_& m);
void bind_packing(py::module_& m);
void bind_rotary(py::module_& m);
void bind_samples(py::module_& m);

}  // namespace fastbert
