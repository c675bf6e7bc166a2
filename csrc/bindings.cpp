// fastbert._C: raw pointers, sizes, strides and dtype codes as integers. It knows no torch.
// Tensors are checked by the ops and laid out by fastbert/backends; here only what would crash is refused.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/isa.h"
#include "cpu/layer_norm.h"
#include "cpu/parallel.h"
#if FASTBERT_CUDA
#include "cuda/layer_norm.h"
#endif

namespace py = pybind11;

namespace {

using namespace fastbert;
using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_of(int code) {
    if (code < 0 || code > 2)
        throw py::value_error("dtype: expected code 0, 1 or 2, got " + std::to_string(code));
    return static_cast<DType>(code);
}

Param param(Address address, int code) { return {pointer(address), dtype_of(code)}; }

void check_shape(std::int64_t rows, std::int64_t hidden) {
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

// Defines <name>(tensors …, tail …) for `launch(args, tail …)`; the tail is `threads`, or a device and its
// stream.
template <class... Tail>
void def_layer_norm_fwd(py::module_& m, const char* name,
                        const char* (*launch)(const LayerNormFwd&, Tail...)) {
    m.def(name, [launch](int dtype, std::int64_t rows, std::int64_t hidden, Address x, std::int64_t x_stride,
                         Address residual, std::int64_t residual_stride, Address weight, int weight_dtype,
                         Address bias, int bias_dtype, Address x_bias, int x_bias_dtype, double eps,
                         Address seed, std::uint32_t offset, std::uint32_t threshold, float scale, Address y,
                         Address z, Address mean, Address rstd, Tail... tail) {
        check_shape(rows, hidden);
        const LayerNormFwd args{dtype_of(dtype),
                                rows,
                                hidden,
                                pointer(x),
                                pointer(residual),
                                x_stride,
                                residual_stride,
                                param(weight, weight_dtype),
                                param(bias, bias_dtype),
                                param(x_bias, x_bias_dtype),
                                eps,
                                {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                                pointer(y),
                                pointer(z),
                                pointer<float>(mean),
                                pointer<float>(rstd)};
        run([&] { return launch(args, tail...); });
    });
}

template <class... Tail>
void def_layer_norm_bwd(py::module_& m, const char* name,
                        const char* (*launch)(const LayerNormBwd&, Tail...)) {
    m.def(name, [launch](int dtype, std::int64_t rows, std::int64_t hidden, Address dy,
                         std::int64_t dy_stride, Address z, std::int64_t z_stride, Address weight,
                         int weight_dtype, Address mean, Address rstd, Address seed, std::uint32_t offset,
                         std::uint32_t threshold, float scale, Address dx, Address dresidual, Address dweight,
                         Address dbias, Address dx_bias, Tail... tail) {
        check_shape(rows, hidden);
        const LayerNormBwd args{dtype_of(dtype),
                                rows,
                                hidden,
                                pointer(dy),
                                pointer(z),
                                dy_stride,
                                z_stride,
                                param(weight, weight_dtype),
                                pointer<const float>(mean),
                                pointer<const float>(rstd),
                                {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                                pointer(dx),
                                pointer(dresidual),
                                pointer<float>(dweight),
                                pointer<float>(dbias),
                                pointer<float>(dx_bias)};
        run([&] { return launch(args, tail...); });
    });
}

// What forward and backward share, in the order in which fastbert/backends/cpu.py hands it over.
void fill(Attention& out, const py::tuple& common) {
    if (common.size() != 27) throw py::value_error("attention: expected 27 common arguments");
    std::size_t next = 0;
    const auto address = [&] { return common[next++].cast<Address>(); };
    const auto size = [&] { return common[next++].cast<std::int64_t>(); };
    const auto heads = [&] {
        const Address data = address();
        const std::int64_t row = size();
        return Heads{pointer(data), row, size()};
    };
    out.dtype = dtype_of(common[next++].cast<int>());
    out.batch = size();
    out.nheads = size();
    out.headdim = size();
    out.total = size();
    out.max_seqlen = size();
    out.cu_seqlens = pointer<const std::int32_t>(address());
    out.q = heads();
    out.k = heads();
    out.v = heads();
    out.softmax_scale = common[next++].cast<float>();
    out.causal = common[next++].cast<bool>();
    out.bias.data = pointer<const float>(address());
    out.bias.batch_stride = size();
    out.bias.head_stride = size();
    out.bias.row_stride = size();
    out.gate = pointer<const float>(address());
    out.dropout.seed = pointer<const std::uint64_t>(address());
    out.dropout.offset = common[next++].cast<std::uint32_t>();
    out.dropout.threshold = common[next++].cast<std::uint32_t>();
    out.dropout.scale = common[next++].cast<float>();
    check_shape(out.batch, out.headdim);
}

void attention_fwd(const py::tuple& common, Address out, Address lse, Address probs, int threads) {
    AttentionFwd args{};
    fill(args, common);
    args.out = pointer(out);
    args.lse = pointer<float>(lse);
    args.probs = pointer(probs);
    run([&] { return cpu_attention_fwd(args, threads); });
}

void attention_bwd(const py::tuple& common, Address dout, Address dq, Address dk, Address dv, Address ds,
                   Address dgate, int threads) {
    AttentionBwd args{};
    fill(args, common);
    args.dout = pointer(dout);
    args.dq = pointer(dq);
    args.dk = pointer(dk);
    args.dv = pointer(dv);
    args.ds = pointer<float>(ds);
    args.dgate = pointer<double>(dgate);
    run([&] { return cpu_attention_bwd(args, threads); });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of fastbert";
#ifdef __clang__
    m.attr("compiler") = __VERSION__;
#else
    m.attr("compiler") = "GCC " __VERSION__;
#endif
    m.attr("cuda_archs") = FASTBERT_CUDA_ARCHS;  // "80;90a;…", empty where built without CUDA

    m.def("cpu_isa", [] { return isa_name(current_isa()); }, "Instruction set of the CPU kernels in use");
    m.def(
        "best_cpu_isa", [] { return isa_name(best_isa()); },
        "The best that this processor and build can run");
    m.def("set_cpu_isa", [](const std::string& name) {
        if (!set_isa(name.c_str()))
            throw py::value_error(
                "FASTBERT_ISA: expected none, avx2, avx512 or best, and no more than this processor "
                "has (" +
                std::string(isa_name(best_isa())) + "), got " + name);
    });
    m.def("set_team_start", &set_team_start, "Hand over the address of the OpenMP runtime's GOMP_parallel");
    m.def("has_team", &has_team, "Whether work is spread over threads at all");

    m.def("cpu_attention_fwd", &attention_fwd);
    m.def("cpu_attention_bwd", &attention_bwd);
    def_layer_norm_fwd(m, "cpu_layer_norm_fwd", &cpu_layer_norm_fwd);
    def_layer_norm_bwd(m, "cpu_layer_norm_bwd", &cpu_layer_norm_bwd);
#if FASTBERT_CUDA
    def_layer_norm_fwd(m, "cuda_layer_norm_fwd", &cuda_layer_norm_fwd);
    def_layer_norm_bwd(m, "cuda_layer_norm_bwd", &cuda_layer_norm_bwd);
    m.def("cuda_layer_norm_bwd_parts", &cuda_layer_norm_bwd_parts,
          "Rows of the float workspace [parts, 3, hidden] for (dtype code, rows, hidden, multiprocessors)");
#endif
}
