#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>

namespace fastbert {
namespace {

using TeamStart = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel

std::atomic<TeamStart> g_team_start{nullptr};
std::atomic<bool> g_team_used{false};
std::atomic<bool> g_team_lost{false};

struct Job {
    Body body;
    void* context;
    std::int64_t tasks;
    std::atomic<std::int64_t> next{0};
    std::atomic<int> workers{0};
};

void work(void* argument) {
    Job& job = *static_cast<Job*>(argument);
    const int worker = job.workers.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
        const std::int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= job.tasks) return;
        job.body(job.context, task, worker);
    }
}

void after_fork_in_child() {
    if (g_team_used.load(std::memory_order_relaxed)) g_team_lost.store(true, std::memory_order_relaxed);
}

}  // namespace

void set_team_start(std::uintptr_t gomp_parallel) {
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    (void)registered;
    g_team_start.store(reinterpret_cast<TeamStart>(gomp_parallel), std::memory_order_relaxed);
}

bool has_team() {
    return g_team_start.load(std::memory_order_relaxed) != nullptr &&
           !g_team_lost.load(std::memory_order_relaxed);
}

void parallel_for(std::int64_t tasks, int threads, Body body, void* context) {
    const int team = static_cast<int>(std::min<std::int64_t>(threads, tasks));
    if (team <= 1 || !has_team()) {
        for (std::int64_t task = 0; task < tasks; ++task) body(context, task, 0);
        return;
    }
    if (!g_team_used.load(std::memory_order_relaxed)) g_team_used.store(true, std::memory_order_relaxed);
    Job job{body, context, tasks};
    g_team_start.load(std::memory_order_relaxed)(work, &job, static_cast<unsigned>(team), 0);
}

}  // namespace fastbert
