// Rotary positions of a run of rows, for one instruction set (see isa.h). Contract: fastbert/ops/rotary.py.
//
// Math       y_l = x_l cos - x_r sin,  y_r = x_r cos + x_l sin  per pair (l, r) of columns; sin is negative
//            on the way back. The other columns are copied.
// Tiling     One head of one row at a time. Rotate-half reads two vectors, the l and the r columns, and a
//            vector of each table. Interleaved reads one vector of pairs and exchanges its neighbours; there
//            the row's tables are spread once over all columns, for all heads, with the signs of sin. A later
//            row is prefetched.
// Precision  Widened to float on load. One product is rounded, the other is added by a fused operation, and
//            the sum is rounded on store.
#include "rotary.h"
#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr std::int64_t kAhead = 2;  // rows between the row that is computed and the row that is prefetched

template <class T>
FASTBERT_INLINE void rotate_halves(const T* x, const float* c, const float* s, std::int64_t half, Vec sign,
                                   T* y) {
    for_vectors(half, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
        const Vec left = load(x + j, n), right = load(x + half + j, n);
        const Vec cosine = load(c + j, n), sine = mul(load(s + j, n), sign);
        store(y + j, fnma(right, sine, mul(left, cosine)), n);
        store(y + half + j, fma(left, sine, mul(right, cosine)), n);
    });
}

// c and s are of all columns, s with its signs.
template <class T>
FASTBERT_INLINE void rotate_neighbours(const T* x, const float* c, const float* s, std::int64_t columns,
                                       T* y) {
    for_vectors(columns, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
        const Vec here = load(x + j, n);
        store(y + j, fma(neighbours(here), load(s + j, n), mul(here, load(c + j, n))), n);
    });
}

template <class T>
void rotate_rows(const Rotary& args, std::int64_t begin, std::int64_t end, float* scratch) {
    const std::int64_t half = args.half, rest = args.headdim - 2 * half;
    const float sign = args.back ? -1.0f : 1.0f;
    const Vec signs = broadcast(sign);
    const std::int64_t y_head_stride = args.y == args.x ? args.head_stride : args.headdim;
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t at = position_of(args, row) * half;
        const float *c = args.cos + at, *s = args.sin + at;
        if (args.interleaved) {
            float *spread_c = scratch, *spread_s = scratch + 2 * half;
            for (std::int64_t i = 0; i < half; ++i) {
                spread_c[2 * i] = spread_c[2 * i + 1] = c[i];
                spread_s[2 * i] = -sign * s[i];
                spread_s[2 * i + 1] = sign * s[i];
            }
            c = spread_c;
            s = spread_s;
        }
        const T* x = static_cast<const T*>(args.x) + row * args.row_stride;
        T* y = static_cast<T*>(args.y) + row * args.y_stride;
        for (std::int64_t head = 0; head < args.heads; ++head, x += args.head_stride, y += y_head_stride) {
            // The processor's own prefetch stops at each gap between rows (NOTES.md).
            const char* const ahead = reinterpret_cast<const char*>(x + kAhead * args.row_stride);
            for (std::int64_t i = 0; i < args.headdim * static_cast<std::int64_t>(sizeof(T)); i += 64)
                __builtin_prefetch(ahead + i);
            if (args.interleaved)
                rotate_neighbours(x, c, s, 2 * half, y);
            else
                rotate_halves(x, c, s, half, signs, y);
            if (rest > 0 && x != y)
                __builtin_memcpy(y + 2 * half, x + 2 * half, static_cast<std::size_t>(rest) * sizeof(T));
        }
    }
}

void rotate(const Rotary& args, std::int64_t begin, std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return rotate_rows<float>(args, begin, end, scratch);
        case DType::kBFloat16:
            return rotate_rows<bf16>(args, begin, end, scratch);
        case DType::kFloat16:
            return rotate_rows<fp16>(args, begin, end, scratch);
    }
}

}  // namespace

extern const RotaryKernels rotary_kernels;
const RotaryKernels rotary_kernels = {rotate};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
