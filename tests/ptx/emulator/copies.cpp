// cp.async: copies from global to shared memory that land when their group is waited for, or at once.
//
// Meanwhile their bytes are in flight: a warp that reads or writes them gets a report.
#include <algorithm>

#include "memory.h"

namespace ptx {
namespace {

template <uint32_t size>
void mark(Warp& w, uint32_t at, uint32_t lane, uint8_t state) {
    Shared& shared = *w.block->shared;
    // The lane's own earlier copy of these bytes that has not landed would race with this one.
    for (uint32_t i = 0; i < size; ++i)
        if (shared.state[at + i] == in_flight)
            fail(Kind::shared_race, 1u << lane, at + i,
                 "copies to shared memory while an asynchronous copy to it is in flight");
    shared.on_write<size>(w, at, lane, 0, state);
}

void land(Warp& w, const Copy& copy, uint32_t lanes) {
    Shared& shared = *w.block->shared;
    for_lanes(lanes, [&](uint32_t l) {
        const uint32_t at = copy.target[l];
        uint8_t* to = shared.data.data() + at;
        std::memset(to, 0, copy.bytes);
        if (copy.read[l]) std::memcpy(to, reinterpret_cast<const void*>(copy.source[l]), copy.read[l]);
        for (uint32_t i = 0; i < copy.bytes; ++i) {
            shared.state[at + i] = valid;
            shared.writer[at + i] = uint16_t(w.actor);
            shared.write_time[at + i] = w.block->cluster->now;
        }
    });
}

// `read_size`: the third source, if there is one, tells how many bytes to read; the rest becomes zero.
template <uint32_t size>
void copy(Warp& w, const Op& op, uint32_t m) {
    if (op.imm[4] != size) fail(Kind::bad_launch, m, 0, "a cp.async of another size than the form has");
    uint64_t to[LANES], from[LANES];
    addresses(w, op, 0, 0, to);
    addresses(w, op, 1, 2, from);
    const uint32_t* sizes = op.src.size() > 2 ? w.lane<uint32_t>(op.src[2]) : nullptr;
    Copy copy;
    copy.lanes = m;
    copy.bytes = size;
    Launch& launch = *w.block->launch;
    for_lanes(m, [&](uint32_t l) {
        const uint32_t read = sizes ? sizes[l] : size;
        if (read > size) fail(Kind::out_of_bounds, 1u << l, from[l], "a cp.async that reads more than it writes");
        const uint32_t at = shared_offset(to[l]);
        w.block->shared->check(at, size, l, "an asynchronous copy");
        if (from[l] & (size - 1)) Shared::misaligned(from[l], size, l, "an asynchronous copy");
        if (read) check_early(w, from[l], read, l, false);
        // Whatever is read lies within `size` aligned bytes; the check asks for those that are.
        if (read && (read & (read - 1))) {
            for (uint32_t i = 0; i < read; ++i) global_access(launch, from[l] + i, 1, l, "an asynchronous copy");
        } else if (read) {
            global_access(launch, from[l], read, l, "an asynchronous copy");
        }
        mark<size>(w, at, l, launch.late ? in_flight : valid);
        copy.target[l] = at;
        copy.source[l] = from[l];
        copy.read[l] = read;
        copy.group[l] = w.committed[l];
    });
    if (launch.late) {
        for_lanes(m, [&](uint32_t l) { std::memset(w.block->shared->data.data() + copy.target[l], 0xFF, size); });
        w.copies.push_back(copy);
    } else {
        land(w, copy, m);
    }
}

void commit(Warp& w, const Op&, uint32_t m) {
    for_lanes(m, [&](uint32_t l) { ++w.committed[l]; });
}

// All groups of these lanes but the last `pending` land. `open`: also copies that no group has yet.
void wait(Warp& w, uint32_t m, uint32_t pending, bool open) {
    size_t kept = 0;
    for (Copy& copy : w.copies) {
        uint32_t ready = 0;
        for_lanes(copy.lanes & m, [&](uint32_t l) {
            const bool done = open || int64_t(copy.group[l]) < int64_t(w.committed[l]) - int64_t(pending);
            ready |= uint32_t(done) << l;
        });
        land(w, copy, ready);
        copy.lanes &= ~ready;
        if (copy.lanes) w.copies[kept++] = copy;
    }
    w.copies.resize(kept);
}

void wait_group(Warp& w, const Op& op, uint32_t m) { wait(w, m, uint32_t(op.imm[0]), false); }
void wait_all(Warp& w, const Op&, uint32_t m) { wait(w, m, 0, true); }

// The text's size picks the function.
void copy_any(Warp& w, const Op& op, uint32_t m) {
    switch (op.imm[4]) {
        case 4: return copy<4>(w, op, m);
        case 8: return copy<8>(w, op, m);
        case 16: return copy<16>(w, op, m);
        default: fail(Kind::bad_launch, m, 0, "cp.async of a size that is not 4, 8 or 16");
    }
}
void copy_through_l2(Warp& w, const Op& op, uint32_t m) {
    if (op.imm[4] != 16) fail(Kind::bad_launch, m, 0, "cp.async.cg of a size that is not 16");
    copy<16>(w, op, m);
}

}  // namespace

void copy_forms() {
    for (const char* signature : {"@ @ #", "@ @ # b32"}) {
        form("cp.async.ca.shared.global", signature, copy_any);
        form("cp.async.cg.shared.global", signature, copy_through_l2);
    }
    form("cp.async.commit_group", "", commit);
    form("cp.async.wait_group", "#", wait_group);
    form("cp.async.wait_all", "", wait_all);
}

}  // namespace ptx
