// The Python module fastbert._C.
#include <string>

#include "../cpu/isa.h"
#include "../cpu/parallel.h"
#include "bindings.h"

using namespace fastbert;

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of fastbert";
#ifdef __clang__
    m.attr("compiler") = __VERSION__;
#else
    m.attr("compiler") = "GCC " __VERSION__;
#endif
    m.attr("cuda_archs") = FASTBERT_CUDA_ARCHS;      // "80;90a;…", empty where built without CUDA
    m.attr("cuda_sources") = FASTBERT_CUDA_SOURCES;  // "attention=<sha256>;…", empty likewise
    m.attr("nvcc") = FASTBERT_NVCC;                  // "13.0", empty likewise

    m.def("cpu_isa", [] { return isa_name(current_isa()); }, "Instruction set of the CPU kernels in use");
    m.def(
        "best_cpu_isa", [] { return isa_name(best_isa()); },
        "The best that this processor and build can run");
    m.def(
        "preferred_cpu_isa", [] { return isa_name(preferred_isa()); },
        "The one that serves unless FASTBERT_ISA names another");
    m.def("set_cpu_isa", [](const std::string& name) {
        if (name.find('\0') != std::string::npos || !set_isa(name.c_str()))
            throw py::value_error(
                "FASTBERT_ISA: expected none, avx2, avx2_vnni, avx512, avx512_bf16 or best, and no more than "
                "this processor has (" +
                std::string(isa_name(best_isa())) + "), got " + name);
    });
    m.def(
        "set_team_start",
        [](std::uintptr_t parallel, std::uintptr_t start, std::uintptr_t end, std::uintptr_t size) {
            check_functions({parallel, start, end, size});
            set_team_start(parallel, start, end, size);
        },
        py::arg("gomp_parallel"), py::arg("gomp_parallel_start") = 0, py::arg("gomp_parallel_end") = 0,
        py::arg("omp_get_num_threads") = 0, "Hand over the addresses of the OpenMP runtime's functions");
    m.def(
        "open_team",
        [](int threads) {
            check_threads(threads);
            open_team(threads);
        },
        py::arg("threads"), "See csrc/cpu/parallel.h");
    m.def("close_team", &close_team, py::call_guard<py::gil_scoped_release>());
    m.def(
        "set_always_alone",
        [](bool alone, std::int64_t microseconds) {
            if (microseconds < 0) refuse("microseconds", ">= 0", microseconds);
            set_always_alone(alone, microseconds);
        },
        py::arg("alone").noconvert(), py::arg("microseconds"), "For tests: see csrc/cpu/parallel.h");
    m.def("set_may_be_alone", &set_may_be_alone, py::arg("may").noconvert(),
          "For tests: see csrc/cpu/parallel.h");
    m.def("has_team", &has_team, "Whether work is spread over threads at all");

    bind_attention(m);
    bind_cross_entropy(m);
    bind_embedding(m);
    bind_encoder_layer(m);
    bind_encoder_layers(m);
    bind_host_batch(m);
    bind_layer_norm(m);
    bind_linear(m);
    bind_model_watch(m);
    bind_packing(m);
    bind_rotary(m);
    bind_samples(m);
}
