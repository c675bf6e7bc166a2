"""The CPU's kernels under sanitizers: a plugin of pytest, for the processes that `tested` starts.

`fastbert._C` is the one that was built with -fsanitize. What the tests make by `randn` and in strided memory
ends where a page begins that may not be touched, because the sanitizers do not see what a masked vector load
reads. All other tensors are between red zones of the sanitizers' heap.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils._pytree import tree_map

from tests.support import cpu_build

LIBRARY = {"address,undefined": "libasan.so", "thread": "libtsan.so"}


def preloaded(sanitizers: str) -> str:
    """The libraries that must be loaded before Python; skips the test where GCC has none."""
    names = LIBRARY[sanitizers], "libstdc++.so"  # the second, or the first cannot wrap its exceptions
    cxx = cpu_build.compiler()
    asked = ([cxx, f"-print-file-name={name}"] for name in names)
    found = [subprocess.check_output(each, text=True).strip() for each in asked]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip(f"{cxx} has no {names[0]}")
    return " ".join(found)


def tested(sanitizers: str, *tests: str) -> str:
    """What pytest prints of `make test`'s part of these tests; fails where a test or a sanitizer does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "LD_PRELOAD": preloaded(sanitizers),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "3",
        cpu_build.SANITIZERS: sanitizers,
    }
    # before LD_PRELOAD is set: compilers need no sanitizer
    cpu_build.sanitized_extension(sanitizers)
    # with pytest's usual capture a sanitizer's report would be lost
    options = "-p", "tests.support.sanitized", "-p", "no:cacheprovider", "-q", "-x", "--capture=sys"
    # that test loads the extension in a process without LD_PRELOAD
    alone = "-k", "not loads_alone"
    command = [sys.executable, "-m", "pytest", *options, *alone, *tests]
    run = subprocess.run(command, cwd=cpu_build.ROOT, env=environment, text=True, capture_output=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[:5000]
    return run.stdout


def load(path: Path) -> None:
    """Make the extension at this path `fastbert._C`; with the thread sanitizer, on threads that it knows."""
    spec = importlib.util.spec_from_file_location("fastbert._C", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from fastbert.runtime import loader

    if os.environ[cpu_build.SANITIZERS] == "thread":
        start = ctypes.cast(ctypes.CDLL(str(cpu_build.team())).team, ctypes.c_void_p).value
        runtime = dict.fromkeys(loader._runtime(), 0) | {"gomp_parallel": start}
        loader._runtime = lambda: runtime
        module.set_team_start(**runtime)


def fenced(make: Callable) -> Callable:
    """`make`, each of whose tensors is then behind a fence of its own."""
    return lambda *args, **options: tree_map(FENCE.copy, make(*args, **options))


def pytest_runtest_teardown() -> None:
    """Fail if a test's kernels wrote before one of its tensors."""
    try:
        FENCE.check()
    finally:
        FENCE.forget()


if cpu_build.SANITIZERS in os.environ:
    os.environ.pop("LD_PRELOAD", None)  # processes that tests start are not sanitized
    load(cpu_build.sanitized_extension(os.environ[cpu_build.SANITIZERS]))

    pytest.register_assert_rewrite("tests.support.cpu_attention")
    from tests.support import cpu_truth
    from tests.support.hostile.fences import Fence

    FENCE = Fence()
    cpu_truth.randn = fenced(cpu_truth.randn)
    cpu_truth.strided_rows = fenced(cpu_truth.strided_rows)

    from tests.support import cpu_attention  # which takes the fenced `randn`

    cpu_attention.strided_qkv = fenced(cpu_attention.strided_qkv)
