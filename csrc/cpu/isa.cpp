#include "isa.h"

#include <atomic>
#include <cstring>

namespace fastbert {
namespace {

constexpr const char* kNames[] = {"none", "avx2", "avx2_vnni", "avx512", "avx512_bf16"};
std::atomic<int> g_isa{-1};

bool has_avx_vnni() {
#if FASTBERT_X86
    return __builtin_cpu_supports("avxvnni");
#else
    return false;
#endif
}

}  // namespace

Isa best_isa() {
#if FASTBERT_X86
    __builtin_cpu_init();  // also asks the operating system whether it saves the wide registers
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Bf16;
    if (avx512) return Isa::kAvx512;
    if (avx2) return has_avx_vnni() ? Isa::kAvx2Vnni : Isa::kAvx2;
#endif
    return Isa::kNone;
}

Isa preferred_isa() {
    const Isa best = best_isa();
#if FASTBERT_X86
    if (best == Isa::kAvx512Bf16 && !__builtin_cpu_is("amd")) return Isa::kAvx512;
#endif
    return best;
}

Isa current_isa() {
    int isa = g_isa.load(std::memory_order_relaxed);
    if (isa < 0) g_isa.store(isa = static_cast<int>(preferred_isa()), std::memory_order_relaxed);
    return static_cast<Isa>(isa);
}

bool set_isa(const char* name) {
    if (std::strcmp(name, "best") == 0) {
        g_isa.store(static_cast<int>(preferred_isa()), std::memory_order_relaxed);
        return true;
    }
    const int best = static_cast<int>(best_isa());
    for (int isa = 0; isa <= best; ++isa) {
        if (isa == static_cast<int>(Isa::kAvx2Vnni) && !has_avx_vnni()) continue;
        if (std::strcmp(name, kNames[isa]) == 0) {
            g_isa.store(isa, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace fastbert
