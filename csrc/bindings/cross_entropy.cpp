// cross_entropy on the CPU.
#include "../cpu/cross_entropy.h"

#include "bindings.h"

namespace fastbert {
namespace {

CrossEntropy common(int dtype, std::int64_t rows, std::int64_t classes, Address logits, std::int64_t stride,
                    Address labels, std::int64_t ignore_index, double label_smoothing) {
    check_shape(rows, classes);
    const CrossEntropy out{dtype_of(dtype), rows,           classes,
                           pointer(logits), stride,         pointer<const std::int64_t>(labels),
                           ignore_index,    label_smoothing};
    check_rows("logits", out.logits, rows, classes, stride);
    check_given("labels", out.labels, rows);
    for (std::int64_t row = 0; row < rows; ++row) {  // under torch.compile the op cannot look
        const std::int64_t label = out.labels[row];
        if (label != ignore_index && (label < 0 || label >= classes))
            throw py::value_error("labels: label " + std::to_string(label) + " is out of range for " +
                                  std::to_string(classes) + " classes (ignore_index is " +
                                  std::to_string(ignore_index) + ")");
    }
    return out;
}

void cross_entropy_fwd(int dtype, std::int64_t rows, std::int64_t classes, Address logits,
                       std::int64_t stride, Address labels, std::int64_t ignore_index, double label_smoothing,
                       Address loss, Address lse, Address count, int threads) {
    const CrossEntropyFwd args{
        common(dtype, rows, classes, logits, stride, labels, ignore_index, label_smoothing),
        pointer<float>(loss), pointer<float>(lse), pointer<std::int64_t>(count)};
    check_threads(threads);
    check_given("loss", args.loss, 1);
    check_given("lse", args.lse, rows);
    check_given("count", args.count, 1);
    run([&] { return cpu_cross_entropy_fwd(args, threads); });
}

void cross_entropy_bwd(int dtype, std::int64_t rows, std::int64_t classes, Address logits,
                       std::int64_t stride, Address labels, std::int64_t ignore_index, double label_smoothing,
                       Address dloss, Address lse, Address count, Address dlogits, int threads) {
    const CrossEntropyBwd args{
        common(dtype, rows, classes, logits, stride, labels, ignore_index, label_smoothing),
        pointer<const float>(dloss), pointer<const float>(lse), pointer<const std::int64_t>(count),
        pointer(dlogits)};
    check_threads(threads);
    check_given("dloss", args.dloss, 1);
    check_given("lse", args.lse, rows);
    check_given("count", args.count, 1);
    check_given("dlogits", args.dlogits, rows);
    run([&] { return cpu_cross_entropy_bwd(args, threads); });
}

}  // namespace

void bind_cross_entropy(py::module_& m) {
    m.def("cpu_cross_entropy_fwd", &cross_entropy_fwd);
    m.def("cpu_cross_entropy_bwd", &cross_entropy_bwd);
}

}  // namespace fastbert
