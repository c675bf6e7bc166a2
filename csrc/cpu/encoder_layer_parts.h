// What the parts of a whole encoder layer are made of: products, norms, rotations and attention of some rows.
#pragma once

#include <algorithm>
#include <atomic>

#include "encoder_layer.h"
#include "linear_int8.h"
#include "parallel.h"

namespace fastbert {
namespace layer_parts {

struct Rows {
    std::int64_t begin, count;
};

// What follows a product: its bias, unless the following norm adds it, then the activation, then what c
// holds, then a NoNorm.
struct Epilogue {
    bool bias = true;
    Activation activation = Activation::kNone;
    Gate gate = Gate::kNone;
    Onto onto = Onto::kNone;
    LayerNormParams no_norm{};
};

// c = act(a w + bias) for some rows, or the same plus or times c.
const char* multiply(const EncoderLayer& layer, Rows rows, const LayerLinear& w, const void* a,
                     std::int64_t a_stride, std::int64_t columns, std::int64_t depth,
                     const Epilogue& epilogue, void* c, int threads);

// The sum that a norm reads: x + bias + residual. The last two may be null.
struct Sum {
    const void* x;
    std::int64_t x_stride;
    Param bias;
    const void* residual;
    std::int64_t residual_stride;
};

// y = norm(sum) for some rows; the sum itself goes to z, which may be null and may be the residual.
const char* add_norm(const EncoderLayer& layer, Rows rows, const LayerNormParams& norm, const Sum& sum,
                     void* z, void* y, int threads);

// Rotates some rows of `count` heads in place.
const char* rotate(const EncoderLayer& layer, Rows rows, const Heads& heads, std::int64_t count, int threads);

// f(part) for as many parts as there are threads. Returns the reason of one of them, or nullptr.
template <class F>
const char* by_parts(int threads, const F& f) {
    std::atomic<const char*> failed{nullptr};
    parallel_for(threads, threads, [&](std::int64_t part, int) {
        if (const char* const why = f(part)) failed.store(why, std::memory_order_relaxed);
    });
    return failed.load(std::memory_order_relaxed);
}

// f(rows, threads) for all rows: in one part per thread where they have their own rows, or in one part.
template <class F>
const char* by_rows(std::int64_t total, int threads, bool own_rows, const F& f) {
    if (!own_rows) return f(Rows{0, total}, threads);
    return by_parts(threads, [&](std::int64_t part) {
        const auto border = [&](std::int64_t i) { return total * i / threads; };
        return f(Rows{border(part), border(part + 1) - border(part)}, 1);
    });
}

// The working memory of a layer of this many rows: q, k, v, context. After attention, q's place holds the
// inputs of both norms, and k's place the result of the norm after attention. Once the context has been read,
// the inner rows of the feed-forward start at v's place. With pre_norm the context's place first has the
// result of the norm before attention, and y has the sum after attention. A layer with bottlenecks has q, k
// and v, or once attention has run the inner rows, then the context, then in its own width what queries and
// keys are made from, and the residual.
struct Places {
    std::int64_t plane, wide, narrow;
    Places(const EncoderLayer& layer, std::int64_t rows) {
        const std::int64_t size = layer.dtype == DType::kFloat32 ? 4 : 2;
        const std::int64_t widest = std::max(layer.nheads * layer.headdim, layer.hidden);
        const bool narrows = layer.bottleneck.width > 0;
        plane = (rows * (narrows ? layer.nheads * layer.headdim : widest) * size + 63) / 64 * 64;
        wide = (rows * layer.inner * size + 63) / 64 * 64;
        narrow = (rows * layer.bottleneck.width * size + 63) / 64 * 64;
    }
    std::int64_t context() const { return std::max(3 * plane, wide); }  // of a layer with bottlenecks
    std::int64_t bytes() const {
        return narrow > 0 ? context() + plane + 2 * narrow : 2 * plane + std::max(2 * plane, wide);
    }
};

// Attention of a layer, without what it reads and writes.
AttentionFwd attention_of(const EncoderLayer& layer);

// Attention, with the scores of distances of some sequences at a time.
const char* attend(const EncoderLayer& layer, const AttentionFwd& args, int threads);

}  // namespace layer_parts
}  // namespace fastbert
