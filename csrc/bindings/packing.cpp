// The two directions of `packing` on the CPU.
#include "../cpu/packing.h"

#include "bindings.h"

namespace fastbert {
namespace {

Gather gather(Address x, std::int64_t stride, std::int64_t width, Address indices, std::int64_t total,
              std::int64_t rows) {
    const Gather out{pointer(x), stride, width, pointer<const std::int64_t>(indices), total};
    elements_of("rows * width", {rows, width});
    check_size("total", total);
    if (total > rows) refuse("indices", "at most " + std::to_string(rows) + " positions", total);
    check_given("indices", out.indices, total);
    check_rows("x", out.x, total, width, stride);
    const auto wrong = [&](std::int64_t t) {
        return out.indices[t] <= (t > 0 ? out.indices[t - 1] : -1) || out.indices[t] >= rows;
    };
    bool any = false;  // under torch.compile the op cannot look
    for (std::int64_t t = 0; t < total; ++t) any |= wrong(t);
    for (std::int64_t t = 0; any; ++t)
        if (wrong(t))
            throw py::value_error("indices: expected strictly increasing positions in [0, " +
                                  std::to_string(rows) + "), got " + std::to_string(out.indices[t]) + " at " +
                                  std::to_string(t));
    return out;
}

void packing_fwd(Address x, std::int64_t stride, std::int64_t width, Address indices, std::int64_t total,
                 std::int64_t rows, Address out, int threads) {
    const Gather args = gather(x, stride, width, indices, total, rows);
    check_threads(threads);
    check_strides("x", {{rows, stride}, {width, 1}});
    check_given("out", pointer(out), total * width);
    run([&] { return cpu_packing_fwd(args, pointer(out), threads); });
}

void packing_bwd(Address x, std::int64_t stride, std::int64_t width, Address indices, std::int64_t total,
                 std::int64_t rows, Address out, int threads) {
    const Gather args = gather(x, stride, width, indices, total, rows);
    check_threads(threads);
    check_given("out", pointer(out), rows * width);
    run([&] { return cpu_packing_bwd(args, rows, pointer(out), threads); });
}

}  // namespace

void bind_packing(py::module_& m) {
    m.def("cpu_packing_fwd", &packing_fwd);
    m.def("cpu_packing_bwd", &packing_bwd);
}

}  // namespace fastbert
