// Threads: the OpenMP pool that PyTorch already runs on, without linking OpenMP.
//
// A pool of our own, or a second OpenMP runtime (PyTorch's wheels bring their own copy of libgomp, under a
// name that differs between versions), would spin on the same cores as PyTorch's workers between two ops. So
// Python looks up `GOMP_parallel` in the runtime that libtorch_cpu itself is linked to (libgomp, and LLVM's
// and Intel's runtimes too, export it) and hands its address to `set_team_start`. Without one, work runs on
// the calling thread.
//
// libgomp's workers do not survive a fork, and entering a parallel region in the child then hangs. A child
// forked after this pool was used therefore runs on its calling thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fastbert {

void set_team_start(std::uintptr_t gomp_parallel);  // 0: run on the calling thread
bool has_team();

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
