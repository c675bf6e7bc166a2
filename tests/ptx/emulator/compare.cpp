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
struct Nan { template <class T> bool operator()(T a, T b) const { return a != a || b != b; } };
struct Num { template <class T> bool operator()(T a, T b) const { return a == a && b == b; } };
template <class C> struct OrNan {
    template <class T> bool operator()(T a, T b) const { return !(a == a) || !(b == b) || C{}(a, b); }
};

inline float value(Half a) { return to_float(a); }
inline float value(Bf16 a) { return to_float(a); }
template <class T>
inline std::enable_if_t<std::is_arithmetic_v<T>, T> value(T a) { return a; }

template <class C, class T>
void setp(Warp& w, const Op& op, uint32_t m) {
    const T *a = w.lane<T>(op.src[0]), *b = w.lane<T>(op.src[1]);
    alignas(32) uint8_t truth[LANES];
    for (int l = 0; l < LANES; ++l) truth[l] = uint8_t(C{}(value(a[l]), value(b[l])));
    set_predicate(w.predicate(op.dst[0]), m, bits_of(truth));
}

// Of the lower and of the upper halves.
template <class C, class H>
void setp_pairs(Warp& w, const Op& op, uint32_t m) {
    const uint32_t *a = w.lane<uint32_t>(op.src[0]), *b = w.lane<uint32_t>(op.src[1]);
    for (int half = 0; half < 2; ++half) {
        alignas(32) uint8_t truth[LANES];
        const auto number = [&](uint32_t pair) { return to_float(bit_cast<H>(uint16_t(pair >> 16 * half))); };
        for (int l = 0; l < LANES; ++l) truth[l] = uint8_t(C{}(number(a[l]), number(b[l])));
        set_predicate(w.predicate(op.dst[half]), m, bits_of(truth));
    }
}

template <class H>
REGISTERS void pairs(const std::string& type) {
    const auto add = [&](const char* name, Run run) {
        pure_form(std::string("setp.") + name + type + "x2", "=p =p b32 b32", run);
    };
    add("eq", setp_pairs<Eq, H>), add("ne", setp_pairs<Ne, H>), add("lt", setp_pairs<Lt, H>);
    add("le", setp_pairs<Le, H>), add("gt", setp_pairs<Gt, H>), add("ge", setp_pairs<Ge, H>);
}

template <class C, class T>
REGISTERS void one(const std::string& name, const std::string& type) {
    pure_form("setp." + name + type, "=p " + width<T>() + " " + width<T>(), setp<C, T>);
}

template <class T>
REGISTERS void ordered(const std::string& type) {
    one<Eq, T>("eq", type), one<Ne, T>("ne", type), one<Lt, T>("lt", type);
    one<Le, T>("le", type), one<Gt, T>("gt", type), one<Ge, T>("ge", type);
}

template <class T>
REGISTERS void floats(const std::string& type) {
    ordered<T>(type);
    one<OrNan<Eq>, T>("equ", type), one<OrNan<Ne>, T>("neu", type), one<OrNan<Lt>, T>("ltu", type);
    one<OrNan<Le>, T>("leu", type), one<OrNan<Gt>, T>("gtu", type), one<OrNan<Ge>, T>("geu", type);
    one<Nan, T>("nan", type), one<Num, T>("num", type);
}

}  // namespace

REGISTERS void compare_forms() {
    ordered<uint16_t>(".b16"), ordered<uint32_t>(".b32"), ordered<uint64_t>(".b64");
    ordered<uint16_t>(".u16"), ordered<uint32_t>(".u32"), ordered<uint64_t>(".u64");
    ordered<int16_t>(".s16"), ordered<int32_t>(".s32"), ordered<int64_t>(".s64");
    floats<float>(".f32"), floats<Half>(".f16"), floats<Bf16>(".bf16");
    pairs<Half>(".f16"), pairs<Bf16>(".bf16");
}

}  // namespace ptx
