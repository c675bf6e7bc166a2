// LayerNorm of a run of rows, for one instruction set (see isa.h). Contract: fastbert/ops/layer_norm.py.
//
// Math       z = residual + dropout(x + x_bias);  x_hat = (z - mean) rstd;  y = x_hat weight + bias
//            dz = rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy weight
// Tiling     forward: a row at a time, z kept in a float row in L1. Backward: four rows at a time, so that a
// column
//            sum is loaded and stored once for four rows.
// Precision  widened to float on load, rounded once on store. Variance in two passes about the mean m of the
// first;
//            the second pass also sums z - m, whose mean d corrects m (Chan, Golub, LeVeque 1983): the
//            rounding of the first sum does not reach the result, nor does a mean far from 0.
// Saved      z rounded to T, mean and rstd; the dropout bits are drawn again.
#include "layer_norm.h"
#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

// The dropout bits of one row, 64 columns a word.
FASTBERT_INLINE void draw_bits(const DropoutArgs& args, std::int64_t row, std::int64_t hidden,
                               std::uint64_t* bits) {
    const Dropout dropout{*args.seed, args.offset, 0, args.threshold};
    for (std::int64_t block = 0; block * 64 < hidden; ++block)
        bits[block] =
            philox_keep(dropout, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(block));
}

FASTBERT_INLINE std::uint64_t bits_at(const std::uint64_t* bits, std::int64_t column) {
    return bits[column >> 6] >> (column & 63);
}

template <class T>
void widen_as(const Param& param, float* out, std::int64_t hidden) {
    const T* p = static_cast<const T*>(param.data);
    for_vectors(hidden, [&](std::int64_t j, int, int n)
                            __attribute__((always_inline)) { store(out + j, load(p + j, n), n); });
}

void widen(const Param& param, float missing, float* out, std::int64_t hidden) {
    if (param.data == nullptr) {
        for (std::int64_t j = 0; j < hidden; ++j) out[j] = missing;
        return;
    }
    switch (param.dtype) {
        case DType::kFloat32:
            return widen_as<float>(param, out, hidden);
        case DType::kBFloat16:
            return widen_as<bf16>(param, out, hidden);
        case DType::kFloat16:
            return widen_as<fp16>(param, out, hidden);
    }
}

// z of one row into `row_z`, also rounded into z_out if wanted; returns the sum of z.
template <class T>
FASTBERT_INLINE float gather_row(const LayerNormFwd& args, const float* x_bias, std::int64_t row,
                                 const std::uint64_t* bits, float* row_z) {
    const std::int64_t hidden = args.hidden;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* residual = args.residual == nullptr
                            ? nullptr
                            : static_cast<const T*>(args.residual) + row * args.residual_stride;
    T* z_out = args.z == nullptr ? nullptr : static_cast<T*>(args.z) + row * hidden;
    const Vec scale = broadcast(args.dropout.scale);
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        Vec z = load(x + j, n);
        if (x_bias != nullptr) z = add(z, load(x_bias + j, n));
        if (bits != nullptr) z = kept(mul(z, scale), bits_at(bits, j));
        if (residual != nullptr) z = add(z, load(residual + j, n));
        if (z_out != nullptr) store(z_out + j, z, n);
        store(row_z + j, z, n);
        total[k] = add(total[k], z);
    });
    return sum4(total);
}

FASTBERT_INLINE float plain_sum(const float* z, std::int64_t hidden) {
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(hidden, [&](std::int64_t j, int k, int n)
                            __attribute__((always_inline)) { total[k] = add(total[k], load(z + j, n)); });
    return sum4(total);
}

struct Moments {
    float mean, correction, rstd;  // the mean is mean + correction
};

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

template <class T>
void forward_rows(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
                  std::int64_t begin, std::int64_t end, float* scratch) {
    const std::int64_t hidden = args.hidden;
    std::uint64_t* bits =
        args.dropout.seed != nullptr ? reinterpret_cast<std::uint64_t*>(scratch + padded(hidden)) : nullptr;
    const bool summed = args.residual != nullptr || x_bias != nullptr || bits != nullptr || args.z != nullptr;
    for (std::int64_t row = begin; row < end; ++row) {
        const float* z = scratch;
        float total;
        if (sizeof(T) == sizeof(float) && !summed) {  // z is x itself
            z = static_cast<const float*>(args.x) + row * args.x_stride;
            total = plain_sum(z, hidden);
        } else {
            if (bits != nullptr) draw_bits(args.dropout, row, hidden, bits);
            total = gather_row<T>(args, x_bias, row, bits, scratch);
        }
        const Moments moments = moments_of(z, hidden, total, args.eps);
        if (args.mean != nullptr) {
            args.mean[row] = moments.mean + moments.correction;
            args.rstd[row] = moments.rstd;
        }
        const Vec mean = broadcast(moments.mean), correction = broadcast(moments.correction);
        const Vec rstd = broadcast(moments.rstd);
        T* y = static_cast<T*>(args.y) + row * hidden;
        for_vectors(hidden, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
            const Vec x_hat = mul(sub(sub(load(z + j, n), mean), correction), rstd);
            store(y + j, fma(x_hat, load(weight + j, n), load(bias + j, n)), n);
        });
    }
}

// Row r of kRows: its means of g and g x_hat.
template <class T>
FASTBERT_INLINE void row_means(const T* dy, const T* z, const float* weight, std::int64_t hidden, float mean,
                               float rstd, float& mean_g, float& mean_gx) {
    const Vec centre = broadcast(mean), scale = broadcast(rstd);
    Vec g_sum[4] = {zero(), zero(), zero(), zero()}, gx_sum[4] = {zero(), zero(), zero(), zero()};
    for_vectors(hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec g = mul(load(dy + j, n), load(weight + j, n));  // 0 in the lanes past n: x_hat need not be
        const Vec x_hat = first(mul(sub(load(z + j, n), centre), scale), n);
        g_sum[k] = add(g_sum[k], g);
        gx_sum[k] = fma(g, x_hat, gx_sum[k]);
    });
    const double inverse = 1.0 / static_cast<double>(hidden);
    mean_g = static_cast<float>(sum4(g_sum) * inverse);
    mean_gx = static_cast<float>(sum4(gx_sum) * inverse);
}

// Rows [row, row + kRows): dx, dresidual, and their column sums added to `partial`.
template <class T, int kRows>
FASTBERT_INLINE void backward_block(const LayerNormBwd& args, const float* weight, std::int64_t row,
                                    float* partial, std::uint64_t* bits) {
    const std::int64_t hidden = args.hidden, bit_words = padded(hidden) / 64;
    const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
    const T* z = static_cast<const T*>(args.z) + row * args.z_stride;
    T* dx = static_cast<T*>(args.dx) + row * hidden;
    T* dresidual = args.dresidual == nullptr ? nullptr : static_cast<T*>(args.dresidual) + row * hidden;
    const float *mean = args.mean + row, *rstd = args.rstd + row;
    const bool dropout = args.dropout.seed != nullptr, sum_params = args.dweight != nullptr;
    const bool sum_dx = args.dx_bias != nullptr;
    float* const dweight = partial;
    float* const dbias = partial + padded(hidden);
    float* const dx_bias = partial + 2 * padded(hidden);

    float mean_g[kRows], mean_gx[kRows];
    for (int r = 0; r < kRows; ++r) {
        row_means(dy + r * args.dy_stride, z + r * args.z_stride, weight, hidden, mean[r], rstd[r], mean_g[r],
                  mean_gx[r]);
        if (dropout) draw_bits(args.dropout, row + r, hidden, bits + r * bit_words);
    }
    const Vec keep_scale = broadcast(args.dropout.scale);
    for_vectors(hidden, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
        const Vec w = load(weight + j, n);
        Vec dw = zero(), db = zero(), dxb = zero();
        for (int r = 0; r < kRows; ++r) {
            const Vec grad = load(dy + r * args.dy_stride + j, n);
            const Vec scale = broadcast(rstd[r]);
            const Vec x_hat = mul(sub(load(z + r * args.z_stride + j, n), broadcast(mean[r])), scale);
            const Vec centred = fnma(x_hat, broadcast(mean_gx[r]), sub(mul(grad, w), broadcast(mean_g[r])));
            const Vec dz = mul(centred, scale);
            if (dresidual != nullptr) store(dresidual + r * hidden + j, dz, n);
            Vec out = dz;
            if (dropout) out = kept(mul(dz, keep_scale), bits_at(bits + r * bit_words, j));
            store(dx + r * hidden + j, out, n);
            dw = fma(grad, x_hat, dw);
            db = add(db, grad);
            dxb = add(dxb, out);
        }
        if (sum_params) {
            store(dweight + j, add(load(dweight + j, n), dw), n);
            store(dbias + j, add(load(dbias + j, n), db), n);
        }
        if (sum_dx) store(dx_bias + j, add(load(dx_bias + j, n), dxb), n);
    });
}

template <class T>
void backward_rows(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                   float* partial, float* scratch) {
    for (std::int64_t j = 0; j < 3 * padded(args.hidden); ++j) partial[j] = 0.0f;
    std::uint64_t* bits = reinterpret_cast<std::uint64_t*>(scratch);
    std::int64_t row = begin;
    for (; row + 4 <= end; row += 4) backward_block<T, 4>(args, weight, row, partial, bits);
    for (; row < end; ++row) backward_block<T, 1>(args, weight, row, partial, bits);
}

void forward(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
             std::int64_t begin, std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_rows<float>(args, weight, bias, x_bias, begin, end, scratch);
        case DType::kBFloat16:
            return forward_rows<bf16>(args, weight, bias, x_bias, begin, end, scratch);
        case DType::kFloat16:
            return forward_rows<fp16>(args, weight, bias, x_bias, begin, end, scratch);
    }
}

void backward(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
              float* partial, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_rows<float>(args, weight, begin, end, partial, scratch);
        case DType::kBFloat16:
            return backward_rows<bf16>(args, weight, begin, end, partial, scratch);
        case DType::kFloat16:
            return backward_rows<fp16>(args, weight, begin, end, partial, scratch);
    }
}

void sum_chunks(const float* partial, std::int64_t chunks, std::int64_t stride, float* out,
                std::int64_t begin, std::int64_t end) {
    constexpr int kTile = 64;
    for (std::int64_t j = begin; j < end; j += kTile) {
        const int n = static_cast<int>(end - j < kTile ? end - j : kTile);
        double total[kTile] = {};
        for (std::int64_t c = 0; c < chunks; ++c)  // whole tiles: the partials are padded to 64 columns
            for (int i = 0; i < kTile; ++i) total[i] += partial[c * stride + j + i];
        for (int i = 0; i < n; ++i) out[j + i] = static_cast<float>(total[i]);
    }
}

}  // namespace

extern const LayerNormKernels layer_norm_kernels;
const LayerNormKernels layer_norm_kernels = {widen, forward, backward, sum_chunks};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
