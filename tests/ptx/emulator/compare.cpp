// setp: comparisons that give predicates. Combinations with a further predicate are split when text is read.
#include "halves.h"

namespace ptx {
namespace {

struct Eq { template <class T> bool operator()(T a, T b) const { return a == b; } };
struct Ne { template <class T> bool operator()(T a, T b) const { return a < b || a > b; } };  // false for NaN
struct Lt { template <class T> bool operator()(T a, T b) const { return a < b; } };
struct Le { template <class T> bool operator()(T a, T b) const { return a <= b; } };
struct Gt { template <class T> bool operator()(T a, T b) const { return a > b; } };
struct Ge { template <class T> bool operator()(T a, T b) const { return a >= b; } };
struct Num { template <class T> bool operator()(T a, T b) const { return a == a && b == b; } };
struct Nan { template <class T> bool operator()(T a, T b) const { return a != a || b != b; } };
template <class C> struct OrNan {
    template <class T> bool operator()(T a, T b) const { return !(a == a) || !(b == b) || C{}(a, b); }
};

template <bool ftz>
inline float value(float a) {
    const uint32_t bits = bit_cast<uint32_t>(a);
    return ftz && !(bits & 0x7F800000) ? 0.0f : a;
}
template <bool ftz>
inline double value(double a) { return a; }
template <bool ftz>
inline float value(Half a) { return to_float(a); }
template <bool ftz>
inline float value(Bf16 a) { return to_float(a); }
template <bool ftz, class T>
inline std::enable_if_t<std::is_integral_v<T>, T> value(T a) { return a; }

template <class C, class T, bool ftz>
void setp(Warp& w, const Op& op, uint32_t m) {
    const T *a = w.lane<T>(op.src[0]), *b = w.lane<T>(op.src[1]);
    alignas(32) uint8_t truth[LANES];
    for (int l = 0; l < LANES; ++l) truth[l] = uint8_t(C{}(value<ftz>(a[l]), value<ftz>(b[l])));
    set_predicate(w.predicate(op.dst[0]), m, bits_of(truth));
}

template <class C, class T, bool ftz = false>
REGISTERS void one(const std::string& name, const std::string& type) {
    form("setp." + name + (ftz ? ".ftz" : "") + type, "=p " + width<T>() + " " + width<T>(), setp<C, T, ftz>);
}

template <class T>
REGISTERS void integers(const std::string& type) {
    one<Eq, T>("eq", type), one<Ne, T>("ne", type);
    const bool ordered = type[1] != 'b';
    if (!ordered) return;
    one<Lt, T>("lt", type), one<Le, T>("le", type), one<Gt, T>("gt", type), one<Ge, T>("ge", type);
    if (std::is_unsigned_v<T>)
        one<Lt, T>("lo", type), one<Le, T>("ls", type), one<Gt, T>("hi", type), one<Ge, T>("hs", type);
}

template <class T, bool ftz = false>
REGISTERS void floats(const std::string& type) {
    one<Eq, T, ftz>("eq", type), one<Ne, T, ftz>("ne", type), one<Lt, T, ftz>("lt", type);
    one<Le, T, ftz>("le", type), one<Gt, T, ftz>("gt", type), one<Ge, T, ftz>("ge", type);
    one<OrNan<Eq>, T, ftz>("equ", type), one<OrNan<Ne>, T, ftz>("neu", type);
    one<OrNan<Lt>, T, ftz>("ltu", type), one<OrNan<Le>, T, ftz>("leu", type);
    one<OrNan<Gt>, T, ftz>("gtu", type), one<OrNan<Ge>, T, ftz>("geu", type);
    one<Num, T, ftz>("num", type), one<Nan, T, ftz>("nan", type);
}

}  // namespace

REGISTERS void compare_forms() {
    integers<uint16_t>(".b16"), integers<uint32_t>(".b32"), integers<uint64_t>(".b64");
    integers<uint16_t>(".u16"), integers<uint32_t>(".u32"), integers<uint64_t>(".u64");
    integers<int16_t>(".s16"), integers<int32_t>(".s32"), integers<int64_t>(".s64");
    floats<float>(".f32"), floats<float, true>(".f32"), floats<double>(".f64");
    floats<Half>(".f16"), floats<Bf16>(".bf16");
}

}  // namespace ptx
