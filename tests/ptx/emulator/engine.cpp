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
    }
}

// ---- clocks ---------------------------------------------------------------------------------------------

void Clock::join(const Clock& other) {
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size(), 0);
    for (size_t v = 0; v < other.seen.size(); ++v) seen[v] = std::max(seen[v], other.seen[v]);
}

void Warp::clock_changed() { earliest = *std::min_element(clock.seen.begin(), clock.seen.end()); }

Clock Block::release(Warp& warp) {
    warp.clock.seen[warp.index] = ++now;
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
    w.block->executed += begin - left;
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
            case 14: lanes[l] = 1; break;  // the number of blocks of a cluster, or of clusters
            default: lanes[l] = 0; break;  // the rank in a cluster of one block
        }
    }
    fill(w.file + size_t(special.slot) * 64, lanes);
    w.written[special.slot] = ALL;
}

void set_up(Block& block, Launch& launch, uint32_t number, uint32_t start) {
    const Kernel& kernel = *launch.kernel;
    block = Block{};
    block.launch = &launch;
    block.number = number;
    block.index[0] = number % launch.grid[0];
    block.index[1] = number / launch.grid[0] % launch.grid[1];
    block.index[2] = number / (launch.grid[0] * launch.grid[1]);
    const uint32_t threads = launch.threads[0] * launch.threads[1] * launch.threads[2];
    const uint32_t warps = (threads + LANES - 1) / LANES;
    block.warps.resize(warps);
    const size_t bytes = size_t(kernel.slots) * 64;
    block.files.resize(bytes * warps + 64);
    uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block.files.data()) + 63) & ~63ull);
    block.now = start;
    block.shared = std::make_unique<Shared>(launch.shared_bytes, warps);
    if (launch.shared_image) block.shared->preset(launch.shared_image, launch.image_bytes);
    for (uint32_t i = 0; i < warps; ++i) {
        Warp& w = block.warps[i];
        w.block = &block;
        w.index = int(i);
        w.file = base + bytes * i;
        w.written.assign(kernel.slots, 0);
        std::memcpy(w.file, kernel.constants.data(), kernel.constants.size());
        std::fill_n(w.written.begin(), kernel.constants.size() / 64, ALL);
        for (const Special& special : kernel.specials) set_special(w, special);
        const uint32_t lanes = std::min<uint32_t>(LANES, threads - i * LANES);
        w.mask = w.live = lanes == LANES ? ALL : (1u << lanes) - 1;
        w.clock.seen.assign(warps, start);
        w.clock_changed();
        w.local.assign(size_t(kernel.local_bytes) * LANES, 0xFF);
    }
}

std::string standing(const Block& block) {
    std::string text = "no warp can continue:";
    for (const Warp& w : block.warps) {
        text += " warp " + std::to_string(w.index);
        if (w.state == State::exited) text += " has ended,";
        if (w.state == State::at_barrier) text += " waits at barrier " + std::to_string(w.barrier) + ",";
        if (w.state == State::blocked) text += " waits for an asynchronous operation,";
    }
    text.pop_back();
    return text;
}

// Let warps take turns until the block is done or has had `quantum` statements. Returns whether it is done.
bool advance(Block& block, int64_t quantum) {
    Launch& launch = *block.launch;
    const int64_t end = block.executed + quantum;
    std::vector<Warp*> able;
    while (!block.done() && block.executed < end) {
        able.clear();
        for (Warp& w : block.warps) {
            if (w.state == State::blocked && w.ready(w)) w.state = State::running;
            if (w.state == State::running) able.push_back(&w);
        }
        if (able.empty()) {
            bool moved = false;
            for (Progress progress : standstills()) moved = moved || progress(block);
            if (moved) continue;
            launch.current = nullptr;
            for (Warp& w : block.warps)
                if (w.state != State::exited) launch.current = &w;
            fail(Kind::deadlock, 0, 0, standing(block));
        }
        Warp& w = *able[launch.random() % able.size()];
        launch.current = &w;
        w.budget = 1 + launch.random() % 512;
        turn(w);
        if (block.executed > launch.limit)
            fail(Kind::deadlock, w.mask, 0, "no end after " + std::to_string(block.executed) + " statements");
    }
    return block.done();
}

}  // namespace

// Blocks in random order, one after another; where one may wait for another, they take turns.
void run_blocks(Launch& launch) {
    const uint32_t count = launch.grid[0] * launch.grid[1] * launch.grid[2];
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) order[i] = i;
    for (uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[launch.random() % i]);
    const int64_t quantum = launch.kernel->waits_for_blocks ? 100000 : INT64_MAX / 2;
    std::vector<std::unique_ptr<Block>> resident, spare;
    uint32_t started = 0;
    size_t next = 0;
    while (started < count || !resident.empty()) {
        // A new block first: one that waits does so for a block that may not have begun.
        if (started < count) {
            auto block = spare.empty() ? std::make_unique<Block>() : std::move(spare.back());
            if (!spare.empty()) spare.pop_back();
            set_up(*block, launch, order[started++], 1);
            resident.push_back(std::move(block));
            next = resident.size() - 1;
        }
        next %= resident.size();
        bool done;
        try {
            done = advance(*resident[next], quantum);
        } catch (Fault& fault) {
            if (const Warp* w = launch.current) {
                fault.line = launch.kernel->ops[w->pc].line;
                fault.block = w->block->number;
                fault.warp = uint32_t(w->index);
            }
            throw;
        }
        if (done) {
            const Block& block = *resident[next];
            if (launch.shared_result) block.shared->copy(launch.shared_result, launch.image_bytes);
            spare.push_back(std::move(resident[next]));
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
