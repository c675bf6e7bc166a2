// Signs and extremes of f16 and bf16, alone and in pairs, and the product that compilers make of a rounded f32 one.
#include "halves.h"

namespace ptx {
namespace {

template <class H>
struct Pair {
    H low, high;
};

template <class H> inline bool is_nan(H a) { return to_float(a) != to_float(a); }
template <class H, bool nan> struct Min {
    H operator()(H a, H b) const {
        if (is_nan(a) || is_nan(b)) return nan || (is_nan(a) && is_nan(b)) ? H{0x7FFF} : is_nan(a) ? b : a;
        const float x = to_float(a), y = to_float(b);
        return x < y || (x == y && (a.bits & 0x8000)) ? a : b;
    }
};
template <class H, bool nan> struct Max {
    H operator()(H a, H b) const {
        if (is_nan(a) || is_nan(b)) return nan || (is_nan(a) && is_nan(b)) ? H{0x7FFF} : is_nan(a) ? b : a;
        const float x = to_float(a), y = to_float(b);
        return x > y || (x == y && !(a.bits & 0x8000)) ? a : b;
    }
};
template <class H> struct Neg { H operator()(H a) const { return {uint16_t(a.bits ^ 0x8000)}; } };
template <class H> struct Abs { H operator()(H a) const { return {uint16_t(a.bits & 0x7FFF)}; } };
// a b is exact in double. Where the sum is not, its last bit is made odd, so that it is rounded as if once.
template <class H> struct Fused {
    H operator()(H a, H b, H c) const {
        const double product = double(to_float(a)) * to_float(b), addend = to_float(c), sum = product + addend;
        const double part = sum - product, rest = (product - (sum - part)) + (addend - part);
        const bool even = !(bit_cast<uint64_t>(sum) & 1), inexact = std::isfinite(sum) && rest != 0;
        return from_double<H>(inexact && even ? std::nextafter(sum, rest > 0 ? INFINITY : -INFINITY) : sum);
    }
};
template <class H> struct Product {
    H operator()(H a, H b) const { return from_double<H>(double(to_float(a)) * to_float(b)); }
};
template <class F, class H> struct Paired {
    using P = Pair<H>;
    P operator()(P a) const { return {F{}(a.low), F{}(a.high)}; }
    P operator()(P a, P b) const { return {F{}(a.low, b.low), F{}(a.high, b.high)}; }
};

template <class F, class H, class... S>
REGISTERS void alone_and_paired(const std::string& name, const std::string& type) {
    value_form<F, H, S...>(name + type);
    value_form<Paired<F, H>, Pair<H>, std::conditional_t<true, Pair<H>, S>...>(name + type + "x2");
}

template <class H>
REGISTERS void arithmetic(const std::string& type) {
    alone_and_paired<Min<H, false>, H, H, H>("min", type);
    alone_and_paired<Max<H, false>, H, H, H>("max", type);
    alone_and_paired<Min<H, true>, H, H, H>("min.NaN", type);
    alone_and_paired<Max<H, true>, H, H, H>("max.NaN", type);
    alone_and_paired<Neg<H>, H, H>("neg", type);
    alone_and_paired<Abs<H>, H, H>("abs", type);
    value_form<Fused<H>, H, H, H, H>("fma.rn" + type);
    value_form<Product<H>, H, H, H>("mul" + type);
}

}  // namespace

REGISTERS void half_forms() {
    arithmetic<Half>(".f16"), arithmetic<Bf16>(".bf16");
}

}  // namespace ptx
