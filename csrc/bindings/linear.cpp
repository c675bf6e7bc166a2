// linear and linear_int8 on the CPU, linear on a GPU.
#include "../cpu/linear.h"

#include "../cpu/linear_int8.h"
#include "bindings.h"
#if FASTBERT_CUDA
#include "../cuda/linear.h"
#endif

namespace fastbert {
namespace {

void check_halves(std::int64_t columns, bool gated) {
    if (gated && columns % 2 != 0) refuse("columns", "an even number with a gate", columns);
}

void make_panels(int dtype, std::int64_t depth, std::int64_t columns, Address b, std::int64_t depth_stride,
                 std::int64_t column_stride, Address panels, int threads, bool gated) {
    check_shape(columns, depth);
    check_halves(columns, gated);
    if (depth_stride != 1 && column_stride != 1) throw py::value_error("panels: expected one stride of 1");
    const ToPanels args{dtype_of(dtype), depth,         columns,         pointer(b),
                        depth_stride,    column_stride, pointer(panels), gated};
    check_threads(threads);
    check_given("b", args.b, depth * columns);
    check_given("panels", args.panels, depth * columns);
    check_strides("b", {{depth, depth_stride}, {columns, column_stride}});
    run([&] { return cpu_linear_panels(args, threads); });
}

void product(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address a,
             std::int64_t row_stride, std::int64_t depth_stride, Address panels, Address b,
             std::int64_t b_stride, std::int64_t b_column_stride, Address bias, int bias_dtype,
             int activation, Address residual, std::int64_t residual_stride, Address c, Address pre,
             int threads, int b_dtype, int c_dtype, int gate) {
    check_shape(rows, depth);
    check_shape(rows, columns);
    if ((row_stride != 1 && depth_stride != 1) || (panels == 0 && b_stride != 1 && b_column_stride != 1))
        throw py::value_error("product: expected one stride of 1");
    const Product args{dtype_of(dtype),
                       rows,
                       columns,
                       depth,
                       pointer(a),
                       row_stride,
                       depth_stride,
                       pointer(panels),
                       pointer(b),
                       b_stride,
                       b_column_stride,
                       param(bias, bias_dtype),
                       activation_of(activation),
                       pointer(residual),
                       residual_stride,
                       pointer(c),
                       pointer(pre),
                       dtype_of(b_dtype) != dtype_of(dtype),
                       dtype_of(c_dtype) != dtype_of(dtype),
                       gate_of(gate),
                       false};
    for (const int other : {b_dtype, c_dtype})
        if (other != dtype && dtype_of(other) != DType::kFloat32)
            throw py::value_error("product: expected b and c of a's dtype or of float32");
    if (args.wide_c && (args.residual != nullptr || args.pre != nullptr))
        throw py::value_error("product: expected neither residual nor pre beside a wide c");
    const bool gated = args.gate != Gate::kNone;
    if (gated && args.wide_c) throw py::value_error("product: expected no gate beside a wide c");
    const std::int64_t b_columns = gated ? 2 * columns : columns;
    check_shape(rows, b_columns);
    check_shape(b_columns, depth);
    check_threads(threads);
    check_given("a", args.a, rows);
    check_strides("a", {{rows, row_stride}, {depth, depth_stride}});
    if (args.panels == nullptr) {
        check_given("b", args.b, depth * b_columns);
        check_strides("b", {{depth, b_stride}, {b_columns, b_column_stride}});
    }
    if (args.residual != nullptr) check_rows("residual", args.residual, rows, columns, residual_stride);
    check_given("c", args.c, rows);
    run([&] { return cpu_linear_product(args, threads); });
}

void activation_bwd(int dtype, std::int64_t rows, std::int64_t columns, Address dy, Address pre,
                    int activation, Address g, Address dbias, int threads, int gate) {
    check_shape(rows, columns);
    const ActivationBwd args{dtype_of(dtype), rows,
                             columns,         pointer(dy),
                             pointer(pre),    activation_of(activation),
                             pointer(g),      pointer<float>(dbias),
                             gate_of(gate)};
    const bool gated = args.gate != Gate::kNone;
    if (gated) check_shape(rows, 2 * columns);
    check_threads(threads);
    check_given("dy", args.dy, rows);
    check_given("pre", args.pre, args.activation == Activation::kNone && !gated ? 0 : rows);
    check_given("g", args.g, gated ? rows : 0);
    run([&] { return cpu_linear_activation_bwd(args, threads); });
}

// The sum of more products of bytes may overflow 32 bits: MOST_INPUTS of fastbert/ops/linear_int8.py.
void check_depth(std::int64_t depth) {
    if (depth > 65536) refuse("depth", "at most 65536 with 8 bits", depth);
}

void make_panels_int8(std::int64_t depth, std::int64_t columns, Address weight, Address panels, int threads,
                      bool gated) {
    check_shape(columns, depth);
    check_depth(depth);
    check_halves(columns, gated);
    const ToPanelsInt8 args{depth, columns, pointer<const std::int8_t>(weight), pointer<std::uint8_t>(panels),
                            gated};
    check_threads(threads);
    check_given("weight", args.weight, 1);
    check_given("panels", args.panels, int8_panels_size(depth, columns, gated));
    run([&] { return cpu_linear_int8_panels(args, threads); });
}

void product_int8(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address x,
                  std::int64_t x_stride, Address panels, Address scale, Address bias, int bias_dtype,
                  int activation, Address y, int threads, int gate, Address smooth, Address range,
                  bool float_rows) {
    check_shape(rows, depth);
    check_shape(rows, columns);
    const ProductInt8 args{dtype_of(dtype),
                           rows,
                           columns,
                           depth,
                           pointer(x),
                           x_stride,
                           pointer<const std::uint8_t>(panels),
                           pointer<const float>(scale),
                           param(bias, bias_dtype),
                           activation_of(activation),
                           pointer(y),
                           gate_of(gate),
                           Onto::kNone,
                           nullptr,
                           nullptr,
                           pointer<const float>(smooth),
                           pointer<const float>(range)};
    const bool gated = args.gate != Gate::kNone;
    const std::int64_t all_columns = gated ? 2 * columns : columns;
    check_shape(rows, all_columns);
    check_shape(all_columns, depth);
    check_depth(depth);
    check_threads(threads);
    check_rows("x", args.x, rows, depth, x_stride);
    check_given("panels", args.panels, int8_panels_size(depth, all_columns, gated));
    check_given("scale", args.scale, rows);
    check_given("y", args.y, rows);
    if (!float_rows) return run([&] { return cpu_linear_int8(args, threads); });
    if (args.smooth != nullptr || args.range != nullptr)
        throw py::value_error("smooth, range: expected 0 with rows in floating point");
    Product product{};
    product.dtype = args.dtype;
    product.rows = rows;
    product.columns = columns;
    product.depth = depth;
    product.a = args.x;
    product.row_stride = x_stride;
    product.depth_stride = 1;
    product.panels = args.panels;
    product.bias = args.bias;
    product.activation = args.activation;
    product.c = args.y;
    product.gate = args.gate;
    product.scale = args.scale;
    product.group = int8_group();
    run([&] { return cpu_linear_product(product, threads); });
}

#if FASTBERT_CUDA

Layout layout_of(int code) {
    if (code < 0 || code > 2)
        throw py::value_error("layout: expected 0, 1 or 2, got " + std::to_string(code));
    return static_cast<Layout>(code);
}

// Checks the sizes of a product and its operands; returns the columns of b.
std::int64_t check_gated(std::int64_t rows, std::int64_t columns, std::int64_t depth, int gate) {
    check_shape(rows, columns);
    const std::int64_t b_columns = gate_of(gate) == Gate::kNone ? columns : 2 * columns;
    check_shape(rows, b_columns);
    check_shape(rows, depth);
    check_shape(b_columns, depth);
    return b_columns;
}

std::pair<int, int> cuda_plan(int layout, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                              int multiprocessors) {
    check_shape(rows, columns);
    check_shape(rows, depth);
    if (multiprocessors < 1) refuse("multiprocessors", ">= 1", multiprocessors);
    const LinearPlan plan = cuda_linear_plan(layout_of(layout), rows, columns, depth, multiprocessors);
    return {plan.tile_rows, plan.parts};
}

std::int64_t cuda_partial(std::int64_t rows, std::int64_t columns, int parts, int activation, bool exact,
                          int gate) {
    check_shape(rows, columns);
    if (parts < 1) refuse("parts", ">= 1", parts);
    elements_of("parts", {2, parts, rows, columns});
    return cuda_linear_partial(rows, columns, parts, activation_of(activation), exact, gate_of(gate));
}

// What every product reads, checked.
LinearProduct product_of(int dtype, Layout layout, std::int64_t rows, std::int64_t columns,
                         std::int64_t depth, Address a, std::int64_t a_stride, Address b,
                         std::int64_t b_stride, int activation, bool exact, Address c, int gate) {
    const std::int64_t b_columns = check_gated(rows, columns, depth, gate);
    LinearProduct args = {};
    args.dtype = dtype_of(dtype);
    args.layout = layout;
    args.rows = rows, args.columns = columns, args.depth = depth;
    args.a = pointer(a), args.a_stride = a_stride;
    args.b = pointer(b), args.b_stride = b_stride;
    args.activation = activation_of(activation), args.exact = exact;
    args.c = pointer(c);
    args.gate = gate_of(gate);
    const bool turned_a = layout == Layout::kWeights, turned_b = layout != Layout::kForward;
    check_rows("a", args.a, turned_a ? depth : rows, turned_a ? rows : depth, a_stride);
    check_rows("b", args.b, turned_b ? depth : b_columns, turned_b ? b_columns : depth, b_stride);
    check_given("c", args.c, rows);
    return args;
}

void cuda_product(int dtype, int layout, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                  Address a, std::int64_t a_stride, Address b, std::int64_t b_stride, Address bias,
                  int activation, bool exact, Address residual, std::int64_t residual_stride,
                  Address slope_at, Address c, Address pre, Address sums, Address partial, int tile_rows,
                  int parts, int gate, int device, std::uintptr_t stream) {
    LinearProduct args = product_of(dtype, layout_of(layout), rows, columns, depth, a, a_stride, b, b_stride,
                                    activation, exact, c, gate);
    args.bias = pointer(bias);
    args.residual = pointer(residual), args.residual_stride = residual_stride;
    args.slope_at = pointer(slope_at), args.pre = pointer(pre);
    args.sums = pointer<float>(sums), args.partial = pointer<float>(partial);
    args.tile_rows = tile_rows, args.parts = parts;
    if (args.residual != nullptr) check_rows("residual", args.residual, rows, columns, residual_stride);
    run([&] { return cuda_linear_product(args, device, stream); });
}

// By `kProduct`, one of the kernels for compute capability 9.0; `blocks` is its second argument.
template <auto kProduct>
bool cuda_hopper_product(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address a,
                         std::int64_t a_stride, Address b, std::int64_t b_stride, Address bias,
                         int activation, bool exact, Address c, Address pre, int blocks, int gate, int device,
                         std::uintptr_t stream) {
    LinearProduct args = product_of(dtype, Layout::kForward, rows, columns, depth, a, a_stride, b, b_stride,
                                    activation, exact, c, gate);
    args.bias = pointer(bias), args.pre = pointer(pre);
    bool refused = false;
    run([&] { return kProduct(args, blocks, device, stream, refused); });
    return !refused;
}

// The same kernel's product with an activation's derivative
bool cuda_slope_product(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address a,
                        std::int64_t a_stride, Address b, std::int64_t b_stride, int activation, bool exact,
                        Address slope_at, Address c, Address sums, int blocks, int device,
                        std::uintptr_t stream) {
    LinearProduct args = product_of(dtype, Layout::kInputs, rows, columns, depth, a, a_stride, b, b_stride,
                                    activation, exact, c, 0);
    args.slope_at = pointer(slope_at), args.sums = pointer<float>(sums);
    check_given("slope_at", args.slope_at, rows);
    bool refused = false;
    run([&] { return cuda_linear_hopper_product(args, blocks, device, stream, refused); });
    return !refused;
}

void cuda_gradient(int dtype, std::int64_t rows, std::int64_t columns, Address dy, Address pre,
                   int activation, bool exact, Address g, Address sums, std::int64_t parts, int gate,
                   int device, std::uintptr_t stream) {
    check_gated(rows, columns, 1, gate);
    const LinearGradient args{
        dtype_of(dtype),           rows,  columns,    pointer(dy),          pointer(pre), nullptr,      0,
        activation_of(activation), exact, pointer(g), pointer<float>(sums), parts,        gate_of(gate)};
    check_given("dy", args.dy, rows);
    check_given("pre", args.pre, args.activation == Activation::kNone ? 0 : rows);
    run([&] { return cuda_linear_gradient(args, device, stream); });
}

void cuda_add_sums(int dtype, Address sums, std::int64_t parts, std::int64_t columns, Address out, int device,
                   std::uintptr_t stream) {
    check_shape(parts, columns);
    check_given("sums", pointer(sums), parts);
    check_given("out", pointer(out), 1);
    const DType type = dtype_of(dtype);
    run([&] {
        return cuda_linear_add_sums(type, pointer<const float>(sums), parts, columns, pointer(out), device,
                                    stream);
    });
}

#endif

}  // namespace

void bind_linear(py::module_& m) {
    m.def(
        "cpu_linear_panels_size",
        [](std::int64_t depth, std::int64_t columns, bool gated) {
            check_shape(columns, depth);
            check_halves(columns, gated);
            return panels_size(depth, columns, gated);
        },
        "Elements of the panels of a (depth x columns) matrix", py::arg("depth"), py::arg("columns"),
        py::arg("gated") = false);
    m.def("cpu_linear_panels", &make_panels);
    m.def("cpu_linear_product", &product);
    m.def("cpu_linear_activation_bwd", &activation_bwd);
    m.def(
        "cpu_linear_int8_panels_size",
        [](std::int64_t depth, std::int64_t columns, bool gated) {
            check_shape(columns, depth);
            check_halves(columns, gated);
            return int8_panels_size(depth, columns, gated);
        },
        "Bytes, for the instruction set in use", py::arg("depth"), py::arg("columns"),
        py::arg("gated") = false);
    m.def("cpu_linear_int8_panels", &make_panels_int8);
    m.def("cpu_linear_int8", &product_int8);
#if FASTBERT_CUDA
    m.def("cuda_linear_plan", &cuda_plan, "(rows of a tile, parts of the depth); see csrc/cuda/linear.h");
    m.def("cuda_linear_partial", &cuda_partial, "Floats of scratch");
    m.def("cuda_linear_sums", &cuda_linear_sums, "Rows of the column sums of a product of so many rows");
    m.def("cuda_linear_product", &cuda_product);
    m.def("cuda_linear_hopper", &cuda_linear_hopper,
          "Whether a device has compute capability 9.0 and the library code for it");
    m.def("cuda_linear_takes_hopper", [](std::int64_t rows, std::int64_t columns, std::int64_t depth,
                                         int activation, bool exact, int gate) {
        return cuda_linear_takes_hopper(rows, columns, depth, activation_of(activation), exact,
                                        gate_of(gate));
    });
    constexpr const char* kRan = "Whether it ran: the driver may refuse a tensor map";
    m.def("cuda_linear_hopper_product", &cuda_hopper_product<cuda_linear_hopper_product>, kRan);
    m.def("cuda_linear_slope_product", &cuda_slope_product, kRan);
    m.def("cuda_linear_cluster_product", &cuda_hopper_product<cuda_linear_cluster_product>, kRan);
    m.def("cuda_linear_gradient", &cuda_gradient);
    m.def("cuda_linear_add_sums", &cuda_add_sums);
#endif
}

}  // namespace fastbert
