// Runs the fused encoder layer on heap buffers of exactly the needed size, to be built with
// -fsanitize=address,undefined (or thread): an access past an end, an overflow or a misaligned access ends
// it. Every output is compared with that of one thread. Prints the number of calls.
#include <vector>

#include "cpu/encoder_layer.h"
#include "cpu/isa.h"
#include "cpu/linear_int8.h"
#include "sanitize.h"

using namespace fastbert;

namespace {

struct Linear {
    Buffer panels, scale, bias;
    LayerLinear view;

    Linear(DType dtype, bool int8, std::int64_t depth, std::int64_t columns)
        : panels(int8 ? int8_panels_size(depth, columns) : panels_size(depth, columns) * item_size(dtype)),
          scale(int8 ? columns * 4 : 0),
          bias(random_buffer(columns, dtype)) {
        if (int8) {
            const Buffer weight = random_buffer((depth * columns + 3) / 4, DType::kFloat32);
            require_none(cpu_linear_int8_panels(
                {depth, columns, weight.data<const std::int8_t>(), panels.data<std::uint8_t>()}, 1));
            for (std::int64_t i = 0; i < columns; ++i) scale.data<float>()[i] = 1e-3f;
        } else {
            const Buffer weight = random_buffer(depth * columns, dtype);
            require_none(
                cpu_linear_panels({dtype, depth, columns, weight.data(), 1, depth, panels.data()}, 1));
        }
        view = {panels.data(), scale.data<float>(), {bias.data(), dtype}};
    }
};

int run_one(DType dtype, bool int8, const std::vector<std::int32_t>& ends, std::int64_t capacity,
            std::int64_t nheads, std::int64_t headdim, std::int64_t inner, bool everything) {
    // attention is narrower than the rows, or wider
    const std::int64_t width = nheads * headdim, hidden = everything ? width + 11 : width - 3;
    const std::int64_t total = ends.back() + capacity, x_stride = hidden + 3;
    const std::int64_t batch = static_cast<std::int64_t>(ends.size()) - 1;
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < batch; ++b) longest = std::max<std::int64_t>(longest, ends[b + 1] - ends[b]);
    const Buffer x = random_buffer((total - 1) * x_stride + hidden, dtype);
    const Buffer norms = random_buffer(4 * hidden, dtype), gate = random_buffer(nheads, DType::kFloat32);
    const Buffer bias = random_buffer(batch * nheads * longest * longest, DType::kFloat32);
    const Linear query(dtype, int8, hidden, int8 ? 3 * width : width), key(dtype, false, hidden, width),
        value(dtype, false, hidden, width), output(dtype, int8, width, hidden),
        intermediate(dtype, int8, hidden, inner), last(dtype, int8, inner, hidden);
    const auto norm = [&](std::int64_t i) {
        return Param{static_cast<const char*>(norms.data()) + i * hidden * item_size(dtype), dtype};
    };
    EncoderLayer args{};
    args.dtype = dtype;
    args.batch = batch;
    args.nheads = nheads;
    args.headdim = headdim;
    args.total = total;
    args.max_seqlen = longest;
    args.inner = inner;
    args.hidden = hidden;
    args.cu_seqlens = ends.data();
    args.x = x.data();
    args.x_stride = x_stride;
    args.query = query.view;
    args.key = key.view;
    args.value = value.view;
    args.attention_output = output.view;
    args.intermediate = intermediate.view;
    args.output = last.view;
    args.attention_norm = {norm(0), norm(1), 1e-5};
    args.output_norm = {norm(2), norm(3), 1e-5};
    args.activation = Activation::kGelu;
    args.softmax_scale = 0.2f;
    if (everything) {
        args.bias = {bias.data<const float>(), nheads * longest * longest, longest * longest, longest};
        args.gate = gate.data<const float>();
    }
    Buffer first(0);
    for (const int threads : {1, 2, 3}) {
        Buffer y(total * hidden * item_size(dtype));
        args.y = y.data();
        require_none(cpu_encoder_layer_fwd(args, threads));
        if (threads == 1)
            first = std::move(y);
        else
            require(y == first, "the number of threads shows");
    }
    return 3;
}

}  // namespace

int main() {
    use_team();
    int calls = 0;
    for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
        if (!set_isa(isa)) continue;
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
            for (const bool int8 : {false, true})
                for (const bool everything : {false, true})
                    for (const std::vector<std::int32_t>& ends :
                         {std::vector<std::int32_t>{0, 1}, {0, 5, 5, 22}, {0, 0, 131}, {0, 60, 60, 121}})
                        for (const std::int64_t capacity : {0, 3})
                            for (const std::int64_t inner : {1, 40, 200})
                                calls += run_one(dtype, int8, ends, capacity, 3, inner == 40 ? 7 : 16, inner,
                                                 everything);
    }
    std::printf("%d calls\n", calls);
}
