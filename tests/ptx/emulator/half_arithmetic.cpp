// Arithmetic of f16 and bf16, alone and in pairs: computed wider and rounded once.
#include "halves.h"

namespace ptx {
namespace {

template <class H>
struct Pair {
    H low, high;
};

// float holds sums and products of two halves closely enough that rounding twice changes nothing (it has more
// than twice the bits and two); a fused product needs double.
template <class H> struct Add {
    H operator()(H a, H b) const { return from_float<H>(to_float(a) + to_float(b)); }
};
template <class H> struct Sub {
    H operator()(H a, H b) const { return from_float<H>(to_float(a) - to_float(b)); }
};
template <class H> struct Mul {
    H operator()(H a, H b) const { return from_float<H>(to_float(a) * to_float(b)); }
};
template <class H> struct Fma {
    H operator()(H a, H b, H c) const {
        // The product is exact in float. Rounding the sum to odd in double keeps what decides a tie.
        const double product = double(to_float(a)) * to_float(b), addend = to_float(c);
        double sum = product + addend;
        const double from_product = sum - addend, from_addend = sum - from_product;
        const double error = (product - from_product) + (addend - from_addend);
        if (error != 0 && std::isfinite(sum) && !(bit_cast<uint64_t>(sum) & 1))
            sum = std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
        return from_double<H>(sum);
    }
};
template <class H> struct FmaRelu {
    H operator()(H a, H b, H c) const {
        const H r = Fma<H>()(a, b, c);
        return to_float(r) > 0 ? r : to_float(r) == to_float(r) ? H{0} : r;
    }
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
template <class H> struct Ex2 { H operator()(H a) const { return from_double<H>(std::exp2(double(to_float(a)))); } };
template <class H> struct Tanh { H operator()(H a) const { return from_double<H>(std::tanh(double(to_float(a)))); } };

template <class F, class H> struct Paired {
    using P = Pair<H>;
    P operator()(P a) const { return {F{}(a.low), F{}(a.high)}; }
    P operator()(P a, P b) const { return {F{}(a.low, b.low), F{}(a.high, b.high)}; }
    P operator()(P a, P b, P c) const { return {F{}(a.low, b.low, c.low), F{}(a.high, b.high, c.high)}; }
};

template <class F, class H, class... S>
REGISTERS void alone_and_paired(const std::string& name, const std::string& type) {
    value_form<F, H, S...>(name + type);
    value_form<Paired<F, H>, Pair<H>, std::conditional_t<true, Pair<H>, S>...>(name + type + "x2");
}

template <class H>
REGISTERS void arithmetic(const std::string& type) {
    for (const char* rounding : {"", ".rn"}) {
        const std::string r = rounding;
        alone_and_paired<Add<H>, H, H, H>("add" + r, type);
        alone_and_paired<Sub<H>, H, H, H>("sub" + r, type);
        alone_and_paired<Mul<H>, H, H, H>("mul" + r, type);
    }
    alone_and_paired<Fma<H>, H, H, H, H>("fma.rn", type);
    alone_and_paired<FmaRelu<H>, H, H, H, H>("fma.rn.relu", type);
    alone_and_paired<Min<H, false>, H, H, H>("min", type);
    alone_and_paired<Max<H, false>, H, H, H>("max", type);
    alone_and_paired<Min<H, true>, H, H, H>("min.NaN", type);
    alone_and_paired<Max<H, true>, H, H, H>("max.NaN", type);
    alone_and_paired<Neg<H>, H, H>("neg", type);
    alone_and_paired<Abs<H>, H, H>("abs", type);
    alone_and_paired<Tanh<H>, H, H>("tanh.approx", type);
}

}  // namespace

REGISTERS void half_forms() {
    arithmetic<Half>(".f16"), arithmetic<Bf16>(".bf16");
    alone_and_paired<Ex2<Half>, Half, Half>("ex2.approx", ".f16");
    alone_and_paired<Ex2<Bf16>, Bf16, Bf16>("ex2.approx.ftz", ".bf16");
}

}  // namespace ptx
