#include "parallel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>

namespace fastbert {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps. Longer than the Python between two layers, because waking a
// sleeping thread costs 50 us on a virtual machine; short beside a time slice of the scheduler.
constexpr auto kSpin = std::chrono::microseconds(1000);
constexpr int kTracked = 64;  // threads whose core is known

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);
struct Functions {
    Region parallel = nullptr, start = nullptr;
    void (*end)() = nullptr;
    int (*size)() = nullptr;
    bool can_hold() const { return start != nullptr && end != nullptr && size != nullptr; }
} g_runtime;  // written when the extension is loaded

std::atomic<bool> g_team_used{false};
std::atomic<bool> g_team_lost{false};
std::atomic<bool> g_may_be_alone{true};

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Lets threads wait for a change by other threads; the thread that has made the change calls `wake`.
class Bell {
  public:
    // Spins while `worth`, but not too long, then sleeps; `asleep` is called before the sleep.
    template <class Ready, class Asleep>
    void wait(const Ready& ready, bool worth, const Asleep& asleep) {
        if (ready()) return;
        if (worth) {
            const auto end = Clock::now() + kSpin;
            do {
                for (int i = 0; i < 32; ++i) {
                    if (ready()) return;
                    pause_core();
                }
            } while (Clock::now() < end);
        }
        asleep();
        // A thread that changes something after the call of `ready` either sees a sleeper, or has rung before
        // `rung` was read, and then `ready` sees the change.
        sleepers_.fetch_add(1);
        for (;;) {
            const std::uint32_t rung = rung_.load();
            if (ready()) break;
            syscall(SYS_futex, &rung_, FUTEX_WAIT_PRIVATE, rung, nullptr, nullptr, 0);
        }
        sleepers_.fetch_sub(1);
    }
    void wake() {
        rung_.fetch_add(1);
        if (sleepers_.load() > 0)
            syscall(SYS_futex, &rung_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

  private:
    std::atomic<std::uint32_t> rung_{0};
    std::atomic<std::int32_t> sleepers_{0};
};

class Team;
thread_local bool t_in_task = false;

// Whether a core of the machine is idle, by the fourth number of /proc/loadavg: the running and runnable
// threads, including this one. Costs 15 us.
bool has_idle_core() {
    char text[128];
    const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[std::max<ssize_t>(size, 0)] = 0;
    long running = LONG_MAX;
    return std::sscanf(text, "%*s %*s %*s %ld", &running) == 1 && running < sysconf(_SC_NPROCESSORS_ONLN);
}

// Beside a busy neighbour the scheduler may put all threads of a process on one core. There they only take
// turns, and the thread that has the tasks finishes sooner alone. After a while it tries the others again,
// for about 15 ms: later each time it still finds them on its core, sooner if a core is idle.
class Crowd {
  public:
    bool is_known() {
        if (length_ == Clock::duration::zero() || !g_may_be_alone.load(std::memory_order_relaxed))
            return false;
        const auto now = Clock::now();
        if (now >= next_look_ && now < until_) {
            next_look_ = now + kLook;
            if (has_idle_core()) until_ = now;
        }
        return now < until_;
    }
    void note(bool crowded) {
        if (!crowded) {
            length_ = Clock::duration::zero();
            return;
        }
        length_ = has_idle_core() ? std::clamp<Clock::duration>(4 * length_, kFirst, kLast) : kLast;
        const auto now = Clock::now();
        until_ = now + length_;
        next_look_ = now + std::max<Clock::duration>(kLook, length_ / 64);
    }

  private:
    static constexpr Clock::duration kFirst = std::chrono::milliseconds(1),
                                     kLast = std::chrono::milliseconds(4096),
                                     kLook = std::chrono::milliseconds(8);
    Clock::duration length_{0};  // of the time alone
    Clock::time_point until_{}, next_look_{};
};
thread_local Crowd t_crowd;

// The threads of one parallel region: the thread that opened it, worker 0, hands out jobs of tasks.
class Team {
  public:
    Team() : owner_(pthread_self()) {
        for (auto& core : cores_) core.store(-1, std::memory_order_relaxed);
    }

    bool is_mine() const { return pthread_equal(pthread_self(), owner_) != 0; }

    // The loop of each thread of the region except `owner_`.
    static void stand_by(void* argument) {
        Team& team = *static_cast<Team*>(argument);
        if (!team.is_mine()) team.serve(team.entered_.fetch_add(1, std::memory_order_relaxed) + 1);
    }

    void run(std::int64_t tasks, int width, Body body, void* context) {
        job_.body.store(body, std::memory_order_relaxed);
        job_.context.store(context, std::memory_order_relaxed);
        job_.tasks.store(static_cast<std::uint32_t>(tasks), std::memory_order_relaxed);
        job_.width.store(width, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        note_core(0);
        ticket_.store(++number_ << 32 | static_cast<std::uint64_t>(tasks));
        begin_.wake();
        const std::uint32_t mine = take(0);
        const auto ready = [&] { return done_.load(std::memory_order_acquire) == tasks; };
        const bool crowded = is_crowded();
        if (!ready()) end_.wait(ready, !crowded, [] {});
        if (crowded || mine < tasks) t_crowd.note(crowded);  // else the others may only have been late
    }

    // Sends the workers back to the runtime, `others` of them.
    void close(int others) {
        ticket_.store(kClosed);
        begin_.wake();
        const auto ready = [&] { return left_.load(std::memory_order_acquire) >= others; };
        if (!ready()) end_.wait(ready, !is_crowded(), [] {});
    }

  private:
    static constexpr std::uint64_t kClosed = ~std::uint64_t{0};

    static std::uint32_t untaken(std::uint64_t ticket) {
        return ticket == kClosed ? 0 : static_cast<std::uint32_t>(ticket);
    }

    void serve(int worker) {
        std::uint64_t ticket = 0;
        const auto ready = [&] {
            ticket = ticket_.load(std::memory_order_acquire);
            return ticket == kClosed ||
                   (untaken(ticket) != 0 && worker < job_.width.load(std::memory_order_relaxed));
        };
        for (;;) {
            begin_.wait(ready, !shares_core(worker), [&] {
                if (worker < kTracked) cores_[worker].store(-1, std::memory_order_relaxed);
            });
            if (ticket == kClosed) break;
            note_core(worker);
            if (shares_core(worker)) met_.store(true, std::memory_order_relaxed);
            take(worker);
        }
        left_.fetch_add(1);
        end_.wake();
    }

    // Takes tasks until none is left; returns their number. A job's description changes only when all its
    // tasks are done: a thread that takes a task while the ticket is still the one it read has therefore read
    // the description of that task's job.
    std::uint32_t take(int worker) {
        std::uint32_t mine = 0, tasks = 0;
        std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (untaken(ticket) != 0) {
            const Body body = job_.body.load(std::memory_order_relaxed);
            void* const context = job_.context.load(std::memory_order_relaxed);
            const std::uint32_t all = job_.tasks.load(std::memory_order_relaxed);
            if (worker >= job_.width.load(std::memory_order_relaxed)) break;
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                               std::memory_order_acquire))
                continue;
            t_in_task = true;
            body(context, all - untaken(ticket), worker);
            t_in_task = false;
            ++mine;
            tasks = all;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (mine != 0 && done_.fetch_add(mine) + mine == tasks && worker != 0) end_.wake();
        return mine;
    }

    void note_core(int worker) {
        if (worker >= kTracked) return;
        const int core = sched_getcpu();
        if (cores_[worker].load(std::memory_order_relaxed) != core)
            cores_[worker].store(core, std::memory_order_relaxed);
    }

    // Whether a worker was last seen on the core of worker 0, where only one of the two can run.
    bool shares_core(int worker) {
        if (worker >= kTracked) return false;
        note_core(worker);
        return cores_[worker].load(std::memory_order_relaxed) == cores_[0].load(std::memory_order_relaxed);
    }

    // Whether worker 0 has met others on its core, and no waking worker is on another core.
    bool is_crowded() {
        note_core(0);
        const int core = cores_[0].load(std::memory_order_relaxed);
        bool met = met_.exchange(false, std::memory_order_relaxed);
        for (int i = 1; i < std::min(kTracked, entered_.load(std::memory_order_relaxed) + 1); ++i) {
            const int other = cores_[i].load(std::memory_order_relaxed);
            if (other >= 0 && other != core) return false;
            met = met || other == core;
        }
        return met;
    }

    struct Job {
        std::atomic<Body> body{nullptr};
        std::atomic<void*> context{nullptr};
        std::atomic<std::uint32_t> tasks{0};
        std::atomic<int> width{0};
    };

    const pthread_t owner_;
    std::uint64_t number_ = 0;  // of the last job
    std::atomic<int> entered_{0}, left_{0};
    std::atomic<bool> met_{false};                  // a worker woke up on the core of worker 0
    std::array<std::atomic<int>, kTracked> cores_;  // -1: asleep, or not yet here
    // The number that waiting threads read has its own cache line.
    alignas(64) std::atomic<std::uint64_t> ticket_{0};  // the job's number and the tasks not yet taken
    alignas(64) Job job_;
    alignas(64) std::atomic<std::int64_t> done_{0};
    alignas(64) Bell begin_;
    alignas(64) Bell end_;
};

// A region for one job.
struct Once {
    Team team;
    std::int64_t tasks;
    int width;
    Body body;
    void* context;

    static void enter(void* argument) {
        Once& once = *static_cast<Once*>(argument);
        if (!once.team.is_mine()) return Team::stand_by(&once.team);
        once.team.run(once.tasks, once.width, once.body, once.context);
        once.team.close(g_runtime.size != nullptr ? g_runtime.size() - 1 : 0);
    }
};

thread_local Team* t_open = nullptr;  // between open_team and close_team
thread_local bool t_alone = false;    // likewise, if the team would slow the thread down

void run_alone(std::int64_t tasks, Body body, void* context) {
    for (std::int64_t task = 0; task < tasks; ++task) body(context, task, 0);
}

void after_fork_in_child() {
    if (g_team_used.load(std::memory_order_relaxed)) g_team_lost.store(true, std::memory_order_relaxed);
}

}  // namespace

void set_team_start(std::uintptr_t gomp_parallel, std::uintptr_t gomp_parallel_start,
                    std::uintptr_t gomp_parallel_end, std::uintptr_t omp_get_num_threads) {
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    (void)registered;
    g_runtime.parallel = reinterpret_cast<Region>(gomp_parallel);
    g_runtime.start = reinterpret_cast<Region>(gomp_parallel_start);
    g_runtime.end = reinterpret_cast<void (*)()>(gomp_parallel_end);
    g_runtime.size = reinterpret_cast<int (*)()>(omp_get_num_threads);
}

bool has_team() { return g_runtime.parallel != nullptr && !g_team_lost.load(std::memory_order_relaxed); }

void set_may_be_alone(bool may) { g_may_be_alone.store(may, std::memory_order_relaxed); }

bool has_open_team() { return t_open != nullptr || t_alone; }

bool is_alone() { return t_alone || t_crowd.is_known(); }

void open_team(int threads) {
    if (t_open != nullptr || threads <= 1 || !has_team() || !g_runtime.can_hold()) return;
    t_alone = t_crowd.is_known();
    if (t_alone) return;
    g_team_used.store(true, std::memory_order_relaxed);
    t_open = new Team;
    g_runtime.start(Team::stand_by, t_open, static_cast<unsigned>(threads), 0);
}

void close_team() {
    t_alone = false;
    if (t_open == nullptr) return;
    if (has_team()) {  // after a fork there are no others, and the region is the parent's
        t_open->close(g_runtime.size() - 1);
        g_runtime.end();
    }
    delete t_open;
    t_open = nullptr;
}

void parallel_for(std::int64_t tasks, int threads, Body body, void* context) {
    const int width = static_cast<int>(std::min<std::int64_t>(threads, tasks));
    if (width <= 1 || !has_team() || t_in_task || is_alone() || tasks >= UINT32_MAX)
        return run_alone(tasks, body, context);
    if (t_open != nullptr) return t_open->run(tasks, width, body, context);
    g_team_used.store(true, std::memory_order_relaxed);
    Once once{{}, tasks, width, body, context};
    g_runtime.parallel(Once::enter, &once, static_cast<unsigned>(width), 0);
}

}  // namespace fastbert
