// `cpuid` without the bits of AVX-512, AVX-VNNI and AMX: see held.py.
//
// A library reads from the instruction `cpuid` what it may use. held.py has replaced each by `ud2`, which has
// the same size and raises SIGILL. The handler runs cpuid in its place and takes those bits out of the
// answer.
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

#include <initializer_list>

namespace {

unsigned without(unsigned bits, std::initializer_list<int> features) {
    for (const int feature : features) bits &= ~(1u << feature);
    return bits;
}

void answer(int, siginfo_t*, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const auto* const at = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
    if (at[0] != 0x0f || at[1] != 0x0b) {  // not ours: the instruction runs again and ends the process
        signal(SIGILL, SIG_DFL);
        return;
    }
    const auto leaf = static_cast<unsigned>(registers[REG_RAX]),
               part = static_cast<unsigned>(registers[REG_RCX]);
    unsigned a, b, c, d;
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) {
        b = without(b, {16, 17, 21, 26, 27, 28, 30, 31});  // AVX512 F, DQ, IFMA, PF, ER, CD, BW, VL
        c = without(c, {1, 6, 11, 12, 14});                // VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
        d = without(d, {2, 3, 8, 22, 23, 24, 25});         // 4VNNIW, 4FMAPS, VP2INTERSECT, AMX, FP16
    }
    if (leaf == 7 && part == 1) {
        a = without(a, {4, 5, 21});      // AVX-VNNI, AVX512-BF16, AMX-FP16
        d = without(d, {4, 5, 10, 19});  // AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16, AVX10
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

}  // namespace

extern "C" int held_answer() {
    struct sigaction action{};
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &action, nullptr);
}
