// Cross-entropy of a run of rows, for one instruction set (see isa.h). Contract:
// fastbert/ops/cross_entropy.py.
//
// Math       m = max_k x_k, l = log sum_k exp(x_k - m);  loss = l - (1 - s) (x_t - m) - s / K sum_k (x_k - m)
//            dx_k = f (exp(x_k - m) exp(-l) - (1 - s) [k = t] - s / K),  f = dloss / count
// Tiling     One row at a time: once through memory for m, once through the cache for the sum. Backward is
//            one pass, which then corrects the label's own element.
// Precision  Widened to float on load, rounded once on store. exp in float; its sum is added to a double
//            every kBlock columns; the rest of a row's loss and the label's gradient are computed in double.
// Saved      m and l, both float. exp(x - m) exp(-l) is closer than exp(x - m - l), which rounds x - m - l.
// NaN        The maximum ignores NaN, the sum does not: the loss and the gradient of such a row are NaN.
#include "cross_entropy.h"
#include "exp.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr std::int64_t kBlock = 4096;
constexpr float kLowest = -__builtin_inff();

template <class T>
FASTBERT_INLINE float largest_of(const T* x, std::int64_t classes) {
    const Vec low = broadcast(kLowest);
    Vec top[4] = {low, low, low, low};
    for_vectors(classes, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec v = load(x + j, n);
        top[k] = maximum(n == kLanes ? v : first_or(v, n, kLowest), top[k]);  // the second one for NaN
    });
    return largest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
}

struct Sums {
    double exponentials, shifted;  // of exp(x - m) and of x - m
};

template <class T, bool kShifted>
FASTBERT_INLINE Sums sums_of(const T* x, std::int64_t classes, float top) {
    const Vec shift = broadcast(top);
    Sums out{0.0, 0.0};
    for (std::int64_t begin = 0; begin < classes; begin += kBlock) {
        Vec exponentials[4] = {zero(), zero(), zero(), zero()}, shifted[4] = {zero(), zero(), zero(), zero()};
        const std::int64_t count = classes - begin < kBlock ? classes - begin : kBlock;
        for_vectors(count, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
            const Vec d = sub(load(x + begin + j, n), shift);
            exponentials[k] = add(exponentials[k], first(exponential(d), n));
            if (kShifted) shifted[k] = add(shifted[k], first(d, n));
        });
        out.exponentials += sum4(exponentials);
        if (kShifted) out.shifted += sum4(shifted);
    }
    return out;
}

template <class T>
void forward_rows(const CrossEntropyFwd& args, std::int64_t begin, std::int64_t end, double* losses) {
    const double smoothing = args.label_smoothing;
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t label = args.labels[row];
        losses[row] = 0.0;
        args.lse[row] = args.lse[args.rows + row] = 0.0f;
        if (label == args.ignore_index) continue;
        const T* x = static_cast<const T*>(args.logits) + row * args.stride;
        const float top = largest_of(x, args.classes);
        const Sums sums = smoothing > 0.0 ? sums_of<T, true>(x, args.classes, top)
                                          : sums_of<T, false>(x, args.classes, top);
        const double log_sum = __builtin_log(sums.exponentials);
        const double target = static_cast<double>(sum(load(x + label, 1))) - top;
        double loss = log_sum - (1.0 - smoothing) * target;
        if (smoothing > 0.0) loss -= smoothing * sums.shifted / static_cast<double>(args.classes);
        losses[row] = loss;
        args.lse[row] = top;
        args.lse[args.rows + row] = static_cast<float>(log_sum);
    }
}

template <class T>
void backward_rows(const CrossEntropyBwd& args, std::int64_t begin, std::int64_t end, double factor) {
    const double share = args.label_smoothing / static_cast<double>(args.classes);
    const double own_share = (1.0 - args.label_smoothing) + share;  // of one class 1, so that p - 1 is 0
    const Vec even = broadcast(static_cast<float>(-share)), upstream = broadcast(static_cast<float>(factor));
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t label = args.labels[row];
        T* dx = static_cast<T*>(args.dlogits) + row * args.classes;
        if (label == args.ignore_index) {
            __builtin_memset(dx, 0, static_cast<std::size_t>(args.classes) * sizeof(T));
            continue;
        }
        const T* x = static_cast<const T*>(args.logits) + row * args.stride;
        const double inverse = __builtin_exp(-static_cast<double>(args.lse[args.rows + row]));
        const Vec shift = broadcast(args.lse[row]), normal = broadcast(static_cast<float>(inverse));
        for_vectors(args.classes, [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
            const Vec e = exponential(sub(load(x + j, n), shift));
            store(dx + j, mul(fma(e, normal, even), upstream), n);
        });
        const Vec own = first(exponential(sub(load(x + label, 1), shift)), 1);
        const double p = sum(own) * inverse;
        const double d = (p - own_share) * factor;
        store(dx + label, broadcast(static_cast<float>(d)), 1);
    }
}

void forward(const CrossEntropyFwd& args, std::int64_t begin, std::int64_t end, double* losses) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_rows<float>(args, begin, end, losses);
        case DType::kBFloat16:
            return forward_rows<bf16>(args, begin, end, losses);
        case DType::kFloat16:
            return forward_rows<fp16>(args, begin, end, losses);
    }
}

void backward(const CrossEntropyBwd& args, std::int64_t begin, std::int64_t end, double factor) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_rows<float>(args, begin, end, factor);
        case DType::kBFloat16:
            return backward_rows<bf16>(args, begin, end, factor);
        case DType::kFloat16:
            return backward_rows<fp16>(args, begin, end, factor);
    }
}

}  // namespace

extern const CrossEntropyKernels cross_entropy_kernels;
const CrossEntropyKernels cross_entropy_kernels = {forward, backward};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
