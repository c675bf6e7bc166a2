#include "encoder_layer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_received.h"
#include "encoder_layer_parts.h"
#include "workspace.h"

namespace fastbert {

using namespace layer_parts;

namespace {

// The rows, per thread and times the number of threads, from which on a thread takes its own rows through all
// products and norms: its results stay in its own cache, and no thread waits. With fewer rows the threads
// share every product, because otherwise each of them would have to read all weights (NOTES.md).
constexpr std::int64_t kOwnRows = 12;
// Multiplications in the first product of the feed-forward, from which on a thread that works alone cuts a
// product into tasks, to lend some (parallel.h). With fewer it reads the weights once.
constexpr std::int64_t kWorthCutting = std::int64_t{1} << 26;

bool have_own_rows(std::int64_t total, int threads) {
    return threads > 1 && total >= threads * threads * kOwnRows;
}

// Runs of whole sequences with about as many rows each, one per thread: the first sequence of each run, then
// the batch size. Empty if the other threads would wait for the longest run.
std::vector<std::int64_t> runs_of_sequences(const EncoderLayer& layer, int threads) {
    if (layer.cu_seqlens[layer.batch] != layer.total) return {};
    std::vector<std::int64_t> firsts{0};
    for (int i = 1; i < threads; ++i) {
        const std::int64_t wanted = layer.total * i / threads;
        std::int64_t b = firsts.back();
        while (b < layer.batch && layer.cu_seqlens[b] < wanted) ++b;
        if (b > firsts.back() && layer.cu_seqlens[b] - wanted > wanted - layer.cu_seqlens[b - 1]) --b;
        firsts.push_back(b);
    }
    firsts.push_back(layer.batch);
    for (int i = 0; i < threads; ++i) {
        const std::int64_t rows = layer.cu_seqlens[firsts[i + 1]] - layer.cu_seqlens[firsts[i]];
        if (32 * rows * threads > 33 * layer.total) return {};
    }
    return firsts;
}

// A layer with bottlenecks. The residual's place has what each block adds to.
const char* run_narrow(const EncoderLayer& layer, int threads, bool own_rows, char* memory) {
    const LayerBottleneck& own = layer.bottleneck;
    const std::int64_t hidden = layer.hidden, width = layer.nheads * layer.headdim, narrow = own.width;
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const Places places(layer, layer.total);
    char* const context = memory + places.context();
    char* const residual = context + places.plane;
    const bool shared = own.keys.panels == own.residual.panels;  // one bottleneck is both
    char* const keys = shared ? residual : residual + places.narrow;

    const LayerLinear* const weights[] = {&layer.query, &layer.key, &layer.value};
    AttentionFwd attention = attention_of(layer);
    Heads* const heads[] = {&attention.q, &attention.k, &attention.v};
    for (int i = 0; i < 3; ++i) *heads[i] = {memory + i * places.plane, width, layer.headdim};
    attention.out = context;
    const char* failed = by_rows(layer.total, threads, own_rows, [&](Rows rows, int team) {
        const auto narrowed = [&](const LayerLinear& w, const LayerNormParams& norm, char* to) {
            return multiply(layer, rows, w, layer.x, layer.x_stride, narrow, hidden,
                            {true, Activation::kNone, Gate::kNone, Onto::kNone, norm}, to, team);
        };
        const char* why = narrowed(own.residual, own.residual_norm, residual);
        if (why == nullptr && own.narrow_keys && !shared) why = narrowed(own.keys, own.keys_norm, keys);
        for (int i = 0; i < 3 && why == nullptr; ++i) {
            const bool from_keys = i < 2 ? own.narrow_keys : own.narrow_values;
            char* const to = memory + i * places.plane;
            why = from_keys ? multiply(layer, rows, *weights[i], keys, narrow, width, narrow, {}, to, team)
                            : multiply(layer, rows, *weights[i], layer.x, layer.x_stride, width, hidden, {},
                                       to, team);
        }
        return why;
    });
    if (failed == nullptr) failed = cpu_attention_fwd(attention, threads, layer.relative);
    if (failed != nullptr) return failed;
    const std::int64_t used = layer.cu_seqlens[layer.batch];  // behind them there is no context
    std::memset(context + used * width * size, 0, (layer.total - used) * width * size);

    return by_rows(layer.total, threads, own_rows, [&](Rows rows, int team) {
        const auto summed = [&](const LayerLinear& w, const LayerNormParams& norm, const void* a,
                                std::int64_t depth, std::int64_t columns, void* to) {
            return multiply(layer, rows, w, a, depth, columns, depth,
                            {true, Activation::kNone, Gate::kNone, Onto::kAdds, norm}, to, team);
        };
        const char* why =
            summed(layer.attention_output, layer.attention_norm, context, width, narrow, residual);
        for (const LayerFeed& feed : own.feeds) {
            if (why == nullptr)
                why = multiply(layer, rows, feed.up, residual, narrow, layer.inner, narrow,
                               {true, layer.activation}, memory, team);
            if (why == nullptr) why = summed(feed.down, feed.norm, memory, layer.inner, narrow, residual);
        }
        if (why != nullptr) return why;
        for (std::int64_t r = rows.begin; layer.x != layer.y && r < rows.begin + rows.count; ++r)
            std::memcpy(static_cast<char*>(layer.y) + r * hidden * size,
                        static_cast<const char*>(layer.x) + r * layer.x_stride * size, hidden * size);
        return summed(own.output, own.output_norm, residual, narrow, hidden, layer.y);
    });
}

// What follows attention, whose context is in its place in `base`; see Places.
const char* after_attention(const EncoderLayer& layer, int threads, bool own_rows, char* base,
                            std::int64_t plane) {
    const std::int64_t hidden = layer.hidden, width = layer.nheads * layer.headdim;
    const void* const context = base + 3 * plane;
    void* const sum = base;
    void* const attended = base + plane;
    void* const inner = base + 2 * plane;
    const char* const failed = by_rows(layer.total, threads, own_rows, [&](Rows rows, int team) {
        const char* why =
            multiply(layer, rows, layer.attention_output, context, width, hidden, width, {false}, sum, team);
        const auto& norm = layer.pre_norm ? layer.output_norm : layer.attention_norm;
        if (why == nullptr)
            why = add_norm(layer, rows, norm,
                           {sum, hidden, layer.attention_output.bias, layer.x, layer.x_stride},
                           layer.pre_norm ? layer.y : nullptr, attended, team);
        return why;
    });
    if (failed != nullptr) return failed;
    return by_rows(layer.total, threads, own_rows, [&](Rows rows, int team) {
        const Epilogue activates{true, layer.activation, layer.gated};
        const bool alone = layer.activated.panels != nullptr;
        const char* why = multiply(layer, rows, alone ? layer.activated : layer.intermediate, attended,
                                   hidden, layer.inner, hidden, activates, inner, team);
        if (alone && why == nullptr)
            why = multiply(layer, rows, layer.intermediate, attended, hidden, layer.inner, hidden,
                           {true, Activation::kNone, Gate::kNone, Onto::kMultiplies}, inner, team);
        if (why != nullptr) return why;
        if (layer.pre_norm)
            return multiply(layer, rows, layer.output, inner, layer.inner, hidden, layer.inner,
                            {true, Activation::kNone, Gate::kNone, Onto::kAdds}, layer.y, team);
        why =
            multiply(layer, rows, layer.output, inner, layer.inner, hidden, layer.inner, {false}, sum, team);
        if (why == nullptr)
            why = add_norm(layer, rows, layer.output_norm, {sum, hidden, layer.output.bias, attended, hidden},
                           nullptr, layer.y, team);
        return why;
    });
}

// Moves the rows of x that are kept to `rest.x`, and those of the context to its first rows.
const char* keep_most_received(const EncoderLayer& layer, const AttentionFwd& attention,
                               const EncoderLayer& rest, char* context, int threads) {
    std::vector<float> received(layer.total);
    AttentionReceived args{};
    static_cast<Attention&>(args) = attention;
    args.lse = attention.lse;
    args.out = received.data();
    if (const char* const why = cpu_attention_received(args, threads)) return why;
    cpu_most_received(args.out, layer.cu_seqlens, layer.batch, layer.kept, layer.kept_rows);
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t width = layer.nheads * layer.headdim * size, hidden = layer.hidden * size;
    char* const x = static_cast<char*>(const_cast<void*>(rest.x));
    for (std::int64_t i = 0; i < rest.total; ++i) {  // ascending: no row is overwritten before it is read
        const std::int64_t row = layer.kept_rows[i];
        std::memmove(context + i * width, context + row * width, width);
        std::memcpy(x + i * hidden, static_cast<const char*>(layer.x) + row * layer.x_stride * size, hidden);
    }
    return nullptr;
}

const char* run(const EncoderLayer& layer, int threads, bool own_rows, char* memory) {
    if (layer.bottleneck.width > 0) return run_narrow(layer, threads, own_rows, memory);
    const std::int64_t hidden = layer.hidden, width = layer.nheads * layer.headdim;
    const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t plane = Places(layer, layer.total).plane;
    char* const base = memory;
    char* const context = base + 3 * plane;

    AttentionFwd attention = attention_of(layer);
    attention.out = context;
    const bool joined = layer.key.panels == nullptr;  // rows [q, k, v], over the three places
    const LayerLinear* const weights[] = {&layer.query, &layer.key, &layer.value};
    const std::int64_t counts[] = {layer.nheads, layer.kv_heads, layer.kv_heads};
    const std::int64_t columns = (layer.nheads + 2 * layer.kv_heads) * layer.headdim;
    Heads* const heads[] = {&attention.q, &attention.k, &attention.v};
    for (std::int64_t i = 0, before = 0; i < 3; before += counts[i++])
        *heads[i] = !joined            ? Heads{base + i * plane, counts[i] * layer.headdim, layer.headdim}
                    : layer.head_major ? Heads{base + i * layer.headdim * size, columns, 3 * layer.headdim}
                                       : Heads{base + before * layer.headdim * size, columns, layer.headdim};
    const bool normed = layer.pre_norm && layer.attention_norm.eps >= 0.0;
    const void* const x = normed ? context : layer.x;
    const std::int64_t x_stride = normed ? hidden : layer.x_stride;
    const char* failed = by_rows(layer.total, threads, own_rows, [&](Rows rows, int team) {
        const char* why = nullptr;
        if (normed)
            why = add_norm(layer, rows, layer.attention_norm, {layer.x, layer.x_stride, {}, nullptr, 0},
                           nullptr, context, team);
        if (joined && why == nullptr)
            why = multiply(layer, rows, layer.query, x, x_stride, columns, hidden, {}, base, team);
        for (int i = 0; i < 3 && !joined && why == nullptr; ++i)
            why = multiply(layer, rows, *weights[i], x, x_stride, counts[i] * layer.headdim, hidden, {},
                           base + i * plane, team);
        if (layer.tables.cos == nullptr) return why;
        const bool together = joined && !layer.head_major;  // the keys' heads follow the queries'
        for (int i = 0; i < (together ? 1 : 2) && why == nullptr; ++i)
            why = rotate(layer, rows, *heads[i], together ? counts[0] + counts[1] : counts[i], team);
        return why;
    });
    std::vector<float> lse(layer.kept == nullptr ? 0 : layer.nheads * layer.total);
    if (layer.kept != nullptr) attention.lse = lse.data();
    if (failed == nullptr) failed = attend(layer, attention, threads);
    if (failed != nullptr) return failed;
    const std::int64_t end = layer.cu_seqlens[layer.batch];
    std::memset(context + end * width * size, 0, (layer.total - end) * width * size);
    if (layer.kept == nullptr) return after_attention(layer, threads, own_rows, base, plane);

    EncoderLayer rest = layer;
    rest.x = base + 2 * plane;  // v's place, until the context has been read
    rest.x_stride = hidden;
    rest.total = layer.kept[layer.batch];
    failed = keep_most_received(layer, attention, rest, context, threads);
    if (failed != nullptr) return failed;
    return after_attention(rest, threads, own_rows && have_own_rows(rest.total, threads), base, plane);
}

// The whole layer, in one run per thread or in one run.
const char* run_all(const EncoderLayer& layer, int threads, bool own_rows) {
    std::vector<std::int64_t> firsts;
    if (own_rows) firsts = runs_of_sequences(layer, threads);
    const Workspace own_work(layer.work != nullptr ? 0 : cpu_encoder_layer_work(layer, threads) / 4);
    char* const work = static_cast<char*>(layer.work != nullptr ? layer.work : own_work.data());
    if (work == nullptr) return kOutOfMemory;
    if (firsts.empty()) return run(layer, threads, own_rows, work);
    // Each thread takes its own sequences through the whole layer, without waiting.
    const std::int64_t hidden = layer.hidden, size = layer.dtype == DType::kFloat32 ? 4 : 2;
    std::vector<std::int64_t> memory{0};
    std::vector<std::int32_t> ends, kept;
    for (int i = 0; i < threads; ++i) {
        const std::int32_t begin = layer.cu_seqlens[firsts[i]], end = layer.cu_seqlens[firsts[i + 1]];
        for (std::int64_t b = firsts[i]; b <= firsts[i + 1]; ++b) ends.push_back(layer.cu_seqlens[b] - begin);
        for (std::int64_t b = firsts[i]; layer.kept != nullptr && b <= firsts[i + 1]; ++b)
            kept.push_back(layer.kept[b] - layer.kept[firsts[i]]);
        memory.push_back(memory.back() + Places(layer, end - begin).bytes());
    }
    return by_parts(threads, [&](std::int64_t part) -> const char* {
        const std::int64_t first = firsts[part], begin = layer.cu_seqlens[first];
        EncoderLayer own = layer;
        own.batch = firsts[part + 1] - first;
        own.total = layer.cu_seqlens[firsts[part + 1]] - begin;
        if (own.total == 0) return nullptr;
        own.cu_seqlens = ends.data() + first + part;
        own.x = static_cast<const char*>(layer.x) + begin * layer.x_stride * size;
        own.y = static_cast<char*>(layer.y) + begin * hidden * size;
        if (own.positions != nullptr) own.positions += begin;
        if (own.bias.data != nullptr) own.bias.data += first * own.bias.batch_stride;
        if (layer.kept == nullptr) return run(own, 1, false, work + memory[part]);
        own.kept = kept.data() + first + part;
        own.kept_rows += layer.kept[first];
        own.y = static_cast<char*>(layer.y) + layer.kept[first] * hidden * size;
        const char* const failed = run(own, 1, false, work + memory[part]);
        for (std::int64_t i = 0; i < own.kept[own.batch]; ++i) own.kept_rows[i] += begin;
        return failed;
    });
}

}  // namespace

std::int64_t cpu_encoder_layer_work(const EncoderLayer& layer, int threads) {
    return Places(layer, layer.total).bytes() + 4 * 64 * threads;  // each part's places begin a line
}

const char* cpu_encoder_layer_fwd(const EncoderLayer& layer, int threads) {
    if (layer.total == 0) return nullptr;
    const bool held = has_open_team();
    if (!held) open_team(threads);
    const bool alone = is_alone();
    const bool one = alone && layer.total * layer.nheads * layer.headdim * layer.inner < kWorthCutting;
    const char* const failed =
        run_all(layer, one ? 1 : threads, !alone && have_own_rows(layer.total, threads));
    if (!held) close_team();
    return failed;
}

}  // namespace fastbert
