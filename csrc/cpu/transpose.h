// Transposes kLanes x kLanes floats in registers. Needs no include before it: includes vec.h.
#pragma once

#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

#ifdef __AVX512F__
FASTBERT_INLINE void transpose(Vec (&v)[kLanes]) {
    Vec w[kLanes];
    for (int i = 0; i < 16; i += 2) {  // pairs, then quadruples within the four parts of a vector
        w[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    const auto low = [](Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    const auto high = [](Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    for (int i = 0; i < 16; i += 4) {
        v[i] = low(w[i], w[i + 2]);
        v[i + 1] = high(w[i], w[i + 2]);
        v[i + 2] = low(w[i + 1], w[i + 3]);
        v[i + 3] = high(w[i + 1], w[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // then the parts
        const Vec a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88),
                  b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        const Vec c = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88),
                  d = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
        w[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        w[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        w[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        w[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) v[i] = w[i];
}
#else
FASTBERT_INLINE void transpose(Vec (&v)[kLanes]) {
    Vec w[kLanes];
    for (int i = 0; i < 8; i += 4) {
        const Vec a = _mm256_unpacklo_ps(v[i], v[i + 1]), b = _mm256_unpackhi_ps(v[i], v[i + 1]);
        const Vec c = _mm256_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
        w[i] = _mm256_shuffle_ps(a, c, 0x44);
        w[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        w[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        w[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2f128_ps(w[i], w[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(w[i], w[i + 4], 0x31);
    }
}
#endif

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
