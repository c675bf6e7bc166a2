#include "encoder_layer.h"

#include <algorithm>
#include <cstring>

#include "layer_norm.h"
#include "linear_int8.h"
#include "workspace.h"

namespace fastbert {

namespace {

// c = act(a w + bias); `with_bias` false leaves the bias to the norm that follows.
const char* multiply(const EncoderLayer& layer, const LayerLinear& w, const void* a, std::int64_t a_stride,
                     std::int64_t columns, std::int64_t depth, bool with_bias, Activation activation, void* c,
                     int threads) {
    const Param bias = with_bias ? w.bias : Param{nullptr, DType::kFloat32};
    if (w.scale != nullptr) {
        const ProductInt8 args{layer.dtype,
                               layer.total,
                               columns,
                               depth,
                               a,
                               a_stride,
                               static_cast<const std::uint8_t*>(w.packed),
                               w.scale,
                               bias,
                               activation,
                               c};
        return cpu_linear_int8(args, threads);
    }
    Product args{};
    args.dtype = layer.dtype;
    args.rows = layer.total;
    args.columns = columns;
    args.depth = depth;
    args.a = a;
    args.row_stride = a_stride;
    args.depth_stride = 1;
    args.packed = w.packed;
    args.bias = bias;
    args.activation = activation;
    args.c = c;
    return cpu_linear_product(args, threads);
}

// y = norm(residual + x + bias)
const char* add_norm(const EncoderLayer& layer, const LayerNormParams& norm, std::int64_t hidden,
                     const void* x, Param bias, const void* residual, std::int64_t residual_stride, void* y,
                     int threads) {
    LayerNormFwd args{};
    args.dtype = layer.dtype;
    args.rows = layer.total;
    args.hidden = hidden;
    args.x = x;
    args.x_stride = hidden;
    args.residual = residual;
    args.residual_stride = residual_stride;
    args.weight = norm.weight;
    args.bias = norm.bias;
    args.x_bias = bias;
    args.eps = norm.eps;
    args.y = y;
    return cpu_layer_norm_fwd(args, threads);
}

}  // namespace

const char* cpu_encoder_layer_fwd(const EncoderLayer& layer, int threads) {
    if (layer.total == 0) return nullptr;
    const std::int64_t hidden = layer.nheads * layer.headdim, size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t plane = (layer.total * hidden * size + 63) / 64 * 64;
    const std::int64_t wide = (layer.total * layer.inner * size + 63) / 64 * 64;
    // q, k, v, context; q's place serves the two sums that go into a norm, k's the first norm's result, and
    // from v's on there is room for the feed-forward's inner rows.
    const std::int64_t bytes = 2 * plane + std::max(2 * plane, wide);
    const Workspace workspace((bytes + 3) / 4 + layer.nheads * layer.total);
    if (workspace.data() == nullptr) return kOutOfMemory;
    char* const base = reinterpret_cast<char*>(workspace.data());
    void* const sum = base;
    void* const attended = base + plane;
    void* const inner = base + 2 * plane;
    char* const context = base + 3 * plane;

    AttentionFwd attention{};
    attention.dtype = layer.dtype;
    attention.batch = layer.batch;
    attention.nheads = layer.nheads;
    attention.headdim = layer.headdim;
    attention.total = layer.total;
    attention.max_seqlen = layer.max_seqlen;
    attention.cu_seqlens = layer.cu_seqlens;
    attention.softmax_scale = layer.softmax_scale;
    attention.bias = layer.bias;
    attention.gate = layer.gate;
    attention.out = context;
    attention.lse = workspace.data() + (bytes + 3) / 4;
    const char* failed = nullptr;
    if (layer.query.scale != nullptr) {  // rows [q, k, v], over the three places
        const std::int64_t stride = 3 * hidden;
        failed = multiply(layer, layer.query, layer.x, layer.x_stride, stride, hidden, true,
                          Activation::kNone, base, threads);
        attention.q = {base, stride, layer.headdim};
        attention.k = {base + hidden * size, stride, layer.headdim};
        attention.v = {base + 2 * hidden * size, stride, layer.headdim};
    } else {
        const LayerLinear* const weights[] = {&layer.query, &layer.key, &layer.value};
        Heads* const heads[] = {&attention.q, &attention.k, &attention.v};
        for (int i = 0; i < 3 && failed == nullptr; ++i) {
            *heads[i] = {base + i * plane, hidden, layer.headdim};
            failed = multiply(layer, *weights[i], layer.x, layer.x_stride, hidden, hidden, true,
                              Activation::kNone, base + i * plane, threads);
        }
    }
    if (failed == nullptr) failed = cpu_attention_fwd(attention, threads);
    if (failed != nullptr) return failed;
    const std::int64_t end = layer.cu_seqlens[layer.batch];
    std::memset(context + end * hidden * size, 0, (layer.total - end) * hidden * size);

    failed = multiply(layer, layer.attention_output, context, hidden, hidden, hidden, false,
                      Activation::kNone, sum, threads);
    if (failed == nullptr)
        failed = add_norm(layer, layer.attention_norm, hidden, sum, layer.attention_output.bias, layer.x,
                          layer.x_stride, attended, threads);
    if (failed == nullptr)
        failed = multiply(layer, layer.intermediate, attended, hidden, layer.inner, hidden, true,
                          layer.activation, inner, threads);
    if (failed == nullptr)
        failed = multiply(layer, layer.output, inner, layer.inner, hidden, layer.inner, false,
                          Activation::kNone, sum, threads);
    if (failed == nullptr)
        failed = add_norm(layer, layer.output_norm, hidden, sum, layer.output.bias, attended, hidden, layer.y,
                          threads);
    return failed;
}

}  // namespace fastbert
