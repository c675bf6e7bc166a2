// The processor's arithmetic peak, without memory: independent multiply-adds on registers.
//
// bench/lib/roofs.py compiles this file, calls `peak_run` from as many threads as the benchmark uses and takes
// the time. The accumulators are more than the latency of two pipes can use. The instructions are inline
// assembly, or the compiler would copy accumulators between them. AMX is not here: where a machine has it,
// the matrix product of torch shows it, and the roof is the larger of the two.

extern "C" {
long peak_operations(int kind);  // in one round of `kind`, a multiply-add being two; 0: not on this processor
void peak_run(int kind, long rounds);  // kind: 0 fp32 AVX2, 1 fp32 AVX-512, 2 bf16 AVX-512, 3 int8 AVX-512
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace {

constexpr int kAccumulators = 12;

// `acc` = `acc` + a * b in one instruction, `kAccumulators` times a round, in a function for that instruction
// set.
#define PEAK_LOOP(name, isa, vector, zero, instruction)                                    \
    __attribute__((target(isa), noinline)) void name(long rounds) {                        \
        vector acc[kAccumulators], a = zero(), b = zero();                                 \
        _Pragma("GCC unroll 12") for (int i = 0; i < kAccumulators; ++i) acc[i] = zero();  \
        for (long r = 0; r < rounds; ++r) {                                                \
            _Pragma("GCC unroll 12") for (int i = 0; i < kAccumulators; ++i) asm volatile( \
                instruction " %2, %1, %0" : "+v"(acc[i]) : "v"(a), "v"(b));                \
        }                                                                                  \
    }

PEAK_LOOP(fp32_avx2, "avx2,fma", __m256, _mm256_setzero_ps, "vfmadd231ps")
PEAK_LOOP(fp32_avx512, "avx512f", __m512, _mm512_setzero_ps, "vfmadd231ps")
PEAK_LOOP(bf16_avx512, "avx512f", __m512i, _mm512_setzero_si512, "vdpbf16ps")
PEAK_LOOP(int8_avx512, "avx512f", __m512i, _mm512_setzero_si512, "vpdpbusd")

bool supported(int kind) {
    __builtin_cpu_init();
    switch (kind) {
        case 0:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case 1:
            return __builtin_cpu_supports("avx512f");
        case 2:
            return __builtin_cpu_supports("avx512bf16");
        case 3:
            return __builtin_cpu_supports("avx512vnni");
        default:
            return false;
    }
}

}  // namespace

long peak_operations(int kind) {
    const long lanes[] = {8, 16, 32, 64};
    return supported(kind) ? 2 * kAccumulators * lanes[kind] : 0;
}

void peak_run(int kind, long rounds) {
    void (*const loops[])(long) = {fp32_avx2, fp32_avx512, bf16_avx512, int8_avx512};
    if (supported(kind)) loops[kind](rounds);
}

#else
long peak_operations(int) { return 0; }
void peak_run(int, long) {}
#endif
