// Warps as groups of lanes with program counters; blocks as warps that take turns.
#include "engine.h"

#include <algorithm>
#include <cstring>

#include "shared.h"

namespace ptx {

void fail(Kind kind, uint32_t lanes, uint64_t address, const std::string& text) {
    throw Fault{kind, lanes, address, text};
}

namespace {
std::vector<Progress>& standstills() {
    static std::vector<Progress> all;
    return all;
}
}  // namespace

void on_standstill(Progress progress) { standstills().push_back(progress); }

namespace {
std::vector<Ending>& endings() {
    static std::vector<Ending> all;
    return all;
}
}  // namespace

void on_end(Ending ending) { endings().push_back(ending); }

std::vector<std::string>& warnings() {
    static thread_local std::vector<std::string> all;
    return all;
}

void warn(Warp& w, const std::string& text) {
    const std::string line = std::to_string(w.block->launch->kernel->ops[w.pc].line) + "\t" + text;
    auto& all = warnings();
    if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(line);
}

// ---- lanes of one warp ----------------------------------------------------------------------------------

void Warp::reconverge() {
    uint32_t lowest = mask ? pc : NONE;
    for (auto& [where, lanes] : waiting) lowest = std::min(lowest, where);
    if (mask && lowest != pc) waiting.push_back({pc, mask}), mask = 0;
    pc = lowest;
    meet = NONE;
    size_t kept = 0;
    for (auto& group : waiting) {
        if (group.first == lowest) {
            mask |= group.second;
        } else {
            meet = std::min(meet, group.first);
            waiting[kept++] = group;
        }
    }
    waiting.resize(kept);
}

void Warp::exit(uint32_t lanes) {
    live &= ~lanes;
    mask &= ~lanes;
    if (live == 0) {
        state = State::exited;
        ++block->exited;
        for (Ending ending : endings()) ending(*this);
        stop();
        for (int id = 0; id < 16; ++id) block->barrier_check(id);
        block->cluster->barrier_check();
    }
}

// ---- clocks ---------------------------------------------------------------------------------------------

void Clock::join(const Clock& other) {
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size(), 0);
    for (size_t v = 0; v < other.seen.size(); ++v) seen[v] = std::max(seen[v], other.seen[v]);
}

void Warp::clock_changed() { earliest = *std::min_element(clock.seen.begin(), clock.seen.end()); }

Clock Block::release(Warp& warp) {
    warp.clock.seen[size_t(warp.actor)] = ++cluster->now;
    warp.clock_changed();
    return warp.clock;
}

void Block::acquire(Warp& warp, const Clock& clock) {
    warp.clock.join(clock);
    warp.clock_changed();
    ++warp.meetings;
}

// ---- running --------------------------------------------------------------------------------------------

namespace {

void check_reads(Warp& w, const Op& op, uint32_t m) {
    for (uint32_t slot : op.src) {
        const uint32_t missing = m & ~w.written[slot];
        if (missing) fail(Kind::uninitialised_read, missing, slot, "an undefined register is used");
    }
}

void turn(Warp& w) {
    const Op* ops = w.block->launch->kernel->ops.data();
    const int64_t begin = w.budget;
    int64_t left = begin;
    while (w.budget > 0) {
        --w.budget, --left;
        const Op& op = ops[w.pc];
        w.next = w.pc + 1;
        uint32_t m = w.mask;
        if (op.guard != NONE) {
            const uint32_t missing = m & ~w.written[op.guard];
            if (missing)
                fail(Kind::uninitialised_read, missing, op.guard, "an undefined predicate is used");
            const uint32_t p = w.predicate(op.guard);
            m &= op.negated ? ~p : p;
        }
        if (m) {
            if (op.pure) {
                uint32_t known = m;
                for (uint32_t slot : op.src) known &= w.written[slot];
                for (uint32_t slot : op.dst) w.written[slot] = (w.written[slot] & ~m) | known;
            } else if (!op.raw) {
                check_reads(w, op, m);
                for (uint32_t slot : op.dst) w.written[slot] |= m;
            }
            op.run(w, op, m);
        }
        w.pc = w.next;
        if (w.pc >= w.meet || w.mask == 0) {
            if (w.live == 0) break;
            w.reconverge();
        }
    }
    w.block->cluster->executed += begin - left;
}

void fill(uint8_t* at, const std::vector<uint32_t>& values) { std::memcpy(at, values.data(), 4 * LANES); }

void set_special(Warp& w, const Special& special) {
    const Block& b = *w.block;
    const Launch& launch = *b.launch;
    std::vector<uint32_t> lanes(LANES);
    for (uint32_t l = 0; l < LANES; ++l) {
        const uint32_t thread = w.index * LANES + l;
        const uint32_t xy = launch.threads[0] * launch.threads[1];
        const uint32_t tid[3] = {thread % launch.threads[0], thread / launch.threads[0] % launch.threads[1],
                                 thread / xy};
        switch (special.id) {
            case 0: case 1: case 2: lanes[l] = tid[special.id]; break;
            case 3: case 4: case 5: lanes[l] = launch.threads[special.id - 3]; break;
            case 6: case 7: case 8: lanes[l] = b.index[special.id - 6]; break;
            case 9: case 10: case 11: lanes[l] = launch.grid[special.id - 9]; break;
            case 12: lanes[l] = l; break;
            case 13: lanes[l] = w.index; break;
            case 14: case 15: case 16: lanes[l] = b.index[special.id - 14] % launch.cluster[special.id - 14]; break;
            case 17: case 18: case 19: lanes[l] = launch.cluster[special.id - 17]; break;
            case 20: case 21: case 22: lanes[l] = b.cluster->index[special.id - 20]; break;
            case 23: case 24: case 25: lanes[l] = launch.grid[special.id - 23] / launch.cluster[special.id - 23]; break;
            case 26: lanes[l] = b.rank; break;
            default: lanes[l] = uint32_t(b.cluster->blocks.size()); break;
        }
    }
    fill(w.file + size_t(special.slot) * 64, lanes);
    w.written[special.slot] = ALL;
}

// Place `at` of a box of `sizes`, x first.
void place(uint32_t at, const uint32_t* sizes, uint32_t* index) {
    index[0] = at % sizes[0], index[1] = at / sizes[0] % sizes[1], index[2] = at / (sizes[0] * sizes[1]);
}

void set_up(Cluster& cluster, uint32_t rank, Launch& launch) {
    const Kernel& kernel = *launch.kernel;
    Block& block = cluster.blocks[rank];
    block.launch = &launch;
    block.cluster = &cluster;
    block.rank = rank;
    place(rank, launch.cluster, block.index);
    for (int d = 0; d < 3; ++d) block.index[d] += cluster.index[d] * launch.cluster[d];
    block.number = block.index[0] + launch.grid[0] * (block.index[1] + launch.grid[1] * block.index[2]);
    const uint32_t threads = launch.threads[0] * launch.threads[1] * launch.threads[2];
    const uint32_t warps = (threads + LANES - 1) / LANES, actors = warps * uint32_t(cluster.blocks.size());
    cluster.warps_per_block = int(warps);
    block.warps.resize(warps);
    const size_t bytes = size_t(kernel.slots) * 64;
    block.files.resize(bytes * warps + 64);
    uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block.files.data()) + 63) & ~63ull);
    block.shared = std::make_unique<Shared>(launch.shared_bytes, actors);
    if (launch.shared_image) block.shared->preset(launch.shared_image, launch.image_bytes);
    for (uint32_t i = 0; i < warps; ++i) {
        Warp& w = block.warps[i];
        w.block = &block;
        w.index = int(i);
        w.actor = int(rank * warps + i);
        w.file = base + bytes * i;
        w.written.assign(kernel.slots, 0);
        std::memcpy(w.file, kernel.constants.data(), kernel.constants.size());
        std::fill_n(w.written.begin(), kernel.constants.size() / 64, ALL);
        for (const Special& special : kernel.specials) set_special(w, special);
        const uint32_t lanes = std::min<uint32_t>(LANES, threads - i * LANES);
        w.mask = w.live = lanes == LANES ? ALL : (1u << lanes) - 1;
        w.clock.seen.assign(actors, cluster.now);
        w.clock_changed();
        w.local.assign(size_t(kernel.local_bytes) * LANES, 0xFF);
    }
}

// `f` of each warp of a cluster.
template <class F>
void for_warps(Cluster& cluster, F f) {
    for (Block& block : cluster.blocks)
        for (Warp& w : block.warps) f(w);
}

std::string standing(Cluster& cluster) {
    std::string text = "no warp can continue:";
    for_warps(cluster, [&](const Warp& w) {
        if (cluster.blocks.size() > 1 && w.index == 0) text += " of block " + std::to_string(w.block->rank) + ":";
        text += " warp " + std::to_string(w.index);
        if (w.state == State::exited) text += " has ended,";
        if (w.state == State::at_barrier) text += " waits at barrier " + std::to_string(w.barrier) + ",";
        if (w.state == State::blocked)
            text += w.cluster_waits > cluster.phase ? " waits at the cluster's barrier,"
                                                    : " waits for an asynchronous operation,";
    });
    text.pop_back();
    return text;
}

// Let warps take turns until the cluster is done or has had `quantum` statements. Returns whether it is done.
bool advance(Cluster& cluster, Launch& launch, int64_t quantum) {
    const int64_t end = cluster.executed + quantum;
    std::vector<Warp*> able;
    while (!cluster.done() && cluster.executed < end) {
        able.clear();
        for_warps(cluster, [&](Warp& w) {
            if (w.state == State::blocked && w.ready(w)) w.state = State::running;
            if (w.state == State::running) able.push_back(&w);
        });
        if (able.empty()) {
            bool moved = false;
            for (Progress progress : standstills()) moved = moved || progress(cluster);
            if (moved) continue;
            launch.current = nullptr;
            for_warps(cluster, [&](Warp& w) {
                if (w.state != State::exited) launch.current = &w;
            });
            fail(Kind::deadlock, 0, 0, standing(cluster));
        }
        Warp& w = *able[launch.random() % able.size()];
        launch.current = &w;
        w.budget = 1 + launch.random() % 512;
        turn(w);
        if (cluster.executed > launch.limit)
            fail(Kind::deadlock, w.mask, 0, "no end after " + std::to_string(cluster.executed) + " statements");
    }
    return cluster.done();
}

}  // namespace

// Clusters in random order, one after another; where one may wait for another, they take turns.
void run_blocks(Launch& launch) {
    uint32_t clusters[3];
    for (int d = 0; d < 3; ++d) clusters[d] = launch.grid[d] / launch.cluster[d];
    const uint32_t count = clusters[0] * clusters[1] * clusters[2];
    const uint32_t size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) order[i] = i;
    for (uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[launch.random() % i]);
    const int64_t quantum = launch.kernel->waits_for_blocks ? 100000 : INT64_MAX / 2;
    std::vector<std::unique_ptr<Cluster>> resident;
    uint32_t started = 0;
    size_t next = 0;
    while (started < count || !resident.empty()) {
        // A new one first: one that waits does so for a block that may not have begun.
        if (started < count) {
            auto cluster = std::make_unique<Cluster>();
            place(order[started++], clusters, cluster->index);
            cluster->blocks.resize(size);
            for (uint32_t rank = 0; rank < size; ++rank) set_up(*cluster, rank, launch);
            resident.push_back(std::move(cluster));
            next = resident.size() - 1;
        }
        next %= resident.size();
        bool done;
        try {
            done = advance(*resident[next], launch, quantum);
        } catch (Fault& fault) {
            if (const Warp* w = launch.current) {
                fault.line = launch.kernel->ops[w->pc].line;
                fault.block = w->block->number;
                fault.warp = uint32_t(w->index);
            }
            throw;
        }
        if (done) {
            const Block& block = resident[next]->blocks[0];
            if (launch.shared_result) block.shared->copy(launch.shared_result, launch.image_bytes);
            resident.erase(resident.begin() + long(next));
        } else {
            ++next;
        }
    }
}

std::vector<Form>& forms() {
    static std::vector<Form> all;
    return all;
}

void form(const std::string& name, const std::string& signature, Run run) {
    forms().push_back({name, signature, run});
}

void pure_form(const std::string& name, const std::string& signature, Run run) {
    forms().push_back({name, signature, run, false, true});
}

void raw_form(const std::string& name, const std::string& signature, Run run) {
    forms().push_back({name, signature, run, true});
}

}  // namespace ptx
