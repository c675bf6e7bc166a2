// Attention of one sequence and head, for one instruction set (see isa.h). Contract:
// fastbert/ops/attention.py.
//
// Math       S = scale q kᵀ + bias;  P = softmax(S);  out = gate dropout(P) v
//            dP = dropout'(dout vᵀ);  delta = rowsum(P ∘ dP);  dS = gate P ∘ (dP - delta)
//            dq = scale dS k;  dk = scale dSᵀ q;  dv = gate dropout(P)ᵀ dout;  dgate = Σ delta
// Tiling     K (and V for backward) is packed transposed into panels of 64 keys, V (and K) as float rows: at
//            512 tokens and 64 columns each takes 128 KiB and stays in L2. 24 queries go through all keys
//            together, so that a panel is loaded from L2 once for all of them. A register tile is 6 rows by 4
//            vectors (AVX-512) or by 2 (AVX2).
// Precision  Widened to float on load, rounded once on store; P is never rounded. The maximum of a row is
//            subtracted before exp. Backward computes the softmax again: exp(S - lse) would carry the
//            rounding of a large lse into every P.
// Source     Vaswani et al. 2017, eq. 1; blocking as in Goto, van de Geijn 2008, "Anatomy of High-Performance
//            Matrix Multiplication".
#include "attention_simd.h"

#include <type_traits>

#include "transpose.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

// Rows [first, first + count) as floats, `width` per row, with zeros after `headdim`; then zero rows up to
// `padded`.
template <class T>
void copy_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count, std::int64_t padded,
               std::int64_t headdim, std::int64_t width, float* out) {
    for (std::int64_t i = 0; i < padded; ++i) {
        for (std::int64_t c = 0; c < width; c += kLanes) {
            const std::int64_t n = less(headdim - c, kLanes);
            store(out + i * width + c,
                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, static_cast<int>(n)) : zero(),
                  kLanes);
        }
    }
}

// Panels [headdim][kKeyPanel] of the transpose of rows [first, first + count); zeros for keys from `count` to
// the next multiple of kLanes.
template <class T>
void transpose_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
                    std::int64_t headdim, float* out) {
    for (std::int64_t j = 0; j < count; j += kLanes) {
        float* const panel = out + j / kKeyPanel * headdim * kKeyPanel + j % kKeyPanel;
        for (std::int64_t c = 0; c < headdim; c += kLanes) {
            const int n = static_cast<int>(less(headdim - c, kLanes));
            Vec block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                block[i] = j + i < count ? load(row_of<T>(t, first + j + i, head) + c, n) : zero();
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                if (i < n) store(panel + (c + i) * kKeyPanel, block[i], kLanes);
        }
    }
}

// The address and the stride of rows [first, first + count) as floats in whole vectors: in place if they are
// stored so, else copied to `out`.
template <class T>
FASTBERT_INLINE const float* float_rows(const Heads& t, std::int64_t first, std::int64_t head,
                                        std::int64_t count, std::int64_t headdim, std::int64_t width,
                                        float* out, std::int64_t& stride) {
    if constexpr (std::is_same_v<T, float>) {
        if (headdim == width) {
            stride = t.row_stride;
            return row_of<float>(t, first, head);
        }
    }
    copy_rows<T>(t, first, head, count, count, headdim, width, out);
    stride = width;
    return out;
}

// Up to this many tokens a vector holds the scores of one key and many queries, else of one query and many
// keys: a row of few keys would spend its time on the sum and the maximum over a vector's lanes.
constexpr std::int64_t kFewKeys = kKeyPanel;
constexpr std::int64_t kFewRows = kFewKeys + kRows, kFewStride = kFewKeys + kLanes;

std::int64_t forward_scratch(std::int64_t seqlen, std::int64_t headdim) {
    const std::int64_t keys = round_up(seqlen, kKeyPanel), width = width_of(headdim);
    const std::int64_t many =
        bits_room(keys) + keys * headdim + keys * width + kQueryBlock * (2 * width + keys);
    const std::int64_t few = kFewKeys * headdim + kFewKeys * width + kFewRows * (2 * width + kFewStride);
    return round_up(many > few ? many : few, 16);
}

// A sequence of at most kFewKeys tokens without bias, dropout and causal mask. Returns false, and does
// nothing, if a query has no score above -inf.
template <class T>
bool forward_few(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, padded = round_up(n, kRows), stride = round_up(n, kLanes);
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    float *panel = scratch, *room = panel + kFewKeys * headdim, *k = room + kFewKeys * width;
    float *out = k + kFewRows * width, *scores = out + kFewRows * width;
    transpose_rows<T>(args.q, tokens.start, head, n, headdim, panel);
    copy_rows<T>(args.k, tokens.start, head, n, padded, headdim, width, k);
    times_panels(k, width, padded, panel, n, headdim, scores, stride);  // (keys, queries)
    const Vec factor = broadcast(args.softmax_scale);
    alignas(64) float inverse[kFewStride], top[kFewStride], sum[kFewStride];
    for (std::int64_t i = 0; i < n; i += kLanes) {
        Vec most = broadcast(-INFINITY);
        for (std::int64_t j = 0; j < n; ++j)
            most = maximum(most, mul(load(scores + j * stride + i, kLanes), factor));
        store(top + i, most, kLanes);
    }
    for (std::int64_t i = 0; i < n; ++i)
        if (top[i] == -INFINITY) return false;
    for (std::int64_t i = 0; i < n; i += kLanes) {
        const Vec shift = load(top + i, kLanes);
        Vec total[2] = {zero(), zero()};
        for (std::int64_t j = 0; j < n; ++j) {
            float* const s = scores + j * stride + i;
            const Vec e = exponential(sub(mul(load(s, kLanes), factor), shift));
            store(s, e, kLanes);
            total[j & 1] = add(total[j & 1], e);
        }
        const Vec all = add(total[0], total[1]);
        store(sum + i, all, kLanes);
        store(inverse + i, divide(broadcast(1.0f), all), kLanes);
    }
    if (args.lse != nullptr)
        for (std::int64_t i = 0; i < n; ++i)
            args.lse[head * args.total + tokens.start + i] = top[i] + __builtin_logf(sum[i]);
    for (std::int64_t i = 0; args.probs != nullptr && i < n; ++i) {
        T* const p = static_cast<T*>(args.probs) +
                     ((sequence * args.nheads + head) * args.max_seqlen + i) * args.max_seqlen;
        for_vectors(n, [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
            alignas(64) float row[kLanes] = {};
            for (int l = 0; l < m; ++l) row[l] = scores[(j + l) * stride + i];
            store(p + j, mul(load(row, kLanes), broadcast(inverse[i])), m);
        });
    }
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    std::int64_t v_row;
    const float* const v = float_rows<T>(args.v, tokens.start, head, n, headdim, width, room, v_row);
    tiles(scores, 1, stride, v, v_row, n, out, width, n, width, false);
    for (std::int64_t i = 0; i < n; ++i) {
        T* const o = static_cast<T*>(args.out) + ((tokens.start + i) * args.nheads + head) * headdim;
        for_vectors(headdim, [&](std::int64_t c, int, int m) __attribute__((always_inline)) {
            store(o + c, mul(load(out + i * width + c, m), broadcast(inverse[i] * gate)), m);
        });
    }
    return true;
}

template <class T>
void forward_as(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                std::int64_t end, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, keys = round_up(n, kKeyPanel);
    const bool plain = !args.causal && args.bias.data == nullptr && args.dropout.seed == nullptr;
    if (plain && n <= kFewKeys && end - begin == n && forward_few<T>(args, sequence, head, scratch)) return;
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    float *panels = scratch + bits_room(keys), *room = panels + keys * headdim, *q = room + keys * width;
    float *out = q + kQueryBlock * width, *scores = out + kQueryBlock * width;
    transpose_rows<T>(args.k, tokens.start, head, n, headdim, panels);
    std::int64_t v_row;
    const float* const v = float_rows<T>(args.v, tokens.start, head, n, headdim, width, room, v_row);
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    const float common = args.dropout.seed == nullptr ? gate : gate * args.dropout.scale;
    for (std::int64_t i = begin; i < end; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, end - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        times_panels(q, width, padded, panels, n, headdim, scores, keys);
        float factor[kQueryBlock];
        Row softmax[kQueryBlock];
        softmax_rows(args, sequence, head, i, rows, n, scores, keys, softmax);
        for (std::int64_t r = 0; r < rows; ++r) {
            float* s = scores + r * keys;
            const std::int64_t row = tokens.start + i + r;
            const bool empty = softmax[r].sum == 0.0f;
            const float inverse = empty ? 0.0f : 1.0f / softmax[r].sum;
            if (args.lse != nullptr)
                args.lse[head * args.total + row] =
                    empty ? -INFINITY : softmax[r].top + __builtin_logf(softmax[r].sum);
            if (args.probs != nullptr) {
                T* p = static_cast<T*>(args.probs) +
                       ((sequence * args.nheads + head) * args.max_seqlen + i + r) * args.max_seqlen;
                for_vectors(n, [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
                    store(p + j, mul(load(s + j, m), broadcast(inverse)), m);
                });
            }
            if (const std::uint64_t* kept = kept_in_forward(args, head, row, n, bits))
                weigh(s, s, n, 1.0f, kept);
            factor[r] = inverse * common;
        }
        times_rows(scores, keys, padded, v, v_row, n, width, out);
        for (std::int64_t r = 0; r < rows; ++r) {
            T* o = static_cast<T*>(args.out) + ((tokens.start + i + r) * args.nheads + head) * headdim;
            for_vectors(headdim, [&](std::int64_t c, int, int m) __attribute__((always_inline)) {
                store(o + c, mul(load(out + r * width + c, m), broadcast(factor[r])), m);
            });
        }
    }
}

std::int64_t backward_scratch(std::int64_t seqlen, std::int64_t headdim) {
    const std::int64_t keys = round_up(seqlen, kKeyPanel), width = width_of(headdim);
    // bits of a row; panels of K and V; rows of K, dk and dv (kRows more, for the last tile); q, dout, dq; P,
    // dP, weights
    return round_up(bits_room(keys) + 2 * keys * headdim + 3 * (keys + kRows) * width +
                        kQueryBlock * (3 * width + 3 * (keys + kRows)),
                    16);
}

template <class T>
void backward_as(const AttentionBwd& args, std::int64_t sequence, std::int64_t head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, keys = round_up(n, kKeyPanel), tall = n + kRows;
    const std::int64_t headdim = args.headdim, width = width_of(headdim), stride = keys + kRows;
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    float *k_panels = scratch + bits_room(keys), *v_panels = k_panels + keys * headdim,
          *k = v_panels + keys * headdim;
    float *dk = k + (keys + kRows) * width, *dv = dk + (keys + kRows) * width,
          *q = dv + (keys + kRows) * width;
    float *dout = q + kQueryBlock * width, *dq = dout + kQueryBlock * width, *p = dq + kQueryBlock * width;
    float *dp = p + kQueryBlock * stride, *w = dp + kQueryBlock * stride;
    const Heads upstream{args.dout, args.nheads * headdim, headdim};
    const bool need_ds = needs_ds(args);
    if (need_ds) transpose_rows<T>(args.v, tokens.start, head, n, headdim, v_panels);
    transpose_rows<T>(args.k, tokens.start, head, n, headdim, k_panels);
    if (args.dq != nullptr) copy_rows<T>(args.k, tokens.start, head, n, n, headdim, width, k);
    for (std::int64_t e = 0; e < tall * width; ++e) dk[e] = dv[e] = 0.0f;
    for (std::int64_t e = 0; e < kQueryBlock * stride; ++e) p[e] = w[e] = 0.0f;  // the last tile reads past n
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    const float scale = args.dropout.seed == nullptr ? 1.0f : args.dropout.scale;
    double gate_sum = 0.0;
    const std::int64_t step = args.nheads * headdim, first = tokens.start * step + head * headdim;
    for (std::int64_t i = 0; i < n; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, n - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        copy_rows<T>(upstream, tokens.start + i, head, rows, padded, headdim, width, dout);
        times_panels(q, width, padded, k_panels, n, headdim, p, stride);
        if (need_ds) times_panels(dout, width, padded, v_panels, n, headdim, dp, stride);
        Row softmax[kQueryBlock];
        softmax_rows(args, sequence, head, i, rows, n, p, stride, softmax);
        for (std::int64_t r = 0; r < rows; ++r) {
            float *pr = p + r * stride, *dpr = dp + r * stride, *wr = w + r * stride;
            const std::int64_t row = tokens.start + i + r;
            const float inverse = softmax[r].sum == 0.0f ? 0.0f : 1.0f / softmax[r].sum;
            const Vec normal = broadcast(inverse);
            const std::uint64_t* const kept = kept_in_backward(args, head, row, n, bits);
            if (!need_ds) {
                for_vectors(n, [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                    store(pr + j, mul(load(pr + j, c), normal), c);
                });
                weigh(pr, wr, n, gate * scale, kept);
                continue;
            }
            if (kept != nullptr) weigh(dpr, dpr, n, scale, kept);
            Vec total[4] = {zero(), zero(), zero(), zero()};
            for_vectors(n, [&](std::int64_t j, int m, int c) __attribute__((always_inline)) {
                const Vec probability = mul(load(pr + j, c), normal);
                store(pr + j, probability, c);
                total[m] = fma(probability, load(dpr + j, c), total[m]);
            });
            const float delta = sum4(total);
            gate_sum += delta;
            if (args.dv != nullptr) weigh(pr, wr, n, gate * scale, kept);
            float* ds =
                args.ds == nullptr
                    ? nullptr
                    : args.ds + ((sequence * args.nheads + head) * args.max_seqlen + i + r) * args.max_seqlen;
            for_vectors(n, [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                const Vec d =
                    mul(mul(load(pr + j, c), sub(load(dpr + j, c), broadcast(delta))), broadcast(gate));
                store(pr + j, d, c);  // P is no longer needed: dS takes its place
                if (ds != nullptr) store(ds + j, d, c);
            });
        }
        if (args.dk != nullptr) add_transposed(p, stride, rows, q, n, width, dk);
        if (args.dv != nullptr) add_transposed(w, stride, rows, dout, n, width, dv);
        if (args.dq != nullptr) {
            times_rows(p, stride, padded, k, width, n, width, dq);
            store_rows(dq, rows, width, args.softmax_scale, static_cast<T*>(args.dq) + first + i * step,
                       headdim, step);
        }
    }
    if (args.dk != nullptr)
        store_rows(dk, n, width, args.softmax_scale, static_cast<T*>(args.dk) + first, headdim, step);
    if (args.dv != nullptr) store_rows(dv, n, width, 1.0f, static_cast<T*>(args.dv) + first, headdim, step);
    if (args.dgate != nullptr) args.dgate[sequence * args.nheads + head] = gate_sum;
}

void forward(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
             std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_as<float>(args, sequence, head, begin, end, scratch);
        case DType::kBFloat16:
            return forward_as<bf16>(args, sequence, head, begin, end, scratch);
        case DType::kFloat16:
            return forward_as<fp16>(args, sequence, head, begin, end, scratch);
    }
}

void backward(const AttentionBwd& args, std::int64_t sequence, std::int64_t head, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_as<float>(args, sequence, head, scratch);
        case DType::kBFloat16:
            return backward_as<bf16>(args, sequence, head, scratch);
        case DType::kFloat16:
            return backward_as<fp16>(args, sequence, head, scratch);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {forward_scratch, backward_scratch, forward, backward};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
