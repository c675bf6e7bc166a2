// Attention of one sequence and head in bf16, by AVX-512-BF16's product of pairs. Contract:
// fastbert/ops/attention.py; math: attention_simd.cpp.
//
// Tiling     As in attention_simd.cpp, but an element of a sum is a pair of bf16: q kᵀ and dout vᵀ sum over
//            pairs of columns (panels [headdim / 2][64 keys]), P v and dS k over pairs of keys ([keys / 2]
//            [headdim]), dSᵀ q and Pᵀ dout over pairs of queries ([12][headdim]). K and V take half the
//            memory. A tile may read anything after the last query or key: it enters only sums that are not
//            used, or its weight is 0. With an odd number, the partner of the last element weighs 0.
// Precision  Sums, softmax, lse, probs, delta and the gradients of bias and gate in float, as there. Rounded
//            to bf16 once, before their product: exp(S - max) in forward, P and P ∘ (dP - delta) in backward.
//            Eager PyTorch in bf16 rounds these too, and also S and dP. Constants of a row or a head (1 /
//            sum, gate, 1 / (1 - p), scale) multiply the float sum. Subnormal elements count as 0
//            (vec_avx512_bf16.h). Sequences of fewer than 16 tokens use the kernels for AVX-512, which round
//            neither P nor dS: with so few roundings an error below eager's would be luck.
// Source     Intel, "Intel Architecture Instruction Set Extensions Programming Reference", VDPBF16PS.
#include "attention_simd.h"

namespace fastbert {
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace FASTBERT_ISA {
namespace {

// Shorter sequences use the kernels for AVX-512.
constexpr std::int64_t kFew = 16;

FASTBERT_INLINE std::int64_t more(std::int64_t a, std::int64_t b) { return a < b ? b : a; }
constexpr std::int64_t half(std::int64_t n) { return (n + 1) / 2; }

// Columns c … c + 15 of a row of q, k, v or dout, zeros from `headdim` on.
FASTBERT_INLINE Words words_of(const bf16* row, std::int64_t c, std::int64_t headdim) {
    const std::int64_t n = less(headdim - c, kLanes);
    return n > 0 ? load_words(row + c, static_cast<int>(n)) : _mm256_setzero_si256();
}

// Rows [first, first + count) unchanged, in pairs of columns, `width` columns per row.
void copy_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
               std::int64_t headdim, std::int64_t width, Pair* out) {
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t c = 0; c < width; c += kLanes)
            store_words(out + (i * width + c) / 2, words_of(row_of<bf16>(t, first + i, head), c, headdim),
                        kLanes);
}

// Row i of `out` holds the pairs {row 2i, row 2i + 1}; the partner of a last row is the row itself.
void pair_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
               std::int64_t headdim, std::int64_t width, Pair* out) {
    for (std::int64_t i = 0; i < count; i += 2, out += width) {
        const bf16* even = row_of<bf16>(t, first + i, head);
        const bf16* odd = row_of<bf16>(t, first + less(i + 1, count - 1), head);
        for (std::int64_t c = 0; c < width; c += kLanes)
            store(out + c, interleave(words_of(even, c, headdim), words_of(odd, c, headdim)));
    }
}

// Panels [half(headdim)][kKeyPanel] of the transpose, pairs of columns; zeros for keys from `count` to the
// next multiple of kLanes.
void transpose_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
                    std::int64_t headdim, Pair* out) {
    const std::int64_t depth = half(headdim);
    for (std::int64_t j = 0; j < count; j += kLanes) {
        Pair* panel = out + j / kKeyPanel * depth * kKeyPanel + j % kKeyPanel;
        for (std::int64_t c = 0; c < depth; c += kLanes) {
            const std::int64_t n = less(2 * kLanes, headdim - 2 * c);
            const __mmask32 mask = static_cast<__mmask32>((1ull << n) - 1);
            __m512i block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                block[i] = j + i < count
                               ? _mm512_maskz_loadu_epi16(mask, row_of<bf16>(t, first + j + i, head) + 2 * c)
                               : _mm512_setzero_si512();
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                if (c + i < depth) store(panel + (c + i) * kKeyPanel, block[i]);
        }
    }
}

// out = dropout(p), rounded, without the factor 1 / (1 - p); zeros up to the next multiple of kLanes.
FASTBERT_INLINE void narrow_row(const float* p, const Keys& keys, const std::uint64_t* bits, Pair* out) {
    for_kept(keys, bits, [&](std::int64_t j, int n, std::uint64_t word) __attribute__((always_inline)) {
        store_words(out + j / 2, narrow(kept(load(p + j, n), word)), kLanes);
    });
}

void clear(Pair* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = Pair{0, 0};
}

// Row i of `out` holds the pairs {row 2i, row 2i + 1} of `rows` (count x stride pairs of columns), with
// zeros in the kLanes columns after the last vector.
void pair_weights(const Pair* rows, std::int64_t stride, std::int64_t count, std::int64_t columns, Pair* out,
                  std::int64_t out_stride) {
    for (std::int64_t i = 0; i < count; i += 2, rows += 2 * stride, out += out_stride) {
        std::int64_t j = 0;
        for (; j < columns; j += kLanes)
            store(out + j,
                  interleave(load_words(rows + j / 2, kLanes), load_words(rows + stride + j / 2, kLanes)));
        store(out + j, _mm512_setzero_si512());
    }
}

std::int64_t forward_scratch(const Attention& args, std::int64_t seqlen, std::int64_t queries) {
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    const std::int64_t keys = round_up(most_keys(args, seqlen, queries), kKeyPanel);
    const std::int64_t stride = row_stride(args, seqlen);
    // bits of a row; panels of K, pairs of rows of V; of a block: q, P, out and scores
    const std::int64_t own = bits_room(stride) + keys * half(headdim) + keys / 2 * width +
                             kQueryBlock * (width / 2 + stride / 2 + width + stride);
    return more(round_up(own, 16), avx512::attention_kernels.forward_scratch(args, less(seqlen, kFew), kFew));
}

void forward(const AttentionFwd& args, const Relative& relative, std::int64_t sequence, std::int64_t head,
             std::int64_t begin, std::int64_t end, float* scratch) {
    const Span tokens = span_of(args, sequence);
    if (tokens.length < kFew)
        return avx512::attention_kernels.forward(args, relative, sequence, head, begin, end, scratch);
    const std::int64_t n = tokens.length, kv_head = kv_head_of(args, head);
    const std::int64_t headdim = args.headdim, width = width_of(headdim), depth = half(headdim);
    // packed are the keys from `low` on
    const Keys all = keys_of(args, n, begin, end - begin);
    const std::int64_t low = all.begin / kKeyPanel * kKeyPanel, count = all.end - low;
    const std::int64_t packed = round_up(count, kKeyPanel), stride = row_stride(args, n);
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    Pair *panels = reinterpret_cast<Pair*>(scratch + bits_room(stride)), *v = panels + packed * depth,
         *q = v + packed / 2 * width;
    Pair* weights = q + kQueryBlock * width / 2;
    float* out = reinterpret_cast<float*>(weights + kQueryBlock * stride / 2);
    float* scores = out + kQueryBlock * width;
    transpose_rows(args.k, tokens.start + low, kv_head, count, headdim, panels);
    pair_rows(args.v, tokens.start + low, kv_head, count, headdim, width, v);
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    const float common = args.dropout.seed == nullptr ? gate : gate * args.dropout.scale;
    for (std::int64_t i = begin; i < end; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, end - i), padded = round_up(rows, kRows);
        copy_rows(args.q, tokens.start + i, head, rows, headdim, width, q);
        prefetch_rows<bf16>(args.q, tokens.start + i + rows, head, less(kQueryBlock, end - i - rows),
                            headdim);
        const Keys keys = keys_of(args, n, i, rows);
        times_panels(q, width / 2, padded, panels, keys.first - low, keys.end - low, depth, scores, stride);
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
                bf16* p = static_cast<bf16*>(args.probs) + cell_of(args, sequence, head, i + r, keys.first);
                for_vectors(keys.columns(), [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
                    store(p + j, mul(load(s + j, m), broadcast(inverse)), m);
                });
            }
            narrow_row(s, keys, kept_in_forward(args, head, row, keys, bits), weights + r * stride / 2);
            factor[r] = inverse * common;
        }
        const std::int64_t skipped = (keys.begin - keys.first) / 2;
        times_rows(weights + skipped, stride / 2, padded, v + ((keys.first - low) / 2 + skipped) * width,
                   width, half(keys.columns()) - skipped, width, out);
        for (std::int64_t r = 0; r < rows; ++r)
            store_rows(out + r * width, 1, width, factor[r],
                       static_cast<bf16*>(args.out) + ((tokens.start + i + r) * args.nheads + head) * headdim,
                       headdim, 0);
    }
}

// Whether backward leaves the call to the kernels for AVX-512, whose dS has the gate as a factor: rounded dS
// of heads with different gates cannot be summed.
FASTBERT_INLINE bool gates_shared(const Attention& args) {
    return args.gate != nullptr && args.kv_heads < args.nheads;
}

std::int64_t backward_scratch(const Attention& args, std::int64_t seqlen) {
    if (gates_shared(args)) return avx512::attention_kernels.backward_scratch(args, seqlen);
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    const std::int64_t keys = round_up(seqlen, kKeyPanel), columns = row_stride(args, seqlen);
    // bits of a row; panels of K and V, pairs of rows of K; dk and dv (more, for the last tile); of a block:
    // q and dout, each in pairs of columns and of rows, dq, P and dP, weights and dS, each in pairs of keys
    // and of queries
    const std::int64_t own = bits_room(columns) + 2 * keys * half(headdim) + keys / 2 * width +
                             2 * (keys + kLanes) * width +
                             kQueryBlock * (2 * width + width + 2 * columns + columns + columns + kLanes);
    return more(round_up(own, 16), avx512::attention_kernels.backward_scratch(args, less(seqlen, kFew)));
}

void backward(const AttentionBwd& args, const Relative& relative, const RelativeGrads& grads,
              std::int64_t sequence, std::int64_t kv_head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    if (tokens.length < kFew || gates_shared(args))
        return avx512::attention_kernels.backward(args, relative, grads, sequence, kv_head, scratch);
    const std::int64_t n = tokens.length, packed = round_up(n, kKeyPanel), tall = packed + kLanes;
    const std::int64_t headdim = args.headdim, width = width_of(headdim), depth = half(headdim);
    const std::int64_t columns = row_stride(args, n), stride = columns + kLanes;
    std::uint64_t* const bits = reinterpret_cast<std::uint64_t*>(scratch);
    Pair *k_panels = reinterpret_cast<Pair*>(scratch + bits_room(columns)),
         *v_panels = k_panels + packed * depth;
    Pair *k = v_panels + packed * depth, *q = k + packed / 2 * width, *dout = q + kQueryBlock * width / 2;
    Pair *q_pairs = dout + kQueryBlock * width / 2, *dout_pairs = q_pairs + kQueryBlock / 2 * width;
    Pair *w = dout_pairs + kQueryBlock / 2 * width, *ds = w + kQueryBlock * columns / 2;
    Pair *w_pairs = ds + kQueryBlock * columns / 2, *ds_pairs = w_pairs + kQueryBlock / 2 * stride;
    float *dk = reinterpret_cast<float*>(ds_pairs + kQueryBlock / 2 * stride), *dv = dk + tall * width;
    float *dq = dv + tall * width, *p = dq + kQueryBlock * width, *dp = p + kQueryBlock * columns;
    const Heads upstream{args.dout, args.nheads * headdim, headdim};
    const bool need_ds = needs_ds(args, grads);
    transpose_rows(args.k, tokens.start, kv_head, n, headdim, k_panels);
    if (need_ds) transpose_rows(args.v, tokens.start, kv_head, n, headdim, v_panels);
    if (args.dq != nullptr) pair_rows(args.k, tokens.start, kv_head, n, headdim, width, k);
    for (std::int64_t e = 0; e < tall * width; ++e) dk[e] = dv[e] = 0.0f;
    const bool drop = args.dropout.seed != nullptr;
    const std::int64_t shared = args.nheads / args.kv_heads;
    // one gate if several heads of q read these keys
    const float gate = args.gate == nullptr ? 1.0f : args.gate[kv_head];
    for (std::int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
        double gate_sum = 0.0;
        const std::int64_t step = args.nheads * headdim, first = tokens.start * step + head * headdim;
        for (std::int64_t i = 0; i < n; i += kQueryBlock) {
            const std::int64_t rows = less(kQueryBlock, n - i), padded = round_up(rows, kRows);
            const Keys keys = keys_of(args, n, i, rows);
            copy_rows(args.q, tokens.start + i, head, rows, headdim, width, q);
            copy_rows(upstream, tokens.start + i, head, rows, headdim, width, dout);
            pair_rows(args.q, tokens.start + i, head, rows, headdim, width, q_pairs);
            pair_rows(upstream, tokens.start + i, head, rows, headdim, width, dout_pairs);
            times_panels(q, width / 2, padded, k_panels, keys.first, keys.end, depth, p, columns);
            if (need_ds)
                times_panels(dout, width / 2, padded, v_panels, keys.first, keys.end, depth, dp, columns);
            Row softmax[kQueryBlock];
            softmax_rows(args, relative, sequence, head, n, i, rows, keys, keys.columns(), p, columns,
                         softmax);
            for (std::int64_t r = 0; r < rows; ++r) {
                float *pr = p + r * columns, *dpr = dp + r * columns;
                const std::int64_t row = tokens.start + i + r;
                const float inverse = softmax[r].sum == 0.0f ? 0.0f : 1.0f / softmax[r].sum;
                const Vec normal = broadcast(inverse);
                const std::uint64_t* const kept = kept_in_backward(args, head, row, keys, bits);
                if (!need_ds) {
                    for_vectors(keys.columns(),
                                [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                                    store(pr + j, mul(load(pr + j, c), normal), c);
                                });
                    narrow_row(pr, keys, kept, w + r * columns / 2);
                    continue;
                }
                if (drop) weigh(dpr, dpr, keys, args.dropout.scale, kept);
                Vec total[4] = {zero(), zero(), zero(), zero()};
                for_vectors(keys.columns(), [&](std::int64_t j, int m, int c) __attribute__((always_inline)) {
                    const Vec probability = mul(load(pr + j, c), normal);
                    store(pr + j, probability, c);
                    total[m] = fma(probability, load(dpr + j, c), total[m]);
                });
                const float delta = sum4(total);
                gate_sum += delta;
                if (args.dv != nullptr) narrow_row(pr, keys, kept, w + r * columns / 2);
                Pair* ds_row = ds + r * columns / 2;
                float* wide =
                    args.ds == nullptr ? nullptr : args.ds + cell_of(args, sequence, head, i + r, keys.first);
                for_vectors(keys.columns(), [&](std::int64_t j, int, int c) __attribute__((always_inline)) {
                    const Vec d = mul(load(pr + j, c), sub(load(dpr + j, c), broadcast(delta)));
                    store_words(ds_row + j / 2, narrow(d), kLanes);
                    if (wide != nullptr) store(wide + j, mul(d, broadcast(gate)), c);
                    // dP is no longer needed
                    if (wanted(grads)) store(dpr + j, mul(d, broadcast(gate)), c);
                });
                if (wanted(grads)) add_distances(args, relative, grads, sequence, head, i + r, keys, dpr);
            }
            if (rows % 2 == 1) {  // the last query's partner
                clear(w + rows * columns / 2, columns / 2);
                clear(ds + rows * columns / 2, columns / 2);
            }
            const std::int64_t seen = keys.end - keys.begin, skipped = keys.begin - keys.first;
            if (args.dk != nullptr) {
                pair_weights(ds, columns / 2, rows, keys.columns(), ds_pairs, stride);
                add_transposed(ds_pairs + skipped, stride, half(rows), q_pairs, seen, width,
                               dk + keys.begin * width);
            }
            if (args.dv != nullptr) {
                pair_weights(w, columns / 2, rows, keys.columns(), w_pairs, stride);
                add_transposed(w_pairs + skipped, stride, half(rows), dout_pairs, seen, width,
                               dv + keys.begin * width);
            }
            if (args.dq != nullptr) {
                times_rows(ds + skipped / 2, columns / 2, padded, k + keys.begin / 2 * width, width,
                           half(keys.columns()) - skipped / 2, width, dq);
                store_rows(dq, rows, width, gate * args.softmax_scale,
                           static_cast<bf16*>(args.dq) + first + i * step, headdim, step);
            }
        }
        if (args.dgate != nullptr) args.dgate[sequence * args.nheads + head] = gate_sum;
    }
    const std::int64_t step = args.kv_heads * headdim, first = tokens.start * step + kv_head * headdim;
    if (args.dk != nullptr)
        store_rows(dk, n, width, gate * args.softmax_scale, static_cast<bf16*>(args.dk) + first, headdim,
                   step);
    if (args.dv != nullptr)
        store_rows(dv, n, width, drop ? gate * args.dropout.scale : gate, static_cast<bf16*>(args.dv) + first,
                   headdim, step);
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {forward_scratch, backward_scratch, forward, backward};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
