// Clusters: addresses of other blocks' shared memory, and the barrier of all warps of a cluster.
#include <algorithm>

#include "memory.h"

namespace ptx {

bool Cluster::done() const {
    return std::all_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.done(); });
}

// A phase is over when every warp has arrived or exited.
void Cluster::barrier_check() {
    bool any = false;
    for (const Block& block : blocks)
        for (const Warp& w : block.warps) {
            if (w.cluster_arrivals > phase)
                any = true;
            else if (w.state != State::exited)
                return;
        }
    if (!any) return;
    ++phase;
    done_clock.join(clock);
}

// Before a warp accesses the shared memory of a block: another one must have begun, and not ended.
void visit(Warp& w, Block& block, uint32_t at, uint32_t lane) {
    if (&block == w.block) return;
    if (block.done())
        fail(Kind::shared_race, 1u << lane, at, "accesses shared memory of a block of its cluster that has ended");
    const auto known = [&](const Warp& other) { return w.clock.seen[size_t(other.actor)] > 1; };
    if (std::none_of(block.warps.begin(), block.warps.end(), known))
        fail(Kind::shared_race, 1u << lane, at,
             "accesses shared memory of a block of its cluster that no barrier has shown to have begun");
    block.shared->visits[size_t(w.actor)] = w.block->cluster->now;
}

// The block whose shared memory an address of the cluster is in; makes the address relative to it.
Block& block_of(Warp& w, uint64_t& address, uint32_t lane) {
    const uint64_t number = address >> RANK_SHIFT;
    if (number == 0) return *w.block;
    auto& blocks = w.block->cluster->blocks;
    if (number > blocks.size())
        fail(Kind::out_of_bounds, 1u << lane, address, "an address in no block of the cluster");
    address &= (1ull << RANK_SHIFT) - 1;
    Block& block = blocks[size_t(number - 1)];
    visit(w, block, uint32_t(address), lane);
    return block;
}

namespace {

// The same place in the shared memory of another block; T is the width of an address.
template <class T>
void map_address(Warp& w, const Op& op, uint32_t m) {
    const T* address = w.lane<T>(op.src[0]);
    const uint32_t* rank = w.lane<uint32_t>(op.src[1]);
    T* to = w.lane<T>(op.dst[0]);
    for_lanes(m, [&](uint32_t l) {
        if (rank[l] >= w.block->cluster->blocks.size())
            fail(Kind::bad_launch, 1u << l, rank[l], "mapa to a block that the cluster does not have");
        to[l] = address[l] + (T(rank[l] + 1) << RANK_SHIFT);
    });
}

void whole(Warp& w, uint32_t m) {
    if (m != w.live)
        fail(Kind::divergent_barrier, m, 0, "a cluster's barrier that only some of the warp's threads reach");
}

template <bool relaxed>
void arrive(Warp& w, const Op&, uint32_t m) {
    whole(w, m);
    if (w.cluster_arrivals > w.cluster_waits)
        fail(Kind::divergent_barrier, m, 0, "a warp arrives at the cluster's barrier twice without a wait");
    Cluster& cluster = *w.block->cluster;
    cluster.clock.join(relaxed ? w.inits : w.block->release(w));
    ++w.cluster_arrivals;
    cluster.barrier_check();
}

bool passed(Warp& w) {
    const Cluster& cluster = *w.block->cluster;
    if (cluster.phase < w.cluster_waits) return false;
    w.block->acquire(w, cluster.done_clock);
    return true;
}

void wait(Warp& w, const Op&, uint32_t m) {
    whole(w, m);
    if (w.cluster_waits == w.cluster_arrivals)
        fail(Kind::divergent_barrier, m, 0, "a warp waits at the cluster's barrier without having arrived");
    ++w.cluster_waits;
    w.block_until(passed);
}

// mbarriers that were initialised are known to those who see this warp arrive, even relaxed.
void fence_inits(Warp& w, const Op&, uint32_t) { w.inits = w.block->release(w); }

// What other blocks did with a block's shared memory must have come before its end.
void ended(Warp& w) {
    const Block& block = *w.block;
    if (!block.done()) return;
    const auto& visits = block.shared->visits;
    for (size_t v = 0; v < visits.size(); ++v) {
        const auto after = [&](const Warp& own) { return own.clock.seen[v] > visits[v]; };
        if (visits[v] != 0 && std::none_of(block.warps.begin(), block.warps.end(), after))
            fail(Kind::shared_race, 0, 0, "the block ends while a warp of another block may access its shared memory");
    }
}

}  // namespace

REGISTERS void cluster_forms() {
    form("mapa.shared::cluster.u32", "=b32 b32 b32", map_address<uint32_t>);
    for (const char* name : {"mapa.u64", "mapa.shared::cluster.u64"})
        form(name, "=b64 b64 b32", map_address<uint64_t>);
    form("barrier.cluster.arrive.relaxed.aligned", "", arrive<true>);
    for (const char* name : {"barrier.cluster.arrive.aligned", "barrier.cluster.arrive.release.aligned"})
        form(name, "", arrive<false>);
    for (const char* name : {"barrier.cluster.wait.aligned", "barrier.cluster.wait.acquire.aligned"})
        form(name, "", wait);
    form("fence.mbarrier_init.release.cluster", "", fence_inits);
    on_end(ended);
}

}  // namespace ptx
