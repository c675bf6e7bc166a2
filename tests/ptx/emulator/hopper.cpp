// Forms of sm_90 beside wgmma: mbarrier, copies of tensor tiles, fences of proxies.
//
// A bulk copy lands when a barrier that it counts on is waited for and nothing else can run ("late"), or at
// once ("early"). Until a warp has waited, its bytes are in flight. A bulk store reads shared memory when its
// group is waited for, or at once; until then no warp may write what it reads.
#include "hopper.h"

#include <algorithm>

namespace ptx {

HopperWarp& hopper(Warp& w) {
    if (!w.hopper_state) w.hopper_state = std::make_shared<HopperWarp>();
    return *static_cast<HopperWarp*>(w.hopper_state.get());
}

HopperBlock& hopper(Block& block) {
    if (!block.hopper_state) block.hopper_state = std::make_shared<HopperBlock>();
    return *static_cast<HopperBlock*>(block.hopper_state.get());
}

namespace {

// ---- mbarrier -------------------------------------------------------------------------------------------

void on_barrier(Warp& w, Block& block, uint64_t offset, uint32_t lane, uint16_t flag) {
    block.shared->check(offset, 8, lane, "an mbarrier");
    block.shared->on_write<8>(w, uint32_t(offset), lane, flag);
}

uint32_t barrier_offset(Warp& w, const Op& op, uint32_t lane, uint16_t flag) {
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    const uint32_t offset = shared_offset(at[lane]);
    on_barrier(w, *w.block, offset, lane, flag);
    return offset;
}

Barrier& barrier_at(Block& block, uint32_t offset, uint32_t lane) {
    for (Barrier& b : hopper(block).barriers)
        if (b.offset == offset) return b;
    fail(Kind::uninitialised_read, 1u << lane, offset, "an mbarrier that was not initialised");
}

void complete_phases(Barrier& b) {
    if (b.pending != 0 || b.bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.expected;
    b.done.join(b.clock);
}

void init(Warp& w, const Op& op, uint32_t m) {
    const uint32_t* count = w.lane<uint32_t>(op.src[1]);
    for_lanes(m, [&](uint32_t l) {
        const uint32_t offset = barrier_offset(w, op, l, 0);
        for (Barrier& b : hopper(*w.block).barriers)
            if (b.offset < offset + 8 && offset < b.offset + 8)
                fail(Kind::shared_race, 1u << l, offset, "mbarrier.init of an mbarrier that was not invalidated");
        Barrier b;
        b.offset = offset, b.expected = b.pending = count[l];
        hopper(*w.block).barriers.push_back(b);
    });
}

void inval(Warp& w, const Op& op, uint32_t m) {
    for_lanes(m, [&](uint32_t l) {
        const uint32_t offset = barrier_offset(w, op, l, 0);
        Barrier* b = &barrier_at(*w.block, offset, l);
        if (b->bytes != 0)
            fail(Kind::shared_race, 1u << l, offset, "mbarrier.inval while copies that it counts are in flight");
        auto& all = hopper(*w.block).barriers;
        all.erase(all.begin() + (b - all.data()));
        std::memset(w.block->shared->state.data() + offset, empty, 8);
    });
}

void arrived(Warp& w, Barrier& b, uint32_t lane) {
    if (b.pending == 0)
        fail(Kind::divergent_barrier, 1u << lane, b.offset, "more threads arrive at an mbarrier than its count");
    b.clock.join(w.block->release(w));
    --b.pending;
    complete_phases(b);
}

void arrive(Warp& w, const Op& op, uint32_t m) {
    for_lanes(m, [&](uint32_t l) { arrived(w, barrier_at(*w.block, barrier_offset(w, op, l, ATOMIC), l), l); });
}

// At an mbarrier of any block of the cluster.
void arrive_in_cluster(Warp& w, const Op& op, uint32_t m) {
    uint64_t at[LANES];
    addresses(w, op, 0, 0, at);
    for_lanes(m, [&](uint32_t l) {
        uint64_t offset = shared_offset(at[l]);
        Block& block = block_of(w, offset, l);
        on_barrier(w, block, offset, l, ATOMIC);
        arrived(w, barrier_at(block, uint32_t(offset), l), l);
    });
}

void arrive_expect(Warp& w, const Op& op, uint32_t m) {
    const uint32_t* bytes = w.lane<uint32_t>(op.src[1]);
    for_lanes(m, [&](uint32_t l) {
        Barrier& b = barrier_at(*w.block, barrier_offset(w, op, l, ATOMIC), l);
        b.bytes += bytes[l];
        arrived(w, b, l);
    });
}

bool phase_passed(Warp& w) {
    for (const Barrier& b : hopper(*w.block).barriers)
        if (int64_t(b.offset) == w.wait[2]) return int64_t(b.phase) != w.wait[3];
    return true;
}

// Whether the phase of that parity is over. A warp that finds it is not gets its next turn when it is, and
// asks again.
void wait_parity(Warp& w, const Op& op, uint32_t m) {
    const uint32_t* parity = w.lane<uint32_t>(op.src[1]);
    uint32_t over = 0;
    for_lanes(m, [&](uint32_t l) {
        const uint32_t offset = barrier_offset(w, op, l, ATOMIC);
        Barrier& b = barrier_at(*w.block, offset, l);
        if (parity[l] > 1) fail(Kind::bad_launch, 1u << l, offset, "a parity that is neither 0 nor 1");
        if (b.phase != parity[l]) {
            over |= 1u << l;
            w.block->acquire(w, b.done);
        } else {
            w.wait[2] = offset, w.wait[3] = parity[l];
        }
    });
    set_predicate(w.predicate(op.dst[0]), m, over);
    if (over != m && m == w.live) w.block_until(phase_passed);
}

// ---- tensor maps ----------------------------------------------------------------------------------------

const TensorMap& map_of(Warp& w, const Op& op, size_t s, size_t i, uint32_t lane) {
    uint64_t at[LANES];
    addresses(w, op, s, i, at);
    uint64_t address = at[lane];
    const Space space = resolve(address);
    const uint8_t* found = nullptr;
    if (address & 63) Shared::misaligned(address, 64, lane, "a tensor map");
    if (space == Space::parameter) {
        for (uint32_t b = 0; b < sizeof(TensorMap); b += 8) {
            const uint8_t* part = parameter_at(w, address + b, 8, lane);
            if (b == 0) found = part;
        }
    } else if (space == Space::global) {
        for (uint32_t b = 0; b < sizeof(TensorMap); b += 8)
            global_access(*w.block->launch, address + b, 8, lane, "a tensor map");
        found = reinterpret_cast<const uint8_t*>(address);
    } else {
        fail(Kind::out_of_bounds, 1u << lane, address, "a tensor map in neither parameters nor global memory");
    }
    const auto& map = *reinterpret_cast<const TensorMap*>(found);
    if (map.magic != TensorMap::MAGIC)
        fail(Kind::bad_launch, 1u << lane, address, "what the tensor map's address names is none");
    return map;
}

void prefetch_map(Warp& w, const Op& op, uint32_t m) {
    for (uint32_t l = 0; l < LANES; ++l)
        if (m >> l & 1) map_of(w, op, 0, 0, l);
}

uint32_t swizzled(uint32_t at, uint32_t mode) {
    if (mode == 128) return at ^ (at >> 3 & 0x70);
    if (mode == 64) return at ^ (at >> 3 & 0x30);
    if (mode == 32) return at ^ (at >> 3 & 0x10);
    return at;
}

// The pieces of 16 bytes or less of a tile: `f(address in global memory or 0 outside, offset in shared memory,
// bytes)`. A tile lies in shared memory by rows, swizzled by its addresses.
template <class F>
void pieces(const TensorMap& map, const int32_t* coordinates, uint32_t target, F f) {
    const uint32_t row = map.box[0] * map.element_bytes;
    uint32_t rows = 1;
    for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
    for (uint32_t r = 0; r < rows; ++r) {
        uint64_t address = map.base;
        bool inside = true;
        uint32_t left = r;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t at = coordinates[d] + int64_t(left % map.box[d]);
            left /= map.box[d];
            inside = inside && at >= 0 && at < int64_t(map.size[d]);
            address += uint64_t(at) * map.stride[d];
        }
        for (uint32_t b = 0; b < row; b += 16) {
            const uint32_t count = std::min(16u, row - b);
            // Elements of a piece may lie inside and outside, but for those before 0, which count as outside.
            const int64_t first = coordinates[0] + int64_t(b / map.element_bytes);
            const int64_t all = count / map.element_bytes;
            const int64_t from = std::clamp<int64_t>(-first, 0, all);
            const int64_t to = std::clamp<int64_t>(int64_t(map.size[0]) - first, 0, all);
            const uint32_t skipped = uint32_t(from) * map.element_bytes;
            const uint32_t there = inside && to > from ? uint32_t(to - from) * map.element_bytes : 0;
            const uint64_t place = address + uint64_t(first + from) * map.element_bytes;
            f(place, swizzled(target + r * row + b, map.swizzle), count, skipped, there);
        }
    }
}

void check_target(Block& block, const TensorMap& map, uint32_t at, uint32_t lane, const char* what) {
    if (at & 127) Shared::misaligned(at, 128, lane, what);
    if (map.swizzle && map.box[0] * map.element_bytes > map.swizzle)
        fail(Kind::bad_launch, 1u << lane, at, "a tensor map whose rows are longer than its swizzle");
    if (at + map.bytes() > block.shared->bytes)
        fail(Kind::out_of_bounds, 1u << lane, at, std::string(what) + " outside the block's shared memory");
}

void read_tile(Block& block, const TileCopy& copy) {
    pieces(copy.map, copy.coordinates, copy.shared,
           [&](uint64_t from, uint32_t to, uint32_t count, uint32_t skipped, uint32_t there) {
               uint8_t* at = block.shared->data.data() + to;
               std::memset(at, 0, count);
               if (there) {
                   for (uint32_t i = 0; i < there; i += copy.map.element_bytes)
                       global_access(*block.launch, from + i, copy.map.element_bytes, copy.lane, "a copy of a tile");
                   std::memcpy(at + skipped, reinterpret_cast<const void*>(from), there);
               }
           });
}

void set_state(Block& block, const TileCopy& copy, uint8_t state) {
    pieces(copy.map, copy.coordinates, copy.shared,
           [&](uint64_t, uint32_t to, uint32_t count, uint32_t, uint32_t) {
               std::memset(block.shared->state.data() + to, state, count);
           });
}

void land(Block& block, TileCopy& copy) {
    if (block.launch->late) read_tile(block, copy);
    set_state(block, copy, valid);
    for (Barrier& b : hopper(block).barriers)
        if (b.offset == copy.barrier) {
            b.clock.join(copy.clock);
            b.bytes -= copy.map.bytes();
            complete_phases(b);
            return;
        }
    fail(Kind::shared_race, 1u << copy.lane, copy.barrier, "a copy of a tile finds no mbarrier when it lands");
}

// The tile comes to `block`, to the place that the address names in each block, and counts on its mbarrier.
void issue(Warp& w, Block& block, TileCopy copy) {
    const uint32_t l = copy.lane;
    visit(w, block, copy.shared, l);
    check_target(block, copy.map, copy.shared, l, "a copy of a tile");
    if (&block != w.block) on_barrier(w, block, copy.barrier, l, ATOMIC);
    barrier_at(block, copy.barrier, l);
    pieces(copy.map, copy.coordinates, copy.shared,
           [&](uint64_t from, uint32_t to, uint32_t count, uint32_t, uint32_t there) {
               if (there) check_early(w, from, there, l, false);
               for (uint32_t i = 0; i < count; ++i)
                   if (block.shared->state[to + i] == in_flight)
                       fail(Kind::shared_race, 1u << l, to, "a copy of a tile to bytes of one in flight");
               if (count != 16) fail(Kind::bad_launch, 1u << l, to, "rows of a tile that are no 16 bytes");
               block.shared->on_write<16>(w, to, l, ASYNC, in_flight);
               std::memset(block.shared->data.data() + to, 0xFF, 16);
           });
    // What this warp did until now, it releases; what it does from now on, it does not.
    copy.clock = w.block->release(w);
    if (!block.launch->late) read_tile(block, copy);
    hopper(block).copies.push_back(copy);
}

// `multicast`: the last operand has a bit for each block of the cluster that the tile comes to.
template <bool multicast>
void load_tile(Warp& w, const Op& op, uint32_t m) {
    uint64_t target[LANES], barrier[LANES];
    addresses(w, op, 0, 0, target);
    const size_t rank = op.src.size() - 3 - multicast;
    addresses(w, op, 2 + rank, 4, barrier);
    auto& blocks = w.block->cluster->blocks;
    for_lanes(m, [&](uint32_t l) {
        TileCopy copy;
        copy.map = map_of(w, op, 1, 2, l);
        copy.shared = shared_offset(target[l]);
        copy.barrier = shared_offset(barrier[l]);
        copy.warp = &w, copy.lane = l;
        if (copy.map.rank != rank) fail(Kind::bad_launch, 1u << l, 0, "a tensor map of another rank than the copy");
        for (size_t d = 0; d < rank; ++d) copy.coordinates[d] = w.lane<int32_t>(op.src[2 + d])[l];
        const uint32_t to = multicast ? w.lane<uint16_t>(op.src.back())[l] : 1u << w.block->rank;
        if (to == 0 || to >> blocks.size())
            fail(Kind::bad_launch, 1u << l, to, "a multicast to no block, or to one that the cluster does not have");
        for (Block& block : blocks)
            if (to >> block.rank & 1) issue(w, block, copy);
    });
    if (!w.block->launch->late) land_copies(*w.block->cluster);
}

void write_tile(Warp& w, const TileCopy& copy) {
    pieces(copy.map, copy.coordinates, copy.shared,
           [&](uint64_t to, uint32_t from, uint32_t, uint32_t skipped, uint32_t there) {
               for (uint32_t i = 0; i < there; i += copy.map.element_bytes)
                   on_global_write(w, to + i, copy.map.element_bytes, copy.lane);
               const uint8_t* at = w.block->shared->data.data() + from + skipped;
               if (there) std::memcpy(reinterpret_cast<void*>(to), at, there);
           });
}

void hold(Shared& shared, const TileCopy& copy, int by) {
    pieces(copy.map, copy.coordinates, copy.shared, [&](uint64_t, uint32_t at, uint32_t, uint32_t, uint32_t) {
        shared.readers[at >> 4] = uint8_t(shared.readers[at >> 4] + by);
    });
}

void store_tile(Warp& w, const Op& op, uint32_t m) {
    uint64_t source[LANES];
    const size_t rank = op.src.size() - 2;
    addresses(w, op, 1 + rank, 2, source);
    for_lanes(m, [&](uint32_t l) {
        TileCopy copy;
        copy.map = map_of(w, op, 0, 0, l);
        copy.shared = shared_offset(source[l]);
        copy.warp = &w, copy.lane = l;
        if (copy.map.rank != rank) fail(Kind::bad_launch, 1u << l, 0, "a tensor map of another rank than the store");
        for (size_t d = 0; d < rank; ++d) copy.coordinates[d] = w.lane<int32_t>(op.src[1 + d])[l];
        check_target(*w.block, copy.map, copy.shared, l, "a store of a tile");
        pieces(copy.map, copy.coordinates, copy.shared,
               [&](uint64_t, uint32_t at, uint32_t count, uint32_t, uint32_t) {
                   if (count != 16) fail(Kind::bad_launch, 1u << l, at, "rows of a tile that are no 16 bytes");
                   w.block->shared->on_read<16>(w, at, l);
                   async_read(w, at, 16, "cp.async.bulk.tensor");
               });
        hold(*w.block->shared, copy, 1);
        copy.group = hopper(w).committed[l];
        if (!w.block->launch->late) write_tile(w, copy);
        hopper(w).stores.push_back(copy);
    });
}

void commit(Warp& w, const Op&, uint32_t m) {
    for_lanes(m, [&](uint32_t l) { ++hopper(w).committed[l]; });
}

// .read waits until shared memory has been read, the other one until global memory has been written: here they
// are one moment.
void wait_group(Warp& w, const Op& op, uint32_t m) {
    HopperWarp& state = hopper(w);
    size_t kept = 0;
    for (TileCopy& copy : state.stores) {
        const bool named = m >> copy.lane & 1;
        if (!named || int64_t(copy.group) >= int64_t(state.committed[copy.lane]) - op.imm[0]) {
            state.stores[kept++] = copy;
            continue;
        }
        if (w.block->launch->late) write_tile(w, copy);
        hold(*w.block->shared, copy, -1);
        pieces(copy.map, copy.coordinates, copy.shared, [&](uint64_t, uint32_t at, uint32_t, uint32_t, uint32_t) {
            w.block->shared->on_read<16>(w, at, copy.lane);
        });
    }
    state.stores.resize(kept);
}

// Shared memory belongs to another block when the block has ended.
void ended(Warp& w) {
    if (w.hopper_state && !hopper(w).stores.empty()) {
        const TileCopy& copy = hopper(w).stores.front();
        fail(Kind::shared_race, 1u << copy.lane, copy.shared,
             "a warp ends while a bulk store of its still reads memory");
    }
    const Block& block = *w.block;
    if (!block.done() || !block.hopper_state || hopper(*w.block).copies.empty()) return;
    const TileCopy& copy = hopper(*w.block).copies.front();
    fail(Kind::shared_race, 0, copy.shared, "the block ends while a tile that no warp waited for is in flight");
}

void proxy_fence(Warp& w, const Op&, uint32_t) { hopper(w).fenced = w.block->cluster->now++; }

// Registers are not counted here: only what every device refuses is.
void set_registers(Warp& w, const Op& op, uint32_t m) {
    if (m != ALL || w.live != ALL)
        fail(Kind::divergent_barrier, ~m, 0, "setmaxnreg is executed by a part of the warp's lanes");
    if (op.imm[0] < 24 || op.imm[0] > 256 || op.imm[0] % 8 != 0)
        fail(Kind::bad_launch, m, uint64_t(op.imm[0]), "setmaxnreg: expected 24 to 256 registers, a multiple of 8");
}

}  // namespace

bool land_copies(Cluster& cluster) {
    Launch& launch = *cluster.blocks[0].launch;
    size_t count = 0;
    for (Block& block : cluster.blocks) {
        auto& copies = hopper(block).copies;
        count += copies.size();
        if (launch.late) continue;
        for (TileCopy& copy : copies) land(block, copy);
        copies.clear();
    }
    if (count == 0 || !launch.late) return count != 0;
    // In any order, one at a time: a warp runs as soon as it can.
    size_t chosen = launch.random() % count;
    Block* block = cluster.blocks.data();
    for (; chosen >= hopper(*block).copies.size(); ++block) chosen -= hopper(*block).copies.size();
    auto& copies = hopper(*block).copies;
    std::swap(copies[chosen], copies.back());
    TileCopy copy = copies.back();
    copies.pop_back();
    land(*block, copy);
    return true;
}

// A generic write that no proxy fence of its writer or of this warp has followed is not sure to be seen by an
// asynchronous operation.
void async_read(Warp& w, uint32_t at, uint32_t size, const char* what) {
    const Shared& shared = *w.block->shared;
    const uint32_t own = hopper(w).fenced;
    for (uint32_t i = at; i < at + size; ++i) {
        Warp& writer = w.block->cluster->warp(shared.writer[i] & ACTOR);
        if (shared.write_time[i] == 0 || (shared.writer[i] & ASYNC)) continue;
        if (std::max(own, hopper(writer).fenced) >= shared.write_time[i]) continue;
        warn(w, std::string(what) + " reads shared memory that was written without a fence.proxy.async since");
        return;
    }
}

REGISTERS void hopper_forms() {
    form("mbarrier.init.shared::cta.b64", "@ b32", init);
    form("mbarrier.inval.shared::cta.b64", "@", inval);
    form("mbarrier.arrive.shared::cta.b64", "=b64 @", arrive);
    form("mbarrier.arrive.expect_tx.shared::cta.b64", "=b64 @ b32", arrive_expect);
    for (const std::string order : {"", ".release.cluster"})
        form("mbarrier.arrive" + order + ".shared::cluster.b64", "=b64 @", arrive_in_cluster);
    for (const std::string order : {"", ".acquire.cluster"})
        form("mbarrier.try_wait.parity" + order + ".shared::cta.b64", "=p @ b32", wait_parity);
    for (const char* of : {"shared::cta", "shared::cluster"})
        form(std::string("fence.proxy.async.") + of, "", proxy_fence);
    for (const std::string mode : {"", ".tile"}) {
        for (const std::string to : {".shared::cta", ".shared::cluster"})
            form("cp.async.bulk.tensor.2d" + to + ".global" + mode + ".mbarrier::complete_tx::bytes", "@ @+b32*2 @",
                 load_tile<false>);
        form("cp.async.bulk.tensor.2d.shared::cluster.global" + mode +
                 ".mbarrier::complete_tx::bytes.multicast::cluster",
             "@ @+b32*2 @ b16", load_tile<true>);
        form("cp.async.bulk.tensor.2d.global.shared::cta" + mode + ".bulk_group", "@+b32*2 @", store_tile);
    }
    form("cp.async.bulk.commit_group", "", commit);
    form("cp.async.bulk.wait_group", "#", wait_group);
    form("cp.async.bulk.wait_group.read", "#", wait_group);
    form("prefetch.tensormap", "@", prefetch_map);
    form("cp.async.bulk.prefetch.tensor.2d.L2.global.tile", "@+b32*2", prefetch_map);
    form("setmaxnreg.inc.sync.aligned.u32", "#", set_registers);
    form("setmaxnreg.dec.sync.aligned.u32", "#", set_registers);
    wgmma_forms();
    on_standstill(land_copies);
    on_end(ended);
}

}  // namespace ptx
