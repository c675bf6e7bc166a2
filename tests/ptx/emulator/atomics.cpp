// atom and red: one lane after another.
#include "memory.h"

namespace ptx {
namespace {

struct Add { template <class T> T operator()(T a, T b) const { return T(a + b); } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
template <Space space, class T>
T* cell(Warp& w, uint64_t address, uint32_t lane) {
    const Space where = space == Space::generic ? resolve(address) : space;
    if (where == Space::global) {
        check_early(w, address, sizeof(T), lane, true);
        // Two blocks may update one address: what is checked is that it is theirs to touch.
        global_access(*w.block->launch, address, sizeof(T), lane, "an atomic update");
        return reinterpret_cast<T*>(address);
    }
    if (where == Space::local) fail(Kind::out_of_bounds, 1u << lane, address, "an atomic update of local memory");
    Shared& shared = shared_at<space>(w, address, lane);
    const uint32_t at = uint32_t(address);
    shared.check(at, sizeof(T), lane, "an atomic update");
    for (uint32_t i = 0; i < sizeof(T); ++i)
        if (shared.state[at + i] == empty)
            fail(Kind::uninitialised_read, 1u << lane, at, "an atomic update of shared memory never written");
    shared.on_write<sizeof(T)>(w, at, lane, ATOMIC);
    return reinterpret_cast<T*>(shared.data.data() + at);
}

template <Space space, class F, class T, bool returns>
void update(Warp& w, const Op& op, uint32_t m) {
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    const T* value = w.lane<T>(op.src[1]);
    T old[LANES];
    for_lanes(m, [&](uint32_t l) {
        T* memory = cell<space, T>(w, at[l], l);
        old[l] = *memory;
        *memory = F{}(old[l], value[l]);
    });
    if constexpr (returns) {
        T* d = w.lane<T>(op.dst[0]);
        for_lanes(m, [&](uint32_t l) { d[l] = old[l]; });
    }
}

template <Space space, class F, class T>
REGISTERS void one(const std::string& where, const std::string& name) {
    form("atom." + where + "." + name, "=" + width<T>() + " @ " + width<T>(), update<space, F, T, true>);
    form("red." + where + "." + name, "@ " + width<T>(), update<space, F, T, false>);
}

template <Space space, class T>
REGISTERS void order(const std::string& where, const std::string& type) {
    one<space, Add, T>(where, "add." + type);
    one<space, Min, T>(where, "min." + type), one<space, Max, T>(where, "max." + type);
}

template <Space space>
REGISTERS void all(const std::string& where) {
    order<space, uint32_t>(where, "u32"), order<space, int32_t>(where, "s32");
    order<space, uint64_t>(where, "u64"), order<space, int64_t>(where, "s64");
    one<space, Add, float>(where, "add.f32");
}

}  // namespace

REGISTERS void atomic_forms() {
    all<Space::global>("global"), all<Space::shared>("shared"), all<Space::cluster>("cluster");
}

}  // namespace ptx
