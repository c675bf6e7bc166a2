// Rows of a LayerNorm, an RMSNorm or a NoNorm, for one instruction set; shared by layer_norm_simd.cpp and
// embedding_simd.cpp.
//
// A row of z is stored in float, in L1. Precision: the variance takes two passes. The first computes the mean
// m; the second also sums z - m, whose mean d corrects m (Chan, Golub, LeVeque 1983). So neither the rounding
// of the first sum nor a mean far from 0 reaches the result. An RMSNorm subtracts nothing: its squares are
// summed in the pass that computes z. A NoNorm has neither mean nor rstd.
#pragma once

#include "layer_norm.h"
#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

// Draws the dropout bits of one row, 64 columns per word.
FASTBERT_INLINE void draw_bits(const DropoutArgs& args, std::int64_t row, std::int64_t hidden,
                               std::uint64_t* bits) {
    const Dropout dropout{*args.seed, args.offset, 0, args.threshold};
    philox_keep(dropout, static_cast<std::uint32_t>(row), (hidden + 63) / 64, bits);
}

FASTBERT_INLINE std::uint64_t bits_at(const std::uint64_t* bits, std::int64_t column) {
    return bits[column >> 6] >> (column & 63);
}

enum class Norm { kLayer, kRms, kNone };

// Adds to the first pass over a row: its sum, or of an RMSNorm the sum of its squares.
template <Norm kNorm>
FASTBERT_INLINE Vec with_value(Vec total, Vec z) {
    return kNorm == Norm::kNone ? total : kNorm == Norm::kRms ? fma(z, z, total) : add(total, z);
}

template <Norm kNorm>
FASTBERT_INLINE float plain_sum(const float* z, std::int64_t hidden) {
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        total[k] = with_value<kNorm>(total[k], load(z + j, n));
    });
    return sum4(total);
}

struct Moments {
    float mean, correction, rstd;  // the mean is mean + correction; 0 but of a LayerNorm
};

FASTBERT_INLINE Moments rms_of(std::int64_t hidden, float square_sum, double eps) {
    const double rstd = 1.0 / __builtin_sqrt(square_sum / static_cast<double>(hidden) + eps);
    return {0.0f, 0.0f, static_cast<float>(rstd)};
}

FASTBERT_INLINE Moments moments_of(const float* z, std::int64_t hidden, float total, double eps) {
    const double inverse = 1.0 / static_cast<double>(hidden);
    const float mean = static_cast<float>(total * inverse);
    const Vec centre = broadcast(mean);
    Vec first_moment[4] = {zero(), zero(), zero(), zero()},
        second_moment[4] = {zero(), zero(), zero(), zero()};
    for_vectors(hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec centred = first(sub(load(z + j, n), centre), n);
        first_moment[k] = add(first_moment[k], centred);
        second_moment[k] = fma(centred, centred, second_moment[k]);
    });
    const double correction = sum4(first_moment) * inverse;
    const double variance = sum4(second_moment) * inverse - correction * correction;
    const double rstd = 1.0 / __builtin_sqrt((variance > 0.0 || variance != variance ? variance : 0.0) + eps);
    return {mean, static_cast<float>(correction), static_cast<float>(rstd)};
}

// Calls each(column, n, y) for every vector of y = x_hat weight + bias.
template <class Each>
FASTBERT_INLINE void normalise(const float* z, const Moments& moments, const float* weight, const float* bias,
                               std::int64_t hidden, const Each& each) {
    const Vec mean = broadcast(moments.mean), correction = broadcast(moments.correction);
    const Vec rstd = broadcast(moments.rstd);
    for_vectors(hidden, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
        const Vec x_hat = mul(sub(sub(load(z + j, n), mean), correction), rstd);
        each(j, n, fma(x_hat, load(weight + j, n), load(bias + j, n)));
    });
}

// The inputs of backward for kRows rows: z rounded to T, the statistics that the norm has, and the widened
// weight.
template <class T>
struct NormRows {
    std::int64_t hidden, z_stride;
    const T* z;
    const float *mean, *rstd, *weight;
};

// A row's means of g = dy weight and of g x_hat; upstream(r, column, n) is dy of row r.
template <Norm kNorm, class T, class Upstream>
FASTBERT_INLINE void row_means(const NormRows<T>& rows, int r, const Upstream& upstream, float& mean_g,
                               float& mean_gx) {
    constexpr bool kRms = kNorm == Norm::kRms;
    const T* z = rows.z + r * rows.z_stride;
    const Vec centre = kRms ? zero() : broadcast(rows.mean[r]), scale = broadcast(rows.rstd[r]);
    Vec g_sum[4] = {zero(), zero(), zero(), zero()}, gx_sum[4] = {zero(), zero(), zero(), zero()};
    for_vectors(rows.hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec g =
            mul(upstream(r, j, n), load(rows.weight + j, n));  // 0 in the lanes past n: x_hat need not be
        const Vec x_hat = first(mul(sub(load(z + j, n), centre), scale), n);
        if (!kRms) g_sum[k] = add(g_sum[k], g);
        gx_sum[k] = fma(g, x_hat, gx_sum[k]);
    });
    const double inverse = 1.0 / static_cast<double>(rows.hidden);
    mean_g = static_cast<float>(sum4(g_sum) * inverse);
    mean_gx = static_cast<float>(sum4(gx_sum) * inverse);
}

// Backward of kRows rows. Calls each(column, n, dz), with one vector of dz per row, if dz is needed. Adds the
// sums of dy x_hat and of dy over the rows to dweight and dbias (both null: not wanted).
template <int kRows, Norm kNorm = Norm::kLayer, class T, class Upstream, class Each>
FASTBERT_INLINE void norm_backward(const NormRows<T>& rows, const Upstream& upstream, float* dweight,
                                   float* dbias, bool need_dz, const Each& each) {
    constexpr bool kRms = kNorm == Norm::kRms, kNone = kNorm == Norm::kNone;
    float mean_g[kRows] = {}, mean_gx[kRows] = {};
    if (need_dz && !kNone)
        for (int r = 0; r < kRows; ++r) row_means<kNorm>(rows, r, upstream, mean_g[r], mean_gx[r]);
    for_vectors(rows.hidden, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
        const Vec w = load(rows.weight + j, n);
        Vec dw = zero(), db = zero(), dz[kRows];
        for (int r = 0; r < kRows; ++r) {
            const Vec grad = upstream(r, j, n);
            const Vec z = load(rows.z + r * rows.z_stride + j, n);
            const Vec g = mul(grad, w);
            Vec x_hat = z;
            dz[r] = g;
            if (!kNone) {
                const Vec scale = broadcast(rows.rstd[r]);
                x_hat = mul(kRms ? z : sub(z, broadcast(rows.mean[r])), scale);
                dz[r] =
                    mul(fnma(x_hat, broadcast(mean_gx[r]), kRms ? g : sub(g, broadcast(mean_g[r]))), scale);
            }
            dw = fma(grad, x_hat, dw);
            db = add(db, grad);
        }
        if (need_dz) each(j, n, dz);
        if (dweight != nullptr) {
            store(dweight + j, add(load(dweight + j, n), dw), n);
            store(dbias + j, add(load(dbias + j, n), db), n);
        }
    });
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
