#include "parallel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <memory>

namespace fastbert {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps. Longer than the Python between two layers, because waking a
// sleeping thread costs 50 us on a virtual machine; short beside a time slice of the scheduler.
constexpr auto kSpin = std::chrono::microseconds(1000);
constexpr int kTracked = 64;  // threads whose core is known
// How long the owner of a region works before it makes room for workers that have not come yet, and how
// often.
constexpr auto kLate = std::chrono::microseconds(60);
constexpr int kInvitations = 4;
// How long the owner of lent tasks waits before it checks whether their workers make progress.
constexpr auto kPatience = std::chrono::microseconds(30);

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
std::atomic<bool> g_always_alone{false};
// The rest of a job, in microseconds, from which on a thread that works alone lends tasks.
std::atomic<std::int64_t> g_worth_lending{1000};

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
// threads, including this one; `waiting` of them are known to wait for the core of another one. Costs 15 us.
bool has_idle_core(int waiting = 0) {
    char text[128];
    const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[std::max<ssize_t>(size, 0)] = 0;
    long running = LONG_MAX;
    return std::sscanf(text, "%*s %*s %*s %ld", &running) == 1 &&
           running - waiting < sysconf(_SC_NPROCESSORS_ONLN);
}

// Beside a busy neighbour the scheduler may put all threads of a process on one core. There they only take
// turns, and the thread that has the tasks finishes sooner alone. After a while it tries the other threads
// again, for about 15 ms: later each time it still finds them on its core, sooner if a core is idle.
class Crowd {
  public:
    bool is_known() {
        if (g_always_alone.load(std::memory_order_relaxed)) return true;
        if (length_ == Clock::duration::zero() || !g_may_be_alone.load(std::memory_order_relaxed))
            return false;
        if (Clock::now() >= lent_ + kSettled) look();
        return Clock::now() < until_;
    }
    // Ends the time alone if a core is idle. Called while the team's other threads sleep.
    void look() {
        const auto now = Clock::now();
        if (now < next_look_ || now >= until_) return;
        next_look_ = now + kLook;
        if (has_idle_core()) until_ = now;
    }
    // The other threads wake up for lent tasks. After their region libgomp lets them spin, and no core looks
    // idle: until they sleep again, only inside the region is it worth a look.
    void lend() { lent_ = Clock::now(); }
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
    // Twice libgomp's spinning.
    static constexpr Clock::duration kSettled = std::chrono::milliseconds(30);
    Clock::duration length_{0};  // of the time alone
    Clock::time_point lent_{}, until_{}, next_look_{};
};
thread_local Crowd t_crowd;

// A thread of a team that may be bound to cores, and whether it makes progress.
struct Worker {
    std::atomic<pid_t> thread{0};       // 0: the thread cannot be moved
    clockid_t clock;                    // its processor time
    cpu_set_t allowed;                  // its cores as it came
    std::atomic<bool> in_task{false};   // it has a task
    std::atomic<bool> may_take{false};  // it is off the owner's core for the lent job
    std::atomic<bool> moved{false};     // it is bound to other cores than `allowed`
    std::int64_t time = 0;              // of its clock when the owner last looked, in ns

    // Called by the thread itself.
    void take() {
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
            pthread_getcpuclockid(pthread_self(), &clock) != 0)
            return;
        thread.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_release);
    }
    void leave() {
        if (moved.load(std::memory_order_relaxed)) sched_setaffinity(0, sizeof allowed, &allowed);
    }

    // Called by the owner of the team. `keep_off` is false if the thread has no other core.
    bool keep_off(int core) {
        if (thread.load(std::memory_order_acquire) == 0) return false;
        cpu_set_t others = allowed;
        CPU_CLR(core, &others);
        return CPU_COUNT(&others) > 0 && bind(others);
    }
    void give(int core) {
        if (!CPU_ISSET(core, &allowed)) return;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        bind(one);
    }
    bool bind(const cpu_set_t& cores) {
        moved.store(true, std::memory_order_relaxed);
        return sched_setaffinity(thread.load(std::memory_order_relaxed), sizeof cores, &cores) == 0;
    }
    bool has_run() {
        timespec now;
        if (clock_gettime(clock, &now) != 0) return true;
        const std::int64_t before = time;
        time = now.tv_sec * 1'000'000'000 + now.tv_nsec;
        return time != before;
    }
};

// A worker's way off the owner's core, where the scheduler often wakes it up, to a core that is idle. Used by
// the worker itself.
class Aside {
  public:
    // False, and nothing done, if the thread may run on no other core or none is idle.
    bool step(int core, const Worker* self) {
        if (g_may_be_alone.load(std::memory_order_relaxed) && !has_idle_core(1)) return false;
        if (!stepped_) {
            if (self != nullptr && self->thread.load(std::memory_order_relaxed) != 0)
                allowed_ = self->allowed;
            else if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0)
                return false;
        }
        cpu_set_t elsewhere = allowed_;
        CPU_CLR(core, &elsewhere);
        if (CPU_COUNT(&elsewhere) == 0 || sched_setaffinity(0, sizeof elsewhere, &elsewhere) != 0)
            return false;
        stepped_ = true;
        return true;
    }
    // From now on the thread may again run on all the cores that it came with.
    void leave() {
        if (stepped_) sched_setaffinity(0, sizeof allowed_, &allowed_);
    }

  private:
    cpu_set_t allowed_;
    bool stepped_ = false;
};

// The threads of one parallel region: the thread that opened it, worker 0, hands out jobs of tasks.
class Team {
  public:
    // Of this many threads.
    Team(int threads, bool lends)
        : others_(threads - 1), owner_(pthread_self()), workers_(lends ? new Worker[kTracked] : nullptr) {
        for (auto& core : cores_) core.store(-1, std::memory_order_relaxed);
        note_core(0);
    }

    bool is_mine() const { return pthread_equal(pthread_self(), owner_) != 0; }

    // The loop of each thread of the region except `owner_`.
    static void stand_by(void* argument) {
        Team& team = *static_cast<Team*>(argument);
        if (!team.is_mine()) team.serve(team.entered_.fetch_add(1, std::memory_order_relaxed) + 1);
    }

    void run(std::int64_t tasks, int width, Body body, void* context) {
        lent_.store(false, std::memory_order_relaxed);
        invite();
        note_core(0);
        const std::uint32_t mine = work(tasks, width, body, context);
        const auto ready = [&] { return done_.load(std::memory_order_acquire) == tasks; };
        const bool crowded = is_crowded();
        if (!ready()) end_.wait(ready, !crowded, [] {});
        if (crowded || mine < tasks) t_crowd.note(crowded);  // else the other threads may only be late
    }

    // A worker that slept may wake up on the owner's core and wait there for a time slice, 3 to 4 ms: the
    // owner lets it run if another core is idle, and it steps aside.
    void invite() {
        if (entered_.load(std::memory_order_relaxed) >= others_ || invitations_ >= kInvitations) return;
        if (Clock::now() < opened_ + kLate) return;
        if (invitations_++ == 0 && !has_idle_core(others_)) invitations_ = kInvitations;
        if (invitations_ < kInvitations) sched_yield();
    }

    // Waits a moment for the workers' first steps, which they may have to do on the owner's core.
    void admit() {
        const auto end = Clock::now() + std::chrono::microseconds(500);
        while (workers_[1].thread.load(std::memory_order_relaxed) == 0 && Clock::now() < end) sched_yield();
    }

    // Whether the workers sleep as soon as they have no task.
    bool has_lent() const { return lent_.load(std::memory_order_relaxed); }

    // `run` by the owner and by workers on other cores, where a neighbour lets them run now and then. False,
    // and nothing done, if no worker can go to other cores.
    bool lend(std::int64_t tasks, int width, Body body, void* context) {
        const int core = sched_getcpu();
        bool any = false;
        for (int i = 1; i < std::min(width, kTracked); ++i) {
            const bool kept_off = workers_[i].keep_off(core);
            workers_[i].may_take.store(kept_off, std::memory_order_relaxed);
            any = any || kept_off;
        }
        if (!any) return false;
        lent_.store(true, std::memory_order_relaxed);
        work(tasks, std::min(width, kTracked), body, context);
        const auto ready = [&] { return done_.load(std::memory_order_acquire) == tasks; };
        for (bool stuck = false; !stuck && !ready();) {
            for (const auto end = Clock::now() + kPatience; Clock::now() < end && !ready();) pause_core();
            for (int i = 1; i < std::min(width, kTracked) && !ready(); ++i) {
                Worker& self = workers_[i];
                if (!self.in_task.load(std::memory_order_relaxed) || self.has_run()) continue;
                self.give(sched_getcpu());
                stuck = true;
            }
        }
        // a worker that the neighbour holds up continues here, while the owner sleeps
        if (!ready()) end_.wait(ready, false, [] {});
        return true;
    }

    // Sends the workers back to the runtime, `others` of them.
    void close(int others) {
        for (int i = 1; workers_ != nullptr && i < kTracked; ++i)
            if (workers_[i].moved.load(std::memory_order_relaxed)) workers_[i].give(sched_getcpu());
        ticket_.store(kClosed);
        begin_.wake();
        invite();
        const auto ready = [&] { return left_.load(std::memory_order_acquire) >= others; };
        if (!ready()) end_.wait(ready, !is_crowded(), [] {});
    }

  private:
    static constexpr std::uint64_t kClosed = ~std::uint64_t{0};

    // Hands out a job and takes its tasks until none is left; returns how many it took.
    std::uint32_t work(std::int64_t tasks, int width, Body body, void* context) {
        job_.body.store(body, std::memory_order_relaxed);
        job_.context.store(context, std::memory_order_relaxed);
        job_.tasks.store(static_cast<std::uint32_t>(tasks), std::memory_order_relaxed);
        job_.width.store(width, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(++number_ << 32 | static_cast<std::uint64_t>(tasks));
        begin_.wake();
        return take(0);
    }

    static std::uint32_t untaken(std::uint64_t ticket) {
        return ticket == kClosed ? 0 : static_cast<std::uint32_t>(ticket);
    }

    void serve(int worker) {
        Worker* const self = workers_ != nullptr && worker < kTracked ? &workers_[worker] : nullptr;
        if (self != nullptr) self->take();
        Aside aside;
        std::uint64_t ticket = 0;
        const auto ready = [&] {
            ticket = ticket_.load(std::memory_order_acquire);
            return ticket == kClosed ||
                   (untaken(ticket) != 0 && worker < job_.width.load(std::memory_order_relaxed) &&
                    may_take(worker));
        };
        // Where it would only keep the owner from its next job, or, in libgomp, from continuing after the
        // last job.
        const auto make_room = [&] {
            if (lent_.load(std::memory_order_relaxed) || !shares_core(worker)) return true;
            // to the owner, which runs again as soon as this thread is moved, they share a core no longer
            if (worker < kTracked) cores_[worker].store(-1, std::memory_order_relaxed);
            const bool away = aside.step(cores_[0].load(std::memory_order_relaxed), self);
            note_core(worker);
            return away;
        };
        make_room();
        for (;;) {
            const bool lent = lent_.load(std::memory_order_relaxed);
            begin_.wait(ready, !lent && !shares_core(worker), [&] {
                if (worker < kTracked) cores_[worker].store(-1, std::memory_order_relaxed);
            });
            if (ticket == kClosed) break;
            note_core(worker);
            if (!make_room()) met_.store(true, std::memory_order_relaxed);
            if (self != nullptr) self->in_task.store(true, std::memory_order_relaxed);
            take(worker);
            if (self != nullptr) self->in_task.store(false, std::memory_order_relaxed);
        }
        make_room();
        aside.leave();
        if (self != nullptr) self->leave();
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
            if (worker >= job_.width.load(std::memory_order_relaxed) || !may_take(worker)) break;
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

    // Lent tasks are for the owner and for workers on other cores. Checked after the ticket was read.
    bool may_take(int worker) const {
        return worker == 0 || !lent_.load(std::memory_order_relaxed) ||
               (worker < kTracked && workers_[worker].may_take.load(std::memory_order_relaxed));
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

    // Whether worker 0 has found other workers on its core, and no waking worker is on another core.
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

    const int others_;
    const Clock::time_point opened_ = Clock::now();
    int invitations_ = 0;
    const pthread_t owner_;
    const std::unique_ptr<Worker[]> workers_;  // by worker; null: `lend` is not called
    std::uint64_t number_ = 0;                 // of the last job
    std::atomic<int> entered_{0}, left_{0};
    std::atomic<bool> met_{false};                  // a worker woke up on the core of worker 0
    std::atomic<bool> lent_{false};                 // the last job was lent
    std::array<std::atomic<int>, kTracked> cores_;  // -1: asleep, on its way, or not yet here
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
thread_local bool t_alone = false;    // likewise, while the team would slow the thread down
thread_local int t_threads = 0;       // likewise, of the team

void open_region(int threads) {
    g_team_used.store(true, std::memory_order_relaxed);
    t_open = new Team(threads, true);
    g_runtime.start(Team::stand_by, t_open, static_cast<unsigned>(threads), 0);
}

// Lets the open team serve as soon as it no longer slows the thread down.
void end_alone() {
    if (t_crowd.is_known()) return;
    t_alone = false;
    if (t_open == nullptr) open_region(t_threads);
}

void run_alone(std::int64_t tasks, Body body, void* context) {
    for (std::int64_t task = 0; task < tasks; ++task) body(context, task, 0);
}

// A job's tasks from `first` on.
struct Rest {
    Body body;
    void* context;
    std::int64_t first;

    static void run(void* argument, std::int64_t task, int worker) {
        const Rest& rest = *static_cast<Rest*>(argument);
        rest.body(rest.context, rest.first + task, worker);
    }
};

// Tasks of a thread that works alone inside an open team, while a neighbour has the other cores. What is left
// of a long job is lent.
void run_mostly_alone(std::int64_t tasks, int width, Body body, void* context) {
    const double worth = 1e-6 * static_cast<double>(g_worth_lending.load(std::memory_order_relaxed));
    const auto begin = Clock::now();
    const auto seconds_per_task = [&](std::int64_t done) {
        return std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(done);
    };
    for (std::int64_t task = 0; task < tasks; ++task) {
        const std::int64_t left = tasks - task;
        if (task > 0 && left > 1 && seconds_per_task(task) * static_cast<double>(left) >= worth) {
            if (t_open == nullptr) {
                open_region(width);
                t_open->admit();
            } else if (t_open->has_lent()) {
                t_crowd.look();
            }
            t_crowd.lend();
            Rest rest{body, context, task};
            if (t_open->lend(left, width, Rest::run, &rest)) return;
        }
        t_in_task = true;
        body(context, task, 0);
        t_in_task = false;
    }
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

void set_always_alone(bool alone, std::int64_t microseconds) {
    g_always_alone.store(alone, std::memory_order_relaxed);
    g_worth_lending.store(microseconds, std::memory_order_relaxed);
}

bool has_open_team() { return t_open != nullptr || t_alone; }

bool is_alone() { return t_alone || t_crowd.is_known(); }

void open_team(int threads) {
    if (has_open_team() || threads <= 1 || !has_team() || !g_runtime.can_hold()) return;
    t_alone = true;
    t_threads = threads;
    end_alone();
}

void close_team() {
    t_alone = false;
    if (t_open == nullptr) return;
    if (has_team()) {  // after a fork there are no other threads, and the region is the parent's
        t_open->close(g_runtime.size() - 1);
        g_runtime.end();
    }
    delete t_open;
    t_open = nullptr;
}

void parallel_for(std::int64_t tasks, int threads, Body body, void* context) {
    const int width = static_cast<int>(std::min<std::int64_t>(threads, tasks));
    if (width <= 1 || !has_team() || t_in_task || tasks >= UINT32_MAX) return run_alone(tasks, body, context);
    if (t_alone) end_alone();
    if (is_alone()) {
        if (!has_open_team() || !g_runtime.can_hold()) return run_alone(tasks, body, context);
        return run_mostly_alone(tasks, width, body, context);
    }
    if (t_open != nullptr) return t_open->run(tasks, width, body, context);
    g_team_used.store(true, std::memory_order_relaxed);
    Once once{Team(width, false), tasks, width, body, context};
    g_runtime.parallel(Once::enter, &once, static_cast<unsigned>(width), 0);
}

}  // namespace fastbert
