// Attention of one sequence and head, for one instruction set (see isa.h). Contract:
// fastbert/ops/attention.py.
//
// Math       S = scale q kᵀ + bias;  P = softmax(S);  out = gate dropout(P) v
//            dP = dropout'(dout vᵀ);  delta = rowsum(P ∘ dP);  dS = gate P ∘ (dP - delta)
//            dq = scale dS k;  dk = scale dSᵀ q;  dv = gate dropout(P)ᵀ dout;  dgate = Σ delta
// Tiling     K (and V for backward) is packed transposed into panels of 64 keys, V (and K) as float rows: at
//            512 tokens and 64 columns each takes 128 KiB and stays in L2. 24 queries go through all keys
//            together, so that a panel is loaded from L2 once for all of them. A register tile is 6 rows by 4
//            vectors (AVX-512) or by 2 (AVX2). With a window 24 queries go only through the keys that one of
//            them sees. Rows of scores then start at the vector of the first such key, and a task of forward
//            packs only the keys of its own queries. P is 0 where a query does not see a key, so a NaN
//            reaches the queries of its block.
// Precision  Widened to float on load, rounded once on store; P is never rounded. The maximum of a row is
//            subtracted before exp. Backward computes the softmax again: exp(S - lse) would carry the
//            rounding of a large lse into every P.
// Source     Vaswani et al. 2017, eq. 1; blocking as in Goto, van de Geijn 2008, "Anatomy of High-Performance
//            Matrix Multiplication".
#include "attention_simd.h"

#include <type_traits>

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

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

std::int64_t forward_scratch(const Attention& args, std::int64_t seqlen, std::int64_t queries) {
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    const std::int64_t keys = round_up(most_keys(args, seqlen, queries), kKeyPanel);
    const std::int64_t stride = row_stride(args, seqlen);
    const std::int64_t many =
        bits_room(stride) + keys * headdim + keys * width + kQueryBlock * (2 * width + stride);
    const std::int64_t few = kFewKeys * headdim + kFewKeys * width + kFewRows * (2 * width + kFewStride);
    return round_up(many > few ? many : few, 16);
}

// A sequence of at most kFewKeys tokens that see each other, without bias and dropout. Returns false, and
// does nothing, if a query has no score above -inf.
template <class T>
bool forward_few(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, padded = round_up(n, kRows), stride = round_up(n, kLanes);
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    float *panel = scratch, *room = panel + kFewKeys * headdim, *k = room + kFewKeys * width;
    float *out = k + kFewRows * width, *scores = out + kFewRows * width;
    const std::int64_t kv_head = kv_head_of(args, head);
    transpose_rows<T>(args.q, tokens.start, head, n, headdim, panel);
    copy_rows<T>(args.k, tokens.start, kv_head, n, padded, headdim, width, k);
    times_panels(k, width, padded, panel, 0, n, headdim, scores, stride);  // (keys, queries)
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
        T* const p = static_cast<T*>(args.probs) + cell_of(args, sequence, head, i, 0);
        for_vectors(n, [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
            alignas(64) float row[kLanes] = {};
            for (int l = 0; l < m; ++l) row[l] = scores[(j + l) * stride + i];
            store(p + j, mul(load(row, kLanes), broadcast(inverse[i])), m);
        });
    }
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    std::int64_t v_row;
    const float* const v = float_rows<T>(args.v, tokens.start, kv_head, n, headdim, width, room, v_row);
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
void forward_as(const AttentionFwd& args, const Relative& relative, std::int64_t sequence, std::int64_t head,
                std::int64_t begin, std::int64_t end, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length;
    const bool plain =
        sees_all(args, n) && args.bias.data == nullptr && !given(relative) && args.dropout.seed == nullptr;
    if (plain && n <= kFewKeys && end - begin == n && forward_few<T>(args, sequence, head, scratch)) return;
    const std::int64_t headdim = args.headdim, width = width_of(headdim), kv_head = kv_head_of(args, head);
    // packed are the keys from `low` on
    const Keys all = keys_of(args, n, begin, end - begin);
    const std::int64_t low = all.begin / kKeyPanel * kKeyPanel, count = all.end - low;
    const std::int64_t first = tokens.start + low;
    const std::int64_t packed = round_up(count, kKeyPanel), stride = row_stride(args, n);
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    float *panels = scratch + bits_room(stride), *room = panels + packed * headdim,
          *q = room + packed * width;
    float *out = q + kQueryBlock * width, *scores = out + kQueryBlock * width;
    transpose_rows<T>(args.k, first, kv_head, count, headdim, panels);
    std::int64_t v_row;
    const float* const v = float_rows<T>(args.v, first, kv_head, count, headdim, width, room, v_row);
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    const float common = args.dropout.seed == nullptr ? gate : gate * args.dropout.scale;
    for (std::int64_t i = begin; i < end; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, end - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        prefetch_rows<T>(args.q, tokens.start + i + rows, head, less(kQueryBlock, end - i - rows), headdim);
        const Keys keys = keys_of(args, n, i, rows);
        times_panels(q, width, padded, panels, keys.first - low, keys.end - low, headdim, scores, stride);
        float factor[kQueryBlock];
        Row softmax[kQueryBlock];
        softmax_rows(args, relative, sequence, head, n, i, rows, keys, keys.columns(), scores, stride,
                     softmax);
        for (std::int64_t r = 0; r < rows; ++r) {
            float* s = scores + r * stride;
            const std::int64_t row = tokens.start + i + r;
            const bool empty = softmax[r].sum == 0.0f;
            const float inverse = empty ? 0.0f : 1.0f / softmax[r].sum;
            if (args.lse != nullptr)
                args.lse[head * args.total + row] =
                    empty ? -INFINITY : softmax[r].top + __builtin_logf(softmax[r].sum);
            if (args.probs != nullptr) {
                T* p = static_cast<T*>(args.probs) + cell_of(args, sequence, head, i + r, keys.first);
                for_vectors(keys.columns(), [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
                    store(p + j, mul(load(s + j, m), broadcast(inverse)), m);
                });
            }
            if (const std::uint64_t* kept = kept_in_forward(args, head, row, keys, bits))
                weigh(s, s, keys, 1.0f, kept);
            factor[r] = inverse * common;
        }
        times_rows(scores + (keys.begin - keys.first), stride, padded, v + (keys.begin - low) * v_row, v_row,
                   keys.end - keys.begin, width, out);
        for (std::int64_t r = 0; r < rows; ++r) {
            T* o = static_cast<T*>(args.out) + ((tokens.start + i + r) * args.nheads + head) * headdim;
            for_vectors(headdim, [&](std::int64_t c, int, int m) __attribute__((always_inline)) {
                store(o + c, mul(load(out + r * width + c, m), broadcast(factor[r])), m);
            });
        }
    }
}

std::int64_t backward_scratch(const Attention& args, std::int64_t seqlen) {
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    const std::int64_t keys = round_up(seqlen, kKeyPanel), stride = row_stride(args, seqlen) + kRows;
    // bits of a row; panels of K and V; rows of K, dk and dv (kRows more, for the last tile); q, dout, dq; P,
    // dP, weights
    return round_up(bits_room(stride) + 2 * keys * headdim + 3 * (keys + kRows) * width +
                        kQueryBlock * (3 * width + 3 * stride),
                    16);
}

template <class T>
void backward_as(const AttentionBwd& args, const Relative& relative, const RelativeGrads& grads,
                 std::int64_t sequence, std::int64_t kv_head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, packed = round_up(n, kKeyPanel), tall = n + kRows;
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    const std::int64_t stride = row_stride(args, n) + kRows;
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    float *k_panels = scratch + bits_room(stride), *v_panels = k_panels + packed * headdim,
          *k = v_panels + packed * headdim;
    float *dk = k + (packed + kRows) * width, *dv = dk + (packed + kRows) * width,
          *q = dv + (packed + kRows) * width;
    float *dout = q + kQueryBlock * width, *dq = dout + kQueryBlock * width, *p = dq + kQueryBlock * width;
    float *dp = p + kQueryBlock * stride, *w = dp + kQueryBlock * stride;
    const Heads upstream{args.dout, args.nheads * headdim, headdim};
    const bool need_ds = needs_ds(args, grads);
    if (need_ds) transpose_rows<T>(args.v, tokens.start, kv_head, n, headdim, v_panels);
    transpose_rows<T>(args.k, tokens.start, kv_head, n, headdim, k_panels);
    if (args.dq != nullptr) copy_rows<T>(args.k, tokens.start, kv_head, n, n, headdim, width, k);
    for (std::int64_t e = 0; e < tall * width; ++e) dk[e] = dv[e] = 0.0f;
    const float scale = args.dropout.seed == nullptr ? 1.0f : args.dropout.scale;
    const std::int64_t shared = args.nheads / args.kv_heads;
    for (std::int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
        const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
        double gate_sum = 0.0;
        const std::int64_t step = args.nheads * headdim, first = tokens.start * step + head * headdim;
        for (std::int64_t i = 0; i < n; i += kQueryBlock) {
            const std::int64_t rows = less(kQueryBlock, n - i), padded = round_up(rows, kRows);
            const Keys keys = keys_of(args, n, i, rows);
            const std::int64_t seen = keys.end - keys.begin, skipped = keys.begin - keys.first;
            copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
            copy_rows<T>(upstream, tokens.start + i, head, rows, padded, headdim, width, dout);
            times_panels(q, width, padded, k_panels, keys.first, keys.end, headdim, p, stride);
            if (need_ds)
                times_panels(dout, width, padded, v_panels, keys.first, keys.end, headdim, dp, stride);
            Row softmax[kQueryBlock];
            // dk's and dv's last tile reads kRows - 1 further columns
            const std::int64_t read = keys.columns() + kRows;
            softmax_rows(args, relative, sequence, head, n, i, rows, keys, read, p, stride, softmax);
            for (std::int64_t r = 0; r < rows; ++r) {
                float *pr = p + r * stride, *dpr = dp + r * stride, *wr = w + r * stride;
                const std::int64_t row = tokens.start + i + r;
                const float inverse = softmax[r].sum == 0.0f ? 0.0f : 1.0f / softmax[r].sum;
                const Vec normal = broadcast(inverse);
                const std::uint64_t* const kept = kept_in_backward(args, head, row, keys, bits);
                for (std::int64_t j = keys.columns(); j < read; ++j) wr[j] = 0.0f;
                if (!need_ds) {
                    for_vectors(keys.columns(),
                                [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                                    store(pr + j, mul(load(pr + j, c), normal), c);
                                });
                    weigh(pr, wr, keys, gate * scale, kept);
                    continue;
                }
                if (kept != nullptr) weigh(dpr, dpr, keys, scale, kept);
                Vec total[4] = {zero(), zero(), zero(), zero()};
                for_vectors(keys.columns(), [&](std::int64_t j, int m, int c) __attribute__((always_inline)) {
                    const Vec probability = mul(load(pr + j, c), normal);
                    store(pr + j, probability, c);
                    total[m] = fma(probability, load(dpr + j, c), total[m]);
                });
                const float delta = sum4(total);
                gate_sum += delta;
                if (args.dv != nullptr) weigh(pr, wr, keys, gate * scale, kept);
                float* ds =
                    args.ds == nullptr ? nullptr : args.ds + cell_of(args, sequence, head, i + r, keys.first);
                for_vectors(keys.columns(), [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                    const Vec d =
                        mul(mul(load(pr + j, c), sub(load(dpr + j, c), broadcast(delta))), broadcast(gate));
                    store(pr + j, d, c);  // P is no longer needed: dS takes its place
                    if (ds != nullptr) store(ds + j, d, c);
                });
                if (wanted(grads)) add_distances(args, relative, grads, sequence, head, i + r, keys, pr);
            }
            float *p_seen = p + skipped, *dk_seen = dk + keys.begin * width,
                  *dv_seen = dv + keys.begin * width;
            if (args.dk != nullptr) add_transposed(p_seen, stride, rows, q, seen, width, dk_seen);
            if (args.dv != nullptr) add_transposed(w + skipped, stride, rows, dout, seen, width, dv_seen);
            if (args.dq != nullptr) {
                times_rows(p_seen, stride, padded, k + keys.begin * width, width, seen, width, dq);
                store_rows(dq, rows, width, args.softmax_scale, static_cast<T*>(args.dq) + first + i * step,
                           headdim, step);
            }
        }
        if (args.dgate != nullptr) args.dgate[sequence * args.nheads + head] = gate_sum;
    }
    const std::int64_t step = args.kv_heads * headdim, first = tokens.start * step + kv_head * headdim;
    if (args.dk != nullptr)
        store_rows(dk, n, width, args.softmax_scale, static_cast<T*>(args.dk) + first, headdim, step);
    if (args.dv != nullptr) store_rows(dv, n, width, 1.0f, static_cast<T*>(args.dv) + first, headdim, step);
}

void forward(const AttentionFwd& args, const Relative& relative, std::int64_t sequence, std::int64_t head,
             std::int64_t begin, std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_as<float>(args, relative, sequence, head, begin, end, scratch);
        case DType::kBFloat16:
            return forward_as<bf16>(args, relative, sequence, head, begin, end, scratch);
        case DType::kFloat16:
            return forward_as<fp16>(args, relative, sequence, head, begin, end, scratch);
    }
}

void backward(const AttentionBwd& args, const Relative& relative, const RelativeGrads& grads,
              std::int64_t sequence, std::int64_t kv_head, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_as<float>(args, relative, grads, sequence, kv_head, scratch);
        case DType::kBFloat16:
            return backward_as<bf16>(args, relative, grads, sequence, kv_head, scratch);
        case DType::kFloat16:
            return backward_as<fp16>(args, relative, grads, sequence, kv_head, scratch);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {forward_scratch, backward_scratch, forward, backward};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
