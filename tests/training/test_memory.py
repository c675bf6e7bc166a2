"""`kept_memory`: memory that a step frees stays for the next step, and the system gets it at the end."""

from __future__ import annotations

import contextlib
import platform
from unittest import mock

import pytest
import torch

from fastbert.training import loop, memory
from fastbert.training.memory import kept_memory
from tests.support.processes import python
from tests.support.tiny_training import trainer

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

SCRIPT = """
import resource, torch
from fastbert.training import memory
from fastbert.training.memory import kept_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return [torch.ones(size, 1 << 18) for size in (1, 3, 8, 40, 96, 20)]  # 168 MiB

def after_three(counted):
    for _ in range(2):
        step()
    begin = faults()
    step()
    counted.append(faults() - begin)

plain, kept = [], []
after_three(plain)
before = resident()
with kept_memory():
    after_three(kept)
    inside = resident()
print(plain[0], kept[0], inside - before, resident() - before)
"""


LIMITS = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}


@pytest.mark.sweep
@pytest.mark.parametrize("limits", [{}, LIMITS])
def test_a_step_takes_what_the_last_one_freed(limits):
    """Unless the user has set limits, which stay."""
    plain, kept, inside, after = map(int, python(SCRIPT, **limits).stdout.split())
    assert plain > 20_000
    assert kept > 20_000 if limits else kept < 1_000
    assert limits or inside > 100 > 50 > after


def test_the_usual_limits_come_back(monkeypatch):
    """Also after an error. Whether pages go back depends on holes in the heap, so it looks at the calls."""
    library = mock.Mock()
    monkeypatch.setattr(memory, "_glibc", lambda: library)
    with contextlib.suppress(KeyError), kept_memory():
        inside = dict(each.args for each in library.mallopt.mock_calls)
        library.reset_mock()
        raise KeyError
    assert inside == {-1: 2**31 - 1, -3: 2**31 - 1}
    *after, last = library.mock_calls
    assert dict(each.args for each in after) == {-1: 64 << 20, -3: 32 << 20}
    assert last == mock.call.malloc_trim(0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_loop_keeps_it_on_a_cpu(device, monkeypatch, tmp_path):
    kept, run = mock.MagicMock(), trainer(tmp_path)
    run.parallel.device = torch.device(device)
    monkeypatch.setattr(loop, "kept_memory", kept)
    monkeypatch.setattr(run, "_begin", mock.Mock(side_effect=RuntimeError("no more is needed")))
    kept.return_value.__exit__.return_value = False
    with pytest.raises(RuntimeError, match="no more is needed"):
        run.run()
    assert kept.return_value.__enter__.called == kept.return_value.__exit__.called == (device == "cpu")
