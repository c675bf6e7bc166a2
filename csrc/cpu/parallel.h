// Threads: the OpenMP pool that PyTorch already runs on, without linking OpenMP, and without its waits.
//
// Our own pool or a second OpenMP runtime would spin on the same cores as PyTorch's workers between two ops.
// (PyTorch's wheels bring their own copy of libgomp, whose name differs between versions.) So Python looks up
// `GOMP_parallel` and related functions in the runtime that libtorch_cpu itself is linked to and passes their
// addresses to `set_team_start`; libgomp and the runtimes of LLVM and Intel export them. Without a runtime,
// work runs on the calling thread.
//
// libgomp's threads wait for each other by spinning, for 13 ms and more. If they share a core with a busy
// neighbour or with each other, a waiting thread slows down the one that it waits for. So the threads of a
// region wait in our own way (`Team` in parallel.cpp): tasks are taken one by one, no thread waits for one
// that has taken none, and a thread that waits longer than a moment sleeps. `open_team` keeps the region open
// over many calls, because libgomp's own spinning begins as soon as a region ends.
//
// After a rest the scheduler often wakes the other threads on the core of the calling thread. A thread that
// finds itself there goes to another core, if one is idle, until the region ends.
//
// Beside a busy neighbour the scheduler puts all threads onto one core: one core per program counts as fair.
// The thread that has the tasks then works alone until a core is idle, and lends tasks of long jobs: the
// other threads are bound to the other cores, where they run each time that the neighbour's turn is over. A
// thread whose turn is over while it has the last task gets the owner's core, and the owner sleeps meanwhile.
// When the region ends, every thread may again run on all the cores that it came with.
//
// libgomp's workers do not survive a fork, and a parallel region in the child then hangs. A child forked
// after this pool was used therefore runs on its calling thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fastbert {

// Addresses of functions of the OpenMP runtime; 0: the runtime lacks it. Without GOMP_parallel work runs on
// the calling thread; without one of the other functions no region is kept open.
void set_team_start(std::uintptr_t gomp_parallel, std::uintptr_t gomp_parallel_start = 0,
                    std::uintptr_t gomp_parallel_end = 0, std::uintptr_t omp_get_num_threads = 0);
bool has_team();

// Whether a thread may work alone for a while if its team would slow it down. True, except in tests of the
// team.
void set_may_be_alone(bool may);
// For tests: whether threads always work alone, and how long the rest of a job must take for a part to be
// lent.
void set_always_alone(bool alone, std::int64_t microseconds);

// From here to `close_team` this many threads serve the calling thread's `parallel_for`s, whatever number
// those ask for. PyTorch's own ops are then inside a parallel region and run on the calling thread alone:
// open a team only around our kernels. Opening a second time changes nothing; closing none is no error.
bool has_open_team();
// Whether the calling thread works alone now because its team would slow it down.
bool is_alone();
void open_team(int threads);
void close_team();

// Calls body(context, task, worker) exactly once for every task in [0, tasks). worker < threads is unique
// among the calls that run at the same time. Any worker may take any task: results must not depend on it.
using Body = void (*)(void* context, std::int64_t task, int worker);
void parallel_for(std::int64_t tasks, int threads, Body body, void* context);

template <class F>
void parallel_for(std::int64_t tasks, int threads, F&& f) {
    using Call = std::remove_reference_t<F>;
    parallel_for(
        tasks, threads,
        [](void* context, std::int64_t task, int worker) { (*static_cast<Call*>(context))(task, worker); },
        &f);
}

}  // namespace fastbert
