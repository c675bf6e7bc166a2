// rotary on the CPU.
#include "../cpu/rotary.h"

#include "bindings.h"

namespace fastbert {
namespace {

void rotary(int dtype, std::int64_t rows, std::int64_t heads, std::int64_t headdim, Address x,
            std::int64_t row_stride, std::int64_t head_stride, Address cos, Address sin,
            std::int64_t max_positions, std::int64_t half, Address positions, bool wide, bool interleaved,
            bool back, Address y, int threads) {
    const Rotary args{dtype_of(dtype),
                      rows,
                      heads,
                      headdim,
                      pointer(x),
                      row_stride,
                      head_stride,
                      pointer<const float>(cos),
                      pointer<const float>(sin),
                      half,
                      pointer(positions),
                      wide,
                      interleaved,
                      back,
                      pointer(y),
                      heads * headdim};
    const std::int64_t elements = elements_of("rows * heads * headdim", {rows, heads, headdim});
    const std::int64_t pairs = elements_of("max_positions * half", {max_positions, half});
    if (half < 1 || half > headdim / 2)
        refuse("half", "1 to " + std::to_string(headdim / 2) + " pairs per head", half);
    check_threads(threads);
    check_given("x", args.x, elements);
    check_strides("x", {{rows, row_stride}, {heads, head_stride}, {headdim, 1}});
    check_given("cos", args.cos, pairs);
    check_given("sin", args.sin, pairs);
    check_given("positions", args.positions, rows);
    check_given("y", args.y, elements);
    for (std::int64_t t = 0; t < rows; ++t) check_position(position_of(args, t), max_positions);
    run([&] { return cpu_rotary(args, threads); });
}

}  // namespace

void bind_rotary(py::module_& m) { m.def("cpu_rotary", &rotary); }

}  // namespace fastbert
