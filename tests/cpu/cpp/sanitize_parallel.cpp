// parallel_for and open_team under sanitizers: every task once, worker numbers never shared, no thread
// left behind.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

using namespace fastbert;

namespace {

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// An OpenMP runtime of our own: the sanitizers know its threads. A region's size is its opener's.
thread_local int region_size = 1;
thread_local std::vector<std::thread> region;

// Cores of the threads of a region; odd ones have one core each if `bound`.
std::atomic<bool> bound{false};
thread_local bool in_region = false;
std::atomic<bool> lent{false};      // every task of a worker is a lent one
std::atomic<bool> together{false};  // a region's threads begin on the core of its owner
thread_local cpu_set_t own_cores;

cpu_set_t cores() {
    cpu_set_t set;
    require(sched_getaffinity(0, sizeof set, &set) == 0, "the thread's cores are known");
    return set;
}

int random_core(const cpu_set_t& set, unsigned seed) {
    static std::atomic<unsigned> calls{0};
    for (unsigned core = (seed + calls++) % CPU_SETSIZE;; core = (core + 1) % CPU_SETSIZE)
        if (CPU_ISSET(core, &set)) return static_cast<int>(core);
}

void begin_region(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    region_size = static_cast<int>(threads);
    const int owners = sched_getcpu();
    for (unsigned i = 1; i < threads; ++i) {
        region.emplace_back([=] {
            in_region = true;
            own_cores = cores();
            if (together) {
                cpu_set_t one;
                CPU_ZERO(&one);
                CPU_SET(owners, &one);
                sched_setaffinity(0, sizeof one, &one);
                sched_setaffinity(0, sizeof own_cores, &own_cores);
            }
            if (bound && i % 2 == 1) {
                const int first = together ? owners : random_core(own_cores, i);
                CPU_ZERO(&own_cores);
                CPU_SET(first, &own_cores);
                sched_setaffinity(0, sizeof own_cores, &own_cores);
            }
            // a latecomer meets a job that has begun
            if (lent && i > 1) std::this_thread::sleep_for(std::chrono::microseconds(300 * i));
            work(argument);
            const cpu_set_t after = cores();
            require(CPU_EQUAL(&own_cores, &after), "a thread leaves with the cores that it came with");
        });
    }
}

void end_region() {
    for (std::thread& other : region) other.join();
    region.clear();
    region_size = 1;
}

void whole_region(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    begin_region(work, argument, threads, 0);
    work(argument);
    end_region();
}

int size_of_region() { return region_size; }

template <class F>
std::uintptr_t address(F* f) {
    return reinterpret_cast<std::uintptr_t>(f);
}

// Whether a worker, not the owner, was seen on a core of its own.
std::atomic<bool> apart{false};
// One job of random tasks; how many of them other workers took.
int job(std::mt19937& random, int threads) {
    const int tasks = 1 + static_cast<int>(random() % 40);
    const bool slow = random() % 4 == 0;
    std::vector<int> runs(tasks, 0), worker_of(tasks, -1);  // plain: two threads on one task are a race
    std::vector<std::atomic<int>> busy(threads);
    std::atomic<int> core{-1};
    parallel_for(tasks, threads, [&](std::int64_t task, int worker) {
        require(0 <= worker && worker < threads, "a worker's number is below the number of threads");
        require(busy[worker].fetch_add(1) == 0, "no two workers have one number");
        ++runs[task];
        worker_of[task] = worker;
        if (in_region && lent && CPU_COUNT(&own_cores) > 1) {
            const cpu_set_t now = cores();
            require(!CPU_EQUAL(&now, &own_cores), "a thread with a lent task is not free to join the owner");
        }
        if (worker == 0) core = sched_getcpu();
        if (worker != 0 && core >= 0 && core != sched_getcpu()) apart = true;
        if (slow && worker != 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        std::atomic<std::int64_t> inner{0};
        parallel_for(3, threads, [&](std::int64_t i, int) { inner += i + 1; });
        require(inner == 6, "a task's own tasks run once");
        require(!in_region || CPU_ISSET(sched_getcpu(), &own_cores), "a thread runs on its own cores");
        busy[worker].fetch_sub(1);
    });
    int others = 0;
    for (int task = 0; task < tasks; ++task) {
        require(runs[task] == 1, "every task runs once");
        others += worker_of[task] != 0;
    }
    return others;
}

// Until other workers have taken tasks in `wanted` jobs, or the time is over.
int jobs(unsigned seed, int most_threads, int wanted,
         std::chrono::milliseconds time = std::chrono::seconds(20)) {
    std::mt19937 random(seed);
    const auto end = std::chrono::steady_clock::now() + time;
    int shared = 0;
    while (shared < wanted && std::chrono::steady_clock::now() < end) {
        const int threads = 2 + static_cast<int>(random() % (most_threads - 1));
        const bool open = random() % 3 != 0;
        if (open) open_team(threads);
        if (random() % 8 == 0) open_team(threads);  // an open team stays
        for (unsigned i = 0; i < 1 + random() % 30; ++i) {
            if (random() % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(1500));
            shared += job(random, 1 + static_cast<int>(random() % (most_threads + 1))) > 0;
        }
        close_team();
        require(!has_open_team(), "close_team closes");
        if (random() % 4 == 0) close_team();
        require(region.empty(), "no thread is left in the region");
    }
    return shared;
}

}  // namespace

int main() {
    require(!has_team(), "without a runtime there are no threads");
    open_team(4);
    require(!has_open_team(), "nor a team");
    set_team_start(address(&whole_region));
    open_team(4);
    require(!has_open_team(), "a runtime that cannot hold a region open opens none");
    int shared = 0;
    {
        std::mt19937 random(7);
        for (int i = 0; i < 50; ++i) job(random, 3);
    }
    set_team_start(address(&whole_region), address(&begin_region), address(&end_region),
                   address(&size_of_region));
    jobs(5, 3, 20);
    // Long jobs of a thread that works alone are lent, and every worker has its own cores again afterwards.
    set_always_alone(true, 0);
    const bool several = std::thread::hardware_concurrency() > 1;
    lent = true;
    const int shared_lent = jobs(6, 2, 40) + jobs(7, 4, 400);
    bound = true;
    jobs(9, 4, 40, std::chrono::seconds(2));
    bound = lent = false;
    require(!several || (shared_lent > 0 && apart), "other threads take lent tasks on other cores");
    set_always_alone(true, 1'000'000'000);
    require(jobs(8, 3, 1, std::chrono::milliseconds(200)) == 0, "a short job is not lent");
    open_team(2);
    require(is_alone() && region.empty(), "a thread that works alone opens no region");
    set_always_alone(false, 1000);
    set_may_be_alone(false);  // on a busy machine other threads would get nothing to do
    std::mt19937 random(20);
    for (int i = 0; i < 10; ++i) job(random, 2);
    require(!is_alone() && !region.empty(), "the time alone ends inside an open team");
    close_team();
    shared += jobs(1, 2, 200);
    shared += jobs(2, 5, 200);
    together = true;  // workers that wake up beside the owner may step aside
    for (unsigned seed = 10; seed < 16; ++seed) jobs(seed, 2, 5, std::chrono::seconds(2));
    jobs(40, 4, 20, std::chrono::seconds(4));
    bound = true;  // odd ones have no core to go to
    jobs(41, 4, 20, std::chrono::seconds(2));
    bound = together = false;
    std::thread first([] { jobs(3, 3, 100); });  // two threads, each with a team of its own
    jobs(4, 3, 100);
    first.join();
    require(shared > 100, "other threads take tasks");
    std::printf("%d shared jobs\n", shared);
}
