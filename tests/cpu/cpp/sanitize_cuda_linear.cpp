// Runs the CUDA linear, emulated, on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined: an access past an end, an overflow or a misaligned access ends it. Prints the
// number of calls.
#include "cuda/common.cuh"
#include "cuda/linear.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

struct Shape {
    std::int64_t rows, columns, depth;
};

// Twice, with different orders of warps and copies; the results must be equal to the bit.
template <class Call>
void twice(std::vector<Buffer*> outputs, Call call) {
    require_none(call());
    std::vector<std::vector<char>> first;
    for (const Buffer* buffer : outputs)
        first.emplace_back(buffer->bytes.get(), buffer->bytes.get() + buffer->size);
    require_none(call());
    for (std::size_t i = 0; i < outputs.size(); ++i)
        for (std::size_t j = 0; j < first[i].size(); ++j)
            require(first[i][j] == outputs[i]->bytes[j], "two calls are equal");
}

int product(const Shape& s, DType dtype, Layout layout, int tile_rows, int parts, Activation activation,
            bool options) {
    const std::int64_t gap = options ? 8 : 0;
    const bool turned_a = layout == Layout::kWeights, turned_b = layout != Layout::kForward;
    const std::int64_t a_lines = turned_a ? s.depth : s.rows, a_width = turned_a ? s.rows : s.depth;
    const std::int64_t b_lines = turned_b ? s.depth : s.columns, b_width = turned_b ? s.columns : s.depth;
    const auto span = [&](std::int64_t lines, std::int64_t width) {
        return (lines - 1) * (width + gap) + width;
    };
    const Buffer a = random_buffer(span(a_lines, a_width), dtype),
                 b = random_buffer(span(b_lines, b_width), dtype);
    const bool forward = layout == Layout::kForward;
    const bool slope = layout == Layout::kInputs && activation != Activation::kNone;
    const Buffer bias = random_buffer(forward && options ? s.columns : 0, dtype);
    const Buffer residual = random_buffer(forward && options ? span(s.rows, s.columns) : 0, dtype);
    const Buffer slope_at = random_buffer(slope ? s.rows * s.columns : 0, dtype);
    Buffer c(s.rows * s.columns * 2);
    Buffer pre(forward && activation != Activation::kNone ? s.rows * s.columns * 2 : 0);
    Buffer sums(slope ? cuda_linear_sums(s.rows) * s.columns * 4 : 0);
    Buffer partial(cuda_linear_partial(s.rows, s.columns, parts, activation, false) * 4);
    const LinearProduct args{dtype,
                             layout,
                             s.rows,
                             s.columns,
                             s.depth,
                             a.data(),
                             b.data(),
                             a_width + gap,
                             b_width + gap,
                             bias.data(),
                             activation,
                             false,
                             residual.data(),
                             s.columns + gap,
                             slope_at.data(),
                             c.data(),
                             pre.data(),
                             sums.data<float>(),
                             partial.data<float>(),
                             tile_rows,
                             parts};
    twice({&c, &pre, &sums}, [&] { return cuda_linear_product(args, 0, 0); });
    return 2;
}

int gradient(std::int64_t rows, std::int64_t columns, DType dtype, Activation activation) {
    const bool active = activation != Activation::kNone;
    const Buffer dy = random_buffer(rows * columns, dtype),
                 pre = random_buffer(active ? rows * columns : 0, dtype);
    Buffer g(active ? rows * columns * 2 : 0), dbias(columns * 2);
    const std::int64_t parts = rows < 3 ? rows : 3;
    Buffer sums(parts * columns * 4);
    const LinearGradient args{dtype, rows,       columns, dy.data(), pre.data(),         nullptr,
                              0,     activation, true,    g.data(),  sums.data<float>(), parts};
    twice({&g, &sums}, [&] { return cuda_linear_gradient(args, 0, 0); });
    twice({&dbias}, [&] {
        return cuda_linear_add_sums(dtype, sums.data<float>(), parts, columns, dbias.data(), 0, 0);
    });
    return 4;
}

}  // namespace

int main() {
    int calls = 0;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
        for (const bool options : {false, true})
            for (const Activation activation : {Activation::kNone, Activation::kGelu, Activation::kTanh}) {
                for (const int tile : {16, 32, 64, 128}) {
                    calls +=
                        product({tile + 1, 131, 72}, dtype, Layout::kForward, tile, 1, activation, options);
                    calls += product({5, 16, 136}, dtype, Layout::kForward, tile, 2, activation, options);
                }
                for (const int tile : {64, 128}) {
                    calls +=
                        product({tile + 1, 136, 72}, dtype, Layout::kInputs, tile, 1, activation, options);
                    calls += product({5, 16, 136}, dtype, Layout::kInputs, tile, 2, activation, options);
                }
                calls += gradient(19, 264, dtype, activation);
                calls += gradient(1, 8, dtype, activation);
            }
    for (const int parts : {1, 2})
        calls +=
            product({136, 24, 37}, DType::kBFloat16, Layout::kWeights, 128, parts, Activation::kNone, true);
    std::printf("%d calls\n", calls);
    return 0;
}
