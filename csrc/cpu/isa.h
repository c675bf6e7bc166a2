// Which instruction set the CPU kernels use. Chosen once from what the processor has; tests may set it.
//
// Each `<op>_simd.cpp` is compiled once per instruction set, with that set's flags and in a namespace of its
// name (fastbert::avx2, fastbert::avx512). Those units share no function of external linkage, not even an
// inline one from the standard library: the linker keeps one copy of such a function, and it may be the one
// with AVX-512 in it.
#pragma once

namespace fastbert {

enum class Isa : int { kNone = 0, kAvx2 = 1, kAvx512 = 2 };

Isa best_isa();                  // what this processor (and this build) can run
Isa current_isa();               // the one in use
bool set_isa(const char* name);  // "none", "avx2", "avx512" or "best"; false if unknown or not supported here
const char* isa_name(Isa isa);

// The table of kernels of the instruction set in use, or nullptr where there is none.
template <class Kernels>
const Kernels* pick(const Kernels* avx2, const Kernels* avx512) {
    switch (current_isa()) {
        case Isa::kAvx512:
            return avx512;
        case Isa::kAvx2:
            return avx2;
        default:
            return nullptr;
    }
}

}  // namespace fastbert
