// Encoder layers on a GPU, all in one call.
#include <algorithm>
#include <vector>

#include "bindings.h"
#if FASTBERT_CUDA
#include "../cuda/cublas_lt.h"
#include "../cuda/encoder_layers.h"
#endif

namespace fastbert {

#if FASTBERT_CUDA
namespace {

// The order of fastbert/backends/cuda/encoder_layers.py.
LayerWeights weights_of(const py::tuple& numbers) {
    if (numbers.size() != 19) throw py::value_error("layers: expected 19 numbers of each");
    std::size_t next = 0;
    const auto size = [&] { return number<std::int64_t>(numbers[next++]); };
    const auto address = [&] { return pointer<const void>(number<Address>(numbers[next++])); };
    LayerWeights found{};
    found.nheads = size(), found.headdim = size(), found.inner = size();
    found.activation = activation_of(number<int>(numbers[next++]));
    found.exact = number<bool>(numbers[next++]);
    found.eps = number<double>(numbers[next++]), found.last_eps = number<double>(numbers[next++]);
    for (const void** const each :
         {&found.qkv, &found.qkv_bias, &found.out, &found.out_bias, &found.norm, &found.norm_bias, &found.up,
          &found.up_bias, &found.down, &found.down_bias, &found.last, &found.last_bias})
        *each = address();
    check_size("nheads", found.nheads, 1);
    check_size("headdim", found.headdim, 1);
    check_size("inner", found.inner, 1);
    return found;
}

LayerStack stack_of(int dtype, std::int64_t hidden, const py::list& layers) {
    LayerStack found{dtype_of(dtype), hidden, {}};
    check_size("hidden", hidden, 1);
    for (const py::handle each : layers) {
        if (!py::isinstance<py::tuple>(each)) throw py::type_error("layers: expected tuples");
        found.layers.push_back(weights_of(py::reinterpret_borrow<py::tuple>(each)));
    }
    return found;
}

CudaDevice device_of(int index, int multiprocessors, bool hopper, bool groups, bool tf32, bool clusters,
                     bool adds, bool chained) {
    if (multiprocessors < 1) refuse("multiprocessors", ">= 1", multiprocessors);
    return {index, multiprocessors, hopper, groups, tf32, clusters, adds, chained};
}

void check_call(const LayerStack& stack, std::int64_t rows, std::int64_t batch) {
    std::int64_t widest = stack.hidden;
    for (const LayerWeights& w : stack.layers) {
        elements_of("width", {w.nheads, w.headdim});
        widest = std::max({widest, 4 * w.nheads * w.headdim, w.inner});
    }
    elements_of("rows * widest", {rows, widest});
    elements_of("batch * widest", {batch, widest});
}

void forward(const LayerStack& stack, std::int64_t rows, std::int64_t batch, std::int64_t max_seqlen,
             Address cu_seqlens, bool causal, Address bias, std::int64_t bias_batch, std::int64_t bias_head,
             std::int64_t bias_row, bool first_only, Address x, const py::list& out, Address work,
             std::size_t work_bytes, int index, int multiprocessors, bool hopper, bool groups, bool tf32,
             bool clusters, bool adds, bool chained, Address stream) {
    const CudaDevice device =
        device_of(index, multiprocessors, hopper, groups, tf32, clusters, adds, chained);
    check_call(stack, rows, batch);
    check_size("max_seqlen", max_seqlen);
    check_given("cu_seqlens", pointer(cu_seqlens), 1);
    check_given("x", pointer(x), rows);
    const Bias added{pointer<const float>(bias), bias_batch, bias_head, bias_row};
    if (out.size() != stack.layers.size())
        refuse("out", "an address or 0 for each layer", static_cast<std::int64_t>(out.size()));
    std::vector<void*> outputs;
    for (const py::handle each : out) outputs.push_back(pointer(number<Address>(each)));
    if (outputs.empty() || outputs.back() == nullptr) refuse("out", "an address for the last layer", 0);
    const std::size_t needed = cuda_encoder_layers_work(stack, rows, batch, first_only, device);
    if (work_bytes < needed)
        refuse("work_bytes", "at least " + std::to_string(needed), static_cast<std::int64_t>(work_bytes));
    if (work % 16 != 0) refuse("work", "a multiple of 16", static_cast<std::int64_t>(work));
    for (const LayerWeights& w : stack.layers) check_bias(added, batch, w.nheads, max_seqlen);
    const LayersCall call{rows,        batch,        max_seqlen, pointer<const std::int32_t>(cu_seqlens),
                          causal,      added,        first_only, pointer(x),
                          &outputs[0], pointer(work)};
    run([&] { return cuda_encoder_layers(stack, call, device, stream); });
}

}  // namespace

void bind_encoder_layers(py::module_& m) {
    py::class_<LayerStack>(m, "CudaEncoderLayers", py::module_local())
        .def(py::init(&stack_of), py::arg("dtype"), py::arg("hidden"), py::arg("layers"),
             "Parameters of encoder layers: 19 numbers of each; the caller keeps the tensors");
    m.def(
        "cuda_encoder_layers_gap",
        [](const LayerStack& stack) -> py::object {
            const char* const gap = cuda_encoder_layers_gap(stack);
            return gap == nullptr ? py::object(py::none()) : py::object(py::str(gap));
        },
        "Why these layers cannot run so, or None");
    m.def(
        "cuda_encoder_layers_work",
        [](const LayerStack& stack, std::int64_t rows, std::int64_t batch, bool first_only, int index,
           int multiprocessors, bool hopper, bool groups, bool tf32, bool clusters, bool adds, bool chained) {
            check_call(stack, rows, batch);
            return cuda_encoder_layers_work(
                stack, rows, batch, first_only,
                device_of(index, multiprocessors, hopper, groups, tf32, clusters, adds, chained));
        },
        "Bytes of scratch");
    m.def("cuda_encoder_layers_fwd", &forward);
    m.def("has_cublas_lt", &cuda::has_cublas_lt, "Whether the process has loaded it");
}
#else
void bind_encoder_layers(py::module_&) {}
#endif

}  // namespace fastbert
