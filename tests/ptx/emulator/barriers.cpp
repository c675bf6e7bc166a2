// Barriers of a block and of a warp.
#include "lanes.h"

namespace ptx {

// Opens a barrier that every warp has reached: waiting warps continue, and see what the arrived warps had done.
void Block::barrier_check(int id) {
    NamedBarrier& b = barriers[id];
    if (b.arrived == 0) return;
    uint32_t expected = b.expected;
    if (expected == NONE) {  // all threads that have not exited
        expected = 0;
        for (const Warp& w : warps)
            if (w.state != State::exited) expected += LANES;
    }
    if (b.arrived < expected) return;
    const NamedBarrier done = b;
    b = NamedBarrier{};
    const uint32_t now = ++cluster->now;
    Clock clock = done.clock;
    clock.seen.resize(warps[0].clock.seen.size(), 0);
    for (size_t v = 0; v < warps.size(); ++v)
        if (done.waiting >> v & 1) clock.seen[size_t(warps[v].actor)] = now;
    for (size_t v = 0; v < warps.size(); ++v) {
        if (!(done.waiting >> v & 1)) continue;
        warps[v].state = State::running;
        acquire(warps[v], clock);
    }
}

namespace {

NamedBarrier& arrive(Warp& w, const Op& op, uint32_t m, uint32_t id, uint32_t threads) {
    if (m != w.live)
        fail(Kind::divergent_barrier, m, id, "a barrier that only some of the warp's threads reach");
    if (id > 15) fail(Kind::bad_launch, m, id, "a barrier with a number above 15");
    if (threads != NONE && threads % LANES)
        fail(Kind::divergent_barrier, m, id, "a barrier for a number of threads that is no multiple of 32");
    (void)op;
    NamedBarrier& b = w.block->barriers[id];
    if (b.arrived && b.expected != threads)
        fail(Kind::divergent_barrier, m, id, "one barrier, for which warps expect different numbers of threads");
    b.expected = threads;
    b.arrived += LANES;
    return b;
}

uint32_t uniform(Warp& w, uint32_t slot, uint32_t m) {
    const uint32_t* v = w.lane<uint32_t>(slot);
    const uint32_t first = v[__builtin_ctz(m)];
    for (int l = 0; l < LANES; ++l)
        if ((m >> l & 1) && v[l] != first) fail(Kind::divergent_barrier, m, 0, "a warp at different barriers");
    return first;
}

void sync(Warp& w, const Op& op, uint32_t m) {
    const uint32_t id = op.src.empty() ? 0 : uniform(w, op.src[0], m);
    const uint32_t threads = op.src.size() > 1 ? uniform(w, op.src[1], m) : NONE;
    NamedBarrier& b = arrive(w, op, m, id, threads);
    b.clock.join(w.clock);
    b.waiting |= 1u << w.index;
    w.state = State::at_barrier;
    w.barrier = int(id);
    w.stop();
    w.block->barrier_check(int(id));
}

void arrive_only(Warp& w, const Op& op, uint32_t m) {
    const uint32_t id = uniform(w, op.src[0], m);
    NamedBarrier& b = arrive(w, op, m, id, uniform(w, op.src[1], m));
    b.clock.join(w.block->release(w));
    w.block->barrier_check(int(id));
}

void warp_sync(Warp& w, const Op& op, uint32_t m) {
    const uint32_t* named = w.lane<uint32_t>(op.src[0]);
    for (int l = 0; l < LANES; ++l)
        if ((m >> l & 1) && (named[l] & w.live & ~m))
            fail(Kind::divergent_barrier, m, named[l], "bar.warp.sync names threads that do not reach it together");
    ++w.meetings;
}

}  // namespace

void barrier_forms() {
    form("bar.sync", "b32", sync);
    form("bar.sync", "b32 b32", sync);
    form("bar.arrive", "b32 b32", arrive_only);
    form("bar.warp.sync", "b32", warp_sync);
}

}  // namespace ptx
