// atom and red: one lane after another.
#include "halves.h"
#include "memory.h"

namespace ptx {
namespace {

struct Add { template <class T> T operator()(T a, T b) const { return T(a + b); } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };
struct Exch { template <class T> T operator()(T, T b) const { return b; } };
struct Inc { template <class T> T operator()(T a, T b) const { return a >= b ? T(0) : T(a + 1); } };
struct Dec { template <class T> T operator()(T a, T b) const { return a == 0 || a > b ? b : T(a - 1); } };
struct AddHalves {
    template <class H> H operator()(H a, H b) const { return from_float<H>(to_float(a) + to_float(b)); }
};

template <class T>
T* cell(Warp& w, Space space, uint64_t address, uint32_t lane) {
    const Space where = space == Space::generic ? resolve(address) : space;
    if (where == Space::global) {
        // Two blocks may update one address: what is checked is that it is theirs to touch.
        global_access(*w.block->launch, address, sizeof(T), lane, "an atomic update");
        return reinterpret_cast<T*>(address);
    }
    if (where != Space::shared) fail(Kind::out_of_bounds, 1u << lane, address, "an atomic update of local memory");
    const uint32_t at = space == Space::shared ? shared_offset(address) : uint32_t(address);
    Shared& shared = *w.block->shared;
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
        T* memory = cell<T>(w, space, at[l], l);
        old[l] = *memory;
        *memory = F{}(old[l], value[l]);
    });
    if constexpr (returns) {
        T* d = w.lane<T>(op.dst[0]);
        for_lanes(m, [&](uint32_t l) { d[l] = old[l]; });
    }
}

template <Space space, class T>
void compare_and_swap(Warp& w, const Op& op, uint32_t m) {
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    T* d = w.lane<T>(op.dst[0]);
    const T *expected = w.lane<T>(op.src[1]), *value = w.lane<T>(op.src[2]);
    for_lanes(m, [&](uint32_t l) {
        T* memory = cell<T>(w, space, at[l], l);
        const T old = *memory;
        if (old == expected[l]) *memory = value[l];
        d[l] = old;
    });
}

template <Space space, class F, class T>
REGISTERS void one(const std::string& where, const std::string& name) {
    form("atom." + where + "." + name, "=" + width<T>() + " @ " + width<T>(), update<space, F, T, true>);
    form("red." + where + "." + name, "@ " + width<T>(), update<space, F, T, false>);
}

template <Space space, class T>
REGISTERS void logic(const std::string& where, const std::string& type) {
    one<space, And, T>(where, "and." + type), one<space, Or, T>(where, "or." + type);
    one<space, Xor, T>(where, "xor." + type), one<space, Exch, T>(where, "exch." + type);
    form("atom." + where + ".cas." + type, "=" + width<T>() + " @ " + width<T>() + " " + width<T>(),
         compare_and_swap<space, T>);
}
template <Space space, class T>
REGISTERS void order(const std::string& where, const std::string& type) {
    one<space, Add, T>(where, "add." + type);
    one<space, Min, T>(where, "min." + type), one<space, Max, T>(where, "max." + type);
}

template <Space space>
REGISTERS void all(const std::string& where) {
    logic<space, uint32_t>(where, "b32"), logic<space, uint64_t>(where, "b64");
    form("atom." + where + ".cas.b16", "=b16 @ b16 b16", compare_and_swap<space, uint16_t>);
    order<space, uint32_t>(where, "u32"), order<space, int32_t>(where, "s32");
    order<space, uint64_t>(where, "u64"), order<space, int64_t>(where, "s64");
    one<space, Inc, uint32_t>(where, "inc.u32"), one<space, Dec, uint32_t>(where, "dec.u32");
    one<space, Add, float>(where, "add.f32"), one<space, Add, double>(where, "add.f64");
    one<space, AddHalves, Half>(where, "add.noftz.f16"), one<space, AddHalves, Bf16>(where, "add.noftz.bf16");
}

}  // namespace

REGISTERS void atomic_forms() {
    all<Space::global>("global"), all<Space::shared>("shared"), all<Space::generic>("generic");
}

}  // namespace ptx
