// How a function of values becomes a statement of 32 lanes, and how it gets its place in the table of forms.
#pragma once

#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "engine.h"

// Of functions that enter forms in the table: they run once, and are compiled for size.
#define REGISTERS __attribute__((cold))

namespace ptx {

// Computed for all lanes, which the compiler turns into vector instructions, and kept for the active ones.
template <class D, class F, class... S>
inline void each(uint32_t mask, D* d, F f, const S*... s) {
    alignas(64) D out[LANES];
    for (int l = 0; l < LANES; ++l) out[l] = f(s[l]...);
    if (mask == ALL) {
        std::memcpy(d, out, sizeof out);
    } else {
        for (int l = 0; l < LANES; ++l) d[l] = (mask >> l & 1) ? out[l] : d[l];
    }
}

inline uint32_t bits_of(const uint8_t* truth) {  // 32 bytes of 0 or 1
#if defined(__AVX2__)
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(truth));
    return uint32_t(_mm256_movemask_epi8(_mm256_cmpgt_epi8(v, _mm256_setzero_si256())));
#else
    uint32_t bits = 0;
    for (int l = 0; l < LANES; ++l) bits |= uint32_t(truth[l]) << l;
    return bits;
#endif
}

inline void set_predicate(uint32_t& p, uint32_t mask, uint32_t value) { p = (p & ~mask) | (value & mask); }

template <class F, class D, class A>
void unary(Warp& w, const Op& op, uint32_t m) {
    each(m, w.lane<D>(op.dst[0]), F{}, w.lane<A>(op.src[0]));
}
template <class F, class D, class A, class B>
void binary(Warp& w, const Op& op, uint32_t m) {
    each(m, w.lane<D>(op.dst[0]), F{}, w.lane<A>(op.src[0]), w.lane<B>(op.src[1]));
}
template <class F, class D, class A, class B, class C>
void ternary(Warp& w, const Op& op, uint32_t m) {
    each(m, w.lane<D>(op.dst[0]), F{}, w.lane<A>(op.src[0]), w.lane<B>(op.src[1]), w.lane<C>(op.src[2]));
}
template <class F, class D, class A, class B, class C, class E>
void quaternary(Warp& w, const Op& op, uint32_t m) {
    each(m, w.lane<D>(op.dst[0]), F{}, w.lane<A>(op.src[0]), w.lane<B>(op.src[1]), w.lane<C>(op.src[2]),
         w.lane<E>(op.src[3]));
}

template <class T>
REGISTERS std::string width() {
    return "b" + std::to_string(8 * sizeof(T));
}

template <class F, class D, class... S>
REGISTERS void value_form(const std::string& name) {
    std::string signature = "=" + width<D>();
    ((signature += " " + width<S>()), ...);
    if constexpr (sizeof...(S) == 1) pure_form(name, signature, unary<F, D, S...>);
    if constexpr (sizeof...(S) == 2) pure_form(name, signature, binary<F, D, S...>);
    if constexpr (sizeof...(S) == 3) pure_form(name, signature, ternary<F, D, S...>);
    if constexpr (sizeof...(S) == 4) pure_form(name, signature, quaternary<F, D, S...>);
}

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace ptx
