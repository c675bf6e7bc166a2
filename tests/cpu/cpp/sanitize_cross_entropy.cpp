// Runs the cross-entropy kernels on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Numbers of threads are compared bit for bit. Prints the number of calls.
#include "cpu/cross_entropy.h"
#include "cpu/isa.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

int check(std::int64_t rows, std::int64_t classes, DType dtype, double smoothing, std::int64_t gap) {
    const std::int64_t stride = classes + gap;
    const Buffer logits = random_buffer(rows == 0 ? 0 : (rows - 1) * stride + classes, dtype);
    const Buffer labels = random_ids(rows, classes), dloss = random_buffer(1, DType::kFloat32);
    for (std::int64_t row = 1; row < rows; row += 3) labels.data<std::int64_t>()[row] = -100;
    int calls = 0;
    for (const char* isa : {"avx2", "avx512"}) {
        if (!set_isa(isa)) continue;
        std::vector<Buffer> first;
        for (const int threads : {1, 3}) {
            std::vector<Buffer> out;
            for (const std::int64_t size :
                 {std::int64_t{4}, std::int64_t{8}, 8 * rows, rows * classes * item_size(dtype)})
                out.emplace_back(size);
            const CrossEntropy common{
                dtype, rows, classes, logits.data(), stride, labels.data<std::int64_t>(), -100, smoothing};
            require_none(cpu_cross_entropy_fwd(
                {common, out[0].data<float>(), out[2].data<float>(), out[1].data<std::int64_t>()}, threads));
            require_none(cpu_cross_entropy_bwd({common, dloss.data<float>(), out[2].data<float>(),
                                                out[1].data<std::int64_t>(), out[3].data()},
                                               threads));
            calls += 2;
            if (first.empty())
                first = std::move(out);
            else
                require(first == out, "1 and 3 threads agree");
        }
    }
    return calls;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    for (const std::int64_t classes : {1, 2, 7, 8, 17, 31, 64, 100, 4099})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const std::int64_t rows : {0, 1, 5})
                for (const double smoothing : {0.0, 0.1})
                    calls += check(rows, classes, dtype, smoothing, smoothing > 0 ? 3 : 0);
    calls += check(40000, 3, DType::kBFloat16, 0.1, 1);
    calls += check(300, 30522, DType::kFloat32, 0.0, 0);  // dlogits asked for in batches
    std::printf("%d calls\n", calls);
    return 0;
}
