// Integer arithmetic.
#include "lanes.h"

namespace ptx {
namespace {

template <class T>
constexpr int BITS = 8 * sizeof(T);

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
struct Wider;
template <> struct Wider<uint16_t> { using type = uint32_t; };
template <> struct Wider<int16_t> { using type = int32_t; };
template <> struct Wider<uint32_t> { using type = uint64_t; };
template <> struct Wider<int32_t> { using type = int64_t; };
template <> struct Wider<uint64_t> { using type = unsigned __int128; };
template <> struct Wider<int64_t> { using type = __int128; };
template <class T>
using Wide = typename Wider<T>::type;

// Sums and products that wrap are made of unsigned numbers wide enough not to be promoted to int.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < 4), uint32_t, Unsigned<T>>;

template <class T> struct Add { T operator()(T a, T b) const { return T(Wrapping<T>(a) + Wrapping<T>(b)); } };
template <class T> struct Sub { T operator()(T a, T b) const { return T(Wrapping<T>(a) - Wrapping<T>(b)); } };
template <class T> struct MulLo { T operator()(T a, T b) const { return T(Wrapping<T>(a) * Wrapping<T>(b)); } };
template <class T> struct MulHi {
    T operator()(T a, T b) const { return T((Wide<T>(a) * Wide<T>(b)) >> BITS<T>); }
};
template <class T> struct MulWide {
    Wide<T> operator()(T a, T b) const { return Wide<T>(a) * Wide<T>(b); }
};
template <class T> struct MadLo {
    T operator()(T a, T b, T c) const { return T(Wrapping<T>(a) * Wrapping<T>(b) + Wrapping<T>(c)); }
};
template <class T> struct MadWide {
    Wide<T> operator()(T a, T b, Wide<T> c) const {
        using U = Unsigned<Wide<T>>;
        return Wide<T>(U(Wide<T>(a) * Wide<T>(b)) + U(c));
    }
};
// Division by zero has no stated result; a GPU gives all ones.
template <class T> struct Div {
    T operator()(T a, T b) const {
        if (b == 0) return T(-1);
        if (std::is_signed_v<T> && b == T(-1)) return T(0 - Wrapping<T>(a));
        return T(a / b);
    }
};
template <class T> struct Rem {
    T operator()(T a, T b) const {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == T(-1)) return 0;
        return T(a % b);
    }
};
template <class T> struct Min { T operator()(T a, T b) const { return a < b ? a : b; } };
template <class T> struct Max { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct Neg { T operator()(T a) const { return T(0 - Wrapping<T>(a)); } };
template <class T> struct Abs { T operator()(T a) const { return a < 0 ? Neg<T>()(a) : a; } };
template <class T>
REGISTERS void arithmetic(const std::string& type) {
    value_form<Add<T>, T, T, T>("add." + type);
    value_form<Sub<T>, T, T, T>("sub." + type);
    value_form<MulLo<T>, T, T, T>("mul.lo." + type);
    value_form<MulHi<T>, T, T, T>("mul.hi." + type);
    value_form<MadLo<T>, T, T, T, T>("mad.lo." + type);
    value_form<Div<T>, T, T, T>("div." + type);
    value_form<Rem<T>, T, T, T>("rem." + type);
    value_form<Min<T>, T, T, T>("min." + type);
    value_form<Max<T>, T, T, T>("max." + type);
    if constexpr (sizeof(T) < 8) {
        value_form<MulWide<T>, Wide<T>, T, T>("mul.wide." + type);
        value_form<MadWide<T>, Wide<T>, T, T, Wide<T>>("mad.wide." + type);
    }
    if constexpr (std::is_signed_v<T>) {
        value_form<Neg<T>, T, T>("neg." + type);
        value_form<Abs<T>, T, T>("abs." + type);
    }
}

}  // namespace

REGISTERS void integer_forms() {
    arithmetic<uint16_t>("u16"), arithmetic<int16_t>("s16");
    arithmetic<uint32_t>("u32"), arithmetic<int32_t>("s32");
    arithmetic<uint64_t>("u64"), arithmetic<int64_t>("s64");
}

}  // namespace ptx
