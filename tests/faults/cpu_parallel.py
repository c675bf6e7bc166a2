"""Faults of the threads: jobs of tasks, teams, working alone and lending tasks."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_CPP = "csrc/cpu/parallel.cpp"
_LAYER = "csrc/cpu/encoder_layer.cpp"
_fault = faults_of(_CPP)

FAULTS = (
    # the first one is caught without sanitizers, by `make test`
    _fault("cores not given back", "if (moved.load(std::memory_order_relaxed)) sched_setaffinity(0, sizeof allowed, &allowed);", ""),
    # jobs
    _fault("a task run twice", "            body(context, all - untaken(ticket), worker);\n            t_in_task = false;", "            body(context, all - untaken(ticket), worker);\n            if (untaken(ticket) == 7) body(context, all - untaken(ticket), worker);\n            t_in_task = false;"),
    _fault("the last task lost", "ticket_.store(++number_ << 32 | static_cast<std::uint64_t>(tasks));", "ticket_.store(++number_ << 32 | static_cast<std::uint64_t>(tasks - 1)); done_.fetch_add(1);"),
    _fault("tasks counted from behind", "body(context, all - untaken(ticket), worker);", "body(context, all - untaken(ticket) + 1, worker);"),
    _fault("two workers with one number", "entered_.fetch_add(1, std::memory_order_relaxed) + 1", "entered_.load(std::memory_order_relaxed) + 1"),
    _fault("no thread waits for the end", "if (!ready()) end_.wait(ready, !crowded, [] {});", "if (!ready() && tasks > 30) end_.wait(ready, !crowded, [] {});"),
    _fault("tasks of tasks go to the team", "t_in_task = true;\n            body(context, all", "body(context, all"),
    _fault("only the owner works", "if (!team.is_mine()) team.serve(", "if (false) team.serve("),
    # lending
    _fault("lent tasks from the first", "rest.body(rest.context, rest.first + task, worker);", "rest.body(rest.context, task, worker);"),
    _fault("the lent tasks are done again", "if (t_open->lend(left, width, Rest::run, &rest)) return;", "t_open->lend(left, width, Rest::run, &rest);"),
    _fault("the task that is at hand is skipped", "Rest rest{body, context, task};", "Rest rest{body, context, task + 1};"),
    _fault("nothing is lent", "return CPU_COUNT(&others) > 0 && bind(others);", "return false;"),
    _fault("workers stay on the owner's core", "CPU_CLR(core, &others);", "CPU_CLR(core + 4096, &others);"),
    _fault("workers that were not bound take lent tasks", "return worker == 0 || !lent_.load(", "return worker == 0 || true || !lent_.load("),
    _fault("a worker goes where it may not", "if (!CPU_ISSET(core, &allowed)) return;", ""),
    _fault("short jobs are lent", "* static_cast<double>(left) >= worth)", ">= 0 * worth)"),
    _fault("no thread waits for lent tasks", "if (!ready()) end_.wait(ready, false, [] {});\n        return true;", "return ready() || true;"),
    # stepping aside
    _fault("a worker stays aside", "if (stepped_) sched_setaffinity(0, sizeof allowed_, &allowed_);", ""),
    _fault("a worker steps where it may not go", "cpu_set_t elsewhere = allowed_;", "cpu_set_t elsewhere = allowed_;\n        for (int i = 0; i < 64; ++i) CPU_SET(i, &elsewhere);"),
    # teams
    _fault("a thread stays alone while its team is open", "if (t_alone) end_alone();", ""),
    _fault("the time alone ends without a team", "if (t_open == nullptr) open_region(t_threads);", ""),
    _fault("a closed team stays", "delete t_open;\n    t_open = nullptr;", ""),
    _fault("a region that cannot be held is opened", " || !g_runtime.can_hold()) return;", ") return;"),
    _fault("a forked child calls its parent's threads", "g_team_lost.store(true, std::memory_order_relaxed);", "g_team_lost.store(false, std::memory_order_relaxed);"),
    # the layer
    _fault("lent products of own rows", "run_all(layer, one ? 1 : threads, !alone && have_own_rows(layer.total, threads));", "run_all(layer, threads, one);", _LAYER),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_threads.py",
        "tests/cpu/test_sanitizers.py::test_every_task_runs_once_under_sanitizers",
    ),
    **IN_PLACE,
    timeout_s=240.0,
)
