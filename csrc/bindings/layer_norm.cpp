// layer_norm: CPU and CUDA take the same arguments.
#include "../cpu/layer_norm.h"

#include "bindings.h"
#if FASTBERT_CUDA
#include "../cuda/layer_norm.h"
#endif

namespace fastbert {
namespace {

// The kind of norm: its place in KINDS of fastbert/ops/layer_norm.py.
constexpr int kLayerNorm = 0, kRmsNorm = 1, kNoNorm = 2;

void check_kind(int kind, int last) {
    if (kind < 0 || kind > last)
        throw py::value_error("kind: expected code 0 … " + std::to_string(last) + ", got " +
                              std::to_string(kind));
}
void check_tail(int kind, int threads) {
    check_kind(kind, kNoNorm);
    check_threads(threads);
}
// A GPU's tail: none of it addresses memory of the host.
template <class... Tail>
void check_tail(int kind, Tail...) {
    check_kind(kind, kRmsNorm);
}

// Defines <name>(tensors …, tail …) for `launch(args, tail …)`. The tail is `threads`, or a device and its
// stream.
template <class... Tail>
void def_layer_norm_fwd(py::module_& m, const char* name,
                        const char* (*launch)(const LayerNormFwd&, Tail...)) {
    m.def(name, [launch](int dtype, std::int64_t rows, std::int64_t hidden, Address x, std::int64_t x_stride,
                         Address residual, std::int64_t residual_stride, Address weight, int weight_dtype,
                         Address bias, int bias_dtype, Address x_bias, int x_bias_dtype, double eps, int kind,
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
                                kind == kRmsNorm,
                                kind == kNoNorm,
                                {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                                pointer(y),
                                pointer(z),
                                pointer<float>(mean),
                                pointer<float>(rstd)};
        check_tail(kind, tail...);
        check_rows("x", args.x, rows, hidden, x_stride);
        if (args.residual != nullptr) check_rows("residual", args.residual, rows, hidden, residual_stride);
        check_given("y", args.y, rows);
        run([&] { return launch(args, tail...); });
    });
}

template <class... Tail>
void def_layer_norm_bwd(py::module_& m, const char* name,
                        const char* (*launch)(const LayerNormBwd&, Tail...)) {
    m.def(name, [launch](int dtype, std::int64_t rows, std::int64_t hidden, Address dy,
                         std::int64_t dy_stride, Address dsum, Address z, std::int64_t z_stride,
                         Address weight, int weight_dtype, Address mean, Address rstd, int kind, Address seed,
                         std::uint32_t offset, std::uint32_t threshold, float scale, Address dx,
                         Address dresidual, Address dweight, Address dbias, Address dx_bias, Tail... tail) {
        check_shape(rows, hidden);
        const LayerNormBwd args{dtype_of(dtype),
                                rows,
                                hidden,
                                pointer(dy),
                                pointer(dsum),
                                pointer(z),
                                dy_stride,
                                z_stride,
                                param(weight, weight_dtype),
                                pointer<const float>(mean),
                                pointer<const float>(rstd),
                                kind == kRmsNorm,
                                kind == kNoNorm,
                                {pointer<const std::uint64_t>(seed), offset, threshold, scale},
                                pointer(dx),
                                pointer(dresidual),
                                pointer<float>(dweight),
                                pointer<float>(dbias),
                                pointer<float>(dx_bias)};
        check_tail(kind, tail...);
        check_rows("dy", args.dy, rows, hidden, dy_stride);
        check_rows("z", args.z, rows, hidden, z_stride);
        if (kind == kLayerNorm) check_given("mean", args.mean, rows);
        if (kind != kNoNorm) check_given("rstd", args.rstd, rows);
        run([&] { return launch(args, tail...); });
    });
}

}  // namespace

void bind_layer_norm(py::module_& m) {
    def_layer_norm_fwd(m, "cpu_layer_norm_fwd", &cpu_layer_norm_fwd);
    def_layer_norm_bwd(m, "cpu_layer_norm_bwd", &cpu_layer_norm_bwd);
#if FASTBERT_CUDA
    def_layer_norm_fwd(m, "cuda_layer_norm_fwd", &cuda_layer_norm_fwd);
    def_layer_norm_bwd(m, "cuda_layer_norm_bwd", &cuda_layer_norm_bwd);
    m.def("cuda_layer_norm_bwd_parts", &cuda_layer_norm_bwd_parts,
          "Rows of the float workspace [parts, 3, hidden] for (dtype code, rows, hidden, multiprocessors)");
#endif
}

}  // namespace fastbert
