// csrc/cpu/isa.cpp on processors of our choice: what it asks the compiler about the processor is answered
// here.
#include <cstdlib>
#include <string>

namespace {

std::string g_features, g_vendor;

bool has_feature(const char* name) {
    return g_features.find(" " + std::string(name) + " ") != std::string::npos;
}

}  // namespace

#define __builtin_cpu_init() static_cast<void>(0)
#define __builtin_cpu_supports(name) has_feature(name)
#define __builtin_cpu_is(name) (g_vendor == name)
#include "cpu/isa.cpp"

using namespace fastbert;

// Features with a space before and behind each. As in a process that has just begun: nothing is chosen yet.
extern "C" void fake_processor(const char* features, const char* vendor) {
    g_features = features;
    g_vendor = vendor;
    g_isa.store(-1);
}
extern "C" const char* fake_best() { return isa_name(best_isa()); }
extern "C" const char* fake_preferred() { return isa_name(preferred_isa()); }
extern "C" const char* fake_current() { return isa_name(current_isa()); }
extern "C" int fake_set(const char* name) { return set_isa(name); }

// Which of two or three tables is picked: 1 … 3, 0 for none.
extern "C" int fake_pick(int tables) {
    static const int kernels[3] = {1, 2, 3};
    const int* chosen =
        tables == 3 ? pick(&kernels[0], &kernels[1], &kernels[2]) : pick(&kernels[0], &kernels[1]);
    return chosen == nullptr ? 0 : *chosen;
}
