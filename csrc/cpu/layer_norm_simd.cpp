// LayerNorm, RMSNorm and NoNorm of a run of rows, for one instruction set (see isa.h). Contract:
// fastbert/ops/layer_norm.py.
//
// Math       z = residual + dropout(x + x_bias);  x_hat = (z - mean) rstd;  y = x_hat weight + bias
//            dz = rstd (g - mean(g) - x_hat mean(g x_hat)) + dsum, g = dy weight
//            RMSNorm: x_hat = z rstd, without mean(g); rstd is that of the mean of z z
//            NoNorm: x_hat = z, dz = g + dsum
// Tiling     Forward: one row at a time, with z in a float row in L1. Backward: four rows at a time, so that
//            a column sum is loaded and stored once for four rows.
// Precision  Widened to float on load, rounded once on store; statistics as in norm_rows.h.
// Saved      z rounded to T, mean and rstd; the dropout bits are drawn again.
#include "norm_rows.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

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

// z of one row into `row_z`, also rounded into z_out if wanted; returns the sum of z, or of its squares.
template <class T, Norm kNorm>
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
        total[k] = with_value<kNorm>(total[k], z);
    });
    return sum4(total);
}

template <class T, Norm kNorm>
void forward_rows(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
                  std::int64_t begin, std::int64_t end, float* scratch) {
    const std::int64_t hidden = args.hidden;
    std::uint64_t* bits =
        args.dropout.seed != nullptr ? reinterpret_cast<std::uint64_t*>(scratch + padded(hidden)) : nullptr;
    const bool summed = args.residual != nullptr || x_bias != nullptr || bits != nullptr || args.z != nullptr;
    for (std::int64_t row = begin; row < end; ++row) {
        const float* z = scratch;
        float total = 0.0f;
        if (sizeof(T) == sizeof(float) && !summed) {  // z is x itself
            z = static_cast<const float*>(args.x) + row * args.x_stride;
            if (kNorm != Norm::kNone) total = plain_sum<kNorm>(z, hidden);
        } else {
            if (bits != nullptr) draw_bits(args.dropout, row, hidden, bits);
            total = gather_row<T, kNorm>(args, x_bias, row, bits, scratch);
        }
        Moments moments{0.0f, 0.0f, 1.0f};
        if (kNorm == Norm::kRms) moments = rms_of(hidden, total, args.eps);
        if (kNorm == Norm::kLayer) moments = moments_of(z, hidden, total, args.eps);
        if (kNorm == Norm::kLayer && args.mean != nullptr) args.mean[row] = moments.mean + moments.correction;
        if (args.rstd != nullptr) args.rstd[row] = moments.rstd;
        T* y = static_cast<T*>(args.y) + row * hidden;
        normalise(z, moments, weight, bias, hidden,
                  [&](std::int64_t j, int n, Vec v) __attribute__((always_inline)) { store(y + j, v, n); });
    }
}

// Rows [row, row + kRows): dx, dresidual, and column sums added to `partial`.
template <class T, Norm kNorm, int kRows>
FASTBERT_INLINE void backward_block(const LayerNormBwd& args, const float* weight, std::int64_t row,
                                    float* partial, std::uint64_t* bits) {
    const std::int64_t hidden = args.hidden, bit_words = padded(hidden) / 64;
    const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
    const T* dsum = args.dsum == nullptr ? nullptr : static_cast<const T*>(args.dsum) + row * hidden;
    T* dx = args.dx == nullptr ? nullptr : static_cast<T*>(args.dx) + row * hidden;
    T* dresidual = args.dresidual == nullptr ? nullptr : static_cast<T*>(args.dresidual) + row * hidden;
    float* const dx_bias = args.dx_bias == nullptr ? nullptr : partial + 2 * padded(hidden);
    const bool need_dx = dx != nullptr || dx_bias != nullptr, sum_params = args.dweight != nullptr;
    const bool dropout = args.dropout.seed != nullptr && need_dx;
    if (dropout)
        for (int r = 0; r < kRows; ++r) draw_bits(args.dropout, row + r, hidden, bits + r * bit_words);
    const Vec keep_scale = broadcast(args.dropout.scale);
    const NormRows<T> rows{hidden,
                           args.z_stride,
                           static_cast<const T*>(args.z) + row * args.z_stride,
                           kNorm == Norm::kLayer ? args.mean + row : nullptr,
                           kNorm == Norm::kNone ? nullptr : args.rstd + row,
                           weight};
    norm_backward<kRows, kNorm>(
        rows,
        [&](int r, std::int64_t j, int n)
            __attribute__((always_inline)) { return load(dy + r * args.dy_stride + j, n); },
        sum_params ? partial : nullptr, sum_params ? partial + padded(hidden) : nullptr,
        need_dx || dresidual != nullptr,
        [&](std::int64_t j, int n, const Vec(&dz)[kRows]) __attribute__((always_inline)) {
            Vec dxb = zero();
            for (int r = 0; r < kRows; ++r) {
                Vec out = dz[r];
                if (dsum != nullptr) out = add(out, load(dsum + r * hidden + j, n));
                if (dresidual != nullptr) store(dresidual + r * hidden + j, out, n);
                if (dropout) out = kept(mul(out, keep_scale), bits_at(bits + r * bit_words, j));
                if (dx != nullptr) store(dx + r * hidden + j, out, n);
                dxb = add(dxb, out);
            }
            if (dx_bias != nullptr) store(dx_bias + j, add(load(dx_bias + j, n), dxb), n);
        });
}

template <class T, Norm kNorm>
void backward_rows(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                   float* partial, float* scratch) {
    for (std::int64_t j = 0; j < 3 * padded(args.hidden); ++j) partial[j] = 0.0f;
    std::uint64_t* bits = reinterpret_cast<std::uint64_t*>(scratch);
    std::int64_t row = begin;
    for (; row + 4 <= end; row += 4) backward_block<T, kNorm, 4>(args, weight, row, partial, bits);
    for (; row < end; ++row) backward_block<T, kNorm, 1>(args, weight, row, partial, bits);
}

template <class T>
void forward_as(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
                std::int64_t begin, std::int64_t end, float* scratch) {
    const auto rows = args.none  ? forward_rows<T, Norm::kNone>
                      : args.rms ? forward_rows<T, Norm::kRms>
                                 : forward_rows<T, Norm::kLayer>;
    rows(args, weight, bias, x_bias, begin, end, scratch);
}

template <class T>
void backward_as(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                 float* partial, float* scratch) {
    const auto rows = args.none  ? backward_rows<T, Norm::kNone>
                      : args.rms ? backward_rows<T, Norm::kRms>
                                 : backward_rows<T, Norm::kLayer>;
    rows(args, weight, begin, end, partial, scratch);
}

void forward(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
             std::int64_t begin, std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_as<float>(args, weight, bias, x_bias, begin, end, scratch);
        case DType::kBFloat16:
            return forward_as<bf16>(args, weight, bias, x_bias, begin, end, scratch);
        case DType::kFloat16:
            return forward_as<fp16>(args, weight, bias, x_bias, begin, end, scratch);
    }
}

void backward(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
              float* partial, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_as<float>(args, weight, begin, end, partial, scratch);
        case DType::kBFloat16:
            return backward_as<bf16>(args, weight, begin, end, partial, scratch);
        case DType::kFloat16:
            return backward_as<fp16>(args, weight, begin, end, partial, scratch);
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
