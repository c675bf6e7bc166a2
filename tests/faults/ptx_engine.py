"""Faults of the PTX emulator: of reading text, of control flow, memory, copies, barriers and reports."""

import sys

from tests.support.mutation import Fault, Suite

_FOLDER = "tests/ptx/emulator"


def _fault(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, f"{_FOLDER}/{file}", old, new)


FAULTS = (
    # text
    _fault("parse.py", "parameters lie side by side", "offset = -(-end // boundary) * boundary", "offset = end"),
    _fault("parse.py", "a negated guard is not", "negated = bool(match.group(1))", "negated = False"),
    _fault("parse.py", "lines are not counted in a statement", 'self.line += text.count("\\n", at, end)', "self.line += 0"),
    _fault("decode.py", "signed values widened by zeros", 'name = "widen.s" if kind.startswith("s") else "widen.u"', 'name = "widen.u"'),
    _fault("decode.py", "a negated predicate read as it is", "            return operand\n        if isinstance(operand, Number):\n            return (\"constant\", 0", "            return operand\n        if isinstance(operand, names.Negated):\n            return operand.register\n        if isinstance(operand, Number):\n            return (\"constant\", 0"),
    _fault("decode.py", "dynamic shared memory over the static", "            self.addresses |= {name: end}\n", "            self.addresses |= {name: 0}\n"),
    _fault("program.py", "the seed does nothing", "request.seed, request.limit = seed % 2**32, limit", "request.seed, request.limit = 0, limit"),
    # control flow
    _fault("control.cpp", "lanes that do not branch are lost", "        w.waiting.push_back({w.pc + 1, others});\n", ""),
    _fault("engine.cpp", "groups that meet stay apart", "        if (group.first == lowest) {", "        if (group.first == lowest && mask == 0) {"),
    _fault("engine.cpp", "a return ends the whole warp", "    live &= ~lanes;\n    mask &= ~lanes;", "    live = 0;\n    mask &= ~lanes;"),
    _fault("engine.cpp", "whatever is read counts as written", "const uint32_t missing = m & ~w.written[slot];", "const uint32_t missing = 0 & m & ~w.written[slot];"),
    _fault("engine.cpp", "an ended warp is waited for", "        for (int id = 0; id < 16; ++id) block->barrier_check(id);\n", ""),
    _fault("engine.cpp", "blocks do not take turns", "launch.kernel->waits_for_blocks ? 100000", "launch.kernel->waits_for_blocks && false ? 100000"),
    _fault("engine.cpp", "y runs before x", "thread % launch.threads[0], thread / launch.threads[0] % launch.threads[1],", "thread / launch.threads[1] % launch.threads[0], thread % launch.threads[1],"),
    # barriers and clocks
    _fault("barriers.cpp", "a barrier does not wait", "    if (b.arrived < expected) return;", "    if (b.arrived < 32) return;"),
    _fault("barriers.cpp", "a barrier orders nothing", "        acquire(warps[v], clock);", "        warps[v].clock_changed();"),
    _fault("barriers.cpp", "some threads of a warp are enough", "    if (m != w.live)\n", "    if (m == 0)\n"),
    _fault("barriers.cpp", "arriving orders what comes after", "b.clock.join(w.block->release(w));", "b.clock.join(w.block->release(w)), b.clock.seen[w.index] += 5;"),
    _fault("barriers.cpp", "a warp barrier names no lane", "(named[l] & w.live & ~m)", "(named[l] & w.live & ~m & 0)"),
    # races
    _fault("shared.h", "lanes may read what another lane wrote", 'if (raced) explain_lanes(at, lane, "reads", "written");', "(void)raced;"),
    _fault("barriers.cpp", "bar.warp.sync orders no lanes", "    ++w.meetings;\n", ""),
    _fault("shared.cpp", "writes of others count as ordered", "write_time[i] < w.clock.seen[other]) continue;", "true) continue;"),
    _fault("shared.cpp", "one value stored twice is a race", "if (value && value[i - at] == data[i]) continue;", "if (value && false) continue;"),
    _fault("shared.cpp", "atomics race with each other", "if (atomic && (writer[i] & ATOMIC)) continue;", "if (atomic && false) continue;"),
    # copies
    _fault("copies.cpp", "a wait is one group early", "int64_t(w.committed[l]) - int64_t(pending)", "int64_t(w.committed[l]) - int64_t(pending) + 1"),
    _fault("copies.cpp", "late copies land at once", "    if (launch.late) {", "    if (launch.late && m == 0) {"),
    _fault("copies.cpp", "what is not read keeps its value", "        std::memset(to, 0, copy.bytes);\n", ""),
    _fault("copies.cpp", "a copy may write anywhere", '        w.block->shared->check(at, size, l, "an asynchronous copy");\n', ""),
    # memory
    _fault("memory.cpp", "blocks may overlap", "writers[i] != 0 && writers[i] != self", "writers[i] != 0 && false"),
    # chained launches
    _fault("control.cpp", "one lane waits for all", "w.waited |= m;", "w.waited = ~0u;"),
    _fault("memory.cpp", "stores may come early", "if (!writes && start <= address", "if (start <= address"),
    _fault("copies.cpp", "copies may come early", "        if (read) check_early(w, from[l], read, l, false);\n", ""),
    _fault("api.cpp", "a chained kernel need not wait", "if (launch.chained && !launch.waited)", "if (false)"),
    _fault("warps.cpp", "a shuffle may name lanes elsewhere", "        if (named[l] & w.live & ~m)\n", "        if (named[l] & w.live & ~m & 0)\n"),
)  # fmt: skip

SUITE = Suite(
    FAULTS,
    ("tests/ptx/test_control.py", "tests/ptx/test_reports.py", "tests/ptx/test_copies.py"),
    build=(sys.executable, "-c", "from tests.ptx.emulator import library; library.engine()"),
    quick="built and not slow",
)
