// Addresses: of which space, of which allocation, and whether an access may be made.
#pragma once

#include <cstring>

#include "lanes.h"
#include "shared.h"

namespace ptx {

enum class Space { parameter, global, shared, cluster, local, generic };

// The 32 addresses of the address that starts at source `s` and immediate `i` of a statement.
inline void addresses(Warp& w, const Op& op, size_t s, size_t i, uint64_t* out) {
    const int64_t offset = op.imm[i];
    if (op.imm[i + 1] == 8) {
        const uint64_t* base = w.lane<uint64_t>(op.src[s]);
        for (int l = 0; l < LANES; ++l) out[l] = base[l] + uint64_t(offset);
    } else {
        const uint32_t* base = w.lane<uint32_t>(op.src[s]);
        for (int l = 0; l < LANES; ++l) out[l] = uint32_t(base[l] + uint32_t(offset));
    }
}

// Offsets in shared memory: addresses may also be generic, as cvta gives them.
inline uint32_t shared_offset(uint64_t address) {
    return uint32_t(address >= SHARED_BASE && address - SHARED_BASE < WINDOW ? address - SHARED_BASE : address);
}

// Of an address in another block of the cluster, as mapa returns it: 1 + the block's rank is above these bits.
constexpr int RANK_SHIFT = 24;
Block& block_of(Warp& w, uint64_t& address, uint32_t lane);
void visit(Warp& w, Block& block, uint32_t at, uint32_t lane);

[[noreturn]] void global_out_of_bounds(uint64_t address, uint32_t size, uint32_t lane, const char* what);

// The allocation that holds these bytes; a fault if there is none or the address is misaligned.
inline Allocation& global_access(Launch& launch, uint64_t address, uint32_t size, uint32_t lane,
                                 const char* what) {
    auto& all = launch.allocations;
    if (launch.recent >= all.size() || address < all[launch.recent].start ||
        address + size > all[launch.recent].end) {
        size_t low = 0, high = all.size();
        while (low < high) {
            const size_t middle = (low + high) / 2;
            (all[middle].end <= address ? low : high) = all[middle].end <= address ? middle + 1 : middle;
        }
        if (low == all.size() || address < all[low].start || address + size > all[low].end)
            global_out_of_bounds(address, size, lane, what);
        launch.recent = low;
    }
    if (address & (size - 1)) Shared::misaligned(address, size, lane, what);
    return all[launch.recent];
}

void check_early(Warp& w, uint64_t address, uint32_t size, uint32_t lane, bool writes);
void check_overlap(Warp& w, Allocation& allocation, uint64_t address, uint32_t size, uint32_t lane);

inline void on_global_write(Warp& w, uint64_t address, uint32_t size, uint32_t lane) {
    Launch& launch = *w.block->launch;
    check_early(w, address, size, lane, true);
    Allocation& allocation = global_access(launch, address, size, lane, "a store");
    if (launch.check_overlap) check_overlap(w, allocation, address, size, lane);
}

// A lane's own memory.
inline uint8_t* local_at(Warp& w, uint64_t at, uint32_t size, uint32_t lane, const char* what) {
    const uint64_t bytes = w.local.size() / LANES;
    if (at + size > bytes)
        fail(Kind::out_of_bounds, 1u << lane, at, std::string(what) + " outside the thread's local memory");
    if (at & (size - 1)) Shared::misaligned(at, size, lane, what);
    return w.local.data() + bytes * lane + at;
}

inline const uint8_t* parameter_at(Warp& w, uint64_t at, uint32_t size, uint32_t lane) {
    const Launch& launch = *w.block->launch;
    if (at + size > launch.parameter_bytes)
        fail(Kind::out_of_bounds, 1u << lane, at, "a load outside the kernel's parameters");
    if (at & (size - 1)) Shared::misaligned(at, size, lane, "a load");
    return launch.parameters + at;
}

// Which space a generic address is in; makes the address relative to it. Shared memory is the cluster's.
inline Space resolve(uint64_t& address) {
    if (address < SHARED_BASE) return Space::global;
    const uint64_t base = address & ~(WINDOW - 1);
    address -= base;
    if (base == SHARED_BASE) return Space::cluster;
    if (base == LOCAL_BASE) return Space::local;
    if (base == PARAM_BASE) return Space::parameter;
    address += base;
    return Space::global;
}

// The shared memory that an address of a space is in; makes the address relative to it.
template <Space space>
Shared& shared_at(Warp& w, uint64_t& address, uint32_t lane) {
    if (space != Space::generic) address = shared_offset(address);
    return space == Space::shared ? *w.block->shared : *block_of(w, address, lane).shared;
}

template <class F>
inline void for_lanes(uint32_t mask, F f) {
    for (; mask; mask &= mask - 1) f(uint32_t(__builtin_ctz(mask)));
}

}  // namespace ptx
