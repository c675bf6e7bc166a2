// exp of csrc/cpu/exp.h for one instruction set, to be called from Python.
#include <cstdint>

#include "cpu/exp.h"

#define NAME_OF(isa) exponential_##isa
#define NAME(isa) NAME_OF(isa)

extern "C" void NAME(FASTBERT_ISA)(const float* x, float* y, std::int64_t count) {
    using namespace fastbert::FASTBERT_ISA;
    for_vectors(count, [&](std::int64_t j, int, int n)
                           __attribute__((always_inline)) { store(y + j, exponential(load(x + j, n)), n); });
}
