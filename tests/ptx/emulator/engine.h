// The engine: clusters of blocks of warps that run decoded PTX statements, 32 lanes at a time.
//
// A register is an array of 32 lane values as wide as it was declared, at a multiple of 64 bytes in its warp's
// file; a predicate is one 32-bit mask. Its number ("slot") is its offset divided by 64. Constants, addresses of
// symbols and special registers such as %tid.x are registers that hold their value from the start, so that every
// operand is an array of lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ptx {

constexpr int LANES = 32;
constexpr uint32_t ALL = ~0u;
constexpr uint32_t NONE = ~0u;

// Windows of generic addresses. Host addresses, which global memory uses, are below all of them.
constexpr uint64_t SHARED_BASE = 1ull << 60, LOCAL_BASE = 2ull << 60, PARAM_BASE = 3ull << 60;
constexpr uint64_t WINDOW = 1ull << 32;

struct Warp;
struct Block;
struct Cluster;
struct Launch;
struct Op;

using Run = void (*)(Warp&, const Op&, uint32_t mask);

struct Op {
    Run run;
    uint32_t guard = NONE;  // slot of the predicate before the statement
    bool negated = false;
    bool pure = false;      // it only computes: of undefined values come undefined ones, which are no fault yet
    bool raw = false;       // the form itself looks which registers hold values, and says which do then
    uint32_t line = 0;  // of the PTX text
    // The lists are the statement's operands in order; vectors are flattened.
    // An address is one source, the base, and two immediates: offset, bytes of the base.
    std::vector<uint32_t> dst, src;
    std::vector<int64_t> imm;
};

enum class Kind : int {
    none,
    uninitialised_read,
    out_of_bounds,
    misaligned,
    shared_race,
    divergent_barrier,
    deadlock,
    block_overlap,
    bad_launch,
    early_access,
};

// What a kernel did wrong; thrown, and returned to Python as a struct of numbers and the text.
struct Fault {
    Kind kind;
    uint32_t lanes;
    uint64_t address;
    std::string text;
    uint32_t line = 0, block = 0, warp = 0;
};

// A warp's knowledge of the warps of its cluster: `seen[v]` is the time of the last release of warp v that it has
// acquired.
// An access of warp v at time t happens before what this warp does now if t < seen[v].
struct Clock {
    std::vector<uint32_t> seen;
    void join(const Clock& other);
};

// Bytes of shared memory that an asynchronous copy will write, of one statement of one warp.
struct Copy {
    uint32_t lanes;
    uint32_t group[LANES];  // per lane: the number of its commit group
    uint32_t target[LANES];
    uint64_t source[LANES];
    uint32_t bytes;          // written per lane
    uint32_t read[LANES];    // of them read from the source; the rest become zero
};

enum class State { running, at_barrier, blocked, exited };

struct Warp {
    Block* block = nullptr;
    int index = 0;   // in its block
    int actor = 0;   // in its cluster: of clocks
    uint8_t* file = nullptr;
    std::vector<uint32_t> written;  // per slot: lanes that hold a value

    uint32_t pc = 0, next = 0;
    uint32_t mask = 0;  // lanes at pc
    uint32_t live = 0;  // lanes that have not exited
    // Other lanes wait at higher program counters: the lowest runs, and joins whom it meets.
    std::vector<std::pair<uint32_t, uint32_t>> waiting;
    uint32_t meet = NONE;  // the lowest of `waiting`

    State state = State::running;
    int barrier = 0;                      // where it waits
    bool (*ready)(Warp&) = nullptr;       // of a blocked warp: whether it may continue
    int64_t wait[4] = {};                 // what `ready` needs to know
    int64_t budget = 0;                   // statements until another warp gets its turn
    Clock clock;
    uint32_t earliest = 0;  // min(clock.seen): whatever happened before it is ordered
    uint32_t meetings = 1;  // grows where the warp's lanes wait for each other

    std::vector<Copy> copies;
    uint32_t committed[LANES] = {};
    std::vector<uint8_t> local;
    uint32_t cluster_arrivals = 0, cluster_waits = 0;  // at the cluster's barrier
    uint32_t waited = 0;  // lanes that have waited for the kernels before
    Clock inits;  // when it last fenced mbarriers that it had initialised
    std::shared_ptr<void> hopper_state;  // of hopper.cpp

    template <class T>
    T* lane(uint32_t slot) {
        return reinterpret_cast<T*>(file + size_t(slot) * 64);
    }
    uint32_t& predicate(uint32_t slot) { return *lane<uint32_t>(slot); }
    // Give up the turn after this statement; with a `test`, until it holds.
    void stop() { budget = 0; }
    void block_until(bool (*test)(Warp&)) {
        state = State::blocked, ready = test;
        stop();
    }
    void reconverge();
    void exit(uint32_t lanes);
    void clock_changed();
};

struct Shared;

struct NamedBarrier {
    uint32_t arrived = 0;  // threads
    uint32_t expected = 0;
    uint32_t waiting = 0;  // warps, as bits
    Clock clock;
};

struct Block {
    Launch* launch = nullptr;
    Cluster* cluster = nullptr;
    uint32_t number = 0, rank = 0;
    uint32_t index[3] = {};
    std::vector<Warp> warps;
    std::vector<uint8_t> files;
    std::unique_ptr<Shared> shared;
    NamedBarrier barriers[16];
    int exited = 0;
    std::shared_ptr<void> hopper_state;

    bool done() const { return exited == int(warps.size()); }
    void acquire(Warp& warp, const Clock& clock);
    // Everything that the warp did so far, as a clock that others may acquire.
    Clock release(Warp& warp);
    void barrier_check(int id);
};

// Blocks that may access each other's shared memory. Without clusters each block is one of its own.
struct Cluster {
    uint32_t index[3] = {};
    std::vector<Block> blocks;
    int warps_per_block = 0;
    uint32_t now = 1;  // of the clocks
    int64_t executed = 0;
    // The barrier of all warps that have not exited: phases that are over; what the arrived warps had released,
    // and those of these phases.
    uint32_t phase = 0;
    Clock clock, done_clock;

    bool done() const;
    Warp& warp(int actor) { return blocks[size_t(actor / warps_per_block)].warps[size_t(actor % warps_per_block)]; }
    void barrier_check();
};

struct Allocation {
    uint64_t start, end;
    uint32_t* writers;  // per byte: 1 + the block that wrote it, 0 for none
};

struct Special {
    uint32_t slot;
    uint32_t id;
};

struct Kernel {
    std::vector<Op> ops;
    std::vector<uint8_t> constants;            // the first slots of every file
    std::vector<Special> specials;
    uint32_t slots = 0;
    uint32_t shared_bytes = 0, local_bytes = 0;
    bool waits_for_blocks = false;  // atomics or loads with acquire: another block may have to run meanwhile
};

struct Launch {
    const Kernel* kernel;
    uint32_t grid[3], threads[3];
    uint32_t cluster[3];    // its blocks
    uint32_t shared_bytes;  // static and dynamic
    const uint8_t* parameters;
    uint32_t parameter_bytes;
    std::vector<Allocation> allocations;  // sorted
    // Of a chained launch: memory that no kernel before it writes; pairs of start and end, sorted and apart.
    bool chained = false, waited = false;
    std::vector<std::pair<uint64_t, uint64_t>> constant;
    size_t recent = 0;                    // the allocation that was hit last
    bool late;                            // an asynchronous copy lands as late as its wait allows
    bool check_overlap;
    int64_t limit;  // statements of one cluster
    std::mt19937 random;
    const uint8_t* shared_image = nullptr;  // content of shared memory at the start
    uint8_t* shared_result = nullptr;
    uint32_t image_bytes = 0;
    Warp* current = nullptr;              // whose turn it is
};

[[noreturn]] void fail(Kind kind, uint32_t lanes, uint64_t address, const std::string& text);

// Called when no warp can run: complete something in flight and return true, or false if there is nothing.
using Progress = bool (*)(Cluster&);
void on_standstill(Progress progress);
// Called when a warp has ended.
using Ending = void (*)(Warp&);
void on_end(Ending ending);
// What is no fault, for Python to tell; each line of a kernel once per launch.
void warn(Warp& w, const std::string& text);
std::vector<std::string>& warnings();

// ---- forms ----------------------------------------------------------------------------------------------

// Operands of a form, separated by spaces: `=b32` a destination, `b32` a source, `b32*4` a vector in braces,
// `p` a predicate, `@` an address, `#` an integer that is known when the text is read, `L` a label.
struct Form {
    std::string name, signature;
    Run run;
    bool raw = false;
    bool pure = false;
};

std::vector<Form>& forms();
void form(const std::string& name, const std::string& signature, Run run);
void pure_form(const std::string& name, const std::string& signature, Run run);
void raw_form(const std::string& name, const std::string& signature, Run run);

// One function per file of forms.
void control_forms();
void integer_forms();
void bit_forms();
void float_forms();
void half_forms();
void compare_forms();
void convert_forms();
void memory_forms();
void atomic_forms();
void copy_forms();
void barrier_forms();
void cluster_forms();
void warp_forms();
void matrix_forms();
void hopper_forms();

}  // namespace ptx
