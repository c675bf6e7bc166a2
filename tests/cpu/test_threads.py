"""Threads on a CPU: when a model keeps a team of threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastbert
from fastbert.execution import cpu
from fastbert.execution.call import Call
from fastbert.execution.plan import survey
from fastbert.layers.batch import PackedBatch
from fastbert.ops.encoder_layer import encoder_layer
from fastbert.runtime import loader


@pytest.fixture
def runtime():
    """PyTorch's OpenMP runtime."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@pytest.fixture
def calls(monkeypatch):
    """The names of the calls that open and close teams, in order."""
    seen = []
    for name in ("open_team", "close_team"):
        original = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda *a, name=name, original=original: (seen.append(name), original(*a))[1]
        )
    return seen


def tiny(**changes):
    sizes = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    return fastbert.BertModel(fastbert.BertConfig(model_type="bert", **sizes, **changes)).eval()


IDS = torch.arange(24).reshape(2, 12)


def in_parallel(runtime) -> bool:
    return bool(runtime.omp_in_parallel())


def test_threads_stand_by_for_the_layers_and_leave_after_them(calls, runtime, noted):
    model, inside = tiny(), noted(cpu, "encoder_layer", lambda *args, **options: in_parallel(runtime))
    with torch.no_grad():
        model(IDS)
    assert calls == ["open_team", "close_team"]
    # no team may be opened while another runs
    assert len(inside) == 2
    assert inside[0] == inside[1]
    assert not in_parallel(runtime)


def test_no_team_where_a_gradient_or_a_hook_is_wanted(calls):
    model = tiny()
    model(IDS).last_hidden_state.sum().backward()
    assert not in_parallel(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
    seen = []
    with torch.no_grad():
        handle = model.layer_list()[1].register_forward_hook(lambda *_: seen.append(list(calls)))
        calls.clear()
        model(IDS)
        assert seen == [["open_team", "close_team"]]  # of the layer before
        handle.remove()
        model(IDS)
    assert "open_team" in calls


def test_a_layer_that_is_not_fused_lets_the_threads_go(calls, runtime):
    model, inside = tiny(), []

    class Watched(torch.nn.Linear):
        def forward(self, x):
            inside.append(in_parallel(runtime))
            return super().forward(x)

    stock = model.layer_list()[1].intermediate.dense
    other = Watched(stock.in_features, stock.out_features)
    other.load_state_dict(stock.state_dict())
    with torch.no_grad():
        wanted = model(IDS).last_hidden_state
        model.layer_list()[1].intermediate.dense = other
        assert torch.allclose(model(IDS).last_hidden_state, wanted, atol=1e-6)
    assert inside == [False]


def test_an_error_in_a_layer_lets_the_threads_go(calls, runtime, monkeypatch):
    model = tiny()
    monkeypatch.setattr(cpu, "encoder_layer", mock.Mock(side_effect=RuntimeError("planted")))
    with torch.no_grad(), pytest.raises(RuntimeError, match="planted"):
        model(IDS)
    assert calls == ["open_team", "close_team"]
    assert not in_parallel(runtime)


@pytest.fixture
def always_alone():
    """Sets that threads always work alone, and from how many microseconds on they lend; two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield loader.extension.set_always_alone
    loader.extension.set_always_alone(False, 1000)
    torch.set_num_threads(threads)


def cores_of_threads() -> dict[str, set[int]]:
    """The cores that each thread of this process may use."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found[thread] = os.sched_getaffinity(int(thread))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_thread_that_works_alone_and_one_that_lends_give_the_same_bits(dtype, always_alone):
    sizes = dict(vocab_size=50, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    torch.manual_seed(0)
    # 300 rows: enough multiplications that products are cut into tasks
    ids = torch.randint(0, 50, (3, 100))
    model = fastbert.BertModel(fastbert.BertConfig(model_type="bert", num_hidden_layers=2, **sizes)).eval()
    if dtype == "int8":
        model = model.quantize()
    with torch.no_grad():
        wanted = model(ids).last_hidden_state
        before = cores_of_threads()
        for microseconds in (10**9, 0):
            always_alone(True, microseconds)
            for _ in range(3):
                assert torch.equal(model(ids).last_hidden_state, wanted)
    after = cores_of_threads()
    assert {t: after[t] for t in before if t in after} == {t: before[t] for t in before if t in after}
    assert str(os.getpid()) in after


@pytest.mark.sweep
def test_a_forked_child_works_alone():
    """The parent's threads are lost to it, and with them an open team."""
    code = (
        "import os, signal, torch\n"
        "from fastbert.ops.linear import linear\n"
        "from fastbert.runtime import loader\n"
        "C = loader.extension\n"
        "torch.set_num_threads(2)\n"
        "x, w = torch.randn(256, 256), torch.randn(256, 256)\n"
        # bytes: on a busy machine no team may be open, and then torch.equal would wait for threads that
        # PyTorch's fork has lost
        "bits = lambda: linear(x, w).numpy().tobytes()\n"
        "wanted = bits()\n"
        "for is_open in (False, True):\n"
        "    if is_open:\n"
        "        C.open_team(2)\n"
        "    assert bits() == wanted\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        signal.alarm(30)\n"
        "        same = bits() == wanted\n"
        "        C.close_team()\n"
        "        os._exit(0 if same and bits() == wanted and not C.has_team() else 1)\n"
        "    status = os.waitpid(pid, 0)[1]\n"
        "    C.close_team()\n"
        "    assert status == 0, f'the child hung or differs, open: {is_open}'\n"
        "    assert bits() == wanted\n"
        "    assert C.has_team()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert run.returncode == 0, run.stderr


def test_a_result_in_memory_of_the_caller_is_checked():
    model = tiny()
    layer = model.layer_list()[0]
    x = torch.randn(6, 32)
    sequences = PackedBatch(torch.tensor([0, 4, 6], dtype=torch.int32), 4)
    with torch.no_grad():
        launch, taken = cpu.takes(*survey([layer]), x, Call(sequences, 0))

        def result(out=None):
            return encoder_layer(launch, x, [taken], sequences.cu_seqlens, 4, bias=None, out=out)

        wanted = result()
        out = torch.full((8, 32), torch.nan)
        assert torch.equal(result(out[1:7]), wanted)
        assert torch.equal(out[1:7], wanted)
        assert out[[0, 7]].isnan().all()
        for bad, words in (
            (out[:5], "shape"),
            (out[:6].half(), "float16"),
            (wanted.t().contiguous().t(), "strides"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                result(bad)
