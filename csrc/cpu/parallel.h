// Threads: the OpenMP pool that PyTorch already runs on, without linking OpenMP, and without its waits.
//
// A pool of our own, or a second OpenMP runtime (PyTorch's wheels bring their own copy of libgomp, under a
// name that differs between versions), would spin on the same cores as PyTorch's workers between two ops. So
// Python looks up `GOMP_parallel` and its relatives in the runtime that libtorch_cpu itself is linked to
// (libgomp, and LLVM's and Intel's runtimes too, export them) and hands their addresses to `set_team_start`.
// Without one, work runs on the calling thread.
//
// libgomp's threads wait for each other by spinning, 13 ms and more. On a core that they share with a busy
// neighbour, or with each other, the one who waits then keeps the other from what it waits for. So the
// threads of a region wait here in a way of their own (`Team` in parallel.cpp): tasks are taken one by one,
// nobody waits for a thread that has taken none, and who waits longer than a moment sleeps. `open_team` holds
// the region open over many calls, because libgomp's own spinning begins as soon as a region ends.
//
// libgomp's workers do not survive a fork, and entering a parallel region in the child then hangs. A child
// forked after this pool was used therefore runs on its calling thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fastbert {

// Addresses of functions of the OpenMP runtime; 0: it has none. Without GOMP_parallel work runs on the
// calling thread; without one of the others no region is held open.
void set_team_start(std::uintptr_t gomp_parallel, std::uintptr_t gomp_parallel_start = 0,
                    std::uintptr_t gomp_parallel_end = 0, std::uintptr_t omp_get_num_threads = 0);
bool has_team();

// Whether a thread whose team is in its own way may work alone for a while. True; tests of the team say no.
void set_may_be_alone(bool may);

// From here to `close_team` so many threads stand by for the `parallel_for`s of the calling thread, whatever
// number those ask for. PyTorch's own ops are inside a parallel region meanwhile, and so run on the calling
// thread alone: open it around our kernels only. An open team stays; closing none is no error.
bool has_open_team();
// Whether the calling thread works alone now, because its team would only be in its own way.
bool is_alone();
void open_team(int threads);
void close_team();

// body(context, task, worker) for every task in [0, tasks), each exactly once; worker < threads is unique
// among those running at the same time. Which worker takes which task is not fixed: results must not depend
// on it.
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
