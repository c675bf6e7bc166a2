"""Faults of the host's CUDA, which must show a kernel's missing barriers and waits."""

# ruff: noqa: E501 (a table)

import sys

from tests.support.mutation import Fault, Suite

_HOST = "tests/cpu/cpp/cuda_on_host.h"
_CORE = "tests/cpu/cpp/tensor_core_on_host.h"

FAULTS = (
    Fault("lanes in their order", _HOST, "const int j = static_cast<int>(draw(static_cast<unsigned>(i + 1)));", "const int j = i;"),
    Fault("warps in their order", _HOST, "run_warp(ready[draw(static_cast<unsigned>(ready.size()))]);", "run_warp(ready[0]);"),
    Fault("the seed is not taken", _HOST, "{ seed = drawn = value; }", "{ seed = value; }"),
    Fault("the environment's seed is not taken", _HOST, "text != nullptr ? std::strtoull(text, nullptr, 10) : 1", "text != nullptr ? 1 : 1"),
    Fault("copies land at once", _HOST, "late = draw(2) != 0;", "late = false;"),
    Fault("copies always land late", _HOST, "late = draw(2) != 0;", "late = true;"),
    Fault("a failure hides its seed", _HOST, "static_cast<unsigned long long>(seed));", "0ull);"),
    Fault("some lanes are enough for a shuffle", _HOST, "if (waiting != 32) fail(", "if (waiting == 0) fail("),
    Fault("lanes at different instructions", _HOST, "if (fibers[i].together != fibers[first].together)", "if (false)"),
    Fault("some threads are enough for a barrier", _HOST, "if (at_block != count) fail(", "if (at_block == 0) fail("),
    Fault("any grid", _HOST, "grid.y > 65535 || grid.z == 0 ||\n        grid.z > 65535)", "grid.z == 0)"),
    Fault("any shared memory", _HOST, "if (shared > 163 * 1024)", "if (false)"),
    Fault("one lane's value twice", _HOST, "self.turn ^= 1;", "self.turn = 0;"),
    Fault("copies under way are not poisoned", _CORE, "    std::memset(shared, 0xff, bytes);\n", ""),
    Fault("a wait for all groups", _CORE, "groups.size() > kPending + 1u", "groups.size() > 1u"),
    Fault("a wait without a commit", _CORE, "groups.size() > kPending + 1u", "groups.size() > kPending + 0u && !groups.empty()"),
    Fault("matrices never transposed", _CORE, "transposed ? at(m, 2 * pair, group) : at(m, group, 2 * pair);", "at(m, group, 2 * pair);"),
    Fault("matrices in another order", _CORE, "given_by(8 * matrix + i)[0]", "given_by(8 * (matrix ^ 1) + i)[0]"),
    Fault("A's words exchanged", _CORE, "[i / 2 + 2 * (k / 8)]", "[2 * (i / 2) + k / 8]"),
    Fault("B's rows exchanged", _CORE, "[4 + k / 8]", "[5 - k / 8]"),
    Fault("C's columns exchanged", _CORE, "const int column = 2 * pair + i % 2;", "const int column = 2 * pair + 1 - i % 2;"),
    Fault("the sums begin anew", _CORE, "double sum = c[i];", "double sum = 0;"),
)  # fmt: skip

SUITE = Suite(
    FAULTS,
    ("tests/cuda/test_cuda_on_host.py",),
    build=(sys.executable, "-c", "from tests.support import cpu_build; cpu_build.cuda_on_host_check()"),
    quick="not slow",
    timeout_s=300.0,
)
