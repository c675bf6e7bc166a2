// Loads and stores of every space.
#include "memory.h"

namespace ptx {

void global_out_of_bounds(uint64_t address, uint32_t size, uint32_t lane, const char* what) {
    fail(Kind::out_of_bounds, 1u << lane, address,
         std::string(what) + " of " + std::to_string(size) + " bytes outside the memory that the launch names");
}

// In a chained launch, before griddepcontrol.wait: the kernels before it still run.
void check_early(Warp& w, uint64_t address, uint32_t size, uint32_t lane, bool writes) {
    const Launch& launch = *w.block->launch;
    if (!launch.chained || (w.waited >> lane & 1)) return;
    for (const auto& [start, end] : launch.constant)
        if (!writes && start <= address && address + size <= end) return;
    fail(Kind::early_access, 1u << lane, address, "accesses what kernels before it may access, and has not waited for them");
}

void check_overlap(Warp& w, Allocation& allocation, uint64_t address, uint32_t size, uint32_t lane) {
    const uint32_t self = w.block->number + 1;
    uint32_t* writers = allocation.writers + (address - allocation.start);
    for (uint32_t i = 0; i < size; ++i) {
        if (writers[i] != 0 && writers[i] != self)
            fail(Kind::block_overlap, 1u << lane, address + i,
                 "writes a byte of global memory that block number " + std::to_string(writers[i] - 1) +
                     " has written in this launch");
        writers[i] = self;
    }
}

namespace {

template <class T, int N>
void read_shared(Warp& w, Shared& shared, uint64_t at, uint32_t lane, uint8_t* to) {
    constexpr uint32_t size = sizeof(T) * N;
    shared.check(at, size, lane, "a load");
    shared.on_read<size>(w, uint32_t(at), lane);
    shared.lane_reads<size>(w, uint32_t(at), lane);
    std::memcpy(to, shared.data.data() + at, size);
}

template <class T, int N>
void write_shared(Warp& w, Shared& shared, uint64_t at, uint32_t lane, const uint8_t* from) {
    constexpr uint32_t size = sizeof(T) * N;
    shared.check(at, size, lane, "a store");
    shared.on_write<size>(w, uint32_t(at), lane, 0, valid, from);
    shared.lane_writes<size>(w, uint32_t(at), lane);
    std::memcpy(shared.data.data() + at, from, size);
}

template <Space space, class T, int N>
void load(Warp& w, const Op& op, uint32_t m) {
    constexpr uint32_t size = sizeof(T) * N;
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    T* to[N];
    for (int i = 0; i < N; ++i) to[i] = w.lane<T>(op.dst[i]);
    for_lanes(m, [&](uint32_t l) {
        alignas(16) uint8_t value[size];
        uint64_t address = at[l];
        const Space where = space == Space::generic ? resolve(address) : space;
        if (where == Space::global) {
            check_early(w, address, size, l, false);
            global_access(*w.block->launch, address, size, l, "a load");
            std::memcpy(value, reinterpret_cast<const void*>(address), size);
        } else if (where == Space::shared || where == Space::cluster) {
            Shared& shared = shared_at<space>(w, address, l);
            read_shared<T, N>(w, shared, address, l, value);
        } else if (where == Space::local) {
            std::memcpy(value, local_at(w, address, size, l, "a load"), size);
        } else {
            std::memcpy(value, parameter_at(w, address, size, l), size);
        }
        for (int i = 0; i < N; ++i) std::memcpy(&to[i][l], value + i * sizeof(T), sizeof(T));
    });
}

template <Space space, class T, int N>
void store(Warp& w, const Op& op, uint32_t m) {
    constexpr uint32_t size = sizeof(T) * N;
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    const T* from[N];
    for (int i = 0; i < N; ++i) from[i] = w.lane<T>(op.src[i + 1]);
    for_lanes(m, [&](uint32_t l) {
        alignas(16) uint8_t value[size];
        for (int i = 0; i < N; ++i) std::memcpy(value + i * sizeof(T), &from[i][l], sizeof(T));
        uint64_t address = at[l];
        const Space where = space == Space::generic ? resolve(address) : space;
        if (where == Space::global) {
            on_global_write(w, address, size, l);
            std::memcpy(reinterpret_cast<void*>(address), value, size);
        } else if (where == Space::shared || where == Space::cluster) {
            Shared& shared = shared_at<space>(w, address, l);
            write_shared<T, N>(w, shared, address, l, value);
        } else if (where == Space::local) {
            std::memcpy(local_at(w, address, size, l, "a store"), value, size);
        } else {
            fail(Kind::out_of_bounds, 1u << l, address, "a store to the kernel's parameters");
        }
    });
}

template <Space space, class T, int N>
REGISTERS void one(const std::string& where) {
    const std::string vector = N == 1 ? "" : ".v" + std::to_string(N);
    const std::string operand = width<T>() + (N == 1 ? "" : "*" + std::to_string(N));
    form("ld." + where + vector + "." + width<T>(), "=" + operand + " @", load<space, T, N>);
    if (space != Space::parameter)
        form("st." + where + vector + "." + width<T>(), "@ " + operand, store<space, T, N>);
}

template <Space space>
REGISTERS void all(const std::string& where) {
    one<space, uint8_t, 1>(where), one<space, uint8_t, 2>(where), one<space, uint8_t, 4>(where);
    one<space, uint16_t, 1>(where), one<space, uint16_t, 2>(where), one<space, uint16_t, 4>(where);
    one<space, uint32_t, 1>(where), one<space, uint32_t, 2>(where), one<space, uint32_t, 4>(where);
    one<space, uint64_t, 1>(where), one<space, uint64_t, 2>(where);
}

// cvta: from a space to generic addresses and back; those of global memory are the same.
template <uint64_t base>
struct ToGeneric {
    uint64_t operator()(uint64_t a) const { return a + base; }
};
template <uint64_t base>
struct FromGeneric {
    uint64_t operator()(uint64_t a) const { return a - base; }
};

template <uint64_t base>
REGISTERS void conversions(const std::string& where) {
    value_form<ToGeneric<base>, uint64_t, uint64_t>("cvta." + where + ".u64");
    value_form<FromGeneric<base>, uint64_t, uint64_t>("cvta.to." + where + ".u64");
}

}  // namespace

REGISTERS void memory_forms() {
    all<Space::parameter>("param");
    all<Space::global>("global");
    all<Space::shared>("shared");
    all<Space::cluster>("cluster");
    all<Space::local>("local");
    all<Space::generic>("generic");
    conversions<0>("global");
    conversions<0>("const");
    conversions<SHARED_BASE>("shared");
    conversions<LOCAL_BASE>("local");
    conversions<PARAM_BASE>("param");
}

}  // namespace ptx
