#include "encoder_layer.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "layer_norm.h"
#include "linear_int8.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

namespace {

// Rows that pay for a thread of their own: it goes through their products and norms alone, so that what it
// wrote lies in its own cache, and nobody waits. With fewer the threads share every product instead, because
// each of them would have to read all weights; the more threads do so, the more rows it takes (two were
// measured: they gain from 24 rows each on).
constexpr std::int64_t kOwnRows = 12;  // times the number of threads
constexpr std::int64_t kTile = 6;      // rows of a register tile: a part is a whole number of them

struct Rows {
    std::int64_t begin, count;
};

// c = act(a w + bias) for some rows; `with_bias` false leaves the bias to the norm that follows.
const char* multiply(const EncoderLayer& layer, Rows rows, const LayerLinear& w, const void* a,
                     std::int64_t a_stride, std::int64_t columns, std::int64_t depth, bool with_bias,
                     Activation activation, void* c, int threads) {
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const void* const from = static_cast<const char*>(a) + rows.begin * a_stride * size;
    void* const to = static_cast<char*>(c) + rows.begin * columns * size;
    const Param bias = with_bias ? w.bias : Param{nullptr, DType::kFloat32};
    if (w.scale != nullptr) {
        const ProductInt8 args{layer.dtype,
                               rows.count,
                               columns,
                               depth,
                               from,
                               a_stride,
                               static_cast<const std::uint8_t*>(w.packed),
                               w.scale,
                               bias,
                               activation,
                               to};
        return cpu_linear_int8(args, threads);
    }
    Product args{};
    args.dtype = layer.dtype;
    args.rows = rows.count;
    args.columns = columns;
    args.depth = depth;
    args.a = from;
    args.row_stride = a_stride;
    args.depth_stride = 1;
    args.packed = w.packed;
    args.bias = bias;
    args.activation = activation;
    args.c = to;
    return cpu_linear_product(args, threads);
}

// y = norm(residual + x + bias) for some rows
const char* add_norm(const EncoderLayer& layer, Rows rows, const LayerNormParams& norm, std::int64_t hidden,
                     const void* x, Param bias, const void* residual, std::int64_t residual_stride, void* y,
                     int threads) {
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    LayerNormFwd args{};
    args.dtype = layer.dtype;
    args.rows = rows.count;
    args.hidden = hidden;
    args.x = static_cast<const char*>(x) + rows.begin * hidden * size;
    args.x_stride = hidden;
    args.residual = static_cast<const char*>(residual) + rows.begin * residual_stride * size;
    args.residual_stride = residual_stride;
    args.weight = norm.weight;
    args.bias = norm.bias;
    args.x_bias = bias;
    args.eps = norm.eps;
    args.y = static_cast<char*>(y) + rows.begin * hidden * size;
    return cpu_layer_norm_fwd(args, threads);
}

// f(rows, threads) for all rows: in as many parts as there are threads, or at once by all of them. Returns
// what one of them returned, if not null.
template <class F>
const char* by_rows(std::int64_t total, int threads, const F& f) {
    if (threads < 2 || total < threads * threads * kOwnRows) return f(Rows{0, total}, threads);
    std::atomic<const char*> failed{nullptr};
    parallel_for(threads, threads, [&](std::int64_t part, int) {
        const auto border = [&](std::int64_t i) {
            return i == threads ? total : total * i / threads / kTile * kTile;
        };
        const Rows rows{border(part), border(part + 1) - border(part)};
        if (const char* const why = f(rows, 1)) failed.store(why, std::memory_order_relaxed);
    });
    return failed.load(std::memory_order_relaxed);
}

}  // namespace

const char* cpu_encoder_layer_fwd(const EncoderLayer& layer, int threads) {
    if (layer.total == 0) return nullptr;
    if (threads < 1) return "threads: expected >= 1";
    const std::int64_t hidden = layer.nheads * layer.headdim, size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t plane = (layer.total * hidden * size + 63) / 64 * 64;
    const std::int64_t wide = (layer.total * layer.inner * size + 63) / 64 * 64;
    // context, q, k, v; after attention q's place serves the two sums that go into a norm, k's the first
    // norm's result, and from v's on there is room for the feed-forward's inner rows. None of them lies over
    // the context, of which another thread may not have read its rows yet.
    const std::int64_t bytes = 3 * plane + std::max(plane, wide);
    const Workspace workspace((bytes + 3) / 4);
    if (workspace.data() == nullptr) return kOutOfMemory;
    char* const context = reinterpret_cast<char*>(workspace.data());
    char* const base = context + plane;
    void* const sum = base;
    void* const attended = base + plane;
    void* const inner = base + 2 * plane;

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
    const bool joined = layer.query.scale != nullptr;  // rows [q, k, v], over the three places
    const LayerLinear* const weights[] = {&layer.query, &layer.key, &layer.value};
    Heads* const heads[] = {&attention.q, &attention.k, &attention.v};
    for (int i = 0; i < 3; ++i)
        *heads[i] = joined ? Heads{base + i * hidden * size, 3 * hidden, layer.headdim}
                           : Heads{base + i * plane, hidden, layer.headdim};
    const char* failed = by_rows(layer.total, threads, [&](Rows rows, int team) {
        if (joined)
            return multiply(layer, rows, layer.query, layer.x, layer.x_stride, 3 * hidden, hidden, true,
                            Activation::kNone, base, team);
        const char* why = nullptr;
        for (int i = 0; i < 3 && why == nullptr; ++i)
            why = multiply(layer, rows, *weights[i], layer.x, layer.x_stride, hidden, hidden, true,
                           Activation::kNone, base + i * plane, team);
        return why;
    });
    if (failed == nullptr) failed = cpu_attention_fwd(attention, threads);
    if (failed != nullptr) return failed;
    const std::int64_t end = layer.cu_seqlens[layer.batch];
    std::memset(context + end * hidden * size, 0, (layer.total - end) * hidden * size);

    return by_rows(layer.total, threads, [&](Rows rows, int team) {
        const char* why = multiply(layer, rows, layer.attention_output, context, hidden, hidden, hidden,
                                   false, Activation::kNone, sum, team);
        if (why == nullptr)
            why = add_norm(layer, rows, layer.attention_norm, hidden, sum, layer.attention_output.bias,
                           layer.x, layer.x_stride, attended, team);
        if (why == nullptr)
            why = multiply(layer, rows, layer.intermediate, attended, hidden, layer.inner, hidden, true,
                           layer.activation, inner, team);
        if (why == nullptr)
            why = multiply(layer, rows, layer.output, inner, layer.inner, hidden, layer.inner, false,
                           Activation::kNone, sum, team);
        if (why == nullptr)
            why = add_norm(layer, rows, layer.output_norm, hidden, sum, layer.output.bias, attended, hidden,
                           layer.y, team);
        return why;
    });
}

}  // namespace fastbert
