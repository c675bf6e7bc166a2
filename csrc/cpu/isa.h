// The instruction set of the CPU kernels. The processor decides it once; tests may set it.
//
// Each `<op>_simd.cpp` is compiled for AVX2 and for AVX-512, each time with that set's flags and in a
// namespace of its name (fastbert::avx2, fastbert::avx512); each `<op>_bf16_simd.cpp` for AVX-512-BF16 alone
// (fastbert::avx512_bf16). These units share no function with external linkage, not even an inline function
// of the standard library: the linker keeps one copy of such a function, perhaps the one with AVX-512 in it.
#pragma once

namespace fastbert {

// Each has all before it; AVX-512 may be without AVX-VNNI, whose place `linear_int8`'s own VNNI takes.
enum class Isa : int { kNone = 0, kAvx2 = 1, kAvx2Vnni = 2, kAvx512 = 3, kAvx512Bf16 = 4 };

Isa best_isa();  // the highest that this processor (and this build) can run

// The set that serves unless set_isa asks for another: the best, but AVX-512-BF16 only on AMD's processors.
// They multiply pairs of bf16 faster than floats, Intel's more slowly (NOTES.md).
Isa preferred_isa();

Isa current_isa();               // the one in use
bool set_isa(const char* name);  // a name, or "best", the preferred one; false if unknown or not here
const char* isa_name(Isa isa);   // "none", "avx2", "avx2_vnni", "avx512", "avx512_bf16"

// The reason that an op returns where there are no kernels.
inline constexpr const char* kNoIsa =
    "no SIMD kernels: FASTBERT_ISA=none, or the processor lacks AVX2, FMA, F16C";

// The table of kernels of the instruction set in use, or nullptr where there is none. Without kernels for
// AVX-512-BF16, those for AVX-512 serve there; with AVX-VNNI those for AVX2.
template <class Kernels>
const Kernels* pick(const Kernels* avx2, const Kernels* avx512, const Kernels* avx512_bf16 = nullptr) {
    switch (current_isa()) {
        case Isa::kAvx512Bf16:
            return avx512_bf16 != nullptr ? avx512_bf16 : avx512;
        case Isa::kAvx512:
            return avx512;
        case Isa::kAvx2Vnni:
        case Isa::kAvx2:
            return avx2;
        default:
            return nullptr;
    }
}

// Defines kernels(), which picks the table `name` of an op's files *_simd.cpp.
#if FASTBERT_X86
#define FASTBERT_KERNELS(Kernels, name) \
    namespace avx2 {                    \
    extern const Kernels name;          \
    }                                   \
    namespace avx512 {                  \
    extern const Kernels name;          \
    }                                   \
    static const Kernels* kernels() { return pick(&avx2::name, &avx512::name); }
#else
#define FASTBERT_KERNELS(Kernels, name) \
    static const Kernels* kernels() { return nullptr; }
#endif

}  // namespace fastbert
