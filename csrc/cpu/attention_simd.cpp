// Attention of one sequence and head, for one instruction set (see isa.h). Contract:
// fastbert/ops/attention.py.
//
// Math       S = scale q kᵀ + bias;  P = softmax(S);  out = gate dropout(P) v
//            dP = dropout'(dout vᵀ);  delta = rowsum(P ∘ dP);  dS = gate P ∘ (dP - delta)
//            dq = scale dS k;  dk = scale dSᵀ q;  dv = gate dropout(P)ᵀ dout;  dgate = Σ delta
// Tiling     K (and V for backward) is packed transposed into panels of 64 keys, V (and K) as float rows: at
//            512 tokens and 64 columns each is 128 KiB and stays in L2. 24 queries go through all keys
//            together, so that a panel comes from L2 once for them. A register tile is 6 rows by 4 vectors
//            (AVX-512) or by 2 (AVX2).
// Precision  widened to float on load, rounded once on store; P is never rounded. The maximum of a row is
//            subtracted before exp; backward computes the softmax again instead of exp(S - lse), which would
//            carry the rounding of a large lse into every P.
// Source     Vaswani et al. 2017, eq. 1; blocking as in Goto, van de Geijn 2008, "Anatomy of High-Performance
//            Matrix Multiplication".
#include <cmath>

#include "attention.h"
#include "exp.h"
#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kRows = 6;                           // rows of a register tile
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;  // its vectors
constexpr std::int64_t kDepth = 64;                // keys a block of P v goes through before it changes rows

FASTBERT_INLINE std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
FASTBERT_INLINE std::int64_t less(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// c (kRows x kVectors vectors) = or += a b. a: element (row, k) at a[row * a_row + k * a_k]; b: row-major.
template <int kVectors>
FASTBERT_INLINE void tile(const float* a, std::int64_t a_row, std::int64_t a_k, const float* b,
                          std::int64_t b_row, std::int64_t depth, float* c, std::int64_t c_row,
                          bool accumulate) {
    Vec sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = accumulate ? load(c + r * c_row + v * kLanes, kLanes) : zero();
    for (std::int64_t k = 0; k < depth; ++k) {
        Vec right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_row + v * kLanes, kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec left = broadcast(a[r * a_row + k * a_k]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(c + r * c_row + v * kLanes, sum[r][v], kLanes);
}

// The same over `columns` (a multiple of kLanes) columns of b and c.
void tiles(const float* a, std::int64_t a_row, std::int64_t a_k, const float* b, std::int64_t b_row,
           std::int64_t depth, float* c, std::int64_t c_row, std::int64_t columns, bool accumulate) {
    std::int64_t j = 0;
    for (; j + kMaxVectors * kLanes <= columns; j += kMaxVectors * kLanes)
        tile<kMaxVectors>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, accumulate);
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
        tile<2>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, accumulate);
    for (; j < columns; j += kLanes) tile<1>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, accumulate);
}

template <class T>
FASTBERT_INLINE const T* row_of(const Heads& t, std::int64_t row, std::int64_t head) {
    return static_cast<const T*>(t.data) + row * t.row_stride + head * t.head_stride;
}

// Rows [first, first + count) as floats, `width` a row, zeros behind `headdim`; then zero rows up to
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

// Panels [headdim][kPanel] of the transpose, zeros for the keys behind `count`.
void transpose(const float* rows, std::int64_t count, std::int64_t headdim, std::int64_t width, float* out) {
    for (std::int64_t first = 0; first < count; first += kPanel, out += headdim * kPanel) {
        const std::int64_t n = less(kPanel, count - first);
        for (std::int64_t c = 0; c < headdim; ++c) {
            float* line = out + c * kPanel;
            for (std::int64_t j = 0; j < n; ++j) line[j] = rows[(first + j) * width + c];
            for (std::int64_t j = n; j < kPanel; ++j) line[j] = 0.0f;
        }
    }
}

// scores (kQueryBlock x stride) = a (kQueryBlock x headdim) times the panels.
void times_panels(const float* a, std::int64_t width, std::int64_t rows, const float* panels,
                  std::int64_t keys, std::int64_t headdim, float* scores, std::int64_t stride) {
    for (std::int64_t j = 0; j < keys; j += kPanel, panels += headdim * kPanel)
        for (std::int64_t r = 0; r < rows; r += kRows)
            tiles(a + r * width, width, 1, panels, kPanel, headdim, scores + r * stride + j, stride,
                  less(kPanel, round_up(keys - j, kLanes)), false);
}

// out (rows x width) = weights (rows x keys) times rows of b.
void times_rows(const float* weights, std::int64_t stride, std::int64_t rows, const float* b,
                std::int64_t keys, std::int64_t width, float* out) {
    for (std::int64_t j = 0; j < keys; j += kDepth)
        for (std::int64_t r = 0; r < rows; r += kRows)
            tiles(weights + r * stride + j, stride, 1, b + j * width, width, less(kDepth, keys - j),
                  out + r * width, width, width, j > 0);
}

struct Row {
    float top, sum;  // P = exp(s - top) / sum; sum 0 where no key is allowed
};

// One row of scores: scale and bias, then exp(s - max) in place; columns from `allowed` to `keys` become 0.
FASTBERT_INLINE Row softmax_row(float* s, std::int64_t allowed, std::int64_t keys, float scale,
                                const float* bias) {
    const Vec factor = broadcast(scale);
    Vec most[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    for_vectors(allowed, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        Vec x = mul(load(s + j, n), factor);
        if (bias != nullptr) x = add(x, load(bias + j, n));
        store(s + j, x, n);
        most[k] = maximum(most[k], n == kLanes ? x : first_or(x, n, -INFINITY));
    });
    const float top = largest(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
    if (top == -INFINITY) {  // no allowed key, or NaNs, which a maximum may lose: the row is then NaN
        float sum = 0.0f;
        for (std::int64_t j = 0; j < allowed; ++j)
            if (s[j] != s[j]) sum = s[j];
        for (std::int64_t j = 0; j < keys; ++j) s[j] = sum;
        return {top, sum};
    }
    const Vec shift = broadcast(top);
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(allowed, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec e = first(exponential(sub(load(s + j, n), shift)), n);
        store(s + j, e, n);
        total[k] = add(total[k], e);
    });
    for (std::int64_t j = allowed; j < keys; ++j) s[j] = 0.0f;
    return {top, sum4(total)};
}

struct Span {  // the tokens of one sequence
    std::int64_t start, length;
};

FASTBERT_INLINE Span span_of(const Attention& args, std::int64_t sequence) {
    const std::int64_t start = args.cu_seqlens[sequence];
    return {start, args.cu_seqlens[sequence + 1] - start};
}

FASTBERT_INLINE const float* bias_row(const Bias& bias, std::int64_t sequence, std::int64_t head,
                                      std::int64_t i) {
    return bias.data == nullptr
               ? nullptr
               : bias.data + sequence * bias.batch_stride + head * bias.head_stride + i * bias.row_stride;
}

// w = dropout(p) times `factor`; 64 columns share a word of bits.
FASTBERT_INLINE void weigh(const float* p, float* w, std::int64_t keys, float factor, const DropoutArgs& args,
                           std::int64_t head, std::int64_t row) {
    const bool drop = args.seed != nullptr;
    const Dropout dropout{drop ? *args.seed : 0, args.offset, static_cast<std::uint32_t>(head),
                          args.threshold};
    const Vec scale = broadcast(drop ? factor * args.scale : factor);
    for (std::int64_t block = 0; block < keys; block += 64) {
        const std::uint64_t bits = drop ? philox_keep(dropout, static_cast<std::uint32_t>(row),
                                                      static_cast<std::uint32_t>(block / 64))
                                        : ~0ull;
        for (std::int64_t j = block; j < less(keys, block + 64); j += kLanes) {
            const int n = static_cast<int>(less(keys - j, kLanes));
            const Vec x = mul(load(p + j, n), scale);
            store(w + j, drop ? kept(x, bits >> (j - block)) : x, n);
        }
    }
}

std::int64_t width_of(std::int64_t headdim) { return round_up(headdim, kLanes); }

std::int64_t forward_scratch(std::int64_t seqlen, std::int64_t headdim) {
    const std::int64_t keys = round_up(seqlen, kPanel), width = width_of(headdim);
    return round_up(keys * headdim + keys * width + kQueryBlock * (2 * width + keys), 16);
}

template <class T>
void forward_as(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                std::int64_t end, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, keys = round_up(n, kPanel);
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    float *panels = scratch, *v = panels + keys * headdim, *q = v + keys * width;
    float *out = q + kQueryBlock * width, *scores = out + kQueryBlock * width;
    copy_rows<T>(args.k, tokens.start, head, n, n, headdim, width, v);
    transpose(v, n, headdim, width, panels);
    copy_rows<T>(args.v, tokens.start, head, n, n, headdim, width, v);
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    for (std::int64_t i = begin; i < end; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, end - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        times_panels(q, width, padded, panels, n, headdim, scores, keys);
        float factor[kQueryBlock];
        for (std::int64_t r = 0; r < rows; ++r) {
            float* s = scores + r * keys;
            const std::int64_t row = tokens.start + i + r;
            const Row softmax = softmax_row(s, args.causal ? i + r + 1 : n, n, args.softmax_scale,
                                            bias_row(args.bias, sequence, head, i + r));
            const bool empty = softmax.sum == 0.0f;
            const float inverse = empty ? 0.0f : 1.0f / softmax.sum;
            args.lse[head * args.total + row] = empty ? -INFINITY : softmax.top + __builtin_logf(softmax.sum);
            if (args.probs != nullptr) {
                T* p = static_cast<T*>(args.probs) +
                       ((sequence * args.nheads + head) * args.max_seqlen + i + r) * args.max_seqlen;
                for_vectors(n, [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
                    store(p + j, mul(load(s + j, m), broadcast(inverse)), m);
                });
            }
            if (args.dropout.seed != nullptr) weigh(s, s, n, 1.0f, args.dropout, head, row);
            factor[r] = inverse * gate;
        }
        times_rows(scores, keys, padded, v, n, width, out);
        for (std::int64_t r = 0; r < rows; ++r) {
            T* o = static_cast<T*>(args.out) + ((tokens.start + i + r) * args.nheads + head) * headdim;
            for_vectors(headdim, [&](std::int64_t c, int, int m) __attribute__((always_inline)) {
                store(o + c, mul(load(out + r * width + c, m), broadcast(factor[r])), m);
            });
        }
    }
}

std::int64_t backward_scratch(std::int64_t seqlen, std::int64_t headdim) {
    const std::int64_t keys = round_up(seqlen, kPanel), width = width_of(headdim);
    // panels of K and V; rows of K, dk and dv (kRows more, for the last tile); q, dout, dq; P, dP, weights
    return round_up(
        2 * keys * headdim + 3 * (keys + kRows) * width + kQueryBlock * (3 * width + 3 * (keys + kRows)), 16);
}

// sums[j] += Σ_r weights[r][j] b[r], for all keys j.
void add_transposed(const float* weights, std::int64_t stride, std::int64_t rows, const float* b,
                    std::int64_t keys, std::int64_t width, float* sums) {
    for (std::int64_t j = 0; j < keys; j += kRows)
        tiles(weights + j, 1, stride, b, width, rows, sums + j * width, width, width, true);
}

template <class T>
void store_rows(const float* rows, std::int64_t count, std::int64_t width, float factor, T* out,
                std::int64_t headdim, std::int64_t out_stride) {
    for (std::int64_t j = 0; j < count; ++j)
        for_vectors(headdim, [&](std::int64_t c, int, int n) __attribute__((always_inline)) {
            store(out + j * out_stride + c, mul(load(rows + j * width + c, n), broadcast(factor)), n);
        });
}

template <class T>
void backward_as(const AttentionBwd& args, std::int64_t sequence, std::int64_t head, float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, keys = round_up(n, kPanel), tall = n + kRows;
    const std::int64_t headdim = args.headdim, width = width_of(headdim), stride = keys + kRows;
    float *k_panels = scratch, *v_panels = k_panels + keys * headdim, *k = v_panels + keys * headdim;
    float *dk = k + (keys + kRows) * width, *dv = dk + (keys + kRows) * width,
          *q = dv + (keys + kRows) * width;
    float *dout = q + kQueryBlock * width, *dq = dout + kQueryBlock * width, *p = dq + kQueryBlock * width;
    float *dp = p + kQueryBlock * stride, *w = dp + kQueryBlock * stride;
    const Heads upstream{args.dout, args.nheads * headdim, headdim};
    copy_rows<T>(args.v, tokens.start, head, n, n, headdim, width, k);
    transpose(k, n, headdim, width, v_panels);
    copy_rows<T>(args.k, tokens.start, head, n, n, headdim, width, k);
    transpose(k, n, headdim, width, k_panels);
    for (std::int64_t e = 0; e < tall * width; ++e) dk[e] = dv[e] = 0.0f;
    for (std::int64_t e = 0; e < kQueryBlock * stride; ++e) p[e] = w[e] = 0.0f;  // the last tile reads past n
    const float gate = args.gate == nullptr ? 1.0f : args.gate[head];
    double gate_sum = 0.0;
    const std::int64_t step = args.nheads * headdim, first = tokens.start * step + head * headdim;
    for (std::int64_t i = 0; i < n; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, n - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        copy_rows<T>(upstream, tokens.start + i, head, rows, padded, headdim, width, dout);
        times_panels(q, width, padded, k_panels, n, headdim, p, stride);
        times_panels(dout, width, padded, v_panels, n, headdim, dp, stride);
        for (std::int64_t r = 0; r < rows; ++r) {
            float *pr = p + r * stride, *dpr = dp + r * stride, *wr = w + r * stride;
            const std::int64_t row = tokens.start + i + r;
            const Row softmax = softmax_row(pr, args.causal ? i + r + 1 : n, n, args.softmax_scale,
                                            bias_row(args.bias, sequence, head, i + r));
            const float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;
            const Vec normal = broadcast(inverse);
            if (args.dropout.seed != nullptr) weigh(dpr, dpr, n, 1.0f, args.dropout, head, row);
            Vec total[4] = {zero(), zero(), zero(), zero()};
            for_vectors(n, [&](std::int64_t j, int m, int c) __attribute__((always_inline)) {
                const Vec probability = mul(load(pr + j, c), normal);
                store(pr + j, probability, c);
                total[m] = fma(probability, load(dpr + j, c), total[m]);
            });
            const float delta = sum4(total);
            gate_sum += delta;
            weigh(pr, wr, n, gate, args.dropout, head, row);
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
        times_rows(p, stride, padded, k, n, width, dq);
        add_transposed(p, stride, rows, q, n, width, dk);
        add_transposed(w, stride, rows, dout, n, width, dv);
        store_rows(dq, rows, width, args.softmax_scale, static_cast<T*>(args.dq) + first + i * step, headdim,
                   step);
    }
    store_rows(dk, n, width, args.softmax_scale, static_cast<T*>(args.dk) + first, headdim, step);
    store_rows(dv, n, width, 1.0f, static_cast<T*>(args.dv) + first, headdim, step);
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
