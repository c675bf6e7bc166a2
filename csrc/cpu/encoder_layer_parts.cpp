#include "encoder_layer_parts.h"

#include <vector>

#include "layer_norm.h"
#include "rotary.h"
#include "workspace.h"

namespace fastbert {
namespace layer_parts {

const char* multiply(const EncoderLayer& layer, Rows rows, const LayerLinear& w, const void* a,
                     std::int64_t a_stride, std::int64_t columns, std::int64_t depth,
                     const Epilogue& epilogue, void* c, int threads) {
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const void* const from = static_cast<const char*>(a) + rows.begin * a_stride * size;
    void* const to = static_cast<char*>(c) + rows.begin * columns * size;
    const Param bias = epilogue.bias ? w.bias : Param{nullptr, DType::kFloat32};
    if (w.scale != nullptr && !w.float_rows) {
        const ProductInt8 args{layer.dtype,
                               rows.count,
                               columns,
                               depth,
                               from,
                               a_stride,
                               static_cast<const std::uint8_t*>(w.panels),
                               w.scale,
                               bias,
                               epilogue.activation,
                               to,
                               epilogue.gate,
                               epilogue.onto,
                               epilogue.no_norm.weight.data,
                               epilogue.no_norm.bias.data,
                               w.smooth,
                               w.range};
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
    args.panels = w.panels;
    args.bias = bias;
    args.activation = epilogue.activation;
    args.gate = epilogue.gate;
    args.residual = epilogue.onto == Onto::kNone ? nullptr : to;
    args.residual_stride = columns;
    args.multiplies = epilogue.onto == Onto::kMultiplies;
    args.norm_weight = epilogue.no_norm.weight.data;
    args.norm_bias = epilogue.no_norm.bias.data;
    args.scale = w.scale;
    args.group = int8_group();
    args.c = to;
    return cpu_linear_product(args, threads);
}

const char* add_norm(const EncoderLayer& layer, Rows rows, const LayerNormParams& norm, const Sum& sum,
                     void* z, void* y, int threads) {
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t hidden = layer.hidden, first = rows.begin * hidden * size;
    LayerNormFwd args{};
    args.dtype = layer.dtype;
    args.rows = rows.count;
    args.hidden = hidden;
    args.x = static_cast<const char*>(sum.x) + rows.begin * sum.x_stride * size;
    args.x_stride = sum.x_stride;
    if (sum.residual != nullptr)
        args.residual = static_cast<const char*>(sum.residual) + rows.begin * sum.residual_stride * size;
    args.residual_stride = sum.residual_stride;
    args.weight = norm.weight;
    args.bias = norm.bias;
    args.x_bias = sum.bias;
    args.eps = norm.eps;
    args.rms = layer.rms;
    args.y = static_cast<char*>(y) + first;
    args.z = z == nullptr ? nullptr : static_cast<char*>(z) + first;
    return cpu_layer_norm_fwd(args, threads);
}

const char* rotate(const EncoderLayer& layer, Rows rows, const Heads& heads, std::int64_t count,
                   int threads) {
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    Rotary args{};
    args.dtype = layer.dtype;
    args.rows = rows.count;
    args.heads = count;
    args.headdim = layer.headdim;
    args.y = const_cast<char*>(static_cast<const char*>(heads.data)) + rows.begin * heads.row_stride * size;
    args.x = args.y;
    args.row_stride = args.y_stride = heads.row_stride;
    args.head_stride = heads.head_stride;
    args.cos = layer.tables.cos;
    args.sin = layer.tables.sin;
    args.half = layer.tables.half;
    args.positions = layer.positions + rows.begin;
    args.wide = true;
    args.interleaved = layer.interleaved;
    return cpu_rotary(args, threads);
}

AttentionFwd attention_of(const EncoderLayer& layer) {
    AttentionFwd attention{};
    attention.dtype = layer.dtype;
    attention.batch = layer.batch;
    attention.nheads = layer.nheads;
    attention.kv_heads = layer.kv_heads;
    attention.headdim = layer.headdim;
    attention.total = layer.total;
    attention.max_seqlen = layer.max_seqlen;
    attention.cu_seqlens = layer.cu_seqlens;
    attention.softmax_scale = layer.softmax_scale;
    attention.bias = layer.bias;
    attention.gate = layer.gate;
    attention.window = layer.window;
    return attention;
}

namespace {

// Bytes of scores of distances that are made before attention reads them, unless one sequence has more: they
// shall stay in the cache (NOTES.md).
constexpr std::int64_t kScoreBytes = std::int64_t{1} << 21;

// Attention of the sequences [first, end), with the scores of distances made in `memory`.
const char* attend_by_distance(const EncoderLayer& layer, const AttentionFwd& all, std::int64_t first,
                               std::int64_t end, char* memory, int threads) {
    const std::int64_t begin = layer.cu_seqlens[first], rows = layer.cu_seqlens[end] - begin;
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    if (rows == 0) return nullptr;
    std::vector<std::int32_t> ends;
    for (std::int64_t b = first; b <= end; ++b)
        ends.push_back(static_cast<std::int32_t>(layer.cu_seqlens[b] - begin));
    AttentionFwd own = all;
    own.batch = end - first;
    own.total = rows;
    own.cu_seqlens = ends.data();
    for (Heads* heads : {&own.q, &own.k, &own.v})
        heads->data = static_cast<const char*>(heads->data) + begin * heads->row_stride * size;
    own.out = static_cast<char*>(all.out) + begin * all.nheads * all.headdim * size;
    if (own.bias.data != nullptr) own.bias.data += first * all.bias.batch_stride;
    Relative relative = layer.relative;
    const auto score = [&](const void* panels, const Heads& x, Heads& scores) -> const char* {
        if (panels == nullptr) return nullptr;
        const TableScores args{layer.dtype,
                               rows,
                               layer.nheads,
                               layer.headdim,
                               x,
                               panels,
                               layer.distances.rows,
                               layer.distances.first,
                               relative.ncolumns,
                               memory};
        const std::int64_t columns = table_columns(args);
        const std::int64_t skipped = (args.first - table_begin(args)) * score_size(layer.dtype);
        scores = {memory + skipped, columns, rows * columns};
        memory += rows * layer.nheads * columns * score_size(layer.dtype);
        return cpu_table_scores(args, threads);
    };
    const char* why = score(layer.distances.query, own.q, relative.query);
    if (why == nullptr) why = score(layer.distances.key, own.k, relative.key);
    return why == nullptr ? cpu_attention_fwd(own, threads, relative) : why;
}

}  // namespace

const char* attend(const EncoderLayer& layer, const AttentionFwd& args, int threads) {
    const auto& [query, key, rows, from] = layer.distances;
    if (query == nullptr && key == nullptr) return cpu_attention_fwd(args, threads, layer.relative);
    TableScores scores{};
    scores.first = from;
    scores.count = layer.relative.ncolumns;
    const std::int64_t terms = (query == nullptr ? 0 : 1) + (key == nullptr ? 0 : 1);
    const std::int64_t per_row = terms * layer.nheads * table_columns(scores) * score_size(layer.dtype);
    const std::int32_t* const ends = layer.cu_seqlens;
    std::vector<std::int64_t> firsts{0};
    std::int64_t most = 0;
    for (std::int64_t b = 1; b <= layer.batch; ++b) {
        const std::int64_t first = firsts.back();
        if (b < layer.batch && (ends[b + 1] - ends[first]) * per_row <= kScoreBytes) continue;
        most = std::max<std::int64_t>(most, ends[b] - ends[first]);
        firsts.push_back(b);
    }
    const Workspace memory(most * per_row / 4 + 16);
    if (memory.data() == nullptr) return kOutOfMemory;
    const char* why = nullptr;
    for (std::size_t i = 0; i + 1 < firsts.size() && why == nullptr; ++i)
        why = attend_by_distance(layer, args, firsts[i], firsts[i + 1],
                                 reinterpret_cast<char*>(memory.data()), threads);
    return why;
}

}  // namespace layer_parts
}  // namespace fastbert
