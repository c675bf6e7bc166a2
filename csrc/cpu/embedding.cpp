// Embedding + LayerNorm + dropout on the CPU: cuts the tokens into tasks, and the tables into owners.
//
// Backward writes dz of every token once, in float. Then a stable counting sort puts the tokens in the order
// of their ids. Each row of a table belongs to one task, which adds up the row's tokens in their order: no
// atomics, and bit-equal for any number of threads.
#include "embedding.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "layer_norm.h"
#include "pages.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

FASTBERT_KERNELS(EmbeddingKernels, embedding_kernels)

namespace {

// Columns per task if a table has too few rows to share out.
constexpr std::int64_t kColumns = 64;

std::int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Makes order[starts[v] … starts[v + 1]) the tokens of row v, in their order.
void sort_by_id(const TableGrad& table, std::int64_t tokens, std::int64_t* starts, std::int64_t* order) {
    std::fill(starts, starts + table.rows + 1, 0);
    for (std::int64_t t = 0; t < tokens; ++t) ++starts[table.ids[t]];
    std::int64_t end = 0;
    for (std::int64_t v = 0; v < table.rows; ++v) starts[v] = end += starts[v];
    starts[table.rows] = end;
    for (std::int64_t t = tokens - 1; t >= 0; --t) order[--starts[table.ids[t]]] = t;
}

void sum_table(const EmbeddingKernels* simd, const EmbeddingBwd& args, const TableGrad& table,
               const float* dz, std::int64_t* integers, int threads) {
    const std::int64_t hidden = args.hidden, *starts = integers, *order = integers + table.rows + 1;
    sort_by_id(table, args.tokens, integers, integers + table.rows + 1);
    const std::int64_t rows = std::max<std::int64_t>(1, kNormGrain / hidden);
    const std::int64_t blocks = (table.rows + rows - 1) / rows;
    const std::int64_t width = blocks >= 4 * threads || threads == 1 ? hidden : kColumns;
    const std::int64_t tiles = (hidden + width - 1) / width;
    const std::int64_t item = item_size(args.dtype);
    const int team = (args.tokens + table.rows) * hidden < kNormGrain ? 1 : threads;
    expect_writes(table.out, table.rows * hidden * item);
    parallel_for(blocks * tiles, team, [&](std::int64_t task, int) {
        const std::int64_t begin = task / tiles * rows, end = std::min(table.rows, begin + rows);
        const std::int64_t column = task % tiles * width, columns = std::min(width, hidden - column);
        if (tiles == 1)
            populate(static_cast<char*>(table.out) + begin * hidden * item, (end - begin) * hidden * item,
                     table.rows * hidden * item);
        for (std::int64_t v = begin; v < end; ++v) {
            const std::int64_t count = v == table.skip ? 0 : starts[v + 1] - starts[v];
            if (count == 0)
                std::memset(static_cast<char*>(table.out) + (v * hidden + column) * item, 0, columns * item);
            else
                simd->sum_rows(dz, hidden, order + starts[v], count, args.dtype, table.out, v, column,
                               columns);
        }
    });
}

}  // namespace

const char* cpu_embedding_fwd(const EmbeddingFwd& args, int threads) {
    const EmbeddingKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    if (args.tokens == 0) return nullptr;
    const std::int64_t hidden = args.hidden, width = padded(hidden);
    const Workspace workspace((2 + 2 * static_cast<std::int64_t>(threads)) * width);
    if (workspace.data() == nullptr) return kOutOfMemory;
    float *weight = workspace.data(), *bias = weight + width, *scratch = bias + width;
    layer_norm_kernels()->widen(args.weight, 1.0f, weight, hidden);
    layer_norm_kernels()->widen(args.bias, 0.0f, bias, hidden);
    const std::int64_t step = norm_rows_per_task(args.tokens, hidden, threads);
    parallel_for((args.tokens + step - 1) / step, threads, [&](std::int64_t task, int worker) {
        simd->forward(args, weight, bias, task * step, std::min(args.tokens, (task + 1) * step),
                      scratch + worker * 2 * width);
    });
    return nullptr;
}

const char* cpu_embedding_bwd(const EmbeddingBwd& args, int threads) {
    const EmbeddingKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const std::int64_t tokens = args.tokens, hidden = args.hidden, width = padded(hidden);
    const TableGrad* const tables[3] = {&args.word, &args.position, &args.segment};
    std::int64_t longest = 0;  // rows of the longest table wanted
    for (const TableGrad* table : tables)
        if (table->out != nullptr) longest = std::max(longest, table->rows);
    const std::int64_t step = norm_rows_per_chunk(tokens), chunks = (tokens + step - 1) / step;

    const Workspace workspace((1 + 2 * chunks + threads) * width);
    const Workspace sums(longest > 0 ? std::max<std::int64_t>(1, tokens * hidden) : 1);
    const Workspace integers(longest > 0 ? 2 * (longest + 1 + tokens) : 1);
    if (workspace.data() == nullptr || sums.data() == nullptr || integers.data() == nullptr)
        return kOutOfMemory;
    float *weight = workspace.data(), *partial = weight + width, *scratch = partial + 2 * chunks * width;
    float* const dz = longest > 0 ? sums.data() : nullptr;
    layer_norm_kernels()->widen(args.weight, 1.0f, weight, hidden);
    const int team = tokens * hidden < kNormGrain ? 1 : threads;
    parallel_for(chunks, team, [&](std::int64_t chunk, int worker) {
        simd->backward(args, weight, chunk * step, std::min(tokens, (chunk + 1) * step), dz,
                       partial + chunk * 2 * width, scratch + worker * width);
    });
    float* const params[2] = {args.dweight, args.dbias};
    for (int k = 0; k < 2; ++k)
        if (params[k] != nullptr)
            layer_norm_kernels()->sum_chunks(partial + k * width, chunks, 2 * width, params[k], 0, hidden);
    for (const TableGrad* table : tables)
        if (table->out != nullptr)
            sum_table(simd, args, *table, dz, reinterpret_cast<std::int64_t*>(integers.data()), threads);
    return nullptr;
}

}  // namespace fastbert
