// linear and linear_int8 on the CPU.
#include "../cpu/linear.h"

#include "../cpu/linear_int8.h"
#include "bindings.h"

namespace fastbert {
namespace {

void make_panels(int dtype, std::int64_t depth, std::int64_t columns, Address b, std::int64_t depth_stride,
                 std::int64_t column_stride, Address panels, int threads) {
    check_shape(columns, depth);
    if (depth_stride != 1 && column_stride != 1) throw py::value_error("panels: expected one stride of 1");
    const ToPanels args{dtype_of(dtype), depth,         columns,        pointer(b),
                        depth_stride,    column_stride, pointer(panels)};
    check_threads(threads);
    check_given("b", args.b, depth * columns);
    check_given("panels", args.panels, depth * columns);
    check_strides("b", {{depth, depth_stride}, {columns, column_stride}});
    run([&] { return cpu_linear_panels(args, threads); });
}

void product(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address a,
             std::int64_t row_stride, std::int64_t depth_stride, Address panels, Address b,
             std::int64_t b_stride, Address bias, int bias_dtype, int activation, Address residual,
             std::int64_t residual_stride, Address c, Address pre, int threads) {
    check_shape(rows, depth);
    check_shape(rows, columns);
    if (row_stride != 1 && depth_stride != 1) throw py::value_error("product: expected one stride of 1");
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
                       param(bias, bias_dtype),
                       activation_of(activation),
                       pointer(residual),
                       residual_stride,
                       pointer(c),
                       pointer(pre)};
    check_shape(columns, depth);
    check_threads(threads);
    check_given("a", args.a, rows);
    check_strides("a", {{rows, row_stride}, {depth, depth_stride}});
    if (args.panels == nullptr) check_rows("b", args.b, depth, columns, b_stride);
    if (args.residual != nullptr) check_rows("residual", args.residual, rows, columns, residual_stride);
    check_given("c", args.c, rows);
    run([&] { return cpu_linear_product(args, threads); });
}

void activation_bwd(int dtype, std::int64_t rows, std::int64_t columns, Address dy, Address pre,
                    int activation, Address g, Address dbias, int threads) {
    check_shape(rows, columns);
    const ActivationBwd args{
        dtype_of(dtype),      rows, columns, pointer(dy), pointer(pre), activation_of(activation), pointer(g),
        pointer<float>(dbias)};
    check_threads(threads);
    check_given("dy", args.dy, rows);
    check_given("pre", args.pre, args.activation == Activation::kNone ? 0 : rows);
    run([&] { return cpu_linear_activation_bwd(args, threads); });
}

// The sum of more products of bytes may overflow 32 bits: MOST_INPUTS of fastbert/ops/linear_int8.py.
void check_depth(std::int64_t depth) {
    if (depth > 65536) refuse("depth", "at most 65536 with 8 bits", depth);
}

void make_panels_int8(std::int64_t depth, std::int64_t columns, Address weight, Address panels, int threads) {
    check_shape(columns, depth);
    check_depth(depth);
    const ToPanelsInt8 args{depth, columns, pointer<const std::int8_t>(weight),
                            pointer<std::uint8_t>(panels)};
    check_threads(threads);
    check_given("weight", args.weight, 1);
    check_given("panels", args.panels, int8_panels_size(depth, columns));
    run([&] { return cpu_linear_int8_panels(args, threads); });
}

void product_int8(int dtype, std::int64_t rows, std::int64_t columns, std::int64_t depth, Address x,
                  std::int64_t x_stride, Address panels, Address scale, Address bias, int bias_dtype,
                  int activation, Address y, int threads) {
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
                           pointer(y)};
    check_shape(columns, depth);
    check_depth(depth);
    check_threads(threads);
    check_rows("x", args.x, rows, depth, x_stride);
    check_given("panels", args.panels, int8_panels_size(depth, columns));
    check_given("scale", args.scale, rows);
    check_given("y", args.y, rows);
    run([&] { return cpu_linear_int8(args, threads); });
}

}  // namespace

void bind_linear(py::module_& m) {
    m.def(
        "cpu_linear_panels_size",
        [](std::int64_t depth, std::int64_t columns) {
            check_shape(columns, depth);
            return panels_size(depth, columns);
        },
        "Elements of the panels of a (depth x columns) matrix");
    m.def("cpu_linear_panels", &make_panels);
    m.def("cpu_linear_product", &product);
    m.def("cpu_linear_activation_bwd", &activation_bwd);
    m.def(
        "cpu_linear_int8_panels_size",
        [](std::int64_t depth, std::int64_t columns) {
            check_shape(columns, depth);
            return int8_panels_size(depth, columns);
        },
        "Bytes, for the instruction set in use");
    m.def("cpu_linear_int8_panels", &make_panels_int8);
    m.def("cpu_linear_int8", &product_int8);
}

}  // namespace fastbert
