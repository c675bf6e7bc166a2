// Logic, shifts, bit fields, moves and selections.
#include "lanes.h"

namespace ptx {
namespace {

template <class T> struct And { T operator()(T a, T b) const { return a & b; } };
template <class T> struct Or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct Xor { T operator()(T a, T b) const { return a ^ b; } };
template <class T> struct Not { T operator()(T a) const { return T(~a); } };
// A shift by more than the width gives zeros, or the sign.
template <class T> struct Shl {
    T operator()(T a, uint32_t n) const { return n < 8 * sizeof(T) ? T(a << n) : T(0); }
};
template <class T> struct Shr {
    T operator()(T a, uint32_t n) const {
        if (std::is_signed_v<T>) return T(a >> (n < 8 * sizeof(T) ? n : 8 * sizeof(T) - 1));
        return n < 8 * sizeof(T) ? T(a >> n) : T(0);
    }
};
template <class T> struct Same { T operator()(T a) const { return a; } };

// The field of `length` bits at `start`; signed ones repeat the field's highest bit.
template <class T> struct Bfe {
    T operator()(T a, uint32_t start, uint32_t length) const {
        constexpr uint32_t bits = 8 * sizeof(T);
        using U = std::make_unsigned_t<T>;
        start &= 0xFF, length &= 0xFF;
        const uint32_t last = start + length - 1 < bits - 1 ? start + length - 1 : bits - 1;
        const bool sign = std::is_signed_v<T> && length != 0 && (U(a) >> last & 1);
        U field = start < bits ? U(U(a) >> start) : U(0);
        if (length < bits) {
            const U mask = U((U(1) << length) - 1);
            field &= mask;
            if (sign && start + length <= bits) field |= U(~mask);
        }
        if (sign) {
            const uint32_t kept = start < bits ? bits - start : 0;  // bits that came from a
            if (kept < bits) field |= U(~(kept ? (U(1) << kept) - 1 : U(0)));
        }
        return T(field);
    }
};
template <class T> struct Bfi {
    T operator()(T a, T b, uint32_t start, uint32_t length) const {
        constexpr uint32_t bits = 8 * sizeof(T);
        start &= 0xFF, length &= 0xFF;
        if (start >= bits) return b;
        const T ones = length < bits ? T((T(1) << length) - 1) : T(~T(0));
        const T mask = T(ones << start);
        return T((b & ~mask) | (T(a << start) & mask));
    }
};
template <class T> struct Popc { uint32_t operator()(T a) const { return uint32_t(__builtin_popcountll(a)); } };
// Each byte of the selector names a byte of b:a, or its sign.
struct Prmt {
    uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
        const uint64_t bytes = uint64_t(b) << 32 | a;
        uint32_t r = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t s = selector >> (4 * i) & 0xF;
            uint32_t byte = uint32_t(bytes >> (8 * (s & 7))) & 0xFF;
            if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
            r |= byte << (8 * i);
        }
        return r;
    }
};
template <class T>
REGISTERS void logic(const std::string& type) {
    value_form<And<T>, T, T, T>("and." + type);
    value_form<Or<T>, T, T, T>("or." + type);
    value_form<Xor<T>, T, T, T>("xor." + type);
    value_form<Not<T>, T, T>("not." + type);
    value_form<Shl<T>, T, T, uint32_t>("shl." + type);
    value_form<Same<T>, T, T>("mov." + type);
}
template <class T>
REGISTERS void shifts(const std::string& type) {
    value_form<Shr<T>, T, T, uint32_t>("shr." + type);
}
// Parts of a register in braces, the lowest first.
template <class Whole, class Part>
void pack(Warp& w, const Op& op, uint32_t m) {
    alignas(64) Whole out[LANES] = {};
    for (size_t i = 0; i < sizeof(Whole) / sizeof(Part); ++i) {
        const Part* part = w.lane<Part>(op.src[i]);
        for (int l = 0; l < LANES; ++l) out[l] |= Whole(Whole(part[l]) << (8 * sizeof(Part) * i));
    }
    each(m, w.lane<Whole>(op.dst[0]), Same<Whole>{}, out);
}
template <class Whole, class Part>
void unpack(Warp& w, const Op& op, uint32_t m) {
    alignas(64) Whole whole[LANES];
    std::memcpy(whole, w.lane<Whole>(op.src[0]), sizeof whole);
    for (size_t i = 0; i < sizeof(Whole) / sizeof(Part); ++i)
        each(m, w.lane<Part>(op.dst[i]), [i](Whole a) { return Part(a >> (8 * sizeof(Part) * i)); }, whole);
}
template <class Whole, class Part>
REGISTERS void packing() {
    const std::string parts = width<Part>() + "*" + std::to_string(sizeof(Whole) / sizeof(Part));
    pure_form("mov." + width<Whole>(), "=" + width<Whole>() + " " + parts, pack<Whole, Part>);
    pure_form("mov." + width<Whole>(), "=" + parts + " " + width<Whole>(), unpack<Whole, Part>);
}

// Which of the active lanes of the result hold a value.
void defined(Warp& w, const Op& op, uint32_t m, uint32_t lanes) {
    uint32_t& written = w.written[op.dst[0]];
    written = (written & ~m) | (lanes & m);
}

template <class T>
void selp(Warp& w, const Op& op, uint32_t m) {
    const uint32_t p = w.predicate(op.src[2]);
    const T *a = w.lane<T>(op.src[0]), *b = w.lane<T>(op.src[1]);
    T* d = w.lane<T>(op.dst[0]);
    alignas(64) T out[LANES];
    for (int l = 0; l < LANES; ++l) out[l] = (p >> l & 1) ? a[l] : b[l];
    each(m, d, Same<T>{}, out);
    // The operand that is not chosen may be undefined.
    const uint32_t chosen = (p & w.written[op.src[0]]) | (~p & w.written[op.src[1]]);
    defined(w, op, m, chosen & w.written[op.src[2]]);
}

template <class F>
void of_predicates(Warp& w, const Op& op, uint32_t m) {
    const uint32_t a = w.predicate(op.src[0]), b = w.predicate(op.src[1]);
    const uint32_t has_a = w.written[op.src[0]], has_b = w.written[op.src[1]];
    // False and anything is false, true or anything is true.
    uint32_t known = has_a & has_b;
    if (F{}(0, ALL) == 0) known |= (has_a & ~a) | (has_b & ~b);
    if (F{}(ALL, ALL) == ALL && F{}(0, ALL) == ALL) known |= (has_a & a) | (has_b & b);
    set_predicate(w.predicate(op.dst[0]), m, F{}(a, b));
    defined(w, op, m, known);
}
void not_predicate(Warp& w, const Op& op, uint32_t m) {
    set_predicate(w.predicate(op.dst[0]), m, ~w.predicate(op.src[0]));
}
void move_predicate(Warp& w, const Op& op, uint32_t m) {
    set_predicate(w.predicate(op.dst[0]), m, w.predicate(op.src[0]));
}

// A register wider than the operand of a form: the statement works on its low part, or widens its result.
template <class To, class From>
struct Convert {
    To operator()(From a) const { return To(a); }
};
template <class Narrow, class Wide>
REGISTERS void resize() {
    using Signed = std::make_signed_t<Narrow>;
    value_form<Convert<Narrow, Wide>, Narrow, Wide>("narrow");
    value_form<Convert<Wide, Narrow>, Wide, Narrow>("widen.u");
    value_form<Convert<Wide, Signed>, Wide, Signed>("widen.s");
}

}  // namespace

REGISTERS void bit_forms() {
    logic<uint16_t>("b16"), logic<uint32_t>("b32"), logic<uint64_t>("b64");
    shifts<uint16_t>("u16"), shifts<int16_t>("s16"), shifts<uint16_t>("b16");
    shifts<uint32_t>("u32"), shifts<int32_t>("s32"), shifts<uint32_t>("b32");
    shifts<uint64_t>("u64"), shifts<int64_t>("s64"), shifts<uint64_t>("b64");
    value_form<Bfe<uint32_t>, uint32_t, uint32_t, uint32_t, uint32_t>("bfe.u32");
    value_form<Bfe<int32_t>, int32_t, int32_t, uint32_t, uint32_t>("bfe.s32");
    value_form<Bfi<uint32_t>, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>("bfi.b32");
    value_form<Popc<uint32_t>, uint32_t, uint32_t>("popc.b32");
    value_form<Prmt, uint32_t, uint32_t, uint32_t, uint32_t>("prmt.b32");
    packing<uint32_t, uint16_t>(), packing<uint64_t, uint32_t>(), packing<uint64_t, uint16_t>();
    raw_form("selp.b16", "=b16 b16 b16 p", selp<uint16_t>);
    raw_form("selp.b32", "=b32 b32 b32 p", selp<uint32_t>);
    raw_form("selp.b64", "=b64 b64 b64 p", selp<uint64_t>);
    raw_form("and.pred", "=p p p", of_predicates<And<uint32_t>>);
    raw_form("or.pred", "=p p p", of_predicates<Or<uint32_t>>);
    raw_form("xor.pred", "=p p p", of_predicates<Xor<uint32_t>>);
    pure_form("not.pred", "=p p", not_predicate);
    pure_form("mov.pred", "=p p", move_predicate);
    resize<uint8_t, uint16_t>(), resize<uint8_t, uint32_t>(), resize<uint8_t, uint64_t>();
    resize<uint16_t, uint32_t>(), resize<uint16_t, uint64_t>(), resize<uint32_t, uint64_t>();
}

}  // namespace ptx
